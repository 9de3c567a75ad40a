"""Packed sequences: one with everything that training reads of it, and one traced back to its rows and sources.

ids        9707  11 151645 198 │ 151644 872 …      a segment per example
labels     9707  11 151645 −100 │ −100 −100 …      unshifted, −100 where no loss is taken
positions     0   1      2   3 │      0   1 …      begin anew in each segment
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.build.steps import Project
from rowmill.core.arrays import format_count
from rowmill.core.errors import ConfigError, IntegrityError, suggest_name
from rowmill.inspection.trace import (
    Lineage,
    RowOrigin,
    SegmentLocation,
    find_example_files,
    find_origin,
    load_lineage,
    load_order,
    locate_segments,
)
from rowmill.schema import manifest
from rowmill.schema.examples import IGNORED_LABEL, SPAN_KINDS, WEIGHT_COLUMN
from rowmill.schema.indexed_shards import read_sequences
from rowmill.schema.rows import PARENTS_COLUMN, parse_row_id
from rowmill.shards.native import drop_padding
from rowmill.stages.packed_shards import stage as packed_shards
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.tokenization import tokenizer
from rowmill.tokenization.tokenizer import Encoder

CANDIDATES = 64
"""Sequences at the beginning of a split among which one is chosen."""
WANTED_SEGMENTS = 3
"""Segments of the sequence that shows most: several, and none of them tiny."""
CONTEXT_TOKENS = 8
"""Tokens before one that are decoded with it: a character may span several tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceTokens:
    """A sequence by columns, one entry per token: `texts` concatenate to the decoded text of a segment.

    `messages` is −1 for text of the template; `weights` is empty if the recipe has none. Of a long sequence only the
    first tokens are held; `tokens` counts all.
    """

    dataset: str
    split: str
    sequence: int
    tokens: int
    ids: Sequence[int]
    labels: Sequence[int]
    positions: Sequence[int]
    texts: Sequence[str]
    kinds: Sequence[str]
    messages: Sequence[int]
    segments: Sequence[SegmentLocation]
    weights: Sequence[float] = field(default=())
    parents: Sequence[int] = field(default=())
    """The segment that each segment continues, if examples share prefixes; -1 for none."""

    @property
    def trained(self) -> Sequence[bool]:
        """Whether the loss is taken at each token."""
        return [label != IGNORED_LABEL for label in self.labels]


def view_sequence(project: Project, dataset: str, encoder: Encoder, *, max_tokens: int) -> SequenceTokens | None:
    """Return a sequence of a dataset's current shards, at most its first tokens; None if it has no shards."""
    lineage = load_lineage(project, dataset)
    packed = lineage.made.get(packed_shards.STAGE.name)
    parts = [part for part in (packed.parts if packed else ()) if "shard" in part.files and part.files["shard"].rows]
    if not parts:
        return None
    shard = read_sequences(project.store, parts[0].files["shard"])
    at = choose_sequence(shard.column("starts")[:CANDIDATES].to_pylist())
    row: dict[str, Any] = drop_padding(shard.slice(at, 1)).to_pylist()[0]
    sequence = at + int(parts[0].facts["first_sequence"])
    # A segment that several examples share is shown as part of the first of them.
    places = {place.segment: place for _, place in reversed([*locate_segments(lineage, parts[0], sequence, None)])}
    shown = [places[segment] for segment in sorted(places) if places[segment].offset < max_tokens]
    kinds, messages = _join_spans(lineage, shown)
    ids = row["input_ids"][:max_tokens]
    return SequenceTokens(
        dataset=dataset,
        split=str(parts[0].facts["split"]),
        sequence=sequence,
        tokens=len(row["input_ids"]),
        ids=ids,
        labels=row["labels"][:max_tokens],
        positions=row["position_ids"][:max_tokens],
        texts=[
            text for place in shown for text in decode_each(encoder, ids[place.offset : place.offset + place.length])
        ],
        kinds=[SPAN_KINDS[kind] for kind in kinds[: len(ids)]],
        messages=messages[: len(ids)],
        segments=shown,
        weights=row[WEIGHT_COLUMN][:max_tokens] if WEIGHT_COLUMN in row else (),
        parents=row.get(PARENTS_COLUMN, ()),
    )


