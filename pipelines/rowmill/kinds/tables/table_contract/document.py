"""A table contract as a YAML file for people: each column with its evidence, in comments."""

import json
import re
from collections.abc import Callable, Iterator, Mapping

from rowmill.kinds.tables.table_contract.contract import ColumnContract, TableContract
from rowmill.kinds.tables.table_contract.drift import reads_shape
from rowmill.kinds.tables.table_contract.inference import CellLocation, ColumnEvidence, ShapeTally, TableEvidence
from rowmill.kinds.tables.table_contract.value_shapes import formats_of, is_absent_shape, is_ambiguous_shape
from rowmill.kinds.tables.time_order import CANDIDATES

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"})
_DEFAULTS = {name: field.default for name, field in ColumnContract.model_fields.items()}
_SHAPES_SHOWN = 5
_SHAPE_NAMES = {
    "integer": "integers", "sign": "integers with a sign", "zeros": "digits that begin with 0", "point": "decimals",
    "point_group": "decimals", "exponent": "numbers with an exponent", "comma_group": "numbers such as 1,234",
    "comma_groups": "numbers with commas between thousands", "commas_point": "numbers with commas and a point",
    "comma": "decimals with a comma", "point_groups": "numbers with points between thousands",
    "points_comma": "numbers with points and a comma", "boolean": "booleans", "blank": "blanks", "text": "texts",
    "decimal": "decimals", "string": "texts", "container": "lists or objects",
}  # fmt: skip


def format_contract_yaml(
    contract: TableContract,
    evidence: TableEvidence,
    *,
    title: str,
    place_of: Callable[[CellLocation], str],
    shows_cells: bool = True,
) -> str:
    """Return a contract as YAML; without `shows_cells` it contains no values of the data, for private data."""
    lines = [
        f"# Table contract of {title}: what its columns are, and what later data is checked against.",
        f"# Proposed from {evidence.records:,} records. Edit it; a build follows this file, not the data.",
    ]
    for name in ("delimiter", "quote", "group", "order"):
        value = getattr(contract, name)
        if value is not None:
            lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}")
    lines.append("columns:")
    for name, column in contract.columns.items():
        seen = evidence.columns.get(name)
        said = (
            ["in no record"]
            if seen is None
            else _describe_evidence(column, seen, evidence.records, place_of, shows_cells)
        )
        lines += [f"  # {line}" for line in said]
        is_plain = _PLAIN_KEY.fullmatch(name) and name.lower() not in _RESERVED
        key = name if is_plain else json.dumps(name, ensure_ascii=not name.isprintable())
        options = [
            f"{option}: {given if option == 'type' else json.dumps(given, ensure_ascii=False)}"
            for option, given in column.model_dump(mode="json").items()
            if option == "type" or given != (list(_DEFAULTS[option]) if option == "na" else _DEFAULTS[option])
        ]
        lines.append(f"  {key}: {{{', '.join(options)}}}")
    return "\n".join(lines) + "\n"


def _describe_evidence(
    column: ColumnContract,
    seen: ColumnEvidence,
    records: int,
    place_of: Callable[[CellLocation], str],
    shows_cells: bool,
) -> Iterator[str]:
    absent = records - seen.present
    counts = [
        f"{seen.values:,} values",
        *([f"{seen.nulls:,} empty"] if seen.nulls else []),
        *([f"{absent:,} records without it"] if absent else []),
    ]
    tallies = seen.cells or seen.times or seen.kinds
    most = sorted(tallies.items(), key=lambda one: -one[1].count)
    shapes = [f"{tally.count:,} {_describe_shape(shape)}" for shape, tally in most[:_SHAPES_SHOWN]]
    more = [f"{len(most) - _SHAPES_SHOWN} more formats"] if len(most) > _SHAPES_SHOWN else []
    yield f"{', '.join(counts)}: {', '.join([*shapes, *more])}" if shapes else ", ".join(counts)
    # What a user's strptime format reads is known only by trying it.
    is_known = column.format is None or column.format in {order.name for order in CANDIDATES}
    for shape, tally in most if is_known else ():
        if (
            not reads_shape(column, shape)
            and not (is_absent_shape(shape) and column.type != "text")
            and column.type != "text"
        ):
            yield f"{tally.count:,} do not fit{_format_example(tally, place_of, shows_cells)}"
    yield from _explain_text_type(column, tallies, place_of, shows_cells)


def _explain_text_type(
    column: ColumnContract,
    tallies: Mapping[str, ShapeTally],
    place_of: Callable[[CellLocation], str],
    shows_cells: bool,
) -> Iterator[str]:
    """Explain why a column that looks like numbers or dates is text."""
    if column.type != "text":
        return
    values = sum(tally.count for shape, tally in tallies.items() if not is_absent_shape(shape))
    texts = tallies.get("text")
    if "zeros" in tallies:
        yield (
            "text, because digits that begin with 0 are "
            f"codes{_format_example(tallies['zeros'], place_of, shows_cells)}"
        )
    elif texts is not None and 0 < texts.count <= values // 10:
        yield f"text, because of {texts.count:,} values{_format_example(texts, place_of, shows_cells)}"
    elif texts is None and "comma_group" in tallies:
        yield "text, because 1,234 may be over a thousand or a fraction: write type: number and decimal or thousands"
    elif texts is None and any(is_ambiguous_shape(shape) for shape in tallies):
        shape = next(shape for shape in tallies if is_ambiguous_shape(shape))
        yield f"text, because {' and '.join(formats_of(shape))} disagree on it: write type: date and the format"


def _format_example(tally: ShapeTally, place_of: Callable[[CellLocation], str], shows_cells: bool) -> str:
    if not shows_cells or not tally.examples:
        return ""
    text, place = tally.examples[0]
    return f", such as {text[:40]!r} ({place_of(place)})"


def _describe_shape(shape: str) -> str:
    if shape.startswith(("na:", "mark:")):
        return f"{shape.partition(':')[2]!r}"
    if shape.startswith("when:"):
        return f"{shape.split(':')[1]}s as {' or '.join(formats_of(shape))}"
    return _SHAPE_NAMES.get(shape, shape.replace("_", " "))
