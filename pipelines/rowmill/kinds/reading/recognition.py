"""Recognizes a kind of data in some records, by reading them as a build would.

A kind suggests options (`DatasetKind.recognise`), and `try_options` reads the records with them: how many become rows,
from which columns, and which text nothing reads. So a proposal cannot differ from what a build makes of the records,
and a shape that a kind learns to read is recognized at once.

    records ──kind.recognise──► options ──the kind's own reader──► Recognition(fits, of, unread text)

A proposal is sure if the whole records fit and most of the text is read. A record is whole if it has a value in each
column in which most records have one; one that is refused for its content (blank, cut off, too deep) says nothing about
the shape, and one in twenty may be broken: as many as the check `rejects` lets pass.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from rowmill.core.json import Json
from rowmill.kinds.base import DatasetKind, DatasetOptions
from rowmill.kinds.reading.canonicalization import (
    ANSWER_PAIRS,
    Canonicalizer,
    list_present_columns,
    measure_row_text,
    measure_unread_text,
    remove_nulls,
)
from rowmill.kinds.reading.conversation_rows import explain_tree
from rowmill.kinds.shared.messages import (
    ASKING_COLUMNS,
    IDENTIFIER_CHARS,
    PROMPT_COLUMNS,
)
from rowmill.kinds.shared.samples import BLOCKING_SHARE, EXPLICIT_PRECEDENCE, Recognition, Sample
from rowmill.kinds.shared.training_flags import explain_unread_flag, find_value, parse_unread_flag, suggest_meaning
from rowmill.schema.rows import Rejected

RECORDS_LOOKED_AT = 200
"""Records that a recognition is based on."""

SHAPE_REASONS = frozenset(
    "unknown_schema missing_field bad_messages content_not_text bad_tools bad_tool_call unread_prompt no_assistant "
    "missing_ground_truth unpaired_row bad_label prompt_mismatch bad_tokens bad_mask length_mismatch "
    "unknown_content_part bad_system_prompt bad_weight prompt_ends_with_assistant".split()
)
"""Reasons to reject a record that say that it has another shape; the others concern its content."""

_ASKING_NAMES = {*ASKING_COLUMNS, *PROMPT_COLUMNS}
"""Columns of prompts, whose names other datasets write in capitals."""


@dataclass(slots=True)
class _SampleReading:
    """What some records show when they are read with options of a kind."""

    fits: int = 0
    """Records that are read as rows."""
    of: int = 0
    """Records that are read, and those that have another shape."""
    flags: dict[tuple[str, str], Json] = field(default_factory=dict[tuple[str, str], Json])
    """By place and name, flags of training that nothing reads, with a value of each."""
    given_away: int = 0
    """Rows whose prompt holds their response."""
    preferences: set[str] = field(default_factory=set[str])
    """Columns of preference data that nothing reads."""
    columns: Counter[str] = field(default_factory=Counter[str])
    """The columns that are read, by records that have them."""
    schemas: Counter[str] = field(default_factory=Counter[str])
    problems: Counter[str] = field(default_factory=Counter[str])
    """Why records could not be read as rows, with their number."""
    text: int = 0
    """Characters that are read."""
    unread: Counter[str] = field(default_factory=Counter[str])
    """Characters that nothing reads, by column."""


def _read_sample(model: DatasetKind, options: DatasetOptions, sample: Sample) -> _SampleReading:
    """Read the whole records of a sample as a build would."""
    reader, read = Canonicalizer(options), _SampleReading()
    for record in sample.whole:
        row = reader(remove_nulls(dict(record)))
        if isinstance(row, Rejected):
            # A row that says that it does not train is read.
            read.fits += row.reason == "untrained_row"
            read.of += row.reason in SHAPE_REASONS or row.reason == "untrained_row"
            read.problems[f"{row.reason}: {row.detail}"] += 1
            continue
        read.of += 1
        roles = {message["role"] for message in row.messages if message["content"] or message.get("tool_calls")}
        if row.kind == "conversation" and roles.isdisjoint(model.get_token_options().assistant_roles):
            read.problems["no_assistant: no message of the model"] += 1
            continue
        if row.messages and not roles:
            read.problems["bad_messages: no message has content"] += 1
            continue
        read.fits += 1
        for unread_flag in filter(None, map(parse_unread_flag, row.report.notes)):
            read.flags.setdefault(unread_flag, find_value(record, unread_flag[1]))
        # A short answer may well stand in a long prompt.
        is_long = len(row.output or "") > IDENTIFIER_CHARS
        read.given_away += is_long and (row.output or "").strip() in (row.text or "")
        read.preferences.update(list_present_columns(record, reader.unread_preferences))
        read.schemas[row.report.schema] += 1
        read.columns.update(name for name in row.read_columns if record.get(name) is not None)
        read.text += measure_row_text(row)
        read.unread.update(measure_unread_text(record, row, {*row.read_columns, *reader.read_elsewhere}))
    return read


def _needs_weights(model: DatasetKind, read: _SampleReading) -> bool:
    """Return whether the option of weights, if the kind has it, reads what else is refused or unread.

    These are weights other than 0 and 1, and those of rows.
    """
    if "loss" not in model.GROUPS or "weights" in model.FIELDS_NOT_READ.get("loss", ()):
        return False
    return any(problem.startswith("bad_weight") for problem in read.problems) or any(
        place == "column" and name in model.list_message_flags() and type(value) is not bool
        for (place, name), value in read.flags.items()
    )


def _find_problem(kind: type[DatasetKind], read: _SampleReading, sample: Sample) -> str:
    """Return why records must not be read like that although they can be; empty if they may."""
    compares = kind.get_name() == "preference"
    if compared := [
        name for name in sample.columns if name in read.preferences or (name in ANSWER_PAIRS and not compares)
    ]:
        return f"{', '.join(compared)}: a column of preference data, whose worse answers must not be trained"
    if asking := [
        name
        for name, size in read.unread.items()
        if name.lower() in _ASKING_NAMES and size * 2 > sum(len(str(record.get(name, ""))) for record in sample.whole)
    ]:
        return f"{', '.join(asking)}: a column of prompts, which nothing reads"
    return "the prompt holds its response" if read.given_away * 2 > read.fits else ""


def try_options(
    kind: type[DatasetKind],
    options: Mapping[str, Any],
    sample: Sample,
    *,
    notes: Sequence[str] = (),
    groups: Mapping[str, Any] | None = None,
) -> Recognition:
    """Read some records with options of a kind, as a build would.

    Flags of training that they have are read, if their names say what they mean; the others are named in the notes.
    """
    model = kind.model_validate({"kind": kind.get_name(), **options})
    read = _read_sample(model, DatasetOptions.model_validate({"format": model, **(groups or {})}), sample)
    if groups is None and _needs_weights(model, read):
        weighed = try_options(kind, options, sample, notes=notes, groups={"loss": {"weights": True}})
        if weighed.fits >= max(read.fits, 1):
            return weighed
    meanings = {
        name: meaning
        for (place, name), value in read.flags.items()
        if "message_flags" in kind.model_fields and (place != "column" or kind.READS_FLAG_COLUMNS)
        if name not in model.list_message_flags() and (meaning := suggest_meaning(name, value)) is not None
    }
    if meanings and "message_flags" not in options:
        trains = [f"true of `{name}` {'trains' if one == 'train' else 'does not'}" for name, one in meanings.items()]
        note = f"by their names, {', '.join(trains)}; check that"
        return try_options(kind, {**options, "message_flags": meanings}, sample, notes=[*notes, note], groups=groups)
    undecided = [
        f"decide before a build what `{name}` means, which nothing reads: "
        + explain_unread_flag(
            place,
            name,
            value,
            reads=place != "column" or kind.READS_FLAG_COLUMNS,
            is_known=name in model.list_message_flags(),
        )
        for (place, name), value in read.flags.items()
    ]
    total = read.text + read.unread.total()
    order = {name: i for i, name in enumerate(sample.columns)}
    return Recognition(
        {"kind": kind.get_name(), **options},
        read.fits,
        read.of,
        len(sample.records),
        sorted(read.columns, key=lambda name: order.get(name, 0)),
        {name: size / total for name, size in read.unread.most_common() if total},
        read.problems.most_common(1)[0][0] if read.problems else "",
        _find_problem(kind, read, sample),
        [name for name, _ in read.schemas.most_common()],
        [*notes, *undecided],
        groups or {},
        kind.PRECEDENCE,
    )


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """The format that is proposed for some records, or why none is."""

    proposal: Recognition | None
    candidates: Sequence[Recognition]
    """What comes closest, the best first."""
    refusal: str = ""
    """Why no kind reads such records, if that is known."""

    def explain(self) -> str:
        """Return why nothing is proposed, with the two best candidates as lines of a recipe."""
        lines = [self.refusal] if self.refusal else []
        for found in self.candidates[:2]:
            why, share = found.problem or found.misfit, sum(found.unread.values())
            if not why and share >= BLOCKING_SHARE:
                why = f"nothing reads {', '.join(found.unread)}, {share:.0%} of the text"
            line = f"{found.fits} of {found.of or found.records} fit format: {write_options(found.options)}"
            lines.append(f"{line} ({why})" if why else line)
        return "; ".join(lines)


def recognise_format(sample: Sample, kinds: Iterable[type[DatasetKind]]) -> FormatChoice:
    """Return the kind and options that read every whole record, and most of its text."""
    found = [one for kind in kinds if (one := kind.recognise(sample)) is not None]
    # Single messages are no documents and no table, whatever reads them.
    is_apart = sample.is_mostly(bool(explain_tree(record)) for record in sample.whole)
    sure = sorted(
        (one for one in found if one.is_sure and not (is_apart and one.precedence > EXPLICIT_PRECEDENCE)),
        key=lambda one: one.precedence,
    )
    others = sorted(found, key=lambda one: (-one.fits, one.precedence))
    tree = next((why for record in sample.whole if (why := explain_tree(record))), "")
    return FormatChoice(sure[0] if sure else None, others, tree)


def find_wrapped_records(
    records: Sequence[Mapping[str, Json]], kinds: Sequence[type[DatasetKind]]
) -> tuple[str, list[dict[str, Json]]] | None:
    """Return the one list of records in a single object that holds them, with its path; None if it is a record."""
    if len(records) != 1 or recognise_format(Sample(records), kinds).proposal is not None:
        return None
    lists = list_lists(records[0])
    fitting = [
        path
        for path, rows in lists.items()
        if recognise_format(Sample(rows[:RECORDS_LOOKED_AT]), kinds).proposal is not None
    ]
    return (fitting[0], lists[fitting[0]]) if len(fitting) == 1 else None


def list_lists(value: Json) -> dict[str, list[dict[str, Json]]]:
    """Return the lists of objects in an object, by the path that `source.field` gives them."""
    found: dict[str, list[dict[str, Json]]] = {}
    for name, own in value.items() if isinstance(value, dict) else ():
        if isinstance(own, list) and own and all(isinstance(one, dict) for one in own):
            found[name] = own
        elif isinstance(own, dict):
            found |= {f"{name}.{inner}": rows for inner, rows in list_lists(own).items()}
    return found


def write_options(options: Mapping[str, Any]) -> str:
    """Return options as one line of YAML."""
    return yaml.safe_dump(dict(options), default_flow_style=True, width=10**6, sort_keys=False).strip()
