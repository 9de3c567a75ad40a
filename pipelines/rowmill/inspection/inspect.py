"""Some rows through all rooms in memory: what was read, what became of it, and which of its tokens train.

What belongs here: choosing rows, running the parts' own work on them, cutting an example into stretches of one
class, showing that. What does not: any room's work; it is done by the same functions as in a build
(`parts.py`), over a store in memory that is gone afterwards. Nothing is written.

    source ─► first records ─canonicalize_part─► rows ─tokenize_part─► examples ─► trained | context | template

Copies of earlier rows are shown like the others: what repeats what is known only when all rows are made. Records
are put together over a whole dataset, so their examples are the last build's, or made as a build makes them.
"""

import tempfile
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill import sources
from rowmill.build import runner
from rowmill.build.runner import Project
from rowmill.conversation.masking import MaskRules
from rowmill.conversation.rendering.renderer import Renderer
from rowmill.conversation.template_contract import TemplateContract, mismatched_prompts, warnings
from rowmill.conversation.template_proof import TemplateProof, prove_template
from rowmill.core import console
from rowmill.core.errors import ConfigError, nearest
from rowmill.core.storage import Store, digest
from rowmill.executors import LocalPool
from rowmill.schema import manifest
from rowmill.schema.examples import KINDS, WEIGHTS, tokens_by_weight
from rowmill.schema.rows import is_place, place_of
from rowmill.sources import FileScan, Generated, Part, RawRecord
from rowmill.stages import catalog, generated_source, inputs, part_files, raw_dataset, tokenizer_files
from rowmill.stages.base import Work
from rowmill.stages.canonical_rows import text_rows
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.tokenized_examples import text_parts
from rowmill.tokenization.tokenizer import Encoder

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
    """One record on its way: raw, report, canonical row, examples; or at which stage it was rejected and why.

    Of records several share an example: `shown_above` are those that stand under an earlier one, `not_shown` counts
    what is beyond `MOST_EXAMPLES`.
    """

    dataset: str
    row_id: str
    source: str
    raw: bytes
    row: dict[str, Any] | None
    rejected: tuple[str, str, str] | None
    samples: tuple[Sample, ...]
    shown_above: tuple[str, ...] = ()
    not_shown: int = 0


MOST_EXAMPLES = 3
"""Examples that are shown of one record; sampling may put it into thousands."""


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
        if project.recipe.datasets[name].row_kind == "record":
            for one in _records(project, name, count, row_id):
                found = True
                yield one
            continue
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
    tokenizer_files.copy_tokenizers(project.store, store)
    key = (project.recipe.name, name, tokenized_examples.STAGE.name)
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
    earlier = manifest.current(project.store, (*work.dataset_key, raw_dataset.STAGE.name))
    known = [FileScan.from_json(one) for one in earlier.details["scans"]] if earlier else []
    stage = _FirstPieces(sources.StageIn(work.store, "staged"), count)
    source = work.dataset.source
    assert not isinstance(source, Generated), "generated records are records, which are read over the whole dataset"
    known_by_url = {scan.url: scan for scan in known}
    keeps = work.dataset.keeps_non_finite
    return sources.scan(source, project.base, stage, known_by_url, keeps_non_finite=keeps)


def _first(project: Project, work: Work, count: int) -> Iterator[Inspected]:
    left = count
    for scan in _scans(project, work, count):
        for part in scan.parts:
            if left <= 0:
                return
            taken = min(left, part.records)
            left -= taken
            yield from _through(work, part, range(taken))


def _row(project: Project, work: Work, row_id: str) -> Iterator[Inspected]:
    name = row_id.split("#", 1)[0]
    if not is_place(name):
        return
    part_id, at = place_of(name)
    for scan in _scans(project, work, None):
        for part in scan.parts:
            if part.part_id == part_id and at < part.records:
                yield from _through(work, part, range(at, at + 1))


# ── Through the rooms ──────────────────────────────────────────────────────────────────────────────


