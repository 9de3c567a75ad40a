"""Options of the mixture: weights, shuffling, batch sizes, and where the order ends.

What belongs here: the option group `mixture` and the checks that need no data. What does not: the order that follows
from the options (`mixture.py`).
"""

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
        raise ValueError(f"{value!r} is not a weight; a weight is a decimal of 0 or more; write one such as 0.3")
    return value


Weight = Annotated[float | int | str, AfterValidator(_require_weight)]


Weights: TypeAlias = dict[str, Weight]


WeightSchedule: TypeAlias = list[tuple[StepNumber, Weights]]


BatchSizeSchedule: TypeAlias = list[tuple[StepNumber, PositiveCount]]


class BlockShuffle(Config):
    """A shuffle that reads neighbouring sequences together: whole blocks move, then mix within a window."""

    io_block_size: PositiveCount = 256
    """Sequences per block."""

    window_blocks: PositiveCount = 512
    """Blocks per window, inside which sequences are shuffled."""


class Mixture(Config):
    """How the sequences of all datasets become one order."""

    batch_size: PositiveCount | BatchSizeSchedule | None = None
    """Sequences per step, all ranks together; or a schedule `[[step, size], …]`; null: only
    epochs count."""

    steps: PositiveCount | None = None
    """Steps after which the order ends; null: it ends with the data."""

    epochs: PositiveCount = 1
    """Number of passes over each dataset's sequences."""

    train_weights: Weights | WeightSchedule | None = None
    """Share of each dataset in sequences, normalized; or stages `[[step, {…}], …]`; null: every sequence exactly once
    per epoch. A dataset that is not named has weight 0."""

    stop_strategy: StopStrategy | None = None
    """With weights: `restart` (the default) repeats exhausted datasets until `steps` end, `first_exhausted` ends with
    the first stream that ends, `all_exhausted` with the last."""

    mixture_block_size: PositiveCount = 2048
    """Sequences per block; at each block's end every dataset is less than one sequence from its share."""

    block_rounding: Literal["carry", "fixed"] = "carry"
    """`carry`: fractions carry over to the next block; `fixed`: each block has the same counts."""

    randomize_blocks: bool = True
    """Whether the datasets are shuffled within a block; false: one dataset after another."""

    max_train_batches: dict[str, PositiveCount] | None = None
    """Maximum batches of a dataset, counted with the batch size at step 0."""

    num_validation_sequences: dict[str, PositiveCount] | None = None
    """Sequences per dataset held out for validation, instead of a share: whole groups by their hash until the number is
    reached. Further sequences of these groups are left out, not trained on."""

    target_budget: PositiveCount | None = None
    """Sequences (or tokens) of the simulated run; with `experiment_budget`."""

    experiment_budget: PositiveCount | None = None
    """Sequences (or tokens) of this run: each dataset keeps the share experiment / target of its
    sequences."""

    shuffle: bool | Annotated[int, Field(ge=2)] | BlockShuffle = True
    """How the sequences of a pass are shuffled: true: over the whole set; n: within eras of n; or by blocks."""

    permutation_type: PermutationType = "feistel"
    """The permutation behind `shuffle`: `feistel`, or the cheaper and less random `linear`."""

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
                    f"{option} has stages at steps {steps}; stages start at 0 and ascend; sort them and begin with 0"
                )
        needs = {
            "steps": self.steps is not None,
            "train_weights by stages": isinstance(self.train_weights, list) and len(self.train_weights) > 1,
            "max_train_batches": self.max_train_batches is not None,
        }
        for option, is_set in needs.items():
            if is_set and self.batch_size is None:
                raise ValueError(f"{option} without batch_size; it counts in batches; set batch_size")

    def _require_usable_weights(self) -> None:
        for step, weights in self.stages or ():
            if not any(weights.values()):
                raise ValueError(f"train_weights at step {step} are all 0; at least one must be positive; raise one")
        if self.train_weights is None and self.block_rounding == "fixed":
            raise ValueError(
                "block_rounding: fixed without train_weights; equal counts in every block cannot show each "
                "sequence once; set train_weights, or choose carry"
            )

    def _require_stop(self) -> None:
        if self.train_weights is None and self.stop_strategy is not None:
            raise ValueError(
                f"stop_strategy: {self.stop_strategy} without train_weights; without weights an epoch shows "
                "every sequence once; set train_weights, or delete stop_strategy"
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
            raise ValueError("only one of target_budget and experiment_budget; set both or neither; set the other")
        if target is None or experiment is None:
            return
        if experiment > target:
            raise ValueError(
                f"experiment_budget {experiment} is above target_budget {target}; it is a share of it; exchange them"
            )
        for option in ("max_train_batches", "num_validation_sequences"):
            if getattr(self, option) is not None:
                raise ValueError(f"budgets with {option}; only one of the two may limit datasets; delete one")

    @property
    def resolved_stop(self) -> StopStrategy:
        """The stop strategy in force."""
        return self.stop_strategy or "restart"

    @property
    def stages(self) -> list[tuple[int, dict[str, Fraction]]] | None:
        """The weights as exact fractions, by the step at which they begin; None without weights."""
        if self.train_weights is None:
            return None
        given = self.train_weights if isinstance(self.train_weights, list) else [(0, self.train_weights)]
        return [(step, {name: Fraction(str(value)) for name, value in weights.items()}) for step, weights in given]

    @property
    def batch_sizes(self) -> list[tuple[int, int]]:
        """The batch size by the step at which it begins; empty without one."""
        if self.batch_size is None:
            return []
        return [(0, self.batch_size)] if isinstance(self.batch_size, int) else list(self.batch_size)
