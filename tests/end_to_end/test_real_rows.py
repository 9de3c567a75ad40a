"""Every real chat, instruction, tool, reasoning and preference file through one recipe: nothing is lost uncounted."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from rowmill.build import steps
from rowmill.sources.reading import load_source_parts
from tests.support.recipes import Built, build_project

pytestmark = [pytest.mark.slow, pytest.mark.real_data]

FORMATS = '''
"""The desired side of a file with one answer per record and a result on it."""
from rowmill.formats import RowFormat
from rowmill.schema.rows import Row


class Desired(RowFormat):
    def rows(self, record):
        return Row("conversation", messages=tuple(record["messages"])) if record["label"] else None
'''
CHOSEN = {
    "kind": "chat", "dataset_schema": "prompt_response", "prompt_fields": ["conversations"],
    "response_fields": ["chosen"], "role_field": "from", "content_field": "value",
}  # fmt: skip
CHAT, ALPACA, AUTO = {"kind": "chat"}, {"kind": "chat", "dataset_schema": "alpaca"}, {"kind": "auto"}
UNKNOWN = "unknown_schema"
FILES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "tinker": ("chat/tinker_conversations.jsonl", CHAT, 128, "messages"),
    "fastchat": ("chat/fastchat_dummy_conversation.json", CHAT, 500, "sharegpt"),
    "v1_sft": ("chat/v1_sft_demo.jsonl", CHAT, 500, "messages"),
    "bench_questions": ("chat/mt_bench_question.jsonl", CHAT, 80, UNKNOWN),
    "bench_references": ("chat/mt_bench_reference_gpt4.jsonl", CHAT, 30, UNKNOWN),
    "identity": ("instruct/identity.json", CHAT, 91, "alpaca"),
    "roleplay": ("instruct/gpteacher_roleplay.json", ALPACA, 1923, "alpaca"),
    "glaive": ("tools/glaive_toolcall_en_demo.json", CHAT, 300, "sharegpt"),
    "tau": ("tools/tau_airline_gpt4o.messages.jsonl", CHAT, 100, "messages"),
    "tool_questions": ("tools/bfcl/BFCL_v4_multiple.json", CHAT, 200, UNKNOWN),
    "reason_tools": ("reasoning/reason_tool_use_demo_50.jsonl", CHAT, 50, "messages"),
    "rlla": ("reasoning/toolrl_rlla_sft.json", CHAT, 400, "alpaca"),
    "rlla_questions": ("reasoning/toolrl_rlla_4k_test.parquet", CHAT, 80, UNKNOWN),
    "chosen": ("preference/dpo_en_demo.json", CHOSEN, 300, "prompt_response"),
    "chosen_messages": ("preference/v1_dpo_demo.jsonl", {**CHAT, "messages_field": "chosen_messages"}, 10, "messages"),
    "marked": ("preference/kto_en_demo.json", AUTO, 300, "messages"),
    "pairs": ("instruct/identity.json", {"kind": "supervised"}, 91, "alpaca"),
    "told": ("instruct/gpteacher_roleplay.json", AUTO, 1923, "prompt_response"),
    "texts": ("text/c4_demo.jsonl", AUTO, 300, "text"),
    "desired": ("preference/kto_en_demo.json", {"kind": "python", "class": "formats_of_files:Desired"}, 300, "python"),
}
"""Dataset → file, format, records, and their shape; records of no known one are all rejected."""


@pytest.fixture(scope="module")
def built(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("files")
    (folder / "configs").mkdir()
    (folder / "formats_of_files.py").write_text(FORMATS, encoding="utf-8")
    values = {
        "tokenizer": str(real_data / "tokenizers/qwen3"),
        "seq_len": 32768,
        "defaults": {
            "template": {"chat_template": {"file": str(real_data / "templates/llamacpp__Qwen-Qwen3-0.6B.jinja")}},
            "splits": {"validation": 0},
        },
        "datasets": {
            name: {"source": {"train_urls": [str(real_data / file)]}, "format": form}
            for name, (file, form, _, _) in FILES.items()
        },
        "execution": {"workers": 1},
        "gates": {
            "nonempty": {"at_least": 0},
            **{
                check: {"at_most": 1}
                for check in ("rejects", "duplicates", "zero_loss_rows", "content_dropped", "preference_data")
            },
        },
    }
    (folder / "configs/files.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    project = steps.open_project(folder / "configs/files.yaml")
    return build_project(project, only=("raw_dataset", "canonical_rows", "tokenized_examples"))


def rejects_of(built: Built, dataset: str) -> Counter[str]:
    return Counter(reason for _, reason in built.rejects(dataset))


def read_records(path: Path) -> list[Any]:
    content = path.read_bytes()
    if content.lstrip().startswith(b"["):
        return orjson.loads(content)
    return [orjson.loads(line) for line in content.split(b"\n") if line.strip()]


@pytest.mark.parametrize("dataset", list(FILES))
def test_every_record_of_a_file_is_kept_or_rejected_for_a_reason(built: Built, dataset: str) -> None:
    _, _, records, shape = FILES[dataset]
    canonical, tokenized = (built.manifest(dataset, stage) for stage in ("canonical_rows", "tokenized_examples"))
    rejects = rejects_of(built, dataset)

    assert canonical.facts["records"] == records
    assert tokenized.facts["kept"] + sum(rejects.values()) == records
    assert set(rejects) <= {"duplicate", "skipped_by_format", UNKNOWN}, (rejects, built.details(dataset)[-5:])
    assert rejects[UNKNOWN] == (records if shape == UNKNOWN else 0)
    assert {row["schema"] for row in built.rows_of(dataset, "canonical_rows", file="rows")} <= {shape}


# Leaf by leaf

SAID = {
    "v1_sft": ("messages",),
    "tau": ("messages", "tools"),
    "reason_tools": ("messages", "tools"),
    "rlla": ("instruction", "input", "output", "system"),
    "glaive": ("conversations", "tools", "system"),
    "chosen": ("conversations", "chosen"),
    "chosen_messages": ("chosen_messages",),
}
"""Where a file keeps what its rows say."""

NAMES_OF_SHAPES = frozenset(
    "user assistant system tool text function human gpt function_call observation tool_call tools reasoning".split()
)
"""Words that say what a part is, and are not said by anybody."""

NOT_SAID = ("id", "tool_call_id", "loss_weight")
"""Keys whose values Qwen3's template prints nowhere, and that are no content."""


