"""`stats.duckdb`: views over the tables, and queries on them.

What belongs here: the views' definitions, replacing the file that holds them, running a query safely.
What does not: the tables' columns (`tables.py`).

A DuckDB file that is open for writing excludes every other process, so this one holds only views and is never opened
for writing under its own name: it is written under a temporary name and renamed. The data are Parquet files, which a
view finds by name whenever it is queried.

A view binds the pointers *before* the table: DuckDB lists files from left to right while it plans, so
every version that a listed pointer names was listed after it was written. The other way round, a version
switched in between shows no rows.
"""

import os
import re
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from rowmill.core import remote
from rowmill.core.errors import ConfigError
from rowmill.core.storage import Store, digest_json
from rowmill.stats import column_docs
from rowmill.stats.schemas import SCHEMAS
from rowmill.stats.tables import require_whole_tables, write_empty_tables

if TYPE_CHECKING:
    import duckdb

DATABASE_FILE = "stats.duckdb"
MARKER_FILE = "stats/_views.json"
"""Holds the digest of the definitions in `stats.duckdb`, which is rewritten only if they change."""

VIEWS_VERSION = 2
"""Increase it when a table's columns or a view's definition changes in a way that its text does not show."""


TRUNCATION_QUERY = (
    "SELECT recipe, dataset, version, split, count(*) AS examples, "
    "count_if(tokens < original_tokens) AS shortened, "
    "count_if(tokens < original_tokens) / count(*) AS shortened_share, "
    "sum(original_tokens)::BIGINT AS original_tokens, "
    "sum(original_tokens - tokens)::BIGINT AS tokens_removed, "
    "sum(exchanges_removed)::BIGINT AS exchanges_removed, "
    "sum(reasoning_removed)::BIGINT AS reasoning_removed, sum(tokens_cut)::BIGINT AS tokens_cut "
    "FROM examples{history} GROUP BY recipe, dataset, version, split"
)
RUNS_QUERY = (
    "SELECT recipe, run_id, min(built_at) AS began, max(built_at) AS ended, count(*) AS stages, "
    "sum(seconds) AS seconds, sum(rows)::BIGINT AS rows, sum(parts)::BIGINT AS parts, "
    "sum(parts_reused)::BIGINT AS parts_reused FROM builds_history WHERE NOT reused GROUP BY recipe, run_id"
)
CHECK_RESULTS_QUERY = (
    "SELECT recipe, dataset, version, stage, law AS check_name, severity, value, bound, outcome, passed, waiver, "
    "judged_at FROM findings{history}"
)
"""`findings` and its column `law` are the stored names of `check_results` and `check_name`; both can be queried."""
DERIVED_VIEWS = {
    "truncation": TRUNCATION_QUERY.format(history=""),
    "truncation_history": TRUNCATION_QUERY.format(history="_history"),
    "runs": RUNS_QUERY,
    "check_results": CHECK_RESULTS_QUERY.format(history=""),
    "check_results_history": CHECK_RESULTS_QUERY.format(history="_history"),
}
"""Views over other views, for common questions."""

LAST_RESULT_CLAUSE = " QUALIFY judged_at = max(judged_at) OVER (PARTITION BY t.recipe, t.scope, t.version)"
"""For a version judged under several bounds, the view shows the last results; the history has all."""


def list_view_names() -> tuple[str, ...]:
    """Return the views' names; each has a `_history` view too, except `runs`, which covers all versions."""
    return (*SCHEMAS, *(name for name in DERIVED_VIEWS if not name.endswith("_history")))


def publish_views(store: Store) -> None:
    """Bring `stats.duckdb` up to date.

    There is nothing to do unless a definition changed, the root moved, or the file is missing. A root on an object
    store gets the empty tables only; `query_views` makes its views in memory.
    """
    import duckdb

    statements = list(_make_view_statements(store))
    wanted = digest_json(VIEWS_VERSION, duckdb.__version__, [str(schema) for schema in SCHEMAS.values()], statements)
    made = store.exists(DATABASE_FILE) or not store.is_local
    if made and store.exists(MARKER_FILE) and orjson.loads(store.read(MARKER_FILE)) == wanted:
        return
    write_empty_tables(store)
    if store.is_local:
        try:
            _replace_database(store, statements)
        except duckdb.Error:
            require_whole_tables(store)
            raise
    store.write(MARKER_FILE, orjson.dumps(wanted))


