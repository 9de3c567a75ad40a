"""Parts of rows with the ids of their records, as files of this host, out of which records are taken in any order."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rowmill.core.storage import Store
from rowmill.schema.manifest import File
from rowmill.shards import gather
from rowmill.shards.host_scratch import HostScratch

_ROW_COLUMNS = ("row_id", "domain", "group_key")
"""The columns of rows that examples have, too."""


@dataclass(frozen=True, slots=True)
class RecordSource:
    """A part of rows, and the ids of its records."""

    rows: File
    tokens: File

    @property
    def copy_name(self) -> str:
        """Name of the copy that a host makes of it, for taking records in any order."""
        return f"{self.rows.digest}-{self.tokens.digest}.arrow"

    def copy(self, root: str, target: str) -> None:
        """Write ids and rows side by side as a scratch file."""
        store = Store(root)
        rows, ids = store.table(self.rows, _ROW_COLUMNS), store.table(self.tokens, ("input_ids",))
        gather.write_scratch_file(rows.add_column(0, "input_ids", ids.column(0)), target)


def require_copies(sources: Sequence[RecordSource], root: str, scratch: HostScratch) -> list[str]:
    """Return the paths of this host's copies, after making those that it lacks."""
    scratch.require({source.copy_name: partial(source.copy, root) for source in sources})
    return [scratch.locate(source.copy_name) for source in sources]
