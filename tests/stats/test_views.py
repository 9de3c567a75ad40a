"""Statistics for DuckDB: tables of a manifest, versions in the views, and reading without locks."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmill.checks.judge import CheckResult
from rowmill.core.errors import ConfigError, DamagedFileError, IntegrityError, SchemaError
from rowmill.core.remote_index import ObjectFacts
from rowmill.core.storage import Store
from rowmill.parts.functions import write_parquet, write_table
from rowmill.schema.examples import EXAMPLE_SCHEMA
from rowmill.schema.manifest import DisplayTable, Manifest, Part, StageKey
from rowmill.schema.rows import REJECT_SCHEMA, ROW_SCHEMA
from rowmill.schema.shard_counts import ShardDetails
from rowmill.stages import catalog
from rowmill.stats import tables, view_files, views
from rowmill.stats.tables import (
    SCHEMAS,
    StatsInputs,
    record_manifest,
    remove_version_tables,
    set_current_versions,
    write_check_results,
)
from rowmill.stats.views import MARKER_FILE, list_history_names, list_view_names, publish_views, query_views

pytestmark = pytest.mark.slow

CHATS: tuple[str, str] = ("support", "chats")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "root"))


def manifest_of(stage: str, version: str, *, key: StageKey | None = None, **content: Any) -> Manifest:
    """Return a manifest of a stage of dataset `chats` (or of `key`) with the given version and content."""
    bare = Manifest(
        key=key or (*CHATS, stage),
        stage=stage,
        fingerprint="f",
        code_version="c",
        inputs={},
        parts=(),
        values={},
        version=version,
        built_at="2026-01-01T00:00:00+00:00",
        run_id="run-1",
        seconds=1.5,
    )
    return replace(bare, **content)


def record(store: Store, manifest: Manifest, *, reused: bool = False, parts_reused: int = 0) -> None:
    """Write what the manifest's stage feeds the statistics."""
    record_manifest(store, manifest, feeds_of(manifest.stage), reused=reused, parts_reused=parts_reused)


def feeds_of(stage: str) -> StatsInputs:
    """Return what the statistics take from a stage."""
    return catalog.find_stage(stage).stats_inputs


def part_of(store: Store, name: str, **files: pa.Table) -> Part:
    """Write these tables, shards as Parquet, and return the part that they make up."""
    written = {
        file: write_parquet(store, f"parts/{name}/{file}.parquet", table)
        if file == "shard"
        else write_table(store, f"parts/{name}/{file}.arrow", table)
        for file, table in files.items()
    }
    return Part(fingerprint=name, files=written)


def filled(schema: pa.Schema, lines: Sequence[dict[str, Any]]) -> pa.Table:
    """Return a table of the schema; columns that a line does not name have their type's zero."""
    return pa.Table.from_pylist(
        [{field.name: _zero(field.type) for field in schema} | line for line in lines], schema=schema
    )


def _zero(kind: pa.DataType) -> Any:
    if pa.types.is_list(kind):
        return []
    if pa.types.is_string(kind):
        return ""
    if pa.types.is_fixed_size_binary(kind):
        return bytes(kind.byte_width)
    if pa.types.is_boolean(kind):
        return False
    return b"" if pa.types.is_binary(kind) else 0


def answer(store: Store, sql: str) -> list[tuple[Any, ...]]:
    return query_views(store, sql)[1]


def ledger_of(version: str, kept: int, *, dataset: str = "chats") -> Manifest:
    key = ("support", dataset, "canonical_rows")
    return manifest_of("canonical_rows", version, key=key, ledger=(("kept", "", kept), ("rejected", "duplicate", 2)))


