"""`rowmill inspect`: the text that trains, its source, and that inspection changes nothing."""

import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.cli.error_boundary import ExitStatus
from rowmill.conversation.template_contract import TemplateBehavior, list_template_warnings
from rowmill.core.console import render_text
from rowmill.inspection import inspect
from rowmill.inspection.chat_templates import TemplateReport
from rowmill.inspection.inspect import InspectedRecord, TokenClass
from rowmill.reports import row_view
from rowmill.tokenization import tokenizer
from rowmill.tokenization.tokenizer import Encoder
from tests.support.cli_project import CHATS, RECIPE, ROOT, CliProject, answer, chat, list_files, note, task

END = "<|im_end|>"


@lru_cache
def demo_encoder() -> Encoder:
    return Encoder(tokenizer.open_tokenizer("configs/demo/tokenizer", ROOT))


def looked_at(
    project: CliProject, count: int = 3, dataset: str | None = "chats", row: str | None = None
) -> list[InspectedRecord]:
    return list(inspect.inspect_rows(project.project, count=count, dataset=dataset, row_id=row))


def trained(one: InspectedRecord) -> list[str]:
    return [stretch.text for sample in one.samples for stretch in sample.stretches if stretch.kind == "trained"]


# ── What is shown ──
@pytest.mark.slow
def test_brackets_hold_the_answer_and_its_end_of_turn_and_nothing_else(small: CliProject) -> None:
    out = small.run("inspect", "-n", "5", "--dataset", "chats").out
    # Five records, the second of them the broken line.
    assert re.findall(r"⟦(.*?)⟧", out, re.DOTALL) == [answer(i) + END for i in range(4)]


def test_trained_spans_of_every_chat_are_its_answer(small: CliProject) -> None:
    rows = looked_at(small, CHATS + 1)
    kept = [one for one in rows if one.rejected is None]
    assert [trained(one) for one in kept] == [[answer(i) + END] for i in range(CHATS)]


def test_pair_trains_its_response_alone(small: CliProject) -> None:
    rows = looked_at(small, 3, "tasks")
    assert [trained(one)[0].removesuffix("<|endoftext|>") for one in rows] == [task(i)[1] for i in range(3)]


def test_spans_of_a_row_are_distinguished_by_class(small: CliProject) -> None:
    [first, *_] = looked_at(small, 1)
    [sample] = first.samples
    assert [(stretch.kind, stretch.text) for stretch in sample.stretches] == [
        ("template", "<|im_start|>user\n"),
        ("context", "What is 0 plus 1?"),
        ("template", f"{END}\n<|im_start|>assistant\n"),
        ("trained", f"{answer(0)}{END}"),
        ("template", "\n"),
    ]


def test_document_that_is_split_shows_each_window(tmp_path: Path) -> None:
    notes = RECIPE["datasets"]["notes"] | {"truncation": {"overlong": "split"}}
    project = CliProject(tmp_path).write(datasets={"notes": notes})

    [first] = looked_at(project, 1, "notes")
    assert len(first.samples) > 2
    assert all(sample.tokens <= 128 for sample in first.samples)
    assert "".join(stretch.text for sample in first.samples for stretch in sample.stretches).startswith(note(0))


def test_numbers_are_those_of_the_build(small: CliProject) -> None:
    columns = ["example_id", "tokens", "trained_tokens", "original_tokens"]
    files = small.current("chats", "tokenized_examples").files("examples")
    stored = [row for file in files for row in small.project.store.table(file, columns).to_pylist()]

    samples = [sample for one in looked_at(small, CHATS + 1) for sample in one.samples]
    assert [{name: getattr(sample, name) for name in columns} for sample in samples] == stored


def test_rejected_record_shows_reason_and_raw_line(small: CliProject) -> None:
    out = small.run("inspect", "-n", "2", "--dataset", "chats").out
    assert "invalid_json at canonical_rows" in out
    assert "data/chats.jsonl:3" in out
    assert '{"messages": [' in out


@pytest.mark.slow
def test_every_dataset_is_shown_if_none_is_named(small: CliProject) -> None:
    assert [one.dataset for one in looked_at(small, 2, None)] == ["chats", "chats", "tasks", "tasks", "notes", "notes"]


def test_row_by_id_is_that_row(small: CliProject) -> None:
    wanted = looked_at(small, 9)[8]
    assert looked_at(small, 1, None, wanted.row_id) == [wanted]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--row", "nothing"], "no row of chats, tasks, notes has this id"),
        (["--row", "0123456789abcdef:0"], "no row of chats, tasks, notes has this id"),
        (["--row", ""], "no row of chats, tasks, notes has this id"),
        (["--dataset", "chat"], "did you mean chats?"),
    ],
)
def test_unknown_row_or_dataset_is_an_error_that_says_what_there_is(
    small: CliProject, options: list[str], said: str
) -> None:
    assert said in small.run("inspect", *options, status=ExitStatus.INVALID).err


def with_chat(folder: Path, *messages: Mapping[str, Any]) -> CliProject:
    """Write a project of one chat."""
    project = CliProject(folder).write(datasets={"chats": RECIPE["datasets"]["chats"]})
    project.write_data("chats.jsonl", json.dumps({"messages": messages}) + "\n")
    return project


@pytest.mark.slow
def test_truncated_row_shows_what_each_stage_removed(tmp_path: Path) -> None:
    turns = (chat(i)["messages"] for i in range(20))
    project = with_chat(tmp_path, *chain.from_iterable(turns))

    [one] = looked_at(project, 1)
    [sample] = one.samples
    assert sample.tokens <= 128
    assert sample.removed == {"exchanges": sample.original_tokens - sample.tokens}
    assert f"which removed {sample.removed['exchanges']:,} by exchanges" in project.run("inspect", "-n", "1").out


