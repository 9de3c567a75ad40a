"""What one worker does with one part: the rooms in order, rows in plain values, batches in columns.

What belongs here: composing rooms over one part, and the part's counts. What does not: which parts there
are and whether they must be done (`runner.py`), or any room's own work.

    source part ──sources──► records ──canonicalization──► rows.parquet, rejects.parquet, ledger.parquet
    rows.parquet ──rendering, masking, truncation, tokenization──► examples.parquet, rejects.parquet, ledger.parquet

A function here takes one picklable task and returns one `manifest.Part`. Expensive state (a tokenizer, a
renderer) is made once per process and context.
"""

import gc
import hashlib
import multiprocessing
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rowmill import sources
from rowmill.conversation.rendering.renderer import RendererSpec
from rowmill.core.errors import ContextOverflowError
from rowmill.core.storage import Store, digest_bytes
from rowmill.formats import Python, canonicalization, filters
from rowmill.formats.preference import columns_in
from rowmill.formats.splits import Splitter, assign_split
from rowmill.recipe.recipe import Dataset
from rowmill.schema.examples import WEIGHTS, tokens_by_weight
from rowmill.schema.ledger import KEPT, LEDGER, NOT_TAKEN, REJECTED, add_up
from rowmill.schema.manifest import File, Part
from rowmill.schema.rows import NOTICED, REJECTS, ROWS, Json, ParseReport, Rejected, Row, message_counts, to_json
from rowmill.sources.parts import SplitHint
from rowmill.sources.sharing import TakenGroup, read_taken, records_of
from rowmill.stages.custom_rows import OwnRows
from rowmill.stages.tokenized_examples import tool_lengths
from rowmill.stages.tokenized_examples.text_examples import Prepared, Preparer
from rowmill.tokenization import encoded_batch
from rowmill.tokenization.encoded_batch import Counts
from rowmill.tokenization.tokenizer import Encoder, from_bytes

# ── Writing a part ─────────────────────────────────────────────────────────────────────────────────


def write_parquet(store: Store, path: str, table: pa.Table) -> File:
    """Write a table whole or not at all; zstd at its fastest level, no dictionaries for unique columns."""
    content = _as_parquet(table)
    store.write(path, content)
    return File(path=path, bytes=len(content), digest=digest_bytes(content), rows=table.num_rows)


def _as_parquet(table: pa.Table) -> bytes:
    buffer = BytesIO()
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        compression_level=1,
        use_dictionary=["dataset", "kind", "split", "stage", "reason", "state", "schema", "domain"],
    )
    return buffer.getvalue()


@dataclass(slots=True)
class RejectLog:
    """Rejected records of a part, kept raw."""

    stage: str
    row_ids: list[str] = field(default_factory=list[str])
    reasons: list[str] = field(default_factory=list[str])
    details: list[str] = field(default_factory=list[str])
    raws: list[bytes] = field(default_factory=list[bytes])

    def add(self, row_id: str, rejected: Rejected, raw: bytes) -> None:
        """Keep one reject with its reason and what it was."""
        self.row_ids.append(row_id)
        self.reasons.append(rejected.reason)
        self.details.append(rejected.detail[:500])
        self.raws.append(raw)

    def table(self) -> pa.Table:
        """Return the rejects as `rows.REJECTS`."""
        return pa.table(
            [self.row_ids, [self.stage] * len(self.row_ids), self.reasons, self.details, self.raws], schema=REJECTS
        )

    def counts(self) -> dict[str, int]:
        """Return how many rejects there are by reason."""
        return dict(sorted(Counter(self.reasons).items()))


def write_rejects(store: Store, stage_folder: str, at: str, log: RejectLog) -> File:
    """Write a part's rejects; the many parts that have none share one file."""
    if log.row_ids:
        return write_parquet(store, f"{at}/rejects.parquet", log.table())
    path = f"{stage_folder}/no_rejects.parquet"
    content = _no_rejects()
    if not store.exists(path):
        store.write(path, content)
    return File(path=path, bytes=len(content), digest=digest_bytes(content), rows=0)


