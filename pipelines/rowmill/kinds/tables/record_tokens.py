"""Tokens of a table's records, examples of slices of its plan, and the prefixes of its series.

    rows ──encode_part──► ids of each record, in the store
    plan's slice + ids, in files of this host ──build_part──► prompt BOS record record EOS …  ──► examples.arrow

Each record is encoded separately and once per dataset: passes and examples only decide which ids go where.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.core.arrays import (
    Ints,
    compute_offsets,
    expand_ranges,
    find_distinct,
    flatten_lists,
    make_list_array,
    make_position_ids,
    read_lists,
)
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.storage import File, Store, digest_json
from rowmill.kinds.tables.counts import EncodedRecordDetails, PlanSlice, TableExampleCounts
from rowmill.kinds.tables.options import RecordOptions
from rowmill.kinds.tables.partition_plan import DELIMITERS_PER_UNIT, FLUSHES, ColumnReader, PlannedSplit
from rowmill.kinds.tables.partitions import RowIndex, RowPart
from rowmill.kinds.tables.prompt import PromptFrame
from rowmill.kinds.tables.schema import Mode, RecordSchema
from rowmill.kinds.tables.serialization import RecordDecoder, RecordProblem, Serialiser, Wire, read_json
from rowmill.parts.functions import (
    PartInputs,
    PartPlace,
    PartResult,
    RowFileInputs,
    cut_blocks,
    identify,
    part_function,
)
from rowmill.schema.example_counts import TOKEN_COLUMNS, ControlStringCounts, ExampleCounts, JoinedExampleDetails
from rowmill.schema.examples import EXAMPLE_SCHEMA, SPAN_KINDS
from rowmill.schema.rows import Rejected
from rowmill.shards import host_scratch
from rowmill.shards.host_scratch import HostScratch
from rowmill.tokenization import encoded_batch
from rowmill.tokenization.encoded_batch import PartTally
from rowmill.tokenization.reference_sample import ReferenceSample
from rowmill.tokenization.stored_tokenizers import open_encoder
from rowmill.tokenization.tokenizer import Encoder
from rowmill.tokenization.vocabulary import RoundTripDecoder

BATCH_CHARS = 1 << 20
"""Characters of records that are encoded at once."""

_ROW_COLUMNS = ("row_id", "domain", "group_key")
"""The columns of rows that examples have, too."""


def name_copy(part: RowPart) -> str:
    """Return the name of the copy that a host makes of a part, for taking records in any order."""
    return f"{part.rows.digest}-{part.tokens.digest}.arrow"


def copy_part(part: RowPart, root: str, target: str) -> None:
    """Write ids and rows of a part side by side as a scratch file."""
    store = Store(root)
    rows, ids = store.table(part.rows, _ROW_COLUMNS), store.table(part.tokens, ("input_ids",))
    host_scratch.write_scratch_file(rows.add_column(0, "input_ids", ids.column(0)), target)


SLICE_SCHEMA = make_required_schema(
    rows=pa.list_(pa.int64()), unit_records=pa.list_(pa.int64()), number=pa.int64(), record_start=pa.int64(),
    **{"pass": pa.int32()}, budget=pa.int64(), flush=pa.string(),
)  # fmt: skip
"""An example of a slice of one split's plan: the rows of its records, counted over all parts of the partition, and the
number of records of each of its units; `number` counts the examples that begin with the same row."""


PROMPT, RECORD, TEMPLATE = (SPAN_KINDS.index(name) for name in ("prompt", "record", "template"))


RECORD_EXAMPLES = pa.schema(
    [
        *EXAMPLE_SCHEMA,
        pa.field("group_keys", pa.list_(pa.string()), nullable=False),
        pa.field("record_start", pa.int64(), nullable=False),
        pa.field("record_stop", pa.int64(), nullable=False),
        pa.field("pass", pa.int32(), nullable=False),
        pa.field("budget", pa.int64(), nullable=False),
        pa.field("flush", pa.string(), nullable=False),
    ]
)
"""A part of `tokenized_examples` of records: an example's groups, its records, and why it ended.

