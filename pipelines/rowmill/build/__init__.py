"""Building a recipe: the graph of stages, running them, gates, reuse, publishing, garbage collection.

What belongs here: which stage runs when, and on what. What does not: a stage's work (`stages/`), printing (`reports/`).
"""
