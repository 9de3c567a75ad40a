"""The engine of rowmill: raw datasets in, packed token shards and per-GPU partitions out.

What belongs here: this map. The engine knows no Dagster; `dagster_rowmill` shows what it did.

    source file ─ sources ─► records
    record ─ formats ─► canonical row, with a split ─► rows.parquet
    row ─ conversation.rendering ─► text ─ conversation.masking ─► trained characters ─ tokenization ─► example
    table rows ─ tabular ─► examples of records
    examples' lengths ─ packing ─► plan ─ shards ─► sequences ─ packing ─► order of training ─► shards per rank
    shards per rank ─ reader ─► batches ─► trainer ─► generated text ─ tabular.parsing ─► records

Layers, each importing only those below it (held by the contract in `pyproject.toml`):

    cli          commands
    reports      console tables, the HTML report, plots
    inspection   questions about a build
    build        the graph of stages, running, gates, reuse
    stages       one module or package for each Dagster asset
    recipe       everything that decides the bytes, validated once
    exports · formats · stats
    checks · conversation · executors · packing · reader · shards · sources · tabular · tokenization
    schema       rows, examples, ledger, manifest: the nouns and their Arrow schemas
    core         config, errors, storage, text

One real row on this way, with its bytes: `docs/walk.md`.
"""
