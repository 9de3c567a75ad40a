"""Tables of the statistics: small Parquet files beside the outputs, one partition per recipe, scope and version.

    stats/<table>/recipe=<r>/scope=<dataset or _recipe>/version=<version>/part-0.parquet
    stats/_current/recipe=<r>/scope=<…>/stage=<stage>/current-<stamp>.parquet

They hold counts of parts, and of rows and rejects where each came from and how its text begins: what people look for
first. Everything is computed per column, except for rejected records, whose bytes may be anything.

There are no locks, so a reader may be anywhere between listing files and reading them while a writer works. Therefore
no file that a reader may have listed is rewritten with other content or removed at once: a new pointer is a new file
with a higher stamp, and superseded pointers are removed after `GRACE_NS`. Rejected: replacing one pointer file in
place, with which a fifth of the reads found no rows: the pointer named a version newer than the reader's list of files.
"""

import io
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rowmill.core.arrow_files import SUFFIX
from rowmill.core.errors import DamagedFileError, PipelineError, SchemaError
from rowmill.core.stage_names import CANONICAL_ROWS, EXPORTS, RAW_DATASET
from rowmill.core.storage import Store, damaged_file_error, digest_json, map_reads
from rowmill.schema import manifest
from rowmill.schema.counts import CountsT
from rowmill.schema.manifest import File, Manifest, Part, StageKey, get_stage_name
from rowmill.schema.rows import REJECTED_ROW_COLUMNS, ROW_KINDS
from rowmill.schema.shard_counts import ShardDetails
from rowmill.schema.source_counts import SourceCounts

if TYPE_CHECKING:
    import polars as pl

    from rowmill.sources.parts import SourcePart

PREVIEW_CHARACTERS = 200

TABLES_WITH_ORIGINS = ("rows", "rejects")

ORIGIN_COLUMNS = ("source", "record", "line")
"""The columns that `SourceIndex.locate` adds."""

PREVIEWED_COLUMNS = ("messages", "text", "record")
"""Columns of canonical rows that a preview is taken from, the first that has text; `record` is JSON text there."""

ReadDomain = Callable[[bytes], str | None]
"""Returns the domain of a rejected record, from its raw bytes."""

_PREVIEWED = pa.schema([pa.field(name, pa.string()) for name in PREVIEWED_COLUMNS])

_LONG_SPACE = r"\s{2,}|[^\S ]"
"""White space that is not one blank: a quarter of the time of `\\s+`, which most words end with."""

_ESCAPE = r"\\u[0-9a-fA-F]{4}|\\."
_STRING_ITEM = rf'(?:[^"\\]|{_ESCAPE})'
_CONTENT = r'"content":"'
_QUESTION = rf'"role":"user",(?:"[a-z_]+":"[^"\\]*",)*{_CONTENT}'


@dataclass(frozen=True, slots=True, eq=False)
class SourceIndex:
    """The parts of a source by their ids, each with its file and the record and line at which it begins."""

    ids: pa.Array
    urls: pa.Array
    first_records: pa.Array
    first_lines: pa.Array
    """Null for a part in which records and lines differ: its file has no lines, or there are blank ones."""

    def locate(self, row_ids: pa.ChunkedArray) -> dict[str, pa.ChunkedArray]:
        """Return file, record and line of row ids; null where no part has the id."""
        parsed = pc.extract_regex(row_ids, r"^(?P<part>.+):(?P<number>\d+)(?:\.\d+)?$")
        at = pc.index_in(pc.struct_field(parsed, "part"), value_set=self.ids)
        number = pc.struct_field(parsed, "number").cast(pa.int64())
        return {
            "source": self.urls.take(at),
            "record": pc.add(self.first_records.take(at), number),
            "line": pc.add(self.first_lines.take(at), number),
        }

    @classmethod
    def of(cls, store: Store, output: Manifest) -> "SourceIndex":
        """Return the source that an output was made from."""
        from rowmill.sources.parts import FileScan

        source = find_source(store, output)
        parts: list[SourcePart] = []
        if source is not None:
            for scan in source.details.get("scans", ()):
                parts += FileScan.from_json(scan).parts
        return cls(
            pa.array([part.part_id for part in parts], pa.string()),
            pa.array([part.url for part in parts], pa.string()),
            pa.array([part.first_record for part in parts], pa.int64()),
            pa.array([part.first_line if part.lines == part.records else None for part in parts], pa.int64()),
        )


def find_source(store: Store, output: Manifest) -> Manifest | None:
    """Return the raw dataset that an output was made from, by its inputs; None if it had none."""
    if output.stage == RAW_DATASET:
        return output
    for key in map(manifest.parse_stage_key, output.inputs):
        if manifest.get_stage_name(key) in (RAW_DATASET, CANONICAL_ROWS):
            return find_source(store, manifest.load_input(store, output, key))
    return None


