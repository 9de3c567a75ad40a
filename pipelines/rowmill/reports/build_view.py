"""One view of a recipe's current build, which the terminal, the report, Dagster and JSON render.

    BuildView        verdict, check results, counts of datasets, what was left out, training, flows
    changes          facts on files, rows, tokens, drift and checks since the last build, which renderers join
    a stage's output its tables (`list_tables`), its plots (`plots.draw_plots`), its line (`console.summarize_output`)

Each manifest is loaded once. Shares stay numbers, and rows keep their order, until a renderer words them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rowmill.alerts.history import list_undelivered
from rowmill.build.comparison import BuildChanges, FileChanges, Moves, find_changes
from rowmill.build.steps import Project, Step, plan_steps
from rowmill.checks.drift import Shift
from rowmill.checks.judge import CheckResult, load_check_results
from rowmill.core.arrays import NO_NUMBER, format_count, format_percent, format_time
from rowmill.core.stage_names import (
    CANONICAL_ROWS,
    EXPORTS,
    PACKED_SHARDS,
    TOKENIZED_EXAMPLES,
    TRAINING_SPLITS,
    TRUNCATION_STATS,
)
from rowmill.exports import Export
from rowmill.inspection import trace
from rowmill.reports import flows
from rowmill.reports.flows import Flow
from rowmill.schema import manifest
from rowmill.schema.counts import CountsT
from rowmill.schema.example_counts import ExampleCounts
from rowmill.schema.ledger import KEPT
from rowmill.schema.length_counts import LengthCounts
from rowmill.schema.manifest import DisplayTable, Manifest, StageKey
from rowmill.schema.order_counts import OrderCounts
from rowmill.schema.row_counts import RowCounts
from rowmill.schema.shard_counts import PackingCounts
from rowmill.stats.views import describe_estimate

SUMMARY_COLUMNS = ("dataset", "records", "rows", "rejected", "examples", "tokens", "trained", "sequences", "fill")


def load_build_view(project: Project) -> "BuildView":
    """Load the current versions of a recipe's stages."""
    steps = plan_steps(project)
    return BuildView(project, {step.key: manifest.load_current(project.store, step.key) for step in steps})


