"""Options: their base class, documentation and places in a recipe, and packages that they need.

Models are frozen and closed: an unknown key is an error that names where it belongs, or the nearest known one, because
a mistyped key that is silently ignored has ruined more training runs than any bug.

    datasets.chats.format.group_training_examples_by        written here: an unknown key
    datasets.*.format.data.group_training_examples_by       declared here, of kind records

The docstring under each field says what it means, and is read when a page or a JSON Schema is written. pydantic would
read it itself (`use_attribute_docstrings`), in every process that imports a model: 0.2 s of each command and worker.

YAML is read by PyYAML's safe loader; errors name their line:

    a key twice in a mapping      refused: PyYAML silently keeps the last one
    `<<: *name`                   merged, as YAML 1.1 describes; a mapping's own keys win
    aliases                       copied out; one inside its own anchor is refused
    a value that Python refuses   an error with its line: the 31st of February, an integer of 5,000 digits
"""

import ast
import inspect
import math
import os
import re
import stat
import textwrap
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin

import orjson
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from rowmill.core.errors import ConfigError, find_related_names, hint_at_name, join_choices, suggest_name

# ── Finds where an option belongs that a recipe writes one level too high, too low, or under another kin ──


ANY_NAME = "*"
"""The step of a place for a name that users choose, such as a dataset's, or an element's number."""

MAX_PLACES = 3
"""A name that stands in more places at the same distance is too common to say where it belongs."""


@dataclass(frozen=True, slots=True)
class OptionPlace:
    """A group that has an option: its path, and the kinds that groups on the way must be of, by path length."""

    name: str
    group: tuple[str, ...]
    kinds: tuple[tuple[int, str], ...] = ()


def iterate_option_places(
    model: type[BaseModel], group: tuple[str, ...] = (), kinds: tuple[tuple[int, str], ...] = ()
) -> Iterator[OptionPlace]:
    """Yield every option of a model and of the models inside it; fields that a user cannot write are left out."""
    for name, field in model.model_fields.items():
        if name in getattr(model, "FILLED_IN", ()):
            continue
        yield OptionPlace(name, group, kinds)
        inner = list(_find_inner_models(field.annotation))
        for inner_model, wildcards in inner:
            path = (*group, name, *[ANY_NAME] * wildcards)
            tag_field = inner_model.model_fields.get("kind") if len(inner) > 1 else None
            tags = () if tag_field is None else get_args(tag_field.annotation)
            yield from iterate_option_places(inner_model, path, (*kinds, (len(path), str(tags[0]))) if tags else kinds)


