"""The engine of rowmill: raw datasets in, packed token shards and per-GPU partitions out."""
