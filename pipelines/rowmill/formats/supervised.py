"""Pairs: a prompt that is read and a response that trains, joined without a chat template.

What belongs here: the kind's configuration and reading its two columns, Alpaca's `instruction` and `input`
as one prompt. What does not: separators and special tokens, which are ids (`tokenizer.py`).
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rowmill.core.config import Config, describe_type
from rowmill.core.json import Json
from rowmill.formats.columns import apply_eos_alias, rename_aliases
from rowmill.formats.detection import join_alpaca_prompt
from rowmill.schema.rows import Rejected


class Supervised(Config):
    """Each record is a prompt and a response."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "prompt_key": "input_field",
        "input_key": "input_field",
        "response_key": "output_field",
        "target_key": "output_field",
        "enforce_eos": "add_eos",
    }

    kind: Literal["supervised"] = "supervised"
    """Pairs, joined without a template."""
    input_field: str = "prompt"
    """Column with the prompt. `instruction` joins Alpaca's `input` to it; without the column, an Alpaca record
    (`instruction`, `output`) is read as one."""
    output_field: str = "response"
    """Column with the response."""
    separate_with: str | Annotated[int, Field(ge=0)] | None = None
    """Text, or one token id, between prompt and response; it belongs to the prompt."""
    domain_key: str | None = None
    """Column that names the row's domain; a row without a text there is in `__default__`."""
    add_bos: Literal["auto"] | bool = "auto"
    """Whether the beginning-of-text token starts a pair; auto: if the tokenizer adds it itself."""
    add_eos: Literal["auto"] | bool = "auto"
    """Whether the end-of-text token ends a pair; auto: if the tokenizer has one."""

    @model_validator(mode="before")
    @classmethod
    def _pair_aliases(cls, values: Json) -> Json:
        return apply_eos_alias(
            rename_aliases(values, {alias: name for alias, name in cls.ALIASES.items() if alias != "enforce_eos"})
        )


def read_pair(record: Mapping[str, Json], options: Supervised) -> tuple[str, str, str] | Rejected:
    """Return schema, prompt and response of a record."""
    prompt_field, response_field, schema = options.input_field, options.output_field, "prompt_response"
    if _is_alpaca(record, options):
        prompt_field, response_field, schema = "instruction", "output", "alpaca"
    prompt, response = record.get(prompt_field), record.get(response_field)
    for name, value in ((prompt_field, prompt), (response_field, response)):
        if value is None:
            return Rejected(
                "missing_field", f"{name} is absent or null; the record has {', '.join(sorted(record)[:20])}"
            )
        if type(value) is not str:
            return Rejected("content_not_text", f"{name} is {describe_type(value)}")
    if not response or response.isspace():
        return Rejected("empty_text", f"{response_field} is blank")
    whole = join_alpaca_prompt(record) if prompt_field == "instruction" else str(prompt)
    return whole if isinstance(whole, Rejected) else (schema, whole, str(response))


def _is_alpaca(record: Mapping[str, Json], options: Supervised) -> bool:
    return (
        record.get(options.input_field) is None
        and record.get(options.output_field) is None
        and record.get("instruction") is not None
        and record.get("output") is not None
    )
