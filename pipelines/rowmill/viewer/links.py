"""Where each number of a build's report leads: to the list of the rows behind it, with its filters."""

from collections.abc import Mapping

from rowmill.core.stage_names import PACKED_SHARDS, RAW_DATASET, TRUNCATION_STATS
from rowmill.reports.flows import FlowBranch, FlowLevel
from rowmill.reports.links import SHORTENED, PageLinks
from rowmill.schema.ledger import REJECT_REASONS, UNUSED_STATES
from rowmill.schema.manifest import Manifest
from rowmill.schema.rows import SPLITS
from rowmill.viewer.builds import Build


class Links(PageLinks):
    """Where the numbers of a build's pages lead; each address holds the build's version."""

    def __init__(self, build: Build) -> None:
        super().__init__(build.recipe, version=build.version)
        self.build = build

    def of_changes(self) -> str:
        """Return the address of the comparison with the last build."""
        changes = self.build.changes
        return "" if changes is None else self.of("compare", changes.version[:12])

    def of_number(self, name: str, dataset: str | None = None) -> str:
        """Return the address of a count of a dataset, or of all."""
        if name.startswith("sequences of") or name in ("step", "steps", "rank", "ranks"):
            return self.of("steps", 0)
        if name == "checks":
            of_dataset = f"dataset = '{dataset}' and " if dataset else ""
            columns = "dataset, stage, check_name, severity, value, bound"
            return self.of("sql", q=f"from check_results select {columns} where {of_dataset}passed order by all")
        if name in ("rejected", "left out"):
            return self.of("rejects", dataset=dataset)
        if name in ("sequences", "fill"):
            packed = self.build.find_output(dataset, PACKED_SHARDS) if dataset else None
            return "" if packed is None else self.of_sequence(str(dataset), "train", 0)
        order = {"tokens": "-tokens", "trained": "-trained", "examples": "-tokens"}.get(name)
        return self.of("rows", dataset=dataset, order=order)

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
            split = row["split"] if row["split"] in SPLITS else None
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
