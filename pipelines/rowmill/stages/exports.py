"""The order and the packed shards → one export: the same tokens in a trainer's own form.

What belongs here: which segments in which order, the identity card, dealing files to workers, conservation, the
manifest that is written last. What does not: a format's files (`shards/`), the order (`training_splits`).

    <recipe>/exports/<name>/parts/<fingerprint>/<name>/
    ├── data/            what a trainer is pointed at
    ├── card.json
    └── manifest.json

Everything is written to a local folder first and moved when it is whole: libraries that write files of their own
need one, and a build that is killed leaves nothing under the export's name but files without a manifest.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.errors import ConfigError
from rowmill.core.number_text import format_count, format_size
from rowmill.core.stage_names import EXPORTS, PACKED_SHARDS, RAW_DATASET, TOKENIZED_EXAMPLES, TRAINING_SPLITS
from rowmill.core.storage import Store, digest_json
from rowmill.exports import astrai, export_manifest
from rowmill.exports.base import Export, ExportContext, ExportIndex, ExportJob, ExportLayout
from rowmill.exports.export_manifest import CARD_FILE, DATA_FOLDER, MANIFEST_FILE, FileDigests
from rowmill.packing.layout import expand_ranges
from rowmill.packing.plan import plan_best_fit
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.facts import RawDatasetFacts, read_facts
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import DisplayTable, File, Manifest, Part, StageKey
from rowmill.shards import native
from rowmill.shards.native import ShardScratchTask
from rowmill.shards.sequences import SegmentFiles, SequenceBatch, require_valid_tokens, take_segments
from rowmill.stages import inputs
from rowmill.stages.base import (
    PreparedStage,
    StageContext,
    StageDeclaration,
    StageOutput,
    load_kept_part,
    part_folder,
    save_kept_part,
    scratch_folder,
)
from rowmill.stats import RowCount, StatsInputs, count_rows_by_fact

VERSION = 4
"""Raise it when any export may hold other bytes, or its manifest say other things of them."""


_SEGMENT_DTYPE = np.dtype([("hash", "V16"), ("trained", "<i8")])
"""What a worker tells of each segment: its content hash and its targets."""


def find_export(work: StageContext) -> Export:
    """Return the options of the export that a step makes."""
    return next(one for one in work.recipe.exports if one.name == work.key[-1])


@dataclass(frozen=True, slots=True)
class ExportFacts:
    """What an output of the stage is counted by."""

    conservation: int
    sequences: int
    segments: int
    tokens: int
    trained_tokens: int
    left_out: int
    files: int
    size_bytes: int
    content_hash: str


def identify_export(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide an export's files and its card; tokens and their order are its inputs'."""
    export = next(one for one in recipe.exports if one.name == name)
    return {
        "versions": [VERSION, export.VERSION, export_manifest.describe_builder()],
        "export": export.model_dump(mode="json"),
        "seq_len": recipe.seq_len,
        "vocab_size": recipe.vocab_size,
        "kinds": sorted({dataset.row_kind for dataset in recipe.datasets.values()}),
    }


# ── What there is to export ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class _ExportSource:
    """The packed shards of one split, of all datasets.

    Row r holds segments `[first_segments[r], first_segments[r + 1])`; `lengths` int64 are those of all segments.
    `rows` int64[S] are the rows to export, in order.
    """

    shards: tuple[File, ...]
    lineage: tuple[File, ...]
    first_rows: Ints
    first_segments: Ints
    lengths: Ints
    rows: Ints

    @property
    def segments(self) -> Ints:
        """The segments to export, by their number over all shards, in order."""
        counts = np.diff(self.first_segments)[self.rows]
        return expand_ranges(self.first_segments[self.rows], counts)


def _collect_export_source(work: StageContext, export: Export) -> _ExportSource:
    packed = inputs.get_packed_shards(work)
    parts = [part for one in packed.values() for part in one.parts if part.facts["split"] == export.split]
    shards = tuple(part.files["shard"] for part in parts)
    counts = [np.empty(0, np.int64)]
    lengths = [np.empty(0, np.int64)]
    for shard in shards:
        column = work.store.table(shard, ("segment_lengths",)).column(0).combine_chunks()
        counts.append(np.diff(np.asarray(column.offsets, np.int64)))
        lengths.append(column.flatten().to_numpy(zero_copy_only=False).astype(np.int64))
    first_rows = _accumulate_counts([shard.rows for shard in shards])
    return _ExportSource(
        shards=shards,
        lineage=tuple(part.files["segments"] for part in parts),
        first_rows=first_rows,
        first_segments=_accumulate_counts(np.concatenate(counts)),
        lengths=np.concatenate(lengths),
        rows=_list_ordered_rows(work, export, packed) if export.split == "train" else np.arange(first_rows[-1]),
    )


