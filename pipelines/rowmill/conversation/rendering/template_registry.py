"""Chat templates that have a name: the bundled ones, our own text, and those a program registers.

What belongs here: finding a template's text by its name, and giving it to a tokenizer. What does not: the other
ways to say which template is meant (a file, the text, the tokenizer's own; `resolve`), or running it.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rowmill.core.errors import ConfigError, join_choices, suggest_name

TEMPLATE_FOLDER = Path(__file__).parent / "templates"
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
    if name in list_known_templates():
        raise ValueError(
            f"chat template {name!r}: the name is taken; there are {join_choices(list_known_templates())}; "
            "choose another"
        )
    if is_template_text(name):
        raise ValueError(f"chat template {name!r}: that is a template's text, not a name; give the name first")
    _REGISTERED[name] = text


def is_template_text(chosen: str) -> bool:
    """Tell whether a string is a template itself; any other string is a name."""
    return "{{" in chosen or "{%" in chosen


def list_bundled_templates() -> list[str]:
    """List the templates that come with the project."""
    return sorted(path.name.removesuffix(".jinja") for path in TEMPLATE_FOLDER.glob("*.jinja"))


def list_known_templates() -> list[str]:
    """List the bundled templates and the registered ones."""
    return [*list_bundled_templates(), *_REGISTERED]


def read_named_template(name: str) -> str:
    """Return the text of a bundled or registered template.

    Raises
    ------
    ConfigError
        If no template has that name.

    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    known = list_known_templates()
    if name not in known:
        guess = suggest_name(name, known)
        raise ConfigError(
            f"template.chat_template: {name!r} is no bundled template; there are {join_choices(known)}; "
            + (f"did you mean {guess}?" if guess else "name one of them, a file or the text")
        )
    return read_template_file(TEMPLATE_FOLDER / f"{name}.jinja")


def read_template_file(path: Path) -> str:
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
    text = named.get(chat_template) or (
        chat_template if is_template_text(chat_template) else read_named_template(chat_template)
    )
    changed = copy.copy(tokenizer)
    changed.chat_template = text
    return changed
