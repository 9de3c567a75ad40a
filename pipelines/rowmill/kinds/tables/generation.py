"""Generation with a trained model: whole series step by step in a sliding window, or single records and groups.

A backend completes prompts: a Python function, or a server that speaks OpenAI's `/completions`.
"""

import importlib
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from math import ceil
from typing import Annotated, Any, Literal, Protocol, TypeAlias, cast

from pydantic import Field

from rowmill.core.completions import URL_PATTERN, CompletionsServer, read_api_key
from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, GenerationError, require_code_permission
from rowmill.core.permutation import hash_labels
from rowmill.kinds.tables.parsing import GeneratedTextSpec, ParsedText, Parser, Validation
from rowmill.kinds.tables.schema import DAY, Position, Record, RecordSchema, Value
from rowmill.kinds.tables.serialization import (
    RecordDecoder,
    RecordProblem,
    Serialiser,
    read_json,
)
from rowmill.schema.generated_counts import SpanCounts, merge_span_counts
from rowmill.schema.rows import Rejected


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as text and, if known, as the token ids of training."""

    text: str
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion; `finish_reason` is `stop` if the model ended it, and then the text does not contain the EOS."""

    text: str
    finish_reason: str | None = None

    @property
    def is_ended_by_model(self) -> bool:
        """Whether the model ended the text with EOS, which the server removed."""
        return self.finish_reason == "stop"


class Completer(Protocol):
    """Continues prompts."""

    def complete(
        self,
        prompts: Sequence[PromptText],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        repetition_penalty: float,
        stop: Sequence[str],
        seeds: Sequence[int],
    ) -> Sequence[Sequence[Completion] | Exception]:
        """Return `n` completions per prompt, each prompt sampled with its own seed.

        A prompt that failed has the error in its place; the others keep their completions.
        """


class CallableBackend(Config):
    """A Python function; it is called with `prompts` (a list of texts) and those of these keywords that it declares.

    Keywords: `prompt_ids`, `n`, `max_tokens`, `temperature`, `top_p`, `repetition_penalty`, `stop`, `seeds`. It returns
    `n` completions per prompt: texts, or pairs of text and finish reason.
    """

    kind: Literal["callable"] = "callable"
    """A Python function."""
    target: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    """The function, as `module:name`."""

    def open(self) -> "CallableCompleter":
        """Import the function."""
        require_code_permission(self.target, "generation.backend.target")
        module, _, name = self.target.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for step in name.split("."):
                found = getattr(found, step)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"generation.backend.target: {self.target!r} cannot be imported ({error}); name a "
                "function of an importable module as module:name"
            ) from error
        if not callable(found):
            raise ConfigError(
                f"generation.backend.target: {self.target!r} is a {type(found).__name__}, not a function; name one"
            )
        return CallableCompleter(found)


