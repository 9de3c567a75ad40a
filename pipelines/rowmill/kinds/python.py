"""The kind `python`: a user's class turns records into canonical rows, or into tokens that are validated.

record ──rows──► Row(s) ──canonicalisation──► canonical rows
       └─build─► ids, loss_mask, domain ──checked──► BuiltExample
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from rowmill.conversation.options import Template
from rowmill.core.config import describe_type
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.kinds.base import CompletedOptions, DatasetKind, DatasetOptions, RowReader, TokenBuilder, TokenOptions
from rowmill.kinds.chat import Chat
from rowmill.kinds.custom import BuildContext, RowFormat, find_format, get_format_method, hash_format_source
from rowmill.kinds.shared.canonicalization import Canonicalizer, RowOptionValues, reject_format_error, remove_nulls
from rowmill.kinds.shared.messages import Tools, apply_eos_alias, is_mapping
from rowmill.kinds.supervised import Supervised, refuse_joined_separator
from rowmill.kinds.text import Text
from rowmill.schema.rows import Rejected, Row, RowKind

SCHEMA = "python"
"""The schema in the report of such a row."""


def open_row_format(class_name: str, arguments: Mapping[str, Any], base: Path) -> RowFormat:
    """Return an instance of a user's format class, with the recipe's arguments.

    Raises
    ------
    ConfigError
        If the class cannot be found or instantiated.

    """
    where = "format.class"
    cls = find_format(class_name, base, where)
    try:
        return cls(**arguments)
    except Exception as error:
        raise ConfigError(
            f"{where}: {class_name} cannot be instantiated with options {arguments} "
            f"({type(error).__name__}: {error}); expected the constructor's arguments; correct format.options"
        ) from error


class CustomRowReader:
    """Turns records into canonical rows by a user's format class."""

    unread_preferences: frozenset[str] = frozenset()
    """Empty, because the columns that the class reads are unknown."""

    def __init__(self, row_format: RowFormat, chat: Chat, options: DatasetOptions) -> None:
        """Prepare a reader per row kind, so that the class may return calls, parts and flags in any known shape."""
        self._format = row_format
        self._builds = get_format_method(type(row_format)) == "build"
        tools, template = Tools(tools_fields=["tools"]), Template(chat_template_kwargs="kwargs")
        self._readers: dict[str, Canonicalizer] = {
            kind: Canonicalizer(
                RowOptionValues(form, options.reasoning, tools, template, options.loss, options.filters),
                group_key=options.splits.group_key,
                order_key=options.splits.time_key,
            )
            for kind, form in (
                ("conversation", chat),
                ("pair", Supervised(domain_key=chat.domain_key)),
                ("text", Text(domain_key=chat.domain_key)),
            )
        }

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
        rows: list[Any] = [] if made is None else list(made) if isinstance(made, (list, tuple)) else [made]
        return [self._canonicalize_row(row, record) for row in rows] or [Rejected("skipped_by_format")]

    def _canonicalize_row(self, row: Any, record: Mapping[str, Json]) -> Row | Rejected:
        if not isinstance(row, Row) or row.kind not in self._readers:
            what = f"a Row of kind {row.kind}" if isinstance(row, Row) else type(row).__name__
            return Rejected("format_error", f"rows returned {what}, expected a Row: conversation, pair or text")
        given: dict[str, Json]
        match row.kind:
            case "conversation":
                kwargs = row.template_kwargs or None
                given = {"messages": list(row.messages), "tools": row.tools and list(row.tools), "kwargs": kwargs}
            case "pair":
                given = {"prompt": row.text, "response": row.output}
            case _:
                given = {"text": row.text}
        read = self._readers[row.kind].row(given)
        return read if isinstance(read, Rejected) else self._add_keys(read, record, row)

    def _add_keys(self, row: Row, record: Mapping[str, Json], given: Row | None = None) -> Row | Rejected:
        """Add group, order and domain: those that the class set, else the record's."""
        reader = self._readers["conversation"]
        placed = reader.add_keys(row, record)
        if isinstance(placed, Rejected):
            return placed
        report = replace(placed.report, schema=SCHEMA)
        if given is None:
            return replace(placed, report=report)
        return replace(
            placed,
            report=report,
            group_key=given.group_key or placed.group_key,
            order_key=given.order_key or placed.order_key,
            domain=given.domain or placed.domain,
        )


