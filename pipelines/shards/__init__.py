"""Sequences and files: the native shards, and how rows are gathered from many files in any order.

| module | what |
|---|---|
| `native` | packed sequences as Parquet, readable by HF `datasets` and TRL with no glue |
| `gather` | rows of many files in a planned order, with flat memory |
"""
