"""What some folders of a remote storage root hold, from one listing each, for the length of a build.

A build asks some thousand times whether small files exist and what they say. Each question as a request would cost 20
to 50 ms. Here a folder is listed once, with all that is below it; what this process writes or removes is noted, and
records are read once. What other processes write meanwhile is not seen: workers of this build write files that
nobody had before, so `forget_absences` has folders listed again before anything in them is called absent.

    exists, has, list ─► listing of the folder, noted changes          no request
    read              ─► content read before, records also written      no request, or one GET
    absent            ─► only if no worker has written since the listing; else list again

A build of a whole recipe leaves a copy of the small files that it read and wrote in one file, each with the version tag
(ETag) that the storage gave its content. The next build takes a file from the copy if the listing shows the same tag
and size: a file that was replaced or removed is noticed, and a stale or lost copy costs requests, nothing else.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

RECENT_BYTES = 64 << 20
"""Bytes of files of parts that are kept after they were read, the latest; a stage reads some columns, then others."""
CONCURRENT_REQUESTS = 16
LISTED_PER_REQUEST = 1000
"""Files in one answer of S3; the answers of a listing come one after another."""
MAX_SMALL_BYTES = 128 << 10
"""Size of the largest file that is copied for the next build; a tokenizer is larger."""

_OPEN: dict[str, "RemoteIndex"] = {}
"""The indexes of this process, by storage root."""


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """An object's size in bytes and its version tag, empty if it was not told."""

    size_bytes: int
    tag: str = ""


@dataclass(slots=True)
class _Folder:
    """A folder that was listed: files by their paths, and the names in each folder below it."""

    files: dict[str, ObjectFacts] = field(default_factory=dict[str, ObjectFacts])
    names: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    is_complete: bool = False
    """Whether a path that is not in it is absent."""
    is_own: bool = False
    """Whether no worker writes in it, so that it stays complete."""

    def add(self, path: str, facts: ObjectFacts) -> None:
        self.files[path] = facts
        while path:
            path, _, name = path.rpartition("/")
            names = self.names.setdefault(path, set())
            if name in names:
                return
            names.add(name)

    def remove(self, path: str) -> None:
        for one in [file for file in self.files if file == path or file.startswith(f"{path}/")]:
            del self.files[one]
        for one in [one for one in self.names if one == path or one.startswith(f"{path}/")]:
            del self.names[one]
        while path and path not in self.files and path not in self.names:
            path, _, name = path.rpartition("/")
            siblings = self.names.get(path, set())
            siblings.discard(name)
            if not siblings:
                self.names.pop(path, None)


