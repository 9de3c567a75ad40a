"""A trained model asked for records: whole series step by step, or single records and groups.

What belongs here: the table of contents, and the values that both ways share. What does not: how a backend is
reached (`backends/`), what makes an object a record (`parsing/`).

| module | what is in it |
|---|---|
| `options.py` | the `generation` block |
| `outcome.py` | what was trained on, what came out |
| `series.py` | time series in a sliding window, that always end |
| `rounds.py` | one series: its window, its bound, what a round did to it |
| `batches.py` | tabular and grouped records |
"""

from rowmill.tabular.generation.batches import generate_records
from rowmill.tabular.generation.options import Generation
from rowmill.tabular.generation.outcome import GenerationResult, Prefill, RejectedObject, SeriesOutcome, TrainedModel
from rowmill.tabular.generation.series import generate_series

__all__ = [
    "Generation",
    "GenerationResult",
    "Prefill",
    "RejectedObject",
    "SeriesOutcome",
    "TrainedModel",
    "generate_records",
    "generate_series",
]  # fmt: skip
