"""What commands print with `--json`: one object per command, for programs.

Every object has `recipe` and `store`. Shares are numbers from 0 to 1. Fields may be added; a field that is there keeps
its name and meaning.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from rowmill.core.stage_names import TRUNCATION_STATS
from rowmill.reports.build_view import STATISTICS_STAGES
from rowmill.reports.console import format_key

if TYPE_CHECKING:
    from rowmill.build.preflight import Finding
    from rowmill.build.prepare import StepForecast
    from rowmill.build.runner import StepReport
    from rowmill.build.steps import Project, Step
    from rowmill.checks.judge import CheckResult
    from rowmill.inspection.verify import StageVerification
    from rowmill.reports.build_view import BuildView
    from rowmill.schema.manifest import Manifest


def format_object(project: "Project", fields: dict[str, Any]) -> str:
    """Return a command's answer as JSON text."""
    whole = {"recipe": project.recipe.name, "store": project.store.path(""), **fields}
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2).decode()


def describe_plan(forecasts: "Sequence[StepForecast]", remarks: "Sequence[Finding]") -> dict[str, Any]:
    """Describe what a build would do: `steps`, each with its action and why, and the remarks of the pre-flight."""
    steps = [
        {"stage": format_key(forecast.step.key), "action": forecast.action, "why": forecast.why}
        for forecast in forecasts
    ]
    return {"steps": steps, "remarks": [{"warning": remark.is_warning, "text": remark.text} for remark in remarks]}


def describe_build(built: "Iterable[tuple[Step, StepReport, Sequence[CheckResult]]]") -> list[dict[str, Any]]:
    """Describe the steps that a build ran, each with its version, time, facts and check results."""
    return [
        {
            "stage": format_key(step.key),
            "version": report.version,
            "reused": report.reused,
            "parts": report.parts,
            "parts_reused": report.parts_reused,
            "seconds": round(report.seconds, 3),
            "facts": report.manifest.facts,
            "checks": [_describe_result(result) for result in results],
        }
        for step, report, results in built
    ]


def describe_statistics(build: "BuildView") -> dict[str, Any]:
    """Describe each dataset: the facts of its stages up to the lengths, its ledger, the what-if table, and hints."""
    datasets: dict[str, Any] = {}
    hints: list[str] = []
    for name in build.project.recipe.datasets:
        outputs = {
            stage: output for stage in STATISTICS_STAGES if (output := build.find_output(name, stage)) is not None
        }
        what_if = outputs[TRUNCATION_STATS].tables.get("what_if") if TRUNCATION_STATS in outputs else None
        datasets[name] = {
            "facts": {stage: output.facts for stage, output in outputs.items()},
            "left_out": [
                dict(zip(("stage", "state", "reason", "records"), line, strict=True))
                for line in build.list_left_out(name)
            ],
            "what_if": [dict(zip(what_if.columns, row, strict=True)) for row in what_if.rows] if what_if else [],
        }
        hints += [f"{name}: {hint}" for hint in build.list_hints(name)]
    return {"datasets": datasets, "hints": hints}


def describe_verification(checked: "Sequence[StageVerification]") -> dict[str, Any]:
    """Describe each stage: its version, whether its options changed since, its check results and its damage."""
    return {
        "fails": any(stage.fails for stage in checked),
        "stages": [
            {
                "stage": format_key(stage.step.key),
                "version": None if stage.manifest is None else stage.manifest.version,
                "outdated": stage.is_outdated,
                "checks": [_describe_result(result) for result in stage.results],
                "damage": list(stage.damage),
                "disagreements": list(stage.disagreements),
                "files_read": stage.files,
                "bytes_read": stage.size_bytes,
                "files_not_read": stage.unread_files,
                "bytes_not_read": stage.unread_bytes,
            }
            for stage in checked
        ],
    }


def describe_versions(kept: "Sequence[Manifest]", current: "Manifest | None") -> dict[str, Any]:
    """Describe the kept versions of a stage, newest first."""
    return {
        "current": None if current is None else current.version,
        "versions": [
            {
                "version": output.version,
                "built_at": output.built_at,
                "run_id": output.run_id,
                "facts": output.facts,
                "waivers": list(output.waivers),
            }
            for output in reversed(kept)
        ],
    }


RESULT_FIELDS = ("check", "outcome", "blocking", "severity", "value", "wanted", "what", "remedy", "waiver")


def _describe_result(result: "CheckResult") -> dict[str, Any]:
    rest = {"causes": list(result.causes), "samples": [] if result.causes else list(result.samples)}
    return {name: getattr(result, name) for name in RESULT_FIELDS} | rest
