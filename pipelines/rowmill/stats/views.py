"""The views of the statistics in DuckDB, and one line about each of their columns.

A DuckDB file that is open for writing excludes every other process, so this one holds only views and is never opened
for writing under its own name: it is written under a temporary name and renamed. The data are Parquet files, which a
view finds by name whenever it is queried.

A view binds the pointers *before* the table: DuckDB lists files from left to right while it plans, so every version
that a listed pointer names was listed after it was written. The other way round, a version switched in between shows no
rows.

The viewer, and queries of one recipe or of an object store, make the same views in memory, over `ViewFiles`.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import orjson

from rowmill.core.errors import ConfigError
from rowmill.core.storage import Store, digest_json
from rowmill.schema.manifest import DisplayTable
from rowmill.stats.tables import POINTERS, SCHEMAS, require_whole_tables, write_empty_tables

if TYPE_CHECKING:
    import duckdb

    from rowmill.stats.view_files import ViewFiles

ESTIMATE_NOTES: Final[Mapping[str, str]] = {
    "what_if": (
        "Estimated from lengths alone: an example above the length loses trained tokens in proportion to what is "
        "above, and is packed at just that length; documents that are cut into pieces lose none. Truncation that "
        "removes whole exchanges may lose more and pack into fewer sequences, also at the current limit."
    ),
}
"""Tables of estimates, and the note on how they are made; a page that shows such a table adds the note."""

PLANNED_NOTE: Final[str] = (
    "Records are planned again for each length, as a build would plan them; the tokens of records that no example "
    "could hold are lost."
)
"""The note for records datasets, whose examples are assembled from several rows."""


def describe_estimate(name: str, table: DisplayTable) -> str | None:
    """Return the note for a table that holds estimates; None for any other."""
    if name == "what_if" and "examples" in table.columns:
        return PLANNED_NOTE
    return ESTIMATE_NOTES.get(name)


VIEW_DOCS: Final[Mapping[str, str]] = {
    "builds": "Stages built: one row per version, and one for its last reuse.",
    "check_results": "Check results: the last one of each check on each current version.",
    "ledger": "Where records ended: every record of a stage is in exactly one state.",
    "token_ledger": "Where tokens ended, each in exactly one class; for packed_shards, those in no sequence, and "
    "padding after segments.",
    "rejects": "Rejected records, one row each.",
    "contamination": "Rows that have an item of a benchmark, removed or not, beside the item that they match most.",
    "near_duplicate_groups": "Rows that resemble a longer row, removed or not; those of one kept_row_id are a group.",
    "rows": "Canonical rows, without their content, of which there is a preview.",
    "examples": "Tokenized examples, without their tokens; in history without columns of their rows.",
    "lengths": "Bins of the histogram of original lengths, for each split.",
    "what_if": f"The effect of other context lengths. {ESTIMATE_NOTES['what_if']} {PLANNED_NOTE}",
    "sequences": "Packed sequences.",
    "generated_records": "Accepted records that a model generated, one row each, with their content.",
    "segments": "Segments: which example's tokens are where in which sequence; in history without columns of rows.",
    "left_out": "Examples that are not completely in the sequences: cut, dropped, a tail, or surplus of validation.",
    "splits": "Resulting sizes of the splits, for each dataset.",
    "mixture": "Datasets in training order: the wanted share and the actual one.",
    "rank_steps": "Sequences and tokens of each rank in each step.",
    "truncation": "What truncation removed, for each dataset and split.",
    "runs": "Runs: what each run built. A run that reused everything has no row.",
    "current_versions": "Which version of each stage the views show.",
}

COMMON_COLUMN_DOCS: Final[Mapping[str, str]] = {
    "recipe": "The recipe's name.",
    "dataset": "The dataset's name; _recipe if the stage belongs to the whole recipe.",
    "version": "The version of the stage's output: a digest of its content.",
    "stage": "The stage, such as canonical_rows.",
    "scope": "The dataset's name, or _recipe.",
    "split": "train, validation or test.",
    "row_id": "A row's id: the digest of its part of the source, and its number there.",
    "example_id": "An example's id: its first row, and its number among that row's examples.",
    "trained_tokens": "Tokens with loss.",
    "source": "The source file; of an example, that of its first row.",
    "record": "The record's number in that file, from 1, blank lines not counted.",
    "line": "The line of that file, from 1; null where it is not known: in files that are not JSON Lines, and in parts "
    "of a file that have blank lines. `rowmill trace` finds it.",
    "domain": "The value of format.domain_key; null without it.",
    "preview": "How the text begins, up to 200 characters: a chat's first question, a prompt, a text, a record.",
}

_CHECK_RESULT_COLUMNS: Final[Mapping[str, str]] = {
    "severity": "error closes the gate, warn only shows.",
    "value": "The measured number; null if it was not measured or is not applicable.",
    "bound": "The bound that it was compared with.",
    "outcome": "passed, failed (a waived failure too), or not_applicable: the check does not apply to this data.",
    "passed": "Whether it is within its bound; null if the check is not applicable.",
    "waiver": "The reason for which a failure is accepted; empty if none covers it.",
    "judged_at": "When it was judged, ISO 8601 in UTC.",
}

COLUMN_DOCS: Final[Mapping[str, Mapping[str, str]]] = {
    "builds": {
        "built_at": "When it was built, ISO 8601 in UTC.",
        "run_id": "The Dagster run that built it, or build-… for `rowmill build`.",
        "seconds": "How long building it took.",
        "reused": "Whether this row records a reuse; run_id, built_at and seconds are then those of the build.",
        "parts": "Parts of the output; of raw_dataset, parts of its source files.",
        "parts_reused": "Parts that an earlier build had written.",
        "rows": "Rows of the output, as its page counts them: records, rows, examples, sequences, places or segments.",
    },
    "check_results": {
        "check_name": "The check, or the name of an expectation that the recipe adds.",
        **_CHECK_RESULT_COLUMNS,
    },
    "ledger": {
        "state": "kept, rejected, or left out: not_taken, not_sampled, tail, remainder, not_scheduled …",
        "reason": "Why, from a closed list; empty for kept.",
        "records": "Records, rows or sequences in this state.",
    },
    "token_ledger": {
        "split": "train, validation or test; rejected or all if no split is known.",
        "class": "trained, context, template, truncated, dropped, padding or shared; template is context after "
        "packing.",
        "tokens": "Tokens of this class.",
    },
    "rejects": {
        "reason": "Why, from a closed list.",
        "detail": "What was found in this record.",
        "domain": "The value of format.domain_key; null without it, in a record that cannot be read, and for "
        "rows removed among equal ones.",
        "preview": "How its text begins, or its raw record if it could not be read, up to 200 characters.",
    },
    "contamination": {
        "benchmark": "The benchmark's name.",
        "item": "The item's number in the benchmark, from 0 through its files.",
        "source": "The benchmark's file.",
        "record": "The item's record in that file, from 1.",
        "coverage": "Share of the item's words in n-grams that the row has too.",
        "ngram": "The first n-gram that both have.",
        "text": "The text of the row that has the n-gram, its first 300 characters.",
        "item_text": "The item's text, its first 300 characters.",
    },
    "near_duplicate_groups": {
        "kept_row_id": "The row that stays instead.",
        "similarity": "Share of common n-grams among those of either row.",
        "displaced": "Whether the row that stays comes after it in the source.",
    },
    "rows": {
        "kind": "conversation, pair, text, record, prompt, tokens or preference.",
        "group_key": "The group that must not be split; null without splits.group_key.",
        "schema": "The schema that the record was recognized as.",
        "extracted_think_from_content": "Reasoning passages extracted from messages' content.",
        "moved_reasoning_keys": "Messages whose reasoning was under another key.",
        "dropped_think_messages": "Messages of only reasoning, which were dropped.",
        "tools_present": "Whether the row has tools.",
        "tools_parsed_from_string": "Whether the tools were JSON text.",
        "unknown_roles": "Roles that no template is known to print.",
        "notes": "Other observations of canonicalization.",
    },
    "examples": {
        "row_ids": "The rows that it was made from.",
        "original_tokens": "Tokens before truncation.",
        "tokens": "Tokens that are kept.",
        "removed_tokens": "Tokens that truncation removed.",
        "exchanges_removed": "Tokens of whole exchanges that truncation removed.",
        "reasoning_removed": "Tokens of reasoning that truncation removed.",
        "tokens_cut": "Tokens that the final cut removed.",
    },
    "lengths": {
        "lower": "Tokens: the bin begins here.",
        "upper": "Tokens: the bin ends before this.",
        "examples": "Examples with such a length.",
    },
    "what_if": {
        "seq_len": "Tokens: a candidate context length.",
        "examples_over": "Examples that would be longer; for records, those that no example could hold.",
        "trained_lost": "Trained tokens that would be lost, estimated; for records, counted.",
        "sequences": "Sequences that packing would make, estimated; for records, planned.",
    },
    "sequences": {
        "shard": "The file, relative to the storage root.",
        "sequence_id": "The sequence's number in its split, from 0.",
        "tokens": "Tokens in it.",
        "fill": "Share of seq_len that holds tokens.",
    },
    "generated_records": {
        "text_id": "The generated text that holds it: its line in the file of texts.",
        "number": "Its number among the text's accepted records, from 0.",
        "record": "The record as JSON text.",
    },
    "segments": {
        "sequence_id": "The sequence's number in its split, from 0.",
        "segment": "Its number in the sequence, from 0; one that examples share has a line for each of them.",
        "start": "Token of the example at which the segment begins.",
        "length": "Tokens of the segment.",
    },
    "left_out": {
        "state": "Its state; `kept`: the rest of it is in sequences.",
        "reason": "Why, if it was rejected.",
        "tokens": "Its tokens that are in no sequence.",
        "of_tokens": "Its tokens.",
    },
    "splits": {
        "rows": "Examples in the split.",
        "sequences": "Packed sequences in the split.",
    },
    "mixture": {
        "weight": "The weight in the recipe.",
        "wanted_share": "The weight as a share of all weights.",
        "passes": "Passes over the dataset.",
        "sequences": "Places in the order.",
    },
    "rank_steps": {
        "rank": "The rank's number, from 0.",
        "world_size": "Number of ranks.",
        "step": "The step, from 0.",
        "sequences": "Sequences that the rank gets.",
        "fillers": "How many of them are fillers, which make ranks equally long.",
        "tokens": "Tokens in the other sequences.",
    },
    "truncation": {
        "examples": "Examples.",
        "shortened": "Examples that lost tokens.",
        "shortened_share": "Their share.",
        "original_tokens": "Tokens before truncation.",
        "tokens_removed": "Tokens that truncation removed.",
        "exchanges_removed": "Of these, tokens of whole exchanges.",
        "reasoning_removed": "Of these, tokens of reasoning.",
        "tokens_cut": "Of these, tokens that the final cut removed.",
    },
    "runs": {
        "run_id": "The Dagster run, or build-… for `rowmill build`.",
        "began": "When its first stage was finished, ISO 8601 in UTC.",
        "ended": "When its last stage was finished.",
        "stages": "Stages that it built; reused stages are not counted.",
        "seconds": "Seconds spent in them.",
        "rows": "The sum of their rows, as in builds.",
        "parts": "Parts of these stages.",
        "parts_reused": "Of these, parts that an earlier run had written.",
    },
    "current_versions": {},
}


def describe_column(view: str, column: str) -> str:
    """Return the description of a view's column; every column has one, as a test checks."""
    return COLUMN_DOCS[view].get(column) or COMMON_COLUMN_DOCS[column]


