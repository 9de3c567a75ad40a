"""Tables: typed records, their text, and how many records become one training example.

What belongs here: the table contract, serialization, assembly, parsing, generation and its backends. What does not:
which rows a dataset has and where they are stored (`stages/`).

    table_contract/   what the columns of a table are
    schema.py         the types of a record's columns
    serialization/    a record to text and back
    time_order.py     the position of a record in its group or series
    assembly/         records to examples, planned with integers
    parsing/          generated text to records
    generation/       asking a model for records or series, through a backend of backends/
"""
