"""The recipe: all options that affect the output, validated once at load, and `execution`, which does not affect it.

A dataset's options are in groups. Two conveniences are applied before validation: `defaults` fills in what a dataset
omits (only in groups that its kind reads), and an option of a group that is written directly under `format`, as in
other tools, is moved to its group.
"""

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import pyarrow as pa
from pydantic import Field, ValidationError, model_validator

from rowmill.alerts import AnyAlert
from rowmill.checks.gates import Gates
from rowmill.conversation.truncation import Truncation
from rowmill.core import config
from rowmill.core.completions import Teacher
from rowmill.core.config import Config, describe_type
from rowmill.core.errors import ConfigError, hint_at_name, join_choices
from rowmill.core.stage_names import PARSED_RECORDS
from rowmill.core.storage import check_name
from rowmill.executors import AnyExecutor, LocalExecutor
from rowmill.exports import AnyExport
from rowmill.kinds.base import OPTION_GROUPS, DatasetKind, DatasetOptions, IdleOption, iterate_idle_options
from rowmill.kinds.catalog import KINDS, Auto, Format, resolve_kind
from rowmill.packing.options import Mixture, Packing
from rowmill.packing.rank_assignment import Partitions
from rowmill.schema.examples import WEIGHT_COLUMN, Objective, RolloutFields, join_fields
from rowmill.schema.recipe_summary import DatasetSummary, RecipeSummary, limit_sides
from rowmill.schema.rows import RowKind
from rowmill.sources import GeneratedSource, Source
from rowmill.tokenization.tokenizer_source import (
    TokenizerChoice,
    find_tokenizer_folder,
    hash_tokenizer_folder,
    require_no_revision,
)
from rowmill.tracking import AnyTracker


class Freshness(Config):
    """How old a build may be: Dagster's freshness policy of `training_splits`."""

    hours: float = Field(gt=0)
    """Hours in which there must be a build: the last ones, or those before the last `deadline`."""
    deadline: str | None = None
    """Cron expression of the times by which a build must be there, in UTC; null: at all times."""


class Execution(Config):
    """How a recipe is run; no option here affects the output or is part of a fingerprint."""

    workers: int = Field(default=0, ge=0)
    """Number of worker processes on this machine; 0 is one per core."""
    executor: AnyExecutor = LocalExecutor()
    """Where the tasks of a stage run."""
    cron: str = "0 2 * * *"
    """Cron expression of the nightly rebuild, in UTC."""
    schedule_on: bool = False
    """Whether the nightly schedule is on when Dagster first loads it."""
    watch_sources: bool = False
    """Whether a sensor rebuilds after source files changed and then stayed unchanged for one tick."""
    automation: Literal["off", "on_change"] = "off"
    """Whether Dagster materializes assets automatically when their inputs have changed."""
    run_executor: Literal["in_process", "multiprocess"] = "in_process"
    """How Dagster runs a job's steps; workers run in parallel inside a stage either way."""
    freshness: Freshness | None = None
    """When Dagster shows `training_splits` as overdue; null: never."""
    owners: tuple[str, ...] = ()
    """Owners shown in Dagster: e-mail addresses or `team:name`."""
    reports_url: str | None = None
    """Where reports are served, for links from Dagster's pages and from alerts."""
    alerts: tuple[AnyAlert, ...] = ()
    """Who is told what became of a build, and how."""
    log_to: tuple[AnyTracker, ...] = ()
    """Trackers in which published builds are put on record."""

    def limit_to_this_machine(self, workers: int | None = None) -> "Execution":
        """Return the same with processes of this machine, for work that must not leave it."""
        chosen = self.workers if workers is None else workers
        return self.model_copy(update={"executor": LocalExecutor(), "workers": chosen})