def _find_inner_models(annotation: Any, wildcards: int = 0) -> Iterator[tuple[type[BaseModel], int]]:
    """Yield the models of an annotation, and how many containers each is in."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, wildcards
        return
    deeper = wildcards + (get_origin(annotation) in (dict, list, tuple))
    for inner in get_args(annotation):
        yield from _find_inner_models(inner, deeper)


def explain_place(
    root: type[BaseModel], name: str, written: Sequence[str], kinds: Mapping[tuple[str, ...], str]
) -> str | None:
    """Say where an unknown key belongs; None if no group has it, or too many do.

    `written` is the path of the group that holds the key, `kinds` the kinds of the groups on the way to it. Of the
    groups that have an option of the name, the likeliest are named: of the written kinds, on the same way, near.
    """
    here = tuple(written)
    likeliest: tuple[bool, bool, int] | None = None
    kinds_by_group: dict[tuple[str, ...], list[str]] = {}
    for place in iterate_option_places(root):
        if place.name != name:
            continue
        # Names that users chose are those on the way to `here`, as far as both ways are the same.
        filled: list[str] = []
        for i, step in enumerate(place.group):
            is_shared = tuple(filled) == here[:i] and i < len(here)
            filled.append(here[i] if step == ANY_NAME and is_shared else step)
        group, shared = tuple(filled), len(os.path.commonprefix([tuple(filled), here]))
        other_kinds = [kind for length, kind in place.kinds if kinds.get(group[:length], kind) != kind]
        has_to_guess = ANY_NAME in group and shared < len(here)
        if has_to_guess or (place.group == here and not other_kinds):
            continue
        is_beside = shared < min(len(group), len(here))
        rank = bool(other_kinds), is_beside, len(group) + len(here) - 2 * shared
        if likeliest is None or rank < likeliest:
            likeliest, kinds_by_group = rank, {}
        if rank == likeliest:
            missing = [kind for length, kind in place.kinds if group[:length] not in kinds]
            kinds_by_group.setdefault(group, []).extend([*other_kinds, *missing][-1:])
    if not 1 <= len(kinds_by_group) <= MAX_PLACES:
        return None
    if list(kinds_by_group) == [here]:
        return f"{name} is an option of kind {join_choices(kinds_by_group[here])}; delete it, or choose that kind"
    described: list[str] = []
    for group, group_kinds in kinds_by_group.items():
        path = ".".join("NAME" if step == ANY_NAME else step for step in group)
        where = f"under {path}" if path else "at the top level of the recipe"
        of_kinds = f" (kind {join_choices(dict.fromkeys(group_kinds))})" if group_kinds else ""
        described.append(f"{where}{of_kinds}")
    return f"{name} belongs {join_choices(described)}; move it there"


# ── Parses YAML text into plain values ──


_MERGE_TAG = "tag:yaml.org,2002:merge"
_BOOLEAN_TAG = "tag:yaml.org,2002:bool"


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text: dictionaries, lists and scalars, none of them shared.

    Raises ConfigError for anything that the text may not hold; the message names the line, except for deep nesting.
    """
    try:
        return _copy_value(yaml.load(text, Loader=_UniqueKeyLoader))  # noqa: S506  (a SafeLoader subclass)
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}; correct the line named") from error
    except RecursionError as error:
        raise ConfigError(
            "lists and mappings are nested in hundreds of levels; expected the ten or so of a recipe; correct the "
            "brackets or the indentation"
        ) from error


def _copy_value(value: Any) -> Any:
    """Give every place of an alias its own copy, so that changing one place changes no other."""
    if isinstance(value, dict):
        return {key: _copy_value(one) for key, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [_copy_value(one) for one in cast("list[Any]", value)]
    return value


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, which refuses a key that is given twice, and names the line of each error."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value; an error that Python raises for it gets the line."""
        try:
            return super().construct_object(node, deep=deep)
        except ConfigError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = node.tag.rpartition(":")[2]
            text = str(node.value) if isinstance(node, yaml.ScalarNode) else node.tag
            shortened = repr(text if len(text) <= 60 else f"{text[:57]}...")
            raise ConfigError(
                f"{_describe_line(node)}: {shortened} cannot be read as YAML's {kind} ({error}); write it in quotes if "
                "it is a text"
            ) from error

    def construct_unique_mapping(self, node: yaml.MappingNode) -> dict[Any, Any]:
        """Construct a mapping whose keys are given once, with the mappings merged that `<<` names."""
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == _BOOLEAN_TAG:
                # A key is a name: `on:` is the option of that name, not the truth.
                key_node.tag = yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG
            key: object = "<<" if key_node.tag == _MERGE_TAG else self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                what = "list" if isinstance(key_node, yaml.SequenceNode) else "mapping"
                raise ConfigError(
                    f"{_describe_line(key_node)}: a {what} is a key; keys are texts or numbers; put quotes around it "
                    "if it is a text"
                )
            if key in seen:
                raise ConfigError(
                    f"{_describe_line(key_node)}: key {key!r} is given twice in one mapping; a key may occur once; "
                    "delete one of the two"
                )
            seen.add(key)
        # Merged pairs are put before the mapping's own, so that a dictionary keeps its own.
        self.flatten_mapping(node)
        return dict(self.construct_pairs(node, deep=True))


_UniqueKeyLoader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _UniqueKeyLoader.construct_unique_mapping
)


