"""Loss weights: from a message's number to a float per token, through cuts, packing, ranks, reader and exports."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.build.in_memory import sft_tokenize
from rowmill.core.console import render_text
from rowmill.core.errors import ConfigError
from rowmill.inspection import inspect, trace
from rowmill.reader import Reader
from rowmill.reader.layouts import LayoutName
from rowmill.reports import row_view, summary
from rowmill.reports.build_view import load_build_view
from rowmill.schema.examples import SPAN_KINDS, WEIGHT_COLUMN
from rowmill.schema.rows import Rejected
from rowmill.schema.shard_counts import ShardDetails, select_shards
from rowmill.tokenization.encoded_batch import Example, make_columns
from rowmill.tokenization.token_truncation import prepend_bos
from tests.support.recipes import CHAT, PAIR, TEXT, Built, Workspace, chat, document, open_reader, pair, text_of

WEIGHED = {"loss": {"weights": True}}
SOME = (0, 0.5, 1, 2, 0.25, None)
"""What messages of the model weigh in turn; None: no number is given."""


def weighed(row: dict[str, Any], weights: Sequence[float | None], key: str = "weight") -> dict[str, Any]:
    """Return a conversation whose assistant messages weigh so much, in turn."""
    given_weights = iter(weights)
    messages: list[dict[str, Any]] = []
    for message in row["messages"]:
        weight = next(given_weights) if message["role"] == "assistant" else None
        messages.append(message if weight is None else {**message, key: weight})
    return {"messages": messages}


def chats(count: int) -> list[dict[str, Any]]:
    return [
        weighed(chat(i, turns=2, words=6 + i % 20), (SOME[i % len(SOME)], SOME[(i + 1) % len(SOME)]))
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build weighted chats beside pairs and documents without weights, dealt to three ranks."""
    workspace = Workspace(tmp_path_factory.mktemp("weighted"))
    groups = {**WEIGHED, "splits": {"validation": 0.2}, "packing": {"slice_strategy": "split"}}
    datasets = {
        "chats": workspace.dataset("chats.jsonl", chats(40), **groups),
        "pairs": workspace.dataset("pairs.jsonl", [pair(i) for i in range(7)], PAIR),
        "texts": workspace.dataset("texts.jsonl", [document(i, words=90) for i in range(5)], TEXT),
    }
    exports = [{"kind": "native", "name": "own"}, {"kind": "tinker", "name": "tinker", "unit": "unpacked"}]
    workspace.recipe(
        datasets, seq_len=128, partitions={"world_size": 3, "remainder": "pad"}, exports=exports,
        mixture={"batch_size": 6},
    )  # fmt: skip
    return workspace.build()


