"""A stage's details are folded, show shares as per cent, and leave out tables of zeros."""

from rowmill.reports import report_stages
from rowmill.schema.manifest import DisplayTable
from tests.support.markup import Page
from tests.support.recipes import Built


def test_table_of_zeros_is_left_out_and_one_of_words_is_not() -> None:
    columns = ("stage", "examples", "tokens_removed")

    assert not report_stages.says_something(DisplayTable(columns, (("exchanges", 0, 0), ("tokens", 0, 0))))
    assert not report_stages.says_something(DisplayTable(columns, ()))
    assert report_stages.says_something(DisplayTable(columns, (("exchanges", 0, 0), ("tokens", 0, 3))))
    assert report_stages.says_something(DisplayTable(("column", "distance"), (("units", 0.0),)))
    assert report_stages.says_something(DisplayTable(("hint",), (("raise seq_len",),)))


def test_stages_are_folded_and_the_page_has_no_table_of_zeros(reported: Built, page: Page) -> None:
    tables = [reported.manifest(name, "truncation_stats").tables["stages"] for name in ("chats", "pairs")]

    assert page.values("open", "details") == []
    assert [report_stages.says_something(table) for table in tables] == [True, False]
    assert page.markup.count('<p class="dim">stages</p>') == 1
