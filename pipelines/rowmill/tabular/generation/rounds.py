"""State of one series during generation: its window, its bound, and the effect of each round of samples.

generation prompt │ r4 │ r5 │ r6 │  ──model──►  r7 r8 bad …
                   └─ context_records           └──┴─ accepted: they follow r6
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from rowmill.core.errors import ConfigError
from rowmill.schema.rows import Rejected
from rowmill.tabular.backends import Completion, PromptText
from rowmill.tabular.generation.options import Generation
from rowmill.tabular.generation.outcome import (
    GenerationTally,
    Prefill,
    SeriesStatus,
    TrainedModel,
    is_bad_round,
    is_ended_by_model,
)
from rowmill.tabular.generation.sampling import describe_error
from rowmill.tabular.parsing import ParsedText, Parser
from rowmill.tabular.schema import Record, RecordSchema, Value
from rowmill.tabular.serialization import RecordDecoder, RecordProblem, Serialiser, read_json, serialise_record
from rowmill.tabular.time_order import DAY, Position


@dataclass(frozen=True, slots=True)
class SeriesContext:
    """What all series of a run share."""

    trained: TrainedModel
    options: Generation
    parser: Parser
    serialise: Serialiser
    style: Literal["records", "partial"]


@dataclass(slots=True)
class SeriesState:
    """A series: `window` holds the texts of its records so far, `opening` is the given start of its first record.

    `position` is the last record's, `stop` the position where the series ends, `bound` the maximum number of records,
    `key` the values of the group columns; None until the model wrote them.
    """

    shared: SeriesContext
    prefill: Prefill
    source: str
    window: list[str]
    opening: str
    position: Position | None
    stop: Position | None
    bound: int
    key: Mapping[str, Value] | None
    records: list[Record] = field(default_factory=list[Record])
    tally: GenerationTally = field(default_factory=GenerationTally)
    rounds: int = 0
    bad_rounds: int = 0
    has_passed_stop: bool = False
    error: str = ""

    @property
    def status(self) -> SeriesStatus | None:
        """How the series ended; None while it is running."""
        if self._is_at_stop:
            return "completed"
        if len(self.records) >= self.bound:
            return "capped"
        return "failed" if self.bad_rounds >= self.shared.options.patience else None

    @property
    def _is_at_stop(self) -> bool:
        if self.stop is None or self.position is None:
            return False
        interval = self.shared.trained.place.interval
        following = self.position if interval is None else self.position + interval
        return self.has_passed_stop or self.position >= self.stop or following > self.stop

    def prompt(self) -> tuple[PromptText, int]:
        """Return the prompt of the next round, and the maximum tokens of its completions."""
        trained = self.shared.trained
        context = self.window[-self.shared.options.context_records :]
        lengths = [len(trained.encode(text)) for text in context]
        opening = trained.encode(self.opening) if self.opening else ()
        available = trained.max_seq_length - trained.prompt_length - len(opening) - sum(lengths)
        # The context is shortened until another record of its largest size, and EOS, would fit after it.
        while len(lengths) > 1 and available <= max(lengths):
            available += lengths.pop(0)
        context = context[len(context) - len(lengths) :]
        ids = trained.prompt.ids
        if ids is not None:
            ids = (*ids, *(token for text in context for token in trained.encode(text)), *opening)
        return PromptText(f"{trained.prompt.text}{''.join(context)}{self.opening}", ids), trained.max_tokens(available)

    def record_failure(self, error: Exception) -> None:
        """Count a round in which the backend failed."""
        self.rounds += 1
        self.bad_rounds += 1
        self.error = describe_error(error)

    def add_samples(self, samples: Sequence[Completion]) -> None:
        """Choose the sample with the most valid records, and append those up to stop and bound."""
        self.rounds += 1
        texts = [self.opening + sample.text for sample in samples]
        parsed = [
            self.shared.parser(text, closed_at_end=is_ended_by_model(sample), group=self.key, after=self.position)
            for text, sample in zip(texts, samples, strict=True)
        ]
        chosen = max(range(len(parsed)), key=lambda index: len(parsed[index].records))
        for index, one in enumerate(parsed):
            if index != chosen and (objects := one.report.valid + one.report.invalid):
                self.tally.counts["invalid:not_chosen"] += objects
        self.tally.count_rejected_spans(parsed[chosen], texts[chosen], self.source)
        accepted = self._append_records(parsed[chosen])
        threshold = self.shared.options.invalid_fraction_threshold
        bad = is_bad_round(parsed[chosen], accepted=accepted, threshold=threshold)
        self.bad_rounds = self.bad_rounds + 1 if bad else 0

    def _append_records(self, parsed: ParsedText) -> int:
        """Append records up to stop and bound; return how many were appended."""
        before = len(self.records)
        for index, record in enumerate(parsed.records):
            text = self._format_record(record)
            position = parsed.positions[index] if parsed.positions else None
            if self.stop is not None and position is not None and position > self.stop:
                self.has_passed_stop = True
                self.tally.reject("past_stop", text, self.source)
            elif len(self.records) >= self.bound:
                self.tally.reject("past_bound", text, self.source)
            else:
                self.records.append(record)
                self.window.append(text)
                self.tally.counts["record"] += 1
                self.position = position
                self.opening = ""
                if self.key is None:
                    self.key = {name: record[name] for name in self.shared.trained.place.group_columns}
        return len(self.records) - before

    def _format_record(self, record: Record) -> str:
        """Format a record as in training, however the model formatted it."""
        line = self.shared.serialise(record)
        if isinstance(line, Rejected):
            # A model may write escapes that the reference format cannot.
            trained = self.shared.trained
            line = serialise_record(record, trained.schema, special_tokens=trained.special_tokens)
            assert isinstance(line, str), "a decoded record can be serialized"
        return line


# ── Beginnings ─────────────────────────────────────────────────────────────────────────────────────


def start_series(prefill: Prefill, shared: SeriesContext, *, start: Value, stop: Value, where: str) -> SeriesState:
    """Return a series before its first round; `start` and `stop` override the group's own unless None.

    Raises
    ------
    ConfigError
        If its times cannot be read, or it would stop before it starts.

    """
    trained = shared.trained
    source = _name_series(prefill, trained.schema)
    first = prefill.start if start is None else start
    started = _read_boundary(trained, first, f"{where}: start_timestamp", source)
    texts = list(prefill.texts) if shared.style == "records" else []
    position = _read_last_position(trained, texts, source, where)
    stopped = _resolve_stop(trained, prefill, started, stop, where, source)
    before = _find_previous_position(trained, started, position)
    # Group columns come first in a record: without a key, no part of it can be prefilled.
    has_key = bool(prefill.key) or not trained.place.group_columns
    opening = _write_opening(trained, prefill, first, f"{where}: start_timestamp") if has_key and not texts else ""
    return SeriesState(
        shared, prefill, source, texts, opening, position if has_key else before, stopped,
        _bound_records(shared, before, stopped), prefill.key if has_key else None,
    )  # fmt: skip


def _find_previous_position(
    model: TrainedModel, started: Position | None, position: Position | None
) -> Position | None:
    """Return the position of the record before the first generated one, real or hypothetical."""
    if position is not None or started is None or model.place.interval is None:
        return position
    return started - model.place.interval


def _bound_records(shared: SeriesContext, before: Position | None, stop: Position | None) -> int:
    """Return the maximum records of a series; every good round adds at least one, so the series ends."""
    if shared.options.max_records_per_group != "auto":
        return shared.options.max_records_per_group
    interval = shared.trained.place.interval
    if interval is None or stop is None or before is None:
        return 2 * shared.trained.longest_group
    return max(0, int((stop - before) // interval))


def _resolve_stop(
    model: TrainedModel, prefill: Prefill, started: Position | None, stop: Value, where: str, source: str
) -> Position | None:
    order, interval = model.place.order, model.place.interval
    if order is None or not order.is_time:
        return None
    if order.is_time_of_day and stop is None and started is not None and interval is not None and prefill.length:
        # The group's end may be days after what its time of day says.
        return started + (prefill.length - 1) * interval
    stopped = _read_boundary(model, prefill.stop if stop is None else stop, f"{where}: stop_timestamp", source)
    if started is None or stopped is None or stopped >= started:
        return stopped
    if order.is_time_of_day:
        return stopped + DAY
    raise ConfigError(
        f"{where}: series {source} would stop at {prefill.stop if stop is None else stop!r}, before it starts; "
        "correct start_timestamp or stop_timestamp"
    )


def _read_boundary(model: TrainedModel, value: Value, where: str, source: str) -> Position | None:
    """Return the position of a start or stop, or None without one."""
    place = model.place
    if value is None or place.order is None:
        return None
    position = place.order.read(Decimal(repr(value)) if isinstance(value, float) else value)
    if position is None:
        raise ConfigError(
            f"{where}: {value!r} of series {source} cannot be read as {place.order.name}; write it like the values of "
            f"column {place.order_column!r}, or correct time_series.timestamp_format"
        )
    return position


def _read_last_position(model: TrainedModel, texts: Sequence[str], source: str, where: str) -> Position | None:
    """Return the position of the prefill's last record."""
    place = model.place
    if place.order is None or place.order_column is None or not texts:
        return None
    read = RecordDecoder(model.schema, wire=model.wire)
    values: list[Value] = []
    for text in texts:
        record = read(read_json(text))
        values.append(None if isinstance(record, RecordProblem) else record.get(place.order_column))
    position = place.order.read_series(values)[-1]
    if position is None:
        raise ConfigError(
            f"{where}: prefill of series {source}: the time of its last record cannot be read; build "
            "tokenized_examples again"
        )
    return position


