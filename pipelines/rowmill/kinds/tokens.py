"""The kind `tokens`: rows that are token ids already, such as a server's rollouts, kept exactly as they are.

    prompt_response   {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "response_mask": [1, 0, 1]}
    masked            {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 0, 1]}
    labelled          {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, -100, 9]}
    counted           {"input_ids": [5, 6, 7, 8, 9], "response_length": 3}
    turns             {"turns": [{"prompt_token_ids": [5, 6], "generation_token_ids": [7]},
                                 {"prompt_token_ids": [5, 6, 7, 8], "generation_token_ids": [9]}]}

The first shape that matches wins. Fields of tokens have a value for all, for those of the response, or for the trained
ones: these sets contain each other, so the number of values says which of them is meant.

    ids        5 6 7 8 9      of which the response is 7 8 9, and 7 and 9 are trained
    3 values   the response   0 0 a b c
    2 values   the trained    0 0 a 0 b
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from rowmill.conversation.truncation import OverlongPolicy
from rowmill.core.arrays import Bools, Numbers, make_zeros
from rowmill.core.arrays import Tokens as TokenIds
from rowmill.core.config import Config, describe_type
from rowmill.core.json import Json
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES
from rowmill.kinds.base import ALL_GROUPS, DatasetKind, DatasetOptions, RecordReader, refuse_overlong_policy
from rowmill.kinds.reading.recognition import try_options
from rowmill.kinds.shared.messages import RejectError, find_first_column, get_at_path, is_list, is_mapping
from rowmill.kinds.shared.samples import Recognition, Sample, choose_best
from rowmill.schema.checks import Check
from rowmill.schema.counts import Counts, find_share
from rowmill.schema.examples import IGNORED_LABEL, TAKEN_NAMES, RolloutFields
from rowmill.schema.rows import ParseReport, Row, RowKind, make_plain_report

_MOST = float(np.finfo(np.float32).max)


class TokenField(Config):
    """What a column holds for each token: one number, or a fixed number of them."""

    type: Literal["float32", "float16", "int32"] = "float32"
    """The type in which the numbers are stored."""
    size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Numbers of each token, in a list of its own, such as the 8 likeliest ids of a teacher; null: one, without a list.
    A token without any has zeros."""
    values: Literal["auto", "numbers", "token_ids", "logprobs"] = "auto"
    """What they are. `numbers`: any finite ones; `token_ids`: integers from 0 to the vocabulary's size; `logprobs`:
    finite, at most 0; `auto`: token_ids for int32, logprobs for a column whose name ends with that word, else numbers.
    A row with others is a reject."""

    @model_validator(mode="after")
    def _check_values(self) -> "TokenField":
        if self.values == ("logprobs" if self.type == "int32" else "token_ids"):
            raise ValueError(
                f"values: {self.values} of type {self.type}; token_ids are int32, logprobs are float32 or float16; "
                "change type or values"
            )
        return self

    @property
    def arrow_type(self) -> pa.DataType:
        """The Arrow type of a token's value: a number, or a fixed-size list."""
        number = {"float32": pa.float32(), "float16": pa.float16(), "int32": pa.int32()}[self.type]
        return number if self.size is None else pa.list_(number, self.size)

    def choose_values(self, name: str) -> Literal["numbers", "token_ids", "logprobs"]:
        """Return what the numbers of a column are."""
        if self.values != "auto":
            return self.values
        if self.type == "int32":
            return "token_ids"
        return "logprobs" if name.endswith("logprobs") else "numbers"

    def read(self, value: Json, name: str) -> Numbers:
        """Return a list with a value for each token as [T], or as [T, size]."""
        is_whole, values = self.type == "int32", self.choose_values(name)
        noun = "integers" if is_whole else "numbers"
        numbers: list[Any] = value if is_list(value) else []
        if self.size is not None:
            for at, of_token in enumerate(numbers):
                if not is_list(of_token):
                    what = f"{name} is {describe_type(of_token)} at {at}"
                    raise RejectError("bad_field", f"{what}, expected a list of {self.size} {noun}")
                if len(of_token) != self.size:
                    raise RejectError("length_mismatch", f"{name} has {len(of_token)} at {at}, expected {self.size}")
            numbers = list(chain.from_iterable(numbers))
        flat = to_flat_array(numbers) if is_list(value) else None
        # NumPy would turn true into 1 among numbers.
        if (
            flat is None
            or (len(flat) and flat.dtype.kind not in ("iu" if is_whole else "iuf"))
            or bool in map(type, numbers)
        ):
            expected = f"a flat list of {noun}" if self.size is None else f"lists of {self.size} {noun}"
            raise RejectError("bad_field", f"{name} is {describe_type(value)}, expected {expected}")
        with np.errstate(over="ignore"):
            stored = flat.astype(self.type)
        if is_whole:
            is_wrong = (flat < (0 if values == "token_ids" else -(2**31))) | (flat > _MAX_ID)
        else:
            is_wrong = ~np.isfinite(stored) | ((stored > 0) & (values == "logprobs"))
        wrong = np.flatnonzero(is_wrong)
        if len(wrong):
            expected = "the id of a token" if values == "token_ids" else f"a finite {self.type}"
            most = ", at most 0" if values == "logprobs" else ""
            what = f"{name} is {flat[wrong[0]]} at {int(wrong[0]) // (self.size or 1)}"
            raise RejectError("bad_field", f"{what}, expected {expected}{most}")
        return stored if self.size is None else stored.reshape(-1, self.size)


