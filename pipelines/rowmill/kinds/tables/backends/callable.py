"""A Python function as backend."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

from pydantic import Field

from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, GenerationError, require_code_permission
from rowmill.kinds.tables.backends.completions import Completion, PromptText


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