# ── Options from the command line ──


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return a recipe's mapping with options of its records datasets replaced.

    A key is the option's path in `format`, joined by `__`: `data__max_sequences_per_example`. It starts with the
    dataset's name if the recipe has several records datasets. A value is parsed as YAML.
    """
    changed = copy.deepcopy(dict(values))
    datasets: Any = changed.get("datasets", changed.get("configs", {}))
    tables = (
        [str(name) for name, dataset in datasets.items() if (kind := _find_kind(dataset)) and kind.TAKES_OVERRIDES]
        if isinstance(datasets, dict)
        else []
    )
    for key, text in overrides.items():
        first, *rest = key.split("__")
        name, path = (first, rest) if first in tables else (tables[0] if len(tables) == 1 else "", [first, *rest])
        if not name or not path:
            raise ConfigError(
                f"--{key}: the dataset is ambiguous; this recipe's records datasets are "
                f"{join_choices(tables) or 'none'}; write --NAME__{key}"
            )
        target: Any = datasets[name]["format"]
        for word in path[:-1]:
            inner = target.setdefault(word, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"--{key}: {word} is {describe_type(inner)}, which has no options; correct the option's name"
                )
            target = cast("dict[str, Any]", inner)
        target[path[-1]] = config.read_value(text, f"--{key}")
    return changed


def _find_kind(dataset: Any) -> type[DatasetKind] | None:
    """Return the kind that a dataset's mapping names; None if it names none by its own name."""
    form: Any = dataset.get("format") if isinstance(dataset, dict) else None
    named = form.get("kind", form.get("type")) if isinstance(form, dict) else None
    return KINDS.get(named) if isinstance(named, str) else None


# ── One dataset ──


class Dataset(DatasetOptions):
    """One dataset: the source of its rows, and how they become packed sequences."""

    source: Source
    """Location of the raw records."""
    format: Format = Auto()
    """How a record's own columns become a row."""
    teacher: Teacher | None = None
    """The server that `rowmill score` asks for the likeliest ids of trained tokens; null: none."""

    @model_validator(mode="after")
    def _check_options(self) -> "Dataset":
        # Refuses a packing strategy that the kind's rows do not support, before a row is read.
        self.packing.strategy_for(self.row_kind)
        if isinstance(self.source, GeneratedSource):
            self.format.check_generated_source(self.source.generated)
        self.format.check_options(self)
        if problem := self.find_teacher_problem():
            raise ValueError(problem)
        return self

    def find_teacher_problem(self) -> str:
        """Return why a teacher cannot score these examples; empty if it can, or there is none."""
        if self.teacher is None:
            return ""
        if not self.format.predicts_next_token():
            return (
                f"teacher: {self.format.get_name()} rows have the objective {self.format.get_objective()}; scores "
                "are of next_token examples; delete teacher"
            )
        if self.loss.has_weights:
            option = "weights: true" if self.loss.weights else f"prompt_weight: {self.loss.prompt_weight:g}"
            return (
                f"teacher with loss.{option}; scored rows are token ids, which have no weights; only one of the two is "
                f"possible; delete loss.{option.partition(':')[0]}"
            )
        return ""

    def summarize(self) -> DatasetSummary:
        """Return what other groups of the recipe know of the dataset."""
        splits = {
            "splits.validation": float(self.splits.validation) > 0,
            "splits.time_key": self.splits.time_key is not None,
        }
        makes_records = not isinstance(self.source, GeneratedSource) and has_generation_stage(PARSED_RECORDS, self)
        return DatasetSummary(
            kind=self.row_kind,
            is_joined=self.packing.strategy_for(self.row_kind) == "concat",
            is_open=not self.packing.block_cross_document_attention,
            has_weights=self.loss.has_weights,
            shares_prefixes=self.packing.share_prefixes,
            objective=self.format.get_objective(),
            fields=self.format.get_rollout_fields().names,
            segment_multiple_of=self.packing.segment_multiple_of,
            makes_records=makes_records,
            holdout_options=(
                *(f"source.{option}" for option in self.source.list_validation_options()),
                *(option for option, is_set in splits.items() if is_set),
            ),
        )

    @property
    def row_kind(self) -> RowKind:
        """The kind of most of its rows."""
        return self.format.ROW_KIND

    @property
    def keeps_non_finite(self) -> bool:
        """Whether NaN and infinity of typed sources are kept as values: only records datasets have text for them."""
        return self.format.WRITES_ALL_COLUMNS

    @property
    def keeps_overlong(self) -> bool:
        """Whether rows over the limit are left to packing, unless `truncation.overlong` says otherwise."""
        joined = self.packing.strategy_for(self.row_kind) == "concat" and self.truncation.max_length is None
        return joined or self.packing.slice_strategy is not None


def has_generation_stage(stage: str, dataset: Dataset) -> bool:
    """Return whether a dataset has an on-demand stage of records that a model generates."""
    return stage in dataset.format.list_generation_stages()


# ── Defaults, aliases and moved options ──


FORMAT_ALIASES = {"type": "kind"}

