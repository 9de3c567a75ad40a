"""The backends that complete prompts: a Python function, or a server that speaks OpenAI's `/completions`."""

import importlib
import inspect
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeAlias, cast

from pydantic import Field

from rowmill.core.completions import URL_PATTERN, CompletionsServer, read_api_key
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
        """Return the client; nothing is sent yet.

        Raises
        ------
        ConfigError
            If the key's environment variable is not set.

        """
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
