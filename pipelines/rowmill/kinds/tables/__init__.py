"""Tables: rows under one contract, their text, and examples assembled from them; README.md shows the way of a table."""
