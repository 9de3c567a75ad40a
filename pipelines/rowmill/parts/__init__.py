"""Work in parts: the framework below stages and kinds of data, which knows neither recipes nor stages."""
