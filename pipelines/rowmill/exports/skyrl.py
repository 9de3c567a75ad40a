"""SkyRL: pre-tokenized rows for its trainer of supervised fine-tuning."""

from typing import Literal

from rowmill.exports.base import ExportContext
from rowmill.exports.masked_rows import MaskedRows


class SkyRL(MaskedRows):
    """Pre-tokenized rows with their mask for SkyRL, which packs them itself."""

    kind: Literal["skyrl"] = "skyrl"
    """`input_ids` and `loss_mask`, and nothing else."""
    unit: Literal["unpacked"] = "unpacked"
    """Segments one by one."""

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the options of its trainer; it cuts rows at `max_length`."""
        name = "eval_pretokenized_dataset_paths" if self.split != "train" else "pretokenized_dataset_paths"
        return f"{name}=\"['{data}']\" max_length={context.seq_len}"
