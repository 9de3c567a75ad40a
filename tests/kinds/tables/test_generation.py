"""Generation of series and records with scripted models: what is accepted and rejected, and that it ends."""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.errors import ConfigError, GenerationError
from rowmill.kinds.tables.generation import (
    CallableCompleter,
    Completion,
    Generation,
    GenerationResult,
    OpenAIBackend,
    OpenAICompleter,
    Prefill,
    PromptText,
    TrainedModel,
    generate_records,
    generate_series,
)
from rowmill.kinds.tables.parsing import PlacementColumns
from rowmill.kinds.tables.schema import ELAPSED, ISO8601, TIME_OF_DAY, Column, Mode, RecordSchema, SortKey
from tests.support.completions_server import Reply, serving

BOS, EOS = "<s>", "</s>"
PROMPT = f"g, t, v\n{BOS}"
HOUR = 3600
Texts = Callable[[list[str], int], list[list[str]]]


def line(g: str, t: Any, v: int = 1) -> str:
    return json.dumps({"g": g, "t": t, "v": v}, separators=(",", ":")) + "\n"


def clock(hour: int) -> str:
    return f"{hour:02d}:00"


def trained(
    order: SortKey | None = TIME_OF_DAY, interval: Any = HOUR, mode: Mode = "sequential", **changed: Any
) -> TrainedModel:
    """Describe a model of columns g, t, v whose tokens are bytes."""
    kind = "string" if order in (TIME_OF_DAY, ISO8601) else "decimal" if isinstance(interval, Decimal) else "integer"
    given: dict[str, Any] = {
        "mode": mode,
        "schema": RecordSchema((Column("g", "string"), Column("t", kind), Column("v", "integer"))),
        "place": PlacementColumns(("g",), "t" if order else None, order, interval),
        "prompt": PromptText(PROMPT),
        "bos": BOS,
        "eos": EOS,
        "special_tokens": (BOS, EOS),
        "wire": "lossless",
        "max_seq_length": 1000,
        "longest_example": 330,
        "longest_group": 10,
        "encode": lambda text: list(text.encode()),
    }
    return TrainedModel(**{**given, **changed})


def hourly(g: str = "A", stop: int = 9) -> Prefill:
    """Return the prefill of a series with hours 0 to 2 that ends at `stop`."""
    return Prefill({"g": g}, tuple(line(g, clock(hour)) for hour in range(3)), clock(0), clock(stop), stop + 1)


def last_of(prompt: str) -> dict[str, Any]:
    return json.loads(prompt.rstrip("\n").rsplit("\n", 1)[-1].removeprefix(BOS))


def continued(prompt: str, count: int) -> str:
    """Write the hours that follow the prompt's last record."""
    last = last_of(prompt)
    hour = int(last["t"][:2])
    return "".join(line(last["g"], clock((hour + step) % 24)) for step in range(1, count + 1))


def perfect(prompts: list[str], n: int) -> list[list[str]]:
    return [[continued(prompt, 1)] * n for prompt in prompts]


def run(
    function: Any, prefills: Sequence[Prefill] = (hourly(),), model: TrainedModel | None = None, **options: Any
) -> GenerationResult:
    """Generate with a function as the model; options of the `generation` block by name."""
    given = {name: options.pop(name) for name in ("start", "stop", "is_private") if name in options}
    return generate_series(
        CallableCompleter(function), prefills, model=model or trained(), options=Generation(**options), **given
    )


def times(result: GenerationResult, g: str = "A") -> list[Any]:
    return [record["t"] for record in result.records if record["g"] == g]


# ── Vectors ────────────────────────────────────────────────────────────────────────────────────────


def test_series_ends_at_its_stop_or_its_bound() -> None:
    result = run(perfect)
    assert times(result) == [clock(hour) for hour in range(3, 10)]
    assert result.status == "complete"
    assert [(one.status, one.rounds, len(one.records)) for one in result.series] == [("completed", 7, 7)]

    result = run(lambda prompts: [continued(prompt, 20) for prompt in prompts], samples_per_prompt=1)
    assert times(result) == [clock(hour) for hour in range(3, 10)]
    assert result.counts == {"invalid:past_stop": 13, "record": 7}
    assert [one.reason for one in result.rejected] == ["past_stop"] * 13

    def model(prompts: list[str], n: int) -> list[list[str]]:
        days = [int(last_of(prompt)["t"][-2:]) for prompt in prompts]
        return [[line("A", f"2024-01-{day + 1:02d}")] * n for day in days]

    begun = Prefill({"g": "A"}, (line("A", "2024-01-01"),), "2024-01-01", "2024-01-31", 31)
    result = run(model, [begun], trained(ISO8601, 86400))

    assert times(result) == [f"2024-01-{day:02d}" for day in range(2, 32)]
    assert result.series[0].status == "completed"

    begun = Prefill({"g": "A"}, (line("A", 5),), 5, None, 10)
    result = run(lambda prompts: [line("A", 5)] * len(prompts), [begun], trained(ELAPSED, None), samples_per_prompt=1)
    assert (result.series[0].status, len(result.series[0].records)) == ("capped", 20)