`record_start` and `record_stop` index a series' records in its order, other records in the order of their split and
partition.
"""


_TOKENS_SCHEMA = make_required_schema(input_ids=pa.list_(pa.int32()), length=pa.int32())
"""Stored ids of a part of rows; `length` is −1 for a rejected row, so that planning reads no ids."""


VERSION = 6
"""Increase it when any row may get different ids or a different example, or facts are counted differently."""


# ── Texts to ids ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class EncodeInputs(RowFileInputs):
    """A part of rows to encode; the ids do not depend on the plan, so a build that ends in planning keeps them."""

    versions: tuple[int, ...]
    tokenizer_digest: str
    schema: str
    wire: Wire
    special_tokens: tuple[str, ...]
    tokenizer: str = field(compare=False)
    """The tokenizer's file in the store."""
    min_compared_chars: int = field(compare=False)


@lru_cache(maxsize=2)
def _open_codec(root: str, path: str) -> tuple[Encoder, RoundTripDecoder]:
    encoder = open_encoder(root, path)
    return encoder, RoundTripDecoder(encoder.read_token_bytes(), encoder.decode)


@part_function(version=2)
def encode_part(inputs: EncodeInputs, place: PartPlace) -> PartResult:
    """Encode a part's records and store their ids; a rejected one has an empty list, and its reason in the details."""
    rows = place.store.table(inputs.rows, ("record", "row_id"))
    encoder, decoder = _open_codec(place.store.root, inputs.tokenizer)
    # The lossless text is the row's own except for special tokens, which are rare and found in one pass.
    records = rows.column("record")
    texts: list[str] = [f"{text}\n" for text in records.to_pylist()]
    schema = RecordSchema.from_json(orjson.loads(inputs.schema))
    write = Serialiser(schema, special_tokens=inputs.special_tokens, wire=inputs.wire)
    read, reread = RecordDecoder(schema), RecordDecoder(schema, wire=inputs.wire)
    rejects: list[tuple[int, str, str]] = []
    changed = 0
    # Which records contain the text of a special token.
    special = np.zeros(len(records), bool)
    if inputs.special_tokens:
        # A pattern of all texts finds any of them in a single pass; RE2 compiles it to one automaton.
        pattern = "|".join(_REGEX_SPECIAL.sub(r"\\\g<0>", text) for text in inputs.special_tokens)
        special = pc.match_substring_regex(records, pattern).to_numpy(zero_copy_only=False)
    again = range(len(records)) if inputs.wire == "reference" else np.flatnonzero(special).tolist()
    for number in again:
        record = read(read_json(texts[number]))
        assert not isinstance(record, RecordProblem), record
        line = write(record)
        if isinstance(line, Rejected):
            rejects.append((number, line.reason, line.detail))
            texts[number] = ""
            continue
        texts[number] = line
        changed += inputs.wire == "reference" and reread(read_json(line)) != record
    counts = PartTally(sample=ReferenceSample(inputs.min_compared_chars))
    pieces, altered = _encode_batches(encoder, decoder, texts, counts)
    if counts.engine_differs:
        counts = PartTally(fast_path_mismatches=counts.fast_path_mismatches)
        pieces, altered = _encode_batches(encoder.without_fast_path(), decoder, texts, counts)
    ids = pa.chunked_array(pieces, _TOKENS_SCHEMA.field("input_ids").type)
    lengths = pc.list_value_length(ids).to_numpy(zero_copy_only=False).astype(np.int32)
    lengths[[number for number, _, _ in rejects]] = -1
    samples = tuple(rows.column("row_id").take(pa.array(altered[:3], pa.int64())).to_pylist())
    return PartResult(
        {"tokens": place.write("tokens", pa.table([ids, lengths], schema=_TOKENS_SCHEMA))},
        counts=(
            ExampleCounts(
                altered_texts=len(altered),
                reference_path_texts=counts.reference_path_texts,
                fast_path_mismatches=counts.fast_path_mismatches,
            ),
            ControlStringCounts(searched_rows=rows.num_rows, rows_with_control_strings=int(special.sum())),
            TableExampleCounts(changed_by_wire=changed, samples_of_altered={"": samples} if samples else {}),
        ),
        details=(EncodedRecordDetails(rejects=tuple(rejects)),),
    )


