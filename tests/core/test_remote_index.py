"""What a build knows of a remote storage from listings: what it wrote, what workers wrote, and what it keeps."""

from hashlib import md5
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.remote_index import (
    CONCURRENT_REQUESTS,
    LISTED_PER_REQUEST,
    MAX_SMALL_BYTES,
    RECENT_BYTES,
    ObjectFacts,
    RemoteIndex,
)

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


# ── The copy of small files ────────────────────────────────────────────────────────────────────────
def describe(content: bytes) -> ObjectFacts:
    return ObjectFacts(len(content), f'"{md5(content).hexdigest()}"')


def index_of(files: dict[str, ObjectFacts]) -> RemoteIndex:
    index = RemoteIndex({"top": files}.__getitem__)
    index.cover(("top",))
    index.list_all(("top",))
    return index


def test_small_files_that_were_used_are_copied_with_their_tags() -> None:
    files = {"top/a": b"\xff\0", "top/parts/b": b"b", "top/large": bytes(MAX_SMALL_BYTES + 1), "top/unread": b"c"}
    index = index_of({path: describe(content) for path, content in files.items()})
    for path in ("top/a", "top/parts/b", "top/large"):
        assert index.content(path) is None
        index.note_read(path, files[path])
    index.note_written("top/written", 1, b"d", "tag of an upload")
    index.note_written("top/untagged", 1, b"e")

    copied = index.list_small_files()
    assert copied == {"top/a": [describe(b"\xff\0").tag, "ÿ\0"], "top/written": ["tag of an upload", "d"]}

    later = index_of({"top/a": describe(b"\xff\0"), "top/written": ObjectFacts(1, "tag of an upload")})
    later.restore_small_files(copied)
    assert later.content("top/a") == b"\xff\0"
    # What nothing asks for any more, such as files of earlier versions, is left out.
    assert later.list_small_files().keys() == {"top/a"}


def test_file_that_was_replaced_between_listing_and_reading_is_not_copied() -> None:
    """An object that gets its earlier content back has its earlier tag again."""
    index = index_of({"top/pointer.json": describe(b"old")})
    index.content("top/pointer.json")
    index.note_read("top/pointer.json", b"new")
    assert not index.list_small_files()

    index.note_written("top/pointer.json", 3, b"own", "own tag")
    index.note_written("top/pointer.json", 5, b"other")
    assert not index.list_small_files()


@pytest.mark.parametrize("listed", [None, ObjectFacts(1, "other"), ObjectFacts(2, "tag"), ObjectFacts(1)])
def test_copied_file_is_not_taken_if_the_listing_shows_another_one(listed: ObjectFacts | None) -> None:
    index = index_of({} if listed is None else {"top/a": listed})

    index.restore_small_files({"top/a": ["tag", "a"], "elsewhere/b": ["tag", "b"]})

    assert index.content("top/a") is None


@pytest.mark.parametrize(
    ("files", "folders", "listings"),
    [
        (0, CONCURRENT_REQUESTS, CONCURRENT_REQUESTS + 1),
        (LISTED_PER_REQUEST - 1, CONCURRENT_REQUESTS, 2),
        (LISTED_PER_REQUEST, CONCURRENT_REQUESTS, CONCURRENT_REQUESTS + 1),
        (LISTED_PER_REQUEST, 2 * CONCURRENT_REQUESTS, 2),
        (1, CONCURRENT_REQUESTS - 1, CONCURRENT_REQUESTS),
    ],
)
def test_many_folders_with_few_files_are_listed_with_their_parent(files: int, folders: int, listings: int) -> None:
    names = [f"top/{number}" for number in range(folders)]
    storage = Storage(*(f"{name}/a" for name in names[1:]), "top/other", "stats/b")
    index = RemoteIndex(storage.list_files)
    index.cover([*names, "stats"])

    index.list_all(("top", "stats"), "top", files)

    assert storage.listings == listings
    assert [index.list_names(name) for name in names] == [[], *[["a"]] * (folders - 1)]
    assert index.find("stats/b") is not None
    assert index.count_files("top") == folders - 1
    assert not index.covers("top/other")
    assert storage.listings == listings
