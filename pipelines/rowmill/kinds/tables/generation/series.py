"""Generation of time series: each group is continued step by step in a sliding window until it ends.

Every series ends. A good round accepts at least one record, and a series has at most C; `patience` consecutive bad
rounds end it; so there are at most `patience` × (C + 1) rounds. Any failure of the backend, exceptions included, is one
bad round of the series in the request.
"""

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Literal

from rowmill.core.permutation import hash_labels
from rowmill.kinds.tables.backends import Completer
from rowmill.kinds.tables.generation.options import Generation
from rowmill.kinds.tables.generation.rounds import (
    SEEDS,
    GenerationResult,
    Prefill,
    RejectedObject,
    SeriesContext,
    SeriesOutcome,
    SeriesState,
    TrainedModel,
    sample_completions,
    start_series,
)
from rowmill.kinds.tables.schema import Record, Value
from rowmill.kinds.tables.serialization import Serialiser


def generate_series(
    completer: Completer,
    prefills: Sequence[Prefill],
    *,
    model: TrainedModel,
    options: Generation,
    start: Value = None,
    stop: Value = None,
    seed: int = 0,
    is_private: bool = False,
    where: str = "generation",
) -> GenerationResult:
    """Generate one series per prefill; the records are returned sorted by group, then time.

    `start` and `stop` apply to all series; None: each group's own. `is_private`: no record, key, time or length of the
    data is used; the series are numbered.

    Raises
    ------
    ConfigError
        If a series' times cannot be read or contradict each other, before any request is sent.

    """
    style: Literal["records", "partial"]
    style = ("partial" if is_private else "records") if options.prefill == "auto" else options.prefill
    serialise = Serialiser(model.schema, special_tokens=model.special_tokens, wire=model.wire)
    if is_private:
        # A private series has only a number (without groups there is one, unnumbered).
        numbers = range(1, len(prefills) + 1)
        prefills = [Prefill({}, (), name=f"series-{i}" if model.place.group_columns else "") for i in numbers]
    shared = SeriesContext(model, options, model.parser(options), serialise, style)
    series = [start_series(prefill, shared, start=start, stop=stop, where=where) for prefill in prefills]
    waiting = [state for state in series if state.status is None]
    while waiting:
        # A request has one temperature, which rises with bad rounds.
        batches: dict[int, list[SeriesState]] = {}
        for state in waiting[: options.parallel_groups]:
            batches.setdefault(state.bad_rounds, []).append(state)
        for batch in batches.values():
            _run_round(completer, batch, model, options, seed)
        waiting = [state for state in waiting if state.status is None]
    return _gather_result(series, options)


def _run_round(
    completer: Completer, batch: Sequence[SeriesState], model: TrainedModel, options: Generation, seed: int
) -> None:
    """Run one round of a batch of series."""
    prompts = [one.prompt() for one in batch]
    answers = sample_completions(
        completer,
        [prompt for prompt, _ in prompts],
        n=options.samples_per_prompt,
        max_tokens=min(tokens for _, tokens in prompts),
        seeds=[hash_labels(seed, "generate", one.source, one.rounds) % SEEDS for one in batch],
        stop=model.eos,
        bad_rounds=batch[0].bad_rounds,
        options=options,
    )
    for one, answer in zip(batch, answers, strict=True):
        if isinstance(answer, Exception):
            one.record_failure(answer)
        else:
            one.add_samples(answer)


def _gather_result(series: Sequence[SeriesState], options: Generation) -> GenerationResult:
    failed = [one for one in series if one.status == "failed"]
    counts: Counter[str] = Counter()
    rejected: list[RejectedObject] = []
    kept: list[SeriesState] = []
    for one in sorted(series, key=_series_sort_key):
        if one.status == "failed" and options.on_failed_group == "drop":
            for text in one.window[len(one.window) - len(one.records) :]:
                one.tally.reject("series_incomplete", text, one.source)
            del one.tally.counts["record"]
        else:
            kept.append(one)
        counts.update(one.tally.counts)
        rejected += one.tally.rejected
    status: Literal["complete", "partial", "failed"] = "complete" if not failed else "partial"
    if failed and len(failed) == len(series):
        status = "failed"
    outcomes = [
        SeriesOutcome(one.source, one.status or "failed", one.rounds, len(one.records), one.error)
        for one in sorted(series, key=_series_sort_key)
    ]
    records = [record for one in kept for record in _replace_series_key(one)]
    return GenerationResult(status, records, rejected, dict(sorted(counts.items())), outcomes)


def _replace_series_key(one: SeriesState) -> list[Record]:
    """Return a series' records, with its number as key if it is private.

    The key that the model wrote may come from the training data: all records of a series have the key, and the unit of
    privacy is a record. The first column of the key that can hold a name or a number is replaced.
    """
    if not one.prefill.name:
        return one.records
    schema = one.shared.trained.schema.by_name
    for name in one.shared.trained.place.group_columns:
        number = one.prefill.name.rpartition("-")[2]
        match schema[name].type:
            case "string" | "json":
                return [{**record, name: one.prefill.name} for record in one.records]
            case "integer":
                return [{**record, name: int(number)} for record in one.records]
            case "float":
                return [{**record, name: float(number)} for record in one.records]
            case "decimal":
                return [{**record, name: Decimal(number)} for record in one.records]
            case _:
                continue
    return one.records


def _series_sort_key(one: SeriesState) -> list[tuple[bool, float, str]]:
    """Sort numbers by value and everything else by its text; a column has one type."""
    return [
        (True, float(value), "") if isinstance(value, int | float) else (False, 0.0, str(value))
        for value in one.prefill.key.values()
    ]