def preview_rows(rows: pa.Table) -> pa.Array:
    """Return how each canonical row begins: its first question, prompt, text or record; null without any text.

    `rows` has `PREVIEWED_COLUMNS`.
    """
    import polars as pl

    columns = pl.DataFrame(rows.select(PREVIEWED_COLUMNS))
    of_chat = _begin_chats(columns.get_column("messages"))
    text = pl.coalesce(of_chat, *(_cut(pl.col(name)) for name in ("text", "record")))
    return (
        columns.select(_cut(text.str.replace_all(_LONG_SPACE, " ").str.strip_chars()).str.strip_chars())
        .to_series()
        .to_arrow()
    )


_SHORT_JSON = 4 * PREVIEW_CHARACTERS
_LONG_JSON = 16 * PREVIEW_CHARACTERS
"""Characters of JSON that are looked at behind the begin of a string; an escape has at most six for one of text."""


_PLAIN_BEGIN = '[{"role":"user","content":"'
"""How the JSON of a chat begins whose first message is the user's, if only its content is a string."""


def _begin_chats(messages: "pl.Series") -> "pl.Series":
    """Return how the first question of each chat begins, or else its first text; null where there is none.

    As text, of which `2 * PREVIEW_CHARACTERS` are enough: few chats have so many escapes that these need more than
    `_SHORT_JSON`. To resolve the escapes of `_LONG_JSON` in all of them took three times as long. Nineteen of twenty
    plain chats are read without a regular expression, which took three times as long for them.
    """
    begun = _read_plain_questions(messages)
    text, is_certain = begun.get_column("text"), begun.get_column("is_certain")
    for json_characters in (_SHORT_JSON, _LONG_JSON):
        if is_certain.all():
            break
        places = (~is_certain).arg_true()
        begun = _read_strings(messages.gather(places), json_characters)
        text = text.scatter(places, begun.get_column("text"))
        is_certain = is_certain.scatter(places, begun.get_column("is_certain"))
    return text


def _read_plain_questions(messages: "pl.Series") -> "pl.DataFrame":
    """Return the `text` of each chat that begins with a question without escapes, and whether it is such a chat."""
    import polars as pl

    json, begun, text = map(pl.col, ("messages", "begun", "text"))
    found = messages.rename("messages").to_frame()
    found = found.with_columns(
        begun=pl.when(json.str.starts_with(_PLAIN_BEGIN)).then(
            json.str.slice(len(_PLAIN_BEGIN), 2 * PREVIEW_CHARACTERS)
        )
    )
    # Up to the string's end, if it ends there: in bytes, as it is found.
    end = begun.str.find('"', literal=True)
    cut = begun.cast(pl.Binary).bin.slice(0, end).cast(pl.String)
    found = found.with_columns(text=pl.when(end.is_null()).then(begun).otherwise(cut))
    is_plain = (text != "") & ~text.str.contains("\\", literal=True)
    return found.select("text", is_certain=is_plain.fill_null(value=False) | json.is_null())


def _read_strings(messages: "pl.Series", json_characters: int) -> "pl.DataFrame":
    """Return the `text` of each chat's first string as it begins, and whether it is all of it or long enough."""
    import polars as pl

    json, question, begun, rest = map(pl.col, ("messages", "question", "begun", "rest"))
    found = messages.rename("messages").to_frame()
    found = found.with_columns(question=_begin_string(json, _QUESTION, json_characters))
    further = _begin_string(pl.when(question.is_null()).then(json), _CONTENT, json_characters)
    found = found.select(begun=pl.coalesce(question, further))
    # Without captures, which take four times as long.
    found = found.with_columns(rest=begun.str.replace(f"^{_STRING_ITEM}*", ""))
    length = begun.str.len_chars() - rest.str.len_chars()
    # The escapes of JSON text are resolved, and each white-space or control character becomes a blank. Text that is
    # written as JSON has no character 0, so it can stand for an escaped backslash meanwhile.
    plain = begun.str.slice(0, length).str.replace_all("\\\\", "\0", literal=True)
    plain = plain.str.replace_all(r"\\(?:u[0-9a-fA-F]{4}|[bfnrt])", " ").str.replace_all(r"\\(.)", "$1")
    found = found.with_columns(plain=plain.str.replace_all("\0", "\\", literal=True))
    # What is found is not empty, unless it begins behind all that was looked at. An escape may be cut at the end.
    is_whole = (length > 0) & rest.str.starts_with('"')
    is_long = pl.col("plain").str.len_chars() >= 2 * PREVIEW_CHARACTERS + len(r"\u0000")
    return found.select(
        text=pl.col("plain").str.slice(0, 2 * PREVIEW_CHARACTERS), is_certain=begun.is_null() | is_whole | is_long
    )


