"""Some rows through all rooms in memory: what was read, what became of it, and which of its tokens train.

What belongs here: choosing rows, running the parts' own work on them, cutting an example into stretches of one
class, showing that. What does not: any room's work; it is done by the same functions as in a build
(`parts.py`), over a store in memory that is gone afterwards. Nothing is written.

    source ─► first records ─canonicalize_part─► rows ─tokenize_part─► examples ─► trained | context | template

Copies of earlier rows are shown like the others: what repeats what is known only when all rows are made.
"""

import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines import manifest, parts, sources, terminal
from pipelines.build import Project
from pipelines.contract import TemplateContract, mismatched_prompts, warnings
from pipelines.errors import ConfigError, nearest
from pipelines.examples import KINDS, WEIGHTS, tokens_by_weight
from pipelines.executors import LocalPool
from pipelines.masking import MaskRules
from pipelines.rendering import Renderer
from pipelines.rows import is_place, place_of
from pipelines.sources import FileScan, Part, RawRecord
from pipelines.stages import Work, record_examples, record_rows, tokenized_examples
from pipelines.storage import Store, digest
from pipelines.template_proof import TemplateProof, prove_template
from pipelines.tokenization import Encoder

TokenClass = Literal["trained", "context", "template"]
ClassT = TypeVar("ClassT")


