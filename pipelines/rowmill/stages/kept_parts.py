"""Finished parts of a stage, which later builds find under their fingerprints.

    <stage>/parts/<fingerprint>/part.json    one part is complete; written after its files
    <stage>/kept_parts/<function>.json       the records of all parts that a function made; on object stores alone

On an object store a record per part would be a request per part; the list is one. A stage may map a function more than
once: its list then has the parts of all of its maps.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from rowmill.core.remote_index import CONCURRENT_REQUESTS
from rowmill.core.storage import Store
from rowmill.schema.manifest import KEPT_PARTS_FOLDER, Part, parse_part


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
        """Begin with no list; each is read when it is first asked for."""
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