class CallableCompleter:
    """Calls a function with the keywords that it declares."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._declared = None if takes_all else {parameter.name for parameter in parameters}

    def complete(self, prompts: Sequence[PromptText], *, n: int, **keywords: Any) -> Sequence[Sequence[Completion]]:
        """Return what the function returns, checked."""
        offered = {"prompt_ids": [prompt.ids for prompt in prompts], "n": n, **keywords}
        given = {name: value for name, value in offered.items() if self._declared is None or name in self._declared}
        answers = _require_list(self._function([prompt.text for prompt in prompts], **given), "its answer")
        if len(answers) != len(prompts):
            raise GenerationError(
                f"generation.backend: the function returned {len(answers)} answers to {len(prompts)} prompts; return "
                "one per prompt"
            )
        completions: list[Sequence[Completion]] = []
        for answer in answers:
            # A single completion may be returned without a list.
            alone = n == 1 and (isinstance(answer, str | Completion) or _is_pair(answer))
            values = [answer] if alone else _require_list(answer, "the answer to a prompt")
            found: list[Completion] = []
            for value in values:
                if isinstance(value, Completion):
                    found.append(value)
                elif isinstance(value, str):
                    found.append(Completion(value))
                elif _is_pair(value) and (value[1] is None or isinstance(value[1], str)):
                    found.append(Completion(*value))
                else:
                    raise GenerationError(
                        f"generation.backend: a completion is a {type(value).__name__}; return text, (text, "
                        "finish_reason) or a Completion"
                    )
            if len(found) != n:
                raise GenerationError(
                    f"generation.backend: the function returned {len(found)} completions of a prompt; n is {n}; "
                    "return n"
                )
            completions.append(found)
        return completions


def _require_list(value: Any, what: str) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise GenerationError(
            f"generation.backend: {what} is a {type(value).__name__}; return a list with one entry per prompt"
        )
    return list(cast("Iterable[Any]", value))


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(cast("tuple[Any, ...]", value)) == 2 and isinstance(value[0], str)


_MAX_CONCURRENT_REQUESTS = 32


class OpenAIBackend(Config):
    """A server that answers `POST {base_url}/completions`, such as vLLM, SGLang, llama.cpp or OpenAI's own."""

    kind: Literal["openai"] = "openai"
    """A completions server."""
    base_url: str = Field(pattern=URL_PATTERN)
    """The URL that `/completions` is appended to, such as `http://127.0.0.1:8000/v1`."""
    model: str = Field(min_length=1)
    """The model's name on the server."""
    api_key_env: str | None = None
    """Environment variable that holds the API key; null: no key is sent. The key itself is never part of a recipe."""
    timeout_seconds: float = Field(default=120, gt=0)
    """Seconds until an attempt times out."""
    retries: int = Field(default=5, ge=0)
    """Retries of transient failures."""
    prompt_as: Literal["text", "ids"] = "text"
    """Whether prompts are sent as text or as token ids; send ids where the check `prompt_parity` recommends it."""

    def open(self) -> "OpenAICompleter":
        """Return the client; nothing is sent yet."""
        return OpenAICompleter(self, read_api_key(self.api_key_env, "generation.backend"))


class OpenAICompleter:
    """Sends prompts to a completions server; `wait` sleeps between attempts."""

    def __init__(self, config: OpenAIBackend, key: str | None, *, wait: Callable[[float], None] = time.sleep) -> None:
        self._config = config
        self._server = CompletionsServer(
            config.base_url,
            key,
            where="generation.backend",
            timeout_seconds=config.timeout_seconds,
            retries=config.retries,
            wait=wait,
        )

    def __repr__(self) -> str:
        """Name the server, not the key."""
        return f"{type(self).__name__}({self._server.url!r}, model={self._config.model!r})"

    def complete(
        self,
        prompts: Sequence[PromptText],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        repetition_penalty: float,
        stop: Sequence[str],
        seeds: Sequence[int],
    ) -> Sequence[Sequence[Completion] | Exception]:
        """Return `n` completions per prompt, or the error of the last attempt."""
        # At temperature 0 all samples are equal, and servers refuse to draw several.
        drawn = n if temperature > 0 else 1
        options: dict[str, Any] = {
            "model": self._config.model, "n": drawn, "max_tokens": max_tokens, "temperature": temperature,
            "top_p": top_p, "stop": list(stop),
        }  # fmt: skip
        if repetition_penalty != 1:
            options["repetition_penalty"] = repetition_penalty

        def ask(prompt: PromptText, seed: int) -> Sequence[Completion] | Exception:
            is_text = self._config.prompt_as == "text"
            sent = prompt.text if is_text or prompt.ids is None else list(prompt.ids)
            try:
                body = {**options, "prompt": sent, "seed": seed}
                found = self._server.ask(body, lambda answer: self._parse_answer(answer, drawn))
            except GenerationError as error:
                return error
            return found * n if drawn < n else found

        with ThreadPoolExecutor(min(len(prompts), _MAX_CONCURRENT_REQUESTS) or 1) as pool:
            return list(pool.map(ask, prompts, seeds))

    def _parse_answer(self, answer: bytes, n: int) -> list[Completion]:
        """Return the completions of a response, in the order of their index."""
        try:
            choices: list[dict[str, Any]] = json.loads(answer)["choices"]
            ordered = sorted(choices, key=lambda one: one.get("index", 0))
            found = [Completion(one["text"], one.get("finish_reason")) for one in ordered]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self._server.make_error(
                "the answer is not a completions object; check that base_url is that of a completions server"
            ) from None
        if len(found) != n or not all(isinstance(one.text, str) for one in found):
            raise self._server.make_error(f"the answer has {len(found)} texts; {n} were requested")
        return found


Backend: TypeAlias = Annotated[
    CallableBackend  # a Python function, named as `module:name`
    | OpenAIBackend,  # any server that speaks OpenAI's `/completions`
    Field(discriminator="kind"),
]


