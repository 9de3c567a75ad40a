"""The recipe: everything that decides the bytes of a build, validated once at load.

What belongs here: composing the option groups, defaults and aliases, overrides, and `execution`, which never decides
bytes. What does not: an option group itself; its class is in the module whose behaviour it sets.
"""
