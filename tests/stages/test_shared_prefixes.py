"""`packing.share_prefixes`: examples that begin alike are stored as trees, and are read back as they were."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rowmill
from dagster_rowmill import metadata
from rowmill.cli.error_boundary import ExitStatus
from rowmill.cli.main import main
from rowmill.core.console import render_text
from rowmill.core.errors import ConfigError
from rowmill.inspection.trace import read_tree, trace_row, trace_sequence, view_sequence
from rowmill.packing.pack_plan import keep_examples_whole
from rowmill.packing.prefix_trees import find_cuts, plan_trees, sort_by_tokens
from rowmill.reports import console, report_page, row_view
from rowmill.reports.summary import summarize_recipe
from rowmill.schema.examples import SPAN_KINDS, WEIGHT_COLUMN
from rowmill.shards import native
from rowmill.stages.packed_shards.pack_group import GroupTokens, gather_trees, has_whole_spans
from tests.support.loops import for_each
from tests.support.reader_builds import in_bytes
from tests.support.recipes import PAIR, TEXT, Built, Workspace, chat, open_encoder, open_reader

LEAST = 12
SHARED = {"share_prefixes": True, "min_shared": LEAST}


# ── Examples in memory ─────────────────────────────────────────────────────────────────────────────

EXAMPLE = st.lists(
    st.tuples(st.integers(0, 1), st.booleans(), st.sampled_from([0.25, 1.0, 2.0])), min_size=1, max_size=10
)


Examples: TypeAlias = list[list[tuple[int, bool, float]]]
"""Examples as tokens: an id, whether it trains, and its weight."""


def join_examples(examples: Examples, least: int) -> GroupTokens:
    lengths = [len(example) for example in examples]
    ids, mask, weights = (
        np.array(column) for column in zip(*(token for one in examples for token in one), strict=True)
    )
    return GroupTokens(
        ids=ids.astype(np.int32),
        mask=mask,
        values={WEIGHT_COLUMN: np.where(mask, weights, 0).astype(np.float32)},
        offsets=np.cumsum([0, *lengths]),
        example_ids=pa.array([f"part:{number}#0" for number in range(len(examples))]),
        own=pa.table({}),
        min_shared=least,
    )


def store_trees(examples: Examples, least: int, limit: int = 1000) -> pa.Table:
    """Return the shard of examples that are numbered in their names."""
    tokens = join_examples(examples, least)
    pieces = keep_examples_whole(np.diff(tokens.offsets))
    plan = plan_trees(pieces, tokens.sort_pieces(pieces), limit)
    assert plan.trees is not None
    return gather_trees(tokens, plan, plan.trees, dataset="rows", ignore_token_id=None)


@given(st.lists(EXAMPLE, min_size=1, max_size=30), st.integers(10, 40), st.integers(1, 3))
def test_examples_read_back_from_trees_are_those_that_were_stored(examples: Examples, limit: int, least: int) -> None:
    table = store_trees(examples, least, limit)
    found = native.recover_segments(table.combine_chunks())

    assert found.weights is not None
    cuts = found.offsets[1:-1]
    columns = (np.split(values, cuts) for values in (found.ids, found.trained, found.weights))
    back = zip(found.example_ids.to_pylist(), *([part.tolist() for part in column] for column in columns), strict=True)
    stored: list[tuple[str, list[int], list[bool], list[float]]] = []
    for number, example in enumerate(examples):
        # The first token of an example follows no other one.
        mask = [False, *(trained for _, trained, _ in example[1:])]
        weights = [weight if trained else 0 for trained, (_, _, weight) in zip(mask, example, strict=True)]
        stored.append((f"part:{number}#0", [token for token, _, _ in example], mask, weights))
    assert sorted(back) == sorted(stored)
    assert has_whole_spans(table)
    sums = table.column("loss_weights").combine_chunks().flatten().to_numpy()
    assert sums.sum() == pytest.approx(sum(sum(weights) for *_, weights in stored))


@given(st.lists(EXAMPLE, min_size=1, max_size=8))
def test_stored_weights_or_labels_that_are_not_the_sums_are_found(examples: Examples) -> None:
    table = store_trees(examples, 1)

    def changed(name: str) -> pa.Table:
        column = table.column(name).combine_chunks()
        values = column.flatten().to_numpy().copy()
        values[-1] += 1
        place = table.schema.get_field_index(name)
        other = pa.ListArray.from_arrays(column.offsets, pa.array(values, column.type.value_type))
        return table.set_column(place, table.schema.field(place), other)

    assert not any(has_whole_spans(changed(name)) for name in ("loss_weights", "labels", "position_ids", "seq_lengths"))


# ── Where conversations may be cut ─────────────────────────────────────────────────────────────────


def last_common_cut(one: list[tuple[int, bool]], other: list[tuple[int, bool]], least: int) -> int:
    """Return how many tokens two examples share up to the last cut that both have; nothing below the least."""
    last = max((place for place, (_, is_cut) in enumerate(commonprefix([one, other]), 1) if is_cut), default=0)
    return last if last >= least else 0


SPAN = st.tuples(st.sampled_from(["template", "user", "assistant", "reasoning"]), st.integers(-1, 2), st.integers(1, 3))


@given(st.lists(st.lists(SPAN, min_size=1, max_size=6), min_size=1, max_size=5))
def test_a_cut_is_where_no_message_has_text_on_both_sides(rows: list[list[tuple[str, int, int]]]) -> None:
    table = pa.table(
        {
            "tokens": [sum(length for *_, length in row) for row in rows],
            "span_starts": [np.cumsum([0, *(length for *_, length in row)])[:-1].tolist() for row in rows],
            "span_messages": [[-1 if kind == "template" else message for kind, message, _ in row] for row in rows],
            "span_kinds": [[SPAN_KINDS.index(kind) for kind, *_ in row] for row in rows],
        }
    )

    cuts = find_cuts(table)

    expected: list[bool] = []
    for row in rows:
        owners = [None if kind == "template" else message for kind, message, length in row for _ in range(length)]
        for place in range(1, len(owners) + 1):
            before = next((owner for owner in owners[:place][::-1] if owner is not None), "none before")
            after = next((owner for owner in owners[place:] if owner is not None), "none after")
            expected.append(before != after)
    assert cuts.tolist() == expected


@given(st.lists(st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=1, max_size=9), min_size=1, max_size=20),
       st.integers(1, 4))  # fmt: skip
def test_sorted_neighbors_share_up_to_the_last_cut_that_both_have(
    pieces: list[list[tuple[int, bool]]], least: int
) -> None:
    # A piece may always be cut at its end.
    pieces = [[*piece[:-1], (piece[-1][0], True)] for piece in pieces]
    ids, cuts = (np.array([token[part] for piece in pieces for token in piece]) for part in (0, 1))
    offsets = np.cumsum([0, *(len(piece) for piece in pieces)])

    found = sort_by_tokens(ids.astype(np.int32), cuts.astype(bool), offsets, min_shared=least)

    assert sorted(found.order.tolist()) == list(range(len(pieces)))
    for (first, second), shared in zip(pairwise(found.order), found.shared.tolist(), strict=True):
        assert shared == last_common_cut(pieces[first], pieces[second], least)


# ── Whole builds ───────────────────────────────────────────────────────────────────────────────────


BRANCHING = {"template": {"turns": "message"}, "filters": {"deduplicate": "off"}}


def branching_chats() -> list[dict[str, Any]]:
    """Return chats of several turns, some of which answer one prompt in several ways, and one of them twice."""
    rows = [chat(i, turns=1 + i % 4) for i in range(24)]
    for i in range(8):
        messages = chat(100, turns=1)["messages"]
        rows.append({"messages": [*messages[:-1], {"role": "assistant", "content": f"Answer {i} of several."}]})
    return [*rows, rows[-1]]


def build(folder: Path, *, layout: str = "copied", workers: int = 1, **packing: Any) -> Built:
    workspace = Workspace(folder)
    dataset = workspace.files({f"{i}.jsonl": branching_chats()[i::3] for i in range(3)}, packing=packing, **BRANCHING)
    dataset |= {"splits": {"validation": 0.2}}
    return workspace.recipe(
        {"rows": dataset}, mixture={"batch_size": 6}, partitions={"world_size": 2, "layout": layout},
        execution={"workers": workers},
    ).build()  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("shared"), **SHARED)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("plain"))


def inspect(built: Built, *options: str) -> int:
    config, root = str(built.project.base / "configs/mini.yaml"), built.project.store.root
    return main(["inspect", config, "--root", root, "--sequence", "rows/train/0", *options])


def read_examples(table: pa.Table) -> Counter[tuple[Any, ...]]:
    """Return the examples of some rows of shards: id, tokens and labels."""
    found = native.recover_segments(table.combine_chunks())
    cuts = found.offsets[1:-1]
    parts = zip(np.split(found.ids, cuts), np.split(found.trained, cuts), strict=True)
    values = [(tuple(ids.tolist()), tuple(mask.tolist())) for ids, mask in parts]
    return Counter((name, *value) for name, value in zip(found.example_ids.to_pylist(), values, strict=True) if name)


def test_every_example_is_read_back_and_each_token_is_stored_once_or_counted_as_shared(shared: Built) -> None:
    store = shared.project.store
    examples = Counter(
        (row["example_id"], tuple(row["input_ids"]), tuple(row["loss_mask"])) for row in shared.examples()
    )
    trained = {row["example_id"] for row in shared.examples() if row["split"] == "train"}
    train = Counter({example: count for example, count in examples.items() if example[0] in trained})

    shards = [store.table(file) for file in shared.manifest("rows", "packed_shards").files("shard")]
    parts = shared.manifest("gpu_partitions").parts
    ranks = [store.table(file) for part in parts for name, file in part.files.items() if name.startswith("data/")]

    assert sum(map(read_examples, shards), Counter[Any]()) == examples
    assert sum(map(read_examples, ranks), Counter[Any]()) == train

    facts, examples = shared.facts("rows", "packed_shards"), shared.examples()
    total = sum(row["tokens"] for row in examples)
    assert facts["tokens"] + facts["tokens_shared"] == total
    assert (facts["conservation"], facts["shard_digests"], facts["tokens_left_out"]) == (0, 0, 0)
    assert shared.manifest("rows", "packed_shards").token_ledger == (("all", "shared", facts["tokens_shared"]),)
    assert facts["tokens"] == sum(count_trie([row for row in examples if row["split"] == split]) for split in SPLITS)
    assert facts["tokens_shared"] > total / 3


def test_summaries_name_the_tokens_and_bytes_that_sharing_saves(shared: Built, plain: Built) -> None:
    output = shared.manifest("rows", "packed_shards")
    tokens, saved = output.facts["tokens"], output.facts["tokens_shared"]
    named = f"{saved:,} tokens, {12 * saved / 1000:.1f} kB"

    assert f" full · sharing saves {named}" in console.summarize_output(output)
    summary = re.sub(r"\s+", " ", summarize_recipe(shared.project))
    assert (
        f"shared {named} before compression, are saved where examples begin alike: {tokens:,} are stored, " in summary
    )
    assert f"{(tokens + saved) / tokens:.1f} × fewer" in summary
    page = metadata.write_summary(output, [], [])
    assert f"**sharing saves {named}**" in page
    assert "sharing" not in console.summarize_output(plain.manifest("rows", "packed_shards"))
    assert " shared " not in summarize_recipe(plain.project)


SPLITS = ("train", "validation")


def count_trie(examples: Sequence[dict[str, Any]]) -> int:
    """Return the tokens of examples of which those before the last common cut of two neighbors count once."""
    coded = sorted(
        [*zip(row["input_ids"], find_cuts(pa.Table.from_pylist([row])).tolist(), strict=True)] for row in examples
    )
    stored = len(coded[0]) if coded else 0
    for before, one in pairwise(coded):
        stored += len(one) - last_common_cut(before, one, LEAST)
    return stored


def test_build_without_trees_needs_more_sequences_and_has_no_mask_of_them(shared: Built, plain: Built) -> None:
    assert shared.facts("rows", "packed_shards")["sequences"] < plain.facts("rows", "packed_shards")["sequences"]
    assert "segment_parents" not in plain.rows_of("rows", "packed_shards", file="shard")[0]
    assert "tokens_shared" not in plain.facts("rows", "packed_shards")

    with pytest.raises(ConfigError, match="the batch has no subtree_ends; a recipe with"):
        rowmill.tree_mask(next(iter(open_reader(plain, 0, 2))))
    with pytest.raises(ConfigError, match="data_files of a build with"):
        _ = open_reader(shared, 0, 2).data_files


def list_batches(built: Built, layout: Any) -> list[dict[str, Any]]:
    return [batch for rank in range(2) for batch in in_bytes(open_reader(built, rank, 2, batch_size=3, layout=layout))]


@pytest.mark.slow
def test_batches_are_the_same_for_both_rank_layouts_and_any_number_of_workers(shared: Built, tmp_path: Path) -> None:
    others = [build(tmp_path / "indexed", layout="index", **SHARED), build(tmp_path / "workers", workers=2, **SHARED)]

    for layout in ("flat", "padded"):
        assert list_batches(others[0], layout) == list_batches(others[1], layout) == list_batches(shared, layout)
    digests = [[file.digest for file in one.manifest("rows", "packed_shards").files("shard")] for one in
               (shared, *others)]  # fmt: skip
    assert digests[0] == digests[1] == digests[2]


def test_batches_name_predecessors_and_what_each_query_attends_to(shared: Built) -> None:
    flat, padded = (open_reader(shared, 0, 2, layout=layout).get_batch([0, 1]) for layout in ("flat", "padded"))

    for batch in (flat, padded):
        allowed, before = rowmill.tree_mask(batch), batch["predecessors"]
        real = batch.get("attention_mask", np.ones_like(before)) == 1
        own = np.arange(before.shape[1])
        # A query attends to what its predecessor attends to, and to itself.
        for row, mask in enumerate(allowed):
            expected = mask[before[row]] | np.eye(len(own), dtype=bool)
            assert (mask == np.where((before[row] == own)[:, None], np.eye(len(own), dtype=bool), expected)).all()
        positions = np.where(real, batch["position_ids"], 0)
        assert (np.where(real, allowed.sum(axis=2) - 1, 0) == positions).all()
        assert (batch["labels"][before == own] == -100).all()
        assert ((batch["labels"] != -100) == (batch["loss_weights"] > 0)).all()
    assert (flat["segment_parents"] == padded["segment_parents"]).all()
    assert (flat["segment_parents"] >= 0).any()


def test_traces_name_every_row_of_a_shared_token_and_the_segment_that_each_continues(shared: Built) -> None:
    name = next(
        row["example_id"]
        for row in shared.examples()
        if row["split"] == "train" and "Answer 0 of" in decode(shared, row["input_ids"])
    )
    place = trace_row(shared.project, name)[0].places[0]

    traced = trace_sequence(shared.project, f"rows/train/{place.sequence}:{place.offset}")

    sources = {(origin.url, origin.line) for origin, at in zip(traced.origins, traced.places, strict=True)
               if at.offset == place.offset}  # fmt: skip
    shown = render_text(row_view.render_sequence_trace(traced))
    assert len(sources) > 4
    assert all(f"{url}:{line}" in shown for url, line in sources)
    # All examples that begin with the same tokens as this one, and no others.
    ids = next(row["input_ids"] for row in shared.examples() if row["example_id"] == name)
    assert traced.tree is not None
    segment = traced.tree.segments[place.segment]
    beginning = ids[: segment.position + segment.length]
    having = {row["example_id"] for row in shared.examples() if row["input_ids"][: len(beginning)] == beginning}
    held = [traced.tree.examples[number].example_id for number in segment.examples]
    assert len(held) == len(set(held))
    assert f"by {len(held)} examples, of which 0 train it" in shown
    splits = {row["example_id"]: row["split"] for row in shared.examples()}
    assert {one for one in having if splits[one] == "train"} == set(held)


def test_more_sources_than_are_shown_whole_are_all_named(tmp_path: Path) -> None:
    begin = "The same beginning of a document. " * 3
    rows = [{"text": f"{begin}It ends with {i}."} for i in range(row_view.MAX_SHOWN_OCCURRENCES + 7)]
    built = Workspace(tmp_path).one("rows.jsonl", rows, TEXT, packing=SHARED).build()

    shown = render_text(row_view.render_sequence_trace(trace_sequence(built.project, "rows/train/0:1")))

    assert sorted(re.findall(r"source +data/rows\.jsonl:(\d+)", shown), key=int) == [
        str(1 + i) for i in range(len(rows))
    ]
    assert shown.count(begin) == row_view.MAX_SHOWN_OCCURRENCES


@given(st.lists(EXAMPLE, min_size=1, max_size=12), st.integers(1, 3))
def test_tree_of_a_sequence_says_what_each_example_holds_and_trains(examples: Examples, least: int) -> None:
    table = store_trees(examples, least)
    for at in range(table.num_rows):
        row = table.slice(at, 1).to_pylist()[0]
        tree = read_tree(row)
        assert tree is not None
        for segment in tree.segments:
            own = slice(segment.offset, segment.offset + segment.length)
            assert row["position_ids"][own] == [*range(segment.position, segment.position + segment.length)]
            assert segment.trained_tokens == sum(label >= 0 for label in row["labels"][own])
        assert [segment.parent for segment in tree.segments] == row["segment_parents"]
        for number, example in enumerate(tree.examples):
            own = [tree.segments[one] for one in example.segments]
            ids = [token for one in own for token in row["input_ids"][one.offset : one.offset + one.length]]
            stored = examples[int(example.example_id.split(":")[1].split("#")[0])]
            assert ids == [token for token, _, _ in stored]
            assert example.tokens == len(ids)
            weights = [example.find_weight(position) for position in range(len(ids))]
            assert weights == [None, *(weight if trained else None for _, trained, weight in stored[1:])]
            assert [number in one.examples for one in tree.segments] == [
                one in example.segments for one in range(len(tree.segments))
            ]


def test_inspected_sequence_shows_its_tree_and_the_text_of_each_segment_once(
    shared: Built, capsys: pytest.CaptureFixture[str]
) -> None:
    traced = trace_sequence(shared.project, "rows/train/0")
    tree = traced.tree
    assert tree is not None

    assert inspect(shared) == 0

    shown = capsys.readouterr().out
    of_all = sum(example.tokens for example in tree.examples)
    assert f"{len(tree.examples)} examples · {of_all - traced.tokens:,} tokens of {of_all:,} shared" in shown
    branches, _, texts = shown.partition("── segment 0")
    for number, segment in enumerate(tree.segments):
        parent = "" if segment.parent < 0 else f"{segment.parent} +"
        numbers = [(segment.offset, segment.length), (segment.position, segment.length)]
        ranges = [str(first) if count == 1 else f"{first} to {first + count - 1}" for first, count in numbers]
        line = rf"^ +{number} +{parent}{' +'.join(ranges)} +{segment.length} +{segment.trained_tokens} "
        assert re.search(line, branches, re.MULTILINE), line
    for example in tree.examples:
        trained = ", ".join(f"{first} to {first + count - 1}" for first, count, _ in example.targets)
        assert re.search(rf" {re.escape(trained)} +{re.escape(example.example_id)} +data/\d\.jsonl:\d+", branches)
    ids = shared.rows_of("rows", "packed_shards", file="shard")[0]["input_ids"]
    written = re.sub(r"\n*── segment .*\n", "", f"── segment 0{texts}").rstrip("\n")
    assert re.sub("[⟦⟧\n]", "", written) == decode(shared, ids).replace("\n", "")
    assert texts.count("── segment ") == len(tree.segments) - 1


@for_each("option", [["--row", "x:1"], ["--dataset", "rows"]])
def test_sequence_is_inspected_by_itself(shared: Built, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(shared, *option) == ExitStatus.INVALID
    expected = (
        f"--sequence rows/train/0 with {option[0]}: a sequence names its dataset, and holds several rows; expected "
    )
    assert expected in capsys.readouterr().err


def decode(built: Built, ids: Sequence[int]) -> str:
    return open_encoder(built).decode(ids)


def test_shown_sequence_has_each_stored_token_once(shared: Built) -> None:
    shown = view_sequence(shared.project, "rows", open_encoder(shared), max_tokens=10_000)

    assert shown is not None
    assert (
        len(shown.read("input_ids"))
        == len(shown.texts)
        == len(shown.kinds)
        == sum(place.length for place in shown.segments)
    )
    assert shown.tree is not None
    about = report_page.describe_sequence(shown)
    assert f" · shared by {len(shown.tree.examples)} examples" in about["caption"]
    for (head, *_), segment in zip(about["segments"], shown.tree.segments, strict=True):
        assert (f"continues segment {segment.parent} " in head) == (segment.parent >= 0)
        assert (f"shared by {len(segment.examples)} examples" in head) == (len(segment.examples) > 1)
    assert [place.segment for place in shown.segments] == list(range(len(shown.tree.segments)))


@pytest.mark.parametrize(("kind", "rows"), [
    (TEXT, [{"text": f"{'The same beginning of a document. ' * 3}It ends with {i}."} for i in range(12)]),
    (PAIR, [{"prompt": f"{'One prompt, ' * 8}", "answer": f"answer {i} of many"} for i in range(12)]),
])  # fmt: skip
def test_texts_and_pairs_share_tokens_anywhere(tmp_path: Path, kind: dict[str, Any], rows: list[Any]) -> None:
    built = Workspace(tmp_path).one("rows.jsonl", rows, kind, packing=SHARED).build()

    facts, examples = built.facts("rows", "packed_shards"), built.examples()

    assert facts["conservation"] == 0
    assert facts["tokens"] + facts["tokens_shared"] == sum(row["tokens"] for row in examples)
    assert facts["tokens_shared"] > 10 * LEAST
    targets = [sum(row["loss_mask"][1:]) for row in examples]
    weights = sum(sum(row["loss_weights"]) for row in built.rows_of("rows", "packed_shards", file="shard"))
    assert weights == sum(targets)


# ── What cannot be shared ──────────────────────────────────────────────────────────────────────────


def test_dataset_that_must_not_share_is_mixed_with_one_that_does(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    rows = workspace.dataset("rows.jsonl", branching_chats(), packing=SHARED, **BRANCHING)
    apart = {"packing": {"share_prefixes": True, "min_shared": 257}}
    built = workspace.recipe({"rows": rows, "others": rows | apart}).build()

    facts = {name: built.manifest(name, "packed_shards").facts for name in ("rows", "others")}
    assert facts["rows"]["tokens_shared"] > 0
    assert facts["others"]["tokens_shared"] == 0
    assert facts["others"]["tokens"] == sum(row["tokens"] for row in built.examples("others"))
    batches = list_batches(built, "flat")
    assert {tuple(batch) for batch in batches} == {tuple(batches[0])}
    roots = [row for row in built.rows_of("others", "packed_shards", file="shard") if row["segment_parents"]]
    assert roots
    assert all(parent == -1 for row in roots for parent in row["segment_parents"])
