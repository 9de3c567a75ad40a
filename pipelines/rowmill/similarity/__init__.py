"""Words, n-grams and MinHashes of texts as arrays of 64-bit hashes, to find what resembles what."""
