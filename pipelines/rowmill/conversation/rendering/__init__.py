"""Render conversations by their chat template, with the span of every message.

What belongs here: the template's sandbox, the two engines and their comparison, probes, the bundled templates. What
does not: which characters train (`masking/`).
"""
