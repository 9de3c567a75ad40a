"""The documentation as a site, built as `make site` does."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build_site(folder: Path) -> Path:
    """Build the site in a folder, or skip the test where MkDocs is not installed; a warning is an error."""
    pytest.importorskip("material", reason="MkDocs is not installed: pip install 'rowmill[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder
