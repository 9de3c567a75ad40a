"""Read the batches of one build in training order, for any number of ranks, resumable at any batch.

reader = Reader(".rowmill", "demo", rank=0, world_size=2, batch_size=4)
for batch in reader:                      # continues where deliveries stopped
    …                                     # reader.step: which step this was, and whether it is complete
    checkpoint["reader"] = reader.state_dict()
"""

from rowmill.reader.example_losses import ExampleLosses
from rowmill.reader.layouts import Batch
from rowmill.reader.reader import Reader, TrainingStep
from rowmill.reader.sequences import PackedSequence
from rowmill.reader.source_losses import SourceLosses, SourceNames, loss_by_source
from rowmill.reader.views import View

__all__ = [
    "Batch",
    "ExampleLosses",
    "PackedSequence",
    "Reader",
    "SourceLosses",
    "SourceNames",
    "TrainingStep",
    "View",
    "loss_by_source",
]
