"""Completes a recipe's mapping: defaults, aliases, options of groups that are written under `format`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from rowmill.conversation.truncation import Truncation
from rowmill.core import config
from rowmill.core.config import describe_type
from rowmill.core.errors import ConfigError, join_choices, suggest_name
from rowmill.core.storage import check_name
from rowmill.formats import KINDS, Auto, resolve_kind
from rowmill.formats.kind import OPTION_GROUPS, DatasetKind, IdleOption, iterate_idle_options
from rowmill.packing.options import Packing

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
        else:
            _check_default_format(cast("dict[str, Any]", values), where)


def _check_default_format(values: Mapping[str, Any], where: str) -> None:
    """Refuse a key that no kind of format has: every dataset would silently ignore it."""
    known = {"kind", *(name for kind in KINDS.values() for name in kind.list_fields())}
    for name in values:
        if name in known:
            continue
        home = next((group for group, model in OPTION_GROUPS.items() if name in model.model_fields), None)
        guess = suggest_name(name, known)
        hint = f"write it under defaults.{home}" if home else f"did you mean {guess}?" if guess else "delete it"
        raise ConfigError(
            f"{where}: defaults.format.{name}: no kind of format has this option; allowed: "
            f"{join_choices(sorted(known))}; {hint}"
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
    options = _resolve_aliases(dict(cast("dict[str, Any]", form)), FORMAT_ALIASES | FIELD_ALIASES, f"{at}.format")
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
    _refuse_unread(raw, kind, at)
    own = {group: frozenset(raw[group]) for group in read if isinstance(raw.get(group), dict)}
    _insert_group_defaults(raw, kind, read, options, defaults, at)
    _refuse_idle(raw, kind, own, defaults, at)
    known = kind.list_fields()
    raw["format"] = {**{k: v for k, v in shared.items() if k in known}, **options}
    return raw


def _move_reading_options(options: dict[str, Any], raw: dict[str, Any], at: str) -> None:
    """Move what `format.table` says about reading a CSV file to `source`, where all of it stands."""
    table: object = options.get("table")
    source: object = raw.get("source")
    if not isinstance(table, dict) or not isinstance(source, dict):
        return
    own, into = dict(cast("dict[str, Any]", table)), dict(cast("dict[str, Any]", source))
    for name in [name for name in TABLE_READING_OPTIONS if name in own]:
        if name in into:
            raise ConfigError(f"{at}: format.table.{name} and source.{name} are the same option; keep source.{name}")
        into[name] = own.pop(name)
    raw["source"], options["table"] = into, own or None


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
            own = raw.get(group, {})
            if group == "splits" and "boundaries" in own:
                # A dataset with its own time boundaries inherits no shares.
                unread |= {"validation", "test"}
            raw[group] = {**{k: v for k, v in defaults[group].items() if k not in unread}, **own}
        if group in of_kind and isinstance(raw.get(group, {}), dict):
            raw[group] = {**of_kind[group], **raw.get(group, {})}


def _refuse_unread(raw: Mapping[str, Any], kind: type[DatasetKind], at: str) -> None:
    """Refuse an option that the dataset's kind would ignore."""
    for group, names in kind.FIELDS_NOT_READ.items():
        given: object = raw.get(group, {})
        for name in sorted(names & set(given)) if isinstance(given, dict) else ():
            allowed = sorted(set(OPTION_GROUPS[group].model_fields) - names)
            raise ConfigError(
                f"{at}.{group}.{name}: a {kind.get_name()} dataset does not read this option; of {group} it reads "
                f"{join_choices(allowed)}; delete it"
            )


def _refuse_idle(
    raw: dict[str, Any],
    kind: type[DatasetKind],
    own: Mapping[str, frozenset[str]],
    defaults: Mapping[str, Any],
    at: str,
) -> None:
    """Refuse an option of the dataset that its other options leave without effect; do not inherit such a one."""
    idle = _list_idle(raw, kind)
    for option in idle:
        group, name = option.group, option.name
        if name in own.get(group, ()):
            reasons = [one for one in idle if (one.group, one.name) == (group, name)]
            remedy = _suggest_other_values(reasons, raw, kind, own)
            raise ConfigError(
                f"{at}.{group}.{name}: {raw[group][name]} has no effect: "
                f"{', and '.join(one.reason for one in reasons)}; {remedy}, or delete {name}"
            )
        if name in defaults.get(group, {}):
            raw[group].pop(name, None)


def _list_idle(raw: Mapping[str, Any], kind: type[DatasetKind]) -> list[IdleOption]:
    """Return the options that others leave without effect; none if the dataset's own validation refuses its groups."""
    try:
        truncation = Truncation.model_validate(raw.get("truncation", {}) if "truncation" in kind.GROUPS else {})
        packing = Packing.model_validate(raw.get("packing", {}) if "packing" in kind.GROUPS else {})
        return [one for one in iterate_idle_options(kind.ROW_KIND, truncation, packing) if one.group in kind.GROUPS]
    except (ValidationError, ConfigError):
        return []


def _suggest_other_values(
    reasons: Sequence[IdleOption],
    raw: Mapping[str, Any],
    kind: type[DatasetKind],
    own: Mapping[str, frozenset[str]],
) -> str:
    """Return the changes that give an option an effect; they delete what would have none beside the new values."""
    changed = dict(raw)
    for one in reasons:
        changed[one.other_group] = {**changed.get(one.other_group, {}), one.other_name: one.other_value}
    values = [f"{one.other_name}: {str(one.other_value).lower()}" for one in reasons]
    idle = [f"{one.group}.{one.name}" for one in _list_idle(changed, kind) if one.name in own.get(one.group, ())]
    return " and ".join([f"set {' and '.join(values)}", *(f"delete {path}" for path in idle)])


def drop_validation_shares(raw: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    """Set the validation share to 0 for datasets with a number of validation sequences, unless they set their own."""
    mixture: object = raw.get("mixture")
    given = cast("dict[str, Any]", mixture) if isinstance(mixture, dict) else {}
    numbers: object = given.get("num_validation_sequences")
    for name in cast("dict[str, Any]", numbers) if isinstance(numbers, dict) else ():
        splits: object = written[name].get("splits", {}) if isinstance(written.get(name), dict) else None
        if isinstance(splits, dict) and not {"validation", "time_key"} & splits.keys():
            raw["datasets"][name]["splits"] = {**raw["datasets"][name].get("splits", {}), "validation": 0}


def _resolve_aliases(options: dict[str, Any], aliases: Mapping[str, str], at: str) -> dict[str, Any]:
    for alias, name in aliases.items():
        if alias in options:
            if name in options:
                raise ConfigError(f"{at}: {alias} is another name of {name}; only one is allowed; delete {alias}")
            options[name] = options.pop(alias)
    return options


def _move_flat_options(
    options: dict[str, Any], raw: dict[str, Any], kind: type[DatasetKind], read: frozenset[str], at: str
) -> None:
    """Move options of a group out of `format`, where other tools place them."""
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
            raise ConfigError(
                f"{at}: {field} is set in format and in {group}; only one is allowed; delete it from format"
            )
        raw[group] = {**cast("dict[str, Any]", into), field: options.pop(field)}