def _accumulate_counts(counts: "Sequence[int] | Ints") -> Ints:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def _list_ordered_rows(work: StageContext, export: Export, packed: Mapping[str, Manifest]) -> Ints:
    """Return the rows of the train shards in the order of training, without fillers."""
    splits = work.inputs[(work.recipe.name, TRAINING_SPLITS)]
    order = work.store.table(splits.parts[0].files["order"], ("dataset", "sequence_id", "pass", "filler"))
    shown = pc.invert(order.column("filler"))
    if export.passes == "first":
        shown = pc.and_(shown, pc.equal(order.column("pass"), 0))
    order = order.filter(shown)
    sizes = [sum(p.files["shard"].rows for p in one.parts if p.facts["split"] == "train") for one in packed.values()]
    return _accumulate_counts(sizes)[order.column("dataset").to_numpy()] + order.column("sequence_id").to_numpy()


def _describe_export_shape(
    work: StageContext, export: Export, source: _ExportSource, card: Mapping[str, Any]
) -> ExportIndex:
    segments = source.segments
    values, domains = (
        _read_segment_domains(work, source) if export.BY_DOMAIN else ((None,), np.zeros(len(source.lengths), np.int64))
    )
    return ExportIndex(
        seq_len=work.recipe.seq_len,
        vocab_size=_resolve_export_vocab_size(work, card),
        bos_id=card["bos_id"],
        eos_id=card["eos_id"],
        kinds=frozenset(one.row_kind for one in work.recipe.datasets.values()),
        lengths=source.lengths[segments],
        sequence_offsets=_accumulate_counts(np.diff(source.first_segments)[source.rows]),
        domains=domains[segments],
        domain_values=values,
        name_of=lambda number: _name_segment(work, source, int(segments[number])),
        best_fit=_plan_best_fit,
    )


def _plan_best_fit(lengths: Ints, limit: int) -> tuple[Ints, Ints]:
    plan = plan_best_fit(lengths, limit, None)
    return plan.examples, plan.sequence_offsets


def _resolve_export_vocab_size(work: StageContext, card: Mapping[str, Any]) -> int:
    return work.recipe.vocab_size or int(card["vocab_size"])


def _name_segment(work: StageContext, source: _ExportSource, segment: int) -> str:
    firsts = _accumulate_counts([file.rows for file in source.lineage])
    which = int(np.searchsorted(firsts, segment, "right")) - 1
    column = work.store.table(source.lineage[which], ("example_id",)).column(0)
    return str(column[segment - int(firsts[which])].as_py())


def _read_segment_domains(work: StageContext, source: _ExportSource) -> tuple[tuple[str | None, ...], Ints]:
    """Return the values of all domains, and for each segment over all shards the number of its own."""
    found = [pl.Series("domain", [], pl.String)]
    for one in inputs.get_packed_shards(work).values():
        lineage = [file for file in one.files("segments") if file in source.lineage]
        examples = _load_export_input(work, one, TOKENIZED_EXAMPLES).files("examples")
        if not lineage:
            continue
        known = _read_frame(work.store, examples, ("example_id", "domain"))
        wanted = _read_frame(work.store, lineage, ("example_id",))
        found.append(wanted.join(known, on="example_id", how="left", maintain_order="left")["domain"])
    every = pl.concat(found)
    # Canonical rows call a row without a domain so; a record's own value of that name cannot be told apart.
    every = every.set(every == astrai.DEFAULT_FOLDER, None)
    values = [None, *sorted(every.drop_nulls().unique().to_list())]
    codes = every.replace_strict({value: i for i, value in enumerate(values)}, return_dtype=pl.Int64)
    return tuple(values), codes.to_numpy()


def _read_frame(store: Store, files: Sequence[File], columns: Sequence[str]) -> pl.DataFrame:
    return cast("pl.DataFrame", pl.from_arrow(pa.concat_tables([store.table(file, columns) for file in files])))


# ── The identity card ──────────────────────────────────────────────────────────────────────────────


def _load_export_input(work: StageContext, made: Manifest, stage: str) -> Manifest:
    key: StageKey = (*made.key[:-1], stage)
    return manifest.load_version(work.store, key, made.inputs.get("/".join(key)))