def test_series_whose_completions_or_backend_fail_are_left_out_alone() -> None:
    def model(prompts: list[str], n: int) -> list[list[str]]:
        return [["nonsense" if last_of(prompt)["g"] == "A" else continued(prompt, 2)] * n for prompt in prompts]

    result = run(model, [hourly("A"), hourly("B")])

    assert result.status == "partial"
    outcomes = [(one.source, one.status, one.rounds) for one in result.series]
    assert outcomes == [('{"g":"A"}', "failed", 3), ('{"g":"B"}', "completed", 4)]
    assert times(result, "B") == [clock(hour) for hour in range(3, 10)]

    def model(prompts: list[str]) -> list[str]:
        raise RuntimeError("out of memory")

    result = run(model, [hourly("A"), hourly("B")])

    assert (result.status, result.records) == ("failed", [])
    assert {(one.rounds, one.error) for one in result.series} == {(3, "RuntimeError: out of memory")}

    def model(prompts: list[str], n: int) -> list[list[str]]:
        return [[continued(prompt, 1) if last_of(prompt)["t"] == "02:00" else "?"] * n for prompt in prompts]

    dropped, kept = run(model), run(model, on_failed_group="keep")

    assert dropped.records == []
    assert [(one.reason, one.text) for one in dropped.rejected] == [("series_incomplete", line("A", "03:00"))]
    assert times(kept) == ["03:00"]


# ── Accepted and rejected ───────────────────────────────────────────────────────────────────────────────────


def test_sample_with_most_valid_records_is_chosen_and_drifting_ones_keep_what_is_valid() -> None:
    def model(prompts: list[str], n: int) -> list[list[str]]:
        first = line("A", clock(3), 10) + "{}"
        return [["", first, line("A", clock(3), 20), "{}", line("A", clock(3), 30)] for _ in prompts]

    result = run(model, max_records_per_group=1)

    assert [record["v"] for record in result.records] == [10]
    assert result.counts == {"invalid:missing_column": 1, "invalid:not_chosen": 3, "record": 1}

    def model(prompts: list[str], n: int) -> list[list[str]]:
        return [[continued(prompt, 1) + line("A", "12:30") + line("A", "13:30")] * n for prompt in prompts]

    result = run(model)

    assert times(result) == [clock(hour) for hour in range(3, 10)]
    assert (result.counts["invalid:step"], result.counts["invalid:after_failure"]) == (7, 7)


def test_bad_rounds_keep_their_records_and_fail_only_a_series_before_its_stop() -> None:
    model: Any = lambda prompts: [continued(prompt, 1) + "{}" * 4 for prompt in prompts]  # noqa: E731
    result = run(model, samples_per_prompt=1, on_failed_group="keep")
    assert result.series[0].status == "failed"
    assert times(result) == ["03:00", "04:00", "05:00"]

    model: Any = lambda prompts: [continued(prompt, 3) + "{}" * 20 for prompt in prompts]  # noqa: E731
    result = run(model, [hourly(stop=5)], samples_per_prompt=1, patience=1)
    assert result.series[0].status == "completed"


def test_output_is_sorted_by_group_then_time_and_a_record_of_another_group_ends_the_sample() -> None:
    result = run(perfect, [hourly("B", 4), hourly("A", 5)], parallel_groups=1)
    assert [(one["g"], one["t"]) for one in result.records] == [
        ("A", "03:00"), ("A", "04:00"), ("A", "05:00"), ("B", "03:00"), ("B", "04:00"),
    ]  # fmt: skip

    result = run(lambda prompts: [line("B", clock(3))] * len(prompts), samples_per_prompt=1)
    assert result.counts == {"invalid:group_mixed_key": 3}

    asked: list[Any] = []
    result = run(asked.append, [hourly(stop=2)])
    assert (result.status, result.records, asked) == ("complete", [], [])


def test_series_of_times_of_day_continues_for_days_and_a_common_stop_overrides_the_groups_own() -> None:
    begun = Prefill({"g": "A"}, (line("A", clock(22)), line("A", clock(23))), clock(22), clock(21), 48)
    result = run(perfect, [begun])
    assert times(result) == [clock(hour % 24) for hour in range(46)]
    assert times(run(perfect, stop=clock(4))) == ["03:00", "04:00"]


