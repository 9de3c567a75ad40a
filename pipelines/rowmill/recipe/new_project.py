"""Creates a project in a folder: a recipe for the user's data, workspace.yaml, .gitignore.

An existing file is never overwritten.

    configs/<name>.yaml     the recipe
    workspace.yaml          what `rowmill ui` and `dagster dev` load
    .gitignore              built data and Dagster's history
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError, PipelineError, join_choices
from rowmill.core.storage import check_name
from rowmill.kinds.base import DatasetKind
from rowmill.kinds.catalog import KINDS
from rowmill.kinds.reading.conversation_rows import hint_at_columns
from rowmill.kinds.reading.recognition import (
    RECORDS_LOOKED_AT,
    find_wrapped_records,
    list_lists,
    recognise_format,
    write_options,
)
from rowmill.kinds.shared.samples import Recognition, Sample
from rowmill.recipe.recipe import find_recipes, parse_recipe
from rowmill.schema.rows import HELD_OUT, Split
from rowmill.sources.delimited import UnnamedColumnError
from rowmill.sources.files import FORMATS_BY_SUFFIX, SUFFIXES, Files, find_files
from rowmill.sources.parts import SourceFile
from rowmill.sources.reading import read_first_records
from rowmill.sources.split_names import SPLIT_WORDS, find_split_name, name_split

DEFAULT_DATA = "data"
"""The folder that is read if no data is named."""

COLUMNS_SHOWN = 40
"""Columns of a dataset that the recipe's comment lists."""

WORKSPACE = """\
# What `rowmill ui` and `dagster dev` load: every recipe under configs/.
load_from:
  - python_module: {module_name: dagster_rowmill.definitions, location_name: rowmill}
"""
IGNORED = (".rowmill/", ".dagster/")
"""What a build and Dagster write next to configs/."""


@dataclass(frozen=True, slots=True)
class NewProject:
    """The written files, and the existing files that were kept, with the lines that they lack."""

    recipe: Path
    written: Sequence[Path]
    kept: Mapping[Path, Sequence[str]]
    untrained: Sequence[str]
    """Datasets that are prompts by what was found, of which nothing trains."""

    @property
    def name(self) -> str:
        return self.recipe.stem


@dataclass(frozen=True, slots=True)
class _FoundDataset:
    """Files with the same columns, and the format recognized in their first records.

    `urls` are by split; `options` are those of the source without which the files are not read. `left_out` are
    held-out files whose records are of another format.
    """

    name: str
    urls: Mapping[Split, Sequence[str]]
    sample: Sample
    found: Recognition
    options: Mapping[str, Any]
    left_out: Sequence[str] = ()


def create_project(
    folder: Path, data: Sequence[str] = (), *, name: str | None = None, tokenizer: str, seq_len: int
) -> NewProject:
    """Write a recipe for some data into a folder's configs/, and the other files of a project.

    `data` are files, folders, globs or URLs; relative paths are resolved against `folder`.
    """
    if not data and not (folder / DEFAULT_DATA).is_dir():
        raise ConfigError(
            f"rowmill init: no data is named, and there is no folder {DEFAULT_DATA}/ here; expected a file, folder, "
            f"glob or URL of {join_choices(FORMATS_BY_SUFFIX)}; run rowmill init FILE"
        )
    datasets: list[_FoundDataset] = []
    for arguments in _group_arguments(folder, data or [DEFAULT_DATA]):
        datasets += _find_datasets_of(folder, arguments, {dataset.name for dataset in datasets})
    chosen = name or (datasets[0].name if len(datasets) == 1 else _make_name(folder.resolve().name))
    recipe = folder / "configs" / f"{check_name(chosen, '--name')}.yaml"
    if recipe.exists():
        raise ConfigError(
            f"{recipe}: exists already, and init overwrites nothing; a new recipe needs an unused name; add --name, "
            "or delete the file"
        )
    existing = {path.stem: path for path in find_recipes(recipe.parent)} if recipe.parent.is_dir() else {}
    if recipe.stem in existing:
        raise ConfigError(
            f"{existing[recipe.stem]}: a recipe of this name exists; names of recipes must differ; add --name"
        )
    # A local folder shows whether it has a chat template; a name on the hub is taken to have one.
    at, settings = folder / tokenizer, folder / tokenizer / "tokenizer_config.json"
    has_template = (
        not at.is_dir()
        or (at / "chat_template.jinja").exists()
        or (at / "chat_template.json").exists()
        or (settings.is_file() and "chat_template" in json.loads(settings.read_text(encoding="utf-8")))
    )
    text = _render_recipe(datasets, tokenizer, seq_len, needs_template=not has_template)
    parse_recipe(yaml.safe_load(text), name=chosen, where=str(recipe), base=folder)
    ignore = "".join(f"{line}\n" for line in IGNORED)
    files = {recipe: text, folder / "workspace.yaml": WORKSPACE, folder / ".gitignore": ignore}
    kept = [path for path in files if path.exists()]
    written = [path for path in files if path not in kept]
    for path in written:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
    missing: dict[Path, Sequence[str]] = {}
    for path in kept:
        existing_text = path.read_text(encoding="utf-8", errors="replace")
        if path.name == "workspace.yaml":
            missing[path] = [] if "dagster_rowmill" in existing_text else WORKSPACE.splitlines()[-1:]
        else:
            present = {line.strip().strip("/") for line in existing_text.splitlines()}
            missing[path] = [line for line in IGNORED if line.rstrip("/") not in present]
    untrained = [dataset.name for dataset in datasets if not _read_kind(dataset.found).has_targets()]
    return NewProject(recipe, written, missing, untrained)


