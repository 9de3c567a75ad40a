"""Pictures: what they show, that they are well-formed, and that words from data stay words."""

from itertools import pairwise
from xml.etree import ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from rowmill.reports import plots
from rowmill.schema.manifest import Histogram

SVG = "{http://www.w3.org/2000/svg}"
HISTOGRAM = Histogram(
    title="original length", unit="tokens", edges=(0.0, 10.0, 20.0, 30.0), counts=(4, 2, 1), limit=20.0
)


def bars_of(svg: str) -> list[ET.Element]:
    return [one for one in ET.fromstring(svg).iter(f"{SVG}rect") if one.get("rx") is None]


def test_histogram_svg_draws_bars_in_proportion_and_marks_the_limit() -> None:
    bars = bars_of(plots.draw_histogram_svg(HISTOGRAM))
    heights = [float(bar.get("height", "0")) for bar in bars]
    assert [round(height / heights[2]) for height in heights] == [4, 2, 1]
    assert [bar.get("fill") for bar in bars] == [plots.BAR, plots.BAR, plots.OVER]
    assert [bar[0].text for bar in bars] == ["0 to 10: 4", "10 to 20: 2", "20 to 30: 1"]
    svg = plots.draw_histogram_svg(HISTOGRAM, width=323)
    # 15 pixels for the counts at the left and two of three bars of 100 pixels.
    assert 'd="M215.0' in svg
    assert "limit 20<" in svg
    svg = plots.draw_histogram_svg(Histogram("t", "tokens", (0.0, 10.0), (1,), limit=4096.0))
    assert "limit 4,096 →" in svg
    for histogram in (Histogram("t", "u", (0.0, 1.0), (0,)), Histogram("t", "u", (), (), limit=3.0)):
        assert bars_of(plots.draw_histogram_svg(histogram)) == []


def test_axis_of_uneven_bins_with_a_far_tail_has_round_numbers_below_the_tail() -> None:
    edges = (*(1506.3 + 63.7 * i for i in range(21)), 9000.0)
    svg = plots.draw_histogram_svg(Histogram("load", "tokens", edges, (7,) * 21), width=520)
    labels = [one.text or "" for one in ET.fromstring(svg).iter(f"{SVG}text")]
    assert labels[0] == "load (tokens): 147 total"
    assert labels[1:] == ["2", "4", "6", "1,600", "1,800", "2,000", "2,200", "2,400", "2,600"]


@given(st.integers(-1000, 1000), st.floats(1e-2, 1e9), st.integers(1, 12))
def test_round_ticks_are_few_inside_the_range_and_of_one_digit_apart(lowest: int, width: float, most: int) -> None:
    ticks = plots.choose_round_ticks(lowest, lowest + width, most)

    assert len(ticks) <= most + 1
    gaps = {float(f"{b - a:.6g}") for a, b in pairwise(ticks)}
    assert len(gaps) <= 1
    assert all(f"{gap:e}"[0] in "125" and float(f"{gap:.1g}") == gap for gap in gaps)
    assert all(lowest - 1e-6 * width <= at <= lowest + width * (1 + 1e-6) for at in ticks)


@given(st.text(max_size=40))
def test_bars_svg_with_any_name_from_data_stays_well_formed_and_holds_no_markup_of_it(name: str) -> None:
    tree = ET.fromstring(plots.draw_bars_svg("rejects", [(f"<image href='x'/>{name}", 3.0)]))
    assert {element.tag.removeprefix(SVG) for element in tree.iter()} == {"svg", "title", "rect", "text"}


def test_bars_are_drawn_in_proportion_and_without_control_characters() -> None:
    widths = [float(bar.get("width", "0")) for bar in bars_of(plots.draw_bars_svg("t", [("a", 10), ("b", 5)]))]
    assert widths[0] == 2 * widths[1] > 0
    drawn = plots.draw_bars_text([("kept", 16), ("bad", 1)], width=11)
    assert drawn.splitlines() == ["kept │██ 16", " bad │▏ 1"]
    drawn = plots.draw_bars_text([("a\x1b[31m\nb", 1)])
    assert "\x1b" not in drawn
    assert len(drawn.splitlines()) == 1


def test_histogram_text_has_a_line_per_bin_and_a_rule_at_the_limit() -> None:
    lines = plots.draw_histogram_text(HISTOGRAM, width=30).splitlines()

    assert lines[0] == "original length (tokens)"
    bins = [line.split("│")[0].strip() for line in (lines[1], lines[2], lines[4])]
    assert bins == ["0 to 10", "10 to 20", "20 to 30"]
    assert lines[3].startswith("── limit 20 ─")


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=48), st.integers(0, 48))
def test_histogram_text_of_many_bins_joins_them_without_losing_any(counts: list[int], limit: int) -> None:
    edges = tuple(float(edge) for edge in range(len(counts) + 1))
    drawn = plots.draw_histogram_text(Histogram("t", "u", edges, tuple(counts), float(limit)), lines=10)
    body = [line for line in drawn.splitlines()[1:] if not line.startswith("──")]
    assert len(body) <= 12
    assert sum(int(line.rsplit(" ", 1)[1].replace(",", "")) for line in body) == sum(counts)
