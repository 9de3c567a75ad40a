r"""The kind `preference`: a prompt with a better and a worse answer, or with one answer that is marked as good or bad.

messages   S U1 A1 U2      the prompt, which both sides share
chosen     A2
rejected   B2 call result B3

Of these shapes, the first that a record has:

    ranked           {"prompt": …, "completions": [{"completion": …, "score": 3}, …]}: the best against the worst
    hh_text          {"chosen": "\n\nHuman: …\n\nAssistant: …", "rejected": "\n\nHuman: …"}
    compared         {"prompt": …, "response_0": …, "response_1": …, "better_response_id": 1}
    sharegpt_pair    {"conversations": […], "chosen": {…}, "rejected": {…}}
    rejected_branch  {"messages": […], "rejected_response": "…"}, or "rejected_messages": […]
    explicit         {"prompt": …, "chosen": …, "rejected": …}, each text, a message or messages
    implicit         {"chosen": […], "rejected": […]}: the prompt is what both begin with
    unpaired         {"prompt": …, "completion": …, "label": true}, or {"messages": […], "label": true}
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from rowmill.conversation.truncation import OverlongPolicy
from rowmill.core.config import describe_type
from rowmill.core.json import Json, canonical_json, to_json
from rowmill.core.stage_names import CANONICAL_ROWS, PACKED_SHARDS, TOKENIZED_EXAMPLES
from rowmill.core.storage import Store
from rowmill.kinds.base import DatasetOptions, RecordReader, refuse_overlong_policy
from rowmill.kinds.reading.conversation_rows import ConversationReader, DetectedMessages, MessageColumns
from rowmill.kinds.reading.recognition import try_options
from rowmill.kinds.shared.messages import (
    CONTEXT_COLUMNS,
    RejectError,
    find_first_column,
    find_system,
    get_at_path,
    is_list,
    is_mapping,
    join_context,
    parse_messages,
    read_history,
    remove_flags,
    split_open_transcript,
    split_transcript,
    write_number,
)
from rowmill.kinds.shared.samples import Recognition, Sample, choose_best, suggest_context
from rowmill.schema.checks import Check
from rowmill.schema.counts import Counts, compute_share, find_share
from rowmill.schema.examples import Objective
from rowmill.schema.manifest import Part
from rowmill.schema.rows import Message, Row, RowKind, make_plain_report

SIDE_COLUMNS = (
    *(("response_chosen", "response_rejected"), ("chosen_answer", "rejected_answer"), ("accepted", "rejected")),
    *(("chosen_conversations", "rejected_conversations"), ("chosen_conversation", "rejected_conversation")),
    *(("win", "lose"), ("better", "worse"), ("preferred", "dispreferred"), ("good", "bad"), ("positive", "negative")),
)
"""Columns of a better and a worse answer beside those that are read by themselves."""

PROMPT_COLUMNS = ("history", "query", "problem", "input", "inputs", "context", "post", "title", "text")
"""Columns of a prompt beside those that are read by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCounts(Counts):
    """Examples of two sides."""

    pairs: int = 0
    longer_chosen: int = 0
    """Those whose chosen side has more tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRowCounts(Counts):
    """What only all rows together show."""

    pairs_swapped: int = 0
    """Pairs of which another one prefers the other side."""
    margins_not_positive: int = 0
    good_answers: int = 0
    """Of answers that are judged one by one."""
    bad_answers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPairCounts(Counts):
    """What the pairs of shards are counted by."""

    separated_sides: int = 0
    """Sides that are not followed by the other side of their pair in their sequence."""
    pairs_with_two_prompts: int = 0


CHECKS = (
    Check("swapped_pairs", (CANONICAL_ROWS,), "at_most", 0, "warn",
        "pairs of which another one prefers the other side",
        "remove one of the two, or both: a model learns nothing from them", applies_to="preferences",
        only_for="preference",
        of=(PreferenceRowCounts,), value=lambda c: c.pairs_swapped),
    Check("nonpositive_margins", (CANONICAL_ROWS,), "at_most", 0, "warn",
        "pairs with a margin of 0 or less",
        "exchange the sides, correct format.margin_field, or remove the pairs", applies_to="preferences",
        only_for="preference",
        of=(PreferenceRowCounts,), value=lambda c: c.margins_not_positive),
    Check("label_balance", (CANONICAL_ROWS,), "at_least", 0.1, "warn",
        "share of the rarer of good and bad answers",
        "add answers of the rarer label, or weigh the two in the trainer (desirable_weight, undesirable_weight)",
        applies_to="preferences with objective: unpaired", only_for="preference", is_share=True,
        of=(PreferenceRowCounts,),
        value=lambda c: find_share(min(c.good_answers, c.bad_answers), c.good_answers + c.bad_answers)),
    Check("length_bias", (TOKENIZED_EXAMPLES,), "at_most", 0.2, "warn",
        "distance of the share of pairs whose chosen side is longer from a half",
        "a model may learn to prefer length: add pairs whose chosen side is shorter, or use a length-normalized loss",
        applies_to="preferences with objective: paired", only_for="preference", is_share=True,
        of=(PairCounts,),
        value=lambda c: abs(compute_share(c.longer_chosen, c.pairs) - 0.5) if c.pairs else None),
    Check("pair_intact", (PACKED_SHARDS,), "at_most", 0, "error",
        "sides that are not followed by the other side of their pair in their sequence",
        "this is a bug of rowmill: report it with the manifest", waivable=False, applies_to="preferences",
        only_for="preference",
        of=(ShardPairCounts,), value=lambda c: c.separated_sides),
    Check("prompt_identical", (PACKED_SHARDS,), "at_most", 0, "error",
        "pairs whose sides begin with different prompts",
        "this is a bug of rowmill: report it with the manifest", waivable=False, applies_to="preferences",
        only_for="preference",
        of=(ShardPairCounts,), value=lambda c: c.pairs_with_two_prompts),
)  # fmt: skip


class Preference(MessageColumns):
    """Each record is a prompt with a chosen and a rejected answer, or with one that is marked."""

    MEANT_BY: ClassVar = ("dpo", "kto", "orpo", "trl")

    PRECEDENCE: ClassVar[int] = 20
    CHECKS: ClassVar[tuple[Check, ...]] = CHECKS
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
        read = (*(prompt.get("prompt_fields") or known), *(one for names in SIDE_COLUMNS for one in names))
        prompt |= suggest_context(sample, *read)
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

    def get_objective(self) -> Objective:
        """Return whether an example is a pair."""
        return self.objective

    def count_dataset(
        self, store: Store, made: Sequence[Part], kept: Sequence[Part]
    ) -> tuple[Sequence[Counts], Mapping[str, tuple[str, ...]]]:
        """Count pairs that another one reverses, margins that are not positive, and good and bad answers."""
        import polars as pl

        from rowmill.parts.context import scan_rows

        files = [part.files["rows"] for part in kept if part.files["rows"].rows]
        if not files:
            return [PreferenceRowCounts()], {}
        rows = scan_rows(store, files, ["messages", "chosen", "rejected", "margin"])
        pairs = rows.filter(pl.col("chosen").is_not_null() & pl.col("rejected").is_not_null())
        own, swapped = (
            pairs.select(pl.concat_str(["messages", *sides], separator="\0").hash().alias("pair"))
            for sides in (("chosen", "rejected"), ("rejected", "chosen"))
        )
        reversed_pairs = swapped.join(own, on="pair", how="semi").select(pl.len()).collect(engine="streaming")
        counted = rows.select(
            pl.col("chosen").count().alias("good"),
            pl.col("rejected").count().alias("bad"),
            (pl.col("margin") <= 0).sum().alias("nonpositive"),
        ).collect(engine="streaming")
        good, bad, nonpositive = (int(value) for value in counted.row(0))
        is_unpaired = self.objective == "unpaired"
        counts = PreferenceRowCounts(
            pairs_swapped=int(reversed_pairs.item()),
            margins_not_positive=nonpositive,
            good_answers=good if is_unpaired else 0,
            bad_answers=bad if is_unpaired else 0,
        )
        return [counts], {}

    def list_answer_paths(self) -> Sequence[str]:
        """Return the columns of both sides, and of single answers."""
        return [*self.chosen_fields, *self.rejected_fields, *self.completion_fields]

    def list_answer_columns(self) -> None:
        """Return nothing: the columns of preference data are read."""

    def make_record_reader(self, options: DatasetOptions) -> RecordReader:
        """Read every record as a prompt with its sides."""
        return _PreferenceReader(self, options)

    def has_groups(self, options: DatasetOptions) -> bool:
        """Return true: without a group key, rows with the same prompt are a group."""
        return True


@dataclass(frozen=True, slots=True)
class FoundSides:
    """A record's prompt and sides as in the source, with the keys `role` and `content`.

    Without `prompt`, the sides are whole conversations. A record with a `label` has one side.
    """

    schema: str
    prompt: Sequence[Json] | None
    chosen: Sequence[Json] | None
    rejected: Sequence[Json] | None
    label: bool | None = None
    system: Json = None
    columns: tuple[str, ...] = ()
    """Columns of the record that hold the prompt and the sides."""

    def as_detected(self, messages: list[Json]) -> DetectedMessages:
        """Return some of the messages as those of one conversation."""
        return DetectedMessages(self.schema, messages, system=self.system)


_CanonicalSides = tuple[Row, Sequence[Message], Sequence[Sequence[Message] | None]]
"""A side's row with what it shares with the other, the canonical prompt, and the sides after it; None for no side."""


