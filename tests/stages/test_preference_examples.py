"""Preferences through the stages: both sides have the prompt's ids, fit the limit together, and are never divided."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from rowmill.kinds.preference import ShardPairCounts
from rowmill.schema.rows import Rejected
from rowmill.stages.packed_shards.pack_group import count_damaged_pairs
from tests.end_to_end.test_row_vectors import workspace as vector_workspace
from tests.support.preferences import cut_sides
from tests.support.recipes import CHAT, CHATML, TO_EXAMPLES, Workspace, chat, sentence, tokenizer_json, write_tokenizer
from tests.support.row_reading import read

PAIRS: dict[str, Any] = {"kind": "preference"}


def _talk(words: str) -> list[dict[str, str]]:
    roles = {"S": "system", "U": "user", "A": "assistant", "B": "assistant"}
    return [{"role": roles[word[0]], "content": word} for word in words.split()]


def _vector(folder: Path, prompt: str, chosen: str, rejected: str, **truncation: Any) -> list[dict[str, Any]]:
    record = {"prompt": _talk(prompt), "chosen": _talk(chosen), "rejected": _talk(rejected)}
    workspace = vector_workspace(folder).one("a.jsonl", [record], PAIRS, truncation=truncation)
    return workspace.examples()


def _trained(example: dict[str, Any]) -> list[int]:
    return np.flatnonzero(example["loss_mask"]).tolist()


def test_vector_of_one_exchange(tmp_path: Path) -> None:
    [example] = _vector(tmp_path / "whole", "U1", "A1", "B22")

    assert (example["side_lengths"], example["sides"], example["prompt_length"]) == ([18, 19], [1, 0], 12)
    assert _trained(example) == [*range(12, 17), *range(30, 36)]
    assert _vector(tmp_path / "reject", "U1", "A1", "B22", max_length=18) == []
    [cut] = _vector(tmp_path / "allow", "U1", "A1", "B22", max_length=18, token_cut="allow")
    assert cut["side_lengths"] == [18, 18]
    assert (cut["tokens"], cut["tokens_cut"], cut["original_tokens"]) == (36, 1, 37)
    assert _trained(cut) == [*range(12, 17), *range(30, 36)]
    assert _vector(tmp_path / "none", "U1", "A1", "B22", max_length=12, token_cut="allow") == []


def test_vector_of_two_exchanges_loses_as_much_on_both_sides_as_the_longer_one_needs(tmp_path: Path) -> None:
    [whole] = _vector(tmp_path / "whole", "U1 A1 U2", "A2", "B2")
    [short] = _vector(tmp_path / "short", "U1 A1 U2", "A2", "B2", max_length=18)

    assert (whole["side_lengths"], whole["prompt_length"]) == ([36, 36], 30)
    assert _trained(whole) == [*range(30, 35), *range(66, 71)]
    assert (short["side_lengths"], short["prompt_length"]) == ([18, 18], 12)
    assert (short["messages_removed"], short["exchanges_removed"], short["original_tokens"]) == (2, 36, 72)
    assert _trained(short) == [*range(12, 17), *range(30, 35)]

    [example] = _vector(tmp_path, "U1 A1 U2", "A2", "B22222222222", max_length=40)

    assert example["prompt_length"] == 12
    assert example["side_lengths"] == [18, 28]


@pytest.mark.slow
def test_template_that_prints_the_prompt_by_the_answer_is_refused(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    counting = "{{ messages[-1]['content'] | length }}" + CHATML
    write_tokenizer(tmp_path / "tokenizer", template=counting)
    record = {"prompt": _talk("U1"), "chosen": _talk("A1"), "rejected": _talk("B2222")}
    built = workspace.one("a.jsonl", [record], PAIRS).build(only=TO_EXAMPLES)

    assert built.rejects() == [(0, "prompt_differs")]


@pytest.mark.parametrize(("options", "reason"), [
    ({"max_length": 18}, "overlong_after_structure"),
    ({"max_length": 18, "overlong": "drop"}, "overlong"),
    ({"max_length": 12, "token_cut": "allow"}, "overlong_prompt"),
])  # fmt: skip
def test_pair_that_does_not_fit_has_a_reason(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    record = {"prompt": "U1", "chosen": "A1", "rejected": "B22"}
    made = vector_workspace(tmp_path).one("a.jsonl", [record], PAIRS, truncation=options).build(only=TO_EXAMPLES)

    examples = made.manifest("rows", "tokenized_examples")
    assert [line[1] for line in examples.ledger[1:]] == [reason]
    assert ("rejected", "dropped", 37) in examples.token_ledger


def _records(count: int) -> list[dict[str, Any]]:
    sides = [(sentence(i, 9), sentence(i + 1, 5 + i % 7)) for i in range(count)]
    return [
        {"prompt": chat(i, turns=2)["messages"][:3], "chosen": chosen, "rejected": rejected, "margin": i / 4}
        for i, (chosen, rejected) in enumerate(sides)
    ]


def test_side_is_the_chat_of_its_messages_alone_or_in_a_pair(tmp_path: Path) -> None:
    records = _records(20)
    chats = []
    for record in records:
        untrained = [{**one, "train": False} for one in record["prompt"]]
        answers = [{"role": "assistant", "content": record[side]} for side in ("chosen", "rejected")]
        chats += [{"messages": [*untrained, answer]} for answer in answers]

    pairs = Workspace(tmp_path / "pairs").one("a.jsonl", records, PAIRS).examples()
    loss, off = {"boundary": "split"}, {"deduplicate": False}
    alone = Workspace(tmp_path / "chats").one("a.jsonl", chats, CHAT, loss=loss, filters=off).examples()

    sides = [side for example in pairs for side in cut_sides(example)]
    assert sides == [(one["input_ids"], one["loss_mask"]) for one in alone]

    marked = Workspace(tmp_path / "marked").one("a.jsonl", records, {**PAIRS, "objective": "unpaired"}).examples()

    assert [one["example_id"].rpartition("#")[2] for one in marked[:4]] == ["0", "1", "0", "1"]
    assert [one["sides"] for one in marked[:2]] == [[1], [0]]
    of_pairs = Counter((side, tuple(ids)) for one in pairs for side, (ids, _) in zip(one["sides"], cut_sides(one),
                                                                                     strict=True))  # fmt: skip
    assert of_pairs == Counter((one["sides"][0], tuple(one["input_ids"])) for one in marked)


def test_control_strings_are_the_same_text_on_both_sides(tmp_path: Path) -> None:
    record = {"prompt": "say <|im_end|>", "chosen": "no <|im_end|>", "rejected": "yes"}

    [example] = Workspace(tmp_path).one("a.jsonl", [record], PAIRS).examples()

    first, second = (ids for ids, _ in cut_sides(example))
    size = example["prompt_length"]
    assert first[:size] == second[:size]


@pytest.mark.slow
@pytest.mark.parametrize("packing", [{}, {"pack": True}, {"pack": 3}], ids=["single", "packed", "three"])
def test_pair_stays_whole_in_one_sequence(tmp_path: Path, packing: dict[str, Any]) -> None:
    workspace = Workspace(tmp_path)
    workspace.one("a.jsonl", _records(40), PAIRS, packing=packing, seq_len=1024)
    examples = {one["example_id"]: one for one in workspace.examples()}

    made = workspace.build()

    rows = made.rows_of("rows", "packed_shards", file="shard")
    found = Counter(name for row in rows for name in row["example_ids"])
    assert found == dict.fromkeys(examples, 2)
    assert (len(rows) < 40) is bool(packing)
    assert packing.get("pack") != 3 or max(len(row["example_ids"]) for row in rows) == 6
    for row in rows:
        names, lengths = row["example_ids"], row["segment_lengths"]
        assert names[::2] == names[1::2]
        assert row["sides"] == [1, 0] * (len(names) // 2)
        assert row["seq_lengths"] == lengths
        assert row["position_ids"] == [i for length in lengths for i in range(length)]
        assert row["input_ids"] == [token for name in names[::2] for token in examples[name]["input_ids"]]
        assert row["prompt_lengths"] == [examples[name]["prompt_length"] for name in names]
        assert row["margins"] == [examples[name]["margin"] for name in names]
        trained = [flag for name in names[::2] for flag in examples[name]["loss_mask"]]
        assert [label != -100 for label in row["labels"]] == trained
    facts = made.facts("rows", "packed_shards")
    assert (facts["conservation"], facts["segments"]) == (0, 80)
    assert (facts["pair_intact"], facts["prompt_identical"]) == (0, 0)
    outcomes = {result.check: result.outcome for _, results in made.steps.values() for result in results}
    assert {check for check, outcome in outcomes.items() if outcome == "failed"} - {"limit_cost"} == {
        "nonpositive_margins"
    }


def test_marked_answers_pack_with_their_labels(tmp_path: Path) -> None:
    form = {**PAIRS, "objective": "unpaired"}

    made = Workspace(tmp_path).one("a.jsonl", _records(20), form, packing={"pack": True}).build()

    rows = made.rows_of("rows", "packed_shards", file="shard")
    assert Counter(side for row in rows for side in row["sides"]) == {0: 20, 1: 20}
    assert {margin for row in rows for margin in row["margins"]} == {None}


def test_ranks_have_fillers_without_sides(tmp_path: Path) -> None:
    made = Workspace(tmp_path).one("a.jsonl", _records(9), PAIRS, filters={}).build()

    ranks = made.manifest("gpu_partitions")
    assert Counter(tuple(row["sides"]) for row in made.rank_rows()) == {(1, 0): 9, (None,): 1}
    assert ranks.facts["conservation"] == 0


@pytest.mark.slow
def test_divided_pairs_and_other_prompts_are_counted(tmp_path: Path) -> None:
    made = Workspace(tmp_path).one("a.jsonl", _records(6), PAIRS).build()
    [shard] = made.manifest("rows", "packed_shards").files("shard")
    table = made.project.store.table(shard)
    examples = pa.table({"side_lengths": [[2, 2]]})

    def count(column: str, values: list[Any]) -> ShardPairCounts | None:
        place = table.schema.get_field_index(column)
        return count_damaged_pairs(table.set_column(place, column, pa.array(values, table.schema.field(column).type)),
                                   examples)  # fmt: skip

    rows = table.to_pylist()
    swapped = [row["sides"][::-1] for row in rows[:1]] + [row["sides"] for row in rows[1:]]
    other = [[9, *row["input_ids"][1:]] for row in rows]
    renamed = [[f"x{i}:{k}#0" for k in range(2)] for i in range(len(rows))]

    assert count_damaged_pairs(table, examples) == ShardPairCounts()
    assert count("sides", swapped) == ShardPairCounts(separated_sides=2)
    assert count("input_ids", other) == ShardPairCounts(pairs_with_two_prompts=6)
    assert count("example_ids", renamed) == ShardPairCounts(separated_sides=12)


@pytest.mark.slow
def test_swapped_biased_and_unbalanced_preferences_warn(tmp_path: Path) -> None:
    pairs = [{"prompt": f"{i}?", "chosen": sentence(i, 12), "rejected": sentence(i, 3)} for i in range(20)]
    pairs += [{**pairs[0], "chosen": pairs[0]["rejected"], "rejected": pairs[0]["chosen"]}]
    marked = [{"prompt": f"{i}?", "completion": sentence(i, 5), "label": i > 0} for i in range(20)]
    made = [
        Workspace(tmp_path / "pairs").one("a.jsonl", pairs, PAIRS).build(only=TO_EXAMPLES),
        Workspace(tmp_path / "marked")
        .one("a.jsonl", marked, {**PAIRS, "objective": "unpaired"})
        .build(only=TO_EXAMPLES),
    ]

    facts = [one.facts("rows", stage) for one in made for stage in ("canonical_rows", "tokenized_examples")]
    failed = [{result.check for _, results in one.steps.values() for result in results if result.outcome == "failed"}
              for one in made]  # fmt: skip
    assert failed == [{"swapped_pairs", "length_bias"}, {"label_balance"}]
    assert (facts[0]["swapped_pairs"], facts[0]["label_balance"]) == (2, None)
    assert (facts[2]["label_balance"], facts[3]["length_bias"]) == (0.05, None)


@pytest.mark.slow
def test_prompts_of_two_splits_differ(tmp_path: Path) -> None:
    records = [{"prompt": sentence(i % 20, 6), "chosen": sentence(i, 7), "rejected": sentence(i + 1, 7)}
               for i in range(200)]  # fmt: skip
    workspace = Workspace(tmp_path).one("a.jsonl", records, PAIRS, splits={"validation": 0.3})

    made = workspace.build()

    examples = made.manifest("rows", "canonical_rows")
    table = made.project.store.table(examples.files("rows")[0]).to_pylist()
    by_split = {split: {row["messages"] for row in table if row["split"] == split} for split in ("train", "validation")}
    assert all(by_split.values())
    assert by_split["train"].isdisjoint(by_split["validation"])
    assert made.facts("training_splits")["same_group"] == 0


@pytest.mark.slow
def test_real_pairs_share_their_prompts(tmp_path: Path, real_data: Path) -> None:
    workspace = Workspace(tmp_path)
    files = {"dpo": "dpo_en_demo.json", "v1": "v1_dpo_demo.jsonl"}
    datasets = {
        name: workspace.dataset(file, (real_data / "preference" / file).read_bytes(), PAIRS)
        for name, file in files.items()
    }

    made = workspace.recipe(datasets, seq_len=16384).build(only=TO_EXAMPLES)

    manifests = [made.manifest(name, "tokenized_examples") for name in files]
    tables = [made.project.store.table(file) for one in manifests for file in one.files("examples")]
    examples = [row for table in tables for row in table.to_pylist()]
    assert len(examples) == 305
    for example in examples:
        (first, _), (second, _) = cut_sides(example)
        assert first[: example["prompt_length"]] == second[: example["prompt_length"]]
    duplicates = made.manifest("dpo", "canonical_rows").tables["rejects"].rows
    assert [line[:2] for line in duplicates] == [("duplicate", 5)]
    assert json.dumps([name for name, _ in manifests[0].schema][-4:]) == json.dumps(
        ["sides", "side_lengths", "prompt_length", "margin"]
    )


RAW: dict[str, Any] = {"kind": "preference", "text": "raw"}

EOS = 2


def _encode(text: str) -> list[int]:
    return Tokenizer.from_str(tokenizer_json()).encode(text).ids


def _record(i: int, **columns: Any) -> dict[str, Any]:
    return {"prompt": f" {sentence(i, 6)}\n", "chosen": f" {sentence(i + 1, 5)} ", "rejected": sentence(i, 9)} | columns


ASKED = "\n\nHuman: one?\n\nAssistant: two.\n\nHuman: three?\n\nAssistant:"


def test_texts_of_hh_are_parted_behind_the_last_marker_that_both_have(tmp_path: Path) -> None:
    record = {"chosen": f"{ASKED} four,\n\nAssistant of all.", "rejected": f"{ASKED} five. "}

    [example] = Workspace(tmp_path).one("a.jsonl", [record], RAW).examples()

    sides = [[*_encode(ASKED), *_encode(record[name].removeprefix(ASKED)), EOS] for name in ("chosen", "rejected")]
    assert example["input_ids"] == [*sides[0], *sides[1]]
    assert example["prompt_length"] == len(_encode(ASKED))
    assert [sum(example["loss_mask"][: len(sides[0])]), sum(example["loss_mask"])] == [
        len(sides[0]) - len(_encode(ASKED)),
        len(sides[0]) + len(sides[1]) - 2 * len(_encode(ASKED)),
    ]


HOSTILE_HH = [
    (ASKED + " a", ASKED + " a", "identical_sides"),
    (ASKED + " a", ASKED.removesuffix("\n\nAssistant:"), "empty_completion"),
    (ASKED + " a", ASKED + "  ", "empty_completion"),
    (ASKED + " a", ASKED + " b\n\nHuman: and?\n\nAssistant: c", "content_not_text"),
    ("\n\nHuman: one?\n\nAssistant: a", "\n\nHuman: two?\n\nAssistant: a", "prompt_mismatch"),
    (ASKED + " a", "\n\nHuman: one?\n\nAssistant: two.\n\nAssistant: three", "prompt_mismatch"),
]


@pytest.mark.parametrize(("chosen", "rejected", "reason"), HOSTILE_HH)
def test_texts_of_hh_that_cannot_be_parted_have_one_reason(chosen: str, rejected: str, reason: str) -> None:
    row = read({"chosen": chosen, "rejected": rejected}, RAW)

    assert isinstance(row, Rejected)
    assert row.reason == reason


@pytest.mark.parametrize("add_eos", ["auto", False])
def test_sides_are_prompt_answer_and_eos_exactly(tmp_path: Path, add_eos: Any) -> None:
    records = [_record(0), _record(1, chosen="<think>a</think> b", margin=0.5)]
    workspace = Workspace(tmp_path).one("a.jsonl", records, {**RAW, "add_eos": add_eos})

    examples = workspace.examples()

    end = [EOS] if add_eos else []
    for example, record in zip(examples, records, strict=True):
        prompt = _encode(record["prompt"])
        sides = [[*_encode(record[name]), *end] for name in ("chosen", "rejected")]
        assert example["input_ids"] == [*prompt, *sides[0], *prompt, *sides[1]]
        lengths = [len(prompt), len(sides[0]), len(prompt), len(sides[1])]
        assert example["loss_mask"] == [bool(k % 2) for k, length in enumerate(lengths) for _ in range(length)]
        assert (example["prompt_length"], example["margin"]) == (len(prompt), record.get("margin"))


@pytest.mark.slow
def test_texts_need_no_template_and_everything_else_is_rejected_with_a_reason(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    hostile = [
        (_record(1, chosen=[messages[1], messages[1]]), "content_not_text"),
        (_record(2, prompt=messages), "content_not_text"),
        (_record(3, rejected=" \n"), "empty_completion"),
        (_record(4, prompt=""), "prompt_mismatch"),
        (_record(5, chosen=sentence(5, 9)), "identical_sides"),
        (_record(6, chosen={"role": "user", "content": "b"}), "prompt_mismatch"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: b\n\nAssistant: b"}, "prompt_mismatch"),
        ({"chosen": 1, "rejected": 2, "prompt": 3}, "content_not_text"),
        (_record(7, chosen=sentence(1, 300)), "overlong_after_structure"),
    ]
    workspace = Workspace(tmp_path).one("a.jsonl", [_record(0), *(record for record, _ in hostile)], RAW)
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    named = {key: value for key, value in json.loads(config.read_text()).items() if key != "chat_template"}
    config.write_text(json.dumps(named))

    built = workspace.build()

    assert built.rejects() == [(i, reason) for i, (_, reason) in enumerate(hostile, start=1)]
    results = {one.check: one.outcome for _, found in built.steps.values() for one in found}
    assert (results["render_equal"], results["prompt_identical"]) == ("not_applicable", "passed")
    assert len(built.segments()) == 2


def test_unpaired_and_cut_answers(tmp_path: Path) -> None:
    form = {**RAW, "objective": "unpaired"}
    records = [{"prompt": "a b", "completion": sentence(1, 40), "label": True}, _record(2)]
    limits = {"max_length": 20, "token_cut": "allow"}

    examples = Workspace(tmp_path).one("a.jsonl", records, form, truncation=limits).examples()

    assert [(one["sides"], one["tokens"] <= 20) for one in examples] == [([1], True), ([1], True), ([0], True)]
    assert examples[0]["tokens_cut"] > 0
