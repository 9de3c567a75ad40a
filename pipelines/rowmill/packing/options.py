"""The option groups `packing` and `mixture`."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, join_choices
from rowmill.core.permutation import PermutationType
from rowmill.schema.recipe_summary import RecipeSummary
from rowmill.schema.rows import ROW_KINDS, RowKind, SliceStrategy

PackStrategy = Literal["best_fit", "greedy", "concat"]

Strategy = Literal["best_fit", "greedy", "concat", "single"]

_SLICE_ALIASES: dict[str, SliceStrategy] = {"left": "keep_start", "right": "keep_end", "raise": "error"}


SliceOption = Annotated[
    Literal["keep_start", "keep_end", "error", "split", "drop", "left", "right", "raise"],
    AfterValidator(lambda name: _SLICE_ALIASES.get(name, name)),
]


class Packing(Config):
    """The options of the group `packing`: how the examples of one dataset share sequences."""

    pack: bool | Annotated[int, Field(ge=1)] | None = None
    """Examples per sequence. true: up to `max_segments_per_example`; false: one; n: at most n; unset: true, and text
    datasets use `concat`."""

    max_segments_per_example: Annotated[int, Field(ge=1)] | None = None
    """Maximum examples per sequence, if `pack` is not a number; null: no limit. Levanter's default is 64."""

    pack_strategy: PackStrategy | None = None
    """`best_fit` needs the fewest sequences; `greedy` keeps the order of examples; `concat` (text only) joins documents
    and cuts every `seq_len` tokens. Unset: `best_fit`, or `concat` for text with `pack` unset."""

    tail: Literal["keep", "drop"] = "keep"
    """Whether `concat` keeps the last, shorter sequence; dropped tokens are counted in the ledger."""

    group_tokens: Annotated[int, Field(ge=1)] | None = None
    """Size of a pack group in tokens: examples of so many consecutive tokens are packed with each other, independently
    of all others, so that new rows leave earlier groups as they are. null: 2,048 sequences of `seq_len`, but from 8 Mi
    to 256 Mi tokens."""

    segment_multiple_of: Annotated[int, Field(ge=1)] = 1
    """Each segment of a packed sequence (with open attention, each sequence) is padded to a multiple of this number,
    as context parallelism needs: 2 × CP, times TP with sequence parallelism. It must divide `seq_len` and be the same
    for all datasets."""

    block_cross_document_attention: bool = True
    """Whether each example is a separate attention span; false: the whole sequence is one span."""

    share_prefixes: bool = False
    """Whether examples that begin with the same tokens are stored as a tree, in which each of these tokens stands once;
    a trainer needs the mask of `rowmill.tree_mask` for them. It must be the same for all datasets."""

    min_shared: Annotated[int, Field(ge=1)] = 64
    """For `share_prefixes`: the least tokens that examples share; of conversations, they end between two messages."""

    ignore_token_id: Annotated[int, Field(ge=0)] | None = None
    """A token id that is never a target."""

    slice_strategy: SliceOption | None = None
    """What happens to an example of more than `seq_len` tokens. `keep_start` (alias `left`) or `keep_end` (`right`):
    keep these tokens; `error` (`raise`): stop the build; `split`: into several examples; `drop`. Unset: `keep_start`
    for conversations, `keep_end` for pairs, `split` for text, `error` for records."""

    layout: Literal["copied", "index"] = "copied"
    """What packed shards hold: `copied` the tokens of their sequences; `index` only which tokens of which examples they
    are, so that tokens are stored once up to the ranks. Every reader opens both; an index reads many small files, so it
    is not for stores in which each takes a while."""

    store_domains: bool = False
    """Whether shards say the domain of each segment's row (`format.domain_key`), for the loss by domain. The shards of
    all datasets of the recipe then have such a column."""

    @model_validator(mode="before")
    @classmethod
    def _merge_limits(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        options: dict[str, Any] = values
        pack = options.get("pack")
        if not isinstance(pack, int) or isinstance(pack, bool):
            return options
        limit = options.get("max_segments_per_example", pack)
        if limit != pack:
            raise ValueError(
                f"pack: {pack} and max_segments_per_example: {limit} are two limits; only one is allowed, or both "
                "with the same number; delete max_segments_per_example"
            )
        return {**options, "max_segments_per_example": pack}

    @model_validator(mode="after")
    def _require_possible(self) -> "Packing":
        limited = self.pack is not None and self.pack is not True
        if self.pack_strategy == "concat" and limited:
            raise ValueError(
                f"pack_strategy: concat with pack: {str(self.pack).lower()}; concat fills every sequence and "
                "has no limit; delete pack, or choose best_fit or greedy"
            )
        joins = self.pack_strategy == "concat" or (
            self.pack_strategy is None and self.pack is None and not self.share_prefixes
        )
        if self.tail == "drop" and not joins:
            raise ValueError("tail: drop without pack_strategy: concat; only concat has a tail; delete tail")
        return self

    @model_validator(mode="after")
    def _require_possible_sharing(self) -> "Packing":
        if not self.share_prefixes:
            if self.min_shared != type(self).model_fields["min_shared"].default:
                raise ValueError(
                    f"min_shared: {self.min_shared} without share_prefixes, which reads it; examples share nothing "
                    "otherwise; set share_prefixes: true, or delete min_shared"
                )
            return self
        problems = {
            f"pack_strategy: {self.pack_strategy}": self.pack_strategy in ("greedy", "concat"),
            f"pack: {str(self.pack).lower()}": self.pack is not None and self.pack is not True,
            f"max_segments_per_example: {self.max_segments_per_example}": self.max_segments_per_example is not None,
            f"segment_multiple_of: {self.segment_multiple_of}": self.segment_multiple_of > 1,
            "block_cross_document_attention: false": not self.block_cross_document_attention,
            "store_domains: true": self.store_domains,
            "layout: index": self.layout == "index",
        }
        for option in (option for option, is_set in problems.items() if is_set):
            raise ValueError(
                f"share_prefixes: true with {option}; trees are packed whole by best_fit, each token attends to its "
                "own example, and segments, which are of several rows, are neither counted, padded nor named; delete "
                f"{option.partition(':')[0]}, or share_prefixes"
            )
        return self

    @model_serializer(mode="wrap")
    def _leave_out_sharing(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the options, those of sharing only if prefixes are shared: they decide nothing otherwise."""
        values = serialize(self)
        unread = () if self.share_prefixes else ("share_prefixes", "min_shared")
        return {name: value for name, value in values.items() if name not in unread}

    def check_recipe(self, name: str, recipe: RecipeSummary) -> None:
        """Refuse options of a dataset, called `name`, that the sequences of a recipe or its other datasets exclude."""
        own, first = recipe.datasets[name], recipe.first
        multiple, expected = self.segment_multiple_of, recipe.datasets[first].segment_multiple_of
        if recipe.seq_len % multiple:
            raise ValueError(
                f"datasets.{name}.packing.segment_multiple_of: {multiple} does not divide seq_len {recipe.seq_len}; "
                "a sequence must hold whole multiples; choose a divisor, or another seq_len"
            )
        if multiple != expected:
            raise ValueError(
                f"datasets.{name}.packing.segment_multiple_of: {multiple}, and datasets.{first} has {expected}; one "
                "trainer reads all datasets, so they have one; set it in defaults"
            )
        if recipe.row_fields and not self.block_cross_document_attention:
            raise ValueError(
                f"datasets.{name}.packing.block_cross_document_attention: false, and {recipe.row_fields[0]} is a "
                "field of rows; such a field is the value of an attention span, so each row must be one; set it to "
                "true, or drop format.row_fields"
            )
        sharing = next((other for other, dataset in recipe.datasets.items() if dataset.shares_prefixes), None)
        if sharing is None:
            return
        if not own.predicts_next_token:
            raise ValueError(
                f"datasets.{sharing}.packing.share_prefixes: true beside datasets.{name}, which has examples of "
                f"kind {own.kind}; one trainer reads all datasets, and only examples that predict the next "
                "token can be trees; move one of them to a recipe of its own, or share no prefixes"
            )
        if not self.share_prefixes:
            raise ValueError(
                f"datasets.{name}.packing.share_prefixes: false, and datasets.{sharing} has true; one trainer "
                "reads all datasets, so they have one; set it in defaults, and min_shared: "
                f"{recipe.seq_len + 1} in the dataset that must not share"
            )
        if own.fields:
            raise ValueError(
                f"datasets.{name}.packing.share_prefixes: true, and rows carry {own.fields[0]}; a token that rows "
                "share has one value of a field, and they may differ; set it to false, or drop the field"
            )
        if name in recipe.counted_validation:
            raise ValueError(
                f"datasets.{name}.packing.share_prefixes: true with mixture.num_validation_sequences.{name}, which "
                "counts sequences before tokens are compared; a share of rows can be held out; set "
                "splits.validation instead"
            )

    @property
    def room_multiple(self) -> int:
        """The number that the tokens of each segment are rounded up to in a plan.

        With open attention only sequences are padded, which their limit always allows.
        """
        return self.segment_multiple_of if self.block_cross_document_attention else 1

    @property
    def segment_limit(self) -> int | None:
        """Maximum examples per sequence; None: no limit."""
        return 1 if self.pack is False else self.max_segments_per_example

    def strategy_for(self, kind: RowKind) -> Strategy:
        """Resolve the strategy for rows of one kind.

        Raises ConfigError if rows of this kind cannot be packed that way.
        """
        if self.pack is False:
            return "single"
        joins = ROW_KINDS[kind].is_running_text and self.pack is None and not self.share_prefixes
        chosen = self.pack_strategy or ("concat" if joins else "best_fit")
        if chosen == "concat" and not ROW_KINDS[kind].is_running_text:
            raise ConfigError(
                f"packing.pack_strategy: concat for rows of kind {kind}; concat cuts examples anywhere, so it is only "
                "allowed for text; choose best_fit or greedy"
            )
        if self.tail == "drop" and chosen != "concat":
            raise ConfigError("packing.tail: drop without pack_strategy: concat; only concat has a tail; delete tail")
        return chosen

    def slice_strategy_for(self, kind: RowKind) -> SliceStrategy:
        """Resolve the slice strategy for rows of one kind."""
        # The validator has replaced every alias by its canonical name.
        return self.slice_strategy or ROW_KINDS[kind].slice_strategy  # pyrefly: ignore[bad-return]


# ── The option group `mixture` ──


StopStrategy = Literal["restart", "first_exhausted", "all_exhausted"]

PositiveCount = Annotated[int, Field(ge=1)]

StepNumber = Annotated[int, Field(ge=0)]


def _require_weight(value: float | str) -> float | str:
    try:
        weight = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        weight = Fraction(-1)
    if weight < 0 or "/" in str(value):
        raise ValueError(f"{value!r} is not a weight; expected a decimal of at least 0; write for example 0.3")
    return value


Weight = Annotated[float | int | str, AfterValidator(_require_weight)]

Weights: TypeAlias = dict[str, Weight]

WeightSchedule: TypeAlias = list[tuple[StepNumber, Weights]]

BatchSizeSchedule: TypeAlias = list[tuple[StepNumber, PositiveCount]]


class BlockShuffle(Config):
    """A shuffle that reads neighboring sequences together: blocks are shuffled, then sequences within a window."""

    io_block_size: PositiveCount = 256
    """Sequences per block."""

    window_blocks: PositiveCount = 512
    """Blocks per window, within which sequences are shuffled."""


class Mixture(Config):
    """The options of the group `mixture`: the order of all datasets' sequences."""

    batch_size: PositiveCount | BatchSizeSchedule | None = None
    """Sequences per step over all ranks, or a schedule `[[step, size], …]`; null: there are epochs, but no steps."""

    steps: PositiveCount | None = None
    """Number of steps after which the order ends; null: it ends with the data."""

    epochs: PositiveCount = 1
    """Number of passes over each dataset's sequences."""

    train_weights: Weights | WeightSchedule | None = None
    """Each dataset's share of the sequences, normalized, or stages `[[step, {…}], …]`; null: every sequence exactly
    once per epoch. A dataset without an entry has weight 0."""

    stop_strategy: StopStrategy | None = None
    """With weights: `restart` (the default) repeats exhausted datasets until `steps` end; `first_exhausted` ends with
    the first stream that ends, `all_exhausted` with the last."""

    mixture_block_size: PositiveCount = 2048
    """Sequences per block; at the end of each block every dataset is less than one sequence from its share."""

    block_rounding: Literal["carry", "fixed"] = "carry"
    """`carry`: fractions carry over to the next block; `fixed`: all blocks have the same counts."""

    randomize_blocks: bool = True
    """Whether datasets are shuffled within a block; false: one dataset after another."""

    max_train_batches: dict[str, PositiveCount] | None = None
    """Maximum batches per dataset, counted with the batch size at step 0."""

    num_validation_sequences: dict[str, PositiveCount] | None = None
    """Sequences per dataset held out for validation, instead of a share: whole groups, chosen by hash, until the number
    is reached. The surplus sequences of these groups are left out, not trained on."""

    target_budget: PositiveCount | None = None
    """Sequences (or tokens) of the simulated run; with `experiment_budget`."""

    experiment_budget: PositiveCount | None = None
    """Sequences (or tokens) of this run: each dataset keeps the share experiment_budget / target_budget of its
    sequences."""

    shuffle: bool | Annotated[int, Field(ge=2)] | BlockShuffle = True
    """How the sequences of a pass are shuffled. true: globally; n: within eras of n sequences; or by blocks."""

    permutation_type: PermutationType = "feistel"
    """The permutation that `shuffle` uses: `feistel`, or the cheaper and less random `linear`."""

    reshuffle_each_epoch: bool = True
    """Whether each pass is shuffled again."""

    @model_validator(mode="after")
    def _require_possible(self) -> "Mixture":
        for option, stages in (("batch_size", self.batch_size), ("train_weights", self.train_weights)):
            if not isinstance(stages, list):
                continue
            steps = [step for step, _ in stages]
            if not steps or steps[0] != 0 or any(a >= b for a, b in pairwise(steps)):
                raise ValueError(
                    f"{option} has stages at steps {steps}; stages must start at 0 and ascend; sort them and begin at 0"
                )
        needs = {
            "steps": self.steps is not None,
            "train_weights by stages": isinstance(self.train_weights, list) and len(self.train_weights) > 1,
            "max_train_batches": self.max_train_batches is not None,
        }
        for option, is_set in needs.items():
            if is_set and self.batch_size is None:
                raise ValueError(f"{option} without batch_size; it is counted in batches; set batch_size")
        for step, weights in self.stages or ():
            if not any(weights.values()):
                raise ValueError(f"train_weights at step {step} are all 0; at least one must be positive; increase one")
        if self.train_weights is None and self.block_rounding == "fixed":
            raise ValueError(
                "block_rounding: fixed without train_weights; an epoch has every sequence once, which blocks with "
                "equal counts cannot give; set train_weights, or choose carry"
            )
        if self.train_weights is None and self.stop_strategy is not None:
            raise ValueError(
                f"stop_strategy: {self.stop_strategy} without train_weights; without weights an epoch has every "
                "sequence once; set train_weights, or delete stop_strategy"
            )
        restarts = self.train_weights is not None and self.resolved_stop == "restart"
        if restarts and self.steps is None:
            raise ValueError(
                "stop_strategy: restart without steps never ends; restart (the default with train_weights) "
                "needs steps; set steps, or choose first_exhausted or all_exhausted"
            )
        if restarts and self.epochs > 1:
            raise ValueError(
                f"epochs: {self.epochs} with stop_strategy: restart; restart repeats without end; delete "
                "epochs, or choose first_exhausted or all_exhausted"
            )
        target, experiment = self.target_budget, self.experiment_budget
        if (target is None) != (experiment is None):
            raise ValueError("only one of target_budget and experiment_budget is set; set both or neither")
        if target is not None and experiment is not None and experiment > target:
            raise ValueError(
                f"experiment_budget {experiment} is above target_budget {target}; it must not exceed it; swap them"
            )
        for option in ("max_train_batches", "num_validation_sequences"):
            if target is not None and getattr(self, option) is not None:
                raise ValueError(f"budgets and {option} are both set; only one may limit datasets; delete one")
        return self

    def check_recipe(self, recipe: RecipeSummary) -> None:
        """Refuse names that no dataset has, and numbers of validation sequences beside another choice of them.

        A kind that cannot hold out sequences refuses a number of them itself.
        """
        for field in ("train_weights", "max_train_batches", "num_validation_sequences"):
            value = getattr(self, field)
            stages = value if isinstance(value, (tuple, list)) else [(0, value)]
            for _, weights in cast("Iterable[tuple[int, Mapping[str, float] | None]]", stages):
                for name in weights or {}:
                    if name not in recipe.datasets:
                        raise ValueError(
                            f"mixture.{field}: {name!r} is not a dataset; choose {join_choices(recipe.datasets)}"
                        )
        for name in self.num_validation_sequences or {}:
            for option in recipe.datasets[name].holdout_options:
                raise ValueError(
                    f"mixture.num_validation_sequences.{name} with datasets.{name}.{option}; only one of the two can "
                    "decide which rows are held out; delete one"
                )

    @property
    def resolved_stop(self) -> StopStrategy:
        return self.stop_strategy or "restart"

    @property
    def stages(self) -> list[tuple[int, dict[str, Fraction]]] | None:
        """(first step, weights as exact fractions) of every stage; None without weights."""
        if self.train_weights is None:
            return None
        schedule = self.train_weights if isinstance(self.train_weights, list) else [(0, self.train_weights)]
        return [(step, {name: Fraction(str(value)) for name, value in weights.items()}) for step, weights in schedule]

    @property
    def batch_sizes(self) -> list[tuple[int, int]]:
        """(first step, batch size) of every stage; empty without a batch size."""
        if self.batch_size is None:
            return []
        return [(0, self.batch_size)] if isinstance(self.batch_size, int) else list(self.batch_size)
