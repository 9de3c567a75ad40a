"""The kind `supervised`: a prompt and a trained response, joined without a chat template.

What belongs here: the kind's configuration and reading its two columns, Alpaca's `instruction` and `input` as one
prompt. What does not: separators and special tokens, which are ids (`tokenizer.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rowmill.conversation.truncation import OverlongPolicy
from rowmill.core.config import describe_type
from rowmill.core.json import Json
from rowmill.formats.canonicalization import RecordReader, RowOptions
from rowmill.formats.detection import join_alpaca_prompt
from rowmill.formats.kind import (
    ALL_GROUPS,
    PAIR_SIDES,
    DatasetKind,
    DatasetOptions,
    TokenOptions,
    refuse_mask_names,
    refuse_overlong_policy,
)
from rowmill.formats.record_values import apply_eos_alias, rename_aliases
from rowmill.schema.rows import Rejected, Row, RowKind, make_plain_report


class Supervised(DatasetKind):
    """Each record is a prompt and a response."""

    ROW_KIND: ClassVar[RowKind] = "pair"
    GROUPS: ClassVar[frozenset[str]] = ALL_GROUPS - {"reasoning", "tools", "template"}
    FIELDS_NOT_READ: ClassVar[Mapping[str, frozenset[str]]] = {
        "filters": frozenset({"min_chars", "max_chars"}),
        "loss": frozenset({"supervise", "think_loss", "lead", "end_of_turn", "trailing", "finish", "weights"}),
        "truncation": frozenset({"token_cut"}),
    }
    OVERLONG_POLICIES: ClassVar[tuple[OverlongPolicy, ...]] = ("truncate", "drop", "raise", "keep")
    KIND_ALIASES: ClassVar[tuple[str, ...]] = ("instruction",)
    ALIASES: ClassVar[Mapping[str, str]] = {
        "prompt_key": "input_field",
        "input_key": "input_field",
        "response_key": "output_field",
        "target_key": "output_field",
        "enforce_eos": "add_eos",
    }

    kind: Literal["supervised"] = "supervised"
    """Pairs of prompt and response, joined without a chat template."""
    input_field: str = "prompt"
    """Column with the prompt. For `instruction`, Alpaca's `input` is joined to it; if the column is absent, an Alpaca
    record (`instruction`, `output`) is read as such."""
    output_field: str = "response"
    """Column with the response."""
    separate_with: str | Annotated[int, Field(ge=0)] | None = None
    """Text, or one token id, between prompt and response; it belongs to the prompt."""
    domain_key: str | None = None
    """Column that names the row's domain; a row without text there is in `__default__`."""
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

    def check_options(self, options: DatasetOptions) -> None:
        """Refuse what can be done to conversations only."""
        refuse_overlong_policy(self, options, "cannot be done to a pair, which has one response")
        refuse_mask_names(self.get_name(), set(options.loss.mask) - PAIR_SIDES, "prompt and response")
        super().check_options(options)
        refuse_joined_separator(self.separate_with, options)

    def get_token_options(self) -> TokenOptions:
        """Return BOS, EOS and separator of a pair."""
        return TokenOptions(separate_with=self.separate_with, add_bos=self.add_bos, add_eos=self.add_eos)

    def list_answer_columns(self) -> Sequence[str | None]:
        """Return the columns of prompt and response."""
        return [self.input_field, self.output_field, self.domain_key]

    def make_record_reader(self, options: RowOptions) -> RecordReader:
        """Read every record as a pair."""
        return self._read_row

    def _read_row(self, record: Mapping[str, Json]) -> Row | Rejected:
        pair = read_pair(record, self)
        if isinstance(pair, Rejected):
            return pair
        return Row("pair", text=pair[1], output=pair[2], report=make_plain_report(pair[0]))


def refuse_joined_separator(separator: str | int | None, options: DatasetOptions) -> None:
    """Refuse a token id between two sides that are encoded as one text."""
    if options.loss.boundary == "whole" and isinstance(separator, int):
        raise ValueError(
            "loss.boundary: whole encodes input and output as one text, and separate_with is a token id; expected a "
            "text or null; write the separator's text, or set loss.boundary: split"
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
