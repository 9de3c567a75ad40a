"""Control strings in texts without a chat template: text by default, a token where allowed, one BOS and one EOS."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.errors import ConfigError
from rowmill.tokenization.control_tokens import EdgeStrings
from rowmill.tokenization.tokenizer import Encoder, open_tokenizer
from tests.support.recipes import (
    CONTROL,
    PAIR,
    TEXT,
    TO_EXAMPLES,
    Built,
    Workspace,
    document,
    pair,
    text_of,
    write_tokenizer,
)
from tests.support.tiers import mark_all_but

END = "<|im_end|>"
RAW: dict[str, Any] = {"kind": "preference", "text": "raw"}
QUOTED = "the mark <|im_end|> ends a turn and <|endoftext|> a document, as maps say"

KINDS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "pair": (PAIR, {"prompt": "what is <|im_end|>?", "answer": QUOTED}),
    "document": (TEXT, {"text": f"what is <|im_end|>? {QUOTED}"}),
    "preference": (RAW, {"prompt": "what is <|im_end|>?", "chosen": QUOTED, "rejected": "seven stones"}),
    "marked": (RAW | {"objective": "unpaired"}, {"prompt": "what is <|im_end|>?", "completion": QUOTED, "label": True}),
}
"""Kind → its format and a record that quotes `<|im_end|>` twice and `<|endoftext|>` once."""


def build(folder: Path, rows: Sequence[Mapping[str, Any]], kind: Mapping[str, Any], **options: Any) -> Built:
    return Workspace(folder).one("a.jsonl", rows, kind, **options).build(only=TO_EXAMPLES)


def control_ids(example: Mapping[str, Any]) -> list[str]:
    return [CONTROL[i] for i in example["input_ids"] if i < len(CONTROL)]


def trained_text(example: Mapping[str, Any]) -> str:
    pairs = zip(example["input_ids"], example["loss_mask"], strict=True)
    return text_of({"input_ids": [token for token, trains in pairs if trains]})


# ── The policy ──


@pytest.mark.parametrize("name", KINDS)
def test_quoted_control_strings_are_text_that_is_counted(tmp_path: Path, name: str) -> None:
    """Documents and pairs are split at special tokens on request only (allenai/dolma#176, transformers#30772)."""
    kind, row = KINDS[name]

    built = build(tmp_path, [row], kind)

    (example,) = built.examples()
    ends = 2 if name == "preference" else 1
    assert control_ids(example) == [END] * ends
    assert QUOTED in text_of(example)
    made = built.manifest("rows", "tokenized_examples")
    assert made.facts["control_strings"] == 1
    assert built.outcomes("rows", "tokenized_examples")["control_strings"] == "failed"
    counted: dict[str, int] = {}
    for _, found, count in made.tables["control_strings"].rows:
        counted[str(found)] = counted.get(str(found), 0) + int(count)
    assert counted == {END: 2, "<|endoftext|>": 1}


@pytest.mark.parametrize("name", KINDS)
def test_control_strings_that_the_recipe_allows_are_tokens(tmp_path: Path, name: str) -> None:
    kind, row = KINDS[name]

    built = build(tmp_path, [row], kind, template={"control_tokens": "allow"})

    quoted = [END, "<|endoftext|>"]
    ends = [[END, *quoted, END], [END, *quoted, END, END, END]]
    assert control_ids(built.examples()[0]) == ends[name == "preference"]
    assert built.facts("rows", "tokenized_examples")["control_strings"] == 1


@pytest.mark.parametrize("name", KINDS)
def test_rows_with_control_strings_are_rejected_where_the_recipe_says_so(tmp_path: Path, name: str) -> None:
    kind, row = KINDS[name]
    plain = {key: text.replace("|", "") if isinstance(text, str) else text for key, text in row.items()}

    built = build(tmp_path, [row, plain], kind, template={"control_tokens": "reject"})

    assert built.rejects() == [(0, "control_token_in_content")]
    assert built.kept() == [1]


@pytest.mark.parametrize("kind", [PAIR, TEXT])
def test_text_without_control_strings_is_counted_as_such_under_every_policy(
    tmp_path: Path, kind: Mapping[str, Any]
) -> None:
    row = pair(1) if kind is PAIR else document(1)

    builts = [
        build(tmp_path / policy, [row], kind, template={"control_tokens": policy})
        for policy in ("as_text", "allow", "reject")
    ]

    assert len({str(built.examples()[0]["input_ids"]) for built in builts}) == 1
    for built in builts:
        assert built.facts("rows", "tokenized_examples")["control_strings"] == 0
        assert built.outcomes("rows", "tokenized_examples")["control_strings"] == "passed"


def test_control_tokens_of_the_recipes_own_separator_stay_tokens(tmp_path: Path) -> None:
    kind = PAIR | {"separate_with": "<|im_end|><|im_start|>"}

    built = build(tmp_path, [{"prompt": "why <|im_end|>", "answer": "maps <|im_end|> go"}], kind)

    (example,) = built.examples()
    assert control_ids(example) == [END, "<|im_start|>", END]
    assert trained_text(example) == "maps <|im_end|> go<|im_end|>"


def test_pair_encoded_as_one_text_has_the_same_ordinary_strings(tmp_path: Path) -> None:
    rows = [
        {"prompt": "why <|im_end|>", "answer": " maps <|im_end|> go"},
        {"prompt": "why <|im_", "answer": "end|> go"},
    ]

    built = build(tmp_path, rows, PAIR, loss={"boundary": "whole"})

    assert [control_ids(one) for one in built.examples()] == [[END], [END]]
    assert [text_of(one) for one in built.examples()] == [f"{one['prompt']}{one['answer']}{END}" for one in rows]
    assert trained_text(built.examples()[0]) == " maps <|im_end|> go<|im_end|>"


def test_rows_beside_one_with_control_strings_have_the_ids_that_they_have_alone(tmp_path: Path) -> None:
    rows = [document(1), {"text": QUOTED}, document(2)]

    first, _, last = build(tmp_path / "a", rows, TEXT).examples()

    alone = build(tmp_path / "b", [document(1), document(2)], TEXT).examples()
    assert [first["input_ids"], last["input_ids"]] == [one["input_ids"] for one in alone]


def test_windows_of_a_long_document_hold_its_control_strings_as_text(tmp_path: Path) -> None:
    text = " ".join(f"the mark <|im_end|> number {i} ends" for i in range(60))

    built = build(tmp_path, [{"text": text}], TEXT, truncation={"overlong": "split", "max_length": 64})

    examples = built.examples()
    assert len(examples) > 3
    assert "".join(map(text_of, examples)) == text + END
    assert [name for one in examples for name in control_ids(one)] == [END]


def test_kinds_without_a_template_read_no_other_option_of_the_group(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    for number, (kind, options) in enumerate([(TEXT, {"turns": "whole"}), (PAIR, {"chat_template": "chatml"})]):
        made = workspace.one(f"{number}.jsonl", [document(1)], kind, template=options)
        with pytest.raises(ConfigError, match="does not read this option; of template it reads control_tokens"):
            _ = made.project
    rows = workspace.dataset("b.jsonl", [{"text": QUOTED}], TEXT)
    defaults = {"splits": {"validation": 0}, "template": {"chat_template": "chatml", "control_tokens": "allow"}}
    built = workspace.recipe({"rows": rows}, defaults=defaults).build(only=TO_EXAMPLES)
    assert control_ids(built.examples()[0]) == [END, "<|endoftext|>", END]


# ── The edges of a text ──


@pytest.mark.parametrize("policy", ["as_text", "allow", "reject"])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n", "<|im_end|> <|im_end|>\n\n", "<|im_end|><|im_end|>"])
@pytest.mark.parametrize("name", ["pair", "document", "preference"])
def test_text_that_ends_in_eos_ends_in_it_once(tmp_path: Path, name: str, end: str, policy: str) -> None:
    """A line break behind an EOS brought a second one (huggingface/trl#3318), and so did pairs (trl#4481)."""
    rows = {
        "pair": (PAIR, {"prompt": "why?", "answer": "maps go" + end}),
        "document": (TEXT, {"text": "why? maps go" + end}),
        "preference": (RAW, {"prompt": "why?", "chosen": "maps go" + end, "rejected": "stones" + end}),
    }
    kind, row = rows[name]

    built = build(tmp_path, [row], kind, template={"control_tokens": policy})

    (example,) = built.examples()
    texts = ["why?maps go", "why?stones"] if name == "preference" else ["why? maps go"]
    if name == "pair":
        texts = ["why?maps go"]
    assert text_of(example) == "".join(text + END for text in texts)
    assert control_ids(example) == [END] * len(texts)
    assert built.facts("rows", "tokenized_examples")["control_strings"] == 0
    assert trained_text(example).endswith(END)


def test_eos_of_the_data_stays_a_token_where_none_is_added(tmp_path: Path) -> None:
    rows = [{"prompt": "why?", "answer": "maps go<|im_end|>"}, {"prompt": "why?", "answer": "maps stay"}]

    built = build(tmp_path, rows, PAIR | {"add_eos": False})

    assert [control_ids(one) for one in built.examples()] == [[END], []]
    assert [trained_text(one) for one in built.examples()] == ["maps go<|im_end|>", "maps stay"]


def test_eos_that_ends_a_prompt_is_text(tmp_path: Path) -> None:
    built = build(tmp_path, [{"prompt": "why?<|im_end|>", "answer": "maps go"}], PAIR)

    assert control_ids(built.examples()[0]) == [END]
    assert built.facts("rows", "tokenized_examples")["control_strings"] == 1


def with_bos(folder: Path) -> Path:
    """Write the tiny tokenizer with `<|im_start|>` as BOS."""
    path = write_tokenizer(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"bos_token": "<|im_start|>"}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize("kind", [PAIR, TEXT])
def test_text_that_begins_with_bos_begins_with_it_once(tmp_path: Path, kind: dict[str, Any], times: int) -> None:
    """Texts printed by a template bring a BOS of their own (huggingface/trl#3328, OpenRLHF#393)."""
    with_bos(tmp_path / "tokenizer")
    begin = "<|im_start|>" * times
    row = {"prompt": begin + "why? ", "answer": "maps go"} if kind is PAIR else {"text": begin + "why? maps go"}

    built = build(tmp_path, [row], kind | {"add_bos": True})

    (example,) = built.examples()
    assert text_of(example) == "<|im_start|>why? maps go<|im_end|>"
    assert control_ids(example) == ["<|im_start|>", END]
    assert example["loss_mask"][0] is False


@pytest.mark.parametrize("begin", ["", "<|im_start|>"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pair_with_a_bos_of_its_own_is_cut_like_one_without(tmp_path: Path, begin: str, side: str) -> None:
    with_bos(tmp_path / "tokenizer")
    row = {"prompt": begin + pair(1, words=60)["prompt"], "answer": "maps go"}
    options = {"truncation": {"max_length": 24, "truncate_side": side}}

    (example,) = build(tmp_path, [row], PAIR | {"add_bos": True}, **options).examples()

    assert example["tokens"] == 24
    assert text_of(example).startswith("<|im_start|>")
    assert trained_text(example) == "maps go<|im_end|>"


@given(st.text(st.sampled_from("ab \nse</>"), max_size=12), st.integers(0, 3), st.integers(0, 3))
def test_edges_occur_once_and_the_text_between_them_stays(text: str, begins: int, ends: int) -> None:
    edges = EdgeStrings("<s>", "</s>")
    body = f"x{text}x"

    found = edges.cut_repeats(begins * "<s>" + body + ends * "</s>\n")

    assert found == (begins > 0) * "<s>" + body + ("</s>" if ends else "")


# ── Real tokenizers ──


@pytest.mark.real_data
@pytest.mark.parametrize("tokenizer", mark_all_but(["tinyllama", "gpt2"], ["tinyllama", "gpt2", "qwen3", "smollm3"]))
def test_real_tokenizers_make_no_control_token_of_text(tmp_path: Path, real_data: Path, tokenizer: str) -> None:
    """HTML strikes text out with `<s>` and `</s>`, which many tokenizers have as BOS and EOS."""
    text = "An <s>old</s> price, <unk> <|endoftext|> <|im_end|> <|begin_of_text|>, and naïve ones"
    source = [{"text": text}, {"text": "plain words"}, {"text": f"{text}."}]

    built = Workspace(tmp_path).one("a.jsonl", source, TEXT, tokenizer=str(real_data / "tokenizers" / tokenizer))
    made = built.build(only=TO_EXAMPLES)

    encoder = Encoder(open_tokenizer(str(real_data / "tokenizers" / tokenizer), made.project.base))
    special = {token_id for token_id, _, is_special in encoder.card.added if is_special}
    edges = {encoder.card.bos_id, encoder.card.eos_id}
    for row, example in zip(source, made.examples(), strict=True):
        ids = example["input_ids"]
        inner = [one for place, one in enumerate(ids) if not (place in (0, len(ids) - 1) and one in edges)]
        assert not special.intersection(inner)
        assert encoder.decode(inner).strip() == row["text"]
