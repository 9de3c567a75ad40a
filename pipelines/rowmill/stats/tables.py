"""Manifests as tables: small Parquet files for DuckDB, one partition per recipe, scope and version.

    stats/<table>/recipe=<r>/scope=<dataset or _recipe>/version=<version>/part-0.parquet
    stats/_current/recipe=<r>/scope=<…>/stage=<stage>/current-<stamp>.parquet

There are no locks, so a reader may be anywhere between listing files and reading them while a writer works. Therefore
no file that a reader may have listed is rewritten with other content or removed at once: a new pointer is a new file
with a higher stamp, and superseded pointers are removed after `GRACE_NS`. Replacing one pointer file in place was
tried: during writes, a fifth of the reads found no rows, because the pointer named a version newer than the reader's
list of files.
"""

import io
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.core.errors import DamagedFileError
from rowmill.core.stage_names import EXPORTS
from rowmill.core.storage import Store, digest_json
from rowmill.schema.manifest import DisplayTable, Manifest, StageKey, get_stage_name
from rowmill.stats.counts import StatsInputs, count_parts
from rowmill.stats.part_rows import (
    GROUP_ROWS,
    PartFile,
    cast_to_schema,
    find_long_tables,
    make_misfit_error,
    read_part_rows,
    require_schema_columns,
)
from rowmill.stats.row_origins import TABLES_WITH_ORIGINS, ReadDomain, find_source
from rowmill.stats.schemas import CURRENT_SCHEMA, SCHEMAS

if TYPE_CHECKING:
    from rowmill.checks.judge import CheckResult

_LOG = logging.getLogger("rowmill.stats")

RECIPE_SCOPE = "_recipe"
"""The scope of stages that belong to a whole recipe; no dataset can have this name."""

GRACE_NS = 600 * 10**9
"""Nanoseconds for which a superseded pointer is kept: longer than any query takes to plan."""

PATH_PART_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def split_stage_key(key: StageKey) -> tuple[str, str]:
    """Return the recipe and the scope of a stage's key: its dataset, an export's name, or `_recipe`."""
    if get_stage_name(key) == EXPORTS:
        return key[0], key[2]
    return (key[0], key[1]) if len(key) == 3 else (key[0], RECIPE_SCOPE)


def write_table(store: Store, table: str, recipe: str, scope: str, version: str, content: pa.Table) -> None:
    """Write one version of a table; writing the same content again leaves the file alone.

    Raises
    ------
    SchemaError
        If `content` lacks a column of the table or has one of another type; extra columns are ignored.

    """
    path = _first_file_path(table, recipe, scope, version)
    encoded = _encode_parquet(cast_to_schema(content, SCHEMAS[table], f"table {table}"))
    if not (store.exists(path) and store.read(path) == encoded):
        store.write(path, encoded)


def set_current_versions(store: Store, recipe: str, scope: str, stage: str, versions: Sequence[str]) -> None:
    """Make the views show these versions of a stage; call it after their tables are written."""
    parts = (_require_path_part(one) for one in (recipe, scope, stage))
    folder = "stats/_current/recipe={}/scope={}/stage={}".format(*parts)
    wanted = [_require_path_part(version) for version in versions]
    newest = _read_newest(store, folder, "current", CURRENT_SCHEMA)
    if newest is not None and newest.column("versions").to_pylist() == [wanted]:
        return
    _append_file(
        store,
        folder,
        "current",
        lambda stamp: pa.Table.from_pylist([{"stamp": stamp, "versions": wanted}], schema=CURRENT_SCHEMA),
    )


