"""The viewer's pages without a browser: who may ask, what a page says, and that nothing of data becomes markup."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rowmill.checks.catalog import CHECKS_BY_NAME
from rowmill.core import html
from rowmill.core.console import render_text
from rowmill.inspection import inspect, trace
from rowmill.reports import report_page, row_view
from rowmill.reports.links import LISTS_OF_CHECKS
from rowmill.schema.indexed_shards import read_sequences
from rowmill.schema.rows import parse_row_id
from rowmill.schema.shard_counts import ShardDetails
from rowmill.stages.inputs import load_order
from rowmill.viewer.builds import Builds
from tests.reports.conftest import HOSTILE, make_hostile_rows
from tests.support.cli_project import CliProject
from tests.support.markup import Page
from tests.support.recipes import (
    PAIR,
    TEXT,
    THINKING,
    Built,
    Workspace,
    chat,
    document,
    pair,
    sentence,
    write_tokenizer,
)
from tests.support.viewer import Answer, ask


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Return a build of chats, some hostile and some rejected, and of pairs; no test changes it."""
    workspace = Workspace(tmp_path_factory.mktemp("viewed"))
    rows = [*make_hostile_rows(), chat(100, turns=40, words=12)]
    datasets = {
        "chats": workspace.dataset("chats.jsonl", rows),
        "pairs": workspace.dataset("pairs.jsonl", [pair(i) for i in range(60)], PAIR),
    }
    built = workspace.recipe(datasets).build()
    report_page.write_report(built.project)
    return built


@pytest.fixture(scope="module")
def builds(built: Built) -> Builds:
    return Builds.of_folder(built.project.base / "configs", None)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Return a small build of texts of two files, with rejects, and with examples that packing cuts."""
    workspace = Workspace(tmp_path_factory.mktemp("cut"))
    texts = [document(i, words=150) for i in range(9)]
    files = {"a.jsonl": [*texts[:5], {"text": ""}], "b.jsonl": [*texts[5:], {"text": 7}]}
    built = workspace.recipe({"texts": workspace.files(files, TEXT, packing={"tail": "drop"})}).build()
    return Builds.of_folder(built.project.base / "configs", None)


def list_rows(builds: Builds, address: str) -> list[str]:
    return re.findall(r'<tr data-row="([^"]+)"', ask(builds, address).text)


def find_row(built: Built, **wanted: Any) -> str:
    rows = built.rows_of("chats", "canonical_rows", file="rows")
    return next(row["row_id"] for row in rows if all(row[name] == value for name, value in wanted.items()))


# ── Who may ask ────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {}),
        (200, {"host": "localhost:3002"}),
        (200, {"host": "[::1]:3002"}),
        (403, {"host": "evil.invalid:3002"}),
        (403, {"host": "127.0.0.1.evil.invalid"}),
        (403, {"host": ""}),
        (403, {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"}),
        (403, {"sec_fetch_site": "same-site", "sec_fetch_mode": "cors", "sec_fetch_dest": "empty"}),
        (403, {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"}),
        (200, {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}),
        (200, {"sec_fetch_site": "same-origin"}),
    ],
)
def test_request_is_answered_only_if_a_person_on_this_machine_made_it(
    status: int, headers: dict[str, str], builds: Builds
) -> None:
    answer = ask(builds, "/mini/rows", **headers)
    assert answer.status == status
    assert ("Host" in answer.text) is ("host" in headers and status == 403)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_allowed(method: str, builds: Builds) -> None:
    assert ask(builds, "/mini/rows", method=method).status == 405


@pytest.mark.parametrize(
    "address", ["/", "/mini", "/mini/rows", "/mini/sql", "/static/viewer.js", "/mini/rows/nothing"]
)
def test_every_answer_forbids_scripts_and_styles_that_are_not_served_from_here(address: str, builds: Builds) -> None:
    answer = ask(builds, address)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<style|<script>|\son\w+=|\sstyle=", re.sub(r">[^<]*", ">", answer.text))


def test_token_is_wanted_wherever_others_can_reach_the_port_and_leaves_the_address(builds: Builds) -> None:
    first = ask(builds, "/mini/rows?dataset=chats&token=secret", token="secret", host="machine:3002")

    assert ask(builds, "/mini/rows", token="secret", host="machine:3002").status == 403
    assert ask(builds, "/mini/rows?token=guess", token="secret").status == 403
    assert (first.status, first.headers["location"]) == (303, "/mini/rows?dataset=chats")
    assert re.match(r"rowmill_token=secret; HttpOnly; .*SameSite=strict", first.headers["set-cookie"])
    assert ask(builds, "/mini/rows", token="secret", host="machine:3002", cookie="rowmill_token=secret").status == 200


OUTSIDE = [
    "/../secret", "/mini/expectations/../../../data/chats.jsonl", "/mini/expectations/%2e%2e/%2e%2e/x.html",
    "/mini/expectations//etc/passwd", "/mini/expectations/chats/../../report.html", "/%2e%2e%2fmini",
    "/mini/rows/..%2f..%2fx", "/mini/sequences/../train/0", "/mini/sequences/chats/..%2ftrain/0",
    "/mini?version=../../data", "/other", "/mini/rows/%00", "/mini/expectations/%ED%A0%80.html",
    "/mini/sql?q=select * from read_text('/etc/passwd')",
]  # fmt: skip


@pytest.mark.parametrize("address", OUTSIDE)
def test_address_that_tries_to_leave_the_store_gets_nothing(address: str, builds: Builds) -> None:
    answer = ask(builds, address)
    assert answer.status == 404 or 'role="alert"' in answer.text
    assert "root:" not in answer.text
    assert "river" not in answer.text


# ── What pages say ─────────────────────────────────────────────────────────────────────────────────
def test_each_count_of_the_report_leads_to_that_many_rows(built: Built, builds: Builds) -> None:
    report = ask(builds, "/mini")
    kept = built.facts("chats", "canonical_rows")["kept"]
    [address] = set(re.findall(r'<dd><a href="([^"]+)">' + f"{kept:,}</a></dd><dt>rows</dt>", report.text))
    shown = ask(builds, address.replace("&amp;", "&"))

    assert f'<span class="dim total">{kept:,}</span>' in shown.text
    assert len(list_rows(builds, address.replace("&amp;", "&"))) == min(kept, 50)
    mailed = built.project.store.read("reports/mini/report.html").decode()
    assert set(re.findall(r'href="([^#"][^"]*)"', mailed)) == set(re.findall(r'href="(expectations/[^"]+)"', mailed))


BEHIND_NO_ROWS = {
    # No view says which messages have a role, reasoning or a call, as rows are stored without their content.
    ("roles", "messages"), ("reasoning_and_tools", "times"),
    # What would be packed at another length, and the length itself: nothing was built with it.
    ("what_if", "sequences"), ("what_if", "seq_len"),
    # What the recipe asks for.
    ("shares", "wanted"), ("mixture", "weight"), ("mixture", "wanted_share"),
    # Padding, which is of no row.
    ("token_ledger", "tokens"),
}  # fmt: skip
"""Columns of numbers, by table, some of whose cells lead nowhere; seconds, versions and dates are in no table."""


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Return a build of chats with tools, reasoning and control tokens in their text, in groups and two files."""
    workspace = Workspace(tmp_path_factory.mktemp("noted"))
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "river"}}}
    tool = {"type": "function", "function": {"name": "look", "description": "look", "parameters": {}}}
    odd: list[dict[str, Any]] = [
        {"role": "user", "content": "What is <|im_end|>?"},
        {"role": "moderator", "content": "Be kind."},
        {"role": "assistant", "content": "<think>hm</think>Look.", "tool_calls": [call]},
        {"role": "tool", "content": "a river", "name": "look"},
        {"role": "assistant", "content": "A river."},
    ]
    rows = [chat(i, turns=1 + i % 9, words=12) | {"topic": f"t{i % 3}", "of": f"g{i % 5}"} for i in range(40)]
    files = {
        "a.jsonl": [*rows[:30], {"messages": odd, "tools": [tool], "topic": "t0", "of": "g0"}, {"messages": 7}],
        "b.jsonl": [*rows[30:], rows[0]],
    }
    form = {"kind": "chat", "domain_key": "topic", "group_key": "of", "unknown_roles": "warn"}
    options: dict[str, Any] = {"mixture": {"batch_size": 4, "steps": 3}, "partitions": {"world_size": 2}}
    datasets = {"chats": workspace.files(files, form, splits={"validation": 0.2})}
    built = workspace.recipe(datasets, seq_len=128, **options).build()
    return Builds.of_folder(built.project.base / "configs", None)


