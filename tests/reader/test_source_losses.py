"""Loss by source: sums over a reader's batches are those of the examples, however these are packed and laid out."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill import loss_by_source
from rowmill.core.errors import ConfigError, IntegrityError
from rowmill.reader import Batch, PackedSequence, Reader, SourceLosses, SourceNames
from rowmill.reader.layouts import LayoutName, make_layout
from rowmill.reader.source_losses import SourceLoss
from rowmill.schema.examples import WEIGHT_COLUMN
from tests.support.recipes import CHAT, TEXT, Built, Workspace, chat, document

TOPICS = ("math", "code", "history")


def build(folder: Path, *, layout: str = "copied", stores: bool = True, **packing: Any) -> Built:
    """Build chats of three topics with weighted prompts, beside texts without a topic, dealt to two ranks."""
    workspace = Workspace(folder)
    chats = [{**chat(i, turns=1 + i % 3, words=4 + i % 9), "topic": TOPICS[i % 3]} for i in range(50)]
    texts = [document(i, words=30 + i) for i in range(17)]
    by_topic, weighted = {**CHAT, "domain_key": "topic"}, {"prompt_weight": 0.25}
    storing = {**packing, "store_domains": True} if stores else packing
    datasets = {
        "chats": workspace.dataset("chats.jsonl", chats, by_topic, loss=weighted, packing=storing),
        "texts": workspace.dataset("texts.jsonl", texts, TEXT, packing=packing),
    }
    partitions = {"world_size": 2, "layout": layout, "remainder": "pad"}
    return workspace.recipe(datasets, seq_len=128, mixture={"batch_size": 6}, partitions=partitions).build()


def open_reader(built: Built, rank: int = 0, world_size: int = 1, **options: Any) -> Reader:
    every: dict[str, Any] = {"as_torch": False, "segment_sources": True, "batch_size": 3} | options
    return Reader(built.project.store.root, built.project.recipe.name, rank=rank, world_size=world_size, **every)


def make_losses(labels: Any) -> Any:
    """Return a loss for each label that depends on the label alone, and NaN where there is none."""
    return np.where(labels < 0, np.nan, labels % 11 + 0.5)


def add_up(reader: Reader) -> SourceLosses:
    losses = [loss_by_source(make_losses(batch["labels"]), batch) for batch in reader]
    total = losses[0]
    for more in losses[1:]:
        total += more
    return total


def expect(built: Built) -> dict[str, SourceLoss]:
    """Compute the losses of datasets and domains from the examples, one token after the other."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, 0])
    for dataset in ("chats", "texts"):
        for example in built.examples(dataset):
            weights = example.get(WEIGHT_COLUMN, example["loss_mask"])
            for i, (token, weight) in enumerate(zip(example["input_ids"], weights, strict=True)):
                for name in (dataset, example["domain"]) if i and example["loss_mask"][i] else ():
                    added = (weight * (token % 11 + 0.5), weight, 1)
                    sums[name] = [a + b for a, b in zip(sums[name], added, strict=True)]
    return {name: SourceLoss(loss / size, int(tokens)) for name, (loss, size, tokens) in sums.items() if name}


PACKINGS: list[dict[str, Any]] = [
    {"pack_strategy": "best_fit"},
    {"pack_strategy": "best_fit", "segment_multiple_of": 8},
    {"pack": False},
]


@pytest.mark.parametrize("layout", ["copied", "index"])
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_loss_of_each_source_is_that_of_its_examples(tmp_path: Path, layout: str, packing: dict[str, Any]) -> None:
    built = build(tmp_path, layout=layout, **packing)
    expected = expect(built)
    assert set(expected) == {"chats", "texts", *TOPICS}

    for batch_layout, width in (("flat", None), ("flat", 900), ("padded", None), ("padded", 200)):
        found = add_up(open_reader(built, layout=batch_layout, pad_to=width))
        sources = found.datasets | found.domains
        assert {name: loss.tokens for name, loss in sources.items()} == {n: e.tokens for n, e in expected.items()}
        for name, loss in sources.items():
            assert loss.loss == pytest.approx(expected[name].loss, rel=1e-9)
    # Ranks add up to the whole.
    ranks = [add_up(open_reader(built, rank, 2)).sums for rank in (0, 1)]
    np.testing.assert_allclose(ranks[0] + ranks[1], add_up(open_reader(built)).sums, rtol=1e-12)


