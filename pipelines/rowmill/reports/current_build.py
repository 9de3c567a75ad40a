"""The current build as the report shows it: manifests, check results and flows, each loaded once."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rowmill.build.steps import Project, Step, plan_steps
from rowmill.checks.judge import CheckResult, load_check_results
from rowmill.core.number_text import format_count
from rowmill.reports import flows
from rowmill.reports.flows import Flow
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether training may use the build: a mark, its colour's class in the page, and a sentence."""

    mark: str
    style: str
    sentence: str


@dataclass(frozen=True)
class CurrentBuild:
    """The current versions of all stages, None where a stage was never built."""

    project: Project
    made: Mapping[StageKey, Manifest | None]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The recipe's steps."""
        return plan_steps(self.project)

    @cached_property
    def results(self) -> Mapping[StageKey, list[CheckResult]]:
        """The check results of each step's current version."""
        found: dict[StageKey, list[CheckResult]] = {}
        for step in self.steps:
            one = self.made[step.key]
            found[step.key] = [] if one is None else load_check_results(self.project.store, one, step.shown_thresholds)
        return found

    @cached_property
    def failed(self) -> list[CheckResult]:
        """Every failed check, those that block first."""
        found = [result for step in self.steps for result in self.results[step.key] if result.failed]
        return sorted(found, key=lambda one: (not one.blocking, bool(one.waiver)))

    @cached_property
    def missing(self) -> list[Step]:
        """The steps that a build makes and that have no output yet."""
        return [step for step in self.steps if self.made[step.key] is None and not step.on_demand]

    @cached_property
    def outdated(self) -> list[Step]:
        """The steps whose options changed since their output was made."""
        return [step for step in self.steps if (one := self.made[step.key]) and one.code_version != step.code_version]

    @cached_property
    def waivers(self) -> list[str]:
        """The waivers that the current versions were made with."""
        return sorted({waiver for one in self.made.values() if one is not None for waiver in one.waivers})

    @property
    def verdict(self) -> Verdict:
        """The build in one sentence."""
        blocking = [one for one in self.failed if one.blocking]
        if blocking:
            closed = "failed check closes its gate" if len(blocking) == 1 else "failed checks close their gates"
            return Verdict("✗", "bad", f"Not ready: {len(blocking)} {closed}")
        if self.missing:
            unbuilt = format_count(len(self.missing), "step")
            return Verdict("!", "look", f"Not complete: {unbuilt} of {len(self.steps)} not built")
        if self.outdated:
            return Verdict("!", "look", f"Out of date: options of {format_count(len(self.outdated), 'step')} changed")
        if self.failed:
            return Verdict("✓", "good", f"Ready to train, with {format_count(len(self.failed), 'warning')}")
        return Verdict("✓", "good", "Ready to train: everything is built, and every applicable check passed")

    def find_step(self, dataset: str | None, stage: str) -> Step | None:
        """Return the step of a stage, if the recipe has it."""
        return next((step for step in self.steps if step.dataset == dataset and step.name == stage), None)

    def find_output(self, dataset: str | None, stage: str) -> Manifest | None:
        """Return the current output of a stage, if there is one."""
        step = self.find_step(dataset, stage)
        return None if step is None else self.made[step.key]

    @cached_property
    def flows(self) -> Mapping[str, tuple[Flow, Flow]]:
        """The flows of each dataset: of its rows, and of its tokens."""
        recipe = self.project.recipe
        chains = {name: flows.select_chain(self.made, recipe.name, name) for name in recipe.datasets}
        return {
            name: (flows.trace_rows(chain, name), flows.trace_tokens(chain, name, seq_len=recipe.seq_len))
            for name, chain in chains.items()
        }


def load_current_build(project: Project) -> CurrentBuild:
    """Load the current versions of a recipe's stages."""
    return CurrentBuild(
        project, {step.key: manifest.load_current(project.store, step.key) for step in plan_steps(project)}
    )
