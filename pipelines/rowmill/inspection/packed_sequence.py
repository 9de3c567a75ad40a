"""One packed sequence with everything that training reads of it, token by token.

ids        9707  11 151645 198 │ 151644 872 …      a segment per example
labels     9707  11 151645 −100 │ −100 −100 …      unshifted, −100 where no loss is taken
positions     0   1      2   3 │      0   1 …      begin anew in each segment
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.build.steps import Project
from rowmill.inspection.lineage import Lineage, SegmentLocation, load_lineage, locate_segments
from rowmill.inspection.trace import find_example_files
from rowmill.schema import manifest
from rowmill.schema.examples import IGNORED_LABEL, SPAN_KINDS, WEIGHT_COLUMN
from rowmill.shards.segment_padding import drop_padding
from rowmill.stages.packed_shards import stage as packed_shards
from rowmill.tokenization.encoder import Encoder

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
    shard = project.store.table(parts[0].files["shard"])
    at = choose_sequence(shard.column("starts")[:CANDIDATES].to_pylist())
    row: dict[str, Any] = drop_padding(shard.slice(at, 1)).to_pylist()[0]
    sequence = at + int(parts[0].facts["first_sequence"])
    places = [place for _, place in locate_segments(lineage, parts[0], sequence, None)]
    shown = [place for place in places if place.offset < max_tokens]
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
        texts=[text for place in shown for text in decode_each(encoder, _slice_segment(ids, place))],
        kinds=[SPAN_KINDS[kind] for kind in kinds[: len(ids)]],
        messages=messages[: len(ids)],
        segments=shown,
        weights=row[WEIGHT_COLUMN][:max_tokens] if WEIGHT_COLUMN in row else (),
    )


def choose_sequence(starts: Sequence[Sequence[int]]) -> int:
    """Return the first sequence with about `WANTED_SEGMENTS` segments that begin where their examples do."""

    def measure_distance(at: int) -> tuple[int, int]:
        return abs(len(starts[at]) - WANTED_SEGMENTS) + sum(start > 0 for start in starts[at]), at

    return min(range(len(starts)), key=measure_distance)


def _slice_segment(ids: Sequence[int], location: SegmentLocation) -> Sequence[int]:
    return ids[location.offset : location.offset + location.length]


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
    by_part: dict[str, set[str]] = {}
    for name in names:
        by_part.setdefault(name.split("#", 1)[0].rpartition(":")[0], set()).add(name)
    found: dict[str, dict[str, Any]] = {}
    for index, part in enumerate(lineage.parts):
        for file in find_example_files(lineage, index) if part.part_id in by_part else ():
            wanted = names - set(found)
            if wanted:
                found |= {span["example_id"]: span for span in _read_spans(lineage, file, wanted)}
    return found


def _read_spans(lineage: Lineage, file: manifest.File, names: set[str]) -> list[dict[str, Any]]:
    table = lineage.project.store.table(file, ("example_id", "span_starts", "span_messages", "span_kinds"))
    return table.filter(pc.is_in(table.column("example_id"), pa.array(sorted(names), pa.string()))).to_pylist()
