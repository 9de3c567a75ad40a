"""Builds on an object store: how many requests they take, how they end where it fails, and two of them at once."""

import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rowmill.build import prepare, runner, share
from rowmill.build.steps import Project, Step, open_project, plan_steps
from rowmill.core import remote
from rowmill.core.errors import BusyError, ConfigError, GateError, UnreachableError
from rowmill.core.json import parse_sealed
from rowmill.core.storage import Store
from rowmill.executors import Share
from rowmill.reader import Reader
from rowmill.schema import manifest
from rowmill.stages import catalog
from tests.support import object_server
from tests.support.cli_project import run
from tests.support.object_server import ObjectServer, serving_s3fs
from tests.support.recipes import CHAT, LENIENT, Workspace, chat
from tests.support.shard_layouts import SHARD_LAYOUTS, write_layout
from tests.support.tiers import mark_all_but

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

FIRST_BUILD, NOTHING_CHANGED, ONE_ROW_APPENDED = 600, 40, 400
"""Requests that a build of the demo may take."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    with serving_s3fs(monkeypatch) as made:
        yield made


def build(project: Project, server: ObjectServer, *only: str) -> tuple[int, dict[str, str], int]:
    """Build; return the requests that it took, the versions, and how many steps were made."""
    before = server.requests
    done = runner.build(project, only=only)
    versions = {"/".join(step.key[1:]): report.version for step, report, _ in done}
    return server.requests - before, versions, sum(not report.reused for _, report, _ in done)


def test_requests_of_the_demo_stay_within_their_budgets(server: ObjectServer, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs" / "demo", tmp_path / "configs" / "demo")
    config = tmp_path / "configs" / "demo" / "demo.yaml"
    local = runner.build(open_project(config))
    project = open_project(config, "s3://bucket/store")
    first, versions, made = build(project, server)
    server.latency_s = 0.02
    again, same, made_again = build(project, server)
    server.latency_s = 0.0
    rows = min((config.parent / "data").rglob("*.jsonl"))
    lines = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(b"".join([*lines, lines[0].replace(b"the ", b"this ")]))
    appended, other, made_then = build(project, server)

    assert versions == same == {"/".join(step.key[1:]): report.version for step, report, _ in local}
    assert versions != other
    assert (made, made_again) == (17, 0)
    assert 0 < made_then < 17
    assert first <= FIRST_BUILD, f"{first} requests"
    assert again <= NOTHING_CHANGED, f"{again} requests"
    assert appended <= ONE_ROW_APPENDED, f"{appended} requests"


QUIET_NIGHT = 10
"""Requests that a build of any number of datasets may take in which nothing changed; the command may take as many more.

A listing takes one for each thousand files.
"""


def write_datasets(folder: Path, count: int, **changes: object) -> Project:
    workspace = Workspace(folder, "s3://bucket/store")
    rows = [[chat(10 * number + i) for i in range(6)] for number in range(count)]
    datasets = {f"d{number}": workspace.dataset(f"{number}.jsonl", own) for number, own in enumerate(rows)}
    return workspace.recipe(datasets, **changes).project


@pytest.mark.parametrize(
    "are_digests", mark_all_but([False], [True, False]), ids=["tags of content", "tags of uploads"]
)
def test_requests_of_a_quiet_night_do_not_grow_with_the_number_of_datasets(
    are_digests: bool, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a store with encryption by keys of its own, tags do not tell what was read; builds know what they wrote."""
    if not are_digests:
        tag_of = object_server.make_tag
        monkeypatch.setattr(object_server, "make_tag", lambda content: tag_of(b"key" + content))
    for count in (3, 6) if are_digests else (3,):
        server.objects.clear()
        project = write_datasets(tmp_path / str(count), count)
        _, versions, steps = build(project, server)
        assert steps == 5 * count + 2

        # A row of statistics for each step that is reused for the first time, and the copy of small files.
        assert build(project, server)[0] <= QUIET_NIGHT + steps + 1
        requests, same, made = build(project, server)
        assert (same, made) == (versions, 0)
        assert requests <= QUIET_NIGHT

    before = [server.requests]
    for _ in range(2):
        # The first one writes the report and the views.
        run("build", str(tmp_path / str(count) / "configs" / "mini.yaml"), "--root", "s3://bucket/store")
        before.append(server.requests)
    assert before[2] - before[1] <= 2 * QUIET_NIGHT


