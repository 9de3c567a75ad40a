"""The stages, one module or package per Dagster asset. `catalog.py` lists them in order.

No stage imports another; code that stages share is in `base.py`, the other top-level modules here, and `parts/` below.
"""
