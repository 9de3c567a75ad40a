"""Packed sequences: one with everything that training reads of it, and one traced back to its rows and sources.

ids        9707  11 151645 198 │ 151644 872 …      a segment per example
labels     9707  11 151645 −100 │ −100 −100 …      unshifted, −100 where no loss is taken
positions     0   1      2   3 │      0   1 …      begin anew in each segment, or go on where examples share prefixes
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.build.steps import Project
from rowmill.core.arrays import compute_offsets, format_count, join_facts
from rowmill.core.errors import ConfigError, IntegrityError, suggest_name
from rowmill.core.segment_trees import list_paths, sum_over_ancestors
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
from rowmill.shards.prefix_trees import ExampleTrees
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


# ── Examples that share segments ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TreeSegment:
    """A segment of a tree: its tokens begin at `offset` in the sequence and at `position` in each of its examples.

    `parent` is the segment that it continues, -1 for none; `trained_tokens` counts those that an example trains.
    """

    parent: int
    offset: int
    position: int
    length: int
    trained_tokens: int
    examples: range
    """The examples that hold it, which are neighbors in their sequence."""


@dataclass(frozen=True, slots=True)
class TreeExample:
    """An example of a tree: the segments from the root to its last one, and what it trains.

    `targets` are runs of equal weight: the position of the first token, the number of tokens, the weight of each.
    """

    example_id: str
    tokens: int
    segments: tuple[int, ...]
    targets: tuple[tuple[int, int, float], ...]

    def find_weight(self, position: int) -> float | None:
        """Return the weight with which it trains the token at a position; None if it does not."""
        return next((weight for first, count, weight in self.targets if first <= position < first + count), None)


@dataclass(frozen=True, slots=True)
class SequenceTree:
    """The segments and the examples of a sequence whose examples share prefixes, in the order of the shard."""

    segments: tuple[TreeSegment, ...]
    examples: tuple[TreeExample, ...]


def read_tree(sequence: pa.Table) -> SequenceTree | None:
    """Return the tree of a sequence, one row of a shard; None if its examples share no segments."""
    if PARENTS_COLUMN not in sequence.column_names:
        return None
    trees = ExampleTrees.of(sequence)
    is_trained, _ = trees.sum_targets()
    offsets = compute_offsets(trees.lengths)
    owners, examples, _ = trees.list_memberships()
    borders = np.searchsorted(owners, np.arange(len(trees.lengths) + 1))
    segments = zip(
        trees.parents.tolist(),
        offsets[:-1].tolist(),
        sum_over_ancestors(trees.parents, trees.lengths).tolist(),
        trees.lengths.tolist(),
        np.add.reduceat(is_trained, offsets[:-1], dtype=np.int64).tolist(),
        [range(min(own), max(own) + 1) for own in np.split(examples, borders[1:-1])],
        strict=True,
    )
    paths, path_offsets = list_paths(trees.parents, trees.ends)
    tokens = np.diff(trees.list_example_tokens()[1])
    targets = trees.targets
    runs = list(zip(targets.starts.tolist(), targets.lengths.tolist(), targets.weights.tolist(), strict=True))
    ids: list[str] = sequence.column("example_ids")[0].as_py()
    return SequenceTree(
        segments=tuple(starmap(TreeSegment, segments)),
        examples=tuple(
            TreeExample(
                example_id=name,
                tokens=int(tokens[at]),
                segments=tuple(paths[path_offsets[at] : path_offsets[at + 1]].tolist()),
                targets=tuple(runs[targets.offsets[at] : targets.offsets[at + 1]]),
            )
            for at, name in enumerate(ids)
        ),
    )


# ── One sequence with all that training reads of it ────────────────────────────────────────────────


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
    tree: SequenceTree | None = None
    """What its examples share; None in recipes without `packing.share_prefixes`."""

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
    return _view_row(lineage, parts[0], shard.slice(at, 1), at, encoder, max_tokens)


def view_traced_sequence(project: Project, trace: "SequenceTrace") -> SequenceTokens:
    """Return all tokens of a sequence that was traced."""
    lineage = load_lineage(project, trace.dataset)
    part = _find_shard_part(lineage, trace.split, trace.sequence, "")
    at = trace.sequence - int(part.facts["first_sequence"])
    shard = read_sequences(project.store, part.files["shard"])
    return _view_row(lineage, part, shard.slice(at, 1), at, _open_encoder(lineage), trace.tokens)


def _view_row(
    lineage: Lineage, part: manifest.Part, shard_row: pa.Table, at: int, encoder: Encoder, max_tokens: int
) -> SequenceTokens:
    table = drop_padding(shard_row)
    row: dict[str, Any] = table.to_pylist()[0]
    tree = read_tree(table)
    sequence = at + int(part.facts["first_sequence"])
    # A segment that several examples share is shown as part of the first of them.
    places = {place.segment: place for _, place in reversed([*locate_segments(lineage, part, sequence, None)])}
    shown = [places[segment] for segment in sorted(places) if places[segment].offset < max_tokens]
    kinds, messages = _join_spans(lineage, shown)
    ids = row["input_ids"][:max_tokens]
    texts: list[str] = []
    for place in shown:
        parent = -1 if tree is None else tree.segments[place.segment].parent
        end = 0 if parent < 0 else places[parent].offset + places[parent].length
        before = ids[max(end - CONTEXT_TOKENS, places[parent].offset) : end] if end else []
        texts += decode_each(encoder, ids[place.offset : place.offset + place.length], before)
    return SequenceTokens(
        dataset=lineage.dataset,
        split=str(part.facts["split"]),
        sequence=sequence,
        tokens=len(row["input_ids"]),
        ids=ids,
        labels=row["labels"][:max_tokens],
        positions=row["position_ids"][:max_tokens],
        texts=texts,
        kinds=[SPAN_KINDS[kind] for kind in kinds[: len(ids)]],
        messages=messages[: len(ids)],
        segments=shown,
        weights=row[WEIGHT_COLUMN][:max_tokens] if WEIGHT_COLUMN in row else (),
        tree=tree,
    )


def choose_sequence(starts: Sequence[Sequence[int]]) -> int:
    """Return the first sequence with about `WANTED_SEGMENTS` segments that begin where their examples do."""

    def measure_distance(at: int) -> tuple[int, int]:
        return abs(len(starts[at]) - WANTED_SEGMENTS) + sum(start > 0 for start in starts[at]), at

    return min(range(len(starts)), key=measure_distance)


def decode_each(encoder: Encoder, ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    """Return the text of each token; of a character that spans several, all of it at the last of them.

    A token is decoded behind some tokens before it, since decoding it alone would lose the space that SentencePiece
    strips from a beginning. `context` are tokens before all of them.
    """
    texts: list[str] = []
    joined = [*context, *ids]
    for at in range(len(context), len(joined)):
        first = max(0, at - CONTEXT_TOKENS)
        before, both = (encoder.decode(joined[first:end]).rstrip("\ufffd") for end in (at, at + 1))
        texts.append(both[len(before) :] if at > first else both)
    return texts


def describe_segment(sequence: SequenceTokens, place: SegmentLocation) -> str:
    """Say which segment it is, what it continues, and of which examples it is."""
    count = format_count(place.length, "token")
    if sequence.tree is None:
        cut = f"from its token {place.start:,}" if place.start else ""
        return join_facts([f"segment {place.segment}", place.example_id, count, cut])
    segment = sequence.tree.segments[place.segment]
    continued = f"continues segment {segment.parent}" if segment.parent >= 0 else ""
    holding = [sequence.tree.examples[number].example_id for number in segment.examples]
    others = f"shared by {format_count(len(holding), 'example')}" if len(holding) > 1 else ""
    positions = f"positions {format_range(segment.position, segment.length)}"
    return join_facts([f"segment {place.segment}", continued, holding[0], others, count, positions])


def format_range(first: int, count: int) -> str:
    """Format neighboring numbers: `3 to 7`, or `3`."""
    return str(first) if count == 1 else f"{first} to {first + count - 1}"


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

    `weight` is its loss weight; None if the recipe has no weights. If examples share it, `position` is where it is in
    each of them.
    """

    at: int
    position: int
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
    tree: SequenceTree | None = None
    """What its examples share; None in recipes without `packing.share_prefixes`."""


