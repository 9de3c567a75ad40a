"""The data types that packages exchange, and the Arrow schemas in which they are stored."""
