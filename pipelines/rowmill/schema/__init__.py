"""The data types that packages exchange, and the Arrow schemas in which they are stored.

What belongs here: rows, conversations, examples, the ledger, the manifest, reject reasons. What does not: code that
makes or changes them.
"""
