"""The recipe: all options that affect the output, read and validated once, and `execution`, which does not affect it.

A dataset's options are in groups. Two conveniences are applied before validation: `defaults` fills in what a dataset
omits (only in groups that its kind reads), and an option of a group that is written directly under `format`, as in
other tools, is moved to its group.
"""

import copy
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from pydantic import Field, model_validator

from rowmill.checks.gates import Gates, find_unknown_dataset
from rowmill.core import config
from rowmill.core.config import Config, describe_type
from rowmill.core.errors import ConfigError, join_choices
from rowmill.core.storage import check_name
from rowmill.exports import AnyExport, RecipeSummary
from rowmill.formats import KINDS
from rowmill.formats.kind import OPTION_GROUPS
from rowmill.packing.options import Mixture
from rowmill.packing.rank_assignment import Partitions, check_world_size
from rowmill.recipe.dataset import Dataset, has_generation, summarize_dataset
from rowmill.recipe.defaults import check_defaults, drop_validation_shares, parse_dataset, resolve_top_level_aliases
from rowmill.recipe.execution import Execution
from rowmill.recipe.overrides import apply_overrides, is_records
from rowmill.schema.examples import Objective
from rowmill.schema.rollout_fields import RolloutFields, join_fields
from rowmill.sources import GeneratedSource
from rowmill.tabular.table_contract import TableContract
from rowmill.tokenization.tokenizer_source import (
    TokenizerChoice,
    find_tokenizer_folder,
    hash_tokenizer_folder,
    require_no_revision,
)


