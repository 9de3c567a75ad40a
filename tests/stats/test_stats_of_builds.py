"""`rowmill stats` reports the numbers of a build."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dagster_rowmill import metadata
from rowmill.build import runner, steps
from rowmill.cli import main
from rowmill.core.console import render_text
from rowmill.reports import report_page, summary
from rowmill.reports.build_view import load_build_view
from rowmill.schema.rows import NORMALIZATION_COLUMNS
from rowmill.stages import catalog, truncation_stats
from rowmill.stats.views import ESTIMATE_NOTES, query_views
from tests.support.recipes import PAIR, Built, Workspace, chat, pair, sentence, write_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['reasoning_content'] %}({{ m['reasoning_content'] }}){% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}}]


def varied() -> list[dict[str, Any]]:
    """Return rows of all lengths, some with reasoning, tools, thoughts in tags, duplicates and flaws."""
    rows: list[dict[str, Any]] = [chat(i, turns=1 + i % 5, words=3 + i % 9) for i in range(30)]
    for i, row in enumerate(rows):
        answer = row["messages"][-1]
        if i % 3 == 0:
            answer["thinking"] = sentence(900 + i, 40)
        if i % 4 == 1:
            answer["content"] = f"<think>{sentence(i, 5)}</think>{answer['content']}"
        if i % 5 == 2:
            row["tools"] = TOOLS if i % 2 else '[{"name": "find", "parameters": {}}]'
    return [*rows, rows[3], rows[7], {"messages": [{"role": "user", "content": "q"}]}, {"x": 1}]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("stats")
    write_tokenizer(folder / "tokenizer", template=TEMPLATE)
    workspace = Workspace(folder)
    datasets = {
        "rows": workspace.dataset("a.jsonl", varied(), truncation={"max_length": 96}),
        "pairs": workspace.dataset("b.jsonl", [pair(i) for i in range(9)], PAIR),
    }
    return workspace.recipe(datasets).build()


@pytest.mark.slow
def test_stats_builds_the_same_outputs_as_build(built: Built, capsys: pytest.CaptureFixture[str]) -> None:
    aside = Workspace(built.project.base, str(built.project.base / "aside"))

    assert main.main(["stats", str(aside.config), "--root", str(aside.root)]) == main.ExitStatus.SUCCESS

    alone = steps.open_project(aside.config, aside.root)
    for stage in catalog.list_stages_up_to(truncation_stats.STAGE):
        for dataset in ("rows", "pairs"):
            step = steps.find_step(alone, ("mini", dataset, stage))
            made = runner.manifest.load_current(alone.store, step.key)
            assert made is not None
            assert made.version == built.manifest(dataset, stage).version
            assert made.facts == built.facts(dataset, stage)
    assert "what truncation removed" in capsys.readouterr().out
    assert not alone.store.exists("mini/rows/packed_shards")


def test_lengths_and_stages_of_truncation_are_those_of_the_examples(built: Built) -> None:
    facts, lengths = (
        built.facts("rows", "truncation_stats"),
        [one["original_tokens"] for one in built.examples()],
    )

    for share in (25, 50, 75, 90, 95, 99):
        assert facts["quantiles"][f"p{share}"] == np.percentile(lengths, share, method="inverted_cdf")
    assert facts["quantiles"]["max"] == max(lengths)
    quarters = Counter(min(4 * length // 96, 4) for length in lengths)
    assert list(facts["buckets"].values()) == [quarters[i] for i in range(5)]

    table = {row[0]: row[1:] for row in built.manifest("rows", "truncation_stats").tables["stages"].rows}
    examples = built.examples()

    columns = {
        "exchanges": ("messages_removed", "exchanges_removed", "exchanges_trained"),
        "reasoning": (None, "reasoning_removed", "reasoning_trained"),
        "tokens": (None, "tokens_cut", "cut_trained"),
    }
    for stage, (messages, tokens, trained) in columns.items():
        touched = sum(bool(one[tokens] or (messages and one[messages])) for one in examples)
        gone = sum(one[messages] for one in examples) if messages else 0
        assert table[stage] == (
            touched,
            gone,
            sum(one[tokens] for one in examples),
            sum(one[trained] for one in examples),
        )
        assert touched > 0


def test_noticed_features_are_summed_over_kept_rows_and_shown(built: Built) -> None:
    rows, facts = built.rows_of("rows", "canonical_rows", file="rows"), built.facts("rows", "canonical_rows")

    assert {name: facts[name] for name in NORMALIZATION_COLUMNS} == {
        name: sum(row[name] for row in rows) for name in NORMALIZATION_COLUMNS
    }
    assert facts["moved_reasoning_keys"] > 0
    assert facts["extracted_think_from_content"] > 0
    assert facts["tools_parsed_from_string"] > 0

    text = reports_text(built)
    facts = built.facts("rows", "tokenized_examples")

    assert facts["rows_with_tools"] == sum(
        row["tools_present"] for row in built.rows_of("rows", "canonical_rows", file="rows")
    )
    assert f"{facts['rows_with_tools']} rows, {facts['tool_tokens']:,} tokens" in text
    for words in ("noted in the rows", "tool schemas", "trained of them", "effect of other limits", "at max"):
        assert words in text
    for reason in ("duplicate", "unknown_schema", "no_assistant"):
        assert reason in text


@pytest.mark.slow
def test_what_if_is_called_an_estimate_wherever_it_is_shown(built: Built) -> None:
    """Even at the present limit it is not what truncation removed, so it must not look like a count."""
    made = built.manifest("rows", "truncation_stats")
    [(lost, sequences)] = [(row[2], row[3]) for row in made.tables["what_if"].rows if row[0] == made.facts["limit"]]
    assert lost < made.facts["trained_removed"]
    assert sequences > built.facts("rows", "packed_shards")["sequences"]

    said = ESTIMATE_NOTES["what_if"]
    page = metadata.make_stage_page(built.project, built.report("rows", "truncation_stats"))
    asked = "SELECT comment FROM duckdb_views() WHERE view_name = 'what_if' AND schema_name = 'main'"
    _, [(comment,)] = query_views(built.project.store, asked)
    report = built.project.store.local(report_page.report_path("mini"))
    report_page.write_report(built.project)
    places = (page["about what_if"].value, comment, report.read_text("utf-8"), reports_text(built))

    assert page["table what_if"].value
    for place in places:
        assert said in " ".join(place.split())


def reports_text(built: Built) -> str:
    return render_text(summary.render_statistics(load_build_view(built.project)))
