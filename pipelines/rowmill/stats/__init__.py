"""Facts about a build for people: length distributions, and tables for SQL queries with DuckDB.

Shards do not depend on statistics, so these are not part of a fingerprint.
"""

from rowmill.stats.lengths import (
    choose_candidate_seq_lens,
    compute_length_quantiles,
    count_length_buckets,
    estimate_seq_len_effects,
    make_length_histogram,
    make_lengths_table,
    suggest_limits,
)
from rowmill.stats.tables import (
    SCHEMAS,
    CountRows,
    RowCount,
    StatsInputs,
    count_parts,
    count_rows_by_fact,
    find_damage,
    record_manifest,
    remove_version_tables,
    set_current_versions,
    split_stage_key,
    write_check_results,
    write_table,
)
from rowmill.stats.views import (
    ESTIMATE_NOTES,
    PLANNED_NOTE,
    describe_estimate,
    list_history_names,
    list_view_names,
    publish_views,
    query_views,
)

__all__ = [
    "ESTIMATE_NOTES",
    "PLANNED_NOTE",
    "SCHEMAS",
    "CountRows",
    "RowCount",
    "StatsInputs",
    "choose_candidate_seq_lens",
    "compute_length_quantiles",
    "count_length_buckets",
    "count_parts",
    "count_rows_by_fact",
    "describe_estimate",
    "estimate_seq_len_effects",
    "find_damage",
    "list_history_names",
    "list_view_names",
    "make_length_histogram",
    "make_lengths_table",
    "publish_views",
    "query_views",
    "record_manifest",
    "remove_version_tables",
    "set_current_versions",
    "split_stage_key",
    "suggest_limits",
    "write_check_results",
    "write_table",
]