def _begin_string(json: "pl.Expr", prefix: str, characters: int) -> "pl.Expr":
    """Return the text behind the prefix of the first JSON string that is not empty; null where there is none.

    Found without captures, then cut in a short text: captures in whole chats took three times as long.
    """
    import polars as pl

    found = json.str.find(prefix + _STRING_ITEM)
    before = json.cast(pl.Binary).bin.slice(0, found).cast(pl.String).str.len_chars()
    begun = json.str.slice(before, characters).str.replace(f"^{prefix}", "")
    return pl.when(found.is_not_null()).then(begun)


def _cut(text: "pl.Expr") -> "pl.Expr":
    return text.str.slice(0, PREVIEW_CHARACTERS)


def describe_rejects(raws: pa.ChunkedArray, read_domain: ReadDomain | None) -> dict[str, pa.Array]:
    """Return domain and preview of rejected records: raw bytes as they begin, canonical rows as in `preview_rows`.

    The JSON of a canonical row has no domain.
    """
    records = raws.to_pylist()
    rows = [_read_canonical_row(raw) for raw in records]
    previews = preview_rows(pa.Table.from_pylist([row or {} for row in rows], schema=_PREVIEWED)).to_pylist()
    domains = [None if read_domain is None or row else read_domain(raw) for raw, row in zip(records, rows, strict=True)]
    # Bytes that are not UTF-8 are shown as the replacement character.
    begun = [
        preview or " ".join(raw[: 4 * PREVIEW_CHARACTERS].decode("utf-8", "replace").split())[:PREVIEW_CHARACTERS]
        for raw, preview in zip(records, previews, strict=True)
    ]
    return {"domain": pa.array(domains, pa.string()), "preview": pa.array(begun, pa.string())}


def _read_canonical_row(raw: bytes) -> dict[str, Any] | None:
    """Return the columns of a canonical row; None for a record of a source."""
    # A fast test first: raw records may be long, and their own JSON is rarely like this.
    if not raw.startswith(b'{"kind":'):
        return None
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return row if row.keys() <= REJECTED_ROW_COLUMNS and row["kind"] in ROW_KINDS else None


@dataclass(frozen=True, slots=True)
class RowCount:
    """The number of rows of an output, and the noun for one of them."""

    count: int
    noun: str


CountRows = Callable[[Manifest], RowCount | None]
"""Returns the rows of an output; None if its manifest does not count them.

Summing the rows of a part's files gives no answer: a part also holds rejects, an index of segments or a ledger."""


def count_rows_of(kind: type[CountsT], count: Callable[[CountsT], int], noun: str) -> CountRows:
    """Return a function that reads the number of rows from a stage's counts."""

    def read(output: Manifest) -> RowCount | None:
        counts = output.find_counts(kind)
        return None if counts is None else RowCount(count(counts), noun)

    return read


@dataclass(frozen=True, slots=True)
class StatsInputs:
    """What a stage contributes to the statistics besides its ledgers."""

    rows: CountRows = lambda _: None
    """Counts the rows shown in the view `builds` and on the stage's page."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of a part's file → the table of statistics that its rows are copied to."""
    tables: tuple[str, ...] = ()
    """Tables of statistics that the manifest holds completely; its other tables are for its page only."""


def count_parts(output: Manifest) -> int:
    """Return the number of parts of an output; for `raw_dataset`, the ranges of its source files."""
    return len(output.parts) or output.get_counts(SourceCounts).parts


def _make_schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in columns.items()])


_TEXT, _COUNT, _NUMBER, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_TEXTS = pa.list_(pa.string())

