"""Native shards: the Parquet columns of a packed sequence, and reading sequences back.

What belongs here: what a shard's columns mean and how sequences are gathered. What does not: a trainer's own form
(`exports/`), batches for a trainer (`reader/`).
"""