def test_integers_beyond_64_bits_are_shown_as_the_source_has_them(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": {"id": 123456789012345678901234567890}}
    model = {"role": "assistant", "content": "a", "tool_calls": [call]}
    project = with_chat(tmp_path, {"role": "user", "content": "q"}, model)
    assert 'f({"id":123456789012345678901234567890})' in project.run("inspect").out


@pytest.mark.slow
def test_escape_sequences_in_data_are_shown_not_executed(tmp_path: Path) -> None:
    evil = ({"role": "user", "content": "a\x1b[2Jb"}, {"role": "assistant", "content": "c\x1b]0;title\x07d"})
    out = with_chat(tmp_path, *evil).run("inspect").out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "⟦c␛]0;title␇d<|im_end|>⟧" in out


# ── Inspection changes nothing ──
@pytest.mark.slow
@pytest.mark.parametrize("compressed", [False, True])
def test_inspection_of_a_project_never_built_writes_nothing(tmp_path: Path, *, compressed: bool) -> None:
    project = CliProject(tmp_path).write()
    if compressed:
        content = (tmp_path / "data" / "chats.jsonl").read_bytes()
        (tmp_path / "data" / "chats.jsonl.gz").write_bytes(gzip.compress(content))
        chats = {"source": {"train_urls": ["data/chats.jsonl.gz"]}, "format": {"kind": "chat"}}
        project.write_recipe(datasets={"chats": chats})
    before = list_files(tmp_path)
    shown = looked_at(project, 4, None)
    assert trained(shown[0]) == [answer(0) + END]
    assert list_files(tmp_path) == before


@pytest.mark.slow
def test_inspection_of_a_built_project_writes_nothing(small: CliProject) -> None:
    before = list_files(small.folder)
    looked_at(small, 4, None)
    assert list_files(small.folder) == before


@pytest.mark.slow
def test_inspected_row_names_the_command_of_its_page_once_a_build_has_it(small: CliProject, tmp_path: Path) -> None:
    printed = small.run("inspect", "-n", "2", "--dataset", "chats").out
    row_ids = re.findall(r"── chats  (\S+) ──", printed)

    assert len(row_ids) == 2
    assert re.findall(r"look +(rowmill view .*)", printed) == [f"rowmill view small {row_id}" for row_id in row_ids]
    assert "rowmill view" not in CliProject(tmp_path).write().run("inspect", "-n", "1").out


# ── Stretches ──
@pytest.mark.slow
@given(st.text(max_size=60), st.lists(st.sampled_from(["trained", "context", "template"]), min_size=1, max_size=12))
def test_stretches_joined_are_the_decoded_text_however_it_is_cut(text: str, pattern: list[TokenClass]) -> None:
    encoder = demo_encoder()
    ids = encoder.encode([text]).ids.tolist()
    kinds: list[TokenClass] = [pattern[i % len(pattern)] for i in range(len(ids))]

    cut = list(inspect.split_by_class(ids, kinds, encoder))
    assert "".join(one.text for one in cut) == encoder.decode(ids)
    assert [one.kind for one in cut for _ in range(one.tokens)] == kinds


def test_classes_follow_mask_first_and_spans_next() -> None:
    example = {
        "input_ids": np.arange(6).tolist(),
        "loss_mask": [False, False, False, True, True, False],
        "span_starts": [0, 1, 3, 4],
        "span_kinds": [6, 1, 2, 6],
    }

    kinds = inspect.list_token_kinds(example)
    shown = [inspect.classify_token(*kind) for kind in kinds]
    assert shown == ["template", "context", "context", "trained", "trained", "template"]


# ── Colours and templates ──
@pytest.mark.slow
def test_with_colours_there_are_no_brackets_but_a_legend(small: CliProject) -> None:
    [first] = looked_at(small, 1)
    shown = render_text(row_view.render_inspected_record(first, colours=True))
    assert "⟦" not in shown
    assert "■ trained" in shown
    assert answer(0) in shown


def test_template_report_says_how_turns_end(small: CliProject) -> None:
    words = [line.split(maxsplit=1) for line in small.run("template-report").out.splitlines()]
    observed = {line[0]: line[1].strip() for line in words if len(line) == 2}

    assert observed["printed_end"] == repr(END)
    assert observed["end_is_one_token"] == "yes"
    assert "look" not in observed
    assert observed["end_of_turn"] == "own"
    assert "tasks" not in observed


def test_template_report_shows_every_field_of_the_contract_in_one_place() -> None:
    shown = [name for names in row_view.BEHAVIOR_SECTIONS.values() for name in names]
    assert sorted(shown) == sorted(field.name for field in fields(TemplateBehavior))


def test_template_report_begins_with_what_a_trainer_should_know() -> None:
    observed = TemplateBehavior(
        prompts={"user": "<a>"}, prompt_match={"user": "partial"}, generation_blocks="equal", end_of_turn="own"
    )
    report = TemplateReport("chats", "0123456789abcdef01", observed, tuple(list_template_warnings(observed)))
    lines = render_text(row_view.render_template_report(report)).splitlines()
    assert lines[0].split() == ["chats", "template", "0123456789abcdef"]
    assert lines[1].split()[:2] == ["look", "{%"]
    assert "a model would not stop" in " ".join(" ".join(lines[1:4]).split())
    assert "user: partial" in "\n".join(lines)
