"""Print which tokens of two conversations TRL trains, and which tokens rowmill trains.

pip install '.[train]'
python docs/how-to/compare_masks.py Qwen/Qwen3-0.6B
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rowmill import Rejected, sft_tokenize

ROWS: Sequence[Mapping[str, Any]] = (
    {
        "messages": [
            {"role": "user", "content": "Capital of France?"},
            {"role": "assistant", "content": "Paris."},
            {"role": "user", "content": "And of Italy?"},
            {"role": "assistant", "content": "Rome."},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "How does ChatML end a turn?"},
            {"role": "assistant", "content": "With <|im_end|>, which the server takes as a stop."},
        ]
    },
)


def mark_trained_tokens(tokenizer: Any, ids: Iterable[int], trained: Iterable[bool]) -> str:
    """Decode ids, with trained ones between ⟦ and ⟧ and every control token as `[its id]`."""
    control = set(tokenizer.all_special_ids)
    marked, was_trained = "", False
    for token, is_trained in zip(ids, trained, strict=True):
        if is_trained != was_trained:
            marked += "⟦" if is_trained else "⟧"
        marked += f"[{token}]" if token in control else tokenizer.decode([token])
        was_trained = is_trained
    return marked + ("⟧" if was_trained else "")


def tokenize_as_trl_does(tokenizer: Any, messages: Sequence[Any], template: str) -> str:
    """Tokenize with a template that has `{% generation %}`, as `SFTConfig(assistant_only_loss=True)` does."""
    # The call that `SFTTrainer` makes; the mask is transformers'.
    made = tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return mark_trained_tokens(tokenizer, made["input_ids"], map(bool, made["assistant_masks"]))


def tokenize_as_rowmill_does(tokenizer: Any, row: Mapping[str, Any], name: str) -> str:
    """Tokenize as a build does."""
    [examples] = sft_tokenize([row], name, max_seq_len=2048)
    if isinstance(examples, Rejected):
        return f"rejected: {examples.reason}"
    return mark_trained_tokens(tokenizer, examples[0].ids.tolist(), examples[0].loss_mask.tolist())


def main() -> None:
    """Print the conversations as both train them."""
    from transformers import AutoTokenizer
    from trl.chat_template_utils import get_training_chat_template

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="a folder, or a name on the Hugging Face hub, with a template that TRL knows")
    name = parser.parse_args().tokenizer
    tokenizer = AutoTokenizer.from_pretrained(name)
    template = get_training_chat_template(tokenizer) or tokenizer.chat_template
    for row in ROWS:
        print("TRL:", tokenize_as_trl_does(tokenizer, row["messages"], template), sep="\n")
        print("rowmill:", tokenize_as_rowmill_does(tokenizer, row, name), sep="\n")


if __name__ == "__main__":
    main()
