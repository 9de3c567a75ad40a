"""The stage `packed_shards`: examples become sequences of `seq_len` tokens, stored in shards.

What belongs here: one plan for each split, validation held out by number, writing shards. What does not: the packing
algorithm (`packing/`), the files' columns (`shards/`).
"""
