"""Addresses of the pages, and where each number of a report leads."""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, urlencode

from rowmill.checks.judge import CheckResult
from rowmill.core import html
from rowmill.core.stage_names import (
    CANONICAL_ROWS,
    PACKED_SHARDS,
    RAW_DATASET,
    TOKENIZED_EXAMPLES,
    TRUNCATION_STATS,
)
from rowmill.reports.flows import FlowBranch, FlowLevel
from rowmill.reports.report_page import ReportLinks
from rowmill.schema.ledger import REJECT_REASONS, UNUSED_STATES
from rowmill.schema.manifest import Manifest
from rowmill.viewer.builds import Build

ROW_ID: Final = re.compile(r"\b[0-9a-f]{16}:\d+(?:\.\d+)?(?:#\d+)?")
"""A row id, or the id of an example."""

SHORTENED: Final = {"removed": "any", "order": "-removed"}

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


class Links(ReportLinks):
    """Addresses in a build; each holds its version."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.folder = f"/{quote(build.recipe)}/"

    def of(self, *path: object, **query: object) -> str:
        """Return the address of a page of the build."""
        values = {name: value for name, value in query.items() if value not in (None, "")}
        if self.build.version:
            values["version"] = self.build.version
        pieces = [self.folder.rstrip("/"), *(quote(str(piece), safe=":.") for piece in path)]
        return "/".join(pieces) + (f"?{urlencode(values)}" if values else "")

    def of_row(self, row_id: str) -> str:
        """Return the address of a row, or of an example's row."""
        return self.of("rows", row_id.partition("#")[0])

    def of_sequence(self, dataset: str, split: str, sequence: int) -> str:
        """Return the address of a packed sequence."""
        return self.of("sequences", dataset, split, sequence)

    def of_changes(self) -> str:
        """Return the address of the comparison with the last build."""
        changes = self.build.changes
        return "" if changes is None else self.of("compare", changes.version[:12])

    def of_number(self, name: str, dataset: str | None = None) -> str:
        """Return the address of a count of a dataset, or of all."""
        if name.startswith("sequences of") or name in ("step", "steps", "rank", "ranks"):
            return self.of("steps", 0)
        if name in ("rejected", "left out"):
            return self.of("rejects", dataset=dataset)
        if name in ("sequences", "fill"):
            packed = self.build.find_output(dataset, PACKED_SHARDS) if dataset else None
            return "" if packed is None else self.of_sequence(str(dataset), "train", 0)
        order = {"tokens": "-tokens", "trained": "-trained", "examples": "-tokens"}.get(name)
        return self.of("rows", dataset=dataset, order=order)

    def of_check(self, result: CheckResult) -> str:
        """Return the address of the rows on which a check failed."""
        dataset = result.key[1] if len(result.key) == 3 else None
        if result.check in LISTS_OF_CHECKS:
            page, filters = LISTS_OF_CHECKS[result.check]
            return self.of(page, dataset=dataset, check=result.check, **filters)
        return self.of("rows", dataset=dataset, check=result.check, stage=result.key[-1])

    def of_flow(self, dataset: str | None, level: FlowLevel, branch: FlowBranch | None) -> str:
        """Return the address of a level of a flow, or of what leaves it."""
        if branch is None:
            in_order = "scheduled" in level.label or "passes" in level.label or "positions" in level.label
            return self.of("steps", 0) if in_order else self.of("rows", dataset=dataset)
        if branch.name in REJECT_REASONS:
            return self.of("rejects", dataset=dataset, reason=branch.name)
        if branch.name == "truncated":
            return self.of("rows", dataset=dataset, **SHORTENED)
        if branch.name.endswith(" split"):
            return self.of("rows", dataset=dataset, split=branch.name.removesuffix(" split"))
        state = branch.name.replace(" ", "_")
        if state in UNUSED_STATES or branch.name == "dropped by packing":
            return self.of("left_out", dataset=dataset, state=state if state in UNUSED_STATES else None)
        if branch.kind == "rejected":
            return self.of("rejects", dataset=dataset)
        if branch.kind in ("trained", "context"):
            return self.of("rows", dataset=dataset, order="-trained" if branch.kind == "trained" else "trained")
        return ""

    def of_bin(self, output: Manifest, histogram: str, lower: float, upper: float) -> str:
        """Return the address of a bar of a histogram."""
        names = {"lengths": "original", "example_tokens": "tokens", "trained_share": "share"}
        if histogram not in names or len(output.key) != 3:
            return ""
        name, scale = names[histogram], 100 if histogram == "trained_share" else 1
        bounds: dict[str, object] = {f"{name}_from": f"{lower * scale:g}", f"{name}_below": f"{upper * scale:g}"}
        return self.of("rows", dataset=output.key[1], **bounds)

    def of_cell(self, output: Manifest | None, table: str, column: str, row: Mapping[str, object]) -> str:
        """Return the address of a cell of an output's table."""
        key = () if output is None else output.key
        dataset = str(row["dataset"]) if "dataset" in row else key[1] if len(key) == 3 else None
        dataset = None if dataset == "all" else dataset
        if table == "changes":
            return self.of_changes()
        if table == "datasets":
            return self.of("rows", dataset=dataset) if column == "dataset" else self.of_number(column, dataset)
        if table in ("ledger", "rejects"):
            reason, state = row.get("reason"), row.get("state", "rejected")
            if column not in ("reason", "records", "rows", "state"):
                return ""
            if state == "kept":
                return self.of("rows", dataset=dataset)
            if reason:
                return self.of("rejects", dataset=dataset, reason=reason)
            return self.of("left_out", dataset=dataset, state=state)
        filters = {
            "schemas": ("schema", "schema"), "unknown_roles": ("role", "role"), "largest_groups": ("group", "group"),
            "domains": ("domain", "domain"), "splits": ("split", "split"), "packing": ("split", "split"),
        }  # fmt: skip
        if table in filters and column != "dataset":
            name, of = filters[table]
            return self.of("rows", dataset=dataset, **{name: row[of]})
        if table == "stages" and output is not None and output.stage == TRUNCATION_STATS:
            return self.of("rows", dataset=dataset, removed=row["stage"], order="-removed")
        if table == "token_ledger":
            wanted = SHORTENED if row["class"] == "truncated" else {"order": "-trained"}
            split = row["split"] if row["split"] in ("train", "validation", "test") else None
            return self.of("rows", dataset=dataset, split=split, **wanted)
        if table == "lengths" and "lower" in row:
            bounds = {"original_from": row["lower"], "original_below": row["upper"]}
            return self.of("rows", dataset=dataset, split=row["split"], **bounds)
        if table == "files" and "file" in row and output is not None and output.stage == RAW_DATASET:
            return self.of("rows", dataset=dataset, file=row["file"])
        if table in ("mixture", "shares", "schedule") and column == "dataset":
            return self.of("rows", dataset=dataset)
        if table == "ranks":
            return self.of("steps", 0)
        return ""

    def mention_rows(self, text: str) -> str:
        """Return text as markup in which each row id is a link."""
        shown, end = "", 0
        for found in ROW_ID.finditer(text):
            shown += html.escape_text(text[end : found.start()])
            shown += html.link_text(html.escape_text(found.group()), self.of_row(found.group()))
            end = found.end()
        return shown + html.escape_text(text[end:])


STAGES_WITH_REJECTS: Final = (CANONICAL_ROWS, TOKENIZED_EXAMPLES)