def _encode_batches(
    encoder: Encoder, decoder: RoundTripDecoder, texts: Sequence[str], counts: PartTally
) -> tuple[list[pa.ListArray], list[int]]:
    """Return the ids of a part's texts, batch by batch, and the numbers of texts that they do not give back."""
    pieces, altered = list[pa.ListArray](), list[int]()
    for block in cut_blocks([len(text) for text in texts], BATCH_CHARS) if texts else ():
        own = texts[block.start : block.stop]
        if encoder.card.fast:
            encoded = encoded_batch.encode_and_compare(encoder, own, counts, continuation=True)
            counts.reference_path_texts += encoded.reference_texts
            ids, offsets = encoded.ids, encoded.offsets
        else:
            counts.reference_path_texts += len(own)
            ids, offsets = encoder.encode_continuation_ids(own)
        altered += [block.start + number for number in decoder.altered(own, ids, offsets)]
        pieces.append(make_list_array(offsets, ids))
    return pieces, altered


_REGEX_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")
"""Characters with a special meaning in patterns."""


# ── Examples of a slice of the plan ────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class BuildExamplesInputs(PartInputs):
    """A slice of a partition's plan, which `slice_fingerprint` identifies with its records, and all its parts."""

    slice_fingerprint: str
    split: str
    vocab_size: int
    records: int = field(compare=False)
    tokens: int = field(compare=False)
    sources: tuple[RowPart, ...] = field(compare=False)
    plan_file: File = field(compare=False)
    frame: PromptFrame = field(compare=False)
    scratch: HostScratch = field(compare=False)

    @property
    def input_rows(self) -> int:
        return self.records

    @property
    def input_bytes(self) -> int:
        """About the size of the ids."""
        return 4 * self.tokens


@part_function(version=2)
def build_part(inputs: BuildExamplesInputs, place: PartPlace) -> PartResult:
    """Gather the records of a slice of the plan and write them as examples."""
    table = _build_examples_table(place.store, inputs)
    classes = {name: int(table.column(column).to_numpy().sum()) for name, column in TOKEN_COLUMNS.items()}
    # The source parts of the first rows of examples, which lineage names.
    parts = pc.replace_substring_regex(table.column("example_id"), ":[^:]*$", "")
    return PartResult(
        {"examples": place.write("examples", table)},
        counts=(
            ExampleCounts(
                examples=table.num_rows,
                tokens_by_split={inputs.split: dict(sorted({**classes, "truncated": 0}.items()))},
                verified_examples=count_verified(table),
                rows_to_train=table.num_rows,
                untrained_rows=int((table.column("trained_tokens").to_numpy() == 0).sum()),
                ids_outside_vocabulary=encoded_batch.count_outside_vocabulary(table, inputs.vocab_size),
            ),
            TableExampleCounts(flushes=dict(sorted(Counter(table.column("flush").to_pylist()).items()))),
        ),
        details=(JoinedExampleDetails(split=inputs.split, source_parts=tuple(sorted(pc.unique(parts).to_pylist()))),),
    )


def count_verified(table: pa.Table) -> int:
    """Count the examples whose every token is trained except the prompt and the first token.

    Checked against the stored spans, which are computed independently of the mask, and against the stored count.
    """
    mask, offsets = read_lists(table.column("loss_mask"))
    span_starts, span_offsets = read_lists(table.column("span_starts"))
    kinds = flatten_lists(table.column("span_kinds"))
    span_counts = np.diff(span_offsets)
    positions = span_starts + np.repeat(offsets[:-1], span_counts)
    sizes = np.diff(np.append(positions, len(mask)))
    sums = compute_offsets(mask)
    wanted = np.where(kinds == PROMPT, 0, sizes - (span_starts == 0))
    is_wrong = sums[positions + sizes] - sums[positions] != wanted
    wrong = np.bincount(np.repeat(np.arange(table.num_rows), span_counts)[is_wrong], minlength=table.num_rows) > 0
    wrong |= np.diff(sums[offsets]) != table.column("trained_tokens").to_numpy()
    return int((~wrong).sum())


