"""Compares generated records with the training table: columns, associations, copies of training rows.

Copies are searched among all training rows. Columns are compared on at most `MAX_SAMPLED_ROWS` evenly sampled rows of
each table, because the measures sort values in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import are_among, find_distinct
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES
from rowmill.core.storage import File, Store
from rowmill.kinds.joint_rows import KindContext
from rowmill.kinds.tables import table_comparison
from rowmill.kinds.tables.partitions import get_table_options, load_observed_table
from rowmill.kinds.tables.schema import RecordSchema
from rowmill.kinds.tables.table_comparison import hash_cells, read_cells
from rowmill.parts.context import compute_share
from rowmill.schema import manifest
from rowmill.schema.facts import CanonicalRowsFacts, read_facts
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, Part

MAX_SAMPLED_ROWS = 200_000
MAX_NAMED_COPIES = 10
COMPARISON_FACTS = (
    "exact_copies",
    "repeated_records",
    "repeated_train_records",
    "column_distance",
    "association_distance",
)


@dataclass(slots=True)
class TrainComparison:
    """Comparison of generated with training records; not applicable if either has none."""

    facts: dict[str, Any] = field(default_factory=lambda: dict[str, Any].fromkeys(COMPARISON_FACTS, NOT_APPLICABLE))
    tables: dict[str, DisplayTable] = field(default_factory=dict[str, DisplayTable])
    samples: tuple[str, ...] = ()


def compare_with_train(context: KindContext, parts: Sequence[Part]) -> TrainComparison:
    """Compare the records of some parts with the rows that the model was trained on."""
    trained = context.input(TOKENIZED_EXAMPLES)
    key = (*context.dataset_key, CANONICAL_ROWS)
    rows = manifest.load_version(context.store, key, trained.inputs["/".join(key)])
    schema = load_observed_table(trained.details).schema
    tables = [context.store.table(part.files["records"], ["text_id", "record"]) for part in parts]
    generated = pa.concat_tables(tables) if tables else pa.table({"text_id": [], "record": []})
    train = read_facts(CanonicalRowsFacts, rows.facts).splits.get("train", 0)
    if not generated.num_rows or not train or not schema.names:
        return TrainComparison()
    # Numbered groups of private series are synthetic; only the other columns are compared.
    left_out = get_table_options(context).group_columns if get_table_options(context).privacy.dp_enabled else ()
    compared = tuple(name for name in schema.names if name not in left_out)
    cells = read_cells(generated.column("record"), schema.names)
    hashes = _sum_cell_hashes(cells, compared)
    files, stride = rows.files("rows"), -(-train // MAX_SAMPLED_ROWS)
    search = partial(search_train_part, context.store, schema.names, compared, stride)
    size = sum(file.bytes for file in files)
    made = list(context.pool.map(search, files, size_bytes=size, shared=find_distinct(hashes)))
    copied = are_among(hashes, find_distinct(np.concatenate([one for one, _, _ in made])))
    every = np.concatenate([one for _, one, _ in made])
    taken = pl.concat([one for _, _, one in made])
    return _build_comparison(schema, cells, hashes, copied, every, taken, generated.column("text_id").to_pylist())


def _build_comparison(
    schema: RecordSchema,
    cells: pl.DataFrame,
    hashes: NDArray[np.uint64],
    copied: NDArray[np.bool_],
    train: NDArray[np.uint64],
    taken: pl.DataFrame,
    text_ids: Sequence[str],
) -> TrainComparison:
    found = table_comparison.compare_tables(schema, taken, cells.gather_every(-(-len(cells) // MAX_SAMPLED_ROWS)))
    repeated = {
        "repeated_records": compute_share(len(hashes) - len(find_distinct(hashes)), len(hashes)),
        "repeated_train_records": compute_share(len(train) - len(find_distinct(train)), len(train)),
    }
    facts = {
        "exact_copies": compute_share(int(copied.sum()), len(copied)),
        **repeated,
        "column_distance": found.column_distance,
        "association_distance": found.association_distance,
    }
    counts = DisplayTable(
        ("table", "records", "repeated", "copies of train"),
        (
            ("train", len(train), repeated["repeated_train_records"], None),
            ("generated", len(hashes), repeated["repeated_records"], facts["exact_copies"]),
        ),
    )
    names = dict.fromkeys(text_ids[place] for place in np.flatnonzero(copied).tolist())
    tables = {"beside train": counts, "columns beside train": found.columns, "associations": found.associations}
    return TrainComparison(facts, tables, tuple(names)[:MAX_NAMED_COPIES])


def search_train_part(
    store: Store,
    columns: Sequence[str],
    compared: Sequence[str],
    stride: int,
    file: File,
    generated: NDArray[np.uint64],
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], pl.DataFrame]:
    """Return the generated records that a part's training rows equal, a hash per row, and every `stride`-th's cells."""
    rows = store.table(file, ["split", "record"])
    train = rows.filter(pc.equal(rows.column("split"), "train"))
    cells = read_cells(train.column("record"), columns)
    hashes = _sum_cell_hashes(cells, compared)
    equal = generated[are_among(generated, find_distinct(hashes))]
    return equal, hashes, cells.gather_every(stride)


def _sum_cell_hashes(cells: pl.DataFrame, names: Sequence[str]) -> NDArray[np.uint64]:
    """Return a hash for each record, the sum of its cells' hashes."""
    return hash_cells(cells.select(names)).sum(axis=1, dtype=np.uint64)
