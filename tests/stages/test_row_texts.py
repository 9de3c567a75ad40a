"""The texts of canonical rows: each message by itself, in every column that a kind has."""

import orjson
import pyarrow as pa

from rowmill.stages.canonical_rows.row_texts import list_row_texts


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
