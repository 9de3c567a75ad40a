"""The stage `truncation_stats`: what truncation removed, and what another context length would do.

What belongs here: counting and planning anew over lengths. What does not: truncating.
"""
