"""Where each number of a build's report leads: to the list of the rows behind it, with its filters."""

import re
from collections.abc import Mapping
from typing import Final

from rowmill.core.stage_names import CANONICAL_ROWS, PACKED_SHARDS, RAW_DATASET, TRAINING_SPLITS, TRUNCATION_STATS
from rowmill.reports.flows import FlowBranch, FlowLevel
from rowmill.reports.links import SHORTENED, PageLinks
from rowmill.schema.ledger import KEPT, REJECT_REASONS, UNUSED_STATES
from rowmill.schema.manifest import Manifest
from rowmill.schema.rows import SPLITS
from rowmill.viewer.builds import Build

WITH_EXAMPLE: Final = {"tokens_from": "0"}
"""The filter of rows of which an example was made: not those that were rejected when they were tokenized."""

NOTED_COLUMNS: Final = (
    "extracted_think_from_content", "moved_reasoning_keys", "dropped_think_messages", "tools_present",
    "tools_parsed_from_string",
)  # fmt: skip
"""The columns of the view `rows` that say what was noted as a row was read."""

STATES_OF_SEQUENCES: Final = frozenset({"not_scheduled", "remainder"})
"""States of sequences that no step reads."""
IN_NO_STEP: Final = "in_no_step"
"""The state, in the list of what is left out, of examples in such sequences."""


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
            of_dataset = f"dataset = {quote_text(dataset)} and " if dataset else ""
            columns = "dataset, stage, check_name, severity, value, bound"
            return self.of("sql", q=f"from check_results select {columns} where {of_dataset}passed order by all")
        if name in ("rejected", "left out"):
            return self.of("rejects", dataset=dataset)
        if name in ("sequences", "fill"):
            packed = self.build.find_output(dataset, PACKED_SHARDS) if dataset else None
            return self.of("steps", 0) if packed is None else self.of_sequence(str(dataset), "train", 0)
        order = {"tokens": "-tokens", "trained": "-trained"}.get(name)
        return self.of("rows", dataset=dataset, order=order, **(WITH_EXAMPLE if name == "examples" else {}))

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
        if state in STATES_OF_SEQUENCES:
            return self.of("left_out", dataset=dataset, state=IN_NO_STEP)
        if state in UNUSED_STATES or branch.name == "dropped by packing":
            return self.of("left_out", dataset=dataset, state=state if state in UNUSED_STATES else None)
        if branch.kind == "rejected":
            return self.of("rejects", dataset=dataset)
        if branch.kind in ("trained", "context"):
            return self.of("rows", dataset=dataset, order="-trained" if branch.kind == "trained" else "trained")
        return ""

    def of_bin(self, output: Manifest, histogram: str, lower: float, upper: float) -> str:
        """Return the address of a bar of a histogram; of sequences, groups and ranks, a query that names them."""
        dataset = output.key[1] if len(output.key) == 3 else ""
        ranges = {"lengths": ("original", 1), "example_tokens": ("tokens", 1), "trained_share": ("share", 100)}
        if histogram in ranges:
            name, scale = ranges[histogram]
            bounds: dict[str, object] = {f"{name}_from": f"{lower * scale:g}", f"{name}_below": f"{upper * scale:g}"}
            return self.of("rows", dataset=dataset, **bounds)
        if histogram == "fill":
            # A sequence that is full is in the last bin.
            below = "" if upper >= 1 else f" and fill < {upper:g}"
            columns = "dataset, split, sequence_id, tokens, trained_tokens, fill"
            where = f"dataset = {quote_text(dataset)} and fill >= {lower:g}{below}"
            return self.of("sql", q=f"from sequences select {columns} where {where} order by fill, split, sequence_id")
        if histogram == "rank_load":
            # Its last bar has the highest load.
            below = "<=" if upper == output.histograms[histogram].edges[-1] else "<"
            where = f"trained_tokens >= {lower:.17g} and trained_tokens {below} {upper:.17g}"
            columns = "step, rank, sequences, tokens, trained_tokens"
            return self.of("sql", q=f"from rank_steps select {columns} where {where} order by step, rank")
        if histogram == "group_sizes":
            size = f"count(*) >= {lower:g} and count(*) < {upper:g}"
            columns = "group_key, count(*) as rows, string_agg(row_id, ' ') as row_ids"
            where = f"dataset = {quote_text(dataset)} and group_key is not null"
            query = f"from rows select {columns} where {where} group by group_key having {size} order by rows desc, 1"
            return self.of("sql", q=query)
        return ""

    def of_bar(self, output: Manifest, plot: str, name: str) -> str:
        """Return the address of a bar with a name: of a class of tokens, of a file or of a rank."""
        dataset = output.key[1] if len(output.key) == 3 else None
        if plot == "token_classes":
            return self._of_token_class(dataset, None, name)
        if plot == "files":
            return self.of("rows", dataset=dataset, file=name) if output.stage == RAW_DATASET else ""
        if plot == "ranks" and (found := re.match(r"rank-0*(\d+)", name)):
            return f"{self.of('steps', 0)}#rank-{found[1]}"
        return ""

    def _of_token_class(self, dataset: str | None, split: str | None, name: str) -> str:
        """Return the address of the rows that tokens of a class are of; padding is of none."""
        if name in ("padding", "shared"):
            return ""
        if name == "dropped":
            return self.of("left_out", dataset=dataset, split=split)
        wanted = SHORTENED if name == "truncated" else {"order": "-trained" if name == "trained" else "trained"}
        return self.of("rows", dataset=dataset, split=split, **wanted)

    def of_cell(self, output: Manifest | None, table: str, column: str, row: Mapping[str, object]) -> str:
        """Return the address of a cell of an output's table."""
        key = () if output is None else output.key
        stage = "" if output is None else output.stage
        dataset = str(row["dataset"]) if "dataset" in row else key[1] if len(key) == 3 else None
        dataset = None if dataset == "all" else dataset
        split = str(row["split"]) if row.get("split") in SPLITS else None
        if table == "changes":
            return self.of_changes()
        if table == "datasets":
            return self.of("rows", dataset=dataset) if column == "dataset" else self.of_number(column, dataset)
        if table in ("ledger", "rejects"):
            return self._of_ledger_cell(stage, dataset, column, row)
        if table == "token_ledger":
            return self._of_token_class(dataset, split, str(row["class"]))
        filters = {
            "schemas": ("schema", "schema"), "unknown_roles": ("role", "role"), "largest_groups": ("group", "group"),
        }  # fmt: skip
        if table in filters:
            name, of = filters[table]
            return self.of("rows", dataset=dataset, **{name: row[of]})
        if table == "domains":
            wanted = WITH_EXAMPLE if column in ("domain", "examples") else SHORTENED
            return self.of("rows", dataset=dataset, domain=row["domain"], **wanted)
        if table in ("splits", "packing", "shares", "mixture", "schedule"):
            return self._of_split_cell(dataset, split or "train", column, row)
        if table == "stages" and stage == TRUNCATION_STATS:
            return self.of("rows", dataset=dataset, removed=row["stage"], order="-removed")
        if table == "what_if" and column in ("examples_over", "trained_lost"):
            return self.of("rows", dataset=dataset, original_from=int(str(row["seq_len"])) + 1, order="-tokens")
        if table == "quantiles":
            return self.of("rows", dataset=dataset, original_from=row["tokens"], order="tokens")
        if table == "lengths" and "lower" in row:
            bounds = {"original_from": row["lower"], "original_below": row["upper"]}
            return self.of("rows", dataset=dataset, split=row["split"], **bounds)
        if table == "files" and "file" in row and stage == RAW_DATASET:
            return self.of("rows", dataset=dataset, file=row["file"])
        if table == "reasoning_and_tools" and (noted := str(row["found"]).replace(" ", "_")) in NOTED_COLUMNS:
            return self.of("rows", dataset=dataset, noted=noted)
        if table == "control_strings":
            return self.of("rows", dataset=dataset, q=row["string"])
        if table == "ranks":
            return self.of_bar(output, "ranks", str(row["rank"])) if output is not None else ""
        return ""

    def _of_ledger_cell(self, stage: str, dataset: str | None, column: str, row: Mapping[str, object]) -> str:
        reason, state = row.get("reason"), str(row.get("state", "rejected"))
        if column not in ("reason", "records", "rows", "state"):
            return ""
        if stage == TRAINING_SPLITS:
            # Its records are sequences.
            return self.of("steps", 0) if state == KEPT else self.of("left_out", state=IN_NO_STEP)
        if state == KEPT:
            return self.of("rows", dataset=dataset, **({} if stage == CANONICAL_ROWS else WITH_EXAMPLE))
        if reason:
            return self.of("rejects", dataset=dataset, reason=reason)
        return self.of("left_out", dataset=dataset, state=state)

    def _of_split_cell(self, dataset: str | None, split: str, column: str, row: Mapping[str, object]) -> str:
        """Return the address of a cell of a table with a line for each dataset, or for each split of one."""
        if column in ("weight", "wanted", "wanted_share"):
            return ""
        if row.get("state") in STATES_OF_SEQUENCES and column != "dataset":
            return self.of("left_out", dataset=dataset, state=IN_NO_STEP)
        if column == "dataset":
            return self.of("rows", dataset=dataset)
        if column in ("sequences", "segments_each", "fill", "state", "passes"):
            return self.of_sequence(str(dataset), split, 0) if dataset is not None else ""
        order = {"tokens": "-tokens", "trained_tokens": "-trained", "trained_share": "-trained"}.get(column)
        return self.of("rows", dataset=dataset, split=split, order=order, **WITH_EXAMPLE)


def quote_text(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"
