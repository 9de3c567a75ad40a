"""What is installed: where rowmill came from decides the command that mends it; a package may be too old."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rowmill.core.installation import explain_old_package, format_install_command

ROOT = Path(__file__).resolve().parents[2]


def install(folder: Path, name: str, version: str, *lines: str, origin: dict[str, Any] | None = None) -> None:
    """Write what an installer writes of a distribution."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines]))
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///a/rowmill-0.1.0-py3-none-any.whl", "archive_info": {}},
         "pip install '/a/rowmill-0.1.0-py3-none-any.whl[build,s3]'"),
        ({"url": "file:///my%20clone", "dir_info": {"editable": True}}, "pip install --editable '/my clone[build,s3]'"),
        ({"url": "file:///clone", "dir_info": {}}, "pip install '/clone[build,s3]'"),
        ({"url": "ssh://host/rowmill.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
         "pip install 'rowmill[build,s3] @ git+ssh://host/rowmill.git@ab12'"),
    ],
)  # fmt: skip
def test_install_command_installs_from_where_rowmill_came(
    origin: dict[str, Any], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "rowmill", "0.1.0", origin=origin)
    monkeypatch.syspath_prepend(str(tmp_path))

    assert format_install_command("build", "s3") == command


def test_install_command_of_an_install_by_name_is_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "rowmill", "0.1.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    assert format_install_command("build") == "pip install 'rowmill[build]'"
    assert format_install_command() == "pip install rowmill"


@pytest.mark.parametrize(
    ("left", "command"),
    [("pipx_metadata.json", "pipx install --force"), ("uv-receipt.toml", "uv tool install --force")],
)
def test_install_command_is_that_of_the_program_that_made_the_environment(
    left: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path, "rowmill", "0.1.0", origin={"url": "file:///a/rowmill-0.1.0-py3-none-any.whl", "archive_info": {}}
    )
    (tmp_path / left).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))

    assert format_install_command("dagster") == f"{command} '/a/rowmill-0.1.0-py3-none-any.whl[dagster]'"


@pytest.mark.parametrize(
    ("installed", "is_old"),
    [("1.36", True), ("1.35.9", True), ("1.36.1", False), ("1.36.1+local", False), ("2", False)],
)
def test_package_below_its_bound_is_one_sentence_with_the_command(
    installed: str, is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path, "rowmill", "0.1.0", 'Requires-Dist: polars<3,>=1.36.1; extra == "build"', "Requires-Dist: numpy>=2"
    )
    install(tmp_path, "polars", installed)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    told = explain_old_package("rowmill build")

    assert (told is not None) == is_old
    assert not is_old or str(told) == (
        f"rowmill build: polars {installed} is installed; rowmill needs polars 1.36.1 or newer; run pip install "
        "'rowmill[build]'"
    )


@pytest.mark.slow
def test_command_that_fails_under_an_old_package_says_so_instead_of_an_attribute_error(tmp_path: Path) -> None:
    install(tmp_path, "polars", "0.20.0")
    (tmp_path / "polars.py").write_text("class DataFrame: ...\n")
    code = "import sys; from rowmill.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "plan", str(ROOT / "configs/demo/demo.yaml")]
    path = os.pathsep.join([str(tmp_path), str(ROOT / "pipelines")])
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )

    assert done.stderr.startswith("rowmill plan: polars 0.20.0 is installed; rowmill needs polars 1.")
    assert done.stderr.count("\n") == 1
    assert done.returncode == 2
