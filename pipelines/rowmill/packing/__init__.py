"""Plan with integers: which examples share a sequence, in which order sequences train, and on which rank."""