class Generation(Config):
    """Sampling, the sliding window of series, and validation of generated records.

    The block adds `parsed_records` to the dataset's stages, and with a backend `generated_series`. It does not affect
    the shards.
    """

    temperature: float = Field(default=0.9, ge=0)
    """Sampling temperature; a retry adds 0.1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: probability mass of the tokens that are sampled from."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Penalty on repeated tokens; 1 is none."""
    samples_per_prompt: int = Field(default=5, ge=1)
    """Continuations of a series sampled per round; the one with the most valid records is kept."""
    context_records: int = Field(default=3, ge=1)
    """Previous records of a series in the model's context."""
    parallel_groups: int = Field(default=20, ge=1)
    """Series that are generated concurrently."""
    patience: int = Field(default=3, ge=1)
    """Consecutive bad rounds after which a series fails, or bad batches after which generation of records ends."""
    invalid_fraction_threshold: float = Field(default=0.8, ge=0, le=1)
    """A round is bad if at least this share of its objects is invalid, or if nothing of it is accepted."""
    prefill: Literal["auto", "records", "partial"] = "auto"
    """How a series begins; `records`: after its group's first records; `partial`: after its key and start time only;
    `auto`: records, or partial under differential privacy."""
    max_records_per_group: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Maximum records generated per series; auto: the steps to its stop, or else twice the longest training group."""
    on_failed_group: Literal["drop", "keep"] = "drop"
    """What happens to the records of a failed series; drop: they are rejected as `series_incomplete`."""
    num_records: int = Field(default=1000, ge=1)
    """Records to generate in tabular and grouped mode; groups stay whole, so there may be a few more."""
    text_urls: list[str] | None = None
    """Files of generated text to parse, named as in `source.train_urls`: JSON Lines with a `text` each (or answers of a
    completions server), or `.txt` files of one text each; null: the files in `generated/RECIPE/DATASET/`."""
    backend: Backend | None = None
    """The model server or function that generates; null: only existing text is parsed."""
    validation: Validation = Validation()
    """Repairs of generated groups."""


SEEDS = 2**31
"""Exclusive upper bound of seeds: some servers accept none larger."""
_MAX_TEMPERATURE = 2.0
"""Maximum temperature of retries: the highest that servers accept."""
_TEMPERATURE_STEP = 0.1

Answer = Sequence[Completion] | Exception


def sample_completions(
    completer: Completer,
    prompts: Sequence[PromptText],
    *,
    n: int,
    max_tokens: int,
    seeds: Sequence[int],
    stop: str,
    bad_rounds: int,
    options: Generation,
) -> Sequence[Answer]:
    """Return `n` completions per prompt, or the error instead; nothing is raised.

    Each bad round raises the temperature by 0.1.
    """
    warmer = min(_MAX_TEMPERATURE, options.temperature + _TEMPERATURE_STEP * bad_rounds)
    try:
        answers = completer.complete(
            prompts,
            n=n,
            max_tokens=max_tokens,
            temperature=round(max(options.temperature, warmer), 6),
            top_p=options.top_p,
            repetition_penalty=options.repetition_penalty,
            stop=[stop],
            seeds=seeds,
        )
        if len(answers) != len(prompts):
            wrong = f"{len(answers)} answers to {len(prompts)} prompts; return one per prompt"
            return [GenerationError(f"generation.backend: {wrong}")] * len(prompts)
        return [
            answer
            if isinstance(answer, Exception) or len(answer) == n
            else GenerationError(f"generation.backend: {len(answer)} completions of a prompt; {n} were requested")
            for answer in answers
        ]
    except Exception as error:  # noqa: BLE001  (whatever a backend does is one bad round, and not the end of the run)
        return [error] * len(prompts)


def describe_error(error: Exception) -> str:
    """Format an error for a report."""
    return f"{type(error).__name__}: {error}"[:500]


SeriesStatus = Literal["completed", "capped", "failed"]
_LENGTH_MARGIN = 1.2
"""Maximum tokens of a completion, as a multiple of the longest training example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel(GeneratedTextSpec):
    """What generation needs to know of a model's training data.

    `prompt` is the generation prompt, BOS included; `encode` returns a record's tokens as in training;
    `longest_example` is in tokens, `longest_group` in records.
    """

    prompt: PromptText
    special_tokens: tuple[str, ...]
    max_seq_length: int
    longest_example: int
    longest_group: int
    encode: Callable[[str], Sequence[int]]

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
class GenerationResult:
    """Result of generation.

    `status`: whether no, some or all series failed; for records, whether as many were generated as requested. `counts`
    are items by class, as in `SpanCounts`, over all chosen completions.
    """

    status: Literal["complete", "partial", "failed"]
    records: Sequence[Record]
    rejected: Sequence[RejectedObject]
    counts: Mapping[str, int]
    series: "Sequence[SeriesState]" = ()
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