FIELD_ALIASES = {"max_seq_len": "max_length"}

TABLE_READING_OPTIONS = ("header", "skip", "comment", "escape")
"""Options of `source` that may be written in `format.table`, beside the columns of a table."""

_CACHE_OPTIONS = ("cache_dir", "cache_options", "auto_build_caches")
"""Cache options of other projects; rowmill finds stored tokens by a digest of everything that affects them."""


def _refuse_cache(raw: Mapping[str, Any], at: str) -> None:
    for name in _CACHE_OPTIONS:
        if name in raw:
            raise ConfigError(
                f"{at}: {name}: a recipe holds only options that affect the output, and this one does not; set "
                "the storage root with --root or ROWMILL_STORE, and workers with execution.workers; delete it"
            )


def resolve_top_level_aliases(raw: dict[str, Any], where: str) -> None:
    """Move options that other tools place at the top level into their groups."""
    _refuse_cache(raw, where)
    if "configs" in raw:
        if "datasets" in raw:
            raise ConfigError(f"{where}: configs and datasets are the same key; only one is allowed; delete configs")
        raw["datasets"] = raw.pop("configs")
    if isinstance(raw.get("defaults"), dict):
        raw["defaults"] = dict(raw["defaults"])
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


def check_defaults(defaults: Mapping[str, Any], where: str) -> None:
    """Refuse an unknown group or option of `defaults`."""
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
            continue
        # Every dataset would silently ignore a key that no kind of format has.
        allowed = {"kind", *(name for kind in KINDS.values() for name in kind.list_fields())}
        for name in cast("dict[str, Any]", values):
            if name in allowed:
                continue
            home = next((group for group, model in OPTION_GROUPS.items() if name in model.model_fields), None)
            hint = f"write it under defaults.{home}" if home else hint_at_name(name, allowed, "delete it")
            raise ConfigError(
                f"{where}: defaults.format.{name}: no kind of format has this option; allowed: "
                f"{join_choices(sorted(allowed))}; {hint}"
            )


def parse_dataset(name: str, value: object, defaults: Mapping[str, Any], where: str, base: Path) -> object:
    """Return a dataset's mapping with aliases resolved and its groups filled in from `defaults` and its kind."""
    check_name(name, f"{where}: datasets.{name}")
    if not isinstance(value, dict):
        return value
    at = f"{where}: datasets.{name}"
    raw = dict(cast("dict[str, Any]", value))
    _refuse_cache(raw, at)
    form: object = raw.get("format", {})
    if not isinstance(form, dict):
        return raw
    shared: dict[str, Any] = dict(defaults.get("format", {}))
    options = dict(cast("dict[str, Any]", form))
    for alias, option in (FORMAT_ALIASES | FIELD_ALIASES).items():
        if alias in options:
            if option in options:
                raise ConfigError(
                    f"{at}.format: {alias} is another name of {option}; only one is allowed; delete {alias}"
                )
            options[option] = options.pop(alias)
    written = str(options.get("kind", shared.get("kind", Auto.get_name())))
    options["kind"], registered = resolve_kind(written)
    if registered is not None:
        if "class" in options:
            raise ConfigError(
                f"{at}.format: {written} is registered for {registered}, which sets the class; delete class"
            )
        options["class"] = registered
    kind = KINDS.get(options["kind"])
    if kind is None:
        # Validation by the union of kinds lists the known ones.
        return raw | {"format": options}
    _move_reading_options(options, raw, at)
    options, read = kind.complete_options(options, base, f"{at}.format")
    _move_flat_options(options, raw, kind, read, at)
    for group, names in kind.FIELDS_NOT_READ.items():
        values: object = raw.get(group, {})
        for option in sorted(names & set(values)) if isinstance(values, dict) else ():
            allowed = sorted(set(OPTION_GROUPS[group].model_fields) - names)
            raise ConfigError(
                f"{at}.{group}.{option}: a {kind.get_name()} dataset does not read this option; of {group} it reads "
                f"{join_choices(allowed)}; delete it"
            )
    set_options = {group: frozenset(raw[group]) for group in read if isinstance(raw.get(group), dict)}
    _insert_group_defaults(raw, kind, read, options, defaults, at)
    _drop_test_share(raw, set_options, read, at)
    _refuse_idle(raw, kind, set_options, defaults, at)
    fields = kind.list_fields()
    raw["format"] = {**{k: v for k, v in shared.items() if k in fields}, **options}
    return raw