@lru_cache(maxsize=1)
def _no_rejects() -> bytes:
    return _as_parquet(RejectLog("none").table())


def _ledger_table(kept: pa.ChunkedArray, log: RejectLog, not_taken: Sequence[str] = ()) -> pa.Table:
    others = pa.array([*log.row_ids, *not_taken], pa.string())
    row_ids = pa.chunked_array([*kept.chunks, others], pa.string())
    states = [REJECTED] * len(log.row_ids) + [NOT_TAKEN] * len(not_taken)
    reasons = [*log.reasons, *[""] * len(not_taken)]

    def column(first: str, rest: Sequence[str]) -> pa.ChunkedArray:
        same = pa.repeat(pa.scalar(first), len(kept))
        return pa.chunked_array([same, pa.array(rest, pa.string())], pa.string())

    stages = [log.stage] * len(others)
    return pa.Table.from_arrays(
        [row_ids, column(log.stage, stages), column(KEPT, states), column("", reasons)], schema=LEDGER
    )


# ── Canonical rows ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CanonicalTask:
    """Source parts to make rows of together."""

    root: str
    folder: str
    fingerprint: str
    base: str
    dataset_name: str
    dataset: Dataset
    taken: TakenGroup


_CANONICALIZERS: dict[str, "tuple[canonicalization.Canonicalizer, Splitter]"] = {}


def _canonicalizer(name: str, dataset: Dataset) -> "tuple[canonicalization.Canonicalizer, Splitter]":
    key = name + dataset.model_dump_json()
    if key not in _CANONICALIZERS:
        made = canonicalization.Canonicalizer(
            dataset,
            weighted=dataset.loss.weights,
            group_key=dataset.splits.group_key,
            order_key=dataset.splits.time_key,
        )
        _CANONICALIZERS.clear()
        _CANONICALIZERS[key] = (made, Splitter(dataset.splits))
    return _CANONICALIZERS[key]


def canonicalize_part(task: CanonicalTask) -> Part:
    """Make canonical rows of some source parts."""
    if isinstance(task.dataset.format, Python):
        return _canonicalize_own(task)
    canonicalizer, splitter = _canonicalizer(task.dataset_name, task.dataset)
    log = RejectLog("canonical_rows")
    by_prefix = task.dataset.filters.deduplicate == "prefix200"
    columns = _RowColumns(task.dataset_name, task.taken[0][0], splitter, by_prefix=by_prefix)
    left_out: list[str] = []
    for part, row_id, record in read_taken(task.taken, Path(task.base), left_out):
        row = record.rejected or canonicalizer(record.value, arrow=part.arrow)
        if record.value is not None and not (isinstance(row, Row) and row.kind == "text"):
            columns.note_preferences(row_id, columns_in(record.value, canonicalizer.unread_preferences))
        if isinstance(row, Rejected):
            log.add(row_id, row, record.raw)
            continue
        refused = columns.add(row_id, row, record.value)
        if refused is not None:
            log.add(row_id, refused, record.raw)
    return _save_rows(task, columns, log, left_out)


def _canonicalize_own(task: CanonicalTask) -> Part:
    """Make the rows of some parts by a class of one's own, which may make several of one record."""
    own = OwnRows(task.dataset, Path(task.base))
    log = RejectLog("canonical_rows")
    by_prefix = task.dataset.filters.deduplicate == "prefix200"
    columns = _RowColumns(task.dataset_name, task.taken[0][0], Splitter(task.dataset.splits), by_prefix=by_prefix)
    left_out: list[str] = []
    further = 0
    for part, row_id, record in read_taken(task.taken, Path(task.base), left_out):
        made = [record.rejected] if record.rejected else own(record.value, arrow=part.arrow)
        further += len(made) - 1
        for k, row in enumerate(made):
            name = f"{row_id}.{k}" if k else row_id
            # Rows of one record are not copies of each other, whatever its first 200 characters.
            seen = [k, record.value] if k else record.value
            refused = row if isinstance(row, Rejected) else columns.add(name, row, seen)
            if refused is not None:
                log.add(name, refused, record.raw)
    return _save_rows(task, columns, log, left_out, further=further)