def _through(work: Work, part: Part, wanted: range) -> Iterator[Inspected]:
    """Do with some records of a part what a build does with all."""
    records = [one for one in sources.read(part, work.base) if one.number in wanted]
    names = [f"{part.part_id}:{one.number}" for one in records]
    task = text_rows.CanonicalTask(
        work.store.root,
        "rows",
        part.sha256,
        str(work.base),
        work.dataset_name or "",
        work.dataset,
        ((part, wanted.stop),),
    )
    made = text_rows.canonicalize_part(task)
    rows = _only(work.store.table(made.files["rows"]), names)
    rejects = [_only(work.store.table(made.files["rejects"]), names)]
    samples: dict[str, list[Sample]] = {}
    if rows.num_rows:
        tokenized, encoder = _tokenize(work, rows)
        rejects.append(work.store.table(tokenized.files["rejects"]))
        examples = work.store.table(tokenized.files["examples"])
        for sample, own in zip(_samples(examples, encoder), examples.column("row_ids").to_pylist(), strict=True):
            samples.setdefault(own[0], []).append(sample)
    of_row = {row["row_id"]: row for row in rows.to_pylist()}
    refused = {one["row_id"]: one for table in rejects for one in table.to_pylist()}
    numbered = dict(zip(names, records, strict=True))
    further = [name for name in (*of_row, *refused) if name not in numbered]
    for name in sorted({*names, *further}, key=lambda one: (place_of(one), len(one), one)):
        record = numbered[name] if name in numbered else numbered[name.rpartition(".")[0]]
        yield _inspected(
            work.dataset_name or "", part, name, record, of_row.get(name), refused.get(name), samples.get(name, [])
        )


# ── Records: as a build puts them together ─────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Assembled:
    """A records dataset on its way, and the store that has its files."""

    store: Store
    raw: manifest.Manifest
    rows: manifest.Manifest
    examples: manifest.Manifest
    encoder: Encoder


def _records(project: Project, name: str, count: int, row_id: str | None) -> Iterator[Inspected]:
    """Yield records with the examples that a build puts them in.

    Which records share an example is decided over all of them, so no few records can be put together alone.
    """
    wanted = None if row_id is None else row_id.split("#", 1)[0]
    if wanted is not None and not is_place(wanted):
        return
    with _assembled(project, name) as made:
        left, shown = count, set[str]()
        for index, part in inputs.numbered_parts(made.raw.details):
            if wanted is None:
                numbers = range(min(left, part.records))
                left -= len(numbers)
            else:
                number = place_of(wanted)[1]
                is_here = place_of(wanted)[0] == part.part_id and number < part.records
                numbers = range(number, number + 1) if is_here else range(0)
            if numbers:
                yield from _records_of(project, name, made, index, part, numbers, shown)


def _records_of(
    project: Project, name: str, made: _Assembled, index: int, part: Part, numbers: range, shown: set[str]
) -> Iterator[Inspected]:
    """Yield some records of a part; an example that stood under an earlier record is only named."""
    records = [one for one in sources.read(part, project.base) if one.number in numbers]
    names = [f"{part.part_id}:{one.number}" for one in records]
    rows, refused = made.rows.parts[index], list[dict[str, Any]]()
    for one in (rows, made.examples.parts[index]):
        refused += _only(made.store.table(one.files["rejects"]), names).to_pylist()
    of_row = {row["row_id"]: row for row in _only(made.store.table(rows.files["rows"]), names).to_pylist()}
    why = {one["row_id"]: one for one in refused}
    samples = _samples_of(made, names)
    for row_id, record in zip(names, records, strict=True):
        own = samples.get(row_id, [])
        fresh = [one for one in own if one.example_id not in shown][:MOST_EXAMPLES]
        above = tuple(one.example_id for one in own if one.example_id in shown)
        shown |= {one.example_id for one in fresh}
        told = _inspected(name, part, row_id, record, of_row.get(row_id), why.get(row_id), fresh)
        yield replace(told, shown_above=above, not_shown=len(own) - len(fresh) - len(above))


def _samples_of(made: _Assembled, names: Sequence[str]) -> dict[str, list[Sample]]:
    """Return the examples that some rows stand in, by row, in the order of the build."""
    found: dict[str, list[Sample]] = {}
    for file in made.examples.files("examples"):
        row_ids = made.store.table(file, ["row_ids"]).column(0).combine_chunks()
        is_wanted = pc.is_in(row_ids.flatten(), pa.array(names, pa.string())).to_numpy(zero_copy_only=False)
        places = np.unique(pc.list_parent_indices(row_ids).to_numpy()[is_wanted])
        if not len(places):
            continue
        table = made.store.table(file).take(pa.array(places))
        for sample, own in zip(_samples(table, made.encoder), table.column("row_ids").to_pylist(), strict=True):
            for row_id in dict.fromkeys(own):
                if row_id in names:
                    found.setdefault(row_id, []).append(sample)
    return found


