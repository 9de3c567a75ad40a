"""Shares of a build: they make what one build makes, none of them publishes, and other versions are refused."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import gc, prepare, share
from rowmill.build.share import ShareOutcome, ShareReport
from rowmill.core.errors import BusyError, ConfigError
from rowmill.executors import Share
from tests.support.recipes import CHAT, Built, Workspace, chat
from tests.support.tables import as_csv, purchases, records

pytestmark = pytest.mark.usefixtures("small_parts")

TOTAL = 3
# Small groups, so that there are several to share.
PACKING = {"group_tokens": 4096}


def write_chats(folder: Path, **groups: Any) -> Workspace:
    """Write chats of which some repeat earlier ones of other parts, so that rows have a second pass."""
    rows = [chat(i, words=40) for i in range(1200)]
    return Workspace(folder).one("chats.jsonl", [*rows, *rows[:300:7]], CHAT, **({"packing": PACKING} | groups))


def build_only(workspace: Workspace, *stages: str) -> Built:
    return workspace.build(only=stages)


def make_all_shares(workspace: Workspace, stage: str, *, left_out: int | None = None) -> list[ShareReport]:
    """Make the shares of a stage in this process, one after another."""
    numbers = [number for number in range(1, TOTAL + 1) if number != left_out]
    return [
        one for number in numbers for one in share.make_share(workspace.project, Share(number, TOTAL), only=[stage])
    ]


def list_files(workspace: Workspace) -> dict[str, bytes]:
    """Return the files of a store outside `parts`, with their content; lock files hold nothing."""
    files = (path for path in workspace.store.rglob("*") if path.is_file() and "parts" not in path.parts)
    return {str(path.relative_to(workspace.store)): path.read_bytes() for path in files if path.name[0] != "."}


def make_first(workspace: Workspace, stage: str, total: int = TOTAL) -> ShareReport:
    """Make the first share of a stage."""
    [report] = share.make_share(workspace.project, Share(1, total), only=[stage])
    return report


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return write_chats(tmp_path_factory.mktemp("plain")).build()


@pytest.fixture
def scanned(tmp_path: Path) -> Workspace:
    """Return a project whose source was read, and nothing else."""
    workspace = write_chats(tmp_path)
    build_only(workspace, "raw_dataset")
    return workspace


@pytest.fixture
def with_rows(scanned: Workspace) -> Workspace:
    """Return a project whose rows were built, and nothing after them."""
    build_only(scanned, "canonical_rows")
    return scanned


# ── All shares ─────────────────────────────────────────────────────────────────────────────────────
def test_the_shares_of_a_stage_are_apart_and_together_all_of_it(scanned: Workspace, plain: Built) -> None:
    first, second, _ = make_all_shares(scanned, "canonical_rows")
    assert first.made + first.missing == plain.report("rows", "canonical_rows").parts
    assert second.made + second.missing == first.missing
    # Which share a part falls to follows from its fingerprint, and so may be one for all.
    assert first.made or second.made


def test_a_share_writes_no_manifest_no_pointer_and_no_statistics(with_rows: Workspace) -> None:
    before = list_files(with_rows)
    make_all_shares(with_rows, "tokenized_examples")
    changed = {path for path, content in list_files(with_rows).items() if before.get(path) != content}
    assert {path for path in changed if path.startswith("stats")} == set()
    assert {Path(path).parent.name for path in changed if path.endswith(".json")} == {prepare.SHARE_VERSIONS_FOLDER}


# ── Shares twice, gaps, other versions ─────────────────────────────────────────────────────────────
def test_one_share_of_one_makes_every_pass_and_nothing_when_it_runs_again(scanned: Workspace) -> None:
    first, again = (make_first(scanned, "canonical_rows") for _ in range(2))
    assert first.made > 0
    assert (again.made, again.missing) == (0, first.missing)
    assert make_first(scanned, "canonical_rows", total=1).outcome is ShareOutcome.FINISHED
    assert build_only(scanned, "canonical_rows").report("rows", "canonical_rows").rows_made == 0


def test_a_build_makes_the_parts_of_a_missing_share(scanned: Workspace, plain: Built) -> None:
    first = plain.manifest("rows", "canonical_rows").parts[0]
    left_out = next(number for number in range(1, TOTAL + 1) if Share(number, TOTAL).has(first.fingerprint))
    reports = make_all_shares(scanned, "canonical_rows", left_out=left_out)
    built = scanned.build()
    assert built.report("rows", "canonical_rows").parts_reused == sum(one.made for one in reports) > 0
    assert built.report("rows", "canonical_rows").rows_made > 0
    assert built.digests() == plain.digests()


def test_parts_of_another_recipe_version_are_not_used(tmp_path: Path, plain: Built) -> None:
    workspace = write_chats(tmp_path, splits={"validation": 0.2})
    build_only(workspace, "raw_dataset")
    assert make_all_shares(workspace, "canonical_rows")[0].made
    write_chats(tmp_path)

    built = workspace.build()
    assert built.report("rows", "canonical_rows").parts_reused == 0
    assert built.digests() == plain.digests()


def test_a_damaged_input_is_made_again_by_the_share_that_reads_it(with_rows: Workspace) -> None:
    rows = build_only(with_rows, "canonical_rows").manifest("rows", "canonical_rows")
    damaged = [with_rows.store / file.path for file in rows.files("rows")]
    whole = [path.read_bytes() for path in damaged]
    for path in damaged:
        path.write_bytes(bytes(path.stat().st_size))
    reports = make_all_shares(with_rows, "tokenized_examples")
    assert [path.read_bytes() for path in damaged] == whole
    # Which share a part falls to follows from its fingerprint; the last one that has any finishes the stage.
    parts = build_only(with_rows, "tokenized_examples").manifest("rows", "tokenized_examples").parts
    own = [sum(Share(number, TOTAL).has(part.fingerprint) for part in parts) for number in range(1, TOTAL + 1)]
    missing = [sum(own[number:]) for number in range(1, TOTAL + 1)]
    assert [one.missing for one in reports] == missing
    outcomes = [ShareOutcome.MADE if count else ShareOutcome.FINISHED for count in missing]
    assert [one.outcome for one in reports] == outcomes
    assert outcomes[0] is ShareOutcome.MADE


def test_a_stage_that_was_built_of_other_options_is_a_missing_input(tmp_path: Path) -> None:
    workspace = write_chats(tmp_path, splits={"validation": 0.2})
    build_only(workspace, "raw_dataset", "canonical_rows")
    write_chats(tmp_path)
    report = make_first(workspace, "tokenized_examples")
    assert report.outcome is ShareOutcome.WAITING
    assert report.waits_for == ("mini", "rows", "canonical_rows")


def test_a_built_stage_has_nothing_to_make_until_its_input_was_built_again(with_rows: Workspace) -> None:
    assert make_first(with_rows, "canonical_rows").outcome is ShareOutcome.BUILT
    with (with_rows.folder / "data" / "chats.jsonl").open("a") as file:
        file.write(json.dumps(chat(9999)) + "\n")
    build_only(with_rows, "raw_dataset")
    assert make_first(with_rows, "tokenized_examples").waits_for == ("mini", "rows", "canonical_rows")


def test_validation_held_out_by_number_is_packed_the_same_from_shares(tmp_path: Path) -> None:
    def write(folder: Path) -> Workspace:
        workspace = write_chats(folder)
        groups = {"source": {"train_urls": ["data/chats.jsonl"]}, "format": CHAT, "packing": PACKING}
        return workspace.recipe({"rows": groups}, mixture={"num_validation_sequences": {"rows": 5}})

    expected, workspace = write(tmp_path / "plain").build(), write(tmp_path / "shares")
    build_only(workspace, "raw_dataset", "canonical_rows", "tokenized_examples", "truncation_stats")
    for _ in range(2):
        make_all_shares(workspace, "packed_shards")
    built = workspace.build()
    assert built.report("rows", "packed_shards").rows_made == 0
    assert built.digests() == expected.digests()


def test_records_are_encoded_in_shares(tmp_path: Path) -> None:
    alone, workspace = (
        Workspace(tmp_path / name).one("sales.csv", as_csv(purchases(9000)), records()) for name in ("plain", "shares")
    )
    expected = alone.build()
    build_only(workspace, "raw_dataset", "canonical_rows")
    reports = make_all_shares(workspace, "tokenized_examples")
    built = workspace.build()
    assert sum(one.made for one in reports) > 0
    assert {one.made > 0 for one in reports[:2]} == {True}
    assert built.report("rows", "tokenized_examples").rows_made == 0
    assert built.digests() == expected.digests()


# ── Beside others ──────────────────────────────────────────────────────────────────────────────────
def test_garbage_collection_waits_for_a_share(scanned: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "LOCK_WAIT_S", 0.1)
    busy: list[BusyError] = []

    def collect(where: str, **_: Any) -> None:
        with pytest.raises(BusyError, match="rows/canonical_rows") as refused:
            gc.collect_garbage(scanned.project, keep=1, dry_run=False)
        busy.append(refused.value)

    share.make_share(scanned.project, Share(1, TOTAL), only=["canonical_rows"], progress=collect)
    assert busy


# ── Refusals ───────────────────────────────────────────────────────────────────────────────────────
def test_work_on_a_stage_without_shares_is_refused(tmp_path: Path) -> None:
    workspace = write_chats(tmp_path)
    with pytest.raises(ConfigError, match=r"--only gpu_partitions: .* in shares; there are canonical_rows, .* build"):
        share.make_share(workspace.project, Share(1, 1), only=["gpu_partitions"])


STAGE = "canonical_rows"
MIXED = r"mini/rows/canonical_rows: share 1/3 was made with pyarrow 9.0 instead of .*; the same versions .* rowmill gc"


@contextmanager
def on_another_host() -> Generator[None]:
    """Have another version of a package that decides bytes."""
    other = prepare.describe_versions() | {"pyarrow": "9.0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "describe_versions", lambda: other)
        yield


@pytest.fixture
def begun(scanned: Workspace) -> Workspace:
    """Return a project in which another host has made a share of rows."""
    with on_another_host():
        assert make_first(scanned, STAGE).made
    return scanned


@pytest.mark.parametrize("number", [1, 2])
def test_another_share_is_refused_and_makes_nothing(begun: Workspace, number: int) -> None:
    parts_and_records = ("part.json", f"{prepare.SHARE_VERSIONS_FOLDER}/*")
    before = [sorted(begun.store.rglob(pattern)) for pattern in parts_and_records]
    with pytest.raises(ConfigError, match=MIXED):
        share.make_share(begun.project, Share(number, TOTAL), only=[STAGE])
    assert [sorted(begun.store.rglob(pattern)) for pattern in parts_and_records] == before


def test_a_build_takes_no_such_part_until_they_are_removed(begun: Workspace, plain: Built) -> None:
    with pytest.raises(ConfigError, match=MIXED):
        begun.build()
    assert not list(begun.store.rglob(f"{STAGE}/manifests/*"))

    gc.collect_garbage(begun.project, keep=1, dry_run=False)
    built = begun.build()
    assert built.report("rows", STAGE).parts_reused == 0
    assert built.digests() == plain.digests()


def test_a_build_of_the_shares_ends_their_records(begun: Workspace, plain: Built) -> None:
    with on_another_host():
        make_all_shares(begun, STAGE)
        built = begun.build()

    assert built.report("rows", STAGE).parts_reused > 0
    assert not list(begun.store.rglob(prepare.SHARE_VERSIONS_FOLDER))
    # Parts that an output names are reused after an upgrade, as ever.
    assert begun.build().digests() == plain.digests()
