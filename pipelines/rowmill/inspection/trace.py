"""Traces a row from its source line through every stage to its places in shards, order and ranks.

    shard ─ sequence ─ segment ─► example ─► row `<part>:<number>` ─► part of a file ─► line
    row ─► its outcome at each stage ─► examples ─► segments ─► places in the order ─► rank, step, file

Only versions that were built from each other are joined: the trace starts at the current shards and follows the
inputs that each manifest names, so a half-finished rebuild cannot mix two lineages.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rowmill import sources
from rowmill.build.steps import Project
from rowmill.core.arrays import find_distinct
from rowmill.core.errors import ConfigError, suggest_name
from rowmill.core.number_text import format_count
from rowmill.core.storage import File
from rowmill.inspection.lineage import (
    Lineage,
    RowOrigin,
    SegmentLocation,
    filter_rows,
    find_origin,
    load_lineage,
    locate_examples,
)
from rowmill.schema.rows import is_row_id, parse_row_id
from rowmill.sources import SourcePart
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.packed_shards import stage as packed_shards
from rowmill.stages.tokenized_examples import stage as tokenized_examples


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """A row's outcome at a stage: its state in the ledger, with reason and detail."""

    stage: str
    state: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class RowTrace:
    """A row from its source to every place that holds its tokens; examples as `(id, tokens, trained)`."""

    dataset: str
    row_id: str
    origin: RowOrigin
    fates: tuple[StageOutcome, ...]
    examples: tuple[tuple[str, int, int], ...]
    places: tuple[SegmentLocation, ...]
    order_note: str = ""


def trace_row(project: Project, row_id: str) -> list[RowTrace]:
    """Trace a row by its id, or an example by its id; a part may belong to several datasets.

    Raises
    ------
    ConfigError
        If no dataset has it.

    """
    name = row_id.split("#", 1)[0]
    found: list[RowTrace] = []
    for dataset in project.recipe.datasets:
        lineage = load_lineage(project, dataset)
        for index, part in enumerate(lineage.parts):
            if is_row_id(name) and parse_row_id(name)[0] == part.part_id and parse_row_id(name)[1] < part.records:
                found.append(_make_row_trace(lineage, index, name))
    if not found:
        raise ConfigError(
            f"{row_id}: no row of {project.recipe.name} has this id; expected a row_id of the view rows, "
            f'<part>:<number>; see `rowmill sql "from rows select row_id limit 10" {project.recipe.name}`'
        )
    return found


def trace_source(project: Project, place: str) -> list[RowTrace]:
    """Trace the record on a line of a source file, `FILE:LINE`; in files without lines, LINE is the record number.

    Raises
    ------
    ConfigError
        If no dataset reads the file, or the line holds no record.

    """
    file, _, line = place.rpartition(":")
    if not file or not line.isdecimal():
        raise ConfigError(
            f"--source {place}: expected FILE:LINE, a file of the recipe and a line number, such as chats.jsonl:14"
        )
    lineages = [load_lineage(project, dataset) for dataset in project.recipe.datasets]
    found: list[RowTrace] = []
    files: dict[str, list[SourcePart]] = {}
    for lineage in lineages:
        for index, part in enumerate(lineage.parts):
            if _is_source_file(project, part.url, file):
                files.setdefault(part.url, []).append(part)
                found += _trace_line(lineage, index, part, int(line))
            else:
                files.setdefault(part.url, [])
    if not found:
        raise _explain_missing_record(project, file, int(line), files)
    return found


def _is_source_file(project: Project, url: str, file: str) -> bool:
    return (
        url == sources.public_url(file)
        or url.endswith(f"/{file}")
        or (project.base / url).resolve() == Path(file).resolve()
    )


def _trace_line(lineage: Lineage, index: int, part: SourcePart, line: int) -> Iterator[RowTrace]:
    """Trace the record on a line, if it is in this part; a part starts where the previous one ends."""
    following = next((p.first_line for p in lineage.parts[index + 1 : index + 2] if p.url == part.url), None)
    if part.first_line <= line and (following is None or line < following):
        number = next(
            (record.number for record in sources.read_records(part, lineage.project.base) if record.line == line), None
        )
        if number is not None:
            yield from (_make_row_trace(lineage, index, row_id) for row_id in _list_record_rows(lineage, index, number))