class RemoteIndex:
    """Listings and small contents of some folders; paths are relative to the root."""

    def __init__(self, list_files: Callable[[str], Mapping[str, ObjectFacts]]) -> None:
        self._list_files = list_files
        self._folders: dict[str, _Folder] = {}
        self._first_tags: dict[str, str] = {}
        self._seen: set[str] = set()
        self._contents: dict[str, bytes] = {}
        self._tags: dict[str, str] = {}
        """The version tag of each content, if it is certain that the storage gave it to these bytes."""
        self._used: set[str] = set()
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._lock = threading.RLock()
        self.users = 0

    def cover(self, folders: Iterable[str], *, own: Iterable[str] = ()) -> None:
        """Answer for some more folders, and for `own` ones, in which no worker writes."""
        with self._lock:
            for folder in folders:
                self._folders.setdefault(folder, _Folder())
            for one in own:
                self._folders.setdefault(one, _Folder(is_own=True))

    def list_all(self, top: Collection[str], parent: str = "", files: int = 0) -> None:
        """List all folders that were not listed yet, at once; `top` are the names in the root.

        Those below a `parent` are listed with it if the number of `files` below it, 0 if unknown, makes that faster.
        """
        for name, one in self._folders.items():
            # Asking for what is below an empty folder takes three requests.
            if name.partition("/")[0] not in top:
                self._seen.add(name)
                one.is_complete = True
        waiting = [name for name, one in self._folders.items() if not one.is_complete]
        below = {name for name in waiting if name.startswith(f"{parent}/")}
        is_faster = files and len(below) >= CONCURRENT_REQUESTS * (1 + files // LISTED_PER_REQUEST)
        asked = [parent, *(name for name in waiting if name not in below)] if is_faster else waiting
        found: dict[str, dict[str, ObjectFacts]] = {name: {} for name in waiting}
        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as threads:
            for listed in threads.map(self._list_files, asked):
                for file, facts in listed.items():
                    if (name := self._name_of(file)) in found:
                        found[name][file] = facts
        for name, listed in found.items():
            self._note_listing(name, listed)

    def list_small_files(self) -> dict[str, list[str]]:
        """Return tag and content, one character per byte, of the small files that were read or written."""
        with self._lock:
            return {
                path: [tag, self._contents[path].decode("latin-1")]
                for path, tag in sorted(self._tags.items())
                if path in self._used and len(self._contents[path]) <= MAX_SMALL_BYTES
            }

    def restore_small_files(self, files: Mapping[str, Sequence[str]]) -> None:
        """Take what `list_small_files` returned in an earlier build, as far as the listings show the same files."""
        with self._lock:
            for path, (tag, text) in files.items():
                known, content = self._folder_of(path), text.encode("latin-1")
                if known is not None and known.files.get(path) == ObjectFacts(len(content), tag):
                    self._contents[path], self._tags[path] = content, tag

    def count_files(self, folder: str) -> int:
        """Return the number of files in the folders below a folder."""
        with self._lock:
            return sum(len(one.files) for name, one in self._folders.items() if name.startswith(f"{folder}/"))

    def find(self, path: str) -> ObjectFacts | None:
        """Return a file's facts; None if it is absent. `covers(path)` must hold."""
        with self._lock:
            known = self._folder_of(path)
            if known is None or not (path in known.files or known.is_complete):
                known = self._list(path)
            return known.files.get(path)

    def list_names(self, path: str) -> list[str]:
        """Return the sorted names in a folder; empty if it is absent. `covers(path)` must hold."""
        with self._lock:
            known = self._folder_of(path)
            if known is None or not known.is_complete:
                known = self._list(path)
            return sorted(known.names.get(path, ()))

    def covers(self, path: str) -> bool:
        """Return whether a path is in one of the folders, or is one."""
        return self._name_of(path) is not None

    def first_tag(self, path: str) -> str | None:
        """Return the version tag that a file directly in a folder had when this process first saw it, or left it with.

        None if it was absent. `covers(path)` must hold.
        """
        self.find(path)
        return self._first_tags.get(path)

    def content(self, path: str) -> bytes | None:
        """Return a file's content if it is known."""
        with self._lock:
            self._used.add(path)
            return self._contents.get(path, self._recent.get(path))

    def note_read(self, path: str, content: bytes) -> None:
        """Keep what was read: records of a build all, files of parts, of which there are many, for some time."""
        with self._lock:
            self._forget_content(path)
            if "/parts/" not in path:
                self._contents[path] = content
                known = self._folder_of(path)
                listed = None if known is None else known.files.get(path)
                # The file may have been replaced between listing and reading.
                if listed and listed.tag.strip('"') == hashlib.md5(content, usedforsecurity=False).hexdigest():
                    self._tags[path] = listed.tag
                return
            self._recent[path] = content
            self._recent_bytes += len(content)
            while self._recent_bytes > RECENT_BYTES:
                self._recent_bytes -= len(self._recent.popitem(last=False)[1])

    def _forget_content(self, path: str) -> None:
        self._contents.pop(path, None)
        self._tags.pop(path, None)
        self._recent_bytes -= len(self._recent.pop(path, b""))

    def note_written(self, path: str, size_bytes: int, content: bytes | None = None, tag: str = "") -> None:
        """Note a file that this process wrote; files of parts are read back from the storage."""
        with self._lock:
            self._forget_content(path)
            if tag:
                self._first_tags[path] = tag
            if content is not None and "/parts/" not in path:
                self._contents[path] = content
                self._used.add(path)
                if tag:
                    self._tags[path] = tag
            known = self._folder_of(path)
            if known is not None:
                known.add(path, ObjectFacts(size_bytes, tag))

    def note_removed(self, path: str) -> None:
        """Note a file or folder that this process removed."""
        with self._lock:
            for one in [one for one in (*self._contents, *self._recent) if one == path or one.startswith(f"{path}/")]:
                self._forget_content(one)
            known = self._folder_of(path)
            if known is not None:
                known.remove(path)

    def forget_absences(self) -> None:
        """Call nothing absent any more before its folder is listed again: other processes have written."""
        with self._lock:
            for folder in self._folders.values():
                folder.is_complete = folder.is_complete and folder.is_own

    def _name_of(self, path: str) -> str | None:
        while path:
            if path in self._folders:
                return path
            path = path.rpartition("/")[0]
        return None

    def _folder_of(self, path: str) -> _Folder | None:
        name = self._name_of(path)
        return None if name is None else self._folders[name]

    def _list(self, path: str) -> _Folder:
        name = self._name_of(path)
        assert name is not None
        self._note_listing(name, self._list_files(name))
        return self._folders[name]

    def _note_listing(self, name: str, files: Mapping[str, ObjectFacts]) -> None:
        is_first = name not in self._seen
        self._seen.add(name)
        listed = _Folder(is_complete=True, is_own=self._folders[name].is_own)
        for file, facts in files.items():
            listed.add(file, facts)
            if is_first and facts.tag and file.rpartition("/")[0] == name:
                self._first_tags[file] = facts.tag
        with self._lock:
            self._folders[name] = listed


@contextmanager
def open_index(
    root: str, folders: Iterable[str], own: Iterable[str], list_files: Callable[[str], Mapping[str, ObjectFacts]]
) -> Generator[RemoteIndex]:
    """Answer for some folders of a root while the block runs; blocks of one root share an index."""
    index = _OPEN.setdefault(root, RemoteIndex(list_files))
    index.cover(folders, own=own)
    index.users += 1
    try:
        yield index
    finally:
        index.users -= 1
        if not index.users:
            _OPEN.pop(root, None)


def find_index(root: str, path: str) -> RemoteIndex | None:
    """Return the index that answers for a path; None if none does."""
    index = _OPEN.get(root)
    return index if index is not None and index.covers(path) else None


def forget_absences() -> None:
    """Say that other processes have written files that this one asked for before."""
    for index in _OPEN.values():
        index.forget_absences()
