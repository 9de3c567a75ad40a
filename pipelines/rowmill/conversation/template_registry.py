"""Chat templates by name: the bundled ones, and those that a program registers."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rowmill.core.errors import ConfigError, hint_at_name, join_choices

TEMPLATE_FOLDER = Path(__file__).parent / "templates"
"""The bundled templates, one file per format, each with `{% generation %}`."""

_REGISTERED: dict[str, str] = {}


class HasChatTemplate(Protocol):
    """The only attribute of a `transformers` tokenizer that this module uses."""

    chat_template: Any


Tokenizer = TypeVar("Tokenizer", bound=HasChatTemplate)


def register_chat_template(name: str, text: str) -> None:
    """Register a template under a name in this process; workers are sent its text.

    Raises
    ------
    ValueError
        If a different template has that name already, or the name looks like a template's text.

    """
    if _REGISTERED.get(name) == text:
        return
    if name in list_known_templates():
        raise ValueError(
            f"chat template {name!r}: the name is taken; known names are {join_choices(list_known_templates())}; "
            "choose another name"
        )
    if is_template_text(name):
        raise ValueError(f"chat template {name!r}: this is a template's text; expected a name; pass the name first")
    _REGISTERED[name] = text


def is_template_text(chosen: str) -> bool:
    """Return whether a string is a template's text; any other string is a name."""
    return "{{" in chosen or "{%" in chosen


def list_bundled_templates() -> list[str]:
    """List the bundled templates."""
    return sorted(path.name.removesuffix(".jinja") for path in TEMPLATE_FOLDER.glob("*.jinja"))


def list_known_templates() -> list[str]:
    """List the bundled templates and the registered ones."""
    return [*list_bundled_templates(), *_REGISTERED]


def read_named_template(name: str) -> str:
    """Return the text of a bundled or registered template."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    known = list_known_templates()
    if name not in known:
        hint = hint_at_name(name, known, "or give a file or the template's text")
        raise ConfigError(
            f"template.chat_template: {name!r} is not a bundled template; choose {join_choices(known)}; {hint}"
        )
    return read_template_file(TEMPLATE_FOLDER / f"{name}.jinja")


def read_template_file(path: Path) -> str:
    """Return the text of a template file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"template.chat_template.file: {path} cannot be read as UTF-8 text ({error}); give a readable template file"
        ) from error


def get_chat_template(tokenizer: Tokenizer, chat_template: str) -> Tokenizer:
    """Return a copy of the tokenizer with that template: the name of a bundled, registered or own one, or its text.

    The given tokenizer is unchanged; both share one vocabulary.

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
