"""Forecasts what a build would do with each step, and why, for `rowmill plan`."""

from collections.abc import Mapping
from dataclasses import dataclass

from rowmill.build.gate import open_generated_source
from rowmill.build.prepare import (
    find_outside_change,
    find_reusable_output,
    make_stage_context,
    prepare_step,
    require_ready,
)
from rowmill.build.share_versions import find_held_version, follow_held_versions
from rowmill.build.steps import Project, Step, plan_steps
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.tokenization import tokenizer_source


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The forecast of one step: the action, and the reason."""

    step: Step
    action: str
    why: str
    manifest: Manifest | None = None
    """The output that would be reused."""


@tokenizer_source.hold_commits()
def forecast_steps(project: Project) -> list[StepForecast]:
    """Forecast each step; writes nothing except scans of changed sources.

    A step after one that must be made is forecast as `make if changed`: its input's content is not known yet.
    """
    require_ready(project, plan_steps(project))
    known: dict[StageKey, Manifest] = {}
    return [_forecast_step(project, step, known) for step in plan_steps(project)]


def _forecast_step(project: Project, step: Step, known: dict[StageKey, Manifest]) -> StepForecast:
    """Forecast one step from the manifests `known` before it; adds the step's manifest if it would be reused."""
    if step.on_demand:
        command = f"rowmill {step.stage.command} {step.recipe}"
        return StepForecast(step, "on request", f"`{command}` makes it from a trained model")
    held = find_held_version(project.store, step.key)
    if held is not None:
        known[step.key] = manifest.load_version(project.store, step.key, held.version)
        return StepForecast(step, "held", held.sentence, known[step.key])
    waiting = [key for key in step.inputs if key not in known]
    if waiting:
        return StepForecast(step, "make if changed", f"{'/'.join(waiting[0][1:])} must be made first")
    inputs = follow_held_versions(project.store, {key: known[key] for key in step.inputs})
    inputs |= open_generated_source(project, step)
    context = make_stage_context(project, step, inputs)
    fingerprint, prepared = prepare_step(context, step)
    kept = find_reusable_output(project.store, step, fingerprint, prepared)
    if kept is not None:
        known[step.key] = kept
        moved = find_outside_change(step, context, kept)
        same = f"; {moved}, with the same tokenizer" if moved else ""
        return StepForecast(step, "reuse", f"version {kept.version[:12]} of {kept.built_at[:19]}{same}", kept)
    earlier = manifest.load_current_if_intact(project.store, step.key)
    return StepForecast(
        step, "make", find_outside_change(step, context, earlier) or _explain_rebuild(step, earlier, inputs)
    )


def _explain_rebuild(step: Step, earlier: Manifest | None, inputs: Mapping[StageKey, Manifest]) -> str:
    if earlier is None:
        return "never built"
    if earlier.code_version != step.code_version:
        return "its options changed"
    moved = [key for key, one in inputs.items() if earlier.inputs.get("/".join(key)) != one.version]
    if moved:
        return f"{'/'.join(moved[0][1:])} changed"
    return "its template or kept files changed" if step.inputs else "its source files changed"