@pytest.fixture(scope="module")
def linked(builds: Builds, cut: Builds, noted: Builds, small: CliProject) -> list[tuple[str, Builds]]:
    """Return builds of most kinds of data, each with the name of its recipe."""
    of_small = Builds.of_folder(small.folder / "configs", None)
    return [("mini", builds), ("mini", cut), ("mini", noted), ("small", of_small)]


def read_report_tables(page: str) -> list[tuple[str, str, str]]:
    """Return the name, the column and the markup of each cell with a number of a report's tables."""
    shown = re.findall(r'<p class="dim">([\w ]+)</p>\s*<div class="scroll"><table>(.*?)</table>', page, re.DOTALL)
    shown += [("all counts", table) for table in re.findall(r"all counts by dataset</summary>(.*?)</table>", page)]
    cells: list[tuple[str, str, str]] = []
    for name, table in shown:
        columns = re.findall(r"<th[^>]*>([^<]*)</th>", table)
        for row in table.split("<tr>")[2:]:
            values = re.findall(r"<td[^>]*>(.*?)</td>", row)
            numbered = zip(columns, values, strict=True)
            cells += [
                (name.replace(" ", "_"), column.replace(" ", "_"), value)
                for column, value in numbered
                if re.fullmatch(r"[\d,.]+(?: %)?", re.sub(r"<[^>]+>", "", value))
            ]
    return cells


