"""What a kind of dataset is: one class with its fields, what it declares, and what is asked of it.

What belongs here: the base class of all kinds, and the option groups that a dataset may have. What does not: any one
kind; each is a module of its own, listed in `formats/__init__.py`.

A kind is added in one file and one line of that list. It declares its row kind, the option groups that it reads and
the options in them that it does not.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, get_args

from rowmill.conversation.masking import Loss
from rowmill.conversation.rendering.renderer import Template
from rowmill.conversation.truncation import Truncation
from rowmill.core.config import Config
from rowmill.formats.filters import Filters
from rowmill.formats.reasoning import Reasoning
from rowmill.formats.splits import Splits
from rowmill.formats.tool_calls import Tools
from rowmill.packing.plan import Packing
from rowmill.schema.rows import RowKind

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


class DatasetOptions(Protocol):
    """The option groups of one dataset, whatever its kind."""

    @property
    def reasoning(self) -> Reasoning:
        """Where reasoning is found."""
        ...

    @property
    def tools(self) -> Tools:
        """Where tools are found."""
        ...

    @property
    def template(self) -> Template:
        """The chat template."""
        ...

    @property
    def loss(self) -> Loss:
        """Which tokens train."""
        ...

    @property
    def truncation(self) -> Truncation:
        """What happens to rows that are too long."""
        ...

    @property
    def filters(self) -> Filters:
        """Which rows are left out."""
        ...

    @property
    def splits(self) -> Splits:
        """Which rows are held out."""
        ...

    @property
    def packing(self) -> Packing:
        """How examples share sequences."""
        ...


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
    """Whether a kind with the group `template` must have a chat template."""
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
        base: Path,  # noqa: ARG003  (a hook)
        where: str,  # noqa: ARG003  (a hook)
    ) -> CompletedOptions:
        """Fill in what is not written in the recipe, and return it with the groups that such a dataset reads.

        `base` is the project's folder, `where` the place of the options in the recipe, for errors.
        """
        return CompletedOptions(dict(options), cls.GROUPS)

    @classmethod
    def select_group_defaults(
        cls,
        options: Mapping[str, Any],  # noqa: ARG003  (a hook)
        groups: Mapping[str, Any],  # noqa: ARG003  (a hook)
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

    def as_table(self) -> "Records | None":
        """Return the options of a table, for kinds with `IS_TABLE`."""
        return None


def refuse_mask_names(kind: str, wrong: frozenset[str] | set[str], allowed: str) -> None:
    """Refuse a mask that names sides in a conversation or roles in a pair: it would silently do nothing."""
    if wrong:
        raise ValueError(
            f"loss.mask: {min(wrong)!r} is not in the rows of a {kind} dataset; allowed are {allowed}; name one of them"
        )
