"""Options of generation."""

from typing import Annotated, Literal

from pydantic import Field

from rowmill.core.config import Config
from rowmill.kinds.tables.backends import Backend
from rowmill.kinds.tables.parsing import Validation


class Generation(Config):
    """Sampling, the sliding window of series, and validation of generated records.

    The block adds `parsed_records` to the dataset's stages, and with a backend `generated_series`. It does not affect
    the shards.
    """

    temperature: float = Field(default=0.9, ge=0)
    """Sampling temperature; a retry adds 0.1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: probability mass of the tokens that are sampled from."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Penalty on repeated tokens; 1 is none."""
    samples_per_prompt: int = Field(default=5, ge=1)
    """Continuations of a series sampled per round; the one with the most valid records is kept."""
    context_records: int = Field(default=3, ge=1)
    """Previous records of a series in the model's context."""
    parallel_groups: int = Field(default=20, ge=1)
    """Series that are generated concurrently."""
    patience: int = Field(default=3, ge=1)
    """Consecutive bad rounds after which a series fails, or bad batches after which generation of records ends."""
    invalid_fraction_threshold: float = Field(default=0.8, ge=0, le=1)
    """A round is bad if at least this share of its objects is invalid, or if nothing of it is accepted."""
    prefill: Literal["auto", "records", "partial"] = "auto"
    """How a series begins; `records`: after its group's first records; `partial`: after its key and start time only;
    `auto`: records, or partial under differential privacy."""
    max_records_per_group: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Maximum records generated per series; auto: the steps to its stop, or else twice the longest training group."""
    on_failed_group: Literal["drop", "keep"] = "drop"
    """What happens to the records of a failed series; drop: they are rejected as `series_incomplete`."""
    num_records: int = Field(default=1000, ge=1)
    """Records to generate in tabular and grouped mode; groups stay whole, so there may be a few more."""
    text_urls: list[str] | None = None
    """Files of generated text to parse, named as in `source.train_urls`: JSON Lines with a `text` each (or answers of a
    completions server), or `.txt` files of one text each; null: the files in `generated/RECIPE/DATASET/`."""
    backend: Backend | None = None
    """The model server or function that generates; null: only existing text is parsed."""
    validation: Validation = Validation()
    """Repairs of generated groups."""
