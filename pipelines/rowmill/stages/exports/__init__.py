"""The order and the packed shards → one export: the same tokens in a trainer's file format.

What belongs here: which segments in which order and the identity card (`export_source.py`), writing and moving
files (`export_files.py`), the stage (`stage.py`). What does not: a format's files (`rowmill.exports`).
"""
