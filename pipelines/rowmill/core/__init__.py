"""What every package uses and that knows none of them: config, errors, storage, JSON, text of numbers, the console.

What belongs here: code that would serve another project as it is. What does not: anything that knows a row or a token.
"""
