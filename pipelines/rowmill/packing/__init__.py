"""Plan with integers: which examples share a sequence, in which order sequences train, and on which rank.

What belongs here: pack plans, mixtures, rank assignment. What does not: tokens and files (`shards/`, `stages/`).
"""
