"""Every column that a stage writes has its sentence, and no sentence is left of one that is gone."""

import pyarrow as pa

from rowmill.kinds.tables.generated_records import PARSED
from rowmill.kinds.tables.record_tokens import RECORD_EXAMPLES
from rowmill.schema.examples import COLUMN_DOCS, EXAMPLE_SCHEMA, ROW_FIELDS, WEIGHT_COLUMN
from rowmill.schema.rows import ROW_KINDS, ROW_SCHEMA, TREE_COLUMNS
from rowmill.shards.native import SEQUENCE_SCHEMA
from rowmill.stages.training_splits.stage import ORDER_SCHEMA


def test_columns_and_sentences_are_the_same_names() -> None:
    schemas: list[pa.Schema] = [ROW_SCHEMA, EXAMPLE_SCHEMA, RECORD_EXAMPLES, SEQUENCE_SCHEMA, ORDER_SCHEMA, PARSED]
    own = [
        field.name
        for kind in ROW_KINDS.values()
        for field in (*kind.columns, *kind.example_columns, *kind.segment_columns)
    ]

    assert {
        *own,
        *ROW_FIELDS,
        *TREE_COLUMNS,
        WEIGHT_COLUMN,
        *(name for schema in schemas for name in schema.names),
    } == set(COLUMN_DOCS)
    assert all(text.endswith(".") and len(text) <= 90 for text in COLUMN_DOCS.values())
