r"""Loss masks: which characters of a printed conversation train, verified on every row.

What belongs here: the options of the group `loss`, the choice of supervised messages, their trained
characters, and the checks that refuse a row whose mask would be wrong. What does not: printing
(`rendering/`, handed in as a `Printer`), characters → tokens (`tokenizer.py`).

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
                                     └──────── lead ───────┘⟦own text + end of turn⟧└ trailing

    pieces, owned      own text in the print, by search and by proof
    frames             the closed list of template text that may train; frame_probes, probe_shapes: learning it
    cutting            the parts of a turn, and which of them train
    verification       the checks that every mask must pass        shapes   masks of plain chats, a batch at a time

What cannot be verified is a reject with its reason, never a guess.
"""

from rowmill.conversation.masking.loss_mask import MASKING_VERSION, Masker, compute_share_threshold, needs_plain_check
from rowmill.conversation.masking.options import Loss, MaskRules

__all__ = ["MASKING_VERSION", "Loss", "MaskRules", "Masker", "compute_share_threshold", "needs_plain_check"]
