"""The tutorial's commands, run in order in an empty folder, print what the page shows.

The hub is a cache in a temporary folder with the tokenizer of Qwen3 and, where torch is installed, a tiny model of its
architecture; the page's names stay as they are.
"""

from pathlib import Path

import pytest

from docs.generate.transcripts import PAGES, Command, has_torch, is_shown, read_transcript, replace_outputs, run_page
from tests.docs.test_docs import ROOT

TUTORIAL = "docs/tutorial.md"
Printed = list[tuple[Command, str | None]]


@pytest.fixture(scope="module")
def printed(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """Run the tutorial once."""
    page = (ROOT / TUTORIAL).read_text(encoding="utf-8")
    files = {name: ROOT / source for name, source in PAGES[TUTORIAL].items()}
    return run_page(page, files, real_data / "tokenizers/qwen3", tmp_path_factory.mktemp("tutorial"))


@pytest.mark.campaign
@pytest.mark.real_data
def test_commands_of_the_tutorial_print_what_it_shows(printed: Printed) -> None:
    shell = [(command, output) for command, output in printed if not command.needs_torch]
    assert len(shell) > 8
    require_shown(shell)


def require_shown(printed: Printed) -> None:
    for command, output in printed:
        assert is_shown(command.shown, str(output)), f"$ {command.line}\n{output}\nrun `make docs`"


@pytest.mark.campaign
@pytest.mark.real_data
def test_programs_of_the_tutorial_train(printed: Printed) -> None:
    if not has_torch():
        pytest.skip("torch and TRL are not installed: pip install 'rowmill[train]'")
    programs = [(command, output) for command, output in printed if command.needs_torch]
    assert len(programs) == 2
    require_shown(programs)


# ── Transcripts ──

PAGE = """# A page

```yaml
# configs/a.yaml
seq_len: 2
```

```console
$ rowmill plan a
a  1 to make
…
end in 1.5 s
$ python train.py
loss 2.50
```
"""


def test_transcript_has_files_and_commands_in_order() -> None:
    plan = Command("rowmill plan a", "a  1 to make\n…\nend in 1.5 s\n")
    train = Command("python train.py", "loss 2.50\n")
    assert list(read_transcript(PAGE)) == [("configs/a.yaml", "# configs/a.yaml\nseq_len: 2\n"), plan, train]
    assert train.needs_torch


@pytest.mark.parametrize(
    ("printed_text", "same"),
    [
        ("a  1 to make\n\nmuch\nend in 0.2 s\n", True),
        ("a 1\nto make\nend in 33 s", True),
        ("a  2 to make\nend in 1.5 s\n", False),
        ("a  1 to make\nend in 1.5 s\nmore\n", False),
    ],
)
def test_output_is_compared_without_times_line_breaks_and_what_is_left_out(printed_text: str, same: bool) -> None:
    [plan, _] = [part for part in read_transcript(PAGE) if isinstance(part, Command)]
    assert is_shown(plan.shown, printed_text) == same


def test_only_changed_outputs_are_replaced() -> None:
    plan, train = (part for part in read_transcript(PAGE) if isinstance(part, Command))
    same, other = ([(plan, text), (train, None)] for text in ("a  1 to make\nend in 9 s\n", "a  3 to make\n"))
    assert replace_outputs(PAGE, same) == PAGE
    assert "$ rowmill plan a\na  3 to make\n$ python" in replace_outputs(PAGE, other)
