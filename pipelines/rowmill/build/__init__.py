"""Builds a recipe: the graph of stages, running them, gates, reuse, publishing, garbage collection.

steps.py ─► gate.py ─► prepare.py ─► runner.py    the graph; open inputs; identity of an output, forecasts; making it
                           └► share.py            a share of the parts, without outputs
"""
