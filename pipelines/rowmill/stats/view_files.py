"""The file system in which DuckDB finds the files of a view, when a query refers to the view and not before.

DuckDB searches for a view's files when the view is made and in every query of it. On an object store its own search
takes a request for each folder and several for each file: 1,900 for the views of one small recipe. Here a view names a
pattern, which is answered from one listing by the store:

    rowmill://history/<table>            files of all kept versions
    rowmill://current/<table>            files of the versions that the newest pointers name
    rowmill://current/_current           the newest pointer of each stage

The last match of every pattern is an empty file with the table's columns, in memory: a view has all its columns
whatever the stored files have. While views are made, it is the only match. Files of a local root are returned by their
paths, and DuckDB reads them itself. Those on an object store are read here, and only if they were listed.

Pointers are listed before the tables, as `set_current_versions` wants it: every version that a listed pointer names was
written before the tables are listed.
"""

import io
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import PurePosixPath
from threading import Lock
from typing import Any, BinaryIO, TypeVar

from fsspec import AbstractFileSystem

from rowmill.core.errors import IntegrityError, PipelineError
from rowmill.core.remote_index import ObjectFacts
from rowmill.core.storage import Store, map_reads
from rowmill.stats.tables import POINTERS, SCHEMAS, encode_empty_table

ResultT = TypeVar("ResultT")

PROTOCOL = "rowmill"

WHOLE_FILE_BYTES = 4 << 20
"""Size up to which a file is read with one request; of a larger one DuckDB reads the columns that it needs."""
KEPT_VIEW_BYTES = 64 << 20
"""Bytes of whole files that are kept between queries, as far as the storage tells when they change."""


