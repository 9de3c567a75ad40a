"""Record columns of declared types: Arrow type names of Parquet, and Hugging Face features."""

import re

from rowmill.kinds.tables.schema import Column, ColumnType

_ARROW: tuple[tuple[re.Pattern[str], ColumnType], ...] = (
    (re.compile(r"u?int(8|16|32|64)"), "integer"),
    (re.compile(r"half_?float|float(16|32|64)?|double"), "float"),
    (re.compile(r"decimal(32|64|128|256)?\(.*\)"), "decimal"),
    (re.compile(r"bool"), "boolean"),
    (re.compile(r"(large_)?(string|utf8)(_view)?"), "string"),
    (re.compile(r"timestamp\[.*\]"), "datetime"),
    (re.compile(r"date(32|64)(\[.*\])?"), "date"),
    (re.compile(r"time(32|64)\[.*\]"), "time"),
    (re.compile(r"duration\[.*\]"), "duration"),
    (re.compile(r"(large_|fixed_size_)?binary(_view)?(\[\d+\])?"), "bytes"),
)
_LIST = re.compile(r"(?:large_|fixed_size_)?list(?:_view)?<[^:<>]+: (.+?)>(?:\[\d+\])?")
_FEATURE = re.compile(r"Value\((?:dtype=)?'([^']+)'.*\)")


def parse_declared_column(name: str, declared: str, *, nullable: bool, required: bool) -> Column:
    """Return the column of a declared Arrow type; `json` if the declaration does not determine it."""
    feature = _FEATURE.fullmatch(declared)
    declared = declared if feature is None else feature[1]
    for pattern, kind in _ARROW:
        if pattern.fullmatch(declared):
            return Column(name, kind, nullable=nullable, required=required)
    inner = _LIST.fullmatch(declared)
    if inner is not None:
        item = parse_declared_column("item", inner[1].removesuffix(" not null"), nullable=True, required=True)
        return Column(name, "list", nullable=nullable, required=required, item=item)
    fields = _split_struct_fields(declared)
    if fields is not None:
        # Arrow stores every field of a struct, absent ones as null.
        inner_columns = tuple(parse_declared_column(n, kind, nullable=True, required=True) for n, kind in fields)
        return Column(name, "struct", nullable=nullable, required=required, fields=inner_columns)
    return Column(name, "json", nullable=nullable, required=required)


_KINDS: dict[ColumnType, str] = {
    "integer": "numbers", "float": "numbers", "decimal": "numbers", "boolean": "booleans", "string": "text",
    "datetime": "times", "date": "times", "time": "times", "duration": "durations", "bytes": "bytes",
}  # fmt: skip


def name_declared_kind(declared: str) -> str:
    """Return the kind of values of a declared type: "numbers", "text", …; "" where it may be anything."""
    return _KINDS.get(parse_declared_column("column", declared, nullable=True, required=True).type, "")


def _split_struct_fields(declared: str) -> list[tuple[str, str]] | None:
    """Split `struct<a: int64, b: list<item: string>>` into its fields; None for any other text."""
    if not (declared.startswith("struct<") and declared.endswith(">")):
        return None
    fields: list[tuple[str, str]] = []
    depth, begin, body = 0, 0, declared[len("struct<") : -1]
    for at, character in enumerate(f"{body},"):
        depth += (character in "<([") - (character in ">)]")
        if character == "," and not depth:
            name, colon, kind = body[begin:at].strip().partition(": ")
            if not colon:
                return None
            fields.append((name, kind.removesuffix(" not null")))
            begin = at + 1
    return fields