def is_bad_round(report: SpanCounts, *, accepted: int, options: Generation) -> bool:
    """Tell whether a round or batch counts against `patience`."""
    objects = report.valid + report.invalid
    return not accepted or report.invalid >= options.invalid_fraction_threshold * objects


# ── Tabular and grouped records ────────────────────────────────────────────────────────────────────


_PROMPTS_PER_BATCH = 100
"""Maximum prompts per batch."""


def generate_records(
    completer: Completer, *, model: TrainedModel, options: Generation, num_records: int, seed: int = 0
) -> GenerationResult:
    """Generate `num_records` records, in groups where training was grouped, or stop when `patience` runs out.

    Groups stay whole, so there may be a few records more. Of `patience` consecutive batches at least one adds a record,
    or generation ends: there are at most `patience` × (`num_records` + 1) batches.
    """
    parser = Parser(model)
    tally = GenerationTally()
    records: list[Record] = []
    batches = bad_batches = 0
    error = ""
    while len(records) < num_records and bad_batches < options.patience:
        prompts = min(_PROMPTS_PER_BATCH, num_records - len(records))
        answers = sample_completions(
            completer,
            [model.prompt] * prompts,
            n=1,
            max_tokens=model.max_tokens(model.max_seq_length - model.prompt_length),
            seeds=[hash_labels(seed, "generate", batches, number) % SEEDS for number in range(prompts)],
            stop=model.eos,
            bad_rounds=bad_batches,
            options=options,
        )
        parsed: list[ParsedText] = []
        for answer in answers:
            if not isinstance(answer, Exception):
                text = answer[0].text
                parsed.append(parser(text, open_at_start=True, closed_at_end=answer[0].is_ended_by_model))
                tally.count_rejected_spans(parsed[-1], text, "")
        error = next((describe_error(answer) for answer in answers if isinstance(answer, Exception)), error)
        found = [record for completion in parsed for record in completion.records]
        report = merge_span_counts([completion.report for completion in parsed])
        is_bad = is_bad_round(report, accepted=len(found), options=options)
        batches, bad_batches = batches + 1, bad_batches + 1 if is_bad else 0
        records += found
    if model.mode == "tabular" and len(records) > num_records:
        tally.counts["invalid:past_bound"] += len(records) - num_records
        del records[num_records:]
    tally.counts["record"] = len(records)
    status = "complete" if len(records) >= num_records else "partial" if records else "failed"
    return GenerationResult(status, records, tally.rejected, dict(sorted(tally.counts.items())), error=error)


