"""The Dagster layer: gives the engine's work names, checks, schedules and pages, and computes nothing itself.

    definitions.py   recipes → Definitions, when Dagster asks
    factory.py       a recipe's road → assets; holds the only `@asset` and the gate in front of it
    history.py       what Dagster's event log says
    event_log.py     where it writes: its own files, kept open
    checks.py        checks → asset checks
    automation.py    job, nightly schedule, watching sensor, conditions
    resources.py     where built things lie; which executor
    metadata.py      what a stage's page shows
    reporting.py     which step of a run writes the recipe's report
    materialize.py   a whole recipe in one process, for `make demo`

Only public names of `dagster`, except in `history.py` and `event_log.py`, which say so. Never
`from __future__ import annotations` here: Dagster compares annotations when it defines an asset.
"""
