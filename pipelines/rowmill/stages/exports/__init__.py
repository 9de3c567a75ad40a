"""The order and the packed shards → one export: the same tokens in a trainer's file format."""
