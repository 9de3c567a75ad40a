"""The manifest of a stage's output, through which every other stage reads it.

The manifest is written last, by one atomic rename: if it exists, every file it names is complete. It is found by
*fingerprint* (of the inputs: memoization) and by *version* (of the output: Dagster's data version). Two fingerprints
may lead to one version; that is how an upstream rebuild that changed nothing stops there:

    tokenized_examples 7c… (version t1) ──► truncation_stats 1a… (version s)   lengths are the same,
    tokenized_examples e2… (version t2) ──► truncation_stats 90… (version s)   masks are not

So a version says what an output holds, and only a fingerprint what it was made from: `load_inputs` goes from an output
to its inputs by their fingerprints. A manifest is kept twice, as `manifests/<fingerprint>.json` and as
`versions/<version>-<fingerprint>.json`; the other copy answers for a damaged one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from rowmill.core.errors import BusyError, DamagedFileError, IntegrityError
from rowmill.core.json import parse_sealed
from rowmill.core.stage_names import EXPORTS
from rowmill.core.storage import File, Store, digest_json
from rowmill.schema.counts import Counts, CountSet, CountsT, DetailsT, StoredCounts, find_stored

StageKey: TypeAlias = tuple[str, ...]
"""`(recipe, dataset, stage)`, `(recipe, stage)` for the stages of a whole recipe, `(recipe, "exports", name)`."""

KEPT_PARTS_FOLDER = "kept_parts"
"""Folder of a stage's lists of finished parts, which spare an object store a request per part."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a stage's output with its own fingerprint; `counts` add up over parts, `details` describe it."""

    fingerprint: str
    files: dict[str, File]
    counts: StoredCounts = field(default_factory=StoredCounts)
    details: StoredCounts = field(default_factory=StoredCounts)

    def find_counts(self, kind: type[CountsT]) -> CountsT | None:
        """Return its counts of a class; None if it has none."""
        return find_stored(self.counts, kind)

    def find_details(self, kind: type[DetailsT]) -> DetailsT | None:
        """Return its details of a class; None if it has none."""
        return find_stored(self.details, kind)

    def get_details(self, kind: type[DetailsT]) -> DetailsT:
        """Return its details of a class; raises KeyError if it has none."""
        return kind.parse(self.details[kind.__name__])

    def get_counts(self, kind: type[CountsT]) -> CountsT:
        """Return its counts of a class; empty ones if it has none."""
        return self.find_counts(kind) or kind()


def add_up_counts(parts: Iterable[Part], *further: Counts) -> CountSet:
    """Return the counts of all parts, class by class, and further ones; empty ones say that a class is counted."""
    of_parts = (Counts.CLASSES[name].parse(own) for part in parts for name, own in part.counts.items())
    return CountSet.of(*further, *of_parts)


@dataclass(frozen=True, slots=True)
class DisplayTable:
    """A small table for people: column names and at most a few dozen rows."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts over bins; bin i covers `[edges[i], edges[i + 1])`; `limit` is marked in the plot."""

    title: str
    unit: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """One stage's output.

    `counts` are the sums of those of its parts, `values` the numbers that were computed from them: by check, None where
    it has nothing to ask, and what else follows. `ledger` lines are `(state, reason, records)`; `token_ledger` lines
    `(split, class, tokens)`; `samples` are at most ten row ids per check, for inspection.
    """

    key: StageKey
    stage: str
    fingerprint: str
    code_version: str
    inputs: dict[str, str]
    """The version of each input, by the name of its stage."""
    parts: tuple[Part, ...]
    values: dict[str, Any]
    counts: StoredCounts = field(default_factory=StoredCounts)
    version: str = ""
    input_fingerprints: dict[str, str] = field(default_factory=dict[str, str])
    """The fingerprint of each input, by the same names: which of several outputs of equal content it was."""
    ledger: tuple[tuple[str, str, int], ...] = ()
    token_ledger: tuple[tuple[str, str, int], ...] = ()
    tables: dict[str, DisplayTable] = field(default_factory=dict[str, DisplayTable])
    histograms: dict[str, Histogram] = field(default_factory=dict[str, Histogram])
    samples: dict[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])
    schema: tuple[tuple[str, str], ...] = ()
    card: dict[str, Any] = field(default_factory=dict[str, Any])
    waivers: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    """Data for later stages only: scans of source files, offsets, plan shapes."""
    built_at: str = ""
    run_id: str = ""
    seconds: float = 0.0

    @property
    def facts(self) -> dict[str, Any]:
        """Counts and values by name, for those who read them by name: pages, queries, a recipe's expectations."""
        return {name: count for own in self.counts.values() for name, count in own.items()} | self.values

    def find_counts(self, kind: type[CountsT]) -> CountsT | None:
        """Return its counts of a class; None if nothing counted them."""
        return find_stored(self.counts, kind)

    def get_counts(self, kind: type[CountsT]) -> CountsT:
        """Return its counts of a class; empty ones if nothing counted them."""
        return self.find_counts(kind) or kind()

    @property
    def origin(self) -> tuple[str, dict[str, str]]:
        """What it was made from: its fingerprint, and those of its inputs."""
        return self.fingerprint, self.input_fingerprints

    def content_digest(self) -> str:
        """Return the version: a digest of the output, independent of times, runs and fingerprints."""
        files = [[[name, f.digest] for name, f in sorted(part.files.items())] for part in self.parts]
        return digest_json(self.stage, files, self.ledger, self.token_ledger, self.facts, self.card, self.waivers)

    def files(self, name: str) -> list[File]:
        """Return the files called `name` of all parts, in part order."""
        return [part.files[name] for part in self.parts if name in part.files]