@pytest.mark.parametrize("root", ["folder", "memory://one-recipe"])
def test_query_of_one_recipe_shows_that_recipe_in_every_view(tmp_path: Path, root: str) -> None:
    store = Store(str(tmp_path) if root == "folder" else root)
    for recipe, kept in (("mine", 3), ("yours", 5)):
        key = (recipe, "chats", "canonical_rows")
        record(store, manifest_of("canonical_rows", "v1", key=key, ledger=(("kept", "", kept),)))

    for recipe, kept in (("mine", 3), ("yours", 5)):
        assert query_views(store, "SELECT recipe, records FROM ledger", recipe=recipe)[1] == [(recipe, kept)]
    views = (*list_view_names(), *(f"history.{name}" for name in list_history_names()))
    # One query, because each makes all views anew.
    everything = " UNION ALL ".join(f"SELECT '{view}', recipe FROM {view}" for view in views)
    for name in ("mine", "none"):
        found = query_views(store, everything, recipe=name)[1]
        assert [(view, recipe) for view, recipe in found if recipe != name] == []
    assert "history.ledger" in {view for view, _ in query_views(store, everything, recipe="mine")[1]}


# ── The questions of the specification ────────────────────────────────────────────────────────────


def test_questions_of_the_specification_have_their_answers(store: Store) -> None:
    record(store, ledger_of("v1", 10))
    record(store, ledger_of("v2", 20, dataset="tasks"))
    record(store, manifest_of("tokenized_examples", "v3", ledger=(("rejected", "overlong", 1), ("kept", "", 9))))

    found = answer(
        store, "SELECT dataset, reason, sum(records) FROM ledger WHERE state = 'rejected' GROUP BY ALL ORDER BY ALL"
    )

    assert found == [("chats", "duplicate", 2), ("chats", "overlong", 1), ("tasks", "duplicate", 2)]

    table = DisplayTable(
        ("seq_len", "examples_over", "trained_lost", "sequences"), ((2048, 5, 700, 40), (4096, 1, 100, 20))
    )
    for dataset in ("chats", "tasks"):
        key = ("support", dataset, "truncation_stats")
        record(store, manifest_of("truncation_stats", "v1", key=key, tables={"what_if": table}))

    found = answer(store, "SELECT seq_len, sum(trained_lost), sum(sequences) FROM what_if GROUP BY 1 ORDER BY 1")

    assert found == [(2048, 1400, 80), (4096, 200, 40)]

    mixture = DisplayTable(
        ("dataset", "weight", "wanted_share", "passes", "sequences", "trained_tokens"),
        (("chats", 3, 0.75, 1.0, 30, 3000), ("tasks", 1, 0.25, 2.0, 10, 1000)),
    )
    record(store, manifest_of("training_splits", "v1", key=("support", "training_splits"), tables={"mixture": mixture}))

    found = answer(
        store, "SELECT dataset, wanted_share, trained_tokens / sum(trained_tokens) OVER () FROM mixture ORDER BY 1"
    )

    assert found == [("chats", 0.75, 0.75), ("tasks", 0.25, 0.25)]

    columns = ("split", "shard_row", "segment", "example_id", "row_id", "source", "record", "start", "length")
    lines = [
        dict(zip(columns, ("train", 1, i, f"a:{i}#0", f"a:{i}", "raw/chats.jsonl", 7 + i, 0, 100), strict=True))
        for i in (1, 0)
    ]
    segments = pa.Table.from_pylist([*lines, {**lines[0], "shard_row": 0}])
    shard = pa.table({"tokens": [100, 200], "trained_tokens": [0, 50]})
    details = ShardDetails(
        split="train", first_sequence=4710, sequences=2, segments=3, tokens=300, trained_tokens=50, padding=0
    )
    part = replace(part_of(store, "p", segments=segments, shard=shard), details={"ShardDetails": details.to_json()})
    record(store, manifest_of("packed_shards", "v1", parts=(part,), card={"seq_len": 400}))

    found = answer(
        store, "SELECT segment, source, record, start, length FROM segments WHERE sequence_id = 4711 ORDER BY 1"
    )

    assert found == [(0, "raw/chats.jsonl", 7, 0, 100), (1, "raw/chats.jsonl", 8, 0, 100)]
    assert answer(store, "SELECT * EXCLUDE (recipe, dataset, version) FROM sequences ORDER BY sequence_id") == [
        ("train", "parts/p/shard.parquet", 4710, 100, 0, 0.25),
        ("train", "parts/p/shard.parquet", 4711, 200, 50, 0.5),
    ]


