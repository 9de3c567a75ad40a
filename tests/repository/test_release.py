"""A release is made of a commit alone: equal files twice, only the packages, and refused while it is not ready."""

import json
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from release.make_release import ReleaseError, describe_materials, digest, make_release

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.1.0"
pytestmark = pytest.mark.slow


def git(folder: Path, *command: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *command], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a repository with our packages, whose changelog has a dated section."""
    folder = tmp_path / "clone"
    folder.mkdir()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in tracked.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    changelog = folder / "CHANGELOG.md"
    changelog.write_text(
        re.sub(r"\(unreleased\)", "(2026-01-02)", changelog.read_text(encoding="utf-8")), encoding="utf-8"
    )
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "All")
    return folder


def test_release_has_equal_digests_twice_and_holds_only_the_packages(clone: Path) -> None:
    made = {path.name: digest(path) for path in make_release(VERSION, root=clone)}
    (clone / "pipelines/rowmill/untracked.py").write_text("")
    shutil.rmtree(clone / "dist")
    (clone / "pipelines/rowmill/untracked.py").unlink()
    assert {path.name: digest(path) for path in make_release(VERSION, root=clone)} == made

    assert set(made) == {
        "SHA256SUMS", "rowmill-0.1.0-py3-none-any.whl", "rowmill-0.1.0.cdx.json", "rowmill-0.1.0.tar.gz",
    }  # fmt: skip
    with zipfile.ZipFile(clone / "dist/rowmill-0.1.0-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    assert {"rowmill/py.typed", "rowmill/reports/report.css", "rowmill/conversation/templates/qwen3.jinja"} <= names
    with tarfile.open(clone / "dist/rowmill-0.1.0.tar.gz") as sdist:
        names |= {entry.name.partition("/")[2] for entry in sdist}
    assert not [name for name in names if re.match(r"tests|configs|docs|benchmarks|.*\.(jsonl|parquet|csv)$", name)]


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "old", "new", "version", "told"),
    [
        ("CHANGELOG.md", "(2026-01-02)", "(unreleased)", VERSION, "CHANGELOG.md: no section `## 0.1.0 (YYYY-MM-DD)`"),
        (
            "README.md",
            "](CONTRIBUTING.md)",
            "](ABSENT.md)",
            VERSION,
            "README.md: links to ABSENT.md, which is not there",
        ),
        ("README.md", "", "", "0.2.0", "pyproject.toml: version 0.1.0, not 0.2.0"),
        (
            "pyproject.toml",
            'dagster_rowmill = ["dagster.yaml"], ',
            "",
            VERSION,
            "dagster_rowmill/dagster.yaml is missing",
        ),
    ],
)
def test_commit_that_is_not_ready_is_refused(
    file: str, old: str, new: str, version: str, told: str, clone: Path
) -> None:
    edit(clone / file, old, new)
    git(clone, "commit", "--quiet", "--all", "--allow-empty", "--message", "Change")

    with pytest.raises(ReleaseError, match=re.escape(told)):
        make_release(version, root=clone)


def test_uncommitted_change_and_tag_that_exists_are_refused(clone: Path) -> None:
    git(clone, "tag", f"v{VERSION}")
    git(clone, "commit", "--quiet", "--allow-empty", "--message", "Later")
    with pytest.raises(ReleaseError, match=r"tag v0\.1\.0: another commit has it"):
        make_release(VERSION, root=clone)
    edit(clone / "README.md", "rowmill", "Rowmill")
    with pytest.raises(ReleaseError, match=r"README\.md: not committed"):
        make_release(VERSION, root=clone)


def test_bill_of_materials_names_all_that_the_extras_bring() -> None:
    bill = json.loads(json.dumps(describe_materials(VERSION)))
    found = {component["name"]: component for component in bill["components"]}

    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "rowmill")
    assert {"polars", "pyarrow", "dagster", "botocore", "pydantic-core"} <= set(found)
    assert found["polars"]["purl"] == f"pkg:pypi/polars@{found['polars']['version']}"
    assert "pytest" not in found
