"""Lists of finished parts on an object store: what a function made in any of its maps is found by one request."""

from collections.abc import Iterator, Sequence

import pytest

from rowmill.core import json
from rowmill.core.storage import Store
from rowmill.parts.functions import PartLists, save_kept_part
from rowmill.schema.manifest import Part
from tests.support.object_server import ObjectServer, serving_s3fs

pytestmark = pytest.mark.slow

STORE, FOLDER, FUNCTION = Store("s3://bucket/root"), "mini/rows/stage", "make_part"
FIRST, SECOND = ["a1", "a2", "a3"], ["b1", "b2"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with serving_s3fs(monkeypatch) as made:
        yield made


def run(server: ObjectServer, *maps: Sequence[str]) -> tuple[list[int], int]:
    """Find or make the parts of a function's maps as a stage does; return how many each found, and the requests."""
    lists, found, before = PartLists(), list[int](), server.requests
    with STORE.indexed([FOLDER], own=[]):
        for names in maps:
            kept = lists.find_parts(STORE, FOLDER, FUNCTION, names)
            found.append(len(kept))
            for name in (name for name in names if name not in kept):
                kept[name] = Part(name, {})
                save_kept_part(STORE, FOLDER, kept[name])
            lists.add_parts(STORE, FOLDER, FUNCTION, kept.values())
    return found, server.requests - before


def test_second_map_of_a_function_leaves_the_parts_of_the_first_in_its_list(server: ObjectServer) -> None:
    assert run(server, FIRST, SECOND)[0] == [0, 0]

    found, requests = run(server, FIRST, SECOND)

    assert found == [3, 2]
    # The names in the root, those of the stage, and the list.
    assert requests == 3
    assert run(server, FIRST, [*SECOND, "b3"])[0] == [3, 2]
    assert run(server, FIRST, [*SECOND, "b3"]) == ([3, 3], 3)


def test_parts_that_shares_made_are_listed_by_the_build_that_finds_them(server: ObjectServer) -> None:
    for name in FIRST:
        save_kept_part(STORE, FOLDER, Part(name, {}, {}))

    assert run(server, FIRST)[0] == [3]
    assert run(server, FIRST) == ([3], 3)


def test_part_that_is_no_longer_made_leaves_the_list(server: ObjectServer) -> None:
    run(server, FIRST)
    run(server, ["a1", "c1"])

    assert run(server, FIRST)[0] == [3]
    assert sorted(STORE.read_sealed(f"{FOLDER}/kept_parts/{FUNCTION}.json")["parts"]) == ["a1", "a2", "a3"]  # pyrefly: ignore[unsupported-operation]


def test_long_list_is_compressed_and_a_plain_one_of_earlier_builds_is_read(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(server, FIRST)
    path = f"{FOLDER}/kept_parts/{FUNCTION}.json"
    plain = STORE.read(path)
    monkeypatch.setattr(json, "COMPRESSED_FROM_BYTES", 1)

    assert run(server, FIRST) == ([3], 3)
    assert STORE.read(path) == plain
    assert run(server, [*FIRST, "a4"])[0] == [3]
    assert not STORE.read(path).startswith(b"{")
    assert run(server, [*FIRST, "a4"]) == ([4], 3)
