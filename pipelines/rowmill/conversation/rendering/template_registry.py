"""Chat templates that have a name: the bundled ones, our own text, and those a program registers.

What belongs here: finding a template's text by its name, and giving it to a tokenizer. What does not: the other
ways to say which template is meant (a file, the text, the tokenizer's own; `resolve`), or running it.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rowmill.core.errors import ConfigError, nearest, one_of

BUNDLED = Path(__file__).parent / "templates"
"""Our own templates, one file per format, each with `{% generation %}`."""

_REGISTERED: dict[str, str] = {}


class HasChatTemplate(Protocol):
    """What a tokenizer of `transformers` is here: something with a chat template."""

    chat_template: Any


Tokenizer = TypeVar("Tokenizer", bound=HasChatTemplate)


def register_chat_template(name: str, text: str) -> None:
    """Make a template known under a name in this process; workers are sent its text.

    Raises
    ------
    ValueError
        If another template of that name is there already, or the name looks like a template's text.

    """
    if _REGISTERED.get(name) == text:
        return
    if name in known_names():
        raise ValueError(
            f"chat template {name!r}: the name is taken; there are {one_of(known_names())}; choose another"
        )
    if is_text(name):
        raise ValueError(f"chat template {name!r}: that is a template's text, not a name; give the name first")
    _REGISTERED[name] = text


def is_text(chosen: str) -> bool:
    """Tell whether a string is a template itself; any other string is a name."""
    return "{{" in chosen or "{%" in chosen


def bundled_names() -> list[str]:
    """List the templates that come with the project."""
    return sorted(path.name.removesuffix(".jinja") for path in BUNDLED.glob("*.jinja"))


def known_names() -> list[str]:
    """List the bundled templates and the registered ones."""
    return [*bundled_names(), *_REGISTERED]


def bundled(name: str) -> str:
    """Return the text of a bundled or registered template.

    Raises
    ------
    ConfigError
        If no template has that name.

    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    known = known_names()
    if name not in known:
        guess = nearest(name, known)
        raise ConfigError(
            f"template.chat_template: {name!r} is no bundled template; there are {one_of(known)}; "
            + (f"did you mean {guess}?" if guess else "name one of them, a file or the text")
        )
    return read_template(BUNDLED / f"{name}.jinja")


def read_template(path: Path) -> str:
    """Return the text of a template file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"template.chat_template.file: {path} cannot be read as UTF-8 text ({error}); name a template file"
        ) from error


def get_chat_template(tokenizer: Tokenizer, chat_template: str) -> Tokenizer:
    """Return the tokenizer with that template: a bundled or registered name, one of its own names, or the text.

    Law: the tokenizer handed in is unchanged; both share one vocabulary.

    Raises
    ------
    ConfigError
        If no template has that name.

    """
    own = tokenizer.chat_template
    named: Mapping[str, str] = own if isinstance(own, Mapping) else {}
    text = named.get(chat_template) or (chat_template if is_text(chat_template) else bundled(chat_template))
    changed = copy.copy(tokenizer)
    changed.chat_template = text
    return changed
