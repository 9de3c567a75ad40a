"""The kinds of data: `base.py` is the contract of a kind, `catalog.py` the list of them."""
