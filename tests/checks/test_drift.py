"""Drift: how far distributions moved since the published build, what is too small to say so, and what it closes."""

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import gc
from rowmill.checks import cross_stage, drift
from rowmill.checks.drift import compare_profiles
from rowmill.core.errors import GateError
from tests.checks.test_cross_stage import judged, result_of
from tests.support.recipes import CHAT, LENIENT, Workspace, chat, current

QUESTIONS = {
    "English": "What is the capital of France, and how is it that you know?",
    "German": "Wo liegt die Hauptstadt und wie heißt das Land, in dem ich nicht bin?",
    "French": "Quelle est la capitale de la France et que dans les villes pour vous ?",
    "Spanish": "¿Cuál es la capital de los países que las personas visitan por placer?",
    "Italian": "Che cosa è la capitale della Francia e il fiume che non conosco?",
    "Portuguese": "Qual é a capital do país que você não conhece? Não sei, para uma viagem.",
    "Dutch": "Wat is de hoofdstad van het land dat ik niet ken en een stad voor mij?",
    "Polish": "Jak to jest, że nie wiem, co się dzieje na ulicy?",
    "Turkish": "O ne için var ve bir soru ile ne kadar çok?",
    "Vietnamese": "Thủ đô của Pháp là gì và các thành phố của nó có lớn không?",
    "Indonesian": "Apa yang tidak kamu ketahui dari kota ini dan untuk siapa itu?",
    "Chinese": "法国的首都是哪里？请告诉我。",
    "Japanese": "フランスの首都はどこですか。",
    "Korean": "프랑스의 수도는 어디입니까?",
    "Cyrillic": "Какая столица Франции? Use Python.",
    "Arabic": "ما هي عاصمة فرنسا؟",
    "Hebrew": "מהי בירת צרפת?",
    "Greek": "Ποια είναι η πρωτεύουσα της Γαλλίας;",
    "Devanagari": "फ्रांस की राजधानी क्या है?",
    "Thai": "เมืองหลวงของฝรั่งเศสคืออะไร",
    "Latin letters": "xyzzy foo42 qux",
    "no letters": "1 + 1 = 2",
}
ROWS = 1_200
"""As many rows as a distribution of ten bins needs to be compared, and a few more."""


def ask(i: int, language: str, words: int = 8) -> dict[str, Any]:
    """Return a chat whose question is in a language."""
    row = chat(i, words=words)
    row["messages"][0]["content"] = f"{QUESTIONS[language]} {i}"
    row["messages"][1]["content"] = QUESTIONS[language]
    return row


def write(workspace: Workspace, rows: list[dict[str, Any]], **changes: Any) -> Workspace:
    gates = {name: bound for name, bound in LENIENT.items() if name != "drift"} | changes.pop("gates", {})
    groups = {"filters": {"deduplicate": "off"}, "template": {"chat_template": "chatml"}} | changes.pop("groups", {})
    return workspace.one("rows.jsonl", rows, groups.pop("format", CHAT), gates=gates, **groups, **changes)


# ── The index ──────────────────────────────────────────────────────────────────────────────────────


def test_index_of_two_bins_is_what_one_computes_by_hand() -> None:
    [shift] = compare_profiles({"schemas": {"a": 600, "b": 400}}, {"schemas": {"a": 400, "b": 600}})

    # (0.4 - 0.6) ln(0.4 / 0.6) + (0.6 - 0.4) ln(0.6 / 0.4), and half a row in each bin.
    assert shift.index == pytest.approx(0.4 * math.log(1.5), abs=0.001)
    assert shift.bins == (("a", 0.6, 0.4), ("b", 0.4, 0.6))
    [shift] = compare_profiles({"domains": {"a": 300, "b": 100}}, {"domains": {"a": 600, "b": 200}})
    assert shift.index == pytest.approx(0, abs=1e-4)
    assert shift.bins == ()
    [shift] = compare_profiles({"domains": {"a": 1000}}, {"domains": {"a": 900, "b": 100}})
    assert shift.index == pytest.approx(0.1 * math.log(0.1 / 0.0005), rel=0.05)
    assert shift.bins == (("a", 1.0, 0.9), ("b", 0.0, 0.1))


