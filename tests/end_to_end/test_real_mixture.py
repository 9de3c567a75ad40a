"""Three real datasets mixed by staged weights, and dealt to ranks that change: what is on disk is what was planned."""

from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rowmill.build import runner
from rowmill.build.steps import Project, open_project
from rowmill.reader import Reader
from rowmill.schema.shard_counts import select_shards
from tests.support.recipes import current

pytestmark = [pytest.mark.slow, pytest.mark.real_data]

BLOCK, BATCH, EPOCHS = 32, 24, 2
STAGES: list[tuple[int, dict[str, float]]] = [
    (0, {"chats": 0.5, "maths": 0.3, "texts": 0.2}),
    (20, {"chats": 0.1, "maths": 0.1, "texts": 0.8}),
]
STEPS = 40
MIXTURES: dict[str, dict[str, Any]] = {
    "staged": {
        "batch_size": BATCH, "steps": STEPS, "train_weights": [list(stage) for stage in STAGES],
        "mixture_block_size": BLOCK,
    },
    "epochs": {"batch_size": BATCH, "epochs": EPOCHS},
}  # fmt: skip


@pytest.fixture(scope="module")
def built(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Project]:
    """Build both mixtures of the same three datasets."""
    configs = tmp_path_factory.mktemp("mixed") / "configs"
    configs.mkdir()
    template = {"chat_template": {"file": str(real_data / "templates" / "llamacpp__Qwen-Qwen3-0.6B.jinja")}}
    datasets = {
        "chats": {
            "source": {"train_urls": [str(real_data / "chat/v1_sft_demo.jsonl")], "tags": ["dialogue"]},
            "format": {"kind": "chat"},
            "template": template,
            "splits": {"validation": 0.1},
        },
        "maths": {
            "source": {"train_urls": [str(real_data / "math/gsm8k_test.jsonl")]},
            "format": {"kind": "supervised", "input_field": "question", "output_field": "answer"},
        },
        "texts": {"source": {"train_urls": [str(real_data / "text/c4_demo.jsonl")]}, "format": {"kind": "text"}},
    }
    recipe = {
        "tokenizer": str(real_data / "tokenizers/qwen3"),
        "seq_len": 512,
        "datasets": datasets,
        "partitions": {"world_size": 8},
        "gates": {"rejects": {"at_most": 1}, "zero_loss_rows": {"at_most": 1}},
        "execution": {"workers": 1},
    }
    projects: dict[str, Project] = {}
    for name, mixture in MIXTURES.items():
        path = configs / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe | {"mixture": mixture}), encoding="utf-8")
        projects[name] = open_project(path)
        runner.build(projects[name])
    return projects


def names_on_ranks(project: Project) -> list[str]:
    """Return the dataset at each place of the order, read from the shards of all ranks."""
    ranks: list[list[str]] = []
    for part in current(project, "gpu_partitions").parts:
        files = [file for name, file in sorted(part.files.items()) if name.startswith("data/")]
        columns = [project.store.table(file, ["dataset"]).column(0).to_pylist() for file in files]
        ranks.append([name for column in columns for name in column])
    return [name for together in zip(*ranks, strict=True) for name in together]


def test_observed_shares_of_every_block_are_the_apportionment(built: dict[str, Project]) -> None:
    project = built["staged"]
    shown = names_on_ranks(project)
    datasets = list(project.recipe.datasets)
    start = 0
    # Steps are dealt inside themselves, so counts are compared where steps and blocks both end.
    for end, weights in ((20 * BATCH, STAGES[0][1]), (STEPS * BATCH, STAGES[1][1])):
        for upto in range(start + 96, end + 1, 96):
            counts = Counter(shown[start:upto])
            for name in datasets:
                exact = Fraction(str(weights[name])) * (upto - start)
                assert abs(counts[name] - exact) < 1
        assert Counter(shown[start:end]) == {name: Fraction(str(weights[name])) * (end - start) for name in datasets}
        start = end
    assert len(shown) == STEPS * BATCH
    assert current(project, "training_splits").facts["mixture_share"] < 1


def order_read_by(project: Project, world_size: int) -> list[bytes]:
    """Return the token bytes at each place, as ranks in lockstep are shown them."""
    readers = [_reader(project, rank, world_size) for rank in range(world_size)]
    batches = [[batch["input_ids"].tobytes() for batch in reader] for reader in readers]
    return [row for together in zip(*batches, strict=True) for row in together]


def _reader(project: Project, rank: int, world_size: int) -> Reader:
    root, name = project.store.root, project.recipe.name
    return Reader(root, name, rank=rank, world_size=world_size, batch_size=1, as_torch=False)


@pytest.fixture(scope="module")
def order(built: dict[str, Project]) -> list[bytes]:
    return order_read_by(built["epochs"], 1)


def packed(project: Project) -> Counter[bytes]:
    """Return the token bytes of every packed train sequence."""
    found: Counter[bytes] = Counter()
    for name in project.recipe.datasets:
        for part in select_shards(current(project, name, "packed_shards").parts, "train"):
            ids = project.store.table(part.files["shard"], ["input_ids"]).column(0).to_pylist()
            found.update(np.array(one, np.int64).tobytes() for one in ids)
    return found


def test_every_sequence_is_shown_once_per_epoch_in_one_order_for_any_number_of_ranks(
    built: dict[str, Project], order: list[bytes]
) -> None:
    sequences = packed(built["epochs"])
    whole = sequences.total() + -sequences.total() % BATCH

    assert len(order) == EPOCHS * whole
    for epoch in range(EPOCHS):
        shown = Counter(order[epoch * whole : (epoch + 1) * whole])
        fillers = shown - sequences
        assert shown - fillers == sequences
        assert fillers.total() == whole - sequences.total()
        assert all(len(one) == 2 * 8 for one in fillers)
    assert order[:whole] != order[whole:]
    for world_size in (2, 6, 8):
        assert order_read_by(built["epochs"], world_size) == order


def test_eight_ranks_become_six_in_the_middle_of_an_epoch(built: dict[str, Project], order: list[bytes]) -> None:
    steps = len(order) // BATCH
    before = [_reader(built["epochs"], rank, 8) for rank in range(8)]
    stop = (steps // 3) * BATCH // 8
    first = [[batch["input_ids"].tobytes() for batch in islice(reader, stop)] for reader in before]
    states = [reader.state_dict() for reader in before]
    after = [_reader(built["epochs"], rank, 6) for rank in range(6)]
    for reader in after:
        reader.load_state_dict(states[-1])
    second = [[batch["input_ids"].tobytes() for batch in reader] for reader in after]
    shown = [row for ranks in (first, second) for together in zip(*ranks, strict=True) for row in together]

    assert {state["taken"] for state in states} == {0}
    assert shown == order
