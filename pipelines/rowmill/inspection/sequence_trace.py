"""Traces a sequence, or one of its tokens, from the shards back to the rows and sources."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from rowmill.build.steps import Project
from rowmill.core.errors import ConfigError, IntegrityError, suggest_name
from rowmill.core.number_text import format_count
from rowmill.inspection.lineage import (
    Lineage,
    RowOrigin,
    SegmentLocation,
    filter_rows,
    find_origin,
    load_lineage,
    load_order,
    locate_segments,
)
from rowmill.inspection.trace import find_example_files
from rowmill.schema import manifest
from rowmill.schema.examples import SPAN_KINDS, WEIGHT_COLUMN
from rowmill.schema.rows import parse_row_id
from rowmill.shards.segment_padding import drop_padding
from rowmill.stages.packed_shards import stage as packed_shards
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.tokenization import tokenizer_card
from rowmill.tokenization.encoder import Encoder

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
    shard = project.store.table(part.files["shard"]).slice(sequence - int(part.facts["first_sequence"]), 1)
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
    example = _load_example(lineage, place.example_id)
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


def _load_example(lineage: Lineage, example_id: str) -> dict[str, Any]:
    part_id = example_id.split("#", 1)[0].rpartition(":")[0]
    index = next(i for i, part in enumerate(lineage.parts) if part.part_id == part_id)
    columns = ("example_id", "span_starts", "span_messages", "span_kinds")
    tables = (lineage.project.store.table(file, columns) for file in find_example_files(lineage, index))
    return next(one for table in tables for one in filter_rows(table, "example_id", example_id))


def _open_encoder(lineage: Lineage) -> Encoder:
    """Open the tokenizer that the examples were made with; the storage keeps every one that was used."""
    store, wanted = lineage.project.store, lineage.made[tokenized_examples.STAGE.name].card["tokenizer_digest"]
    for name in store.list("tokenizers"):
        # A damaged one is as good as none.
        with suppress(ValueError):
            loaded = tokenizer_card.deserialize_tokenizer(store.read(f"tokenizers/{name}"))
            if loaded.card.digest == wanted:
                return Encoder(loaded)
    raise IntegrityError(
        f"{store.path('tokenizers')}: the tokenizer of these shards is missing; every build keeps its tokenizer there; "
        "run rowmill build"
    )
