"""Native shards: packed sequences in Parquet, and reading them back."""
