"""The stage `packed_shards`: examples become sequences of `seq_len` tokens, stored in shards."""
