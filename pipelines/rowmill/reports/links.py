"""Where the numbers of a report lead: addresses of the viewer's pages, for its own pages, Dagster's and the terminal.

    BASE/RECIPE/rows?dataset=chats&check=rejects        the rows that a check is about
    BASE/RECIPE/rows/3f9a0c11d2e4b567:12                one row

In the report that can be mailed, nothing leads anywhere.
"""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlencode

from rowmill.core import html
from rowmill.core.stage_names import (
    CANONICAL_ROWS,
    GPU_PARTITIONS,
    PACKED_SHARDS,
    TOKENIZED_EXAMPLES,
    TRAINING_SPLITS,
    TRUNCATION_STATS,
)

if TYPE_CHECKING:
    from rowmill.checks.judge import CheckResult
    from rowmill.reports.flows import FlowBranch, FlowLevel
    from rowmill.schema.manifest import Manifest, StageKey

ROW_ID: Final = re.compile(r"\b[0-9a-f]{16}(?:~\d+)?:\d+(?:\.\d+)?(?:#\d+)?")
"""A row id, or the id of an example."""

SHORTENED: Final = {"removed": "any", "order": "-removed"}
"""The filter and the order of rows that lost tokens to truncation."""

LISTS_OF_CHECKS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "rejects": ("rejects", {}),
    "duplicates": ("rejects", {"reason": "duplicate"}),
    "contaminated": ("rejects", {"reason": "contaminated"}),
    "near_duplicates": ("rejects", {"reason": "near_duplicate"}),
    "content_dropped": ("rejects", {"reason": "content_dropped"}),
    "type_mismatch": ("rejects", {"reason": "type_mismatch"}),
    "unknown_roles": ("rows", {"role": "any"}),
    "preference_data": ("rows", {}),
    "unread_text": ("rows", {}),
    "group_size": ("rows", {"order": "group"}),
    "nonempty": ("rejects", {}),
    "accounted": ("rejects", {}),
    "zero_loss_rows": ("rejects", {"reason": "no_loss_tokens"}),
    "render_equal": ("rejects", {"reason": "render_mismatch"}),
    "context_overflow": ("rows", SHORTENED),
    "end_to_end_loss": ("rows", SHORTENED),
    "packing_loss": ("left_out", {}),
    "limit_cost": ("rows", SHORTENED),
    "dropped_share": ("left_out", {}),
    "fill": ("rows", {"order": "tokens"}),
    "short_documents": ("rows", {"order": "tokens"}),
    "length_bias": ("rows", {"order": "-tokens"}),
}
"""The list that shows the rows a check is about, and its filters; of other checks the rows that its samples name, or
all rows."""

LISTS_OF_STAGES: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    CANONICAL_ROWS: ("rows", {}),
    TOKENIZED_EXAMPLES: ("rows", {"order": "-tokens"}),
    TRUNCATION_STATS: ("rows", SHORTENED),
    PACKED_SHARDS: ("left_out", {}),
    TRAINING_SPLITS: ("steps/0", {}),
    GPU_PARTITIONS: ("steps/0", {}),
}
"""The page that shows what a stage made, and its filters."""


class ReportLinks:
    """Where a report's numbers lead: nowhere, in the file that can be mailed. The viewer's pages say where."""

    folder = ""
    """The address of the folder that holds the report and the pages of expectations."""

    def of_number(self, name: str, dataset: str | None = None) -> str:
        """Return the address of a count of a dataset, or of all."""
        return ""

    def of_check(self, result: "CheckResult") -> str:
        """Return the address of the rows on which a check failed."""
        return ""

    def of_flow(self, dataset: str | None, level: "FlowLevel", branch: "FlowBranch | None") -> str:
        """Return the address of a level of a flow, or of what leaves it."""
        return ""

    def of_cell(self, output: "Manifest | None", table: str, column: str, row: Mapping[str, object]) -> str:
        """Return the address of a cell of an output's table."""
        return ""

    def of_bin(self, output: "Manifest", histogram: str, lower: float, upper: float) -> str:
        """Return the address of a bar of a histogram."""
        return ""

    def of_bar(self, output: "Manifest", plot: str, name: str) -> str:
        """Return the address of a bar with a name, in a plot of an output."""
        return ""

    def of_stage(self, key: "StageKey") -> str:
        """Return the address of the list of what a stage made."""
        return ""

    def of_row(self, row_id: str) -> str:
        """Return the address of a row, or of an example."""
        return ""

    def of_sequence(self, dataset: str, split: str, sequence: int) -> str:
        """Return the address of a packed sequence."""
        return ""

    def of_changes(self) -> str:
        """Return the address of the comparison with the last build."""
        return ""

    def mention_rows(self, text: str) -> str:
        """Return text as markup in which each row id is a link."""
        return html.escape_text(text)


class PageLinks(ReportLinks):
    """Addresses of a recipe's pages at the viewer `base`: of the build of a `version`, or else of the current one."""

    def __init__(self, recipe: str, *, base: str = "", version: str = "") -> None:
        self.recipe, self.version = recipe, version
        self.folder = f"{base.rstrip('/')}/{quote(recipe)}/"

    def of(self, *path: object, **query: object) -> str:
        """Return the address of a page of the recipe."""
        values = {name: value for name, value in query.items() if value not in (None, "")}
        if self.version:
            values["version"] = self.version
        pieces = [self.folder.rstrip("/"), *(quote(str(piece), safe=":.") for piece in path)]
        return "/".join(pieces) + (f"?{urlencode(values)}" if values else "")

    def of_row(self, row_id: str) -> str:
        """Return the address of a row, or of an example's row."""
        return self.of("rows", row_id.partition("#")[0])

    def of_sequence(self, dataset: str, split: str, sequence: int) -> str:
        """Return the address of a packed sequence."""
        return self.of("sequences", dataset, split, sequence)

    def of_check(self, result: "CheckResult") -> str:
        """Return the address of the rows on which a check failed."""
        dataset = result.key[1] if len(result.key) == 3 else None
        if result.check in LISTS_OF_CHECKS:
            page, filters = LISTS_OF_CHECKS[result.check]
            return self.of(page, dataset=dataset, check=result.check, **filters)
        return self.of("rows", dataset=dataset, check=result.check, stage=result.key[-1])

    def of_stage(self, key: "StageKey") -> str:
        """Return the address of the list of what a stage made; empty if no page shows it."""
        if key[-1] not in LISTS_OF_STAGES:
            return ""
        page, filters = LISTS_OF_STAGES[key[-1]]
        return self.of(*page.split("/"), dataset=key[1] if len(key) == 3 else None, **filters)

    def mention_rows(self, text: str) -> str:
        """Return text as markup in which each row id is a link."""
        return replace_row_ids(
            text, html.escape_text, lambda row_id: html.link_text(html.escape_text(row_id), self.of_row(row_id))
        )


def replace_row_ids(text: str, others: Callable[[str], str], own: Callable[[str], str]) -> str:
    """Return a text with each row id replaced by `own` of it, and the text between them by `others`."""
    shown, end = "", 0
    for found in ROW_ID.finditer(text):
        shown += others(text[end : found.start()]) + own(found.group())
        end = found.end()
    return shown + others(text[end:])
