"""Decides which versions are kept, and removes the others.

Kept per stage: the newest versions, the current one, and every output that a kept output of a later stage was built
from; shards without their examples could not be traced. Of several outputs that are one version, those that nothing was
built from go as well, except the newest. The statistics of such examples are kept as well: the gate
needs them when the shards are used again. The version of the ranks in `current.json` is kept too, since trainers read
it, whatever was built later. Removed: other manifests, parts that no kept manifest names, check results, statistics,
staged copies, and leftovers of killed builds: scratch folders and files with temporary names. A part that was
rewritten, without its duplicates or with other splits, is named in its manifest's details, because the next build
starts from it.

Manifests are removed first, then the statistics of versions without a manifest, then files that no manifest names. So
a version that can be found is whole, wherever the process is killed, and the next garbage collection finishes.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from rowmill.build import share
from rowmill.build.gate import find_held_version
from rowmill.build.prepare import SHARE_VERSIONS_FOLDER
from rowmill.build.steps import Project, plan_steps
from rowmill.checks import cross_stage, drift, judge
from rowmill.core.stage_names import EXPORTS
from rowmill.core.storage import Store, map_reads
from rowmill.reader.published import find_published_version
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey, get_stage_folder
from rowmill.stats.tables import RECIPE_SCOPE, list_recorded_versions, remove_version_tables, split_stage_key

LOCK_WAIT_S = 10.0
"""Seconds to wait for a build of the same stage: garbage collection can be done later."""

MANIFEST_KINDS = ("manifest", "version")
"""Kinds of garbage that are the two copies of a manifest."""


@dataclass(frozen=True, slots=True)
class GarbageItem:
    """A file or folder to remove: its stage, its kind, its path under the storage root, its size."""

    key: StageKey
    kind: str
    path: str
    size_bytes: int


def collect_garbage(project: Project, *, keep: int, dry_run: bool) -> list[GarbageItem]:
    """Remove versions that are neither among a stage's newest `keep`, nor current, nor needed by such a version.

    The published version of the ranks and everything it was built from is kept. Holds the locks of all stages, so that
    no build reuses or publishes what is being removed, and no share is writing.
    """
    steps = plan_steps(project)
    store, keys = project.store, [step.key for step in steps]
    # A list changes nothing, so it need not wait for shares.
    lock_names = (".lock",) if dry_run else (".lock", share.LOCK_NAME)
    siblings = {key for step in steps if step.dataset is not None for key in set(step.gates) - set(step.inputs)}
    with ExitStack() as locks:
        for key in keys:
            if store.exists(get_stage_folder(key)):
                for name in lock_names:
                    path = f"{get_stage_folder(key)}/{name}"
                    locks.enter_context(store.lock(path, what="/".join(key), timeout_s=LOCK_WAIT_S))
        published = find_published_version(store, project.recipe.name)
        publishers = {step.key for step in steps if step.stage.publish is not None}
        # Inputs of what is kept, by fingerprint, and by version.
        origins, needed = set[tuple[str, str]](), set[tuple[str, str]]()
        items: list[GarbageItem] = []
        # In reverse order: a stage's kept versions decide which versions of its inputs are needed.
        for key in reversed(keys):
            known = manifest.list_outputs(store, key)
            newest = manifest.select_newest(known)
            pointed = manifest.load_current(store, key)
            held = find_held_version(store, key)
            chosen = {one.fingerprint for one in (*newest[-keep:], pointed, held) if one is not None}
            chosen |= {fingerprint for name, fingerprint in origins if name == "/".join(key)}
            if key in publishers:
                chosen |= {one.fingerprint for one in newest if one.version == published}
            if key in siblings:
                # Statistics of examples are kept with their inputs, although no stage reads them.
                chosen |= {one.fingerprint for one in known if one.inputs.items() <= needed}
            kept = [one for one in known if one.fingerprint in chosen]
            origins |= {named for output in kept for named in output.input_fingerprints.items()}
            needed |= {named for output in kept for named in output.inputs.items()}
            found = list(_find_garbage(store, key, kept))
            # Files with temporary names, outside the folders that are removed anyway.
            folders = tuple(f"{path}/" for _, path in found)
            unfinished = [path for path in store.list_unfinished(get_stage_folder(key)) if not path.startswith(folders)]
            found += [("unfinished file", path) for path in unfinished]
            items += [GarbageItem(key, kind, path, _measure_size(store, path)) for kind, path in found]
        if not dry_run:
            for item in items:
                if item.kind in MANIFEST_KINDS:
                    store.remove(item.path)
            for recipe, scope in dict.fromkeys(map(split_stage_key, keys)):
                _remove_unowned_statistics(store, recipe, scope)
            for item in items:
                if item.kind not in MANIFEST_KINDS:
                    store.remove(item.path)
            store.remove_unfinished()
    return items


def _remove_unowned_statistics(store: Store, recipe: str, scope: str) -> None:
    """Remove the tables of versions that no stage of a scope has, such as those of a gc that was killed."""
    recorded = list_recorded_versions(store, recipe, scope)
    # Listed afterwards: statistics are written after their manifest. Also of stages that the recipe no longer has.
    if scope == RECIPE_SCOPE:
        stages = [f"{recipe}/{name}" for name in store.list(recipe)]
    else:
        stages = [f"{recipe}/{scope}/{name}" for name in store.list(f"{recipe}/{scope}")]
        stages.append(get_stage_folder((recipe, EXPORTS, scope)))
    names = map_reads(store, lambda stage: store.list(f"{stage}/versions"), stages)
    owned = {name.partition("-")[0] for of_stage in names for name in of_stage}
    for version in sorted(recorded - owned):
        remove_version_tables(store, recipe, scope, version)


def _find_garbage(store: Store, key: StageKey, kept: list[Manifest]) -> Iterator[tuple[str, str]]:
    """Yield the kind and path of everything in a stage's folder that no kept version needs."""
    at, versions = get_stage_folder(key), {output.version for output in kept}
    files = [file for output in kept for part in output.parts for file in part.files.values()]
    parts = {file.path.removeprefix(f"{at}/parts/").split("/", 1)[0] for file in files}
    parts |= {name for output in kept for name in output.details.get("made_of", ())}
    scanned = [part for output in kept for scan in output.details.get("scans", ()) for part in scan["parts"]]
    staged = {str(part["staged"]).rsplit("/", 1)[-1] for part in scanned if part["staged"]}
    named = {
        "manifests": ("manifest", {f"{output.fingerprint}.json" for output in kept}),
        "versions": ("version", {f"{output.version}-{output.fingerprint}.json" for output in kept}),
        "parts": ("part", parts),
        "staged": ("staged copy", staged),
        # The parts of shares go, too, unless a build has named them.
        SHARE_VERSIONS_FOLDER: ("share's versions", set[str]()),
    }
    for place, (kind, names) in named.items():
        yield from ((kind, f"{at}/{place}/{name}") for name in store.list(f"{at}/{place}") if name not in names)
    kept_by_version = {
        judge.RESULTS_FOLDER: "check result",
        drift.PROFILES_FOLDER: "profile",
        cross_stage.CHANGES_FOLDER: "note of changes",
    }
    for place, kind in kept_by_version.items():
        for name in store.list(f"{at}/{place}"):
            if name.removesuffix(".json") not in versions:
                yield kind, f"{at}/{place}/{name}"
    yield from (("scratch folder", f"{at}/{name}") for name in store.list(at) if name.startswith("scratch-"))


def _measure_size(store: Store, path: str) -> int:
    if not store.is_local:
        return 0
    full = store.path(path)
    if os.path.isfile(full):
        return os.path.getsize(full)
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(full) for name in names)
