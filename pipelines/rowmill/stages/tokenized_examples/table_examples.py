"""Rows of records → tokenized examples: encode each part once, plan all of them, then write examples in parts.

What belongs here: the tokens around records, encoding over parts, the dry run, parts of examples, adding up. What
does not: the plan (`table_plan.py`), one worker's work (`table_tokens.py`).

    parts of rows ─encode─► ids in scratch, lengths ─► plan ─► nothing fits: stop, nothing was written
                                                        │
                              ids, ledger, rejects per part of rows  +  examples in parts of about a million tokens

Ids of a part are kept under the digest of its texts and tokenizer, so a part that was encoded before is not encoded
again. A part of examples is kept under the digest of what stands in it; one new row moves the shuffle of tabular and
grouped data and makes most of their examples anew, from ids that are there.
"""

import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.core.storage import digest_bytes, digest_json
from rowmill.formats import Records
from rowmill.recipe.recipe import Recipe
from rowmill.schema.facts import TokenizedExamplesFacts
from rowmill.schema.ledger import KEPT, REJECTED, count_unaccounted, sum_counts
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, File, Histogram, Part
from rowmill.shards import gather
from rowmill.stages import table_plan
from rowmill.stages.base import (
    PartTask,
    StageContext,
    StageOutput,
    collect_samples,
    compute_share,
    describe_rejects,
    load_kept_part,
    make_parts,
    save_kept_part,
    scratch_folder,
)
from rowmill.stages.part_files import write_parquet
from rowmill.stages.table_inputs import ObservedTable, get_table_options, index_parts, load_observed_table
from rowmill.stages.table_plan import SplitTablePlan, TableOverflow, TablePlan
from rowmill.stages.tokenized_examples import table_tokens
from rowmill.stages.tokenized_examples.table_tokens import (
    RECORD_EXAMPLES,
    BuildExamplesTask,
    EncodedPart,
    EncodeTask,
    LedgerTask,
)
from rowmill.tabular import prompt
from rowmill.tabular.assembly import EDGES, ExampleLimits
from rowmill.tabular.prompt import PromptFrame
from rowmill.tabular.row_index import RowIndex
from rowmill.tabular.serialization import RecordDecoder, RecordProblem, Serialiser, read_json
from rowmill.tokenization import tokenizer
from rowmill.tokenization.encoder import Encoder
from rowmill.tokenization.tokenizer import LoadedTokenizer

VERSION = 4
"""Raise it when any row may become other ids, or stand in another example, or other facts are counted."""

PART_TOKENS = 1 << 20
"""Tokens of a part of examples: some 20 MB while a worker lays it out."""
PREFILL_RECORDS = 3
ROW_STATES = ("kept", "not_sampled", "record_overflow", "group_overflow", "unserialisable", "control_token_in_content")
"""What becomes of a row, numbered as plans and account tasks do; from `FIRST_REASON` on, reasons of rejects."""


