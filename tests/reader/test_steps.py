"""What a step shows by name, and leaving out steps that a user found to be bad."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import ConfigError
from rowmill.core.storage import Store
from rowmill.reader import Reader
from tests.support.reader_builds import STEPPED, UNSTEPPED, Workers, current, loaded_in_turn, make, open_reader, tokens

LAYOUTS = ("copied", "index")


@pytest.fixture(scope="module", params=LAYOUTS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options: dict[str, Any] = STEPPED | {"partitions": {**STEPPED["partitions"], "layout": request.param}}
    return make(tmp_path_factory.mktemp(request.param) / "project", **options)


def delivered_by_step(reader: Reader) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    for batch in reader:
        assert reader.step is not None
        found.append((reader.step.number, batch["input_ids"].tobytes()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 4])
def test_examples_of_a_step_are_those_of_the_order(built: Path, world_size: int) -> None:
    reader = open_reader(built, 0, world_size)
    found, store = current(built), Store(str(built))
    order = store.unchecked_table(found["order_file"]).to_pylist()
    packed = [
        [ids for shard in found["sets"][name]["shards"]["train"]
         for ids in store.unchecked_table(shard[0], ["example_ids"]).column(0).to_pylist()]
        for name in found["datasets"]
    ]  # fmt: skip
    fillers = 0
    for step in range(reader.steps or 0):
        places = [line for line in order if line["step"] == step]
        fillers += sum(line["filler"] for line in places)

        assert reader.example_ids(step) == [
            [] if line["filler"] else packed[line["dataset"]][line["sequence_id"]] for line in places
        ]

    assert fillers > 0


def test_skipped_steps_are_left_out_and_states_keep_them(built: Path) -> None:
    whole, reader = delivered_by_step(open_reader(built, 1, 2, batch_size=3)), open_reader(built, 1, 2, batch_size=3)
    last = whole[-1][0]
    reader.skip_steps([0, 3])
    reader.skip_steps({4, last})
    assert delivered_by_step(reader) == [one for one in whole if one[0] not in {0, 3, 4, last}]
    reader, seen = open_reader(built), list[int]()
    for _ in reader:
        assert reader.step is not None
        seen.append(reader.step.number)
        if reader.step.number == 1:
            reader.skip_steps([2, 3])
    assert seen == [0, 1, *range(4, reader.steps or 0)]
    whole, first, second = (open_reader(built, batch_size=3) for _ in range(3))
    first.skip_steps([1])
    list(islice(first, 4))
    state: dict[str, Any] = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state | {"skip_steps": [*state["skip_steps"], 5]})
    assert state["skip_steps"] == [1]
    rest = [one for one in delivered_by_step(whole) if one[0] not in {1, 5}][4:]
    assert delivered_by_step(second) == rest


def test_workers_leave_out_the_same_steps(built: Path, standin: Workers) -> None:
    one, *copies = readers = [open_reader(built, batch_size=3) for _ in range(3)]
    for reader in readers:
        reader.skip_steps([0, 2])

    assert tokens(loaded_in_turn(copies, standin)) == tokens(one)
    standin.become(0, 2)
    with pytest.raises(ConfigError, match="call it before the DataLoader is made"):
        copies[0].skip_steps([3])
    with pytest.raises(ConfigError, match="skip_steps"):
        copies[0].load_state_dict(copies[0].state_dict() | {"skip_steps": [0, 2, 3]})


@pytest.mark.parametrize("step", [-1, 10_000])
def test_step_that_is_not_there_is_refused(built: Path, step: int) -> None:
    reader = open_reader(built)
    for call in (reader.example_ids, lambda number: reader.skip_steps([number])):
        with pytest.raises(ConfigError, match=rf"step {step}; steps are 0 to \d+; correct the number"):
            call(step)


@pytest.mark.slow
def test_recipe_without_steps_says_so(tmp_path: Path) -> None:
    reader = open_reader(make(tmp_path / "project", **UNSTEPPED))
    with pytest.raises(ConfigError, match=r"no mixture\.batch_size"):
        reader.example_ids(0)
