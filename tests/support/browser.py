"""A real browser, as tests of pages open it."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    # A browser that looks for its maker's servers is not what is tested.
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@contextmanager
def starting_browser() -> Generator[Any]:
    """Start a browser, or skip the test with one line."""
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH; install Debian's package chromium")
    playwright: Any = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install playwright")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()
