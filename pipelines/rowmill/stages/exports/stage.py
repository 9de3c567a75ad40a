"""The order and the packed shards → one export: the same tokens in a trainer's file format.

    <recipe>/exports/<name>/parts/<fingerprint>/<name>/
    ├── data/            the folder that a trainer reads
    ├── card.json
    └── manifest.json

Each job writes its files to a folder of its host first, because libraries that write their own files need one, and
moves complete files; a killed build leaves only files without a manifest under the export's name.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rowmill.core.arrays import format_count, format_size
from rowmill.core.errors import ConfigError
from rowmill.core.stage_names import EXPORTS, PACKED_SHARDS, TRAINING_SPLITS
from rowmill.core.storage import Store, digest_json
from rowmill.exports import base
from rowmill.exports.base import CARD_FILE, DATA_FOLDER, MANIFEST_FILE, Export, FileDigests
from rowmill.parts.context import StageOutput, open_host_scratch
from rowmill.parts.functions import load_kept_part, part_folder, save_kept_part
from rowmill.recipe.recipe import Recipe
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import DisplayTable, Manifest, Part
from rowmill.shards import native
from rowmill.stages import inputs
from rowmill.stages.base import PreparedStage, StageContext, StageDeclaration
from rowmill.stages.exports.export_files import (
    build_export_card,
    build_export_context,
    collect_export_source,
    describe_export_shape,
    measure_all_segments,
    open_export_shards,
    publish_export_manifest,
    write_export_files,
)
from rowmill.stats import RowCount, StatsInputs, count_rows_by_fact

VERSION = 6
"""Increase it when the bytes of any export, or the content of its manifest, may change."""


def find_export(context: StageContext) -> Export:
    """Return the options of the export that a step makes."""
    return next(export for export in context.recipe.exports if export.name == context.key[-1])


@dataclass(frozen=True, slots=True)
class ExportFacts:
    """Facts of an output of the stage."""

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


# ── Making it ──────────────────────────────────────────────────────────────────────────────────────


def make_export(context: StageContext) -> StageOutput:
    """Write one export, or reuse the one of an earlier build."""
    at = part_folder(context.folder, _fingerprint_export(context))
    part = load_kept_part(context.store, context.folder, _fingerprint_export(context))
    reused = part is not None
    if part is None:
        part = _make_export_part(context, f"{at}/{context.key[-1]}")
        save_kept_part(context.store, context.folder, part)
    return _build_export_output(context, part, reused=reused)


def _fingerprint_export(context: StageContext) -> str:
    versions = sorted(("/".join(key), one.version) for key, one in context.inputs.items())
    waivers = sorted({waiver for one in context.inputs.values() for waiver in one.waivers})
    return digest_json(EXPORTS, identify_export(context.recipe, context.key[-1]), versions, waivers)


def _make_export_part(context: StageContext, at: str) -> Part:
    export = find_export(context)
    source = collect_export_source(context, export)
    tokenizer = next(iter(inputs.get_packed_shards(context).values())).card
    if not len(source.rows):
        raise ConfigError(
            f"exports.{export.name}.split: {export.split} has no sequence; an export needs at least one; enlarge "
            f"splits.{export.split}, or delete the export"
        )
    layout = export.lay_out(describe_export_shape(context, export, source, tokenizer))
    if not layout.jobs:
        raise ConfigError(
            f"exports.{export.name}: kind {export.kind_name} cannot store any of the {len(source.segments)} segments "
            f"({layout.left_out}); at least one is needed; choose another kind, or lower seq_len"
        )
    with open_host_scratch(context) as scratch:
        opened = open_export_shards(context, source, scratch)
        chosen = np.concatenate([source.segments[job.segments] for job in layout.jobs])
        expected = measure_all_segments(context, opened)[chosen]
        counts = {
            "sequences": sum(len(job.sequence_offsets) - 1 for job in layout.jobs),
            "segments": len(chosen),
            "tokens": int(source.lengths[chosen].sum()),
            "trained_tokens": int(expected["trained"].sum()),
        }
        # Limbs of 32 bits added in 64: exact for four billion segments, without an integer object for each.
        limbs = np.frombuffer(expected["hash"].tobytes(), "<u4").reshape(-1, 4).sum(axis=0, dtype=np.uint64)
        content = native.format_content_hash(
            sum(int(limb) << (32 * i) for i, limb in enumerate(limbs)) % native.HASH_MODULUS
        )
        card = build_export_card(context, export, layout, counts, content)
        files, found = write_export_files(context, export, layout, source.segments, opened, card, at)
        facts = counts | {
            "content_hash": content,
            "conserved": found == content and _count_trained_tokens(files) == counts["trained_tokens"],
            "left_out": sum(layout.left_out.values()),
        }
        published = publish_export_manifest(context.store, files, card, at)
        return Part(_fingerprint_export(context), published, facts | {"card": card})


def _count_trained_tokens(files: Sequence[FileDigests]) -> int:
    return sum(file.written.trained_tokens for file in files)


# ── The manifest, and the messages for users ───────────────────────────────────────────────────────


def _build_export_output(context: StageContext, part: Part, *, reused: bool) -> StageOutput:
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
        # Exports have targets, but no span kinds: every other token is context.
        token_ledger=[
            (card["split"], "trained", counts["trained_tokens"]),
            (card["split"], "context", counts["tokens"] - counts["trained_tokens"]),
        ],
        tables={"files": DisplayTable(("file", "segments", "size"), tuple(rows[:30]))},
        card=card,
        parts_reused=int(reused),
        rows_made=0 if reused else counts["sequences"],
    )


def locate_export(output: Manifest) -> str:
    """Return the folder of an export, relative to the storage root."""
    return output.parts[0].files[MANIFEST_FILE].path.rpartition("/")[0]


def format_trainer_pointer(export: Export, output: Manifest, folder: str) -> str:
    """Return the lines of a trainer's configuration that open the export in a folder."""
    return export.pointer(f"{folder}/{DATA_FOLDER}", build_export_context(output.card))


def copy_export_files(store: Store, output: Manifest, target: Path) -> None:
    """Copy an export to a new folder, the manifest last; no later build changes the copy.

    Raises
    ------
    ConfigError
        If the folder is not empty.

    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: not empty; an export is copied to a new folder; name another, or remove this one")
    at = locate_export(output)
    for file in sorted(output.parts[0].files.values(), key=lambda one: one.path.endswith(f"/{MANIFEST_FILE}")):
        path = target / file.path.removeprefix(f"{at}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        with store.open(file.path) as content, path.open("wb") as sink:
            shutil.copyfileobj(content, sink, 1 << 20)


def _count_export_rows(output: Manifest) -> RowCount | None:
    """Count the rows of an export by its unit."""
    is_packed = output.card.get("unit", "unpacked") == "packed"
    count = count_rows_by_fact("sequences", "sequence") if is_packed else count_rows_by_fact("segments", "segment")
    return count(output)


def _summarize_export(facts: ExportFacts, rows: str) -> Sequence[str]:
    return rows, format_count(facts.tokens, "token"), format_size(facts.size_bytes)


STAGE = StageDeclaration(
    name=EXPORTS,
    facts=ExportFacts,
    description="The same tokens and masks in one trainer's file format, with an identity card.",
    scope="export",
    identity=identify_export,
    prepare=lambda context: PreparedStage((), lambda: make_export(context)),
    inputs=(TRAINING_SPLITS, PACKED_SHARDS),
    gates_on_every_dataset=True,
    stats_inputs=StatsInputs(_count_export_rows),
    summarize=_summarize_export,
)
