"""A random life of a project: whatever happened before, each build is that of an empty store with the same inputs.

A life that fails prints its seed and the shortest list of steps that still fails; `replay` carries such a list out.
"""

from collections.abc import Generator
from pathlib import Path

import pytest

from rowmill.sources import parts
from tests.support.random_life import PART_BYTES, Life, LifeStep, Reference, draw_steps, shorten
from tests.support.ray_nodes import starting_cluster

pytestmark = pytest.mark.slow

STEPS = 300
LIVES = 7
SHORTENING_S = 1200.0

A_FEW_STEPS: list[LifeStep] = [
    ["plain", "nothing"],
    ["kill:90", "append", 0, 0, 40, 3],
    ["plain", "edit", 2, 0, 3, 14],
    ["workers:2", "rename_file", 1, 0, 3],
    ["plain", "edit", 2, 0, 3, 13],
    ["plain", "flip", 150, 40],
    ["kill:30", "gc", 1, 9],
    ["plain", "use", 3, 0],
    ["plain", "remove", 0, 0, 2, 2],
    ["plain", "release"],
]
"""A life for every day: each kind of step that needs no luck."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SMALLEST_PART_BYTES", PART_BYTES)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return the builds on empty stores, which lives of one process share."""
    return Reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def ray_address() -> Generator[str]:
    with starting_cluster() as cluster:
        yield cluster.address


def live(
    folder: Path,
    seed: int,
    steps: list[LifeStep],
    reference: Reference,
    capsys: pytest.CaptureFixture[str],
    ray: str = "",
) -> None:
    life = Life(folder / "life", seed, reference, ray)
    for number, step in enumerate(steps, 1):
        if life.live(step):
            pytest.fail(str(shorten(folder / "again", seed, steps[:number], reference, ray=ray, limit_s=SHORTENING_S)))
    counts = life.counts
    with capsys.disabled():
        print(
            f"\nlife {seed}: {len(steps)} steps, {counts.builds} builds, {counts.kills} killed, {counts.mended} times "
            f"damage was mended, {counts.blocked} refused or blocked, 0 differences, {counts.seconds:.0f} s; "
            f"{dict(sorted(counts.steps.items()))}"
        )


@pytest.mark.timeout(1800)
def test_short_life_builds_what_an_empty_store_does(
    tmp_path: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    live(tmp_path, 0, A_FEW_STEPS, reference, capsys)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(LIVES))
def test_random_life_builds_what_an_empty_store_does(
    tmp_path: Path, seed: int, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    live(tmp_path, seed, [*draw_steps(seed, STEPS, has_ray=False)], reference, capsys)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_random_life_with_ray_builds_what_an_empty_store_does(
    tmp_path: Path, reference: Reference, ray_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    live(tmp_path, LIVES, [*draw_steps(LIVES, STEPS, has_ray=True)], reference, capsys, ray_address)
