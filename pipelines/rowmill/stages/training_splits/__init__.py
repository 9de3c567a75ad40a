"""The stage `training_splits`: the training order over all datasets, and leaks between splits."""
