"""The stage `training_splits`: the order of training over all datasets, and what leaks between splits.

What belongs here: the order's files and the leakage checks. What does not: how a mixture is ordered (`packing/`).
"""