@pytest.mark.slow
def test_every_number_and_bar_of_a_report_is_a_link_but_for_those_behind_which_no_rows_are(
    linked: list[tuple[str, Builds]],
) -> None:
    pages = [ask(builds, f"/{recipe}").text for recipe, builds in linked]
    cells = [cell for page in pages for cell in read_report_tables(page)]
    unlinked = {(table, column) for table, column, markup in cells if not markup.startswith("<a href=")}
    bars = [bar for page in pages for bar in re.findall(r"(?:<a href=[^>]+>)?<rect[^>]*>(?:<title>|</a>)", page)]
    headings = [
        one for page in pages for one in re.findall(r"<b>(\w+)</b> <span[^\n]+</summary>\s+<p[^>]*>(<a)?", page)
    ]

    assert len(cells) > 400
    assert unlinked <= BEHIND_NO_ROWS
    # Each exception is one.
    assert BEHIND_NO_ROWS - unlinked == set()
    assert len([bar for bar in bars if bar.endswith("<title>")]) > 50
    assert [bar for bar in bars if bar.endswith("<title>") and not bar.startswith("<a")] == []
    assert len(headings) > 20
    assert {stage for stage, link in headings if not link} <= {"raw_dataset"}
    for page in pages:
        assert re.findall(r"<li>(?!<a)[^<]*sequences", page) == []
    for recipe, builds in linked:
        reasons = ask(builds, f"/{recipe}/rejects").text.partition('<table class="list">')[0]
        assert re.findall(r'<td class="number">(?!<a)', reasons) == []


@pytest.mark.slow
def test_counts_of_rows_lead_to_that_many_rows(linked: list[tuple[str, Builds]]) -> None:
    counted = {
        ("all_counts", "rows"), ("all_counts", "examples"), ("all_counts", "rejected"), ("schemas", "rows"),
        ("unknown_roles", "rows"), ("largest_groups", "rows"), ("rejects", "records"), ("splits", "rows"),
        ("domains", "examples"), ("domains", "shortened"), ("stages", "examples"), ("what_if", "examples_over"),
        ("shares", "examples"),
    }  # fmt: skip
    wrong: list[str] = []
    seen: set[tuple[str, str]] = set()
    for recipe, builds in linked:
        for table, column, markup in read_report_tables(ask(builds, f"/{recipe}").text):
            if (table, column) in counted and markup.startswith("<a"):
                [(address, number)] = re.findall(r'<a href="([^"]+)">([\d,]+)</a>', markup)
                totals = re.findall(r'class="dim total">([\d,]+)<', ask(builds, address.replace("&amp;", "&")).text)
                seen.add((table, column))
                if totals != [number]:
                    wrong.append(f"{recipe} {table} {column}: {number} leads to {totals}: {address}")

    assert wrong == []
    assert seen == counted


def test_files_of_a_report_and_what_was_noted_lead_to_their_rows(noted: Builds) -> None:
    addresses = set(re.findall(r'href="([^"]+)"', ask(noted, "/mini").text))
    of_files = [address.replace("&amp;", "&") for address in sorted(addresses) if "file=" in address]
    odd = [row for row in list_rows(noted, "/mini/rows?file=a.jsonl") if row.endswith(":30")]

    assert [address.partition("file=")[2].partition("&")[0] for address in of_files] == ["a.jsonl", "b.jsonl"]
    assert [len(list_rows(noted, address)) for address in of_files] == [31, 10]
    for name in ("tools_present", "extracted_think_from_content"):
        assert f"/mini/rows?dataset=chats&amp;noted={name}&amp;" in "".join(addresses)
        assert list_rows(noted, f"/mini/rows?noted={name}") == odd
    assert "expected one of extracted_think_from_content" in ask(noted, "/mini/rows?noted=secret").text


@pytest.mark.slow
def test_bars_of_lengths_and_shares_lead_to_that_many_rows(linked: list[tuple[str, Builds]]) -> None:
    wrong: list[tuple[str, str]] = []
    names: set[str] = set()
    for recipe, builds in linked:
        page = ask(builds, f"/{recipe}").text
        for address, number in re.findall(r'<a href="([^"]+/rows[^"]+)"><rect[^>]*><title>[^<]*: ([\d,]+)<', page):
            shown = ask(builds, address.replace("&amp;", "&")).text
            if f'class="dim total">{number}<' not in shown:
                wrong.append((number, address))
            names |= set(re.findall(r"(\w+)_from=", address))

    assert wrong == []
    assert names == {"original", "share"}


@pytest.mark.slow
def test_sequences_that_no_step_reads_lead_to_their_examples(noted: Builds) -> None:
    page = ask(noted, "/mini").text
    addresses = {address.replace("&amp;", "&") for address in re.findall(r'href="([^"]+state=in_no_step[^"]*)"', page)}
    build = noted.open_build("mini")
    order = build.find_output(None, "training_splits")
    packed = build.find_output("chats", "packed_shards")
    assert order is not None
    assert packed is not None
    read = {line["sequence_id"] for line in load_order(build.project.store, order).to_pylist() if not line["filler"]}
    shards = [
        part for part in packed.parts if "shard" in part.files and part.get_details(ShardDetails).split == "train"
    ]
    rows = [row for part in shards for row in read_sequences(build.project.store, part.files["shard"]).to_pylist()]
    unread = [name for number, row in enumerate(rows) if number not in read for name in row["example_ids"]]

    assert len(read) < len(rows)
    assert {address.partition("&version")[0] for address in addresses} == {
        "/mini/left_out?dataset=chats&state=in_no_step", "/mini/left_out?state=in_no_step",
    }  # fmt: skip
    for address in addresses:
        shown = ask(noted, address).text
        assert f'class="dim total">{len(unread)}<' in shown
        assert set(re.findall(r">([0-9a-f]{16}:\d+#\d+)</a>", shown)) <= set(unread)
        assert re.findall(r"<option selected>([^<]+)</option>", shown)[-1] == "in_no_step"
    ordered = re.findall(r'data-label="of tokens">([\d,]+)<', ask(noted, f"{address}&order=-tokens").text)
    assert [int(number) for number in ordered] == sorted((int(number) for number in ordered), reverse=True)
    assert ask(noted, f"/mini/rows/{unread[0].partition('#')[0]}").text.count("In a sequence that no step reads") == 1


