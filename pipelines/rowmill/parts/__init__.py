"""Work in parts, which knows neither recipes nor stages.

`functions.py` makes parts, and brings lines of all parts together; `context.py` maps over them; `accounts.py` says what
became of their records, and rewrites finished parts.
"""
