"""The closed list of reasons: each is reached by a row that somebody could have, and no other is used anywhere."""

import ast
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rowmill.kinds.base import OPTION_GROUPS
from rowmill.kinds.reading.canonicalization import hash_row_content
from rowmill.schema import ledger
from rowmill.schema.rows import Row
from tests.support.recipes import (
    CHAT,
    CHATML,
    TEXT,
    TO_ROWS,
    Built,
    Workspace,
    chat,
    document,
    rewrite_tokenizer,
    sentence,
)

ROOT = Path(__file__).resolve().parents[2]

USER = {"role": "user", "content": "why is that so?"}
BOT = {"role": "assistant", "content": "because it is so"}
DEEP = '{"a":' * 600 + "1" + "}" * 600
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"


def said(**assistant: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", **assistant}]}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": arguments, **more}}


CHATS: dict[str, Any] = {
    "not_utf8": b'{"messages":[{"role":"user","content":"\xff"}]}',
    "invalid_json": b"{",
    "not_an_object": b"[1]",
    "duplicate_key": b'{"messages":[{"role":"user","content":"lost","content":"kept"}]}',
    "too_deep": said(content="", tool_calls=[call(DEEP)]),
    "unknown_schema": {"words": "no known shape"},
    "bad_messages": {"messages": ["why?"]},
    "empty_conversation": {"messages": []},
    "empty_assistant": said(content=" "),
    "content_not_text": said(content=3),
    "unread_prompt": {"messages": [USER, BOT], "context": "what nobody reads"},
    "empty_user": {"messages": [{"role": "user", "content": None}, BOT]},
    "multimodal_content": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, BOT]},
    "unknown_content_part": {"messages": [{"role": "user", "content": [{"type": "smell"}]}, BOT]},
    "unclosed_think": said(content="<think>the answer was cut o"),
    "orphan_think": {"messages": [USER, BOT, {"role": "think", "content": "and then?"}]},
    "bad_tools": {"messages": [USER, BOT], "tools": "[{]"},
    "bad_tool_call": said(content="", tool_calls=[{"arguments": {}}]),
    "bad_tool_arguments": said(content="", tool_calls=[call([1, 2])]),
    "flag_conflict": said(content="yes", train=True, weight=0),
    "bad_weight": said(content="yes", weight=0.5),
    "bad_template_kwargs": {"messages": [USER, BOT], "chat_template_kwargs": {"tokenize": True}},
    "no_assistant": {"messages": [USER]},
    "no_loss_tokens": said(content="quiet", train=False),
    "untrained_row": {"messages": [USER, BOT], "train": False},
    "content_dropped": {"messages": [USER, {**BOT, "content": "tools?"}], "tools": [{"name": "f"}]},
}

Case = tuple[dict[str, Any], list[Any], dict[str, Any]]
"""A format, records, groups of options."""

ONE_BY_ONE: dict[str, Case] = {
    "unknown_role": (
        {**CHAT, "unknown_roles": "reject"}, [{"messages": [{"role": "critic", "content": "x"}, BOT]}], {},
    ),
    "bad_system_prompt": (
        {**CHAT, "system_prompt": "persona"}, [{"messages": [USER, BOT], "persona": {"text": "Be kind."}}], {},
    ),
    "missing_field": ({**CHAT, "messages_field": "dialog"}, [{"messages": [USER, BOT]}], {}),
    "duplicate": (CHAT, [chat(1), chat(1)], {}),
    # The file of rows names its own row.
    "left_out_by_hand": (
        TEXT, [document(1) | {"content_hash": hash_row_content(Row("text", text=document(1)["text"])).hex()}],
        {"filters": {"leave_out": ["data/left_out_by_hand.jsonl"]}},
    ),
    "near_duplicate": (
        TEXT, [document(1), {"text": f"{document(1)['text']} Indeed."}], {"filters": {"near_duplicates": {}}},
    ),
    "contaminated": (TEXT, [document(1)], {"filters": {"decontaminate": {
        "benchmarks": [{"name": "itself", "urls": ["data/contaminated.jsonl"], "fields": ["text"]}]}}}),
    "empty_text": (TEXT, [{"text": " \n"}], {}),
    "too_short": (TEXT, [{"text": "ab"}], {"filters": {"min_chars": 3}}),
    "too_long": (TEXT, [{"text": "abcd"}], {"filters": {"max_chars": 3}}),
    "group_missing": (CHAT, [chat(1)], {"splits": {"group_key": "thread"}}),
    "order_missing": (CHAT, [chat(1)], {"splits": {"time_key": "at", "boundaries": {"test": "2024-06-01"}}}),
    "order_unparsable": (
        CHAT, [{**chat(1), "at": "soon"}], {"splits": {"time_key": "at", "boundaries": {"test": "2024-06-01"}}},
    ),
    "split_gap": (
        CHAT,
        [{**chat(1), "at": "2024-05-31T23:00:00"}],
        {"splits": {"time_key": "at", "boundaries": {"test": "2024-06-01"}, "gap": "12h"}},
    ),
    "straddles_split": (
        CHAT,
        [{**chat(i), "at": at, "who": "a"} for i, at in enumerate(("2024-05-01", "2024-07-01"))],
        {
            "splits": {
                "time_key": "at", "boundaries": {"test": "2024-06-01"}, "group_key": "who", "crossing_groups": "reject",
            },
        },
    ),
    "overlong": (CHAT, [chat(1, turns=4, words=20)], {"truncation": {"max_length": 40, "overlong": "drop"}}),
    "overlong_after_structure": (
        CHAT, [chat(1, words=60)], {"truncation": {"max_length": 40, "token_cut": "reject"}},
    ),
    "control_token_in_content": (CHAT, [said(content="write <|im_end|>")], {"template": {"control_tokens": "reject"}}),
    "skipped_by_format": ({"kind": "python", "class": "formats_of_reasons:Moody"}, [{"how": "skip"}], {}),
    "format_error": ({"kind": "python", "class": "formats_of_reasons:Moody"}, [{"how": "raise"}], {}),
    "bad_example": ({"kind": "python", "class": "formats_of_reasons:Tokens"}, [{"ids": [5, 6], "mask": [1]}], {}),
    # What closes the reasoning depends on the answer: no probe can know it.
    "reasoning_not_located": (
        CHAT,
        [said(content="an answer of some length", reasoning="one two three four")],
        {
            "loss": {"think_loss": "answer_only"},
            "template": {
                "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}"
                "({{ m.reasoning_content }} {{ m.content | length }}){% endif %}{{ m.content }}<|im_end|>{% endfor %}"
            },
        },
    ),
}  # fmt: skip

