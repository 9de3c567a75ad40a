"""The recipe: all options of a build, validated once at load.

What belongs here: composing the option groups, defaults and aliases, overrides, and `execution`, which does
not affect the output. What does not: an option group itself; its class is in the module whose behaviour it sets.
"""