PROMPT_FIELDS = ("prompt_ids", "prompt_token_ids")
RESPONSE_FIELDS = ("response_ids", "completion_ids", "generation_token_ids")
COUNT_FIELDS = ("response_length", "num_actions")
TURN_FIELDS = ("turns", "messages", "output", "response.output", "message_log")
"""Columns that may hold a list of turns, some of which have ids."""

WITHOUT_FIELD = "without_"
"""Begins the note on a row that lacks a declared field, which ends with the field's name."""

FieldsT = TypeVar("FieldsT", bound="list[str] | dict[str, TokenField]")

_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_MAX_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _MaskedIds:
    """Ids with their loss mask, the shape in which they were found, and its answer's tokens and its turns, if any."""

    schema: str
    ids: TokenIds
    mask: Bools
    response: Bools | None = None
    turns: Sequence[Mapping[str, Json]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIdCounts(Counts):
    """Ids that were ids already, compared with the tokenizer."""

    token_ids_read: int = 0
    ids_without_token: int = 0
    """Those that the tokenizer has no token for."""
    retokenized_rows: int = 0
    """Rows whose text was encoded again."""
    equally_tokenized_rows: int = 0
    """Those of them that have the same ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFieldCounts(Counts):
    """Rows with fields beside their ids."""

    rows_with_fields: int = 0
    """Rows of a dataset that declares fields."""
    rows_without_field: Mapping[str, int] = field(default_factory=dict[str, int])
    """By declared field, the rows without a value of it."""


CHECKS = (
    Check("fields_absent", (CANONICAL_ROWS,), "at_most", 0, "warn",
        "share of token rows without a value of a declared field, which has 0.0 for each of their tokens",
        "name the columns that the source has in format.token_fields and format.row_fields, or add the values",
        applies_to="token rows with fields", only_for="tokens",
        requested_by=("format.token_fields", "format.row_fields"), is_share=True,
        of=(TokenFieldCounts,),
        value=lambda c: find_share(max(c.rows_without_field.values(), default=0), c.rows_with_fields)),
    Check("unknown_ids", (TOKENIZED_EXAMPLES,), "at_most", 0, "error",
        "token ids that the tokenizer has no token for",
        "name the tokenizer that made the ids", applies_to="token rows", only_for="tokens",
        of=(TokenIdCounts,), value=lambda c: c.ids_without_token),
    Check("same_tokenization", (TOKENIZED_EXAMPLES,), "at_least", 0.5, "warn",
        "share of a sample of token rows whose text has the same ids when it is encoded again",
        "name the tokenizer that made the ids; sampled ids differ in a few places, those of another tokenizer in most",
        applies_to="token rows", only_for="tokens", is_share=True,
        of=(TokenIdCounts,), value=lambda c: find_share(c.equally_tokenized_rows, c.retokenized_rows)),
)  # fmt: skip


class Tokens(DatasetKind):
    """Each record is a list of token ids with its mask; nothing is encoded again."""

    PRECEDENCE: ClassVar[int] = 10
    CHECKS: ClassVar[tuple[Check, ...]] = CHECKS
    ROW_KIND: ClassVar[RowKind] = "tokens"
    GROUPS: ClassVar[frozenset[str]] = ALL_GROUPS - {"reasoning", "tools", "template", "loss"}
    FIELDS_NOT_READ: ClassVar[Mapping[str, frozenset[str]]] = {"filters": frozenset({"min_chars", "max_chars"})}

    OVERLONG_POLICIES: ClassVar[tuple[OverlongPolicy, ...]] = ("truncate", "drop", "raise", "keep")

    kind: Literal["tokens"] = "tokens"
    """Token ids with their mask, kept exactly: rollouts, and data that another tool tokenized."""
    ids_fields: list[str] = Field(default=["input_ids", "token_ids"], min_length=1)
    """Columns that may hold the ids of a whole example; the first that is not null is used."""
    mask_fields: list[str] = Field(
        default=["loss_mask", "completion_mask", "assistant_masks", "sampled_mask", "response_mask", "mask"],
        min_length=1,
    )
    """Columns that may hold 1 for a trained token and 0 for another, as long as the ids, or as `response_length` says
    for the last tokens; for a prompt and a response, as long as the response. What trains is in all that a record has,
    and in its `labels`."""
    token_fields: list[str] | dict[str, TokenField] = Field(default=[])
    """Columns with a number per token, such as `logprobs` or `advantages`, which go to the reader and to the exports
    `native` and `hf`; as long as the ids, the response or the trained ids. 0 for a token without one. A mapping names
    the type and the size of each: `{teacher_ids: {type: int32, size: 8}}`; a list means float32, one of each token."""
    row_fields: list[Literal["reward", "group_id"]] = Field(default=[])
    """Columns with a value per row that go the same way: `reward`, a number; `group_id`, text or an integer."""
    ignore_columns: list[str] = Field(default=[])
    """Columns that are left out on purpose; others that look as if they said what trains, and that nothing reads, are
    refused."""
    domain_key: str | None = None
    """Column that names the row's domain; a row without text there is in `__default__`."""

    @field_validator("token_fields", "row_fields")
    @classmethod
    def _check_field_names(cls, names: FieldsT) -> FieldsT:
        listed = list(names)
        twice = sorted({name for name in listed if listed.count(name) > 1})
        if twice:
            raise ValueError(f"{twice[0]!r} is listed twice; each field is one column of the shards; list it once")
        return names

    @field_validator("token_fields")
    @classmethod
    def _check_token_fields(cls, names: FieldsT) -> FieldsT:
        for name in names:
            if not _FIELD_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} cannot name a column of the shards; expected letters, digits and _, such as logprobs; "
                    "rename the column in the source"
                )
            if name in TAKEN_NAMES:
                raise ValueError(
                    f"{name!r} is a name of rowmill's own columns and batches; a field per token needs another, such "
                    "as logprobs; rename the column in the source"
                )
        return names

    def count_rows(self, rows: pa.Table) -> Sequence[Counts]:
        """Count the rows that lack a declared field, by the notes on them."""
        import pyarrow.compute as pc

        names = self.get_rollout_fields().names
        notes = pc.list_flatten(rows.column("notes"))
        lacking = {name: int(pc.sum(pc.equal(notes, f"{WITHOUT_FIELD}{name}")).as_py() or 0) for name in sorted(names)}
        return [
            TokenFieldCounts(
                rows_with_fields=rows.num_rows if names else 0,
                rows_without_field={name: count for name, count in lacking.items() if count},
            )
        ]

    def get_rollout_fields(self) -> RolloutFields:
        """Return the declared fields."""
        fields = self.list_token_fields()
        return RolloutFields(
            {name: declared.arrow_type for name, declared in fields.items()},
            tuple(self.row_fields),
            tuple(name for name, declared in fields.items() if declared.choose_values(name) == "token_ids"),
        )

    def list_token_fields(self) -> Mapping[str, TokenField]:
        """Return what each declared column holds for a token."""
        if isinstance(self.token_fields, dict):
            return self.token_fields
        return dict.fromkeys(self.token_fields, TokenField(values="numbers"))

    @classmethod
    def recognise(cls, sample: Sample) -> Recognition | None:
        """Recognise records of ids with a mask, labels or a response."""
        return choose_best([try_options(cls, {}, sample)])

    @classmethod
    def select_group_defaults(
        cls, options: Mapping[str, Any], groups: Mapping[str, Any]
    ) -> Mapping[str, Mapping[str, Any]]:
        """Drop what is too long: to cut ids is for the recipe to say."""
        return {"truncation": {"overlong": "drop", "token_cut": "reject"}}

    def check_options(self, options: DatasetOptions) -> None:
        """Refuse to cut ids unless the recipe allows it, and to make several examples of one."""
        refuse_overlong_policy(self, options, "would make several examples of one")
        chosen = options.truncation
        if chosen.overlong == "truncate" and chosen.token_cut != "allow":  # noqa: S105  (tokens of text)
            raise ValueError(
                "truncation.overlong: truncate for a tokens dataset cuts ids, since it has no messages to remove; "
                "expected truncation.token_cut: allow beside it; set it, or choose drop, raise or keep"
            )
        super().check_options(options)

    def join_shortening_policies(self, options: DatasetOptions) -> str:
        """Return that rows can be dropped, or cut where the recipe allows it."""
        allowed = "" if options.truncation.token_cut == "allow" else " with truncation.token_cut: allow"  # noqa: S105
        return f"drop, or truncate{allowed}"

    @cached_property
    def _read_columns(self) -> tuple[str, ...]:
        """The columns of ids, masks and declared fields."""
        own = (*self.ids_fields, *self.mask_fields, *self.list_token_fields(), *self.row_fields)
        others = (*PROMPT_FIELDS, *RESPONSE_FIELDS, *COUNT_FIELDS, *TURN_FIELDS, "labels", "attention_mask")
        return tuple(dict.fromkeys((*own, *others)))

    def make_record_reader(self, options: DatasetOptions) -> RecordReader:
        """Read every record as ids with their mask."""
        return self._read_row

    def _read_row(self, record: Mapping[str, Json]) -> Row:
        # The first shape that matches; null counts as absent.
        found = _read_prompt_response(record, self) or _read_whole(record, self) or _read_turns(record)
        if found is None:
            present = ", ".join(sorted(record)[:20]) or "no column"
            raise RejectError("unknown_schema", f"no ids with a mask, labels, a response or its length in {present}")
        # Fields are as long as what the record holds, its padding included, and of what it trains.
        declared = self.list_token_fields()
        fields = _read_token_fields(record, found, declared)
        ids, mask = found.ids, found.mask
        attention = record.get("attention_mask")
        if attention is not None:
            # The tokens at both ends that it leaves out are padding.
            attends = _read_mask(attention, "attention_mask")
            if len(attends) != len(ids):
                why = f"attention_mask has {len(attends)} entries, the record {len(ids)} ids"
                raise RejectError("length_mismatch", why)
            places = np.flatnonzero(attends)
            own = slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0)
            if not attends[own].all():
                at = int(places[0] + np.argmin(attends[own]))
                raise RejectError("padded_inside", f"attention_mask is 0 at {at}, inside")
            ids, mask, fields = ids[own], mask[own], {name: values[own] for name, values in fields.items()}
        mask[:1] = False
        if not mask.any():
            raise RejectError("no_loss_tokens", "no token but the first is trained" if len(ids) else "no tokens")
        columns: dict[str, Any] = {"input_ids": ids, "loss_mask": mask}
        columns |= {name: _read_row_field(name, record.get(name)) for name in self.row_fields}
        missing = [name for name in declared if name not in fields]
        columns |= {name: make_zeros(len(ids), declared[name].arrow_type) for name in missing}
        columns |= fields
        missing += [name for name in self.row_fields if columns[name] is None]
        notes = tuple(f"{WITHOUT_FIELD}{name}" for name in missing)
        report = ParseReport(schema=found.schema, notes=notes) if notes else make_plain_report(found.schema)
        return Row("tokens", columns=columns, report=report, read_columns=self._read_columns)


