"""Questions about a build: one row in every stage, one token's source, two versions, what every check said."""
