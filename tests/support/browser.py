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


class Visitor:
    """A person at a page; every error of a page, and every request that leaves it, is noted."""

    def __init__(
        self, browser: Any, address: str, width: int = 1440, scheme: str = "light", timeout_s: int = 30
    ) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(1_000 * timeout_s)
        self.address = address
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)
        self.page.on("dialog", lambda dialog: (self.errors.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda one: None if one.url.startswith(address) else self.errors.append(one.url))

    def go(self, path: str) -> Any:
        self.page.goto(f"{self.address}{path}")
        return self.page

    def search(self, text: str) -> None:
        self.page.keyboard.press("/")
        self.page.locator("#search").fill(text)
        with self.page.expect_navigation():
            self.page.keyboard.press("Enter")

    def follow(self, link: Any) -> None:
        """Click on what leads to another page, and wait for that page: a click ends before the browser has left."""
        with self.page.expect_navigation():
            link.click()

    def read_rows(self) -> list[str]:
        return list(self.page.locator("tr[data-row]").evaluate_all("rows => rows.map(row => row.dataset.row)"))
