"""A table contract as a file of YAML for people: each column with what was seen of it, in comments.

What belongs here: the text. What does not: where the file lies and who reads it (`recipe.py`), places of records.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping

from rowmill.tabular.table_contract.contract import ColumnContract, TableContract
from rowmill.tabular.table_contract.drift import reads
from rowmill.tabular.table_contract.evidence import ColumnEvidence, Evidence, Place, Tally
from rowmill.tabular.table_contract.value_shapes import formats_of, is_absent, is_ambiguous
from rowmill.tabular.time_order import CANDIDATES

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"})
_DEFAULTS = {name: field.default for name, field in ColumnContract.model_fields.items()}
_SHAPES_SHOWN = 5
_WORDS = {
    "integer": "integers", "sign": "integers with a sign", "zeros": "digits that begin with 0", "point": "decimals",
    "point_group": "decimals", "exponent": "numbers with an exponent", "comma_group": "numbers such as 1,234",
    "comma_groups": "numbers with commas between thousands", "commas_point": "numbers with commas and a point",
    "comma": "decimals with a comma", "point_groups": "numbers with points between thousands",
    "points_comma": "numbers with points and a comma", "boolean": "booleans", "blank": "blanks", "text": "texts",
    "decimal": "decimals", "string": "texts", "container": "lists or objects",
}  # fmt: skip


def as_yaml(
    contract: TableContract,
    evidence: Evidence,
    *,
    title: str,
    place_of: Callable[[Place], str],
    shows_cells: bool = True,
) -> str:
    """Return a contract as YAML; `shows_cells` false leaves values of the data out, for data that is private."""
    lines = [
        f"# Table contract of {title}: what its columns are, and what later data is held against.",
        f"# Proposed from {evidence.records:,} records. Edit it; a build follows what stands here, not the data.",
    ]
    for name in ("delimiter", "quote", "group", "order"):
        value = getattr(contract, name)
        if value is not None:
            lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}")
    lines.append("columns:")
    for name, column in contract.columns.items():
        seen = evidence.columns.get(name)
        said = ["no record has it"] if seen is None else _said(column, seen, evidence.records, place_of, shows_cells)
        lines += [f"  # {line}" for line in said]
        lines.append(f"  {_key(name)}: {{{', '.join(_options(column))}}}")
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    is_plain = _PLAIN_KEY.fullmatch(name) and name.lower() not in _RESERVED
    return name if is_plain else json.dumps(name, ensure_ascii=not name.isprintable())


def _options(column: ColumnContract) -> Iterator[str]:
    for name, value in column.model_dump(mode="json").items():
        if name == "type" or value != (list(_DEFAULTS[name]) if name == "na" else _DEFAULTS[name]):
            yield f"{name}: {value if name == 'type' else json.dumps(value, ensure_ascii=False)}"


def _said(
    column: ColumnContract, seen: ColumnEvidence, records: int, place_of: Callable[[Place], str], shows_cells: bool
) -> Iterator[str]:
    absent = records - seen.present
    counts = [
        f"{seen.values:,} values",
        *([f"{seen.nulls:,} empty"] if seen.nulls else []),
        *([f"{absent:,} records without it"] if absent else []),
    ]
    tallies = seen.cells or seen.times or seen.kinds
    most = sorted(tallies.items(), key=lambda one: -one[1].count)
    shapes = [f"{tally.count:,} {_word(shape)}" for shape, tally in most[:_SHAPES_SHOWN]]
    more = [f"{len(most) - _SHAPES_SHOWN} further ways of writing"] if len(most) > _SHAPES_SHOWN else []
    yield f"{', '.join(counts)}: {', '.join([*shapes, *more])}" if shapes else ", ".join(counts)
    # Of a strptime text of one's own it is known what it reads only when it does.
    is_known = column.format is None or column.format in {order.name for order in CANDIDATES}
    for shape, tally in most if is_known else ():
        if not reads(column, shape) and not (is_absent(shape) and column.type != "text") and column.type != "text":
            yield f"{tally.count:,} do not fit{_example(tally, place_of, shows_cells)}"
    yield from _why_text(column, tallies, place_of, shows_cells)


def _why_text(
    column: ColumnContract, tallies: Mapping[str, Tally], place_of: Callable[[Place], str], shows_cells: bool
) -> Iterator[str]:
    """Say why a column that looks like numbers or dates is text."""
    if column.type != "text":
        return
    values = sum(tally.count for shape, tally in tallies.items() if not is_absent(shape))
    texts = tallies.get("text")
    if "zeros" in tallies:
        yield f"text, because digits that begin with 0 are codes{_example(tallies['zeros'], place_of, shows_cells)}"
    elif texts is not None and 0 < texts.count <= values // 10:
        yield f"text, because of {texts.count:,} values{_example(texts, place_of, shows_cells)}"
    elif texts is None and "comma_group" in tallies:
        yield "text, because 1,234 may be above a thousand or a fraction: write type: number and decimal or thousands"
    elif texts is None and any(is_ambiguous(shape) for shape in tallies):
        shape = next(shape for shape in tallies if is_ambiguous(shape))
        yield f"text, because {' and '.join(formats_of(shape))} read it otherwise: write type: date and the format"


def _example(tally: Tally, place_of: Callable[[Place], str], shows_cells: bool) -> str:
    if not shows_cells or not tally.examples:
        return ""
    text, place = tally.examples[0]
    return f", such as {text[:40]!r} ({place_of(place)})"


def _word(shape: str) -> str:
    if shape.startswith(("na:", "mark:")):
        return f"{shape.partition(':')[2]!r}"
    if shape.startswith("when:"):
        return f"{shape.split(':')[1]}s as {' or '.join(formats_of(shape))}"
    return _WORDS.get(shape, shape.replace("_", " "))
