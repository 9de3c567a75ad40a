"""Makes what a release consists of, and checks it: `python -m release.make_release 0.1.0`.

    commit ─ git archive ─► source tree ─► sdist, wheel     twice, and both times with the same digests
    wheel, sdist ─► only packages, templates, py.typed, report files; metadata that a registry accepts
    environment ─► bill of materials (CycloneDX)
    dist/rowmill-VERSION*, dist/SHA256SUMS

`make release` tests before and tags after; a person uploads.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGED = re.compile(r"(?:pipelines|assets)/((?:rowmill|dagster_rowmill)/.+)(?<!\.md)")
"""Tracked files of the packages, and their names in a wheel."""
BESIDE_PACKAGES = re.compile(r"PKG-INFO|LICENSE|README\.md|pyproject\.toml|setup\.cfg|.*\.egg-info/.+")
"""What else an sdist holds."""
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
BUILD = (
    "import os, sys; from setuptools import build_meta; _, source, built = sys.argv; "
    "os.chdir(source); os.umask(0o022); build_meta.build_sdist(built); build_meta.build_wheel(built)"
)


class ReleaseError(Exception):
    """The commit is not ready to be released; the message says what to do."""


def make_release(version: str, *, root: Path = ROOT) -> list[Path]:
    """Build and check the files of a release in `dist`; return them."""
    require_ready(version, root)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        made = build_distributions(root, Path(first))
        again = build_distributions(root, Path(second))
        digests = {path.name: digest(path) for path in made}
        if digests != {path.name: digest(path) for path in again}:
            raise ReleaseError(
                f"{', '.join(digests)}: two builds of one commit differ; a release is built twice with equal digests; "
                "compare them with `diffoscope`"
            )
        require_contents(root, made)
        target = root / "dist"
        target.mkdir(exist_ok=True)
        kept = [target / path.name for path in made]
        for path, copy in zip(made, kept, strict=True):
            copy.write_bytes(path.read_bytes())
    bill = target / f"rowmill-{version}.cdx.json"
    bill.write_text(json.dumps(describe_materials(version), indent=2) + "\n", encoding="utf-8")
    kept.append(bill)
    sums = target / "SHA256SUMS"
    sums.write_text("".join(f"{digest(path)}  {path.name}\n" for path in kept), encoding="utf-8")
    return [*kept, sums]


def require_ready(version: str, root: Path) -> None:
    """Raise ReleaseError unless the tree is clean, and pyproject.toml and the changelog have this version."""
    if dirty := run("git", "status", "--porcelain", root=root):
        raise ReleaseError(f"{dirty.splitlines()[0].strip()}: not committed; a release is a commit; commit or stash it")
    written = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if written != version:
        raise ReleaseError(f"pyproject.toml: version {written}, not {version}; the two must agree; change one of them")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(version)} \((.+)\)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None or section[1] == "unreleased" or not section[2].strip():
        raise ReleaseError(
            f"CHANGELOG.md: no section `## {version} (YYYY-MM-DD)` with text; a release has one; write it and commit"
        )
    tagged = run("git", "tag", "--list", f"v{version}", root=root) and run(
        "git", "rev-list", "-1", f"v{version}", root=root
    )
    if tagged and tagged != run("git", "rev-parse", "HEAD", root=root):
        raise ReleaseError(f"tag v{version}: another commit has it; a version is released once; choose the next one")
    absent = [link for link in find_links(root / "README.md") if "://" not in link and not (root / link).exists()]
    if absent:
        raise ReleaseError(
            f"README.md: links to {absent[0]}, which is not there; a registry shows it; correct the link"
        )


def find_links(page: Path) -> list[str]:
    """Return the targets of a page's links."""
    return LINK.findall(page.read_text(encoding="utf-8"))