def choose_sequence(starts: Sequence[Sequence[int]]) -> int:
    """Return the first sequence with about `WANTED_SEGMENTS` segments that begin where their examples do."""

    def measure_distance(at: int) -> tuple[int, int]:
        return abs(len(starts[at]) - WANTED_SEGMENTS) + sum(start > 0 for start in starts[at]), at

    return min(range(len(starts)), key=measure_distance)


def decode_each(encoder: Encoder, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; of a character that spans several, all of it at the last of them.

    A token is decoded behind some tokens before it, since decoding it alone would lose the space that SentencePiece
    strips from a beginning.
    """
    texts: list[str] = []
    for at in range(len(ids)):
        first = max(0, at - CONTEXT_TOKENS)
        before, both = (encoder.decode(ids[first:end]).rstrip("\ufffd") for end in (at, at + 1))
        texts.append(both[len(before) :] if at > first else both)
    return texts


def _join_spans(lineage: Lineage, places: Sequence[SegmentLocation]) -> tuple[list[int], list[int]]:
    """Return the span kind and the message of every token of some segments."""
    examples = _load_spans(lineage, {place.example_id for place in places})
    kinds: list[int] = []
    messages: list[int] = []
    for place in places:
        one = examples[place.example_id]
        tokens = np.arange(place.start, place.start + place.length)
        spans = np.searchsorted(one["span_starts"], tokens, "right") - 1
        kinds += np.array(one["span_kinds"])[spans].tolist()
        messages += np.array(one["span_messages"])[spans].tolist()
    return kinds, messages


def _load_spans(lineage: Lineage, names: set[str]) -> Mapping[str, dict[str, Any]]:
    """Read the spans of some examples; each file that may hold one of them is read once."""
    part_ids = {name.split("#", 1)[0].rpartition(":")[0] for name in names}
    found: dict[str, dict[str, Any]] = {}
    for index, part in enumerate(lineage.parts):
        for file in find_example_files(lineage, index) if part.part_id in part_ids else ():
            wanted = pa.array(sorted(names - set(found)), pa.string())
            if len(wanted):
                table = lineage.project.store.table(file, ("example_id", "span_starts", "span_messages", "span_kinds"))
                spans = table.filter(pc.is_in(table.column("example_id"), wanted)).to_pylist()
                found |= {span["example_id"]: span for span in spans}
    return found


# ── Back to rows and sources ───────────────────────────────────────────────────────────────────────


NEIGHBOR_TOKENS = 12
"""Tokens shown on each side of a traced one."""


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """One token of a sequence: `at` is its index in the sequence, `in_example` its index in the tokenized example.

    `weight` is its loss weight; None if the recipe has no weights.
    """

    at: int
    token_id: int
    text: str
    before: str
    after: str
    trained: bool
    weight: float | None
    kind: str
    message: int
    in_example: int


@dataclass(frozen=True, slots=True)
class SequenceTrace:
    """A sequence: its segments, the origin of each, and one traced token if requested."""

    dataset: str
    split: str
    sequence: int
    tokens: int
    trained_tokens: int
    places: tuple[SegmentLocation, ...]
    origins: tuple[RowOrigin, ...]
    token: TokenTrace | None = None
    order_note: str = ""
    parents: Sequence[int] = ()
    """The segment that each segment continues, if examples share prefixes; -1 for none."""


def trace_sequence(project: Project, place: str) -> SequenceTrace:
    """Trace `DATASET/SPLIT/N`, or one token of it with `:TOKEN`, to the source.

    Raises
    ------
    ConfigError
        If there is no such dataset, sequence or token.

    """
    dataset, split, sequence, token = _parse_sequence_place(project, place)
    lineage = load_lineage(project, dataset)
    part = _find_shard_part(lineage, split, sequence, place)
    order, note = load_order(lineage)
    named = list(locate_segments(lineage, part, sequence, order))
    shard = read_sequences(project.store, part.files["shard"]).slice(sequence - int(part.facts["first_sequence"]), 1)
    row = drop_padding(shard).to_pylist()[0]
    if token is not None and token >= row["tokens"]:
        raise ConfigError(
            f"--sequence {place}: the sequence has {row['tokens']} tokens; expected a token from 0 to "
            f"{row['tokens'] - 1}; name one of them"
        )
    numbered = {one.part_id: one for one in lineage.parts}
    origins = [find_origin(lineage, numbered[part_id], at) for part_id, at in (parse_row_id(name) for name, _ in named)]
    return SequenceTrace(
        dataset=dataset,
        split=split,
        sequence=sequence,
        tokens=row["tokens"],
        trained_tokens=row["trained_tokens"],
        places=tuple(place for _, place in named),
        origins=tuple(origins),
        token=None if token is None else _trace_token(lineage, row, [place for _, place in named], token),
        order_note=note,
        parents=row.get(PARENTS_COLUMN, ()),
    )


def _parse_sequence_place(project: Project, place: str) -> tuple[str, str, int, int | None]:
    words, _, at = place.partition(":")
    pieces = words.split("/")
    if len(pieces) != 3 or not pieces[2].isdecimal() or (at and not at.isdecimal()):
        raise ConfigError(
            f"--sequence {place}: expected DATASET/SPLIT/N or DATASET/SPLIT/N:TOKEN, such as chats/train/12:40"
        )
    dataset, split, sequence = pieces
    if dataset not in project.recipe.datasets:
        known = project.recipe.datasets
        guess = suggest_name(dataset, known)
        hint = f"did you mean {guess}?" if guess else "name one of them"
        raise ConfigError(f"--sequence {place}: no dataset {dataset}; there are {', '.join(known)}; {hint}")
    return dataset, split, int(sequence), int(at) if at else None


def _find_shard_part(lineage: Lineage, split: str, sequence: int, place: str) -> manifest.Part:
    packed = lineage.made.get(packed_shards.STAGE.name)
    counts: dict[str, int] = {}
    for part in (part for part in (packed.parts if packed else ()) if "shard" in part.files):
        first, count = int(part.facts["first_sequence"]), int(part.facts["sequences"])
        counts[part.facts["split"]] = first + count
        if part.facts["split"] == split and first <= sequence < first + count:
            return part
    splits = ", ".join(f"{name} with {format_count(count, 'sequence')}" for name, count in counts.items()) or "none"
    raise ConfigError(
        f"--sequence {place}: no such sequence; {lineage.dataset} has the splits {splits}; "
        "name one of these; sequences count from 0"
    )


def _trace_token(lineage: Lineage, row: Mapping[str, Any], places: Sequence[SegmentLocation], at: int) -> TokenTrace:
    """Look up the span and message of one token of a sequence in its example."""
    place = next(one for one in places if one.offset <= at < one.offset + one.length)
    example = _load_spans(lineage, {place.example_id})[place.example_id]
    in_example = place.start + at - place.offset
    span = int(np.searchsorted(example["span_starts"], in_example, "right")) - 1
    first, last = max(place.offset, at - NEIGHBOR_TOKENS), min(place.offset + place.length, at + NEIGHBOR_TOKENS + 1)
    before, text, after = _decode_neighbors(_open_encoder(lineage), row["input_ids"][first:last], at - first)
    return TokenTrace(
        at=at,
        token_id=row["input_ids"][at],
        text=text,
        before=before,
        after=after,
        trained=row["labels"][at] >= 0,
        weight=row[WEIGHT_COLUMN][at] if WEIGHT_COLUMN in row else None,
        kind=SPAN_KINDS[example["span_kinds"][span]],
        message=example["span_messages"][span],
        in_example=in_example,
    )


def _decode_neighbors(encoder: Encoder, ids: Sequence[int], at: int) -> tuple[str, str, str]:
    """Decode a token with its neighbours; return the text before, of and after the token."""
    text = encoder.decode(ids)
    edges = [len(encoder.decode(ids[:end]).rstrip("\ufffd")) for end in (at, at + 1)]
    return text[: edges[0]], text[edges[0] : edges[1]], text[edges[1] :]


def _open_encoder(lineage: Lineage) -> Encoder:
    """Open the tokenizer that the examples were made with; the storage keeps every one that was used."""
    store, wanted = lineage.project.store, lineage.made[tokenized_examples.STAGE.name].card["tokenizer_digest"]
    for name in store.list("tokenizers"):
        # A damaged one is as good as none.
        with suppress(ValueError):
            loaded = tokenizer.deserialize_tokenizer(store.read(f"tokenizers/{name}"))
            if loaded.card.digest == wanted:
                return Encoder(loaded)
    raise IntegrityError(
        f"{store.path('tokenizers')}: the tokenizer of these shards is missing; every build keeps its tokenizer there; "
        "run rowmill build"
    )