class Recipe(Config):
    """A recipe; every option but `execution` affects the output."""

    FILLED_IN: ClassVar = ("name",)
    USED_UP: ClassVar = ("defaults",)

    name: str
    """The file's name without its suffix; becomes the asset group."""
    tokenizer: str | TokenizerChoice
    """A folder (relative to the recipe's project) or a name on the hub; a mapping can add a revision."""
    vocab_size: int | None = Field(default=None, ge=1)
    """Token ids must be below it; null: the tokenizer's size."""
    seq_len: int = Field(ge=2)
    """Tokens in a packed sequence, and the most that an example can have."""
    seed: int = 0
    """Seed of every shuffle and of the mixture; splits have their own seed."""
    datasets: dict[str, Dataset] = Field(min_length=1)
    """Datasets by name."""
    mixture: Mixture = Mixture()
    """How datasets are mixed into one order."""
    partitions: Partitions = Partitions()
    """How the order is divided among GPUs."""
    exports: tuple[AnyExport, ...] = ()
    """The same tokens in the file formats of trainers, one folder per export."""
    gates: Gates = Gates()
    """Thresholds of the checks."""
    execution: Execution = Execution()
    """How the recipe is run; does not affect the output."""

    @model_validator(mode="after")
    def _lengths_fit(self) -> "Recipe":
        for name, dataset in self.datasets.items():
            option, limit = dataset.format.get_length_limit(dataset)
            sides = dataset.format.count_sides()
            if limit is not None and sides > 1 and limit > self._limit_sides(sides):
                raise ValueError(
                    f"datasets.{name}.{option} is {limit}, and {sides} sides of an example are in one sequence; at "
                    f"most {self._limit_sides(sides)} fit into seq_len {self.seq_len}; lower it, or raise seq_len"
                )
            if limit is not None and limit > self.seq_len:
                raise ValueError(
                    f"datasets.{name}.{option} is {limit}, seq_len {self.seq_len} is the most allowed; lower it, or "
                    "raise seq_len"
                )
        return self

    @model_validator(mode="after")
    def _segments_fill_sequences(self) -> "Recipe":
        first = next(iter(self.datasets))
        for name, dataset in self.datasets.items():
            multiple = dataset.packing.segment_multiple_of
            if self.seq_len % multiple:
                raise ValueError(
                    f"datasets.{name}.packing.segment_multiple_of: {multiple} does not divide seq_len {self.seq_len}; "
                    "a sequence must hold whole multiples; choose a divisor, or another seq_len"
                )
            if multiple != self.segment_multiple_of:
                raise ValueError(
                    f"datasets.{name}.packing.segment_multiple_of: {multiple}, and datasets.{first} has "
                    f"{self.segment_multiple_of}; one trainer reads all datasets, so they have one; set it in defaults"
                )
        return self

    @model_validator(mode="after")
    def _ranks_share_every_step(self) -> "Recipe":
        check_world_size(self.partitions.world_size, self.mixture.batch_sizes)
        return self

    @model_validator(mode="after")
    def _waivers_name_datasets(self) -> "Recipe":
        for waiver in self.gates.waivers:
            if problem := find_unknown_dataset(waiver, self.datasets):
                raise ValueError(f"gates.waivers: {problem}")
        return self

    @model_validator(mode="after")
    def _weights_name_datasets(self) -> "Recipe":
        for field in ("train_weights", "max_train_batches", "num_validation_sequences"):
            value = getattr(self.mixture, field)
            stages = value if isinstance(value, (tuple, list)) else [(0, value)]
            for _, weights in cast("Iterable[tuple[int, Mapping[str, float] | None]]", stages):
                for name in weights or {}:
                    if name not in self.datasets:
                        raise ValueError(
                            f"mixture.{field}: {name!r} is not a dataset; choose {join_choices(self.datasets)}"
                        )
                    if field == "num_validation_sequences" and self.datasets[name].format.IS_TABLE:
                        raise ValueError(
                            f"mixture.{field}: {name} holds records, which are split before they are assembled into "
                            f"examples; allowed: chats, pairs and texts; set datasets.{name}.splits.validation"
                        )
        return self

    @model_validator(mode="after")
    def _generated_records_come_from_another_dataset(self) -> "Recipe":
        """Refuse a source of records that no dataset of this recipe generates; another recipe's is checked later."""
        for name, dataset in self.datasets.items():
            if not isinstance(dataset.source, GeneratedSource):
                continue
            recipe, origin = dataset.source.dataset_key(self.name)
            if recipe != self.name:
                continue
            able = [one for one, other in self.datasets.items() if one != name and has_generation(other)]
            if origin not in able:
                raise ValueError(
                    f"datasets.{name}.source.generated: {origin!r} is not another dataset of this recipe with a "
                    f"format.generation block; {'there is ' + join_choices(able) if able else 'there is none'}; "
                    "name one, or recipe/dataset of another recipe"
                )
        return self

    @model_validator(mode="after")
    def _require_one_validation_size(self) -> "Recipe":
        for name in self.mixture.num_validation_sequences or {}:
            source, splits = self.datasets[name].source, self.datasets[name].splits
            if isinstance(source, GeneratedSource):
                continue  # records datasets, which are refused above
            named = source.validation_urls if source.kind == "files" else source.validation_split
            others = {
                "source.validation_urls" if source.kind == "files" else "source.validation_split": bool(named),
                "splits.validation": float(splits.validation) > 0,
                "splits.time_key": splits.time_key is not None,
            }
            for option in (option for option, is_set in others.items() if is_set):
                raise ValueError(
                    f"mixture.num_validation_sequences.{name} with datasets.{name}.{option}; only one of the two can "
                    "decide which rows are held out; delete one"
                )
        return self

    @model_validator(mode="after")
    def _datasets_share_one_objective(self) -> "Recipe":
        objectives = {name: dataset.format.get_objective() for name, dataset in self.datasets.items()}
        first = next(iter(objectives))
        for name, objective in objectives.items():
            if objective != objectives[first]:
                raise ValueError(
                    f"datasets.{name}.format.kind: {self.datasets[name].format.get_name()} has the objective "
                    f"{objective}, and datasets.{first} has {objectives[first]}; a recipe has one, since its datasets "
                    "are mixed into one order; give each objective a recipe of its own"
                )
        return self

    @model_validator(mode="after")
    def _row_fields_have_a_span(self) -> "Recipe":
        for name in self.rollout_fields.per_row:
            for dataset, options in self.datasets.items():
                if not options.packing.block_cross_document_attention:
                    raise ValueError(
                        f"datasets.{dataset}.packing.block_cross_document_attention: false, and {name} is a field of "
                        "rows; such a field is the value of an attention span, so each row must be one; set it to "
                        "true, or drop format.row_fields"
                    )
        return self

    @model_validator(mode="after")
    def _exports_are_possible(self) -> "Recipe":
        prospect = RecipeSummary(
            self.seq_len, {name: summarize_dataset(dataset) for name, dataset in self.datasets.items()}
        )
        taken = dict.fromkeys(self.datasets, "a dataset")
        for number, export in enumerate(self.exports):
            check_name(export.name, f"exports.{number}.name")
            if export.name in taken:
                raise ValueError(
                    f"exports.{number}.name: {export.name!r} is already {taken[export.name]}; names must differ, "
                    "because statistics are stored under them; rename the export"
                )
            taken[export.name] = "another export"
            try:
                export.refuse(prospect)
            except ConfigError as error:
                raise ValueError(f"exports.{export.name}: {error}") from error
        return self

    @property
    def objective(self) -> Objective:
        """What a trainer does with the examples of all datasets."""
        return next(iter(self.datasets.values())).format.get_objective()

    @property
    def has_loss_weights(self) -> bool:
        """Whether shards have a weight per token: all shards do if any dataset has weights."""
        return any(dataset.loss.weights for dataset in self.datasets.values())

    @property
    def rollout_fields(self) -> RolloutFields:
        """The fields that token rows carry: all shards have those of every dataset."""
        return join_fields(dataset.format.get_rollout_fields() for dataset in self.datasets.values())

    @property
    def segment_multiple_of(self) -> int:
        """The number that segments of all datasets are padded to a multiple of."""
        return next(iter(self.datasets.values())).packing.segment_multiple_of

    @property
    def total_workers(self) -> int:
        """The number of worker processes to use on this machine."""
        import os

        return self.execution.workers or len(os.sched_getaffinity(0))

    @property
    def tokenizer_choice(self) -> TokenizerChoice:
        """The value of `tokenizer`, normalized to a mapping."""
        return TokenizerChoice(name=self.tokenizer) if isinstance(self.tokenizer, str) else self.tokenizer

    def limit_of(self, dataset: str) -> int:
        """Return the maximum number of tokens of a dataset's examples; of a pair's, that of each side."""
        chosen = self.datasets[dataset]
        return chosen.format.get_length_limit(chosen)[1] or self._limit_sides(chosen.format.count_sides())

    def _limit_sides(self, sides: int) -> int:
        """Return how long each side of an example can be if all are in one sequence, each padded."""
        multiple = self.segment_multiple_of if sides > 1 else 1
        return self.seq_len // sides // multiple * multiple


