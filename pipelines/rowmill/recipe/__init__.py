"""The recipe: all options of a build, validated once at load."""
