"""Generated text to records: records per second of one core at 20 columns, and how time grows with the text.

    python -m benchmarks.parsing [records]

Seconds are those of the processor (`process_time`), since one thread does it all and other work on the machine would
count otherwise. Growth is the time for ten times the text, which linear parsing keeps near 10, for text of valid
records and for texts made to be read more than once: full of `{`, of strings without an end, of objects inside objects.
"""

import random
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from benchmarks import measure
from rowmill.kinds.tables.parsing import GeneratedTextSpec, Parser, PlacementColumns
from rowmill.kinds.tables.schema import Column, RecordSchema
from rowmill.kinds.tables.serialization import Serialiser

SCHEMA = RecordSchema(
    (
        Column("id", "integer"),
        *(Column(f"count_{k}", "integer") for k in range(6)),
        *(Column(f"measure_{k}", "float") for k in range(4)),
        *(Column(f"price_{k}", "decimal") for k in range(3)),
        *(Column(f"label_{k}", "string", nullable=True) for k in range(5)),
        Column("is_open", "boolean"),
    )
)
BOS, EOS = "<|im_start|>", "<|im_end|>"
PLACE = PlacementColumns(("label_0",), None)
LABELS = ("drizzle", "rain", "a longer label of several words", None)
SMALL, LARGE = 200_000, 2_000_000
"""Characters of the texts whose times are compared."""

HARD: dict[str, Callable[[int], str]] = {
    "full_of_braces": lambda size: "{" * size,
    "full_of_objects_begun": lambda size: '{"' * (size // 2),
    "a_broken_object_a_line": lambda size: '{"a\n' * (size // 4),
    "broken_objects_at_carriage_returns": lambda size: '{"\r' * (size // 3),
    "objects_in_objects": lambda size: '{"a":' * (size // 5),
    "an_object_of_many_lines": lambda size: '{"a":\n' * (size // 6),
    "strings_cut_by_delimiters": lambda size: f'{{"a{EOS}' * (size // 13),
    "runs_of_digits": lambda size: f'{{"a":[{",".join(["7" * 4000] * (size // 4001))}]}}',
}


def records(count: int) -> list[dict[str, Any]]:
    """Return records of 20 columns, the same ones every time."""
    draw = random.Random(0)
    made: dict[str, Callable[[], Any]] = {
        "integer": lambda: draw.randrange(10**6),
        "float": lambda: draw.random() * 100,
        "decimal": lambda: Decimal(draw.randrange(10**5)).scaleb(-2),
        "string": lambda: draw.choice(LABELS),
        "boolean": lambda: draw.random() < 0.5,
    }
    return [{one.name: made[one.type]() for one in SCHEMA.columns} for _ in range(count)]


def seconds(run: Callable[[], Any]) -> float:
    """Return the processor's seconds of a call."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def rate(count: int) -> dict[str, Any]:
    """Measure tabular and grouped parsing, and writing; every record must come back."""
    write = Serialiser(SCHEMA, special_tokens=(BOS, EOS))
    rows = records(count)
    lines = [str(write(row)) for row in rows]
    texts = {
        "tabular": "".join(lines),
        "grouped": "".join(f"{BOS}{line}{EOS}" for line in lines),
    }
    parsers = {
        mode: Parser(GeneratedTextSpec(schema=SCHEMA, mode=mode, bos=BOS, eos=EOS, place=PLACE))
        for mode in ("tabular", "grouped")
    }
    for mode, parser in parsers.items():
        assert list(parser(texts[mode]).records) == rows
    written = measure.timed(lambda: seconds(lambda: [write(row) for row in rows]))
    parsed = {mode: measure.timed(lambda m=mode: seconds(lambda: parsers[m](texts[m]))) for mode in parsers}
    return {
        "records": count,
        "columns": len(SCHEMA.columns),
        "characters": len(texts["tabular"]),
        "written_per_s": round(count / written["median_s"]),
        **{f"{mode}_per_s": round(count / one["median_s"]) for mode, one in parsed.items()},
    }


def growth() -> dict[str, float]:
    """Return how many times as long ten times the text takes."""
    parser = Parser(GeneratedTextSpec(schema=SCHEMA, mode="tabular", bos=BOS, eos=EOS, place=PLACE))
    write = Serialiser(SCHEMA, special_tokens=(BOS, EOS))
    line = str(write(records(1)[0]))
    made = {"valid_records": lambda size: line * (size // len(line)), **HARD}
    found: dict[str, float] = {}
    for name, text_of in made.items():
        texts = {size: text_of(size) for size in (SMALL, LARGE)}
        taken = {size: min(seconds(lambda t=text: parser(t)) for _ in range(5)) for size, text in texts.items()}
        found[name] = round(taken[LARGE] / taken[SMALL], 2)
    return found


def main(count: int) -> None:
    """Measure and print."""
    measure.emit("parsing", **rate(count), ten_times_the_text=growth())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