# ── Finding the datasets ───────────────────────────────────────────────────────────────────────────


def _group_arguments(folder: Path, data: Sequence[str]) -> list[Sequence[str]]:
    """Return the arguments that are looked at together: files named for different splits, as a shell lists a folder."""
    files = [one for one in data if "://" not in one and (folder / one).is_file()]
    if len(files) < 2:
        return [[one] for one in data]
    shared = os.path.commonpath([os.path.dirname(os.path.abspath(folder / one)) for one in files])
    named = {one: name_split(os.path.relpath(folder / one, shared)) for one in files}
    if "train" not in named.values() or not set(HELD_OUT) & set(named.values()):
        return [[one] for one in data]
    together = [one for one in files if named[one] is not None]
    return [together, *([one] for one in data if one not in together)]


def _find_datasets_of(folder: Path, arguments: Sequence[str], used_names: set[str]) -> list[_FoundDataset]:
    """Return the datasets of arguments: files with equal format and columns form one dataset, by their splits."""
    source = validate_options(Files, {"train_urls": [*arguments], "named_splits": "ignore"}, "rowmill init")
    shared = os.path.commonpath([os.path.dirname(one) for one in arguments]) if len(arguments) > 1 else ""
    files = find_files(source, folder)
    splits: dict[str, Split] = {}
    for file in files:
        pattern = shared if len(arguments) > 1 else arguments[0]
        splits[file.url] = find_split_name(pattern, file.url) or "train"
    if "train" not in splits.values():
        first = files[0].url
        raise ConfigError(
            f"{arguments[0]}: holds only files that are named for held-out splits ({first}: {splits[first]}); expected "
            f"files to train on; name the file itself if it is that: rowmill init {first}"
        )
    held = [file for file in files if splits[file.url] != "train"]
    alike: dict[str, tuple[Recognition, dict[Split, list[str]], Sample, Mapping[str, Any]]] = {}
    for file in (file for file in files if splits[file.url] == "train"):
        sample, options = _read_sample(file, folder)
        data_format = _require_format(file.url, sample)
        found = alike.setdefault(_make_key(data_format, sample, options), (data_format, {}, sample, options))
        found[1].setdefault("train", []).append(_shorten_url(file.url, folder))
    left_out: list[str] = []
    for file in held:
        url, same = _shorten_url(file.url, folder), None
        try:
            sample, options = _read_sample(file, folder)
            proposal = recognise_format(sample, KINDS.values()).proposal
            same = None if proposal is None else alike.get(_make_key(proposal, sample, options))
        except ConfigError:
            # No record of it can be read: then it is of another form, too.
            pass
        if same is None:
            left_out.append(f"{url} ({splits[file.url]})")
        else:
            same[1].setdefault(splits[file.url], []).append(url)
    datasets: list[_FoundDataset] = []
    for data_format, found_urls, sample, options in alike.values():
        argument = arguments[0]
        is_whole_argument = len(arguments) == len(alike) == 1 and len(files) > 1 and not left_out
        is_glob = any(sign in argument for sign in "*?[{")
        named = found_urls["train"][0] if is_glob or not is_whole_argument else argument
        base = named.rstrip("/").rpartition("/")[2]
        by_length = sorted(SUFFIXES, key=len, reverse=True)
        ending = next((suffix for suffix in by_length if base.lower().endswith(suffix)), "")
        name = stem = _make_name(base.removesuffix(ending))
        if name in used_names:
            name = next(new for i in range(2, len(used_names) + 3) if (new := f"{stem[:60]}_{i}") not in used_names)
        used_names.add(name)
        urls: dict[Split, Sequence[str]] = {
            split: _shorten_list(found_urls[split], folder) for split in SPLIT_WORDS if split in found_urls
        }
        if is_whole_argument and not held:
            urls = {"train": [_shorten_url(argument, folder)]}
        datasets.append(_FoundDataset(name, urls, sample, data_format, options, left_out))
        left_out = []
    return datasets


