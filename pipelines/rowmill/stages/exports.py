"""The order and the packed shards → one export: the same tokens in a trainer's file format.

    <recipe>/exports/<name>/parts/<fingerprint>/<name>/
    ├── data/            the folder that a trainer reads
    ├── card.json
    └── manifest.json

Each job writes its files to a folder of its host first, because libraries that write their own files need one, and
moves complete files; a killed build leaves only files without a manifest under the export's name.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import (
    Ints,
    compute_offsets,
    count_true,
    expand_ranges,
    find_distinct,
    format_count,
    format_size,
    read_lists,
)
from rowmill.core.errors import ConfigError
from rowmill.core.stage_names import EXPORTS, PACKED_SHARDS, RAW_DATASET, TOKENIZED_EXAMPLES, TRAINING_SPLITS
from rowmill.core.storage import Store, digest_json, read_tables
from rowmill.exports import astrai, base
from rowmill.exports.base import (
    CARD_FILE,
    DATA_FOLDER,
    MANIFEST_FILE,
    Export,
    ExportContext,
    ExportIndex,
    ExportJob,
    ExportLayout,
    WrittenFile,
)
from rowmill.parts.context import StageOutput, open_host_scratch
from rowmill.parts.functions import load_kept_part, part_folder, save_kept_part
from rowmill.recipe.recipe import Recipe
from rowmill.schema.content_hash import HASH_MODULUS, format_content_hash
from rowmill.schema.counts import CountSet
from rowmill.schema.export_counts import ExportCounts, ExportDetails
from rowmill.schema.manifest import DisplayTable, File, Manifest, Part, add_up_counts
from rowmill.schema.shard_counts import ShardDetails, select_shards
from rowmill.schema.source_counts import SourceCounts
from rowmill.shards import native
from rowmill.shards.host_scratch import NumberedShard, ShardCopies
from rowmill.shards.sequences import SequenceBatch, require_valid_tokens, take_segments
from rowmill.stages import inputs
from rowmill.stages.base import PreparedStage, StageContext, StageDeclaration
from rowmill.stats.tables import RowCount, StatsInputs

if TYPE_CHECKING:
    import polars as pl


def _read_segment_domains(context: StageContext, exported: Sequence[File]) -> tuple[tuple[str | None, ...], Ints]:
    """Return all domain values, and for each segment over all shards the index of its domain."""
    import polars as pl

    found = [pl.Series("domain", [], pl.String)]
    for shard in inputs.get_packed_shards(context).values():
        lineage = [file for file in shard.files("segments") if file in exported]
        examples = inputs.load_origin(context, shard, TOKENIZED_EXAMPLES).files("examples")
        if not lineage:
            continue
        known = _read_frame(context.store, examples, ("example_id", "domain"))
        wanted = _read_frame(context.store, lineage, ("example_id",))
        found.append(wanted.join(known, on="example_id", how="left", maintain_order="left")["domain"])
    every = pl.concat(found)
    # This is the domain of rows without one; a record's value of the same name is indistinguishable.
    every = every.set(every == astrai.DEFAULT_FOLDER, None)
    values = [None, *sorted(every.drop_nulls().unique().to_list())]
    codes = every.replace_strict({value: i for i, value in enumerate(values)}, return_dtype=pl.Int64)
    return tuple(values), codes.to_numpy()


def _read_frame(store: Store, files: Sequence[File], columns: Sequence[str]) -> "pl.DataFrame":
    import polars as pl

    return cast("pl.DataFrame", pl.from_arrow(pa.concat_tables(read_tables(store, files, columns))))


def build_export_card(
    context: StageContext, export: Export, layout: ExportLayout, counts: Mapping[str, int], content: str
) -> dict[str, Any]:
    """Return the identity card that is written next to the files."""
    packed = inputs.get_packed_shards(context)
    datasets: dict[str, Any] = {}
    for name, one in packed.items():
        raw = inputs.load_origin(context, one, RAW_DATASET)
        datasets[name] = {
            "attention": one.card["attention"],
            "template_digest": one.card["template_digest"],
            "plan": one.version,
            "source": raw.version,
            "source_files": raw.get_counts(SourceCounts).files,
        }
    return {
        "format": export.kind_name,
        "format_version": export.VERSION,
        "label_convention": export.label_convention,
        "unit": export.form,
        "split": export.split,
        "passes": export.passes,
        **{name: next(iter(packed.values())).card[name] for name in ("tokenizer_files", "tokenizer_digest")},
        **describe_tokens(context),
        "recipe": context.recipe.name,
        "order": context.inputs[(context.recipe.name, TRAINING_SPLITS)].card["order"],
        "datasets": datasets,
        "waivers": sorted({waiver for one in context.inputs.values() for waiver in one.waivers}),
        "builder": base.describe_builder(),
        "counts": dict(counts),
        "left_out": dict(layout.left_out),
        "content_hash": content,
        **layout.notes,
    }


def describe_tokens(context: StageContext) -> dict[str, Any]:
    """Return the entries of a card that are fields of an `ExportContext`."""
    own, recipe = next(iter(inputs.get_packed_shards(context).values())).card, context.recipe
    return {
        "vocab_size": recipe.vocab_size or int(own["vocab_size"]),
        **{name: own[name] for name in ("bos_id", "eos_id", "pad_id")},
        "seq_len": recipe.seq_len,
        "segment_multiple_of": recipe.segment_multiple_of,
        "kinds": sorted({dataset.row_kind for dataset in recipe.datasets.values()}),
        "objective": recipe.objective,
    }


def build_export_context(card: Mapping[str, Any]) -> ExportContext:
    """Return a context from a card's entries."""
    own = {field.name: card[field.name] for field in fields(ExportContext) if field.name != "card"}
    return ExportContext(**own | {"kinds": frozenset(card["kinds"])})


