"""The kind `python`: a user's class turns records into canonical rows, or into tokens that are validated.

    @register_format("tickets")
    class Tickets(RowFormat):
        def rows(self, record): ...           a Row, several, or None to skip the record
        def build(self, record, ctx): ...     {"ids": […], "loss_mask": […], "domain": …}, or None

    record ──rows──► Row(s) ──canonicalisation──► canonical rows
           └─build─► ids, loss_mask, domain ──checked──► BuiltExample

A class defines one of the two. An exception that it raises rejects that record and never stops a build. The class's
source file is part of the identity of its output; other modules that it imports are not: keep the code that decides
rows in one file, or increase a constant in it when they change.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from rowmill.conversation.options import Template
from rowmill.core.config import describe_type
from rowmill.core.errors import ConfigError, require_code_permission
from rowmill.core.json import Json
from rowmill.kinds.base import BuildContext, DatasetKind, DatasetOptions, DatasetReader, TokenBuilder
from rowmill.kinds.chat import Chat
from rowmill.kinds.reading.canonicalization import Canonicalizer, reject_format_error, remove_nulls
from rowmill.kinds.shared.messages import Tools, is_mapping
from rowmill.kinds.shared.training_flags import KNOWN_FLAGS, FlagMeaning
from rowmill.kinds.supervised import Supervised, refuse_joined_separator
from rowmill.kinds.text import Text
from rowmill.kinds.tokens import to_flat_array
from rowmill.schema.rows import Rejected, Row, RowKind


class RowFormat:
    """Derive from this class and define `rows` or `build`; the recipe's `options` are the constructor's arguments."""

    def rows(self, record: Mapping[str, Json]) -> Row | Sequence[Row] | None:
        """Return the record's rows: conversations, pairs or texts. None skips the record."""
        raise NotImplementedError

    def build(self, record: Mapping[str, Json], ctx: BuildContext[Any]) -> Mapping[str, Any] | None:
        """Return the record's example: `ids`, `loss_mask` of equal length, optionally `domain`. None skips the record.

        `loss_mask[i]` is true if token i itself is a target; the first token never is.
        """
        raise NotImplementedError


_LOADED_MODULES: dict[tuple[str, str], ModuleType] = {}


def get_format_method(cls: type[RowFormat]) -> Literal["rows", "build"]:
    """Return which of the two methods a class defines."""
    return "build" if cls.build is not RowFormat.build else "rows"


def find_format(path: str, base: Path, where: str) -> type[RowFormat]:
    """Return the class that `module:Name` names; modules of the project in `base` take precedence."""
    module_name, _, name = path.partition(":")
    file = find_source_file(path, base, where)
    # A module is loaded again if its source changed, since a server may run for days.
    key = (str(file), hashlib.sha256(file.read_bytes()).hexdigest())
    module = _LOADED_MODULES.get(key)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{where}: {file} is not Python source; expected a .py file; name another module")
        module = importlib.util.module_from_spec(spec)
        before = sys.modules.get(module_name)
        sys.modules[module_name] = module
        try:
            # It may import others of the project; behind the libraries, a file of the project hides none of them.
            sys.path.append(str(base))
            try:
                spec.loader.exec_module(module)
            finally:
                sys.path.remove(str(base))
        except Exception as error:
            if before is None:
                del sys.modules[module_name]
            else:
                sys.modules[module_name] = before
            raise ConfigError(
                f"{where}: module {module_name} cannot be loaded ({type(error).__name__}: {error}); correct {file}"
            ) from error
        _LOADED_MODULES[key] = module
    found: Any = module
    for step in name.split("."):
        found = getattr(found, step, None)
    if found is None:
        classes = [key for key, one in vars(module).items() if isinstance(one, type) and issubclass(one, RowFormat)]
        known = ", ".join(key for key in classes if key != "RowFormat") or "none"
        raise ConfigError(f"{where}: module {module_name} has no {name}; its formats are {known}; name one of them")
    problem = find_format_problem(found)
    if problem:
        raise ConfigError(f"{where}: {path}: {problem}")
    return found


