"""Rendering: a conversation to the text that a chat template prints, with the span of every message.

What belongs here: the template's sandbox, the two engines and their comparison, probes, the bundled templates. What
does not: which characters train (`masking/`).
"""
