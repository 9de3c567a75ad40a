"""What the README claims on its first screen is what the programs print."""

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
LARGEST_EMPTY_CONTEXT = 2048
"""Of which `coming-from/trl.md` says that it leaves no target, either."""
pytestmark = [pytest.mark.real_data, pytest.mark.slow]


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


def read_columns() -> tuple[str, str]:
    """Return the two masks that the README shows side by side: axolotl's, then ours."""
    [shown] = [text for text in blocks(README, "") if text.startswith("axolotl")]
    head, *lines = shown.splitlines()
    at = head.index("rowmill")
    return "\n".join(line[:at].rstrip() for line in lines), "\n".join(line[at:] for line in lines)


def read_answers() -> dict[str, str]:
    """Return the answer that mentions a control token, as the README shows it for each program."""
    [shown] = [text for text in blocks(README, "") if text.startswith("TRL ")]
    return dict(line.split(maxsplit=1) for line in shown.splitlines())


def test_mask_beside_axolotls_is_the_one_of_a_build(tokenizer: Any, real_data: Path) -> None:
    program = load_program()
    made = program.tokenize_as_rowmill_does(tokenizer, program.ROWS[0], str(real_data / "tokenizers/qwen3"))
    theirs, ours = read_columns()
    assert made.replace("[151644]", "<|im_start|>").replace("[151645]", "<|im_end|>").strip() == ours.strip()
    # The same text, so that only the marks differ.
    assert theirs.replace("⟦", "").replace("⟧", "") == ours.replace("⟦", "").replace("⟧", "")


def test_answers_with_a_control_token_are_those_of_trl_and_of_a_build(
    tokenizer: Any, training_template: str, real_data: Path
) -> None:
    program = load_program()

    trl = program.tokenize_as_trl_does(tokenizer, program.ROWS[1]["messages"], training_template)
    ours = program.tokenize_as_rowmill_does(tokenizer, program.ROWS[1], str(real_data / "tokenizers/qwen3"))

    shown = read_answers()
    for made, answer in ((trl, shown["TRL"]), (ours, shown["rowmill"])):
        trained = made[made.index("⟦") : made.index("⟧")]
        assert trained.strip().endswith(f"</think>\n\n{answer}")


def test_program_prints_what_the_readme_shows_with_trl_installed(real_data: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install 'rowmill[train]'")
    command = [sys.executable, str(PROGRAM), str(real_data / "tokenizers/qwen3")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert set(read_answers().values()) <= {line.rstrip("⟧") for line in printed.splitlines()}


def test_the_first_2048_tokens_of_the_conversations_with_tools_have_no_target(
    tokenizer: Any, training_template: str, real_data: Path
) -> None:
    rows = [json.loads(line) for line in (real_data / AIRLINE).read_text(encoding="utf-8").splitlines()]
    left = 0
    for row in rows:
        options = {"chat_template": training_template, "return_dict": True, "return_assistant_tokens_mask": True}
        made = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], **options)
        assert any(made["assistant_masks"])
        left += any(made["assistant_masks"][:LARGEST_EMPTY_CONTEXT])
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
