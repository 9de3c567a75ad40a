"""Backends: a function, and a completions server over real HTTP, with and without failures."""

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter

from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError, GenerationError
from rowmill.kinds.tables.generation import (
    Backend,
    CallableBackend,
    CallableCompleter,
    Completion,
    OpenAIBackend,
    OpenAICompleter,
    PromptText,
)
from tests.support.completions_server import Reply, Script, serving

PROMPTS = (PromptText("one", (1, 2)), PromptText("two", (3,)))
KEY = "sk-not-to-be-told"


def complete(completer: Any, prompts: Sequence[PromptText] = PROMPTS, **changed: Any) -> Sequence[Any]:
    options = {
        "n": 2, "max_tokens": 7, "temperature": 0.9, "top_p": 1.0, "repetition_penalty": 1.0, "stop": ["</s>"],
        "seeds": list(range(len(prompts))),
    }  # fmt: skip
    return completer.complete(list(prompts), **{**options, **changed})


def echo(request: dict[str, Any]) -> Reply:
    return Reply([f"{request['prompt']} {number}" for number in range(request["n"])])


def asked(script: Script, *, waits: list[float] | None = None, key: str | None = None, **config: Any) -> Any:
    """Send two prompts to a server that follows the script; return its requests, their headers, and the answers."""
    with serving(script) as server:
        backend = OpenAIBackend(base_url=server.base_url, model="m", **config)
        completer = OpenAICompleter(backend, key, wait=(waits if waits is not None else []).append)
        return server, complete(completer)


def in_turn(*replies: Reply) -> Script:
    """Reply in turn, then repeat the last reply."""
    lock, left = threading.Lock(), list(replies)

    def script(_: dict[str, Any]) -> Reply:
        with lock:
            return left.pop(0) if len(left) > 1 else left[0]

    return script


def failing_for(prompt: str, reply: Reply) -> Script:
    return lambda request: reply if request["prompt"] == prompt else echo(request)


# ── A server ───────────────────────────────────────────────────────────────────────────────────────


def test_server_gets_one_request_per_prompt_and_choices_are_in_order() -> None:
    server, answers = asked(echo)

    assert [[one.text for one in answer] for answer in answers] == [["one 0", "one 1"], ["two 0", "two 1"]]
    assert {one.finish_reason for answer in answers for one in answer} == {"stop"}
    assert server.paths == ["/v1/completions"] * 2
    request = next(one for one in server.requests if one["prompt"] == "one")
    assert request == {
        "model": "m", "prompt": "one", "n": 2, "max_tokens": 7, "temperature": 0.9, "top_p": 1.0, "stop": ["</s>"],
        "seed": 0,
    }  # fmt: skip


def test_server_gets_ids_and_penalties_if_set_and_one_request_at_temperature_0() -> None:
    server, _ = asked(lambda request: Reply([""] * request["n"]), prompt_as="ids")

    assert sorted(one["prompt"] for one in server.requests) == [[1, 2], [3]]

    with serving(echo) as server:
        complete(OpenAIBackend(base_url=server.base_url, model="m").open(), repetition_penalty=1.2)

        assert {one["repetition_penalty"] for one in server.requests} == {1.2}

    with serving(echo) as server:
        answers = complete(OpenAIBackend(base_url=server.base_url, model="m").open(), temperature=0.0)

        assert {one["n"] for one in server.requests} == {1}
        assert [len(answer) for answer in answers] == [2, 2]


@pytest.mark.parametrize(
    "trouble",
    [Reply(status=429), Reply(status=500), Reply(status=503), Reply(drops=True), Reply(["cut"], promises_bytes=5)],
    ids=["too many requests", "server error", "unavailable", "dropped connection", "answer cut short"],
)
def test_transient_error_is_retried(trouble: Reply) -> None:
    waits: list[float] = []
    _, answers = asked(in_turn(trouble, trouble, trouble, Reply(["a", "b"])), waits=waits)

    assert [[one.text for one in answer] for answer in answers] == [["a", "b"], ["a", "b"]]
    assert len(waits) == 3


def test_retries_wait_longer_or_as_told_and_a_redirect_is_not_followed() -> None:
    waits: list[float] = []
    with serving(
        in_turn(*[Reply(status=503)] * 3, Reply(status=429, headers={"Retry-After": "7"}), Reply([""]))
    ) as server:
        completer = OpenAICompleter(OpenAIBackend(base_url=server.base_url, model="m"), None, wait=waits.append)
        complete(completer, PROMPTS[:1], n=1)

    assert waits == [0.5, 1.0, 2.0, 7.0]

    with serving(echo) as other:
        _, answers = asked(lambda _: Reply(status=307, headers={"Location": f"{other.base_url}/completions"}), key=KEY)

        assert all("HTTP 307" in str(answer) for answer in answers)
        assert other.requests == []


