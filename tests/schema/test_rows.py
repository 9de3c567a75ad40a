"""Each kind of rows, and each objective, has its description, and a description names columns that it has."""

from typing import get_args

import pytest

from rowmill.schema.examples import OBJECTIVE_DESCRIPTIONS, Objective
from rowmill.schema.rows import ROW_KINDS, RowKind, are_running_text, make_row_schema


def test_every_row_kind_and_objective_is_described() -> None:
    assert set(ROW_KINDS) == set(get_args(RowKind))
    assert set(OBJECTIVE_DESCRIPTIONS) == set(get_args(Objective))


@pytest.mark.parametrize("kind", get_args(RowKind))
def test_rows_of_a_kind_end_with_its_columns_and_have_those_of_their_content(kind: RowKind) -> None:
    names, own = make_row_schema(kind).names, [column.name for column in ROW_KINDS[kind].columns]

    assert names[len(names) - len(own) :] == own
    assert set(ROW_KINDS[kind].content_columns) <= set(own)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [(("text",), True), (("text", "conversation"), False), (("record",), False), ((), False)],
)
def test_rows_are_running_text_if_all_of_them_are(kinds: tuple[RowKind, ...], expected: bool) -> None:
    assert are_running_text(kinds) is expected