# ── What a manifest feeds ─────────────────────────────────────────────────────────────────────────


def test_tables_hold_rows_and_rejects_of_all_parts_and_examples_without_tokens(store: Store) -> None:
    rows = [
        {"row_id": f"a:{i}", "kind": "conversation", "split": "train", "unknown_roles": ["critic"]} for i in range(3)
    ]
    reject = {"row_id": "a:9", "stage": "canonical_rows", "reason": "duplicate", "detail": "of a:1", "raw": b"{}"}
    first = part_of(store, "p1", rows=filled(ROW_SCHEMA, rows[:2]), rejects=filled(REJECT_SCHEMA, [reject]))
    second = part_of(store, "p2", rows=filled(ROW_SCHEMA, rows[2:]), rejects=filled(REJECT_SCHEMA, []))
    record(store, manifest_of("canonical_rows", "v1", parts=(first, second), counts={"RowCounts": {"kept": 3}}))

    assert answer(store, "SELECT recipe, dataset, version, row_id, unknown_roles FROM rows ORDER BY row_id") == [
        ("support", "chats", "v1", f"a:{i}", ["critic"]) for i in range(3)
    ]
    assert answer(store, "SELECT stage, row_id, reason, detail FROM rejects") == [
        ("canonical_rows", "a:9", "duplicate", "of a:1")
    ]
    assert answer(store, "SELECT stage, reused, parts, rows FROM builds") == [("canonical_rows", False, 2, 3)]

    lines = [{"example_id": "a:0#0", "row_ids": ["a:0"], "input_ids": [1, 2], "loss_mask": [False, True], "tokens": 2}]
    part = part_of(store, "p", examples=filled(EXAMPLE_SCHEMA, lines))
    record(store, manifest_of("tokenized_examples", "v1", parts=(part,), token_ledger=(("train", "trained", 1),)))

    columns, found = query_views(store, "FROM examples")

    of_rows = ("removed_tokens", "source", "record", "line", "domain", "preview")
    assert columns[3:] == (*SCHEMAS["examples"].names, *of_rows)
    assert found[0][3:6] == ("a:0#0", ["a:0"], "")
    assert answer(store, 'SELECT stage, split, "class", tokens FROM token_ledger') == [
        ("tokenized_examples", "train", "trained", 1)
    ]


def test_tables_of_many_small_parts_writes_few_row_groups(store: Store) -> None:
    one = filled(EXAMPLE_SCHEMA, [{"example_id": f"a:{i}#0"} for i in range(10)])
    parts = tuple(part_of(store, f"p{i}", examples=one) for i in range(40))
    record(store, manifest_of("tokenized_examples", "v1", parts=parts))

    path = "stats/examples/recipe=support/scope=chats/version=v1/part-0.parquet"
    with pq.ParquetFile(store.path(path)) as written:
        assert (written.metadata.num_rows, written.metadata.num_row_groups) == (400, 1)


def test_tables_of_the_same_manifest_are_not_rewritten_and_its_reuse_is_kept_beside(store: Store) -> None:
    part = part_of(store, "p", rows=filled(ROW_SCHEMA, [{"row_id": "a:0"}]))
    manifest = manifest_of("canonical_rows", "v1", parts=(part,), ledger=(("kept", "", 1),))
    record(store, manifest)
    before = _files(store)

    record(store, manifest)

    assert _files(store) == before

    manifest = manifest_of("canonical_rows", "v2", parts=(Part("p", {}),))
    record(store, manifest)
    record(store, manifest, reused=True, parts_reused=1)
    record(store, manifest, reused=True, parts_reused=1)

    found = answer(store, "SELECT reused, parts_reused, seconds FROM builds ORDER BY reused")

    assert found == [(False, 0, 1.5), (True, 1, 1.5)]


