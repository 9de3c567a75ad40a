"""Questions about a build: one row in every stage, one token's source, two versions, what every check said.

What belongs here: reading what builds stored, and processing rows or texts without storing anything. What does not:
printing the answers (`reports/`).
"""
