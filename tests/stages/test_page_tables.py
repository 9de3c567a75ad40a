"""Tables of each stage's page: files and new data, reject reasons with samples, domains, packing, shares, ranks."""

import html
import json
from collections import Counter
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rowmill import metadata
from rowmill.kinds.shared.messages import KNOWN_ROLES
from rowmill.reports import report_page
from tests.support.recipes import PAIR, Built, Workspace, chat, pair


def lines(built: Built, *key: str, table: str) -> list[dict[str, Any]]:
    found = built.manifest(*key).tables[table]
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Built]:
    """Build chats of two domains and pairs; then again with an added file and a grown one."""
    workspace = Workspace(tmp_path_factory.mktemp("pages"))
    rows = [chat(i, turns=1 + 9 * (i % 2)) | {"topic": "long" if i % 2 else "short"} for i in range(40)]
    workspace.write("a.jsonl", [*rows[:20], {"messages": 7}])
    workspace.write("b.jsonl", rows[20:39])
    chats = {"source": {"train_urls": ["data/[a-c].jsonl"]}, "format": {"kind": "chat", "domain_key": "topic"}}
    splits = {"validation": 0.2, "test": 0.1}
    pairs = workspace.dataset("pairs.jsonl", [pair(i) for i in range(30)], PAIR, splits=splits)
    workspace.recipe({"chats": chats, "pairs": pairs}, mixture={"batch_size": 4})
    first = workspace.build()
    workspace.write("b.jsonl", rows[20:])
    workspace.write("c.jsonl", [chat(100) | {"topic": "short"}])
    return first, workspace.build()


@pytest.mark.slow
def test_raw_page_lists_files_with_digests_and_what_is_new_first(twice: tuple[Built, Built]) -> None:
    first, second = (lines(built, "chats", "raw_dataset", table="files") for built in twice)

    assert [(one["file"], one["in_this_version"]) for one in first] == [("a.jsonl", "new"), ("b.jsonl", "new")]
    assert [(one["file"], one["in_this_version"], one["records"]) for one in second] == [
        ("b.jsonl", "changed, +1 records", 20), ("c.jsonl", "new", 1), ("a.jsonl", "as before", 21),
    ]  # fmt: skip
    assert len({one["digest"] for one in [*first, *second]}) == 4


@pytest.mark.slow
def test_report_of_new_data_changes_no_version(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [chat(i) for i in range(5)])
    first = workspace.build()
    again = Workspace(tmp_path, str(tmp_path / "elsewhere")).build()

    assert first.versions() == again.versions()


def test_pages_of_rows_and_truncation_name_rejected_rows_and_domains_that_lose_tokens(
    twice: tuple[Built, Built],
) -> None:
    [reject] = lines(twice[1], "chats", "canonical_rows", table="rejects")

    assert (reject["reason"], reject["records"]) == ("bad_messages", 1)
    assert reject["for_example"].endswith(":20")

    built = twice[1]
    examples = built.examples("chats")
    found = {one["domain"]: one for one in lines(built, "chats", "truncation_stats", table="domains")}

    assert list(found) == ["long", "short"]
    for domain, one in found.items():
        own = [example for example in examples if example["domain"] == domain]
        assert one["examples"] == len(own)
        assert one["shortened"] == sum(e["tokens"] < e["original_tokens"] for e in own)
        assert one["tokens_removed"] == sum(e["original_tokens"] - e["tokens"] for e in own)
        assert one["trained_removed"] == sum(e["trained_removed"] for e in own)
    assert found["long"]["shortened"] > 0
    assert found["short"]["shortened"] == 0

    assert "domains" not in twice[1].manifest("pairs", "truncation_stats").tables


CALLS_OUT = "![x](https://calls.invalid/x.png)<img src=x>"
"""A role that a page must show as text: as Markdown or HTML it would load a picture."""


def telling(i: int) -> dict[str, Any]:
    """Return a chat: some have reasoning in one form or another, some tools, one a custom role."""
    row = chat(i)
    answer = row["messages"][-1]
    if i % 3 == 0:
        answer["reasoning_content"] = f"think {i}"
    if i % 4 == 0:
        answer["content"] = f"<think>again {i}</think>{answer['content']}"
    if i % 5 == 0:
        row["tools"] = [{"name": "find", "parameters": {}}]
        calls = [{"function": {"name": "find", "arguments": {"n": n}}} for n in range(1 + i % 2)]
        row["messages"] += [
            {"role": "assistant", "content": "", "tool_calls": calls},
            *({"role": "tool", "content": f"{i}"} for _ in calls),
            {"role": "assistant", "content": "Found."},
        ]
    if i == 7:
        row["messages"][0]["role"] = CALLS_OUT
    return row


