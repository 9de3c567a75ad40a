"""Facts of a table in addition to those of all kinds of rows: columns, groups, times, numbers."""

from dataclasses import replace
from typing import Any

import numpy as np

from rowmill.core.arrays import Ints
from rowmill.core.storage import digest_json
from rowmill.schema.facts import CanonicalRowsFacts
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable
from rowmill.stages.base import StageContext, StageOutput, compute_share
from rowmill.stages.canonical_rows.table_drift import find_drifts, merge_mismatches, report_contract
from rowmill.stages.canonical_rows.table_times import index_times, report_ambiguous_times
from rowmill.stages.table_inputs import ObservedTable, get_table_options
from rowmill.tabular import row_index, sizing
from rowmill.tabular.row_index import NO_KEY, RowIndex, count_group_sizes
from rowmill.tabular.table_contract.evidence import ShapeTally
from rowmill.tabular.table_contract.value_shapes import is_non_finite_shape


def complete_table_output(
    context: StageContext, draft: StageOutput, facts: CanonicalRowsFacts, observed: ObservedTable
) -> StageOutput:
    """Add the facts that only records have: schema, groups, times, splits."""
    form = get_table_options(context)
    characters = sum(int(part.facts["characters"]) for part in draft.parts)
    index = index_times(context, draft.parts, observed)
    times = _measure_intervals(context, index)
    ambiguous = report_ambiguous_times(context, draft, observed, index)
    mismatches = merge_mismatches(draft.parts)
    drifts = [] if observed.contract is None else list(find_drifts(context, observed, mismatches))
    facts = replace(
        facts,
        columns=len(observed.schema.columns),
        interval_mismatch=times["mismatch"],
        characters=characters,
        table_drift=len(drifts),
        type_mismatch=sum(mismatch.count for mismatch in mismatches.values()),
        non_finite=_count_non_finite(draft, observed),
        ambiguous_times=NOT_APPLICABLE if ambiguous is None else ambiguous,
    )
    draft.tables["columns"] = DisplayTable(
        ("column", "type", "nullable", "required"),
        tuple((column.name, column.type, column.nullable, column.required) for column in observed.schema.columns[:100]),
    )
    if form.mode != "tabular":
        # Series are split when an example is full, and groups if the recipe allows it; other groups must fit whole.
        is_whole = form.mode == "grouped" and form.assembly.on_overflow != "split"
        keys, sizes = _count_groups(context, draft)
        facts = replace(
            facts,
            group_size=int(sizes.max(initial=0)) if is_whole else NOT_APPLICABLE,
            group_advice=_report_groups(context, draft, keys, sizes, characters / max(int(sizes.sum()), 1)),
            groups=len(keys),
        )
    draft.details["made_of"] = sorted({*draft.details["made_of"], *observed.observed})
    draft.details["records"] = observed.to_json() | {"mode": form.mode, "interval_seconds": times["interval"]}
    # Parsing of generated records reads the schema, so a different schema is a different version.
    draft.card["schema"] = digest_json(observed.schema.to_json())
    report_contract(context, draft, observed, drifts, mismatches)
    draft.facts = facts
    return draft


def _count_non_finite(draft: StageOutput, observed: ObservedTable) -> int:
    """Count the numbers that are NaN or infinite, by column: JSON stores floats as strings, and cells are missing."""
    found: dict[str, list[ShapeTally]] = {}
    for column in observed.schema.columns:
        seen = observed.evidence.columns.get(column.name)
        if seen is None or column.type not in ("float", "decimal", "integer"):
            continue
        tallies = [tally for shape, tally in seen.cells.items() if is_non_finite_shape(shape)]
        tallies += [seen.kinds["string"]] if column.type == "float" and "string" in seen.kinds else []
        if tallies:
            found[column.name] = tallies
    counts = {name: sum(one.count for one in tallies) for name, tallies in found.items()}
    if found:
        rows = [
            (name, counts[name], " ".join(dict.fromkeys(text for one in tallies for text, _ in one.examples)))
            for name, tallies in found.items()
        ]
        draft.tables["non_finite"] = DisplayTable(("column", "values", "for_example"), tuple(rows))
    return sum(counts.values())


def _count_groups(context: StageContext, draft: StageOutput) -> tuple[tuple[str, ...], Ints]:
    """Return all group keys and the rows of each, reading part by part; a lone series is one group."""
    files = [part.files["rows"] for part in draft.parts]
    if get_table_options(context).is_grouped:
        return count_group_sizes(context.store.table(file, ("group_key",)).column(0) for file in files)
    return (NO_KEY,), np.array([sum(file.rows for file in files)], np.int64)


def _report_groups(
    context: StageContext, draft: StageOutput, keys: tuple[str, ...], sizes: Ints, characters_per_record: float
) -> int:
    """Report the groups and the advice on them; return the number of objections to the chosen column."""
    form = get_table_options(context)
    record_budget = context.recipe.limit_of(context.dataset_name or "")
    tokens = sizes * (characters_per_record / sizing.CHARACTERS_PER_TOKEN)
    advice = sizing.advise_group_column(
        ", ".join(form.group_columns) or ("each file" if form.is_grouped_by_file else "one series"),
        sizes,
        tokens.round().astype(np.int64),
        record_budget=record_budget,
        mode=form.mode,
        cap=form.cap,
        is_ordered=form.order_column is not None,
        is_approximate=True,
    )
    draft.tables["group_advice"] = advice.table()
    largest = np.argsort(-sizes, kind="stable")[:10]
    draft.tables["largest_groups"] = DisplayTable(
        ("group", "rows", "about_tokens"),
        tuple((keys[i], int(sizes[i]), round(float(tokens[i]))) for i in largest.tolist()),
    )
    limit = record_budget / max(characters_per_record / sizing.CHARACTERS_PER_TOKEN, 1e-9)
    draft.histograms["group_sizes"] = sizing.size_histogram(sizes, limit if form.mode == "grouped" else None)
    draft.samples["group_size"] = draft.samples["group_advice"] = tuple(keys[i] for i in largest.tolist())
    return len(advice.unsuitable) + len(advice.warnings)


def _measure_intervals(context: StageContext, index: RowIndex | None) -> dict[str, Any]:
    """Return the interval of the series, configured or constant in the data, and the share of deviating steps."""
    form = get_table_options(context)
    configured = form.time_series.timestamp_interval_seconds
    if index is None or (form.mode != "sequential" and configured is None):
        return {"interval": None, "mismatch": NOT_APPLICABLE}
    found = row_index.measure_series_steps(index) if form.mode == "sequential" else np.empty(0, np.int64)
    if configured is None or index.unit is None:
        constant = len(found) > 0 and bool((found == found[0]).all()) and int(found[0]) > 0
        own = None if not constant or index.unit is None else int(found[0]) * index.unit
        return {"interval": None if own is None else format(own, "f"), "mismatch": NOT_APPLICABLE}
    units = float(configured) / float(index.unit)
    off = int((np.abs(found - units) > 1e-9 * max(units, 1)).sum())
    return {"interval": str(configured), "mismatch": compute_share(off, len(found))}