def build_distributions(root: Path, folder: Path) -> list[Path]:
    """Build the sdist and the wheel of the current commit into a folder, all files with the time of the commit."""
    epoch = run("git", "log", "-1", "--format=%ct", root=root)
    source, built = folder / "source", folder / "built"
    built.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for entry in files:
            entry.mode = 0o755 if entry.isdir() else 0o644
            files.extract(entry, source, filter="data")
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch}
    command = [sys.executable, "-W", "ignore", "-c", BUILD, str(source), str(built)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"pyproject.toml: setuptools cannot build it: {done.stderr[-2000:]}")
    for path in built.glob("*.tar.gz"):
        normalize_sdist(path, int(epoch))
    return sorted(built.iterdir())


def normalize_sdist(path: Path, epoch: int) -> None:
    """Write an sdist again, sorted and without the times and the owner of the machine that built it."""
    packed = io.BytesIO()
    with tarfile.open(path) as files, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as out:
        for entry in sorted(files.getmembers(), key=lambda entry: entry.name):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname, entry.pax_headers = epoch, 0, 0, "", "", {}
            out.addfile(entry, files.extractfile(entry) if entry.isfile() else None)
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=epoch))


def require_contents(root: Path, made: Sequence[Path]) -> None:
    """Raise ReleaseError unless wheel and sdist hold the tracked files of the packages, and nothing else."""
    tracked = run("git", "ls-files", root=root).splitlines()
    packaged = {match[0]: match[1] for name in tracked if (match := PACKAGED.fullmatch(name))}
    for path in made:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as files:
                found = {name for name in files.namelist() if ".dist-info/" not in name}
            wanted = set(packaged.values())
        else:
            with tarfile.open(path) as files:
                names = {entry.name.partition("/")[2] for entry in files if entry.isfile()}
            found = {name for name in names if not BESIDE_PACKAGES.fullmatch(name)}
            wanted = set(packaged)
        if different := sorted(found ^ wanted):
            raise ReleaseError(
                f"{path.name}: {different[0]} is {'missing' if different[0] in wanted else 'too much'}; it holds the "
                "tracked files of the two packages; correct [tool.setuptools] in pyproject.toml, or PACKAGED here"
            )


def require_accepted_metadata(made: Sequence[Path]) -> None:
    """Raise ReleaseError unless twine accepts the metadata of wheel and sdist, as a registry would."""
    distributions = [str(path) for path in made if path.suffix in (".whl", ".gz")]
    if subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *distributions], check=False).returncode:
        raise ReleaseError("dist: twine refuses the metadata; a registry would, too; correct pyproject.toml")


def describe_materials(version: str) -> dict[str, object]:
    """Return the bill of materials: what `rowmill[all]` brings, with versions and licences, as CycloneDX."""
    components = [
        {
            "type": "library",
            "name": name,
            "version": found,
            "purl": f"pkg:pypi/{name}@{found}",
            **({"licenses": [{"license": {"name": licence}}]} if licence else {}),
        }
        for name, found, licence in sorted(find_materials("rowmill", ("all",), {}))
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_DNS, json.dumps([version, components]))}",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "rowmill", "version": version}},
        "components": components,
    }


def find_materials(name: str, extras: Sequence[str], seen: dict[str, set[str]]) -> Iterator[tuple[str, str, str]]:
    """Yield name, version and licence of what a distribution requires here, all levels down."""
    for line in distribution(name).requires or ():
        needed = Requirement(line)
        key = re.sub(r"[-_.]+", "-", needed.name).lower()
        applies = needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras or ("",))
        if not applies or needed.extras | {""} <= seen.get(key, set()):
            continue
        is_new = key not in seen
        seen.setdefault(key, set()).update(needed.extras | {""})
        try:
            found = distribution(key).metadata
        except PackageNotFoundError:
            continue
        if is_new and key != "rowmill":
            licence = next((found[name] for name in ("License-Expression", "License") if name in found), "")
            yield key, found["Version"], licence.partition("\n")[0]
        yield from find_materials(key, ("", *sorted(needed.extras)), seen)


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(*command: str, root: Path) -> str:
    """Run a command in the repository and return what it prints."""
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Make the files of a release from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version")
    try:
        require_accepted_metadata(make_release(parser.parse_args().version))
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    print((ROOT / "dist/SHA256SUMS").read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