def _describe_line(where: yaml.Node) -> str:
    return f"line {where.start_mark.line + 1}"


# ── The base of every configuration model, and the validation of a YAML mapping against it ──


class Config(BaseModel):
    """A group of options: frozen, closed, strict about types, documented under each field (`config.py`)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        # Strict: `max_length: true` is not an integer and `tags: chat` is not a list; YAML makes both easy to write.
        strict=True,
        validate_default=True,
    )

    MEANT_BY: ClassVar[tuple[str, ...]] = ()
    """For a kind: what users of other tools write for it, such as a trainer's name; only for hints."""


ConfigT = TypeVar("ConfigT", bound=Config)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one YAML file whose top level is a mapping; every failure names the file and the line."""
    try:
        # A pipe or a device may have no end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path}: is not a regular file; a recipe is a file of YAML; name one")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 at byte {error.start}; a recipe is UTF-8 text; save it as such"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name an existing recipe file") from error
    try:
        loaded = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{path}: the top level is {describe_type(loaded)}, expected a mapping with tokenizer, seq_len and "
            "datasets; see docs/reference.md"
        )
    return loaded


def read_value(text: str, where: str) -> Any:
    """Read one value as YAML writes it: `3`, `null`, `auto`, `[a, b]`."""
    try:
        return parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(
            f"{where}: {_shorten_repr(text)} cannot be read as a YAML value ({error}); quote it"
        ) from error


def describe_type(value: object) -> str:
    """Name a value's type the way YAML and JSON users do."""
    names: dict[type, str] = {
        type(None): "null", bool: "a boolean", int: "an integer", float: "a number",
        str: "a string", list: "a list", dict: "a mapping",
    }  # fmt: skip
    return names.get(type(value), type(value).__name__)


def validate_options(model: type[ConfigT], values: Mapping[str, Any], where: str) -> ConfigT:
    """Validate `values` against `model`; every problem becomes one line `where.path: what; allowed; remedy`.

    Raises ConfigError with one line per problem: unknown keys first, because a mistyped key explains why its option is
    missing; then in the order of the fields.
    """
    problems = [f"{where}: {path}: {text}" if path else f"{where}: {text}" for path, text in _find_non_finite(values)]
    if problems:
        raise ConfigError("\n".join(problems))
    # Validated as JSON, so that strictness fits YAML: a list may fill a tuple, `"3"` is not an integer.
    try:
        return model.model_validate_json(orjson.dumps(values, option=orjson.OPT_NON_STR_KEYS))
    except TypeError as error:
        raise ConfigError(f"{where}: {error}; a recipe holds only JSON types; write it as a string") from None
    except ValidationError as error:
        reported = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    reasons: dict[tuple[str, ...], list[str]] = {}
    mismatched: set[tuple[str, ...]] = set()
    for one in reported:
        steps, models, kinds = _follow_location(model, one["loc"])
        reason = _explain_unknown_key(model, steps, models, kinds) if one["type"] == "extra_forbidden" else None
        reasons.setdefault(tuple(steps), []).append(reason or _explain_problem(one, models))
        if one["type"] in _EXPECTED_TYPES:
            mismatched.add(tuple(steps))
    for path, found in reasons.items():
        # An error inside a value shows which of its types was meant; its mismatch with the others is not reported.
        if path in mismatched and any(other[: len(path)] == path and other != path for other in reasons):
            continue
        # A value of several types (`true` or a number) has one error per type.
        problems.append(": ".join(part for part in (where, ".".join(path), "; or ".join(dict.fromkeys(found))) if part))
    raise ConfigError("\n".join(problems))


