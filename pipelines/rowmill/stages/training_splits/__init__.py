"""The stage `training_splits`: the training order over all datasets, and leaks between splits.

What belongs here: the order's files and the leakage checks. What does not: ordering a mixture (`packing/`).
"""