@dataclass(frozen=True, slots=True, eq=False)
class TokenOffsets:
    """Where everything of E examples, U units and R records is in the joined tokens of the examples.

        prompt BOS r0 r1 EOS BOS r2 EOS │ prompt BOS r3 EOS
        │      │   │  │  │              └ example_first_token[1]
        │      │   │  │  └ eos_token[0]
        │      │   │  └ record_first_token[1]
        │      │   └ record_first_token[0]
        │      └ bos_token[0]
        └ example_first_token[0]

    `example_first_token` int64[E + 1] ends with the number of tokens.
    """

    example_first_token: Ints
    bos_token: Ints
    record_first_token: Ints
    eos_token: Ints

    @classmethod
    def of(
        cls, record_tokens: Ints, unit_first_record: Ints, example_first_unit: Ints, prompt_tokens: int
    ) -> "TokenOffsets":
        """Return the offsets of examples in which a prompt precedes units, each with BOS, its records, and EOS."""
        units, examples = np.arange(len(unit_first_record) - 1), np.arange(len(example_first_unit))
        # Before a token are the records before its own, and the prompts and delimiters of all units up to its own.
        tokens_before = compute_offsets(record_tokens)
        example_of_unit = np.repeat(examples[:-1], np.diff(example_first_unit))
        before_unit = prompt_tokens * (example_of_unit + 1) + DELIMITERS_PER_UNIT * units
        before_example = prompt_tokens * examples + DELIMITERS_PER_UNIT * example_first_unit
        return cls(
            example_first_token=tokens_before[unit_first_record[example_first_unit]] + before_example,
            bos_token=tokens_before[unit_first_record[:-1]] + before_unit,
            record_first_token=tokens_before[:-1] + 1 + np.repeat(before_unit, np.diff(unit_first_record)),
            eos_token=tokens_before[unit_first_record[1:]] + 1 + before_unit,
        )


def _build_examples_table(store: Store, inputs: BuildExamplesInputs) -> pa.Table:
    """Return a slice of the plan as `RECORD_EXAMPLES`."""
    planned, frame = store.table(inputs.plan_file), inputs.frame
    rows, example_first_record = read_lists(planned.column("rows"))
    unit_records, example_first_unit = read_lists(planned.column("unit_records"))
    unit_first_record = compute_offsets(unit_records)
    # A record that is shown more than once is read once; record r of the slice is row `taken_row[r]` of what is read.
    distinct_rows, taken_row = np.unique(rows, return_inverse=True)
    taken = _take_rows(store, inputs, distinct_rows)
    taken_ids, taken_first_token = read_lists(taken.column("input_ids"))
    record_tokens, prompt_tokens = np.diff(taken_first_token)[taken_row], len(frame.prompt_ids)
    offsets = TokenOffsets.of(record_tokens, unit_first_record, example_first_unit, prompt_tokens)
    # Ids and mask.
    example_first_token = offsets.example_first_token
    first_tokens, example_tokens = example_first_token[:-1], np.diff(example_first_token)
    prompt_positions = first_tokens[:, None] + np.arange(prompt_tokens)
    ids = np.empty(int(example_first_token[-1]), np.int32)
    ids[prompt_positions] = np.array(frame.prompt_ids, np.int32)
    ids[offsets.bos_token] = frame.bos_id
    ids[offsets.eos_token] = frame.eos_id
    taken_positions = expand_ranges(taken_first_token[:-1][taken_row], record_tokens)
    ids[expand_ranges(offsets.record_first_token, record_tokens)] = taken_ids[taken_positions]
    mask = np.ones(len(ids), bool)
    mask[prompt_positions] = False
    # No token before an example's first one could predict it.
    mask[first_tokens] = False
    trained_tokens = example_tokens - max(prompt_tokens, 1)
    # Names and keys: an example is called after its first record, and rows without groups have no key.
    chosen, numbers = pa.array(taken_row), planned.column("number").to_pylist()
    row_ids = taken.column("row_id").combine_chunks().take(chosen)
    first_records = pa.array(example_first_record[:-1])
    first_row_ids = row_ids.take(first_records).to_pylist()
    unit_keys = taken.column("group_key").combine_chunks().take(chosen).take(pa.array(unit_first_record[:-1]))
    key_offsets = compute_offsets(pc.is_valid(unit_keys).to_numpy(zero_copy_only=False))[example_first_unit]
    columns: dict[str, Any] = {
        "example_id": [f"{row_id}#{k}" for row_id, k in zip(first_row_ids, numbers, strict=True)],
        "row_ids": make_list_array(example_first_record, row_ids),
        "split": [inputs.split] * len(example_tokens),
        "domain": taken.column("domain").combine_chunks().take(chosen).take(first_records),
        "input_ids": make_list_array(example_first_token, ids),
        "loss_mask": make_list_array(example_first_token, mask),
        **_list_spans(offsets, example_first_record, has_prompt=prompt_tokens > 0),
        "original_tokens": example_tokens.astype(np.int32),
        "tokens": example_tokens.astype(np.int32),
        "trained_tokens": trained_tokens.astype(np.int32),
        "context_tokens": (example_tokens - trained_tokens).astype(np.int32),
        "group_keys": make_list_array(key_offsets, unit_keys.drop_null()),
        **{name: planned.column(name) for name in ("record_start", "pass", "budget", "flush")},
        "record_stop": pc.add(planned.column("record_start"), pa.array(np.diff(example_first_record))),
    }
    # Nothing is truncated: an example of records is complete, or it is not made.
    nothing = np.zeros(len(example_tokens), np.int32)
    return pa.table([columns.get(field.name, nothing) for field in RECORD_EXAMPLES], schema=RECORD_EXAMPLES)


