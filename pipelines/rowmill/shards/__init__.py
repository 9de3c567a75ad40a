"""Native shards: packed sequences in Parquet, and reading them back.

What belongs here: the columns of a shard, gathering sequences, conventions of labels. What does not: other trainers'
file formats (`exports/`), batches for a trainer (`reader/`).
"""
