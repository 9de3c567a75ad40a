"""The documentation's site in a real browser: nothing is cut off at two widths, and pictures follow the colour scheme.

Needs what `test_browser.py` needs, and MkDocs.
"""

from collections.abc import Generator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.browser import starting_browser
from tests.support.site import ROOT, build_site
from tests.support.tiers import mark_all_but

pytestmark = [pytest.mark.slow, pytest.mark.browser]

PAGES = (
    "index",
    "tutorial",
    "how-to/write-a-recipe",
    "how-to/train",
    "how-to/run-it-for-a-team",
    "coming-from/trl",
    "reference",
    "reference/loss",
    "reference/commands",
    "why",
    "walk",
    "decisions/0019-own-text-is-proven-and-template-text-listed",
)
DRAWN = [path for path in sorted((ROOT / "docs/images").glob("*.svg")) if "<text" in path.read_text(encoding="utf-8")]
FIND_CUT_OFF = """() => {
  const width = document.documentElement.clientWidth, found = [];
  const scrolls = element => ['auto', 'scroll'].includes(getComputedStyle(element).overflowX);
  const clips = element => ['hidden', 'clip'].includes(getComputedStyle(element).overflowX);
  const name = element => `${element.tagName} ${element.className} ${element.textContent.trim().slice(0, 40)}`;
  for (const element of document.querySelectorAll('.md-header *, .md-tabs *, .md-content *, .md-footer *')) {
    if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (element.closest('svg, [data-md-component=search], .md-header__title, .headerlink')) continue;
    const box = element.getBoundingClientRect();
    if (box.width <= 1) continue;
    if (clips(element) && element.scrollWidth > element.clientWidth + 1) found.push('clipped: ' + name(element));
    let outer = element.parentElement;
    while (outer && !scrolls(outer)) outer = outer.parentElement;
    if (!outer && (box.right > width + 1 || box.left < -1)) found.push('too wide: ' + name(element));
  }
  if (document.documentElement.scrollWidth > width) found.push(`page of ${document.documentElement.scrollWidth} px`);
  return found;
}"""
"""Names what is wider than the window, or than an element that hides what does not fit, unless it scrolls."""


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is the base class's)
        """Print nothing."""


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    with starting_browser() as started:
        yield started


@pytest.fixture(scope="module")
def address(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Build and serve the site; requested after the browser, which may be missing."""
    del browser
    folder = build_site(tmp_path_factory.mktemp("site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("width", mark_all_but([390], [390, 1440]))
def test_nothing_on_a_page_is_cut_off_and_every_picture_is_there(browser: Any, address: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda one: None if one.url.startswith(address) else errors.append(one.url))
    found = {}
    for name in PAGES:
        page.goto(f"{address}/{name}.html", wait_until="load")
        # Material puts tables into elements that scroll.
        page.wait_for_function(
            "!document.querySelector('.md-typeset table:not([class])')?.parentElement?.matches('article')"
        )
        missing = page.evaluate(
            "Promise.all([...document.querySelectorAll('.md-content img')].map(image => image.decode().then(() => [], "
            "() => [image.src]))).then(lists => lists.flat())"
        )
        if cut_off := [*page.evaluate(FIND_CUT_OFF), *missing]:
            found[name] = cut_off
    page.close()

    assert found == {}
    assert errors == []


def test_what_is_wider_than_the_window_is_found(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.goto(f"{address}/why.html")
    page.evaluate("document.querySelector('.md-content p').style.width = '600px'")
    wide = page.evaluate(FIND_CUT_OFF)
    page.evaluate("document.querySelector('.md-content__inner').style.overflow = 'hidden'")
    clipped = page.evaluate(FIND_CUT_OFF)
    page.close()

    assert any(line.startswith("too wide: P") for line in wide)
    assert any(line.startswith("clipped: ARTICLE") for line in clipped)


@pytest.mark.parametrize(("scheme", "other"), [("light", "dark"), ("dark", "light")])
def test_switch_of_colours_changes_the_page_and_its_pictures(
    browser: Any, address: str, scheme: str, other: str
) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
    page.goto(f"{address}/index.html")
    picture = page.locator("img[src$='pipeline.svg']")
    shots = []
    for expected in (scheme, other):
        assert page.evaluate("getComputedStyle(document.body).colorScheme") == expected
        shots.append(picture.screenshot())
        page.locator("label.md-header__button:visible[title^=Switch]").click()
    page.close()

    assert shots[0] != shots[1]


@pytest.mark.parametrize(("width", "picture"), [(390, "pipeline-narrow.svg"), (1440, "pipeline.svg")])
def test_first_page_shows_the_pipeline_with_text_that_can_be_read(
    browser: Any, address: str, width: int, picture: str
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(f"{address}/index.html")
    image = page.locator("img[src$='pipeline.svg']")
    shown = image.evaluate("image => [image.currentSrc, image.clientWidth / image.naturalWidth]")
    page.close()

    assert shown[0].endswith(f"/{picture}")
    # Its text has 13 pixels.
    assert shown[1] * 13 >= 11


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_text_of_a_drawn_picture_stays_inside_it(browser: Any, path: Path) -> None:
    page = browser.new_page()
    page.goto(path.as_uri())
    outside = page.evaluate(
        "() => [...document.querySelectorAll('text')].filter(text => text.getBBox().x < 0 || text.getBBox().x + "
        "text.getBBox().width > document.documentElement.viewBox.baseVal.width - 4).map(text => text.textContent)"
    )
    page.close()

    assert outside == []


@pytest.mark.parametrize(
    ("words", "page_found"),
    [
        ("end_of_turn", "reference/loss.html"),
        ("context_overflow", "reference/checks.html"),
        ("resume", "how-to/train.html"),
        ("loss mask", "walk.html"),
    ],
)
def test_search_finds_the_page(browser: Any, address: str, words: str, page_found: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{address}/index.html")
    query = page.locator("[data-md-component=search-query]")
    query.fill(words)
    # The page reads the field when a key is released; a value that appears without one it may never see.
    query.press("End")
    results = page.locator("[data-md-component=search-result] a.md-search-result__link")
    results.first.wait_for()
    found = results.evaluate_all("links => links.map(link => link.getAttribute('href').split(/[?#]/)[0])")
    page.close()

    assert any(link.endswith(page_found) for link in list(dict.fromkeys(found))[:3]), found