def _take_rows(store: Store, inputs: BuildExamplesInputs, rows: Ints) -> pa.Table:
    """Return the ids and `_ROW_COLUMNS` of distinct, ascending rows from this host's copies of their parts."""
    part_first_row = compute_offsets([source.rows.rows for source in inputs.sources])
    parts = find_distinct(np.searchsorted(part_first_row, rows, "right") - 1)
    used = [inputs.sources[part] for part in parts.tolist()]
    inputs.scratch.require({name_copy(source): partial(copy_part, source, store.root) for source in used})
    copies = [inputs.scratch.locate(name_copy(source)) for source in inputs.sources]
    return host_scratch.take_rows(copies, part_first_row, rows)


def _list_spans(offsets: TokenOffsets, example_first_record: Ints, *, has_prompt: bool) -> dict[str, pa.Array]:
    """Return the columns of spans: of each example its prompt, and of each unit BOS, every record, and EOS."""
    example_first_token, units = offsets.example_first_token, len(offsets.bos_token)
    prompts = example_first_token[:-1] if has_prompt else example_first_token[:0]
    starts = np.concatenate((prompts, offsets.bos_token, offsets.record_first_token, offsets.eos_token))
    sizes = (len(prompts), units, len(offsets.record_first_token), units)
    kinds = np.repeat(np.array([PROMPT, TEMPLATE, RECORD, TEMPLATE], np.int8), sizes)
    # A record's number in its example, as that of a message in its conversation.
    messages = np.full(len(starts), -1)
    messages[kinds == RECORD] = make_position_ids(np.diff(example_first_record))
    order = np.argsort(starts, kind="stable")
    span_first = np.searchsorted(starts[order], example_first_token)
    in_example = starts[order] - np.repeat(example_first_token[:-1], np.diff(span_first))
    return {
        "span_starts": make_list_array(span_first, in_example.astype(np.int32)),
        "span_messages": make_list_array(span_first, messages[order].astype(np.int32)),
        "span_kinds": make_list_array(span_first, kinds[order]),
    }


# ── The initial prefill of generated series ────────────────────────────────────────────────────────


PREFILL_RECORDS = 3


PREFILL_SCHEMA = pa.schema(
    [
        pa.field("group_key", pa.string(), nullable=False),
        pa.field("records", pa.list_(pa.string()), nullable=False),
        pa.field("start", pa.string()),
        pa.field("stop", pa.string()),
        pa.field("length", pa.int64(), nullable=False),
    ]
)
"""Per training series of a partition, in the order of keys: its first records as trained, its first and last time as
JSON, and its number of records."""


