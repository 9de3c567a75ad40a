"""axolotl's preparation of the same rows: `axolotl preprocess` with a chat template, packing set; no step of training.

    python benchmarks/peer_axolotl.py rows.jsonl tokenizer-folder template.jinja [--max-length N]

Runs in an environment of its own (`pip install axolotl`). The model is tiny and only there because the configuration
names one. axolotl masks and tokenizes here, and packs when it trains. Prints a JSON line with the seconds of axolotl's
process from start to end and the number of tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path


def main(rows: str, tokenizer_folder: str, template: str, max_length: int) -> None:
    """Prepare the rows once, in a folder of its own."""
    from transformers import AutoTokenizer, Qwen2Config

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        tokenizer.save_pretrained(f"{folder}/model")
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=True,
        ).save_pretrained(f"{folder}/model")  # fmt: skip
        dataset = {
            "path": str(Path(rows).resolve()), "ds_type": "json", "type": "chat_template",
            "chat_template": "jinja", "chat_template_jinja": Path(template).read_text(encoding="utf-8"),
        }  # fmt: skip
        values = {
            "base_model": f"{folder}/model", "datasets": [dataset], "sequence_len": max_length, "sample_packing": True,
            "dataset_prepared_path": f"{folder}/prepared", "output_dir": f"{folder}/out", "dataset_num_proc": 2,
            "micro_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 1, "learning_rate": 1e-4,
            "optimizer": "adamw_torch", "val_set_size": 0, "bf16": False, "shuffle_merged_datasets": False,
        }  # fmt: skip
        # JSON is YAML.
        Path(folder, "config.yaml").write_text(json.dumps(values), encoding="utf-8")
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/hub", "AXOLOTL_DO_NOT_TRACK": "1"}
        command = [sys.executable, "-m", "axolotl.cli.preprocess", f"{folder}/config.yaml"]
        begin = time.perf_counter()
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | offline)
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        import datasets

        prepared = datasets.load_from_disk(str(next(Path(folder, "prepared").glob("*/dataset_info.json")).parent))
        tokens = sum(map(len, prepared["input_ids"]))
        result = {"peer": f"axolotl {version('axolotl')}", "process_s": round(seconds, 1), "tokens": tokens}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("rows", "tokenizer_folder", "template"):
        parser.add_argument(name)
    parser.add_argument("--max-length", type=int, default=4096)
    given = parser.parse_args()
    main(given.rows, given.tokenizer_folder, given.template, given.max_length)
