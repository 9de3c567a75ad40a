"""The stage `canonical_rows`: records become rows of one shape, or are rejected with a reason."""
