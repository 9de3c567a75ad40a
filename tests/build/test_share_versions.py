"""Shares with different versions of what decides bytes: refused by shares and builds, until their parts are removed."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rowmill.build import gc, prepare, share
from rowmill.core.errors import ConfigError
from rowmill.executors import Share
from tests.build.test_share import TOTAL, make_all_shares, write_chats
from tests.support.recipes import Built, Workspace

pytestmark = pytest.mark.usefixtures("small_parts")
STAGE = "canonical_rows"
MIXED = r"mini/rows/canonical_rows: share 1/3 was made with pyarrow 9.0 instead of .*; the same versions .* rowmill gc"


@contextmanager
def on_another_host() -> Generator[None]:
    """Have another version of a package that decides bytes."""
    other = prepare.describe_versions() | {"pyarrow": "9.0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "describe_versions", lambda: other)
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return write_chats(tmp_path_factory.mktemp("plain")).build(only=["raw_dataset", STAGE])


@pytest.fixture
def begun(tmp_path: Path) -> Workspace:
    """Return a project in which another host has made a share of rows."""
    workspace = write_chats(tmp_path)
    workspace.build(only=["raw_dataset"])
    with on_another_host():
        [report] = share.make_share(workspace.project, Share(1, TOTAL), only=[STAGE])
    assert report.made
    return workspace


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
    built = begun.build(only=["raw_dataset", STAGE])
    assert built.report("rows", STAGE).parts_reused == 0
    assert built.digests() == plain.digests()


def test_a_build_of_the_shares_ends_their_records(begun: Workspace, plain: Built) -> None:
    with on_another_host():
        make_all_shares(begun, STAGE)
        built = begun.build(only=["raw_dataset", STAGE])

    assert built.report("rows", STAGE).parts_reused > 0
    assert not list(begun.store.rglob(prepare.SHARE_VERSIONS_FOLDER))
    # Parts that an output names are reused after an upgrade, as ever.
    assert begun.build(only=["raw_dataset", STAGE]).digests() == plain.digests()
