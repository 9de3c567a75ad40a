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

from rowmill.core.errors import ConfigError
from rowmill.core.number_text import counted, size_text
from rowmill.core.storage import Store, digest
from rowmill.exports import astrai, export_manifest
from rowmill.exports.base import Export, Job, Layout, Shape, Terms
from rowmill.exports.export_manifest import CARD, DATA, MANIFEST, Described
from rowmill.packing.plan import indices_of, plan_best_fit
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import EXPORTS, File, Key, Manifest, Part, Table
from rowmill.shards import gather, native
from rowmill.shards.sequences import Sequences, Shelf, require_sound, take
from rowmill.stages import inputs
from rowmill.stages.base import (
    Draft,
    Prepared,
    StageDeclaration,
    Work,
    keep_part,
    kept_part,
    part_folder,
    scratch_folder,
)
from rowmill.stats import Feeds, Rows, by_fact

VERSION = 4
"""Raise it when any export may hold other bytes, or its manifest say other things of them."""

Ints = NDArray[np.int64]

_SEGMENT = np.dtype([("hash", "V16"), ("trained", "<i8")])
"""What a worker tells of each segment: its content hash and its targets."""


def export_of(work: Work) -> Export:
    """Return the options of the export that a step makes."""
    return next(one for one in work.recipe.exports if one.name == work.key[-1])


