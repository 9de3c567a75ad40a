"""Rows that a person left out: their content is in a file of `filters.leave_out`.

    {"content_hash": "5f1c…", "row_id": "9b0e…:77", "file": "data/chats.jsonl", "line": 78, "note": "wrong answer"}

By content, so that a row stays left out when its file moves or grows; the other keys are for people. All copies of the
content go, before duplicates are looked for. Entries that match no row are counted.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill import sources
from rowmill.core.errors import ConfigError
from rowmill.core.storage import digest_json
from rowmill.kinds.shared.filters import CONTENT_HASH_BYTES
from rowmill.parts.accounts import plan_removal, rewrite_parts
from rowmill.schema.manifest import DisplayTable, Part
from rowmill.schema.rows import Rejected
from rowmill.sources.reading import read_records
from rowmill.stages.base import StageContext

_HASH = re.compile(rf"[0-9a-f]{{{2 * CONTENT_HASH_BYTES}}}")


@dataclass(frozen=True, slots=True)
class Selection:
    """The entries of all files: the note of each content hash, and the hashes of each file."""

    notes: Mapping[bytes, str]
    files: Mapping[str, frozenset[bytes]]

    @property
    def digest(self) -> str:
        """What identifies the entries; where they are does not count."""
        return digest_json(sorted((content.hex(), note) for content, note in self.notes.items()))


def load_selection(context: StageContext) -> Selection | None:
    """Read the files that a dataset names; None if it names none."""
    urls = context.dataset.filters.leave_out
    if not urls:
        return None
    where = f"datasets.{context.dataset_name}.filters.leave_out"
    stage = sources.StoreStager(context.store, f"{context.folder}/staged")
    notes: dict[bytes, str] = {}
    files: dict[str, set[bytes]] = {}
    for scan in sources.scan_source(sources.Files(train_urls=list(urls)), context.base, stage, {}):
        entries = files.setdefault(scan.url, set())
        for record in (record for part in scan.parts for record in read_records(part, context.base)):
            entry: dict[str, Any] = record.value or {}
            content = entry.get("content_hash")
            if not isinstance(content, str) or not _HASH.fullmatch(content):
                raise ConfigError(
                    f"{where}: {scan.url}:{record.line}: content_hash is {content!r}; expected "
                    f"{2 * CONTENT_HASH_BYTES} hexadecimal digits, as rowmill view writes "
                    "them; correct the line, or delete it"
                )
            entries.add(bytes.fromhex(content))
            note = entry.get("note")
            notes.setdefault(bytes.fromhex(content), note if isinstance(note, str) else "")
    return Selection(notes, {url: frozenset(entries) for url, entries in files.items()})


def leave_out_rows(
    context: StageContext, parts: list[Part], selection: Selection | None
) -> tuple[list[Part], dict[str, DisplayTable]]:
    """Reject the rows of a selection; return the parts, and a table of each file's entries and rows.

    Hashes are read here and not by workers: 16 bytes a row, and only where a recipe names a file.
    """
    if selection is None:
        return parts, {}
    wanted = pa.array(sorted(selection.notes), pa.binary(CONTENT_HASH_BYTES))
    found: dict[bytes, int] = {}
    removals: list[dict[int, Rejected]] = []
    for part in parts:
        hashes = context.store.table(part.files["rows"], ["content_hash"]).column(0)
        places = np.flatnonzero(pc.is_in(hashes, value_set=wanted).to_numpy())
        contents: Sequence[bytes] = hashes.take(pa.array(places)).to_pylist()
        for content in contents:
            found[content] = found.get(content, 0) + 1
        removals.append(
            {
                place: Rejected("left_out_by_hand", selection.notes[content])
                for place, content in zip(places.tolist(), contents, strict=True)
            }
        )
    changes = [plan_removal(part, removed) for part, removed in zip(parts, removals, strict=True)]
    lines = [
        (url, len(entries), sum(found.get(entry, 0) for entry in entries), sum(entry not in found for entry in entries))
        for url, entries in selection.files.items()
    ]
    table = DisplayTable(("file", "entries", "rows", "entries_without_rows"), tuple(lines))
    return rewrite_parts(context, parts, changes, context.dataset.format), {"leave_out": table}
