"""Records of tables: their types, their text, and the examples assembled from them.

table_contract/   types and properties of a table's columns
schema.py         the types of a record's columns
serialization/    record to text and back
time_order.py     the position of a record in its group or series
assembly/         records to examples, planned on integers
parsing/          generated text to records
generation/       sampling records or series from a model, through backends/
"""
