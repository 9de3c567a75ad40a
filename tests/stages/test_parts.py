"""Parts: their identity is their inputs' content, equal inputs are made once, and a shuffle loses no line."""

import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.core.storage import File, Store
from rowmill.executors.local import LocalPool
from rowmill.parts.functions import (
    PartInputs,
    PartPlace,
    PartResult,
    choose_buckets,
    collect_buckets,
    count_buckets,
    cut_blocks,
    identify,
    part_function,
    write_buckets,
)
from rowmill.recipe.recipe import Recipe
from rowmill.schema.counts import Details
from rowmill.schema.manifest import Part
from rowmill.stages.base import StageContext
from tests.support.tiers import draw

FILE = File("rows.arrow", bytes=10, digest="d1", rows=2)


@dataclass(frozen=True, slots=True)
class Inputs(PartInputs):
    file: File
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    values: Any = None
    base: Path = field(default=Path(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDetails(Details):
    """The digest of a part's file, and how many parts were made with it."""

    digest: str
    tasks: int


@part_function(version=1)
def write_digest(inputs: Inputs, place: PartPlace) -> PartResult:
    return PartResult({"text": place.write_bytes("text", inputs.file.digest.encode())})


@part_function(version=1, makes_many=True)
def write_many(tasks: list[tuple[Inputs, PartPlace]]) -> list[PartResult]:
    return [PartResult({}, details=[BatchDetails(digest=inputs.file.digest, tasks=len(tasks))]) for inputs, _ in tasks]


@part_function(version=1, is_reusable=lambda part: part.get_details(BatchDetails).digest == "d1")
def write_bad(inputs: Inputs, place: PartPlace) -> PartResult:
    return PartResult({}, details=[BatchDetails(digest=inputs.file.digest, tasks=1)])


def context_of(folder: Path) -> StageContext:
    recipe = Recipe.model_construct(name="mini")
    return StageContext(Store(str(folder)), folder, ("mini", "rows", "stage"), "rows", {}, LocalPool(1), recipe=recipe)


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [(replace(FILE, path="elsewhere.arrow"), True), (replace(FILE, digest="d2"), False)],
    ids=["a moved file is the same", "a changed file is another"],
)
def test_files_are_identified_by_content(changed: File, is_same: bool) -> None:
    assert (write_digest.identify(Inputs(changed)) == write_digest.identify(Inputs(FILE))) is is_same


@pytest.mark.parametrize(
    "values",
    [1, "a", b"a", np.arange(3), np.arange(3, dtype=np.int32), pa.table({"a": [1]}), Part("f", {}), (FILE,), {"a": 1}],
    ids=lambda value: f"{type(value).__name__} {value}".splitlines()[0],
)
def test_every_field_decides_unless_it_is_not_compared(values: Any) -> None:
    name = write_digest.identify(Inputs(FILE, values=values))

    assert name != write_digest.identify(Inputs(FILE))
    assert name == write_digest.identify(Inputs(FILE, values=values, base=Path("other")))
    assert name != replace(write_digest, version=2).identify(Inputs(FILE, values=values))


def test_function_is_sent_by_name_and_a_value_without_an_identity_is_refused() -> None:
    with pytest.raises(TypeError, match=r"PosixPath: no identity; give it a property `identity`"):
        identify(Path("a"))

    assert pickle.loads(pickle.dumps(write_digest)) is write_digest


def test_map_makes_each_input_once_small_ones_together_and_reuses_what_is_stored(tmp_path: Path) -> None:
    first = context_of(tmp_path).map(write_digest, [Inputs(FILE), Inputs(replace(FILE, digest="d2")), Inputs(FILE)])
    again = context_of(tmp_path).map(write_digest, [Inputs(replace(FILE, digest="d2")), Inputs(FILE, {"a": 1})])

    assert [Store(str(tmp_path)).read(part.files["text"].path) for part in first.parts] == [b"d1", b"d2", b"d1"]
    assert first.reused == 0
    assert (again.parts[0], again.reused) == (first.parts[1], 1)
    assert again.parts[1].fingerprint not in {part.fingerprint for part in first.parts}

    inputs = [Inputs(replace(FILE, digest=f"d{number}")) for number in range(8)]

    parts = context_of(tmp_path).map(write_many, inputs).parts

    assert [part.get_details(BatchDetails) for part in parts] == [
        BatchDetails(digest=f"d{number}", tasks=2) for number in range(8)
    ]

    inputs = [Inputs(FILE), Inputs(replace(FILE, digest="d2"))]

    assert [context_of(tmp_path).map(write_bad, inputs).reused for _ in range(2)] == [0, 1]


@settings(max_examples=draw(40))
@given(st.lists(st.lists(st.integers(0, 255), max_size=6), min_size=1, max_size=9), st.integers(1, 12))
def test_shuffle_brings_equal_lines_together_and_loses_none(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[int]], limit: int
) -> None:
    store = Store(str(tmp_path_factory.mktemp("store")))
    blocks = cut_blocks([len(part) for part in parts], limit)
    buckets = count_buckets(len(blocks))
    written: list[Part] = []
    for number, block in enumerate(blocks):
        values = np.array([value for at in block for value in parts[at]], np.uint8)
        place = PartPlace(store, "stage", str(number))
        files = write_buckets(place, pa.table({"value": values}), choose_buckets(values, buckets), buckets)
        written.append(Part(str(number), files))

    collected = [
        (bucket, line.block, value)
        for bucket, lines in collect_buckets(written)
        for line in lines
        for value in store.table(line.lines).column("value").to_pylist()
    ]
    assert [number for block in blocks for number in block] == list(range(len(parts)))
    assert all(len(block) == 1 or sum(len(parts[number]) for number in block) <= limit for block in blocks)
    assert sorted((block, value) for _, block, value in collected) == sorted(
        (number, value) for number, block in enumerate(blocks) for at in block for value in parts[at]
    )
    bucket_of_value: dict[int, int] = {}
    assert all(bucket_of_value.setdefault(value, bucket) == bucket for bucket, _, value in collected)
