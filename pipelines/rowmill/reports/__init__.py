"""What people look at: console tables, progress, the HTML report, plots.

What belongs here: the wording and layout of what the engine returns. What does not: computing any of it.
"""
