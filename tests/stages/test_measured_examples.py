"""Lengths measured part by part are those of all examples together."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.core.storage import Store
from rowmill.executors.local import LocalPool
from rowmill.parts.functions import write_table
from rowmill.schema.examples import EXAMPLE_SCHEMA
from rowmill.stages.truncation_stats import COLUMNS, MeasuredExamples, measure_examples, measure_files
from tests.support.tiers import draw

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([EXAMPLE_SCHEMA.field(name) for name in COLUMNS])


@st.composite
def lines(draw: st.DrawFn) -> dict[str, Any]:
    tokens, removed = draw(st.integers(0, 50)), draw(st.integers(0, 9))
    counts = {name: draw(st.integers(0, 3)) for name in COLUMNS if name not in ("split", "domain")}
    return counts | {
        "split": draw(st.sampled_from(["train", "validation", "test"])),
        "domain": draw(st.sampled_from([None, "code", "chat"])),
        "original_tokens": tokens + removed,
        "tokens": tokens,
        "trained_tokens": draw(st.integers(0, tokens)),
    }


def write(store: Store, name: str, some: list[dict[str, Any]]) -> Any:
    return write_table(store, f"{name}.arrow", pa.Table.from_pylist(some, schema=SCHEMA))


def describe(measured: MeasuredExamples) -> dict[str, Any]:
    return {
        "original": {name: measured.select_split(name).tolist() for name in measured.list_splits()},
        "trained": measured.trained.tolist(),
        "sums": (measured.shortened, measured.longest_shortened, measured.tokens_removed, measured.trained_removed),
        "stages": measured.stages.tolist(),
        "shares": measured.trained_shares.tolist(),
        "domains": sorted(measured.domains.to_pylist(), key=str),
    }


@settings(max_examples=draw(60))
@given(st.lists(lines(), max_size=12), st.integers(0, 12))
def test_files_add_up_to_one(tmp_path_factory: Any, rows: list[dict[str, Any]], cut: int) -> None:
    folder: Path = tmp_path_factory.mktemp("store")
    store = Store(str(folder))

    whole = measure_examples(store, [write(store, "whole", rows)], LocalPool(1))
    halves = [write(store, "a", rows[:cut]), write(store, "b", rows[cut:])]
    for workers in (1, 2):  # in one run, and each half alone
        assert describe(measure_examples(store, halves, LocalPool(workers))) == describe(whole)
    for at_once in (1, len(rows) + 1):  # file by file, and both together
        assert describe(measure_files(store, halves, rows_at_once=at_once)) == describe(whole)
    own = pl.DataFrame(rows, schema=list(COLUMNS), infer_schema_length=None) if rows else None
    if own is not None:
        lost = own["original_tokens"] - own["tokens"]
        assert whole.tokens_removed == lost.sum()
        assert whole.shortened == (lost > 0).sum()
        assert np.array_equal(whole.trained, own["trained_tokens"] + own["trained_removed"])
        touched = (own["exchanges_removed"] > 0) | (own["messages_removed"] > 0)
        assert whole.stages[0].tolist() == [
            touched.sum(), own["messages_removed"].sum(), own["exchanges_removed"].sum(), own["exchanges_trained"].sum()
        ]  # fmt: skip
    assert sum(describe(whole)["shares"]) == len(rows)


def test_rows_without_a_domain_count_where_a_whole_file_has_none(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    line = dict.fromkeys(COLUMNS, 0) | {"split": "train", "domain": None, "original_tokens": 9, "tokens": 5}

    files = [write(store, "a", [line, line]), write(store, "b", [line | {"domain": "code"}, line])]
    measured = measure_examples(store, files, LocalPool(1))
    counted = {line["domain"]: line["examples"] for line in measured.domains.to_pylist()}
    assert counted == {None: 3, "code": 1}