class _PreferenceReader:
    """Reads the preferences of one dataset."""

    def __init__(self, columns: Preference, options: DatasetOptions) -> None:
        self._columns = columns
        self._roles = frozenset(columns.assistant_roles)
        self._messages = ConversationReader(columns, options)

    def __call__(self, record: Mapping[str, Json]) -> Row:
        found = _find_sides(record, self._columns)
        if found.label is not None and self._columns.objective == "paired":
            raise RejectError("unpaired_row", "one answer with a label; format.objective: unpaired takes such records")
        is_raw = self._columns.text == "raw"
        whole, prompt, sides = _read_texts(found) if is_raw else self._read_messages(record, found)
        margin = self._read_margin(record, found)
        chosen, rejected = (None if side is None else to_json(list(side)) for side in sides)
        columns = {"chosen": chosen, "rejected": rejected, "label": found.label, "margin": margin}
        identity = canonical_json([list(prompt), whole.tools, whole.template_kwargs])
        return replace(
            whole,
            kind="preference",
            messages=tuple(prompt),
            columns=columns,
            # Of rows without a key of their own: the option `splits.group_key` replaces it.
            group_key=f'"{hashlib.blake2b(identity, digest_size=16).hexdigest()}"',
            read_columns=(*found.columns, "margin", "score_chosen", "score_rejected"),
        )

    def _read_messages(self, record: Mapping[str, Json], found: FoundSides) -> _CanonicalSides:
        """Read the prompt with each side as one conversation, so that calls and reasoning find their messages."""
        rows: list[Row | None] = []
        for side in (found.chosen, found.rejected):
            if side is not None and not side:
                raise RejectError("empty_completion", "a side has no messages")
            messages = None if side is None else found.as_detected([*(found.prompt or ()), *side])
            rows.append(None if messages is None else self._messages.read_conversation(record, messages))
        row = next(row for row in rows if row is not None)
        whole = [None if row is None else row.messages for row in rows]
        texts = [None if side is None else [remove_flags(one) for one in side] for side in whole]
        present = [side for side in texts if side is not None]
        if len(present) > 1 and present[0] == present[1]:
            raise RejectError("identical_sides", "both sides have the same messages")
        size = _count_common(present)
        if found.prompt is not None:
            asked = self._messages.read_conversation(record, found.as_detected(list(found.prompt)))
            if size < len(asked.messages):
                raise RejectError("prompt_mismatch", "the prompt reads otherwise before one of its answers")
            size = len(asked.messages)
        elif len(present) == 1:
            size = 1 + max((i for i, one in enumerate(present[0]) if one["role"] in ("user", "tool")), default=-1)
        if not size:
            raise RejectError("prompt_mismatch", "the sides share no prompt")
        sides = [None if side is None else side[size:] for side in whole]
        for side in sides:
            if side is not None and not side:
                raise RejectError("empty_completion", "a side ends with the prompt, or is the beginning of the other")
            if side is not None and side[0]["role"] not in self._roles:
                raise RejectError("prompt_mismatch", f"a side goes on with the role {side[0]['role']}, not the model's")
        return row, present[0][:size], sides

    def _read_margin(self, record: Mapping[str, Json], found: FoundSides) -> float | None:
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
        margin: float | None = None
        for name, value in given:
            number = _to_finite(value)
            if number is None:
                raise RejectError("bad_margin", f"{name} is {describe_type(value)}, expected a finite number")
            margin = number if margin is None else _to_finite(margin - number)
        if margin is None:
            raise RejectError("bad_margin", "the difference of the scores is not finite")
        return margin