def build_tokens(
    row_format: RowFormat, record: Mapping[str, Json], context: BuildContext[Any]
) -> Mapping[str, Any] | Rejected | None:
    """Return what a user's class builds from a record, not validated."""
    try:
        return row_format.build(record, context)
    except Exception as error:  # noqa: BLE001  (any exception of a user's class rejects its record)
        return reject_format_error(error)


_ROW_ONLY_GROUPS = frozenset({"reasoning", "tools", "template", "loss"})
"""Option groups that apply to rows; a class that builds tokens does not read them."""


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
    message_flags: list[str] = Field(default=["train", "weight", "loss", "loss_weight"])
    """Keys of a message that decide whether it is trained (true, false), or with which weight (a number; 0: not)."""
    domain_key: str | None = None
    """Column that names the row's domain, if the class does not set it; without text there, it is `__default__`."""
    separate_with: str | int | None = None
    """Text, or one token id, between a pair's prompt and response; it belongs to the prompt."""
    add_bos: Literal["auto"] | bool = "auto"
    """Whether the beginning-of-text token starts a pair or text; tokens from `build` are not changed."""
    add_eos: Literal["auto"] | bool = "auto"
    """Whether the end-of-text token ends a pair or text; tokens from `build` are not changed."""

    @model_validator(mode="before")
    @classmethod
    def _own_aliases(cls, values: Json) -> Json:
        return apply_eos_alias(values)

    @classmethod
    def complete_options(cls, options: Mapping[str, Any], base: Path, where: str) -> CompletedOptions:
        """Import the class before any data is read, and add the digest of its file."""
        if "source_digest" in options:
            raise ConfigError(
                f"{where}.class: source_digest is computed from the class's file and cannot be set; delete it"
            )
        path = options.get("class")
        if not isinstance(path, str):
            return CompletedOptions(dict(options), cls.GROUPS)
        completed = {**options, "source_digest": hash_format_source(path, base, f"{where}.class")}
        builds = get_format_method(find_format(path, base, f"{where}.class")) == "build"
        return CompletedOptions(completed, cls.GROUPS - _ROW_ONLY_GROUPS if builds else cls.GROUPS)

    def check_options(self, options: DatasetOptions) -> None:
        """Refuse invalid separators; the roles and sides of the class's rows are not known here."""
        super().check_options(options)
        refuse_joined_separator(self.separate_with, options)

    def open_row_reader(self, options: DatasetOptions, base: Path, dataset: str) -> RowReader:
        """Read records with the class, which may make several rows of one record."""
        chat = Chat(
            dataset_schema="messages",
            role_map=self.role_map,
            unknown_roles=self.unknown_roles,
            assistant_roles=self.assistant_roles,
            message_flags=self.message_flags,
            domain_key=self.domain_key,
        )
        return CustomRowReader(open_row_format(self.class_name, self.options, base), chat, options)

    def open_example_builder(self, context: BuildContext[Any], base: Path) -> TokenBuilder | None:
        """Build tokens with the class, if it does not make rows."""
        row_format = open_row_format(self.class_name, self.options, base)
        if get_format_method(type(row_format)) != "build":
            return None
        return lambda record: build_tokens(row_format, record, context)

    def get_token_options(self) -> TokenOptions:
        """Return the options of all kinds of rows that the class may make."""
        return TokenOptions(frozenset(self.assistant_roles), self.separate_with, self.add_bos, self.add_eos)