def _make_key(data_format: Recognition, sample: Sample, options: Mapping[str, Any]) -> str:
    """Return what files have in common whose rows are of one dataset."""
    return json.dumps([options, dict(data_format.options), dict(data_format.groups), sorted(sample.columns)])


def _shorten_list(files: Sequence[str], folder: Path) -> Sequence[str]:
    """Return the folder of files, or a glob, if it finds these and no others; else the files."""
    if len(files) < 2:
        return files
    start = os.path.commonprefix(files)
    parent = start.rpartition("/")[0]
    ending = os.path.commonprefix([file[::-1] for file in files])[::-1]
    at = min(len(start), *(len(file) - len(ending) for file in files))
    for pattern in (parent, f"{start[:at]}*{ending}"):
        if not pattern or ("://" not in pattern and not os.path.isdir(folder / pattern) and "*" not in pattern):
            continue
        source = Files(train_urls=[pattern], named_splits="ignore")
        try:
            found = [_shorten_url(file.url, folder) for file in find_files(source, folder)]
        except PipelineError:
            continue
        if sorted(found) == sorted(files):
            return [pattern]
    return files


def _read_sample(file: SourceFile, folder: Path) -> tuple[Sample, dict[str, Any]]:
    """Return a file's first records, and the options of its source without which they are not read."""
    try:
        sample = _take_sample(file, folder)
    except UnnamedColumnError as error:
        options = {"column_names": error.names}
        return _take_sample(replace(file, options=file.options.model_copy(update=options)), folder), options
    wrapped = find_wrapped_records(sample.records, list(KINDS.values()))
    if wrapped is None:
        return sample, {}
    field, records = wrapped
    return Sample(records[:RECORDS_LOOKED_AT]), {"field": field}


def _take_sample(file: SourceFile, folder: Path) -> Sample:
    found = read_first_records(file, folder)
    records = [record.value for record in found if record.value is not None][:RECORDS_LOOKED_AT]
    if not records:
        whys = [f" (line {one.line}: {one.rejected.reason}: {one.rejected.detail})" for one in found if one.rejected]
        raise ConfigError(
            f"{file.url}: no record could be read from its start{''.join(whys[:1])}; expected a file with records; "
            "check the file"
        )
    has_numbers = any(type(value) in (int, float) for record in records for value in record.values())
    return Sample(records, is_table_file=file.format.has_cells or (file.format.is_arrow and has_numbers))


