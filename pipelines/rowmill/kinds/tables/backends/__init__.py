"""The kinds of backend, which complete prompts, one line each.

A kind's fields and behaviour are in its own file, the protocol in `completions.py`.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from rowmill.kinds.tables.backends.callable import CallableBackend, CallableCompleter
from rowmill.kinds.tables.backends.completions import Completer, Completion, PromptText
from rowmill.kinds.tables.backends.openai import OpenAIBackend, OpenAICompleter

__all__ = [
    "Backend", "CallableBackend", "CallableCompleter", "Completer", "Completion", "OpenAIBackend", "OpenAICompleter",
    "PromptText", "open_backend",
]  # fmt: skip

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
