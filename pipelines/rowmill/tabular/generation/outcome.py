"""The inputs and results of generation."""

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
"""Maximum tokens of a completion, as a multiple of the longest training example."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """What generation needs to know of a model's training data.

    `prompt` is the generation prompt, BOS included; `encode` returns a record's tokens as in training;
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
        """Return the parser of this model's output."""
        return Parser(
            self.schema, self.mode, bos=self.bos, eos=self.eos, place=self.place, validation=options.validation,
            wire=self.wire,
        )  # fmt: skip

    @property
    def prompt_length(self) -> int:
        """Tokens of the generation prompt."""
        return len(self.encode(self.prompt.text) if self.prompt.ids is None else self.prompt.ids)

    def max_tokens(self, available: int) -> int:
        """Return the maximum tokens of a completion, given how many fit into the context."""
        return max(1, min(available, ceil(_LENGTH_MARGIN * self.longest_example)))


@dataclass(frozen=True, slots=True)
class Prefill:
    """Beginning and end of a training group: its typed key, the text of its first records, its times, its length.

    A private series has a `name` instead of a key, because the model writes the key; so has a file that is one series.
    """

    key: Mapping[str, Value]
    texts: tuple[str, ...]
    start: Value = None
    stop: Value = None
    length: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class RejectedObject:
    """A rejected object of generated text, and its source."""

    reason: str
    column: str
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class SeriesOutcome:
    """Outcome of one series; `error` is the backend's last failure, empty if it never failed."""

    source: str
    status: SeriesStatus
    rounds: int
    records: int
    error: str


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """Result of generation.

    `status`: whether no, some or all series failed; for records, whether as many were generated as requested. `counts`
    are items by class, as in `SpanCounts`, over all chosen completions.
    """

    status: Literal["complete", "partial", "failed"]
    records: Sequence[Record]
    rejected: Sequence[RejectedObject]
    counts: Mapping[str, int]
    series: Sequence[SeriesOutcome] = ()
    error: str = ""


@dataclass(slots=True)
class GenerationTally:
    """Items by class, and the rejected objects with their texts."""

    counts: Counter[str] = field(default_factory=Counter[str])
    rejected: list[RejectedObject] = field(default_factory=list[RejectedObject])

    def reject(self, reason: str, text: str, source: str, column: str = "") -> None:
        """Count a rejected object and keep it."""
        self.counts[f"invalid:{reason}"] += 1
        self.rejected.append(RejectedObject(reason, column, text, source))

    def count_rejected_spans(self, parsed: ParsedText, text: str, source: str) -> None:
        """Count a text's spans other than records; the caller counts the records that it accepts."""
        for span in parsed.spans:
            if span.kind == "invalid":
                self.reject(span.reason, text[span.start : span.end], source, span.column)
            elif span.kind in {"prose", "truncated"}:
                self.counts[span.kind] += 1


def is_bad_round(parsed: ParsedText, *, accepted: int, threshold: float) -> bool:
    """Tell whether a round or batch counts against `patience`."""
    objects = parsed.report.valid + parsed.report.invalid
    return not accepted or parsed.report.invalid >= threshold * objects


def is_ended_by_model(completion: Completion) -> bool:
    """Tell whether the model ended the text with EOS, which the server removed."""
    return completion.finish_reason == "stop"