@dataclass(frozen=True, slots=True)
class Stretch(Generic[ClassT]):
    """Neighbouring tokens of one class, decoded."""

    kind: ClassT
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One example of a row: its lengths, what truncation took by stage, and its text in stretches.

    `weights` are trained tokens by their loss weight; empty where the dataset has no weights.
    """

    example_id: str
    original_tokens: int
    tokens: int
    trained_tokens: int
    removed: dict[str, int]
    stretches: tuple[Stretch[TokenClass], ...]
    weights: dict[str, int]


@dataclass(frozen=True, slots=True)
class Inspected:
    """One record on its way: raw, report, canonical row, examples; or at which stage it was rejected and why."""

    dataset: str
    row_id: str
    source: str
    raw: bytes
    row: dict[str, Any] | None
    rejected: tuple[str, str, str] | None
    samples: tuple[Sample, ...]


# ── Choosing rows ──────────────────────────────────────────────────────────────────────────────────


def inspect(project: Project, *, count: int, dataset: str | None, row_id: str | None) -> Iterator[Inspected]:
    """Yield the first `count` records of a dataset, or of each; with `row_id` that row alone.

    Raises
    ------
    ConfigError
        If there is no such dataset or row.

    """
    names = [_known(project, dataset)] if dataset is not None else list(project.recipe.datasets)
    found = False
    for name in names:
        with _desk(project, name) as work:
            if row_id is None:
                yield from _first(project, work, count)
                continue
            for one in _row(project, work, row_id):
                found = True
                yield one
    if row_id is not None and not found:
        raise ConfigError(
            f"{row_id}: no row of {', '.join(names)} has this id; an id as in the table rows, <part>:<number>, is "
            f'needed; see `rowmill sql "from rows select row_id limit 10" {project.recipe.name}`'
        )


def _known(project: Project, dataset: str) -> str:
    known = project.recipe.datasets
    if dataset not in known:
        guess = nearest(dataset, known)
        hint = f"did you mean {guess}?" if guess else "name one of them"
        raise ConfigError(f"--dataset {dataset}: no such dataset; there are {', '.join(known)}; {hint}")
    return dataset


@contextmanager
def _desk(project: Project, name: str) -> Generator[Work, None, None]:
    """Lend a work place in memory; kept tokenizers come along, since opening one anew takes seconds."""
    store = Store(f"memory://rowmill-{uuid.uuid4().hex}")
    for kept in project.store.list("tokenizers"):
        store.write(f"tokenizers/{kept}", project.store.read(f"tokenizers/{kept}"))
    key = (project.recipe.name, name, "tokenized_examples")
    try:
        yield Work(project.recipe, store, project.base, key, name, {}, LocalPool(1))
    finally:
        if store.exists(""):
            store.remove("")


@dataclass(slots=True)
class _FirstPieces:
    """A stage that keeps what holds the first records only, so that a large source does not fill memory."""

    stage: sources.StageIn
    records: int | None

    def __call__(self, name: str, content: bytes) -> str:
        """Keep a piece while records are wanted; later pieces get a path that nobody will read."""
        if self.records is None:
            return self.stage(name, content)
        if self.records <= 0:
            return self.stage.store.path(f"{self.stage.folder}/{name}")
        self.records -= sum(1 for line in content.split(b"\n") if line.strip())
        return self.stage(name, content)


def _scans(project: Project, work: Work, count: int | None) -> list[FileScan]:
    """Scan the source; files that were scanned for a build and did not move are not read again."""
    earlier = manifest.current(project.store, (*work.dataset_key, "raw_dataset"))
    known = [FileScan.from_json(one) for one in earlier.details["scans"]] if earlier else []
    stage = _FirstPieces(sources.StageIn(work.store, "staged"), count)
    return sources.scan(work.dataset.source, project.base, stage, {scan.url: scan for scan in known})


def _first(project: Project, work: Work, count: int) -> Iterator[Inspected]:
    left = count
    for scan in _scans(project, work, count):
        for part in scan.parts:
            if left <= 0:
                return
            taken = min(left, part.records)
            left -= taken
            yield from _through(project, work, scan, part, range(taken))


def _row(project: Project, work: Work, row_id: str) -> Iterator[Inspected]:
    name = row_id.split("#", 1)[0]
    if not is_place(name):
        return
    part_id, at = place_of(name)
    for scan in _scans(project, work, None):
        for part in scan.parts:
            if part.part_id == part_id and at < part.records:
                yield from _through(project, work, scan, part, range(at, at + 1))


# ── Through the rooms ──────────────────────────────────────────────────────────────────────────────


def _through(project: Project, work: Work, scan: FileScan, part: Part, wanted: range) -> Iterator[Inspected]:
    """Do with some records of a part what a build does with all."""
    records = [one for one in sources.read(part, work.base) if one.number in wanted]
    names = [f"{part.part_id}:{one.number}" for one in records]
    if work.dataset.row_kind == "record":
        yield from _through_assembly(project, work, scan, part, records)
        return
    task = parts.CanonicalTask(
        work.store.root, "rows", part.sha256, str(work.base), work.dataset_name or "", work.dataset, part, wanted.stop
    )
    made = parts.canonicalize_part(task)
    rows = _only(work.store.table(made.files["rows"].path), names)
    rejects = [_only(work.store.table(made.files["rejects"].path), names)]
    samples: dict[str, list[Sample]] = {}
    if rows.num_rows:
        tokenized, encoder = _tokenize(work, rows)
        rejects.append(work.store.table(tokenized.files["rejects"].path))
        samples = _samples(work.store.table(tokenized.files["examples"].path), encoder)
    of_row = {row["row_id"]: row for row in rows.to_pylist()}
    refused = {one["row_id"]: one for table in rejects for one in table.to_pylist()}
    numbered = dict(zip(names, records, strict=True))
    further = [name for name in (*of_row, *refused) if name not in numbered]
    for name in sorted({*names, *further}, key=lambda one: (place_of(one), len(one), one)):
        record = numbered[name] if name in numbered else numbered[name.rpartition(".")[0]]
        yield _inspected(work, part, name, record, of_row.get(name), refused.get(name), samples.get(name, []))


def _through_assembly(
    project: Project, work: Work, scan: FileScan, part: Part, records: Sequence[RawRecord]
) -> Iterator[Inspected]:
    """Do the same with records: those shown make examples among themselves, under the schema of the last build.

    Without a build their types are told by these records alone.
    """
    names = [f"{part.part_id}:{one.number}" for one in records]
    at = (*work.dataset_key, "canonical_rows")
    raw = _made(work, (*work.dataset_key, "raw_dataset"), (), {"scans": [scan.to_json()]})
    desk = replace(work, key=at, inputs={raw.key: raw})
    last = manifest.current(project.store, at)
    known = None if last is None else record_rows.known_of(last.details)
    taken = max((one.number for one in records), default=-1) + 1
    [made], _, _, known = record_rows.make_rows(desk, [(part, taken)], "inspect", known)
    rows = _only(work.store.table(made.files["rows"].path), names)
    rejects = [_only(work.store.table(made.files["rejects"].path), names)]
    samples: dict[str, list[Sample]] = {}
    if rows.num_rows:
        chosen = manifest.Part("chosen", {"rows": parts.write_parquet(work.store, "chosen.parquet", rows)})
        details = {"records": known.to_json() | {"mode": "", "interval_seconds": None}}
        loaded, path = tokenized_examples.open_tokenizer(work)
        draft = record_examples.make(replace(work, inputs={at: _made(work, at, (chosen,), details)}), loaded, path)
        rejects += [work.store.table(one.files["rejects"].path) for one in draft.parts if "rejects" in one.files]
        examples = [work.store.table(one.files["examples"].path) for one in draft.parts if "examples" in one.files]
        samples = _samples(pa.concat_tables(examples), Encoder(loaded)) if examples else {}
    of_row = {row["row_id"]: row for row in rows.to_pylist()}
    refused = {one["row_id"]: one for table in rejects for one in table.to_pylist()}
    for name, record in zip(names, records, strict=True):
        yield _inspected(work, part, name, record, of_row.get(name), refused.get(name), samples.get(name, []))


def _made(
    work: Work, key: manifest.Key, own: "tuple[manifest.Part, ...]", details: dict[str, Any]
) -> manifest.Manifest:
    """Return a manifest of rows that were made for this look alone."""
    return manifest.Manifest(
        key=key, stage=key[-1], fingerprint="", code_version="", inputs={}, parts=own, facts={}, details=details
    )


def _only(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return the lines of some records, further rows that a class made of them included."""
    records = pc.replace_substring_regex(table.column("row_id"), r"\.\d+$", "")
    return table.filter(pc.is_in(records, pa.array(names, pa.string())))


