"""The stage `canonical_rows`: records become rows of one shape; what cannot is rejected with a reason.

What belongs here: reading parts into rows, of text and of tables, and what is decided over all rows. What does not:
how one record is read (`formats/`, `tabular/`).
"""
