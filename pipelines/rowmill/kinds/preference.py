"""The kind `preference`: a prompt with a better and a worse answer, or with one answer that is marked as good or bad.

messages   S U1 A1 U2      the prompt, which both sides share
chosen     A2
rejected   B2 call result B3
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from rowmill.conversation.truncation import OverlongPolicy
from rowmill.core.config import describe_type
from rowmill.core.json import Json, canonical_json, to_json
from rowmill.kinds.base import DatasetOptions, RowReader, TokenOptions, refuse_overlong_policy
from rowmill.kinds.preference_shapes import FoundSides, find_sides
from rowmill.kinds.shared.canonicalization import Canonicalizer, RecordReader, RowOptions
from rowmill.kinds.shared.columns import MessageColumns
from rowmill.kinds.shared.conversation_rows import ConversationReader, DetectedMessages
from rowmill.kinds.shared.messages import get_at_path, is_mapping, remove_flags
from rowmill.kinds.shared.recognition import Recognition, Sample, choose_best, try_options
from rowmill.kinds.shared.unread import CONTEXT_COLUMNS
from rowmill.schema.examples import Objective
from rowmill.schema.rows import Message, Rejected, Row, RowKind, make_plain_report

SIDE_COLUMNS = (
    *(("response_chosen", "response_rejected"), ("chosen_answer", "rejected_answer"), ("accepted", "rejected")),
    *(("chosen_conversations", "rejected_conversations"), ("chosen_conversation", "rejected_conversation")),
    *(("win", "lose"), ("better", "worse"), ("preferred", "dispreferred"), ("good", "bad"), ("positive", "negative")),
)
"""Columns of a better and a worse answer beside those that are read by themselves."""

PROMPT_COLUMNS = ("history", "query", "problem", "input", "inputs", "context", "post", "title", "text")
"""Columns of a prompt beside those that are read by themselves."""


class Preference(MessageColumns):
    """Each record is a prompt with a chosen and a rejected answer, or with one that is marked."""

    MEANT_BY: ClassVar = ("dpo", "kto", "orpo", "trl")

    PRECEDENCE: ClassVar[int] = 20
    ROW_KIND: ClassVar[RowKind] = "preference"
    FIELDS_NOT_READ: ClassVar[Mapping[str, frozenset[str]]] = {
        "filters": frozenset({"min_chars", "max_chars"}),
        "template": frozenset({"turns"}),
        "truncation": frozenset({"truncate_side"}),
        "loss": frozenset({"weights", "prompt_weight", "allow_negative", "mask_user_turns", "mask_inputs"}),
        "packing": frozenset({"slice_strategy", "tail", "share_prefixes", "min_shared"}),
    }

    OVERLONG_POLICIES: ClassVar[tuple[OverlongPolicy, ...]] = ("truncate", "drop", "raise", "keep")

    kind: Literal["preference"] = "preference"
    """Pairs of a chosen and a rejected answer, or answers that are marked as good or bad."""
    objective: Literal["paired", "unpaired"] = "paired"
    """paired: an example is both sides (reward models, DPO); unpaired: an example is one side with its label (KTO), so
    that a pair gives two."""
    prompt_fields: list[str] = Field(default=["prompt", "question", "instruction"], min_length=1)
    """Columns that may hold the prompt, as text or messages; the first that is not null is used. Columns `system` and
    `history` belong to it."""
    context_fields: list[str] = Field(default=[*CONTEXT_COLUMNS])
    """Columns whose text belongs to a prompt that is text: each is appended to it on a new line."""
    chosen_fields: list[str] = Field(default=["chosen", "chosen_messages", "chosen_response"], min_length=1)
    """Columns that may hold the better side, as text, a message or messages."""
    rejected_fields: list[str] = Field(default=["rejected", "rejected_messages", "rejected_response"], min_length=1)
    """Columns that may hold the worse side."""
    completion_fields: list[str] = Field(default=["completion", "response"], min_length=1)
    """Columns that may hold the only answer of a record."""
    label_fields: list[str] = Field(default=["label", "kto_tag"], min_length=1)
    """Columns that may hold whether the only answer is good: true, false, 1 or 0."""
    text: Literal["template", "raw"] = "template"
    """template: a prompt and sides that are text are messages, which the chat template renders; raw: they are encoded
    as they are, one after the other, and a record whose prompt or side is more than one text is rejected. Texts of HH
    are parted behind the last `Assistant:` that both have."""
    add_eos: Literal["auto"] | bool = "auto"
    """With `text: raw`: whether the end-of-text token ends a side; auto: if the tokenizer has one."""
    margin_field: str | None = "auto"
    """Path of a pair's margin; auto: `margin`, else `score_chosen` minus `score_rejected`; null: no margins."""

    @classmethod
    def recognise(cls, sample: Sample) -> Recognition | None:
        """Recognise pairs of answers, answers with a rank, and answers with a label."""
        present = set(sample.columns)
        named = [
            {"chosen_fields": [one], "rejected_fields": [other]}
            for one, other in SIDE_COLUMNS
            if {one, other} <= present
        ]
        prompts = [name for name in PROMPT_COLUMNS if name in present]
        known = present & {"prompt", "question", "instruction"}
        prompt = {} if known or not prompts else {"prompt_fields": prompts[:1]}
        options: list[dict[str, Any]] = [prompt, *({**prompt, **sides} for sides in named)]
        return choose_best(
            try_options(cls, {**objective, **one}, sample)
            for objective in ({}, {"objective": "unpaired"})
            for one in options
        )

    @classmethod
    def select_group_defaults(
        cls, options: Mapping[str, Any], groups: Mapping[str, Any]
    ) -> Mapping[str, Mapping[str, Any]]:
        """Encode the prompt alone, cut no answer, and pack nothing."""
        return {
            "loss": {"boundary": "split"},
            "truncation": {"token_cut": "reject"},
            "packing": {"pack": False},
        }

    def check_options(self, options: DatasetOptions) -> None:
        """Refuse what would divide a pair, or train something else than its answers."""
        super().check_options(options)
        if self.text == "template" and self.add_eos != "auto":
            raise ValueError(
                f"format.add_eos: {str(self.add_eos).lower()} with text: template, which ends each side itself; only "
                "text: raw reads it; delete add_eos, or set text: raw"
            )
        refuse_overlong_policy(self, options, "would divide a pair")
        if options.packing.pack_strategy == "concat":
            raise ValueError(
                "packing.pack_strategy: concat would divide a pair; allowed for a preference dataset are best_fit and "
                "greedy; choose one"
            )
        if not options.packing.block_cross_document_attention:
            raise ValueError(
                "packing.block_cross_document_attention: false would show one side to the other; expected true for a "
                "preference dataset; delete it"
            )

    def uses_template(self) -> bool:
        """Return whether sides are messages."""
        return self.text == "template"

    def get_token_options(self) -> TokenOptions:
        """Return the model's roles, BOS and EOS."""
        return replace(super().get_token_options(), add_eos=self.add_eos)

    def get_objective(self) -> Objective:
        """Return whether an example is a pair."""
        return self.objective

    def count_sides(self) -> int:
        """Return how many texts an example has, each of which may be as long as the limit."""
        return 2 if self.objective == "paired" else 1

    def list_answer_columns(self) -> None:
        """Return nothing: the columns of preference data are read."""

    def make_record_reader(self, options: RowOptions) -> RecordReader:
        """Read every record as a prompt with its sides."""
        return _PreferenceReader(self, options, groups_by_prompt=True)

    def has_groups(self, options: DatasetOptions) -> bool:
        """Return true: without a group key, rows with the same prompt are a group."""
        return True

    def open_row_reader(self, options: DatasetOptions, base: Path, dataset: str) -> RowReader:
        """Read records; without a group key, a row's group is its prompt."""
        own = _PreferenceReader(self, options, groups_by_prompt=options.splits.group_key is None)
        return Canonicalizer(options, group_key=options.splits.group_key, order_key=options.splits.time_key, read=own)