@pytest.mark.parametrize("rows", [1_000, 100_000, 100_000_000])
@pytest.mark.parametrize(("share", "low", "high"), [(0.02, 0, 0.1), (0.05, 0.1, 0.25), (0.1, 0.25, 0.6)])
def test_new_bin_counts_as_much_in_a_large_dataset_as_in_a_small_one(
    rows: int, share: float, low: float, high: float
) -> None:
    new = int(rows * share)
    [shift] = compare_profiles({"domains": {"a": rows}}, {"domains": {"a": rows - new, "b": new}})

    assert shift.index is not None
    assert low < shift.index < high


def test_rare_bins_are_compared_as_one_and_rows_of_the_same_data_never_warn() -> None:
    before = {"domains": {"most": 5_000} | {f"site-{i:03}": 10 for i in range(300)}}
    after = {"domains": {"most": 5_000} | {f"site-{i:03}": 10 for i in range(300, 600)}}
    [shift] = compare_profiles(before, after)

    assert shift.index is not None
    assert shift.index < 0.2
    draw = random.Random(7)
    indices: list[float] = []
    for _ in range(500):
        profiles = [{"lengths": dict(Counter(f"bin {draw.randrange(10)}" for _ in range(1_000)))} for _ in range(2)]
        [shift] = compare_profiles(profiles[0], profiles[1])
        assert shift.index is not None
        indices.append(shift.index)
    assert max(indices) < 0.1
    assert sum(indices) / len(indices) < 0.02