def _build_export_card(
    work: StageContext, export: Export, layout: ExportLayout, counts: Mapping[str, int], content: str
) -> dict[str, Any]:
    packed = inputs.get_packed_shards(work)
    own = next(iter(packed.values())).card
    return {
        "format": export.kind_name,
        "format_version": export.VERSION,
        "letter": export.label_convention,
        "unit": export.form,
        "split": export.split,
        "passes": export.passes,
        **{name: own[name] for name in ("tokenizer_files", "tokenizer_digest")},
        "vocab_size": _resolve_export_vocab_size(work, own),
        **{name: own[name] for name in ("bos_id", "eos_id", "pad_id")},
        "seq_len": work.recipe.seq_len,
        "kinds": sorted({one.row_kind for one in work.recipe.datasets.values()}),
        "recipe": work.recipe.name,
        "order": work.inputs[(work.recipe.name, TRAINING_SPLITS)].card["order"],
        "datasets": {name: _build_dataset_card(work, one) for name, one in packed.items()},
        "waivers": sorted({waiver for one in work.inputs.values() for waiver in one.waivers}),
        "builder": export_manifest.describe_builder(),
        "counts": dict(counts),
        "left_out": dict(layout.left_out),
        "content_hash": content,
        **layout.notes,
    }


def _build_dataset_card(work: StageContext, packed: Manifest) -> dict[str, Any]:
    raw = _load_export_input(work, packed, RAW_DATASET)
    return {
        "attention": packed.card["attention"],
        "template_digest": packed.card["template_digest"],
        "plan": packed.version,
        "source": raw.version,
        "source_files": read_facts(RawDatasetFacts, raw.facts).files,
    }


def build_export_terms(card: Mapping[str, Any], *, text: str = "{}") -> ExportContext:
    """Return what a writer knows beside the tokens, from a card."""
    return ExportContext(
        seq_len=int(card["seq_len"]),
        vocab_size=int(card["vocab_size"]),
        bos_id=card["bos_id"],
        eos_id=card["eos_id"],
        kinds=frozenset(card["kinds"]),
        card=text,
    )


# ── Making it ──────────────────────────────────────────────────────────────────────────────────────


def make_export(work: StageContext) -> StageOutput:
    """Write one export, or find it written by an earlier build."""
    at = part_folder(work.folder, _fingerprint_export(work))
    part = load_kept_part(work.store, work.folder, _fingerprint_export(work))
    reused = part is not None
    if part is None:
        part = _make_export_part(work, f"{at}/{work.key[-1]}")
        save_kept_part(work.store, work.folder, part)
    return _build_export_output(work, part, reused=reused)


def _fingerprint_export(work: StageContext) -> str:
    versions = sorted(("/".join(key), one.version) for key, one in work.inputs.items())
    waivers = sorted({waiver for one in work.inputs.values() for waiver in one.waivers})
    return digest_json(EXPORTS, identify_export(work.recipe, work.key[-1]), versions, waivers)


def _make_export_part(work: StageContext, at: str) -> Part:
    export = find_export(work)
    source = _collect_export_source(work, export)
    tokenizer = next(iter(inputs.get_packed_shards(work).values())).card
    if not len(source.rows):
        raise ConfigError(
            f"exports.{export.name}.split: {export.split} holds no sequence; one is needed for an export; enlarge "
            f"splits.{export.split}, or delete the export"
        )
    layout = export.lay_out(_describe_export_shape(work, export, source, tokenizer))
    if not layout.jobs:
        raise ConfigError(
            f"exports.{export.name}: kind {export.kind_name} can hold none of the {len(source.segments)} segments "
            f"({layout.left_out}); at least one is needed; choose another kind, or lower seq_len"
        )
    with scratch_folder(work) as scratch:
        out = scratch / "export"
        (out / DATA_FOLDER).mkdir(parents=True)
        shelf, told = _lay_out_shards(work, source, scratch)
        chosen = np.concatenate([source.segments[job.segments] for job in layout.jobs])
        expected = told[chosen]
        counts = {
            "sequences": sum(len(job.sequence_offsets) - 1 for job in layout.jobs),
            "segments": len(chosen),
            "tokens": int(source.lengths[chosen].sum()),
            "trained_tokens": int(expected["trained"].sum()),
        }
        content = f"{_sum_hashes(expected['hash']):032x}"
        card = _build_export_card(work, export, layout, counts, content)
        files, found = _write_export_files(work, export, layout, source.segments, shelf, card, out)
        facts = counts | {
            "content_hash": content,
            "conserved": found == content and _count_trained_tokens(files) == counts["trained_tokens"],
            "left_out": sum(layout.left_out.values()),
        }
        return Part(
            _fingerprint_export(work), _publish_export_files(work.store, out, files, card, at), facts | {"card": card}
        )