@pytest.mark.slow
def test_bars_of_sequences_groups_and_ranks_lead_to_queries_that_name_them(noted: Builds) -> None:
    addresses = [
        address.replace("&amp;", "&")
        for address in re.findall(r'<a href="(/mini/sql[^"]+)"><rect', ask(noted, "/mini").text)
    ]
    counts = [
        int(number.replace(",", ""))
        for number in re.findall(
            r'<a href="/mini/sql[^"]+"><rect[^>]*><title>[^<]*: ([\d,]+)<', ask(noted, "/mini").text
        )
    ]
    pages = [ask(noted, address).text for address in addresses]

    shown = [int(re.findall(r"(\d+) rows in", page)[0]) for page in pages]
    assert dict(zip(addresses, shown, strict=True)) == dict(zip(addresses, counts, strict=True))
    linked = "".join(pages)
    for pattern in (r"/mini/sequences/chats/(?:train|validation)/\d+", r"/mini/steps/\d+", r"/mini/rows/\w+:\d+"):
        assert re.search(f'<td[^>]*>.*?<a href="{pattern}', linked), pattern


def test_numbers_of_checks_lead_to_that_many_checks(builds: Builds) -> None:
    addresses = {
        (place, number, link.replace("&amp;", "&"))
        for place in ("/", "/mini")
        for link, number in re.findall(r'<a href="([^"]+)">(\d+) checks</a> passed', ask(builds, place).text)
    }
    listed = {(place, str(len(re.findall(r"<tr>", ask(builds, link).text)) - 1), link) for place, _, link in addresses}

    assert {place for place, _, _ in addresses} == {"/", "/mini"}
    assert listed == addresses


def test_what_a_sentence_has_between_backticks_is_code(built: Built, builds: Builds) -> None:
    [rejected] = [row for row in built.rejected_rows("chats") if "integer" in row["detail"]]
    page = ask(builds, f"/mini/rows/{rejected['row_id']}").text
    listed = ask(builds, f"/mini/rejects?reason={rejected['reason']}").text

    for text in (page, listed):
        [remedy] = re.findall("What to do: ([^\n]+)</p>", text)
        assert "<code>" in remedy
        assert "`" not in remedy
    assert html.mark_code("read `a<b>` and c") == "read <code>a&lt;b&gt;</code> and c"


def test_links_of_a_report_all_lead_somewhere(built: Built, builds: Builds) -> None:
    addresses = {
        one.replace("&amp;", "&").partition("#")[0] for one in re.findall(r'href="(/[^"]+)"', ask(builds, "/mini").text)
    }
    wrong = {
        one: answer.text[-300:] for one in sorted(addresses) if (answer := ask(builds, one)).status not in (200, 303)
    }

    assert wrong == {}
    assert len(addresses) > 40


