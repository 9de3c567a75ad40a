"""Foundations that every package uses: config, errors, storage, JSON, number formats, the console.

What belongs here: code that another project could use unchanged. What does not: anything specific to rows or tokens.
"""
