"""The base class of dataset kinds: one class with a kind's fields, declarations and hooks.

To add a kind, write one module and one line of `catalog.py`. It declares its row kind, the option groups that it reads
and the options in them that it does not read. One hook reads a record into a row; another builds the examples of a kind
that makes its tokens itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

import pyarrow as pa
from pydantic import model_validator

from rowmill.conversation.options import Loss, Template
from rowmill.conversation.truncation import OverlongPolicy, Truncation
from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, join_choices
from rowmill.core.json import Json
from rowmill.core.storage import Store
from rowmill.kinds.shared.filters import Filters
from rowmill.kinds.shared.messages import Tools, is_mapping, rename_aliases
from rowmill.kinds.shared.reasoning import Reasoning
from rowmill.kinds.shared.samples import Recognition, Sample
from rowmill.kinds.shared.splits import Splits
from rowmill.kinds.shared.training_flags import FlagMeaning, name_flags
from rowmill.packing.options import Packing
from rowmill.schema.checks import Check
from rowmill.schema.counts import Counts
from rowmill.schema.examples import OBJECTIVE_DESCRIPTIONS, Objective, RolloutFields
from rowmill.schema.manifest import Manifest, Part
from rowmill.schema.recipe_summary import RecipeSummary
from rowmill.schema.rows import ROW_KINDS, PlainChat, Rejected, Row, RowKind
from rowmill.sources.reading import TakenGroup

if TYPE_CHECKING:
    # A recipe is loaded without what its stages work with.
    from rowmill.kinds.context import RecipeContext, RecipeNumbers
    from rowmill.parts.context import StageOutput, WorkContext
    from rowmill.parts.functions import MappedParts
    from rowmill.tokenization.tokenizer import LoadedTokenizer

KindContext: TypeAlias = "RecipeContext[DatasetOptions]"
"""What a stage hands to the dataset's kind."""

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

NOT_READ_OF_PLAIN_TEXT = frozenset(Template.model_fields) - {"control_tokens"}
"""Options of the group `template` that a kind without a chat template does not read."""

PAIR_SIDES = frozenset({"prompt", "response"})
"""The names that `loss.mask` uses for pairs; for conversations it uses roles."""


RecordReader = Callable[[Mapping[str, Json]], Row | Rejected]
"""A kind's function that reads the columns of one record into a row, without its group, order and domain.

A reject is returned, or raised as a `RejectError`. A `DatasetReader` calls it, and adds what all kinds have.
"""


RowComparison = Callable[[Path, Store, Manifest, Manifest], Sequence[str] | None]
"""Compares rows with published ones, given the project's folder: returns the changes, a sentence each, or None if the
two cannot be compared."""


@dataclass(frozen=True, slots=True)
class NearRows:
    """How many held-out rows were compared, and the ids of those with a near duplicate in train."""

    compared: int
    row_ids: tuple[str, ...]


class DatasetReader(Protocol):
    """Reads the records of one dataset, one at a time, into whole rows, and knows which columns nothing reads."""

    @property
    def unread_preferences(self) -> frozenset[str]:
        """Columns of preference data that the dataset's options do not read."""

    @property
    def read_elsewhere(self) -> Sequence[str] | None:
        """Columns that are read beside those of a row's content; None: a user's class may read any."""

    def restore_numbers(self, record: dict[str, Json], raw: bytes) -> dict[str, Json]:
        """Return a record with the answers that are numbers as its line, `raw`, writes them."""

    def read_plain(self, record: Mapping[str, Json]) -> PlainChat | None:
        """Return a record's chat if that is its only outcome and there is nothing to note; else None."""

    def read(self, record: Json, *, arrow: bool) -> Sequence[Row | Rejected]:
        """Return a record's outcomes: at least one row or reject.

        With `arrow`, the record comes from Arrow, which gives every mapping the union of all keys.
        """


ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True)
class BuildContext(Generic[ConfigT]):
    """The arguments of `build` besides the record: tokenizer, the dataset's options, maximum number of tokens."""

    open_tokenizer: Callable[[], Any]
    config: ConfigT
    max_length: int

    @cached_property
    def tokenizer(self) -> Any:
        """The recipe's tokenizer, a fast tokenizer of `transformers` with its chat template; opened on first use."""
        return self.open_tokenizer()


TokenBuilder = Callable[[Mapping[str, Json]], Mapping[str, Any] | Rejected | None]
"""Builds `ids`, `loss_mask` of equal length and optionally `domain` from a record; None skips the record."""


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """A kind's options for the tokens of its rows; a kind without such a field uses the default."""

    assistant_roles: frozenset[str] = frozenset({"assistant"})
    """Roles of the model's messages."""
    separate_with: str | int | None = None
    """Text, or one token id, between a pair's prompt and response."""
    add_bos: Literal["auto"] | bool = "auto"
    """Whether the beginning-of-text token starts a row."""
    add_eos: Literal["auto"] | bool = "auto"
    """Whether the end-of-text token ends a row."""


