"""Text to token ids and back: opening a tokenizer, encoding, and which tokens cover which characters."""
