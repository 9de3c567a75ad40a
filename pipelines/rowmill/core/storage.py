"""The store: files with digests, local or remote, read and synced at once.

Store build outputs under one root (a folder or any fsspec URL), with atomic writes.

    <root>/<recipe>/<dataset>/<stage>/parts/<fingerprint>/…   the work, one folder per part
    <root>/<recipe>/<dataset>/<stage>/manifests/<fingerprint>.json
    <root>/<recipe>/<dataset>/<stage>/versions/<version>-<fingerprint>.json
    <root>/<recipe>/<dataset>/<stage>/pointer.json            the version that readers get
    <root>/stats/…                                            small tables for DuckDB

A file is written under a temporary name and renamed, so a name that exists is whole. On an object
store the single put has the same effect. No path is ever made from data: only from names that
`check_name` let through, and from hexadecimal digests.
"""

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.core import arrow_files, caches, remote, remote_index
from rowmill.core.errors import (
    DISK_FULL_ERRNOS,
    BusyError,
    ConfigError,
    DamagedFileError,
    GateError,
    NewerStoreError,
    PipelineError,
    SourceError,
)
from rowmill.core.json import parse_sealed, seal_object
from rowmill.core.remote import public_url
from rowmill.core.remote_index import CONCURRENT_REQUESTS, ObjectFacts, RemoteIndex
from rowmill.core.stage_names import EXPORTS, GPU_PARTITIONS, TRAINING_SPLITS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ResultT = TypeVar("ResultT")

DEFAULT_ROOT_NAME = ".rowmill"
"""Folder of a project that is its storage root unless another one is named."""
UNFINISHED_SUFFIX = ".tmp"
"""Suffix of a file's name while it is written."""

UNFINISHED_NAME_PATTERN = re.compile(rf"\.[0-9a-f]{{32}}{re.escape(UNFINISHED_SUFFIX)}(\.[a-z]+)*$")
"""Matches the names of unfinished files, and of what a library keeps beside one."""

CONCURRENT_SYNCS = 16

THREADED_READ_BYTES = 1 << 20
"""The size from which several threads read a Parquet file: one of 2 KB took them 0.55 ms, and one thread 0.3 ms."""

LEAST_SYNCS = 4
"""Files and folders of a thread that syncs: fewer take less time than starting it."""