def _tokenize(work: Work, rows: pa.Table) -> tuple[manifest.Part, Encoder]:
    loaded, path = tokenized_examples.open_tokenizer(work)
    task = parts.TokenizeTask(
        root=work.store.root,
        folder="examples",
        fingerprint=uuid.uuid4().hex,
        tokenizer=path,
        dataset=work.dataset,
        renderer=tokenized_examples.renderer_spec(work, loaded),
        limit=work.recipe.limit_of(work.dataset_name or ""),
        vocab_size=work.recipe.vocab_size or loaded.card.vocab_size,
        rows=parts.write_parquet(work.store, "chosen.parquet", rows),
        base=str(work.base),
    )
    return parts.tokenize_part(task), Encoder(loaded)


def _inspected(
    work: Work,
    part: Part,
    row_id: str,
    record: RawRecord,
    row: "dict[str, Any] | None",
    refused: "dict[str, Any] | None",
    samples: list[Sample],
) -> Inspected:
    return Inspected(
        dataset=work.dataset_name or "",
        row_id=row_id,
        source=terminal.source_text(part.url, part.reader, record.line),
        raw=record.raw,
        row=row,
        rejected=None if refused is None else (refused["stage"], refused["reason"], refused["detail"]),
        samples=tuple(samples),
    )


# ── Examples as stretches ──────────────────────────────────────────────────────────────────────────


def _samples(examples: pa.Table, encoder: Encoder) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for one in examples.to_pylist():
        removed = {
            "exchanges": one["exchanges_removed"],
            "reasoning": one["reasoning_removed"],
            "tokens": one["tokens_cut"],
        }
        sample = Sample(
            example_id=one["example_id"],
            original_tokens=one["original_tokens"],
            tokens=one["tokens"],
            trained_tokens=one["trained_tokens"],
            removed={stage: count for stage, count in removed.items() if count},
            stretches=tuple(stretches(one["input_ids"], classes(one), encoder)),
            weights=tokens_by_weight(pa.array(one.get(WEIGHTS, []), pa.float32())),
        )
        found.setdefault(one["row_ids"][0], []).append(sample)
    return found


def classes(example: Mapping[str, Any]) -> list[TokenClass]:
    """Return the class of every token of a stored example."""
    sizes = np.diff([*example["span_starts"], len(example["input_ids"])])
    kinds = np.repeat(example["span_kinds"], sizes)
    own: list[TokenClass] = ["template" if kind == KINDS.index("template") else "context" for kind in kinds.tolist()]
    return ["trained" if trains else one for one, trains in zip(own, example["loss_mask"], strict=True)]


def stretches(ids: Sequence[int], kinds: Sequence[ClassT], encoder: Encoder) -> Iterator[Stretch[ClassT]]:
    """Cut ids into stretches of one class; joined, their texts are the decoded text.

    Each edge is where the text decoded so far ends. Decoding stretches by themselves would lose the spaces
    that SentencePiece strips in front, and tear characters of several tokens.
    """
    text, end, written = encoder.decode(ids), 0, 0
    for kind, own in groupby(kinds):
        count = len(list(own))
        end += count
        # A character that is not whole yet decodes to U+FFFD; it belongs to the stretch that ends it.
        edge = len(text) if end == len(ids) else max(written, len(encoder.decode(ids[:end]).rstrip("\ufffd")))
        yield Stretch(kind, text[written:edge], count)
        written = edge


# ── Templates ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What probes show one dataset's chat template to do, and what of it a trainer should know."""

    dataset: str
    template_digest: str
    contract: TemplateContract
    warnings: tuple[str, ...]


def template_reports(project: Project) -> list[TemplateReport]:
    """Probe the chat template of each dataset; datasets without one are left out."""
    found: list[TemplateReport] = []
    for name, dataset in project.recipe.datasets.items():
        with _desk(project, name) as work:
            loaded, _ = tokenized_examples.open_tokenizer(work)
            spec = tokenized_examples.renderer_spec(work, loaded)
            if spec is not None:
                observed = Renderer(spec).contract
                told = (*warnings(observed, finish=dataset.loss.finish), *_mismatches(observed))
                found.append(TemplateReport(name, digest(spec.text), observed, told))
    return found


def template_proofs(project: Project) -> Iterator[tuple[str, TemplateProof]]:
    """Prove the masks of each dataset's chat template on probes of all shapes; datasets without one are left out."""
    for name, dataset in project.recipe.datasets.items():
        with _desk(project, name) as work:
            loaded, _ = tokenized_examples.open_tokenizer(work)
            spec = tokenized_examples.renderer_spec(work, loaded)
            if spec is not None:
                on_dropped = {str(kind): policy for kind, policy in dataset.template.on_dropped.items()}
                rules = MaskRules(spans=dataset.template.spans, on_dropped=on_dropped)
                yield name, prove_template(Renderer(spec), rules)


def _mismatches(observed: TemplateContract) -> Iterator[str]:
    for role in mismatched_prompts(observed):
        yield f"after {role}, inference prompts with {observed.prompts[role]!r}, and training text goes on otherwise"