def test_domains_of_open_attention_are_those_of_segments_not_of_spans(tmp_path: Path) -> None:
    options = {"block_cross_document_attention": False, "pack_strategy": "best_fit"}
    built = build(tmp_path, **options)
    batch = next(iter(open_reader(built)))
    assert len(batch["segment_lengths"]) > len(batch["cu_seq_lens_q"]) - 1

    found = add_up(open_reader(built))

    expected = expect(built)
    assert {name: loss.tokens for name, loss in found.domains.items()} == {
        name: expected[name].tokens for name in sorted(TOPICS)
    }


def test_batches_are_as_without_sources_which_losses_need(tmp_path: Path) -> None:
    built = build(tmp_path)
    plain, named = open_reader(built, segment_sources=False), open_reader(built)
    added = {"segment_lengths", "segment_dataset", "segment_domain", "source_names"}
    for one, other in zip(plain, named, strict=True):
        assert set(other) - set(one) == added
        for name, value in one.items():
            assert np.array_equal(value, other[name])
    assert "segment_dataset" in plain_view(named, "chats")
    assert plain_view(named, "texts")["segment_dataset"].tolist().count(1) > 0
    plain, named = next(iter(open_reader(built, segment_sources=False))), next(iter(open_reader(built)))
    with pytest.raises(ConfigError, match=r"segment_dataset and segment_domain are needed; open the Reader with"):
        loss_by_source(np.zeros(plain["labels"].shape), plain)
    width = named["labels"].shape[1]
    with pytest.raises(ConfigError, match=rf"{width - 2} losses for labels of 1 × {width}; .* do not reduce the loss"):
        loss_by_source(np.zeros(width - 2), named)
    with pytest.raises(ConfigError, match=r"segment_sources with layout='preference'; .*choose one of these"):
        open_reader(built, layout="preference")


def plain_view(reader: Reader, name: str) -> Batch:
    return reader.train_sets()[name].get_batch([0])


def test_stored_domains_change_no_other_byte_and_builds_without_have_none(tmp_path: Path) -> None:
    without, with_domains = build(tmp_path / "a", stores=False), build(tmp_path / "b")
    one = without.rows_of("chats", "packed_shards", file="shard")
    other = with_domains.rows_of("chats", "packed_shards", file="shard")
    assert [{name: value for name, value in row.items() if name != "domains"} for row in other] == one
    topics = {row["example_id"]: row["domain"] for row in with_domains.examples("chats")}
    assert all([topics[name] for name in row["example_ids"]] == row["domains"] for row in other)
    reader = open_reader(without)
    assert reader.source_names == SourceNames(("chats", "texts"), ())
    assert set(np.concatenate([batch["segment_domain"] for batch in reader])) == {-1}
    assert add_up(open_reader(without)).domains == {}
    reader = open_reader(with_domains)
    first = next(iter(reader))
    again = open_reader(with_domains)
    again.load_state_dict(reader.state_dict())
    assert not np.array_equal(next(iter(again))["input_ids"], first["input_ids"])
    with pytest.raises(IntegrityError, match="the state's"):
        open_reader(without).load_state_dict(reader.state_dict())


def test_labels_of_shared_prefixes_are_counted_once_and_not_shifted(tmp_path: Path) -> None:
    workspace, chats = Workspace(tmp_path), [chat(i, turns=4, words=12) for i in range(20)]
    groups = {"template": {"turns": "message"}, "packing": {"share_prefixes": True, "min_shared": 1}}
    built = workspace.one("chats.jsonl", chats, **groups, seq_len=512, partitions={"world_size": 1}).build()
    for layout in ("flat", "padded"):
        reader = open_reader(built, layout=layout)
        found = add_up(reader)
        reader.rewind()
        assert found.datasets["rows"].tokens == sum(int((batch["labels"] >= 0).sum()) for batch in reader)
    batch = plain_view(reader, "rows")
    with pytest.raises(ConfigError, match=r"share prefixes, .*; a loss for each label is needed; compute it"):
        loss_by_source(make_losses(batch["labels"]), batch, shifted=True)


