"""How commands end: exit status and message for every kind of exception, never a bare traceback."""

import errno
import io
import os
import pickle
import re
import subprocess
import sys
import threading
from concurrent.futures.process import BrokenProcessPool
from gzip import BadGzipFile
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import prepare, runner, steps
from rowmill.cli import main
from rowmill.cli.error_boundary import ExitStatus, choose_exit_status, explain_error
from rowmill.core.errors import (
    BusyError,
    ConfigError,
    ContextOverflowError,
    DamagedFileError,
    GateError,
    GenerationError,
    IntegrityError,
    PipelineError,
    SchemaError,
    SourceError,
    UnreachableError,
)
from tests.core.test_transient_errors import caused
from tests.support.cli_project import CliProject
from tests.support.tiers import mark_all_but

StorageError = type("EndpointConnectionError", (Exception,), {"__module__": "botocore.exceptions"})

STATUS = [
    (GateError("closed"), ExitStatus.GATE_CLOSED),
    (ConfigError("wrong"), ExitStatus.INVALID),
    (caused(ConfigError("wrong"), OSError(errno.EIO, "x")), ExitStatus.INVALID),
    (ContextOverflowError("too long"), ExitStatus.INVALID),
    (SchemaError("columns"), ExitStatus.INVALID),
    (SourceError("found no data"), ExitStatus.INVALID),
    (caused(SourceError("cut short"), EOFError("end")), ExitStatus.INVALID),
    (caused(SourceError("cut short"), BadGzipFile("crc")), ExitStatus.INVALID),
    (caused(SourceError("no such file"), FileNotFoundError(errno.ENOENT, "x")), ExitStatus.INVALID),
    (IntegrityError("nothing is built"), ExitStatus.INVALID),
    (DamagedFileError("a file is cut", "a/b"), ExitStatus.DAMAGED),
    (pickle.loads(pickle.dumps(DamagedFileError("in a worker", "a/b", "check it"))), ExitStatus.DAMAGED),
    (UnreachableError("no answer"), ExitStatus.OUTSIDE_FAILURE),
    (pickle.loads(pickle.dumps(UnreachableError("no answer, in a worker"))), ExitStatus.OUTSIDE_FAILURE),
    (BusyError("another build"), ExitStatus.OUTSIDE_FAILURE),
    (GenerationError("the backend"), ExitStatus.OUTSIDE_FAILURE),
    (caused(PipelineError("no room"), OSError(errno.ENOSPC, "x")), ExitStatus.INVALID),
    (caused(UnreachableError("denied"), PermissionError("403")), ExitStatus.INVALID),
    (caused(IntegrityError("a worker died"), BrokenProcessPool("killed")), ExitStatus.OUTSIDE_FAILURE),
    (caused(SourceError("hub"), ConnectionError("refused")), ExitStatus.OUTSIDE_FAILURE),
    (OSError(errno.EIO, "Input/output error"), ExitStatus.OUTSIDE_FAILURE),
    (OSError(errno.EROFS, "Read-only file system", "/x"), ExitStatus.INVALID),
    (PermissionError(errno.EACCES, "Permission denied", "/x"), ExitStatus.INVALID),
    (BrokenPipeError(errno.EPIPE, "Broken pipe"), ExitStatus.OUTSIDE_FAILURE),
    (TimeoutError(), ExitStatus.OUTSIDE_FAILURE),
    (MemoryError(), ExitStatus.OUTSIDE_FAILURE),
    (StorageError("Could not connect to the endpoint URL"), ExitStatus.OUTSIDE_FAILURE),
    (KeyError("x"), ExitStatus.INTERNAL_ERROR),
    (AssertionError(), ExitStatus.INTERNAL_ERROR),
    (RecursionError("maximum recursion depth exceeded"), ExitStatus.INTERNAL_ERROR),
    (KeyboardInterrupt(), ExitStatus.INTERRUPTED),
]


@pytest.mark.parametrize(("error", "status"), STATUS, ids=[repr(error) for error, _ in STATUS])
def test_exit_status_says_who_has_to_act(error: BaseException, status: int) -> None:
    assert choose_exit_status(error) == status


def test_what_a_stream_cannot_encode_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, "ascii"))

    assert main.main(["build", str(tmp_path / "é.yaml")]) == ExitStatus.INVALID

    sys.stderr.flush()
    assert b"?.yaml" in written.getvalue()


def test_statuses_are_told_apart_and_only_a_closed_gate_is_1() -> None:
    assert len(ExitStatus) == 9
    assert [error for error, _ in STATUS if choose_exit_status(error) == 1] == [STATUS[0][0]]


def kept(text: str) -> Path:
    """Return the file that a message says the traceback is in."""
    found = re.search(r"traceback is in (\S+\.traceback\.txt)", text)
    assert found is not None, text
    return Path(found[1])