def test_quiet_night_behind_a_closed_gate_takes_as_few_requests(server: ObjectServer, tmp_path: Path) -> None:
    project = write_datasets(tmp_path, 3, gates=LENIENT | {"nonempty": {"at_least": 100}})
    requests: list[int] = []
    for _ in range(3):
        before = server.requests
        with pytest.raises(GateError, match="nonempty"):
            build(project, server)
        requests.append(server.requests - before)

    assert requests[-1] <= QUIET_NIGHT < requests[0]


# ── The copy of small files ──


COPY = "bucket/store/mini/small_files.json"


@pytest.fixture
def quiet(server: ObjectServer, project: Project) -> dict[str, bytes]:
    """Return the objects of a store in which nothing changed since the last build."""
    for _ in range(2):
        build(project, server)
    return dict(server.objects)


def list_copied(objects: dict[str, bytes]) -> list[str]:
    copied = parse_sealed(objects[COPY])
    assert copied is not None
    return [f"bucket/store/{path}" for path in copied["files"]]


def choose_objects(objects: dict[str, bytes]) -> list[str]:
    """Return a path of each kind of file that is copied, and of two of parts."""
    stages = "|".join(stage.name for stage in catalog.STAGES)
    varying = re.compile(rf"(rows[/-])?({stages})|scope=\w+|[0-9a-f]{{32}}|\d{{15,}}")
    copied = {varying.sub("", path): path for path in list_copied(objects)}
    assert len(copied) >= 9
    return [*copied.values(), *(path for path in objects if path.endswith(("/rows.arrow", "/examples.arrow")))]