def get_stage_name(key: StageKey) -> str:
    """Return the stage of a key: its last part, or the second of `(recipe, exports, name)`."""
    return EXPORTS if key[1] == EXPORTS else key[-1]


def get_stage_folder(key: StageKey) -> str:
    """Return the folder of a stage, relative to the storage root."""
    return "/".join(key)


def save_manifest(store: Store, manifest: Manifest) -> Manifest:
    """Write a manifest under its fingerprint and its version, then point `pointer.json` at it.

    All files that it names are synced to disk first. Returns the manifest with `version` set.
    """
    complete = replace(manifest, version=manifest.content_digest())
    store.sync(file.path for part in complete.parts for file in part.files.values())
    _write_copies(store, complete)
    _write_pointer(store, complete)
    return complete


def _list_copies(key: StageKey, version: str, fingerprint: str) -> list[str]:
    """Return the paths under which a manifest is kept; either copy is enough."""
    at = get_stage_folder(key)
    return [f"{at}/versions/{version}-{fingerprint}.json", f"{at}/manifests/{fingerprint}.json"]


def _write_copies(store: Store, manifest: Manifest) -> None:
    written = _list_copies(manifest.key, manifest.version, manifest.fingerprint)
    store.write_sealed_list(written, manifest)
    store.sync(written)


def make_current(store: Store, manifest: Manifest, inputs: Mapping[StageKey, Manifest] | None = None) -> Manifest:
    """Make a kept output the current one, which readers get by default; return it.

    `inputs` are what the build that reuses it would have read: of equal content, and perhaps made from something else
    than those that the output was made from. Its manifest names them from now on, so that its ancestors are theirs.
    """
    now = {"/".join(key): one.fingerprint for key, one in (inputs or {}).items()}
    if inputs is not None and now != manifest.input_fingerprints:
        manifest = replace(manifest, input_fingerprints=now)
        _write_copies(store, manifest)
    else:
        for path in _list_copies(manifest.key, manifest.version, manifest.fingerprint)[:1]:
            if store.recall_sealed(path, _parse_manifest) is None:
                # It was damaged, but the other copy is intact.
                store.write_sealed_list([path], manifest)
    _write_pointer(store, manifest)
    return manifest


def _write_pointer(store: Store, manifest: Manifest) -> None:
    pointer = {"version": manifest.version, "fingerprint": manifest.fingerprint}
    path = f"{get_stage_folder(manifest.key)}/pointer.json"
    if store.recall_sealed(path) == pointer:
        return
    current = store.write_pointer(path, pointer)
    if current is not None and current.get("version") != manifest.version:
        change = f"made version {str(current['version'])[:12]} current" if current else "removed the current version"
        raise BusyError(
            f"{'/'.join(manifest.key)}: another build has {change} since this one began; one may build a recipe at a "
            "time; this one's output is kept; wait for the other, and build again"
        )


