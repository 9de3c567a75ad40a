"""The option group `packing`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rowmill.core.config import Config
from rowmill.core.errors import ConfigError
from rowmill.schema.rows import RowKind

SliceStrategy = Literal["keep_start", "keep_end", "error", "split", "drop"]


PackStrategy = Literal["best_fit", "greedy", "concat"]


Strategy = Literal["best_fit", "greedy", "concat", "single"]


_SLICE_ALIASES: dict[str, SliceStrategy] = {"left": "keep_start", "right": "keep_end", "raise": "error"}


_SLICE_DEFAULTS: dict[RowKind, SliceStrategy] = {
    "conversation": "keep_start",
    "pair": "keep_end",
    "text": "split",
    "record": "error",
    "prompt": "error",
    "tokens": "error",
    "preference": "error",
}


def _resolve_slice_alias(name: str) -> str:
    return _SLICE_ALIASES.get(name, name)


SliceOption = Annotated[
    Literal["keep_start", "keep_end", "error", "split", "drop", "left", "right", "raise"],
    AfterValidator(_resolve_slice_alias),
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

    ignore_token_id: Annotated[int, Field(ge=0)] | None = None
    """A token id that is never a target."""

    slice_strategy: SliceOption | None = None
    """What happens to an example of more than `seq_len` tokens. `keep_start` (alias `left`) or `keep_end` (`right`):
    keep these tokens; `error` (`raise`): stop the build; `split`: into several examples; `drop`. Unset: `keep_start`
    for conversations, `keep_end` for pairs, `split` for text, `error` for records."""

    @model_validator(mode="before")
    @classmethod
    def _merge_limits(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given: dict[str, Any] = values
        pack = given.get("pack")
        if not isinstance(pack, int) or isinstance(pack, bool):
            return given
        limit = given.get("max_segments_per_example", pack)
        if limit != pack:
            raise ValueError(
                f"pack: {pack} and max_segments_per_example: {limit} are two limits; only one is allowed, or both "
                "with the same number; delete max_segments_per_example"
            )
        return {**given, "max_segments_per_example": pack}

    @model_validator(mode="after")
    def _require_possible(self) -> "Packing":
        limited = self.pack is not None and self.pack is not True
        if self.pack_strategy == "concat" and limited:
            raise ValueError(
                f"pack_strategy: concat with pack: {str(self.pack).lower()}; concat fills every sequence and "
                "has no limit; delete pack, or choose best_fit or greedy"
            )
        joins = self.pack_strategy == "concat" or (self.pack_strategy is None and self.pack is None)
        if self.tail == "drop" and not joins:
            raise ValueError("tail: drop without pack_strategy: concat; only concat has a tail; delete tail")
        return self

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

        Raises
        ------
        ConfigError
            If rows of this kind cannot be packed that way.

        """
        if self.pack is False:
            return "single"
        chosen = self.pack_strategy or ("concat" if kind == "text" and self.pack is None else "best_fit")
        if chosen == "concat" and kind != "text":
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
        return self.slice_strategy or _SLICE_DEFAULTS[kind]  # pyrefly: ignore[bad-return]
