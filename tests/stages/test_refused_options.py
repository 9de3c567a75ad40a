"""Options of datasets and stages that cannot work together: each is refused when the recipe is loaded, with its reason.

Those of the packing, the mixture and the exports alone are in `packing/` and `exports/`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import ConfigError
from tests.support.recipes import CHAT, PAIR, TEXT, Workspace
from tests.support.tables import grouped, records

Case = tuple[Mapping[str, Any], Mapping[str, Any], str]
"""Datasets, top-level keys of the recipe, and the pattern of what is said."""


def of(form: Any = CHAT, **groups: Any) -> dict[str, Any]:
    """Return the options of a dataset; what it would read is not there, and nothing asks for it."""
    return {"source": {"train_urls": ["data/rows.jsonl"]}, "format": form, **groups}


def rows(form: Any = CHAT, message: str = "", changes: Mapping[str, Any] | None = None, **groups: Any) -> Case:
    """Return a case of one dataset `rows`."""
    return {"rows": of(form, **groups)}, changes or {}, message


PREFERENCE = {"kind": "preference"}
SHARED = {"share_prefixes": True, "min_shared": 12}


def shared(message: str, **changes: Any) -> Case:
    """Return a case of chats that share prefixes, with more options of packing or of the recipe."""
    packing = {**SHARED, **changes.pop("packing", {})}
    return rows(CHAT, f"{message}.*;.*;", changes, packing=packing)


SHOPS = grouped("shop", "day")
SALES = of(records(**SHOPS, generation={}))


def generated(source: str, message: str, name: str = "synthetic", form: Any = None, **options: Any) -> Case:
    """Return a case of sales, and of a dataset whose source is generated records."""
    synthetic = {"source": {"generated": source, **options}, "format": form or records(**SHOPS)}
    return {"rows": SALES, name: synthetic}, {"seq_len": 1024}, message


def generating(message: str, times: Mapping[str, str] | None = None, **generation: Any) -> Case:
    """Return a case of options of `generation`; of series under privacy where times are given."""
    private = {"privacy": {"dp_enabled": True}, "time_series": {"is_timeseries": True, **(times or {})}}
    form = records(**SHOPS, **({} if times is None else private), generation=generation)
    return rows(form, message, {"seq_len": 1024})


def decontaminated(message: str, form: Any = CHAT, **changes: Any) -> Case:
    benchmark = {"name": "a", "urls": ["a.jsonl"], "fields": ["q"]}
    return rows(form, message, filters={"decontaminate": {"benchmarks": [benchmark], **changes}})


def near(**options: Any) -> Case:
    return rows(TEXT, rf"near_duplicates\.{next(iter(options))}", filters={"near_duplicates": options})


def taught(message: str, form: Any = CHAT, **groups: Any) -> Case:
    return rows(form, message, teacher={"base_url": "http://127.0.0.1:9/v1", "model": "m"}, **groups)


def held_by_number(message: str, dataset: str = "rows", **groups: Any) -> Case:
    return rows(CHAT, message, {"mixture": {"num_validation_sequences": {dataset: 1}}}, **groups)


BENCHMARK = {"name": "a", "urls": ["a.jsonl"], "fields": ["q"]}
TWO_WAYS = "only one of the two can decide which rows are held out"
START, STOP = {"start_timestamp": "2024-01-01T00:00:00"}, {"stop_timestamp": "2024-01-01T00:00:00"}
SYNTHETIC = {"source": {"generated": "rows"}, "format": records(**SHOPS)}

PADDED = {"packing": {"segment_multiple_of": 8}}
REFUSED: dict[str, Case] = {
    "multiple that does not divide seq_len": rows(
        CHAT, "7 does not divide seq_len 256", packing={"segment_multiple_of": 7}
    ),
    "multiples of two datasets": (
        {"rows": of(**PADDED), "other": of(packing={"segment_multiple_of": 4})}, {},
        r"packing\.segment_multiple_of: 4, and datasets\.rows has 8",
    ),
    "side without space for its padding": rows(
        PREFERENCE, "at most 136 fit into seq_len 280", {"seq_len": 280}, truncation={"max_length": 140}, **PADDED
    ),
    "shared least without sharing": rows(CHAT, "min_shared: 8 without share_prefixes", packing={"min_shared": 8}),
    **{
        f"shared with {name}": shared(f"share_prefixes: true with {name}: {said}", packing={name: value})
        for name, value, said in (
            ("pack_strategy", "greedy", "greedy"), ("pack", 3, "3"), ("segment_multiple_of", 4, "4"),
            ("layout", "index", "index"), ("store_domains", True, "true"),
        )
    },
    "shared by an index": rows(
        CHAT, "share_prefixes: true with layout: index; .*; delete layout, or share_prefix",
        packing={"share_prefixes": True, "layout": "index"},
    ),
    "shared with open attention": shared(
        "block_cross_document_attention: false", packing={"block_cross_document_attention": False}
    ),
    "shared with balanced flops": shared(
        r"partitions\.balance: flops with", partitions={"world_size": 1, "balance": "flops"}
    ),
    "shared with sequences held out": shared(
        r"num_validation_sequences\.rows", mixture={"num_validation_sequences": {"rows": 2}}
    ),
    **{
        f"shared in an export {kind}": shared(
            f"kind {kind} cannot store the trees", exports=[{"kind": kind, "name": "n"}]
        )
        for kind in ("native", "axolotl")
    },
    "shared beside preferences": (
        {"rows": of(), "pairs": of(PREFERENCE)}, {"defaults": {"packing": SHARED}},
        r"datasets\.rows\.packing\.share_prefixes: true beside datasets\.pairs, .*; move one of them",
    ),
    "shared preferences": rows(
        PREFERENCE, r"packing\.(share_prefixes|min_shared): a preference dataset does not read this option; .*; del",
        packing=SHARED,
    ),
    "shared in one of two": (
        {"rows": of(packing=SHARED), "others": of()}, {},
        r"others\.packing\.share_prefixes: false, and datasets\.rows has true; .*; set it .*, and min_shared: 257 in",
    ),
    "held out by number and by share": held_by_number(TWO_WAYS, splits={"validation": 0.1}),
    "held out by number and by time": held_by_number(TWO_WAYS, splits={"time_key": "t", "boundaries": {"test": 5}}),
    "held out by number and by source": held_by_number(
        TWO_WAYS, source={"train_urls": ["data/rows.jsonl"], "validation_urls": ["data/held.jsonl"]}
    ),
    "held out by number of another dataset": held_by_number("'rosw' is not a dataset", "rosw"),
    "benchmarks of no coverage": decontaminated("coverage", coverage=0),
    "benchmarks of one word": decontaminated("ngram", ngram=1),
    "no benchmarks": decontaminated("benchmarks", benchmarks=[]),
    "benchmarks of another suffix": decontaminated(
        "has no known suffix", benchmarks=[{**BENCHMARK, "urls": ["a.doc"]}]
    ),
    "benchmarks of one name": decontaminated("2 are called 'a'", benchmarks=[BENCHMARK] * 2),
    "benchmarks of records": decontaminated(
        r"filters\.decontaminate: a records dataset does not read this option", records()
    ),
    "near threshold too low": near(threshold=0.6),
    "near threshold too high": near(threshold=1.1),
    "near n-grams of no word": near(ngram=0),
    "near action": near(action="drop"),
    "teacher with weights": taught(r"teacher with loss\.weights: true", loss={"weights": True}),
    "teacher with weighted prompts": taught(r"teacher with loss\.prompt_weight: 0\.1", loss={"prompt_weight": 0.1}),
    "teacher of prompts": taught("teacher: prompts rows have the objective prompts", {"kind": "prompts"}),
    "generated of itself": generated("synthetic", r"synthetic\.source\.generated: 'synthetic' is not another dataset"),
    "generated of nothing": generated("nothing", "'nothing' is not another dataset of this recipe .* there is rows"),
    "generated of each other": (
        {"a": {**SYNTHETIC, "source": {"generated": "b"}}, "b": {**SYNTHETIC, "source": {"generated": "a"}}},
        {"seq_len": 1024}, "'b' is not another dataset",
    ),
    "generated chats": generated("rows", r"holds records of a table, but format\.kind is chat", form=CHAT),
    "generated by another stage": generated("rows", r"source\.stage", stage="packed_shards"),
    "generated below a dataset": generated("a/b/c", "expected DATASET or RECIPE/DATASET, got 'a/b/c'"),
    "private series that begin with records": generating("real records", START | STOP, prefill="records"),
    "private series without an end": generating("stop_timestamp: null under privacy", START),
    "private series without a start": generating("start_timestamp: null under privacy", STOP),
    "no patience": generating(r"generation\.patience", patience=0),
    "top_p above one": generating(r"generation\.top_p", top_p=1.5),
    "samples that are no number": generating(r"generation\.samples_per_prompt", samples_per_prompt=True),
    "groups of no record": generating(r"generation\.max_records_per_group", max_records_per_group=0),
    "unknown backend": generating(
        r"generation\.backend.*'http' is not a kind; choose callable, openai", backend={"kind": "http"}
    ),
    "unknown validation": generating(
        r"generation\.validation\.group_by_fix: unknown key", validation={"group_by_fix": True}
    ),
    "generation misspelt": generating(r"generation\.temprature: unknown key.*did you mean temperature", temprature=1),
    "end of text of rendered sides": rows(
        {**PREFERENCE, "add_eos": False}, r"format\.add_eos: false with text: template"
    ),
    "pair joined by an id and encoded whole": rows(
        {**PAIR, "separate_with": 1}, r"loss\.boundary: whole", loss={"boundary": "whole"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_options_that_cannot_work_are_refused_when_the_recipe_is_loaded(tmp_path: Path, case: Case) -> None:
    datasets, changes, message = case
    workspace = Workspace(tmp_path).recipe(datasets, **changes)

    with pytest.raises(ConfigError, match=message):
        _ = workspace.project
