"""The stages, one module or package per Dagster asset. `catalog.py` lists them in order.

What belongs here: one stage's work over all parts of a dataset or all datasets of a recipe. What does not: the graph of
stages and reuse (`build/`), or any library's work. No stage imports another; code that stages share is in `base.py`,
`part_files.py` and the other top-level modules here.
"""