def numbers(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return all positive weights, ascending: exactly what sums are made of."""
    return sorted(weight for row in rows for weight in row[WEIGHT_COLUMN] if weight)


def shard_rows(built: Built, *datasets: str) -> list[dict[str, Any]]:
    return [row for name in datasets or ["rows"] for row in built.rows_of(name, "packed_shards", file="shard")]


def require_weights_where_labels_are(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        assert [weight > 0 for weight in row[WEIGHT_COLUMN]] == [label >= 0 for label in row["labels"]]


# ── From examples to ranks ─────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
def test_weights_from_messages_over_segments_to_ranks(mixed: Built) -> None:
    examples = mixed.examples("chats")
    assert {weight for row in examples for weight in row[WEIGHT_COLUMN]} == {0, 0.5, 1, 2, 0.25}
    for row in examples:
        assert [weight > 0 for weight in row[WEIGHT_COLUMN]] == row["loss_mask"]
    for name in ("pairs", "texts"):
        assert all(WEIGHT_COLUMN not in row for row in mixed.examples(name))
    examples = {row["example_id"]: row for row in mixed.examples("chats")}
    segments = 0
    for row in shard_rows(mixed, "chats"):
        first = 0
        for name, start, length in zip(row["example_ids"], row["starts"], row["segment_lengths"], strict=True):
            whole, of_example, of_row = examples[name], slice(start, start + length), slice(first, first + length)
            weights = zip(whole[WEIGHT_COLUMN][of_example], row["labels"][of_row], strict=True)
            assert row["input_ids"][of_row] == whole["input_ids"][of_example]
            assert row[WEIGHT_COLUMN][of_row] == [weight if label >= 0 else 0 for weight, label in weights]
            first += length
            segments += 1
    assert segments > len(examples) / 2
    rows = [*shard_rows(mixed, "chats", "pairs", "texts"), *mixed.rank_rows()]
    require_weights_where_labels_are(rows)
    assert all(set(row[WEIGHT_COLUMN]) <= {0, 1} for row in rows if row["dataset"] in ("pairs", "texts"))
    parts = [part for name in ("chats", "pairs", "texts") for part in mixed.manifest(name, "packed_shards").parts]
    shards = [part.files["shard"] for part in select_shards(parts, "train")]
    ranks = mixed.rank_rows()
    assert any(row["filler"] for row in ranks)
    assert numbers(ranks) == numbers([row for one in shards for row in mixed.project.store.table(one).to_pylist()])


def test_sum_of_weights_is_conserved_from_examples_to_shards_where_nothing_is_cut(tmp_path: Path) -> None:
    built = Workspace(tmp_path).one("a.jsonl", chats(12), **WEIGHED).build()
    assert numbers(shard_rows(built)) == numbers(built.examples())
    assert set(numbers(built.examples())) == {0.25, 0.5, 1, 2}


@pytest.mark.slow
def test_open_attention_and_an_ignored_token_take_the_weight_with_the_label(tmp_path: Path) -> None:
    packing = {"block_cross_document_attention": False, "ignore_token_id": 2}
    rows = shard_rows(Workspace(tmp_path).one("a.jsonl", chats(12), packing=packing, **WEIGHED).build())
    tokens = [token for row in rows for token in zip(row["input_ids"], row[WEIGHT_COLUMN], strict=True)]
    ignored = [weight for token, weight in tokens if token == 2]
    assert ignored
    assert not any(ignored)
    require_weights_where_labels_are(rows)


# ── What a weight means ────────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
def test_weight_0_equals_untrained(tmp_path: Path) -> None:
    def columns(key: str, *, value: float) -> list[list[Any]]:
        rows = [weighed(chat(i, turns=2), (value, None), key) for i in range(6)]
        built = Workspace(tmp_path / key).one("a.jsonl", rows, **WEIGHED).build()
        return [[row[n] for n in ("input_ids", "labels", WEIGHT_COLUMN)] for row in shard_rows(built)]

    assert columns("weight", value=0) == columns("train", value=False)


@pytest.mark.slow
def test_without_loss_weights_files_are_those_that_they_would_be_without_the_column(tmp_path: Path) -> None:
    """Messages may weigh 0 or 1 without the option: their shards differ from weighted ones by the column alone."""
    rows = [weighed(chat(i, turns=2), (i % 2, 1)) for i in range(8)]
    plain = Workspace(tmp_path / "plain").one("a.jsonl", rows).build()
    weighted = Workspace(tmp_path / "weighted").one("a.jsonl", rows, **WEIGHED).build()

    for stage, file in (("tokenized_examples", "examples"), ("packed_shards", "shard")):
        without, with_them = (b.rows_of("rows", stage, file=file) for b in (plain, weighted))
        assert [[*row] for row in with_them] == [[*row, WEIGHT_COLUMN] for row in without]
        assert [{name: row[name] for name in without[0]} for row in with_them] == without
        assert WEIGHT_COLUMN not in dict(plain.manifest("rows", stage).schema)
        assert weighted.manifest("rows", stage).schema[-1][0] == WEIGHT_COLUMN


def test_plain_chats_among_weighted_ones_weigh_1_and_stay_in_their_places(tmp_path: Path) -> None:
    """Plain chats take the fast path, which has no weights; both paths' examples are joined part by part."""
    rows = [chat(i) if i % 2 else weighed(chat(i), (0.5,)) for i in range(9)]
    only = ("raw_dataset", "canonical_rows", "tokenized_examples")
    found = Workspace(tmp_path).one("a.jsonl", rows, **WEIGHED).build(only=only).examples()
    assert [{*row[WEIGHT_COLUMN]} for row in found] == [{0, 1} if i % 2 else {0, 0.5} for i in range(9)]
    assert all([weight > 0 for weight in row[WEIGHT_COLUMN]] == row["loss_mask"] for row in found)


@pytest.mark.slow
def test_weights_reach_the_end_of_turn_that_is_appended(tmp_path: Path) -> None:
    template = {"chat_template": "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"}
    workspace = Workspace(tmp_path).one("a.jsonl", [weighed(chat(0), (0.5,))], template=template, **WEIGHED)
    [row] = shard_rows(workspace.build())
    assert row["labels"][-1] == row["input_ids"][-1] == 2
    assert row[WEIGHT_COLUMN][-1] == 0.5


@pytest.mark.slow
@given(weights=st.lists(st.sampled_from([0, 0.125, 1, 3]), min_size=2, max_size=2), factor=st.sampled_from([0.5, 4]))
def test_scaled_weights_scale_every_token_and_move_none(mixed: Built, weights: list[float], factor: float) -> None:
    rows = [weighed(chat(1, turns=2), one) for one in (weights, [factor * weight for weight in weights])]
    tokenizer = str(mixed.project.base / "tokenizer")
    made = sft_tokenize(rows, tokenizer, max_seq_len=256, options={"format": CHAT, **WEIGHED})
    if not any(weights):
        assert all(isinstance(one, Rejected) and one.reason == "no_loss_tokens" for one in made)
        return
    ((one,), (other,)) = (found for found in made if not isinstance(found, Rejected))
    assert one.loss_weights is not None
    assert other.loss_weights is not None
    assert one.loss_mask.tolist() == other.loss_mask.tolist() == (one.loss_weights > 0).tolist()
    assert np.array_equal(other.loss_weights, one.loss_weights * np.float32(factor))


# ── Prompts ────────────────────────────────────────────────────────────────────────────────────────

PROMPT_KINDS = {"system", "user", "tool_result", "prompt"}
DIALOGUE = {"messages": [
    {"role": "system", "content": "you are quick and brief"},
    {"role": "user", "content": "look at the river and stone"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call_00001", "type": "function", "function": {"name": "look", "arguments": {"at": "river"}}}]},
    {"role": "tool", "content": "deep cold water", "tool_call_id": "call_00001"},
    {"role": "assistant", "content": "the river is deep"}, {"role": "user", "content": "and the stone"},
    {"role": "assistant", "content": "the stone is old"},
]}  # fmt: skip


def kinds_of(row: dict[str, Any]) -> list[str]:
    """Return the kind of each token of an example."""
    bounds = [*row["span_starts"], len(row["input_ids"])]
    return [
        SPAN_KINDS[k] for k, a, b in zip(row["span_kinds"], bounds[:-1], bounds[1:], strict=True) for _ in range(a, b)
    ]


def compare_with_unweighted(tmp_path: Path, rows: list[dict[str, Any]], weight: float, **options: Any) -> list[str]:
    """Build rows with and without a weight of prompts; return the kinds of tokens that train because of it."""
    loss = {**options.pop("loss", {}), "prompt_weight": weight}
    bare = {name: value for name, value in loss.items() if name not in ("prompt_weight", "allow_negative")}
    one, other = (
        Workspace(tmp_path / name).one("a.jsonl", rows, loss=given, **options).build().examples()
        for name, given in (("with", loss), ("without", bare))
    )
    added: list[str] = []
    for weighted, plain in zip(one, other, strict=True):
        assert weighted["input_ids"] == plain["input_ids"]
        assert weighted["template_tokens"] == plain["template_tokens"]
        assert weighted["trained_removed"] == plain["trained_removed"]
        moved = 0
        for i, kind in enumerate(kinds_of(plain)):
            of_prompt = i > 0 and not plain["loss_mask"][i] and kind in PROMPT_KINDS
            expected = np.float32(weight) if of_prompt else plain.get(WEIGHT_COLUMN, plain["loss_mask"])[i]
            assert weighted[WEIGHT_COLUMN][i] == expected
            assert weighted["loss_mask"][i] == (of_prompt or plain["loss_mask"][i])
            added += [kind] * of_prompt
            moved += of_prompt
        # Counted as trained, no longer as context.
        assert weighted["trained_tokens"] == plain["trained_tokens"] + moved
        assert weighted["context_tokens"] == plain["context_tokens"] - moved
    return added


def test_prompt_weight_trains_what_the_model_reads_and_nothing_else(tmp_path: Path) -> None:
    assert set(compare_with_unweighted(tmp_path / "dialogue", [DIALOGUE], 0.1)) == {"system", "user", "tool_result"}
    rows = [chat(i, turns=1 + i % 5, words=4 + i) for i in range(12)]
    cut = {"truncation": {"max_length": 60, "overlong": "truncate"}}
    assert set(compare_with_unweighted(tmp_path / "chats", rows, 0.5)) == {"user"}
    assert set(compare_with_unweighted(tmp_path / "cut", rows, 0.5, **cut)) == {"user"}
    assert set(compare_with_unweighted(tmp_path / "pairs", [pair(i) for i in range(5)], 0.5, format=PAIR)) == {"prompt"}
    last = {"loss": {"supervise": "last_assistant"}}
    assert set(compare_with_unweighted(tmp_path / "last", rows, 0.5, **last)) == {"user"}


def test_prompt_weight_reaches_ledger_statistics_and_batches_but_trains_no_prompt_alone(tmp_path: Path) -> None:
    rows = [*(chat(i) for i in range(9)), {"messages": [{"role": "user", "content": "who is there"}]}]
    built = Workspace(tmp_path).one("a.jsonl", rows, loss={"prompt_weight": 0.25}).build()
    assert built.rejects() == [(9, "no_assistant")]
    expected = Counter(weight for row in built.examples() for weight in row[WEIGHT_COLUMN] if weight)
    assert set(expected) == {0.25, 1}
    assert dict(built.manifest("rows", "tokenized_examples").tables["loss_weights"].rows) == expected
    ledger = {name: count for _, name, count in built.manifest("rows", "tokenized_examples").token_ledger}
    assert ledger["trained"] == sum(expected.values())
    batches = Reader(built.project.store.root, built.project.recipe.name, rank=0, world_size=1, as_torch=False)
    assert Counter(float(w) for batch in batches for w in batch[WEIGHT_COLUMN].ravel() if w) == expected


def test_negative_weights_need_the_recipe_to_say_so(tmp_path: Path) -> None:
    rows = [weighed(chat(0), (-0.5,)), weighed(chat(1), (2,))]
    refused = Workspace(tmp_path / "a").one("a.jsonl", rows, **WEIGHED).build()
    assert refused.rejects() == [(0, "bad_weight")]

    allowed = {"weights": True, "allow_negative": True, "prompt_weight": -0.125}
    built = Workspace(tmp_path / "b").one("a.jsonl", rows, loss=allowed).build()

    assert built.rejects() == []
    assert set(numbers(shard_rows(built))) == {-0.5, -0.125, 2}
    for row in [*built.examples(), *shard_rows(built)]:
        is_target = row.get("loss_mask") or [label >= 0 for label in row["labels"]]
        assert [weight != 0 for weight in row[WEIGHT_COLUMN]] == is_target


# ── Cuts ───────────────────────────────────────────────────────────────────────────────────────────

SIZES = st.integers(1, 30)


def example(size: int, data: st.DataObject) -> Example:
    """Return an example whose token n weighs 1 + n where it trains, so that a moved weight shows."""
    mask = np.array([False, *data.draw(st.lists(st.booleans(), min_size=size - 1, max_size=size - 1))], bool)
    return Example(
        ids=np.arange(size, dtype=np.int32), mask=mask, span_starts=np.zeros(1, np.int64),
        span_messages=np.zeros(1, np.int64), span_kinds=np.zeros(1, np.int8), original_tokens=size,
        original_trained=int(mask.sum()), weights=np.where(mask, np.arange(1, size + 1), 0).astype(np.float32),
    )  # fmt: skip


def is_aligned(one: Example) -> bool:
    assert one.weights is not None
    return np.array_equal(one.weights, np.where(one.mask, one.ids + 1, 0).astype(np.float32))


@pytest.mark.slow
@given(SIZES, st.data())
def test_cut_keeps_weights_with_their_tokens(size: int, data: st.DataObject) -> None:
    start, stop = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)
    whole = example(size, data)

    assert is_aligned(whole.cut(start, stop))
    assert is_aligned(whole.keep(kept))
    assert is_aligned(whole.keep(kept).cut(0, int(kept.sum()) // 2))


def test_bos_put_before_moves_weights_with_their_tokens() -> None:
    whole = Example(
        ids=np.array([5, 6], np.int32), mask=np.array([False, True]), span_starts=np.zeros(1, np.int64),
        span_messages=np.zeros(1, np.int64), span_kinds=np.zeros(1, np.int8), original_tokens=2, original_trained=1,
        weights=np.array([0, 0.5], np.float32),
    )  # fmt: skip
    led = prepend_bos(whole, 1)
    assert led.ids.tolist() == [1, 5, 6]
    assert led.weights is not None
    assert led.weights.tolist() == [0, 0, 0.5]


@pytest.mark.slow
@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=4), st.data())
def test_examples_with_and_without_weights_share_columns(sizes: list[tuple[int, bool]], data: st.DataObject) -> None:
    examples = [example(size, data) for size, _ in sizes]
    for one, (_, has_weights) in zip(examples, sizes, strict=True):
        if not has_weights:
            one.weights = None
    found = make_columns([(i, 0, one) for i, one in enumerate(examples)]).token_weights
    expected = [one.mask.astype(np.float32) if one.weights is None else one.weights for one in examples]
    assert np.array_equal(found, np.concatenate(expected))


@pytest.mark.slow
@pytest.mark.parametrize("overlong", ["truncate", "split"])
def test_truncation_keeps_the_weight_of_every_message_that_stays(tmp_path: Path, overlong: str) -> None:
    weights = [0.5, 2, 0.25, 4, 8]
    rows = [weighed(chat(i, turns=5, words=12), weights) for i in range(4)]
    truncation = {"overlong": overlong, "max_length": 120}
    built = Workspace(tmp_path).one("a.jsonl", rows, truncation=truncation, **WEIGHED).build()
    seen: set[float] = set()
    rendered = [m for row in rows for m in row["messages"]]
    for one in built.examples():
        for weight in {w for w in one[WEIGHT_COLUMN] if w}:
            own = [token for token, w in zip(one["input_ids"], one[WEIGHT_COLUMN], strict=True) if w == weight]
            said = text_of({"input_ids": own}).removesuffix("<|im_end|>")
            assert any(m.get("weight") == weight and m["content"].endswith(said) for m in rendered)
            seen.add(weight)
    assert seen == ({8.0} if overlong == "truncate" else set(weights))


# ── Reader and exports ─────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_reader_gives_weights_beside_labels_and_none_to_padding(mixed: Built, rank: int, layout: LayoutName) -> None:
    batches = list(open_reader(mixed, rank, 3, layout=layout))
    assert batches
    for batch in batches:
        assert batch[WEIGHT_COLUMN].dtype == np.float32
        assert batch[WEIGHT_COLUMN].shape == batch["labels"].shape
        assert np.array_equal(batch[WEIGHT_COLUMN] > 0, batch["labels"] >= 0)
    reader = open_reader(mixed, layout=layout, pad_to=200)
    batch = reader.get_batch([0])
    assert batch[WEIGHT_COLUMN].shape == (1, 200)
    assert batch[WEIGHT_COLUMN][0, len(reader[0].input_ids) :].tolist() == [0] * (200 - len(reader[0].input_ids))


def test_reader_of_all_ranks_returns_the_weights_on_disk_or_the_default(mixed: Built) -> None:
    weights = np.concatenate([batch[WEIGHT_COLUMN].ravel() for batch in open_reader(mixed)])
    assert sorted(weights[weights > 0].tolist()) == numbers(mixed.rank_rows())
    reader = open_reader(mixed)
    kept, plain = reader[0], type(reader[1])(reader[1].input_ids, reader[1].labels, reader[1].seq_lengths)
    view = reader.take(2).map(lambda row: plain if np.array_equal(row.input_ids, plain.input_ids) else row)
    batch = view.get_batch([0, 1])
    assert kept.loss_weights is not None
    expected = [*kept.loss_weights.tolist(), *(plain.labels >= 0).astype(float).tolist()]
    assert batch[WEIGHT_COLUMN].ravel().tolist() == expected


@pytest.mark.slow
def test_reader_of_a_recipe_without_weights_gives_none(tmp_path: Path) -> None:
    reader = open_reader(Workspace(tmp_path).one("a.jsonl", [chat(i) for i in range(4)]).build(), 0, 2)
    assert reader[0].loss_weights is None
    assert all(WEIGHT_COLUMN not in batch for batch in reader)


def test_weights_as_tensors_are_float32(mixed: Built) -> None:
    torch = pytest.importorskip("torch")
    batch = next(iter(open_reader(mixed, as_torch=True)))
    assert batch[WEIGHT_COLUMN].dtype == torch.float32
    assert torch.equal(batch[WEIGHT_COLUMN] > 0, batch["labels"] >= 0)


def test_exports_hold_the_weights_of_the_shards(mixed: Built) -> None:
    ranks = numbers(mixed.rank_rows())
    at = {name: mixed.project.store.local(mixed.manifest("exports", name).parts[0].files["manifest.json"].path).parent
          for name in ("own", "tinker")}  # fmt: skip
    own = [row for path in sorted((at["own"] / "data").iterdir()) for row in pq.read_table(path).to_pylist()]
    lines = [json.loads(line) for path in (at["tinker"] / "data").iterdir() for line in path.read_text().splitlines()]
    assert numbers(own) == ranks
    tinker = [weight for line in lines for weight in line["loss_fn_inputs"]["weights"]["data"] if weight]
    assert sorted(tinker) == ranks
    assert all(mixed.manifest("exports", name).facts["conservation"] == 0 for name in at)


# ── Seen by a person ───────────────────────────────────────────────────────────────────────────────
def test_weights_are_shown_in_statistics_inspection_and_traces(mixed: Built) -> None:
    table = mixed.manifest("chats", "tokenized_examples").tables["loss_weights"]
    assert dict(table.rows) == Counter(numbers(mixed.examples("chats")))
    assert "trained tokens by loss weight" in render_text(summary.render_statistics(load_build_view(mixed.project)))
    assert "loss_weights" not in mixed.manifest("pairs", "tokenized_examples").tables
    rows = inspect.inspect_rows(mixed.project, count=3, dataset="chats", row_id=None)
    _, _, third = (render_text(row_view.render_inspected_record(row, colours=False)) for row in rows)
    assert "weight 2" not in third.split("example")[0].split("structured")[0]
    assert "assistant  weight 1" in third
    assert "assistant  weight 2" in third
    assert re.search(r"weights 1 × \d+, 2 × \d+", third)
    shard = mixed.manifest("chats", "packed_shards").parts[0].get_details(ShardDetails)
    row, split = shard_rows(mixed, "chats")[0], shard.split
    at = next(i for i, weight in enumerate(row[WEIGHT_COLUMN]) if weight not in (0, 1))
    token = trace.trace_sequence(mixed.project, f"chats/{split}/0:{at}")
    assert token.read(WEIGHT_COLUMN)[at - token.shown.start] == row[WEIGHT_COLUMN][at]
    assert f" · trained · weight {row[WEIGHT_COLUMN][at]:g}\n" in render_text(row_view.render_sequence_trace(token))


# ── At load ────────────────────────────────────────────────────────────────────────────────────────
HF = {"exports": [{"kind": "hf", "name": "mine"}]}


@pytest.mark.parametrize(
    ("dataset", "changes", "message"),
    [
        ({"format": PAIR, **WEIGHED}, {}, "datasets.rows.loss.weights: a supervised dataset"),
        ({"loss": {"weights": True, "mask_user_turns": False}}, {}, "trains every token, but weights selects"),
        ({"loss": {"prompt_weight": 1, "mask_user_turns": False}}, {}, "trains every token, but prompt_weight selects"),
        ({"loss": {"prompt_weight": -0.5}}, {},
         "loss: prompt_weight: -0.5 is negative; weights are at least 0 unless .*; set loss.allow"),
        ({"loss": {"prompt_weight": 1e-60}}, {},
         "loss: prompt_weight: 1e-60 is not a float32; weights are 0, or .*; choose one"),
        ({"format": CHAT, **WEIGHED}, HF,
         r"exports\.mine: kind hf cannot store the loss weights of datasets\.rows"),
        ({"format": CHAT, "loss": {"prompt_weight": 0.5}}, HF,
         r"exports\.mine: kind hf cannot store the loss weights of .*prompt_weight: 0"),
    ],
)  # fmt: skip
def test_impossible_weights_are_refused_at_load(
    tmp_path: Path, dataset: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    workspace = Workspace(tmp_path).recipe({"rows": {"source": {"train_urls": ["a.jsonl"]}, **dataset}}, **changes)
    with pytest.raises(ConfigError, match=message):
        _ = workspace.project


def test_weights_in_defaults_are_for_the_datasets_that_can_have_them(tmp_path: Path) -> None:
    source = {"train_urls": ["a.jsonl"]}
    datasets = {name: {"source": source, "format": kind} for name, kind in (("c", CHAT), ("p", PAIR), ("t", TEXT))}
    found = Workspace(tmp_path).recipe(datasets, defaults=WEIGHED).project.recipe
    assert [one.loss.weights for one in found.datasets.values()] == [True, False, False]
    assert found.has_loss_weights


# ── Real data ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
@pytest.mark.real_data
def test_real_chats_with_loss_weights_in_their_messages(real_data: Path, tmp_path: Path) -> None:
    """Every message names a `loss_weight`, 0 or 1; a second dataset weighs each answer by its place in the file."""
    demo = real_data / "chat/v1_sft_demo.jsonl"
    own = [json.loads(line)["messages"] for line in demo.read_text("utf-8").split("\n")[:200]]
    scaled = [
        {"messages": [{**m, "loss_weight": m["loss_weight"] * (i % 4) / 4} for m in messages]}
        for i, messages in enumerate(own)
    ]
    workspace = Workspace(tmp_path)
    template = {"chat_template": {"file": str(real_data / "templates" / "llamacpp__Qwen-Qwen3-0.6B.jinja")}}
    group = {"format": CHAT, "template": template, "filters": {"deduplicate": "off", "max_items": 200}}
    workspace.recipe(
        {
            "plain": {"source": {"train_urls": [str(demo)]}, **group},
            "own": {"source": {"train_urls": [str(demo)]}, **group, **WEIGHED},
            "scaled": {"source": {"train_urls": [workspace.write("scaled.jsonl", scaled)]}, **group, **WEIGHED},
        },
        tokenizer=str(real_data / "tokenizers/qwen3"),
        seq_len=512,
    )
    built = workspace.build()
    found = {name: built.examples(name) for name in ("plain", "own", "scaled")}
    names = [name for name in found["plain"][0] if name not in ("example_id", "row_ids")]
    own, plain = ([{n: row[n] for n in names} for row in found[name]] for name in ("own", "plain"))
    assert own == plain
    assert all(row[WEIGHT_COLUMN] == [float(trains) for trains in row["loss_mask"]] for row in found["own"])
    reasons = {row["reason"] for row in built.rows_of("scaled", "tokenized_examples", file="rejects")}
    assert reasons == {"no_loss_tokens"}
    for number, row in zip([n for n in range(200) if n % 4], found["scaled"], strict=True):
        assert set(row[WEIGHT_COLUMN]) == {0, (number % 4) / 4}
        assert row["loss_mask"] == found["own"][number]["loss_mask"]
    everything = [row for rows in found.values() for row in rows]
    total = sum(sum(row.get(WEIGHT_COLUMN, map(float, row["loss_mask"]))) for row in everything)
    assert sum(sum(row[WEIGHT_COLUMN]) for row in built.rank_rows()) == total
