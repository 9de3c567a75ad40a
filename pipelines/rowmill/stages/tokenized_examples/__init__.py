"""The stage `tokenized_examples`: rows become token ids with a loss mask.

What belongs here: rendering, masking, truncation and tokenization in their order, over batches and parts. What does
not: any of those steps' own work (`conversation/`, `tokenization/`, `tabular/`).
"""