@pytest.mark.slow
def test_rows_page_and_report_count_roles_reasoning_and_tools_of_the_rows_that_were_kept(tmp_path: Path) -> None:
    # Two copies, one of them with every feature, so that the counts of a rewritten part are tested, too.
    rows = [telling(i) for i in (*range(20), 0, 15)]
    built = (
        Workspace(tmp_path)
        .one("a.jsonl", rows, {"kind": "chat", "unknown_roles": "warn"}, reasoning={"think_mode": "inline"})
        .build()
    )
    made = built.manifest("rows", "canonical_rows")
    stored = built.rows_of("rows", "canonical_rows", file="rows")
    messages = [message for row in stored for message in json.loads(row["messages"])]
    roles = Counter(message["role"] for message in messages)
    calls = [message["tool_calls"] for message in messages if message.get("tool_calls")]

    page = metadata.make_stage_page(built.project, built.report("rows", "canonical_rows"))
    report = Path(report_page.write_report(built.project)).read_text(encoding="utf-8")

    assert made.facts["kept"] == 20
    assert {one["role"]: one["messages"] for one in lines(built, "rows", "canonical_rows", table="roles")} == roles
    shown = {f"{role}_messages": roles[role] for role in KNOWN_ROLES} | {
        "messages": len(messages),
        "other_messages": roles[CALLS_OUT],
        "reasoning_messages": sum("reasoning_content" in message for message in messages),
        "tool_call_messages": len(calls),
        "tool_calls": sum(map(len, calls)),
        "tools_present": sum(row["tools"] is not None for row in stored),
        "extracted_think_from_content": sum(row["extracted_think_from_content"] for row in stored),
    }
    assert {name: page[name].value for name in shown} == shown
    assert all(count > 0 for name, count in shown.items() if name != "system_messages")
    assert [one.data["role"] for one in page["table roles"].records] == [
        role for role, _ in sorted(roles.items(), key=lambda found: (-found[1], found[0]))
    ]
    found = {one.data["found"]: one.data["times"] for one in page["table reasoning_and_tools"].records}
    assert found["reasoning messages"] == shown["reasoning_messages"]
    assert found["tools present"] == shown["tools_present"]
    assert "reasoning and tools" in report
    assert html.escape(CALLS_OUT) in report
    assert CALLS_OUT not in report
    assert not any("calls.invalid" in one.value for one in page.values() if isinstance(one, dg.MarkdownMetadataValue))


def test_keys_of_the_rows_page_do_not_depend_on_the_rows(twice: tuple[Built, Built]) -> None:
    chats, pairs = (
        metadata.make_stage_page(twice[0].project, twice[0].report(name, "canonical_rows"))
        for name in ("chats", "pairs")
    )
    numbers = (dg.IntMetadataValue, dg.FloatMetadataValue)

    # A check that does not apply is named, without a number.
    idle = {name for page in (chats, pairs) for name in page["not_applicable"].value.split(", ")}
    assert {key for key, one in chats.items() if isinstance(one, numbers)} - idle == {
        key for key, one in pairs.items() if isinstance(one, numbers)
    } - idle
    assert "unknown_roles" not in chats["not_applicable"].value
    assert "unknown_roles" in pairs["not_applicable"].value
    assert "unknown_roles" not in pairs
    assert pairs["messages"].value == 0


def test_pages_of_shards_and_splits_show_fill_segments_and_shares_of_each_split(twice: tuple[Built, Built]) -> None:
    made = twice[1].manifest("pairs", "packed_shards")
    found = {one["split"]: one for one in lines(twice[1], "pairs", "packed_shards", table="packing")}

    assert set(found) == {"train", "validation", "test"}
    assert sum(one["tokens"] for one in found.values()) == made.facts["tokens"]
    segments = sum(one["segments_each"] * one["sequences"] for one in found.values())
    assert segments == pytest.approx(made.facts["segments"], abs=0.01 * made.facts["sequences"])
    trained = sum(one["trained_share"] * one["tokens"] for one in found.values())
    assert trained == pytest.approx(made.facts["trained_tokens"])

    found = lines(twice[1], "training_splits", table="shares")
    pairs = {one["split"]: one for one in found if one["dataset"] == "pairs"}

    assert {split: one["wanted"] for split, one in pairs.items()} == {
        "train": pytest.approx(0.7), "validation": 0.2, "test": 0.1,
    }  # fmt: skip
    assert sum(one["got"] for one in pairs.values()) == pytest.approx(1)
    assert sum(one["examples"] for one in pairs.values()) == 30


@pytest.mark.parametrize(
    ("stage", "shown"),
    [
        (("chats", "raw_dataset"), {"table files", "plot files", "records"}),
        (
            ("chats", "canonical_rows"),
            {"table rejects", "table schemas", "table ledger", "unknown_roles", "duplicates"},
        ),
        (("chats", "tokenized_examples"), {"plot token_classes", "trained_share", "zero_loss_rows"}),
        (("chats", "truncation_stats"), {"plot lengths", "table stages", "table what_if", "table domains"}),
        (("chats", "packed_shards"), {"plot fill", "table packing", "fill"}),
        (("training_splits",), {"table shares", "table mixture", "plot rank_load", "same_row", "rank_balance"}),
        (("gpu_partitions",), {"plot ranks", "table ranks", "trained_spread"}),
    ],
    ids=lambda value: "/".join(value) if isinstance(value, tuple) else "",
)
def test_page_answers_its_users_questions(twice: tuple[Built, Built], stage: tuple[str, ...], shown: set[str]) -> None:
    page = metadata.make_stage_page(twice[1].project, twice[1].report(*stage))

    assert shown <= set(page)
    assert {"report", "version", "fingerprint", "folder"} <= set(page)
    assert all(isinstance(page[name], dg.IntMetadataValue | dg.FloatMetadataValue) for name in shown if " " not in name)