NAME_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""Names of recipes, datasets and exports: each becomes a folder, an asset key and a SQL value."""

RESERVED_NAMES = frozenset({TRAINING_SPLITS, GPU_PARTITIONS, EXPORTS, "stats", "reports", "_recipe"})


def check_name(name: str, where: str) -> str:
    """Return `name` if it can be a folder, an asset key and a SQL value; else raise ConfigError."""
    if not NAME_PATTERN.fullmatch(name) or name.lower() in RESERVED_NAMES:
        raise ConfigError(
            f"{where}: {name!r} cannot be a name; allowed are a letter followed by up to 63 letters, digits, '_' and "
            f"'-', and not {', '.join(sorted(RESERVED_NAMES))}; rename it"
        )
    return name


@dataclass(frozen=True, slots=True)
class File:
    """A file that a stage wrote: path relative to the storage root, size in bytes, digest, rows."""

    path: str
    bytes: int
    digest: str
    rows: int


@dataclass(frozen=True, slots=True)
class Store:
    """A root folder or fsspec URL; every path given to its methods is relative to it, with `/`.

    It has more than 250 lines, because each question about a file has an answer for local and one for remote roots, and
    they must agree.
    """

    root: str

    @property
    def is_local(self) -> bool:
        """Whether the root is a folder of this machine, so that files can be mapped and renamed."""
        return "://" not in self.root or self.root.startswith("file://")

    def path(self, relative: str) -> str:
        """Return the full path or URL of a relative one."""
        return f"{self._base}/{relative}" if relative else self._base

    def relative_path(self, path: str) -> str:
        """Return an absolute path or URL below the root relative to it; relative ones are returned as they are."""
        root = self.path("")
        return path.removeprefix(f"{os.path.abspath(root) if self.is_local else root}/")

    def local(self, relative: str) -> Path:
        """Return the path of a file of a local root."""
        if not self.is_local:
            raise ConfigError(f"{self.root}: not a local folder; this needs one; set a local storage root")
        return Path(self.path(relative))

    def exists(self, relative: str) -> bool:
        """Return whether a file or folder exists."""
        if self.is_local:
            return os.path.exists(self.path(relative))
        if (index := self._index_of(relative)) is not None:
            return index.find(relative) is not None or bool(index.list_names(relative))
        return remote.fetch_info(self._fs, self.path(relative), self.address(relative)) is not None

    def has(self, file: File) -> bool:
        """Return whether a written file exists with its recorded size; its bytes are compared when they are read."""
        path = self.path(file.path)
        if self.is_local:
            return os.path.isfile(path) and os.path.getsize(path) == file.bytes
        if (index := self._index_of(file.path)) is not None:
            found = index.find(file.path)
            return found is not None and found.size_bytes == file.bytes
        facts = remote.fetch_info(self._fs, path, self.address(file.path))
        return facts is not None and facts["type"] == "file" and int(facts["size"]) == file.bytes

    def read(self, relative: str) -> bytes:
        """Read a whole small file."""
        if self.is_local:
            return Path(self.path(relative)).read_bytes()
        index = self._index_of(relative)
        if index is None:
            return self._fetch(relative)
        known = index.content(relative)
        if known is None:
            if index.find(relative) is None:
                raise FileNotFoundError(self.address(relative))
            known = self._fetch(relative)
            index.note_read(relative, known)
        return known

    def recall(self, relative: str, parse: Callable[[bytes], ResultT]) -> ResultT:
        """Return what a function makes of a whole small file, or made of it before if the file is the same.

        Callers share the value and must not change it; see `read_unchanged`.
        """
        if self.is_local:
            return caches.read_unchanged(self.path(relative), parse)
        return caches.parse_once(self.read(relative), parse)

    def prefetch(self, paths: Iterable[str]) -> None:
        """Read small files of an index at once, as far as they exist, so that `read` has them."""
        indexes = ((path, self._index_of(path)) for path in paths)
        wanted = [path for path, index in indexes if index and index.content(path) is None and index.find(path)]
        with ThreadPoolExecutor(remote_index.CONCURRENT_REQUESTS) as threads:
            list(threads.map(self.read, wanted))

    def open(self, relative: str) -> BinaryIO:
        """Open a file for reading."""
        if self.is_local:
            return Path(self.path(relative)).open("rb")
        return remote.open_file(self._fs, self.path(relative), self.address(relative))

    def content(self, file: File) -> pa.Buffer:
        """Read a whole file that a stage wrote; DamagedFileError if it is missing, or its digest is another."""
        try:
            content = self._read_buffer(file.path, file.bytes)
        except FileNotFoundError:
            raise damaged_file_error(self, file, "missing") from None
        found = digest_bytes(content)
        if found != file.digest:
            raise damaged_file_error(self, file, f"digest {found}")
        return content

    def table(self, file: File, columns: Sequence[str] | None = None) -> pa.Table:
        """Read a table that a stage wrote, Arrow or Parquet, or some of its columns; errors as in `content`."""
        return self._parse_table(self.content(file), columns)

    def unchecked_table(self, relative: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Read a Parquet file without a recorded digest, such as a table of statistics."""
        try:
            return self._parse_table(self._read_buffer(relative), columns)
        except (FileNotFoundError, PipelineError):
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DamagedFileError(
                f"{self.path(relative)}: {' '.join(str(error).split())}; a whole Parquet file is needed", relative
            ) from error

    def _read_buffer(self, relative: str, size_bytes: int = remote.UNKNOWN_SIZE) -> pa.Buffer:
        if not self.is_local:
            index = self._index_of(relative)
            known = None if index is None else index.content(relative)
            if known is None:
                known = self._fetch(relative, size_bytes)
                if index is not None:
                    index.note_read(relative, known)
            return pa.py_buffer(known)
        with pa.memory_map(self.path(relative), "rb") as source:
            return source.read_buffer()

    def _parse_table(self, content: pa.Buffer, columns: Sequence[str] | None) -> pa.Table:
        # In a worker Arrow has one thread, for which the threads of a task that has several would wait in turn.
        is_threaded = self.is_local and pa.cpu_count() > 1
        if arrow_files.is_arrow_file(content):
            return arrow_files.decode_table(content, columns, use_threads=is_threaded and columns is None)
        wanted = None if columns is None else list(columns)
        # Not `read_table`: it opens the file as a dataset of one file, which takes longer than reading a small part.
        with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file:
            # A Python buffer is read on this thread: Arrow's own may let go of it only when the interpreter is ending;
            # they then wait for its lock, are ended by it, and the process aborts ("terminate called without an
            # active exception").
            return file.read(wanted, use_threads=is_threaded and content.size >= THREADED_READ_BYTES)

    def list(self, relative: str) -> list[str]:
        """Return the sorted names in a folder, without unfinished files; an empty list if it does not exist."""
        if self.is_local:
            folder = self.path(relative)
            names = os.listdir(folder) if os.path.isdir(folder) else []
            return sorted(n for n in names if not n.startswith(".") and not n.endswith(UNFINISHED_SUFFIX))
        if (index := self._index_of(relative)) is not None:
            return index.list_names(relative)
        folder = remote.open_filesystem(self.path(relative))[1]
        found = remote.list_folder(self._fs, folder, self.address(relative))
        return sorted(PurePosixPath(str(one["name"]).rstrip("/")).name for one in found)

    def list_files(self, relative: str) -> dict[str, ObjectFacts]:
        """Return the files below a folder, at any depth, by sorted path, without unfinished ones.

        On an object store it takes one request for each thousand of them.
        """
        if not self.is_local:
            return dict(sorted(self._list_objects(relative).items()))
        found: dict[str, ObjectFacts] = {}
        for folder, _, names in os.walk(self.path(relative)):
            at = os.path.relpath(folder, self.path(""))
            for name in names:
                # It may have been removed since.
                with suppress(FileNotFoundError):
                    if not name.startswith(".") and not name.endswith(UNFINISHED_SUFFIX):
                        found[f"{at}/{name}"] = ObjectFacts(os.path.getsize(os.path.join(folder, name)))
        return dict(sorted(found.items()))

    def write(self, relative: str, content: bytes) -> None:
        """Write a whole file atomically: afterwards it has the new content or the old one, never a part."""
        if not self.is_local:
            put = partial(self._put_file, write=lambda path: self._fs.pipe_file(path, content))
            answer = self._retry_request("written", put, relative, size_bytes=len(content))
            if (index := self._index_of(relative)) is not None:
                tag = str(answer.get("ETag", "")) if isinstance(answer, dict) else ""
                index.note_written(relative, len(content), content, tag)
            return
        try:
            with self.create(relative) as handle:
                handle.write(content)
        except OSError as error:
            # The system names no file where writing to an open one fails.
            error.filename = error.filename or self.path(relative)
            raise

    def put(self, relative: str, content: bytes, rows: int = 0) -> File:
        """Write a whole file atomically, and return it with its digest."""
        self.write(relative, content)
        return File(relative, len(content), digest_bytes(content), rows)

    @contextmanager
    def create(self, relative: str) -> Generator[BinaryIO]:
        """Open a file for writing; it appears under its name only if the block ends without an error."""
        target = self.path(relative)
        if not self.is_local:
            # A storage's own handle would upload a partial file when the block fails, and cannot be retried.
            with tempfile.NamedTemporaryFile(prefix="rowmill-") as handle:
                yield cast(BinaryIO, handle)
                handle.flush()
                put = partial(self._put_file, write=lambda path: self._fs.put_file(handle.name, path))
                size_bytes = os.path.getsize(handle.name)
                self._retry_request("written", put, relative, size_bytes=size_bytes)
                if (index := self._index_of(relative)) is not None:
                    index.note_written(relative, size_bytes)
            return
        # Not ending in `.parquet`: globs of DuckDB and Polars must not match unfinished files.
        temporary = f"{target}.{uuid.uuid4().hex}{UNFINISHED_SUFFIX}"
        try:
            with _open_new(temporary) as handle:
                yield handle
                handle.flush()
                # Before it is closed: without its lock, it would be removed as abandoned.
                os.replace(temporary, target)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise

    def write_sealed(self, relative: str, value: "Mapping[str, Any] | DataclassInstance") -> None:
        """Write a JSON object with a digest of itself, by which `read_sealed` detects changes."""
        self.write(relative, seal_object(value, compresses=False))

    def write_sealed_list(self, relatives: Iterable[str], value: "Mapping[str, Any] | DataclassInstance") -> None:
        """Write the same JSON object under some names, compressed if it has many parts."""
        content = seal_object(value, compresses=True)
        for relative in relatives:
            self.write(relative, content)

    def write_pointer(self, relative: str, value: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Write a sealed JSON object; on S3, within `indexed`, return instead what another builder wrote meanwhile."""
        index = None if self.is_local else self._index_of(relative)
        if index is None or not remote.can_put_conditionally(self._fs):
            self.write_sealed(relative, value)
            return None
        content, tag = seal_object(value, compresses=False), index.first_tag(relative)
        put = remote.put_if_unchanged(self._fs, self.path(relative), self.address(relative), content, tag)
        if put.other == b"":
            index.note_removed(relative)
            return {}
        # Another process's content has no tag here: this process still may not replace it.
        held = content if put.other is None else put.other
        index.note_written(relative, len(held), held, put.tag)
        return None if put.other is None else parse_sealed(put.other) or {}

    def read_sealed(self, relative: str) -> dict[str, Any] | None:
        """Return a JSON object as it was written; None if it is absent, truncated, empty or changed since.

        Raises NewerStoreError if a newer rowmill wrote it.
        """
        with self._name_newer(relative), suppress(FileNotFoundError):
            return parse_sealed(self.read(relative))
        return None

    def recall_sealed(
        self, relative: str, parse: "Callable[[bytes], ResultT | None]" = parse_sealed
    ) -> "ResultT | None":
        """Return a JSON object as `read_sealed` does, or what `parse` makes of it, as in `recall`."""
        with self._name_newer(relative), suppress(FileNotFoundError):
            return self.recall(relative, parse)
        return None

    @contextmanager
    def _name_newer(self, relative: str) -> Generator[None]:
        try:
            yield
        except NewerStoreError as error:
            raise NewerStoreError(f"{self.address(relative)}: {error}") from None

    def sync(self, paths: Iterable[str]) -> None:
        """Wait until files, and the folders that hold them, are on the disk, so that a power cut keeps them.

        A file system commits what several threads wait for at once together: 700 new files took 1.7 to 2.7 s one after
        another, and 0.12 to 0.2 s by eight or sixteen threads.
        """
        if not self.is_local:
            return
        files = [self.path(path) for path in paths]
        whole = [*dict.fromkeys([*files, *map(os.path.dirname, files)])]
        threads = min(CONCURRENT_SYNCS, len(whole) // LEAST_SYNCS)
        if threads <= 1:
            for path in whole:
                _sync_path(path)
            return
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(_sync_path, whole):
                pass

    def remove(self, relative: str) -> None:
        """Remove a file, or a folder with all its content."""
        target = self.path(relative)
        if not self.is_local:
            with suppress(FileNotFoundError):
                self._retry_request("removed", partial(self._fs.rm, recursive=True), relative)
            if (index := self._index_of(relative)) is not None:
                index.note_removed(relative)
        elif os.path.isdir(target):
            shutil.rmtree(target)
        elif os.path.exists(target):
            os.unlink(target)

    def remove_unfinished(self) -> Sequence[str]:
        """Remove every file that a dead process left under its temporary name; return their paths.

        A writer holds a lock on its file, which ends with the process, however that ends.
        """
        if not self.is_local:
            return []
        removed: list[str] = []
        for folder, _, names in os.walk(self.path("")):
            for name in names:
                if UNFINISHED_SUFFIX in name and UNFINISHED_NAME_PATTERN.search(name):
                    path = os.path.join(folder, name)
                    if _remove_if_abandoned(path):
                        removed.append(os.path.relpath(path, self.path("")))
        return removed

    def list_unfinished(self, relative: str) -> Sequence[str]:
        """Return the files below a folder, at any depth, that have their temporary names.

        Only the holder of the folder's lock can distinguish the leftovers of a killed process from files being written.
        """
        if not self.is_local:
            return []
        folder = Path(self.path(relative))
        return sorted(f"{relative}/{path.relative_to(folder)}" for path in folder.rglob(f"*{UNFINISHED_SUFFIX}"))

    @contextmanager
    def lock(self, relative: str, *, what: str, timeout_s: float = 600.0, shared: bool = False) -> Generator[None]:
        """Hold a lock among the processes of this machine; many may hold a `shared` one. It ends with its process.

        Object stores have no locks: there two builders do double work, and nothing is corrupted because parts are
        named by their content; `write_pointer` notices the other one.
        """
        if not self.is_local:
            yield
            return
        path = self.path(relative)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "ab") as handle:
            deadline = time.monotonic() + timeout_s
            while not _try_lock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise BusyError(
                        f"{what}: another process has been building it for {timeout_s:.0f} s; one may build it at a "
                        "time; wait for that build or stop it"
                    )
                time.sleep(0.05)
            yield

    @contextmanager
    def indexed(self, folders: Iterable[str], *, own: Iterable[str], copy_path: str = "") -> Generator[bool]:
        """List some folders of a remote root at once, and answer from that while the block runs.

        Only this process writes in `own` ones. Yields whether that happened: not for a local root, and not in a block
        inside another one. A block copies the small files that it used to `copy_path`, for the next one with the same
        path.
        """
        if self.is_local:
            yield False
            return
        with remote_index.open_index(self.root, folders, own, self._list_objects) as index:
            if index.users > 1:
                yield False
                return
            top, folder = self.list(""), copy_path.rpartition("/")[0]
            copied = (self.read_sealed(copy_path) if folder in top else None) or {}
            index.list_all(top, folder, copied.get("listed", 0))
            index.restore_small_files(copied.get("files", {}))
            try:
                yield True
            except GateError:
                # The build has ended, without what is behind a closed gate.
                self._copy_small_files(index, copy_path, copied)
                raise
            self._copy_small_files(index, copy_path, copied)

    def _copy_small_files(self, index: RemoteIndex, path: str, earlier: Mapping[str, Any]) -> None:
        files = index.list_small_files()
        if path and files and files != earlier.get("files"):
            # Without the copy the next build reads the files themselves.
            with suppress(SourceError):
                listed = index.count_files(path.rpartition("/")[0])
                self.write_sealed_list([path], {"listed": listed, "files": files})

    def _list_objects(self, folder: str) -> dict[str, ObjectFacts]:
        base = remote.open_filesystem(self.path(""))[1].rstrip("/")
        at = remote.open_filesystem(self.path(folder))[1]
        found = remote.find_files(self._fs, at, self.address(folder))
        return {
            path.removeprefix(f"{base}/"): ObjectFacts(int(one["size"]), str(one.get("ETag", "")))
            for path, one in found.items()
        }

    def _index_of(self, relative: str) -> RemoteIndex | None:
        return remote_index.find_index(self.root, relative)

    def _fetch(self, relative: str, size_bytes: int = remote.UNKNOWN_SIZE) -> bytes:
        read = partial(remote.read_file, self._fs, size_bytes=size_bytes)
        return self._retry_request("read", read, relative, size_bytes=size_bytes)

    @property
    def _base(self) -> str:
        return self.root.removeprefix("file://").rstrip("/") or "/"

    def address(self, relative: str) -> str:
        """Return the full path or URL of a relative one without secrets, for messages."""
        return public_url(self.path(relative))

    def _retry_request(
        self, action: str, function: Callable[[str], ResultT], relative: str, *, size_bytes: int = remote.UNKNOWN_SIZE
    ) -> ResultT:
        path = self.path(relative)
        return remote.retry_request(
            self._fs, self.address(relative), action, lambda: function(path), size_bytes=size_bytes
        )

    def _put_file(self, path: str, *, write: Callable[[str], Any]) -> Any:
        """Write a file, after making its folder if the storage has real folders; return the storage's answer."""
        try:
            return write(path)
        except FileNotFoundError:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return write(path)

    @property
    def _fs(self) -> Any:
        return remote.open_filesystem(self.root)[0]


@contextmanager
def explain_disk_full(store: Store, what: str) -> Generator[None]:
    """Turn the operating system's error for a full disk into one that names the storage and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS or isinstance(error, PipelineError):
            raise
        raise PipelineError(
            f"{what}: no space left under {store.root} ({os.strerror(error.errno)}); finished files are complete and "
            "kept; free space there, or choose another storage root, and build again"
        ) from error


def _open_new(path: str) -> BinaryIO:
    """Open a file for writing, after making its folder if there is none, and lock it: it has a living writer."""
    while True:
        try:
            handle = open(path, "wb")  # noqa: SIM115  (the caller closes it)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            continue
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle.fileno()).st_nlink:
            return handle
        # It was removed as abandoned before it had its lock.
        handle.close()


def _remove_if_abandoned(path: str) -> bool:
    """Remove an unfinished file unless its writer lives; return whether it was removed."""
    try:
        with open(path.partition(UNFINISHED_SUFFIX)[0] + UNFINISHED_SUFFIX, "rb") as handle:
            if not _try_lock(handle, fcntl.LOCK_EX):
                return False
            os.unlink(path)
    except FileNotFoundError:
        # Its writer finished it, or what is beside it belongs to no file any more.
        if path.endswith(UNFINISHED_SUFFIX) or not os.path.exists(path):
            return False
        os.unlink(path)
    return True


def _sync_path(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _try_lock(handle: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def digest_json(*values: object) -> str:
    """Return a 32-digit hexadecimal BLAKE2b digest of the values' canonical JSON."""
    from rowmill.core.json import canonical_json

    return hashlib.blake2b(canonical_json(list(values)), digest_size=16).hexdigest()


def damaged_file_error(store: Store, file: File, found: str) -> DamagedFileError:
    """Return the error for a stored file that is not what a stage wrote."""
    return DamagedFileError(f"{store.address(file.path)}: {found}; it was written with digest {file.digest}", file.path)


def digest_bytes(content: "bytes | pa.Buffer") -> str:
    """Return the 32-digit hexadecimal BLAKE2b digest of some bytes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digest_file(path: str | Path) -> str:
    """Return the digest of a local file, read in blocks."""
    hasher = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


# ── Many files of a store at once, where each of them is a request ──


ItemT = TypeVar("ItemT")


def map_reads(store: Store, read: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT]:
    """Return what a function reads of the store for each item, in order; concurrently if the store is remote."""
    if store.is_local:
        return [read(item) for item in items]
    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as threads:
        return list(threads.map(read, items))


def read_tables(store: Store, files: Iterable[File], columns: Sequence[str] | None = None) -> list[pa.Table]:
    """Read Parquet files that stages wrote, or some of their columns, each as one table."""
    return map_reads(store, lambda file: store.table(file, columns), files)