# ── Series ─────────────────────────────────────────────────────────────────────────────────────────


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
        if self.stop is not None and self.position is not None:
            following = self.position + (self.shared.trained.place.interval or 0)
            if self.has_passed_stop or self.position >= self.stop or following > self.stop:
                return "completed"
        if len(self.records) >= self.bound:
            return "capped"
        return "failed" if self.bad_rounds >= self.shared.options.patience else None

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

    def add_samples(self, samples: Sequence[Completion]) -> None:
        """Choose the sample with the most valid records, and append those up to stop and bound."""
        self.rounds += 1
        texts = [self.opening + sample.text for sample in samples]
        parsed = [
            self.shared.parser(text, closed_at_end=sample.is_ended_by_model, group=self.key, after=self.position)
            for text, sample in zip(texts, samples, strict=True)
        ]
        chosen = max(range(len(parsed)), key=lambda index: len(parsed[index].records))
        for index, one in enumerate(parsed):
            if index != chosen and (objects := one.report.valid + one.report.invalid):
                self.tally.counts["invalid:not_chosen"] += objects
        self.tally.count_rejected_spans(parsed[chosen], texts[chosen], self.source)
        before, trained = len(self.records), self.shared.trained
        for index, record in enumerate(parsed[chosen].records):
            # Formatted as in training, however the model formatted it.
            text = self.shared.serialise(record)
            if isinstance(text, Rejected):
                # A model may write escapes that the reference format cannot.
                text = Serialiser(trained.schema, special_tokens=trained.special_tokens)(record)
                assert isinstance(text, str), "a decoded record can be serialized"
            position = parsed[chosen].positions[index] if parsed[chosen].positions else None
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
                    self.key = {name: record[name] for name in trained.place.group_columns}
        accepted = len(self.records) - before
        bad = is_bad_round(parsed[chosen].report, accepted=accepted, options=self.shared.options)
        self.bad_rounds = self.bad_rounds + 1 if bad else 0

    def sort_key(self) -> list[tuple[bool, float, str]]:
        """Return what sorts numbers by value and everything else by its text; a column has one type."""
        return [
            (True, float(value), "") if isinstance(value, int | float) else (False, 0.0, str(value))
            for value in self.prefill.key.values()
        ]

    def keyed_records(self) -> list[Record]:
        """Return the records, with the series' number as key if it is private.

        The key that the model wrote may come from the training data: all records of a series have the key, and the unit
        of privacy is a record. The first column of the key that can hold a name or a number is replaced.
        """
        number = self.prefill.name.rpartition("-")[2]
        numeric: dict[str, Callable[[str], Value]] = {"integer": int, "float": float, "decimal": Decimal}
        for name in self.shared.trained.place.group_columns if self.prefill.name else ():
            kind = self.shared.trained.schema.by_name[name].type
            if kind in numeric or kind in ("string", "json"):
                value = numeric[kind](number) if kind in numeric else self.prefill.name
                return [{**record, name: value} for record in self.records]
        return self.records


