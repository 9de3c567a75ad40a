"""The stage `gpu_partitions`: the order and the shards become one partition per data-parallel rank.

What belongs here: the ranks' parts, their files, publishing them for trainers. What does not: the order
(`training_splits/`), which place belongs to which rank (`packing/rank_assignment.py`), reading (`reader/`).
"""
