"""Python literals as JSON values: what is read, what is refused, and that nothing is evaluated."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.json import Json
from rowmill.core.python_literals import MOST_CHARS, from_python

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES.filter(lambda value: "\0" not in repr(value)))
def test_literal_of_a_json_value_is_that_value(value: Json) -> None:
    assert json.dumps(from_python(repr(value))) == json.dumps(value)


def test_tuples_are_lists_and_space_does_not_count() -> None:
    assert from_python("\n [('user', 'Hi'), (-1, 2.5)] ") == [["user", "Hi"], [-1, 2.5]]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("array([{'role': 'user'}], dtype=object)", "NumPy"),
        ("[{'role': 'user'}\n {'role': 'assistant'}]", "not a Python literal"),
        ("[{'role': 'user'}, ...]", "can hold"),
        ("{'a': nan}", "can hold: Name"),
        ("[1e999]", "can hold"),
        ("{'a': 1, 'a': 2}", "'a' is repeated"),
        ("{1: 2}", "a key is no text"),
        ("{**{'a': 1}}", "a key is no text"),
        ("[b'x']", "can hold"),
        ("{'a', 'b'}", "can hold: Set"),
        ("[1j]", "can hold"),
        ("[-True]", "can hold"),
        ("[f'{1}']", "can hold: JoinedStr"),
        ("['\\d']", "invalid escape"),
        ("['\\ud800']", "surrogates"),
        ("[x for x in (1, 2)]", "can hold: ListComp"),
        ("[__import__('os').getcwd()]", "can hold: Call"),
        ("(lambda: 1)()", "can hold: Call"),
        ("[" * 300 + "]" * 300, "too many nested"),
        ("[" + "-" * 100_000 + "1]", "nested too deep"),
        ("[" + "1+" * 100_000 + "1]", "nested too deep"),
        ("[" + "9" * 5000 + "]", "4300 digits"),
        ("['" + "a" * MOST_CHARS + "']", "at most"),
        ("", "not a Python literal"),
    ],
)
def test_what_is_no_literal_of_a_json_value_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        from_python(text)
