"""Put a published build on record in trackers that people have already: MLflow, Weights & Biases, OpenLineage.

    published output ─► BuildRecord ─► is it logged already? ─► client.py, in a process of its own, with a time limit
                        (reports/build_record.py)               (delivery.py)

A tracker changes no build: one that cannot be reached is a line in the log and on the asset's page, and is tried again
by the next build.
"""

from rowmill.tracking.options import AnyTracker, MlflowTracker, OpenLineageTracker, WandbTracker

__all__ = ["AnyTracker", "MlflowTracker", "OpenLineageTracker", "WandbTracker"]