def remove_output(store: Store, manifest: Manifest) -> None:
    """Remove an output's manifest, its parts' completion records and its pointers; the files are left for `gc`."""
    at = get_stage_folder(manifest.key)
    pointer = store.read_sealed(f"{at}/pointer.json")
    if pointer is None or pointer["version"] == manifest.version:
        for name in ("pointer.json", "current.json"):
            store.remove(f"{at}/{name}")
    store.remove(f"{at}/{KEPT_PARTS_FOLDER}")
    for part in manifest.parts:
        store.remove(f"{at}/parts/{part.fingerprint}/part.json")
    for path in reversed(_list_copies(manifest.key, manifest.version, manifest.fingerprint)):
        store.remove(path)


def find_by_fingerprint(store: Store, key: StageKey, fingerprint: str) -> Manifest | None:
    """Return the manifest of an earlier build with the same fingerprint, if all its files still exist."""
    current = load_current_if_intact(store, key)
    is_current = current is not None and current.fingerprint == fingerprint
    manifest = current if is_current else read_manifest(store, f"{get_stage_folder(key)}/manifests/{fingerprint}.json")
    if manifest is None:
        return None
    return manifest if all(store.has(file) for part in manifest.parts for file in part.files.values()) else None


def load_output(store: Store, key: StageKey, version: str, fingerprint: str) -> Manifest:
    """Return one kept output of a stage; IntegrityError if it was removed by gc, or both of its copies are damaged."""
    paths = _list_copies(key, version, fingerprint)
    loaded = next((made for path in paths if (made := read_manifest(store, path)) is not None), None)
    if loaded is None:
        raise _make_missing_error(store, key, version, paths)
    return loaded


def load_version(store: Store, key: StageKey, version: str | None) -> Manifest:
    """Return a kept version of a stage's output; IntegrityError if it is unknown or was removed by gc.

    Of several outputs of this content it is the current one, or else the one that was made last. What an output was
    made from is found by `load_inputs` instead.
    """
    if version is None:
        raise IntegrityError(
            f"{'/'.join(key)}: it was never built; what reads its output needs a version of it; build it first"
        )
    pointer = store.recall_sealed(f"{get_stage_folder(key)}/pointer.json")
    if pointer is not None and pointer["version"] == version:
        return load_output(store, key, version, pointer["fingerprint"])
    names = [name for name in store.list(f"{get_stage_folder(key)}/versions") if name.startswith(f"{version}-")]
    made = [one for name in names if (one := _read_listed(store, key, name)) is not None]
    if not made:
        raise _make_missing_error(store, key, version, [f"{get_stage_folder(key)}/versions/{name}" for name in names])
    return max(made, key=_order_by_time)


def _make_missing_error(store: Store, key: StageKey, version: str, paths: Sequence[str]) -> IntegrityError:
    name, remedy = "/".join(key), "build it, or choose another version"
    damaged = next((path for path in paths if store.exists(path)), None)
    if damaged is not None:
        return DamagedFileError(
            f"{name}: {store.path(damaged)} is damaged or was edited; expected a kept version", damaged, remedy
        )
    return IntegrityError(f"{name}: version {version} is not kept; expected a kept version; {remedy}")


def parse_stage_key(name: str) -> StageKey:
    """Return the key that `Manifest.inputs` names."""
    return tuple(name.split("/"))


def load_input(store: Store, output: Manifest, key: StageKey) -> Manifest:
    """Return the input of an output that is of a stage; IntegrityError if it was removed, or the output has none."""
    name = "/".join(key)
    version, fingerprint = output.inputs.get(name), output.input_fingerprints.get(name)
    if version is None or fingerprint is None:
        return load_version(store, key, version)
    return load_output(store, key, version, fingerprint)


def load_inputs(store: Store, output: Manifest) -> dict[StageKey, Manifest]:
    """Return the inputs of an output, by what its manifest names; IntegrityError if one was removed."""
    return {key: load_input(store, output, key) for key in map(parse_stage_key, output.inputs)}


def load_current(store: Store, key: StageKey) -> Manifest | None:
    """Return the current manifest of a stage, or None if it was never built."""
    pointer = store.recall_sealed(f"{get_stage_folder(key)}/pointer.json")
    return None if pointer is None else load_output(store, key, pointer["version"], pointer["fingerprint"])


