"""Where rows and rejected records came from, and how their text begins: what people look for first in a table of rows.

Everything is computed per column, except for rejected records, whose bytes may be anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.core.stage_names import CANONICAL_ROWS, RAW_DATASET
from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.schema.rows import REJECTED_ROW_COLUMNS, RowKind

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

_ESCAPE = r"\\u[0-9a-fA-F]{4}|\\."
_STRING_BEGIN = rf'"content":"((?:[^"\\]|{_ESCAPE}){{1,{2 * PREVIEW_CHARACTERS}}})'
_FIRST_QUESTION = rf'"role":"user",(?:"[a-z_]+":"[^"\\]*",)*{_STRING_BEGIN}'


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


def find_source(store: Store, output: Manifest) -> tuple[StageKey, str] | None:
    """Return key and version of the source that an output was made from, by its inputs; None if it had none."""
    if output.stage == RAW_DATASET:
        return output.key, output.version
    for name, version in output.inputs.items():
        key = manifest.parse_stage_key(name)
        if manifest.get_stage_name(key) == RAW_DATASET:
            return key, version
        if manifest.get_stage_name(key) == CANONICAL_ROWS:
            return find_source(store, manifest.load_version(store, key, version))
    return None


def index_sources(store: Store, output: Manifest) -> SourceIndex:
    """Return the source that an output was made from."""
    from rowmill.sources.parts import FileScan

    source = find_source(store, output)
    parts: list[SourcePart] = []
    if source is not None:
        scanned = output if source[0] == output.key else manifest.load_version(store, *source)
        for scan in scanned.details.get("scans", ()):
            parts += FileScan.from_json(scan).parts
    return SourceIndex(
        pa.array([part.part_id for part in parts], pa.string()),
        pa.array([part.url for part in parts], pa.string()),
        pa.array([part.first_record for part in parts], pa.int64()),
        pa.array([part.first_line if part.lines == part.records else None for part in parts], pa.int64()),
    )


def preview_rows(rows: pa.Table) -> pa.Array:
    """Return how each canonical row begins: its first question, prompt, text or record; null without any text.

    `rows` has `PREVIEWED_COLUMNS`.
    """
    import polars as pl

    messages = pl.col("messages")
    of_chat = pl.coalesce(messages.str.extract(_FIRST_QUESTION), messages.str.extract(_STRING_BEGIN))
    # The escapes of JSON text are resolved, and each white-space or control character becomes a blank. Text that is
    # written as JSON has no character 0, so it can stand for an escaped backslash meanwhile.
    plain = of_chat.str.replace_all("\\\\", "\0", literal=True)
    plain = plain.str.replace_all(r"\\(?:u[0-9a-fA-F]{4}|[bfnrt])", " ").str.replace_all(r"\\(.)", "$1")
    plain = plain.str.replace_all("\0", "\\", literal=True)
    text = pl.coalesce(plain, *(_cut(pl.col(name)) for name in ("text", "record")))
    columns = pl.DataFrame(rows.select(PREVIEWED_COLUMNS))
    return (
        columns.select(_cut(text.str.replace_all(r"\s+", " ").str.strip_chars()).str.strip_chars())
        .to_series()
        .to_arrow()
    )


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
    return row if row.keys() <= REJECTED_ROW_COLUMNS and row["kind"] in get_args(RowKind) else None
