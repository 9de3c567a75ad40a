"""Shapes of texts: classes fine enough that every column type reads a union of them.

    "17"  integer      "+17" sign         "017" zeros        "1.5" point       "1e-05" exponent
    "1,234" comma_group    "1,234,567" comma_groups    "1,5" comma    "1.234.567,8" points_comma
    "NA"  na:NA        "?" mark:?         "True" boolean     "2024-01-15" when:date:iso8601

Digits with a leading 0 are codes, such as zip codes: no number type reads them, or `01234` would become 1234.
"""

import re
from functools import lru_cache

from rowmill.kinds.tables.schema import MAX_DIGITS
from rowmill.kinds.tables.time_order import list_fitting_candidates, zero_time_of_day

NON_FINITE_WORDS = frozenset("nan -nan inf +inf -inf infinity +infinity -infinity".split())
"""Words for what is no number of JSON, in any case."""
NA_WORDS = NON_FINITE_WORDS | frozenset(
    "na n/a #n/a #na <na> null none nil missing #value! #div/0! #null! #ref! #name? #num!".split()
)
"""Words for a missing value in a column of numbers, dates or booleans, in any case; in text they are text."""

_BOOLEANS = frozenset({"true", "false", "True", "False", "TRUE", "FALSE"})
LONGEST_NA_WORD = max(map(len, NA_WORDS))

_GROUPS = r"[+-]?[1-9][0-9]{0,2}"
_SHAPES = {
    "integer": rf"0|-?[1-9][0-9]{{0,{MAX_DIGITS - 1}}}",
    "sign": rf"\+(?:0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})|-0",
    "zeros": r"[+-]?0[0-9]+",
    "point_group": rf"{_GROUPS}\.[0-9]{{3}}",
    "point": r"[+-]?(?:(?:0|[1-9][0-9]{0,400})\.[0-9]{0,400}|\.[0-9]{1,400})",
    "exponent": r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})[eE][+-]?[0-9]{1,3}",
    "comma_group": rf"{_GROUPS},[0-9]{{3}}",
    "comma_groups": rf"{_GROUPS}(?:,[0-9]{{3}}){{2,}}",
    "commas_point": rf"{_GROUPS}(?:,[0-9]{{3}})+\.[0-9]{{0,400}}",
    "comma": r"[+-]?(?:(?:0|[1-9][0-9]{0,400}),[0-9]{0,400}|,[0-9]{1,400})",
    "point_groups": rf"{_GROUPS}(?:\.[0-9]{{3}}){{2,}}",
    "points_comma": rf"{_GROUPS}(?:\.[0-9]{{3}})+,[0-9]{{0,400}}",
    "spaces": rf"{_GROUPS}(?:[ \u00a0\u202f][0-9]{{3}})+",
    "spaces_point": rf"{_GROUPS}(?:[ \u00a0\u202f][0-9]{{3}})+\.[0-9]{{0,400}}",
    "spaces_comma": rf"{_GROUPS}(?:[ \u00a0\u202f][0-9]{{3}})+,[0-9]{{0,400}}",
    "quotes": rf"{_GROUPS}(?:'[0-9]{{3}})+",
    "quotes_point": rf"{_GROUPS}(?:'[0-9]{{3}})+\.[0-9]{{0,400}}",
    "boolean": "|".join(sorted(_BOOLEANS)),
    "mark": r"[-?.*_–—]{1,4}",
}
_SHAPE = re.compile("|".join(f"(?P<{name}>(?:{pattern})\\Z)" for name, pattern in _SHAPES.items()))
_MAY_BE_TIME = re.compile(r"(?=[^0-9]*[0-9])(?=[^ ./:-]*[ ./:-])[0-9A-Za-z ./:+-]{4,40}\Z", re.ASCII)

_WHOLE = frozenset({"integer", "sign"})
_PLAIN = _WHOLE | {"point", "point_group", "exponent"}
INTEGERS: dict[str, frozenset[str]] = {
    "": _WHOLE,
    ",": _WHOLE | {"comma_group", "comma_groups"},
    ".": _WHOLE | {"point_group", "point_groups"},
    " ": _WHOLE | {"spaces"},
    "'": _WHOLE | {"quotes"},
}
"""Shapes of integers by thousands separator."""
NUMBERS: dict[tuple[str, str], frozenset[str]] = {
    (".", ""): _PLAIN,
    (".", ","): _PLAIN | {"comma_group", "comma_groups", "commas_point"},
    (".", " "): _PLAIN | {"spaces", "spaces_point"},
    (".", "'"): _PLAIN | {"quotes", "quotes_point"},
    (",", ""): _WHOLE | {"comma", "comma_group"},
    (",", "."): _WHOLE | {"comma", "comma_group", "point_group", "point_groups", "points_comma"},
    (",", " "): _WHOLE | {"comma", "comma_group", "spaces", "spaces_comma"},
}
"""Shapes of numbers by decimal and thousands separator."""


def shape_of(text: str) -> str:
    """Return the shape of a nonempty text; surrounding blanks are ignored."""
    bare = text.strip(" \t")
    # Most texts begin with a letter, as only the boolean shape does.
    found = None if bare[:1].isalpha() and bare not in _BOOLEANS else _SHAPE.match(bare)
    if found is not None:
        kind = found.lastgroup
        assert kind is not None
        return f"mark:{bare}" if kind == "mark" else kind
    if not bare:
        return "blank"
    if len(bare) <= LONGEST_NA_WORD and bare.lower() in NA_WORDS:
        return f"na:{bare}"
    return time_shape_of(bare)


def time_shape_of(text: str) -> str:
    """Return the shape of a JSON string: a time or text, because JSON writes numbers without quotes."""
    # The times of day of a column are many more than its days.
    return _name_time_formats(zero_time_of_day(text)) if _MAY_BE_TIME.match(text) else "text"


@lru_cache(maxsize=1 << 14)
def _name_time_formats(text: str) -> str:
    """Return the formats that read a text: `when:date:%d/%m/%Y|%m/%d/%Y`, with `~` if they disagree."""
    read = [(order, order.read(text)) for order in list_fitting_candidates(text)]
    fitting = [(order, position) for order, position in read if position is not None]
    if not fitting:
        return "text"
    kind = "time" if fitting[0][0].is_time_of_day else "datetime" if ":" in text else "date"
    differ = "~" if any(position != fitting[0][1] for _, position in fitting) else ""
    return f"when:{kind}:{differ}{'|'.join(order.name for order, _ in fitting)}"


def formats_of(shape: str) -> tuple[str, ...]:
    """Return the formats that read texts of a shape; none for shapes other than times."""
    return tuple(shape.split(":", 2)[2].lstrip("~").split("|")) if shape.startswith("when:") else ()


def is_non_finite_shape(shape: str) -> bool:
    """Tell whether texts of a shape are NaN or infinity."""
    return shape.startswith("na:") and shape[3:].lower() in NON_FINITE_WORDS


def is_absent_shape(shape: str) -> bool:
    """Tell whether texts of a shape mean a missing value in columns other than text."""
    return shape == "blank" or shape.startswith(("na:", "mark:"))


def is_ambiguous_shape(shape: str) -> bool:
    """Tell whether two formats disagree on texts of a shape."""
    return shape.startswith("when:") and ":~" in shape