def _list_record_rows(lineage: Lineage, index: int, number: int) -> list[str]:
    """Return the ids of a record's rows: one, unless a custom format made several of it."""
    row_id = f"{lineage.parts[index].part_id}:{number}"
    ledger = lineage.table(canonical_rows.STAGE.name, index, "ledger", ("row_id",))
    if ledger is None:
        return [row_id]
    column = ledger.column("row_id")
    further: list[str] = column.filter(pc.starts_with(column, f"{row_id}.")).to_pylist()
    return [row_id, *sorted(further, key=lambda one: (len(one), one))]


def _explain_missing_record(
    project: Project, file: str, line: int, files: Mapping[str, list[SourcePart]]
) -> ConfigError:
    matching = [part for parts in files.values() for part in parts]
    if not matching:
        guess = suggest_name(file, files)
        hint = f"did you mean {guess}?" if guess else "name one of them, or build the recipe first"
        names = ", ".join(list(files)[:10]) or "none"
        return ConfigError(
            f"{file}: no dataset of {project.recipe.name} reads this file; the build read {names}; {hint}"
        )
    lines = [one.line for part in matching for one in sources.read_records(part, project.base)]
    before = max((one for one in lines if one < line), default=None)
    after = min((one for one in lines if one > line), default=None)
    near = " and ".join(f"line {one}" for one in (before, after) if one is not None)
    count = format_count(len(lines), "record")
    return ConfigError(
        f"{file}:{line}: no record on this line; of {count}, the nearest are on {near}; name one of these"
    )


def _make_row_trace(lineage: Lineage, index: int, row_id: str) -> RowTrace:
    examples = tuple(_iterate_row_examples(lineage, index, row_id))
    places, note = locate_examples(lineage, {name for name, _, _ in examples})
    return RowTrace(
        dataset=lineage.dataset,
        row_id=row_id,
        origin=find_origin(lineage, lineage.parts[index], parse_row_id(row_id)[1]),
        fates=tuple(_iterate_stage_outcomes(lineage, index, row_id)),
        examples=examples,
        places=tuple(places),
        order_note=note,
    )


def _iterate_stage_outcomes(lineage: Lineage, index: int, row_id: str) -> Iterator[StageOutcome]:
    for stage in (canonical_rows.STAGE.name, tokenized_examples.STAGE.name):
        ledger = lineage.table(stage, index, "ledger", ("row_id", "state", "reason"))
        rejects = lineage.table(stage, index, "rejects", ("row_id", "detail"))
        if ledger is None or rejects is None:
            return
        details = {one["row_id"]: one["detail"] for one in filter_rows(rejects, "row_id", row_id)}
        for one in filter_rows(ledger, "row_id", row_id):
            yield StageOutcome(stage, one["state"], one["reason"], details.get(row_id, ""))
    packed = lineage.made.get(packed_shards.STAGE.name)
    for file in packed.files("left_out") if packed else ():
        for one in filter_rows(lineage.project.store.table(file), "row_id", row_id):
            share = f"{one['tokens']} of {format_count(one['of_tokens'], 'token')}"
            detail = f"{share} of {one['example_id']} are in no sequence"
            yield StageOutcome(packed_shards.STAGE.name, one["state"], one["reason"], detail)


def _iterate_row_examples(lineage: Lineage, index: int, row_id: str) -> Iterator[tuple[str, int, int]]:
    """Yield the examples that contain a row; for a records dataset, all examples that name it."""
    columns = ("row_ids", "example_id", "tokens", "trained_tokens")
    for file in find_example_files(lineage, index):
        table = lineage.project.store.table(file, columns)
        rows = table.column("row_ids").combine_chunks()
        found = pc.equal(rows.flatten(), row_id).to_numpy(zero_copy_only=False)
        matching = table.take(pa.array(find_distinct(pc.list_parent_indices(rows).to_numpy()[found])))
        yield from ((one["example_id"], one["tokens"], one["trained_tokens"]) for one in matching.to_pylist())


def find_example_files(lineage: Lineage, index: int) -> list[File]:
    """Return the files of examples that may hold a source part's rows: the part's, or all where examples mix parts."""
    made = lineage.made_of(tokenized_examples.STAGE.name, index)
    if made is None:
        return []
    own = made.files.get("examples")
    return lineage.made[tokenized_examples.STAGE.name].files("examples") if own is None else [own]
