"""The engine of rowmill: raw datasets in, packed token shards and per-GPU partitions out.

What belongs here: nothing but this map. The engine knows no Dagster; `assets/` shows what it did.

    source file ─ sources ─► records
    record ─ formats, tools, reasoning (`canonicalization`) ─► canonical row ─ filters, splits ─► rows.parquet
    row ─ rendering ─► text ─ masking ─► trained characters ─ tokenization ─► tokens ─ truncation, if too long ─►
        example (`preparation`; plain chats a batch at a time in `plain_chats`) ─► examples.parquet
    table rows ─ ordering, assembly ─► examples of records (`record_rows`, `record_tokens`)
    examples' lengths ─ packing ─► plan ─ shards ─► sequences ─ mixing ─► order ─ partitions ─► shards per rank
    shards per rank ─ reader ─► batches ─► trainer ─► generated text ─ parsing ─► records

Floors, each importing only those below it (the contract in `pyproject.toml` names every module):

    doors       cli, inspection, tracing, verification, reports, ui …     parse a wish, print an answer
    corridor    build                                                     which stage after which, what is reused
    halls       stages, parts, preparation, canonicalization …            rooms put together, over parts
    rooms       sources, formats, rendering, masking, packing, shards …   one subject each; none imports another
    nouns       rows, records, examples, ledger, manifest, contract       what rooms hand to each other
    ground      config, errors, storage, permutation                      what everything stands on

One real row on this way, with its bytes: `docs/walk.md`.
"""