@dataclass(frozen=True)
class BuildView:
    """The current versions of all stages, None where a stage was never built."""

    project: Project
    made: Mapping[StageKey, Manifest | None]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return plan_steps(self.project)

    def find_output(self, dataset: str | None, stage: str) -> Manifest | None:
        """Return the current output of a stage of a dataset or of the recipe, if there is one."""
        return self.made.get((self.project.recipe.name, *(() if dataset is None else (dataset,)), stage))

    def find_counts(self, dataset: str | None, stage: str, kind: type[CountsT]) -> CountsT | None:
        """Return the counts of a class of a stage's current output; None if there is no output, or it has none."""
        output = self.find_output(dataset, stage)
        return None if output is None else output.find_counts(kind)

    # ── Checks ─────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def results(self) -> Mapping[StageKey, list[CheckResult]]:
        """The check results of each step's current version."""
        store = self.project.store
        return {
            step.key: []
            if (output := self.made[step.key]) is None
            else load_check_results(store, output, step.shown_thresholds)
            for step in self.steps
        }

    @cached_property
    def failed(self) -> list[CheckResult]:
        """Every failed check, those that block first."""
        failures = [result for step in self.steps for result in self.results[step.key] if result.failed]
        return sorted(failures, key=lambda result: (not result.blocking, bool(result.waiver)))

    @cached_property
    def missing(self) -> list[Step]:
        """The steps that a build makes and that have no output yet."""
        return [step for step in self.steps if self.made[step.key] is None and not step.on_demand]

    @cached_property
    def waivers(self) -> list[str]:
        """The waivers that the current versions were made with."""
        return sorted({waiver for output in self.made.values() if output is not None for waiver in output.waivers})

    @property
    def verdict(self) -> tuple[str, str, str]:
        """Whether training may use the build: a mark, its style, and a sentence."""
        blocking = sum(result.blocking for result in self.failed)
        outdated = sum(
            (output := self.made[step.key]) is not None and output.code_version != step.code_version
            for step in self.steps
        )
        if blocking:
            closed = "failed check closes its gate" if blocking == 1 else "failed checks close their gates"
            return "✗", "bad", f"Not ready: {blocking} {closed}"
        if self.missing:
            unbuilt = format_count(len(self.missing), "step")
            return "!", "look", f"Not complete: {unbuilt} of {len(self.steps)} not built"
        if outdated:
            return "!", "look", f"Out of date: options of {format_count(outdated, 'step')} changed"
        if self.failed:
            return "✓", "good", f"Ready to train, with {format_count(len(self.failed), 'warning')}"
        return "✓", "good", "Ready to train: everything is built, and every applicable check passed"

    @cached_property
    def changes(self) -> BuildChanges | None:
        """What changed since the build that was published before; None if there was none."""
        return find_changes(self.project, self.made)

    @cached_property
    def undelivered(self) -> list[str]:
        """Why the last alert did not reach everybody."""
        has_alerts = bool(self.project.recipe.execution.alerts)
        return list_undelivered(self.project.store, self.project.recipe.name) if has_alerts else []

    # ── Datasets ───────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def dataset_counts(self) -> DisplayTable:
        """A line of `SUMMARY_COLUMNS` per dataset, None where nothing is built; of several, their sum last."""
        names = list(self.project.recipe.datasets)
        lines = [self._count_datasets(name, [name]) for name in names]
        return DisplayTable(
            SUMMARY_COLUMNS, (*lines, *([self._count_datasets("all", names)] if len(names) > 1 else ()))
        )

    def _count_datasets(self, label: str, names: Sequence[str]) -> tuple[object, ...]:
        """Sum datasets; the shares are of all tokens, and of the capacity of all sequences."""

        def find_all(stage: str, kind: type[CountsT]) -> list[CountsT]:
            return [counts for name in names if (counts := self.find_counts(name, stage, kind)) is not None]

        rows, examples = find_all(CANONICAL_ROWS, RowCounts), find_all(TOKENIZED_EXAMPLES, ExampleCounts)
        packed = find_all(PACKED_SHARDS, PackingCounts)
        tokens, sequences = sum(counted.tokens for counted in examples), sum(counted.sequences for counted in packed)
        trained = sum(counted.trained_tokens for counted in examples)
        fill = format_percent(sum(counted.tokens for counted in packed), sequences * self.project.recipe.seq_len)
        if len(packed) == 1:
            # With padded segments, the stage counts the padding as well.
            fill = format_percent(packed[0].share_filled())
        return (
            label,
            sum(counted.records for counted in rows) if rows else None,
            sum(counted.kept for counted in rows) if rows else None,
            sum(counted.rejected for counted in (*rows, *examples)),
            sum(counted.examples for counted in examples) if examples else None,
            tokens if examples else None,
            format_percent(trained, tokens) if examples else NO_NUMBER,
            sequences if packed else None,
            fill,
        )

    def find_counted_outputs(self, name: str) -> dict[str, Manifest]:
        """Return a dataset's current outputs whose numbers `rowmill stats` shows, by stage."""
        stages = (CANONICAL_ROWS, TOKENIZED_EXAMPLES, TRUNCATION_STATS)
        return {stage: output for stage in stages if (output := self.find_output(name, stage)) is not None}

    def list_left_out(self, name: str) -> Iterator[tuple[str, str, str, int]]:
        """Yield what a dataset's stages did not keep, as stage, state, reason and records, the most frequent first."""
        for stage, output in self.find_counted_outputs(name).items():
            for state, reason, count in sorted(output.ledger, key=lambda line: -line[2]):
                if state != KEPT:
                    yield stage, state, reason, count

    def list_hints(self, name: str) -> list[str]:
        """Return a dataset's hints; the limit in them is the option that sets it, `seq_len` if the dataset has none."""
        counts = self.find_counts(name, TRUNCATION_STATS, LengthCounts)
        dataset = self.project.recipe.datasets[name]
        option, value = dataset.format.get_length_limit(dataset)
        shown = "seq_len" if value is None else option
        return [hint.replace("max_length", shown) for hint in counts.hints] if counts is not None else []

    @cached_property
    def flows(self) -> Mapping[str, tuple[Flow, Flow]]:
        """The flows of each dataset: of its rows, and of its tokens."""
        recipe = self.project.recipe
        chains = {name: trace.select_chain(self.made, recipe.name, name) for name in recipe.datasets}
        return {
            name: (
                flows.balance_levels(flows.iterate_row_levels(chain, name)),
                flows.balance_levels(flows.iterate_token_levels(chain, name, seq_len=recipe.seq_len)),
            )
            for name, chain in chains.items()
        }

    # ── Training ───────────────────────────────────────────────────────────────────────────────────

    def describe_training(self) -> list[str]:
        """Describe what training will see: steps, padding, epochs, and sequences never seen; empty without an order."""
        splits = self.find_output(None, TRAINING_SPLITS)
        if splits is None:
            return []
        order = splits.get_counts(OrderCounts)
        shown = f"{format_count(order.places, 'sequence')} in {format_count(order.steps, 'step')}"
        padding = 1 - order.tokens / max(order.places * self.project.recipe.seq_len, 1)
        fillers = f", {format_count(order.fillers, 'filler sequence')} included" if order.fillers else ""
        lines = [f"{shown}; {format_percent(padding)} of their positions are padding{fillers}"]
        available = {row[0]: int(row[3]) for row in splits.tables["splits"].rows if row[1] == "train"}
        for dataset, _, _, epochs, _, _ in splits.tables["mixture"].rows:
            sequences = available.get(dataset, 0)
            unseen = round(sequences * max(1 - epochs, 0))
            rest = f"; {unseen:,} of its {format_count(sequences, 'sequence')} are never scheduled" if unseen else ""
            lines.append(f"{dataset}: {epochs:,.2f} {'epoch' if epochs == 1 else 'epochs'}{rest}")
        return lines

    def find_exports(self, names: Collection[str] = ()) -> list[tuple[Export, Manifest]]:
        """Return the recipe's exports that are built, or only those of the given names."""
        pairs = (
            (export, self.made.get((self.project.recipe.name, EXPORTS, export.name)))
            for export in self.project.recipe.exports
            if not names or export.name in names
        )
        return [(export, output) for export, output in pairs if output is not None]


