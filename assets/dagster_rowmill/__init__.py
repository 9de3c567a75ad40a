"""The Dagster layer: wraps the engine in assets, checks, schedules and pages, and computes nothing itself.

    definitions.py   recipes → Definitions, when Dagster loads them
    factory.py       a recipe's steps → assets; holds the only `@asset` and its gate
    history.py       reads Dagster's event log
    event_log.py     storage of the event log: Dagster's own files, kept open
    checks.py        checks → asset checks
    automation.py    job, nightly schedule, watching sensor, conditions
    resources.py     the storage root; the executors
    metadata.py      metadata of a stage's page
    reporting.py     which step of a run writes the report
    materialize.py   a whole recipe in one process, for `make demo`

Only public names of `dagster` are used, except in `history.py` and `event_log.py`, which say so. Never
`from __future__ import annotations` here: Dagster compares annotations when it defines an asset.
"""
