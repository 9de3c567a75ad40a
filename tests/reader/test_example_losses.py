"""Loss by example: what a run writes is the mean over each example's targets, for any ranks, batches and layouts."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rowmill import ExampleLosses
from rowmill.core.errors import ConfigError
from rowmill.stats.views import query_views
from rowmill.viewer.builds import Builds
from tests.support.recipes import TEXT, Built, Workspace, chat, document, open_reader
from tests.support.viewer import ask


def make_losses(labels: Any, *, shifted: bool) -> Any:
    """Return a loss that depends on the label alone, and NaN where there is none; one fewer in a row if shifted."""
    losses = np.where(labels < 0, np.nan, labels % 11 + 0.5)
    return losses[:, 1:] if shifted else losses


def expect(built: Built, names: tuple[str, ...]) -> dict[str, tuple[float, int]]:
    found: dict[str, tuple[float, int]] = {}
    for example in (example for name in names for example in built.examples(name)):
        # Nothing predicts the first token of a segment.
        pairs = zip(example["input_ids"][1:], example["loss_mask"][1:], strict=True)
        trained = [token for token, is_trained in pairs if is_trained]
        if trained:
            found[example["example_id"]] = (float(np.mean([token % 11 + 0.5 for token in trained])), len(trained))
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    workspace = Workspace(tmp_path_factory.mktemp("losses"))
    datasets = {
        "chats": workspace.dataset("chats.jsonl", [chat(i, turns=1 + i % 3, words=4 + i % 9) for i in range(50)]),
        # Whole, as `concat` would cut them.
        "texts": workspace.dataset(
            "texts.jsonl", [document(i, words=30 + i) for i in range(17)], TEXT, packing={"pack_strategy": "best_fit"}
        ),
    }
    options: dict[str, Any] = {
        "mixture": {"batch_size": 6, "epochs": 2},
        "partitions": {"world_size": 2, "remainder": "pad"},
    }
    return workspace.recipe(datasets, seq_len=256, **options).build()


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"batch_size": 2, "layout": "padded"}, {"pad_to": 2048}])
def test_losses_of_all_ranks_are_those_of_the_examples(
    options: dict[str, Any], shifted: bool, built: Built, tmp_path: Path
) -> None:
    for rank in range(2):
        reader = open_reader(built, rank, 2, segment_sources=True, **options)
        if shifted and options.get("layout") != "padded":
            options = {**options, "batch_size": 1}
            reader = open_reader(built, rank, 2, segment_sources=True, **options)
        with ExampleLosses(reader, tmp_path) as kept:
            for batch in reader:
                kept.add(make_losses(batch["labels"], shifted=shifted), batch)

    lines = pq.read_table(tmp_path).to_pylist()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"rank-0000{rank}-from-00000000.parquet" for rank in (0, 1)
    ]
    sums: dict[str, list[float]] = {}
    for line in lines:
        of = sums.setdefault(line["example_id"], [0.0, 0])
        of[0] += line["loss"] * line["tokens"]
        of[1] += line["tokens"]
    wanted = expect(built, ("chats", "texts"))
    once = {name: (total / count, count) for name, (total, count) in sums.items()}
    assert once.keys() == wanted.keys()
    for name, (mean, count) in wanted.items():
        # An example that is shown in more passes has as many lines.
        assert once[name][1] % count == 0
        assert once[name][0] == pytest.approx(mean)
    for line in lines[:20]:
        places = open_reader(built, 0, 2).example_ids(line["step"])
        assert any(line["example_id"] in of_place for of_place in places)


def write_losses(built: Built, folder: Path) -> None:
    """Write the losses of an order of two ranks."""
    for rank in range(2):
        reader = open_reader(built, rank, 2, segment_sources=True)
        with ExampleLosses(reader, folder) as kept:
            for batch in reader:
                kept.add(make_losses(batch["labels"], shifted=False), batch)


def test_losses_are_a_view_and_an_order_of_rows(built: Built, tmp_path: Path) -> None:
    write_losses(built, tmp_path)
    wanted = expect(built, ("chats",))
    first = max(wanted, key=lambda name: wanted[name][0])

    columns, rows = query_views(
        built.project.store,
        "from losses select example_id, avg(loss) group by all order by 2 desc",
        losses=str(tmp_path),
    )
    assert columns[0] == "example_id"
    assert len(rows) == len(expect(built, ("chats", "texts")))
    builds = Builds.of_folder(built.project.base / "configs", None, losses=str(tmp_path))
    page = ask(builds, "/mini/rows?dataset=chats&order=-loss").text
    assert page.split('<tr data-row="')[1].startswith(f'{first.partition("#")[0]}"')
    assert f"{wanted[first][0]:.3f}" in page
    _, above = query_views(
        built.project.store,
        "with steps as (select step, avg(loss) as mean from losses group by all) "
        "select split_part(example_id, '#', 1), "
        "avg(loss - mean) as above from losses join steps using (step) group by all order by above desc limit 3",
        losses=str(tmp_path),
    )
    page = ask(builds, "/mini/rows?order=-above_step").text
    assert re.findall(r'<tr data-row="([^"]+)"', page)[:3] == [row_id for row_id, _ in above]
    assert f"{above[0][1]:+.3f}" in page
    domains = re.findall(
        r'">(\w+)</a></td><td>(\w*)</td><td class="number"><a href="[^"]+&amp;order=-loss[^"]*">(\d+)</a></td>'
        r'<td class="number">([\d.]+)<',
        ask(builds, "/mini/rows").text,
    )
    means = {(name, ""): [mean for mean, _ in expect(built, (name,)).values()] for name in ("chats", "texts")}
    assert {(name, domain): (int(rows), loss) for name, domain, rows, loss in domains} == {
        key: (len(values), f"{sum(values) / len(values):.3f}") for key, values in means.items()
    }
    step = ask(builds, "/mini/steps/0").text
    _, of_step = query_views(
        built.project.store, "select example_id, loss from losses where step = 0 order by 1", losses=str(tmp_path)
    )
    shown = re.findall(r'<tr data-row="([^"]+)">.*? data-label="loss">([\d.]+)<', step)
    assert sorted(shown) == [(example.partition("#")[0], f"{loss:.3f}") for example, loss in of_step]
    assert "<h2>Loss</h2>" in ask(builds, f"/mini/rows/{first.partition('#')[0]}").text


def test_losses_of_a_row_are_drawn_over_steps_beside_the_means_of_these_steps(built: Built, tmp_path: Path) -> None:
    write_losses(built, tmp_path)
    [(example, count)] = query_views(
        built.project.store,
        "from losses select example_id, count(*) group by all order by 2 desc, 1 limit 1",
        losses=str(tmp_path),
    )[1]
    _, wanted = query_views(
        built.project.store,
        "select step, loss, loss - (select avg(loss) from losses as s where s.step = l.step) from losses as l "
        f"where example_id = '{example}' order by step",
        losses=str(tmp_path),
    )
    builds = Builds.of_folder(built.project.base / "configs", None, losses=str(tmp_path))
    page = ask(builds, f"/mini/rows/{example.partition('#')[0]}").text
    [drawing] = re.findall(r"<h2>Loss</h2>.*?(<svg.*?</svg>)", page, re.DOTALL)
    points = re.findall(
        rf'<a href="/mini/steps/(\d+)[^"]*"><circle [^>]*><title>{example}, (\d+): ([^<]+)</title>', drawing
    )
    table = re.findall(r'>(\d+)</a></td><td class="number">([\d.]+)</td><td class="number">([+-][\d.]+)<', page)

    assert count > 1
    assert points == [(str(step), str(step), f"{loss:.4g}") for step, loss, _ in wanted]
    assert drawing.count('<path fill="none"') == 2
    assert "<title>mean of the step</title>" in drawing
    assert table == [(str(step), f"{loss:.4f}", f"{above:+.4f}") for step, loss, above in wanted]


def test_a_step_is_ordered_by_each_of_its_columns(built: Built, tmp_path: Path) -> None:
    write_losses(built, tmp_path)
    builds = Builds.of_folder(built.project.base / "configs", None, losses=str(tmp_path))
    page = ask(builds, "/mini/steps/1").text
    orders = set(re.findall(r"order=(-?\w+)", page))

    def list_lines(order: str) -> list[list[tuple[str, float]]]:
        """Return each rank's lines, a row and a number of tokens or the loss."""
        column = order.removeprefix("-")
        shown = ask(builds, f"/mini/steps/1?order={order}").text
        of_ranks = shown.split("<section>")[1:]
        wanted = rf'<tr data-row="([^"]+)">.*?data-label="{column}">([\d.–]+)<'
        return [
            [(row, float(number)) for row, number in re.findall(wanted, rank) if number != "–"] for rank in of_ranks
        ]

    assert orders == {"-sequence", "-tokens", "-loss", "-domain", "-preview"}
    for column in ("tokens", "loss"):
        ascending, descending = list_lines(column), list_lines(f"-{column}")
        assert [sorted(rank) for rank in ascending] == [sorted(rank) for rank in descending]
        for rank in ascending:
            assert [number for _, number in rank] == sorted(number for _, number in rank)
            assert len(rank) > 1
        for rank in descending:
            assert [number for _, number in rank] == sorted((number for _, number in rank), reverse=True)
    # A line whose neighbour is of another sequence names its own.
    ordered = ask(builds, "/mini/steps/1?order=-loss").text
    assert ordered.count('<tr data-row="') == len(
        re.findall(r'<tr data-row="[^"]+"><td><a href="/mini/sequences', ordered)
    )
    assert 'aria-sort="descending"' in ordered
    wrong = ask(builds, "/mini/steps/1?order=secret")
    assert wrong.status == 404
    assert "there are sequence, tokens, loss, domain, preview" in wrong.text