def load_recipe(path: Path, overrides: Mapping[str, str] | None = None) -> Recipe:
    """Read and check a recipe file; `overrides` are options of records datasets, as `apply_overrides` takes them.

    Raises
    ------
    ConfigError
        With one line per problem: where, what, what is allowed, what to do.

    """
    _require_text(path.resolve())
    _require_distinct_name(path)
    values = _insert_table_contracts(config.read_yaml(path), path)
    given = apply_overrides(values, overrides) if overrides else values
    return parse_recipe(given, name=path.stem, where=str(path), base=project_folder(path))


def _require_distinct_name(path: Path) -> None:
    """Refuse a recipe that is named like another one of its project: commands, storage and Dagster could not differ."""
    path = path.resolve()
    configs = next((folder for folder in path.parents if folder.name == "configs"), path.parent)
    alike = [
        other
        for other in find_recipes(configs)
        if other.resolve() != path and other.stem.replace("-", "_") == path.stem.replace("-", "_")
    ]
    if alike:
        raise ConfigError(
            f"{path}: recipe {path.stem!r} is named like {alike[0]}; recipes must differ in more than '-' and '_'; "
            "rename one of them"
        )


TABLE_SUFFIX = ".table.yaml"
"""Suffix of table contract files; no recipe has it."""


def table_contract_file(recipe_path: Path, dataset: str) -> Path:
    """Return the path of a pinned table contract: `<recipe>/<dataset>.table.yaml` next to the recipe."""
    return recipe_path.with_suffix("") / f"{dataset}{TABLE_SUFFIX}"