HISTORY, CURRENT = "history", "current"
"""The schema of the views of all kept versions, whose names are those of the views of the current ones; and these."""

DATABASE_FILE = "stats.duckdb"
MARKER_FILE = "stats/_views.json"
"""Holds the digest of the definitions in `stats.duckdb`, which is rewritten only if they change."""

VIEWS_VERSION = 3
VIEW_ATTEMPTS = 20
"""How often the views are written before a file that is missing counts as a failure."""
"""Increase it when a table's columns or a view's definition changes in a way that its text does not show."""

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
    store has no such file: `open_views` makes the views in memory.
    """
    if not store.is_local:
        return

    def find_pattern(_: str, table: str) -> str:
        return _quote_text(f"{_escape_glob(_find_root_path(store))}/stats/{table}/*/*/*/*.parquet")

    statements = list(_make_view_statements(find_pattern, finds_current=False))
    # Asked without importing it, which most builds then need not.
    release = metadata.version("duckdb")
    digest = digest_json(VIEWS_VERSION, release, [str(schema) for schema in SCHEMAS.values()], statements)
    if store.exists(DATABASE_FILE) and store.exists(MARKER_FILE) and orjson.loads(store.read(MARKER_FILE)) == digest:
        return
    import duckdb

    write_empty_tables(store)
    for attempts_left in reversed(range(VIEW_ATTEMPTS)):
        try:
            _write_database(store, statements)
            break
        except duckdb.Error as error:
            require_whole_tables(store)
            # The build whose thread this is may replace a file that DuckDB has listed, before DuckDB opens it.
            if not attempts_left or not isinstance(error, duckdb.IOException):
                raise
    store.write(MARKER_FILE, orjson.dumps(digest))


def _write_database(store: Store, statements: list[str]) -> None:
    import duckdb

    with store.create(DATABASE_FILE) as unfinished:
        # DuckDB makes its file itself.
        new_file = f"{unfinished.name}.db"
        try:
            # Each of some hundred short statements would wake all threads.
            with duckdb.connect(new_file, config={"threads": 1}) as connection:
                # The statements that make views and comments have nothing to optimize: 0.145 s instead of 0.165.
                connection.execute("PRAGMA disable_optimizer")
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


def _make_view_statements(find_pattern: Callable[[str, str], str], *, finds_current: bool) -> Iterator[str]:
    """Yield the statements that make the views.

    `find_pattern` returns the pattern of a table's files in `history` or `current`, in quotes. Without `finds_current`
    both hold all versions. No view refers to another one: DuckDB looks such a name up where the query runs, not where
    the view is.
    """

    def scan(group: str, table: str, *keys: str) -> str:
        return f"read_parquet({find_pattern(group, table)}, {_format_hive_options(*keys)})"

    yield f"CREATE SCHEMA {HISTORY}"
    # The current versions: those of each stage's newest pointer; a pointer never changes.
    versions = (
        "SELECT recipe, scope, stage, unnest(max_by(versions, stamp)) AS version "  # noqa: S608  (names are our own, the root is quoted)
        f"FROM {scan(CURRENT, POINTERS, 'recipe', 'scope', 'stage')} GROUP BY recipe, scope, stage"
    )
    history: dict[str, str] = {}
    current: dict[str, str] = {}
    for table, schema in SCHEMAS.items():
        dataset = "coalesce(t.dataset, t.scope)" if "dataset" in schema.names else "t.scope"
        stored = [f't."{name}" AS "{name}"' for name in schema.names if name != "dataset"]
        columns = ", ".join(["t.recipe AS recipe", f"{dataset} AS dataset", "t.version AS version", *stored])
        keys = ("recipe", "scope", "version")
        history[table] = f"SELECT {columns} FROM {scan(HISTORY, table, *keys)} AS t"  # noqa: S608  (the same)
        of_current = f"{scan(CURRENT, table, *keys)} AS t"
        if not finds_current:
            pointed = f"(SELECT DISTINCT recipe, scope, version FROM ({versions})) AS c"  # noqa: S608  (the same)
            of_current = f"{pointed} JOIN {of_current} USING (recipe, scope, version)"
        clause = LAST_RESULT_CLAUSE if table == "check_results" else ""
        current[table] = f"SELECT {columns} FROM {of_current}{clause}"  # noqa: S608  (the same)
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
            yield f"CREATE VIEW {group}.{name} AS {query}"


def _make_comment_statements(connection: "duckdb.DuckDBPyConnection") -> Iterator[str]:
    """Yield a comment for every view and column, which DuckDB shows to users."""
    columns = connection.execute(
        "SELECT schema_name, table_name, column_name FROM duckdb_columns() WHERE NOT internal"
    ).fetchall()
    for schema, view in dict.fromkeys((schema, view) for schema, view, _ in columns):
        kept = " All kept versions." if schema == HISTORY else ""
        yield f"COMMENT ON VIEW {schema}.{view} IS {_quote_text(VIEW_DOCS[view] + kept)}"
    for schema, view, column in columns:
        about = describe_column(view, column)
        yield f'COMMENT ON COLUMN {schema}.{view}."{column}" IS {_quote_text(about)}'


def _format_hive_options(*keys: str) -> str:
    # Without types a dataset named 2024 would be a number in one recipe and text in another.
    types = ", ".join(f"{key}: VARCHAR" for key in keys)
    return f"union_by_name = true, hive_partitioning = true, hive_types = {{{types}}}"


def _escape_glob(path: str) -> str:
    """Escape a path for a glob pattern: a root may be called `a[1]`."""
    return re.sub(r"([*?[])", r"[\1]", path)


def _quote_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _find_root_path(store: Store) -> str:
    return os.path.abspath(store.path("")) if store.is_local else store.path("")


@dataclass(frozen=True, slots=True)
class Views:
    """A DuckDB engine that holds the views and can access nothing but the statistics."""

    store: Store
    connection: "duckdb.DuckDBPyConnection"
    files: "ViewFiles | None"
    """Where it finds the files; None if DuckDB searches for them."""

    @contextmanager
    def query(self, what: str) -> "Generator[duckdb.DuckDBPyConnection]":
        """Lend a connection that shows what was built until now; what DuckDB refuses in the block raises our errors.

        `what` names the query in them. The error of an interrupted query is raised as it is.
        """
        import duckdb

        # A cursor has no search path, which only views of a file that is attached need.
        connection = self.connection
        if self.files is not None:
            self.files.list_again()
            connection = connection.cursor()
        try:
            with connection:
                yield connection
        except duckdb.InterruptException:
            raise
        except duckdb.Error as error:
            # DuckDB passes on only the text of an error in Python.
            failure = None if self.files is None else self.files.pop_failure(str(error))
            if failure is not None:
                raise failure from None
            if isinstance(error, duckdb.IOException | duckdb.InvalidInputException):
                # The cause may be a truncated file, so the tables are verified first.
                require_whole_tables(self.store)
            raise _query_error(what, " ".join(str(error).split("\n\nLINE", 1)[0].split())) from error


def query_views(
    store: Store, sql: str, *, recipe: str | None = None, losses: str = ""
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Run one SELECT over the views, of one recipe or of all in the store; return column names and rows.

    With a folder of `losses`, there is a view of that name: what trainers' `ExampleLosses` wrote there. The query can
    read these and the statistics and nothing else: no other file, no network, no extension, no Python variable. It
    cannot write.
    """
    with open_views(store, recipe, losses).query(sql) as connection:
        return run_select(connection, sql)