class ViewFiles(AbstractFileSystem):
    """The statistics of one recipe or of all, and of some versions or all, for the threads of one DuckDB engine."""

    protocol = PROTOCOL
    cachable = False
    """Each engine has its own listings."""

    def __init__(self, store: Store, recipe: str | None = None, versions: Collection[str] | None = None) -> None:
        super().__init__()
        self._store, self._recipe, self._versions = store, recipe, versions
        self._failure: PipelineError | None = None
        self._lock = Lock()
        self._is_listing = False
        self._listings: dict[str, Mapping[str, ObjectFacts]] = {}
        self._facts: dict[str, ObjectFacts] = {}
        self._whole: dict[str, tuple[ObjectFacts, bytes]] = {}
        self._pointed: dict[str, frozenset[str]] = {}
        self._empty = {_format_empty_path(table): encode_empty_table(table) for table in (*SCHEMAS, POINTERS)}

    def list_again(self) -> None:
        """Have the next query find the files of that moment; before the first call no stored file is found."""
        self._listings = {}
        self._is_listing = True

    def pop_failure(self, message: str) -> PipelineError | None:
        """Return the store's error that a message of DuckDB quotes, and forget it.

        An engine keeps its file system alive, and the error's traceback the engine.
        """
        failure, self._failure = self._failure, None
        return failure if failure is not None and str(failure) in message else None

    def glob(self, path: str, **options: Any) -> list[str]:
        """Return the files that the pattern of a view matches."""
        del options
        group, _, table = path.removeprefix(f"{PROTOCOL}://").partition("/")
        empty = _format_empty_path(table)
        if group not in ("history", "current") or empty not in self._empty:
            return []
        found = self._note_failure(self._find_files, group, table) if self._is_listing else []
        if self._store.is_local:
            return [*(self._store.path(file) for file in found), empty]
        return [*(f"{PROTOCOL}://{file}" for file in found), empty]

    def _find_files(self, group: str, table: str) -> list[str]:
        # One thread at a time: what another one lists for its query may be older than this query's pointers.
        with self._lock:
            listings = self._listings
            if group == "history":
                return [file for file in self._list(listings, table) if self._is_shown(file)]
            if POINTERS not in listings:
                # The tables are listed after the pointers.
                listings = self._listings = {}
            # Names sort like their stamps.
            newest = {str(PurePosixPath(file).parent): file for file in self._list(listings, POINTERS)}
            if table == POINTERS:
                return [*newest.values()]
            unknown = [file for file in newest.values() if file not in self._pointed]
            # A pointer never changes.
            self._pointed |= dict(zip(unknown, map_reads(self._store, self._read_pointer, unknown), strict=True))
            current = {
                (_find_value(file, "recipe"), _find_value(file, "scope"), version)
                for file in newest.values()
                for version in self._pointed[file]
            }
            return [
                file
                for file in self._list(listings, table)
                if tuple(_find_value(file, key) for key in ("recipe", "scope", "version")) in current
                and self._is_shown(file)
            ]

    def _note_failure(self, function: Callable[..., ResultT], *values: str) -> ResultT:
        try:
            return function(*values)
        except FileNotFoundError:
            self._failure = IntegrityError(
                f"{self._store.address(values[-1])}: removed since the query began; expected a version that "
                "`rowmill gc` keeps; run the query again"
            )
            raise self._failure from None
        except PipelineError as error:
            self._failure = error
            raise

    def _is_shown(self, file: str) -> bool:
        return self._versions is None or _find_value(file, "version") in self._versions

    def _list(self, listings: dict[str, Mapping[str, ObjectFacts]], table: str) -> Mapping[str, ObjectFacts]:
        """Return the facts of a table's files, by path, in order."""
        if table not in listings:
            folder = f"stats/{table}" if self._recipe is None else f"stats/{table}/recipe={self._recipe}"
            found = self._store.list_files(folder)
            listings[table] = {file: facts for file, facts in found.items() if file.endswith(".parquet")}
            self._facts |= listings[table]
        return listings[table]

    def _read_pointer(self, file: str) -> frozenset[str]:
        [versions] = self._store.unchecked_table(file, ["versions"])["versions"].to_pylist()
        return frozenset(versions)

    # ── What DuckDB asks about a file of an object store ──

    def open(self, path: str, mode: str = "rb", **options: Any) -> BinaryIO:
        """Open a listed file for reading."""
        del options
        if mode != "rb":
            raise PermissionError(f"{path}: the statistics are only read")
        if path in self._empty:
            return io.BytesIO(self._empty[path])
        file, facts = path.removeprefix(f"{PROTOCOL}://"), self._get_facts(path)
        if facts.size_bytes > WHOLE_FILE_BYTES:
            return self._note_failure(self._store.open, file)
        known, content = self._whole.get(file, (None, b""))
        if known != facts or not facts.tag:
            content = self._note_failure(self._store.read, file)
            if sum(len(kept) for _, kept in self._whole.values()) > KEPT_VIEW_BYTES:
                self._whole = {}
            self._whole[file] = facts, content
        return io.BytesIO(content)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return the size of a listed file in bytes."""
        del options
        size = len(self._empty[path]) if path in self._empty else self._get_facts(path).size_bytes
        return {"name": path, "size": size, "type": "file"}

    def _get_facts(self, path: str) -> ObjectFacts:
        facts = self._facts.get(path.removeprefix(f"{PROTOCOL}://"))
        if facts is None:
            raise FileNotFoundError(f"{path}: not a file of the statistics")
        return facts

    def modified(self, path: str) -> datetime:
        """Return the same time for every file: the engine keeps no content."""
        del path
        return datetime(1970, 1, 1, tzinfo=UTC)

    def unstrip_protocol(self, name: str) -> str:
        """Return a path as `glob` returned it: paths of a local root have no protocol."""
        return name


def _format_empty_path(table: str) -> str:
    last = "stage=_" if table == POINTERS else "version=_"
    return f"{PROTOCOL}://empty/{table}/recipe=_/scope=_/{last}/part-0.parquet"


def _find_value(file: str, key: str) -> str:
    """Return the value of a partition's key in a path."""
    return file.partition(f"/{key}=")[2].partition("/")[0]
