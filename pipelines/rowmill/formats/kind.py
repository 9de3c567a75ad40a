"""What a kind of dataset is: one class with its fields, what it declares, and what is asked of it.

What belongs here: the base class of all kinds, and the option groups that a dataset may have. What does not: any one
kind; each is a module of its own, listed in `formats/__init__.py`.

A kind is added in one file and one line of that list. It declares its row kind, the option groups that it reads and
the options in them that it does not, and it has two hooks: one reads a record into a row, one builds examples of rows
for kinds that make their tokens themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, get_args

from rowmill.conversation.masking import Loss
from rowmill.conversation.rendering.options import Template
from rowmill.conversation.truncation import Truncation
from rowmill.core.config import Config
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.formats.canonicalization import Canonicalizer, RecordReader, RowOptions
from rowmill.formats.custom import BuildContext
from rowmill.formats.filters import Filters
from rowmill.formats.reasoning import Reasoning
from rowmill.formats.splits import Splits
from rowmill.formats.tool_calls import Tools
from rowmill.packing.options import Packing
from rowmill.schema.rows import Rejected, Row, RowKind

if TYPE_CHECKING:
    from rowmill.formats.records import Records

OPTION_GROUPS: dict[str, type[Config]] = {
    "reasoning": Reasoning,
    "tools": Tools,
    "template": Template,
    "loss": Loss,
    "truncation": Truncation,
    "filters": Filters,
    "splits": Splits,
    "packing": Packing,
}
"""The option groups of a dataset by name."""

ALL_GROUPS = frozenset(OPTION_GROUPS)

PAIR_SIDES = frozenset({"prompt", "response"})
"""What `loss.mask` names in pairs; in conversations it names roles."""


class DatasetOptions(RowOptions, Protocol):
    """The kind and the option groups of one dataset."""

    @property
    def truncation(self) -> Truncation:
        """What happens to rows that are too long."""
        ...

    @property
    def splits(self) -> Splits:
        """Which rows are held out."""
        ...

    @property
    def packing(self) -> Packing:
        """How examples share sequences."""
        ...


class RowReader(Protocol):
    """Reads the records of one dataset, one at a time."""

    @property
    def unread_preferences(self) -> frozenset[str]:
        """Columns of preference data that the dataset's options leave unread."""
        ...

    def read(self, record: Json, *, arrow: bool) -> Sequence[Row | Rejected]:
        """Return what becomes of one record: at least one row or reject.

        With `arrow`, the record comes from a table that gave every mapping the keys of all the others.
        """
        ...


TokenBuilder = Callable[[Mapping[str, Json]], Mapping[str, Any] | Rejected | None]
"""Builds `ids`, `loss_mask` as long, and `domain` if there is one, of one record; None: it is left out on purpose."""


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """What a kind's own fields say of the tokens of its rows; a kind without such a field has the default."""

    assistant_roles: frozenset[str] = frozenset({"assistant"})
    """The roles that the model itself speaks."""
    separate_with: str | int | None = None
    """Text, or one token id, between a pair's prompt and response."""
    add_bos: Literal["auto"] | bool = "auto"
    """Whether the beginning-of-text token starts a row."""
    add_eos: Literal["auto"] | bool = "auto"
    """Whether the end-of-text token ends a row."""


class CompletedOptions(NamedTuple):
    """A kind's own options, with what is filled in when the recipe is read."""

    options: dict[str, Any]
    groups: frozenset[str]
    """The option groups that such a dataset reads."""