SCHEMAS: Mapping[str, pa.Schema] = {
    "builds": _make_schema(
        stage=_TEXT, built_at=_TEXT, run_id=_TEXT, seconds=_NUMBER, reused=_FLAG, parts=_COUNT,
        parts_reused=_COUNT, rows=_COUNT,
    ),
    "check_results": _make_schema(
        stage=_TEXT, check_name=_TEXT, severity=_TEXT, value=_NUMBER, bound=_NUMBER, outcome=_TEXT, passed=_FLAG,
        waiver=_TEXT, judged_at=_TEXT,
    ),
    "ledger": _make_schema(stage=_TEXT, state=_TEXT, reason=_TEXT, records=_COUNT),
    "token_ledger": _make_schema(stage=_TEXT, split=_TEXT, **{"class": _TEXT}, tokens=_COUNT),
    "rejects": _make_schema(
        stage=_TEXT, row_id=_TEXT, reason=_TEXT, detail=_TEXT, source=_TEXT, record=_COUNT, line=_COUNT, domain=_TEXT,
        preview=_TEXT,
    ),
    "contamination": _make_schema(
        row_id=_TEXT, benchmark=_TEXT, item=_COUNT, source=_TEXT, record=_COUNT, coverage=_NUMBER, ngram=_TEXT,
        text=_TEXT, item_text=_TEXT,
    ),
    "near_duplicate_groups": _make_schema(
        kept_row_id=_TEXT, row_id=_TEXT, similarity=_NUMBER, displaced=_FLAG
    ),
    "rows": _make_schema(
        row_id=_TEXT, kind=_TEXT, split=_TEXT, group_key=_TEXT, domain=_TEXT, schema=_TEXT,
        extracted_think_from_content=_COUNT, moved_reasoning_keys=_COUNT, dropped_think_messages=_COUNT,
        tools_present=_FLAG, tools_parsed_from_string=_FLAG, unknown_roles=_TEXTS, notes=_TEXTS,
        source=_TEXT, record=_COUNT, line=_COUNT, preview=_TEXT,
    ),
    "examples": _make_schema(
        example_id=_TEXT, row_ids=_TEXTS, split=_TEXT, original_tokens=_COUNT, tokens=_COUNT,
        trained_tokens=_COUNT, exchanges_removed=_COUNT, reasoning_removed=_COUNT, tokens_cut=_COUNT,
    ),
    "lengths": _make_schema(split=_TEXT, lower=_COUNT, upper=_COUNT, examples=_COUNT),
    "what_if": _make_schema(seq_len=_COUNT, examples_over=_COUNT, trained_lost=_COUNT, sequences=_COUNT),
    "sequences": _make_schema(
        split=_TEXT, shard=_TEXT, sequence_id=_COUNT, tokens=_COUNT, trained_tokens=_COUNT, fill=_NUMBER
    ),
    "generated_records": _make_schema(stage=_TEXT, text_id=_TEXT, number=_COUNT, record=_TEXT),
    "segments": _make_schema(
        split=_TEXT, sequence_id=_COUNT, segment=_COUNT, example_id=_TEXT, row_id=_TEXT, source=_TEXT, record=_COUNT,
        start=_COUNT, length=_COUNT,
    ),
    "left_out": _make_schema(
        example_id=_TEXT, row_id=_TEXT, split=_TEXT, state=_TEXT, reason=_TEXT, tokens=_COUNT, of_tokens=_COUNT
    ),
    "splits": _make_schema(dataset=_TEXT, split=_TEXT, rows=_COUNT, sequences=_COUNT, trained_tokens=_COUNT),
    "mixture": _make_schema(
        dataset=_TEXT, weight=_NUMBER, wanted_share=_NUMBER, passes=_NUMBER, sequences=_COUNT,
        trained_tokens=_COUNT,
    ),
    "rank_steps": _make_schema(
        rank=_COUNT, world_size=_COUNT, step=_COUNT, sequences=_COUNT, fillers=_COUNT, tokens=_COUNT,
        trained_tokens=_COUNT,
    ),
}  # fmt: skip
"""Columns of each table, without the partition's recipe, scope and version."""

POINTERS = "_current"
"""The folder of the pointers, beside those of the tables."""

CURRENT_SCHEMA = _make_schema(stamp=_COUNT, versions=_TEXTS)
"""A pointer: one line that lists the current versions of a stage, none if the list is empty."""


# ── Rows of long tables, from the part files of a manifest ──


GROUP_ROWS = 65_536
"""Rows read and written at a time: memory is flat in the size of the dataset."""

_JOINED_BYTES = 16 << 20
"""Bytes of batches that are completed together: the texts that previews are taken from may be long."""

_ADDED_COLUMNS = {"rows": (*ORIGIN_COLUMNS, "preview"), "rejects": (*ORIGIN_COLUMNS, "domain", "preview")}
"""Columns that no part file has: they are found from its row ids, and from the columns that are read instead."""
_READ_INSTEAD = {"rows": PREVIEWED_COLUMNS, "rejects": ("raw",)}