def _find_non_finite(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and problem of the numbers that JSON cannot write, and would turn into null."""
    if isinstance(value, float) and not math.isfinite(value):
        written = ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        yield path, f"{written} is not a finite number; an option takes finite numbers; write one"
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[object, object]", value).items():
            yield from _find_non_finite(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(cast("Sequence[object]", value)):
            yield from _find_non_finite(inner, f"{path}.{number}" if path else str(number))


_EXPECTED_TYPES = {
    "tuple_type": "a list", "list_type": "a list", "dict_type": "a mapping", "model_type": "a mapping",
    "model_attributes_type": "a mapping", "int_type": "an integer", "float_type": "a number",
    "bool_type": "true or false", "string_type": "a string",
}  # fmt: skip


def _explain_unknown_key(
    root: type[BaseModel], steps: Sequence[str], models: set[type[BaseModel]], kinds: Mapping[tuple[str, ...], str]
) -> str:
    """Name the place of a key that belongs elsewhere, or the known key that is nearest to a mistyped one."""
    *written, key = steps
    place = explain_place(root, key, written, kinds)
    if place is not None:
        return f"unknown key here; {place}"
    # The reader of a file fills some fields in, and users do not write them; some keys are consumed before validation.
    filled_in = {name for model in models for name in getattr(model, "FILLED_IN", ())}
    used_up = {name for model in models for name in getattr(model, "USED_UP", ())}
    allowed = {name for model in models for name in model.model_fields} - filled_in | used_up
    hint = hint_at_name(key, allowed, "delete it")
    return f"unknown key; allowed here: {join_choices(sorted(allowed))}; {hint}" if allowed else f"unknown key; {hint}"


def _explain_problem(one: Any, models: set[type[BaseModel]]) -> str:
    context: Mapping[str, Any] = one.get("ctx", {})
    got = one["input"]
    match one["type"]:
        case "missing":
            return "is missing and has no default; add it"
        case "literal_error" | "enum":
            expected = str(context["expected"])
            name = got if isinstance(got, str) else ""
            hint = hint_at_name(name, re.findall("'([^']*)'", expected), "choose one of them")
            return f"must be {expected.replace(chr(39), '')}; got {got!r}; {hint}"
        case "union_tag_invalid":
            tags = str(context["expected_tags"]).replace("'", "")
            guess = _suggest_kind(str(context["tag"]), tags.split(", "), models)
            return f"{context['tag']!r} is not a kind; choose {tags}{f'; did you mean {guess}?' if guess else ''}"
        case "union_tag_not_found":
            return f"has no kind; choose {join_choices(_list_tags(models))} and write it as kind: …"
        case "value_error":
            return str(context["error"])
        case str(kind) if kind in _EXPECTED_TYPES:
            wanted = _EXPECTED_TYPES[kind]
            remedy = _suggest_value(wanted, str(one["loc"][-1]), got, models)
            return (
                f"must be {wanted}; got {_shorten_repr(got)}, which is {describe_type(got)}; write {remedy or wanted}"
            )
        case _:
            message = str(one["msg"])
            return f"{message[0].lower()}{message[1:]}; got {_shorten_repr(got)} ({describe_type(got)}); correct it"


def _suggest_value(wanted: str, group: str, got: object, models: set[type[BaseModel]]) -> str | None:
    """Return what was probably meant by a value of another type, such as the option that a group is named after."""
    tags = _list_tags(models)
    if wanted == "a list" and isinstance(got, str):
        return f"a list: [{{kind: {got}}}]" if got in tags else f"a list of it: [{got}]"
    if wanted == "a list" and isinstance(got, Mapping):
        # As YAML on one line, as far as a hint needs it.
        pairs = [f"{key}: {inner}" for key, inner in got.items() if isinstance(inner, str | int | float)]
        return f"a list of it: [{{{', '.join([*pairs[:2], *['…'] * (len(got) > len(pairs[:2]))])}}}]"
    options = [(name, field) for model in models for name, field in model.model_fields.items()]
    if wanted == "a mapping" and isinstance(got, int | float) and not isinstance(got, bool):
        numeric = sorted(name for name, field in options if float in get_args(field.annotation))
        return join_choices(f"{{{name}: {got}}}" for name in numeric) if 1 <= len(numeric) <= 2 else None
    if wanted == "a mapping" and isinstance(got, str):
        named = {name for name, _ in options if name.endswith(f"_{group}")}
        return f"{{kind: {got}}}" if got in tags else f"{{{named.pop()}: {got}}}" if len(named) == 1 else None
    return None


def _suggest_kind(tag: str, tags: Sequence[str], models: set[type[BaseModel]]) -> str | None:
    """Return the kinds that were probably meant, also by a value of their options, such as a shape of records."""
    kinds = {kind: model for model in models for kind in _list_tags({model})}
    by_value = {
        kind: f"{name}: {tag} of kind {kind}"
        for kind, model in sorted(kinds.items())
        for name, field in model.model_fields.items()
        if name != "kind" and tag in get_args(field.annotation)
    }
    meant_by = {kind: model.MEANT_BY for kind, model in sorted(kinds.items()) if issubclass(model, Config)}
    named = [kind for kind in find_related_names(tag, tags, meant_by) if kind not in by_value]
    return join_choices([*named, *by_value.values()]) or suggest_name(tag, tags)


def _shorten_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_UNION_BRANCH = re.compile(
    r"bool|int|float|str|none|constrained-\w+|(?:list|dict|tuple|set|literal|nullable|union|function-\w+|lax-or-strict)\[.*\]"
)
"""The step that pydantic adds to a location for a branch of a union of plain types; a user did not write it."""


def _follow_location(
    root: type[BaseModel], path: tuple[int | str, ...]
) -> tuple[list[str], set[type[BaseModel]], dict[tuple[str, ...], str]]:
    """Follow an error's location through the models.

    Returns the steps as a user would write them (without the tags of unions), the innermost models reached: several if
    the value may be of several kinds, and the kinds of the groups on the way.
    """
    current: set[type[BaseModel]] = {root}
    steps: list[str] = []
    kinds: dict[tuple[str, ...], str] = {}
    for step in path:
        # pydantic names a branch of a union of models by its tag or by its class.
        tagged = {model for model in current if str(step) in _list_tags({model}) or model.__name__ == step}
        if tagged:
            current = tagged
            kinds[tuple(steps)] = str(step)
            continue
        if isinstance(step, str) and _UNION_BRANCH.fullmatch(step):
            continue
        steps.append(str(step))
        fields = [model.model_fields[str(step)] for model in current if str(step) in model.model_fields]
        following = {found for field in fields for found, _ in _find_inner_models(field.annotation)}
        current = following or current
    return steps, current, kinds


def _list_tags(models: set[type[BaseModel]]) -> list[str]:
    """Return the kinds of some models."""
    kinds = (model.model_fields.get("kind") for model in models)
    return sorted({str(tag) for kind in kinds if kind is not None for tag in get_args(kind.annotation)})


# ── What the options of a model mean: the docstring under each field, read when a page or a JSON Schema  ──


def describe_field(model: type[Config], name: str) -> str:
    """Return what a field means; empty if it has neither a description nor a docstring."""
    return model.model_fields[name].description or _read_field_docstrings(model).get(name, "")


class DescribedJsonSchema(GenerateJsonSchema):
    """A JSON Schema whose properties are described, for `Config.model_json_schema(schema_generator=…)`."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        """Add the descriptions of a model's fields."""
        described = super().model_schema(schema)
        model: type[Any] = schema["cls"]
        if issubclass(model, Config):
            for name, field in model.model_fields.items():
                text, written = describe_field(model, name), described["properties"].get(field.alias or name)
                if text and written is not None:
                    written["description"] = text
        return described


@cache
def _read_field_docstrings(model: type[Config]) -> dict[str, str]:
    """Return the docstrings of a model's own and inherited fields."""
    found: dict[str, str] = {}
    for base in reversed(model.__bases__):
        found |= _read_field_docstrings(base) if issubclass(base, Config) else {}
    try:
        source = textwrap.dedent(inspect.getsource(model))
    except (OSError, TypeError):
        # A model made by `create_model` has no source; its fields have descriptions.
        return found
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.ClassDef)
    for field, behind in pairwise(tree.body):
        match field, behind:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
            case _:
                pass
    return found