class DatasetKind(Config):
    """The base of all kinds: a subclass has a field `kind` with its name and overrides what differs."""

    ROW_KIND: ClassVar[RowKind]
    """What most of its rows are; it decides how examples are packed."""
    GROUPS: ClassVar[frozenset[str]] = ALL_GROUPS
    """The option groups that it reads; another group in such a dataset is an error."""
    FIELDS_NOT_READ: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Options of those groups that it does not read; given in such a dataset they are an error."""
    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Other names of its fields."""
    KIND_ALIASES: ClassVar[tuple[str, ...]] = ()
    """Other names of the kind."""
    FILLED_IN: ClassVar[tuple[str, ...]] = ()
    """Fields that are computed when the recipe is read and cannot be written in it."""
    NEEDS_TEMPLATE: ClassVar[bool] = True
    """Whether a kind with the group `template` must have a chat template; a user's class may make no conversation."""
    IS_TABLE: ClassVar[bool] = False
    """Whether all its rows are read by one table contract and an example joins several of them."""

    @classmethod
    def get_name(cls) -> str:
        """Return what `format.kind` calls this kind."""
        (name,) = get_args(cls.model_fields["kind"].annotation)
        return name

    @classmethod
    def list_fields(cls) -> set[str]:
        """Return the names of its fields, aliases among them."""
        return set(cls.model_fields) | set(cls.ALIASES)

    @classmethod
    def complete_options(
        cls,
        options: Mapping[str, Any],
        base: Path,
        where: str,
    ) -> CompletedOptions:
        """Fill in what is not written in the recipe, and return it with the groups that such a dataset reads.

        `base` is the project's folder, `where` the place of the options in the recipe, for errors.
        """
        return CompletedOptions(dict(options), cls.GROUPS)

    @classmethod
    def select_group_defaults(
        cls,
        options: Mapping[str, Any],
        groups: Mapping[str, Any],
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return the defaults of groups that are this kind's own, given its options and its groups as written."""
        return {}

    def check_options(self, options: DatasetOptions) -> None:
        """Refuse combinations of the dataset's groups that this kind cannot have.

        Raises
        ------
        ValueError
            With a message that begins with the option's place in the dataset.

        """
        if options.splits.is_exact:
            raise ValueError(
                f"splits: a number of rows, method: exact and max_rows are for records; a {self.get_name()} dataset "
                "takes shares by hash; write a share such as 0.05"
            )

    def get_length_limit(self, options: DatasetOptions) -> tuple[str, int | None]:
        """Return the option that limits an example's tokens, and its value; None is the recipe's `seq_len`."""
        return "truncation.max_length", options.truncation.max_length

    def has_groups(self, options: DatasetOptions) -> bool:
        """Tell whether rows belong to groups that no split may cut."""
        return options.splits.group_key is not None

    def get_token_options(self) -> TokenOptions:
        """Return what the kind's fields say of the tokens of its rows."""
        return TokenOptions()

    def list_answer_columns(self) -> Sequence[str | None] | None:
        """Return the columns that hold answers and what leads to them; None: the kind knows no answers."""
        return None

    def make_record_reader(self, options: RowOptions) -> RecordReader:
        """Return what reads the kind's columns of one record into a row.

        Raises
        ------
        ConfigError
            If the kind reads no single records.

        """
        raise ConfigError(
            f"format.kind: a {self.get_name()} dataset makes its rows itself; a kind that reads columns is needed "
            "here; name such a kind"
        )

    def open_row_reader(self, options: DatasetOptions, base: Path) -> RowReader:
        """Return what reads the dataset's records; a kind that makes one row of a record leaves this as it is.

        `base` is the project's folder.
        """
        return Canonicalizer(options, group_key=options.splits.group_key, order_key=options.splits.time_key)

    def open_example_builder(self, context: BuildContext[Any], base: Path) -> TokenBuilder | None:
        """Return what builds the tokens of a row that is a record; None: all its rows are tokenized by their row kind.

        A kind that builds tokens itself has rows of kind `record`, each with the record as it came. `base` is the
        project's folder.
        """
        return None

    def as_table(self) -> "Records | None":
        """Return the options of a table, for kinds with `IS_TABLE`."""
        return None

    def require_table(self) -> "Records":
        """Return the options of a table, where `IS_TABLE` was asked before."""
        table = self.as_table()
        assert table is not None
        return table


def refuse_mask_names(kind: str, wrong: frozenset[str] | set[str], allowed: str) -> None:
    """Refuse a mask that names sides in a conversation or roles in a pair: it would silently do nothing."""
    if wrong:
        raise ValueError(
            f"loss.mask: {min(wrong)!r} is not in the rows of a {kind} dataset; allowed are {allowed}; name one of them"
        )
