"""What was told before: a cause is told once a night, with the number of nights that it has lasted.

<recipe>/alerts.json    {"causes": {"blocked rejects chats": {"nights": 3, "last": "2026-11-27"}}}
"""

from collections.abc import Collection
from datetime import date

from rowmill.alerts.options import AlertEvent
from rowmill.core.storage import Store


def note_event(store: Store, recipe: str, event: AlertEvent, causes: Collection[str], today: date) -> int | None:
    """Note that an event has these causes today; return on how many nights, or None if it was told today.

    What is new among several causes is told at once. A build that is published ends all causes.
    """
    path = f"{recipe}/alerts.json"
    earlier = (store.read_sealed(path) or {}).get("causes", {})
    names = [f"{event} {cause}".strip() for cause in sorted(causes)] or [event]
    known = {} if event == "published" else dict(earlier)
    is_new = any(earlier.get(name, {}).get("last") != today.isoformat() for name in names)
    nights = 0
    for name in names:
        before = earlier.get(name, {})
        count = int(before.get("nights", 0)) + (before.get("last") != today.isoformat())
        known[name] = {"nights": count, "last": today.isoformat()}
        nights = max(nights, count)
    store.write_sealed(path, {"causes": known})
    return nights if is_new or event == "published" else None
