"""Facts about a build for people: length distributions, and tables that DuckDB answers questions from.

    counts.py    rows and parts of an output, what a row of it is called, and what a stage feeds the tables
    lengths.py   integers in, facts out: histogram, quantiles, buckets, advice, what-if table
    schemas.py   the columns that users write SQL against
    tables.py    a manifest → Parquet files under `stats/`, one partition per version
    words.py     what each view and column means
    views.py     `stats.duckdb`: views over these files, and questions to them

What does not belong here: the numbers that checks judge (whoever writes a stage's output counts them into
its manifest) and drawing (`plots.py`). Nothing here decides a byte of a shard, so nothing here enters a
fingerprint.
"""

from rowmill.core.storage import Store
from rowmill.schema.manifest import Manifest
from rowmill.stats.column_docs import ESTIMATE_NOTES, PLANNED_NOTE, describe_estimate
from rowmill.stats.counts import CountRows, RowCount, StatsInputs, count_parts, count_rows_by_fact
from rowmill.stats.lengths import (
    choose_candidate_seq_lens,
    compute_length_quantiles,
    count_length_buckets,
    estimate_seq_len_effects,
    make_length_histogram,
    make_lengths_table,
    suggest_limits,
)
from rowmill.stats.schemas import SCHEMAS
from rowmill.stats.tables import (
    find_damage,
    remove_version_tables,
    set_current_versions,
    split_stage_key,
    write_check_results,
    write_manifest_tables,
    write_table,
)
from rowmill.stats.views import list_view_names, publish_views, query_views

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
    "write_manifest_tables",
    "write_table",
]


def record_manifest(
    store: Store, manifest: Manifest, feeds: StatsInputs, *, reused: bool = False, parts_reused: int = 0
) -> None:
    """Write all tables of a manifest, then make its version the current one of its stage.

    In this order: a reader that sees the pointer must find the rows it points to. `stats.duckdb` is the business of
    whoever builds for people, the command line and Dagster: its views change only with their definitions.
    """
    write_manifest_tables(store, manifest, feeds, reused=reused, parts_reused=parts_reused)
    recipe, scope = split_stage_key(manifest.key)
    set_current_versions(store, recipe, scope, manifest.stage, (manifest.version,))