def _replace_database(store: Store, statements: list[str]) -> None:
    import duckdb

    temporary = store.path(f"{DATABASE_FILE}.{uuid.uuid4().hex}.tmp")
    try:
        # Each of some hundred short statements would wake all threads.
        with duckdb.connect(temporary, config={"threads": 1}) as connection:
            _run_statements(connection, statements)
            _run_statements(connection, list(_make_comment_statements(connection)))
        os.replace(temporary, store.path(DATABASE_FILE))
    finally:
        for leftover in (temporary, f"{temporary}.wal"):
            if os.path.exists(leftover):
                os.unlink(leftover)


def _run_statements(connection: "duckdb.DuckDBPyConnection", statements: list[str]) -> None:
    # One transaction: each commit would sync the file.
    connection.begin()
    connection.execute(";\n".join(statements))
    connection.commit()


def _make_view_statements(store: Store) -> Iterator[str]:
    current = _select_current_versions(store)
    yield f"CREATE VIEW current_versions AS {current}"
    for table, schema in SCHEMAS.items():
        columns = ", ".join(_select_view_columns(schema))
        files = _scan_table_files(store, table)
        yield f"CREATE VIEW {table}_history AS SELECT {columns} FROM {files} AS t"  # noqa: S608  (names are our own, the root is quoted)
        yield (
            f"CREATE VIEW {table} AS SELECT {columns} "  # noqa: S608  (the same)
            f"FROM (SELECT DISTINCT recipe, scope, version FROM ({current})) AS c "
            f"JOIN {files} AS t USING (recipe, scope, version){LAST_RESULT_CLAUSE if table == 'findings' else ''}"
        )
    yield from (f"CREATE VIEW {name} AS {selected}" for name, selected in DERIVED_VIEWS.items())


def _make_comment_statements(connection: "duckdb.DuckDBPyConnection") -> Iterator[str]:
    """Yield a comment for every view and column, which DuckDB shows to users."""
    found = connection.execute("SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal").fetchall()
    for view in dict.fromkeys(name for name, _ in found):
        about = column_docs.VIEW_DOCS[view.removesuffix("_history")]
        kept = " All kept versions." if view.endswith("_history") else ""
        yield f"COMMENT ON VIEW {view} IS {_quote_text(about + kept)}"
    for view, column in found:
        about = column_docs.describe_column(view.removesuffix("_history"), column)
        yield f'COMMENT ON COLUMN {view}."{column}" IS {_quote_text(about)}'


def _select_view_columns(schema: pa.Schema) -> Iterator[str]:
    yield "t.recipe AS recipe"
    yield "coalesce(t.dataset, t.scope) AS dataset" if "dataset" in schema.names else "t.scope AS dataset"
    yield "t.version AS version"
    yield from (f't."{name}" AS "{name}"' for name in schema.names if name != "dataset")


def _select_current_versions(store: Store) -> str:
    """Select the current versions: those of each stage's newest pointer; a pointer never changes."""
    pattern = _quote_pattern(store, "stats/_current/*/*/*/*.parquet")
    return (
        "SELECT recipe, scope, stage, unnest(max_by(versions, stamp)) AS version "  # noqa: S608  (the same)
        f"FROM read_parquet({pattern}, {_format_hive_options('recipe', 'scope', 'stage')}) GROUP BY recipe, "
        "scope, stage"
    )


def _scan_table_files(store: Store, table: str) -> str:
    pattern = _quote_pattern(store, f"stats/{table}/*/*/*/*.parquet")
    return f"read_parquet({pattern}, {_format_hive_options('recipe', 'scope', 'version')})"


def _format_hive_options(*keys: str) -> str:
    # Without types a dataset named 2024 would be a number in one recipe and text in another.
    types = ", ".join(f"{key}: VARCHAR" for key in keys)
    return f"union_by_name = true, hive_partitioning = true, hive_types = {{{types}}}"