_SEGMENT_DTYPE = np.dtype([("hash", "V16"), ("trained", "<i8")])
"""A worker's result for each segment: its content hash and its number of targets."""


def measure_segments(shard: NumberedShard, copies: ShardCopies) -> bytes:
    """Return the content hash and the targets of each segment of a shard; leave a copy for the jobs of this host."""
    segments = copies.read(shard)
    measured = np.empty(len(segments.offsets) - 1, _SEGMENT_DTYPE)
    hashes = b"".join(one.to_bytes(16, "little") for one in native.hash_segments(segments))
    measured["hash"] = np.frombuffer(hashes, "V16")
    measured["trained"] = count_true(segments.trained, segments.offsets)
    return measured.tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class ExportWriter:
    """Writes jobs of an export to the folder `at` of the store, from the shards' copies on its host.

    `first_segments` int64[S] is the number of each shard's first segment; jobs name segments over all shards.
    """

    export: Export
    context: ExportContext
    at: str
    copies: ShardCopies
    first_segments: Ints

    def write(self, job: ExportJob) -> tuple[list[WrittenFile], int]:
        """Write one job's files; return them with their digests, and the content hash of the written segments."""
        # This host's copies of the shards, of which those that hold the job's segments are there.
        self.copies.require(find_distinct(np.searchsorted(self.first_segments, job.segments, "right") - 1).tolist())
        copies = self.copies.files
        found = 0

        def chunks() -> Iterator[SequenceBatch]:
            nonlocal found
            for segments, offsets in job.chunks(self.export.rows_at_once(self.context)):
                chunk = take_segments(copies, self.first_segments, segments, offsets)
                require_valid_tokens(chunk, vocab_size=self.context.vocab_size, where=f"exports.{self.export.name}")
                found += sum(native.hash_segments(chunk))
                yield chunk

        with self.copies.scratch.open_folder() as folder:
            (folder / DATA_FOLDER).mkdir()
            written = self.export.write(job, chunks(), folder, self.context)
            files = _publish_written_files(Store(self.copies.root), folder, written, self.at)
        return files, found % HASH_MODULUS

    def finish(self, store: Store, files: list[WrittenFile]) -> list[WrittenFile]:
        """Write what the export adds once the files of all jobs are there; return all files."""
        with self.copies.scratch.open_folder() as folder:
            (folder / DATA_FOLDER).mkdir()
            last = self.export.finish(folder, files, self.context)
            return files + _publish_written_files(store, folder, last, self.at)


