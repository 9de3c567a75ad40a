"""The table contract: what the columns of a records dataset are, decided once and held against all later data.

What belongs here: the contract as a model, what data says of its columns, proposing a contract from that, reading
cells by it, comparing two contracts, and the contract as a commented YAML file. What does not: reading files
(`sources/`), which contract is in force for a build (`table_schema.py`), the text of a record (`serialization/`).

    parts ──observe──► evidence ──add_up──► evidence ──infer──► contract ──cell_writer──► typed cells
                                                                    │
                                      contract of the last build ───┴──► drift: what changed, and the cell that shows it

| module | what it holds |
|---|---|
| `contract` | `TableContract` and its columns: options that a recipe may pin |
| `cell_columns` | the cells of a column: distinct texts and a code for each cell |
| `value_shapes` | how a text is written: integer, decimal with a point, a date of a known format, … |
| `evidence` | counts and first places of the shapes of each column |
| `inference` | the contract that evidence proposes, and the schema of a contract |
| `declared_types` | the types that Parquet and Hugging Face declare |
| `cells` | a cell of CSV to its JSON text, its place in the order, or a mismatch |
| `drift` | what changed between a contract and the data |
| `document` | a contract as YAML, its evidence in comments |
"""

from rowmill.tabular.table_contract.cells import make_cell_writer, read_position
from rowmill.tabular.table_contract.contract import ColumnContract, TableContract
from rowmill.tabular.table_contract.drift import ColumnDrift, ColumnMismatch, find_contract_changes, find_missing_or_new
from rowmill.tabular.table_contract.evidence import ColumnEvidence, TableEvidence, merge_evidence, observe_records
from rowmill.tabular.table_contract.inference import build_record_schema, infer_contract, infer_sort_key

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
    "observe_records",
    "read_position",
]
