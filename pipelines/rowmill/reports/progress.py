"""Progress of a running build: live lines on a terminal, a plain line every few seconds elsewhere."""

from collections.abc import Sequence
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column

from rowmill.core import arrays
from rowmill.core.console import DIM, escape_control_characters
from rowmill.reports import console

if TYPE_CHECKING:
    from rowmill.build.runner import StepReport
    from rowmill.build.steps import Project, Step
    from rowmill.checks.judge import CheckResult

PRINT_INTERVAL_S = 5.0
"""Seconds between two plain lines."""
MAX_WAITING_LINES = 6
"""Datasets shown that wait; a recipe may have hundreds."""
WIDE_CELLS = 110
"""Columns of a terminal in which a line has a bar and a clock, too."""
ALL_DATASETS = "all datasets"


class BuildProgress:
    """Shows the progress of a build, inside `with`; pass it as `progress`, and its methods `begin` and `finish`.

    Finished steps are printed to `screen`. On a terminal, a line per dataset stays below them: the one that is built,
    with its stage, rates and time left, and those that wait. Without a terminal, progress lines are printed to `aside`.
    """

    def __init__(self, project: "Project", steps: "Sequence[Step]", screen: Console, aside: Console) -> None:
        self._project = project
        self._steps = list(steps)
        self._scope: tuple[str | None, ...] = ()
        self._screen = screen
        self._aside = aside
        self._printed_s = 0.0
        self._rates = RateMeter()
        self._lines = DatasetLines(self._steps, screen) if screen.is_terminal else None

    def __enter__(self) -> Self:
        """Print the title and start the live lines."""
        datasets = arrays.format_count(len(self._project.recipe.datasets), "dataset")
        count = arrays.format_count(len(self._steps), "step")
        self._print(console.render_title(self._project, arrays.join_facts([datasets, count])))
        if self._lines is not None:
            self._lines.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the live lines."""
        if self._lines is not None:
            self._lines.live.stop()

    def __call__(
        self, where: str, *, done: int, total: int, rows: int, total_rows: int, tokens: int, seconds: float
    ) -> None:
        """Receive the progress of the current step: `done` of `total` parts are finished."""
        rates = self._rates.describe(where, rows=rows, total_rows=total_rows, tokens=tokens, seconds=seconds)
        if self._lines is not None:
            self._lines.update(where, rows, total_rows, rates)
        elif seconds - self._printed_s >= PRINT_INTERVAL_S:
            self._printed_s = seconds
            self._aside.print(f"{where}: {done} of {total} parts, {rates}")

    def begin(self, step: "Step") -> None:
        """Receive the step that begins: print its dataset if that is another than before, and show it in its line."""
        if self._scope != (step.dataset,):
            self._scope = (step.dataset,)
            self._print(console.render_scope(step.dataset))
        self._printed_s = 0.0
        if self._lines is not None:
            self._lines.begin(step.dataset, step.label)

    def finish(self, step: "Step", report: "StepReport", results: "Sequence[CheckResult]") -> None:
        """Receive a finished step."""
        self._print(console.render_step(self._project, step, report, results))
        if self._lines is not None:
            self._lines.finish(step)

    def _print(self, shown: RenderableType) -> None:
        (self._lines.live.console if self._lines is not None else self._screen).print(shown)


class DatasetLines:
    """The live lines of a terminal: one per dataset that is built or waits, and one for the stages of all datasets.

        chats          tokenized_examples  3 of 5  ━━━━━━━━━━━━     0:00:04  830 rows/s, 12.3k tokens/s, 4.0 s left
        instructions   waits               0 of 5
        all datasets   waits               0 of 2

    A line disappears with its last step, whose result is printed above. Waiting lines are shown from the next on.
    """

    def __init__(self, steps: "Sequence[Step]", screen: Console) -> None:
        self._left: dict[str | None, int] = {}
        for step in steps:
            self._left[step.dataset] = self._left.get(step.dataset, 0) + 1
        self._totals = dict(self._left)
        columns: list[ProgressColumn] = [
            TextColumn(" "),
            StartedColumn(SpinnerColumn(style="cyan")),
            TextColumn("{task.description}"),
            TextColumn("{task.fields[stage]}", style="cyan"),
            TextColumn("{task.fields[steps]}", style=DIM),
        ]
        if screen.width >= WIDE_CELLS:
            columns += [
                StartedColumn(BarColumn(bar_width=16, complete_style="cyan", pulse_style="cyan", style="bright_black")),
                StartedColumn(TimeElapsedColumn()),
            ]
        columns.append(
            TextColumn("{task.fields[rates]}", style=DIM, table_column=Column(no_wrap=True, overflow="ellipsis"))
        )
        self.live = Progress(*columns, console=screen, transient=True, refresh_per_second=8)
        self._tasks = {
            scope: self.live.add_task(ALL_DATASETS if scope is None else escape_control_characters(scope), total=None,
                                      start=False, visible=False, stage="waits", steps=f"0 of {count}", rates="")
            for scope, count in self._left.items()
        }  # fmt: skip
        self._entered: list[str | None] = []
        self._show_waiting()

    def begin(self, scope: str | None, label: str) -> None:
        """Show a step in its dataset's line, from its first second."""
        if self._entered and self._entered[-1] != scope:
            # A closed gate leaves some of its steps out.
            self.live.update(self._tasks[self._entered[-1]], visible=False)
        self._entered.append(scope)
        steps = self._format_steps(scope)
        self.live.reset(self._tasks[scope], total=None, visible=True, stage=label, steps=steps, rates="")
        self._show_waiting()

    def update(self, where: str, rows: int, total_rows: int, rates: str) -> None:
        """Show how far the step of `chats/packed_shards` or `training_splits` is, begun or not."""
        first, _, rest = where.partition("/")
        scope, label = (first, rest) if first in self._tasks else (None, where)
        if scope not in self._tasks:
            # A step made ahead of a build, for a dataset that it does not build.
            return
        if scope not in self._entered[-1:]:
            self.begin(scope, label)
        self.live.update(self._tasks[scope], completed=rows, total=total_rows, rates=rates)

    def finish(self, step: "Step") -> None:
        """Count a step, and remove the line if it was its dataset's last."""
        scope = step.dataset
        self._left[scope] -= 1
        self.live.update(self._tasks[scope], steps=self._format_steps(scope), visible=self._left[scope] > 0)

    def _format_steps(self, scope: str | None) -> str:
        return f"{self._totals[scope] - self._left[scope]} of {self._totals[scope]}"

    def _show_waiting(self) -> None:
        """Show the next datasets that wait, as many as `MAX_WAITING_LINES`."""
        waiting = (scope for scope in self._tasks if scope not in self._entered)
        for scope in islice(waiting, MAX_WAITING_LINES):
            self.live.update(self._tasks[scope], visible=True)


