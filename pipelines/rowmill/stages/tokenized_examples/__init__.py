"""The stage `tokenized_examples`: rows become token ids with a loss mask."""