# ── A stage's output ───────────────────────────────────────────────────────────────────────────────


def list_tables(output: Manifest) -> Iterator[tuple[str, DisplayTable, str]]:
    """Yield an output's tables by name, its ledgers last, and for estimates a note; without what a plot shows."""
    ledgers = {
        # What was kept and then the most frequent reasons: a page may not show all of them.
        "ledger": (
            ("state", "reason", "records"),
            sorted(output.ledger, key=lambda line: (line[0] != KEPT, -line[2], line)),
        ),
        "token_ledger": (("split", "class", "tokens"), output.token_ledger),
        "waivers": (("waiver",), [(waiver,) for waiver in output.waivers]),
    }
    shown_elsewhere = {*output.histograms, *(["tokens"] if output.token_ledger else [])}
    for name, table in output.tables.items():
        # A table of rejects with sample rows shows more than the ledger.
        repeats_ledger = name == "rejects" and output.ledger and len(table.columns) == 2
        if table.rows and name not in shown_elsewhere and not repeats_ledger:
            yield name, table, describe_estimate(name, table) or ""
    for name, (columns, rows) in ledgers.items():
        if rows:
            yield name, DisplayTable(columns, tuple(rows)), ""


def sum_token_classes(output: Manifest) -> dict[str, int]:
    """Return an output's tokens by class, over all splits."""
    counts: dict[str, int] = {}
    for _, token_class, tokens in output.token_ledger:
        counts[token_class] = counts.get(token_class, 0) + tokens
    return counts