def _files(store: Store) -> dict[str, int]:
    """Every file under the root by its inode: a file that was replaced has another one."""
    return {str(path): path.stat().st_ino for path in Path(store.root).rglob("*") if path.is_file()}


def test_column_that_is_missing_or_does_not_fit_names_the_file_or_table(store: Store) -> None:
    part = part_of(
        store,
        "p",
        rejects=pa.table({"row_id": ["a:0"], "stage": ["canonical_rows"], "reason": ["duplicate"], "raw": [b""]}),
    )

    with pytest.raises(SchemaError, match=r"parts/p/rejects.arrow: column detail is missing; expected .*; correct"):
        record(store, manifest_of("canonical_rows", "v1", parts=(part,)))

    listed = pa.array([["x"]])
    parts = (_reject_part(store, "p0", pa.array(["x"])), _reject_part(store, "p1", listed))

    with pytest.raises(SchemaError, match=r"parts/p1/rejects.arrow: a value does not fit"):
        record(store, manifest_of("canonical_rows", "v1", parts=parts))

    table = DisplayTable(("seq_len", "examples_over", "trained_lost", "sequences"), (("4k", 1, 1, 1),))

    with pytest.raises(SchemaError, match=r"support/chats/truncation_stats: table what_if: a value does not fit"):
        record(store, manifest_of("truncation_stats", "v1", tables={"what_if": table}))


def _reject_part(store: Store, name: str, detail: pa.Array) -> Part:
    columns: dict[str, Any] = {"row_id": [f"{name}:0"], "stage": ["canonical_rows"], "reason": ["duplicate"]}
    columns |= {"detail": detail, "raw": [b"{}"]}
    return part_of(store, name, rejects=pa.table(columns))


def test_rows_of_files_with_columns_of_other_types_are_copied_in_order(store: Store) -> None:
    details = [pa.array(["x"]), pa.array(["y"]), pa.array([7]), pa.array([None], pa.null())]
    parts = tuple(_reject_part(store, f"p{place}", detail) for place, detail in enumerate(details))

    for count in (2, 4):  # of one type, and of several
        record(store, manifest_of("canonical_rows", f"v{count}", parts=parts[:count]))
        found = answer(store, "SELECT row_id, detail FROM rejects")
        assert found == [("p0:0", "x"), ("p1:0", "y"), ("p2:0", "7"), ("p3:0", None)][:count]


def result(check: str, value: float | None, bound: float, *, passed: bool) -> CheckResult:
    return CheckResult(
        check=check, key=(*CHATS, "canonical_rows"), version="v1", threshold_digest="t", value=value, bound=bound,
        wanted=f"at most {bound:g}", severity="error", passed=passed, blocking=not passed, what="w",
        remedy="r",
    )  # fmt: skip


def test_check_results_after_a_changed_bound_show_the_last_and_keep_the_first(store: Store) -> None:
    manifest = ledger_of("v1", 10)
    record(store, manifest)
    strict = [result("rejects", 0.2, 0.050000001, passed=False), result("nonempty", None, 1, passed=False)]
    lenient = [result("rejects", 0.2, 0.3, passed=True), result("nonempty", None, 1, passed=False)]
    for results in (strict, strict, lenient):
        write_check_results(store, manifest, results)

    assert answer(store, "SELECT check_name, value, bound, passed FROM check_results ORDER BY 1") == [
        ("nonempty", None, 1.0, False),
        ("rejects", 0.2, 0.3, True),
    ]
    assert answer(store, "SELECT bound FROM history.check_results WHERE check_name = 'rejects' ORDER BY judged_at") == [
        (0.050000001,),
        (0.3,),
    ]


# ── Which versions the views show ─────────────────────────────────────────────────────────────────


