"""What the report draws of a build's flow is conserved, whatever the kind of data and however it was left out."""

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from rowmill.build.steps import plan_steps
from rowmill.inspection import trace
from rowmill.reports import flows
from rowmill.reports.flows import Flow, FlowBranch, FlowLevel
from rowmill.schema import manifest
from tests.support.recipes import CHAT, PAIR, TEXT, Built, Workspace, chat, document, pair
from tests.support.tables import grouped, records

GROUPED = records(**grouped("shop"), assembly={"on_overflow": "reject"})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build chats with rejects, documents joined with a tail, pairs held out by number, and records in groups."""
    workspace = Workspace(tmp_path_factory.mktemp("flows"))
    chats = [chat(i, turns=1 + i % 9, words=14) for i in range(60)]
    bad = [{"messages": []}, {"messages": "x"}, chats[0], {"text": "</script>"}, chat(99, words=300)]
    # One of ten groups is too large for an example.
    shops = [f"s{i % 9}" for i in range(36)] + ["large"] * 12
    sales = [{"shop": shop, "day": f"2024-01-{1 + i // 9:02d}", "units": i} for i, shop in enumerate(shops)]
    sources = {
        "chats": workspace.write("chats.jsonl", [*chats, *bad]),
        "documents": workspace.write("documents.jsonl", [document(i, words=90) for i in range(30)]),
        "pairs": workspace.write("pairs.jsonl", [pair(i) for i in range(50)]),
        "sales": workspace.write("sales.jsonl", sales),
    }
    cut = {"overlong": "truncate", "token_cut": "reject"}
    options: dict[str, dict[str, Any]] = {
        "chats": {"format": CHAT, "truncation": cut, "splits": {"validation": 0.2}},
        "documents": {"format": TEXT, "packing": {"pack_strategy": "concat", "tail": "drop"}},
        "pairs": {"format": PAIR, "filters": {"max_items": 45}, "splits": {"group_key": "prompt"}},
        "sales": {"format": GROUPED},
    }
    datasets = {name: {"source": {"train_urls": [url]}, **options[name]} for name, url in sources.items()}
    mixture = {
        "batch_size": 4,
        "steps": 12,
        "num_validation_sequences": {"pairs": 2},
        "train_weights": {"chats": 6, "documents": 1, "pairs": 2, "sales": 1},
    }
    return workspace.recipe(datasets, mixture=mixture).build()


@pytest.fixture(scope="module")
def traced(built: Built) -> dict[str, tuple[Flow, Flow]]:
    project = built.project
    made = {step.key: manifest.load_current(project.store, step.key) for step in plan_steps(project)}
    chains = {name: trace.select_chain(made, project.recipe.name, name) for name in project.recipe.datasets}
    return {
        name: (
            flows.balance_levels(flows.iterate_row_levels(chain, name)),
            flows.balance_levels(flows.iterate_token_levels(chain, name, seq_len=project.recipe.seq_len)),
        )
        for name, chain in chains.items()
    }


def read_drawn(svg: str) -> list[tuple[str, int, list[int], list[str]]]:
    """Return the levels of a drawing: unit, count, signed counts of the branches, all as drawn."""
    levels: list[tuple[str, int, list[int], list[str]]] = []
    for one in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}g"):
        words = "".join(one.itertext())
        count = int(one.get("data-count", ""))
        assert f"{abs(count):,}" in words
        if one.get("class") == "level":
            levels.append((one.get("data-unit", ""), count, [], []))
        else:
            levels[-1][2].append(count)
            levels[-1][3].append(one.get("data-kind", ""))
    return levels


@pytest.mark.slow
def test_every_number_that_is_drawn_adds_up(traced: dict[str, tuple[Flow, Flow]]) -> None:
    drawings = [flows.draw_flow_svg(flow, name) for name, pair_of in traced.items() for flow in pair_of]
    drawings += [flows.draw_flow_svg(flows.sum_flows([pair_of[i] for pair_of in traced.values()]), "") for i in (0, 1)]

    assert len(drawings) == 10
    for drawing in drawings:
        levels = read_drawn(drawing)
        for (unit, count, branches, kinds), following in zip(levels, [*levels[1:], None], strict=True):
            assert "unaccounted" not in kinds
            if following is None:
                assert count + sum(branches) == (0 if unit == "tokens" else count)
            elif following[0] == unit:
                assert count + sum(branches) == following[1]


def test_flow_of_all_datasets_is_what_the_stages_counted(built: Built, traced: dict[str, tuple[Flow, Flow]]) -> None:
    rows, tokens = (flows.sum_flows([pair_of[i] for pair_of in traced.values()]) for i in (0, 1))
    order = built.manifest("training_splits").facts
    ranks = {name: count for _, name, count in built.manifest("gpu_partitions").token_ledger}

    assert rows[0].count == sum(built.manifest(name, "raw_dataset").facts["records"] for name in traced)
    assert rows[-1].count == order["places"] - order["fillers"]
    assert {one.name: one.count for one in tokens[-1].branches if one.name != "padding"} == {
        "trained": ranks["trained"], "not trained": ranks["context"],
    }  # fmt: skip
    names = {branch.name for flow in (rows, tokens) for level in flow for branch in level.branches}
    assert {"duplicate", "bad_messages", "not taken", "validation split", "truncated", "of rows too long to cut",
            "dropped by packing", "not scheduled", "in later passes", "padding"} <= names  # fmt: skip


def test_flow_ends_where_a_stage_was_not_built_from_the_one_before(
    built: Built, traced: dict[str, tuple[Flow, Flow]]
) -> None:
    made = {step.key: manifest.load_current(built.project.store, step.key) for step in plan_steps(built.project)}
    rows = made["mini", "chats", "canonical_rows"]
    assert rows is not None
    mixed = made | {rows.key: replace(rows, version="another")}

    chain = trace.select_chain(mixed, "mini", "chats")
    summed = flows.sum_flows([flows.balance_levels(flows.iterate_row_levels(chain, "chats")), traced["pairs"][0]])
    assert list(chain) == ["raw_dataset", "canonical_rows"]
    assert [level.label for level in summed] == ["records read", "rows"]
    assert summed[-1].branches == ()


def test_numbers_that_do_not_add_up_are_shown_as_unaccounted() -> None:
    lost = (FlowLevel("a", "rows", 10, (FlowBranch("bad", 2, "rejected"),)), FlowLevel("b", "rows", 7))
    balanced = flows.balance_levels(lost)
    assert balanced[0].branches[-1] == FlowBranch("unaccounted", 1, "unaccounted")
    assert "1 unaccounted" in flows.draw_flow_svg(balanced, "")


def test_many_reasons_are_summed_and_a_hostile_name_stays_text() -> None:
    branches = tuple(FlowBranch(f"</svg><script>{i}", 30 - i, "rejected") for i in range(20))
    flow = (FlowLevel("a", "rows", 1000, branches), FlowLevel("b", "rows", 1000 - sum(b.count for b in branches)))
    svg = flows.draw_flow_svg(flow, "t")
    assert {one.tag.rpartition("}")[2] for one in ET.fromstring(svg).iter()} <= {
        "svg", "title", "g", "rect", "path", "text", "tspan",
    }  # fmt: skip
    assert "for 13 other reasons" in svg
