"""The stage `packed_shards`: examples become sequences of `seq_len` tokens, stored in shards.

What belongs here: pack groups, their plans and shards, validation held out by number. What does not: the packing
algorithm and the borders of groups (`packing/`), the files' columns (`shards/`).
"""
