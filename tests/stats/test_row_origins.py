"""Where rows came from and how they begin, in the views of a build."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.schema.rows import REJECT_SCHEMA
from rowmill.stats import tables
from rowmill.stats.views import query_views
from tests.support.recipes import CHAT, PAIR, Built, Workspace, chat, pair, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]

# ── Previews ──────────────────────────────────────────────────────────────────────────────────────


def preview(**columns: Any) -> str | None:
    """Return the preview of one row."""
    schema = pa.schema([pa.field(name, pa.string()) for name in tables.PREVIEWED_COLUMNS])
    found: str | None = tables.preview_rows(pa.Table.from_pylist([columns], schema=schema))[0].as_py()
    return found


def as_messages(*messages: tuple[str, str]) -> str:
    return orjson.dumps([{"role": role, "content": content} for role, content in messages]).decode()


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        ({"messages": as_messages(("system", "Be kind."), ("user", "Hi?"), ("user", "Later"))}, "Hi?"),
        ({"messages": as_messages(("system", "Be kind."), ("assistant", "Hi."))}, "Be kind."),
        ({"messages": as_messages(("system", ""), ("assistant", "Hi."))}, "Hi."),
        ({"messages": '[{"role":"user","name":"bo","content":"Hi?"},{"role":"user","content":"no"}]'}, "Hi?"),
        ({"text": "a prompt"}, "a prompt"),
        ({"messages": "[]", "text": None, "record": '{"a":1}'}, '{"a":1}'),
        ({}, None),
        ({"text": "x" * 300}, "x" * tables.PREVIEW_CHARACTERS),
        ({"text": " a\n\n b\t"}, "a b"),
    ],
)
def test_preview_is_how_a_row_begins(columns: dict[str, Any], shown: str | None) -> None:
    assert preview(**columns) == shown


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ('say "yes"', 'say "yes"'),
        ("two\nlines\tand a tab", "two lines and a tab"),
        # A backslash and an n that are two characters of the text stay so.
        (r"a path C:\new", r"a path C:\new"),
        ("naïve 😀 日本\x07語", "naïve 😀 日本 語"),
        ('","role":"user","content":"trap', '","role":"user","content":"trap'),
    ],
)
def test_preview_of_messages_is_their_text_and_not_its_json(content: str, shown: str) -> None:
    assert preview(messages=as_messages(("user", content))) == shown


@pytest.mark.parametrize("cut", range(195, 205))
def test_preview_that_ends_at_an_escape_is_cut_between_characters(cut: int) -> None:
    text = "x" * cut + "\x01" + '"' * 10 + "\\" * 300

    shown = preview(messages=as_messages(("user", text)))

    assert shown == text.replace("\x01", " ")[: tables.PREVIEW_CHARACTERS].strip()


PIECES = (
    "x",
    "word ",
    " ",
    "\n",
    "\t\r",
    "\x01",
    "\x1f\x7f",
    '"',
    "\\",
    r"\n",
    r"\u0041",
    '\\"',
    '","role":"user","content":"trap',
    "é",
    "😀",
    "\u2028",
    "\x85",
)
RUNS = st.lists(st.tuples(st.sampled_from(PIECES), st.integers(0, 900)), max_size=4)
CONTENTS = st.one_of(
    RUNS.map(lambda runs: "".join(piece * count for piece, count in runs)),
    st.none(),
    st.just([{"type": "text", "text": "a part"}]),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("system", "user", "assistant", "tool")), "content": CONTENTS},
        optional={"name": st.sampled_from(("bo", 'b"o', "")), "tool_call_id": st.just("1"), "tool_calls": st.just([])},
    ),
    max_size=4,
)


def preview_plainly(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the preview of a chat by what its messages say."""
    said = [one for one in messages if isinstance(one["content"], str) and one["content"]]
    chosen = next((one for one in said if one["role"] == "user"), next(iter(said), None))
    if chosen is None:
        return None
    blanked = re.sub("[\x00-\x1f]", " ", chosen["content"][: 2 * tables.PREVIEW_CHARACTERS])
    return " ".join(blanked.split())[: tables.PREVIEW_CHARACTERS].strip()