class _RowColumns:
    """Canonical rows of a part, column by column."""

    def __init__(self, dataset: str, part: sources.Part, splitter: Splitter, *, by_prefix: bool) -> None:
        self.dataset = dataset
        self.by_prefix = by_prefix
        self.hint: SplitHint | None = part.split_hint
        self.splitter = splitter
        self.ids: list[str] = []
        self.rows: list[Row] = []
        self.texts: list[tuple[str | None, ...]] = []
        self.hashes: list[bytes] = []
        self.dedupe_keys: list[bytes | None] = []
        self.splits: list[str] = []
        self.roles: Counter[str] = Counter()
        self.with_unknown_roles: list[str] = []
        self.preferences: Counter[str] = Counter()
        self.with_preferences: list[str] = []

    def note_preferences(self, row_id: str, names: Sequence[str]) -> None:
        """Count a record's columns of preference data, whatever becomes of the record."""
        if names:
            self.preferences.update(names)
            self.with_preferences.append(row_id)

    def add(self, row_id: str, row: Row, record: Json) -> Rejected | None:
        """Add a row, or return why it cannot be stored or its split cannot be told."""
        texts = _as_json(row)
        if isinstance(texts, Rejected):
            return texts
        content = filters.content_hash(row)
        split = assign_split(
            self.splitter,
            source=self.hint,
            group_key=row.group_key,
            order_key=row.order_key,
            content_hash=content,
        )
        if isinstance(split, Rejected):
            return split
        self.ids.append(row_id)
        self.rows.append(row)
        self.texts.append(texts)
        self.hashes.append(content)
        self.dedupe_keys.append(filters.prefix_hash(record) if self.by_prefix else None)
        self.splits.append(split)
        if row.report.unknown_roles:
            self.with_unknown_roles.append(row_id)
            self.roles.update(row.report.unknown_roles)
        return None

    def table(self) -> pa.Table:
        """Return the rows as `rows.ROWS`."""
        rows = self.rows
        messages, tools, kwargs, records = zip(*self.texts, strict=True) if rows else ((), (), (), ())
        columns: list[Any] = [
            self.ids, self.hashes, self.dedupe_keys, pa.repeat(self.dataset, len(rows)), [r.kind for r in rows],
            self.splits, [r.group_key for r in rows], [r.order_key for r in rows], [r.domain for r in rows],
            messages, tools, kwargs, [r.text for r in rows], [r.output for r in rows], records,
            [_prompt_hash(r) for r in rows],
            *_report_columns([row.report for row in rows]),
        ]  # fmt: skip
        return pa.table(columns, schema=ROWS)


DEPTH_LIMIT = 254
"""What orjson encodes. The reader holds records to less; JSON text inside them (arguments, tools) is parsed later."""


def _as_json(row: Row) -> tuple[str | None, ...] | Rejected:
    """Return a row's messages, tools, template values and record as JSON text, or why they have none."""
    values = (
        row.messages if row.kind == "conversation" else None,
        row.tools,
        row.template_kwargs or None,
        row.record,
    )
    try:
        return tuple(None if value is None else orjson.dumps(value).decode() for value in values)
    except TypeError:
        # Integers beyond 64 bits are the row's own content; nesting without end breaks whatever reads it later.
        if _is_deeper(values, DEPTH_LIMIT + 1):
            return Rejected("too_deep", f"JSON text inside the record is nested in more than {DEPTH_LIMIT} levels")
        return tuple(None if value is None else to_json(value) for value in values)


