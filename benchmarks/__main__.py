"""Run every benchmark that needs no peer's environment: `python -m benchmarks`.

Results are appended to `benchmarks/results.jsonl`.
"""

import argparse

from benchmarks import (
    chats_to_shards,
    encoding,
    kinds,
    parsing,
    quiet_rebuild,
    rank_layouts,
    records,
    running,
    scale,
    shards,
    similar_rows,
    small_files,
    turns,
)

if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__).parse_args()
    chats_to_shards.main(10)
    encoding.main(3)
    parsing.main(20_000)
    records.main(50_000)
    scale.main(2.0)
    turns.main(1000)
    shards.main(12)
    running.main()
    quiet_rebuild.main(30)
    small_files.main(20_000)
    similar_rows.main(1000, 100)
    kinds.main(4)
    rank_layouts.main(10, ())
