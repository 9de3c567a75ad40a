"""The recipe: everything that decides the bytes of a build, validated once, when it is loaded.

What belongs here: composing the option groups, defaults and aliases, overrides, and `execution`, which never decides
bytes. What does not: an option group itself; it stands beside the code whose behaviour it sets.
"""
