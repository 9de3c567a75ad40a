"""The texts of canonical rows, each message by itself in every column that a kind has, and the hashes of prompts."""

from hashlib import blake2b

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.stages.canonical_rows.row_texts import list_row_texts
from rowmill.stages.canonical_rows.text_rows import hash_prompts


def say(role: str, content: str, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def test_texts_of_rows_are_in_the_order_of_their_columns() -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": {"what": "a\nb", "many": [1, None]}}}
    messages = [say("user", "Hi"), say("assistant", "", reasoning_content="Hm.", tool_calls=[call]), say("tool", "x")]
    rows = pa.table(
        {
            "messages": [orjson.dumps(messages).decode(), None, orjson.dumps([say("user", "Ask")]).decode(), None],
            "chosen": [None, None, orjson.dumps([say("assistant", "Good")]).decode(), None],
            "rejected": [None, None, orjson.dumps([say("assistant", "Bad")]).decode(), None],
            "text": [None, "prompt", None, None],
            "output": [None, "answer", None, None],
            "record": [None, None, None, orjson.dumps({"a": ["one", {"b": "two"}], "n": 3}).decode()],
        }
    )

    found = list_row_texts(rows)

    assert [found.of_row(k) for k in range(4)] == [
        ["Hi", "Hm.", "find\nwhat\na\nb\nmany\n1\nnull", "x"],
        ["prompt", "answer"],
        ["Ask", "Good", "Bad"],
        ["one", "two"],
    ]
    assert found.characters.tolist() == [31, 12, 10, 6]

    empty = pa.table({name: pa.array([None], pa.string()) for name in ("messages", "text", "output", "record")})

    found = list_row_texts(empty)

    assert (found.texts, found.count, found.characters.tolist()) == ([], 1, [0])


SPACES = "".join(char for char in map(chr, range(0x3001)) if char.isspace())
PROMPTS = st.lists(st.none() | st.text(st.sampled_from(f"aZ0.[\x00\x7f{SPACES}") | st.characters(codec=None)))


@pytest.mark.slow
@given(PROMPTS)
def test_hash_is_that_of_the_folded_prompt(prompts: list[str | None]) -> None:
    folded = [prompt and " ".join(prompt.casefold().split()).encode("utf-8", "surrogatepass") for prompt in prompts]

    assert hash_prompts(prompts) == [
        blake2b(one, digest_size=8).digest() if isinstance(one, bytes) else None for one in folded
    ]


@pytest.mark.slow
def test_prompts_that_differ_in_case_and_spaces_are_equal() -> None:
    first, *others = hash_prompts(["Who are you?", "\n who  ARE\t\x1cyou? ", "who are\u2003you?", "WHO are you? "])

    assert set(others) == {first}
    assert first not in hash_prompts(["whoare you?", "who are you ?", "", None, " "])
