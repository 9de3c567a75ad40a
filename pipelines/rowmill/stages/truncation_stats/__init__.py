"""The stage `truncation_stats`: what truncation removed, and the effect of other context lengths."""