def test_views_show_the_version_pointed_at_and_the_history_all_that_are_kept(store: Store) -> None:
    record(store, ledger_of("v1", 10))
    record(store, ledger_of("v2", 20))

    assert answer(store, "SELECT version, records FROM ledger WHERE state = 'kept'") == [("v2", 20)]
    assert answer(store, "SELECT version FROM history.ledger WHERE state = 'kept' ORDER BY 1") == [("v1",), ("v2",)]
    assert answer(store, "FROM current_versions") == [("support", "chats", "canonical_rows", "v2")]

    set_current_versions(store, *CHATS, "canonical_rows", ("v1",))

    assert answer(store, "SELECT DISTINCT version FROM ledger") == [("v1",)]

    remove_version_tables(store, *CHATS, "v1")

    assert answer(store, "SELECT DISTINCT version FROM history.ledger") == [("v2",)]

    for version in ("v1", "v2", "v3"):
        record(store, ledger_of(version, 1))

    set_current_versions(store, *CHATS, "canonical_rows", ("v1", "v3"))
    assert answer(store, "SELECT DISTINCT version FROM ledger ORDER BY 1") == [("v1",), ("v3",)]

    set_current_versions(store, *CHATS, "canonical_rows", ())
    assert answer(store, "FROM ledger") == []


def test_views_show_no_rejects_of_a_version_before_and_keep_names_of_digits_text(store: Store) -> None:
    reject = filled(REJECT_SCHEMA, [{"row_id": "a:9", "stage": "canonical_rows"}])
    record(store, manifest_of("canonical_rows", "v1", parts=(part_of(store, "p", rejects=reject),)))
    record(store, manifest_of("canonical_rows", "v2"))

    assert answer(store, "FROM rejects") == []
    assert len(answer(store, "FROM history.rejects")) == 1

    tables.write_table(store, "ledger", "r", "2024", "0012", _ledger(1))
    set_current_versions(store, "r", "2024", "canonical_rows", ("0012",))

    assert answer(store, "SELECT dataset, version FROM ledger") == [("2024", "0012")]


def _ledger(records: int, lines: int = 1) -> pa.Table:
    return pa.Table.from_pylist([{"stage": "s", "state": "kept", "reason": "", "records": records}] * lines)


def test_views_on_an_empty_root_are_empty_with_all_their_columns(store: Store) -> None:
    for view in SCHEMAS:
        columns, rows = query_views(store, f"FROM {view}")
        own = ("recipe", "dataset", "version", *(name for name in SCHEMAS[view].names if name != "dataset"))
        assert columns[: len(own)] == own
        kept, old_rows = query_views(store, f"FROM history.{view}")
        assert kept == own
        assert rows == old_rows == []


def test_each_view_is_listed_once_and_it_and_each_column_has_a_comment(store: Store) -> None:
    record(store, ledger_of("v1", 10))

    for recipe in (None, "support"):
        listed = [name for (name,) in query_views(store, "SHOW TABLES", recipe=recipe)[1]]
        assert sorted(listed) == sorted(list_view_names())
        history = "SELECT view_name FROM duckdb_views() WHERE schema_name = 'history' AND NOT internal"
        kept = [name for (name,) in query_views(store, history, recipe=recipe)[1]]
        assert sorted(kept) == sorted(list_history_names())

    commented_views = answer(store, "SELECT view_name, comment FROM duckdb_views() WHERE NOT internal")
    every = "SELECT table_name, column_name, comment FROM duckdb_columns() WHERE NOT internal"
    columns = answer(store, every)

    assert [name for name, comment in commented_views if not comment] == []
    assert [line for line in columns if not line[2]] == []
    own = {(name, column) for name, column, _ in columns}
    told = {(view, column) for view, column_words in views.COLUMN_DOCS.items() for column in column_words}
    assert told <= own
    assert {name for name, _ in commented_views} == set(views.VIEW_DOCS)
    assert sorted(query_views(store, every, recipe="support")[1]) == sorted(columns)


