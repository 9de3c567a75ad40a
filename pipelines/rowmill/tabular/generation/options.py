"""How a model is asked for records.

What belongs here: the `generation` block of a records dataset. What does not: what the block makes happen.
"""

from typing import Annotated, Literal

from pydantic import Field

from rowmill.core.config import Config
from rowmill.tabular.backends import Backend
from rowmill.tabular.parsing import Validation


class Generation(Config):
    """Sampling, the sliding window of series, and what generated records are held to.

    The block adds `parsed_records` to the dataset's stages, and with a backend `generated_series`. It decides
    nothing of the shards.
    """

    temperature: float = Field(default=0.9, ge=0)
    """Sampling temperature; a retry adds 0.1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Share of probability that is sampled from."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Penalty on repeated tokens; 1 is none."""
    samples_per_prompt: int = Field(default=5, ge=1)
    """Continuations of a series drawn per round, of which the best is kept."""
    context_records: int = Field(default=3, ge=1)
    """Records of a series that the model sees of its past."""
    parallel_groups: int = Field(default=20, ge=1)
    """Series that are generated at once."""
    patience: int = Field(default=3, ge=1)
    """Bad rounds in a row after which a series has failed, or bad batches after which asking for records ends."""
    invalid_fraction_threshold: float = Field(default=0.8, ge=0, le=1)
    """A round is bad if this share of its objects, or more, is invalid, or if nothing of it is accepted."""
    prefill: Literal["auto", "records", "partial"] = "auto"
    """How a series begins; `records`: behind its group's first records; `partial`: behind its key and start time alone;
    `auto`: records, under differential privacy partial."""
    max_records_per_group: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Records generated per series at most; auto: the steps to its stop, else twice the longest training group."""
    on_failed_group: Literal["drop", "keep"] = "drop"
    """What happens to the records of a failed series; drop: to the rejects, `series_incomplete`."""
    num_records: int = Field(default=1000, ge=1)
    """Records that are generated in tabular and grouped mode; of groups, which stay whole, a few more may come."""
    text_urls: list[str] | None = None
    """Files of generated text to parse, named as in `source.train_urls`: JSON Lines with a `text` each (or answers of a
    completions server), or `.txt` files that are one text each; null: what lies in `generated/RECIPE/DATASET/`."""
    backend: Backend | None = None
    """What generates; null: nothing does, and only text that is already there is parsed."""
    validation: Validation = Validation()
    """What becomes of generated groups with something wrong in them."""