def write_manifest_tables(
    store: Store,
    manifest: Manifest,
    inputs: StatsInputs,
    *,
    reused: bool = False,
    parts_reused: int = 0,
    read_domain: ReadDomain | None = None,
) -> None:
    """Write every table that a manifest contributes to, under its version.

    Long tables are copied column by column in batches, and only if the version's copy does not exist yet; short ones
    come from the manifest itself. `reused` marks a build that found its output instead of making it: of the rows for
    reuses only the last is kept, of those for builds all. `read_domain` reads the domain of a rejected record.

    Raises
    ------
    SchemaError
        If a part file or a table of the manifest lacks a column, which is a bug of the stage that wrote it.

    """
    if reused and not store.is_local and _has_all_tables(store, manifest):
        _write_build_row(store, manifest, inputs, reused, parts_reused)
        return
    for table, lines, where in _list_short_tables(manifest, inputs):
        _write_lines(store, table, *split_stage_key(manifest.key), manifest.version, lines, where)
    for table, files in find_long_tables(manifest, inputs).items():
        _copy_long_table(store, manifest, table, files, read_domain)
    _write_build_row(store, manifest, inputs, reused, parts_reused)


def write_check_results(
    store: Store, manifest: Manifest, results: "Sequence[CheckResult]", *, judged_at: str | None = None
) -> None:
    """Write the check results of a version.

    `judged_at` (ISO 8601, now if omitted) distinguishes a later judgement from this one. Equal results are not written
    again. Different ones, for example under other bounds, are added: the view shows the last, its history shows all.
    """
    folder = _partition_path("check_results", *split_stage_key(manifest.key), manifest.version)
    lines = [_make_check_row(manifest.stage, result) for result in results]
    newest = _read_newest(store, folder, "part", SCHEMAS["check_results"])
    if newest is not None and newest.drop_columns(["judged_at"]).to_pylist() == lines:
        return
    when = judged_at or datetime.now(UTC).isoformat(timespec="microseconds")
    dated = [{**line, "judged_at": when} for line in lines]
    content = pa.Table.from_pylist(dated, schema=SCHEMAS["check_results"])
    _append_file(store, folder, "part", lambda _: content, prune=False)


def remove_version_tables(store: Store, recipe: str, scope: str, version: str) -> None:
    """Remove all tables of a version that gc removed; it must not be current."""
    for table in SCHEMAS:
        folder = _partition_path(table, recipe, scope, version)
        if store.exists(folder):
            store.remove(folder)


def write_empty_tables(store: Store) -> None:
    """Write a file without rows under `recipe=_` of each table, so that every view finds a file."""
    for table, schema in SCHEMAS.items():
        store.write(_first_file_path(table, "_", "_", "_"), _encode_parquet(schema.empty_table()))
    store.write(
        "stats/_current/recipe=_/scope=_/stage=_/current-0.parquet", _encode_parquet(CURRENT_SCHEMA.empty_table())
    )


def _make_check_row(stage: str, result: "CheckResult") -> dict[str, Any]:
    return {
        "stage": stage,
        "check_name": result.check,
        "severity": str(result.severity),
        "value": None if result.value is None else float(result.value),
        "bound": result.bound,
        "outcome": result.outcome,
        "passed": None if result.outcome == "not_applicable" else result.passed,
        "waiver": result.waiver,
    }


def _write_build_row(store: Store, manifest: Manifest, inputs: StatsInputs, reused: bool, parts_reused: int) -> None:
    folder = _partition_path("builds", *split_stage_key(manifest.key), manifest.version)
    rows, parts = inputs.rows(manifest), count_parts(manifest)
    line = {
        "stage": manifest.stage,
        "built_at": manifest.built_at,
        "run_id": manifest.run_id,
        "seconds": manifest.seconds,
        "reused": reused,
        "parts": parts,
        # A reused output reuses all of its parts.
        "parts_reused": parts if reused else parts_reused,
        "rows": rows.count if rows else None,
    }
    prefix = "reused" if reused else _MADE_PREFIX
    newest = _read_newest(store, folder, prefix, SCHEMAS["builds"])
    if newest is not None and newest.to_pylist() == [line]:
        return
    content = pa.Table.from_pylist([line], schema=SCHEMAS["builds"])
    _append_file(store, folder, prefix, lambda _: content, prune=reused)