def _sum_hashes(hashes: "NDArray[np.void]") -> int:
    # Limbs of 32 bits added in 64: exact for four billion segments, without an integer object for each.
    limbs = np.frombuffer(hashes.tobytes(), "<u4").reshape(-1, 4).sum(axis=0, dtype=np.uint64)
    return sum(int(limb) << (32 * i) for i, limb in enumerate(limbs)) % native.HASH_MODULUS


def _count_trained_tokens(files: Sequence[FileDigests]) -> int:
    return sum(one.written.trained_tokens for one in files)


def write_export_scratch(task: ShardScratchTask) -> bytes:
    """Lay a shard out for taking; return the content hash and the targets of each of its segments."""
    segments = native.lay_out_shard(task)
    told = np.empty(len(segments.offsets) - 1, _SEGMENT_DTYPE)
    hashes = b"".join(one.to_bytes(16, "little") for one in native.hash_segments(segments, segments.mask))
    told["hash"] = np.frombuffer(hashes, "V16")
    told["trained"] = np.add.reduceat(segments.mask, segments.offsets[:-1], dtype=np.int64) if len(told) else 0
    return told.tobytes()


def _lay_out_shards(
    work: StageContext, source: _ExportSource, scratch: Path
) -> "tuple[SegmentFiles, NDArray[np.void]]":
    targets = tuple(str(scratch / f"{i:06d}.arrow") for i in range(len(source.shards)))
    tasks = [
        ShardScratchTask(work.store.root, shard, target) for shard, target in zip(source.shards, targets, strict=True)
    ]
    told = b"".join(
        work.pool.map(write_export_scratch, tasks, size_bytes=4 * sum(shard.bytes for shard in source.shards))
    )
    return SegmentFiles(targets, _locate_first_segments(source)), np.frombuffer(told, _SEGMENT_DTYPE)


def _locate_first_segments(source: _ExportSource) -> Ints:
    return source.first_segments[source.first_rows]


@dataclass(frozen=True, slots=True, eq=False)
class _ExportTask:
    """One job of an export: segments by their number over all shards, and where its files go."""

    export: Export
    job: ExportJob
    shelf: SegmentFiles
    folder: str
    terms: ExportContext


def write_export_job(task: _ExportTask) -> tuple[list[FileDigests], int]:
    """Write one job's files; return them with their digests, and the content hash of what was written into them."""
    found = 0

    def chunks() -> Iterator[SequenceBatch]:
        nonlocal found
        for segments, offsets in task.job.chunks(task.export.rows_at_once(task.terms.seq_len)):
            chunk = take_segments(task.shelf, segments, offsets)
            require_valid_tokens(chunk, vocab_size=task.terms.vocab_size, where=f"exports.{task.export.name}")
            found += sum(native.hash_segments(_to_segments(chunk), chunk.trained))
            yield chunk

    folder = Path(task.folder)
    written = task.export.write(task.job, chunks(), folder, task.terms)
    return [export_manifest.digest_written_file(folder, one) for one in written], found % native.HASH_MODULUS


def _to_segments(chunk: SequenceBatch) -> native.Segments:
    return native.Segments(
        ids=chunk.ids,
        mask=chunk.trained,
        offsets=chunk.offsets,
        sequence_offsets=chunk.sequence_offsets,
        example_ids=chunk.example_ids,
        starts=chunk.starts,
        weights=chunk.weights,
    )


def _write_export_files(
    work: StageContext,
    export: Export,
    layout: ExportLayout,
    segments: Ints,
    shelf: SegmentFiles,
    card: Mapping[str, Any],
    out: Path,
) -> tuple[list[FileDigests], str]:
    terms = build_export_terms(card, text=export_manifest.encode_json(card).decode())
    tasks = [
        _ExportTask(export, replace(job, segments=segments[job.segments]), shelf, str(out), terms)
        for job in layout.jobs
    ]
    size = 4 * int(card["counts"]["tokens"])
    files: list[FileDigests] = []
    total = 0
    for own, found in work.pool.map(write_export_job, tasks, size_bytes=size):
        files += own
        total += found
    last = export.finish(out, [one.written for one in files], terms)
    return [
        *files,
        *(export_manifest.digest_written_file(out, one) for one in last),
    ], f"{total % native.HASH_MODULUS:032x}"


# ── From the local folder to where it stays ────────────────────────────────────────────────────────


