"""Facts about a build for people: length distributions, and tables for SQL queries with DuckDB.

Shards do not depend on statistics, so these are not part of a fingerprint.
"""
