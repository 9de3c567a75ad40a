"""Our own recipes, and a mixture of real data, give the versions that are on record."""

import json
from pathlib import Path

import pytest

from tests.support import recorded

pytestmark = pytest.mark.slow

ON_RECORD: dict[str, dict[str, str]] = json.loads(recorded.RECORDED.read_text(encoding="utf-8"))
TO_DO = "if that is meant, run `python -m tests.support.recorded` and say why in the commit"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("recorded")
    recorded.write_project(at, None)
    return at


def test_every_recipe_of_ours_is_on_record() -> None:
    assert set(ON_RECORD) == {*recorded.OWN, recorded.REAL}


@pytest.mark.parametrize("name", recorded.OWN)
def test_own_recipe_gives_the_versions_on_record(folder: Path, name: str) -> None:
    assert recorded.versions_of(folder / "configs" / name) == ON_RECORD[name], TO_DO


@pytest.mark.real_data
def test_mixture_of_real_data_gives_the_versions_on_record(tmp_path: Path, real_data: Path) -> None:
    recorded.write_project(tmp_path, real_data)
    assert recorded.versions_of(tmp_path / "configs" / recorded.REAL) == ON_RECORD[recorded.REAL], TO_DO
