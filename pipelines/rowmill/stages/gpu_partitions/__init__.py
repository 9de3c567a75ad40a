"""The stage `gpu_partitions`: the order and the shards become one partition per data-parallel rank."""