def find_source_file(path: str, base: Path, where: str) -> Path:
    """Return the file of the module that `module:Name` names."""
    module_name, colon, name = path.partition(":")
    if not (colon and name and all(step.isidentifier() for step in module_name.split("."))):
        raise ConfigError(f"{where}: expected module:Name, such as my_formats:Tickets, got {path!r}")
    # Looking up an installed module imports its parent packages.
    require_code_permission(path, where)
    steps = module_name.split(".")
    for candidate in (base.joinpath(*steps).with_suffix(".py"), base.joinpath(*steps, "__init__.py")):
        if candidate.is_file():
            return candidate.resolve()
    loaded = sys.modules.get(module_name)
    if loaded is not None:
        origin = getattr(loaded, "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(module_name)
        except ImportError:
            spec = None
        origin = spec.origin if spec is not None and spec.has_location else None
    if origin is None:
        raise ConfigError(
            f"{where}: no module {module_name} in {base} or among the installed packages; expected a Python source "
            "file; put it next to configs/, or install its package"
        )
    return Path(origin).resolve()


def find_format_problem(cls: object) -> str:
    """Return why a value is not a valid format class; empty if it is."""
    if not (isinstance(cls, type) and issubclass(cls, RowFormat)):
        return "it is not a RowFormat; expected a class derived from rowmill.RowFormat; derive it"
    own = [name for name in ("rows", "build") if getattr(cls, name) is not getattr(RowFormat, name)]
    if len(own) == 1:
        return ""
    has = "both rows and build" if own else "neither rows nor build"
    return f"it defines {has}; exactly one of them is needed; define one"


# ── Rows and tokens of a class ──


@dataclass(frozen=True, slots=True)
class BuiltExample:
    """An example whose tokens its kind built: `ids` int32[T], `mask` bool[T]; the first token is never a target."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    domain: str | None


def check_built_example(made: Any, vocab_size: int) -> BuiltExample | Rejected:
    """Return a kind's output as an example, or the reject for what is wrong with it; a reject is returned as is."""
    if made is None or isinstance(made, Rejected):
        return made or Rejected("skipped_by_format")
    if not isinstance(made, Mapping) or "ids" not in made or "loss_mask" not in made:
        return Rejected("bad_example", f"build returned {type(made).__name__}, expected ids and loss_mask")
    ids, mask, domain = to_flat_array(made["ids"]), to_flat_array(made["loss_mask"]), made.get("domain")
    if ids is None or ids.dtype.kind not in "iu" or not len(ids):
        return Rejected("bad_example", "ids are no list of integers, or an empty one")
    if mask is None or len(mask) != len(ids):
        has = "not a flat list" if mask is None else f"{len(mask)} long"
        return Rejected("bad_example", f"loss_mask is {has}, ids are {len(ids)} long")
    if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        return Rejected("bad_example", "loss_mask holds other values than 0 and 1")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        return Rejected("bad_example", f"id {outside[0]} is unknown; ids are 0 to {vocab_size - 1}")
    if domain is not None and not isinstance(domain, str):
        return Rejected("bad_example", f"domain is {describe_type(domain)}, expected text")
    trained = mask.astype(np.bool_)
    trained[0] = False
    return BuiltExample(ids.astype(np.int32), trained, domain)


def open_row_format(class_name: str, arguments: Mapping[str, Any], base: Path) -> RowFormat:
    """Return an instance of a user's format class, with the recipe's arguments."""
    where = "format.class"
    cls = find_format(class_name, base, where)
    try:
        return cls(**arguments)
    except Exception as error:
        raise ConfigError(
            f"{where}: {class_name} cannot be instantiated with options {arguments} "
            f"({type(error).__name__}: {error}); expected the constructor's arguments; correct format.options"
        ) from error


class CustomDatasetReader:
    """Turns records into canonical rows by a user's format class."""

    unread_preferences: frozenset[str] = frozenset()
    """Empty, because the columns that the class reads are unknown."""
    read_elsewhere: None = None

    def __init__(self, row_format: RowFormat, chat: Chat, options: DatasetOptions) -> None:
        """Prepare a reader per row kind, so that the class may return calls, parts and flags in any known shape."""
        self._format = row_format
        self._builds = get_format_method(type(row_format)) == "build"
        tools, template = Tools(tools_fields=["tools"]), Template(chat_template_kwargs="kwargs")
        self._readers: dict[str, Canonicalizer] = {
            kind: Canonicalizer(
                options.model_copy(update={"format": form, "tools": tools, "template": template}),
                group_key=options.splits.group_key,
                order_key=options.splits.time_key,
            )
            for kind, form in (
                ("conversation", chat),
                ("pair", Supervised(domain_key=chat.domain_key)),
                ("text", Text(domain_key=chat.domain_key)),
            )
        }

    def restore_numbers(self, record: dict[str, Json], raw: bytes) -> dict[str, Json]:
        """Return the record: the class gets numbers as JSON has them."""
        return record

    def read_plain(self, record: Mapping[str, Json]) -> None:
        """Return nothing: the class reads every record."""

    def read(self, record: Json, *, arrow: bool) -> list[Row | Rejected]:
        """Return a record's outcomes: at least one row or reject."""
        if not is_mapping(record):
            return [Rejected("not_an_object", f"the record is {describe_type(record)}, expected a mapping")]
        if arrow:
            record = remove_nulls(record)
        if self._builds:
            # Tokens are built in a later stage, which has the tokenizer; the row keeps the original record.
            return [self._add_keys(Row("record", record=record), record)]
        try:
            made: Any = self._format.rows(record)
        except Exception as error:  # noqa: BLE001  (any exception of a user's class rejects its record)
            return [reject_format_error(error)]
        made_rows: list[Any] = [] if made is None else list(made) if isinstance(made, (list, tuple)) else [made]
        outcomes: list[Row | Rejected] = []
        for row in made_rows:
            if not isinstance(row, Row) or row.kind not in self._readers:
                what = f"a Row of kind {row.kind}" if isinstance(row, Row) else type(row).__name__
                why = f"rows returned {what}, expected a Row: conversation, pair or text"
                outcomes.append(Rejected("format_error", why))
                continue
            given: dict[str, Json] = {"text": row.text}
            if row.kind == "conversation":
                kwargs = row.template_kwargs or None
                given = {"messages": list(row.messages), "tools": row.tools and list(row.tools), "kwargs": kwargs}
            elif row.kind == "pair":
                given = {"prompt": row.text, "response": row.output}
            read = self._readers[row.kind].row(given)
            outcomes.append(read if isinstance(read, Rejected) else self._add_keys(read, record, row))
        return outcomes or [Rejected("skipped_by_format")]

    def _add_keys(self, row: Row, record: Mapping[str, Json], given: Row | None = None) -> Row | Rejected:
        """Add group, order and domain: those that the class set, else the record's."""
        placed = self._readers["conversation"].add_keys(row, record)
        if isinstance(placed, Rejected):
            return placed
        placed = replace(placed, report=replace(placed.report, schema="python"))
        if given is None:
            return placed
        return replace(
            placed,
            group_key=given.group_key or placed.group_key,
            order_key=given.order_key or placed.order_key,
            domain=given.domain or placed.domain,
        )


class Python(DatasetKind):
    """A class of yours turns each record into rows, or into tokens with their mask."""

    model_config = ConfigDict(populate_by_name=True)

    ROW_KIND: ClassVar[RowKind] = "conversation"
    # The class itself says what a row's tools and its template's arguments are.
    FIELDS_NOT_READ: ClassVar[Mapping[str, frozenset[str]]] = {
        "tools": frozenset({"tools_fields"}),
        "template": frozenset({"chat_template_kwargs"}),
    }
    NEEDS_TEMPLATE: ClassVar[bool] = False
    FILLED_IN: ClassVar[tuple[str, ...]] = ("source_digest",)
    ALIASES: ClassVar[Mapping[str, str]] = {"enforce_eos": "add_eos", "class": "class_name"}

    kind: Literal["python"] = "python"
    """A class of your own; its registered name is an alias."""
    class_name: str = Field(alias="class")
    """`module:Name` of a RowFormat, in a module of the project's folder (that of `configs/`) or an installed one."""
    options: dict[str, Any] = Field(default={})
    """Arguments of the class's constructor."""
    source_digest: str = ""
    """Digest of the class's source file, computed when the recipe is loaded: changed code makes other rows."""
    role_map: dict[str, str] = Field(default={})
    """Role of the class's messages → role of the template; adds to the built-in names (human, gpt, observation, …)."""
    unknown_roles: Literal["warn", "reject"] = "warn"
    """How to treat a role that no template is known to print: keep and list it, or reject the row."""
    assistant_roles: list[str] = Field(default=["assistant"], min_length=1)
    """Roles of the model's messages."""
    message_flags: list[str] | dict[str, FlagMeaning] = Field(default=[*KNOWN_FLAGS])
    """Keys of a message or of a part of its content that decide whether it is trained (true, false), or with which
    weight (a number; 0: not). A mapping adds to these: `{trainable: train, masked: mask, skip: ignore}`, where true
    trains, or masks, or says nothing."""
    domain_key: str | None = None
    """Column that names the row's domain, if the class does not set it; without text there, it is `__default__`."""
    separate_with: str | int | None = None
    """Text, or one token id, between a pair's prompt and response; it belongs to the prompt."""
    add_bos: Literal["auto"] | bool = "auto"
    """Whether the beginning-of-text token starts a pair or text; tokens from `build` are not changed."""
    add_eos: Literal["auto"] | bool = "auto"
    """Whether the end-of-text token ends a pair or text; tokens from `build` are not changed."""

    @classmethod
    def complete_options(
        cls, options: Mapping[str, Any], base: Path, where: str
    ) -> tuple[dict[str, Any], frozenset[str]]:
        """Import the class before any data is read, and add the digest of its file."""
        if "source_digest" in options:
            raise ConfigError(
                f"{where}.class: source_digest is computed from the class's file and cannot be set; delete it"
            )
        path = options.get("class")
        if not isinstance(path, str):
            return dict(options), cls.GROUPS
        where = f"{where}.class"
        digest = hashlib.sha256(find_source_file(path, base, where).read_bytes()).hexdigest()
        builds = get_format_method(find_format(path, base, where)) == "build"
        # What applies to rows, a class that builds tokens does not read.
        not_read = frozenset({"reasoning", "tools", "template", "loss"}) if builds else frozenset[str]()
        return {**options, "source_digest": digest}, cls.GROUPS - not_read

    def check_options(self, options: DatasetOptions) -> None:
        """Refuse invalid separators; the roles and sides of the class's rows are not known here."""
        super().check_options(options)
        refuse_joined_separator(self.separate_with, options)

    def open_dataset_reader(self, options: DatasetOptions, base: Path, dataset: str) -> DatasetReader:
        """Read records with the class, which may make several rows of one record."""
        chat = Chat(
            dataset_schema="messages",
            role_map=self.role_map,
            unknown_roles=self.unknown_roles,
            assistant_roles=self.assistant_roles,
            message_flags=self.message_flags,
            domain_key=self.domain_key,
        )
        return CustomDatasetReader(open_row_format(self.class_name, self.options, base), chat, options)

    def open_example_builder(self, context: BuildContext[Any], base: Path) -> TokenBuilder | None:
        """Build tokens with the class, if it does not make rows."""
        row_format = open_row_format(self.class_name, self.options, base)
        if get_format_method(type(row_format)) != "build":
            return None

        def build(record: Mapping[str, Json]) -> Mapping[str, Any] | Rejected | None:
            try:
                return row_format.build(record, context)
            except Exception as error:  # noqa: BLE001  (any exception of a user's class rejects its record)
                return reject_format_error(error)

        return build