def _is_deeper(value: Json, limit: int) -> bool:
    """Tell whether lists and objects are nested in more than `limit` levels."""
    level = [value]
    for _ in range(limit):
        inner = [one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer)]
        level = [one for one in inner if isinstance(one, dict | list | tuple)]
        if not level:
            return False
    return True


def _prompt_hash(row: Row) -> bytes | None:
    """Identify what a row asks, case-folded and with spaces collapsed: the same prompt in two splits is a leak."""
    prompt = row.text if row.kind == "pair" else next((m["content"] for m in row.messages if m["role"] == "user"), None)
    if not prompt:
        return None
    return hashlib.blake2b(" ".join(prompt.casefold().split()).encode(errors="surrogatepass"), digest_size=8).digest()


def _report_columns(reports: Sequence[ParseReport]) -> list[pa.Array]:
    names = ("schema", "extracted_think_from_content", "moved_reasoning_keys", "dropped_think_messages",
             "tools_present", "tools_parsed_from_string", "unknown_roles", "notes")  # fmt: skip
    # Rows of one schema about which there is nothing to say share one report.
    each = {id(report): report for report in reports}
    places = {key: place for place, key in enumerate(each)}
    rows = pa.array([places[id(report)] for report in reports], pa.int32())
    return [
        pa.array([getattr(report, name) for report in each.values()], ROWS.field(name).type).take(rows)
        for name in names
    ]


def _save_rows(
    task: CanonicalTask,
    columns: _RowColumns,
    log: RejectLog,
    not_taken: Sequence[str],
    *,
    further: int = 0,
) -> Part:
    store = Store(task.root)
    at = f"{task.folder}/parts/{task.fingerprint}"
    table = columns.table()
    notes = Counter(note for row in columns.rows for note in row.report.notes)
    facts: dict[str, Any] = {
        "records": records_of(task.taken),
        "is_text_file": task.taken[0][0].reader == "plain_text",
        "further_rows": further,
        "kept": len(columns.ids),
        "reasons": log.counts(),
        "left_out": {NOT_TAKEN: len(not_taken)} if not_taken else {},
        "roles": dict(sorted(columns.roles.items())),
        "rows_with_unknown_roles": len(columns.with_unknown_roles),
        "examples_of_roles": {"": columns.with_unknown_roles[:3]},
        "preference_columns": dict(sorted(columns.preferences.items())),
        "rows_with_preferences": len(columns.with_preferences),
        "examples_of_preferences": {"": columns.with_preferences[:3]},
        "schemas": dict(sorted(Counter(row.report.schema for row in columns.rows).items())),
        "notes": dict(sorted(notes.items())),
        "splits": dict(sorted(Counter(columns.splits).items())),
        "examples_of_rejects": _first_of_each(log),
        "noticed": noticed(table),
        **message_counts(row.messages for row in columns.rows),
    }
    files = {
        "rows": write_parquet(store, f"{at}/rows.parquet", table),
        "rejects": write_rejects(store, task.folder, at, log),
        "ledger": write_parquet(store, f"{at}/ledger.parquet", _ledger_table(table.column("row_id"), log, not_taken)),
    }
    return Part(task.fingerprint, files, facts)


def noticed(table: pa.Table) -> dict[str, int]:
    """Add up what canonicalisation noticed in the rows of a part."""
    return {name: int(pc.sum(table.column(name)).as_py() or 0) for name in NOTICED}


def _first_of_each(log: RejectLog) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row_id, reason in zip(log.row_ids, log.reasons, strict=True):
        if len(found.setdefault(reason, [])) < 3:
            found[reason].append(row_id)
    return dict(sorted(found.items()))


def row_as_bytes(row: dict[str, Any]) -> bytes:
    """Return a stored canonical row as JSON, for the rejects of later stages: the raw record is one trace away."""
    kept = {
        k: v
        for k, v in row.items()
        if v is not None and k in ("kind", "messages", "tools", "template_kwargs", "text", "output", "record")
    }
    return orjson.dumps(kept)