def test_losses_are_a_column_and_an_order_of_examples_that_were_left_out(tmp_path: Path) -> None:
    texts = [document(i, words=70 + 13 * i) for i in range(12)]
    options: dict[str, Any] = {"mixture": {"batch_size": 4}, "partitions": {"world_size": 2, "remainder": "pad"}}
    workspace = Workspace(tmp_path)
    datasets = {
        "texts": workspace.dataset("texts.jsonl", texts, TEXT, packing={"tail": "drop"}, splits={"validation": 0.3})
    }
    # Each split has a tail, and the validation split trains nothing.
    built = workspace.recipe(datasets, seq_len=64, **options).build()
    write_losses(built, tmp_path / "losses")
    builds = Builds.of_folder(tmp_path / "configs", None, losses=str(tmp_path / "losses"))

    def list_losses(order: str) -> list[str]:
        return re.findall(r' data-label="loss">([^<]+)<', ask(builds, f"/mini/left_out?order={order}").text)

    assert len(list_losses("-loss")) > 1
    assert list_losses("-loss")[-1] == "–" != list_losses("-loss")[0]
    assert sorted(list_losses("loss")) == sorted(list_losses("-loss"))
    assert ask(builds, "/mini/rejects").text.count("above step") == 0


def test_reader_without_sources_and_a_folder_without_losses_are_refused(built: Built, tmp_path: Path) -> None:
    reader = open_reader(built, 0, 2)
    batch = next(iter(reader))
    with pytest.raises(ConfigError, match="segment_sources=True"):
        ExampleLosses(reader, tmp_path).add(np.ones(batch["labels"].shape), batch)
    with pytest.raises(ConfigError, match="no Parquet file is here"):
        query_views(built.project.store, "from losses", losses=str(tmp_path))