def is_current(store: Store, manifest: Manifest) -> bool:
    """Return whether a manifest is the current one of its stage, by the pointer alone."""
    pointer = store.recall_sealed(f"{get_stage_folder(manifest.key)}/pointer.json")
    return pointer is not None and pointer["fingerprint"] == manifest.fingerprint


def prefetch_current(store: Store, keys: Iterable[StageKey]) -> dict[StageKey, str]:
    """Read pointers and current manifests of some stages at once; return the current versions."""
    paths = {key: f"{get_stage_folder(key)}/pointer.json" for key in keys}
    store.prefetch(paths.values())
    found = {key: pointer for key, path in paths.items() if (pointer := store.recall_sealed(path)) is not None}
    store.prefetch(_list_copies(key, one["version"], one["fingerprint"])[0] for key, one in found.items())
    return {key: str(pointer["version"]) for key, pointer in found.items()}


def load_current_if_intact(store: Store, key: StageKey) -> Manifest | None:
    """Return the current manifest for optional use, such as reuse; None also if it is damaged or was removed by gc.

    Rebuilding an output must not fail because of the output that it replaces.
    """
    try:
        return load_current(store, key)
    except IntegrityError:
        return None


def list_outputs(store: Store, key: StageKey) -> list[Manifest]:
    """Return all kept outputs with an intact manifest, oldest first; several may be the same version."""
    names = store.list(f"{get_stage_folder(key)}/versions")
    return sorted((made for name in names if (made := _read_listed(store, key, name)) is not None), key=_order_by_time)


def list_versions(store: Store, key: StageKey) -> list[Manifest]:
    """Return the newest kept output of each version, oldest first."""
    return select_newest(list_outputs(store, key))


def select_newest(outputs: Iterable[Manifest]) -> list[Manifest]:
    """Return the last output of each version, oldest first; `outputs` are in that order."""
    return sorted({output.version: output for output in outputs}.values(), key=_order_by_time)


def _order_by_time(manifest: Manifest) -> tuple[str, str, str]:
    return manifest.built_at, manifest.version, manifest.fingerprint


def _read_listed(store: Store, key: StageKey, name: str) -> Manifest | None:
    """Return the output of a file name in `versions/`; None if both of its copies are damaged."""
    version, _, fingerprint = name.removesuffix(".json").partition("-")
    paths = _list_copies(key, version, fingerprint)
    return next((made for path in paths if (made := read_manifest(store, path)) is not None), None)


def verify_files(store: Store, manifest: Manifest) -> None:
    """Read every file of a manifest and compare digests; `DamagedFileError` names the first bad one."""
    for part in manifest.parts:
        for file in part.files.values():
            store.content(file)


def read_manifest(store: Store, path: str) -> Manifest | None:
    """Return a manifest; None if it is missing, damaged or edited. It is shared with others who read it."""
    return store.recall_sealed(path, _parse_manifest)


def _parse_manifest(content: bytes) -> Manifest | None:
    raw = parse_sealed(content)
    if raw is None:
        return None
    raw["key"] = tuple(raw["key"])
    raw["parts"] = tuple(parse_part(part) for part in raw["parts"])
    raw["ledger"] = tuple((str(s), str(r), int(n)) for s, r, n in raw["ledger"])
    raw["token_ledger"] = tuple((str(s), str(c), int(n)) for s, c, n in raw["token_ledger"])
    raw["tables"] = {
        name: DisplayTable(columns=tuple(t["columns"]), rows=tuple(tuple(r) for r in t["rows"]))
        for name, t in raw["tables"].items()
    }
    for histogram in raw["histograms"].values():
        histogram |= {"edges": tuple(histogram["edges"]), "counts": tuple(histogram["counts"])}
    raw["histograms"] = {name: Histogram(**histogram) for name, histogram in raw["histograms"].items()}
    raw["samples"] = {check: tuple(ids) for check, ids in raw["samples"].items()}
    raw["schema"] = tuple((str(n), str(t)) for n, t in raw["schema"])
    raw["waivers"] = tuple(raw["waivers"])
    return Manifest(**raw)


def parse_part(raw: Mapping[str, Any]) -> Part:
    """Rebuild a part from its JSON mapping."""
    return Part(
        fingerprint=raw["fingerprint"],
        files={name: File(**file) for name, file in raw["files"].items()},
        counts=dict(raw["counts"]),
        details=dict(raw["details"]),
    )