def test_failures_affect_no_other_prompt_and_are_told_after_the_retries_they_deserve() -> None:
    _, answers = asked(failing_for("one", Reply(status=400, body=b'{"error": "too long"}')))

    assert isinstance(answers[0], GenerationError)
    assert "HTTP 400" in str(answers[0])
    assert "too long" in str(answers[0])
    assert [one.text for one in answers[1]] == ["two 0", "two 1"]

    server, answers = asked(lambda _: Reply(status=500), retries=2)

    assert all("HTTP 500 after 2 retries; check that the server runs" in str(answer) for answer in answers)
    assert len(server.requests) == 6

    server, answers = asked(lambda _: Reply(status=401))

    assert all(isinstance(answer, GenerationError) for answer in answers)
    assert len(server.requests) == 2

    _, answers = asked(lambda _: Reply(is_slow=True), timeout_seconds=0.05, retries=0)

    assert all("TimeoutError" in str(answer) or "timed out" in str(answer) for answer in answers)

    with serving(echo) as server:
        gone = server.base_url
    answers = complete(OpenAIBackend(base_url=gone, model="m", retries=0).open())

    assert all("check that the server runs" in str(answer) for answer in answers)


@pytest.mark.parametrize(
    "body",
    [b"", b"no JSON", b"[]", b'{"choices": [{"index": 0}]}', b'{"choices": 5}', b'{"choices": ["x", "y"]}',
     json.dumps({"choices": [{"text": 1}, {"text": 2}]}).encode(), b"[" * 5000, b'{"choices": [{"text": "only one"}]}'],
)  # fmt: skip
def test_answer_other_than_completions_is_an_error(body: bytes) -> None:
    server, answers = asked(lambda _: Reply(body=body))

    assert all(isinstance(answer, GenerationError) for answer in answers)
    assert len(server.requests) == 2


def test_key_is_sent_and_never_reported_and_a_missing_one_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    with serving(lambda _: Reply(status=401, body=f"wrong key {KEY}".encode())) as server:
        completer = OpenAIBackend(base_url=server.base_url, model="m", api_key_env="A_KEY").open()
        answers = complete(completer)

        assert {one["Authorization"] for one in server.headers} == {f"Bearer {KEY}"}
    assert all("wrong key ***" in str(answer) for answer in answers)
    assert KEY not in f"{completer!r} {answers!r}"

    monkeypatch.delenv("A_KEY", raising=False)

    with pytest.raises(ConfigError, match="the environment variable A_KEY is not set"):
        OpenAIBackend(base_url="http://127.0.0.1:1/v1", model="m", api_key_env="A_KEY").open()


# ── A function ─────────────────────────────────────────────────────────────────────────────────────


def with_all(prompts: list[str], **keywords: Any) -> list[list[str]]:
    assert sorted(keywords) == [
        "max_tokens", "n", "prompt_ids", "repetition_penalty", "seeds", "stop", "temperature", "top_p",
    ]  # fmt: skip
    return [
        [f"{prompt} {ids}" for _ in range(keywords["n"])]
        for prompt, ids in zip(prompts, keywords["prompt_ids"], strict=True)
    ]


def with_some(prompts: list[str], n: int) -> list[list[tuple[str, str]]]:
    return [[(prompt, "stop")] * n for prompt in prompts]


def with_none(prompts: list[str]) -> list[list[Completion]]:
    return [[Completion(prompt), Completion(prompt, "length")] for prompt in prompts]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (with_all, [Completion("one (1, 2)"), Completion("one (1, 2)")]),
        (with_some, [Completion("one", "stop"), Completion("one", "stop")]),
        (with_none, [Completion("one"), Completion("one", "length")]),
    ],
)
def test_function_gets_the_keywords_that_it_declares(function: Callable[..., Any], expected: list[Completion]) -> None:
    assert complete(CallableCompleter(function))[0] == expected


def test_function_is_found_by_name_and_may_return_plain_strings_for_one_sample() -> None:
    answers = complete(CallableCompleter(lambda prompts: [prompt.upper() for prompt in prompts]), n=1)

    assert answers == [[Completion("ONE")], [Completion("TWO")]]

    backend = CallableBackend(target="tests.kinds.tables.test_backends:with_some")

    assert complete(backend.open(), n=1)[1] == [Completion("two", "stop")]


@pytest.mark.parametrize(
    "target", ["tests.kinds.tables.test_backends:absent", "no.such.module:f", "tests.kinds.tables.test_backends:KEY"]
)
def test_backend_that_is_not_a_function_is_a_config_error(target: str) -> None:
    with pytest.raises(ConfigError, match=r"generation\.backend\.target"):
        CallableBackend(target=target).open()


@pytest.mark.parametrize(
    "answer", [None, 5, "text", [], ["a", "b", "c"], ["a", "b"], [["a"], ["b"]], [["a", 1], ["b", 2]], [[None] * 2] * 2]
)
def test_function_that_returns_no_completions_is_an_error(answer: Any) -> None:
    with pytest.raises(GenerationError, match=r"generation\.backend"):
        complete(CallableCompleter(lambda _prompts: answer))


# ── Options ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "backend",
    [CallableBackend(target="a.b:c.d"), OpenAIBackend(base_url="https://host/v1", model="m", api_key_env="K")],
)
def test_each_kind_of_backend_round_trips(backend: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Backend)

    assert adapter.validate_json(backend.model_dump_json()) == backend


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http://", "http://host/v1?key=1", "file:///etc"])
def test_invalid_address_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        validate_options(OpenAIBackend, {"kind": "openai", "base_url": url, "model": "m"}, "backend")