def _read_texts(found: FoundSides) -> _CanonicalSides:
    """Return a prompt and sides of plain text as a message each, exactly as they are in the record."""
    prompt = _read_single_text(found.prompt, "user", "the prompt")
    sides: list[Sequence[Message] | None] = []
    for side in (found.chosen, found.rejected):
        if side is not None and not side:
            raise RejectError("empty_completion", "a side is blank")
        sides.append(None if side is None else _read_single_text(side, "assistant", "a side"))
    if sides[0] == sides[1]:
        raise RejectError("identical_sides", "both sides have the same text")
    return Row("preference", report=make_plain_report(found.schema)), prompt, sides


def _read_single_text(messages: Sequence[Json] | None, role: str, name: str) -> list[Message]:
    if messages is None or not messages:
        raise RejectError("prompt_mismatch", f"{name} is blank or absent; text: raw needs it apart from the sides")
    one = messages[0]
    if len(messages) > 1 or not is_mapping(one) or set(one) != {"role", "content"} or type(one["content"]) is not str:
        raise RejectError("content_not_text", f"{name} is not a single text, as text: raw needs")
    if one["role"] != role:
        raise RejectError("prompt_mismatch", f"{name} is a message of {one['role']}")
    return [{"role": role, "content": one["content"]}]


def _to_finite(value: Json) -> float | None:
    """Return a number that float32 can hold; None for any other value."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _LARGEST_MARGIN:
        return None
    return float(value)


_LARGEST_MARGIN = (2 - 2.0**-23) * 2.0**127


def _count_common(sides: Sequence[Sequence[Message]]) -> int:
    """Return how many first messages all sides share."""
    count = 0
    for messages in zip(*sides, strict=False):
        if any(message != messages[0] for message in messages):
            break
        count += 1
    return count


_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_RANKED_COLUMNS = ("completions", "answers", "responses", "candidates")
_RANKED_TEXTS = ("completion", "response", "answer", "text", "content", "output")
_RANKS: Mapping[str, int] = {"rank": -1, "score": 1, "overall_score": 1, "pm_score": 1, "rating": 1}
"""Columns that rank answers, and whether a higher value is better."""
_WHOLE_SHAPES = frozenset({"rejected_branch", "sharegpt_pair"})
"""Shapes whose prompt is a list of messages, whatever the columns of prompts hold."""
_SHAPE_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "ranked": ("context", *_RANKED_COLUMNS),
    "rejected_branch": ("rejected_messages", "rejected_response"),
}
"""Columns of a shape beside those that options name."""


def _find_sides(record: Mapping[str, Json], columns: Preference) -> FoundSides:
    """Return the sides of the first shape that matches, with the system message of a column; null counts as absent."""
    found = (
        _find_ranked(record, columns)
        or _find_hh_text(record, columns)
        or _find_compared(record, columns)
        or _find_rejected_branch(record, columns)
        or _find_pair(record, columns)
        or _find_unpaired(record, columns)
    )
    if found is None:
        present = ", ".join(sorted(record)[:20]) or "no column"
        raise RejectError("unknown_schema", f"neither two sides nor an answer with a label in {present}")
    read = [*found.columns, *columns.chosen_fields, *columns.rejected_fields, "messages", "conversations"]
    read += [*columns.completion_fields, *columns.label_fields, *_SHAPE_COLUMNS.get(found.schema, ())]
    if found.prompt is not None and found.schema not in _WHOLE_SHAPES:
        name = find_first_column(record, columns.prompt_fields)[0]
        read += [name, *(["history"] if is_list(record.get("history")) else [])]
        read += columns.context_fields if type(record.get(name)) is str else ()
    if columns.text == "raw":
        return replace(found, columns=tuple(read))
    whole = found.prompt if found.prompt is not None else found.chosen if found.chosen is not None else found.rejected
    name, system = find_system(record, (columns.system_prompt,), whole or ())
    return replace(found, system=system, columns=(*read, *(() if name is None else (name,))))


def _find_ranked(record: Mapping[str, Json], columns: Preference) -> FoundSides | None:
    answers = find_first_column(record, _RANKED_COLUMNS)[1]
    if not is_list(answers) or not answers or not all(map(is_mapping, answers)):
        return None
    rank = next((name for name in _RANKS if all(answer.get(name) is not None for answer in answers)), None)
    if rank is None:
        return None
    prompt = record["context"] if record.get("context") is not None else _find_prompt(record, columns)
    if prompt is None:
        return None
    values = [answer[rank] for answer in answers]
    if any(type(value) not in (int, float) for value in values):
        raise RejectError("bad_messages", f"a {rank} of completions is no number")
    ordered = sorted(range(len(values)), key=lambda i: _RANKS[rank] * values[i])
    worst, best = ordered[0], next(i for i in range(len(values)) if values[i] == values[ordered[-1]])
    if values[worst] == values[best]:
        raise RejectError("tied", f"every completion has the {rank} {values[best]}")
    sides = [find_first_column(answers[i], _RANKED_TEXTS)[1] for i in (best, worst)]
    return _pair_sides("ranked", prompt, sides, columns)


def _find_hh_text(record: Mapping[str, Json], columns: Preference) -> FoundSides | None:
    sides = _find_both(record, columns)
    if sides is None or find_first_column(record, columns.prompt_fields)[0]:
        return None
    texts = [side for side in sides if type(side) is str]
    if len(texts) != len(sides):
        return None
    if not all(text.startswith("\n\nHuman:") for text in texts):
        parted = [split_transcript(text) for text in texts]
        if columns.text == "raw" or parted[0] is None or parted[1] is None:
            return None
        return FoundSides("hh_text", None, parted[0], parted[1])
    turns = [_HH_TURN.split(text)[1:] for text in texts]
    whole = [list(zip(own[::2], own[1::2], strict=True)) for own in turns]
    if columns.text != "raw":
        roles = {"Human": "user", "Assistant": "assistant"}
        chosen, rejected = (
            [{"role": roles[who], "content": said.removeprefix(" ")} for who, said in own] for own in whole
        )
        return FoundSides("hh_text", None, chosen, rejected)
    # Raw: the turns that both begin with, through the next `Assistant:`, and the text after that. Prompt and answer,
    # end to end, are the record's text. An answer is one turn: nothing after it would be known to be the user's.
    if whole[0] == whole[1]:
        raise RejectError("identical_sides", "both sides have the same text")
    shared = next((i for i, pair in enumerate(zip(*whole, strict=False)) if pair[0] != pair[1]), None)
    if shared is None:
        raise RejectError("empty_completion", "a side is the beginning of the other")
    if any(own[shared][0] != "Assistant" for own in whole):
        raise RejectError("prompt_mismatch", "the sides differ before an answer")
    if any(len(own) > shared + 1 for own in whole):
        raise RejectError("content_not_text", "a side goes on after its answer, and is not a single text")
    prompt = "".join(f"\n\n{who}:{said}" for who, said in whole[0][:shared]) + "\n\nAssistant:"
    answers: list[list[Json]] = [
        [{"role": "assistant", "content": own[shared][1]}] if own[shared][1].strip() else [] for own in whole
    ]
    return FoundSides("hh_text", [{"role": "user", "content": prompt}], answers[0], answers[1])


def _find_rejected_branch(record: Mapping[str, Json], columns: Preference) -> FoundSides | None:
    messages = parse_messages(record.get("messages"))
    if not is_list(messages) or find_first_column(record, columns.chosen_fields)[1] is not None:
        return None
    branch, response = parse_messages(record.get("rejected_messages")), record.get("rejected_response")
    if branch is None and response is None:
        return None
    whole = _read_side(messages, columns)
    if is_list(branch):
        return FoundSides("rejected_branch", None, whole, _read_side(branch, columns))
    users = [i for i, one in enumerate(whole) if is_mapping(one) and one.get("role") in ("user", "human")]
    if not users:
        raise RejectError("prompt_mismatch", "no message of a user, after which the rejected response would be")
    asked, answer = whole[: users[-1] + 1], whole[users[-1] + 1 :]
    return FoundSides("rejected_branch", asked, answer, _read_side(response, columns))


def _find_pair(record: Mapping[str, Json], columns: Preference) -> FoundSides | None:
    """Return two sides with the messages or the prompt of another column, or with the prompt that both begin with."""
    sides = _find_both(record, columns)
    if sides is None:
        return None
    asked = parse_messages(find_first_column(record, ("conversations", "messages"))[1])
    if is_list(asked) and all(map(is_mapping, sides)):
        return _pair_sides("sharegpt_pair", asked, sides, columns)
    prompt = _find_prompt(record, columns)
    if prompt is not None:
        return _pair_sides("explicit", prompt, sides, columns)
    if not all(map(is_list, sides)):
        return None
    chosen, rejected = (_read_side(side, columns) for side in sides)
    return FoundSides("implicit", None, chosen, rejected)


_ANSWER_STEMS = ("response", "answer", "completion", "conversation", "output", "human_ref")
_SIDE_SUFFIXES = (("0", "1"), ("1", "2"), ("a", "b"), ("A", "B"))
_ANSWER_PAIRS = [
    (f"{stem}{between}{first}", f"{stem}{between}{second}")
    for stem in _ANSWER_STEMS
    for first, second in _SIDE_SUFFIXES
    for between in ("_", "")
]
"""Names of two columns that hold answers to the same prompt, such as `response_a` and `response_b`."""
_CHOICES = ("better_response_id", "winner", "preferred", "preference", "choice", "labels", "label")


def _find_compared(record: Mapping[str, Json], columns: Preference) -> FoundSides | None:
    """Return two answers in the order that another column, or their scores, give them."""
    if record.get("response_j") is not None and record.get("response_k") is not None:
        names, better = ("response_j", "response_k"), 0
    else:
        pair = next((p for p in _ANSWER_PAIRS if all(record.get(name) not in (None, "") for name in p)), None)
        if pair is None or _find_both(record, columns) is not None:
            return None
        names, better = pair, _read_choice(record, pair)
        if better is None:
            return None
    sides = [parse_messages(write_number(record[names[i]])) for i in (better, 1 - better)]
    prompt = _find_prompt(record, columns)
    if prompt is None and all(map(is_list, sides)):
        chosen, rejected = (_read_side(side, columns) for side in sides)
        return FoundSides("compared", None, chosen, rejected, columns=names)
    return None if prompt is None else replace(_pair_sides("compared", prompt, sides, columns), columns=names)


def _read_choice(record: Mapping[str, Json], names: tuple[str, str]) -> int | None:
    """Return which of two answers is better; None if no column says so in a way that is known."""
    suffixes = [name[-1] for name in names]
    first, second = (record.get(f"score_{suffix}") for suffix in suffixes)
    if isinstance(first, int | float) and isinstance(second, int | float):
        if first == second:
            raise RejectError("tied", f"both answers have the score {first}")
        return int(second > first)
    name, value = find_first_column(record, _CHOICES)
    if type(value) is str:
        said = value.strip().rpartition("_")[2].lower()
        if said.startswith("tie") or value.lower().startswith(("tie", "both")):
            raise RejectError("tied", f"{name} is a tie")
        return next((i for i, suffix in enumerate(suffixes) if said == suffix.lower()), None)
    if type(value) is int and name != "label":
        # Stanford's `labels` are 1 where the first answer is preferred; others name the answer by its suffix.
        if name == "labels":
            return 1 - value if value in (0, 1) else None
        return next((i for i, suffix in enumerate(suffixes) if str(value) == suffix), None)
    return None


def _pair_sides(schema: str, prompt: Json, sides: Sequence[Json], columns: Preference) -> FoundSides:
    """Return a prompt with two sides; sides that repeat the prompt lose it."""
    asked = _read_side(prompt, columns, role="user")
    found: list[Sequence[Json]] = []
    for side in sides:
        answer = _read_side(side, columns)
        if type(prompt) is str and is_list(side):
            opening = next((one for one in answer if is_mapping(one) and one.get("role") in ("user", "human")), None)
            begins = _read_role(answer[0]) if answer else None
            if opening is not None and opening.get("content") == prompt and begins not in columns.assistant_roles:
                # The text stands for the first user message of lists that hold the whole conversation.
                found.append(answer)
                continue
            if begins is not None and begins not in columns.assistant_roles and begins not in ("gpt", "model", "bot"):
                raise RejectError("prompt_mismatch", "the messages of a side begin with another prompt than the text")
        repeats = list(answer[: len(asked)]) == list(asked)
        found.append(answer[len(asked) :] if repeats else answer)
    whole = [
        type(prompt) is str and bool(side) and _read_role(side[0]) in ("user", "human", "system") for side in found
    ]
    if any(whole) and not all(whole):
        raise RejectError("prompt_mismatch", "one side repeats the prompt, and the other does not")
    schema, asked = ("implicit", None) if any(whole) else (schema, asked)
    return FoundSides(schema, asked, found[0], found[1])


def _find_unpaired(record: Mapping[str, Json], columns: Preference) -> FoundSides | None:
    value = find_first_column(record, columns.label_fields)[1]
    if value is None:
        return None
    if type(value) not in (bool, int) or value not in (0, 1):
        raise RejectError("bad_label", f"{describe_type(value)}, expected true, false, 1 or 0")
    answer = parse_messages(write_number(find_first_column(record, columns.completion_fields)[1]))
    prompt = None if answer is None else _find_prompt(record, columns)
    if prompt is not None:
        asked, answered = _read_side(prompt, columns, role="user"), _read_side(answer, columns)
    else:
        whole = parse_messages(find_first_column(record, ("messages", "conversations"))[1])
        if not is_list(whole):
            return None
        asked, answered = None, _read_side(whole, columns)
    sides = (answered, None) if value else (None, answered)
    return FoundSides("unpaired", asked, *sides, label=bool(value))


def _find_both(record: Mapping[str, Json], columns: Preference) -> tuple[Json, Json] | None:
    chosen, rejected = (
        parse_messages(write_number(find_first_column(record, names)[1]))
        for names in (columns.chosen_fields, columns.rejected_fields)
    )
    return None if chosen is None or rejected is None else (chosen, rejected)


def _find_prompt(record: Mapping[str, Json], columns: Preference) -> Any:
    """Return the prompt as text or messages, the reject of one that cannot be joined, or None."""
    name, value = find_first_column(record, columns.prompt_fields)
    prompt = parse_messages(value)
    if type(prompt) is not str:
        return prompt
    text, _ = join_context(record, name, columns.context_fields)
    history = read_history(record)
    if (parted := split_open_transcript(text)) is not None:
        return [*history, *parted]
    return [*history, {"role": "user", "content": text}] if history else text


def _read_side(value: Json, columns: Preference, *, role: str = "assistant") -> Sequence[Json]:
    """Return a text, a message or a list as messages with the keys `role` and `content`; a blank text as none."""
    if type(value) is str:
        return [{"role": role, "content": value}] if value.strip() else []
    messages = [value] if is_mapping(value) else value
    if not is_list(messages):
        raise RejectError("content_not_text", f"a side is {describe_type(value)}, expected text or messages")
    renamed: list[Json] = []
    for message in messages:
        if not is_mapping(message):
            renamed.append(message)
            continue
        sharegpt = "from" in message and "role" not in message
        role_key = columns.role_field or ("from" if sharegpt else "role")
        content_key = columns.content_field or ("value" if sharegpt else "content")
        if (role_key, content_key) == ("role", "content"):
            renamed.append(message)
            continue
        others = {key: value for key, value in message.items() if key not in (role_key, content_key)}
        renamed.append({"role": message.get(role_key), "content": message.get(content_key), **others})
    return renamed


def _read_role(message: Json) -> str | None:
    role = message.get("role") if is_mapping(message) else None
    return role if type(role) is str else None
