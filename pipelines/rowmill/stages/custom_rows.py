"""A class of one's own at work: its records become rows like any others, or tokens that are checked before they count.

What belongs here: calling the class, what it may return, one word for every way in which it fails. What does
not: finding it (`custom.py`), files (`parts.py`), lengths (`text_examples.py`).

    record ──rows──► Row(s) ──canonicalisation──► canonical rows
           └─build─► ids, loss_mask, domain ──checked──► Built
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmill.conversation.rendering.renderer import Template
from rowmill.core.config import describe_type
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.formats import Chat, Python, Supervised, Text
from rowmill.formats.canonicalization import Canonicalizer, RowOptionValues, remove_nulls
from rowmill.formats.custom import BuildContext, RowFormat, find_format, get_format_method
from rowmill.formats.record_values import is_mapping
from rowmill.formats.tool_calls import Tools
from rowmill.recipe.recipe import Dataset
from rowmill.schema.rows import Rejected, Row

SCHEMA = "python"
"""What the report of such a row says of its shape."""


def open_row_format(options: Python, base: Path) -> RowFormat:
    """Return the dataset's format with its options.

    Raises
    ------
    ConfigError
        If the class cannot be found or made.

    """
    where = "format.class"
    cls = find_format(options.class_name, base, where)
    try:
        return cls(**options.options)
    except Exception as error:
        raise ConfigError(
            f"{where}: {options.class_name} cannot be made with options {options.options} "
            f"({type(error).__name__}: {error}); the constructor's arguments are needed; correct format.options"
        ) from error


class CustomRowReader:
    """Turns records into canonical rows by a class of one's own."""

    def __init__(self, dataset: Dataset, base: Path) -> None:
        assert isinstance(dataset.format, Python)
        own = dataset.format
        self._format = open_row_format(own, base)
        self._builds = get_format_method(type(self._format)) == "build"
        # A conversation is read again as if a source had held it: whatever shape its calls, parts and flags have.
        chat = Chat(
            dataset_schema="messages",
            role_map=own.role_map,
            unknown_roles=own.unknown_roles,
            assistant_roles=own.assistant_roles,
            message_flags=own.message_flags,
            domain_key=own.domain_key,
        )
        tools, template = Tools(tools_fields=["tools"]), Template(chat_template_kwargs="kwargs")
        self._readers: dict[str, Canonicalizer] = {
            kind: Canonicalizer(
                RowOptionValues(form, dataset.reasoning, tools, template, dataset.filters),
                weighted=dataset.loss.weights,
                group_key=dataset.splits.group_key,
                order_key=dataset.splits.time_key,
            )
            for kind, form in (
                ("conversation", chat),
                ("pair", Supervised(domain_key=own.domain_key)),
                ("text", Text(domain_key=own.domain_key)),
            )
        }

    def __call__(self, record: Json, *, arrow: bool = False) -> list[Row | Rejected]:
        """Return what becomes of one record: at least one row or reject."""
        if not is_mapping(record):
            return [Rejected("not_an_object", f"the record is {describe_type(record)}, expected a mapping")]
        if arrow:
            record = remove_nulls(record)
        if self._builds:
            # Tokens are made where the tokenizer is; the record waits as it came.
            return [self._add_keys(Row("record", record=record), record)]
        try:
            made: Any = self._format.rows(record)
        except Exception as error:  # noqa: BLE001  (whatever a class of one's own raises is that record's reject)
            return [reject_format_error(error)]
        rows: list[Any] = [] if made is None else list(made) if isinstance(made, list | tuple) else [made]
        return [self._canonicalize_row(row, record) for row in rows] or [Rejected("skipped_by_format")]

    def _canonicalize_row(self, row: Any, record: Mapping[str, Json]) -> Row | Rejected:
        if not isinstance(row, Row) or row.kind not in self._readers:
            what = f"a Row of kind {row.kind}" if isinstance(row, Row) else type(row).__name__
            return Rejected("format_error", f"rows returned {what}, expected a Row: conversation, pair or text")
        given: dict[str, Json]
        match row.kind:
            case "conversation":
                kwargs = row.template_kwargs or None
                given = {"messages": list(row.messages), "tools": row.tools and list(row.tools), "kwargs": kwargs}
            case "pair":
                given = {"prompt": row.text, "response": row.output}
            case _:
                given = {"text": row.text}
        read = self._readers[row.kind].row(given)
        return read if isinstance(read, Rejected) else self._add_keys(read, record, row)

    def _add_keys(self, row: Row, record: Mapping[str, Json], given: Row | None = None) -> Row | Rejected:
        """Add group, order and domain: the class's own, else the record's."""
        reader = self._readers["conversation"]
        placed = reader.add_keys(row, record)
        if isinstance(placed, Rejected):
            return placed
        report = replace(placed.report, schema=SCHEMA)
        if given is None:
            return replace(placed, report=report)
        return replace(
            placed,
            report=report,
            group_key=given.group_key or placed.group_key,
            order_key=given.order_key or placed.order_key,
            domain=given.domain or placed.domain,
        )


@dataclass(frozen=True, slots=True)
class CustomExample:
    """An example by a class of one's own: `ids` int32[T], `mask` bool[T]; the first token is no target."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    domain: str | None


class CustomExampleBuilder:
    """Turns records into tokens by a class of one's own, and checks what it made."""

    def __init__(
        self, dataset: Dataset, base: Path, *, open_tokenizer: Callable[[], Any], vocab_size: int, max_length: int
    ) -> None:
        assert isinstance(dataset.format, Python)
        self._format = open_row_format(dataset.format, base)
        self._context = BuildContext(open_tokenizer, dataset, max_length)
        self._vocab_size = vocab_size

    def __call__(self, record: Mapping[str, Json]) -> CustomExample | Rejected:
        """Return the example of one record."""
        try:
            made: Any = self._format.build(record, self._context)
        except Exception as error:  # noqa: BLE001  (whatever a class of one's own raises is that record's reject)
            return reject_format_error(error)
        return (
            Rejected("skipped_by_format") if made is None else check_custom_example(made, vocab_size=self._vocab_size)
        )


def check_custom_example(made: Any, *, vocab_size: int) -> CustomExample | Rejected:
    """Return what `build` returned as an example, or what is wrong with it."""
    if not isinstance(made, Mapping) or "ids" not in made or "loss_mask" not in made:
        return Rejected("bad_example", f"build returned {type(made).__name__}, expected ids and loss_mask")
    ids, mask, domain = _to_flat_array(made["ids"]), _to_flat_array(made["loss_mask"]), made.get("domain")
    if ids is None or ids.dtype.kind not in "iu" or not len(ids):
        return Rejected("bad_example", "ids are no list of integers, or an empty one")
    if mask is None or len(mask) != len(ids):
        has = "no flat list" if mask is None else f"{len(mask)} long"
        return Rejected("bad_example", f"loss_mask is {has}, ids are {len(ids)} long")
    if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        return Rejected("bad_example", "loss_mask holds other values than 0 and 1")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        return Rejected("bad_example", f"id {outside[0]} is unknown; ids are 0 to {vocab_size - 1}")
    if domain is not None and not isinstance(domain, str):
        return Rejected("bad_example", f"domain is {describe_type(domain)}, expected text")
    trained = mask.astype(np.bool_)
    trained[0] = False
    return CustomExample(ids.astype(np.int32), trained, domain)


def _to_flat_array(values: Any) -> NDArray[Any] | None:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        return None
    return array if array.ndim == 1 else None


def reject_format_error(error: Exception) -> Rejected:
    """Word what a class raised."""
    return Rejected("format_error", f"{type(error).__name__}: {error}")
