"""Versions that builds keep: those held by `rowmill use`, and those of the packages that shares ran with.

    training_splits ──► gpu_partitions @ 4f2a     held: the order goes forward, the ranks stay as they were published
    <stage>/share_versions/<digest of the versions>-<share>.json

A held version is one small file beside the stage's pointer, so that a night sees it wherever it runs. A share writes
its record before it makes a part, and then reads those of the others: of two that start at once with different
versions, at least one sees the other. A build compares them with its own before it takes parts of shares.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from rowmill.core import remote_index
from rowmill.core.errors import ConfigError
from rowmill.core.storage import Store, digest_json
from rowmill.executors import Share
from rowmill.executors.base import describe_difference, describe_versions
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


FOLDER_NAME = "share_versions"


def claim_versions(store: Store, key: StageKey, share: Share) -> None:
    """Record the versions of this process for a share of a stage."""
    record = f"{_folder(key)}/{_own_digest()}-{share.number}-of-{share.total}.json"
    is_new = not store.exists(record)
    if is_new:
        store.write_sealed(record, {"share": str(share), "versions": describe_versions()})
        remote_index.forget_absences()
    try:
        require_own_versions(store, key)
    except ConfigError:
        if is_new:
            # It has made nothing.
            store.remove(record)
        raise


def require_own_versions(store: Store, key: StageKey) -> None:
    """Check that the shares of a stage, if any were made since its last build, had the versions of this process."""
    names = store.list(_folder(key))
    if not names:
        return
    other = next((name for name in names if not name.startswith(f"{_own_digest()}-")), None)
    if other is None:
        return
    record = store.read_sealed(f"{_folder(key)}/{other}") or {"share": "?", "versions": {}}
    raise ConfigError(
        f"{'/'.join(key)}: share {record['share']} was made with "
        f"{describe_difference(describe_versions(), record['versions'])}; the same versions give the same bytes; "
        "install those of the share here, or remove the parts of shares with rowmill gc and make all shares with one "
        "set of versions"
    )


def forget_versions(store: Store, key: StageKey) -> None:
    """Remove the records of a stage whose output was made of the parts."""
    if store.list(_folder(key)):
        store.remove(_folder(key))


def _folder(key: StageKey) -> str:
    return f"{get_stage_folder(key)}/{FOLDER_NAME}"


def _own_digest() -> str:
    return digest_json(describe_versions())
