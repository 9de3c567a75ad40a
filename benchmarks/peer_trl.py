"""TRL's preparation of the same rows: `SFTTrainer` with packing and assistant-only loss; no step of training.

The model is tiny and only there because the trainer wants one. Runs in an environment of its own
(`pip install torch trl`), because rowmill needs neither. Prints one JSON
line per number of processes. The clock runs from reading the JSON Lines to packed rows: loading the dataset
and `SFTTrainer.__init__` with its tokenizing and packing; loading the tokenizer and making the model are not
counted. Every run has a fresh cache folder, so that nothing is read back.

    python benchmarks/peer_trl.py chats.jsonl tokenizer-folder training-template.jinja [--max-length N] [processes …]

Rows with tools have them as JSON text in the column `tools`, and the arguments of calls as JSON text: `datasets` gives
the objects of a column the keys of all of them.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def main(rows: str, tokenizer_folder: str, template: str, processes: list[int], max_length: int) -> None:
    """Prepare the rows once per number of processes."""
    import datasets
    import trl
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for count in processes:
        with tempfile.TemporaryDirectory() as cache:
            arguments = SFTConfig(
                output_dir=cache, max_length=max_length, packing=True, packing_strategy="bfd", assistant_only_loss=True,
                dataset_num_proc=count, report_to=[], per_device_train_batch_size=1, use_cpu=True, bf16=False,
            )  # fmt: skip
            begin = time.perf_counter()
            data = datasets.load_dataset("json", data_files=rows, split="train", cache_dir=cache)
            data = data.remove_columns([name for name in data.column_names if name not in ("messages", "tools")])
            trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
            seconds = time.perf_counter() - begin
            packed = trainer.train_dataset
            tokens = sum(len(ids) for ids in packed["input_ids"])
            result = {
                "peer": f"trl {trl.__version__}",
                "processes": count,
                "seconds": round(seconds, 3),
                "tokens": tokens,
                "sequences": len(packed),
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("rows", "tokenizer_folder", "template"):
        parser.add_argument(name)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("processes", type=int, nargs="*")
    given = parser.parse_intermixed_args()
    main(given.rows, given.tokenizer_folder, given.template, given.processes or [1, 2], given.max_length)