def _require_format(url: str, sample: Sample) -> Recognition:
    choice = recognise_format(sample, KINDS.values())
    if choice.proposal is None:
        columns = ", ".join(sample.columns) or "none"
        closest = choice.explain()
        remedy = "write a recipe with what is meant" if choice.candidates else "convert the file"
        if len(sample.records) == 1 and (lists := list_lists(sample.records[0])):
            named = ", ".join(f"{path} ({len(rows)} objects)" for path, rows in lists.items())
            remedy = f"name the list of its records in a recipe's source.field: {named}"
        raise ConfigError(
            f"{url}: no known format fits its records (columns: {columns}); expected messages with an answer, a prompt "
            "and a response, preferences, prompts with a ground truth, token ids, text, or rows of single values; "
            f"{f'{closest}; ' if closest else ''}{remedy}, or a rowmill.RowFormat"
            f"{hint_at_columns(sample.columns)}"
        )
    return choice.proposal


def _shorten_url(url: str, folder: Path) -> str:
    """Return a local path inside the project relative to it, so that the project can be moved."""
    if "://" in url or not os.path.isabs(url):
        return url
    relative = os.path.relpath(url, folder.resolve())
    return url if relative.startswith("..") else relative


def _make_name(text: str) -> str:
    """Turn a text into a valid recipe name: letters, digits and underscores, starting with a letter."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")[:60]
    return name if name[:1].isalpha() else f"data_{name}".rstrip("_")


# ── The recipe's text ──────────────────────────────────────────────────────────────────────────────


def _render_recipe(datasets: Sequence[_FoundDataset], tokenizer: str, seq_len: int, *, needs_template: bool) -> str:
    lines = [
        "# Written by `rowmill init` from the first records of the data. Review the guesses and edit them as needed:",
        "# `rowmill inspect` shows the rows as the model will see them.",
        f"tokenizer: {_render_value(tokenizer)}  # a folder, or a name on the Hugging Face hub: that of your model",
        f"seq_len: {seq_len}  # `rowmill stats` shows the effect of other lengths",
        "datasets:",
    ]
    for dataset in datasets:
        types = dataset.sample.describe_columns()
        columns = ", ".join(f"{name} ({kind})" for name, kind in list(types.items())[:COLUMNS_SHOWN])
        columns += ", …" if len(types) > COLUMNS_SHOWN else ""
        lines += [
            f"  {dataset.name}:",
            *_render_comment(f"columns in the first {len(dataset.sample.records)} records: {columns}"),
            *(line for sentence in dataset.found.evidence for line in _render_comment(sentence)),
            *(["    # a column has no name in the header: name it"] if "column_names" in dataset.options else []),
            *(line for sentence in _describe_splits(dataset) for line in _render_comment(sentence)),
            *_render_source(dataset),
            f"    format: {write_options(dataset.found.options)}",
            *(f"    {group}: {write_options(options)}" for group, options in dataset.found.groups.items()),
        ]
        if _read_kind(dataset.found).uses_template() and needs_template:
            lines += [*_render_comment("the tokenizer has no chat template"), "    template: {chat_template: chatml}"]
    return "\n".join(lines) + "\n"


def _read_kind(found: Recognition) -> DatasetKind:
    return KINDS[found.kind].model_validate(found.options)


def _describe_splits(dataset: _FoundDataset) -> Iterator[str]:
    """Yield what files named for a split were found."""
    held = [split for split in HELD_OUT if split in dataset.urls]
    if held:
        yield (
            f"files are named for their split: those of {' and '.join(held)} never train; name them in train_urls if "
            "they should"
        )
    if dataset.left_out:
        yield (
            f"left out, since they are named for a held-out split and their records are of another form: "
            f"{', '.join(dataset.left_out[:5])}"
        )


def _render_source(dataset: _FoundDataset) -> list[str]:
    """Return the source's lines: one, or one per split if there are several."""
    values = {f"{split}_urls": list(own) for split, own in dataset.urls.items()} | dict(dataset.options)
    if len(dataset.urls) == 1:
        return [f"    source: {_render_value(values)}"]
    return ["    source:", *(f"      {name}: {_render_value(value)}" for name, value in values.items())]


def _render_value(value: object) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
        .removesuffix("...\n")
        .strip()
    )


def _render_comment(sentence: str) -> list[str]:
    """Return a sentence as comment lines; a line break inside a column name does not end the comment."""
    words, lines = " ".join(sentence.split()).split(" "), ["    #"]
    for word in words:
        if len(lines[-1]) + len(word) > 100:
            lines.append("    #")
        lines[-1] += f" {word}"
    return lines