@dataclass(frozen=True, slots=True)
class _CanonicalSides:
    """The canonical prompt and the sides after it; a side that the record lacks is None.

    `whole` is the row of a side with its prompt, which has what both share beside messages.
    """

    whole: Row
    prompt: Sequence[Message]
    sides: tuple[Sequence[Message] | None, Sequence[Message] | None]


class _PreferenceReader:
    """Reads the preferences of one dataset."""

    def __init__(self, columns: Preference, options: RowOptions, *, groups_by_prompt: bool) -> None:
        self._columns = columns
        self._groups_by_prompt = groups_by_prompt
        self._roles = frozenset(columns.assistant_roles)
        self._messages = ConversationReader(columns, options, _reject_undetected)

    def __call__(self, record: Mapping[str, Json]) -> Row | Rejected:
        found = find_sides(record, self._columns)
        if isinstance(found, Rejected):
            return found
        if found.label is not None and self._columns.objective == "paired":
            return Rejected("unpaired_row", "one answer with a label; format.objective: unpaired takes such records")
        read = _read_texts(found) if self._columns.text == "raw" else self._read_messages(record, found)
        if isinstance(read, Rejected):
            return read
        margin = self._read_margin(record, found)
        if isinstance(margin, Rejected):
            return margin
        chosen, rejected = (None if side is None else to_json(list(side)) for side in read.sides)
        columns = {"chosen": chosen, "rejected": rejected, "label": found.label, "margin": margin}
        row = replace(
            read.whole,
            kind="preference",
            messages=tuple(read.prompt),
            columns=columns,
            read_columns=(*found.columns, "margin", "score_chosen", "score_rejected"),
        )
        if not self._groups_by_prompt:
            return row
        prompt = canonical_json([list(row.messages), row.tools, row.template_kwargs])
        return replace(row, group_key=f'"{hashlib.blake2b(prompt, digest_size=16).hexdigest()}"')

    def _read_messages(self, record: Mapping[str, Json], found: FoundSides) -> _CanonicalSides | Rejected:
        rows = self._read_sides(record, found)
        if isinstance(rows, Rejected):
            return rows
        whole = next(row for row in rows if row is not None)
        return self._part_sides(record, found, [None if row is None else row.messages for row in rows], whole)

    def _read_sides(self, record: Mapping[str, Json], found: FoundSides) -> list[Row | None] | Rejected:
        """Read the prompt with each side as one conversation, so that calls and reasoning find their messages."""
        rows: list[Row | None] = []
        for side in (found.chosen, found.rejected):
            if side is None:
                rows.append(None)
                continue
            if not side:
                return Rejected("empty_completion", "a side has no messages")
            row = self._messages.read_conversation(record, found.as_detected([*(found.prompt or ()), *side]))
            if isinstance(row, Rejected):
                return row
            rows.append(row)
        return rows

    def _part_sides(
        self, record: Mapping[str, Json], found: FoundSides, whole: Sequence[Sequence[Message] | None], row: Row
    ) -> _CanonicalSides | Rejected:
        """Part the prompt from the canonical sides."""
        texts = [None if side is None else [remove_flags(one) for one in side] for side in whole]
        present = [side for side in texts if side is not None]
        if len(present) > 1 and present[0] == present[1]:
            return Rejected("identical_sides", "both sides have the same messages")
        size = _count_common(present)
        if found.prompt is not None:
            asked = self._messages.read_conversation(record, found.as_detected(list(found.prompt)))
            if isinstance(asked, Rejected):
                return asked
            if size < len(asked.messages):
                return Rejected("prompt_mismatch", "the prompt reads otherwise before one of its answers")
            size = len(asked.messages)
        elif len(present) == 1:
            size = 1 + max((i for i, one in enumerate(present[0]) if one["role"] in ("user", "tool")), default=-1)
        if not size:
            return Rejected("prompt_mismatch", "the sides share no prompt")
        sides = [None if side is None else side[size:] for side in whole]
        for side in sides:
            if side is not None and not side:
                return Rejected("empty_completion", "a side ends with the prompt, or is the beginning of the other")
            if side is not None and side[0]["role"] not in self._roles:
                return Rejected("prompt_mismatch", f"a side goes on with the role {side[0]['role']}, not the model's")
        return _CanonicalSides(row, present[0][:size], (sides[0], sides[1]))

    def _read_margin(self, record: Mapping[str, Json], found: FoundSides) -> float | Rejected | None:
        field = self._columns.margin_field
        if field is None or found.label is not None:
            return None
        given = [(field, get_at_path(record, field))]
        if field == "auto":
            given = [("margin", record.get("margin"))]
            if given[0][1] is None:
                given = [(name, record.get(name)) for name in ("score_chosen", "score_rejected")]
        if any(value is None for _, value in given):
            return None
        numbers: list[float] = []
        for name, value in given:
            number = _to_finite(value)
            if number is None:
                return Rejected("bad_margin", f"{name} is {describe_type(value)}, expected a finite number")
            numbers.append(number)
        margin = _to_finite(numbers[0] - (numbers[1] if len(numbers) > 1 else 0.0))
        return Rejected("bad_margin", "the difference of the scores is not finite") if margin is None else margin