def _read_token_fields(
    record: Mapping[str, Json], found: _MaskedIds, declared: Mapping[str, TokenField]
) -> dict[str, Numbers]:
    """Return the declared fields that a record has, with a value for each of its ids."""
    fields: dict[str, Numbers] = {}
    ids, mask, response = found.ids, found.mask, found.response
    _, count = find_first_column(record, COUNT_FIELDS)
    if response is None and type(count) is int and 0 <= count <= len(ids):
        # The last tokens are the answer if all trained ones are among them.
        last = np.arange(len(ids)) >= len(ids) - count
        response = None if (mask & ~last).any() else last
    for name, declared_field in declared.items():
        values = _read_field(record, found.turns, name, declared_field)
        if values is None:
            continue
        # They are of all tokens, of the response, or of the trained ones; the others have 0.
        chosen = [np.ones(len(ids), np.bool_), *(() if response is None else (response,)), mask]
        counts = [int(places.sum()) for places in chosen]
        if len(values) not in counts:
            wanted = " or ".join(map(str, dict.fromkeys(counts)))
            raise RejectError("length_mismatch", f"{name} has {len(values)} values, expected {wanted}")
        fields[name] = np.zeros((len(ids), *values.shape[1:]), values.dtype)
        fields[name][chosen[counts.index(len(values))]] = values
    return fields


