"""Collecting leaves what the next build begins with, and takes what killed builds left."""

from pathlib import Path

from pipelines import build, verification
from pipelines.retention import collect
from tests.recipes import PAIR, Road, pair


def test_unfinished_files_go_and_finished_ones_stay(tmp_path: Path) -> None:
    road = Road(tmp_path).one("rows.jsonl", [pair(i) for i in range(5)], PAIR)
    built = road.build()
    (part,) = built.manifest("rows", "canonical_rows").parts
    beside = road.store / f"{part.files['rows'].path}.0123abcd.tmp"
    alone = road.store / "road" / "gpu_partitions" / "current.json.4567.tmp"
    for path in (beside, alone):
        path.write_bytes(b"half")

    named = collect(road.project, keep=1, dry_run=True).items
    assert sorted((one.kind, one.path, one.size_bytes) for one in named) == sorted(
        ("unfinished file", str(path.relative_to(road.store)), 4) for path in (beside, alone)
    )
    assert beside.exists()
    collect(road.project, keep=1, dry_run=False)
    assert not beside.exists()
    assert not alone.exists()
    assert not any(one.fails for one in verification.verify(road.project, deep=True))
    assert road.build().made() == set()


def test_part_that_was_written_again_is_what_the_next_build_begins_with(tmp_path: Path) -> None:
    road = Road(tmp_path)
    first = [pair(0), pair(1), pair(2)]
    urls = [road.write("a.jsonl", first), road.write("b.jsonl", [pair(1), pair(7)]), road.write("c.jsonl", [pair(8)])]
    road.recipe({"rows": {"source": {"train_urls": urls}, "format": PAIR}})
    before = road.build(only=("raw_dataset", "canonical_rows"))
    made_of = before.manifest("rows", "canonical_rows").details["made_of"]
    collect(road.project, keep=1, dry_run=False)

    road.write("c.jsonl", [pair(9)])
    after = road.build(only=("raw_dataset", "canonical_rows")).report("rows", "canonical_rows")

    # Of three parts only the one whose file changed is read; b's stands without its duplicate beside the whole one.
    assert len(made_of) == 1
    assert (after.parts, after.parts_reused, after.rows_made) == (3, 2, 1)


def test_versions_that_go_take_the_parts_they_began_with_along(tmp_path: Path) -> None:
    road = Road(tmp_path)
    urls = [road.write("a.jsonl", [pair(0), pair(0)])]
    road.recipe({"rows": {"source": {"train_urls": urls}, "format": PAIR}})
    road.build(only=("raw_dataset", "canonical_rows"))
    road.write("a.jsonl", [pair(1), pair(1), pair(2)])
    road.build(only=("raw_dataset", "canonical_rows"))
    folder = road.store / "road" / "rows" / "canonical_rows" / "parts"
    assert len(list(folder.iterdir())) == 4

    collect(road.project, keep=1, dry_run=False)

    kept = build.manifest.current(road.project.store, ("road", "rows", "canonical_rows"))
    assert kept is not None
    assert {path.name for path in folder.iterdir()} == {
        *(part.fingerprint for part in kept.parts),
        *kept.details["made_of"],
    }
