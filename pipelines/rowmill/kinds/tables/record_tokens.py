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
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.core.arrays import compute_offsets, find_distinct, flatten_lists, make_list_array, read_lists
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.storage import File, Store, digest_json
from rowmill.kinds.tables.counts import EncodedRecordDetails, TableExampleCounts
from rowmill.kinds.tables.options import RecordOptions
from rowmill.kinds.tables.partition_plan import DELIMITERS_PER_UNIT, FLUSHES, PartitionPlan
from rowmill.kinds.tables.partitions import RowIndex, RowPart, read_row_column
from rowmill.kinds.tables.prompt import PromptFrame
from rowmill.kinds.tables.schema import RecordSchema
from rowmill.kinds.tables.serialization import (
    RecordDecoder,
    RecordProblem,
    Serialiser,
    Wire,
    read_json,
)
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
from rowmill.schema.manifest import Part
from rowmill.schema.rows import Rejected
from rowmill.shards import host_scratch
from rowmill.shards.host_scratch import HostScratch
from rowmill.tokenization import encoded_batch
from rowmill.tokenization.encoded_batch import TokenizationCounts
from rowmill.tokenization.reference_sample import ReferenceSample
from rowmill.tokenization.stored_tokenizers import open_encoder
from rowmill.tokenization.tokenizer import Encoder
from rowmill.tokenization.vocabulary import RoundTripDecoder, read_sentencepiece_bytes, read_token_bytes

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
    rows=pa.list_(pa.int64()), units=pa.list_(pa.int64()), number=pa.int64(), record_start=pa.int64(),
    **{"pass": pa.int32()}, budget=pa.int64(), flush=pa.string(),
)  # fmt: skip
"""An example of a run of one split's plan: the rows of its records, counted over all parts of the partition, and the
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
    backend = encoder.loaded.backend
    table = read_token_bytes(backend) if encoder.card.byte_level else read_sentencepiece_bytes(backend)
    return encoder, RoundTripDecoder(table, encoder.decode)


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
    counts = TokenizationCounts(sample=ReferenceSample(inputs.min_compared_chars))
    pieces, altered = _encode_batches(encoder, decoder, texts, counts)
    if counts.engine_differs:
        counts = TokenizationCounts(fast_path_mismatches=counts.fast_path_mismatches)
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
    encoder: Encoder, decoder: RoundTripDecoder, texts: Sequence[str], counts: TokenizationCounts
) -> tuple[list[pa.ListArray], list[int]]:
    """Return the ids of a part's texts, batch by batch, and the places of texts that they do not give back."""
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
        altered += [block.start + place for place in decoder.altered(own, ids, offsets)]
        pieces.append(make_list_array(offsets, ids))
    return pieces, altered


_REGEX_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")
"""Characters with a special meaning in patterns."""


# ── Examples of a slice of the plan ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class BuildExamplesInputs(PartInputs):
    """A slice of a partition's plan, which `slice_fingerprint` identifies with its records, and all its parts."""

    slice_fingerprint: str
    split: str
    is_grouped: bool
    vocab_size: int
    records: int = field(compare=False)
    tokens: int = field(compare=False)
    sources: tuple[RowPart, ...] = field(compare=False)
    piece: File = field(compare=False)
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
    places = span_starts + np.repeat(offsets[:-1], span_counts)
    sizes = np.diff(np.append(places, len(mask)))
    sums = compute_offsets(mask)
    wanted = np.where(kinds == PROMPT, 0, sizes - (span_starts == 0))
    is_wrong = sums[places + sizes] - sums[places] != wanted
    wrong = np.bincount(np.repeat(np.arange(table.num_rows), span_counts)[is_wrong], minlength=table.num_rows) > 0
    wrong |= np.diff(sums[offsets]) != table.column("trained_tokens").to_numpy()
    return int((~wrong).sum())


