"""Finished parts of a stage, which later builds find under their fingerprints.

What belongs here: where a part's files are, and the record that says it is complete. What does not: making parts
(`base.py`).
"""

from rowmill.core.storage import Store
from rowmill.schema.manifest import Part, parse_part


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
