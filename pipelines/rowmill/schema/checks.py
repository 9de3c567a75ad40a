"""A check: a number that a stage's output must keep within a bound, declared once.

Checks of all data are listed in `checks/catalog.py`; those of one kind of data stand in its folder.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rowmill.schema.counts import Counts, Measure
from rowmill.schema.rows import ROW_KINDS, RowKind

Severity = Literal["error", "warn"]


@dataclass(frozen=True, slots=True)
class Check:
    """A number that a stage's output must keep within a bound.

    `name` is its key in `Manifest.values`. A check that is not `waivable` guards correctness. `applies_to` describes
    the data that it applies to, "" means all; where it has nothing to ask of other data, it is not applicable.
    """

    name: str
    stages: tuple[str, ...]
    direction: Literal["at_most", "at_least"]
    bound: float
    severity: Severity
    what: str
    remedy: str
    """`{recipe}` and `{dataset}` are replaced by those of the output; see `format_remedy`."""
    of: tuple[type[Counts], ...] = ()
    """The counts that its number is computed from, one class for each of its stages that has another one."""
    value: Measure | None = field(default=None, hash=False)
    """Computes its number from counts of such a class, None where there is nothing to ask. Without it, the number is
    no content of the output, and is measured when it is judged (`CROSS_STAGE_FACTS` in `checks/cross_stage.py`)."""
    waivable: bool = True
    warn_from: float | None = None
    """A value beyond it fails, but blocks only beyond `bound`; None: every failure blocks."""
    applies_to: str = ""
    of_kinds: Mapping[RowKind, str] = field(default_factory=dict[RowKind, str], hash=False)
    """The remedies for row kinds that do not have the options of the general one."""
    only_for: RowKind | None = None
    """The kind of rows that the check exists for, `record` for tables; stages of other data do not count its fact."""
    not_for: RowKind | None = None
    """The kind of rows that the check does not exist for, although their stages count its fact."""
    requested_by: tuple[str, ...] = ()
    """The options of a dataset that ask for it: without any of them the check is off, which pages do not show, and not
    applicable."""
    is_share: bool = False
    """Whether its number is a share, which people read as per cent; files and gates hold it as from 0 to 1."""
    before_build: str = ""
    """The remedy if the check fails on a dataset's first records, where the general one queries a build."""
    names_samples: bool = False
    """Whether its samples are sentences that describe the problem; every message about it then shows them."""

    def exists_for(self, row_kind: RowKind | None) -> bool:
        """Return whether datasets of these rows have the check; None: the whole recipe, or data of unknown kind."""
        return self.only_for in (None, row_kind) and (row_kind is None or self.not_for != row_kind)

    def choose_remedy(self, row_kinds: Collection[RowKind]) -> str:
        """Return the remedy for datasets of these rows, with a remedy for each kind where they differ."""
        remedies: dict[RowKind, str] = {kind: text for kind, text in self.of_kinds.items() if kind in row_kinds}
        general = [] if remedies and len(remedies) == len(set(row_kinds)) else [self.remedy]
        if not general and len(set(remedies.values())) == 1:
            return next(iter(remedies.values()))
        return "; ".join([*general, *(f"for {ROW_KINDS[kind].plural}: {text}" for kind, text in remedies.items())])