class StartedColumn(ProgressColumn):
    """A column that is empty in the lines of datasets that wait."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        """Return what the wrapped column shows of a line that has begun."""
        return self._column.render(task) if task.started else ""


class RateMeter:
    """Words the rates of a stage, and the time that is left of it: `830 rows/s, 12.3k tokens/s, 4.0 s left`.

    A stage's first part takes longer, because it opens the tokenizer and probes the template. So rates count from the
    end of the first part, and until then nothing is said of the time left.
    """

    def __init__(self) -> None:
        """Begin without a stage."""
        self._where = ""
        self._first: tuple[int, int, float] | None = None

    def describe(self, where: str, *, rows: int, total_rows: int, tokens: int, seconds: float) -> str:
        """Return the rates of a stage after its parts with so many rows and tokens took so long."""
        if where != self._where or not rows:
            self._where, self._first = where, None
        if not rows or seconds <= 0:
            return "starting"
        if self._first is None:
            self._first = rows, tokens, seconds
            return _format_rates(rows, tokens, seconds)
        first_rows, first_tokens, first_seconds = self._first
        since_s = seconds - first_seconds
        if rows <= first_rows or since_s <= 0:
            return _format_rates(rows, tokens, seconds)
        left_s = since_s / (rows - first_rows) * (total_rows - rows)
        rates = _format_rates(rows - first_rows, tokens - first_tokens, since_s)
        return f"{rates}, {arrays.format_seconds(left_s)} left"


def _format_rates(rows: int, tokens: int, seconds: float) -> str:
    rates = [f"{format_short_number(rows / seconds)} rows/s"]
    if tokens:
        rates.append(f"{format_short_number(tokens / seconds)} tokens/s")
    return ", ".join(rates)


def format_short_number(value: float) -> str:
    """Format a rate with three digits: `830`, `12.3k`, `1.24M`."""
    for unit in ("", "k", "M"):
        if value < 999.5:
            return f"{value:.3g}{unit}" if unit else f"{value:.0f}"
        value /= 1000
    return f"{value:.3g}G"