# ── Tokenized examples ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TokenizeTask:
    """One part of canonical rows to tokenize; `tokenizer` is a file of the store, `renderer` plain data."""

    root: str
    folder: str
    fingerprint: str
    tokenizer: str
    dataset: Dataset
    renderer: RendererSpec | None
    limit: int
    vocab_size: int
    rows: File
    base: str = ""


READ = ("row_id", "content_hash", "kind", "split", "domain", "messages", "tools", "template_kwargs", "text", "output",
        "record")  # fmt: skip
"""The columns of canonical rows that decide examples."""


@lru_cache(maxsize=2)
def _encoder(root: str, path: str) -> Encoder:
    return Encoder(from_bytes(Store(root).read(path)))


_PREPARERS: dict[str, "Preparer"] = {}


def _preparer(task: TokenizeTask) -> "Preparer":
    """Return this process's rooms for a task's options; the last ones are kept."""
    key = repr((task.root, task.tokenizer, task.renderer, task.limit, task.base)) + task.dataset.model_dump_json()
    if key not in _PREPARERS:
        _PREPARERS.clear()
        encoder = _encoder(task.root, task.tokenizer)
        _PREPARERS[key] = Preparer(encoder, task.dataset, task.renderer, task.limit, base=Path(task.base))
        if multiprocessing.parent_process() is not None:
            # What a worker has opened stays: walking it at every collection cost ten per cent of a part.
            gc.collect()
            gc.freeze()
    return _PREPARERS[key]


def tokenize_part(task: TokenizeTask) -> Part:
    """Tokenize one part of canonical rows."""
    store, preparer = Store(task.root), _preparer(task)
    rows = store.table(task.rows, READ)
    counts = Counts()
    prepared = preparer.prepare(rows, counts)
    preparer.compare_prompts(rows, counts)
    log = RejectLog("tokenized_examples")
    for place, rejected in prepared.rejected:
        row = rows.slice(place, 1).to_pylist()[0]
        log.add(row["row_id"], rejected, row_as_bytes(row))
    kept = np.ones(rows.num_rows, bool)
    kept[[place for place, _ in prepared.rejected]] = False
    lengths = _short_documents(rows, prepared)
    return _save_examples(task, rows.filter(pa.array(kept)), prepared, log, counts, lengths)


def too_long(limit: int, count: int, found: Sequence[tuple[str, int]], where: str) -> ContextOverflowError:
    """Word the error of `overlong: raise`: how many, the longest, and up to twenty of them."""
    longest = max(length for _, length in found)
    names = ", ".join(row_id for row_id, _ in found[:20])
    return ContextOverflowError(
        f"{where}: {count} rows are longer than {limit} tokens, the longest {longest}: {names}; at most {limit} fit; "
        "raise seq_len, or choose truncation.overlong truncate, drop or split"
    )


SHORT_TOKENS = 20
"""Documents under it are rather lines of a document that was cut wrongly."""


def _short_documents(rows: pa.Table, prepared: Prepared) -> dict[str, int]:
    """Count the documents that became examples, and those of them that are shorter than `SHORT_TOKENS`."""
    is_text = pc.equal(rows.column("kind"), "text").to_numpy(zero_copy_only=False)
    lengths = prepared.examples.column("original_tokens").to_numpy()
    tokens = np.bincount(prepared.places, weights=lengths, minlength=rows.num_rows)[is_text]
    return {
        "documents": int((tokens > 0).sum()),
        "short_documents": int(((tokens > 0) & (tokens < SHORT_TOKENS)).sum()),
    }