# ── What changed since the last build ──────────────────────────────────────────────────────────────
#
# since 2026-11-26 02:03 UTC: files: 1 new, 1 changed; rows +120 -3, 4 in another split; tokens +9,120 -310
# chats: drift 0.12, languages: English 100 % → 95 %, German 0 % → 5 %
# chats/canonical_rows: rejects fails now, 3.3 %


NAMED_DATASETS = 5
"""Datasets and checks that are named in sentences: those with the largest drift."""
NOTHING_CHANGED = "the same files, rows and tokens"

_FILES = ("new", "gone", "changed")


def list_counts(changes: BuildChanges) -> list[str]:
    """Return what changed of the files, the rows and the tokens of all datasets; empty if nothing did."""
    datasets = changes.datasets
    new, gone, changed = (sum(getattr(one.files, name) for one in datasets) for name in _FILES)
    counts = [_format_files(FileChanges(new, gone, changed))]
    for noun in ("rows", "tokens"):
        moves = [getattr(one, noun) for one in datasets]
        total = Moves(*(sum(getattr(one, name) for one in moves) for name in ("added", "removed", "moved")))
        counts.append(f"{noun} {_format_moves(total)}" if total != Moves() else "")
    return [count for count in counts if count]


def list_shifts_and_checks(changes: BuildChanges, *, names_bins: bool = True) -> list[str]:
    """Return the drift of each dataset, then the checks whose result changed, a line for each.

    Names of bins are text from data; without them, no line has any.
    """
    most = [(one.dataset, one.shifts[0]) for one in changes.datasets if one.shifts]
    drifted = [(name, shift) for name, shift in most if shift.index is not None and shift.bins]
    shifts = [
        f"{name}: drift {shift.index:.2g}, {shift.distribution}{f': {_format_bins(shift)}' if names_bins else ''}"
        for name, shift in sorted(drifted, key=lambda pair: -(pair[1].index or 0))
    ]
    checks = [
        f"{one.stage}: {one.check} {f'fails now, {one.after}' if one.after else f'passes again, after {one.before}'}"
        for one in changes.checks
    ]
    named: list[str] = []
    for lines, noun in ((shifts, "dataset"), (checks, "check")):
        rest = len(lines) - NAMED_DATASETS
        named += [*lines[:NAMED_DATASETS], *([f"and {format_count(rest, noun)} more"] if rest > 0 else [])]
    return named


def describe_changes(changes: BuildChanges) -> list[str]:
    """Return the sentence of all datasets, then a line for each shift and check."""
    counts = "; ".join(list_counts(changes)) or NOTHING_CHANGED
    return [f"since {format_time(changes.published_at)}: {counts}", *list_shifts_and_checks(changes)]


def tabulate_changes(changes: BuildChanges) -> DisplayTable:
    """Return a row for each dataset that changed; the widest columns, which a narrow page cuts, are the last."""
    rows: list[tuple[str, ...]] = []
    for one in changes.datasets:
        files = ", ".join(one.files.named) or _format_files(one.files)
        more = one.files.new + one.files.gone + one.files.changed - len(one.files.named)
        drift, distribution, bins = "", "", ""
        if one.shifts:
            shift = one.shifts[0]
            drift = "too few rows" if shift.index is None else f"{shift.index:.3f}"
            distribution, bins = shift.distribution, _format_bins(shift)
        files = f"{files} and {more:,} more" if more else files
        rows.append((one.dataset, _format_moves(one.rows), _format_moves(one.tokens), drift, distribution, files, bins))
    return DisplayTable(("dataset", "rows", "tokens", "drift", "of", "files", "moved most"), tuple(rows))


def _format_files(files: FileChanges) -> str:
    counts = [f"{getattr(files, name):,} {name}" for name in _FILES if getattr(files, name)]
    return f"files: {', '.join(counts)}" if counts else ""


def _format_moves(moves: Moves) -> str:
    moved = f", {moves.moved:,} in another split" if moves.moved else ""
    return f"+{moves.added:,} -{moves.removed:,}{moved}" if moves != Moves() else ""


def _format_bins(shift: Shift) -> str:
    return ", ".join(f"{name} {format_percent(before)} → {format_percent(after)}" for name, before, after in shift.bins)