def test_runs_count_what_a_run_built_and_truncation_adds_up_examples_by_split(store: Store) -> None:
    first, second = ledger_of("v1", 10), replace(ledger_of("v2", 11), run_id="run-2", seconds=0.5)
    record(store, first)
    record(store, replace(first, key=("support", "tasks", "canonical_rows")), parts_reused=0)
    record(store, first, reused=True)
    record(store, second)

    found = answer(store, "SELECT run_id, stages, seconds FROM runs ORDER BY run_id")

    assert found == [("run-1", 2, 3.0), ("run-2", 1, 0.5)]

    lines = [
        {"example_id": "a:0#0", "split": "train", "original_tokens": 10, "tokens": 10},
        {"example_id": "a:1#0", "split": "train", "original_tokens": 30, "tokens": 10, "exchanges_removed": 20},
        {"example_id": "a:2#0", "split": "test", "original_tokens": 5, "tokens": 4, "tokens_cut": 1},
    ]
    part = part_of(store, "p1", examples=filled(EXAMPLE_SCHEMA, lines))
    record(store, manifest_of("tokenized_examples", "v1", parts=(part,)))

    found = answer(
        store,
        "SELECT split, examples, shortened, shortened_share, tokens_removed, exchanges_removed, tokens_cut "
        "FROM truncation ORDER BY split",
    )

    assert found == [("test", 1, 1, 1.0, 1, 0, 1), ("train", 2, 1, 0.5, 20, 20, 0)]


def test_views_read_just_their_root_wherever_it_moved(tmp_path: Path) -> None:
    odd, other = Store(str(tmp_path / "it's [a]*")), Store(str(tmp_path / "it's ab"))
    record(odd, ledger_of("v1", 10))
    record(other, ledger_of("v2", 10))

    assert answer(odd, "SELECT DISTINCT version FROM history.ledger") == [("v1",)]

    record(Store(str(tmp_path / "old")), ledger_of("v1", 10))
    (tmp_path / "old").rename(tmp_path / "new")

    assert answer(Store(str(tmp_path / "new")), "SELECT DISTINCT version FROM ledger") == [("v1",)]


@pytest.mark.filterwarnings("default")
def test_query_on_a_remote_root_answers_from_memory() -> None:
    store = Store("memory://rowmill-views-test")
    record(store, ledger_of("v1", 10))
    record(store, ledger_of("v2", 20))

    assert answer(store, "SELECT version, records FROM ledger WHERE state = 'kept'") == [("v2", 20)]
    with pytest.raises(ConfigError, match="disabled by configuration"):
        query_views(store, "FROM read_text('/etc/hostname')")


@pytest.mark.filterwarnings("default")
def test_query_on_a_remote_root_opens_no_file_but_the_tables() -> None:
    store = Store("memory://rowmill-views-secret")
    record(store, ledger_of("v1", 10))
    store.write("secret.txt", b"secret")

    for path in ("secret.txt", "stats/../secret.txt", "stats/ledger/../../secret.txt"):
        assert query_views(store, f"FROM read_text('rowmill://{path}')")[1] == []


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("root", ["folder", "memory://rowmill-views-older"])
@pytest.mark.parametrize("recipe", [None, "support"])
def test_table_without_a_newer_column_is_shown_with_nulls(tmp_path: Path, root: str, recipe: str | None) -> None:
    store = Store(str(tmp_path) if root == "folder" else root)
    older = ledger_of("v1", 10)
    record(store, older)
    path = "stats/ledger/recipe=support/scope=chats/version=v1/part-0.parquet"
    with store.create(path) as handle:
        pq.write_table(store.unchecked_table(path).drop_columns(["reason"]), handle)

    found = query_views(store, "SELECT state, reason, records FROM ledger ORDER BY state", recipe=recipe)[1]

    assert found == [("kept", None, 10), ("rejected", None, 2)]


@pytest.mark.filterwarnings("default")
def test_large_table_on_a_remote_root_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_files, "WHOLE_FILE_BYTES", 0)
    store = Store("memory://rowmill-views-large")
    rows = filled(ROW_SCHEMA, [{"row_id": f"a:{i}", "split": "train"} for i in range(100)])
    record(store, manifest_of("canonical_rows", "v1", parts=(part_of(store, "p", rows=rows),)))

    found = query_views(store, "SELECT count(*), max(row_id) FROM rows WHERE split = 'train'", recipe="support")[1]

    assert found == [(100, "a:99")]