@pytest.mark.parametrize("rows", [20, 200, 999])
def test_distribution_of_few_rows_is_shown_and_not_compared(rows: int) -> None:
    one = {"lengths": {f"bin {i}": rows // 10 for i in range(9)} | {"bin 9": rows - 9 * (rows // 10)}}
    other = {"lengths": {"bin 0": rows // 2, "bin 1": rows - rows // 2}}
    [shift] = compare_profiles(one, other)

    assert shift.index is None
    assert len(shift.bins) == 3


def test_language_is_told_by_script_and_frequent_words(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    options = {"format": CHAT, "filters": {"deduplicate": "off"}, "template": {"chat_template": "chatml"}}
    files = [workspace.write(f"{k}.jsonl", [ask(i, one) for i in range(3)]) for k, one in enumerate(QUESTIONS)]
    datasets = {f"d{k}": {"source": {"train_urls": [file]}, **options} for k, file in enumerate(files)}
    built = workspace.recipe(datasets).build(only=["raw_dataset", "canonical_rows", "tokenized_examples"])
    made = [built.manifest(name, "tokenized_examples") for name in datasets]

    assert [drift.load_profile(built.project.store, one)["languages"] for one in made] == [
        {one: 3} for one in QUESTIONS
    ]


# ── Profiles of builds ─────────────────────────────────────────────────────────────────────────────


def test_profile_counts_what_a_person_can_count(tmp_path: Path) -> None:
    rows = [chat(i, turns=1 + i % 2) | {"site": "a" if i < 4 else "b"} for i in range(10)]
    workspace = write(Workspace(tmp_path), rows, groups={"format": CHAT | {"domain_key": "site"}})
    built = workspace.build(only=["raw_dataset", "canonical_rows", "tokenized_examples"])
    examples = built.manifest("rows", "tokenized_examples")
    profile = drift.load_profile(built.project.store, examples)

    assert profile["domains"] == {"a": 4, "b": 6}
    assert profile["turns"] == {"2": 5, "4": 5}
    assert profile["roles"] == {"user": 15, "assistant": 15}
    assert profile["languages"] == {"English": 10}
    assert [sum(profile[name].values()) for name in ("schemas", "lengths", "trained share")] == [10, 10, 10]


def test_profile_counted_from_the_published_one_is_the_one_counted_afresh(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    names = [workspace.write(f"{i}.jsonl", [ask(40 * i + j, "German") for j in range(40)]) for i in range(4)]
    datasets = {"rows": {"source": {"train_urls": names}, "format": CHAT}}
    workspace.recipe(datasets).build()
    store = workspace.project.store
    first = current(workspace.project, "rows", "tokenized_examples")
    drift.load_profile(store, first)
    workspace.write("1.jsonl", [ask(1000 + j, "French") for j in range(25)])
    workspace.build()
    second = current(workspace.project, "rows", "tokenized_examples")
    path = f"mini/rows/tokenized_examples/{drift.PROFILES_FOLDER}/{second.version}.json"
    store.remove(path)
    step_by_step = drift.load_profile(store, second, first)
    store.remove(path)

    assert first.version != second.version
    assert step_by_step == drift.load_profile(store, second)
    assert step_by_step["languages"] == {"French": 25, "German": 120}


@pytest.mark.slow
def test_changed_data_warns_then_blocks_and_trainers_keep_their_build(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    first = write(workspace, [ask(i, "English") for i in range(ROWS)]).build()
    # A first build has nothing to compare with, and the same data has not moved.
    assert result_of(first, "drift", "rows", "tokenized_examples").outcome == "not_applicable"
    assert judged(workspace, "drift", "rows", "tokenized_examples").outcome == "not_applicable"

    mixed = [ask(i, "German" if i % 20 == 0 else "English") for i in range(ROWS)]
    warned = result_of(write(workspace, mixed).build(), "drift", "rows", "tokenized_examples")
    assert (warned.outcome, warned.severity, warned.blocking) == ("failed", "warn", False)
    assert warned.value is not None
    assert 0.1 < warned.value < 0.25
    assert warned.what.startswith("distribution of languages: English 100.0 % → 95.0 %; German 0.0 % → 5.0 % since")
    published = cross_stage.load_published(workspace.project.store, "mini")

    with pytest.raises(GateError, match=r"tokenized_examples: drift: 1\.\d+ \(distribution of languages: English") as e:
        write(workspace, [ask(i, "German" if i % 2 else "English") for i in range(ROWS)]).build()
    assert "accept it for one build with a waiver in gates.waivers" in str(e.value)
    assert cross_stage.load_published(workspace.project.store, "mini") == published

    waiver = {"check": "drift", "dataset": "rows", "at_most": 5, "reason": "half of the chats are German from now on"}
    waived = write(
        workspace, [ask(i, "German" if i % 2 else "English") for i in range(ROWS)], gates={"waivers": [waiver]}
    ).build()
    assert result_of(waived, "drift", "rows", "tokenized_examples").waiver == waiver["reason"]
    assert cross_stage.load_published(workspace.project.store, "mini") != published


@pytest.mark.slow
def test_change_of_options_explains_drift(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write(workspace, [ask(i, "English" if i % 2 else "German") for i in range(ROWS)]).build()
    write(
        workspace,
        [ask(i, "German") for i in range(ROWS)],
        groups={"template": {"chat_template": "chatml"}, "filters": {"deduplicate": "exact"}},
    )
    result = result_of(workspace.build(), "drift", "rows", "tokenized_examples")

    assert result.outcome == "failed"
    assert not result.blocking
    assert result.what.endswith("the options of mini/rows/canonical_rows changed as well")


def test_small_dataset_that_is_wholly_another_one_is_not_judged(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write(workspace, [ask(i, "English") for i in range(60)]).build()
    result = result_of(write(workspace, [ask(i, "Greek") for i in range(60)]).build(), "drift", "rows",
                       "tokenized_examples")  # fmt: skip

    assert result.outcome == "not_applicable"
    assert "too few rows" in result.what


def test_profiles_go_with_their_versions(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    for language in ("English", "Greek", "German"):
        write(workspace, [ask(i, language) for i in range(20)]).build()
    folder = f"mini/rows/tokenized_examples/{drift.PROFILES_FOLDER}"
    store = workspace.project.store
    before = set(store.list(folder))
    gc.collect_garbage(workspace.project, keep=1, dry_run=False)

    assert len(before) == 3
    assert len(store.list(folder)) == 1
