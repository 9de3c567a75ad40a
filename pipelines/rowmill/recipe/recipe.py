"""The recipe: everything that decides the bytes, read once, checked whole; beside it the execution, which decides none.

What belongs here: composing the rooms' option groups, defaults, aliases, reading a recipe file. What does
not: an option itself; each lives in the room whose behaviour it sets.

A dataset's options stand in groups. Two courtesies are done before validation: `defaults` fills in what a
dataset leaves out (only the groups that its kind reads), and an option of a group written directly under
`format`, as other tools do, is moved to its group.
"""

import copy
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from rowmill.checks.gates import Gates
from rowmill.conversation.masking import Loss
from rowmill.conversation.rendering.renderer import Template
from rowmill.conversation.truncation import Truncation
from rowmill.core import config
from rowmill.core.config import Config, describe_type
from rowmill.core.errors import ConfigError, join_choices, suggest_name
from rowmill.core.storage import check_name
from rowmill.exports import AnyExport, DatasetSummary, RecipeSummary
from rowmill.formats import KINDS, Auto, Format, resolve_kind
from rowmill.formats.filters import Filters
from rowmill.formats.kind import OPTION_GROUPS, DatasetKind
from rowmill.formats.reasoning import Reasoning
from rowmill.formats.splits import Splits
from rowmill.formats.tool_calls import Tools
from rowmill.packing.mixture import Mixture
from rowmill.packing.plan import Packing
from rowmill.packing.rank_assignment import Partitions, check_world_size
from rowmill.schema.rows import RowKind
from rowmill.sources import GeneratedSource, Source
from rowmill.tabular.table_contract import TableContract
from rowmill.tokenization.tokenizer_source import (
    TokenizerChoice,
    find_tokenizer_folder,
    hash_tokenizer_folder,
    require_no_revision,
)

FORMAT_ALIASES = {"type": "kind"}
FIELD_ALIASES = {"max_seq_len": "max_length"}


class Dataset(Config):
    """One dataset: where its rows come from and what is done to them on the way to packed sequences."""

    source: Source
    """Where the raw records are."""
    format: Format = Auto()
    """How a record's own columns become a row."""
    reasoning: Reasoning = Reasoning()
    """Where reasoning is found, and what becomes of it."""
    tools: Tools = Tools()
    """Where tools are found, and in which form calls reach the template."""
    template: Template = Template()
    """The chat template and what is asked of it."""
    loss: Loss = Loss()
    """Which tokens train."""
    truncation: Truncation = Truncation()
    """What happens to rows longer than the context."""
    filters: Filters = Filters()
    """Rows left out on purpose."""
    splits: Splits = Splits()
    """Which rows are held out."""
    packing: Packing = Packing()
    """How examples share sequences."""

    @model_validator(mode="after")
    def _require_packable_rows(self) -> "Dataset":
        """Refuse a way of packing that the kind's rows cannot take, before a row is read."""
        self.packing.strategy_for(self.row_kind)
        return self

    @model_validator(mode="after")
    def _require_records_format(self) -> "Dataset":
        if isinstance(self.source, GeneratedSource) and not self.format.IS_TABLE:
            raise ValueError(
                f"source.generated: {self.source.generated} holds records of a table, and format.kind is "
                f"{self.format.kind}; records is needed; set format: {{kind: records}}"
            )
        return self

    @model_validator(mode="after")
    def _check_kind(self) -> "Dataset":
        self.format.check_options(self)
        return self

    @property
    def row_kind(self) -> RowKind:
        """What most of its rows are."""
        return self.format.ROW_KIND

    @property
    def keeps_non_finite(self) -> bool:
        """Whether NaN and infinity of typed sources are values of its rows: records have texts for them."""
        return self.format.IS_TABLE

    @property
    def keeps_overlong(self) -> bool:
        """Whether rows over the limit are left to packing, unless `truncation.overlong` says otherwise."""
        joined = self.packing.strategy_for(self.row_kind) == "concat" and self.truncation.max_length is None
        return joined or self.packing.slice_strategy is not None


def _has_generation(dataset: Dataset) -> bool:
    """Tell whether a model's records are parsed for a dataset that has data of its own."""
    table = dataset.format.as_table()
    return table is not None and table.generation is not None and not isinstance(dataset.source, GeneratedSource)


