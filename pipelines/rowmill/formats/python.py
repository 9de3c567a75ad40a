"""The kind `python`: rows or tokens made by a user's class."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.formats.chat import Chat
from rowmill.formats.custom import BuildContext, find_format, get_format_method, hash_format_source
from rowmill.formats.custom_rows import CustomRowReader, build_tokens, open_row_format
from rowmill.formats.kind import CompletedOptions, DatasetKind, DatasetOptions, RowReader, TokenBuilder, TokenOptions
from rowmill.formats.record_values import apply_eos_alias
from rowmill.formats.supervised import refuse_joined_separator
from rowmill.schema.rows import RowKind

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
