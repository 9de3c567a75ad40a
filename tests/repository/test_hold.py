"""`benchmarks.hold`: a checkout that became slower is told, one that did not is not, and what it took is kept."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import hold, measure

SPIN = "import subprocess, sys, time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"


def measured(ratio: float) -> dict[str, float]:
    return {"processor_s": ratio, "bare_processor_s": 1.0, "elapsed_s": ratio, "bare_elapsed_s": 1.0, "ratio": ratio}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file of results, in which two commits were measured before."""
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(hold, "name_commit", lambda _: "now")
    (tmp_path / "benchmarks").mkdir()
    kept = tmp_path / "benchmarks" / "results.jsonl"
    lines = [{"workload": "chats", "whole": False, "commit": name, **measured(ratio)} for name, ratio in
             (("best", 1.0), ("later", 1.2))]  # fmt: skip
    others = [{"benchmark": "scale"}, {"benchmark": "hold", "workload": "chats", "whole": True, "ratio": 0.1}]
    kept.write_text("".join(f"{json.dumps({'benchmark': 'hold'} | one)}\n" for one in (*lines, *others)))
    return kept


@pytest.mark.parametrize(("ratio", "lost"), [(1.05, False), (1.06, True)])
def test_ratio_above_the_best_is_a_loss(
    ratio: float, lost: bool, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hold, "measure_workload", lambda *_, **__: {"now": measured(ratio)})
    monkeypatch.setattr(sys, "argv", ["hold", "chats"])

    assert hold.main() == lost
    assert ("chats: 1.06 times bare work, and 1.0 was reached before" in capsys.readouterr().err) == lost
    assert json.loads(results.read_text().splitlines()[-1])["commit"] == "now"


def test_processor_time_of_a_process_holds_that_of_its_children(tmp_path: Path) -> None:
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPIN!r}], check=True)"

    assert hold.run([sys.executable, "-c", child], tmp_path).processor >= 0.3