_MADE_PREFIX = f"made-{digest_json({name: str(schema) for name, schema in SCHEMAS.items()})[:8]}"
"""Prefix of the row of a build that made a version, which is written after all its tables: it says by which schemas."""


def _has_all_tables(store: Store, manifest: Manifest) -> bool:
    """Return whether a version's tables were all written under the present schemas, by the names of files alone."""
    folder = _partition_path("builds", *split_stage_key(manifest.key), manifest.version)
    return bool(_list_stamped_files(store, folder, _MADE_PREFIX))


_Lines = list[dict[str, Any]]


def _list_short_tables(manifest: Manifest, inputs: StatsInputs) -> Iterator[tuple[str, _Lines, str]]:
    """Yield each table that a manifest holds completely: its name, its lines, and where they come from."""
    ledger = [{"stage": manifest.stage, "state": s, "reason": r, "records": n} for s, r, n in manifest.ledger]
    tokens = [{"stage": manifest.stage, "split": s, "class": c, "tokens": n} for s, c, n in manifest.token_ledger]
    where = "/".join(manifest.key)
    for table, lines in (("ledger", ledger), ("token_ledger", tokens)):
        if lines:
            yield table, lines, f"{where}: {table}"
    for table in inputs.tables:
        if table in manifest.tables:
            at = f"{where}: table {table}"
            yield table, _align_lines(manifest.tables[table], SCHEMAS[table], at), at


def _align_lines(table: DisplayTable, schema: pa.Schema, where: str) -> _Lines:
    """Return the rows of a table under the columns of a schema; columns that the table lacks are null."""
    require_schema_columns(schema, table.columns, where)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return [{name: row.get(name) for name in schema.names} for row in rows]