def _read_row_field(name: str, value: Json) -> float | str | None:
    """Return the value of a field of the whole row: a reward as a number, others as text."""
    if value is None:
        return None
    if name == "reward":
        if type(value) not in (int, float):
            raise RejectError("bad_field", f"reward is {describe_type(value)}, expected a number")
        if not abs(value) <= _MOST:
            raise RejectError("bad_field", f"reward is {value}, expected a finite float32")
        return float(value)
    if type(value) not in (int, str):
        raise RejectError("bad_field", f"{name} is {describe_type(value)}, expected text or an integer")
    return str(value)


def _read_prompt_response(record: Mapping[str, Json], options: Tokens) -> _MaskedIds | None:
    _, prompt = find_first_column(record, PROMPT_FIELDS)
    _, response = find_first_column(record, RESPONSE_FIELDS)
    if prompt is None or response is None:
        return None
    asked, answered = _read_ids(prompt), _read_ids(response)
    mask = np.ones(len(answered), np.bool_)
    for name, flags in _list_masks(record, options):
        own = _read_mask(flags, name)
        if len(own) != len(answered):
            raise RejectError("length_mismatch", f"{name} has {len(own)} entries, the response {len(answered)} ids")
        mask &= own
    ids, whole = np.concatenate((asked, answered)), np.concatenate((np.zeros(len(asked), np.bool_), mask))
    return _MaskedIds("prompt_response", ids, whole, response=np.arange(len(ids)) >= len(asked))


