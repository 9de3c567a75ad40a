"""Results of generated text: files parsed without storing anything, and accepted records as JSON Lines."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rowmill.build.steps import Project, plan_steps
from rowmill.core.errors import ConfigError, join_choices
from rowmill.core.storage import File, Store
from rowmill.executors import LocalPool
from rowmill.kinds.joint_rows import ParsedFiles, require_joint_rows
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.stages import generated_series, parsed_records
from rowmill.stages.base import StageContext
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.tokenized_examples import stage as tokenized_examples


def select_datasets(project: Project, stage: str, dataset: str | None) -> list[str]:
    """Return the datasets that have the given stage after training, or only the named one.

    Raises
    ------
    ConfigError
        If no dataset has it, or the named one does not.

    """
    known = [step.dataset for step in plan_steps(project) if step.name == stage and step.dataset is not None]
    block = "generation.backend" if stage == generated_series.STAGE.name else "generation"
    if not known:
        raise ConfigError(
            f"{project.recipe.name}: no dataset has a {block} block; {stage} needs one, under format; add it"
        )
    if dataset is not None and dataset not in known:
        raise ConfigError(
            f"{project.recipe.name}: --dataset {dataset}: it has no {block} block; there is "
            f"{join_choices(known)}; name one"
        )
    return known if dataset is None else [dataset]


TRAINING_STAGES = (canonical_rows.STAGE.name, tokenized_examples.STAGE.name)
"""Stages whose outputs a model is trained on."""


def find_outdated_builds(project: Project, datasets: Sequence[str]) -> list[str]:
    """Return the stages whose current output was built with other options: the model was trained on that output."""
    steps = [step for step in plan_steps(project) if step.dataset in datasets and step.name in TRAINING_STAGES]
    made = {step.key: manifest.load_current(project.store, step.key) for step in steps}
    return [
        "/".join(step.key)
        for step in steps
        if (one := made[step.key]) is not None and one.code_version != step.code_version
    ]


def parse_files(project: Project, dataset: str, urls: Sequence[str]) -> ParsedFiles:
    """Parse the texts of some files as `parsed_records` does, storing nothing.

    Relative paths are resolved against the working directory.

    Raises
    ------
    IntegrityError
        If `tokenized_examples` was not built yet.
    SourceError
        If a file is missing or unreadable.

    """
    key: StageKey = (project.recipe.name, dataset, tokenized_examples.STAGE.name)
    pointed = manifest.load_current(project.store, key)
    made = manifest.load_version(project.store, key, None) if pointed is None else pointed
    with tempfile.TemporaryDirectory(prefix="rowmill-parse-") as scratch:
        store = Store(scratch)
        at = (project.recipe.name, dataset, parsed_records.STAGE.name)
        context = StageContext(store, Path.cwd(), at, dataset, {key: made}, LocalPool(1), recipe=project.recipe)
        return require_joint_rows(context.dataset.format).parse_files(context, urls)


def iterate_accepted_records(store: Store, output: Manifest) -> Iterator[str]:
    """Yield the accepted records of a stage as lines of JSON."""
    for file in output.files("records"):
        yield from _read_records(store, file)


def _read_records(store: Store, file: File) -> list[str]:
    return [str(text) for text in store.table(file, ["record"]).column(0).to_pylist()]


def write_json_lines(path: Path, records: Sequence[str]) -> None:
    """Write records as JSON Lines; the file appears whole or not at all."""
    Store(str(path.parent)).write(path.name, "".join(f"{text}\n" for text in records).encode("utf-8", "surrogatepass"))
