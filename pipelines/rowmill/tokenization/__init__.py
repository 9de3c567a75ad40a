"""Text to token ids and back: opening a tokenizer, encoding, and which tokens cover which characters.

What belongs here: the tokenizer's files and identity, batches of encoded texts, examples and their cuts. What does not:
where texts and character ranges come from (`conversation/`, `stages/`).
"""