def _build_examples_table(store: Store, inputs: BuildExamplesInputs) -> pa.Table:
    """Return a slice of the plan as `RECORD_EXAMPLES`."""
    piece, frame = store.table(inputs.piece), inputs.frame
    # Example e has units `[unit_offsets[e], unit_offsets[e + 1])`, unit u records `[firsts[u], firsts[u + 1])`.
    (rows, record_offsets), (unit_sizes, unit_offsets) = (read_lists(piece.column(name)) for name in ("rows", "units"))
    firsts = compute_offsets(unit_sizes)
    wanted, back = np.unique(rows, return_inverse=True)
    first_rows = compute_offsets([source.rows.rows for source in inputs.sources])
    # This host's copies of the parts, after those that it lacks are made.
    used = [inputs.sources[at] for at in find_distinct(np.searchsorted(first_rows, wanted, "right") - 1).tolist()]
    inputs.scratch.require({name_copy(source): partial(copy_part, source, store.root) for source in used})
    copies = [inputs.scratch.locate(name_copy(source)) for source in inputs.sources]
    taken = host_scratch.take_rows(copies, first_rows, wanted)
    ids, offsets = read_lists(taken.column("input_ids"))
    lengths, begins, prompt = np.diff(offsets)[back], offsets[:-1][back], np.array(frame.prompt_ids, np.int32)
    # Where units and records begin in the concatenated examples.
    record_ends = compute_offsets(lengths)
    unit_lengths = np.diff(record_ends[firsts]) + DELIMITERS_PER_UNIT
    unit_ends = compute_offsets(unit_lengths)
    example_lengths = len(prompt) + np.diff(unit_ends[unit_offsets])
    example_offsets = compute_offsets(example_lengths)
    starts, total, examples = example_offsets[:-1], int(example_offsets[-1]), len(example_lengths)
    example_of_unit = np.repeat(np.arange(examples), np.diff(unit_offsets))
    unit_of_record = np.repeat(np.arange(len(unit_lengths)), unit_sizes)
    before = unit_ends[:-1] - unit_ends[unit_offsets[:-1]][example_of_unit]
    unit_starts = starts[example_of_unit] + len(prompt) + before
    inside = record_ends[:-1] - record_ends[firsts[:-1]][unit_of_record]
    record_starts = unit_starts[unit_of_record] + 1 + inside
    # Ids and mask.
    out = np.empty(total, np.int32)
    in_prompt = starts[:, None] + np.arange(len(prompt))
    out[in_prompt] = prompt
    out[unit_starts] = frame.bos_id
    out[unit_starts + unit_lengths - 1] = frame.eos_id
    steps = np.arange(int(record_ends[-1]))
    source_places = steps + np.repeat(begins - record_ends[:-1], lengths)
    out[steps + np.repeat(record_starts - record_ends[:-1], lengths)] = ids[source_places]
    mask = np.ones(total, bool)
    mask[in_prompt] = False
    # No token before an example's first one could predict it.
    mask[starts] = False
    # Spans: prompt, BOS, each record, EOS.
    units, records, prompts = len(unit_starts), len(record_starts), examples if len(prompt) else 0
    numbers = np.arange(records) - record_offsets[:-1][example_of_unit[unit_of_record]]
    span_starts = np.concatenate((starts[:prompts], unit_starts, record_starts, unit_starts + unit_lengths - 1))
    kinds = np.repeat(np.array([PROMPT, TEMPLATE, RECORD, TEMPLATE], np.int8), (prompts, units, records, units))
    messages = np.concatenate((np.full(prompts + units, -1), numbers, np.full(units, -1)))
    order = np.argsort(span_starts, kind="stable")
    span_starts = span_starts[order]
    span_counts = np.diff(np.searchsorted(span_starts, example_offsets))
    span_offsets = compute_offsets(span_counts)
    # Names, keys and counts.
    row_ids = taken.column("row_id").combine_chunks().take(pa.array(back))
    first_places = pa.array(record_offsets[:-1])
    names = row_ids.take(first_places).to_pylist()
    trained = example_lengths - max(len(prompt), 1)
    keys = taken.column("group_key").combine_chunks().take(pa.array(back)).take(pa.array(firsts[:-1]))
    by_unit = unit_offsets if inputs.is_grouped else np.arange(examples + 1)
    # Offsets into the non-null keys: rows without groups have none.
    key_offsets = compute_offsets(pc.is_valid(keys).to_numpy(zero_copy_only=False))
    columns: dict[str, Any] = {
        "example_id": [f"{name}#{k}" for name, k in zip(names, piece.column("number").to_pylist(), strict=True)],
        "row_ids": make_list_array(record_offsets, row_ids),
        "split": [inputs.split] * examples,
        "domain": taken.column("domain").combine_chunks().take(pa.array(back)).take(first_places),
        "input_ids": make_list_array(example_offsets, out),
        "loss_mask": make_list_array(example_offsets, mask),
        "span_starts": make_list_array(span_offsets, (span_starts - np.repeat(starts, span_counts)).astype(np.int32)),
        "span_messages": make_list_array(span_offsets, messages[order].astype(np.int32)),
        "span_kinds": make_list_array(span_offsets, kinds[order]),
        "original_tokens": example_lengths.astype(np.int32),
        "tokens": example_lengths.astype(np.int32),
        "trained_tokens": trained.astype(np.int32),
        "context_tokens": (example_lengths - trained).astype(np.int32),
        "group_keys": make_list_array(key_offsets[by_unit], keys.drop_null()),
        **{name: piece.column(name) for name in ("record_start", "pass", "budget", "flush")},
        "record_stop": pc.add(piece.column("record_start"), pa.array(np.diff(record_offsets))),
    }
    # Nothing is truncated: an example of records is complete, or it is not made.
    nothing = np.zeros(examples, np.int32)
    return pa.table([columns.get(field.name, nothing) for field in RECORD_EXAMPLES], schema=RECORD_EXAMPLES)


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


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """How the records of an initial prefill are written."""

    form: RecordOptions
    schema: RecordSchema
    frame: PromptFrame