@pytest.mark.filterwarnings("default")
def test_query_that_meets_a_removed_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store("memory://rowmill-views-removed")
    record(store, ledger_of("v1", 10))
    found = Store.list_files

    def list_and_remove(self: Store, folder: str) -> dict[str, ObjectFacts]:
        files = found(self, folder)
        if folder.startswith("stats/ledger"):
            remove_version_tables(store, *CHATS, "v1")
        return files

    monkeypatch.setattr(Store, "list_files", list_and_remove)
    with pytest.raises(
        IntegrityError, match=r"part-0\.parquet: removed since the query began; .*; run the query again"
    ):
        query_views(store, "FROM ledger")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("table", ["_current", "ledger"])
def test_query_of_a_damaged_file_on_a_remote_root_names_it(table: str) -> None:
    store = Store(f"memory://rowmill-views-damaged-{table}")
    record(store, ledger_of("v1", 10))
    [path] = [path for path in store.list_files(f"stats/{table}/recipe=support") if path.endswith(".parquet")]
    store.write(path, store.read(path)[:-9])

    with pytest.raises(DamagedFileError, match=path):
        query_views(store, "FROM ledger", recipe="support")


# ── A query reads only the statistics ────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("SELEC 1", "syntax error"),
        ("SELECT nosuch FROM ledger", "nosuch"),
        ("FROM ledgr", "ledgr"),
        ("SELECT 1; SELECT 2", "not a single SELECT"),
        ("", "not a single SELECT"),
        ("COPY (SELECT 1) TO '{root}/stats/x.csv'", "not a single SELECT"),
        ("EXPLAIN ANALYZE COPY (SELECT 1) TO '{root}/stats/x.csv'", "not a single SELECT"),
        ("CREATE TABLE t (a INT)", "not a single SELECT"),
        ("SET enable_external_access = true", "not a single SELECT"),
        ("FROM read_text('/etc/hostname')", "disabled by configuration"),
        ("FROM read_text('{root}/stats/../secret.txt')", "disabled by configuration"),
        ("FROM glob('{root}/*')", "disabled by configuration"),
        ("FROM 'https://127.0.0.1:1/x.parquet'", "x.parquet"),
        ("FROM python_variable", "python_variable"),
    ],
)
def test_invalid_or_external_query_is_refused_in_four_parts(store: Store, sql: str, why: str) -> None:
    python_variable = pa.table({"a": [1]})
    publish_views(store)
    store.write("secret.txt", b"secret")
    before = _files(store)

    with pytest.raises(ConfigError) as refusal:
        query_views(store, sql.replace("{root}", store.root))

    message = str(refusal.value)
    assert message.startswith("query ")
    assert why in message
    assert "builds, check_results, ledger" in message
    assert "write one SELECT" in message
    assert _files(store) == before
    assert len(python_variable) == 1