def _publish_export_files(
    store: Store, out: Path, files: Sequence[FileDigests], card: Mapping[str, Any], at: str
) -> dict[str, File]:
    """Move everything to its place, the manifest last."""
    if store.exists(at):
        # What a build left that was killed while it moved files.
        store.remove(at)
    content = export_manifest.encode_json(card)
    named: dict[str, File] = {}
    for one in files:
        _move_file(store, out / one.written.path, f"{at}/{one.written.path}")
        named[one.written.path] = File(f"{at}/{one.written.path}", one.size_bytes, one.digest, one.written.segments)
    for name, text in ((CARD_FILE, content), (MANIFEST_FILE, export_manifest.encode_manifest(files, content))):
        (out / name).write_bytes(text)
        described = export_manifest.digest_written_file(out, export_manifest.WrittenFile(name))
        _move_file(store, out / name, f"{at}/{name}")
        named[name] = File(f"{at}/{name}", described.size_bytes, described.digest, 0)
    return named


def _move_file(store: Store, source: Path, target: str) -> None:
    if store.is_local:
        path = store.local(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The scratch folder lies beside the stage, so this is a rename.
        os.replace(source, path)
        return
    with source.open("rb") as content, store.create(target) as sink:
        shutil.copyfileobj(content, sink, 1 << 20)


# ── What the manifest says, and what a person is told ──────────────────────────────────────────────


def _build_export_output(work: StageContext, part: Part, *, reused: bool) -> StageOutput:
    facts, card = dict(part.facts), dict(part.facts["card"])
    rows = [
        (name, file.rows, file.bytes) for name, file in part.files.items() if name not in (CARD_FILE, MANIFEST_FILE)
    ]
    counts = {name: int(facts[name]) for name in ("sequences", "segments", "tokens", "trained_tokens")}
    return StageOutput(
        parts=[part],
        facts=ExportFacts(
            conservation=0 if facts["conserved"] else 1,
            **counts,
            left_out=int(facts["left_out"]),
            files=len(rows),
            size_bytes=sum(size for _, _, size in rows),
            content_hash=facts["content_hash"],
        ),
        ledger=[(KEPT, "", counts["segments"]), *((state, "", n) for state, n in card["left_out"].items() if n)],
        # Exports have targets, but no kinds of spans: what is no target is context.
        token_ledger=[
            (card["split"], "trained", counts["trained_tokens"]),
            (card["split"], "context", counts["tokens"] - counts["trained_tokens"]),
        ],
        tables={"files": DisplayTable(("file", "segments", "size"), tuple(rows[:30]))},
        card=card,
        parts_reused=int(reused),
        rows_made=0 if reused else counts["sequences"],
    )


def locate_export(made: Manifest) -> str:
    """Return the folder of an export, relative to the storage root."""
    return made.parts[0].files[MANIFEST_FILE].path.rpartition("/")[0]


def format_trainer_pointer(export: Export, made: Manifest, folder: str) -> str:
    """Return the lines of a trainer's configuration that open an export which lies in a folder."""
    return export.pointer(f"{folder}/{DATA_FOLDER}", build_export_terms(made.card))


def copy_export_files(store: Store, made: Manifest, target: Path) -> None:
    """Put a copy of an export into a new folder, the manifest last: a path that no later build changes.

    Raises
    ------
    ConfigError
        If there is something in the folder already.

    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: not empty; a copy goes into a new folder; name another, or remove this one")
    at = locate_export(made)
    for file in sorted(made.parts[0].files.values(), key=lambda one: one.path.endswith(f"/{MANIFEST_FILE}")):
        path = target / file.path.removeprefix(f"{at}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        with store.open(file.path) as content, path.open("wb") as sink:
            shutil.copyfileobj(content, sink, 1 << 20)


def _count_export_rows(made: Manifest) -> RowCount | None:
    """Count the rows of an export by its unit."""
    is_packed = made.card.get("unit", "unpacked") == "packed"
    count = count_rows_by_fact("sequences", "sequence") if is_packed else count_rows_by_fact("segments", "segment")
    return count(made)


def _summarize_export(facts: ExportFacts, rows: str) -> Sequence[str]:
    return rows, format_count(facts.tokens, "token"), format_size(facts.size_bytes)


STAGE = StageDeclaration(
    name=EXPORTS,
    facts=ExportFacts,
    description="The same tokens and masks in the form of one trainer, with an identity card.",
    scope="export",
    identity=identify_export,
    prepare=lambda work: PreparedStage((), lambda: make_export(work)),
    inputs=(TRAINING_SPLITS, PACKED_SHARDS),
    gates_on_every_dataset=True,
    feeds=StatsInputs(_count_export_rows),
    summarize=_summarize_export,
)
