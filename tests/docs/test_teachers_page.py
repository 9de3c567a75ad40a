"""The page on teachers: its commands score a build and build a student, against a server of the test."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from rowmill.cli.main import main
from rowmill.reader import Reader
from tests.support import teacher
from tests.support.completions_server import serving
from tests.support.recipes import Workspace, chat

PAGE = (Path(__file__).resolve().parents[2] / "docs/explanation/teachers.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_commands_of_the_page_score_a_build_and_build_a_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace(tmp_path)
    source = {"train_urls": [workspace.write("c.jsonl", [chat(i) for i in range(20)])]}
    workspace.recipe({"chats": {"source": source, "format": {"kind": "chat"}}})
    workspace.config.rename(tmp_path / "configs/support.yaml")
    student = yaml.safe_load(_find_block("yaml"))
    gates = yaml.safe_load((tmp_path / "configs/support.yaml").read_text())["gates"]
    student_path = tmp_path / "configs/student.yaml"
    student_path.write_text(yaml.safe_dump(student | {"gates": gates | {"same_tokenization": {"at_least": 0}}}))
    monkeypatch.chdir(tmp_path)
    with serving(teacher.teach) as server:
        for line in _find_block("bash").splitlines():
            if line.startswith("rowmill "):
                command = line.replace("http://127.0.0.1:8000/v1", server.base_url)
                assert main(shlex.split(command)[1:]) == 0, line

    assert {request["model"] for request in server.requests} == {"Qwen/Qwen3-32B"}
    [batch] = list(Reader(str(tmp_path / ".rowmill"), "student", rank=0, world_size=1, as_torch=False, batch_size=100))
    assert batch["teacher_ids"].shape == batch["teacher_logprobs"].shape == (*batch["labels"].shape, 8)
    assert (batch["teacher_logprobs"][batch["labels"] != -100] < 0).all()
    printed = re.search(r"^datasets:\n(?: .*\n)+", capsys.readouterr().out, re.MULTILINE)
    assert printed is not None
    scored = yaml.safe_load(printed[0])["datasets"]["chats"]
    assert scored["format"] == student["datasets"]["chats"]["format"]
    [url] = student["datasets"]["chats"]["source"]["train_urls"]
    assert scored["source"]["train_urls"] == [f"{tmp_path}/{url}"]


def _find_block(language: str) -> str:
    """Return the first block of a language."""
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]
