"""The nouns that packages hand to each other, and the Arrow schemas in which they are stored.

What belongs here: rows, conversations, examples, the ledger, the manifest, reject reasons. What does not: code that
makes or changes them.
"""
