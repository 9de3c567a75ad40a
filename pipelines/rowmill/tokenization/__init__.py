"""Text to token ids and back: opening a tokenizer, encoding, and which token covers which characters.

What belongs here: the tokenizer's files and identity, batches of encoded texts, cuts of token columns. What does not:
where texts and character ranges come from (`conversation/`, `stages/`).
"""