def trace_sequence(project: Project, place: str) -> SequenceTrace:
    """Trace `DATASET/SPLIT/N`, or one token of it with `:TOKEN`, to the source.

    Raises ConfigError if there is no such dataset, sequence or token.
    """
    dataset, split, sequence, token = _parse_sequence_place(project, place)
    lineage = load_lineage(project, dataset)
    part = _find_shard_part(lineage, split, sequence, place)
    order, note = load_order(lineage)
    named = list(locate_segments(lineage, part, sequence, order))
    shard = read_sequences(project.store, part.files["shard"]).slice(sequence - int(part.facts["first_sequence"]), 1)
    table = drop_padding(shard)
    row = table.to_pylist()[0]
    if token is not None and token >= row["tokens"]:
        raise ConfigError(
            f"--sequence {place}: the sequence has {row['tokens']} tokens; expected a token from 0 to "
            f"{row['tokens'] - 1}; name one of them"
        )
    numbered = {one.part_id: one for one in lineage.parts}
    # A segment is named once for each example that holds it, and a row may have many of both.
    records = {name: parse_row_id(name) for name, _ in named}
    found = {name: find_origin(lineage, numbered[part_id], at) for name, (part_id, at) in records.items()}
    return SequenceTrace(
        dataset=dataset,
        split=split,
        sequence=sequence,
        tokens=row["tokens"],
        trained_tokens=row["trained_tokens"],
        places=tuple(place for _, place in named),
        origins=tuple(found[name] for name, _ in named),
        token=None if token is None else _trace_token(lineage, row, [place for _, place in named], token),
        order_note=note,
        tree=read_tree(table),
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
        position=row["position_ids"][at],
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
