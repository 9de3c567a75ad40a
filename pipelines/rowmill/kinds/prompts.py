"""The kind `prompts`: prompts for reinforcement learning, with the ground truth that an answer is held to.

{"question": "48 + 24?", "answer": "… #### 72"}   ─►   messages [user]   ground_truth "72"   data_source gsm8k
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from rowmill.conversation.truncation import OverlongPolicy
from rowmill.core.config import describe_type
from rowmill.core.json import Json, to_json
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.core.storage import Store
from rowmill.kinds.base import ALL_GROUPS, DatasetOptions, DatasetReader, RecordReader, refuse_overlong_policy
from rowmill.kinds.reading.canonicalization import Canonicalizer
from rowmill.kinds.reading.conversation_rows import (
    ConversationReader,
    DetectedMessages,
    MessageColumns,
    add_system,
)
from rowmill.kinds.reading.recognition import try_options
from rowmill.kinds.shared.messages import (
    CONTEXT_COLUMNS,
    LIST_COLUMNS,
    PAIR_COLUMNS,
    RejectError,
    get_at_path,
    is_list,
    is_mapping,
    join_context,
    parse_messages,
    remove_flags,
    split_open_transcript,
)
from rowmill.kinds.shared.samples import Recognition, Sample, choose_best, suggest_context
from rowmill.schema.checks import Check
from rowmill.schema.counts import Counts
from rowmill.schema.examples import Objective
from rowmill.schema.manifest import Part
from rowmill.schema.rows import Row, RowKind

_TELLING_PATHS = ("reward_model.ground_truth", "reward_spec.ground_truth", "ground_truth")
"""Paths that only prompts of reinforcement learning have."""

_ANSWERING_COLUMNS = {
    "answers",
    *(path.partition(".")[0] for path in _TELLING_PATHS),
    *(name for _, name in PAIR_COLUMNS),
}
"""Columns that hold answers or a ground truth, whatever their form."""


_NOTES = ("nothing of them trains: a trainer of reinforcement learning answers the prompts itself",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRowCounts(Counts):
    """What only all rows together show."""

    conflicting_prompts: int = 0
    """Prompts of which equal copies have different ground truths."""


CHECKS = (
    Check("ground_truth_conflicts", (CANONICAL_ROWS,), "at_most", 0, "warn",
        "prompts of which equal copies have different ground truths",
        "correct the ground truths, or take one source of them; of equal prompts the first is kept",
        applies_to="prompts", only_for="prompt", names_samples=True,
        of=(PromptRowCounts,), value=lambda c: c.conflicting_prompts),
)  # fmt: skip


class Prompts(MessageColumns):
    """Each record is a prompt for reinforcement learning, with its ground truth."""

    MEANT_BY: ClassVar = ("grpo", "rl", "trl")

    PRECEDENCE: ClassVar[int] = 60
    CHECKS: ClassVar[tuple[Check, ...]] = CHECKS
    ROW_KIND: ClassVar[RowKind] = "prompt"
    GROUPS: ClassVar[frozenset[str]] = ALL_GROUPS - {"loss", "packing"}
    FIELDS_NOT_READ: ClassVar[Mapping[str, frozenset[str]]] = {
        "filters": frozenset({"min_chars", "max_chars"}),
        "template": frozenset({"turns", "spans"}),
        "truncation": frozenset({"truncate_side", "token_cut"}),
    }

    OVERLONG_POLICIES: ClassVar[tuple[OverlongPolicy, ...]] = ("drop", "raise", "keep")

    kind: Literal["prompts"] = "prompts"
    """Prompts for reinforcement learning: nothing is trained, and the ground truth goes with the ids."""
    prompt_fields: list[str] = Field(
        default=["prompt", "messages", "question", "problem", "input", "instruction"], min_length=1
    )
    """Paths that may hold the prompt; the first that is not null is used. A text is a user message."""
    context_fields: list[str] = Field(default=[*CONTEXT_COLUMNS])
    """Columns whose text belongs to a prompt that is text: each is appended to it on a new line."""
    ground_truth_fields: list[str] = Field(default=[*_TELLING_PATHS, "solution", "expected_answer", "answer", "label"])
    """Paths that may hold the ground truth, any JSON; the first that is not null is used."""
    ground_truth_pattern: str | None = None
    """Regular expression with one group, whose last match in the ground truth's text replaces it; a ground truth
    without a match is missing. null: as it is."""
    require_ground_truth: bool = True
    """Whether a record without a ground truth is rejected."""
    source_field: list[str] = Field(default=["data_source", "dataset", "datasource"])
    """Paths that may hold the data source, which selects the verifier: a text, or a list of texts. Without one, it is
    the dataset's name."""
    trailing_assistant: Literal["drop", "ground_truth", "reject"] = "drop"
    """What happens to an answer at the prompt's end: drop it, make it the ground truth where no field holds one, or
    reject the record."""
    carry_fields: list[str] = Field(default=[])
    """Paths whose values are carried to the exports, as JSON text."""

    @field_validator("source_field", mode="before")
    @classmethod
    def _read_single_source(cls, value: Json) -> Json:
        return [value] if isinstance(value, str) else value

    @field_validator("ground_truth_pattern")
    @classmethod
    def _require_one_group(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(
                f"{pattern!r} is not a regular expression ({error}); expected one with a group in round brackets, such "
                "as #### (.+)$; correct it"
            ) from error
        if groups != 1:
            raise ValueError(
                f"{pattern!r} has {groups} groups; expected one in round brackets, which is the ground truth; write "
                "others as (?:…)"
            )
        return pattern

    @classmethod
    def recognise(cls, sample: Sample) -> Recognition | None:
        """Recognise prompts with a ground truth, and prompts alone."""
        context = suggest_context(sample, *cls.model_fields["prompt_fields"].default)
        found = choose_best([try_options(cls, context, sample)])
        if found is not None and found.fits == found.of:
            named = any(get_at_path(record, path) is not None for record in sample.whole for path in _TELLING_PATHS)
            found = replace(found, notes=_NOTES)
            return replace(found, precedence=30) if named else _refuse_unread_answers(found)
        asks = {"prompt", "messages", "question", "instruction"} & set(sample.columns)
        # A column that may answer, in a form that is not read, is no ground truth to do without.
        answers = _ANSWERING_COLUMNS & set(sample.columns)
        if not asks or answers:
            return None
        options = {"require_ground_truth": False, **context}
        found = choose_best([try_options(cls, {**options, "trailing_assistant": "reject"}, sample)])
        if found is None:
            return None
        return _refuse_unread_answers(replace(found, options={"kind": cls.get_name(), **options}, notes=_NOTES))

    @classmethod
    def select_group_defaults(
        cls, options: Mapping[str, Any], groups: Mapping[str, Any]
    ) -> Mapping[str, Mapping[str, Any]]:
        """Drop what is too long, and pack nothing: a prompt that is cut asks something else."""
        return {"truncation": {"overlong": "drop"}, "packing": {"pack": False}}

    def check_options(self, options: DatasetOptions) -> None:
        """Refuse to shorten a prompt."""
        refuse_overlong_policy(self, options, "cannot be done to a prompt, which would ask something else")
        super().check_options(options)

    def get_objective(self) -> Objective:
        """Return that nothing is trained: the model answers the prompts."""
        return "prompts"

    def count_dataset(
        self, store: Store, made: Sequence[Part], kept: Sequence[Part]
    ) -> tuple[Sequence[Counts], Mapping[str, tuple[str, ...]]]:
        """Count prompts whose copies have different ground truths, and name the first row of some of them."""
        import polars as pl

        from rowmill.parts.context import scan_rows

        found: list[str] = []
        if made:
            rows = scan_rows(store, [part.files["rows"] for part in made], ["row_id", "content_hash", "ground_truth"])
            by_prompt = rows.group_by("content_hash").agg(
                pl.col("row_id").min(), pl.col("ground_truth").n_unique().alias("truths")
            )
            conflicts = by_prompt.filter(pl.col("truths") > 1).select("row_id").collect(engine="streaming")
            found = sorted(conflicts["row_id"].to_list())
        return [PromptRowCounts(conflicting_prompts=len(found))], {"ground_truth_conflicts": tuple(found[:10])}

    def list_answer_columns(self) -> None:
        """Return nothing: no answer of the data is trained, so none needs to be told from a bad one."""

    def make_record_reader(self, options: DatasetOptions) -> RecordReader:
        """Read every record as a prompt."""
        return _PromptReader(self, options, dataset="")

    def open_dataset_reader(self, options: DatasetOptions, base: Path, dataset: str) -> DatasetReader:
        """Read records; one without a data source of its own has the dataset's name."""
        return Canonicalizer(
            options,
            group_key=options.splits.group_key,
            order_key=options.splits.time_key,
            read=_PromptReader(self, options, dataset),
        )


def _refuse_unread_answers(found: Recognition) -> Recognition:
    """Return a recognition that is not sure if there are answers that it does not read: a `label` then rates them."""
    unread = [name for name in found.unread if name in {*_ANSWERING_COLUMNS, "responses", "completions"}]
    return replace(found, problem=f"nothing reads {', '.join(unread)}, a column of answers") if unread else found


class _PromptReader:
    """Reads the prompts of one dataset."""

    def __init__(self, columns: Prompts, options: DatasetOptions, dataset: str) -> None:
        self._columns = columns
        self._messages = ConversationReader(columns, options)
        self._dataset = dataset
        self._roles = frozenset(columns.assistant_roles)
        beside = (*columns.ground_truth_fields, *columns.source_field, *columns.carry_fields)
        self._read_beside = tuple(path.partition(".")[0] for path in beside)
        self._pattern = None if columns.ground_truth_pattern is None else re.compile(columns.ground_truth_pattern)

    def __call__(self, record: Mapping[str, Json]) -> Row:
        row = self._messages.read_conversation(record, self._find_prompt(record))
        end = len(row.messages)
        while end and row.messages[end - 1]["role"] in self._roles:
            end -= 1
        # The messages that ask, and those of the model after them.
        messages, answer = row.messages[:end], row.messages[end:]
        if answer and self._columns.trailing_assistant == "reject":
            raise RejectError("prompt_ends_with_assistant", f"message {len(messages)} is the model's")
        if not messages:
            raise RejectError("empty_conversation", "no messages but the model's")
        paths = self._columns.ground_truth_fields
        truth = next((value for path in paths if (value := get_at_path(record, path)) is not None), None)
        if truth is None and answer and self._columns.trailing_assistant == "ground_truth":
            truth = answer[-1]["content"]
        why = f"{', '.join(paths)} are absent or null"
        if truth is not None and self._pattern is not None:
            matches = list(self._pattern.finditer(truth)) if type(truth) is str else []
            why = f"no match of {self._pattern.pattern} in {describe_type(truth)}"
            truth = matches[-1].group(1) if matches else None
        if truth is None and self._columns.require_ground_truth:
            raise RejectError("missing_ground_truth", why)
        data_source = [self._dataset]
        for path in self._columns.source_field:
            value = get_at_path(record, path)
            names = value if is_list(value) else [value]
            if names and all(type(name) is str and name.strip() for name in names):
                data_source = names
                break
        carried = {path: get_at_path(record, path) for path in self._columns.carry_fields}
        report = replace(row.report, notes=(*row.report.notes, "trailing_assistant")) if answer else row.report
        columns = {
            "ground_truth": None if truth is None else to_json(truth),
            "data_source": data_source,
            "extra": to_json(carried) if carried else None,
        }
        return replace(
            row,
            kind="prompt",
            messages=tuple(map(remove_flags, messages)),
            columns=columns,
            report=report,
            read_columns=(*row.read_columns, *self._read_beside),
        )

    def _find_prompt(self, record: Mapping[str, Json]) -> DetectedMessages:
        columns = self._columns
        for path in columns.prompt_fields:
            value = parse_messages(get_at_path(record, path))
            if value is None:
                continue
            role_key, content_key = columns.role_field or "role", columns.content_field or "content"
            if type(value) is str:
                if path in LIST_COLUMNS and split_open_transcript(value) is None:
                    raise RejectError("bad_messages", f"{path} is text, expected messages, their JSON or a transcript")
                text, used = value, (path,)
                if path in record:
                    # Alpaca's `input` belongs to its `instruction`, whichever of them is looked for first.
                    name = "instruction" if path == "input" and type(record.get("instruction")) is str else path
                    text, used = join_context(record, name, columns.context_fields)
                if not text or text.isspace():
                    raise RejectError("empty_text", f"{path} is blank")
                parted = split_open_transcript(text)
                if parted is not None:
                    found = DetectedMessages(path, parted, columns=used)
                else:
                    asked: list[Json] = [{role_key: "user", content_key: text}]
                    found = DetectedMessages(path, asked, role_key, content_key, columns=used)
            else:
                messages = [value] if is_mapping(value) else value
                if not is_list(messages):
                    raise RejectError(
                        "content_not_text", f"{path} is {describe_type(value)}, expected text or messages"
                    )
                if messages and is_mapping(messages[0]) and "from" in messages[0] and "role" not in messages[0]:
                    role_key, content_key = columns.role_field or "from", columns.content_field or "value"
                used = (path.partition(".")[0],)
                found = DetectedMessages(path, messages, role_key, content_key, columns=used)
            return add_system(record, found, columns.system_prompt)
        present = ", ".join(sorted(record)[:20]) or "no column"
        raise RejectError(
            "missing_field", f"{', '.join(columns.prompt_fields)} are absent or null; the record has {present}"
        )