# ── Requests ──────────────────────────────────────────────────────────────────────────────────


def requests_of(texts: Texts, prefills: Sequence[Prefill] = (hourly(),), **options: Any) -> list[dict[str, Any]]:
    """Run a model and return the keywords of every request."""
    requests: list[dict[str, Any]] = []

    def recording(prompts: list[str], **keywords: Any) -> list[list[str]]:
        requests.append({"prompts": prompts, **keywords})
        return texts(prompts, keywords["n"])

    run(recording, prefills, **options)
    return requests


def test_request_has_the_last_records_as_trained_the_options_and_a_limit_of_tokens() -> None:
    def respaced(prompts: list[str], n: int) -> list[list[str]]:
        return [[continued(prompt, 1).replace(",", " , ")] * n for prompt in prompts]

    requests = requests_of(respaced)

    assert requests[0]["prompts"] == [PROMPT + "".join(line("A", clock(hour)) for hour in range(3))]
    assert requests[1]["prompts"] == [PROMPT + "".join(line("A", clock(hour)) for hour in range(1, 4))]

    first = requests_of(perfect, temperature=0.5, top_p=0.8, repetition_penalty=1.1, samples_per_prompt=2)[0]
    assert (first["n"], first["temperature"], first["top_p"], first["repetition_penalty"]) == (2, 0.5, 0.8, 1.1)
    assert first["max_tokens"] == 396
    assert first["stop"] == [EOS]

    size = len(line("A", clock(0)))
    first = requests_of(perfect, model=trained(max_seq_length=len(PROMPT) + 3 * size))[0]
    assert (first["prompts"][0].count("\n"), first["max_tokens"]) == (2, 2 * size)


def test_seeds_of_a_series_do_not_depend_on_others_and_retries_are_warmer_with_new_ones() -> None:
    def model(prompts: list[str], n: int) -> list[list[str]]:
        counts["asked"] += 1
        return [["?" if counts["asked"] in {1, 2, 4} else continued(prompts[0], 1)] * n]

    counts = Counter[str]()
    requests = requests_of(model, [hourly(stop=4)])

    assert [one["temperature"] for one in requests] == [0.9, 1.0, 1.1, 0.9, 1.0]
    assert len({seed for one in requests for seed in one["seeds"]}) == 5

    alone = [one["seeds"][0] for one in requests_of(perfect, [hourly("B")])]
    beside = [one["seeds"][1] for one in requests_of(perfect, [hourly("A"), hourly("B")])]
    assert alone == beside
    requests = requests_of(perfect, [hourly(name) for name in "ABCDE"], parallel_groups=2)
    assert {len(one["prompts"]) for one in requests} <= {1, 2}


def test_ids_of_a_prompt_are_the_trained_ones_and_a_partial_one_gives_the_first_step() -> None:
    def model(prompts: list[str], n: int) -> list[list[str]]:
        return [['"v":7}\n' if prompt.endswith(",") else continued(prompt, 1)] * n for prompt in prompts]

    requests, result = requests_of(model, prefill="partial"), run(model, prefill="partial")

    assert requests[0]["prompts"] == [f'{PROMPT}{{"g":"A","t":"00:00",']
    assert times(result) == [clock(hour) for hour in range(10)]
    assert result.records[0]["v"] == 7

    ids: list[Any] = []

    def model(prompts: list[str], prompt_ids: Any, n: int) -> list[list[str]]:
        ids.append(prompt_ids[0])
        return perfect(prompts, n)

    run(model, model=trained(prompt=PromptText(PROMPT, (7, 8, 9))))

    assert ids[0] == (7, 8, 9, *"".join(line("A", clock(hour)) for hour in range(3)).encode())


@pytest.mark.parametrize(
    ("kind", "written", "named"),
    [("string", '"Q"', ["series-1", "series-2"]), ("integer", "77", [1, 2]), ("boolean", "true", [True])],
)
def test_private_series_and_prompts_contain_nothing_of_the_data(kind: Any, written: str, named: list[Any]) -> None:
    schema = RecordSchema((Column("g", kind), Column("t", "string"), Column("v", "integer")))
    prompts: list[str] = []

    def model(asked: list[str], n: int) -> list[list[str]]:
        prompts.extend(asked)
        hours = [prompt.count("\n") - 1 for prompt in asked]
        return [[f'{{"g":{written},"t":"{clock(hour)}","v":1}}\n'] * n for hour in hours]

    result = run(
        model, [hourly("A"), hourly("B")], trained(schema=schema), is_private=True, start=clock(0), stop=clock(2),
        context_records=9,
    )  # fmt: skip

    assert prompts[:2] == [PROMPT, PROMPT]
    assert not any('"A"' in prompt or '"B"' in prompt for prompt in prompts)
    assert [record["t"] for record in result.records] == [clock(hour) for hour in range(3)] * 2
    assert list(dict.fromkeys(record["g"] for record in result.records)) == named
    assert [one.source for one in result.series] == ["series-1", "series-2"]