def _write_opening(model: TrainedModel, prefill: Prefill, start: Value, where: str) -> str:
    """Return the start of a series' first record, with its group key and start time."""
    place = model.place
    names = [*place.group_columns, *([place.order_column] if place.order_column and start is not None else [])]
    if not names:
        return ""
    known = RecordSchema(tuple(model.schema.by_name[name] for name in names))
    given: Record = dict(prefill.key)
    if place.order_column is not None and place.order_column in names:
        given[place.order_column] = _convert_value(known, place.order_column, start, model, where)
    line = Serialiser(known, special_tokens=model.special_tokens, wire=model.wire)(given)
    if isinstance(line, Rejected):
        raise ConfigError(f"{where}: the start of a series cannot be written ({line.detail}); correct it")
    return line.removesuffix("}\n") + ("," if len(model.schema.columns) > len(names) else "}\n")


def _convert_value(known: RecordSchema, name: str, value: Value, model: TrainedModel, where: str) -> Value:
    """Convert a value of the recipe to its column's type."""
    decoded = Decimal(repr(value)) if isinstance(value, float) else value
    record = RecordDecoder(RecordSchema((known.by_name[name],)))({name: decoded})
    if isinstance(record, RecordProblem):
        raise ConfigError(
            f"{where}: {value!r} is not of type {known.by_name[name].type}, as column {name!r} is; correct it"
        )
    return record[name]


def _name_series(prefill: Prefill, schema: RecordSchema) -> str:
    """Name a series by its key as JSON."""
    if not prefill.key:
        return prefill.name or "(the only one)"
    line = Serialiser(RecordSchema(tuple(schema.by_name[name] for name in prefill.key)), special_tokens=())(prefill.key)
    return repr(prefill.key) if isinstance(line, Rejected) else line.strip()
