"""What a build knows of a remote storage from listings: what it wrote, what workers wrote, and what it keeps."""

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.remote_index import RECENT_BYTES, ObjectFacts, RemoteIndex

PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(lambda names: "/".join(["top", *names]))


class Storage:
    """Objects and how often they were listed."""

    def __init__(self, *paths: str) -> None:
        self.objects = dict.fromkeys(paths, 1)
        self.listings = 0

    def index(self, *, own: tuple[str, ...] = ()) -> RemoteIndex:
        index = RemoteIndex(self.list_files)
        index.cover(("top",), own=own)
        return index

    def list_files(self, folder: str) -> dict[str, ObjectFacts]:
        self.listings += 1
        return {path: ObjectFacts(size) for path, size in self.objects.items() if path.startswith(f"{folder}/")}


@pytest.mark.slow
@given(st.lists(st.tuples(PATHS, st.booleans()), max_size=12))
def test_an_index_knows_what_a_new_listing_would_show(changes: list[tuple[str, bool]]) -> None:
    storage = Storage("top/a/b", "top/c")
    index = storage.index()
    index.find("top/c")
    for path, is_written in changes:
        if is_written:
            # An object store has no folders that a file could stand in the way of.
            storage.objects[path] = len(path)
            index.note_written(path, len(path))
        else:
            storage.objects = {
                one: size for one, size in storage.objects.items() if one != path and not one.startswith(f"{path}/")
            }
            index.note_removed(path)

    parents = {"top", *(str(parent) for path in storage.objects for parent in PurePosixPath(path).parents)} - {"."}
    for path in {path for path, _ in changes} | set(storage.objects):
        found = index.find(path)
        assert (found.size_bytes if found else None) == storage.objects.get(path)
    for parent in parents:
        below = [one.removeprefix(f"{parent}/") for one in storage.objects if one.startswith(f"{parent}/")]
        names = {one.split("/")[0] for one in below}
        assert set(index.list_names(parent)) == names
    assert storage.listings == 1


def test_what_a_worker_wrote_is_found_by_one_more_listing_of_the_folders_they_write_in() -> None:
    storage = Storage("top/a")
    index = storage.index()
    assert index.find("top/b") is None

    storage.objects["top/b"] = 7
    index.forget_absences()

    assert index.find("top/b") == ObjectFacts(7)
    assert index.find("top/c") is None
    assert storage.listings == 2
    storage = Storage("stats/a")
    index = storage.index(own=("stats",))
    index.find("stats/b")
    index.forget_absences()
    assert index.find("stats/b") is None
    assert storage.listings == 1


def test_files_of_parts_are_kept_for_some_time_and_read_back_after_a_write() -> None:
    index = Storage().index()
    large = bytes(RECENT_BYTES // 2)
    for name in ("a", "b", "c"):
        index.note_read(f"top/parts/{name}", large)
    index.note_written("top/parts/c", 1, b"x")
    index.note_written("top/pointer.json", 1, b"x")

    assert [index.content(f"top/parts/{name}") is not None for name in ("a", "b", "c")] == [False, True, False]
    assert index.content("top/pointer.json") == b"x"
