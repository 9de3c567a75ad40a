"""Bare tokenizing: `encode_batch` of rendered text on all cores, no mask, no packing, nothing written.

    python benchmarks/peer_encode.py texts.jsonl tokenizer.json

Every line of the file is one text as JSON. Prints a JSON line with the number of tokens.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer


def main(texts: str, tokenizer: str) -> None:
    """Encode all texts at once."""
    rendered = [json.loads(line) for line in Path(texts).read_bytes().splitlines()]
    encoded = Tokenizer.from_file(tokenizer).encode_batch(rendered, add_special_tokens=False)
    print(json.dumps({"peer": f"tokenizers {version('tokenizers')}", "tokens": sum(len(one.ids) for one in encoded)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