def _move_reading_options(options: dict[str, Any], raw: dict[str, Any], at: str) -> None:
    """Move what `format.table` says about reading a CSV file to `source`, where all of it stands."""
    table: object = options.get("table")
    source: object = raw.get("source")
    if not isinstance(table, dict) or not isinstance(source, dict):
        return
    table_options, into = dict(cast("dict[str, Any]", table)), dict(cast("dict[str, Any]", source))
    for name in [name for name in TABLE_READING_OPTIONS if name in table_options]:
        if name in into:
            raise ConfigError(f"{at}: format.table.{name} and source.{name} are the same option; keep source.{name}")
        into[name] = table_options.pop(name)
    raw["source"], options["table"] = into, table_options or None


def _insert_group_defaults(
    raw: dict[str, Any],
    kind: type[DatasetKind],
    read: frozenset[str],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    at: str,
) -> None:
    """Fill in a dataset's groups: its own value, else the one of `defaults`, else the kind's default."""
    of_kind = kind.select_group_defaults(options, raw)
    for group in OPTION_GROUPS:
        if group in raw and group not in read:
            raise ConfigError(
                f"{at}.{group}: a {kind.get_name()} dataset does not read this group; it reads "
                f"{join_choices(sorted(read))}; delete it"
            )
        if group in read and group in defaults and isinstance(raw.get(group, {}), dict):
            unread = kind.FIELDS_NOT_READ.get(group, frozenset())
            group_values = raw.get(group, {})
            if group == "splits" and "boundaries" in group_values:
                # A dataset with its own time boundaries inherits no shares.
                unread |= {"validation", "test"}
            raw[group] = {**{k: v for k, v in defaults[group].items() if k not in unread}, **group_values}
        if group in of_kind and isinstance(raw.get(group, {}), dict):
            raw[group] = {**of_kind[group], **raw.get(group, {})}


def _drop_test_share(
    raw: dict[str, Any], set_options: Mapping[str, frozenset[str]], read: frozenset[str], at: str
) -> None:
    """Set the test share of a dataset to 0 whose source has test rows of its own, and refuse to set both."""
    source: object = raw.get("source")
    options = cast("dict[str, Any]", source) if isinstance(source, dict) else {}
    option = next((name for name in ("test_urls", "test_split") if options.get(name)), None)
    splits: object = raw.get("splits", {})
    if option is None or "splits" not in read or not isinstance(splits, dict):
        return
    given = cast("dict[str, Any]", splits)
    if "test" in set_options.get("splits", ()) and given.get("test") != 0:
        raise ConfigError(
            f"{at}.splits.test: {given.get('test')} beside source.{option}; only one of the two can say which rows are "
            "test; delete one"
        )
    raw["splits"] = {**given, "test": 0}


def _refuse_idle(
    raw: dict[str, Any],
    kind: type[DatasetKind],
    set_options: Mapping[str, frozenset[str]],
    defaults: Mapping[str, Any],
    at: str,
) -> None:
    """Refuse an option of the dataset that its other options leave without effect; do not inherit such a one."""
    idle = _list_idle(raw, kind)
    for option in idle:
        group, name = option.group, option.name
        if name in set_options.get(group, ()):
            reasons = [entry for entry in idle if (entry.group, entry.name) == (group, name)]
            # The changes that give it an effect delete what would have none beside the new values.
            changed = dict(raw)
            for entry in reasons:
                changed[entry.other_group] = {**changed.get(entry.other_group, {}), entry.other_name: entry.other_value}
            values = [f"{entry.other_name}: {str(entry.other_value).lower()}" for entry in reasons]
            useless = [entry for entry in _list_idle(changed, kind) if entry.name in set_options.get(entry.group, ())]
            deletions = [f"delete {entry.group}.{entry.name}" for entry in useless]
            remedy = " and ".join([f"set {' and '.join(values)}", *deletions])
            raise ConfigError(
                f"{at}.{group}.{name}: {raw[group][name]} has no effect: "
                f"{', and '.join(entry.reason for entry in reasons)}; {remedy}, or delete {name}"
            )
        if name in defaults.get(group, {}):
            raw[group].pop(name, None)


