"""The stage `truncation_stats`: what truncation removed, and the effect of other context lengths.

What belongs here: counting and planning from lengths. What does not: truncating.
"""