@contextmanager
def _assembled(project: Project, name: str) -> Generator[_Assembled, None, None]:
    """Lend what the last build made if a build would reuse it; else make it in a folder that is gone afterwards."""
    steps = [step for step in runner.road(project) if step.dataset == name and step.name in _TO_EXAMPLES]
    with tempfile.TemporaryDirectory(prefix="rowmill-inspect-") as folder:
        placed = replace(project, store=Store(folder))
        tokenizer_files.copy_tokenizers(project.store, placed.store)
        generated_source.lend(project.store, placed.store, project.recipe.datasets[name].source, project.recipe.name)
        scanned = manifest.current(project.store, steps[0].key)
        if scanned is not None:
            # Files that did not move since the last build are not read again.
            manifest.save(placed.store, scanned)
        raw = runner.run(placed, steps[0], {}).manifest
        made, store = _kept(project, placed, steps, raw), project.store
        if made is None:
            made, store = {raw.key: raw}, placed.store
            for step in steps[1:]:
                made[step.key] = runner.run(placed, step, {key: made[key] for key in step.inputs}).manifest
        work = Work(placed.recipe, placed.store, placed.base, steps[-1].key, name, {}, LocalPool(1))
        loaded, _ = tokenizer_files.open_tokenizer(work)
        rows, examples = (made[step.key] for step in steps[1:])
        yield _Assembled(store, raw, rows, examples, Encoder(loaded))


def _kept(
    project: Project, placed: Project, steps: Sequence[runner.Step], raw: manifest.Manifest
) -> dict[manifest.Key, manifest.Manifest] | None:
    """Return what a build of this recipe would reuse up to the examples; None if it would make anything of it."""
    made = {raw.key: raw}
    for step in steps[1:]:
        kept = runner.find_kept(project, step, {key: made[key] for key in step.inputs}, scratch=placed.store)
        if kept is None:
            return None
        made[step.key] = kept
    return made


_TO_EXAMPLES = catalog.names_up_to(tokenized_examples.STAGE)


def _only(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return the lines of some records, further rows that a class made of them included."""
    records = pc.replace_substring_regex(table.column("row_id"), r"\.\d+$", "")
    return table.filter(pc.is_in(records, pa.array(names, pa.string())))


def _tokenize(work: Work, rows: pa.Table) -> tuple[manifest.Part, Encoder]:
    loaded, path = tokenizer_files.open_tokenizer(work)
    task = text_parts.TokenizeTask(
        root=work.store.root,
        folder="examples",
        fingerprint=uuid.uuid4().hex,
        tokenizer=path,
        dataset=work.dataset,
        renderer=tokenized_examples.renderer_spec(work, loaded),
        limit=work.recipe.limit_of(work.dataset_name or ""),
        vocab_size=work.recipe.vocab_size or loaded.card.vocab_size,
        rows=part_files.write_parquet(work.store, "chosen.parquet", rows),
        base=str(work.base),
    )
    return text_parts.tokenize_part(task), Encoder(loaded)


def _inspected(
    dataset: str,
    part: Part,
    row_id: str,
    record: RawRecord,
    row: "dict[str, Any] | None",
    refused: "dict[str, Any] | None",
    samples: list[Sample],
) -> Inspected:
    return Inspected(
        dataset=dataset,
        row_id=row_id,
        source=console.source_text(part.url, part.reader, record.line),
        raw=record.raw,
        row=row,
        rejected=None if refused is None else (refused["stage"], refused["reason"], refused["detail"]),
        samples=tuple(samples),
    )


# ── Examples as stretches ──────────────────────────────────────────────────────────────────────────


def _samples(examples: pa.Table, encoder: Encoder) -> Iterator[Sample]:
    for one in examples.to_pylist():
        removed = {
            "exchanges": one["exchanges_removed"],
            "reasoning": one["reasoning_removed"],
            "tokens": one["tokens_cut"],
        }
        yield Sample(
            example_id=one["example_id"],
            original_tokens=one["original_tokens"],
            tokens=one["tokens"],
            trained_tokens=one["trained_tokens"],
            removed={stage: count for stage, count in removed.items() if count},
            stretches=tuple(stretches(one["input_ids"], classes(one), encoder)),
            weights=tokens_by_weight(pa.array(one.get(WEIGHTS, []), pa.float32())),
        )


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
            loaded, _ = tokenizer_files.open_tokenizer(work)
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
            loaded, _ = tokenizer_files.open_tokenizer(work)
            spec = tokenized_examples.renderer_spec(work, loaded)
            if spec is not None:
                on_dropped = {str(kind): policy for kind, policy in dataset.template.on_dropped.items()}
                rules = MaskRules(spans=dataset.template.spans, on_dropped=on_dropped)
                yield name, prove_template(Renderer(spec), rules)


def _mismatches(observed: TemplateContract) -> Iterator[str]:
    for role in mismatched_prompts(observed):
        yield f"after {role}, inference prompts with {observed.prompts[role]!r}, and training text goes on otherwise"