def _list_idle(raw: Mapping[str, Any], kind: type[DatasetKind]) -> list[IdleOption]:
    """Return the options that others leave without effect; none if the dataset's own validation refuses its groups."""
    try:
        truncation = Truncation.model_validate(raw.get("truncation", {}) if "truncation" in kind.GROUPS else {})
        packing = Packing.model_validate(raw.get("packing", {}) if "packing" in kind.GROUPS else {})
        return [
            option for option in iterate_idle_options(kind.ROW_KIND, truncation, packing) if option.group in kind.GROUPS
        ]
    except (ValidationError, ConfigError):
        return []


def drop_validation_shares(raw: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    """Set the validation share to 0 for datasets with a number of validation sequences, unless they set their own."""
    mixture: object = raw.get("mixture")
    options = cast("dict[str, Any]", mixture) if isinstance(mixture, dict) else {}
    numbers: object = options.get("num_validation_sequences")
    for name in cast("dict[str, Any]", numbers) if isinstance(numbers, dict) else ():
        splits: object = written[name].get("splits", {}) if isinstance(written.get(name), dict) else None
        if isinstance(splits, dict) and not {"validation", "time_key"} & splits.keys():
            raw["datasets"][name]["splits"] = {**raw["datasets"][name].get("splits", {}), "validation": 0}


def _move_flat_options(
    options: dict[str, Any], raw: dict[str, Any], kind: type[DatasetKind], read: frozenset[str], at: str
) -> None:
    """Move options of a group out of `format`, where other tools place them."""
    own_fields = kind.list_fields()
    for field in [key for key in options if key not in own_fields]:
        homes = [group for group in OPTION_GROUPS if group in read and field in OPTION_GROUPS[group].model_fields]
        if not homes:
            continue
        group = homes[0]
        into: object = raw.setdefault(group, {})
        if not isinstance(into, dict):
            continue
        if field in into:
            raise ConfigError(
                f"{at}: {field} is set in format and in {group}; only one is allowed; delete it from format"
            )
        raw[group] = {**cast("dict[str, Any]", into), field: options.pop(field)}


# ── The whole recipe ──


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
    def _names_differ(self) -> "Recipe":
        """Refuse equal names, and names that are one folder on macOS, such as `Chats` and `chats`."""
        seen: dict[str, str] = {}
        for name in (*self.datasets, *(export.name for export in self.exports)):
            if (other := seen.setdefault(name.lower(), name)) != name:
                raise ValueError(f"{name} and {other}: names must differ in more than capitals; rename one of them")
        used_names = dict.fromkeys(self.datasets, "a dataset")
        for number, export in enumerate(self.exports):
            check_name(export.name, f"exports.{number}.name")
            if export.name in used_names:
                raise ValueError(
                    f"exports.{number}.name: {export.name!r} is already {used_names[export.name]}; names must differ, "
                    "because statistics are stored under them; rename the export"
                )
            used_names[export.name] = "another export"
        return self

    @model_validator(mode="after")
    def _groups_fit_together(self) -> "Recipe":
        """Let each group refuse what the others make impossible."""
        recipe = self._summarize()
        for name, dataset in self.datasets.items():
            # Shared prefixes say more of a kind that cannot have them than its objective does.
            dataset.packing.check_recipe(name, recipe)
            dataset.format.check_recipe(name, dataset, recipe)
            if isinstance(dataset.source, GeneratedSource):
                dataset.source.check_recipe(name, recipe)
        for group in (self.partitions, self.gates, self.mixture, *self.exports):
            group.check_recipe(recipe)
        return self

    def _summarize(self) -> RecipeSummary:
        return RecipeSummary(
            self.seq_len,
            {name: dataset.summarize() for name, dataset in self.datasets.items()},
            name=self.name,
            batch_sizes=self.mixture.batch_sizes,
            counted_validation=frozenset(self.mixture.num_validation_sequences or ()),
            row_fields=self.rollout_fields.per_row,
        )

    @property
    def objective(self) -> Objective:
        """What a trainer does with the examples of all datasets."""
        return next(iter(self.datasets.values())).format.get_objective()

    @property
    def has_targets(self) -> bool:
        """Whether examples have tokens that train."""
        return next(iter(self.datasets.values())).format.has_targets()

    @property
    def has_loss_weights(self) -> bool:
        """Whether shards have a weight per token: all shards do if any dataset has weights, or shares prefixes."""
        return self.shares_prefixes or any(dataset.loss.has_weights for dataset in self.datasets.values())

    @property
    def shares_prefixes(self) -> bool:
        """Whether the sequences of all datasets are trees of segments that examples share."""
        return next(iter(self.datasets.values())).packing.share_prefixes

    @property
    def stores_domains(self) -> bool:
        """Whether shards have the domain of each segment: all shards do if any dataset asks for it."""
        return any(dataset.packing.store_domains for dataset in self.datasets.values())

    @property
    def rollout_fields(self) -> RolloutFields:
        """The fields that token rows carry: all shards have those of every dataset."""
        return join_fields({name: dataset.format.get_rollout_fields() for name, dataset in self.datasets.items()})

    @property
    def token_types(self) -> dict[str, pa.DataType]:
        """The types of what shards have of each token beside id, label and position: its weight, and its fields."""
        return ({WEIGHT_COLUMN: pa.float32()} if self.has_loss_weights else {}) | dict(self.rollout_fields.per_token)

    @property
    def segment_multiple_of(self) -> int:
        """The number that segments of all datasets are padded to a multiple of."""
        return next(iter(self.datasets.values())).packing.segment_multiple_of

    @property
    def total_workers(self) -> int:
        """The number of worker processes to use on this machine."""
        # Only Linux says which cores this process may use.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.execution.workers or cores

    @property
    def tokenizer_choice(self) -> TokenizerChoice:
        """The value of `tokenizer`, normalized to a mapping."""
        return TokenizerChoice(name=self.tokenizer) if isinstance(self.tokenizer, str) else self.tokenizer

    def limit_of(self, dataset: str) -> int:
        """Return the maximum number of tokens of a dataset's examples; of a pair's, that of each side."""
        chosen = self.datasets[dataset]
        if limit := chosen.format.get_length_limit(chosen)[1]:
            return limit
        sides = chosen.format.count_sides()
        return self.seq_len if sides == 1 else limit_sides(self.seq_len, sides, self.segment_multiple_of)


def load_recipe(path: Path, overrides: Mapping[str, str] | None = None) -> Recipe:
    """Read and check a recipe file; `overrides` are options of records datasets, as `apply_overrides` takes them.

    Raises ConfigError with one line per problem: where, what, what is allowed, what to do.
    """
    path = path.resolve()
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise ConfigError(
            f"{shown}: this path is not UTF-8; a project's paths are recorded as text, so they must be UTF-8; rename "
            "the file or folder"
        ) from None
    configs = next((folder for folder in path.parents if folder.name == "configs"), path.parent)
    alike = [
        other
        for other in find_recipes(configs)
        if other.resolve() != path and other.stem.replace("-", "_").lower() == path.stem.replace("-", "_").lower()
    ]
    if alike:
        raise ConfigError(
            f"{path}: recipe {path.stem!r} is named like {alike[0]}; recipes must differ in more than '-', '_' and "
            "capitals; rename one of them"
        )
    values = _insert_table_contracts(config.read_yaml(path), path)
    overridden = apply_overrides(values, overrides) if overrides else values
    return parse_recipe(overridden, name=path.stem, where=str(path), base=project_folder(path))


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
        model = _find_contract_model(dataset)
        if model is None and isinstance(dataset, dict):
            model = _find_contract_model({"format": shared})
        if model is None:
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
        config.validate_options(model, loaded, str(file))
        form["table"] = loaded
    return filled


def _find_contract_model(dataset: Any) -> type[Config] | None:
    """Return the options of a contract that the kind of a dataset's mapping may have; None if there are none."""
    kind = _find_kind(dataset)
    return None if kind is None else kind.get_contract_model()


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
    """Return the recipe files of a configs folder: `<name>.yaml` in it or one level below, in no hidden folder.

    Kubernetes keeps the files of a ConfigMap in hidden folders too, and editors keep copies in theirs.
    """
    paths = (*configs.glob("*.yaml"), *configs.glob("[!.]*/*.yaml"))
    return sorted((path for path in paths if not path.name.endswith(TABLE_SUFFIX)), key=lambda path: path.stem)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe file, for editors; `defaults` takes the groups of a dataset."""
    schema = Recipe.model_json_schema(schema_generator=config.DescribedJsonSchema)
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
    tokenizer: Any = raw.get("tokenizer")
    written: dict[str, Any] = (
        {"name": tokenizer} if isinstance(tokenizer, str) else tokenizer if isinstance(tokenizer, dict) else {}
    )
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