def list_prefills(
    form: RecordOptions,
    schema: RecordSchema,
    frame: PromptFrame,
    splits: Sequence[PlannedSplit],
    index: RowIndex,
    read_column: ColumnReader,
) -> pa.Table | None:
    """Return the initial prefills of a partition; none under differential privacy, since it would publish records."""
    train = next((split for split in splits if split.records.split == "train"), None)
    if form.mode != "sequential" or form.privacy.dp_enabled or train is None:
        return None
    series = np.split(train.records.rows, train.records.group_first_record[1:-1])
    shown = find_distinct(np.concatenate([np.append(rows[:PREFILL_RECORDS], rows[-1]) for rows in series]))
    texts = dict(zip(shown.tolist(), read_column(shown, "record"), strict=True))
    read, write = RecordDecoder(schema), Serialiser(schema, special_tokens=frame.special_tokens, wire=form.codec.wire)

    def write_record(row: int) -> str:
        """Return a record as it is trained."""
        record = read(read_json(texts[row]))
        assert not isinstance(record, RecordProblem), record
        line = write(record)
        assert isinstance(line, str), line
        return line

    def read_time(row: int) -> str | None:
        """Return a record's time as the JSON text of its value."""
        value = None if form.order_column is None else read_json(texts[row]).get(form.order_column)
        return None if value is None else json.dumps(value, default=str, ensure_ascii=False)

    lines = [
        {
            "group_key": index.keys[key],
            "records": [write_record(row) for row in rows[:PREFILL_RECORDS].tolist()],
            "start": read_time(int(rows[0])),
            "stop": read_time(int(rows[-1])),
            "length": len(rows),
        }
        for key, rows in zip(train.records.group_keys.tolist(), series, strict=True)
    ]
    return pa.Table.from_pylist(lines, schema=PREFILL_SCHEMA)


# ── The plan in slices ─────────────────────────────────────────────────────────────────────────────


PART_TOKENS = 1 << 20
"""Tokens of a part of examples; a worker needs about 20 MB to lay it out."""


def cut_slices(
    splits: Sequence[PlannedSplit], mode: Mode, index: RowIndex, parts: Sequence[RowPart], frame: PromptFrame
) -> Iterator[tuple[PlanSlice, pa.Table]]:
    """Yield the plan of each split in slices of about `PART_TOKENS`, as `SLICE_SCHEMA`, with what identifies each.

    `parts` are those that the index counts.
    """
    import polars as pl

    part_first_row = compute_offsets([part.rows.rows for part in parts])
    for plan in splits:
        records, first_place = plan.records, plan.example_first_place
        part_at, row_in_part = index.locate_rows(records.rows[plan.order.records])
        rows = part_first_row[part_at] + row_in_part
        record_start = first_place[:-1]
        if mode == "sequential":
            first_record = plan.order.records[record_start]
            record_start = first_record - records.group_first_record[records.find_groups(first_record)]
        # In plan order.
        numbers = pl.DataFrame({"row": rows[first_place[:-1]]}).select(pl.int_range(pl.len()).over("row")).to_series()
        columns = [
            make_list_array(first_place, rows),
            make_list_array(plan.example_first_unit, np.diff(plan.unit_first_place)),
            numbers.to_arrow(),
            record_start,
            plan.passes.astype(np.int32),
            plan.budget_tokens,
            np.array(FLUSHES)[plan.flushes],
        ]
        planned = pa.table(columns, schema=SLICE_SCHEMA)
        # Later examples do not affect earlier borders.
        borders = np.flatnonzero(np.diff(np.cumsum(plan.example_tokens) // PART_TOKENS)) + 1
        for first, end in pairwise([0, *borders.tolist(), len(planned)]):
            if first == end:
                continue
            own, places = planned.slice(first, end - first), slice(first_place[first], first_place[end])
            # Rows are identified by the fingerprints of their parts and their numbers in these.
            used, local = np.unique(part_at[places], return_inverse=True)
            shown = [
                [parts[i].fingerprint for i in used.tolist()],
                local,
                row_in_part[places],
                own.drop_columns("rows"),
            ]
            fingerprint = digest_json("examples", VERSION, frame.to_json(), records.split, mode, identify(shown))
            tokens = int(plan.example_tokens[first:end].sum())
            yield PlanSlice(fingerprint, records.split, len(local), tokens), own