# ── The function by itself ─────────────────────────────────────────────────────────────────────────

NAMES = SourceNames(("a", "b"), ("x", "y", "z"))


@st.composite
def sequences(draw: st.DrawFn) -> list[PackedSequence]:
    """Draw sequences of segments with sources, some of none."""
    made: list[PackedSequence] = []
    for _ in range(draw(st.integers(1, 4))):
        lengths = np.array(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
        count, tokens = len(lengths), int(lengths.sum())
        labels = np.array(draw(st.lists(st.sampled_from([-100, 3, 8, 20]), min_size=tokens, max_size=tokens)), np.int32)
        labels[0] = -100
        weights = draw(st.lists(st.sampled_from([0.5, 1, -2]), min_size=tokens, max_size=tokens))
        made.append(
            PackedSequence(
                np.zeros(tokens, np.int32),
                labels,
                lengths.astype(np.int32),
                np.where(labels >= 0, weights, 0).astype(np.float32),
                segment_lengths=lengths,
                segment_datasets=np.full(count, draw(st.integers(-1, 1))),
                segment_domains=np.array(draw(st.lists(st.integers(-1, 2), min_size=count, max_size=count))),
            )
        )
    return made


@given(sequences(), st.sampled_from(["flat", "padded"]), st.sampled_from([None, 90]))
def test_sums_are_those_of_a_loop_over_tokens(
    rows: list[PackedSequence], layout: LayoutName, width: int | None
) -> None:
    batch = make_layout(layout, pad_id=0, pad_to=width, as_torch=False, names=NAMES).make_batch(rows)
    expected = np.zeros((3, 5))
    for row in rows:
        assert row.segment_lengths is not None
        assert row.segment_datasets is not None
        assert row.segment_domains is not None
        assert row.loss_weights is not None
        datasets, domains = (np.repeat(of, row.segment_lengths) for of in (row.segment_datasets, row.segment_domains))
        for label, weight, dataset, domain in zip(row.labels, row.loss_weights, datasets, domains, strict=True):
            for column in ([dataset] if dataset >= 0 else []) + ([2 + domain] if domain >= 0 else []):
                if label >= 0:
                    expected[:, column] += (weight * (label % 11 + 0.5), abs(weight), 1)
    losses = make_losses(batch["labels"])

    aligned = loss_by_source(losses, batch)
    shorter = loss_by_source(losses[:, 1:], batch)
    ahead = loss_by_source(np.append(losses[:, 1:], np.full((len(losses), 1), 7.0), axis=1), batch, shifted=True)

    for found in (aligned, shorter, ahead, loss_by_source(losses.reshape(-1), batch)):
        np.testing.assert_allclose(found.sums, expected)


def test_mean_is_weighted_and_none_without_a_target() -> None:
    row = PackedSequence(
        np.zeros(4, np.int32), np.array([-100, 1, 1, 1], np.int32), np.array([4], np.int32),
        np.array([0, 1, -0.5, 0.5], np.float32), segment_lengths=np.array([4]), segment_datasets=np.array([1]),
        segment_domains=np.array([-1]),
    )  # fmt: skip
    batch = make_layout("flat", pad_id=0, pad_to=None, as_torch=False, names=NAMES).make_batch([row])
    found = loss_by_source(np.array([9.0, 2, 4, 8]), batch)

    assert found.datasets["b"] == SourceLoss((2 - 2 + 4) / 2, 3)
    assert found.datasets["a"].tokens == 0
    assert np.isnan(found.datasets["a"].loss)
    assert np.isnan(found.domains["x"].loss)