TEMPLATES: dict[str, str] = {
    "template_error": "{{ raise_exception('roles must alternate') }}" + CHATML,
    # The rendered text depends on the characters of every text: no placeholder can replace one.
    "span_not_found": (
        "{% set ns = namespace(l=[]) %}{% for m in messages %}"
        "{% set ns.l = ns.l + [dict(role=m.role, content=m.content, n=m.content | upper)] %}{% endfor %}"
        "{% for m in ns.l %}{{ m.n }}" + TURN + "{% endfor %}"
    ),
    "own_text_untrained": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content[:4] }}{% endgeneration %}{{ m.content[4:] }}<|im_end|>"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "assistant_untrained": (
        "{% for m in messages %}{{ m.role + ':' + m.content }}{% generation %}{% endgeneration %}<|im_end|>{% endfor %}"
    ),
    "foreign_text_trained": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>{{ m.content }} (asked: "
        "{{ messages[0].content }})<|im_end|>{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    ),
}


FORMATS = """
from rowmill.formats import RowFormat


class Moody(RowFormat):
    def rows(self, record):
        if record["how"] == "raise":
            raise ValueError("not today")
        return None


class Tokens(RowFormat):
    def build(self, record, ctx):
        return {"ids": record["ids"], "loss_mask": record["mask"]}
"""


def encoded(rows: Iterable[Any]) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


