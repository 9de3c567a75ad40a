"""Builds of real data: five datasets, three tokenizers, every row in the ledger, every id equal to the reference's."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rowmill.build import runner, steps
from rowmill.build.steps import Project
from tests.support.recipes import current, current_rows
from tests.support.tiers import mark_all_but

pytestmark = [pytest.mark.slow, pytest.mark.real_data]

ROWS = {"gsm8k": 7473, "glaive": 300, "fastchat": 500, "tau": 100, "rfcs": 648}
TEMPLATES = {
    "qwen3": "llamacpp__Qwen-Qwen3-0.6B.jinja",
    "smollm3": "llamacpp__HuggingFaceTB-SmolLM3-3B.jinja",
    "tinyllama": "chujiezheng__zephyr.jinja",
}
WAIVER = "airline dialogues are longer than the context with their tools; truncated by exchange on purpose"


def _recipe(real_data: Path, tokenizer: str) -> dict[str, Any]:
    def chat(name: str, **options: Any) -> dict[str, Any]:
        return {"source": {"train_urls": [str(real_data / name)]}, "format": {"kind": "chat"}, **options}

    # Zephyr's template prints neither tools nor calls, SmolLM3's no calls: counted here, rejected by default.
    kinds = ("tool_list", "call_name", "call_arguments", "text_beside_call")
    tools = {} if tokenizer == "qwen3" else {"template": {"on_dropped": dict.fromkeys(kinds, "count")}}
    pairs = {"kind": "supervised", "input_field": "question", "output_field": "answer", "separate_with": "\n"}
    return {
        "tokenizer": str(real_data / "tokenizers" / tokenizer),
        "seq_len": 4096,
        "defaults": {"template": {"chat_template": {"file": str(real_data / "templates" / TEMPLATES[tokenizer])}}},
        "datasets": {
            "gsm8k": {"source": {"train_urls": [str(real_data / "math/gsm8k_train.jsonl")]}, "format": pairs},
            "glaive": chat("tools/glaive_toolcall_en_demo.json", **tools),
            "fastchat": chat("chat/fastchat_dummy_conversation.json"),
            "tau": chat("tools/tau_airline_gpt4o.messages.jsonl", **tools),
            "rfcs": {"source": {"train_urls": [str(real_data / "text/rust_rfcs.jsonl")]}, "format": {"kind": "text"}},
        },
        "partitions": {"world_size": 2},
        "gates": {
            **{check: {"at_most": 1.0} for check in ("zero_loss_rows", "rejects", "end_to_end_loss")},
            "waivers": [{"check": "context_overflow", "dataset": "tau", "at_most": 1.0, "reason": WAIVER}],
        },
    }


@pytest.fixture(scope="module", params=mark_all_but(["qwen3"], ["qwen3", "smollm3", "tinyllama"]))
def built(request: pytest.FixtureRequest, real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Build the whole recipe with one of the tokenizers."""
    folder = tmp_path_factory.mktemp(request.param) / "configs"
    folder.mkdir()
    (folder / "real.yaml").write_text(yaml.safe_dump(_recipe(real_data, request.param)), encoding="utf-8")
    project = steps.open_project(folder / "real.yaml")
    runner.build(project)
    return project


@pytest.mark.parametrize("dataset", list(ROWS))
def test_every_record_and_token_ends_in_one_state_or_class(built: Project, dataset: str) -> None:
    canonical = current(built, dataset, "canonical_rows")
    tokenized = current(built, dataset, "tokenized_examples")

    assert sum(count for _, _, count in canonical.ledger) == ROWS[dataset]
    kept = sum(count for state, _, count in canonical.ledger if state == "kept")
    assert sum(count for _, _, count in tokenized.ledger) == kept
    for made in (canonical, tokenized):
        lines = current_rows(built, dataset, made.stage, file="ledger")
        assert len({row["row_id"] for row in lines}) == len(lines) == sum(count for _, _, count in made.ledger)
    original = sum(
        one["original_tokens"] for one in current_rows(built, dataset, "tokenized_examples", file="examples")
    )
    assert sum(count for _, name, count in tokenized.token_ledger if name != "dropped") == original
    packed = current(built, dataset, "packed_shards")
    assert packed.facts["tokens"] + packed.facts["tokens_left_out"] == tokenized.facts["tokens"]
    assert packed.facts["conservation"] == 0


@pytest.mark.parametrize("dataset", ["glaive", "fastchat", "tau"])
def test_ids_of_untruncated_chats_equal_transformers(built: Project, dataset: str) -> None:
    import orjson
    from transformers import AutoTokenizer

    options = built.recipe.datasets[dataset].template.chat_template
    assert options is not None and not isinstance(options, str) and options.file is not None
    tokenizer = AutoTokenizer.from_pretrained(built.recipe.tokenizer_choice.name)
    tokenizer.chat_template = Path(options.file).read_text(encoding="utf-8")
    rows = {row["row_id"]: row for row in current_rows(built, dataset, "canonical_rows", file="rows")}
    compared = 0
    for example in current_rows(built, dataset, "tokenized_examples", file="examples"):
        if example["original_tokens"] != example["tokens"]:
            continue
        row = rows[example["row_ids"][0]]
        messages, tools = orjson.loads(row["messages"]), row["tools"] and orjson.loads(row["tools"])
        for message in messages:
            message.pop("arguments_source", None)
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        assert example["input_ids"] == tokenizer(text, add_special_tokens=False).input_ids
        compared += 1
    zephyr_prints_no_tools = "zephyr" in options.file
    assert compared > 100 or dataset == "tau" or zephyr_prints_no_tools


def test_fast_path_is_taken_rows_that_never_fit_keep_their_end_and_a_second_build_reuses_all(built: Project) -> None:
    made = current(built, "fastchat", "tokenized_examples")
    assert made.details["engine"]["name"] == "gigatoken"
    assert made.facts["reference_path_texts"] < made.facts["examples"] / 10
    assert made.facts["fast_path_mismatches"] == 0
    examples = current_rows(built, "tau", "tokenized_examples", file="examples")
    shortened = [row for row in examples if row["original_tokens"] > row["tokens"]]

    # Without the tools, which zephyr does not print, every dialogue fits.
    assert bool(shortened) is ("tinyllama" not in built.recipe.tokenizer_choice.name)
    for row in shortened:
        removed = row["exchanges_removed"] + row["reasoning_removed"] + row["tokens_cut"]
        assert row["original_tokens"] == row["tokens"] + removed
        assert row["tokens"] <= 4096
        assert row["trained_tokens"] > 0
    assert all(report.reused for _, report, _ in runner.build(built))


def test_pairs_train_exactly_the_answer_and_its_end(built: Project) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(built.recipe.tokenizer_choice.name)
    rows = {row["row_id"]: row for row in current_rows(built, "gsm8k", "canonical_rows", file="rows")}
    for example in current_rows(built, "gsm8k", "tokenized_examples", file="examples"):
        trained = [i for i, mask in zip(example["input_ids"], example["loss_mask"], strict=True) if mask]
        assert trained[-1] == tokenizer.eos_token_id
        row = rows[example["row_ids"][0]]
        assert tokenizer.decode(trained[:-1]).strip() == row["output"].strip()
        assert sum(example["loss_mask"]) == example["trained_tokens"] == len(trained)
