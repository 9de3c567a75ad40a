r"""Loss masks: which characters of a rendered conversation train, verified on every row.

What belongs here: the options of the group `loss`, the choice of supervised messages, their trained
characters, and the checks that reject a row whose mask would be wrong. What does not: rendering
(`rendering/`, passed in as a `ChatRenderer`), characters → tokens (`tokenization/alignment.py`).

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
                                   └──────── header ─────┘⟦own text + end of turn⟧└ trailing

    loss_mask          the steps in order: `Masker`               supervision     which messages train
    owned_spans        own text in the render, from its proof
    template_frames    closed list of template text that trains   frame_probes    learns it, with prefix_probes,
                       from rendered_probes of probe_shapes
    turn_cutting       the parts of a turn, and which train       verification    checks that every mask must pass
    turn_layouts       masks of plain chats, a batch at a time

A row whose mask cannot be verified is rejected with a reason, never guessed.
"""

from rowmill.conversation.masking.frame_probes import learn_frames_once
from rowmill.conversation.masking.loss_mask import MASKING_VERSION, Masker, find_plain_checks, needs_plain_check
from rowmill.conversation.masking.options import Loss, MaskRules

__all__ = [
    "MASKING_VERSION",
    "Loss",
    "MaskRules",
    "Masker",
    "find_plain_checks",
    "learn_frames_once",
    "needs_plain_check",
]
