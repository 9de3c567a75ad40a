"""Options of packing.

What belongs here: the option group `packing` and its defaults per kind of row. What does not: what the options do
(`slicing.py`, `plan.py`, `layout.py`).
"""

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
}


def _resolve_slice_alias(name: str) -> str:
    return _SLICE_ALIASES.get(name, name)


SliceOption = Annotated[
    Literal["keep_start", "keep_end", "error", "split", "drop", "left", "right", "raise"],
    AfterValidator(_resolve_slice_alias),
]


class Packing(Config):
    """How the examples of one dataset share sequences."""

    pack: bool | Annotated[int, Field(ge=1)] | None = None
    """Examples per sequence: true: up to `max_segments_per_example`; false: one; n: at most n; unset: true, and text
    datasets join their documents (`concat`)."""

    max_segments_per_example: Annotated[int, Field(ge=1)] | None = None
    """Maximum examples per sequence, if `pack` is not a number; null: no limit. Levanter's is 64."""

    pack_strategy: PackStrategy | None = None
    """`best_fit` needs the fewest sequences, `greedy` keeps example order, `concat` (text only) joins documents
    and cuts every `seq_len` tokens; unset is `best_fit`, for text with `pack` unset `concat`."""

    tail: Literal["keep", "drop"] = "keep"
    """What `concat` does with the last, shorter sequence; dropped tokens are recorded."""

    block_cross_document_attention: bool = True
    """Whether each example is a separate attention span; false: the whole sequence is one span."""

    ignore_token_id: Annotated[int, Field(ge=0)] | None = None
    """A token id that is never a target."""

    slice_strategy: SliceOption | None = None
    """What happens to an example of more than `seq_len` tokens: `keep_start` (alias `left`) or `keep_end`
    (`right`) name the tokens that stay, `error` (`raise`), `split` into examples, `drop`; unset:
    conversations keep their start, pairs their end, text is split, records are an error."""

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
                f"pack: {pack} and max_segments_per_example: {limit} name two limits; one of them may be "
                "given, or both with the same number; delete max_segments_per_example"
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
    def segment_limit(self) -> int | None:
        """Examples per sequence at most; None for no limit."""
        return 1 if self.pack is False else self.max_segments_per_example

    def strategy_for(self, kind: RowKind) -> Strategy:
        """Resolve the strategy for rows of one kind; ConfigError if the kind cannot be packed that way."""
        if self.pack is False:
            return "single"
        chosen = self.pack_strategy or ("concat" if kind == "text" and self.pack is None else "best_fit")
        if chosen == "concat" and kind != "text":
            raise ConfigError(
                f"packing.pack_strategy: concat for rows of kind {kind}; concat cuts anywhere and is for "
                "text only; choose best_fit or greedy"
            )
        if self.tail == "drop" and chosen != "concat":
            raise ConfigError("packing.tail: drop without pack_strategy: concat; only concat has a tail; delete tail")
        return chosen

    def slice_strategy_for(self, kind: RowKind) -> SliceStrategy:
        """Resolve what happens to a too long example, for rows of one kind."""
        # The validator has turned every alias into its canonical name.
        return self.slice_strategy or _SLICE_DEFAULTS[kind]  # pyright: ignore[reportReturnType]