def read_part_rows(
    store: Store,
    manifest: Manifest,
    table: str,
    sources: Sequence[tuple[Part, File]],
    read_domain: ReadDomain | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of a long table from files of parts, in groups of about `GROUP_ROWS`."""
    schema, seq_len = SCHEMAS[table], manifest.card.get("seq_len")
    read = [name for name in schema.names if name not in _ADDED_COLUMNS.get(table, ())]
    read += _READ_INSTEAD.get(table, ("shard_row",) if "sequence_id" in read else ())
    index = SourceIndex.of(store, manifest) if table in TABLES_WITH_ORIGINS else None
    if table == "sequences" and (not isinstance(seq_len, int) or seq_len < 1):
        raise SchemaError(
            f"{'/'.join(manifest.key)}: its card has seq_len {seq_len!r}; expected a positive integer; correct the "
            "stage that writes it"
        )

    def add_origins(content: pa.Table) -> pa.Table:
        """Add where rows or rejects came from and how they begin."""
        if index is None:
            return content
        added: dict[str, Any] = index.locate(content.column("row_id"))
        if table == "rows":
            added["preview"] = preview_rows(content)
            content = content.drop_columns(list(PREVIEWED_COLUMNS))
        else:
            added |= describe_rejects(content.column("raw"), read_domain)
        return _add_columns(content, added)

    def complete(content: pa.Table, part: Part, path: str, row: int) -> pa.Table:
        """Add the columns that a batch lacks, which begins with row n of its file."""
        added: dict[str, Any] = {}
        shard = part.find_details(ShardDetails)
        places = content.column("shard_row") if "shard_row" in content.column_names else None
        if table == "sequences":
            places = pa.array(range(row, row + len(content)), pa.int64())
            for name, value in (("shard", path), ("split", "" if shard is None else shard.split)):
                added[name] = pa.repeat(pa.scalar(value, pa.string()), len(content))
        # Shards know only their own rows, manifests where each begins in its split.
        if places is not None and (table != "sequences" or shard is not None):
            first = pa.scalar(part.get_details(ShardDetails).first_sequence, pa.int64())
            added["sequence_id"] = pc.add(places.cast(pa.int64()), first)
        content = _add_columns(content, added)
        if table == "sequences":
            require_schema_columns(schema, {*content.column_names, "fill"}, path)
            content = content.append_column("fill", pa.array(content.column("tokens").to_numpy() / seq_len))
        return content

    # Small batches are joined, so that thousands of small parts do not make thousands of row groups.
    groups: list[pa.Table] = []
    waiting: list[tuple[pa.Table, str]] = []
    rows, waiting_bytes = 0, 0

    def join_waiting() -> pa.Table:
        return _join_batches(waiting, lambda content, path: cast_to_schema(add_origins(content), schema, path))

    # Most parts have no rejects; opening their empty file costs as much as reading one with rows.
    for part, file in (source for source in sources if source[1].rows):
        for row, batch in _read_batches(store, file, read):
            waiting.append((complete(pa.Table.from_batches([batch]), part, file.path, row), file.path))
            rows, waiting_bytes = rows + len(batch), waiting_bytes + batch.nbytes
            if rows >= GROUP_ROWS or waiting_bytes >= _JOINED_BYTES:
                groups.append(join_waiting())
                waiting.clear()
                waiting_bytes = 0
            if rows >= GROUP_ROWS:
                yield pa.concat_tables(groups)
                groups, rows = [], 0
    if waiting:
        groups.append(join_waiting())
    yield pa.concat_tables(groups) if groups else schema.empty_table()


def _read_batches(store: Store, file: File, columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the batches of those columns that a file has, each with the number of its first row."""
    if file.path.endswith(SUFFIX):
        table = store.table(file, columns)
        for row in range(0, len(table), GROUP_ROWS):
            yield from ((row, batch) for batch in table.slice(row, GROUP_ROWS).to_batches())
        return
    # Not compared with its digest: checks cover the stage's files, and nobody trains on statistics.
    try:
        # One request: columns of a remote file would take several each, and a part is small enough.
        source = store.path(file.path) if store.is_local else pa.BufferReader(store.read(file.path))
        with pq.ParquetFile(source) as parquet:
            present = [name for name in columns if name in parquet.schema_arrow.names]
            row = 0
            for batch in parquet.iter_batches(batch_size=GROUP_ROWS, columns=present, use_threads=store.is_local):
                yield row, batch
                row += len(batch)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged_file_error(store, file, " ".join(str(error).split())) from error


def _join_batches(batches: Sequence[tuple[pa.Table, str]], complete: Callable[[pa.Table, str], pa.Table]) -> pa.Table:
    """Join batches, each with its file's path, and complete them together.

    One by one, those of small parts take longer than to read them: 1,200 long dialogues in 59 parts 80 ms for their
    previews instead of 10.
    """
    first, path = batches[0]
    if all(content.schema.equals(first.schema) for content, _ in batches):
        # If that fails, the error has to name the file.
        with suppress(SchemaError):
            return complete(pa.concat_tables([content for content, _ in batches]), path)
    return pa.concat_tables([complete(content, path) for content, path in batches])


def _add_columns(content: pa.Table, added: Mapping[str, Any]) -> pa.Table:
    """Add columns, except those that a table has."""
    for name, values in added.items():
        if name not in content.column_names:
            content = content.append_column(name, values)
    return content


def cast_to_schema(content: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    """Return the schema's columns in its order and types."""
    require_schema_columns(schema, content.column_names, where)
    absent = [name for name in schema.names if name not in content.column_names]
    for name in absent:
        content = content.append_column(name, pa.nulls(len(content), schema.field(name).type))
    try:
        return content.select(schema.names).replace_schema_metadata(None).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise make_misfit_error(where, error, schema) from error


def make_misfit_error(where: str, error: Exception, schema: pa.Schema) -> SchemaError:
    """Return the error for a value that its column cannot hold."""
    expected = ", ".join(f"{field.name} {field.type}" for field in schema)
    return SchemaError(
        f"{where}: a value does not fit ({error}); expected {expected}; correct the stage that writes it"
    )


def require_schema_columns(schema: pa.Schema, columns: Iterable[str], where: str) -> None:
    """Raise SchemaError if columns of a table are missing."""
    # A stage of one dataset may omit the dataset's name: the view then takes the scope.
    missing = set(schema.names) - set(columns) - {"dataset"}
    if missing:
        raise SchemaError(
            f"{where}: column {', '.join(sorted(missing))} is missing; expected {', '.join(schema.names)}; "
            "correct the stage that writes it"
        )


# ── Writing ──


_LOG = logging.getLogger("rowmill.stats")

RECIPE_SCOPE = "_recipe"
"""The scope of stages that belong to a whole recipe; no dataset can have this name."""

GRACE_NS = 600 * 10**9
"""Nanoseconds for which a superseded pointer is kept: longer than any query takes to plan."""

PATH_PART_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def split_stage_key(key: StageKey) -> tuple[str, str]:
    """Return the recipe and the scope of a stage's key: its dataset, an export's name, or `_recipe`."""
    if get_stage_name(key) == EXPORTS:
        return key[0], key[2]
    return (key[0], key[1]) if len(key) == 3 else (key[0], RECIPE_SCOPE)


def write_table(store: Store, table: str, recipe: str, scope: str, version: str, content: pa.Table) -> None:
    """Write one version of a table; writing the same content again leaves the file alone."""
    path = _first_file_path(table, recipe, scope, version)
    encoded = _encode_parquet(cast_to_schema(content, SCHEMAS[table], f"table {table}"))
    if not (store.exists(path) and store.read(path) == encoded):
        store.write(path, encoded)


def set_current_versions(store: Store, recipe: str, scope: str, stage: str, versions: Sequence[str]) -> None:
    """Make the views show these versions of a stage; call it after their tables are written."""
    parts = (_require_path_part(part) for part in (recipe, scope, stage))
    folder = f"stats/{POINTERS}/" + "recipe={}/scope={}/stage={}".format(*parts)
    current = [_require_path_part(version) for version in versions]
    _append_lines(
        store, folder, "current", CURRENT_SCHEMA, [{"versions": current}], date=lambda stamp: {"stamp": stamp}
    )


def record_manifest(
    store: Store,
    manifest: Manifest,
    inputs: StatsInputs,
    *,
    reused: bool = False,
    parts_reused: int = 0,
    is_unchanged: bool = False,
    read_domain: ReadDomain | None = None,
) -> None:
    """Write every table that a manifest contributes to, then make its version the current one of its stage.

    In this order: a reader that sees the pointer must find the rows it points to. Long tables are copied column by
    column in batches, and only if the version's copy does not exist yet; short ones come from the manifest itself.
    `reused` marks a build that found its output instead of making it: of the rows for reuses only the last is kept, of
    those for builds all. With `is_unchanged` the output was current before, and made from the same inputs: on a remote
    store its tables are then taken as they are if they were ever written. `read_domain` reads the domain of a rejected
    record. The caller publishes the views (`stats.duckdb`), which change only with their definitions.
    """
    recipe, scope = split_stage_key(manifest.key)
    at = recipe, scope, manifest.version
    # By the names of files alone: a version's tables may all have been written under the present schemas.
    is_remote = not store.is_local
    if not (is_remote and is_unchanged and _list_stamped_files(store, _partition_path("builds", *at), _MADE_PREFIX)):
        for table, lines, where in _list_short_tables(manifest, inputs):
            schema = SCHEMAS[table]
            # Compared as Python values: converting to Arrow would make pyarrow import pandas first, a second of work
            # that a night without changes need not do.
            stored = _read_or_remove(store, _first_file_path(table, *at))
            if stored is not None and stored.schema.equals(schema) and stored.to_pylist() == lines:
                continue
            try:
                content = pa.Table.from_pylist(lines, schema=schema)
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                raise make_misfit_error(where, error, schema) from error
            write_table(store, table, *at, content)
        long_tables: dict[str, list[tuple[Part, File]]] = {}
        for part in manifest.parts:
            for name, file in part.files.items():
                if name in inputs.files:
                    long_tables.setdefault(inputs.files[name], []).append((part, file))
        for table, files in long_tables.items():
            schema = SCHEMAS[table]
            if table in TABLES_WITH_ORIGINS:
                # If a file was renamed, rows are the same version, and were read from another file.
                source = find_source(store, manifest)
                schema = schema.with_metadata({"source": source.version if source else ""})
            path = _first_file_path(table, *at)
            # An existing copy with this schema is complete.
            if not (store.exists(path) and _has_schema(store, path, schema)):
                with store.create(path) as handle, pq.ParquetWriter(handle, schema, **_WRITE_OPTIONS) as writer:
                    for group in read_part_rows(store, manifest, table, files, read_domain):
                        writer.write_table(group, row_group_size=GROUP_ROWS)
    _write_build_row(store, manifest, inputs, reused, parts_reused)
    set_current_versions(store, recipe, scope, manifest.stage, (manifest.version,))


class JudgedCheck(Protocol):
    """The result of a check, as the statistics keep it."""

    @property
    def check(self) -> str:
        """The check's name."""

    @property
    def severity(self) -> str:
        """Whether a failure blocks."""

    @property
    def value(self) -> float | None:
        """Its number; None if it was not measured."""

    @property
    def bound(self) -> float:
        """What the number is compared with."""

    @property
    def outcome(self) -> str:
        """`passed`, `failed` or `not_applicable`."""

    @property
    def passed(self) -> bool:
        """Whether it passed."""

    @property
    def waiver(self) -> str:
        """Why a failure was accepted; empty if it was not."""


def write_check_results(
    store: Store, manifest: Manifest, results: Sequence[JudgedCheck], *, judged_at: str | None = None
) -> None:
    """Write the check results of a version.

    `judged_at` (ISO 8601, now if omitted) distinguishes a later judgement from this one. Equal results are not written
    again. Different ones, for example under other bounds, are added: the view shows the last, its history shows all.
    """
    folder = _partition_path("check_results", *split_stage_key(manifest.key), manifest.version)
    lines: list[dict[str, Any]] = [
        {
            "stage": manifest.stage,
            "check_name": result.check,
            "severity": str(result.severity),
            "value": None if result.value is None else float(result.value),
            "bound": result.bound,
            "outcome": result.outcome,
            "passed": None if result.outcome == "not_applicable" else result.passed,
            "waiver": result.waiver,
        }
        for result in results
    ]
    when = {"judged_at": judged_at or datetime.now(UTC).isoformat(timespec="microseconds")}
    _append_lines(store, folder, "part", SCHEMAS["check_results"], lines, date=lambda _: when, prune=False)


def list_recorded_versions(store: Store, recipe: str, scope: str) -> set[str]:
    """Return the versions of a scope that any table has rows of."""
    folders = [f"stats/{table}/recipe={recipe}/scope={scope}" for table in SCHEMAS]
    return {
        name.removeprefix("version=")
        for names in map_reads(store, store.list, folders)
        for name in names
        if name.startswith("version=")
    }


def remove_version_tables(store: Store, recipe: str, scope: str, version: str) -> None:
    """Remove all tables of a version that gc removed; it must not be current."""
    for table in SCHEMAS:
        folder = _partition_path(table, recipe, scope, version)
        if store.exists(folder):
            store.remove(folder)


def write_empty_tables(store: Store) -> None:
    """Write a file without rows under `recipe=_` of each table, so that every view finds a file."""
    for table in SCHEMAS:
        store.write(_first_file_path(table, "_", "_", "_"), encode_empty_table(table))
    store.write(f"stats/{POINTERS}/recipe=_/scope=_/stage=_/current-0.parquet", encode_empty_table(POINTERS))


def encode_empty_table(table: str) -> bytes:
    """Return a file without rows of a table, or of the pointers."""
    schema = CURRENT_SCHEMA if table == POINTERS else SCHEMAS[table]
    # Not `Schema.empty_table`, which makes pyarrow import pandas.
    return _encode_parquet(pa.Table.from_batches([], schema))


def _write_build_row(store: Store, manifest: Manifest, inputs: StatsInputs, reused: bool, parts_reused: int) -> None:
    folder = _partition_path("builds", *split_stage_key(manifest.key), manifest.version)
    rows, parts = inputs.rows(manifest), count_parts(manifest)
    line = {
        "stage": manifest.stage,
        "built_at": manifest.built_at,
        "run_id": manifest.run_id,
        "seconds": manifest.seconds,
        "reused": reused,
        "parts": parts,
        # A reused output reuses all of its parts.
        "parts_reused": parts if reused else parts_reused,
        "rows": rows.count if rows else None,
    }
    _append_lines(store, folder, "reused" if reused else _MADE_PREFIX, SCHEMAS["builds"], [line], prune=reused)


_MADE_PREFIX = f"made-{digest_json({name: str(schema) for name, schema in SCHEMAS.items()})[:8]}"
"""Prefix of the row of a build that made a version, which is written after all its tables: it says by which schemas."""


def _list_short_tables(manifest: Manifest, inputs: StatsInputs) -> Iterator[tuple[str, list[dict[str, Any]], str]]:
    """Yield each table that a manifest holds completely: its name, its lines, and where they come from."""
    ledger = [{"stage": manifest.stage, "state": s, "reason": r, "records": n} for s, r, n in manifest.ledger]
    tokens = [{"stage": manifest.stage, "split": s, "class": c, "tokens": n} for s, c, n in manifest.token_ledger]
    where = "/".join(manifest.key)
    for table, lines in (("ledger", ledger), ("token_ledger", tokens)):
        if lines:
            yield table, lines, f"{where}: {table}"
    for table in inputs.tables:
        if table in manifest.tables:
            at, shown, schema = f"{where}: table {table}", manifest.tables[table], SCHEMAS[table]
            require_schema_columns(schema, shown.columns, at)
            rows = [dict(zip(shown.columns, row, strict=True)) for row in shown.rows]
            # Columns that the table lacks are null.
            yield table, [{name: row.get(name) for name in schema.names} for row in rows], at


def _partition_path(table: str, recipe: str, scope: str, version: str) -> str:
    parts = (_require_path_part(part) for part in (recipe, scope, version))
    return f"stats/{table}/" + "recipe={}/scope={}/version={}".format(*parts)


def _first_file_path(table: str, recipe: str, scope: str, version: str) -> str:
    return f"{_partition_path(table, recipe, scope, version)}/part-0.parquet"


def _require_path_part(name: str) -> str:
    """Return a name that becomes a folder; no name comes from data, so an invalid one is our bug."""
    assert PATH_PART_PATTERN.fullmatch(name), f"{name!r} cannot be part of a path"
    return name


_WRITE_OPTIONS: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
"""No manifest holds the digest of a statistics table, so checksums in its pages detect damage."""


def _encode_parquet(content: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(content, buffer, **_WRITE_OPTIONS)
    return buffer.getvalue()


def _parse_small_table(content: bytes) -> pa.Table:
    with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file:
        return file.read(use_threads=False)


def _read_or_remove(store: Store, path: str) -> pa.Table | None:
    """Return a small table if it exists; remove a damaged one with a warning, so that it is written again."""
    try:
        return store.recall(path, _parse_small_table)
    except FileNotFoundError:
        return None
    except PipelineError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        _LOG.warning("%s: %s; it is made again", store.address(path), " ".join(str(error).split()))
        store.remove(path)
        return None


def find_damage(store: Store, key: StageKey, version: str) -> dict[str, str]:
    """Return a message for each damaged table of a version, by path."""
    damage: dict[str, str] = {}
    for table in SCHEMAS:
        folder = _partition_path(table, *split_stage_key(key), version)
        for name in store.list(folder):
            try:
                store.unchecked_table(f"{folder}/{name}")
            except DamagedFileError as error:
                damage[error.path] = error.damage.removeprefix(store.path("") + "/")
    return damage


def require_whole_tables(store: Store) -> None:
    """Read every statistics table; raise DamagedFileError for the first damaged one."""
    for path in store.list_files("stats"):
        if path.endswith(".parquet"):
            # A build may have replaced a file since it was listed.
            with suppress(FileNotFoundError):
                store.unchecked_table(path)


def _has_schema(store: Store, path: str, schema: pa.Schema) -> bool:
    """Return whether a table has a schema; False if its footer is damaged."""
    try:
        with store.open(path) as handle:
            stored = cast(pa.Schema, pq.read_schema(handle))
            is_same_source = (stored.metadata or {}).get(b"source") == (schema.metadata or {}).get(b"source")
            return is_same_source and stored.remove_metadata().equals(schema)
    except (pa.ArrowException, OSError, ValueError) as error:
        _LOG.warning("%s: %s; it is made again", store.path(path), error)
        return False


def _list_stamped_files(store: Store, folder: str, prefix: str) -> list[str]:
    """Return the files `<prefix>-<stamp>.parquet` of a folder, oldest first."""
    names = store.list(folder)
    return [name for name in names if name.startswith(f"{prefix}-") and name.endswith(".parquet")]


def _append_lines(
    store: Store,
    folder: str,
    prefix: str,
    schema: pa.Schema,
    lines: Sequence[Mapping[str, Any]],
    *,
    date: Callable[[int], Mapping[str, Any]] = lambda _: {},
    prune: bool = True,
) -> None:
    """Write lines to a file that sorts after the existing ones, unless the newest of these holds the same lines.

    `date` returns the values of the columns that tell when, for the file's stamp: they are not compared. With `prune`,
    files superseded past the grace period are removed.
    """
    names = _list_stamped_files(store, folder, prefix)
    newest = _read_or_remove(store, f"{folder}/{names[-1]}") if names else None
    if names and newest is None:
        # It was damaged.
        names.pop()
    stamp = max([time.time_ns(), *(_parse_stamp(name) + 1 for name in names)])
    dated = date(stamp)
    stored = None if newest is None else [_leave_out(line, dated) for line in newest.to_pylist()]
    if stored == lines:
        return
    # Twenty digits hold every 64-bit stamp, so names sort like their stamps.
    new = f"{prefix}-{stamp:020d}.parquet"
    content = pa.Table.from_pylist([{**line, **dated} for line in lines], schema=schema)
    store.write(f"{folder}/{new}", _encode_parquet(content))
    if not prune:
        return
    for old, successor in pairwise([*names, new]):
        if _parse_stamp(successor) < stamp - GRACE_NS:
            with suppress(FileNotFoundError):  # another writer's sweep may have taken it
                store.remove(f"{folder}/{old}")


def _leave_out(line: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in names}


def _parse_stamp(name: str) -> int:
    return int(name.removesuffix(".parquet").rsplit("-", 1)[1])