def test_private_series_keeps_the_key_that_its_first_record_wrote_and_begins_at_its_start() -> None:
    def model(asked: list[str], n: int) -> list[list[str]]:
        # The first of two samples continues with another key; it has as many objects, but no valid record.
        begun = asked[0].count("\n") > 1
        answers = [line("R", clock(1)), line("Q", clock(1))] if begun else [line("Q", clock(0))] * 2
        return [answers[:n] for _ in asked]

    result = run(model, [hourly("A")], is_private=True, start=clock(0), stop=clock(1), samples_per_prompt=2)
    too_late: Any = lambda asked, n: [[line("Q", clock(5))] * n for _ in asked]  # noqa: E731
    late = run(too_late, is_private=True, start="00:00", stop="09:00")

    assert times(result, "series-1") == [clock(0), clock(1)]
    assert (late.status, late.counts["invalid:step"]) == ("failed", late.series[0].rounds)


BACKWARDS = Prefill({"g": "A"}, (line("A", "2024-01-02"),), "2024-01-02", "2024-01-01", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": "late"}, r"stop_timestamp: 'late' .* cannot be read as %H:%M"),
        ({"start": "soon"}, r"start_timestamp: 'soon'"),
        ({"start": 5}, r"start_timestamp: 5"),
        ({"prefills": [BACKWARDS], "model": trained(ISO8601, 86400)}, "would stop at '2024-01-01', before it starts"),
    ],
)
def test_impossible_time_is_a_config_error_before_any_request(options: dict[str, Any], message: str) -> None:
    asked: list[Any] = []
    with pytest.raises(ConfigError, match=message):
        run(asked.append, **options)
    assert asked == []


# ── Invariants ───────────────────────────────────────────────────────────────────────────────────────────

_junk = st.sampled_from(["", "?", "{}", EOS, BOS, '{"g":', "\n", line("B", clock(3)), "\ud800", "{" * 70])


@st.composite
def adversaries(draw: st.DrawFn) -> Callable[..., Any]:
    """Draw a model that answers validly, invalidly, in the wrong shape or not at all."""
    deeds = draw(st.lists(st.integers(0, 7), min_size=1, max_size=12))
    text = "".join(draw(st.lists(_junk, min_size=1, max_size=6)))
    turn = [0]

    def model(prompts: list[str], n: int) -> Any:
        turn[0] += 1
        match deeds[turn[0] % len(deeds)]:
            case 0:
                raise [RuntimeError, ValueError, StopIteration][turn[0] % 3]("no")
            case 1:
                return [[text] * n] * len(prompts)
            case 2:
                return None
            case 3:
                return [[text] * (n + 1)] * len(prompts)
            case 4:
                return [[continued(prompt, 1 + turn[0] % 5) + text] * n for prompt in prompts]
            case 5:
                return [[None] * n] * len(prompts)
            case _:
                return [[text, *[continued(prompt, 30)] * (n - 1)] for prompt in prompts]

    return model


@pytest.mark.slow
@given(
    adversaries(),
    st.integers(3, 30),
    st.fixed_dictionaries(
        {
            "patience": st.integers(1, 3),
            "invalid_fraction_threshold": st.floats(0, 1),
            "on_failed_group": st.sampled_from(["drop", "keep"]),
            "samples_per_prompt": st.integers(1, 3),
        }
    ),
)
def test_series_always_end_within_their_bound_and_at_the_stop(
    model: Callable[..., Any], stop: int, options: dict[str, Any]
) -> None:
    begun = Prefill({"g": "A"}, tuple(line("A", clock(hour)) for hour in range(3)), clock(0), None, stop + 1)
    result = run(model, [begun], **options)
    [outcome] = result.series

    assert outcome.rounds <= options["patience"] * (stop - 2 + 1)
    assert times(result) == [clock(hour % 24) for hour in range(3, 3 + len(result.records))]
    assert len(result.records) <= stop - 2
    assert outcome.status == "failed" or len(result.records) == stop - 2
    assert len(result.records) == result.counts.get("record", 0)
    assert all(re.match(r"invalid:|record$|prose$|truncated$", name) for name in result.counts)


