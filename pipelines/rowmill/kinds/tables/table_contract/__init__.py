"""The table contract: types and formats of a table's columns, decided once and checked against all later data.

    parts ──observe──► evidence ──merge───► evidence ──infer──► contract ──cell_writer──► typed cells
                                                                    │
                                      contract of the last build ───┴──► drift: each change with an example cell

| module | contents |
|---|---|
| `contract` | `TableContract` and its columns: options that a recipe may pin |
| `cell_columns` | a column of cells, dictionary-encoded |
| `value_shapes` | classes of texts: integer, decimal with a point, a date of a known format, … |
| `evidence` | counts and first locations of the shapes of each column |
| `inference` | evidence to contract, contract to schema |
| `declared_types` | the types that Parquet and Hugging Face declare |
| `cells` | CSV cell to JSON text and position, or a mismatch |
| `drift` | differences between a contract and the data |
| `document` | a contract as YAML, with its evidence in comments |
"""

from rowmill.kinds.tables.table_contract.cells import make_cell_writer, read_position
from rowmill.kinds.tables.table_contract.contract import ColumnContract, TableContract
from rowmill.kinds.tables.table_contract.declared_types import name_declared_kind
from rowmill.kinds.tables.table_contract.drift import (
    ColumnDrift,
    ColumnMismatch,
    find_contract_changes,
    find_missing_or_new,
)
from rowmill.kinds.tables.table_contract.inference import (
    ColumnEvidence,
    TableEvidence,
    build_record_schema,
    infer_contract,
    infer_sort_key,
    merge_evidence,
    observe_records,
)

__all__ = [
    "ColumnContract",
    "ColumnDrift",
    "ColumnEvidence",
    "ColumnMismatch",
    "TableContract",
    "TableEvidence",
    "build_record_schema",
    "find_contract_changes",
    "find_missing_or_new",
    "infer_contract",
    "infer_sort_key",
    "make_cell_writer",
    "merge_evidence",
    "name_declared_kind",
    "observe_records",
    "read_position",
]
