"""`stats.duckdb`: views over the tables, and queries on them.

A DuckDB file that is open for writing excludes every other process, so this one holds only views and is never opened
for writing under its own name: it is written under a temporary name and renamed. The data are Parquet files, which a
view finds by name whenever it is queried.

A view binds the pointers *before* the table: DuckDB lists files from left to right while it plans, so
every version that a listed pointer names was listed after it was written. The other way round, a version
switched in between shows no rows.
"""

import os
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import orjson

from rowmill.core import remote
from rowmill.core.errors import ConfigError
from rowmill.core.storage import Store, digest_json
from rowmill.stats import column_docs
from rowmill.stats.tables import SCHEMAS, require_whole_tables, write_empty_tables

if TYPE_CHECKING:
    import duckdb

DATABASE_FILE = "stats.duckdb"
MARKER_FILE = "stats/_views.json"
"""Holds the digest of the definitions in `stats.duckdb`, which is rewritten only if they change."""

VIEWS_VERSION = 3
"""Increase it when a table's columns or a view's definition changes in a way that its text does not show."""

HISTORY = "history"
"""The schema of the views of all kept versions; their names are those of the views of the current ones."""

TRUNCATION_QUERY = (
    "SELECT recipe, dataset, version, split, count(*) AS examples, "
    "count_if(tokens < original_tokens) AS shortened, "
    "count_if(tokens < original_tokens) / count(*) AS shortened_share, "
    "sum(original_tokens)::BIGINT AS original_tokens, "
    "sum(original_tokens - tokens)::BIGINT AS tokens_removed, "
    "sum(exchanges_removed)::BIGINT AS exchanges_removed, "
    "sum(reasoning_removed)::BIGINT AS reasoning_removed, sum(tokens_cut)::BIGINT AS tokens_cut "
    "FROM ({examples}) GROUP BY recipe, dataset, version, split"
)
RUNS_QUERY = (
    "SELECT recipe, run_id, min(built_at) AS began, max(built_at) AS ended, count(*) AS stages, "
    "sum(seconds) AS seconds, sum(rows)::BIGINT AS rows, sum(parts)::BIGINT AS parts, "
    "sum(parts_reused)::BIGINT AS parts_reused FROM ({builds}) WHERE NOT reused GROUP BY recipe, run_id"
)

ROW_COLUMNS_QUERIES = {
    "rejects": (
        "SELECT t.* REPLACE (coalesce(t.domain, r.domain) AS domain) FROM ({table}) AS t LEFT JOIN ({rows}) AS r "
        "ON r.recipe = t.recipe AND r.dataset = t.dataset AND r.row_id = t.row_id"
    ),
    "examples": (
        "SELECT t.*, t.original_tokens - t.tokens AS removed_tokens, r.source, r.record, r.line, r.domain, r.preview "
        "FROM ({table}) AS t LEFT JOIN ({rows}) AS r "
        "ON r.recipe = t.recipe AND r.dataset = t.dataset AND r.row_id = t.row_ids[1]"
    ),
    "segments": (
        "SELECT t.*, r.line, r.domain, r.preview FROM ({table}) AS t LEFT JOIN ({rows}) AS r "
        "ON r.recipe = t.recipe AND r.dataset = t.dataset AND r.row_id = t.row_id"
    ),
}
"""Views of current versions that have columns of the rows that they were made from, for an example its first row."""

LAST_RESULT_CLAUSE = " QUALIFY judged_at = max(judged_at) OVER (PARTITION BY t.recipe, t.scope, t.version)"
"""For a version judged under several bounds, the view shows the last results; the history has all."""


def list_view_names() -> tuple[str, ...]:
    """Return the views' names; `history` has those of all kept versions."""
    return (*SCHEMAS, "truncation", "runs", "current_versions")


def list_history_names() -> tuple[str, ...]:
    """Return the names of the views of the schema `history`."""
    return (*SCHEMAS, "truncation")


def publish_views(store: Store) -> None:
    """Bring `stats.duckdb` up to date.

    There is nothing to do unless a definition changed, the root moved, or the file is missing. A root on an object
    store gets the empty tables only; `query_views` makes its views in memory.
    """
    import duckdb

    statements = list(_make_view_statements(store))
    digest = digest_json(VIEWS_VERSION, duckdb.__version__, [str(schema) for schema in SCHEMAS.values()], statements)
    is_written = store.exists(DATABASE_FILE) or not store.is_local
    if is_written and store.exists(MARKER_FILE) and orjson.loads(store.read(MARKER_FILE)) == digest:
        return
    write_empty_tables(store)
    if store.is_local:
        try:
            _replace_database(store, statements)
        except duckdb.Error:
            require_whole_tables(store)
            raise
    store.write(MARKER_FILE, orjson.dumps(digest))


def _replace_database(store: Store, statements: list[str]) -> None:
    import duckdb

    with store.create(DATABASE_FILE) as unfinished:
        # DuckDB makes its file itself.
        new_file = f"{unfinished.name}.db"
        try:
            # Each of some hundred short statements would wake all threads.
            with duckdb.connect(new_file, config={"threads": 1}) as connection:
                _run_statements(connection, statements)
                _run_statements(connection, list(_make_comment_statements(connection)))
            with open(new_file, "rb") as whole:
                shutil.copyfileobj(whole, unfinished)
        finally:
            for leftover in (new_file, f"{new_file}.wal"):
                if os.path.exists(leftover):
                    os.unlink(leftover)


