"""Foundations that every package uses: config, errors, storage, JSON, number formats, the console."""
