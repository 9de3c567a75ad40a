"""Versions that a person chose with `rowmill use`: builds keep them until they are released.

    training_splits ──► gpu_partitions        a build: both go forward
    training_splits ──► gpu_partitions @ 4f2a held: the order goes forward, the ranks stay as they were published

The choice is one small file beside the stage's pointer, so that a night sees it wherever it runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey, get_stage_folder, parse_stage_key


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A stage's chosen version, and the time of the choice."""

    key: StageKey
    version: str
    since: str

    @property
    def sentence(self) -> str:
        """Where it is held, since when, and how builds go forward again."""
        stage = "/".join(self.key[1:])
        return (
            f"held at version {self.version[:12]} since {self.since[:16].replace('T', ' ')} UTC by `rowmill use`; "
            f"`rowmill use {self.key[0]} {stage} --release` lets builds go forward"
        )


def hold_version(store: Store, output: Manifest) -> HeldVersion:
    """Keep a version current in every build until it is released."""
    held = HeldVersion(output.key, output.version, datetime.now(UTC).isoformat(timespec="seconds"))
    store.write_sealed(_held_file(output.key), {"version": held.version, "since": held.since})
    return held


def release_version(store: Store, key: StageKey) -> HeldVersion | None:
    """Let builds make a stage again; return what was held, or None."""
    held = find_held_version(store, key)
    store.remove(_held_file(key))
    return held


def find_held_version(store: Store, key: StageKey) -> HeldVersion | None:
    """Return the version at which a stage is held, or None."""
    found = store.read_sealed(_held_file(key))
    return None if found is None else HeldVersion(key, found["version"], found["since"])


def follow_held_versions(store: Store, inputs: Mapping[StageKey, Manifest]) -> dict[StageKey, Manifest]:
    """Return a step's inputs with those that a held one was made of: all inputs belong to one history."""
    followed = dict(inputs)
    for key, made in inputs.items():
        origins = {parse_stage_key(name): version for name, version in made.inputs.items()}
        others = {
            origin: version
            for origin, version in origins.items()
            if origin in followed and followed[origin].version != version
        }
        # Only a conflict is worth a look at the storage.
        if others and find_held_version(store, key) is not None:
            followed |= {origin: manifest.load_version(store, origin, version) for origin, version in others.items()}
    return followed


def _held_file(key: StageKey) -> str:
    return f"{get_stage_folder(key)}/held.json"