def test_error_of_the_disk_names_the_file_and_keeps_the_traceback_where_it_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = explain_error(OSError(errno.EROFS, "Read-only file system", "/data/a"), ["build", "x"])
    file = kept(words)
    assert words.startswith("/data/a: Read-only file system (EROFS); a command needs its sources and storage reachable")
    assert file.read_text().startswith("command: rowmill build x\n")
    assert file.stat().st_mode & 0o077 == 0
    file.unlink()
    words = explain_error(OSError(errno.EIO, "Input/output error", b"/data/f\xe9"), ["build", os.fsdecode(b"\xe9")])
    assert "Input/output error (EIO)" in words
    kept(words).unlink()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert "the traceback is in no file, since none could be written" in explain_error(KeyError("x"), [])


# ── Through the command line ───────────────────────────────────────────────────────────────────────
@pytest.mark.slow
def test_bug_of_ours_is_status_70_with_its_traceback_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: steps.Project) -> None:
        raise KeyError("part_id")

    monkeypatch.setattr(prepare, "forecast_steps", broken)
    err = CliProject(tmp_path).write().run("plan", status=ExitStatus.INTERNAL_ERROR).err
    assert err.startswith("a bug of rowmill, not of your recipe or data: KeyError: 'part_id'; the traceback is in ")
    assert "please report it with that file" in err
    assert "Traceback" not in err
    file = kept(err)
    assert "Traceback (most recent call last)" in file.read_text()
    file.unlink()


@pytest.mark.parametrize("root", ["/dev/null/store", "/proc/rowmill/store"])
@pytest.mark.parametrize("verb", ["build", "stats"])
def test_storage_root_that_cannot_be_written_is_status_2(tmp_path: Path, root: str, verb: str) -> None:
    err = CliProject(tmp_path).write().run(verb, "--root", root, status=ExitStatus.INVALID).err
    assert err.startswith(root.rpartition("/")[0])
    assert "Traceback" not in err
    kept(err).unlink()


def test_project_whose_path_is_not_utf8_is_status_2(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/f\xe9"))
    refused = CliProject(folder).write().run("build", status=ExitStatus.INVALID)
    assert r"f\xe9/configs/small.yaml: this path is not UTF-8" in refused.err


FAULT = """
import errno, os, sys
left = int(sys.argv.pop(1))
def fail(event, args):
    global left
    if event == "os.rename":
        left -= 1
        if left < 0:
            raise OSError(errno.{code}, os.strerror(errno.{code}), str(args[1]))
sys.addaudithook(fail)
from rowmill.cli import main as cli
sys.exit(cli.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "renames"),
    mark_all_but([("EIO", 3)], [(code, count) for code in ("EIO", "EROFS") for count in (0, 3, 12)]),
)
def test_disk_that_fails_ends_a_command_and_the_next_build_is_whole(tmp_path: Path, code: str, renames: int) -> None:
    project = CliProject(tmp_path).write()
    command = [sys.executable, "-c", FAULT.format(code=code), str(renames), "build", project.recipe]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    # A disk that is read-only waits for a person.
    assert ended.returncode == (ExitStatus.OUTSIDE_FAILURE if code == "EIO" else ExitStatus.INVALID), ended.stderr
    assert f"({code})" in ended.stderr
    assert "Traceback" not in ended.stderr
    kept(ended.stderr).unlink()
    assert project.rowmill("build") == 0


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["while stages run", "after the last stage"])
def test_error_of_the_thread_that_makes_the_views_ends_the_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: str
) -> None:
    may_fail = threading.Event()
    build = runner.build

    def build_and_release(*args: Any, **options: Any) -> Any:
        if fails == "while stages run":
            may_fail.set()
        try:
            return build(*args, **options)
        finally:
            may_fail.set()

    def fail(_: steps.Project) -> None:
        may_fail.wait(timeout=60)
        raise OSError(errno.EIO, os.strerror(errno.EIO), "stats.duckdb")

    monkeypatch.setattr(runner, "build", build_and_release)
    monkeypatch.setattr(runner, "publish_statistics", fail)
    err = CliProject(tmp_path).write().run("build", status=ExitStatus.OUTSIDE_FAILURE).err
    assert "stats.duckdb" in err
    assert "Traceback" not in err
    kept(err).unlink()


@pytest.mark.slow
def test_reader_that_goes_away_ends_a_command_quietly(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write()
    assert project.rowmill("build") == 0
    asked = f"{sys.executable} -m rowmill.cli.main sql 'select * from range(200000)' {project.recipe} --format csv"
    command = f"{asked} | head -1; echo ${{PIPESTATUS[0]}}"

    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (ended.stdout.splitlines()[-1], ended.stderr) == ("0", "")