def leaves(value: Any, key: str = "") -> Iterator[str]:
    """Yield every text and number that a value holds, JSON text inside it opened."""
    match value:
        case dict():
            for name, one in value.items():
                if name not in NOT_SAID:
                    yield from leaves(one, name)
        case list():
            for one in value:
                yield from leaves(one, key)
        case str() if value.strip() and value not in NAMES_OF_SHAPES:
            opened = _opened(value)
            if opened is None:
                yield value
            else:
                yield from leaves(opened, key)
        case _:
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield json.dumps(value)


def _opened(text: str) -> Any:
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def is_printed(leaf: str, text: str) -> bool:
    """Tell whether a text contains a leaf: unchanged, trimmed, JSON-escaped, or as separate tagged reasoning."""
    wanted = leaf.strip()
    if wanted in text or json.dumps(wanted, ensure_ascii=False)[1:-1] in text or json.dumps(wanted)[1:-1] in text:
        return True
    if "</think>" not in wanted:
        return False
    thought, _, said = wanted.replace("<think>", "").partition("</think>")
    return thought.strip() in text and said.strip() in text


@pytest.fixture(scope="module")
def printed(built: Built, real_data: Path) -> dict[str, list[tuple[Any, str]]]:
    """Return, per dataset, every kept record with the text that its tokens stand for."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_data / "tokenizers/qwen3")
    found: dict[str, list[tuple[Any, str]]] = {}
    for dataset in SAID:
        records, starts, before = read_records(real_data / FILES[dataset][0]), dict[str, int](), 0
        for source in load_source_parts(built.manifest(dataset, "raw_dataset")):
            starts[source.part_id] = before
            before += source.records
        for row in built.examples(dataset):
            part, _, number = row["row_ids"][0].rpartition(":")
            text = tokenizer.decode(row["input_ids"], skip_special_tokens=False)
            found.setdefault(dataset, []).append((records[starts[part] + int(number)], text))
    return found


@pytest.mark.parametrize("dataset", list(SAID))
def test_what_a_record_says_is_printed_or_counted_as_dropped(
    built: Built, printed: dict[str, list[tuple[Any, str]]], dataset: str
) -> None:
    lost: list[str] = []
    for record, text in printed[dataset]:
        said = {name: record[name] for name in SAID[dataset] if record.get(name) is not None}
        lost += [leaf for leaf in leaves(said) if not is_printed(leaf, text)]
    dropped = built.manifest(dataset, "tokenized_examples").facts["dropped_kinds"]
    assert len(printed[dataset]) > 5
    # Qwen3 prints the reasoning of the last turn only; what it leaves out is counted, piece by piece.
    assert len(lost) == sum(dropped.values()), lost[:3]
    assert set(dropped) <= {"reasoning"}


def test_weights_chosen_sides_and_labels_decide_what_trains(
    built: Built, printed: dict[str, list[tuple[Any, str]]], real_data: Path
) -> None:
    for (record, _), row in zip(printed["v1_sft"], built.examples("v1_sft"), strict=True):
        starts = [*row["span_starts"], row["tokens"]]
        spans = zip(row["span_messages"], starts, starts[1:], strict=False)
        trained = {message for message, start, stop in spans if message >= 0 and any(row["loss_mask"][start:stop])}
        weights = [one["loss_weight"] if one["role"] == "assistant" else 0 for one in record["messages"]]
        assert trained == {i for i, weight in enumerate(weights) if weight > 0}
    for record, text in printed["chosen"]:
        rejected = record["rejected"]["value"].strip()
        assert record["chosen"]["value"].strip() in text
        answer = text.rpartition("<|im_start|>assistant\n")[2]
        assert rejected not in answer or rejected in record["chosen"]["value"]
    undesired = sum(not record["label"] for record in read_records(real_data / FILES["desired"][0]))
    assert undesired > 0
    assert rejects_of(built, "desired")["skipped_by_format"] == undesired