def _read_whole(record: Mapping[str, Json], options: Tokens) -> _MaskedIds | None:
    """Read the ids of a whole example with their mask, their labels, or the number of trained ones at the end."""
    masks, given = _list_masks(record, options), record.get("labels")
    counted, count = find_first_column(record, COUNT_FIELDS)
    value = find_first_column(record, options.ids_fields)[1]
    if value is None or (not masks and given is None and count is None):
        return None
    ids = _read_ids(value)
    mask = np.ones(len(ids), np.bool_)
    for name, flags in masks:
        own = _read_mask(flags, name)
        if len(own) < len(ids) and len(own) == record.get("response_length"):
            own = np.concatenate((np.zeros(len(ids) - len(own), np.bool_), own))
        if len(own) != len(ids):
            raise RejectError("length_mismatch", f"{name} has {len(own)} entries, the record {len(ids)} ids")
        mask &= own
    if given is not None:
        labelled = _read_labels(given, ids)
        if masks and not np.array_equal(mask[1:], labelled[1:]):
            at = 1 + int(np.flatnonzero(mask[1:] != labelled[1:])[0])
            names = ", ".join(name for name, _ in masks)
            raise RejectError(
                "labels_disagree",
                f"label {at} is {ids[at] if labelled[at] else IGNORED_LABEL}, and {names} "
                f"{'does not train it' if labelled[at] else 'trains it'}",
            )
        return _MaskedIds("masked" if masks else "labelled", ids, mask & labelled)
    if masks:
        return _MaskedIds("masked", ids, mask)
    if type(count) is not int or count < 0:
        raise RejectError("bad_mask", f"{counted} is {count!r}, expected how many of the last ids are trained")
    if count > len(ids):
        raise RejectError("length_mismatch", f"{counted} is {count}, the record has {len(ids)} ids")
    return _MaskedIds("counted", ids, np.arange(len(ids)) >= len(ids) - count)


def _list_masks(record: Mapping[str, Json], options: Tokens) -> list[tuple[str, Json]]:
    """Return a record's masks with their names; a null counts as absent."""
    return [(name, flags) for name in options.mask_fields if (flags := record.get(name)) is not None]