def _quote_pattern(store: Store, relative: str) -> str:
    return _quote_text(f"{_escape_glob(_find_root_path(store))}/{relative}")


def _escape_glob(path: str) -> str:
    """Escape a path for a glob pattern: a root may be called `a[1]`."""
    return re.sub(r"([*?[])", r"[\1]", path)


def _quote_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _find_root_path(store: Store) -> str:
    return os.path.abspath(store.path("")) if store.is_local else store.path("")


def query_views(store: Store, sql: str, *, recipe: str | None = None) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Run one SELECT over the views, of one recipe or of all in the store; return column names and rows.

    The query can read the statistics and nothing else: no other file, no network, no extension, no Python variable. It
    cannot write.

    Raises
    ------
    ConfigError
        If the statement is not one SELECT, or DuckDB refuses it; the message lists the views.

    """
    import duckdb

    publish_views(store)
    try:
        with _open_connection(store, recipe) as connection:
            statements = connection.extract_statements(sql)
            if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
                # COPY and EXPORT would write into the one folder that queries may read.
                raise _query_error(sql, "not a single SELECT")
            result = connection.execute(statements[0])
            return tuple(str(column[0]) for column in result.description), result.fetchall()
    except duckdb.Error as error:
        if isinstance(error, duckdb.IOException | duckdb.InvalidInputException):
            # The cause may be a truncated file, so the tables are verified first.
            require_whole_tables(store)
        raise _query_error(sql, " ".join(str(error).split("\n\nLINE", 1)[0].split())) from error


def _open_connection(store: Store, recipe: str | None) -> "duckdb.DuckDBPyConnection":
    """Open a separate DuckDB engine that holds the views and can access nothing but the statistics.

    With a recipe's name, the views show only that recipe: DuckDB looks a name up among temporary views first. The
    engine is in memory, with the file attached: connections to one file share an engine within a process, and a second
    query would find the configuration locked by the first.
    """
    import duckdb

    options: dict[str, Any] = {
        "python_enable_replacements": False,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
    }
    connection = duckdb.connect(":memory:", config=options)
    if store.is_local:
        connection.execute(
            f"ATTACH {_quote_text(os.path.join(_find_root_path(store), DATABASE_FILE))} AS stats (READ_ONLY)"
        )
        connection.execute("USE stats")
    else:
        connection.register_filesystem(remote.open_filesystem(store.root)[0])
        _run_statements(connection, list(_make_view_statements(store)))
    if recipe is not None:
        _run_statements(connection, [*_limit_views_to_recipe(recipe, "stats" if store.is_local else "memory")])
    allowed = ", ".join(_quote_text(folder) for folder in _list_allowed_folders(store))
    connection.execute(f"SET allowed_directories = [{allowed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _limit_views_to_recipe(recipe: str, catalog: str) -> Iterator[str]:
    """Shadow each view of a catalog by a temporary view of one recipe; every view has the column `recipe`."""
    for name in (*SCHEMAS, *(f"{table}_history" for table in SCHEMAS), *DERIVED_VIEWS, "current_versions"):
        selected = f"SELECT * FROM {catalog}.main.{name} WHERE recipe = {_quote_text(recipe)}"  # noqa: S608  (quoted)
        yield f"CREATE TEMP VIEW {name} AS {selected}"


def _list_allowed_folders(store: Store) -> tuple[str, ...]:
    """Return the tables' folder in every spelling that DuckDB compares with.

    In a pattern, in a file name, and as some remote file systems list it: `memory:///x` for `memory://x`.
    """
    folder = f"{_find_root_path(store)}/stats"
    spelled = {folder, _escape_glob(folder)}
    if not store.is_local:
        spelled |= {one.replace("://", ":///", 1) for one in spelled}
    return tuple(sorted(spelled))


def _query_error(sql: str, why: str) -> ConfigError:
    shown = " ".join(sql.split())
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return ConfigError(
        f"query {shown!r}: {why}; the views are {', '.join(list_view_names())}, each except runs with a _history view "
        "of all versions, and current_versions; write one SELECT over them"
    )