def _save_examples(
    task: TokenizeTask, kept: pa.Table, prepared: Prepared, log: RejectLog, counts: Counts, documents: dict[str, int]
) -> Part:
    tools = _tool_lengths(task, kept.column("tools"))
    table = prepared.examples
    by_split = _tokens_by_split(table)
    overlong = _overlong(task, table)
    facts: dict[str, Any] = {
        "rows": kept.num_rows + len(log.row_ids),
        "kept": kept.num_rows,
        "examples": table.num_rows,
        **documents,
        "verified": prepared.verified,
        "reasons": log.counts(),
        "examples_of_rejects": _first_of_each(log),
        "tokens": int(table.column("tokens").to_numpy().sum()),
        "original_tokens": int(table.column("original_tokens").to_numpy().sum()),
        "tokens_by_split": by_split,
        "tokens_by_class": add_up(by_split.values()),
        **({"tokens_by_weight": _tokens_by_weight(table)} if WEIGHTS in table.column_names else {}),
        "outside_vocabulary": encoded_batch.outside_vocabulary(table, task.vocab_size),
        "overlong": overlong[:20],
        "overlong_rows": len(overlong),
        "dropped": dict(sorted(counts.dropped.items())),
        "usual_way": counts.usual_way,
        "lane_differences": counts.lane_differences,
        "control_counts": dict(sorted(counts.control_strings.items())),
        "controlled_rows": counts.controlled_rows,
        "altered": counts.altered,
        "template": counts.template,
        "straddles": counts.straddles,
        "prompts_compared": counts.prompts_compared,
        "prompts_that_differ": len(counts.prompts_that_differ),
        "examples_of_prompts": counts.prompts_that_differ[:3],
        "dropped_tokens": counts.dropped_tokens,
        "dropped_trained": counts.dropped_trained,
        "trained_removed": int(table.column("trained_removed").to_numpy().sum()),
        "rows_with_tools": tools.rows,
        "tool_tokens": tools.tokens,
        "most_tool_tokens": tools.most,
    }
    store = Store(task.root)
    at = f"{task.folder}/parts/{task.fingerprint}"
    files = {
        "examples": write_parquet(store, f"{at}/examples.parquet", table),
        "rejects": write_rejects(store, task.folder, at, log),
        "ledger": write_parquet(store, f"{at}/ledger.parquet", _ledger_table(kept.column("row_id"), log)),
    }
    return Part(task.fingerprint, files, facts)


def _tokens_by_weight(table: pa.Table) -> dict[str, int]:
    return tokens_by_weight(table.column(WEIGHTS).combine_chunks().flatten())


def _overlong(task: TokenizeTask, table: pa.Table) -> list[tuple[str, int]]:
    """Name the rows over the limit with their lengths, longest first, where such rows are to stop the build."""
    if task.dataset.truncation.overlong != "raise":
        return []
    lengths = table.column("tokens").to_numpy()
    places = np.flatnonzero(lengths > task.limit)
    places = places[np.argsort(-lengths[places], kind="stable")]
    names: list[str] = table.column("example_id").take(pa.array(places)).to_pylist()
    return [(name.rpartition("#")[0], int(n)) for name, n in zip(names, lengths[places].tolist(), strict=True)]


def _tool_lengths(task: TokenizeTask, tools: pa.ChunkedArray) -> tool_lengths.ToolLengths:
    preparer = _preparer(task)
    if preparer.printer is None or tools.null_count == len(tools):
        return tool_lengths.ToolLengths()
    return tool_lengths.measure(tools, preparer.printer, _encoder(task.root, task.tokenizer))


def _tokens_by_split(table: pa.Table) -> dict[str, dict[str, int]]:
    """Add up, per split, what every original token became: each is in exactly one class."""
    names = {"trained": "trained_tokens", "context": "context_tokens", "template": "template_tokens"}
    columns = {name: table.column(column).to_numpy().astype(np.int64) for name, column in names.items()}
    removed = table.column("original_tokens").to_numpy().astype(np.int64) - table.column("tokens").to_numpy()
    columns["truncated"] = removed
    splits = table.column("split").to_numpy(zero_copy_only=False)
    return {
        str(split): {name: int(values[splits == split].sum()) for name, values in columns.items()}
        for split in sorted(set(splits.tolist()))
    }
