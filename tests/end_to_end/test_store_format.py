"""A store says in which format it is: one of a newer rowmill is left alone, one of an older is read or made again."""

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from rowmill.build import gc, runner
from rowmill.build.steps import Project, plan_steps
from rowmill.core import json
from rowmill.core.errors import NewerStoreError
from rowmill.core.json import FORMAT_KEY, SEAL_KEY, STORE_FORMAT, seal_object
from rowmill.core.storage import digest_file
from rowmill.inspection import verify
from rowmill.reader import Reader
from rowmill.schema import manifest
from tests.support.kept_store import FOLDER, unpack_project, write_project
from tests.support.recipes import Workspace

pytestmark = pytest.mark.slow
FORMATS = sorted(int(path.name.removeprefix("format-").partition(".")[0]) for path in FOLDER.glob("format-*"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Build the project once; its store is then written as the next format."""
    workspace = write_project(tmp_path_factory.mktemp("built"))
    workspace.build()
    return workspace


@pytest.fixture
def newer(built: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Write every sealed file of the store as the next format."""
    with monkeypatch.context() as later:
        later.setattr(json, "STORE_FORMAT", STORE_FORMAT + 1)
        for path in built.store.rglob("*.json"):
            value = orjson.loads(path.read_bytes())
            path.write_bytes(seal_object({k: v for k, v in value.items() if k != SEAL_KEY}, compresses=False))
    return built


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    return {str(path): digest_file(path) for path in files}


def open_reader(project: Project) -> Reader:
    return Reader(project.store.root, project.recipe.name, rank=0, world_size=1)


def test_every_sealed_file_carries_the_number_of_its_format(built: Workspace) -> None:
    sealed = [orjson.loads(path.read_bytes()) for path in built.store.rglob("*.json")]

    assert len(sealed) > 50
    assert {value[FORMAT_KEY] for value in sealed} == {STORE_FORMAT}


COMMANDS: dict[str, Callable[[Project], object]] = {
    "build": runner.build,
    "verify": lambda project: verify.verify_recipe(project, deep=True),
    "read": open_reader,
    "gc": lambda project: gc.collect_garbage(project, keep=1, dry_run=False),
    "versions": lambda project: [manifest.load_current(project.store, step.key) for step in plan_steps(project)],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_store_of_a_newer_rowmill_is_refused_in_one_sentence_and_left_alone(command: str, newer: Workspace) -> None:
    before = digests(newer.store)

    with pytest.raises(NewerStoreError) as refused:
        COMMANDS[command](newer.project)

    where, found, allowed, remedy = f"{refused.value}".replace(".json: ", ".json; ", 1).split("; ")
    assert where.startswith(str(newer.store))
    assert found == f"written by a newer rowmill, in format {STORE_FORMAT + 1} of a store"
    assert allowed == f"this rowmill reads up to format {STORE_FORMAT}"
    assert remedy == "install the newer one, or name another storage root"
    assert digests(newer.store) == before


@pytest.mark.parametrize("number", FORMATS)
def test_kept_store_is_read_and_what_it_lacks_is_made(number: int, tmp_path: Path) -> None:
    workspace = unpack_project(number, tmp_path)
    assert sum(int(batch["input_ids"].size) for batch in open_reader(workspace.project)) > 500

    workspace.build()
    assert not any(one.damage for one in verify.verify_recipe(workspace.project, deep=True))