def _summarize_dataset(dataset: Dataset) -> DatasetSummary:
    """Return what decides which exports a dataset can go into."""
    return DatasetSummary(
        kind=dataset.row_kind,
        is_joined=dataset.packing.strategy_for(dataset.row_kind) == "concat",
        is_open=not dataset.packing.block_cross_document_attention,
        has_weights=bool(dataset.loss.weights),
    )


class Execution(Config):
    """How a recipe is run: nothing here changes a byte, and nothing here enters a fingerprint."""

    workers: int = Field(default=0, ge=0)
    """Number of worker processes; 0 is one per core."""
    cron: str = "0 2 * * *"
    """When the nightly rebuild runs, in UTC."""
    schedule_on: bool = False
    """Whether the nightly rebuild is on when the location is first loaded."""
    watch_sources: bool = False
    """Whether a sensor rebuilds when source files have changed and settled."""
    automation: Literal["off", "on_change"] = "off"
    """Whether assets materialize themselves when what they read has changed."""
    run_executor: Literal["in_process", "multiprocess"] = "in_process"
    """How Dagster runs a job's steps; workers parallelise inside a stage either way."""
    overdue_hours: float | None = Field(default=None, gt=0)
    """Hours without a build after which Dagster shows the order of training as overdue; null is never."""
    owners: tuple[str, ...] = ()
    """Owners shown in Dagster: e-mail addresses or `team:name`."""
    reports_url: str | None = None
    """Where reports are served, for links from Dagster's pages."""


