"""Cross-stage checks: the loss over all stages, and decreases since the published ranks."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.build import gate, runner, steps
from rowmill.checks import cross_stage
from rowmill.checks.judge import CheckResult
from rowmill.core.errors import GateError
from rowmill.schema import manifest
from tests.support.recipes import CHAT, LENIENT, PAIR, Built, Workspace, chat, document, lines, pair

STRICT = {name: bound for name, bound in LENIENT.items() if name not in ("end_to_end_loss", "shrunk")}
"""Bounds that let everything through but the two checks of this page."""


def result_of(built: Built, check: str, *key: str) -> CheckResult:
    _, results = built.steps[key]
    return next(one for one in results if one.check == check)


def judged(workspace: Workspace, check: str, *key: str) -> CheckResult:
    """Judge what is current, as `rowmill verify` does."""
    project = workspace.project
    step = steps.find_step(project, ("mini", *key))
    made = manifest.load_current(project.store, step.key)
    assert made is not None
    return next(one for one in runner.check_step(project, step, made) if one.check == check)


def write(
    workspace: Workspace, rows: "list[dict[str, Any]] | bytes", kind: "dict[str, Any]" = PAIR, **changes: Any
) -> Workspace:
    return workspace.one("rows.jsonl", rows, kind, **{"gates": STRICT} | changes.pop("groups", {}) | changes)


@pytest.fixture
def grown(tmp_path: Path) -> Workspace:
    workspace = write(Workspace(tmp_path), [pair(i) for i in range(20)])
    workspace.build()
    return workspace


# ── Loss ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_loss_adds_up_over_stages_of_which_none_loses_much(tmp_path: Path) -> None:
    # 16 of 100 records cannot be read, and 14 of the 84 rows have no answer: together more than a quarter.
    unanswered = [{"messages": [{"role": "user", "content": f"Is anybody at door {i}?"}]} for i in range(14)]
    content = lines([*(chat(i) for i in range(70)), *unanswered]) + b"{\n" * 16
    gates = STRICT | {"rejects": {"at_most": 0.17}, "zero_loss_rows": {"at_most": 0.17}}
    workspace = write(Workspace(tmp_path), content, CHAT, gates=gates, groups={"template": {"chat_template": "chatml"}})

    with pytest.raises(GateError, match=r"packed_shards: end_to_end_loss: 30 % \(records that entered"):
        workspace.build()

    found = judged(workspace, "end_to_end_loss", "rows", "packed_shards")
    assert found.value == pytest.approx(1 - (84 / 100) * (70 / 84))
    assert found.what.endswith("of 100: canonical_rows 16, tokenized_examples 14")


def test_loss_of_trained_tokens_counts_those_of_rows_that_were_rejected_for_their_length(tmp_path: Path) -> None:
    rows = [*(pair(i) for i in range(83)), *(pair(100 + i, words=150) for i in range(9))]
    workspace = write(Workspace(tmp_path), rows, seq_len=128, groups={"truncation": {"overlong": "drop"}})

    with pytest.raises(GateError, match=r"packed_shards: end_to_end_loss: .* \(trained tokens that entered"):
        workspace.build()

    found = judged(workspace, "end_to_end_loss", "rows", "packed_shards")
    tokenized = manifest.load_current(workspace.project.store, ("mini", "rows", "tokenized_examples"))
    assert tokenized is not None
    facts = tokenized.facts
    assert found.value == pytest.approx(
        facts["dropped_trained"] / (facts["dropped_trained"] + facts["trained_tokens"]), abs=1e-9
    )
    assert found.what.endswith(f"of {facts['dropped_trained'] + facts['trained_tokens']:,}: tokenized_examples "
                               f"{facts['dropped_trained']:,}")  # fmt: skip


@pytest.mark.slow
def test_trained_tokens_that_a_rejected_row_had_are_counted_whatever_rejects_it(tmp_path: Path) -> None:
    rows = [chat(i) for i in range(6)] + [chat(50 + i, turns=12, words=20) for i in range(3)]
    counted: dict[str, int] = {}
    for policy, options in {
        "keep": {"overlong": "keep"},
        "drop": {"overlong": "drop"},
        "truncate": {"overlong": "truncate"},
        "split": {"overlong": "split"},
    }.items():
        workspace = write(
            Workspace(tmp_path / policy), rows, CHAT, seq_len=160,
            groups={"truncation": options, "template": {"chat_template": "chatml"}},
        )  # fmt: skip
        facts = (
            workspace.build(only=["raw_dataset", "canonical_rows", "tokenized_examples"])
            .manifest("rows", "tokenized_examples")
            .facts
        )
        counted[policy] = facts["trained_tokens"] + facts["trained_removed"] + facts["dropped_trained"]

    assert counted["drop"] == counted["truncate"] == counted["keep"]
    # A piece begins at an exchange: tokens in no piece are counted as dropped.
    assert counted["split"] >= counted["keep"]


def test_records_count_from_where_they_were_read_and_copies_are_no_loss(tmp_path: Path) -> None:
    rows = [pair(i) for i in range(40)]
    content = lines(rows + rows) + b"[1]\n" * 10
    built = write(Workspace(tmp_path), content, groups={"filters": {"deduplicate": "exact"}}).build()
    found = result_of(built, "end_to_end_loss", "rows", "packed_shards")

    assert found.value == pytest.approx(10 / 50)
    assert (found.outcome, found.blocking) == ("failed", False)
    assert found.what == "records that entered but are in no sequence, of 50: canonical_rows 10"


def test_loss_of_a_dataset_that_loses_nothing_passes(tmp_path: Path) -> None:
    built = write(Workspace(tmp_path), [document(i) for i in range(5)], {"kind": "text"}).build()

    assert result_of(built, "end_to_end_loss", "rows", "packed_shards").value == 0


# ── Decreases ────────────────────────────────────────────────────────────────────────────────────


def test_first_build_has_nothing_to_be_compared_with_and_a_quiet_one_writes_nothing(tmp_path: Path) -> None:
    workspace = write(Workspace(tmp_path), [pair(i) for i in range(20)])
    built = workspace.build()

    assert result_of(built, "shrunk", "rows", "raw_dataset").outcome == "not_applicable"
    project = workspace.project
    step = steps.find_step(project, ("mini", "gpu_partitions"))

    # Nobody has judged the inputs against what was just published.
    assert set(gate.open_inputs(project, step))
    path = tmp_path / ".rowmill" / cross_stage.published_path("mini")
    pages = {one: one.stat().st_mtime_ns for one in (tmp_path / ".rowmill").rglob("*.parquet")}
    before = path.stat().st_mtime_ns
    quiet = workspace.build()

    # A quiet night keeps the result from when the rows were new, and writes nothing about it.
    assert result_of(quiet, "shrunk", "rows", "raw_dataset").outcome == "not_applicable"
    assert path.stat().st_mtime_ns == before
    assert {one: one.stat().st_mtime_ns for one in pages} == pages


@pytest.mark.slow
@pytest.mark.parametrize(("left", "outcome"), [(19, "passed"), (17, "warns"), (9, "blocks")])
def test_source_that_lost_rows_overnight_warns_and_then_blocks(tmp_path: Path, left: int, outcome: str) -> None:
    workspace = write(Workspace(tmp_path), [pair(i) for i in range(20)])
    first = workspace.build()
    write(workspace, [pair(i) for i in range(left)])
    if outcome == "blocks":
        with pytest.raises(GateError, match=r"raw_dataset: shrunk: 55 % \(records: 9, down from 20 since version"):
            workspace.build()
    else:
        found = result_of(workspace.build(), "shrunk", "rows", "raw_dataset")
        assert (found.outcome, found.blocking) == ("passed" if outcome == "passed" else "failed", False)
        assert found.value == pytest.approx(1 - left / 20)
    published = workspace.project.store.read_sealed("mini/gpu_partitions/current.json")
    assert published is not None
    assert (published["version"] == first.manifest("gpu_partitions").version) == (outcome == "blocks")


@pytest.mark.parametrize("content", [None, b"", b"{}"])
def test_counts_that_were_lost_or_damaged_are_taken_from_the_manifests(grown: Workspace, content: bytes | None) -> None:
    path = grown.store / cross_stage.published_path("mini")
    path.unlink() if content is None else path.write_bytes(content)
    write(grown, [pair(i) for i in range(9)])

    with pytest.raises(GateError, match=r"raw_dataset: shrunk: 55 % \(records: 9, down from 20 since version"):
        grown.build()


def test_vanished_file_is_seen_by_count_though_its_rows_are_few(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    for name, count in {"a": 100, "b": 1, "c": 1}.items():
        workspace.write(f"{name}.jsonl", [pair(i, words=8 + ord(name)) for i in range(count)])
    workspace.recipe({"rows": {"source": {"train_urls": ["data/*.jsonl"]}, "format": PAIR}}, gates=STRICT).build()
    for name in ("b", "c"):
        (tmp_path / "data" / f"{name}.jsonl").unlink()

    with pytest.raises(GateError, match=r"shrunk: 66.67 % \(files: 1, down from 3"):
        workspace.build()


@pytest.mark.slow
def test_waiver_lets_the_smaller_build_through_once_and_it_is_the_next_to_compare_with(tmp_path: Path) -> None:
    workspace = write(Workspace(tmp_path), [pair(i) for i in range(20)])
    workspace.build()
    waiver = {"check": "shrunk", "dataset": "rows", "at_most": 0.6, "reason": "half of the pairs were withdrawn"}
    write(workspace, [pair(i) for i in range(9)], gates=STRICT | {"waivers": [waiver]})
    waived = result_of(workspace.build(), "shrunk", "rows", "raw_dataset")

    assert (waived.outcome, waived.blocking, waived.waiver) == ("failed", False, "half of the pairs were withdrawn")

    write(workspace, [pair(i) for i in range(9)])
    assert result_of(workspace.build(), "shrunk", "rows", "raw_dataset").value == 0


@pytest.mark.slow
def test_recipe_that_takes_less_on_purpose_only_warns(tmp_path: Path) -> None:
    workspace = write(Workspace(tmp_path), [pair(i) for i in range(20)])
    workspace.build()
    built = write(workspace, [pair(i) for i in range(20)], groups={"filters": {"max_items": 5}}).build()
    found = result_of(built, "shrunk", "rows", "canonical_rows")

    assert (found.value, found.outcome, found.blocking) == (0.75, "failed", False)
    assert "the options of mini/rows/canonical_rows changed as well" in found.what


@pytest.mark.slow
def test_waiver_of_another_check_excuses_no_decrease(tmp_path: Path) -> None:
    workspace = write(Workspace(tmp_path), [pair(i, words=24) for i in range(20)])
    workspace.build()
    waiver = {"check": "duplicates", "dataset": "rows", "at_most": 1, "reason": "copies are known and meant"}
    write(workspace, [pair(i, words=4) for i in range(20)], gates=STRICT | {"waivers": [waiver]})

    with pytest.raises(
        GateError, match=r"packed_shards: shrunk: .*\(trained tokens: \d+, down from \d+ since [^;]*\);"
    ):
        workspace.build()


@pytest.mark.slow
def test_share_of_a_dataset_in_the_mixture_is_compared_by_name(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)

    def built(count: int) -> Built:
        sources = {"small": [pair(i) for i in range(40)], "large": [pair(500 + i) for i in range(count)]}
        datasets = {name: workspace.dataset(f"{name}.jsonl", rows, PAIR) for name, rows in sources.items()}
        return workspace.recipe(datasets, gates=STRICT, seq_len=64).build()

    built(40)
    found = result_of(built(90), "shrunk", "training_splits")

    assert found.outcome == "failed"
    assert found.value == pytest.approx(1 - 2 * 40 / 130, abs=0.05)
    assert found.what.startswith("share of small: ")


@pytest.mark.slow
def test_rollback_to_a_smaller_version_is_no_vanished_source(tmp_path: Path) -> None:
    workspace = write(Workspace(tmp_path), [pair(i) for i in range(9)])
    older = workspace.build().manifest("gpu_partitions").version
    write(workspace, [pair(i) for i in range(40)]).build()
    project = workspace.project
    step = steps.find_step(project, ("mini", "gpu_partitions"))

    assert runner.run_step(project, step, {}, version=older).version == older