class DatasetKind(Config):
    """Base class of all kinds: a subclass has a field `kind` with its name and overrides what differs."""

    ROW_KIND: ClassVar[RowKind]
    """The kind of most of its rows, which decides how examples are packed."""
    GROUPS: ClassVar[frozenset[str]] = ALL_GROUPS
    """Option groups that it reads; any other group in such a dataset is an error."""
    FIELDS_NOT_READ: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Options of those groups that it does not read; setting one in such a dataset is an error."""
    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Aliases of its fields."""
    KIND_ALIASES: ClassVar[tuple[str, ...]] = ()
    """Aliases of the kind."""
    FILLED_IN: ClassVar[tuple[str, ...]] = ()
    """Fields that are computed when the recipe is loaded and cannot be set in it."""
    READS_FLAG_COLUMNS: ClassVar[bool] = False
    """Whether columns of a record may say what of it trains, as `message_flags` names them."""
    NEEDS_TEMPLATE: ClassVar[bool] = True
    """Whether a kind with the group `template` needs a chat template; a user's class may make no conversations."""
    OVERLONG_POLICIES: ClassVar[tuple[OverlongPolicy, ...]] = get_args(OverlongPolicy)
    """What can be done to its rows that are too long, by `truncation.overlong`."""
    CHECKS: ClassVar[tuple[Check, ...]] = ()
    """The checks of what only this kind counts."""
    PLANS_EXAMPLES: ClassVar[bool] = False
    """Whether `rowmill plan` and `rowmill advise` say how its rows form examples, as a `JointKind` can."""
    TAKES_OVERRIDES: ClassVar[bool] = False
    """Whether the command line may set its options, such as `--data__max_sequences_per_example 4`."""
    COMPARES_ROWS: ClassVar[bool] = False
    """Whether it compares held-out rows with those that train itself; of others, prompts and examples are compared."""
    WRITES_ALL_COLUMNS: ClassVar[bool] = False
    """Whether all columns of a record are in its row, so that none is unread, and NaN and infinity are kept as text."""
    WORKER_MODULES: ClassVar[tuple[str, ...]] = ()
    """Modules that making its parts takes, imported inside functions: workers find them imported."""
    FITS_MOST_RECORDS: ClassVar[bool] = False
    """Whether it reads records of nearly any shape, so that records that fit it may be of another kind."""
    PRECEDENCE: ClassVar[int] = 100
    """Of several kinds that read some records, the one with the lowest number is proposed."""

    @classmethod
    def get_name(cls) -> str:
        """Return the kind's name in `format.kind`."""
        (name,) = get_args(cls.model_fields["kind"].annotation)
        return name

    @classmethod
    def list_fields(cls) -> set[str]:
        """Return the names of its fields, including aliases."""
        return set(cls.model_fields) | set(cls.ALIASES)

    @classmethod
    def recognise(cls, sample: Sample) -> Recognition | None:
        """Return the options under which the kind reads most of some records; None if it reads none of them."""
        return None

    @classmethod
    def get_contract_model(cls) -> type[Config] | None:
        """Return the options of a contract of its rows, which a file beside the recipe may hold; None: it has none."""
        return None

    @model_validator(mode="before")
    @classmethod
    def _rename_own_aliases(cls, values: Json) -> Json:
        # An alias that pydantic knows, it reads itself.
        own = {alias: name for alias, name in cls.ALIASES.items() if cls.model_fields[name].alias != alias}
        renamed = rename_aliases(values, own)
        if "enforce_eos" in own and is_mapping(values) and values.get("enforce_eos") is True:
            return {**renamed, "add_eos": "auto"}
        return renamed

    @classmethod
    def complete_options(
        cls, options: Mapping[str, Any], base: Path, where: str
    ) -> tuple[dict[str, Any], frozenset[str]]:
        """Complete the options, and return them with the groups that such a dataset reads.

        `base` is the project's folder, `where` the path of the options in the recipe, for errors.
        """
        return dict(options), cls.GROUPS

    @classmethod
    def select_group_defaults(
        cls, options: Mapping[str, Any], groups: Mapping[str, Any]
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return the kind's own defaults for groups, given its options and the groups as written."""
        return {}

    def check_options(self, options: "DatasetOptions") -> None:
        """Refuse combinations of options that this kind does not support, by a ValueError that begins with the path."""
        if options.splits.is_exact:
            raise ValueError(
                f"splits: a number of rows, method: exact and max_rows are for records; a {self.get_name()} dataset is "
                "split by hash; set a share such as 0.05"
            )

    def check_generated_source(self, generated: str) -> None:
        """Refuse the source `generated`, whose records were generated by a model, unless they are of this kind."""
        raise ValueError(
            f"source.generated: {generated} holds records of a table, but format.kind is {self.get_name()}; expected "
            "records; set format: {kind: records}"
        )

    def check_recipe(self, name: str, options: "DatasetOptions", recipe: RecipeSummary) -> None:
        """Refuse a dataset, called `name`, whose examples fit neither the sequences of a recipe nor its objective."""
        option, limit = self.get_length_limit(options)
        sides = self.count_sides()
        if limit is not None and sides > 1 and limit > recipe.limit_sides(sides):
            raise ValueError(
                f"datasets.{name}.{option} is {limit}, and {sides} sides of an example are in one sequence; at "
                f"most {recipe.limit_sides(sides)} fit into seq_len {recipe.seq_len}; lower it, or raise seq_len"
            )
        if limit is not None and limit > recipe.seq_len:
            raise ValueError(
                f"datasets.{name}.{option} is {limit}, seq_len {recipe.seq_len} is the most allowed; lower it, or "
                "raise seq_len"
            )
        objective, expected = self.get_objective(), recipe.datasets[recipe.first].objective
        if objective != expected:
            raise ValueError(
                f"datasets.{name}.format.kind: {self.get_name()} has the objective {objective}, and "
                f"datasets.{recipe.first} has {expected}; a recipe has one, since its datasets are mixed into one "
                "order; give each objective a recipe of its own"
            )

    def get_length_limit(self, options: "DatasetOptions") -> tuple[str, int | None]:
        """Return the option that limits a text's tokens, and its value; None means what `seq_len` leaves each side."""
        return "truncation.max_length", options.truncation.max_length

    def suggest_longer_examples(self, options: "DatasetOptions") -> str:
        """Return which option to raise, so that longer texts of this dataset fit."""
        option, limit = self.get_length_limit(options)
        return "raise seq_len" if limit is None else f"raise {option} (at most seq_len)"

    def suggest_overlong_policies(self, options: "DatasetOptions") -> str:
        """Return how to choose a policy under which texts that are too long stop no build."""
        # Beside any of these policies, packing has nothing to slice, and the option is refused.
        deleted = "" if options.packing.slice_strategy is None else "delete packing.slice_strategy and "
        return f"{deleted}choose truncation.overlong {self.join_shortening_policies(options)}"

    def join_shortening_policies(self, options: "DatasetOptions") -> str:
        """Return the policies that shorten or drop texts, with the options that they need beside them."""
        return join_choices(one for one in self.OVERLONG_POLICIES if one not in ("raise", "keep"))

    def suggest_slicing(self) -> str:
        """Return how packing can cut examples that are too long; empty if it cannot."""
        cannot = "packing" not in self.GROUPS or "slice_strategy" in self.FIELDS_NOT_READ.get("packing", ())
        return "" if cannot else "choose packing.slice_strategy keep_start, keep_end, split or drop"

    def count_sides(self) -> int:
        """Return how many texts an example has, each of which may be as long as the limit."""
        return OBJECTIVE_DESCRIPTIONS[self.get_objective()].sides

    def has_groups(self, options: "DatasetOptions") -> bool:
        """Return whether rows belong to groups that must stay in one split."""
        return options.splits.group_key is not None

    def count_rows(self, rows: pa.Table) -> Sequence[Counts]:
        """Return what only this kind counts of the rows of a part, as they are written; `CHECKS` has its checks."""
        return ()

    def count_dataset(
        self, store: Store, made: Sequence[Part], kept: Sequence[Part]
    ) -> tuple[Sequence[Counts], Mapping[str, tuple[str, ...]]]:
        """Return what only all rows of a dataset together show, and some row ids by the name of what they show.

        `made` are the parts before duplicates are removed, `kept` those that are written; `CHECKS` has the checks.
        """
        return (), {}

    def get_rollout_fields(self) -> RolloutFields:
        """Return the fields that its rows carry to a trainer beside their ids."""
        return RolloutFields()

    def get_objective(self) -> Objective:
        """Return what a trainer does with the examples."""
        return "next_token"

    def predicts_next_token(self) -> bool:
        """Return whether each trained token of an example is predicted from those before it, and nothing else is."""
        return OBJECTIVE_DESCRIPTIONS[self.get_objective()].predicts_next_token

    def has_targets(self) -> bool:
        """Return whether examples have tokens that train."""
        return OBJECTIVE_DESCRIPTIONS[self.get_objective()].has_targets

    def uses_template(self) -> bool:
        """Return whether a chat template renders its rows."""
        return "template" in self.GROUPS and "chat_template" not in self.FIELDS_NOT_READ.get("template", ())

    def has_control_strings(self) -> bool:
        """Return whether its rows have texts, in which strings of control tokens may occur."""
        return "template" in self.GROUPS

    def get_token_options(self) -> TokenOptions:
        """Return the kind's options for the tokens of its rows: those of its fields that have their names."""
        names = [option.name for option in fields(TokenOptions) if option.name in type(self).model_fields]
        options = TokenOptions(**{name: getattr(self, name) for name in names})
        return replace(options, assistant_roles=frozenset(options.assistant_roles))

    def list_ignored_columns(self) -> Sequence[str]:
        """Return the columns that are left out on purpose: the kind's option `ignore_columns`, if it has one."""
        return getattr(self, "ignore_columns", ())

    def list_message_flags(self) -> Mapping[str, FlagMeaning]:
        """Return the meaning of each flag of messages: the kind's option `message_flags`, if it has one."""
        return name_flags(getattr(self, "message_flags", ()))

    def get_domain_key(self) -> str | None:
        """Return the column that names a row's domain: the kind's option `domain_key`, if it has one."""
        return getattr(self, "domain_key", None)

    def list_answer_columns(self) -> Sequence[str | None] | None:
        """Return the columns of answers and their prompts; None if the kind has no such columns."""
        return None

    def list_answer_paths(self) -> Sequence[str]:
        """Return the paths of answers, at which a number is text; none if the kind has no such columns."""
        return ()

    # ── What only some kinds decide: those whose rows depend on one another are in `joint_rows.py` ──

    def identify_rows(self, recipe: "RecipeNumbers", name: str, options: "DatasetOptions") -> dict[str, Any] | None:
        """Return what decides a dataset's rows (`rows`), and what only facts about them; None: as those of any kind."""
        return None

    def list_comparisons(self) -> Mapping[str, RowComparison]:
        """Return the comparisons with published rows by the name of the check that makes them."""
        return {}

    def identify_examples(self, recipe: "RecipeNumbers", name: str, options: "DatasetOptions") -> dict[str, Any] | None:
        """Return what decides a dataset's examples; None: what decides those of any kind."""
        return None

    def reads_tokenizer_name(self) -> bool:
        """Return whether examples depend on how the tokenizer is called."""
        return False

    def identify_lengths(self, recipe: "RecipeNumbers", options: "DatasetOptions") -> dict[str, Any]:
        """Return what decides the facts of lengths beside the options of all kinds."""
        return {}

    def list_generation_stages(self) -> Sequence[str]:
        """Return the names of the on-demand stages in which a trained model generates records of the dataset."""
        return ()

    # ── What a stage makes of a whole dataset: most kinds let it make each part by itself ──

    def make_rows(
        self,
        context: KindContext,
        taken: Sequence[TakenGroup],
        digest: str,
        make_groups: "Callable[[Sequence[TakenGroup]], MappedParts]",
    ) -> "tuple[MappedParts, Any]":
        """Make the rows of groups of source parts, each part with how many of its records are taken (None: all).

        `digest` identifies the dataset's options, and `make_groups` makes the rows of each group by itself. Also return
        what was decided over all parts, for the two hooks that follow.
        """
        return make_groups(taken), None

    def assign_splits(self, context: KindContext, parts: list[Part], decided: Any) -> list[Part]:
        """Return the parts after splits that only the kind can assign."""
        return parts

    def complete_rows(self, context: KindContext, draft: "StageOutput", decided: Any) -> "StageOutput":
        """Add the kind's own facts and tables to the output of rows."""
        return draft

    def make_examples(
        self,
        context: KindContext,
        tokenizer: "LoadedTokenizer",
        path: str,
        tokenize_parts: "Callable[[], StageOutput]",
    ) -> "StageOutput":
        """Make the examples of all rows; `path` is the tokenizer's in the store.

        `tokenize_parts` makes examples of one row each, part by part.
        """
        return tokenize_parts()

    def find_near_rows(self, context: "WorkContext", options: "DatasetOptions", rows: Manifest) -> NearRows:
        """Compare the held-out rows with those that train, if the kind does this itself (`COMPARES_ROWS`)."""
        return NearRows(0, ())

    def count_read_records(self, shown: int) -> int | None:
        """Return how many records must be read to make the examples of the first `shown` ones; None: all."""
        return shown

    def measure_lengths(self, context: KindContext, measure_examples: "Callable[[], StageOutput]") -> "StageOutput":
        """Measure the examples, and estimate the effect of other limits.

        `measure_examples` does so for examples that are made alike at every limit, except for what is cut off.
        """
        return measure_examples()

    # ── The two hooks: a record becomes a row, and a row becomes examples ──

    def make_record_reader(self, options: "DatasetOptions") -> RecordReader:
        """Return the function that reads one record's columns into a row; raises ConfigError if the kind has none."""
        raise ConfigError(
            f"format.kind: a {self.get_name()} dataset makes its rows itself; expected a kind that reads columns; "
            "choose such a kind"
        )

    def open_dataset_reader(self, options: "DatasetOptions", base: Path, dataset: str) -> DatasetReader | None:
        """Return the kind's own reader of the dataset's records; None if `make_record_reader` reads one row of each."""
        return None

    def open_example_builder(self, context: BuildContext[Any], base: Path) -> TokenBuilder | None:
        """Return the builder of tokens from a record; None if rows are tokenized according to their row kind.

        A kind that builds tokens itself has rows of kind `record`, each with the original record. `base` is the
        project's folder.
        """
        return None


class DatasetOptions(Config):
    """The kind and the option groups of one dataset; those that are not given have their defaults."""

    source: Any = None
    """Location of the raw records, a `Source`; every dataset of a recipe has one."""
    format: DatasetKind
    """How a record's own columns become a row."""
    reasoning: Reasoning = Reasoning()
    """Where reasoning is found, and how it is handled."""
    tools: Tools = Tools()
    """Where tools are found, and the form in which the template receives calls."""
    template: Template = Template()
    """The chat template, its arguments and how its masks are made."""
    loss: Loss = Loss()
    """Which tokens are trained."""
    truncation: Truncation = Truncation()
    """How rows longer than the context are shortened."""
    filters: Filters = Filters()
    """Which rows are left out on purpose."""
    splits: Splits = Splits()
    """Which rows are held out."""
    packing: Packing = Packing()
    """How examples share sequences."""


def refuse_overlong_policy(kind: DatasetKind, options: DatasetOptions, why: str) -> None:
    """Refuse a `truncation.overlong` that cannot be done to a kind's rows, with the reason."""
    policy = options.truncation.policy(kind.ROW_KIND, sliced=options.packing.slice_strategy is not None)
    if policy not in kind.OVERLONG_POLICIES:
        raise ValueError(
            f"truncation.overlong: {policy} {why}; allowed for a {kind.get_name()} dataset are "
            f"{join_choices(kind.OVERLONG_POLICIES)}; choose one"
        )


class IdleOption(NamedTuple):
    """An option that another one leaves without effect, and the value of the other with which it would have one."""

    group: str
    name: str
    reason: str
    other_group: str
    other_name: str
    other_value: str | bool


def iterate_idle_options(row_kind: RowKind, truncation: Truncation, packing: Packing) -> Iterator[IdleOption]:
    """Yield the options that others leave without effect, once per reason.

    An option that does nothing is refused where a dataset sets it, and not inherited from `defaults`.
    """
    policy = truncation.policy(row_kind, sliced=packing.slice_strategy is not None)
    if policy in ("drop", "raise", "keep"):
        why = f"truncation.overlong is {policy}, which cuts no example"
        for name in ("truncate_side", "token_cut"):
            yield IdleOption("truncation", name, why, "truncation", "overlong", "truncate")
    if policy != "keep":
        why = f"truncation.overlong is {policy}, which leaves no example for it"
        yield IdleOption("packing", "slice_strategy", why, "truncation", "overlong", "keep")
    if packing.pack is False:
        why = "packing.pack is false, so each example has its own sequence"
        for name in ("pack_strategy", "max_segments_per_example"):
            yield IdleOption("packing", name, why, "packing", "pack", other_value=True)
    elif ROW_KINDS[row_kind].is_running_text and packing.strategy_for(row_kind) == "concat":
        why = "packing.pack_strategy is concat, which joins all texts"
        for name in ("slice_strategy", "max_segments_per_example"):
            yield IdleOption("packing", name, why, "packing", "pack_strategy", "best_fit")


def refuse_mask_names(kind: str, wrong: frozenset[str] | set[str], allowed: str) -> None:
    """Refuse a mask that names sides in a conversation or roles in a pair: it would have no effect."""
    if wrong:
        raise ValueError(
            f"loss.mask: {min(wrong)!r} does not occur in the rows of a {kind} dataset; allowed are {allowed}; name "
            "one of them"
        )