class Recipe(Config):
    """A whole recipe. `execution` and the file's place are the only parts that decide no byte."""

    FILLED_IN: ClassVar = ("name",)
    USED_UP: ClassVar = ("defaults",)

    name: str
    """The file's name without its suffix; becomes the asset group."""
    tokenizer: str | TokenizerChoice
    """A folder (relative to the recipe's project) or a name on the hub; a mapping has a revision beside the name."""
    vocab_size: int | None = Field(default=None, ge=1)
    """Ids must lie below it; null is the tokenizer's own size."""
    seq_len: int = Field(ge=2)
    """Tokens: the length of a packed sequence, the most that an example may have."""
    seed: int = 0
    """Decides every shuffle and mixture; splits have a seed of their own."""
    datasets: dict[str, Dataset] = Field(min_length=1)
    """Datasets by name."""
    mixture: Mixture = Mixture()
    """How datasets are mixed into one order."""
    partitions: Partitions = Partitions()
    """How the order is dealt to GPUs."""
    exports: tuple[AnyExport, ...] = ()
    """The same tokens in trainers' own forms, one folder each."""
    gates: Gates = Gates()
    """Thresholds of the checks."""
    execution: Execution = Execution()
    """How the recipe is run; decides no byte."""

    @model_validator(mode="after")
    def _lengths_fit(self) -> "Recipe":
        for name, dataset in self.datasets.items():
            option, limit = dataset.format.get_length_limit(dataset)
            if limit is not None and limit > self.seq_len:
                raise ValueError(
                    f"datasets.{name}.{option} is {limit}, seq_len {self.seq_len} is the most allowed; lower it, or "
                    "raise seq_len"
                )
        return self

    @model_validator(mode="after")
    def _ranks_share_every_step(self) -> "Recipe":
        check_world_size(self.partitions.world_size, self.mixture.batch_sizes)
        return self

    @model_validator(mode="after")
    def _waivers_name_datasets(self) -> "Recipe":
        for waiver in self.gates.waivers:
            if waiver.dataset is not None and waiver.dataset not in self.datasets:
                raise ValueError(
                    f"gates.waivers: {waiver.dataset!r} is no dataset; choose {join_choices(self.datasets)}; a "
                    "waiver that "
                    "covers nothing would be believed to cover something"
                )
        return self

    @model_validator(mode="after")
    def _weights_name_datasets(self) -> "Recipe":
        for field in ("train_weights", "max_train_batches", "num_validation_sequences"):
            value = getattr(self.mixture, field)
            stages = value if isinstance(value, tuple | list) else [(0, value)]
            for _, weights in cast("Iterable[tuple[int, Mapping[str, float] | None]]", stages):
                for name in weights or {}:
                    if name not in self.datasets:
                        raise ValueError(
                            f"mixture.{field}: {name!r} is no dataset; choose {join_choices(self.datasets)}"
                        )
                    if field == "num_validation_sequences" and self.datasets[name].format.IS_TABLE:
                        raise ValueError(
                            f"mixture.{field}: {name} holds records, whose splits are decided before they are put into "
                            f"examples; chats, pairs and texts can be named; set datasets.{name}.splits.validation"
                        )
        return self

    @model_validator(mode="after")
    def _generated_records_come_from_another_dataset(self) -> "Recipe":
        """Refuse a source that nothing is generated for; what another recipe generated is found when it is read."""
        for name, dataset in self.datasets.items():
            if not isinstance(dataset.source, GeneratedSource):
                continue
            recipe, origin = dataset.source.dataset_key(self.name)
            if recipe != self.name:
                continue
            able = [one for one, other in self.datasets.items() if one != name and _has_generation(other)]
            if origin not in able:
                raise ValueError(
                    f"datasets.{name}.source.generated: {origin!r} is no other dataset of this recipe with a "
                    f"format.generation block; {'there is ' + join_choices(able) if able else 'there is none'}; "
                    "name one, or "
                    "recipe/dataset of another recipe"
                )
        return self

    @model_validator(mode="after")
    def _require_one_validation_size(self) -> "Recipe":
        for name in self.mixture.num_validation_sequences or {}:
            source, splits = self.datasets[name].source, self.datasets[name].splits
            if isinstance(source, GeneratedSource):
                continue  # they are records, which are refused above
            named = source.validation_urls if source.kind == "files" else source.validation_split
            others = {
                "source.validation_urls" if source.kind == "files" else "source.validation_split": bool(named),
                "splits.validation": float(splits.validation) > 0,
                "splits.time_key": splits.time_key is not None,
            }
            for option in (option for option, is_set in others.items() if is_set):
                raise ValueError(
                    f"mixture.num_validation_sequences.{name} with datasets.{name}.{option}; one of the two may say "
                    "what is held out; delete one"
                )
        return self

    @model_validator(mode="after")
    def _exports_are_possible(self) -> "Recipe":
        prospect = RecipeSummary(
            self.seq_len, {name: _summarize_dataset(dataset) for name, dataset in self.datasets.items()}
        )
        taken = dict.fromkeys(self.datasets, "a dataset")
        for number, export in enumerate(self.exports):
            check_name(export.name, f"exports.{number}.name")
            if export.name in taken:
                raise ValueError(
                    f"exports.{number}.name: {export.name!r} is already {taken[export.name]}; names must differ, since "
                    "statistics are kept by them; rename the export"
                )
            taken[export.name] = "another export"
            try:
                export.refuse(prospect)
            except ConfigError as error:
                raise ValueError(f"exports.{export.name}: {error}") from error
        return self

    @property
    def has_loss_weights(self) -> bool:
        """Whether shards have a weight per token: all of them, as soon as one dataset has weights."""
        return any(dataset.loss.weights for dataset in self.datasets.values())

    @property
    def total_workers(self) -> int:
        """The number of worker processes to use on this machine."""
        import os

        return self.execution.workers or len(os.sched_getaffinity(0))

    @property
    def tokenizer_choice(self) -> TokenizerChoice:
        """What `tokenizer` names, however it is written."""
        return TokenizerChoice(name=self.tokenizer) if isinstance(self.tokenizer, str) else self.tokenizer

    def limit_of(self, dataset: str) -> int:
        """Return the most tokens that an example of a dataset may have."""
        chosen = self.datasets[dataset]
        return chosen.format.get_length_limit(chosen)[1] or self.seq_len


def load_recipe(path: Path, overrides: Mapping[str, str] | None = None) -> Recipe:
    """Read and check a recipe file; `overrides` are options of records datasets, as `overridden` takes them.

    Raises
    ------
    ConfigError
        One line per problem, each saying where, what, what was allowed, what to do.

    """
    _require_text(path.resolve())
    values = _insert_table_contracts(config.read_yaml(path), path)
    given = apply_overrides(values, overrides) if overrides else values
    return parse_recipe(given, name=path.stem, where=str(path), base=project_folder(path))


TABLE_SUFFIX = ".table.yaml"
"""How the name of a table contract's file ends; no recipe's does."""