# ── Records ────────────────────────────────────────────────────────────────────────────────────────


def records_of(function: Any, mode: Mode = "tabular", num_records: int = 10, **options: Any) -> GenerationResult:
    model = trained(ELAPSED if mode == "grouped" else None, None, mode)
    backend = CallableCompleter(function)
    return generate_records(backend, model=model, options=Generation(**options), num_records=num_records)


def stopped(text: str) -> Callable[..., Any]:
    return lambda prompts: [Completion(text, "stop") for _ in prompts]


def test_records_are_requested_in_batches_with_distinct_seeds_until_there_are_enough() -> None:
    result = records_of(stopped(line("A", 1) * 3), num_records=250)
    assert (result.status, len(result.records)) == ("complete", 250)

    seeds: list[list[int]] = []

    def model(prompts: list[str], **keywords: Any) -> list[str]:
        assert prompts == [PROMPT] * len(keywords["seeds"])
        seeds.append(keywords["seeds"])
        return [line("A", 1)] * len(prompts)

    records_of(model, num_records=250)

    assert [len(one) for one in seeds] == [100, 100, 50]
    assert len({seed for one in seeds for seed in one}) == 250


def test_groups_stay_whole_and_generation_ends_with_patience() -> None:
    group = "".join(line("A", time) for time in range(4))
    result = records_of(stopped(group), "grouped", 3)
    cut = records_of(lambda prompts: [Completion(group, "length") for _ in prompts], "grouped", 3)

    assert len(result.records) == 12
    assert (cut.status, cut.counts) == ("failed", {"invalid:group_incomplete": 36, "record": 0})

    def model(prompts: list[str]) -> list[str]:
        counts["asked"] += 1
        if counts["asked"] == 2:
            raise GenerationError("gone")
        return [line("A", 1)] * len(prompts) if counts["asked"] == 1 else ["?"] * len(prompts)

    counts = Counter[str]()
    result = records_of(model, num_records=150)

    assert (result.status, len(result.records), counts["asked"]) == ("partial", 100, 4)
    assert result.error == "GenerationError: gone"


# ── Over HTTP ──────────────────────────────────────────────────────────────────────────────────────


def perfect_reply(request: dict[str, Any]) -> Reply:
    return Reply([continued(request["prompt"], 1)] * request["n"], finish_reason="length")


def drifting_reply(request: dict[str, Any]) -> Reply:
    """Write one good hour, then one that is half an hour late."""
    last = last_of(request["prompt"])
    late = line(last["g"], f"{(int(last['t'][:2]) + 2) % 24:02d}:30")
    return Reply([continued(request["prompt"], 1) + late] * request["n"], finish_reason="length")


def broken_reply(request: dict[str, Any]) -> Reply:
    return Reply(['{"g":"A","t":'] * request["n"], finish_reason="length")


@dataclass
class FlakyModel:
    """A perfect model behind a server that fails the first requests."""

    troubles: list[Reply]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: dict[str, Any]) -> Reply:
        with self.lock:
            return self.troubles.pop(0) if self.troubles else perfect_reply(request)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "status", "invalid"),
    [
        (perfect_reply, "complete", {}),
        (drifting_reply, "complete", {"invalid:step": 14}),
        (broken_reply, "failed", {"truncated": 6}),
        (FlakyModel([Reply(is_slow=True)] * 2), "complete", {}),
        (FlakyModel([Reply(status=429, headers={"Retry-After": "1"})] * 3), "complete", {}),
        (FlakyModel([Reply(drops=True), Reply(status=500), Reply(drops=True), Reply(status=503)]), "complete", {}),
        (FlakyModel([Reply(body=b"{}"), Reply(status=400)]), "complete", {}),
    ],
    ids=["perfect", "drifting", "broken", "slow", "too many requests", "dropping connections", "refusing once"],
)
def test_series_over_http_survive_transient_errors(script: Any, status: str, invalid: dict[str, int]) -> None:
    options = Generation(samples_per_prompt=1)
    with serving(script) as server:
        backend = OpenAIBackend(base_url=server.base_url, model="m", timeout_seconds=1, retries=20)
        completer = OpenAICompleter(backend, None, wait=lambda _: None)
        result = generate_series(completer, [hourly("A"), hourly("B")], model=trained(), options=options)

    assert result.status == status
    expected = [clock(hour) for hour in range(3, 10)] if status == "complete" else []
    assert times(result, "A") == times(result, "B") == expected
    assert {name: count for name, count in result.counts.items() if name != "record"} == invalid