def _run_statements(connection: "duckdb.DuckDBPyConnection", statements: list[str]) -> None:
    # One transaction: each commit would sync the file.
    connection.begin()
    connection.execute(";\n".join(statements))
    connection.commit()


def _make_view_statements(store: Store, recipe: str | None = None) -> Iterator[str]:
    """Yield the statements that make the views, of one recipe or of all.

    No view refers to another one: DuckDB looks such a name up where the query runs, not where the view is.
    """
    where = "" if recipe is None else f" WHERE recipe = {_quote_text(recipe)}"
    yield f"CREATE SCHEMA {HISTORY}"
    # The current versions: those of each stage's newest pointer; a pointer never changes.
    pointers = _quote_pattern(store, "stats/_current/*/*/*/*.parquet")
    versions = (
        "SELECT recipe, scope, stage, unnest(max_by(versions, stamp)) AS version "  # noqa: S608  (names are our own, the root is quoted)
        f"FROM read_parquet({pointers}, {_format_hive_options('recipe', 'scope', 'stage')}) GROUP BY recipe, "
        "scope, stage"
    )
    history: dict[str, str] = {}
    current: dict[str, str] = {}
    for table, schema in SCHEMAS.items():
        dataset = "coalesce(t.dataset, t.scope)" if "dataset" in schema.names else "t.scope"
        stored = [f't."{name}" AS "{name}"' for name in schema.names if name != "dataset"]
        columns = ", ".join(["t.recipe AS recipe", f"{dataset} AS dataset", "t.version AS version", *stored])
        pattern = _quote_pattern(store, f"stats/{table}/*/*/*/*.parquet")
        scanned = f"read_parquet({pattern}, {_format_hive_options('recipe', 'scope', 'version')})"
        history[table] = f"SELECT {columns} FROM {scanned} AS t"  # noqa: S608  (the same)
        current[table] = (
            f"SELECT {columns} FROM (SELECT DISTINCT recipe, scope, version FROM ({versions})) AS c "  # noqa: S608  (the same)
            f"JOIN {scanned} AS t USING (recipe, scope, version)"
            f"{LAST_RESULT_CLAUSE if table == 'check_results' else ''}"
        )
    rows = current["rows"]
    shown = current | {
        name: query.format(table=current[name], rows=rows) for name, query in ROW_COLUMNS_QUERIES.items()
    }
    shown["truncation"] = TRUNCATION_QUERY.format(examples=current["examples"])
    shown["runs"] = RUNS_QUERY.format(builds=history["builds"])
    shown["current_versions"] = versions
    history["truncation"] = TRUNCATION_QUERY.format(examples=history["examples"])
    for group, views in (("main", shown), (HISTORY, history)):
        for name, query in views.items():
            yield f"CREATE VIEW {group}.{name} AS SELECT * FROM ({query}){where}"  # noqa: S608  (the same)


def _make_comment_statements(connection: "duckdb.DuckDBPyConnection") -> Iterator[str]:
    """Yield a comment for every view and column, which DuckDB shows to users."""
    columns = connection.execute(
        "SELECT schema_name, table_name, column_name FROM duckdb_columns() WHERE NOT internal"
    ).fetchall()
    for schema, view in dict.fromkeys((schema, view) for schema, view, _ in columns):
        kept = " All kept versions." if schema == HISTORY else ""
        yield f"COMMENT ON VIEW {schema}.{view} IS {_quote_text(column_docs.VIEW_DOCS[view] + kept)}"
    for schema, view, column in columns:
        about = column_docs.describe_column(view, column)
        yield f'COMMENT ON COLUMN {schema}.{view}."{column}" IS {_quote_text(about)}'


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

    With a recipe's name, the views show only that recipe. The engine is in memory, with the file attached if that has
    the views: connections to one file share an engine within a process, and a second query would find the configuration
    locked by the first.
    """
    import duckdb

    options: dict[str, Any] = {
        "python_enable_replacements": False,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
    }
    connection = duckdb.connect(":memory:", config=options)
    if not store.is_local:
        connection.register_filesystem(remote.open_filesystem(store.root)[0])
    if store.is_local and recipe is None:
        connection.execute(
            f"ATTACH {_quote_text(os.path.join(_find_root_path(store), DATABASE_FILE))} AS stats (READ_ONLY)"
        )
        connection.execute("USE stats")
    else:
        _run_statements(connection, list(_make_view_statements(store, recipe)))
        _run_statements(connection, list(_make_comment_statements(connection)))
    # The tables' folder in every spelling that DuckDB compares with: in a pattern, in a file name, and as some remote
    # file systems list it, `memory:///x` for `memory://x`.
    folder = f"{_find_root_path(store)}/stats"
    spelled = {folder, _escape_glob(folder)}
    if not store.is_local:
        spelled |= {spelling.replace("://", ":///", 1) for spelling in spelled}
    allowed = ", ".join(_quote_text(spelling) for spelling in sorted(spelled))
    connection.execute(f"SET allowed_directories = [{allowed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _query_error(sql: str, why: str) -> ConfigError:
    shown = " ".join(sql.split())
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return ConfigError(
        f"query {shown!r}: {why}; the views are {', '.join(list_view_names())}, and those of all kept versions in "
        f"{HISTORY}, such as {HISTORY}.rows; write one SELECT over them"
    )