def table_contract_file(recipe_path: Path, dataset: str) -> Path:
    """Return where a records dataset's table contract is pinned: `<recipe>/<dataset>.table.yaml` beside the recipe."""
    return recipe_path.with_suffix("") / f"{dataset}{TABLE_SUFFIX}"


def _insert_table_contracts(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a recipe's mapping with the table contracts that stand in files of their own."""
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
        if not (_is_records(dataset) or (isinstance(dataset, dict) and _is_records({"format": shared}))):
            raise ConfigError(
                f"{file}: there is no records dataset {name!r} in {path}; a table contract is named after the dataset "
                "that it is of; rename the file, or delete it"
            )
        form: Any = dataset.setdefault("format", {})
        if isinstance(form, dict) and form.get("table") is not None:
            raise ConfigError(
                f"{path}: datasets.{name}.format.table: {file} is its table contract, too; one may be; delete one"
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
            f"{shown}: this path is not UTF-8; the paths of a project are recorded as text, so they must be; rename "
            "the file or folder"
        ) from None


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return a recipe's mapping with options of its records datasets replaced.

    A key is the option's path in `format` with `__` between its words, `data__max_sequences_per_example`, and
    begins with the dataset's name where the recipe has several records datasets; a value is read as YAML.

    Raises
    ------
    ConfigError
        If it does not say which dataset, or its value is no YAML.

    """
    changed = copy.deepcopy(dict(values))
    datasets: Any = changed.get("datasets", changed.get("configs", {}))
    tables = [str(name) for name, one in datasets.items() if _is_records(one)] if isinstance(datasets, dict) else []
    for key, text in overrides.items():
        first, *rest = key.split("__")
        name, path = (first, rest) if first in tables else (tables[0] if len(tables) == 1 else "", [first, *rest])
        if not name or not path:
            raise ConfigError(
                f"--{key}: does not say whose option it is; this recipe's records datasets are "
                f"{join_choices(tables) or 'none'}; write --NAME__{key}"
            )
        here: Any = datasets[name]["format"]
        for word in path[:-1]:
            inner = here.setdefault(word, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"--{key}: {word} is {describe_type(inner)}, which has no options; correct the option's name"
                )
            here = cast("dict[str, Any]", inner)
        here[path[-1]] = config.read_value(text, f"--{key}")
    return changed


def _is_records(dataset: Any) -> bool:
    form: Any = dataset.get("format") if isinstance(dataset, dict) else None
    named = form.get("kind", form.get("type")) if isinstance(form, dict) else None
    return isinstance(named, str) and named in KINDS and KINDS[named].IS_TABLE


def project_folder(path: Path) -> Path:
    """Return the folder from which a recipe's paths count: the one that holds `configs/`, else the recipe's own."""
    path = path.resolve()
    return next((p.parent for p in path.parents if p.name == "configs"), path.parent)


def parse_recipe(values: Mapping[str, Any], *, name: str, where: str, base: Path = Path()) -> Recipe:
    """Check a recipe given as a mapping; `name` becomes the recipe's, `base` is the project's folder."""
    check_name(name, where)
    raw: dict[str, Any] = dict(values)
    if "name" in raw:
        raise ConfigError(f"{where}: name: the file's name is the recipe's name; delete the key, or rename the file")
    raw["name"] = name
    _resolve_top_level_aliases(raw, where)
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
        _check_defaults(groups, where)
        raw["datasets"] = {
            str(key): _parse_dataset(str(key), value, groups, where, base) for key, value in filled.items()
        }
        _drop_validation_shares(raw, filled)
    return config.validate_options(Recipe, raw, where)


def find_recipes(configs: Path) -> list[Path]:
    """Return the recipe files of a configs folder: `<name>.yaml` in it or one folder down."""
    found = (*configs.glob("*.yaml"), *configs.glob("*/*.yaml"))
    return sorted((path for path in found if not path.name.endswith(TABLE_SUFFIX)), key=lambda path: path.stem)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe file, for editors; `defaults` takes the groups of a dataset."""
    schema = Recipe.model_json_schema()
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


_CACHE_OPTIONS = ("cache_dir", "cache_options", "auto_build_caches")
"""What other projects call where and how tokens are kept; here they are found by the digest of what decides them."""


def _refuse_cache(raw: Mapping[str, Any], at: str) -> None:
    for name in _CACHE_OPTIONS:
        if name in raw:
            raise ConfigError(
                f"{at}: {name}: a recipe holds what decides the bytes, and this decides none; the storage root is "
                "--root or ROWMILL_STORE, workers are execution.workers; delete it"
            )


def _resolve_top_level_aliases(raw: dict[str, Any], where: str) -> None:
    _refuse_cache(raw, where)
    if "configs" in raw:
        if "datasets" in raw:
            raise ConfigError(f"{where}: configs and datasets are the same key; only one may stand; delete configs")
        raw["datasets"] = raw.pop("configs")
    moves = {"chat_template": ("template", "chat_template"), "enforce_eos": ("format", "add_eos"),
             "ignore_token_id": ("packing", "ignore_token_id")}  # fmt: skip
    for alias, (group, field) in moves.items():
        if alias in raw:
            defaults: dict[str, Any] = raw.setdefault("defaults", {})
            into: dict[str, Any] = defaults.setdefault(group, {})
            if field in into:
                raise ConfigError(f"{where}: {alias} and defaults.{group}.{field} are the same option; keep one")
            into[field] = ("auto" if raw[alias] else False) if alias == "enforce_eos" else raw[alias]
            del raw[alias]


def _identify_tokenizer(raw: dict[str, Any], where: str, base: Path) -> None:
    """Put the digest of a tokenizer's folder beside its name: the folder's path identifies nothing."""
    given: Any = raw.get("tokenizer")
    written: dict[str, Any] = {"name": given} if isinstance(given, str) else given if isinstance(given, dict) else {}
    if "content" in written:
        raise ConfigError(
            f"{where}: tokenizer.content: it is read from the folder's files and cannot be set; name and revision are "
            "allowed; delete it"
        )
    name = written.get("name")
    folder = find_tokenizer_folder(name, base) if isinstance(name, str) and name else None
    if isinstance(name, str) and folder is not None:
        try:
            require_no_revision(name, written.get("revision"))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        raw["tokenizer"] = {**written, "content": hash_tokenizer_folder(folder)}


def _check_defaults(defaults: Mapping[str, Any], where: str) -> None:
    for group, values in defaults.items():
        if group != "format" and group not in OPTION_GROUPS:
            raise ConfigError(
                f"{where}: defaults.{group}: unknown group; allowed: "
                f"{join_choices([*OPTION_GROUPS, 'format'])}; correct it"
            )
        if not isinstance(values, dict):
            raise ConfigError(
                f"{where}: defaults.{group}: is {describe_type(values)}, expected a mapping; write its options under it"
            )
        if group in OPTION_GROUPS:
            config.validate_options(OPTION_GROUPS[group], values, f"{where}: defaults.{group}")
        else:
            _check_default_format(cast("dict[str, Any]", values), where)


def _check_default_format(values: Mapping[str, Any], where: str) -> None:
    """Refuse a key that no kind of format has: every dataset would leave it out, and nobody would notice."""
    known = {"kind", *(name for kind in KINDS.values() for name in kind.list_fields())}
    for name in values:
        if name in known:
            continue
        home = next((group for group, model in OPTION_GROUPS.items() if name in model.model_fields), None)
        guess = suggest_name(name, known)
        hint = f"write it under defaults.{home}" if home else f"did you mean {guess}?" if guess else "delete it"
        raise ConfigError(
            f"{where}: defaults.format.{name}: no kind of format has this option; allowed: "
            f"{join_choices(sorted(known))}; "
            f"{hint}"
        )


def _parse_dataset(name: str, value: object, defaults: Mapping[str, Any], where: str, base: Path) -> object:
    check_name(name, f"{where}: datasets.{name}")
    if not isinstance(value, dict):
        return value
    raw = dict(cast("dict[str, Any]", value))
    at = f"{where}: datasets.{name}"
    _refuse_cache(raw, at)
    form: object = raw.get("format", {})
    if not isinstance(form, dict):
        return raw
    shared: dict[str, Any] = dict(defaults.get("format", {}))
    options = _resolve_format_aliases(dict(cast("dict[str, Any]", form)), at)
    written = str(options.get("kind", shared.get("kind", Auto.get_name())))
    options["kind"], registered = resolve_kind(written)
    if registered is not None:
        if "class" in options:
            raise ConfigError(
                f"{at}.format: {written} is registered for {registered}; its class is known; delete class"
            )
        options["class"] = registered
    kind = KINDS.get(options["kind"])
    if kind is None:
        # The union of kinds names those that there are.
        return raw | {"format": options}
    options, read = kind.complete_options(options, base, f"{at}.format")
    _move_flat_options(options, raw, kind, read, at)
    _refuse_unread(raw, kind, at)
    _insert_group_defaults(raw, kind, read, options, defaults, at)
    known = kind.list_fields()
    raw["format"] = {**{k: v for k, v in shared.items() if k in known}, **options}
    return raw


def _insert_group_defaults(
    raw: dict[str, Any],
    kind: type[DatasetKind],
    read: frozenset[str],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    at: str,
) -> None:
    """Fill in a dataset's groups: its own value, else that of `defaults`, else the kind's default."""
    of_kind = kind.select_group_defaults(options, raw)
    for group in OPTION_GROUPS:
        if group in raw and group not in read:
            raise ConfigError(
                f"{at}.{group}: a {kind.get_name()} dataset does not read this group; it reads "
                f"{join_choices(sorted(read))}; delete it"
            )
        if group in read and group in defaults and isinstance(raw.get(group, {}), dict):
            unread = kind.FIELDS_NOT_READ.get(group, frozenset())
            own = raw.get(group, {})
            if group == "splits" and "boundaries" in own:
                # A dataset that cuts in time at boundaries of its own takes no shares from the others.
                unread |= {"validation", "test"}
            raw[group] = {**{k: v for k, v in defaults[group].items() if k not in unread}, **own}
        if group in of_kind and isinstance(raw.get(group, {}), dict):
            raw[group] = {**of_kind[group], **raw.get(group, {})}


def _refuse_unread(raw: Mapping[str, Any], kind: type[DatasetKind], at: str) -> None:
    """Refuse an option that the dataset's kind would read over."""
    for group, names in kind.FIELDS_NOT_READ.items():
        given: object = raw.get(group, {})
        for name in sorted(names & set(given)) if isinstance(given, dict) else ():
            allowed = sorted(set(OPTION_GROUPS[group].model_fields) - names)
            raise ConfigError(
                f"{at}.{group}.{name}: a {kind.get_name()} dataset does not read this option; of {group} it reads "
                f"{join_choices(allowed)}; delete it"
            )


def _drop_validation_shares(raw: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    """Take the validation share from datasets whose validation is given by number, unless they say their own."""
    mixture: object = raw.get("mixture")
    given = cast("dict[str, Any]", mixture) if isinstance(mixture, dict) else {}
    numbers: object = given.get("num_validation_sequences")
    for name in cast("dict[str, Any]", numbers) if isinstance(numbers, dict) else ():
        splits: object = written[name].get("splits", {}) if isinstance(written.get(name), dict) else None
        if isinstance(splits, dict) and not {"validation", "time_key"} & splits.keys():
            raw["datasets"][name]["splits"] = {**raw["datasets"][name].get("splits", {}), "validation": 0}


def _resolve_format_aliases(options: dict[str, Any], at: str) -> dict[str, Any]:
    for alias, name in (FORMAT_ALIASES | FIELD_ALIASES).items():
        if alias in options:
            if name in options:
                raise ConfigError(f"{at}.format: {alias} is another name of {name}; only one may stand; delete {alias}")
            options[name] = options.pop(alias)
    return options


def _move_flat_options(
    options: dict[str, Any], raw: dict[str, Any], kind: type[DatasetKind], read: frozenset[str], at: str
) -> None:
    """Move options that belong to a group out of `format`, where other tools keep them."""
    own = kind.list_fields()
    for field in [key for key in options if key not in own]:
        homes = [group for group in OPTION_GROUPS if group in read and field in OPTION_GROUPS[group].model_fields]
        if not homes:
            continue
        group = homes[0]
        into: object = raw.setdefault(group, {})
        if not isinstance(into, dict):
            continue
        if field in into:
            raise ConfigError(f"{at}: {field} stands in format and in {group}; once is allowed; delete it from format")
        raw[group] = {**cast("dict[str, Any]", into), field: options.pop(field)}
