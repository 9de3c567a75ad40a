"""The order and the packed shards → one export: the same tokens in a trainer's own form.

What belongs here: which segments in which order and the card that says so (`export_source.py`), writing and moving
files (`export_files.py`), the stage (`stage.py`). What does not: a format's files (`rowmill.exports`).
"""