def _read_texts(found: FoundSides) -> _CanonicalSides | Rejected:
    """Return a prompt and sides of plain text as a message each, exactly as they are in the record."""
    prompt = _read_single_text(found.prompt, "user", "the prompt")
    if isinstance(prompt, Rejected):
        return prompt
    sides: list[Sequence[Message] | None] = []
    for side in (found.chosen, found.rejected):
        if side is not None and not side:
            return Rejected("empty_completion", "a side is blank")
        read = None if side is None else _read_single_text(side, "assistant", "a side")
        if isinstance(read, Rejected):
            return read
        sides.append(read)
    if sides[0] == sides[1]:
        return Rejected("identical_sides", "both sides have the same text")
    row = Row("preference", report=make_plain_report(found.schema))
    return _CanonicalSides(row, prompt, (sides[0], sides[1]))


def _read_single_text(messages: Sequence[Json] | None, role: str, name: str) -> list[Message] | Rejected:
    if messages is None or not messages:
        return Rejected("prompt_mismatch", f"{name} is blank or absent; text: raw needs it apart from the sides")
    one = messages[0]
    if len(messages) > 1 or not is_mapping(one) or set(one) != {"role", "content"} or type(one["content"]) is not str:
        return Rejected("content_not_text", f"{name} is not a single text, as text: raw needs")
    if one["role"] != role:
        return Rejected("prompt_mismatch", f"{name} is a message of {one['role']}")
    return [{"role": role, "content": one["content"]}]


def _to_finite(value: Json) -> float | None:
    """Return a number that float32 can hold; None for any other value."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _LARGEST_MARGIN:
        return None
    return float(value)


_LARGEST_MARGIN = (2 - 2.0**-23) * 2.0**127


def _reject_undetected(record: Mapping[str, Json]) -> DetectedMessages | Rejected:
    """Reject a record whose messages nobody found: the sides of a preference are found before they are read."""
    return Rejected("unknown_schema", ", ".join(sorted(record)[:20]))


def _count_common(sides: Sequence[Sequence[Message]]) -> int:
    """Return how many first messages all sides share."""
    count = 0
    for messages in zip(*sides, strict=False):
        if any(message != messages[0] for message in messages):
            break
        count += 1
    return count