def _insert_table_contracts(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a recipe's mapping with the table contracts from separate files inserted."""
    files = sorted(path.with_suffix("").glob(f"*{TABLE_SUFFIX}"))
    datasets: Any = values.get("datasets", values.get("configs"))
    if not files or not isinstance(datasets, dict):
        return values
    filled = copy.deepcopy(values)
    written: dict[str, Any] = filled["datasets" if "datasets" in filled else "configs"]
    shared: Any = (filled.get("defaults") or {}).get("format", {}) if isinstance(filled.get("defaults"), dict) else {}
    for file in files:
        name = file.name.removesuffix(TABLE_SUFFIX)
        dataset: Any = written.get(name)
        if not (is_records(dataset) or (isinstance(dataset, dict) and is_records({"format": shared}))):
            raise ConfigError(
                f"{file}: there is no records dataset {name!r} in {path}; a table contract is named after its dataset; "
                "rename the file, or delete it"
            )
        form: Any = dataset.setdefault("format", {})
        if isinstance(form, dict) and form.get("table") is not None:
            raise ConfigError(
                f"{path}: datasets.{name}.format.table: {file} is its table contract, too; only one is allowed; "
                "delete one"
            )
        loaded = config.read_yaml(file)
        config.validate_options(TableContract, loaded, str(file))
        form["table"] = loaded
    return filled


def _require_text(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise ConfigError(
            f"{shown}: this path is not UTF-8; a project's paths are recorded as text, so they must be UTF-8; rename "
            "the file or folder"
        ) from None


def project_folder(path: Path) -> Path:
    """Return the base of a recipe's relative paths: the folder that holds `configs/`, else the recipe's folder."""
    path = path.resolve()
    return next((p.parent for p in path.parents if p.name == "configs"), path.parent)


def parse_recipe(values: Mapping[str, Any], *, name: str, where: str, base: Path = Path()) -> Recipe:
    """Validate a recipe given as a mapping; `name` becomes the recipe's name, `base` is the project's folder."""
    check_name(name, where)
    raw: dict[str, Any] = dict(values)
    if "name" in raw:
        raise ConfigError(f"{where}: name: the file's name is the recipe's name; delete the key, or rename the file")
    raw["name"] = name
    resolve_top_level_aliases(raw, where)
    _identify_tokenizer(raw, where, base)
    defaults: object = raw.pop("defaults", {}) or {}
    datasets: object = raw.get("datasets")
    if not isinstance(defaults, dict):
        raise ConfigError(
            f"{where}: defaults: is {describe_type(defaults)}, expected a mapping of groups; see docs/reference.md"
        )
    if isinstance(datasets, dict):
        filled = cast("dict[str, Any]", datasets)
        groups = cast("dict[str, Any]", defaults)
        check_defaults(groups, where)
        raw["datasets"] = {
            str(key): parse_dataset(str(key), value, groups, where, base) for key, value in filled.items()
        }
        drop_validation_shares(raw, filled)
    return config.validate_options(Recipe, raw, where)


def find_recipes(configs: Path) -> list[Path]:
    """Return the recipe files of a configs folder: `<name>.yaml` in it or one level below."""
    found = (*configs.glob("*.yaml"), *configs.glob("*/*.yaml"))
    return sorted((path for path in found if not path.name.endswith(TABLE_SUFFIX)), key=lambda path: path.stem)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe file, for editors; `defaults` takes the groups of a dataset."""
    from rowmill.core.option_docs import DescribedJsonSchema

    schema = Recipe.model_json_schema(schema_generator=DescribedJsonSchema)
    groups = {name: {"$ref": f"#/$defs/{model.__name__}"} for name, model in OPTION_GROUPS.items()}
    schema["properties"].pop("name")
    for kind in KINDS.values():
        for field in kind.FILLED_IN:
            schema["$defs"][kind.__name__]["properties"].pop(field)
    schema["$defs"]["TokenizerChoice"]["properties"].pop("content")
    schema["required"] = [field for field in schema["required"] if field != "name"]
    schema["properties"]["defaults"] = {
        "type": "object", "properties": groups | {"format": {"type": "object"}}, "additionalProperties": False,
        "description": "Groups for all datasets; a dataset's own value wins.",
    }  # fmt: skip
    return schema | {"title": "rowmill recipe"}


def _identify_tokenizer(raw: dict[str, Any], where: str, base: Path) -> None:
    """Add the digest of a local tokenizer folder: its path does not identify its content."""
    given: Any = raw.get("tokenizer")
    written: dict[str, Any] = {"name": given} if isinstance(given, str) else given if isinstance(given, dict) else {}
    if "content" in written:
        raise ConfigError(
            f"{where}: tokenizer.content: it is computed from the folder's files and cannot be set; name and revision "
            "are allowed; delete it"
        )
    name = written.get("name")
    folder = find_tokenizer_folder(name, base) if isinstance(name, str) and name else None
    if isinstance(name, str) and folder is not None:
        try:
            require_no_revision(name, written.get("revision"))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        raw["tokenizer"] = {**written, "content": hash_tokenizer_folder(folder)}
