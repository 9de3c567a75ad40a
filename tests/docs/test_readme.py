"""What the README claims on its first screen is what the programs print.

What belongs here: the comparison with TRL, and what `rowmill plan` says of too short a context. What does not: links,
commands and generated tables, which are checked on every page (`test_docs.py`).
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rowmill.cli import main
from tests.docs.test_docs import ROOT, blocks

README = ROOT / "README.md"
PROGRAM = ROOT / "docs/how-to/compare_masks.py"
AIRLINE = "tools/tau_airline_gpt4o.messages.jsonl"
TRL_DEFAULT_MAX_LENGTH = 1024
pytestmark = pytest.mark.real_data


@cache
def load_program() -> ModuleType:
    """Import the program that the README names."""
    spec = importlib.util.spec_from_file_location("compare_masks", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer(real_data: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_data / "tokenizers/qwen3")


@pytest.fixture(scope="module")
def training_template(real_data: Path) -> str:
    """Return the template with `{% generation %}` that TRL puts in place of Qwen3's."""
    return (real_data / "templates/trl__qwen3_training.jinja").read_text(encoding="utf-8")


def shown_masks() -> list[str]:
    """Return the blocks that show a mask: TRL's, then ours."""
    return [text.removesuffix("\n") for text in blocks(README, "") if "⟦" in text and "[151644]" in text]


def test_row_of_the_readme_is_the_one_that_is_compared() -> None:
    [shown] = blocks(README, "json")

    assert json.loads(shown) == load_program().ROW


def test_masks_of_the_readme_are_those_of_trl_and_of_a_build(
    tokenizer: Any, training_template: str, real_data: Path
) -> None:
    program = load_program()
    trl = program.tokenize_as_trl_does(tokenizer, program.ROW["messages"], training_template)
    ours = program.tokenize_as_rowmill_does(tokenizer, program.ROW, str(real_data / "tokenizers/qwen3"))

    for shown, made in zip(shown_masks(), (trl, ours), strict=True):
        assert made.rstrip("\n").endswith(shown)
        assert shown.startswith("[151644]assistant")


def test_program_prints_the_masks_of_the_readme_with_trl_installed(real_data: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install 'rowmill[train]'")
    command = [sys.executable, str(PROGRAM), str(real_data / "tokenizers/qwen3")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    for shown in shown_masks():
        assert f"{shown}\n" in printed


def test_context_of_trls_default_leaves_no_trained_token_of_the_conversations_with_tools(
    tokenizer: Any, training_template: str, real_data: Path
) -> None:
    rows = [json.loads(line) for line in (real_data / AIRLINE).read_text(encoding="utf-8").splitlines()]
    left = 0
    for row in rows:
        made = tokenizer.apply_chat_template(
            row["messages"],
            tools=row["tools"],
            chat_template=training_template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert any(made["assistant_masks"])
        left += any(made["assistant_masks"][:TRL_DEFAULT_MAX_LENGTH])

    assert len(rows) == 100
    assert left == 0


def test_plan_says_of_the_same_conversations_what_the_readme_shows(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(real_data / AIRLINE, "airline.jsonl")
    tokenizer = str(real_data / "tokenizers/qwen3")
    assert main.main(["init", "airline.jsonl", "--tokenizer", tokenizer, "--seq-len", str(TRL_DEFAULT_MAX_LENGTH)]) == 0

    main.main(["plan", "airline"])

    printed = "".join(capsys.readouterr())
    [shown] = [text for text in blocks(README, "") if "context_overflow" in text]
    for line in shown.splitlines():
        assert re.search(".*".join(map(re.escape, line.split("…"))), printed), line