def start_series(prefill: Prefill, shared: SeriesContext, *, start: Value, stop: Value, where: str) -> SeriesState:
    """Return a series before its first round; `start` and `stop` override the group's own unless None."""
    trained = shared.trained
    source = prefill.name or "(the only one)"
    if prefill.key:
        key_schema = RecordSchema(tuple(trained.schema.by_name[name] for name in prefill.key))
        line = Serialiser(key_schema, special_tokens=())(prefill.key)
        source = repr(prefill.key) if isinstance(line, Rejected) else line.strip()
    first = prefill.start if start is None else start
    started = _read_boundary(trained, first, f"{where}: start_timestamp", source)
    texts = list(prefill.texts) if shared.style == "records" else []
    place, position = trained.place, None
    if place.order is not None and place.order_column is not None and texts:
        read = RecordDecoder(trained.schema, wire=trained.wire)
        records = [read(read_json(text)) for text in texts]
        values = [None if isinstance(one, RecordProblem) else one.get(place.order_column) for one in records]
        # The position of the prefill's last record.
        position = place.order.read_series(values)[-1]
        if position is None:
            raise ConfigError(
                f"{where}: prefill of series {source}: the time of its last record cannot be read; build "
                "tokenized_examples again"
            )
    interval, last = place.interval, prefill.stop if stop is None else stop
    stopped: Position | None = None
    if place.order is not None and place.order.is_time:
        is_clock = place.order.is_time_of_day
        if is_clock and stop is None and started is not None and interval is not None and prefill.length:
            # The group's end may be days after what its time of day says.
            stopped = started + (prefill.length - 1) * interval
        else:
            stopped = _read_boundary(trained, last, f"{where}: stop_timestamp", source)
        if started is not None and stopped is not None and stopped < started:
            if not is_clock:
                raise ConfigError(
                    f"{where}: series {source} would stop at {last!r}, before it starts; correct start_timestamp or "
                    "stop_timestamp"
                )
            stopped += DAY
    # The position of the record before the first generated one, real or hypothetical.
    before = position
    if position is None and started is not None and interval is not None:
        before = started - interval
    # Every good round adds at least one record, so the series ends.
    bound = shared.options.max_records_per_group
    if bound == "auto":
        is_open = interval is None or stopped is None or before is None
        bound = 2 * trained.longest_group if is_open else max(0, int((stopped - before) // interval))
    # Group columns come first in a record: without a key, no part of it can be prefilled.
    has_key = bool(prefill.key) or not place.group_columns
    opening = _write_opening(trained, prefill, first, f"{where}: start_timestamp") if has_key and not texts else ""
    return SeriesState(
        shared, prefill, source, texts, opening, position if has_key else before, stopped,
        bound, prefill.key if has_key else None,
    )  # fmt: skip


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


def _write_opening(model: TrainedModel, prefill: Prefill, start: Value, where: str) -> str:
    """Return the start of a series' first record, with its group key and start time."""
    place = model.place
    names = [*place.group_columns, *([place.order_column] if place.order_column and start is not None else [])]
    if not names:
        return ""
    known = RecordSchema(tuple(model.schema.by_name[name] for name in names))
    given: Record = dict(prefill.key)
    if place.order_column is not None and place.order_column in names:
        # A value of the recipe, converted to its column's type.
        column = known.by_name[place.order_column]
        decoded = Decimal(repr(start)) if isinstance(start, float) else start
        read = RecordDecoder(RecordSchema((column,)))({place.order_column: decoded})
        if isinstance(read, RecordProblem):
            raise ConfigError(
                f"{where}: {start!r} is not of type {column.type}, as column {place.order_column!r} is; correct it"
            )
        given |= read
    line = Serialiser(known, special_tokens=model.special_tokens, wire=model.wire)(given)
    if isinstance(line, Rejected):
        raise ConfigError(f"{where}: the start of a series cannot be written ({line.detail}); correct it")
    return line.removesuffix("}\n") + ("," if len(model.schema.columns) > len(names) else "}\n")


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
    """
    style: Literal["records", "partial"]
    style = ("partial" if is_private else "records") if options.prefill == "auto" else options.prefill
    serialise = Serialiser(model.schema, special_tokens=model.special_tokens, wire=model.wire)
    if is_private:
        # A private series has only a number (without groups there is one, unnumbered).
        numbers = range(1, len(prefills) + 1)
        prefills = [Prefill({}, (), name=f"series-{i}" if model.place.group_columns else "") for i in numbers]
    shared = SeriesContext(model, options, Parser(model), serialise, style)
    series = [start_series(prefill, shared, start=start, stop=stop, where=where) for prefill in prefills]
    while waiting := [state for state in series if state.status is None]:
        # A request has one temperature, which rises with bad rounds.
        batches: dict[int, list[SeriesState]] = {}
        for state in waiting[: options.parallel_groups]:
            batches.setdefault(state.bad_rounds, []).append(state)
        for batch in batches.values():
            _run_round(completer, batch, seed)
    return _collect_series(series, options)


def _run_round(completer: Completer, batch: Sequence[SeriesState], seed: int) -> None:
    """Sample continuations of some series, of which all have had the same number of bad rounds, in one request."""
    model, options = batch[0].shared.trained, batch[0].shared.options
    prompts = [state.prompt() for state in batch]
    answers = sample_completions(
        completer,
        [prompt for prompt, _ in prompts],
        n=options.samples_per_prompt,
        max_tokens=min(tokens for _, tokens in prompts),
        seeds=[hash_labels(seed, "generate", state.source, state.rounds) % SEEDS for state in batch],
        stop=model.eos,
        bad_rounds=batch[0].bad_rounds,
        options=options,
    )
    for state, answer in zip(batch, answers, strict=True):
        if isinstance(answer, Exception):
            state.rounds, state.bad_rounds = state.rounds + 1, state.bad_rounds + 1
            state.error = describe_error(answer)
        else:
            state.add_samples(answer)


def _collect_series(series: list[SeriesState], options: Generation) -> GenerationResult:
    """Return the records of series that have ended, sorted by group, and what was counted of them."""
    failed = [state for state in series if state.status == "failed"]
    counts: Counter[str] = Counter()
    rejected: list[RejectedObject] = []
    records: list[Record] = []
    series.sort(key=SeriesState.sort_key)
    for state in series:
        if state.status == "failed" and options.on_failed_group == "drop":
            for text in state.window[len(state.window) - len(state.records) :]:
                state.tally.reject("series_incomplete", text, state.source)
            del state.tally.counts["record"]
        else:
            records += state.keyed_records()
        counts.update(state.tally.counts)
        rejected += state.tally.rejected
    status: Literal["complete", "partial", "failed"] = "complete" if not failed else "partial"
    if failed and len(failed) == len(series):
        status = "failed"
    return GenerationResult(status, records, rejected, dict(sorted(counts.items())), series)
