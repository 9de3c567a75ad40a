"""Generation with a trained model: whole series step by step, or single records and groups.

| module | contents |
|---|---|
| `options.py` | the `generation` block |
| `rounds.py` | the inputs and results of generation |
| `rounds.py` | one request: temperature, seeds, errors |
| `series.py` | time series in a sliding window |
| `rounds.py` | the state of one series |
| `rounds.py` | tabular and grouped records |
"""

from rowmill.kinds.tables.generation.options import Generation
from rowmill.kinds.tables.generation.rounds import (
    GenerationResult,
    Prefill,
    RejectedObject,
    SeriesOutcome,
    TrainedModel,
    generate_records,
)
from rowmill.kinds.tables.generation.series import generate_series

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
