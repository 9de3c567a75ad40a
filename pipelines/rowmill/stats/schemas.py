"""The columns of every statistics table.

The stages of the whole recipe fill `splits` and `mixture` with a line per dataset, so these have a column `dataset`.
`token_ledger` has a column for the stage, because several stages count the same tokens; `segments` has one for the
split, because every split numbers its sequences from 0.
"""

from collections.abc import Mapping

import pyarrow as pa


def _make_schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in columns.items()])


_TEXT, _COUNT, _NUMBER, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_TEXTS = pa.list_(pa.string())

SCHEMAS: Mapping[str, pa.Schema] = {
    "builds": _make_schema(
        stage=_TEXT, built_at=_TEXT, run_id=_TEXT, seconds=_NUMBER, reused=_FLAG, parts=_COUNT,
        parts_reused=_COUNT, rows=_COUNT,
    ),
    "check_results": _make_schema(
        stage=_TEXT, check_name=_TEXT, severity=_TEXT, value=_NUMBER, bound=_NUMBER, outcome=_TEXT, passed=_FLAG,
        waiver=_TEXT, judged_at=_TEXT,
    ),
    "ledger": _make_schema(stage=_TEXT, state=_TEXT, reason=_TEXT, records=_COUNT),
    "token_ledger": _make_schema(stage=_TEXT, split=_TEXT, **{"class": _TEXT}, tokens=_COUNT),
    "rejects": _make_schema(
        stage=_TEXT, row_id=_TEXT, reason=_TEXT, detail=_TEXT, source=_TEXT, record=_COUNT, line=_COUNT, domain=_TEXT,
        preview=_TEXT,
    ),
    "contamination": _make_schema(
        row_id=_TEXT, benchmark=_TEXT, item=_COUNT, source=_TEXT, record=_COUNT, coverage=_NUMBER, ngram=_TEXT,
        text=_TEXT, item_text=_TEXT,
    ),
    "near_duplicate_groups": _make_schema(
        kept_row_id=_TEXT, row_id=_TEXT, similarity=_NUMBER, displaced=_FLAG
    ),
    "rows": _make_schema(
        row_id=_TEXT, kind=_TEXT, split=_TEXT, group_key=_TEXT, domain=_TEXT, schema=_TEXT,
        extracted_think_from_content=_COUNT, moved_reasoning_keys=_COUNT, dropped_think_messages=_COUNT,
        tools_present=_FLAG, tools_parsed_from_string=_FLAG, unknown_roles=_TEXTS, notes=_TEXTS,
        source=_TEXT, record=_COUNT, line=_COUNT, preview=_TEXT,
    ),
    "examples": _make_schema(
        example_id=_TEXT, row_ids=_TEXTS, split=_TEXT, original_tokens=_COUNT, tokens=_COUNT,
        trained_tokens=_COUNT, exchanges_removed=_COUNT, reasoning_removed=_COUNT, tokens_cut=_COUNT,
    ),
    "lengths": _make_schema(split=_TEXT, lower=_COUNT, upper=_COUNT, examples=_COUNT),
    "what_if": _make_schema(seq_len=_COUNT, examples_over=_COUNT, trained_lost=_COUNT, sequences=_COUNT),
    "sequences": _make_schema(
        split=_TEXT, shard=_TEXT, sequence_id=_COUNT, tokens=_COUNT, trained_tokens=_COUNT, fill=_NUMBER
    ),
    "generated_records": _make_schema(stage=_TEXT, text_id=_TEXT, number=_COUNT, record=_TEXT),
    "segments": _make_schema(
        split=_TEXT, sequence_id=_COUNT, segment=_COUNT, example_id=_TEXT, row_id=_TEXT, source=_TEXT, record=_COUNT,
        start=_COUNT, length=_COUNT,
    ),
    "left_out": _make_schema(
        example_id=_TEXT, row_id=_TEXT, split=_TEXT, state=_TEXT, reason=_TEXT, tokens=_COUNT, of_tokens=_COUNT
    ),
    "splits": _make_schema(dataset=_TEXT, split=_TEXT, rows=_COUNT, sequences=_COUNT, trained_tokens=_COUNT),
    "mixture": _make_schema(
        dataset=_TEXT, weight=_NUMBER, wanted_share=_NUMBER, passes=_NUMBER, sequences=_COUNT,
        trained_tokens=_COUNT,
    ),
    "rank_steps": _make_schema(
        rank=_COUNT, world_size=_COUNT, step=_COUNT, sequences=_COUNT, fillers=_COUNT, tokens=_COUNT,
        trained_tokens=_COUNT,
    ),
}  # fmt: skip
"""Columns of each table, without the partition's recipe, scope and version."""

CURRENT_SCHEMA = _make_schema(stamp=_COUNT, versions=_TEXTS)
"""A pointer: one line that lists the current versions of a stage, none if the list is empty."""
