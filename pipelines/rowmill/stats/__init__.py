"""Facts about a build for people: length distributions, and tables that DuckDB answers questions from.

    counts.py    rows and parts of an output, what a row of it is called, and what a stage feeds the tables
    lengths.py   integers in, facts out: histogram, quantiles, buckets, advice, what-if table
    schemas.py   the columns that users write SQL against
    tables.py    a manifest → Parquet files under `stats/`, one partition per version
    words.py     what each view and column means
    views.py     `stats.duckdb`: views over these files, and questions to them

What does not belong here: the numbers that laws judge (whoever writes a stage's output counts them into
its manifest) and drawing (`plots.py`). Nothing here decides a byte of a shard, so nothing here enters a
fingerprint.
"""

from rowmill.core.storage import Store
from rowmill.schema.manifest import Manifest
from rowmill.stats.column_docs import ESTIMATES, PLANNED, about
from rowmill.stats.counts import CountRows, Feeds, Rows, by_fact, parts_of
from rowmill.stats.lengths import (
    advice,
    candidate_seq_lens,
    length_buckets,
    length_histogram,
    length_quantiles,
    lengths_table,
    what_if,
)
from rowmill.stats.schemas import SCHEMAS
from rowmill.stats.tables import damage, forget, point_current, scope_of, tables_of, write_findings, write_table
from rowmill.stats.views import publish_views, query, view_names

__all__ = [
    "ESTIMATES",
    "PLANNED",
    "SCHEMAS",
    "CountRows",
    "Feeds",
    "Rows",
    "about",
    "advice",
    "by_fact",
    "candidate_seq_lens",
    "damage",
    "forget",
    "length_buckets",
    "length_histogram",
    "length_quantiles",
    "lengths_table",
    "parts_of",
    "point_current",
    "publish_views",
    "query",
    "record",
    "scope_of",
    "tables_of",
    "view_names",
    "what_if",
    "write_findings",
    "write_table",
]


def record(store: Store, manifest: Manifest, feeds: Feeds, *, reused: bool = False, parts_reused: int = 0) -> None:
    """Write all tables of a manifest, then make its version the current one of its stage.

    In this order: a reader that sees the pointer must find the rows it points to. `stats.duckdb` is the business of
    whoever builds for people, the command line and Dagster: its views change only with their definitions.
    """
    tables_of(store, manifest, feeds, reused=reused, parts_reused=parts_reused)
    recipe, scope = scope_of(manifest.key)
    point_current(store, recipe, scope, manifest.stage, (manifest.version,))
