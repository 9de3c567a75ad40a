"""Parts: the pieces that a stage's work is cut into, each made by one function and kept under its fingerprint.

    @dataclass(frozen=True, slots=True)
    class WordInputs(PartInputs):
        rows: File
        language: str

    @part_function(version=1)
    def count_words(inputs: WordInputs, place: PartPlace) -> PartResult:
        table = count(place.store.table(inputs.rows), inputs.language)
        return PartResult({"words": place.write("words", table)}, counts=[WordCounts(words=len(table))])

    parts = context.map(count_words, [WordInputs(file, "en") for file in files]).parts

A part's fingerprint is a digest of its function's name and version and of its inputs, files by their content; whoever
asks for the same part again, in this build or a later one, gets the one that is stored.

    <stage>/parts/<fingerprint>/part.json    one part is complete; written after its files
    <stage>/kept_parts/<function>.json       the records of all parts that a function made; on object stores alone

On an object store a record per part would be a request per part; the list is one. A stage may map a function more than
once: its list then has the parts of all of its maps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from decimal import Decimal
from functools import partial, update_wrapper
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel

from rowmill.core.arrow_files import encode_parquet, encode_table
from rowmill.core.json import Json
from rowmill.core.remote_index import CONCURRENT_REQUESTS
from rowmill.core.storage import File, Store, digest_bytes, digest_json
from rowmill.schema.counts import Counts, CountSet, Details, StoredCounts
from rowmill.schema.manifest import KEPT_PARTS_FOLDER, Part, parse_part


@runtime_checkable
class Identified(Protocol):
    """A value that says itself what decides the content of parts made from it."""

    @property
    def identity(self) -> object:
        """Return what decides the content, of the types that `identify` takes."""
        ...


def identify(value: object) -> Json:
    """Describe a value by what decides a part's content, as JSON: files by digest, arrays and tables by their bytes.

    Of a dataclass these are its fields, except those with `field(compare=False)`.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case File():
            return value.digest
        case Part():
            return value.fingerprint
        case bytes():
            return digest_bytes(value)
        case np.generic():
            return value.item()
        case np.ndarray():
            return [value.dtype.str, list(value.shape), digest_bytes(np.ascontiguousarray(value).tobytes())]
        case pa.Table():
            return digest_bytes(encode_table(value.combine_chunks()))
        case datetime() | Decimal():
            return str(value)
        case BaseModel():
            return value.model_dump(mode="json")
        case Mapping():
            return {str(key): identify(item) for key, item in value.items()}
        case list() | tuple():
            return [identify(item) for item in value]
        case Identified():
            return identify(value.identity)
        case _ if is_dataclass(value):
            return {own.name: identify(getattr(value, own.name)) for own in fields(value) if own.compare}
        case _:
            pass
    raise TypeError(f"{type(value).__name__}: no identity; give it a property `identity`, or set `compare=False`")


def list_files(value: object) -> Iterator[File]:
    """Yield the files among inputs, at any depth of dataclasses and sequences."""
    match value:
        case File():
            yield value
        case list() | tuple():
            for item in value:
                yield from list_files(item)
        case _ if is_dataclass(value):
            for own in fields(value):
                yield from list_files(getattr(value, own.name))
        case _:
            pass


