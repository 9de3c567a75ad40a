"""Causes of a failed check: the reasons with counts, an offending value, a file and a line."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dagster_rowmill import metadata
from rowmill.build import runner
from rowmill.build.gate import open_inputs
from rowmill.build.steps import plan_steps
from rowmill.checks.expectation_suite import render_expectations_page
from rowmill.core.console import render_text
from rowmill.core.errors import GateError
from rowmill.parts.accounts import MAX_VALUE_CHARS, clean_value
from rowmill.reports import report_page
from rowmill.reports.console import render_check_result
from tests.support.recipes import TO_ROWS, Workspace, chat, lines

EXAMPLES = (*TO_ROWS, "tokenized_examples", "truncation_stats")


def make_workspace(folder: Path, content: bytes | Iterable[Mapping[str, Any]], **groups: Any) -> Workspace:
    """Write a project of one dataset whose checks have their default bounds."""
    workspace = Workspace(folder)
    return workspace.one("a.jsonl", content, **groups, gates={})


def with_role(i: int, role: str) -> dict[str, Any]:
    row = chat(i)
    row["messages"][0]["role"] = role
    return row


def test_rejects_are_summarized_by_three_reasons_with_detail_and_line(tmp_path: Path) -> None:
    bad = [b"{", b'{"talk": []}', b"{", b'{"messages": []}', b"{", b'{"talk": []}', b'{"messages": "x"}', b""]
    content = lines(map(chat, range(3))) + b"\n" + b"\n".join(bad)

    one = make_workspace(tmp_path, content).build(only=TO_ROWS).result("rejects", "rows", "canonical_rows")

    first, second, third, rest = one.causes
    assert re.fullmatch(r"invalid_json: 3, the first is data/a\.jsonl line 5 \(\w+:3\): .+", first)
    assert re.fullmatch(r"unknown_schema: 2, the first is data/a\.jsonl record \d+ \(\w+:4\): .*talk.*", second)
    assert re.match(r"\w+: 1, the first is ", third)
    assert rest == "1 other reason: 1"


def test_overlong_examples_and_dropped_rows_are_counted_with_a_length_and_the_limit(tmp_path: Path) -> None:
    rows = [chat(i, words=words) for i, words in ((1, 8), (2, 8), (0, 900), (3, 1200))]
    one = make_workspace(tmp_path, rows).build(only=EXAMPLES).result("context_overflow", "rows", "truncation_stats")

    pattern = (
        r"truncated: 2, the first is data/a\.jsonl line 3 \(\w+:2#0\): ([\d,]+) tokens, at most 256; "
        r"the longest has ([\d,]+)"
    )
    found = re.fullmatch(pattern, one.causes[0])
    assert found is not None
    first, longest = (int(one.replace(",", "")) for one in found.groups())
    assert 900 < first < longest

    rows = [chat(i, words=8 if i else 900) for i in (1, 2, 0, 3)]
    workspace = make_workspace(tmp_path, rows, truncation={"overlong": "drop"})

    one = workspace.build(only=EXAMPLES).result("context_overflow", "rows", "truncation_stats")

    pattern = r"overlong: 1, the first is data/a\.jsonl line 3 \(\w+:2\): \d+ tokens, at most 256"
    assert re.fullmatch(pattern, one.causes[0])


def test_missing_source_leaves_the_record_number(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path, [chat(i, words=8 if i else 900) for i in (1, 2, 0, 3)])
    workspace.build(only=(*TO_ROWS, "tokenized_examples"))
    (tmp_path / "data" / "a.jsonl").unlink()
    project = workspace.project

    made = [step for step in plan_steps(project) if step.name == "truncation_stats"]
    report = runner.run_step(project, made[0], open_inputs(project, made[0]))

    assert re.match(
        r"truncated: 1, the first is data/a\.jsonl record 3 \(", report.manifest.samples["context_overflow"][0]
    )


def test_passing_check_names_no_cause(tmp_path: Path) -> None:
    built = make_workspace(tmp_path, map(chat, range(3))).build(only=TO_ROWS)
    one = built.result("unknown_roles", "rows", "canonical_rows")

    assert (one.passed, one.causes, one.message) == (True, (), one.sentence)


def test_every_place_that_shows_unknown_roles_shows_their_counts_and_a_line_of_the_most_frequent(
    tmp_path: Path,
) -> None:
    roles = ["user", "narrator", "critic", "narrator", "user", "narrator", "oracle", "wizard"]
    workspace = make_workspace(tmp_path, [with_role(i, role) for i, role in enumerate(roles)])
    built = workspace.build(only=TO_ROWS)
    one = built.result("unknown_roles", "rows", "canonical_rows")
    made = built.manifest("rows", "canonical_rows")
    thresholds = built.project.graph.thresholds[made.key]

    with pytest.raises(GateError) as refused:
        workspace.build()
    report = Path(report_page.write_report(built.project)).read_text(encoding="utf-8")
    shown = {
        "gate": str(refused.value),
        "terminal": render_text(render_check_result(built.project, one)),
        "dagster": metadata.make_check_page(one, built.project.store)["samples"].value,
        "report": report.replace("&#x27;", "'").replace("&#39;", "'"),
        "expectations": render_expectations_page(made, thresholds, [one]).replace("&#x27;", "'").replace("&#39;", "'"),
    }

    assert re.fullmatch(r"role 'narrator': 3, the first is data/a\.jsonl line 2 \(\w+:1\)", one.causes[0])
    assert one.causes[1:] == ("role 'critic': 1", "role 'oracle': 1", "1 other role: 1")
    assert {place: [cause for cause in one.causes if cause not in text] for place, text in shown.items()} == {
        place: [] for place in shown
    }


def test_equal_causes_of_two_datasets_are_both_printed(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    rows = [with_role(0, "narrator"), with_role(1, "narrator"), with_role(2, "critic")]
    datasets = {name: workspace.dataset(f"{name}.jsonl", rows) for name in ("a", "b")}
    workspace.recipe(datasets, gates={})

    with pytest.raises(GateError) as refused:
        workspace.build()

    assert str(refused.value).splitlines().count("  role 'critic': 1") == 2


def test_values_of_the_data_are_one_short_line_without_control_characters() -> None:
    assert clean_value("a\x1b[31m\n b\u202ec") == r"a\x1b[31m b\u202ec"
    assert len(clean_value("x" * 999)) == MAX_VALUE_CHARS
