"""Words, n-grams and MinHashes of texts as arrays of 64-bit hashes, to find what resembles what.

What belongs here: splitting texts into words, hashing runs of words, coverage of benchmark items, near duplicates among
rows. What does not: which texts a row has and what becomes of the rows that are found (`stages/canonical_rows/`), the
options (`formats/removal_filters.py`), and leaks between splits, which compare token ids (`stages/training_splits/`).
"""
