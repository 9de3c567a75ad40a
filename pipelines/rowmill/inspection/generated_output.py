"""What came of generated text, for a person: files parsed off the road, and accepted records as JSON Lines.

What belongs here: parsing some files without storing anything, reading accepted records back. What does not: the
stages (`parsed_records.py`, `generated_series.py`), words (`reports/console.py`).
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rowmill.build import runner
from rowmill.build.runner import Project
from rowmill.core.errors import ConfigError, one_of
from rowmill.core.storage import File, Store
from rowmill.executors import LocalPool
from rowmill.schema import manifest
from rowmill.schema.manifest import Key, Manifest, Table
from rowmill.sources import StageIn
from rowmill.stages import generated_series, generated_texts, parsed_records
from rowmill.stages.base import Work
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.generated_texts import expected_texts
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.tabular import parsing


@dataclass(frozen=True, slots=True)
class ParsedFiles:
    """What some files of generated text hold."""

    report: parsing.Report
    texts: int
    unreadable: int
    records: Sequence[str]

    @property
    def table(self) -> Table:
        """The counts by class."""
        return parsed_records.tables_of(self.report.items, self.report.characters)["classes"]


def datasets_of(project: Project, stage: str, dataset: str | None) -> list[str]:
    """Return the datasets that have a stage behind a trained model, or the one that is named.

    Raises
    ------
    ConfigError
        If there is none, or the named one has none.

    """
    known = [step.dataset for step in runner.road(project) if step.name == stage and step.dataset is not None]
    block = "generation.backend" if stage == generated_series.STAGE.name else "generation"
    if not known:
        raise ConfigError(
            f"{project.recipe.name}: no dataset has a {block} block; {stage} needs one, under format; add it"
        )
    if dataset is not None and dataset not in known:
        raise ConfigError(
            f"{project.recipe.name}: --dataset {dataset}: it has no {block} block; there is {one_of(known)}; name one"
        )
    return known if dataset is None else [dataset]


TRAINED_ON = (canonical_rows.STAGE.name, tokenized_examples.STAGE.name)
"""Stages that say what a model was trained on."""


def differing_builds(project: Project, datasets: Sequence[str]) -> list[str]:
    """Name the stages whose last build is not that of the recipe as it is now: models were trained on that build."""
    steps = [step for step in runner.road(project) if step.dataset in datasets and step.name in TRAINED_ON]
    made = {step.key: manifest.current(project.store, step.key) for step in steps}
    return [
        "/".join(step.key)
        for step in steps
        if (one := made[step.key]) is not None and one.code_version != step.code_version
    ]


def parse_files(project: Project, dataset: str, urls: Sequence[str]) -> ParsedFiles:
    """Take the texts of some files apart as `parsed_records` would, storing nothing.

    Relative paths are those of the working directory.

    Raises
    ------
    IntegrityError
        If `tokenized_examples` was never built.
    SourceError
        If a file is missing or unreadable.

    """
    key: Key = (project.recipe.name, dataset, tokenized_examples.STAGE.name)
    pointed = manifest.current(project.store, key)
    made = manifest.by_version(project.store, key, None) if pointed is None else pointed
    with tempfile.TemporaryDirectory(prefix="rowmill-parse-") as scratch:
        store = Store(scratch)
        at = (project.recipe.name, dataset, parsed_records.STAGE.name)
        work = Work(project.recipe, store, Path.cwd(), at, dataset, {key: made}, LocalPool(1))
        scans = parsed_records.scan(urls, work.base, StageIn(store, "staged"), ())
        tasks = [one.task for one in parsed_records.tasks_of(work, scans, expected_texts(work))]
        parts = [generated_texts.parse_texts(task) for task in tasks]
        records = [text for part in parts for text in _records(store, part.files["records"])]
    report = parsing.Report(parsed_records.added(parts, "items"), parsed_records.added(parts, "characters"))
    texts = sum(int(part.facts["texts"]) for part in parts)
    unreadable = sum(sum(part.facts["reasons"].values()) for part in parts) - report.invalid
    return ParsedFiles(report, texts, unreadable, records)


def records_of(store: Store, made: Manifest) -> Iterator[str]:
    """Yield the accepted records of a stage as lines of JSON."""
    for file in made.files("records"):
        yield from _records(store, file)


def _records(store: Store, file: File) -> list[str]:
    return [str(text) for text in store.table(file, ["record"]).column(0).to_pylist()]


def write_lines(path: Path, records: Sequence[str]) -> None:
    """Write records as JSON Lines; the file appears whole or not at all."""
    Store(str(path.parent)).write(path.name, "".join(f"{text}\n" for text in records).encode("utf-8", "surrogatepass"))
