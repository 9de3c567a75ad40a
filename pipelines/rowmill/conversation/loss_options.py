"""The options of the group `loss`, and the options of other groups that a masker reads.

What belongs here: which text trains, as the recipe says. What does not: finding that text (`loss_mask.py`).
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from rowmill.core.config import Config
from rowmill.core.frozen_classes import frozen_dataclass


class Loss(Config):
    """The options of the group `loss`: which text trains."""

    mask: dict[str, Literal["mask", "train"]] = Field(default_factory=dict[str, Literal["mask", "train"]])
    """Role (or `prompt`, `response` of pairs) → whether it trains; replaces the default, the model's roles."""
    mask_default: Literal["mask", "train"] = "mask"
    """Whether roles that `mask` does not name train."""
    mask_user_turns: bool = True
    """False: every token but the first trains; excludes mask, supervise, think_loss and weights."""
    mask_inputs: bool = True
    """The same option for pairs."""
    supervise: Literal["all_assistant", "last_assistant", "last_turn"] = "all_assistant"
    """Which of the model's messages train: all, the last one, or all after the last user message."""
    think_loss: Literal["all", "answer_only", "answer_plus_think"] = "all"
    """Whether reasoning trains together with its tags, not at all, or without its tags."""
    lead: Literal["mask", "train"] | None = None
    """Whether the assistant's header trains, which is part of the prompt at inference; null: as the template's
    `{% generation %}` blocks decide, mask without blocks."""
    end_of_turn: Literal["train", "mask"] | None = None
    """Whether the end-of-turn token trains; a model that is not trained on it never stops; null: as the blocks
    decide, train without blocks."""
    trailing: Literal["mask", "train"] | None = None
    """Whether white space after the end of turn trains; null: as the blocks decide, mask without blocks."""
    finish: str = "auto"
    """Text appended to a render that lacks an end of turn: auto, none, eos, or the text itself."""
    boundary: Literal["whole", "split"] | None = None
    """Encode the text as a whole, or split it where training starts; null: split for pairs, else whole."""
    weights: bool = False
    """Whether messages may have weights other than 0 and 1; tokens then have float32 `loss_weights`, 1 by default."""

    @model_validator(mode="after")
    def _check_contradictions(self) -> "Loss":
        everything = not self.mask_user_turns or not self.mask_inputs
        chosen = [
            name
            for name, given in (
                ("mask", bool(self.mask) or self.mask_default != "mask"),
                ("supervise", self.supervise != "all_assistant"),
                ("think_loss", self.think_loss != "all"),
                ("weights", self.weights),
            )
            if given
        ]
        if everything and chosen:
            raise ValueError(
                f"mask_user_turns/mask_inputs: false trains every token, but {' and '.join(chosen)} selects text to "
                "train; only one of the two is allowed; delete the other"
            )
        return self

    @property
    def trains_everything(self) -> bool:
        """Whether every token but the first trains."""
        return not self.mask_user_turns or not self.mask_inputs


@frozen_dataclass
class MaskRules:
    """Options of other groups that a masker reads, as plain values."""

    assistant_roles: frozenset[str] = frozenset({"assistant"})
    spans: Literal["auto", "generation"] = "auto"
    on_dropped: Mapping[str, str] | None = None
    verify_render: float = 0.02
    turns: Literal["whole", "exchange", "message", "auto"] = "whole"
