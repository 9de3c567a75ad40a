"""Prompts of the model families of Safe Synthesizer: text and delimiters of each."""

from typing import Any

import pytest

from rowmill.core.errors import ConfigError
from rowmill.kinds.tables.options import Delimiters
from rowmill.kinds.tables.prompt import FAMILIES, PromptFrame, build_prompt_frame
from rowmill.kinds.tables.records import Records
from rowmill.kinds.tables.schema import Column, RecordSchema
from rowmill.tokenization.tokenizer import TokenizerCard

SCHEMA = RecordSchema((Column("a", "string"), Column("b", "integer")))
ASKED = 'Generate a JSONL dataset with the following columns:  "a":<unk>,"b":<unk>'
TURN = f"user\n {ASKED} \n assistant\n"
INST = f"[INST] {ASKED} [/INST]"
SPREAD = '[INST] Generate a JSONL dataset with the following columns:  \n\n "a":<unk>,"b":<unk> [/INST]'
START, END = "<|im_start|>", "<|im_end|>"

LLAMA = ("<|begin_of_text|>", "<|eot_id|>")
SENTENCEPIECE = ("<s>", "</s>")


def framed(name: str, own: tuple[str | None, str], *others: str, **changes: Any) -> PromptFrame:
    """Build the prompt for a tokenizer with one id per character after its special tokens."""
    texts = list(dict.fromkeys(text for text in (*own, *others) if text is not None))
    special = {text: number for number, text in enumerate(texts)}
    begins = None if own[0] is None else special[own[0]]
    card = TokenizerCard(
        digest="", files={}, vocab_size=1 << 21, bos_id=begins, eos_id=special[own[1]], pad_id=None, special_tokens={},
        added=tuple((number, text, True) for text, number in special.items()), chat_template=None, adds_bos=True,
        adds_eos=False, byte_level=False, engine="", engine_version=None, refused={},
    )  # fmt: skip
    options: dict[str, Any] = {"data": {"group_training_examples_by": "a"}, "prompt": {"style": "reference"}}
    form = Records(**options, tokens=Delimiters(**changes))
    return build_prompt_frame(SCHEMA, card, lambda text: _encoded(text, special), form, tokenizer=name, where="format")


def _encoded(text: str, special: dict[str, int]) -> list[int]:
    ids: list[int] = []
    while text:
        found = next((one for one in special if text.startswith(one)), None)
        ids.append(special[found] if found is not None else 100 + ord(text[0]))
        text = text[1 if found is None else len(found) :]
    return ids


@pytest.mark.parametrize(
    ("name", "own", "others", "prompt", "begins", "ends"),
    [
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", SENTENCEPIECE, (), f"<s>{INST}</s>", "<s>", "</s>"),
        ("Qwen/Qwen2.5-7B", (None, "<|endoftext|>"), (START, END), f"{START}{TURN}", START, "<|endoftext|>"),
        ("Qwen/Qwen3-0.6B", (None, END), (START,), f"{START}{TURN}", START, END),
        ("meta-llama/Llama-3.2-1B-Instruct", LLAMA, (), TURN, *LLAMA),
        ("models/llama32", LLAMA, (), TURN, *LLAMA),
        ("HuggingFaceTB/SmolLM2-135M", ("<|endoftext|>", "<|endoftext|>"), (START, END), TURN, START, "<|endoftext|>"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", (START, END), (), TURN, START, END),
        (
            "HuggingFaceTB/SmolLM3-3B", (None, END), (START,),
            f"{START}user\n {ASKED} {END} \n assistant\n", START, END,
        ),
        ("mistralai/Mistral-7B-Instruct-v0.3", SENTENCEPIECE, (), f"<s>{SPREAD}</s>", *SENTENCEPIECE),
        ("nvidia/Llama-3.1-Nemotron-Nano-8B-v1", LLAMA, (), f"{LLAMA[0]}{SPREAD}{LLAMA[1]}", *LLAMA),
        ("nvidia/Nemotron-Nano-9B-v2", SENTENCEPIECE, (START, END), f"<s>{SPREAD}</s>", *SENTENCEPIECE),
        ("ibm-granite/granite-4.0-micro", LLAMA, (), f"{TURN}{LLAMA[1]}", *LLAMA),
    ],
)  # fmt: skip
def test_reference_prompt_of_a_family_has_its_text_edges_and_delimiters(
    name: str, own: tuple[str | None, str], others: tuple[str, ...], prompt: str, begins: str, ends: str
) -> None:
    made = framed(name, own, *others)
    assert (made.prompt_text, made.bos_text, made.eos_text) == (prompt, begins, ends)
    assert made.is_parity


def test_families_are_those_of_the_original_and_named_tokens_override_theirs() -> None:
    assert [one.names[0] for one in FAMILIES] == [
        "tinyllama", "qwen", "llama32", "smollm2", "smollm3", "mistral", "nemotron", "granite",
    ]  # fmt: skip

    own = ("<|end_of_text|>", "<|end_of_text|>")
    made = framed("ibm-granite/granite-3.3-2b-instruct", own, "<|start|>", bos="<|start|>")
    assert (made.bos_text, made.prompt_text) == ("<|start|>", f"{TURN}<|end_of_text|>")
    with pytest.raises(ConfigError, match="no template for the tokenizer 'gpt2', only for tinyllama, qwen"):
        framed("gpt2", SENTENCEPIECE)
