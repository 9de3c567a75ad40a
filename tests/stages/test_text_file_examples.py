"""Examples of text files: the lengths of documents under each `source.sample_by`."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.checks.judge import CheckResult
from rowmill.schema.manifest import Manifest
from tests.support.recipes import TEXT, TO_EXAMPLES, Built, Workspace, document, sentence

PLAY = "\n".join(f"SPEAKER {i}:\n{sentence(i, 9)}\n{sentence(i + 500, 9)}\n" for i in range(60))


def built(folder: Path, *urls: str, tokenizer: str = "tokenizer", **source: Any) -> tuple[Manifest, CheckResult]:
    """Build documents to examples; return the build and the check result on their lengths."""
    workspace = Workspace(folder)
    workspace.recipe(
        {"rows": {"source": {"train_urls": list(urls), **source}, "format": TEXT}}, seq_len=4096, tokenizer=tokenizer
    )
    made: Built = workspace.build(only=TO_EXAMPLES)
    report, results = made.steps["rows", "tokenized_examples"]
    return report.manifest, next(one for one in results if one.check == "short_documents")


@pytest.mark.parametrize(
    ("sample_by", "examples", "outcome"),
    [("line", 180, "failed"), ("paragraph", 60, "passed"), ("document", 1, "passed")],
)
def test_lines_treated_as_documents_are_a_warning(tmp_path: Path, sample_by: str, examples: int, outcome: str) -> None:
    path = Workspace(tmp_path).write("play.txt", PLAY.encode())

    made, result = built(tmp_path, path, sample_by=sample_by)

    assert (made.facts["examples"], result.outcome) == (examples, outcome)
    assert not result.blocking
    assert ("source.sample_by to paragraph or document" in result.sentence) is (outcome == "failed")


def test_short_records_of_other_files_are_no_warning(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    short = workspace.write("short.jsonl", [document(i, words=3) for i in range(40)])
    long = workspace.write("long.txt", (sentence(1, 60) + "\n").encode())

    assert built(tmp_path, short)[1].outcome == "not_applicable"
    assert built(tmp_path, short, long)[1].value == 0
