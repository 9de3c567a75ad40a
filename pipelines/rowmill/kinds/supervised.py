"""The kind `supervised`: a prompt and a trained response, joined without a chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rowmill.conversation.truncation import OverlongPolicy
from rowmill.core.config import describe_type
from rowmill.core.json import Json
from rowmill.kinds.base import (
    ALL_GROUPS,
    NOT_READ_OF_PLAIN_TEXT,
    PAIR_SIDES,
    DatasetKind,
    DatasetOptions,
    RecordReader,
    refuse_mask_names,
    refuse_overlong_policy,
)
from rowmill.kinds.reading.recognition import try_options
from rowmill.kinds.shared.messages import (
    CONTEXT_COLUMNS,
    PAIR_COLUMNS,
    RejectError,
    get_at_path,
    is_list,
    join_context,
    parse_messages,
    write_number,
)
from rowmill.kinds.shared.samples import Recognition, Sample, choose_best, suggest_context
from rowmill.schema.rows import Row, RowKind, make_plain_report

NESTED_RESPONSES = ("answers.text.0", "answers.0", "answer.text.0", "answer.value", "responses.0")
"""Paths of a response inside a column, as in SQuAD."""


class Supervised(DatasetKind):
    """Each record is a prompt and a response."""

    PRECEDENCE: ClassVar[int] = 50
    ROW_KIND: ClassVar[RowKind] = "pair"
    GROUPS: ClassVar[frozenset[str]] = ALL_GROUPS - {"reasoning", "tools"}
    FIELDS_NOT_READ: ClassVar[Mapping[str, frozenset[str]]] = {
        "filters": frozenset({"min_chars", "max_chars"}),
        "loss": frozenset({"supervise", "think_loss", "lead", "end_of_turn", "trailing", "finish", "weights"}),
        "template": NOT_READ_OF_PLAIN_TEXT,
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
    """Column with the prompt, or its path; if it is absent, an Alpaca record (`instruction`, `output`) is read as
    such."""
    context_fields: list[str] = Field(default=[*CONTEXT_COLUMNS])
    """Columns whose text belongs to the prompt: each is appended to it on a new line."""
    output_field: str = "response"
    """Column with the response, or its path, as in `answers.text.0`."""
    ignore_columns: list[str] = Field(default=[])
    """Columns that are left out on purpose; others of text that nothing reads are reported, and refused if their name
    says that they belong to the prompt, or what trains."""
    separate_with: str | Annotated[int, Field(ge=0)] | None = None
    """Text, or one token id, between prompt and response; it belongs to the prompt."""
    domain_key: str | None = None
    """Column that names the row's domain; a row without text there is in `__default__`."""
    add_bos: Literal["auto"] | bool = "auto"
    """Whether the beginning-of-text token starts a pair; auto: if the tokenizer adds it itself."""
    add_eos: Literal["auto"] | bool = "auto"
    """Whether the end-of-text token ends a pair; auto: if the tokenizer has one."""

    @classmethod
    def recognise(cls, sample: Sample) -> Recognition | None:
        """Recognise two columns of text, one of which answers the other."""
        present = set(sample.columns)
        named = ((sample.find_column(one), sample.find_column(other)) for one, other in PAIR_COLUMNS)
        paths = [path for path in NESTED_RESPONSES if path.partition(".")[0] in present]
        # Which of several responses is meant, only a rank or the number of the right one tells.
        paths = [
            path
            for path in paths
            if path not in ("answers.0", "responses.0")
            or all(get_at_path(record, f"{path[:-1]}1") is None for record in sample.whole)
        ]
        nested = ((prompt, path) for path in paths for prompt in ("question", "prompt") if prompt in present)
        found = choose_best(
            try_options(
                cls,
                {
                    "input_field": prompt,
                    "output_field": response,
                    **suggest_context(sample, prompt, response.partition(".")[0]),
                },
                sample,
            )
            for prompt, response in (*named, *nested)
            if prompt is not None and response is not None
        )
        if found is None:
            return None
        prompt, response = found.options["input_field"], found.options["output_field"]
        notes = [
            "they are joined without a chat template; to have one, write:",
            f"{{kind: chat, prompt_fields: [{prompt}], response_fields: [{response}]}}",
        ]
        return replace(found, notes=[*found.notes, *(notes if "." not in response else [])])

    def check_options(self, options: DatasetOptions) -> None:
        """Refuse what can be done to conversations only."""
        refuse_overlong_policy(self, options, "cannot be done to a pair, which has one response")
        refuse_mask_names(self.get_name(), set(options.loss.mask) - PAIR_SIDES, "prompt and response")
        super().check_options(options)
        refuse_joined_separator(self.separate_with, options)

    def list_answer_paths(self) -> Sequence[str]:
        """Return the path of the response, and Alpaca's."""
        return [self.output_field, "output"]

    def list_answer_columns(self) -> Sequence[str | None]:
        """Return the columns of prompt and response."""
        return [self.input_field, self.output_field, self.domain_key]

    def make_record_reader(self, options: DatasetOptions) -> RecordReader:
        """Read every record as a pair."""
        return self._read_row

    def _read_row(self, record: Mapping[str, Json]) -> Row:
        prompt_field, response_field, schema = self.input_field, self.output_field, "prompt_response"
        if (
            record.get(prompt_field) is None
            and record.get(response_field) is None
            and record.get("instruction") is not None
            and record.get("output") is not None
        ):
            prompt_field, response_field, schema = "instruction", "output", "alpaca"
        prompt = parse_messages(get_at_path(record, prompt_field))
        response = parse_messages(write_number(get_at_path(record, response_field)))
        for name, value in ((prompt_field, prompt), (response_field, response)):
            if value is None:
                raise RejectError(
                    "missing_field", f"{name} is absent or null; the record has {', '.join(sorted(record)[:20])}"
                )
            if type(value) is not str:
                hint = "; kind: chat reads messages" if is_list(value) else ""
                raise RejectError("content_not_text", f"{name} is {describe_type(value)}{hint}")
        if not response or response.isspace():
            raise RejectError("empty_text", f"{response_field} is blank")
        text, used = str(prompt), (prompt_field.partition(".")[0],)
        if prompt_field in record:
            text, used = join_context(record, prompt_field, self.context_fields, response_field)
        used = (*used, response_field.partition(".")[0])
        return Row("pair", text=text, output=response, report=make_plain_report(schema), read_columns=used)


def refuse_joined_separator(separator: str | int | None, options: DatasetOptions) -> None:
    """Refuse a token id between two sides that are encoded as one text."""
    if options.loss.boundary == "whole" and isinstance(separator, int):
        raise ValueError(
            "loss.boundary: whole encodes input and output as one text, and separate_with is a token id; expected a "
            "text or null; write the separator's text, or set loss.boundary: split"
        )