def test_list_is_filtered_ordered_and_paged(built: Built, builds: Builds) -> None:
    examples = built.examples("chats")
    longest = sorted(examples, key=lambda one: -one["tokens"])[:3]
    assert list_rows(builds, "/mini/rows?dataset=chats&order=-tokens")[:3] == [one["row_ids"][0] for one in longest]

    cut = [one["row_ids"][0] for one in examples if one["original_tokens"] > one["tokens"]]
    assert list_rows(builds, "/mini/rows?removed=any") == cut
    middle = sorted(one["tokens"] for one in examples)[len(examples) // 2]
    assert len(list_rows(builds, f"/mini/rows?dataset=chats&tokens_from={middle}")) == sum(
        one["tokens"] >= middle for one in examples
    )

    shares = [100 * one["trained_tokens"] / one["tokens"] for one in examples]
    some = sorted(shares)[len(shares) // 2]
    assert len(list_rows(builds, f"/mini/rows?dataset=chats&share_from={some!r}")) == sum(
        share >= some for share in shares
    )
    pairs = built.rows_of("pairs", "canonical_rows", file="rows")
    assert list_rows(builds, "/mini/rows?file=data/pairs.jsonl") == [row["row_id"] for row in pairs][:50]

    every = [list_rows(builds, f"/mini/rows?page={page}") for page in range(3)]
    ids = [row_id for page in every for row_id in page]
    assert len(ids) == len(set(ids)) == len(examples) + 60


@pytest.mark.parametrize("address", ["/mini/rows", "/mini/rejects", "/mini/left_out"])
def test_list_has_an_order_for_each_column_and_a_filter_for_what_it_shows(address: str, cut: Builds) -> None:
    page = ask(cut, address).text
    [head] = re.findall(r'<table class="list"><thead>(.*?)</thead>', page, re.DOTALL)
    columns = [html for html in re.findall(r"<th[^>]*>(.*?)</th>", head) if "leave out</span>" not in html]
    orders = [re.findall(r'href="([^"]*order=[^"]+)"', html) for html in columns]
    offered = set(re.findall(r'<(?:select|input type="(?:number|search)") name="(\w+)"', page))

    assert [len(links) for links in orders] == [1] * len(columns)
    first = list_rows(cut, address)
    for [link] in orders:
        assert sorted(list_rows(cut, link.replace("&amp;", "&"))) == sorted(first)
    wanted = {
        "/mini/rows": {"split", "removed", "tokens_from", "tokens_below", "share_from", "share_below", "file"},
        "/mini/rejects": {"reason", "file"}, "/mini/left_out": {"split", "state"},
    }  # fmt: skip
    assert offered >= wanted[address] | {"dataset", "q"}


@pytest.mark.parametrize(
    "query", ["order=secret", "page=-1", "page=x", "tokens_from=many", "removed=all", "version=0123"]
)
def test_bad_value_of_a_filter_is_one_sentence_that_says_what_is_allowed(query: str, builds: Builds) -> None:
    answer = ask(builds, f"/mini/rows?{query}")
    assert answer.status == 404
    value = query.partition("=")[2]
    [said] = re.findall(r'role="alert">([^<]+)<', answer.text)
    assert value in said
    assert len(re.split("[:;] ", said)) >= 3


def test_row_is_shown_as_inspect_and_trace_show_it(built: Built, builds: Builds) -> None:
    row_id = built.examples("chats")[-1]["row_ids"][0]
    page = Page(ask(builds, f"/mini/rows/{row_id}").text).words
    [record] = inspect.inspect_rows(built.project, count=1, dataset=None, row_id=row_id)
    [traced] = trace.trace_row(built.project, row_id)

    assert record.rejected is None
    said = " ".join(page.split())
    for shown in (
        row_view.render_inspected_record(record, colours=False),
        row_view.render_row_traces(built.project, [traced]),
    ):
        words = render_text(shown)
        assert record.source in words
        assert record.source in said
    [sample] = record.samples
    assert f"{sample.tokens:,} tokens" in said
    assert f"{sample.trained_tokens:,} trained" in said
    assert " ".join("".join(stretch.text for stretch in sample.stretches).split()) in said
    removed = sample.removed_messages
    assert removed
    assert page.count("removed by truncation") == len(removed)
    assert f"chats/{traced.places[0].split}/{traced.places[0].sequence}" in said
    assert f"step {traced.places[0].showings[0].step}, rank {traced.places[0].showings[0].rank}" in said


def test_messages_that_truncation_removed_are_those_that_the_example_lacks(built: Built, builds: Builds) -> None:
    del builds
    lineage = trace.load_lineage(built.project, "chats")
    row_id = built.examples("chats")[-1]["row_ids"][0]
    [record] = inspect.inspect_row(lineage, row_id)
    [sample] = record.samples
    assert record.row is not None
    messages = json.loads(record.row["messages"])
    text = "".join(stretch.text for stretch in sample.stretches)
    lacking = [number for number, message in enumerate(messages) if message["content"] not in text]

    assert list(sample.removed_messages or ()) == lacking
    assert 0 < len(lacking) < len(messages)


@pytest.mark.slow
def test_messages_that_truncation_cut_at_a_token_show_what_they_lost(tmp_path: Path) -> None:
    thinking = {"role": "assistant", "content": sentence(3, 6), "reasoning_content": sentence(9, 30)}
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": sentence(1, 400)}]
    rows = [{"messages": [*asked, thinking]}, *(chat(i) for i in range(20))]
    write_tokenizer(tmp_path / "tokenizer", template=THINKING)
    workspace = Workspace(tmp_path).one(
        "rows.jsonl", rows, truncation={"overlong": "truncate", "truncate_side": "left"}
    )
    built = workspace.build()
    row_id = built.rows_of("rows", "canonical_rows", file="rows")[0]["row_id"]
    [record] = inspect.inspect_row(trace.load_lineage(built.project, "rows"), row_id)
    [sample] = record.samples
    page = ask(Builds.of_folder(tmp_path / "configs", None), f"/mini/rows/{row_id}").text
    messages = re.findall(r'<li class="message(.*?)</li>', page, re.DOTALL)
    kept = "".join(stretch.text for stretch in sample.stretches)

    assert [*sample.removed] == ["reasoning", "tokens"]
    assert f"truncation removed {sum(sample.removed.values()):,} of {sample.original_tokens:,} tokens" in page
    assert ["removed by truncation" in message for message in messages] == [True, False, False]
    assert ["cut by truncation" in message for message in messages] == [False, True, True]
    [lost] = re.findall(r'<span class="lost">([^<]+)</span>', messages[1])
    [rest] = re.findall(r"</span>([^<]+)</div>", messages[1])
    assert lost + rest == rows[0]["messages"][1]["content"]
    assert kept.lstrip().startswith(rest)
    assert re.findall(r'<span class="lost">([^<]+)</span>', messages[2]) == [thinking["reasoning_content"]]
    assert f'<div class="text">{thinking["content"]}</div>' in messages[2]


@pytest.mark.slow
@pytest.mark.parametrize(("column", "side"), [("text", None), ("output", "right"), ("text", "left")])
def test_text_shows_what_truncation_cut_of_it(column: str, side: str | None, tmp_path: Path) -> None:
    prompt, answer = ("Why?", sentence(3, 300)) if column == "output" else (sentence(3, 300), "So.")
    record = document(1, words=300) if side is None else {"prompt": prompt, "answer": answer}
    short = document(2, words=5) if side is None else {"prompt": "Why?", "answer": "So."}
    options = {"overlong": "truncate", "max_length": 40} | ({} if side is None else {"truncate_side": side})
    form = TEXT if side is None else PAIR
    workspace = Workspace(tmp_path).one("rows.jsonl", [record, short], form, truncation=options)
    rows = workspace.build().rows_of("rows", "canonical_rows", file="rows")
    pages = [ask(Builds.of_folder(tmp_path / "configs", None), f"/mini/rows/{row['row_id']}").text for row in rows]
    [shown] = re.findall(rf"<h3>{column}</h3><div class=\"text\">(.*?)</div>", pages[0], re.DOTALL)
    [lost] = re.findall(r'<span class="lost">([^<]+)</span>', shown)
    kept = re.sub(r'<span class="lost">[^<]+</span>', "", shown)

    assert (lost + kept if side == "left" else kept + lost) == rows[0][column]
    assert kept.strip() in Page(pages[0]).words.partition("What the model sees")[2]
    assert kept.strip()
    assert 'class="lost"' not in pages[1]


@pytest.mark.slow
def test_pair_shows_both_sides_with_what_truncation_removed_of_its_prompt_and_of_each_answer(tmp_path: Path) -> None:
    prompt = [message for i in range(4) for message in chat(i, words=12)["messages"][:2]]
    asked = [*prompt, {"role": "user", "content": "And then?"}]
    long = {"prompt": asked, "chosen": sentence(30, 90), "rejected": sentence(60, 12)}
    short = {"prompt": asked[-1:], "chosen": "This.", "rejected": "That."}
    options = {"truncation": {"overlong": "truncate", "token_cut": "allow", "max_length": 80}}
    workspace = Workspace(tmp_path).one("pairs.jsonl", [long, short], {"kind": "preference"}, **options)
    rows = workspace.build().rows_of("rows", "canonical_rows", file="rows")
    builds = Builds.of_folder(tmp_path / "configs", None)
    pages = [ask(builds, f"/mini/rows/{row['row_id']}").text for row in rows]

    def read_section(page: str, name: str) -> str:
        return page.partition(f'<h2 id="{name}-1">')[2].partition("</section>")[0]

    read, model = read_section(pages[0], "read"), read_section(pages[0], "model")
    of_prompt, of_chosen, of_rejected = re.split("<h3>(?:chosen|rejected)</h3>", read)
    [[lost], none] = (re.findall(r'<span class="lost">([^<]+)</span>', part) for part in (of_chosen, of_rejected))
    seen = {
        column: "".join(re.findall(r">([^<]+)</span>", part))
        for column, part in re.findall(r"<h3>(chosen|rejected)</h3>\s*(<div.*?</div>)", model, re.DOTALL)
    }

    assert re.findall("<h3>(chosen|rejected)</h3>", read) == ["chosen", "rejected"]
    assert of_prompt.count("removed by truncation") == len(prompt)
    assert of_chosen.count("cut by truncation") == 1
    assert long["chosen"].endswith(lost)
    assert seen["chosen"].endswith(long["chosen"].removesuffix(lost))
    assert (none, "by truncation" in of_rejected) == ([], False)
    assert long["rejected"] in seen["rejected"]
    assert long["rejected"] not in seen["chosen"]
    assert "by truncation" not in pages[1]
    assert pages[1].count('<div class="text model"') == 2


@pytest.mark.slow
def test_row_of_the_validation_split_is_not_said_to_be_lost(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one(
        "rows.jsonl", [chat(i) for i in range(30)], defaults={"splits": {"validation": 0.3}}
    )
    rows = workspace.build().rows_of("rows", "canonical_rows", file="rows")
    builds = Builds.of_folder(tmp_path / "configs", None)
    said = {
        split: ask(builds, f"/mini/rows/{next(row['row_id'] for row in rows if row['split'] == split)}").text
        for split in ("train", "validation")
    }

    assert "In the validation split, which no step trains on" in said["validation"]
    assert "in a sequence that no step reads" not in said["validation"].lower()
    assert "✓ Trains" in said["train"]
    anchors = re.findall(r'<a href="#([\w-]+)">', said["train"])
    assert anchors == ["raw-1", "read-1", "model-1", "places-1"]
    assert [said["train"].count(f'id="{anchor}"') for anchor in anchors] == [1] * 4


def test_reject_has_its_reason_what_it_means_what_to_do_and_its_record_with_the_place(
    built: Built, builds: Builds
) -> None:
    [rejected] = [row for row in built.rejected_rows("chats") if "integer" in row["detail"]]
    answer = ask(builds, f"/mini/rows/{rejected['row_id']}")

    assert "Not in the training data" in answer.text
    assert "It means: the messages are not a list of mappings, each with a role." in answer.text
    assert "What to do: name the role" in answer.text
    assert re.search(r'<span class="problem">&#34;role&#34;</span>', answer.text)
    assert rejected["row_id"] in list_rows(builds, f"/mini/rejects?reason={rejected['reason']}")


@pytest.mark.slow
def test_reject_marks_nothing_for_what_its_record_lacks(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "look", "parameters": {}}}
    call = {"type": "function", "function": {"arguments": "{}"}}
    asked = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    built = Workspace(tmp_path).one("rows.jsonl", [chat(1), {"messages": asked, "tools": [tool]}]).build()
    [rejected] = built.rejected_rows()
    page = ask(Builds.of_folder(tmp_path / "configs", None), f"/mini/rows/{rejected['row_id']}").text

    assert rejected["detail"] == "a call has no name"
    assert 'class="problem"' not in page
    assert "&#34;name&#34;: &#34;look&#34;" in page


def test_search_leads_to_what_its_words_name(built: Built, builds: Builds) -> None:
    row_id = find_row(built)
    number = parse_row_id(row_id)[1] + 1

    def go(text: str) -> str:
        return ask(builds, f"/mini/search?q={text}").headers["location"].partition("?version")[0]

    assert go("step%200") == "/mini/steps/0"
    rank = ask(builds, "/mini/search?q=step%200,%20rank%201").headers["location"]
    assert rank.startswith("/mini/steps/0?")
    assert rank.endswith("#rank-1")
    assert go(row_id) == go(f"{row_id}%230") == go(f"chats.jsonl:{number}") == f"/mini/rows/{row_id}"
    assert go("chats/train/0") == "/mini/sequences/chats/train/0"
    assert go("bad_messages").startswith("/mini/rejects?reason=bad_messages")
    assert go("river").startswith("/mini/rows?q=river")


def test_search_for_a_line_of_a_file_that_is_not_here_names_those_that_are(builds: Builds) -> None:
    address = ask(builds, "/mini/search?q=chat.jsonl:3").headers["location"]
    page = ask(builds, address).text

    assert "chat.jsonl: no file of this build has this name" in page
    assert "chats.jsonl" in page.partition("has this name")[2].partition("</p>")[0]
    assert "there are chats.jsonl, pairs.jsonl<" in ask(builds, "/mini/rows?q=river.md:7").text
    assert "has this name" not in ask(builds, "/mini/rows?q=river").text


def test_text_is_found_in_rows_and_in_rejects_whatever_its_case_and_its_quotes(built: Built, builds: Builds) -> None:
    hostile = [
        row["row_id"]
        for row in built.rows_of("chats", "canonical_rows", file="rows")
        if "evil.invalid" in row["messages"]
    ]
    assert list_rows(builds, "/mini/rows?q=EVIL.invalid") == hostile
    assert list_rows(builds, "/mini/rows?q=onerror%3D%22alert") == hostile
    assert list_rows(builds, "/mini/rows?q=no+such+words") == []
    assert len(list_rows(builds, "/mini/rejects?q=evil.invalid")) == 1
    read = re.findall(r"([\d,]+) of ([\d,]+) read, (\d+) found", ask(builds, "/mini/rows?q=evil").text)[-1]
    assert read[0] == read[1]
    assert read[2] == str(len(hostile))


def test_rows_that_try_to_be_markup_are_shown_as_text(built: Built, builds: Builds) -> None:
    [row_id] = [
        row["row_id"]
        for row in built.rows_of("chats", "canonical_rows", file="rows")
        if "evil.invalid" in row["messages"]
    ]
    for address in (
        f"/mini/rows/{row_id}",
        "/mini/rows?q=evil.invalid",
        "/mini/sql?q=select '<img src=x>' as x",
        "/mini",
    ):
        page = ask(builds, address).text
        assert "<img" not in page
        assert page.count("<script") == 1
        assert "&lt;img" in page
    assert HOSTILE in Page(ask(builds, f"/mini/rows/{row_id}").text).words


def test_step_has_the_sequences_that_the_ranks_read(built: Built, builds: Builds) -> None:
    page = ask(builds, "/mini/steps/0").text
    order = built.project.store.table(built.manifest("training_splits").files("order")[0]).to_pylist()
    names = ["chats", "pairs"]
    wanted = {
        f"{names[one['dataset']]}/train/{one['sequence_id']}" for one in order if one["step"] == 0 and not one["filler"]
    }
    assert set(re.findall(r">(\w+/train/\d+)</a>", page)) == wanted
    assert [int(rank) for rank in re.findall(r'id="rank-(\d+)"', page)] == [0, 1]
    by_rank = {
        rank: sum(int(tokens.replace(",", "")) for tokens in re.findall(f'#rank-{rank}">([0-9,]+)<', page))
        for rank in re.findall(r'<th class="number"><a href="#rank-(\d+)">', page)
    }
    headed = re.findall(r'id="rank-(\d+)">.*, ([\d,]+) tokens', page)
    assert by_rank == {rank: int(tokens.replace(",", "")) for rank, tokens in headed}
    assert [*by_rank] == ["0", "1"]
    steps = built.facts("training_splits")["steps"]
    assert f"of steps 0 to {steps - 1}<" in page
    assert ask(builds, "/mini/steps/9999").status == 404


def test_query_has_links_to_rows_and_an_error_says_what_is_wrong(builds: Builds) -> None:
    shown = ask(builds, "/mini/sql?q=from rejects select row_id, reason")
    wrong = ask(builds, "/mini/sql?q=select nothing from nowhere")

    assert len(re.findall(r'<a href="/mini/rows/[^"]+">[0-9a-f]{16}:\d+</a>', shown.text)) >= 3
    assert "the views are" in wrong.text
    assert wrong.status == 200
    for query in ("copy rows to 'x.csv'", "install httpfs", "attach 'x.db'", "from read_csv('/etc/passwd')"):
        assert 'role="alert"' in ask(builds, f"/mini/sql?q={query}").text


def test_page_of_checks_names_checks_that_there_are() -> None:
    assert LISTS_OF_CHECKS.keys() <= CHECKS_BY_NAME.keys()


# ── Versions ───────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
def test_page_keeps_its_version_and_says_when_a_newer_one_is_here_and_when_it_is_gone(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [chat(i) for i in range(20)])
    workspace.build()
    builds = Builds.of_folder(tmp_path / "configs", None)
    [before] = set(re.findall(r"version=(\w+)", ask(builds, "/mini").text))
    workspace.write("rows.jsonl", [chat(i) for i in range(30)])
    built = workspace.build()

    kept = ask(builds, f"/mini/rows?version={before}")
    assert "A newer build is here" in kept.text
    assert '<span class="dim total">20</span>' in kept.text
    current = ask(builds, "/mini/rows")
    assert '<span class="dim total">30</span>' in current.text
    assert "newer build" not in current.text

    for output in [report.manifest for report, _ in built.steps.values()]:
        for name in (tmp_path / ".rowmill" / "/".join(output.key) / "versions").glob("*.json"):
            if not name.stem.startswith(output.version):
                name.unlink()
    gone: Answer = ask(builds, f"/mini/rows?version={before}")
    assert gone.status == 404
    assert "it was removed by rowmill gc" in gone.text


# ── Two builds ─────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
def test_comparison_has_the_rows_that_came_went_and_changed(tmp_path: Path) -> None:
    rows = [chat(i) for i in range(20)]
    workspace = Workspace(tmp_path).one("rows.jsonl", rows)
    before = workspace.build()
    changed = [*rows[:3], chat(50), *rows[4:10], *rows[12:], chat(60), chat(61)]
    workspace.write("rows.jsonl", changed)
    workspace.build()
    builds = Builds.of_folder(tmp_path / "configs", None)
    page = ask(builds, "/mini/compare")
    sections = {
        heading: re.findall(r'<tr data-row="([^"]+)"', rest)
        for heading, rest in re.findall(r"<h2>rows: ([^<]+)</h2>(.*?)</section>", page.text, re.DOTALL)
    }

    # By its place, line 4 changed; what moved has the same content.
    assert {heading: len(ids) for heading, ids in sections.items()} == {
        "2 rows came": 2, "2 rows went": 2, "1 row with another text": 1,
    }  # fmt: skip
    gone = [row["row_id"] for row in before.rows_of("rows", "canonical_rows", file="rows")][10:12]
    assert sections["2 rows went"] == gone
    old = before.manifest("gpu_partitions").version[:12]
    assert ask(builds, f"/mini/compare/{old}").text.count("<section>") == 3
    assert "Since the last build</a>" in ask(builds, "/mini").text
    assert ask(builds, f"/mini/rows/{gone[0]}?version={old}").status == 200


@pytest.mark.slow
def test_comparison_tells_masks_tokens_and_splits_apart_and_names_reasons(tmp_path: Path) -> None:
    rows = [chat(i, turns=2) for i in range(20)]
    workspace = Workspace(tmp_path).one("rows.jsonl", rows)
    before = workspace.build()
    first = before.rows_of("rows", "canonical_rows", file="rows")[0]
    left_out = workspace.write("left-out.jsonl", [{"content_hash": first["content_hash"].hex()}])
    options = {"loss": {"supervise": "last_assistant"}, "filters": {"leave_out": [left_out]}}
    workspace.one("rows.jsonl", rows, **options, defaults={"splits": {"validation": 0.3}}).build()
    page = ask(Builds.of_folder(tmp_path / "configs", None), "/mini/compare").text

    headings = re.findall(r"<h2>rows: ([^<]+)</h2>", page)
    assert headings[0] == "1 row went"
    assert re.fullmatch(r"\d+ rows in another split", headings[1])
    assert headings[2] == "19 rows with another mask"
    assert "1 left_out_by_hand</a>" in page


@pytest.mark.slow
def test_comparison_has_the_records_that_came_and_were_rejected(tmp_path: Path) -> None:
    broken = {"messages": "no list"}
    rows = [*(chat(i) for i in range(20)), broken]
    workspace = Workspace(tmp_path).one("rows.jsonl", rows)
    workspace.build()
    # The first record is broken where it was; of the two new ones that are broken, one is like an earlier one.
    workspace.write("rows.jsonl", [{"messages": 7}, *rows[1:], chat(30), broken, {"messages": 8}])
    built = workspace.build()
    page = ask(Builds.of_folder(tmp_path / "configs", None), "/mini/compare").text
    sections = re.findall(r"<h2>rows: ([^<]+)</h2>(.*?)</section>", page, re.DOTALL)

    assert [heading for heading, _ in sections] == ["1 row came", "1 row went", "2 records newly rejected"]
    assert re.findall(r">([^<]*bad_messages)</a>", sections[1][1]) == ["1 bad_messages"]
    assert re.findall(r">([^<]*bad_messages)</a>", sections[2][1]) == ["2 bad_messages"]
    shown = re.findall(r'<tr data-row="([^"]+)"', sections[2][1])
    assert shown == [row["row_id"] for row in built.rejected_rows()][2:]
    assert "rows.jsonl:23" in sections[2][1]
    built_at = re.findall(r"What changed <span[^>]*>since the build of (\d{4}-\d\d-\d\d \d\d:\d\d UTC)</span>", page)
    assert len(built_at) == 1
