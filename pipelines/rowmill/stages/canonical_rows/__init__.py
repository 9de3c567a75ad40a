"""The stage `canonical_rows`: records become rows of one shape, or are rejected with a reason.

What belongs here: reading parts into rows, of text and of tables, and decisions over all rows. What does not: reading
one record (`formats/`, `tabular/`).
"""