def preview_chats(chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[str | None]:
    """Return the previews of chats, which are read together."""
    rows = [{"messages": orjson.dumps(list(chat)).decode()} for chat in chats]
    schema = pa.schema([pa.field(name, pa.string()) for name in tables.PREVIEWED_COLUMNS])
    found: list[str | None] = tables.preview_rows(pa.Table.from_pylist(rows, schema=schema)).to_pylist()
    return found


@given(st.lists(MESSAGES, min_size=1, max_size=8))
def test_previews_of_any_chats_are_what_their_messages_say(drawn: list[list[dict[str, Any]]]) -> None:
    assert preview_chats(drawn) == [preview_plainly(chat) for chat in drawn]


# At the borders of what is shown, of what is kept of a text, and of what is read of its JSON without and with escapes.
BORDERS = [n + more for n in (0, 200, 400, 800, 3200) for more in (-2, -1, 0, 1, 2) if n + more >= 0]


@pytest.mark.parametrize("piece", ['"', "\\", '\\"', "\n", "\x01", "😀", "  "])
@pytest.mark.parametrize("filler", ["x", "é", "😀", " "])
def test_a_piece_at_the_borders_of_what_is_read_of_a_question_is_shown_as_elsewhere(piece: str, filler: str) -> None:
    contents = [filler * border + piece + rest for border in BORDERS for rest in ("", "y", "y" * 4000)]
    # As the first message, which may be read without escapes, and behind another one.
    ways: list[list[dict[str, Any]]] = [[], [{"role": "system", "content": "s"}], [{"role": "user", "content": ""}]]
    drawn = [[*way, {"role": "user", "content": content}] for way in ways for content in contents]

    assert preview_chats(drawn) == [preview_plainly(chat) for chat in drawn]


def test_an_escaped_surrogate_pair_is_shown_as_blanks() -> None:
    shown = [preview(messages=rf'[{{"role":"user","content":"a{emoji}b"}}]') for emoji in (r"\ud83d\ude00", "😀")]

    assert shown == ["a b", "a😀b"]


def test_rejects_are_shown_as_text_where_they_are_rows_and_as_bytes_where_not() -> None:
    row = orjson.dumps({"kind": "conversation", "messages": as_messages(("user", "Hi?"))})
    raws = [row, b'{"kind": "book", "topic": "bees"}', b"\xff{", b"", b'{"kind":"text","text":"t","mine":1}']
    table = pa.table({"raw": pa.array(raws, pa.binary())})

    found = tables.describe_rejects(table.column("raw"), lambda raw: f"{len(raw)}")

    assert found["preview"].to_pylist() == [
        "Hi?",
        '{"kind": "book", "topic": "bees"}',
        "�{",
        "",
        '{"kind":"text","text":"t","mine":1}',
    ]
    assert found["domain"].to_pylist() == [None, *(str(len(raw)) for raw in raws[1:])]
    nothing = REJECT_SCHEMA.empty_table().column("raw")
    assert [len(column) for column in tables.describe_rejects(nothing, None).values()] == [0, 0]


# ── A build ───────────────────────────────────────────────────────────────────────────────────────

TOPICS = ("bees", "trains")


def chats(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{**chat(i, turns=1 + i % 4), "topic": TOPICS[i % 2]} for i in range(first, first + count)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("origins")
    write_tokenizer(folder / "tokenizer")
    workspace = Workspace(folder)
    wrong = [{"messages": [{"role": "user", "content": "unanswered"}], "topic": "bees"}, {"topic": "trains"}]
    files = {
        "chats": workspace.write("chats.jsonl", [*chats(20), *wrong, {**chats(1)[0], "topic": "copies"}]),
        "pairs": workspace.write("pairs.jsonl", [pair(i) for i in range(9)]),
    }
    blanks = Path(workspace.write("blanks.jsonl", chats(4, 100)))
    (folder / blanks).write_text("\n\n" + (folder / blanks).read_text(encoding="utf-8"), encoding="utf-8")
    source = {"train_urls": [files["chats"], str(blanks)]}
    datasets = {
        "chats": {"source": source, "format": CHAT | {"domain_key": "topic"}, "truncation": {"max_length": 40}},
        "pairs": {"source": {"train_urls": [files["pairs"]]}, "format": PAIR},
    }
    return workspace.recipe(datasets).build()


def ask(built: Built, sql: str) -> list[tuple[Any, ...]]:
    return query_views(built.project.store, sql)[1]


@pytest.mark.slow
def test_rows_rejects_examples_and_segments_have_file_record_line_and_text(built: Built) -> None:
    found = ask(built, "SELECT parse_filename(source), record, line, domain, preview FROM rows WHERE dataset = 'chats'")

    texts = [one["messages"][0]["content"] for one in chats(20)]
    expected = [("chats.jsonl", i + 1, i + 1, TOPICS[i % 2], " ".join(texts[i].split())[:200]) for i in range(20)]
    # Tokenization rejects it later.
    unanswered = ("chats.jsonl", 21, 21, "bees", "unanswered")
    assert sorted(one for one in found if one[0] == "chats.jsonl") == sorted([*expected, unanswered])
    # Where lines are blank, records and lines differ, and only the records are known.
    later = sorted(one[1:3] for one in found if one[0] == "blanks.jsonl")
    assert later == [(i, None) for i in (1, 2, 3, 4)]

    found = ask(built, "SELECT reason, record, line, domain, preview FROM rejects WHERE dataset = 'chats'")

    by_record = {one[1]: one for one in found}
    assert by_record[21] == ("no_assistant", 21, 21, "bees", "unanswered")
    assert by_record[22] == ("unknown_schema", 22, 22, "trains", json.dumps({"topic": "trains"}))
    # The domain of a row that was removed among equal ones is not kept.
    assert by_record[23][:4] == ("duplicate", 23, 23, None)

    of_rows = "source, record, line, domain, preview"
    rows = dict(ask(built, f"SELECT row_id, [{of_rows.replace(', ', '::VARCHAR, ')}] FROM rows"))
    for view, row_id in (("examples", "row_ids[1]"), ("segments", "row_id")):
        found = ask(built, f"SELECT {row_id}, [{of_rows.replace(', ', '::VARCHAR, ')}] FROM {view}")
        assert found
        assert [one for one in found if rows[one[0]] != one[1]] == []
    sums = ask(built, "SELECT sum(original_tokens), sum(tokens), sum(removed_tokens) FROM examples")
    [(original, kept, removed)] = sums
    assert removed == original - kept > 0


@pytest.mark.slow
def test_rows_of_last_night_are_those_that_no_build_before_had(tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/queries.md").read_text(encoding="utf-8")
    query = page.partition("Which rows came last night?")[2].partition("```sql\n")[2].partition("```")[0]
    write_tokenizer(tmp_path / "tokenizer")
    workspace = Workspace(tmp_path)
    chosen = {"source": {"train_urls": ["data/*.jsonl"]}, "format": CHAT}
    workspace.write("monday.jsonl", chats(6))
    workspace.recipe({"chats": chosen}).build()
    workspace.write("tuesday.jsonl", chats(3, 50))
    night = workspace.build()

    found = ask(night, query.replace("'demo'", "'mini'"))

    assert found == [("chats", "tuesday.jsonl", 3, 1, 3)]


@pytest.mark.slow
def test_a_renamed_file_is_named_as_in_the_build_that_read_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    workspace = Workspace(tmp_path)
    workspace.write("old.jsonl", chats(6))
    workspace.recipe({"chats": {"source": {"train_urls": ["data/*.jsonl"]}, "format": CHAT}}).build()
    os.rename(tmp_path / "data/old.jsonl", tmp_path / "data/new.jsonl")

    again = workspace.build()

    named = ask(again, "SELECT DISTINCT parse_filename(source) FROM segments")
    assert named == [("new.jsonl",)]
    assert ask(again, "SELECT DISTINCT parse_filename(source) FROM rows") == named
