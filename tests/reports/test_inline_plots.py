"""Small pictures: what they show, that they are well-formed and short, and that text from data stays text."""

from urllib.parse import unquote
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.reports import inline_plots
from rowmill.schema.manifest import Histogram

SVG = "{http://www.w3.org/2000/svg}"


def make_histogram(counts: list[int], limit: float | None = None) -> Histogram:
    return Histogram("lengths", "tokens", tuple(float(i) for i in range(len(counts) + 1)), tuple(counts), limit)


def test_histogram_is_an_outline_on_each_side_of_its_limit() -> None:
    svg = inline_plots.draw_inline_histogram(make_histogram([2, 1, 0, 4], limit=2.0))

    below, above = ET.fromstring(svg).iter(f"{SVG}path")
    assert (below.get("fill"), above.get("fill")) == (inline_plots.BAR, inline_plots.OVER)
    # 106 pixels for the highest of four bars of 85 pixels.
    assert below.get("d") == "M0 130V77h85V104h85V130z"
    assert above.get("d") == "M170 130V130h85V24h85V130z"
    assert [one.text for one in ET.fromstring(svg).iter(f"{SVG}text")] == ["lengths, tokens, limit 2", "0", "4"]


def test_bars_beyond_the_last_line_are_one_bar_with_their_sum() -> None:
    items = [("a", 10), ("b", 5), ("c", 3), ("d", 1)]

    drawn = ET.fromstring(inline_plots.draw_inline_bars(items, max_bars=3))

    assert [one.text for one in drawn.iter(f"{SVG}text")] == ["a", "b", "others", "10", "5", "4"]
    [path] = drawn.iter(f"{SVG}path")
    assert path.get("d") == "M190 2h150v17h-150zM190 26h75v17h-75zM190 50h60v17h-60z"


@pytest.mark.slow
@given(st.lists(st.integers(0, 100), min_size=1, max_size=200), st.integers(1, 60))
def test_joined_counts_keep_their_sum_and_their_limit(counts: list[int], most: int) -> None:
    joined = inline_plots.join_counts(counts, most)

    assert sum(joined) == sum(counts)
    assert len(joined) <= most


@given(st.text(alphabet="<>&'\"()![]#% \nab", max_size=20))
def test_address_of_any_text_has_nothing_that_ends_a_markdown_image(name: str) -> None:
    uri = inline_plots.make_inline_uri(inline_plots.draw_inline_bars([(name, 1)]))

    assert not set(uri) & set(' ()<>"\n![]#')
    assert ET.fromstring(unquote(uri).partition(",")[2]).tag == f"{SVG}svg"