@pytest.mark.parametrize("damage", mark_all_but(["other bytes"], ["removed", "other bytes", "other length"]))
def test_file_that_changed_since_it_was_copied_is_noticed_as_without_the_copy(
    damage: str, server: ObjectServer, project: Project, quiet: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    noticed, paths = 0, choose_objects(quiet)
    for path in paths:
        content, middle = quiet[path], len(quiet[path]) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        changed = {"removed": None, "other bytes": flipped, "other length": content[:middle]}[damage]
        ends: list[object] = []
        requests: list[int] = []
        for hidden in ((path, COPY), (path,)):
            caplog.clear()
            server.objects = {other: kept for other, kept in quiet.items() if other not in hidden}
            server.objects |= {} if changed is None else {path: changed}
            request_count, *outcome = build(project, server)
            requests.append(request_count)
            is_mended = server.objects.get(path) != changed
            names = {re.sub(r"-\d{15,}", "", name) for name in server.objects}
            ends.append((outcome, caplog.messages, is_mended, names))
        noticed += is_mended
        assert ends[0] == ends[1], path
        assert requests[0] > requests[1], path
        assert build(project, server)[2] == 0, path
    assert noticed >= len(paths) // 2


def test_pointer_that_another_builder_moved_is_noticed(
    server: ObjectServer, tmp_path: Path, project: Project, quiet: dict[str, bytes]
) -> None:
    """To an earlier version, while the copy has the later one."""
    Workspace(tmp_path).write("rows.jsonl", [chat(i) for i in range(21)])
    _, other, _ = build(project, server)
    copy = server.objects[COPY]
    server.objects |= {path: content for path, content in quiet.items() if path.endswith("/pointer.json")}
    server.objects[COPY] = copy

    _, same, made = build(project, server)

    assert (same, made) == (other, 0)
    found = parse_sealed(server.objects[POINTER])
    assert found is not None
    assert found["version"] == other["rows/canonical_rows"]


@pytest.mark.parametrize("copy", mark_all_but(["cut", "stale"], ["lost", "cut", "empty", "stale", "other"]))
def test_copy_that_is_not_whole_or_not_of_this_night_costs_requests_only(
    copy: str, server: ObjectServer, tmp_path: Path, project: Project, quiet: dict[str, bytes]
) -> None:
    Workspace(tmp_path).write("rows.jsonl", [chat(i) for i in range(21)])
    for _ in range(2):
        _, versions, _ = build(project, server)
    few = build(project, server)[0]
    whole = server.objects[COPY]
    changed = {"cut": whole[:-100], "empty": b"", "stale": quiet[COPY], "other": quiet[POINTER]}
    server.objects = {path: content for path, content in server.objects.items() if path != COPY}
    server.objects |= {COPY: changed[copy]} if copy in changed else {}

    requests, same, made = build(project, server)
    assert (same, made) == (versions, 0)
    assert requests > few
    assert server.objects[COPY] == whole
    assert build(project, server) == (few, versions, 0)


def test_copy_that_cannot_be_written_fails_no_build(server: ObjectServer, project: Project) -> None:
    build(project, server)
    objects = dict(server.objects)
    requests, versions, _ = build(project, server)
    server.objects = dict(objects)

    server.fail("expired", after=requests - 1)

    assert build(project, server) == (requests, versions, 0)
    assert server.failed == 1
    assert server.objects[COPY] == objects[COPY]


def with_rows(folder: Path, root: str | None = "s3://bucket/store") -> Workspace:
    return Workspace(folder, root).one("rows.jsonl", [chat(i) for i in range(20)])


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return with_rows(tmp_path).project


# ── A store that fails ─────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what a build in a local store comes to."""
    return with_rows(tmp_path_factory.mktemp("local"), root=None).build().versions()


@pytest.mark.campaign
def test_store_that_fails_one_request_in_five_changes_no_byte(
    server: ObjectServer, project: Project, versions: dict[str, str]
) -> None:
    server.latency_s = 0.02
    server.fail("503", "500", "cut", every=5)

    assert build(project, server)[1] == versions
    assert server.failed > 20
    require_whole_manifests(project)


@pytest.mark.campaign
def test_token_that_expires_ends_a_build_in_one_error_and_the_next_one_finishes(
    server: ObjectServer, tmp_path: Path, versions: dict[str, str], trials: Callable[[int], int]
) -> None:
    """At random moments of a build in an empty store."""
    requests = build(with_rows(tmp_path).project, server)[0]
    for moment in random.Random(17).sample(range(requests - 20), trials(8)):
        server.objects.clear()
        project = with_rows(tmp_path).project
        server.fail("expired", after=moment)

        with pytest.raises(UnreachableError, match=r"^s3://bucket/store\S*: cannot be .*; it must .* the credentials$"):
            build(project, server)
        server.heal()
        require_whole_manifests(project)

        assert build(project, server)[1] == versions, f"after {moment} of {requests} requests"


def require_whole_manifests(project: Project) -> None:
    """Hold every manifest in a store to its files: if it is there, all that it names is whole."""
    for step in plan_steps(project):
        for made in manifest.list_versions(project.store, step.key):
            manifest.verify_files(project.store, made)


def test_server_without_conditions_is_refused_before_anything_is_current(
    server: ObjectServer, project: Project, versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.takes_conditions = False
    said = (
        r"^s3://bucket/store/mini/rows/raw_dataset/pointer.json: the server refuses .* \(A header you provided "
        r"implies functionality that is not implemented\); If-Match and .*; use a server .* ROWMILL_STORAGE_CONDITIONS"
    )
    with pytest.raises(ConfigError, match=said):
        build(project, server)
    assert not any(path.endswith("pointer.json") for path in server.objects)
    monkeypatch.setenv(remote.VARIABLE, "none")
    assert build(project, server)[1] == versions


# ── Other layouts ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", mark_all_but(["index"], SHARD_LAYOUTS))
def test_shards_of_other_layouts_are_those_of_a_local_store(server: ObjectServer, tmp_path: Path, layout: str) -> None:
    local = write_layout(Workspace(tmp_path), layout).build()

    remote_build = Workspace(tmp_path, "s3://bucket/store").build()

    assert remote_build.versions() == local.versions()
    assert [part.files for part in remote_build.manifest("rows", "packed_shards").parts] == [
        part.files for part in local.manifest("rows", "packed_shards").parts
    ]
    require_whole_manifests(remote_build.project)
    for name in ("flat", "padded"):
        batches = [
            [*Reader(root, "mini", rank=1, world_size=2, layout=name, as_torch=False, verify=True)]
            for root in (local.project.store.root, "s3://bucket/store")
        ]
        assert len(batches[0]) == len(batches[1]) > 1
        for mine, theirs in zip(*batches, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(np.array_equal(values, theirs[field]) for field, values in mine.items())


# ── Shares ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.campaign
def test_three_shares_of_each_stage_make_what_one_build_makes(server: ObjectServer, tmp_path: Path) -> None:
    rows = [chat(i, words=40) for i in range(800)]
    groups = {"filters": {"deduplicate": "exact"}, "packing": {"group_tokens": 4096}}
    rows += rows[:100:7]
    workspace = Workspace(tmp_path)
    urls = [workspace.write(f"{first:03}.jsonl", rows[first : first + 200]) for first in range(0, len(rows), 200)]
    local = workspace.recipe({"rows": {"source": {"train_urls": urls}, "format": CHAT, **groups}}).build()
    project, built = Workspace(tmp_path, "s3://bucket/store").project, dict[str, str]()
    for job in share.list_jobs(project):
        if job.command == "build":
            built = build(project, server, *job.stages)[1]
            continue
        # Rows without duplicates are a second pass over the parts of all shares.
        for number in (1, 2, 3, 1, 2, 3):
            share.make_share(project, Share(number, 3), only=job.stages)

    assert built == local.versions()
    made = [path for path in server.objects if path.endswith("/part.json")]
    assert len(made) > 10
    assert not any(prepare.SHARE_VERSIONS_FOLDER in path for path in server.objects)


# ── Two builders ───────────────────────────────────────────────────────────────────────────────────

POINTER = "bucket/store/mini/rows/canonical_rows/pointer.json"


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_builders_one_sets_the_pointer_and_the_other_says_so(
    is_first: bool, server: ObjectServer, tmp_path: Path, project: Project
) -> None:
    if not is_first:
        runner.build(project)
        Workspace(tmp_path).write("rows.jsonl", [chat(i) for i in range(21)])
    other = Store("s3://bucket/other")
    other.write_sealed("pointer.json", {"version": "f" * 32, "fingerprint": "e" * 32})

    def interfere(step: Step) -> None:
        if step.name == "canonical_rows":
            server.objects[POINTER] = server.objects["bucket/other/pointer.json"]

    with pytest.raises(BusyError, match=r"mini/rows/canonical_rows: another build has made version ffffffffffff"):
        runner.build(project, begin=interfere)
    assert server.objects[POINTER] == server.objects["bucket/other/pointer.json"]


def test_two_builders_of_one_version_both_end(server: ObjectServer, project: Project) -> None:
    versions = [report.version for _, report, _ in runner.build(project)]
    pointer = server.objects[POINTER]
    server.objects = {path: content for path, content in server.objects.items() if not path.startswith("bucket/store")}

    def interfere(step: Step) -> None:
        if step.name == "canonical_rows":
            # The same version, in other bytes.
            server.objects[POINTER] = b" " + pointer

    assert [report.version for _, report, _ in runner.build(project, begin=interfere)] == versions
