"""The option group `mixture`: weights, shuffling, batch sizes, and where the order ends."""

from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from rowmill.core.config import Config
from rowmill.core.permutation import PermutationType

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
        self._require_ascending_schedules()
        self._require_usable_weights()
        self._require_stop()
        self._require_budgets()
        return self

    def _require_ascending_schedules(self) -> None:
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

    def _require_usable_weights(self) -> None:
        for step, weights in self.stages or ():
            if not any(weights.values()):
                raise ValueError(f"train_weights at step {step} are all 0; at least one must be positive; increase one")
        if self.train_weights is None and self.block_rounding == "fixed":
            raise ValueError(
                "block_rounding: fixed without train_weights; an epoch has every sequence once, which blocks with "
                "equal counts cannot give; set train_weights, or choose carry"
            )

    def _require_stop(self) -> None:
        if self.train_weights is None and self.stop_strategy is not None:
            raise ValueError(
                f"stop_strategy: {self.stop_strategy} without train_weights; without weights an epoch has every "
                "sequence once; set train_weights, or delete stop_strategy"
            )
        if self.train_weights is None or self.resolved_stop != "restart":
            return
        if self.steps is None:
            raise ValueError(
                "stop_strategy: restart without steps never ends; restart (the default with train_weights) "
                "needs steps; set steps, or choose first_exhausted or all_exhausted"
            )
        if self.epochs > 1:
            raise ValueError(
                f"epochs: {self.epochs} with stop_strategy: restart; restart repeats without end; delete "
                "epochs, or choose first_exhausted or all_exhausted"
            )

    def _require_budgets(self) -> None:
        target, experiment = self.target_budget, self.experiment_budget
        if (target is None) != (experiment is None):
            raise ValueError("only one of target_budget and experiment_budget is set; set both or neither")
        if target is None or experiment is None:
            return
        if experiment > target:
            raise ValueError(
                f"experiment_budget {experiment} is above target_budget {target}; it must not exceed it; swap them"
            )
        for option in ("max_train_batches", "num_validation_sequences"):
            if getattr(self, option) is not None:
                raise ValueError(f"budgets and {option} are both set; only one may limit datasets; delete one")

    @property
    def resolved_stop(self) -> StopStrategy:
        """The stop strategy, with its default."""
        return self.stop_strategy or "restart"

    @property
    def stages(self) -> list[tuple[int, dict[str, Fraction]]] | None:
        """(first step, weights as exact fractions) of every stage; None without weights."""
        if self.train_weights is None:
            return None
        given = self.train_weights if isinstance(self.train_weights, list) else [(0, self.train_weights)]
        return [(step, {name: Fraction(str(value)) for name, value in weights.items()}) for step, weights in given]

    @property
    def batch_sizes(self) -> list[tuple[int, int]]:
        """(first step, batch size) of every stage; empty without a batch size."""
        if self.batch_size is None:
            return []
        return [(0, self.batch_size)] if isinstance(self.batch_size, int) else list(self.batch_size)
