"""Plans of a table at other maximum lengths, partition by partition.

The partitions are those of the build, whatever the length. A table that is one partition is planned by the calling
process; others have the lengths of their examples in files.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import pyarrow as pa

from rowmill.core.storage import File, Store, digest_json
from rowmill.schema.manifest import Part
from rowmill.stages.base import PartTask, StageContext, make_parts
from rowmill.stages.kept_parts import part_folder
from rowmill.stages.part_files import write_table
from rowmill.stages.table_inputs import IndexOptions
from rowmill.stages.table_partitions import (
    RowPart,
    TablePartition,
    choose_borders,
    partition_rows,
    read_partition,
)
from rowmill.stages.table_plan import ReplannedTable, TablePlanRequest, count_sampled_rows, replan_partition
from rowmill.tabular.assembly import ExampleLimits
from rowmill.tabular.row_index import SPLITS
from rowmill.tabular.table_partitions import share_sample

VERSION = 1
"""Increase it when the files of partitions may have other content."""

_LENGTH_SCHEMA = pa.schema(
    [
        pa.field("limit", pa.int32(), nullable=False),
        pa.field("split", pa.int8(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
    ]
)
"""An example at another length; `split` indexes `SPLITS`."""


@dataclass(frozen=True, slots=True)
class ReplanTask:
    """A partition to plan at other lengths: a request for each of them."""

    root: str
    folder: str
    fingerprint: str
    partition: TablePartition
    options: IndexOptions
    requests: tuple[TablePlanRequest, ...]


def replan_table(
    context: StageContext,
    request: TablePlanRequest,
    options: IndexOptions,
    rows: Sequence[File],
    tokens: Sequence[File],
    limits: Sequence[int],
) -> tuple[list[ReplannedTable], list[str]]:
    """Plan a table at each length; return the plans, and the fingerprints of what was written for them.

    `rows` are the files of its rows, `tokens` those of their ids.
    """
    parts = [RowPart(*both, digest_json(*(one.digest for one in both))) for both in zip(rows, tokens, strict=True)]
    borders = choose_borders(context, rows)
    partitions, blocks = partition_rows(context, borders, parts)
    requests = [_limit_request(request, limit) for limit in limits]
    if borders.is_whole:
        held = read_partition(context.store, partitions[0], options)
        return [replan_partition(one, held.index, held.lengths) for one in requests], []
    tasks = _list_replan_tasks(context, partitions, options, requests)
    planned = [PartTask(task.fingerprint, task, 0, task.partition.bytes) for task in tasks]
    made = make_parts(context, replan_partition_part, planned)[0]
    return _join_partitions(context.store, limits, made), sorted([*blocks, *(one.fingerprint for one in made)])


def _limit_request(request: TablePlanRequest, limit: int) -> TablePlanRequest:
    return replace(request, limits=ExampleLimits(limit, request.limits.prompt, request.limits.cap))


def _list_replan_tasks(
    context: StageContext,
    partitions: Sequence[TablePartition],
    options: IndexOptions,
    requests: Sequence[TablePlanRequest],
) -> list[ReplanTask]:
    plain = [
        ReplanTask(
            context.store.root,
            context.folder,
            "",
            one,
            options,
            tuple(replace(own, partition=one.name) for own in requests),
        )
        for one in partitions
    ]
    wanted = requests[0].wanted if requests else None
    if wanted is not None:
        # What fits depends on the length, and with it the share of each partition.
        counts = list(context.pool.map(count_partition_samples, plain, size_bytes=sum(one.bytes for one in partitions)))
        shares = [share_sample(wanted, own) for own in zip(*counts, strict=True)]
        plain = [
            replace(
                task,
                requests=tuple(replace(one, wanted=own[at]) for one, own in zip(task.requests, shares, strict=True)),
            )
            for at, task in enumerate(plain)
        ]
    return [replace(task, fingerprint=_identify_task(task)) for task in plain]


def _identify_task(task: ReplanTask) -> str:
    first = task.requests[0]
    form = first.form.model_dump(mode="json", exclude={"generation"})
    plans = [[asdict(request.limits), request.wanted] for request in task.requests]
    return digest_json("replanned", VERSION, task.partition.content, first.dataset, first.seed, form, plans)


def count_partition_samples(task: ReplanTask) -> list[int]:
    """Count the train records of a partition that fit at each length."""
    rows = read_partition(Store(task.root), task.partition, task.options)
    return [count_sampled_rows(request, rows.index, rows.lengths) for request in task.requests]


def replan_partition_part(task: ReplanTask) -> Part:
    """Plan a partition at each length, and write the lengths of its examples."""
    store = Store(task.root)
    rows = read_partition(store, task.partition, task.options)
    replanned = [replan_partition(request, rows.index, rows.lengths) for request in task.requests]
    pieces = [
        pa.table([np.full(len(own), one.limit), np.full(len(own), split), own], schema=_LENGTH_SCHEMA)
        for one in replanned
        for split, own in enumerate(one.lengths)
    ]
    table = pa.concat_tables([_LENGTH_SCHEMA.empty_table(), *pieces])
    path = f"{part_folder(task.folder, task.fingerprint)}/lengths.arrow"
    over = [[one.records_over, one.tokens_over] for one in replanned]
    return Part(task.fingerprint, {"lengths": write_table(store, path, table)}, {"over": over})


def _join_partitions(store: Store, limits: Sequence[int], parts: Sequence[Part]) -> list[ReplannedTable]:
    table = pa.concat_tables([store.table(part.files["lengths"]) for part in parts])
    limited, splits, tokens = (table.column(name).to_numpy() for name in ("limit", "split", "tokens"))
    return [
        ReplannedTable(
            limit,
            tuple(tokens[(limited == limit) & (splits == split)].astype(np.int64) for split in range(len(SPLITS))),
            sum(int(part.facts["over"][at][0]) for part in parts),
            sum(int(part.facts["over"][at][1]) for part in parts),
        )
        for at, limit in enumerate(limits)
    ]
