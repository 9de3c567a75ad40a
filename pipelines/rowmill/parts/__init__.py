"""Work in parts, which knows neither recipes nor stages: `functions.py` makes parts, `context.py` maps over them.

`shuffle.py` brings lines of all parts together, `accounts.py` says what became of their records, and `rewriting.py`
removes rows from finished parts.
"""