def _write_lines(store: Store, table: str, recipe: str, scope: str, version: str, lines: _Lines, where: str) -> None:
    """Write one version of a short table, unless an equal one exists.

    The stored table is compared as Python values: converting to Arrow would make pyarrow import pandas first, a second
    of work that a night without changes need not do.
    """
    schema, path = SCHEMAS[table], _first_file_path(table, recipe, scope, version)
    known = _read_or_remove(store, path)
    if known is not None and known.schema.remove_metadata().equals(schema) and known.to_pylist() == lines:
        return
    try:
        content = pa.Table.from_pylist(lines, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise make_misfit_error(where, error, schema) from error
    write_table(store, table, recipe, scope, version, content)


def _copy_long_table(
    store: Store, manifest: Manifest, table: str, sources: Sequence[PartFile], read_domain: ReadDomain | None
) -> None:
    """Copy a table's columns from part files; an existing copy with this schema is complete and is kept.

    Rows that came from a source keep its version in the schema's metadata: if a file was renamed, they are the same
    version of rows, and were read from another file.
    """
    schema = SCHEMAS[table]
    if table in TABLES_WITH_ORIGINS:
        schema = schema.with_metadata({"source": str(find_source(store, manifest))})
    path = _first_file_path(table, *split_stage_key(manifest.key), manifest.version)
    if store.exists(path) and _has_schema(store, path, schema):
        return
    with store.create(path) as handle, pq.ParquetWriter(handle, schema, **_WRITE_OPTIONS) as writer:
        for group in read_part_rows(store, manifest, table, sources, read_domain):
            writer.write_table(group, row_group_size=GROUP_ROWS)


def _partition_path(table: str, recipe: str, scope: str, version: str) -> str:
    parts = (_require_path_part(one) for one in (recipe, scope, version))
    return f"stats/{table}/" + "recipe={}/scope={}/version={}".format(*parts)


def _first_file_path(table: str, recipe: str, scope: str, version: str) -> str:
    return f"{_partition_path(table, recipe, scope, version)}/part-0.parquet"


def _require_path_part(name: str) -> str:
    """Return a name that becomes a folder; no name comes from data, so an invalid one is our bug."""
    assert PATH_PART_PATTERN.fullmatch(name), f"{name!r} cannot be part of a path"
    return name


_WRITE_OPTIONS: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
"""No manifest holds the digest of a statistics table, so checksums in its pages detect damage."""


def _encode_parquet(content: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(content, buffer, **_WRITE_OPTIONS)
    return buffer.getvalue()


def _read_or_remove(store: Store, path: str) -> pa.Table | None:
    """Return a table if it exists; remove a damaged one with a warning, so that it is written again."""
    try:
        return store.unchecked_table(path) if store.exists(path) else None
    except DamagedFileError as error:
        _LOG.warning("%s; it is made again", error.damage)
        store.remove(path)
        return None


def find_damage(store: Store, key: StageKey, version: str) -> dict[str, str]:
    """Return a message for each damaged table of a version, by path."""
    found: dict[str, str] = {}
    for table in SCHEMAS:
        folder = _partition_path(table, *split_stage_key(key), version)
        for name in store.list(folder):
            try:
                store.unchecked_table(f"{folder}/{name}")
            except DamagedFileError as error:
                found[error.path] = error.damage.removeprefix(store.path("") + "/")
    return found


def require_whole_tables(store: Store) -> None:
    """Read every statistics table; raise DamagedFileError for the first damaged one."""
    for path in _list_parquet_files(store, "stats"):
        store.unchecked_table(path)


def _list_parquet_files(store: Store, folder: str) -> Iterator[str]:
    for name in store.list(folder):
        path = f"{folder}/{name}"
        if name.endswith(".parquet"):
            yield path
        elif "." not in name.partition("=")[0]:
            yield from _list_parquet_files(store, path)


def _has_schema(store: Store, path: str, schema: pa.Schema) -> bool:
    """Return whether a table has a schema; False if its footer is damaged."""
    try:
        with store.open(path) as handle:
            stored = cast(pa.Schema, pq.read_schema(handle))
            is_same_source = (stored.metadata or {}).get(b"source") == (schema.metadata or {}).get(b"source")
            return is_same_source and stored.remove_metadata().equals(schema)
    except (pa.ArrowException, OSError, ValueError) as error:
        _LOG.warning("%s: %s; it is made again", store.path(path), error)
        return False


def _list_stamped_files(store: Store, folder: str, prefix: str) -> list[str]:
    """Return the files `<prefix>-<stamp>.parquet` of a folder, oldest first."""
    names = store.list(folder)
    return [name for name in names if name.startswith(f"{prefix}-") and name.endswith(".parquet")]


def _read_newest(store: Store, folder: str, prefix: str, schema: pa.Schema) -> pa.Table | None:
    names = _list_stamped_files(store, folder, prefix)
    content = _read_or_remove(store, f"{folder}/{names[-1]}") if names else None
    return None if content is None else content.select(schema.names)


def _append_file(
    store: Store, folder: str, prefix: str, content: Callable[[int], pa.Table], *, prune: bool = True
) -> None:
    """Write a file that sorts after the existing ones; with `prune`, remove those superseded past the grace period."""
    names = _list_stamped_files(store, folder, prefix)
    stamp = max([time.time_ns(), *(_parse_stamp(name) + 1 for name in names)])
    # Twenty digits hold every 64-bit stamp, so names sort like their stamps.
    new = f"{prefix}-{stamp:020d}.parquet"
    store.write(f"{folder}/{new}", _encode_parquet(content(stamp)))
    if not prune:
        return
    for old, successor in pairwise([*names, new]):
        if _parse_stamp(successor) < stamp - GRACE_NS:
            with suppress(FileNotFoundError):  # another writer's sweep may have taken it
                store.remove(f"{folder}/{old}")


def _parse_stamp(name: str) -> int:
    return int(name.removesuffix(".parquet").rsplit("-", 1)[1])
