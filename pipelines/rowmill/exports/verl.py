"""verl: tokenized rows for its supervised fine-tuning, read by a class of ours."""

from typing import Literal

from rowmill.exports.base import ExportContext
from rowmill.exports.masked_rows import MaskedRows

_OPTIONS = {"train": "train_files", "validation": "val_files", "test": "val_files"}


class Verl(MaskedRows):
    """Tokenized rows with their mask for verl's supervised fine-tuning."""

    kind: Literal["verl"] = "verl"
    """`input_ids` and `loss_mask`, which `TokenizedDataset` reads."""
    unit: Literal["unpacked"] = "unpacked"
    """Segments one by one."""

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the options of verl's trainer."""
        return (
            f"data.{_OPTIONS[self.split]}={data} data.max_length={context.seq_len} data.pad_mode=no_padding "
            "data.custom_cls.path=pkg://rowmill.exports.verl_dataset data.custom_cls.name=TokenizedDataset"
        )
