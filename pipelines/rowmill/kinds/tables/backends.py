"""The backends that complete prompts: a Python function, or a server that speaks OpenAI's `/completions`."""

import importlib
import inspect
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Annotated, Any, Literal, Protocol, TypeAlias, cast

from pydantic import Field

from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, GenerationError, require_code_permission


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
        ...


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
        """Import the function.

        Raises
        ------
        ConfigError
            If it cannot be imported, or code is forbidden.

        """
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
        """Return what the function returns, checked.

        Raises
        ------
        GenerationError
            If it returns a wrong number of completions, or something else.

        """
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
            found = [_read_completion(value) for value in values]
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


def _read_completion(value: Any) -> Completion:
    if isinstance(value, Completion):
        return value
    if isinstance(value, str):
        return Completion(value)
    if _is_pair(value) and (value[1] is None or isinstance(value[1], str)):
        return Completion(value[0], value[1])
    raise GenerationError(
        f"generation.backend: a completion is a {type(value).__name__}; return text, (text, finish_reason) or a "
        "Completion"
    )


_RETRIED_STATUSES = frozenset({408, 409, 425, 429, *range(500, 600)})
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_MAX_CONCURRENT_REQUESTS = 32
_MAX_ANSWER_BYTES = 256 << 20
_MAX_ERROR_CHARS = 300


class OpenAIBackend(Config):
    """A server that answers `POST {base_url}/completions`, such as vLLM, SGLang, llama.cpp or OpenAI's own."""

    kind: Literal["openai"] = "openai"
    """A completions server."""
    base_url: str = Field(pattern=r"^https?://[^\s/?#]+[^\s?#]*$")
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
        """Return the client; nothing is sent yet.

        Raises
        ------
        ConfigError
            If the key's environment variable is not set.

        """
        key = None
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if not key:
                raise ConfigError(
                    f"generation.backend.api_key_env: the environment variable {self.api_key_env} is not set; "
                    "set it to the server's key, or delete api_key_env if the server needs none"
                )
        return OpenAICompleter(self, key)


class OpenAICompleter:
    """Sends prompts to a completions server; `wait` sleeps between attempts."""

    def __init__(self, config: OpenAIBackend, key: str | None, *, wait: Callable[[float], None] = time.sleep) -> None:
        self._config = config
        self._key = key
        self._wait = wait
        self._url = f"{config.base_url.rstrip('/')}/completions"
        self._opener = urllib.request.build_opener(_NoRedirect)

    def __repr__(self) -> str:
        """Name the server, not the key."""
        return f"{type(self).__name__}({self._url!r}, model={self._config.model!r})"

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
                found = self._send_with_retries({**options, "prompt": sent, "seed": seed}, drawn)
            except GenerationError as error:
                return error
            return found * n if drawn < n else found

        with ThreadPoolExecutor(min(len(prompts), _MAX_CONCURRENT_REQUESTS) or 1) as pool:
            return list(pool.map(ask, prompts, seeds))

    def _send_with_retries(self, body: dict[str, Any], n: int) -> list[Completion]:
        """Send one request until it is answered, fails permanently, or has no retries left."""
        sent = json.dumps(body).encode()
        pause, problem = _FIRST_WAIT_S, ""
        for attempt in range(self._config.retries + 1):
            asked_for = None
            try:
                return self._parse_answer(self._post_request(sent), n)
            except urllib.error.HTTPError as error:
                problem = self._describe_http_error(error)
                # The header may be absent, or a date.
                with suppress(ValueError):
                    asked_for = max(0.0, float(error.headers.get("Retry-After") or ""))
                if error.code not in _RETRIED_STATUSES:
                    raise self._make_error(problem, attempt) from None
            except (OSError, HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < self._config.retries:
                self._wait(min(_LONGEST_WAIT_S, pause if asked_for is None else asked_for))
                pause *= 2
        raise self._make_error(problem, self._config.retries) from None

    def _post_request(self, sent: bytes) -> bytes:
        """Return the response body; an attempt ends at its deadline even while bytes still arrive."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, sent, headers, method="POST")  # noqa: S310  (http or https, checked)
        limit = self._config.timeout_seconds
        deadline = time.monotonic() + limit
        with self._opener.open(request, timeout=limit) as answer:
            read: list[bytes] = []
            size = 0
            while piece := answer.read1(1 << 16):
                read.append(piece)
                size += len(piece)
                if time.monotonic() > deadline:
                    raise TimeoutError("the answer did not end in time")
                if size > _MAX_ANSWER_BYTES:
                    raise GenerationError(self._format_problem(f"the answer is over {_MAX_ANSWER_BYTES} bytes"))
            length = answer.headers.get("Content-Length")
            if length is not None and length.isdigit() and int(length) != size:
                raise ConnectionError(f"the answer ended after {size} of {length} bytes")
            return b"".join(read)

    def _parse_answer(self, answer: bytes, n: int) -> list[Completion]:
        """Return the completions of a response, in the order of their index."""
        try:
            choices: list[dict[str, Any]] = json.loads(answer)["choices"]
            ordered = sorted(choices, key=lambda one: one.get("index", 0))
            found = [Completion(one["text"], one.get("finish_reason")) for one in ordered]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise GenerationError(
                self._format_problem(
                    "the answer is not a completions object; check that base_url is that of a completions server"
                )
            ) from None
        if len(found) != n or not all(isinstance(one.text, str) for one in found):
            raise GenerationError(self._format_problem(f"the answer has {len(found)} texts; {n} were requested"))
        return found

    def _describe_http_error(self, error: urllib.error.HTTPError) -> str:
        """Return the server's error message, shortened."""
        try:
            said = error.read(1 << 16).decode("utf-8", "replace")
        except (OSError, HTTPException):
            said = ""
        finally:
            error.close()
        return f"HTTP {error.code} {' '.join(said.split())[:_MAX_ERROR_CHARS]}".rstrip()

    def _make_error(self, problem: str, retries: int) -> GenerationError:
        after = f" after {retries} retries" if retries else ""
        return GenerationError(
            self._format_problem(f"{problem}{after}; check that the server runs and accepts this request")
        )

    def _format_problem(self, problem: str) -> str:
        """Format a problem without the key, which the server may have repeated."""
        text = f"generation.backend: {self._url}: {problem}"
        return text if not self._key else text.replace(self._key, "***")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        """Follow none."""


Backend: TypeAlias = Annotated[
    CallableBackend  # a Python function, named as `module:name`
    | OpenAIBackend,  # any server that speaks OpenAI's `/completions`
    Field(discriminator="kind"),
]


def open_backend(backend: CallableBackend | OpenAIBackend | Callable[..., Any]) -> Completer:
    """Open a backend; a function may be given instead of a configuration.

    Raises
    ------
    ConfigError
        If the function cannot be found, or the server's address or key cannot be used.

    """
    if isinstance(backend, CallableBackend | OpenAIBackend):
        return backend.open()
    return CallableCompleter(backend)
