"""Records which versions the shares of a stage ran with, so that parts of different versions are never mixed unnoticed.

    <stage>/share_versions/<digest of the versions>-<share>.json

A share writes its record before it makes a part, and then reads those of the others: of two that start at once with
different versions, at least one sees the other. A build compares them with its own versions before it takes parts of
shares, and removes them once its output is saved.
"""

from rowmill.core import remote_index
from rowmill.core.errors import ConfigError
from rowmill.core.storage import Store, digest_json
from rowmill.executors import Share
from rowmill.executors.versions import describe_difference, describe_versions
from rowmill.schema.manifest import StageKey, get_stage_folder

FOLDER_NAME = "share_versions"


def claim_versions(store: Store, key: StageKey, share: Share) -> None:
    """Record the versions of this process for a share of a stage.

    Raises
    ------
    ConfigError
        If a share of the stage was made with other versions.

    """
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
    """Check that the shares of a stage, if any were made since its last build, had the versions of this process.

    Raises
    ------
    ConfigError
        If one had others.

    """
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
