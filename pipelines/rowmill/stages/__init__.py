"""The stages, one module or package per Dagster asset. `catalog.py` lists them in order.

No stage imports another; code that stages share is in `base.py`, `part_files.py` and the other top-level modules here.
"""
