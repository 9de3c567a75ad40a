"""The manifest of a stage's output, through which every other stage reads it.

The manifest is written last, by one atomic rename: if it exists, every file it names is complete. It is found by
*fingerprint* (of the inputs: memoization) and by *version* (of the output: Dagster's data version). Two fingerprints
may lead to one version; that is how an upstream rebuild that changed nothing stops there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from rowmill.core.errors import BusyError, DamagedFileError, IntegrityError
from rowmill.core.stage_names import EXPORTS
from rowmill.core.storage import File, Store, digest_json

StageKey: TypeAlias = tuple[str, ...]
"""`(recipe, dataset, stage)`, `(recipe, stage)` for the stages of a whole recipe, `(recipe, "exports", name)`."""

KEPT_PARTS_FOLDER = "kept_parts"
"""Folder of a stage's lists of finished parts, which spare an object store a request per part."""

NOT_APPLICABLE = "not_applicable"
"""The value of a fact that does not apply to the data, such as one about a table's chat template.

No number can express this: 0 would claim a successful measurement.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a stage's output with its own fingerprint; `facts` are counts that add up over parts."""

    fingerprint: str
    files: dict[str, File]
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


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

    `facts` holds the value of every check of the stage (`catalog.py`) and the counts shown on its page; `ledger` lines
    are `(state, reason, records)`; `token_ledger` lines `(split, class, tokens)`; `samples` are at most ten row ids per
    check, for inspection.
    """

    key: StageKey
    stage: str
    fingerprint: str
    code_version: str
    inputs: dict[str, str]
    parts: tuple[Part, ...]
    facts: dict[str, Any]
    version: str = ""
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
    at = get_stage_folder(complete.key)
    written = [f"{at}/versions/{complete.version}.json", f"{at}/manifests/{complete.fingerprint}.json"]
    store.write_sealed_list(written, complete)
    store.sync(written)
    _write_pointer(store, complete)
    return complete


def make_current(store: Store, manifest: Manifest) -> None:
    """Make a kept version the current one, which readers get by default."""
    path = f"{get_stage_folder(manifest.key)}/versions/{manifest.version}.json"
    if store.read_sealed(path) is None:
        # It was damaged, but the copy under its fingerprint is intact.
        store.write_sealed_list([path], manifest)
    _write_pointer(store, manifest)


def _write_pointer(store: Store, manifest: Manifest) -> None:
    pointer = {"version": manifest.version, "fingerprint": manifest.fingerprint}
    path = f"{get_stage_folder(manifest.key)}/pointer.json"
    if store.read_sealed(path) == pointer:
        return
    current = store.write_pointer(path, pointer)
    if current is not None and current.get("version") != manifest.version:
        change = f"made version {str(current['version'])[:12]} current" if current else "removed the current version"
        raise BusyError(
            f"{'/'.join(manifest.key)}: another build has {change} since this one began; one may build a recipe at a "
            "time; this one's output is kept; wait for the other, and build again"
        )


def remove_version(store: Store, manifest: Manifest) -> None:
    """Remove a version, its parts' completion records and its pointers; the files are left for `gc`."""
    at = get_stage_folder(manifest.key)
    pointer = store.read_sealed(f"{at}/pointer.json")
    if pointer is None or pointer["version"] == manifest.version:
        for name in ("pointer.json", "current.json"):
            store.remove(f"{at}/{name}")
    store.remove(f"{at}/{KEPT_PARTS_FOLDER}")
    for part in manifest.parts:
        store.remove(f"{at}/parts/{part.fingerprint}/part.json")
    for name in store.list(f"{at}/manifests"):
        kept = read_manifest(store, f"{at}/manifests/{name}")
        if kept is None or kept.version == manifest.version:
            store.remove(f"{at}/manifests/{name}")
    store.remove(f"{at}/versions/{manifest.version}.json")


def find_by_fingerprint(store: Store, key: StageKey, fingerprint: str) -> Manifest | None:
    """Return the manifest of an earlier build with the same fingerprint, if all its files still exist."""
    current = load_current_if_intact(store, key)
    is_current = current is not None and current.fingerprint == fingerprint
    manifest = current if is_current else read_manifest(store, f"{get_stage_folder(key)}/manifests/{fingerprint}.json")
    if manifest is None:
        return None
    return manifest if all(store.has(file) for part in manifest.parts for file in part.files.values()) else None


