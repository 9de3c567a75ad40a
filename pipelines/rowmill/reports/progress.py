"""Progress of a running build: a live line on a terminal, a plain line every few seconds elsewhere.

What belongs here: receiving progress and finished steps, rates and remaining time, and showing them. What does not: the
text of a finished step (`reports/console.py`).
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rowmill.build.runner import StepReport
from rowmill.build.steps import Project, Step
from rowmill.checks.judge import CheckResult
from rowmill.core import number_text
from rowmill.core.console import DIM
from rowmill.reports import console

PRINT_INTERVAL_S = 5.0
"""Seconds between two plain lines."""


class BuildProgress:
    """Shows the progress of a build, inside `with`; pass it as `progress`, and its methods `begin` and `finish`.

    Finished steps are printed to `screen`. Without a terminal there, progress lines are printed to `aside`.
    """

    def __init__(self, project: Project, steps: Sequence[Step], screen: Console, aside: Console) -> None:
        self._project = project
        self._steps = list(steps)
        self._scope: tuple[str | None, ...] = ()
        self._screen = screen
        self._aside = aside
        self._printed_s = 0.0
        self._rates = RateMeter()
        self._live = _make_live_line(screen) if screen.is_terminal else None
        self._task = self._live.add_task("", total=None, rates="") if self._live else None

    def __enter__(self) -> Self:
        """Print the title and start the live line."""
        self._print(console.render_build_title(self._project, self._steps))
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the live line."""
        if self._live is not None:
            self._live.stop()

    def __call__(
        self, where: str, *, done: int, total: int, rows: int, total_rows: int, tokens: int, seconds: float
    ) -> None:
        """Receive the progress of the current step: `done` of `total` parts are finished."""
        rates = self._rates.describe(where, rows=rows, total_rows=total_rows, tokens=tokens, seconds=seconds)
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=rows, total=total_rows, rates=rates)
        elif seconds - self._printed_s >= PRINT_INTERVAL_S:
            self._printed_s = seconds
            self._aside.print(f"{where}: {done} of {total} parts, {rates}")

    def begin(self, step: Step) -> None:
        """Receive the step that begins: print its dataset if that is another than before, and reset the live line."""
        if self._scope != (step.dataset,):
            self._scope = (step.dataset,)
            self._print(console.render_scope_title(self._project, step))
        self._printed_s = 0.0
        if self._live is not None and self._task is not None:
            self._live.reset(self._task, description=step.label, total=None, rates="")

    def finish(self, step: Step, report: StepReport, results: Sequence[CheckResult]) -> None:
        """Receive a finished step."""
        self._print(console.render_step(step, report, results))

    def _print(self, shown: RenderableType) -> None:
        (self._live.console if self._live is not None else self._screen).print(shown)


def _make_live_line(screen: Console) -> Progress:
    columns = (
        TextColumn(" "),
        SpinnerColumn(style="cyan"),
        TextColumn("{task.description:<20}", style="cyan"),
        BarColumn(bar_width=20, complete_style="cyan", pulse_style="cyan", style="bright_black"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rates]}", style=DIM),
    )
    return Progress(*columns, console=screen, transient=True, refresh_per_second=8)


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
        return f"{_format_rates(rows - first_rows, tokens - first_tokens, since_s)}, {_format_time_left(left_s)}"


def _format_rates(rows: int, tokens: int, seconds: float) -> str:
    rates = [f"{format_short_number(rows / seconds)} rows/s"]
    if tokens:
        rates.append(f"{format_short_number(tokens / seconds)} tokens/s")
    return ", ".join(rates)


def _format_time_left(seconds: float) -> str:
    return f"{number_text.format_seconds(seconds)} left"


def format_short_number(value: float) -> str:
    """Format a rate with three digits: `830`, `12.3k`, `1.24M`."""
    for unit in ("", "k", "M"):
        if value < 999.5:
            return f"{value:.3g}{unit}" if unit else f"{value:.0f}"
        value /= 1000
    return f"{value:.3g}G"