def _read_labels(given: Json, ids: TokenIds) -> Bools:
    """Return which ids are labels of themselves; the others have -100."""
    labels = _to_integers(given)
    if labels is None:
        raise RejectError("bad_mask", f"labels are {describe_type(given)}, expected a list of integers")
    if len(labels) != len(ids):
        raise RejectError("length_mismatch", f"labels have {len(labels)} entries, the record {len(ids)} ids")
    mask = labels != IGNORED_LABEL
    wrong = np.flatnonzero(mask & (labels != ids))
    if not len(wrong):
        return mask
    at = int(wrong[0])
    next_ids = np.append(ids[1:], -1)
    shifted = bool((labels[mask] == next_ids[mask])[: -1 if mask[-1] else None].all())
    hint = "; they are shifted by one, each label is the next id: shift them back" if shifted else ""
    raise RejectError("labels_disagree", f"label {at} is {labels[at]}, id {at} is {ids[at]}{hint}")


def _read_turns(record: Mapping[str, Json]) -> _MaskedIds | None:
    wanted = ("prompt_token_ids", "generation_token_ids")
    turns: list[dict[str, Any]] = []
    for path in TURN_FIELDS:
        value = get_at_path(record, path)
        if is_list(value):
            # Tools' results and messages without ids lie in later prompts.
            turns = [turn for turn in value if is_mapping(turn) and all(turn.get(name) is not None for name in wanted)]
        if turns:
            break
    else:
        return None
    ids, mask = np.empty(0, np.int32), np.empty(0, np.bool_)
    for number, turn in enumerate(turns):
        prompt, generated = _read_ids(turn["prompt_token_ids"]), _read_ids(turn["generation_token_ids"])
        if not np.array_equal(prompt[: len(ids)], ids):
            raise RejectError("not_append_only", f"the prompt of turn {number} does not begin with all ids before it")
        mask = np.concatenate((mask, np.arange(len(ids), len(prompt) + len(generated)) >= len(prompt)))
        ids = np.concatenate((prompt, generated))
    return _MaskedIds("turns", ids, mask, turns=turns)


def _read_field(
    record: Mapping[str, Json], turns: Sequence[Mapping[str, Json]], name: str, declared: TokenField
) -> Numbers | None:
    """Return a record's values, those of its turns end to end, or None; a null counts as absent, in a turn as zeros."""
    if all(turn.get(name) is None for turn in turns):
        value = record.get(name)
        return None if value is None else declared.read(value, name)
    joined: list[Numbers] = []
    for number, turn in enumerate(turns):
        generated = len(turn["generation_token_ids"])
        value = turn.get(name)
        values = make_zeros(generated, declared.arrow_type) if value is None else declared.read(value, name)
        if len(values) != generated:
            raise RejectError(
                "length_mismatch", f"{name} of turn {number} has {len(values)} values, the turn {generated} ids"
            )
        joined.append(values)
    return np.concatenate(joined)


def _read_ids(value: Json) -> TokenIds:
    """Return ids int32[T]; that each is below the vocabulary's size is checked where the tokenizer is known."""
    ids = _to_integers(value)
    if ids is None:
        raise RejectError("bad_tokens", f"ids are {describe_type(value)}, expected a flat list of integers")
    outside = ids[(ids < 0) | (ids > _MAX_ID)]
    if len(outside):
        raise RejectError("bad_tokens", f"id {outside[0]} is no token's")
    return ids.astype(np.int32)


def _read_mask(value: Json, name: str) -> Bools:
    mask = _read_json_list(value)
    if mask is None or (len(mask) and (mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all())):
        raise RejectError("bad_mask", f"{name} holds other values than 0 and 1")
    return mask.astype(np.bool_)


def _to_integers(value: Json) -> NDArray[np.int64] | None:
    array = _read_json_list(value)
    if array is None or (len(array) and array.dtype.kind not in "iu"):
        return None
    # Half of the range of uint64 is no int64; such a value is an integer, and no id.
    return np.minimum(array, np.iinfo(np.int64).max).astype(np.int64)


def _read_json_list(value: Json) -> NDArray[Any] | None:
    # NumPy would turn true into 1 among integers.
    if not is_list(value) or (bool in map(type, value) and int in map(type, value)):
        return None
    return to_flat_array(value)


def to_flat_array(values: Any) -> NDArray[Any] | None:
    """Return values as an array of one dimension; None if they are nested, of different kinds, or too large."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        return None
    return array if array.ndim == 1 else None
