"""What generating needs to know of the training, and what it gives back.

What belongs here: plain values. What does not: asking a model.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from rowmill.tabular.backends import Completion, PromptText
from rowmill.tabular.generation.options import Generation
from rowmill.tabular.parsing import ParsedText, Parser, PlacementColumns
from rowmill.tabular.schema import Mode, Record, RecordSchema, Value
from rowmill.tabular.serialization import Wire

SeriesStatus = Literal["completed", "capped", "failed"]
_LENGTH_MARGIN = 1.2
"""Tokens that a completion may have, as a multiple of the longest training example's."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """What a model was trained on, as far as asking it for more needs it.

    `prompt` is the generation prompt, BOS included; `encode` gives a record's tokens as they stood in training;
    `longest_example` is in tokens, `longest_group` in records.
    """

    mode: Mode
    schema: RecordSchema
    place: PlacementColumns
    prompt: PromptText
    bos: str
    eos: str
    special_tokens: tuple[str, ...]
    wire: Wire
    max_seq_length: int
    longest_example: int
    longest_group: int
    encode: Callable[[str], Sequence[int]]

    def parser(self, options: Generation) -> Parser:
        """Return the parser of this model's texts."""
        return Parser(
            self.schema, self.mode, bos=self.bos, eos=self.eos, place=self.place, validation=options.validation,
            wire=self.wire,
        )  # fmt: skip

    @property
    def prompt_length(self) -> int:
        """Tokens of the generation prompt."""
        return len(self.encode(self.prompt.text) if self.prompt.ids is None else self.prompt.ids)

    def max_tokens(self, room: int) -> int:
        """Return the tokens that a completion may have where so many fit."""
        return max(1, min(room, ceil(_LENGTH_MARGIN * self.longest_example)))


@dataclass(frozen=True, slots=True)
class Prefill:
    """How a training group begins and ends: its typed key, its first records as trained on, its times, its length.

    A private series has a `name` in place of a key, for the model writes a key of its own; so has a file that is a
    series by itself.
    """

    key: Mapping[str, Value]
    texts: tuple[str, ...]
    start: Value = None
    stop: Value = None
    length: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class RejectedObject:
    """An object of generated text that is no record of the output, and where it came from."""

    reason: str
    column: str
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class SeriesOutcome:
    """How one series went: `error` is the last failure of the backend, empty if it never failed."""

    source: str
    status: SeriesStatus
    rounds: int
    records: int
    error: str


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What generating gave.

    `status`: no, some or all of the series failed; for records, whether as many came as were wanted. `counts` are
    items by class, as in `parsing.Report`, over all that was looked at.
    """

    status: Literal["complete", "partial", "failed"]
    records: Sequence[Record]
    refused: Sequence[RejectedObject]
    counts: Mapping[str, int]
    series: Sequence[SeriesOutcome] = ()
    error: str = ""


@dataclass(slots=True)
class GenerationTally:
    """Items by class, and the refused objects' own texts."""

    counts: Counter[str] = field(default_factory=Counter[str])
    refused: list[RejectedObject] = field(default_factory=list[RejectedObject])

    def refuse(self, reason: str, text: str, source: str, column: str = "") -> None:
        """Count an object that is no record of the output, and keep it."""
        self.counts[f"invalid:{reason}"] += 1
        self.refused.append(RejectedObject(reason, column, text, source))

    def count_rejected_spans(self, parsed: ParsedText, text: str, source: str) -> None:
        """Count a text's spans that are no records; records are counted by who accepts them."""
        for span in parsed.spans:
            if span.kind == "invalid":
                self.refuse(span.reason, text[span.start : span.end], source, span.column)
            elif span.kind in {"prose", "truncated"}:
                self.counts[span.kind] += 1


def is_bad_round(parsed: ParsedText, *, accepted: int, threshold: float) -> bool:
    """Tell whether a round or batch counts against the patience."""
    objects = parsed.report.valid + parsed.report.invalid
    return not accepted or parsed.report.invalid >= threshold * objects


def is_ended_by_model(completion: Completion) -> bool:
    """Tell whether the model ended a text itself: the server ate the EOS."""
    return completion.finish_reason == "stop"
