"""The checks: what is measured against which bound, the results, and the gates that they close.

What belongs here: the catalog of checks, thresholds and waivers, judging facts, and checks of ancestors. What
does not: counting the facts (`stages/`), showing results (`reports/`, Dagster).
"""
