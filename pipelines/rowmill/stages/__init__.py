"""The stages, one module or package for each Dagster asset. `catalog.py` lists them in order.

What belongs here: one stage's work over all parts of a dataset or all datasets of a recipe. What does not: which
stage follows which and what is reused (`build/`), or any library's own work. No stage imports another; what two
stages share is in `base.py`, `part_files.py` and the modules beside them.
"""