def write_export_job(job: ExportJob, writer: ExportWriter) -> tuple[list[WrittenFile], int]:
    """Write one job's files in a worker."""
    return writer.write(job)


def _publish_written_files(store: Store, folder: Path, written: Sequence[WrittenFile], at: str) -> list[WrittenFile]:
    for file in written:
        file.compute_digests(folder)
        source, target = folder / file.path, f"{at}/{file.path}"
        if store.is_local:
            path = store.local(target)
            path.parent.mkdir(parents=True, exist_ok=True)
            # The scratch folder is in the stage's folder, so this is a rename.
            os.replace(source, path)
        else:
            with source.open("rb") as content, store.create(target) as sink:
                shutil.copyfileobj(content, sink, 1 << 20)
    return list(written)


VERSION = 8
"""Increase it when the bytes of any export, or the content of its manifest, may change."""


def identify_export(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide an export's files and its card; tokens and order come from its inputs."""
    export = next(one for one in recipe.exports if one.name == name)
    return {
        "versions": [VERSION, export.VERSION, base.describe_builder()],
        "export": export.model_dump(mode="json"),
        "seq_len": recipe.seq_len,
        "vocab_size": recipe.vocab_size,
        "kinds": sorted({dataset.row_kind for dataset in recipe.datasets.values()}),
        "segment_multiple_of": recipe.segment_multiple_of,
    }


def make_export(context: StageContext) -> StageOutput:
    """Write one export, or reuse the one of an earlier build."""
    at = part_folder(context.folder, _fingerprint_export(context))
    part = load_kept_part(context.store, context.folder, _fingerprint_export(context))
    reused = part is not None
    if part is None:
        part = _make_export_part(context, f"{at}/{context.key[-1]}")
        save_kept_part(context.store, context.folder, part)
    card = part.get_details(ExportDetails).to_json()["card"]
    counts = add_up_counts([part])
    exported = counts.get(ExportCounts)
    rows = [(name, file.rows, file.bytes) for name, file in part.files.items() if name not in _DESCRIBING_FILES]
    return StageOutput(
        parts=[part],
        counts=counts,
        ledger=exported.list_ledger(),
        # Exports have targets, but no span kinds: every other token is context.
        token_ledger=[
            (card["split"], "trained", exported.trained_tokens),
            (card["split"], "context", exported.tokens - exported.trained_tokens),
        ],
        tables={"files": DisplayTable(("file", "segments", "size"), tuple(rows[:30]))},
        card=card,
        parts_reused=int(reused),
        rows_made=0 if reused else exported.sequences,
    )


_DESCRIBING_FILES = (CARD_FILE, MANIFEST_FILE)


def _fingerprint_export(context: StageContext) -> str:
    versions = inputs.list_input_versions(context.store, context.inputs, STAGE)
    waivers = sorted({waiver for one in context.inputs.values() for waiver in one.waivers})
    return digest_json(EXPORTS, identify_export(context.recipe, context.key[-1]), versions, waivers)


def _index_segments(
    context: StageContext, export: Export, packed: Mapping[str, Manifest], parts: Sequence[Part]
) -> tuple[ExportIndex, Ints, Ints]:
    """Return what an export is laid out by, its segments by number over all shards, and each shard's first number."""
    lineage = [part.files["segments"] for part in parts]
    counts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for part in parts:
        values, offsets = read_lists(context.store.table(part.files["shard"], ("segment_lengths",)).column(0))
        counts.append(np.diff(offsets))
        sizes.append(values.astype(np.int64))
    # Row r holds segments `[first_segments[r], first_segments[r + 1])`; both are numbered over all shards.
    lengths, in_rows = np.concatenate(sizes), np.concatenate(counts)
    first_segments = compute_offsets(in_rows)
    first_rows = compute_offsets([part.files["shard"].rows for part in parts])
    rows = np.arange(first_rows[-1])
    if export.split == "train":
        # In training order, without fillers.
        splits = context.inputs[(context.recipe.name, TRAINING_SPLITS)]
        order = inputs.load_order(context.store, splits, ("dataset", "sequence_id", "filler"))
        order = order.filter(pc.invert(order.column("filler")))
        firsts = compute_offsets(inputs.count_train_sequences(packed))
        rows = firsts[order.column("dataset").to_numpy()] + order.column("sequence_id").to_numpy()
        if export.passes == "first":
            # Not the places of pass 0, which may lack a sequence that a later one shows (`remainder: drop`).
            rows = rows[np.sort(np.unique(rows, return_index=True)[1])]
    if not len(rows):
        raise ConfigError(
            f"exports.{export.name}.split: {export.split} has no sequence; an export needs at least one; enlarge "
            f"splits.{export.split}, or delete the export"
        )
    segments = expand_ranges(first_segments[rows], in_rows[rows])
    domain_values, domains = (None,), np.zeros(len(lengths), np.int64)
    if export.BY_DOMAIN:
        domain_values, domains = _read_segment_domains(context, lineage)

    def name_segment(number: int) -> str:
        firsts, segment = compute_offsets([file.rows for file in lineage]), int(segments[number])
        which = int(np.searchsorted(firsts, segment, "right")) - 1
        return str(context.store.table(lineage[which], ("example_id",)).column(0)[segment - int(firsts[which])].as_py())

    index = ExportIndex(
        context=build_export_context(describe_tokens(context)),
        lengths=lengths[segments],
        sequence_offsets=compute_offsets(in_rows[rows]),
        domains=domains[segments],
        domain_values=domain_values,
        name_of=name_segment,
    )
    return index, segments, first_segments[first_rows]


def _make_export_part(context: StageContext, at: str) -> Part:
    export = next(export for export in context.recipe.exports if export.name == context.key[-1])
    packed = inputs.open_ordered_shards(context)
    parts = [part for one in packed.values() for part in select_shards(one.parts, export.split)]
    index, segments, first_segments = _index_segments(context, export, packed, parts)
    layout = export.lay_out(index)
    if not layout.jobs:
        raise ConfigError(
            f"exports.{export.name}: kind {export.kind_name} cannot store any of the {len(segments)} segments "
            f"({layout.left_out}); at least one is needed; choose another kind, or lower seq_len"
        )
    with open_host_scratch(context) as scratch:
        shards = tuple(
            NumberedShard(part.files["shard"], part.get_details(ShardDetails).first_sequence) for part in parts
        )
        copies = ShardCopies(context.store.root, shards, scratch, keeps_padding=False)
        size = 4 * sum(shard.file.bytes for shard in shards)
        measured = context.pool.map(measure_segments, shards, size_bytes=size, shared=copies)
        of_segments = np.frombuffer(b"".join(measured), _SEGMENT_DTYPE)
        jobs = [replace(job, segments=segments[job.segments]) for job in layout.jobs]
        chosen = of_segments[np.concatenate([job.segments for job in jobs])]
        totals = {
            "sequences": sum(len(job.sequence_offsets) - 1 for job in jobs),
            "segments": len(chosen),
            "tokens": sum(int(index.lengths[job.segments].sum()) for job in layout.jobs),
            "trained_tokens": int(chosen["trained"].sum()),
        }
        content = _add_up_hashes(chosen["hash"])
        card = build_export_card(context, export, layout, totals, content)
        text = base.encode_json(card)
        writer = ExportWriter(export, replace(index.context, card=text.decode()), at, copies, first_segments)
        # Leftovers of a build that was killed.
        if context.store.exists(at):
            context.store.remove(at)
        files: list[WrittenFile] = []
        total = 0
        for own, of_job in context.pool.map(write_export_job, jobs, size_bytes=4 * totals["tokens"], shared=writer):
            files += own
            total += of_job
        files = writer.finish(context.store, files)
    found = format_content_hash(total)
    counts = ExportCounts(
        **totals,
        left_out_by_state=dict(layout.left_out),
        files=len(files),
        size_bytes=sum(file.size_bytes for file in files),
        content_hash=content,
        is_unequal=found != content or sum(file.trained_tokens for file in files) != totals["trained_tokens"],
    )
    return Part(
        _fingerprint_export(context),
        _publish_export(context.store, at, files, text),
        counts=CountSet.of(counts).to_json(),
        details={ExportDetails.__name__: ExportDetails(card=card).to_json()},
    )


def _add_up_hashes(hashes: NDArray[Any]) -> str:
    """Return the content hash of segments, of `hashes` V16[N].

    Limbs of 32 bits added in 64: exact for four billion segments, without an integer object for each.
    """
    limbs = np.frombuffer(hashes.tobytes(), "<u4").reshape(-1, 4).sum(axis=0, dtype=np.uint64)
    return format_content_hash(sum(int(limb) << (32 * i) for i, limb in enumerate(limbs)) % HASH_MODULUS)


def _publish_export(store: Store, at: str, files: Sequence[WrittenFile], card: bytes) -> dict[str, File]:
    """Write card and manifest, last of all: a folder with a manifest is complete; return all files by their paths."""
    published = {file.path: File(f"{at}/{file.path}", file.size_bytes, file.digest, file.segments) for file in files}
    for name, written in ((CARD_FILE, card), (MANIFEST_FILE, base.encode_manifest(files, card))):
        published[name] = store.put(f"{at}/{name}", written)
    return published


def locate_export(output: Manifest) -> str:
    """Return the folder of an export, relative to the storage root."""
    return output.parts[0].files[MANIFEST_FILE].path.rpartition("/")[0]


def format_trainer_pointer(export: Export, output: Manifest, folder: str) -> str:
    """Return the lines of a trainer's configuration that open the export in a folder."""
    return export.pointer(f"{folder}/{DATA_FOLDER}", build_export_context(output.card))


def copy_export_files(store: Store, output: Manifest, target: Path) -> None:
    """Copy an export to a new folder, the manifest last; no later build changes the copy.

    Raises ConfigError if the folder is not empty.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: not empty; an export is copied to a new folder; name another, or remove this one")
    at = locate_export(output)
    for file in sorted(output.parts[0].files.values(), key=lambda one: one.path.endswith(f"/{MANIFEST_FILE}")):
        path = target / file.path.removeprefix(f"{at}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        with store.open(file.path) as content, path.open("wb") as sink:
            shutil.copyfileobj(content, sink, 1 << 20)


def _count_export_rows(output: Manifest) -> RowCount:
    """Count the rows of an export by its unit."""
    is_packed = output.card["unit"] == "packed"
    counts = output.get_counts(ExportCounts)
    return RowCount(counts.sequences, "sequence") if is_packed else RowCount(counts.segments, "segment")


def _summarize_export(counts: CountSet, rows: str) -> Sequence[str]:
    exported = counts.get(ExportCounts)
    return rows, format_count(exported.tokens, "token"), format_size(exported.size_bytes)


STAGE = StageDeclaration(
    name=EXPORTS,
    counts=ExportCounts,
    description="The same tokens and masks in one trainer's file format, with an identity card.",
    scope="export",
    identity=identify_export,
    prepare=lambda context: PreparedStage((), lambda: make_export(context)),
    inputs=(TRAINING_SPLITS, PACKED_SHARDS),
    origins=(RAW_DATASET, TOKENIZED_EXAMPLES),
    gates_on_every_dataset=True,
    stats_inputs=StatsInputs(_count_export_rows),
    summarize=_summarize_export,
)
