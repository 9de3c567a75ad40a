"""What was told before: a cause is told each target once a night, with the number of nights that it has lasted.

<recipe>/alerts.json  {"causes": {"blocked rejects chats": {"nights": 3, "last": "2026-11-27", "told": ["email-1f…"]}}}

A target is noted once a message reached it, so a message that was refused is sent again, to those who missed it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date

from rowmill.alerts import AlertEvent, AnyAlert
from rowmill.core.storage import Store, digest_json


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of messages: on how many nights it was there, the last of them, and the targets that were told on it."""

    nights: int = 0
    last: str = ""
    told: tuple[str, ...] = ()


def identify_target(alert: AnyAlert) -> str:
    """Return a name for where an alert goes, which holds no address."""
    return f"{alert.kind}-{digest_json(alert.model_dump(mode='json', exclude={'on'}))[:12]}"


def load_causes(store: Store, recipe: str, event: AlertEvent, names: Iterable[str], today: date) -> dict[str, Cause]:
    """Return the causes of today's event by their names, which begin with it, each with tonight counted."""
    known = _load_all(store, recipe)
    causes: dict[str, Cause] = {}
    for name in [f"{event} {name}".strip() for name in names]:
        before = known.get(name, Cause())
        is_tonight = before.last == today.isoformat()
        causes[name] = before if is_tonight else Cause(before.nights + 1, today.isoformat())
    return causes


def save_causes(store: Store, recipe: str, causes: Mapping[str, Cause], undelivered: Sequence[str] = ()) -> None:
    """Note the causes of an event, and why some were not told of it."""
    _save_all(store, recipe, _load_all(store, recipe) | dict(causes), undelivered)


def end_causes(store: Store, recipe: str, published: Mapping[str, Cause], today: date) -> None:
    """End all causes but today's warnings and the build that trainers read, since a build passed."""
    known = _load_all(store, recipe)
    left = {
        name: cause
        for name, cause in (dict(published) | known).items()
        if name in published or (name.startswith("warned") and cause.last == today.isoformat())
    }
    if left != known:
        _save_all(store, recipe, left, list_undelivered(store, recipe))


def list_undelivered(store: Store, recipe: str) -> list[str]:
    """Return why the last message did not reach everybody, a line for each; empty if it did."""
    return list((store.read_sealed(_history_path(recipe)) or {}).get("undelivered", ()))


def _save_all(store: Store, recipe: str, causes: Mapping[str, Cause], undelivered: Sequence[str]) -> None:
    noted = {name: asdict(cause) for name, cause in causes.items()}
    store.write_sealed(_history_path(recipe), {"causes": noted, "undelivered": list(undelivered)})


def _load_all(store: Store, recipe: str) -> dict[str, Cause]:
    raw = (store.read_sealed(_history_path(recipe)) or {}).get("causes", {})
    return {name: Cause(one["nights"], one["last"], tuple(one["told"])) for name, one in raw.items()}


def _history_path(recipe: str) -> str:
    return f"{recipe}/alerts.json"
