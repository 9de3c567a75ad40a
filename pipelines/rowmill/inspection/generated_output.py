"""Results of generated text: files parsed without storing anything, and accepted records as JSON Lines."""

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rowmill.build.steps import Project, plan_steps
from rowmill.core.completions import Teacher
from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError, join_choices
from rowmill.core.storage import Store
from rowmill.executors import LocalPool
from rowmill.kinds.joint_rows import ParsedFiles, require_joint_kind
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.stages import generated_series, parsed_records, teacher_scores
from rowmill.stages.base import StageContext
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.tokenized_examples import stage as tokenized_examples


def select_datasets(project: Project, stage: str, dataset: str | None) -> list[str]:
    """Return the datasets that have the given stage after training, or only the named one."""
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


def choose_teacher(project: Project, dataset: str | None, changes: Mapping[str, Any]) -> Project:
    """Return the project with options of its teachers replaced: of one dataset, or of all that can be scored."""
    recipe = project.recipe
    if dataset is not None and dataset not in recipe.datasets:
        raise ConfigError(
            f"{recipe.name}: --dataset {dataset}: no such dataset; there is {join_choices(recipe.datasets)}; name one"
        )
    chosen = dict(recipe.datasets)
    for name, options in recipe.datasets.items():
        if dataset not in (None, name) or (dataset is None and not options.format.predicts_next_token()):
            continue
        values = {} if options.teacher is None else options.teacher.model_dump()
        if values or changes:
            teacher = validate_options(Teacher, values | dict(changes), f"{recipe.name}: datasets.{name}.teacher")
            chosen[name] = options.model_copy(update={"teacher": teacher})
            problem = chosen[name].find_teacher_problem()
            if problem:
                raise ConfigError(f"{recipe.name}: datasets.{name}: {problem}")
    if not any(options.teacher is not None and dataset in (None, name) for name, options in chosen.items()):
        if changes:
            objectives = sorted({options.format.get_objective() for options in recipe.datasets.values()})
            raise ConfigError(
                f"{recipe.name}: no dataset can be scored; their examples are for {', '.join(objectives)}, and scores "
                "are of next_token examples; choose another recipe"
            )
        raise ConfigError(
            f"{recipe.name}: no dataset has a teacher block; score needs the address of a server and its model's name; "
            "pass --base-url and --model, or add datasets.NAME.teacher"
        )
    return replace(project, recipe=recipe.model_copy(update={"datasets": chosen}))


SCORED_CARD = "scores.json"
"""Says which teacher scored which version of which dataset."""


def copy_scored_dataset(store: Store, output: Manifest, folder: Path) -> None:
    """Write the files of a `teacher_scores` output to a folder, a folder per split, in place of earlier ones."""
    if folder.exists() and not (folder / SCORED_CARD).exists() and any(folder.iterdir()):
        raise ConfigError(
            f"--output {folder.parent}: {folder} holds files of something else; expected an empty folder, or one that "
            "score wrote; choose another one"
        )
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for split, files in teacher_scores.list_scored_files(output.parts).items():
        for number, file in enumerate(files):
            target = partial / split / f"part-{number:05d}.parquet"
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(store.content(file))
    card = {"recipe": output.key[0], "dataset": output.key[1], "version": output.version, **output.card, **output.facts}
    (partial / SCORED_CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def format_scored_datasets(recipe: Recipe, outputs: Sequence[Manifest], folder: Path) -> str:
    """Return the lines of a recipe that read what was scored; a dataset without scored rows is left out."""
    datasets: dict[str, dict[str, Any]] = {}
    for output in outputs:
        own = folder / output.key[1]
        files = teacher_scores.list_scored_files(output.parts)
        types = teacher_scores.COLUMN_TYPES.items()
        fields = {name: {"type": kind, "size": output.card["top_k"]} for name, kind in types}
        if urls := {f"{split}_urls": [f"{own / split}/"] for split, of_split in files.items() if of_split}:
            form = {"kind": "tokens", "domain_key": "domain", "token_fields": fields}
            datasets[output.key[1]] = {"source": urls, "format": form}
            # Examples longer than a sequence are cut as in the scored build, since token rows would be dropped. There
            # are such examples where packing cuts them: any joined text, and what `overlong: keep` keeps.
            dataset, cut = recipe.datasets[output.key[1]], None
            kind, packing = dataset.row_kind, dataset.packing
            if packing.strategy_for(kind) == "concat":
                cut = "split"
            elif dataset.truncation.policy(kind, sliced=packing.slice_strategy is not None) == "keep":
                cut = packing.slice_strategy_for(kind)
            if cut is not None:
                kept = {"truncation": {"overlong": "keep"}, "packing": {"slice_strategy": cut}}
                datasets[output.key[1]] |= kept
    # An empty mapping is no block.
    lines = ["datasets:"] if datasets else []
    for name, options in datasets.items():
        lines.append(f"  {_format_flow(name)}:")
        lines += [f"    {group}: {_format_flow(values)}" for group, values in options.items()]
    return "\n".join(lines)


def _format_flow(value: Any) -> str:
    """Return a value as one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf)
    return text.removesuffix("...\n").strip()


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
        return require_joint_kind(context.dataset.format).parse_files(context, urls)


def iterate_accepted_records(store: Store, output: Manifest) -> Iterator[str]:
    """Yield the accepted records of a stage as lines of JSON."""
    for file in output.files("records"):
        yield from map(str, store.table(file, ["record"]).column(0).to_pylist())


def write_json_lines(path: Path, records: Sequence[str]) -> None:
    """Write records as JSON Lines; the file appears whole or not at all."""
    Store(str(path.parent)).write(path.name, "".join(f"{text}\n" for text in records).encode("utf-8", "surrogatepass"))