@pytest.mark.slow
def test_a_flaw_of_a_chat_has_the_reason_that_is_named_for_it(tmp_path: Path) -> None:
    built = Workspace(tmp_path).one("a.jsonl", encoded(CHATS.values()), CHAT, filters={"deduplicate": "off"}).build()
    assert built.rejects() == list(enumerate(CHATS))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build a dataset for each reason that an option brings about, in one recipe."""
    workspace = Workspace(tmp_path_factory.mktemp("reasons"))
    (workspace.folder / "formats_of_reasons.py").write_text(FORMATS, encoding="utf-8")
    cases = dict(ONE_BY_ONE)
    for reason, template in TEMPLATES.items():
        rows = [said(content="because", tool_calls=[call({})])] if reason == "span_not_found" else [chat(1)]
        cases[reason] = (CHAT, rows, {"template": {"chat_template": template, "verify_render": 1.0}})
    datasets = {
        reason: workspace.dataset(f"{reason}.jsonl", encoded(rows), form, **groups)
        for reason, (form, rows, groups) in cases.items()
    }
    return workspace.recipe(datasets).build(only=("raw_dataset", "canonical_rows", "tokenized_examples"))


@pytest.mark.slow
@pytest.mark.parametrize("reason", [*ONE_BY_ONE, *TEMPLATES])
def test_a_flaw_has_the_reason_that_is_named_for_it(many: Built, reason: str) -> None:
    assert {found for _, found in many.rejects(reason)} == {reason}, many.details(reason)


def test_a_blank_line_of_a_text_file_is_accounted_for_and_is_no_reject_of_the_check(tmp_path: Path) -> None:
    text, by_line = f"{sentence(1, 30)}\n\n \n{sentence(1, 30)}\n".encode(), {"sample_by": "line"}
    built = Workspace(tmp_path).one("a.txt", text, TEXT, source=by_line).build(only=TO_ROWS)
    made = built.manifest("rows", "canonical_rows")

    assert sorted(made.ledger) == [("kept", "", 1), ("rejected", "blank", 2), ("rejected", "duplicate", 1)]
    assert (made.facts["rejects"], made.facts["accounted"]) == (0, 0)
    # Of two lines that say something one repeats the other; blank ones do not make that share smaller.
    assert made.facts["duplicates"] == 0.5


@pytest.mark.slow
def test_offsets_that_cannot_be_trusted_are_a_reject(tmp_path: Path) -> None:
    # A normaliser that changes lengths, and offsets from which spaces are trimmed: what a space covers is lost.
    trimming = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    changes = {"normalizer": {"type": "NFKC"}, "post_processor": trimming}
    rewrite_tokenizer(tmp_path / "tokenizer", lambda parsed: parsed.update(changes))
    built = Workspace(tmp_path).one("a.jsonl", [said(content="½   of it"), chat(1)]).build()
    assert built.rejects() == [(0, "offsets_degenerate")]


ELSEWHERE = {
    "kinds/test_long_runs.py": "too_long_run",
    "sources/test_csv_dialects.py": "header_again comment",
    "kinds/test_tokens.py": "bad_tokens not_append_only bad_mask length_mismatch labels_disagree padded_inside",
    "kinds/test_token_fields.py": "bad_field",
    "kinds/test_prompts.py": "missing_ground_truth prompt_ends_with_assistant",
    "kinds/test_preference.py": (
        "empty_completion identical_sides prompt_mismatch bad_label bad_margin tied unpaired_row"
    ),
    "stages/test_preference_examples.py": "prompt_differs overlong_prompt",
    "stages/test_judged_rows.py": "render_mismatch mask_judged_wrong",
}
"""Reasons that the tests of their kind reach, by file."""


def test_reasons_of_a_kind_are_in_its_tests() -> None:
    for file, reasons in ELSEWHERE.items():
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert [reason for reason in reasons.split() if f'"{reason}"' not in text] == []


def test_every_reason_is_reached_by_one_of_these_rows() -> None:
    # The last one is reached in `test_source_limits.py`.
    reached = {*CHATS, *ONE_BY_ONE, *TEMPLATES, "offsets_degenerate", "blank", "too_long_record"}
    reached |= {reason for reasons in ELSEWHERE.values() for reason in reasons.split()}
    of_records = {name for name, words in ledger.REASON_DESCRIPTIONS.items() if words.of in {"records", "generated"}}
    assert reached == set(ledger.REJECT_REASONS) - of_records


def literal_reasons() -> Iterator[tuple[str, str]]:
    """Yield (place, reason) for every `Rejected("…")` of the engine."""
    for path in sorted((ROOT / "pipelines").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Rejected" and node.args:
                for inner in ast.walk(node.args[0]):
                    if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                        yield f"{path.name}:{node.lineno}", inner.value


@pytest.mark.slow
def test_no_reason_outside_the_list_is_used() -> None:
    found = list(literal_reasons())
    assert len(found) > 80
    assert [one for one in found if one[1] not in ledger.REASON_DESCRIPTIONS] == []


def test_every_reason_has_its_words_and_the_page_shows_them() -> None:
    page = (ROOT / "docs/reasons.md").read_text(encoding="utf-8")

    for reason in ledger.REJECT_REASONS:
        words = ledger.REASON_DESCRIPTIONS[reason]
        assert f"| `{reason}` | {words.what} | {words.remedy} |" in page
        assert len(words.remedy) > 10
        assert all(one == one.strip() and not one.endswith((" and", " or")) for one in (words.what, words.remedy))


def options_named(text: str) -> Iterator[str]:
    for word in text.split("`")[1::2]:
        if "." in word and word.split(".")[0] in {*OPTION_GROUPS, "format"}:
            yield word.partition(":")[0]


def test_options_that_the_words_name_exist() -> None:
    from typing import get_args

    from rowmill.kinds.catalog import Format

    kinds = get_args(get_args(Format)[0])
    formats = {field.alias or name for kind in kinds for name, field in kind.model_fields.items()}
    for reason, words in ledger.REASON_DESCRIPTIONS.items():
        for option in options_named(words.what + words.remedy):
            group, name = option.split(".")[:2]
            known = formats if group == "format" else set(OPTION_GROUPS[group].model_fields)
            assert name in known, f"{reason}: {option}"