def identity_of(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide an export's files and its card; tokens and their order are its inputs'."""
    export = next(one for one in recipe.exports if one.name == name)
    return {
        "versions": [VERSION, export.VERSION, export_manifest.builder()],
        "export": export.model_dump(mode="json"),
        "seq_len": recipe.seq_len,
        "vocab_size": recipe.vocab_size,
        "kinds": sorted({dataset.row_kind for dataset in recipe.datasets.values()}),
    }


# ── What there is to export ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
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
        return indices_of(self.first_segments[self.rows], counts)


def _source(work: Work, export: Export) -> _Source:
    packed = inputs.packed_of(work)
    parts = [part for one in packed.values() for part in one.parts if part.facts["split"] == export.split]
    shards = tuple(part.files["shard"] for part in parts)
    counts = [np.empty(0, np.int64)]
    lengths = [np.empty(0, np.int64)]
    for shard in shards:
        column = work.store.table(shard, ("segment_lengths",)).column(0).combine_chunks()
        counts.append(np.diff(np.asarray(column.offsets, np.int64)))
        lengths.append(column.flatten().to_numpy(zero_copy_only=False).astype(np.int64))
    first_rows = _firsts([shard.rows for shard in shards])
    return _Source(
        shards=shards,
        lineage=tuple(part.files["segments"] for part in parts),
        first_rows=first_rows,
        first_segments=_firsts(np.concatenate(counts)),
        lengths=np.concatenate(lengths),
        rows=_rows(work, export, packed) if export.split == "train" else np.arange(first_rows[-1]),
    )


def _firsts(counts: "Sequence[int] | Ints") -> Ints:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def _rows(work: Work, export: Export, packed: Mapping[str, Manifest]) -> Ints:
    """Return the rows of the train shards in the order of training, without fillers."""
    splits = work.inputs[(work.recipe.name, "training_splits")]
    order = work.store.table(splits.parts[0].files["order"], ("dataset", "sequence_id", "pass", "filler"))
    shown = pc.invert(order.column("filler"))
    if export.passes == "first":
        shown = pc.and_(shown, pc.equal(order.column("pass"), 0))
    order = order.filter(shown)
    sizes = [sum(p.files["shard"].rows for p in one.parts if p.facts["split"] == "train") for one in packed.values()]
    return _firsts(sizes)[order.column("dataset").to_numpy()] + order.column("sequence_id").to_numpy()


def _shape(work: Work, export: Export, source: _Source, card: Mapping[str, Any]) -> Shape:
    segments = source.segments
    values, domains = _domains(work, source) if export.BY_DOMAIN else ((None,), np.zeros(len(source.lengths), np.int64))
    return Shape(
        seq_len=work.recipe.seq_len,
        vocab_size=_vocabulary(work, card),
        bos_id=card["bos_id"],
        eos_id=card["eos_id"],
        kinds=frozenset(one.row_kind for one in work.recipe.datasets.values()),
        lengths=source.lengths[segments],
        sequence_offsets=_firsts(np.diff(source.first_segments)[source.rows]),
        domains=domains[segments],
        domain_values=values,
        name_of=lambda number: _name(work, source, int(segments[number])),
        best_fit=_best_fit,
    )


def _best_fit(lengths: Ints, limit: int) -> tuple[Ints, Ints]:
    plan = plan_best_fit(lengths, limit, None)
    return plan.examples, plan.sequence_offsets


def _vocabulary(work: Work, card: Mapping[str, Any]) -> int:
    return work.recipe.vocab_size or int(card["vocab_size"])


def _name(work: Work, source: _Source, segment: int) -> str:
    firsts = _firsts([file.rows for file in source.lineage])
    which = int(np.searchsorted(firsts, segment, "right")) - 1
    column = work.store.table(source.lineage[which], ("example_id",)).column(0)
    return str(column[segment - int(firsts[which])].as_py())


def _domains(work: Work, source: _Source) -> tuple[tuple[str | None, ...], Ints]:
    """Return the values of all domains, and for each segment over all shards the number of its own."""
    found = [pl.Series("domain", [], pl.String)]
    for one in inputs.packed_of(work).values():
        lineage = [file for file in one.files("segments") if file in source.lineage]
        examples = _input(work, one, "tokenized_examples").files("examples")
        if not lineage:
            continue
        known = _read(work.store, examples, ("example_id", "domain"))
        wanted = _read(work.store, lineage, ("example_id",))
        found.append(wanted.join(known, on="example_id", how="left", maintain_order="left")["domain"])
    every = pl.concat(found)
    # Canonical rows call a row without a domain so; a record's own value of that name cannot be told apart.
    every = every.set(every == astrai.DEFAULT, None)
    values = [None, *sorted(every.drop_nulls().unique().to_list())]
    codes = every.replace_strict({value: i for i, value in enumerate(values)}, return_dtype=pl.Int64)
    return tuple(values), codes.to_numpy()


def _read(store: Store, files: Sequence[File], columns: Sequence[str]) -> pl.DataFrame:
    return cast("pl.DataFrame", pl.from_arrow(pa.concat_tables([store.table(file, columns) for file in files])))


# ── The identity card ──────────────────────────────────────────────────────────────────────────────


def _input(work: Work, made: Manifest, stage: str) -> Manifest:
    key: Key = (*made.key[:-1], stage)
    return manifest.by_version(work.store, key, made.inputs.get("/".join(key)))


def _card(work: Work, export: Export, layout: Layout, counts: Mapping[str, int], content: str) -> dict[str, Any]:
    packed = inputs.packed_of(work)
    own = next(iter(packed.values())).card
    return {
        "format": export.word,
        "format_version": export.VERSION,
        "letter": export.letter,
        "unit": export.form,
        "split": export.split,
        "passes": export.passes,
        **{name: own[name] for name in ("tokenizer_files", "tokenizer_digest")},
        "vocab_size": _vocabulary(work, own),
        **{name: own[name] for name in ("bos_id", "eos_id", "pad_id")},
        "seq_len": work.recipe.seq_len,
        "kinds": sorted({one.row_kind for one in work.recipe.datasets.values()}),
        "recipe": work.recipe.name,
        "order": work.inputs[(work.recipe.name, "training_splits")].card["order"],
        "datasets": {name: _dataset_card(work, one) for name, one in packed.items()},
        "waivers": sorted({waiver for one in work.inputs.values() for waiver in one.waivers}),
        "builder": export_manifest.builder(),
        "counts": dict(counts),
        "left_out": dict(layout.left_out),
        "content_hash": content,
        **layout.notes,
    }


def _dataset_card(work: Work, packed: Manifest) -> dict[str, Any]:
    raw = _input(work, packed, "raw_dataset")
    return {
        "attention": packed.card["attention"],
        "template_digest": packed.card["template_digest"],
        "plan": packed.version,
        "source": raw.version,
        "source_files": raw.facts["files"],
    }


def terms_of(card: Mapping[str, Any], *, text: str = "{}") -> Terms:
    """Return what a writer knows beside the tokens, from a card."""
    return Terms(
        seq_len=int(card["seq_len"]),
        vocab_size=int(card["vocab_size"]),
        bos_id=card["bos_id"],
        eos_id=card["eos_id"],
        kinds=frozenset(card["kinds"]),
        card=text,
    )


# ── Making it ──────────────────────────────────────────────────────────────────────────────────────


def make(work: Work) -> Draft:
    """Write one export, or find it written by an earlier build."""
    at = part_folder(work.folder, _part_fingerprint(work))
    part = kept_part(work.store, work.folder, _part_fingerprint(work))
    reused = part is not None
    if part is None:
        part = _make(work, f"{at}/{work.key[-1]}")
        keep_part(work.store, work.folder, part)
    return _draft(work, part, reused=reused)


def _part_fingerprint(work: Work) -> str:
    versions = sorted(("/".join(key), one.version) for key, one in work.inputs.items())
    waivers = sorted({waiver for one in work.inputs.values() for waiver in one.waivers})
    return digest("exports", identity_of(work.recipe, work.key[-1]), versions, waivers)


def _make(work: Work, at: str) -> Part:
    export = export_of(work)
    source = _source(work, export)
    tokenizer = next(iter(inputs.packed_of(work).values())).card
    if not len(source.rows):
        raise ConfigError(
            f"exports.{export.name}.split: {export.split} holds no sequence; one is needed for an export; enlarge "
            f"splits.{export.split}, or delete the export"
        )
    layout = export.lay_out(_shape(work, export, source, tokenizer))
    if not layout.jobs:
        raise ConfigError(
            f"exports.{export.name}: kind {export.word} can hold none of the {len(source.segments)} segments "
            f"({layout.left_out}); at least one is needed; choose another kind, or lower seq_len"
        )
    with scratch_folder(work) as scratch:
        out = scratch / "export"
        (out / DATA).mkdir(parents=True)
        shelf, told = _laid_out(work, source, scratch)
        chosen = np.concatenate([source.segments[job.segments] for job in layout.jobs])
        expected = told[chosen]
        counts = {
            "sequences": sum(len(job.sequence_offsets) - 1 for job in layout.jobs),
            "segments": len(chosen),
            "tokens": int(source.lengths[chosen].sum()),
            "trained_tokens": int(expected["trained"].sum()),
        }
        content = f"{_sum(expected['hash']):032x}"
        card = _card(work, export, layout, counts, content)
        files, found = _write(work, export, layout, source.segments, shelf, card, out)
        facts = counts | {
            "content_hash": content,
            "conserved": found == content and _trained(files) == counts["trained_tokens"],
            "left_out": sum(layout.left_out.values()),
        }
        return Part(_part_fingerprint(work), _publish(work.store, out, files, card, at), facts | {"card": card})


def _sum(hashes: "NDArray[np.void]") -> int:
    # Limbs of 32 bits added in 64: exact for four billion segments, without an integer object for each.
    limbs = np.frombuffer(hashes.tobytes(), "<u4").reshape(-1, 4).sum(axis=0, dtype=np.uint64)
    return sum(int(limb) << (32 * i) for i, limb in enumerate(limbs)) % native.MODULUS


def _trained(files: Sequence[Described]) -> int:
    return sum(one.written.trained_tokens for one in files)


@dataclass(frozen=True, slots=True)
class _ScratchTask:
    root: str
    source: File
    target: str


def to_scratch(task: _ScratchTask) -> bytes:
    """Lay a shard out for taking; return the content hash and the targets of each of its segments."""
    table = Store(task.root).table(task.source).combine_chunks()
    segments = native.segments_of(table)
    # Each shard has a dictionary of its own; plain strings can be taken from several.
    place = table.schema.get_field_index("dataset")
    gather.to_scratch(table.set_column(place, "dataset", pc.cast(table.column("dataset"), pa.string())), task.target)
    told = np.empty(len(segments.offsets) - 1, _SEGMENT)
    hashes = b"".join(one.to_bytes(16, "little") for one in native.segment_hashes(segments, segments.mask))
    told["hash"] = np.frombuffer(hashes, "V16")
    told["trained"] = np.add.reduceat(segments.mask, segments.offsets[:-1], dtype=np.int64) if len(told) else 0
    return told.tobytes()


def _laid_out(work: Work, source: _Source, scratch: Path) -> "tuple[Shelf, NDArray[np.void]]":
    targets = tuple(str(scratch / f"{i:06d}.arrow") for i in range(len(source.shards)))
    tasks = [_ScratchTask(work.store.root, shard, target) for shard, target in zip(source.shards, targets, strict=True)]
    told = b"".join(work.pool.map(to_scratch, tasks, size_bytes=4 * sum(shard.bytes for shard in source.shards)))
    return Shelf(targets, _file_firsts(source)), np.frombuffer(told, _SEGMENT)


def _file_firsts(source: _Source) -> Ints:
    return source.first_segments[source.first_rows]


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """One job of an export: segments by their number over all shards, and where its files go."""

    export: Export
    job: Job
    shelf: Shelf
    folder: str
    terms: Terms


def write_job(task: _Task) -> tuple[list[Described], int]:
    """Write one job's files; return them with their digests, and the content hash of what was written into them."""
    found = 0

    def chunks() -> Iterator[Sequences]:
        nonlocal found
        for segments, offsets in task.job.chunks(task.export.rows_at_once(task.terms.seq_len)):
            chunk = take(task.shelf, segments, offsets)
            require_sound(chunk, vocab_size=task.terms.vocab_size, where=f"exports.{task.export.name}")
            found += sum(native.segment_hashes(_flat(chunk), chunk.trained))
            yield chunk

    folder = Path(task.folder)
    written = task.export.write(task.job, chunks(), folder, task.terms)
    return [export_manifest.describe(folder, one) for one in written], found % native.MODULUS


def _flat(chunk: Sequences) -> native.Segments:
    return native.Segments(
        ids=chunk.ids,
        mask=chunk.trained,
        offsets=chunk.offsets,
        sequence_offsets=chunk.sequence_offsets,
        example_ids=chunk.example_ids,
        starts=chunk.starts,
        weights=chunk.weights,
    )


def _write(
    work: Work,
    export: Export,
    layout: Layout,
    segments: Ints,
    shelf: Shelf,
    card: Mapping[str, Any],
    out: Path,
) -> tuple[list[Described], str]:
    terms = terms_of(card, text=export_manifest.json_bytes(card).decode())
    tasks = [
        _Task(export, replace(job, segments=segments[job.segments]), shelf, str(out), terms) for job in layout.jobs
    ]
    size = 4 * int(card["counts"]["tokens"])
    files: list[Described] = []
    total = 0
    for own, found in work.pool.map(write_job, tasks, size_bytes=size):
        files += own
        total += found
    last = export.finish(out, [one.written for one in files], terms)
    return [*files, *(export_manifest.describe(out, one) for one in last)], f"{total % native.MODULUS:032x}"


# ── From the local folder to where it stays ────────────────────────────────────────────────────────


def _publish(store: Store, out: Path, files: Sequence[Described], card: Mapping[str, Any], at: str) -> dict[str, File]:
    """Move everything to its place, the manifest last."""
    if store.exists(at):
        # What a build left that was killed while it moved files.
        store.remove(at)
    content = export_manifest.json_bytes(card)
    named: dict[str, File] = {}
    for one in files:
        _move(store, out / one.written.path, f"{at}/{one.written.path}")
        named[one.written.path] = File(f"{at}/{one.written.path}", one.size_bytes, one.digest, one.written.segments)
    for name, text in ((CARD, content), (MANIFEST, export_manifest.manifest_of(files, content))):
        (out / name).write_bytes(text)
        described = export_manifest.describe(out, export_manifest.Written(name))
        _move(store, out / name, f"{at}/{name}")
        named[name] = File(f"{at}/{name}", described.size_bytes, described.digest, 0)
    return named


def _move(store: Store, source: Path, target: str) -> None:
    if store.is_local:
        path = store.local(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The scratch folder lies beside the stage, so this is a rename.
        os.replace(source, path)
        return
    with source.open("rb") as content, store.create(target) as sink:
        shutil.copyfileobj(content, sink, 1 << 20)


# ── What the manifest says, and what a person is told ──────────────────────────────────────────────


def _draft(work: Work, part: Part, *, reused: bool) -> Draft:
    facts, card = dict(part.facts), dict(part.facts["card"])
    rows = [(name, file.rows, file.bytes) for name, file in part.files.items() if name not in (CARD, MANIFEST)]
    counts = {name: int(facts[name]) for name in ("sequences", "segments", "tokens", "trained_tokens")}
    return Draft(
        parts=[part],
        facts={
            "conservation": 0 if facts["conserved"] else 1,
            **counts,
            "left_out": int(facts["left_out"]),
            "files": len(rows),
            "size_bytes": sum(size for _, _, size in rows),
            "content_hash": facts["content_hash"],
        },
        ledger=[(KEPT, "", counts["segments"]), *((state, "", n) for state, n in card["left_out"].items() if n)],
        # Exports have targets, but no kinds of spans: what is no target is context.
        token_ledger=[
            (card["split"], "trained", counts["trained_tokens"]),
            (card["split"], "context", counts["tokens"] - counts["trained_tokens"]),
        ],
        tables={"files": Table(("file", "segments", "size"), tuple(rows[:30]))},
        card=card,
        parts_reused=int(reused),
        rows_made=0 if reused else counts["sequences"],
    )


def folder_of(made: Manifest) -> str:
    """Return the folder of an export, relative to the storage root."""
    return made.parts[0].files[MANIFEST].path.rpartition("/")[0]


def pointer(export: Export, made: Manifest, folder: str) -> str:
    """Return the lines of a trainer's configuration that open an export which lies in a folder."""
    return export.pointer(f"{folder}/{DATA}", terms_of(made.card))


def copy_out(store: Store, made: Manifest, target: Path) -> None:
    """Put a copy of an export into a new folder, the manifest last: a path that no later build changes.

    Raises
    ------
    ConfigError
        If there is something in the folder already.

    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: not empty; a copy goes into a new folder; name another, or remove this one")
    at = folder_of(made)
    for file in sorted(made.parts[0].files.values(), key=lambda one: one.path.endswith(f"/{MANIFEST}")):
        path = target / file.path.removeprefix(f"{at}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        with store.open(file.path) as content, path.open("wb") as sink:
            shutil.copyfileobj(content, sink, 1 << 20)


def _count_rows(made: Manifest) -> Rows | None:
    """Count the rows of an export by its unit."""
    is_packed = made.card.get("unit", "unpacked") == "packed"
    count = by_fact("sequences", "sequence") if is_packed else by_fact("segments", "segment")
    return count(made)


def _summarize(facts: Mapping[str, Any], rows: str) -> Sequence[str]:
    return rows, counted(facts["tokens"], "token"), size_text(facts["size_bytes"])


STAGE = StageDeclaration(
    name=EXPORTS,
    description="The same tokens and masks in the form of one trainer, with an identity card.",
    scope="export",
    identity=identity_of,
    prepare=lambda work: Prepared((), lambda: make(work)),
    inputs=("training_splits", "packed_shards"),
    gates_on_every_dataset=True,
    feeds=Feeds(_count_rows),
    summarize=_summarize,
)