def identify_table_examples(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide examples; what a trained model is asked for decides none."""
    return {
        "versions": [VERSION, tokenizer.TOKENIZATION_VERSION],
        "format": recipe.datasets[name].format.model_dump(mode="json", exclude={"generation"}),
        "limit": recipe.limit_of(name),
        "seed": recipe.seed,
        "vocab_size": recipe.vocab_size,
    }


def resolve_prompt_frame(work: StageContext, loaded: LoadedTokenizer, known: ObservedTable) -> PromptFrame:
    """Return what stands around the records."""
    form, card, encoder = get_table_options(work), loaded.card, Encoder(loaded, fast_lane=False)
    vocabulary = prompt.Vocabulary(
        name=work.recipe.tokenizer_choice.name,
        size=work.recipe.vocab_size or card.vocab_size,
        bos_id=card.bos_id,
        eos_id=card.eos_id,
        adds_bos=card.adds_bos,
        special={content: number for number, content, special in card.added if special and content},
    )
    return prompt.build_prompt_frame(
        known.schema,
        vocabulary,
        lambda text: encoder.usual.encode(text, add_special_tokens=False).ids,
        style=form.prompt.style,
        template=form.prompt.template,
        add_bos=form.prompt.add_bos,
        add_eos=form.prompt.add_eos,
        bos=form.tokens.bos,
        eos=form.tokens.eos,
        is_grouped=form.mode == "grouped",
        where=f"datasets.{work.dataset_name}.format",
    )


# ── Encoding and planning ──────────────────────────────────────────────────────────────────────────


def _fingerprint_tokens(
    work: StageContext, known: ObservedTable, loaded: LoadedTokenizer, frame: PromptFrame, rows: File
) -> str:
    wire = get_table_options(work).codec.wire
    return digest_json(
        "tokens", VERSION, tokenizer.TOKENIZATION_VERSION, loaded.card.digest, wire, known.schema.to_json(),
        frame.special_tokens,
        rows.digest,
    )  # fmt: skip


def _encode_parts(
    work: StageContext,
    known: ObservedTable,
    loaded: LoadedTokenizer,
    path: str,
    frame: PromptFrame,
    scratch: Path,
    *,
    keep: bool,
) -> tuple[list[EncodedPart], list[str], list[bool]]:
    """Encode all parts of rows into scratch files; return them, the fingerprints of their ids, and which are fresh.

    With `keep` ids are kept part by part, before anything is planned: a build that does not fit, or is killed, leaves
    them to the next.
    """
    rows = [part.files["rows"] for part in work.input(CANONICAL_ROWS).parts]
    names = [_fingerprint_tokens(work, known, loaded, frame, file) for file in rows]
    schema = orjson.dumps(known.schema.to_json()).decode()
    tasks = [
        EncodeTask(
            work.store.root, work.folder if keep else None, name, str(scratch / f"{i:06d}.arrow"), path, file, schema,
            get_table_options(work).codec.wire, frame.special_tokens, load_kept_part(work.store, work.folder, name),
        )
        for i, (file, name) in enumerate(zip(rows, names, strict=True))
    ]  # fmt: skip
    size = sum(4 * file.bytes for file, task in zip(rows, tasks, strict=True) if task.kept is None)
    encoded: list[EncodedPart] = []
    for task, one in zip(tasks, work.pool.map(table_tokens.encode_part, tasks, size_bytes=size), strict=True):
        if task.kept is None and one.kept is not None:
            save_kept_part(work.store, work.folder, one.kept)
        encoded.append(one)
    return encoded, names, [task.kept is None for task in tasks]


def _plan_dataset(
    work: StageContext, known: ObservedTable, frame: PromptFrame, encoded: Sequence[EncodedPart], index: RowIndex
) -> TablePlan:
    form = get_table_options(work)
    room = _get_example_limits(work, frame)
    asked = table_plan.TablePlanRequest(
        dataset=work.dataset_name or "",
        seed=work.recipe.seed,
        form=form,
        room=room,
    )
    naming = table_plan.OverflowNaming(
        names_of=lambda rows: _read_row_column(work, index, rows, "row_id"),
        widest_of=lambda units: _find_widest_columns(work, index, units),
    )
    options = {
        "mode": form.mode, "bos_id": frame.bos_id, "bos": frame.bos_text, "eos_id": frame.eos_id, "eos": frame.eos_text,
        "prompt": len(frame.prompt_ids), "limit": room.limit, "records": room.records, "cap": room.cap,
        "wanted": form.wanted, "prompt_text": frame.prompt_text,
        "order": None if known.order is None else known.order.name,
        "privacy_unit": ("group" if form.mode == "grouped" else "record") if form.privacy.dp_enabled else None,
        "widest_names": ", ".join(sorted(known.schema.names, key=lambda name: -len(name))[:5]),
    }  # fmt: skip
    changed = sum(int(one.facts["changed"]) for one in encoded)
    return table_plan.plan_table(asked, index, _join_lengths(encoded), naming=naming, changed=changed, options=options)


def _read_row_column(work: StageContext, index: RowIndex, rows: Ints, column: str) -> list[str]:
    """Return one column of some rows, in their order, reading each part once."""
    files = [part.files["rows"] for part in work.input(CANONICAL_ROWS).parts]
    which = np.searchsorted(index.first_rows, rows, "right") - 1
    found = np.empty(len(rows), object)
    for i in np.unique(which).tolist():
        own = np.flatnonzero(which == i)
        cells = work.store.table(files[i], [column]).column(0)
        found[own] = cells.take(pa.array(rows[own] - index.first_rows[i])).to_pylist()
    return found.tolist()


MAX_EXAMINED_ROWS = 100
"""Records of a group that are looked at to find its widest column."""


def _find_widest_columns(work: StageContext, index: RowIndex, units: Sequence[Ints]) -> list[str]:
    """Return for each of some sets of rows the column that has most characters in them."""
    looked_at = [rows[:MAX_EXAMINED_ROWS] for rows in units]
    texts = iter(_read_row_column(work, index, np.concatenate([np.empty(0, np.int64), *looked_at]), "record"))
    return [_find_widest_column(islice(texts, len(rows))) for rows in looked_at]


def _find_widest_column(texts: Iterable[str]) -> str:
    sizes: dict[str, int] = {}
    for text in texts:
        for name, value in read_json(text).items():
            sizes[name] = sizes.get(name, 0) + len(str(value))
    return max(sizes, key=lambda name: sizes[name], default="")


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """What is known of a dataset once its records are encoded: each row's tokens (−1: rejected)."""

    form: Records
    room: ExampleLimits
    index: RowIndex
    lengths: Ints


def dry_run_table(work: StageContext, loaded: LoadedTokenizer, path: str) -> TablePlan:
    """Plan as a build would, leaving nothing behind.

    Raises
    ------
    ContextOverflowError
        As `record_plan.plan` does.

    """
    known = load_observed_table(work.input(CANONICAL_ROWS).details)
    frame = resolve_prompt_frame(work, loaded, known)
    index = index_parts(work, work.input(CANONICAL_ROWS).parts, known)
    with _open_scratch_folder() as scratch:
        encoded, _, _ = _encode_parts(work, known, loaded, path, frame, scratch, keep=False)
        return _plan_dataset(work, known, frame, encoded, index)


def measure_table(work: StageContext, loaded: LoadedTokenizer, path: str) -> MeasuredTable:
    """Encode all records and return their lengths, leaving nothing behind."""
    known = load_observed_table(work.input(CANONICAL_ROWS).details)
    frame = resolve_prompt_frame(work, loaded, known)
    index = index_parts(work, work.input(CANONICAL_ROWS).parts, known)
    with _open_scratch_folder() as scratch:
        encoded, _, _ = _encode_parts(work, known, loaded, path, frame, scratch, keep=False)
    return MeasuredTable(get_table_options(work), _get_example_limits(work, frame), index, _join_lengths(encoded))


@contextmanager
def _open_scratch_folder() -> Generator[Path]:
    """Lend a folder outside the store, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="rowmill-plan-") as name:
        try:
            yield Path(name)
        finally:
            gather.drop_scratch_maps()


def _get_example_limits(work: StageContext, frame: PromptFrame) -> ExampleLimits:
    return ExampleLimits(
        work.recipe.limit_of(work.dataset_name or ""), len(frame.prompt_ids), get_table_options(work).cap
    )


def _join_lengths(encoded: Sequence[EncodedPart]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *(one.lengths for one in encoded)])


def make_table_examples(work: StageContext, loaded: LoadedTokenizer, path: str) -> StageOutput:
    """Encode, plan, and write examples; nothing but the ids of records is written unless the plan holds."""
    known = load_observed_table(work.input(CANONICAL_ROWS).details)
    frame = resolve_prompt_frame(work, loaded, known)
    rows = work.input(CANONICAL_ROWS).parts
    index = index_parts(work, rows, known)
    with scratch_folder(work) as scratch:
        encoded, names, fresh = _encode_parts(work, known, loaded, path, frame, scratch, keep=True)
        plan = _plan_dataset(work, known, frame, encoded, index)
        accounts = _write_ledgers(work, plan, index, encoded, names)
        built, reused, _ = make_parts(
            work, table_tokens.build_part, _plan_example_tasks(work, frame, plan, index, encoded, names, loaded)
        )
    rows_made = sum(one.lengths.size for one, is_fresh in zip(encoded, fresh, strict=True) if is_fresh)
    prefill = _write_prefill(work, known, frame, plan, index)
    return _build_table_output(
        work, known, frame, plan, accounts, [*built, *prefill], loaded, reused=reused, rows_made=rows_made
    )


# ── Parts beside the parts of rows ─────────────────────────────────────────────────────────────────


def _write_ledgers(
    work: StageContext, plan: TablePlan, index: RowIndex, encoded: Sequence[EncodedPart], names: Sequence[str]
) -> list[Part]:
    """Write what became of the rows of each part."""
    states = plan.states.copy()
    overflows = _OverflowDetails.of(plan.overflows)
    planned: list[PartTask] = []
    rows = [part.files["rows"] for part in work.input(CANONICAL_ROWS).parts]
    for i, (file, one, name) in enumerate(zip(rows, encoded, names, strict=True)):
        first, last = int(index.first_rows[i]), int(index.first_rows[i + 1])
        details = overflows.between(first, last)
        for place, reason, detail in one.facts["rejects"]:
            states[first + place] = ROW_STATES.index(reason)
            details[place] = detail
        assert one.kept is not None, "a build keeps all ids"
        task = LedgerTask(
            root=work.store.root,
            folder=work.folder,
            fingerprint=digest_json(name, "account", states[first:last].tobytes().hex(), details),
            rows=file,
            tokens=one.kept.files["tokens"],
            facts=one.facts,
            states=states[first:last].tobytes(),
            names=ROW_STATES,
            details=details,
        )
        planned.append(PartTask(task.fingerprint, task, file.rows, 4 * file.bytes))
    return make_parts(work, table_tokens.account_part, planned)[0]


@dataclass(frozen=True, slots=True, eq=False)
class _OverflowDetails:
    """Why rows do not fit: `rows` ascend, each with the number of its sentence."""

    rows: Ints
    which: Ints
    sentences: tuple[str, ...]

    @classmethod
    def of(cls, overflows: Sequence[TableOverflow]) -> "_OverflowDetails":
        rows = np.array([row for one in overflows for row in one.rows], np.int64)
        which = np.repeat(np.arange(len(overflows)), np.array([len(one.rows) for one in overflows], np.int64))
        order = np.argsort(rows, kind="stable")
        return cls(rows[order], which[order], tuple(one.sentence for one in overflows))

    def between(self, first: int, last: int) -> dict[int, str]:
        """Return the sentences of the rows of a part, by their places in it."""
        begin, end = np.searchsorted(self.rows, (first, last)).tolist()
        places = (self.rows[begin:end] - first).tolist()
        return {place: self.sentences[i] for place, i in zip(places, self.which[begin:end].tolist(), strict=True)}


# ── Parts of examples ──────────────────────────────────────────────────────────────────────────────


def _plan_example_tasks(
    work: StageContext,
    frame: PromptFrame,
    plan: TablePlan,
    index: RowIndex,
    encoded: Sequence[EncodedPart],
    names: Sequence[str],
    loaded: LoadedTokenizer,
) -> list[PartTask]:
    numbers = _number_examples(plan)
    planned: list[PartTask] = []
    for one, own in zip(plan.splits, numbers, strict=True):
        for first, last in _cut_parts(one.lengths):
            task = _make_build_task(work, frame, plan, one, own, index, encoded, names, loaded, first, last)
            planned.append(PartTask(task.fingerprint, task, len(task.rows), 4 * int(one.lengths[first:last].sum())))
    return planned


def _number_examples(plan: TablePlan) -> list[Ints]:
    """Return, per split, which of the examples that begin with the same row each is, in the order of the plan."""
    counted: list[Ints] = []
    for one in plan.splits:
        firsts = one.rows[one.assembled.records[one.assembled.record_offsets[:-1]]]
        order = np.argsort(firsts, kind="stable")
        ordered = firsts[order]
        begins = np.flatnonzero(np.diff(ordered, prepend=-1))
        numbers = np.empty(len(firsts), np.int64)
        numbers[order] = np.arange(len(firsts)) - np.repeat(begins, np.diff(np.append(begins, len(firsts))))
        counted.append(numbers)
    return counted


def _cut_parts(lengths: Ints) -> list[tuple[int, int]]:
    """Cut examples into runs of about `PART_TOKENS`; the cuts depend on nothing behind them."""
    part = np.cumsum(lengths) // PART_TOKENS
    borders = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(lengths)]
    return [(first, last) for first, last in pairwise(borders) if first < last]


def _make_build_task(
    work: StageContext,
    frame: PromptFrame,
    plan: TablePlan,
    one: SplitTablePlan,
    numbers: Ints,
    index: RowIndex,
    encoded: Sequence[EncodedPart],
    names: Sequence[str],
    loaded: LoadedTokenizer,
    first: int,
    last: int,
) -> BuildExamplesTask:
    made = one.assembled
    units = made.examples[first : last + 1]
    records = made.units[units[0] : units[-1] + 1]
    places = made.records[records[0] : records[-1]]
    rows = one.rows[places]
    starts = made.record_offsets[first:last]
    if plan.mode == "sequential":
        own = made.records[starts]
        starts = own - one.records.groups[np.searchsorted(one.records.groups, own, "right") - 1]
    arrays: dict[str, NDArray[Any]] = {
        "units": records - records[0],
        "examples": units - units[0],
        "numbers": numbers[first:last],
        "starts": starts,
        "passes": made.passes[first:last],
        "budgets": made.budgets[first:last],
        "flushes": made.flushes[first:last],
    }
    fingerprint = digest_json(
        "examples", VERSION, frame.to_json(), one.split, plan.mode, _identify_records(index, names, rows),
        {name: digest_bytes(values.tobytes()) for name, values in arrays.items()},
    )  # fmt: skip
    return BuildExamplesTask(
        root=work.store.root,
        folder=work.folder,
        fingerprint=fingerprint,
        files=tuple(part.target for part in encoded),
        first_rows=index.first_rows,
        frame=frame,
        split=one.split,
        is_grouped=plan.mode == "grouped",
        rows=rows,
        vocab_size=work.recipe.vocab_size or loaded.card.vocab_size,
        **arrays,
    )


def _identify_records(index: RowIndex, names: Sequence[str], rows: Ints) -> list[object]:
    """Say which records some rows are, by the parts that hold them and their places in these."""
    which = np.searchsorted(index.first_rows, rows, "right") - 1
    used, local = np.unique(which, return_inverse=True)
    places = rows - index.first_rows[which]
    return [
        [names[i] for i in used.tolist()],
        digest_bytes(local.astype(np.int64).tobytes()),
        digest_bytes(places.tobytes()),
    ]


# ── Where generated series begin ───────────────────────────────────────────────────────────────────


PREFILL_SCHEMA = pa.schema(
    [
        pa.field("group_key", pa.string(), nullable=False),
        pa.field("records", pa.list_(pa.string()), nullable=False),
        pa.field("start", pa.string()),
        pa.field("stop", pa.string()),
        pa.field("length", pa.int64(), nullable=False),
    ]
)
"""Per train series, in the order of keys: its first records as they are trained, its first and last time as JSON, and
how many records it has."""


def _write_prefill(
    work: StageContext, known: ObservedTable, frame: PromptFrame, plan: TablePlan, index: RowIndex
) -> list[Part]:
    """Write the initial prefill; under differential privacy there is none, since it publishes records."""
    form = get_table_options(work)
    train = next((one for one in plan.splits if one.split == "train"), None)
    if plan.mode != "sequential" or form.privacy.dp_enabled or train is None:
        return []
    begins, ends = train.records.groups[:-1], train.records.groups[1:]
    wanted = np.concatenate(
        [
            np.append(np.arange(a, min(a + PREFILL_RECORDS, b)), b - 1)
            for a, b in zip(begins.tolist(), ends.tolist(), strict=True)
        ]
    )
    shown = np.unique(train.rows[wanted])
    texts = dict(zip(shown.tolist(), _read_row_column(work, index, shown, "record"), strict=True))
    read = RecordDecoder(known.schema)
    write = Serialiser(known.schema, special_tokens=frame.special_tokens, wire=form.codec.wire)
    lines: list[dict[str, Any]] = []
    for group, first, last in zip(train.groups.tolist(), begins.tolist(), ends.tolist(), strict=True):
        own = train.rows[first:last]
        lines.append(
            {
                "group_key": index.keys[group],
                "records": [_format_as_trained(texts[row], read, write) for row in own[:PREFILL_RECORDS].tolist()],
                "start": _read_record_time(texts[int(own[0])], form.order_column),
                "stop": _read_record_time(texts[int(own[-1])], form.order_column),
                "length": last - first,
            }
        )
    table = pa.Table.from_pylist(lines, schema=PREFILL_SCHEMA)
    fingerprint = digest_json("prefill", VERSION, lines)
    path = f"{work.folder}/parts/{fingerprint}/prefill.parquet"
    return [Part(fingerprint, {"prefill": write_parquet(work.store, path, table)}, {})]


def _format_as_trained(text: str, read: RecordDecoder, write: Serialiser) -> str:
    record = read(read_json(text))
    assert not isinstance(record, RecordProblem), record
    line = write(record)
    assert isinstance(line, str), line
    return line


def _read_record_time(text: str, column: str | None) -> str | None:
    """Return a record's time as the JSON text of its value."""
    if column is None:
        return None
    record: dict[str, Any] = read_json(text)
    value = record.get(column)
    return None if value is None else orjson.dumps(value, default=str).decode()


# ── Adding up ──────────────────────────────────────────────────────────────────────────────────────


def _build_table_output(
    work: StageContext,
    known: ObservedTable,
    frame: PromptFrame,
    plan: TablePlan,
    accounts: list[Part],
    built: list[Part],
    loaded: LoadedTokenizer,
    *,
    reused: int,
    rows_made: int,
) -> StageOutput:
    examples = [part for part in built if "examples" in part.files]
    reasons = sum_counts(p.facts["reasons"] for p in accounts)
    left_out = sum_counts(p.facts["left_out"] for p in accounts)
    rows, kept = (sum(int(p.facts[name]) for p in accounts) for name in ("rows", "kept"))
    by_split = {
        split: sum_counts(p.facts["tokens_by_split"].get(split, {}) for p in examples)
        for split in sorted({str(p.facts["split"]) for p in examples})
    }
    classes = sum_counts(by_split.values())
    ledger = [
        (KEPT, "", kept),
        *((REJECTED, r, n) for r, n in reasons.items()),
        *((s, "", n) for s, n in left_out.items()),
    ]
    made = sum(int(p.facts["examples"]) for p in examples)
    verified, untrained = (sum(int(p.facts[name]) for p in examples) for name in ("verified", "untrained"))
    tokens = sum(classes.get(name, 0) for name in ("trained", "context", "template"))
    planned = sum(told["tokens"] for told in plan.facts["splits"].values())
    altered = sum(int(p.facts["altered"]) for p in accounts)
    of_length = sum(n for r, n in reasons.items() if r.endswith("_overflow"))
    longest = _measure_longest(plan)
    facts = TokenizedExamplesFacts(
        nonempty=made,
        accounted=count_unaccounted(rows, ledger) + abs(tokens - planned) + abs(tokens - _count_expected_tokens(plan)),
        rejects=compute_share(sum(reasons.values()) - of_length, rows),
        mask_verified=compute_share(verified, made) if made else NOT_APPLICABLE,
        zero_loss_rows=compute_share(untrained, made),
        control_strings=compute_share(sum(int(p.facts["escaped"]) for p in accounts), rows),
        text_roundtrip=compute_share(altered, rows),
        prompt_parity=0 if frame.is_parity else 1,
        token_ids=sum(int(p.facts["outside_vocabulary"]) for p in examples),
        rows=rows,
        kept=kept,
        rejected=sum(reasons.values()),
        examples=made,
        tokens=tokens,
        trained_tokens=classes.get("trained", 0),
        trained_share=compute_share(classes.get("trained", 0), tokens),
        usual_way=sum(int(p.facts["usual_way"]) for p in accounts),
        lane_differences=sum(int(p.facts["lane_differences"]) for p in accounts),
        changed_by_wire=plan.changed,
        prompt_tokens=plan.room.prompt,
        limit=plan.room.limit,
        record_room=plan.room.records,
        longest_example=longest["longest_example"],
        longest_group=longest["longest_group"],
        # Records are printed by no chat template.
        render_equal=NOT_APPLICABLE,
        content_dropped=NOT_APPLICABLE,
        contract=NOT_APPLICABLE,
        prompt_match=NOT_APPLICABLE,
        date_pinned=NOT_APPLICABLE,
        short_documents=NOT_APPLICABLE,
    )
    samples = collect_samples(accounts, "examples_of_rejects")
    return StageOutput(
        parts=[*accounts, *built],
        facts=facts,
        ledger=ledger,
        token_ledger=[(split, name, count) for split, own in by_split.items() for name, count in own.items()],
        tables=_build_table_tables(plan, reasons, frame),
        histograms=_draw_length_histograms(plan),
        samples={
            "rejects": describe_rejects({r: n for r, n in reasons.items() if not r.endswith("_overflow")}, samples),
            "text_roundtrip": tuple(i for p in accounts for i in p.facts["altered_rows"])[:10],
        },
        schema=tuple((f.name, str(f.type)) for f in RECORD_EXAMPLES),
        card=_build_table_card(loaded),
        details={"records": _describe_table_model(work, known, frame, plan)},
        parts_reused=reused,
        rows_made=rows_made,
    )


def _count_expected_tokens(plan: TablePlan) -> int:
    """Add up what every token should be: prompts, edges of units, records as often as they are shown."""
    total = 0
    for one in plan.splits:
        units = len(one.assembled.units) - 1
        total += len(one.lengths) * plan.room.prompt + EDGES * units
        total += int(one.records.tokens[one.assembled.records].sum())
    return total


def _measure_longest(plan: TablePlan) -> dict[str, int]:
    """Return what generation is bounded by: the longest example and the longest series of train."""
    train = next((one for one in plan.splits if one.split == "train"), None)
    if train is None:
        return {"longest_example": 0, "longest_group": 0}
    sizes = train.records.group_sizes if plan.mode != "tabular" else np.empty(0, np.int64)
    return {"longest_example": int(train.lengths.max(initial=0)), "longest_group": int(sizes.max(initial=0))}


def _describe_table_model(
    work: StageContext, known: ObservedTable, frame: PromptFrame, plan: TablePlan
) -> dict[str, Any]:
    """Return what parsing and generation read of a dataset."""
    earlier = work.input(CANONICAL_ROWS).details["records"]
    return {
        **earlier,
        "frame": frame.to_json(),
        "wire": get_table_options(work).codec.wire,
        "options": plan.options,
        **_measure_longest(plan),
    }


def _build_table_card(loaded: LoadedTokenizer) -> dict[str, Any]:
    card = loaded.card
    return {
        "tokenizer_digest": card.digest, "tokenizer_files": card.files,
        "vocab_size": card.vocab_size, "bos_id": card.bos_id, "eos_id": card.eos_id, "pad_id": card.pad_id,
        "fast_lane": card.fast, "why_usual_way": card.why_usual, "template_digest": None,
    }  # fmt: skip


def _build_table_tables(plan: TablePlan, reasons: dict[str, int], frame: PromptFrame) -> dict[str, DisplayTable]:
    told = [(name, value) for name, value in plan.options.items() if value is not None and name != "widest_names"]
    overflow = [(one.kind, one.name, one.tokens, one.limit, one.widest) for one in plan.overflows]
    tables = {
        "plan": plan.table(),
        "options": DisplayTable(("option", "value"), tuple((name, str(value)) for name, value in told)),
        "rejects": DisplayTable(("reason", "rows"), tuple(sorted(reasons.items(), key=lambda r: (-r[1], r[0]))[:30])),
    }
    if overflow:
        tables["overflow"] = DisplayTable(("kind", "name", "tokens", "limit", "widest_column"), tuple(overflow[:100]))
    return tables


def _draw_length_histograms(plan: TablePlan) -> dict[str, Histogram]:
    """Draw the tokens of examples and of whole groups, with what an example can hold."""
    drawn: dict[str, Histogram] = {}
    lengths = np.concatenate([np.empty(0, np.int64), *(one.lengths for one in plan.splits)])
    if len(lengths):
        drawn["example_tokens"] = _draw_histogram("tokens per example", lengths, plan.room.limit)
    if plan.mode == "grouped":
        tokens = np.concatenate([np.empty(0, np.int64), *(one.records.group_tokens for one in plan.splits)])
        if len(tokens):
            drawn["group_tokens"] = _draw_histogram("tokens per group", tokens, plan.room.records)
    return drawn


def _draw_histogram(title: str, values: Ints, limit: int) -> Histogram:
    counts, edges = np.histogram(values, bins=24, range=(0, max(int(values.max()), limit) + 1))
    return Histogram(
        title, "tokens", tuple(round(float(e), 1) for e in edges), tuple(int(c) for c in counts), float(limit)
    )