def test_query_in_several_threads_at_once_answers_each(store: Store) -> None:
    record(store, ledger_of("v1", 10))
    answers: list[object] = []
    threads = [
        threading.Thread(target=lambda: answers.append(answer(store, "SELECT sum(records) FROM ledger")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert answers == [[(12,)]] * 4


# ── No locks ──────────────────────────────────────────────────────────────────────────────────


def test_ledger_with_a_version_switched_between_listing_and_reading_shows_the_version_listed(store: Store) -> None:
    """DuckDB lists files when it plans a query and folds constants after that; ours switches the version.

    With one pointer file per stage, replaced in place, the query finds nothing: what it reads names a version
    younger than the list of the table's files.
    """
    record(store, ledger_of("v1", 10))
    publish_views(store)

    def switch() -> bool:
        record(store, ledger_of("v2", 20))
        return True

    with duckdb.connect(store.path("stats.duckdb"), read_only=True) as reader:
        reader.create_function("switch", switch, [], "BOOLEAN")
        during = reader.execute("SELECT version FROM ledger WHERE state = 'kept' AND switch()").fetchall()
        after = reader.execute("SELECT version FROM ledger WHERE state = 'kept'").fetchall()

    assert (during, after) == ([("v1",)], [("v2",)])


SWITCHES = 60
WRITER = """
import sys
import pyarrow as pa
from rowmill.stats import tables, view_files, views
from rowmill.core.storage import Store, digest_bytes
from rowmill.schema.shard_counts import ShardDetails

store = Store(sys.argv[1])
for number in range(1, int(sys.argv[2]) + 1):
    lines = [{"stage": "s", "state": "kept", "reason": "", "records": number}] * 10
    tables.write_table(store, "ledger", "r", "d", f"v{number}", pa.Table.from_pylist(lines))
    tables.set_current_versions(store, "r", "d", "canonical_rows", (f"v{number}",))
    views.publish_views(store)
"""


@pytest.mark.slow
def test_views_are_published_while_pointers_are_replaced(store: Store) -> None:
    """As in the first build after an upgrade, whose views are made again beside its steps."""
    tables.write_table(store, "ledger", "r", "d", "v0", _ledger(0, lines=10))
    set_current_versions(store, "r", "d", "canonical_rows", ("v0",))
    [pointer] = store.list_files("stats/_current/recipe=r/scope=d/stage=canonical_rows")
    content = store.read(pointer)

    def replace_pointers() -> None:
        for number in range(15):
            for stage in (f"stage_{i}" for i in range(20)):
                # Superseded so long ago that the next one removes them.
                for stamp in (number + 1, number + 2):
                    store.write(f"stats/_current/recipe=r/scope=d/stage={stage}/current-{stamp:020d}.parquet", content)
                set_current_versions(store, "r", "d", stage, (f"v{number}",))

    with ThreadPoolExecutor(1) as background:
        replaced = background.submit(replace_pointers)
        publish_views(store)
        while not replaced.done():
            store.remove(MARKER_FILE)
            publish_views(store)
        replaced.result()

    assert query_views(store, "SELECT count(*) FROM ledger")[1] == [(10,)]


def test_open_reader_during_writes_always_sees_one_complete_version(store: Store) -> None:
    """A view that lists the table before the pointers shows no rows in one of six of these reads."""
    tables.write_table(store, "ledger", "r", "d", "v0", _ledger(0, lines=10))
    set_current_versions(store, "r", "d", "canonical_rows", ("v0",))
    publish_views(store)
    root = Path(__file__).resolve().parents[2]
    seen: list[list[tuple[int, int]]] = []
    with duckdb.connect(store.path("stats.duckdb"), read_only=True) as reader:
        command = [sys.executable, "-c", WRITER, store.root, str(SWITCHES)]
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(root / "pipelines")}) as writer:
            while writer.poll() is None:
                seen.append(reader.execute("SELECT records, count(*) FROM ledger GROUP BY ALL").fetchall())
        last = reader.execute("SELECT records, count(*) FROM ledger GROUP BY ALL").fetchall()

    assert writer.returncode == 0
    assert last == [(SWITCHES, 10)]
    assert all(len(one) == 1 and one[0][1] == 10 for one in seen)
    numbers = [one[0][0] for one in seen]
    assert numbers == sorted(numbers)


def test_publish_views_while_a_reader_has_the_file_open_replaces_it_under_another_inode(store: Store) -> None:
    record(store, ledger_of("v1", 10))
    publish_views(store)
    with duckdb.connect(store.path("stats.duckdb"), read_only=True) as reader:
        before = Path(store.path("stats.duckdb")).stat().st_ino
        store.remove("stats/_views.json")
        publish_views(store)

        assert Path(store.path("stats.duckdb")).stat().st_ino != before
        assert reader.execute("SELECT count(*) FROM ledger").fetchall() == [(2,)]
    assert sorted(os.listdir(store.root)) == ["stats", "stats.duckdb"]
