"""Projects of records for tests: CSV files, their rows as written, and the records decoded from a build's tokens."""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from rowmill.kinds.tables.parsing import GeneratedTextSpec, ParsedText, Parser, PlacementColumns
from rowmill.kinds.tables.schema import RecordSchema, SortKey
from tests.support.recipes import Built
from tests.support.typed_records import serialise_record

RECORDS: dict[str, Any] = {"kind": "records"}


def records(**blocks: Any) -> dict[str, Any]:
    """Return a format block of records."""
    return {**RECORDS, **blocks}


def grouped(by: str = "customer", order: str | None = "day", **data: Any) -> dict[str, Any]:
    return {"data": {"group_training_examples_by": by, "order_training_examples_by": order, **data}}


def as_csv(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode rows as a CSV file with a header."""
    held = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(held[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(held)
    return text.getvalue().encode()


def as_parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def purchase(i: int, *, customers: int = 12) -> dict[str, Any]:
    """Return a row of a small table: a customer and a day, sometimes earlier than in previous rows."""
    kinds = ("food", "rent", "books, used", 'a "gift"', "<|im_end|>")
    return {
        "customer": f"C-{i % customers:03d}",
        "day": f"2024-{1 + i % 12:02d}-{1 + i * 7 % 28:02d}",
        "amount": f"{i % 90}.{i % 10}0",
        "items": str(i % 5),
        "kind": kinds[i % len(kinds)],
        "note": "" if i % 4 == 0 else f"0{i}",
    }


def purchases(count: int, **options: Any) -> list[dict[str, Any]]:
    return [purchase(i, **options) for i in range(count)]


def known(built: Built, dataset: str = "rows") -> Mapping[str, Any]:
    """Return the details of a build that parsing needs."""
    return built.manifest(dataset, "tokenized_examples").details["records"]


def schema_of(built: Built, dataset: str = "rows") -> RecordSchema:
    return RecordSchema.from_json(known(built, dataset)["schema"])


def read_back(built: Built, tokenizer: Tokenizer, form: Mapping[str, Any], dataset: str = "rows") -> list[ParsedText]:
    """Decode the trained tokens of every example and parse them."""
    told, data = known(built, dataset), form.get("data", {})
    groups = data.get("group_training_examples_by")
    order = told["order"]
    meant = GeneratedTextSpec(
        schema=schema_of(built, dataset),
        mode=told["mode"],
        bos=told["frame"]["bos_text"],
        eos=told["frame"]["eos_text"],
        place=PlacementColumns(
            group_columns=[groups] if isinstance(groups, str) else groups or [],
            order_column=data.get("order_training_examples_by"),
            order=None if order is None else SortKey(order),
        ),
        wire=told["wire"],
    )
    parser = Parser(meant)
    return [parser(text) for text in trained_texts(built, tokenizer, dataset)]


def trained_texts(built: Built, tokenizer: Tokenizer, dataset: str = "rows") -> list[str]:
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in trained_ids(built, dataset)]


def trained_ids(built: Built, dataset: str = "rows") -> list[list[int]]:
    pairs = [zip(one["input_ids"], one["loss_mask"], strict=True) for one in built.examples(dataset)]
    return [[token for token, trains in one if trains] for one in pairs]


def as_written(parsed: Iterable[ParsedText], schema: RecordSchema) -> Counter[tuple[tuple[str, str], ...]]:
    """Return parsed records as cells of CSV: each value as written, text unquoted, null empty."""
    return Counter(
        tuple(cell(name, record[name], schema) for name in record) for one in parsed for record in one.records
    )


def cell(name: str, value: Any, schema: RecordSchema) -> tuple[str, str]:
    if value is None:
        return (name, "")
    if isinstance(value, str):
        return (name, value)
    line = serialise_record({name: value}, RecordSchema((schema.by_name[name],)))
    assert isinstance(line, str)
    return (name, line[len(f'{{"{name}":') : -len("}\n")])


def cells(rows: Iterable[Mapping[str, str]], names: Sequence[str]) -> Counter[tuple[tuple[str, str], ...]]:
    """Return rows as in a CSV file, columns in the given order."""
    return Counter(tuple((name, row[name]) for name in names) for row in rows)