def write_prefill(
    store: Store, folder: str, options: PrefillOptions, files: Sequence[File], index: RowIndex, plan: PartitionPlan
) -> list[Part]:
    """Write the initial prefill of a partition; none under differential privacy, since it would publish records.

    `files` are the parts of rows that the index counts.
    """
    form = options.form
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
    shown = find_distinct(train.rows[wanted])
    texts = dict(zip(shown.tolist(), read_row_column(store, files, index, shown, "record"), strict=True))
    read = RecordDecoder(options.schema)
    write = Serialiser(options.schema, special_tokens=options.frame.special_tokens, wire=form.codec.wire)

    def read_time(row: int) -> str | None:
        """Return a record's time as the JSON text of its value."""
        value = None if form.order_column is None else read_json(texts[row]).get(form.order_column)
        return None if value is None else json.dumps(value, default=str, ensure_ascii=False)

    lines: list[dict[str, Any]] = []
    for group, first, last in zip(train.groups.tolist(), begins.tolist(), ends.tolist(), strict=True):
        own = train.rows[first:last]
        records: list[str] = []
        for row in own[:PREFILL_RECORDS].tolist():
            record = read(read_json(texts[row]))
            assert not isinstance(record, RecordProblem), record
            line = write(record)
            assert isinstance(line, str), line
            records.append(line)
        lines.append(
            {
                "group_key": index.keys[group],
                "records": records,
                "start": read_time(int(own[0])),
                "stop": read_time(int(own[-1])),
                "length": last - first,
            }
        )
    table = pa.Table.from_pylist(lines, schema=PREFILL_SCHEMA)
    place = PartPlace(store, folder, digest_json("prefill", VERSION, lines))
    return [Part(place.fingerprint, {"prefill": place.write("prefill", table)}, {})]


PART_TOKENS = 1 << 20
"""Tokens of a part of examples; a worker needs about 20 MB to lay it out."""


def cut_slices(
    plan: PartitionPlan, index: RowIndex, parts: Sequence[RowPart], frame: PromptFrame
) -> Iterator[tuple[tuple[str, str, int, int], pa.Table]]:
    """Yield the plan of each split in slices, each with its fingerprint, split, records and tokens.

    `parts` are those that the index counts.
    """
    first_rows = compute_offsets([part.rows.rows for part in parts])
    for split in plan.splits:
        made = split.assembled
        offsets = made.record_offsets
        which, places = index.locate_rows(split.rows[made.records])
        rows = first_rows[which] + places
        starts = offsets[:-1]
        if plan.mode == "sequential":
            own = made.records[starts]
            starts = own - split.records.groups[np.searchsorted(split.records.groups, own, "right") - 1]
        # In plan order.
        numbers = pl.DataFrame({"row": rows[offsets[:-1]]}).select(pl.int_range(pl.len()).over("row")).to_series()
        columns = [
            make_list_array(offsets, rows),
            make_list_array(made.examples, np.diff(made.units)),
            numbers.to_arrow(),
            starts,
            made.passes.astype(np.int32),
            made.budgets,
            np.array(FLUSHES)[made.flushes],
        ]
        examples = pa.table(columns, schema=SLICE_SCHEMA)
        # Runs of about `PART_TOKENS`; later examples do not affect earlier boundaries.
        part_numbers = np.cumsum(split.lengths) // PART_TOKENS
        borders = [0, *(np.flatnonzero(np.diff(part_numbers)) + 1).tolist(), len(split.lengths)]
        for first, last in pairwise(borders):
            if first == last:
                continue
            piece, records = examples.slice(first, last - first), slice(offsets[first], offsets[last])
            # Rows are identified by the fingerprints of their parts and their places in these.
            used, local = np.unique(which[records], return_inverse=True)
            shown = [[parts[i].fingerprint for i in used.tolist()], local, places[records], piece.drop_columns("rows")]
            fingerprint = digest_json("examples", VERSION, frame.to_json(), split.split, plan.mode, identify(shown))
            yield (fingerprint, split.split, len(local), int(split.lengths[first:last].sum())), piece