def run_select(
    connection: "duckdb.DuckDBPyConnection", sql: str, *, max_rows: int | None = None
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Run one SELECT of a user; return column names and rows, or the first `max_rows` of them."""
    import duckdb

    statements = connection.extract_statements(sql)
    if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
        # COPY and EXPORT would write into the one folder that queries may read.
        raise _query_error(sql, "not a single SELECT")
    result = connection.execute(statements[0])
    names = tuple(str(column[0]) for column in result.description)
    return names, result.fetchall() if max_rows is None else result.fetchmany(max_rows)


def open_views(
    store: Store, recipe: str | None = None, losses: str = "", *, versions: Collection[str] | None = None
) -> Views:
    """Open a separate engine for the views.

    With a recipe's name, the views show only that recipe; with `versions`, only these. The engine is in memory; the
    views of all recipes of a local store are in the file of `publish_views`, which is attached.
    """
    import duckdb

    options: dict[str, Any] = {
        "python_enable_replacements": False,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
        # It would know a file that was written again by its time, which object stores tell in seconds.
        "enable_external_file_cache": False,
    }
    connection = duckdb.connect(":memory:", config=options)
    # In every spelling that DuckDB compares with: in a pattern, and in a file name.
    allowed, files = set[str](), None
    if store.is_local:
        folder = f"{_find_root_path(store)}/stats"
        allowed = {folder, _escape_glob(folder)}
    if store.is_local and recipe is None and versions is None:
        publish_views(store)
        # Connections to one file share an engine within a process, and a second query would find the configuration
        # locked by the first; so the file is attached to an engine in memory.
        connection.execute(
            f"ATTACH {_quote_text(os.path.join(_find_root_path(store), DATABASE_FILE))} AS stats (READ_ONLY)"
        )
        connection.execute("SET search_path = 'stats.main,memory.main'")
    else:
        from rowmill.stats.view_files import PROTOCOL, ViewFiles

        files = ViewFiles(store, recipe, versions)
        connection.register_filesystem(files)
        statements = _make_view_statements(
            lambda group, table: _quote_text(f"{PROTOCOL}://{group}/{table}"), finds_current=True
        )
        _run_statements(connection, list(statements))
        _run_statements(connection, list(_make_comment_statements(connection)))
        files.list_again()
        allowed.add(f"{PROTOCOL}://")
    if losses:
        if not any(name.endswith(".parquet") for name in (os.listdir(losses) if os.path.isdir(losses) else ())):
            raise ConfigError(
                f"--losses {losses}: no Parquet file is here; expected a folder that a trainer's ExampleLosses wrote; "
                "name that folder"
            )
        allowed.add(os.path.abspath(losses))
        pattern = _quote_text(f"{_escape_glob(os.path.abspath(losses))}/*.parquet")
        connection.execute(f"CREATE VIEW memory.main.losses AS SELECT * FROM read_parquet({pattern})")  # noqa: S608
    spelled = ", ".join(_quote_text(spelling) for spelling in sorted(allowed))
    connection.execute(f"SET allowed_directories = [{spelled}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return Views(store, connection, files)


def _query_error(sql: str, why: str) -> ConfigError:
    shown = " ".join(sql.split())
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return ConfigError(
        f"query {shown!r}: {why}; the views are {', '.join(list_view_names())}, and those of all kept versions in "
        f"{HISTORY}, such as {HISTORY}.rows; write one SELECT over them"
    )