def load_version(store: Store, key: StageKey, version: str | None) -> Manifest:
    """Return a kept version of a stage's output; IntegrityError if it is unknown or was removed by gc."""
    path = f"{get_stage_folder(key)}/versions/{version}.json"
    loaded = None if version is None else read_manifest(store, path)
    if loaded is None and version is not None and store.exists(path):
        # It is damaged; a copy is kept under its fingerprint.
        names = store.list(f"{get_stage_folder(key)}/manifests")
        kept = (read_manifest(store, f"{get_stage_folder(key)}/manifests/{name}") for name in names)
        loaded = next((candidate for candidate in kept if candidate is not None and candidate.version == version), None)
    if loaded is None:
        if version is None:
            raise IntegrityError(
                f"{'/'.join(key)}: it was never built; what reads its output needs a version of it; build it first"
            )
        name, remedy = "/".join(key), "build it, or choose another version"
        if store.exists(path):
            raise DamagedFileError(
                f"{name}: {store.path(path)} is damaged or was edited; expected a kept version", path, remedy
            )
        raise IntegrityError(f"{name}: version {version} is not kept; expected a kept version; {remedy}")
    return loaded


def parse_stage_key(name: str) -> StageKey:
    """Return the key that `Manifest.inputs` names."""
    return tuple(name.split("/"))


def load_inputs(store: Store, output: Manifest) -> dict[StageKey, Manifest]:
    """Return the inputs of an output, at the versions that its manifest names; IntegrityError if one was removed."""
    named = ((parse_stage_key(name), version) for name, version in output.inputs.items())
    return {key: load_version(store, key, version) for key, version in named}


def load_current(store: Store, key: StageKey) -> Manifest | None:
    """Return the current manifest of a stage, or None if it was never built."""
    pointer = store.read_sealed(f"{get_stage_folder(key)}/pointer.json")
    return None if pointer is None else load_version(store, key, pointer["version"])


def is_current(store: Store, manifest: Manifest) -> bool:
    """Return whether a manifest is the current one of its stage, by the pointer alone."""
    pointer = store.read_sealed(f"{get_stage_folder(manifest.key)}/pointer.json")
    return pointer is not None and pointer["version"] == manifest.version


def prefetch_current(store: Store, keys: Iterable[StageKey]) -> dict[StageKey, str]:
    """Read pointers and current manifests of some stages at once; return the current versions."""
    folders = {key: get_stage_folder(key) for key in keys}
    store.prefetch(f"{folder}/pointer.json" for folder in folders.values())
    pointers = {key: store.read_sealed(f"{folder}/pointer.json") for key, folder in folders.items()}
    versions = {key: str(pointer["version"]) for key, pointer in pointers.items() if pointer is not None}
    store.prefetch(f"{folders[key]}/versions/{version}.json" for key, version in versions.items())
    return versions


def load_current_if_intact(store: Store, key: StageKey) -> Manifest | None:
    """Return the current manifest for optional use, such as reuse; None also if it is damaged or was removed by gc.

    Rebuilding an output must not fail because of the output that it replaces.
    """
    try:
        return load_current(store, key)
    except IntegrityError:
        return None


def list_versions(store: Store, key: StageKey) -> list[Manifest]:
    """Return all kept versions with an intact manifest, oldest first."""
    names = store.list(f"{get_stage_folder(key)}/versions")
    loaded = (
        read_manifest(store, f"{get_stage_folder(key)}/versions/{name}") for name in names if name.endswith(".json")
    )
    manifests = [manifest for manifest in loaded if manifest is not None]
    return sorted(manifests, key=lambda manifest: (manifest.built_at, manifest.version))


def verify_files(store: Store, manifest: Manifest) -> None:
    """Read every file of a manifest and compare digests; `DamagedFileError` names the first bad one."""
    for part in manifest.parts:
        for file in part.files.values():
            store.content(file)


def read_manifest(store: Store, path: str) -> Manifest | None:
    """Return a manifest; None if it is missing, damaged or edited."""
    raw = store.read_sealed(path)
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
        facts=dict(raw["facts"]),
    )