@dataclass(frozen=True, slots=True)
class PartInputs:
    """Base of the inputs of parts; every field decides the part's content, except those with `field(compare=False)`."""

    @property
    def input_rows(self) -> int:
        """Rows that are read, for progress; auxiliary parts count none."""
        return 0

    @property
    def input_bytes(self) -> int:
        """About how many bytes are read, which decides how many processes are worth their start."""
        return sum(file.bytes for file in list_files(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFileInputs(PartInputs):
    """Base of the inputs of a part that is made from the rows of one file."""

    rows: File

    @property
    def input_rows(self) -> int:
        return self.rows.rows

    @property
    def input_bytes(self) -> int:
        """About the size of the rows' text, of which the file has a quarter."""
        return 4 * self.rows.bytes


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where a part is written: the store, the stage's folder, and the part's fingerprint."""

    store: Store
    stage_folder: str
    fingerprint: str
    threads: int = 1
    """Threads that the function may use, more than one only if it declares that it `uses_threads`."""

    @property
    def folder(self) -> str:
        return part_folder(self.stage_folder, self.fingerprint)

    def write(self, name: str, table: pa.Table) -> File:
        """Write a table that only stages read, atomically, as the Arrow file of this name."""
        return self.write_bytes(f"{name}.arrow", encode_table(table), table.num_rows)

    def write_parquet(self, name: str, table: pa.Table) -> File:
        """Write a table that other programs read, too, atomically, as the Parquet file of this name."""
        return self.write_bytes(f"{name}.parquet", encode_parquet(table), table.num_rows)

    def write_bytes(self, name: str, content: bytes, rows: int = 0) -> File:
        """Write a file of the part atomically."""
        return self.store.put(f"{self.folder}/{name}", content, rows)


@dataclass(frozen=True, slots=True)
class PartResult:
    """What a function made: the part's files by name, its counts, and what describes it alone."""

    files: dict[str, File]
    counts: Sequence[Counts] = ()
    details: Sequence[Details] = ()
    kept_details: StoredCounts = field(default_factory=StoredCounts)
    """The details of a part that this one is made from, which are its own, too."""


def write_table(store: Store, path: str, table: pa.Table) -> File:
    """Write a table that only stages read, atomically, as an Arrow file."""
    return store.put(path, encode_table(table), table.num_rows)


def write_parquet(store: Store, path: str, table: pa.Table) -> File:
    """Write a table that other programs read, too, atomically."""
    return store.put(path, encode_parquet(table), table.num_rows)


# ── Functions that make parts ──────────────────────────────────────────────────────────────────────


InputsT = TypeVar("InputsT", bound=PartInputs)


@dataclass(eq=False)
class PartFunction(Generic[InputsT]):
    """A function that makes one part from its inputs, or many at once; see `part_function`."""

    function: Callable[..., Any]
    version: int
    makes_many: bool
    is_reusable: Callable[[Part], bool]
    uses_threads: bool

    @property
    def name(self) -> str:
        """The function's name, which is part of its parts' identities."""
        return self.function.__name__

    def __reduce__(self) -> str:
        """Pickle as a function is: by its name in its module."""
        return self.function.__qualname__

    def identify(self, inputs: InputsT) -> str:
        """Return the fingerprint of the part that is made from some inputs."""
        return digest_json(self.name, self.version, identify(inputs))

    def make(self, inputs: InputsT, store: Store, stage_folder: str) -> Part:
        """Make a part in this process, without asking whether it exists, and without recording that it does."""
        [part] = self.make_parts([(inputs, PartPlace(store, stage_folder, self.identify(inputs)))])
        return part

    def make_parts(self, tasks: Sequence[tuple[InputsT, PartPlace]], *shared: object) -> list[Part]:
        """Make parts in this process; `shared` is handed to the function of each."""
        if self.makes_many:
            contents = self.function(tasks)
        else:
            contents = (self.function(inputs, place, *shared) for inputs, place in tasks)
        return [
            Part(
                place.fingerprint,
                content.files,
                CountSet.of(*content.counts).to_json(),
                content.kept_details | {type(one).__name__: one.to_json() for one in content.details},
            )
            for (_, place), content in zip(tasks, contents, strict=True)
        ]


def part_function(
    *,
    version: int,
    makes_many: bool = False,
    is_reusable: Callable[[Part], bool] = lambda _: True,
    uses_threads: bool = False,
) -> Callable[[Callable[..., Any]], PartFunction[Any]]:
    """Declare a module's function of `PartInputs` and a `PartPlace` as one that makes parts.

    `version` is increased when the same inputs may give other content, unless they hold the digest of a stage's
    identity: then the `VERSION` of the stage is, which is in that. A function that `makes_many`, because a small
    part has a fixed cost, gets a list of pairs of inputs and places, and returns as many contents. Later builds make a
    part again that is not `is_reusable`, a function of the module. A function that `uses_threads`, one of few and large
    parts, gets the largest first, and in `place.threads` the cores for which there is no part.
    """

    def declare(function: Callable[..., Any]) -> PartFunction[Any]:
        declared = PartFunction[Any](function, version, makes_many, is_reusable, uses_threads)
        return update_wrapper(declared, function)  # type: ignore[return-value]

    return declare


def make_and_keep(
    function: PartFunction[InputsT], tasks: Sequence[tuple[InputsT, PartPlace]], *shared: object
) -> list[Part]:
    """Make parts in this process, and record that those are complete that later builds may reuse."""
    parts = function.make_parts(tasks, *shared)
    for (_, place), part in zip(tasks, parts, strict=True):
        if function.is_reusable(part):
            save_kept_part(place.store, place.stage_folder, part)
    return parts


@dataclass(frozen=True, slots=True)
class MappedParts:
    """The parts of a map in the order of their inputs: how many are reused, and the rows read for the others."""

    parts: list[Part]
    reused: int
    rows_made: int


BATCH_BYTES = 4 << 20
"""Maximum size of the parts that are made together: their fixed cost is then small, and so is the memory."""


def batch_tasks(tasks: Sequence[tuple[InputsT, PartPlace]], workers: int) -> list[list[tuple[InputsT, PartPlace]]]:
    """Return tasks in batches of at most `BATCH_BYTES`, and smaller ones if each worker would get fewer than 4."""
    sizes = [inputs.input_bytes for inputs, _ in tasks]
    limit = min(BATCH_BYTES, sum(sizes) // (4 * workers))
    batches: list[list[tuple[InputsT, PartPlace]]] = []
    total = 0
    for task, size in zip(tasks, sizes, strict=True):
        if not batches or total + size > limit:
            batches.append([])
            total = 0
        batches[-1].append(task)
        total += size
    return batches


# ── Finished parts, which later builds find under their fingerprints ───────────────────────────────


def part_folder(stage_folder: str, fingerprint: str) -> str:
    """Return the folder of a part's files."""
    return f"{stage_folder}/parts/{fingerprint}"


def load_kept_part(store: Store, stage_folder: str, fingerprint: str) -> Part | None:
    """Return a part that an earlier build finished, even if that build was killed later."""
    raw = store.read_sealed(f"{part_folder(stage_folder, fingerprint)}/part.json")
    part = None if raw is None else parse_part(raw)
    return part if part is not None and all(store.has(file) for file in part.files.values()) else None


def save_kept_part(store: Store, stage_folder: str, part: Part) -> None:
    """Record that a part is complete; written after its files."""
    store.write_sealed(f"{part_folder(stage_folder, part.fingerprint)}/part.json", part)


@dataclass(slots=True)
class _PartList:
    """The parts of a function: those listed when the run began, those of the run, and what the list names now."""

    earlier: Mapping[str, Part]
    current: dict[str, Part] = field(default_factory=dict[str, Part])
    written: frozenset[str] = frozenset()


class PartLists:
    """The lists of finished parts of a stage, one per function, for the length of one run of the stage."""

    def __init__(self) -> None:
        self._lists: dict[str, _PartList] = {}

    def find_parts(self, store: Store, folder: str, function: str, fingerprints: Sequence[str]) -> dict[str, Part]:
        """Return the finished parts among some, by fingerprint; on an object store from the list of the last build."""
        if store.is_local:
            loaded = [load_kept_part(store, folder, name) for name in fingerprints]
            return {part.fingerprint: part for part in loaded if part is not None}
        earlier = self._open(store, folder, function).earlier
        found = {
            name: earlier[name]
            for name in fingerprints
            if name in earlier and all(store.has(file) for file in earlier[name].files.values())
        }
        others = [name for name in dict.fromkeys(fingerprints) if name not in found]
        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as threads:
            loaded = list(threads.map(partial(load_kept_part, store, folder), others))
        return found | {part.fingerprint: part for part in loaded if part is not None}

    def add_parts(self, store: Store, folder: str, function: str, parts: Iterable[Part]) -> None:
        """Have the list name these parts and those of the run's other maps, so that the next build reads it alone."""
        if store.is_local:
            return
        own = self._open(store, folder, function)
        own.current |= {part.fingerprint: part for part in parts}
        if not own.current.keys() <= own.written:
            store.write_sealed_list([_list_path(folder, function)], {"parts": own.current})
            own.written = frozenset(own.current)

    def _open(self, store: Store, folder: str, function: str) -> _PartList:
        if function not in self._lists:
            raw = store.read_sealed(_list_path(folder, function)) or {}
            earlier = {str(name): parse_part(one) for name, one in raw.get("parts", {}).items()}
            self._lists[function] = _PartList(earlier, written=frozenset(earlier))
        return self._lists[function]


def _list_path(folder: str, function: str) -> str:
    return f"{folder}/{KEPT_PARTS_FOLDER}/{function}.json"


# ── The shuffle: lines of all parts that must meet, such as equal hashes, brought together bucket by bucket ──


#     parts ─► blocks of consecutive parts ─► a file per block and bucket ─► one task per bucket, over all blocks
#
# A task holds the lines of one block, or those of one bucket, so memory does not grow with the dataset; the calling
# process holds none. Appended parts change the last block only, and the files of the others are reused. A small dataset
# is one block and one bucket.

MAX_BUCKETS = 256


def cut_blocks(sizes: Sequence[int], limit: int) -> list[range]:
    """Cut parts into blocks of at most `limit` lines, or one part; return the numbers of each block's parts."""
    blocks: list[range] = []
    first, total = 0, 0
    for number, size in enumerate(sizes):
        total += size
        if total > limit and number > first:
            blocks.append(range(first, number))
            first, total = number, size
    return [*blocks, range(first, len(sizes))]


def count_buckets(blocks: int) -> int:
    """Return as many buckets as blocks, so that one is about as large as the other: a power of two."""
    return min(1 << (blocks - 1).bit_length(), MAX_BUCKETS)


def choose_buckets(first_bytes: NDArray[np.uint8], buckets: int) -> NDArray[np.int64]:
    """Return the bucket of each line, uint8[N] → int64[N], from the first bits of its hash."""
    return (first_bytes.astype(np.int64) * buckets) >> 8


def write_buckets(place: PartPlace, lines: pa.Table, of_bucket: NDArray[np.int64], buckets: int) -> dict[str, File]:
    """Write lines in a file per bucket that has any, in their order, named by its number."""
    order = np.argsort(of_bucket, kind="stable")
    borders = np.searchsorted(of_bucket[order], np.arange(buckets + 1))
    return {
        str(bucket): place.write(f"bucket-{bucket:03d}", lines.take(pa.array(order[begin:end])))
        for bucket, (begin, end) in enumerate(pairwise(borders.tolist()))
        if begin < end
    }


@dataclass(frozen=True, slots=True)
class BlockLines:
    """The lines of one block in one bucket; `block` is its number."""

    block: int
    lines: File


def collect_buckets(blocks: Sequence[Part]) -> list[tuple[int, tuple[BlockLines, ...]]]:
    """Return each bucket that has lines, by number, with its file of every block that has some."""
    names = sorted({int(name) for block in blocks for name in block.files})
    return [
        (
            name,
            tuple(
                BlockLines(number, block.files[str(name)])
                for number, block in enumerate(blocks)
                if str(name) in block.files
            ),
        )
        for name in names
    ]
