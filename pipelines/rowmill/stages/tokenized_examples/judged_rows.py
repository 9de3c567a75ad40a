"""Judge a share of the rows by code that shares nothing with rendering and masking.

`checks/mask_judge.py` renders a row as transformers does and finds characters that train, or do not train,
by mistake. It judges masks in which every message of the model is supervised, so a chosen row is masked once more with
the default loss. Which rows are chosen depends on their hashes and `template.verify_render` alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

import numpy as np
import pyarrow as pa

from rowmill.checks.mask_judge import IndependentMaskJudge, JinjaTemplate, MaskDefect, TransformersTemplate
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import DroppedKind, Loss, MaskRules
from rowmill.conversation.renderer import Renderer
from rowmill.core.arrays import Bools
from rowmill.core.json import Json, to_json
from rowmill.schema.rows import Conversation, MaskedConversation, Rejected

_FLAGS = frozenset({"train", "weight"})
_LARGEST = (1 << 64) - 1
"""The largest value of half a hash, as little-endian uint64; a row is in a share up to that share of it."""


def is_judged(row_hash: bytes, share: float) -> bool:
    """Return whether a row is in the share that is judged, which its hash alone determines."""
    return share > 0 and int.from_bytes(row_hash[-8:].ljust(8, b"\0"), "little") <= min(int(share * 2.0**64), _LARGEST)


def choose_by_hash(hashes: pa.FixedSizeBinaryArray, share: float, *, half: int) -> Bools:
    """Return which rows of a column of 16-byte hashes are in a share: bool[N].

    By the first half of the hash (0), or the second (1), as `is_judged` chooses.
    """
    if not len(hashes) or share <= 0:
        return np.zeros(len(hashes), bool)
    words = np.frombuffer(hashes.buffers()[1], "<u8", count=2 * len(hashes), offset=16 * hashes.offset)
    return words[half::2] <= min(int(share * 2.0**64), _LARGEST)


class MaskJudge:
    """Judges masks of one template in which every message of the model is supervised."""

    def __init__(
        self, renderer: Renderer, roles: frozenset[str] = frozenset({"assistant"}), *, remembers: bool = False
    ) -> None:
        """Judge by the template of a renderer: as a `JinjaTemplate` if it `remembers`, or by transformers' function."""
        self._renderer = renderer
        self._roles = roles
        self._remembers = remembers
        self._judges: dict[str, IndependentMaskJudge] = {}

    def judge(self, conversation: Conversation, masked: MaskedConversation) -> list[MaskDefect] | None:
        """Return the defects of a conversation's mask; None if the owners of its text cannot be proven."""
        adaptation = self._renderer.adaptation
        messages, tools = adaptation.messages(conversation.messages), adaptation.tools(conversation.tools)
        trained = [(span.start, span.end) for span in masked.trained]
        return self._get_judge(conversation.kwargs).judge(messages, tools, masked.text, trained)

    def render_prompt(self, conversation: Conversation) -> str | None:
        """Return what transformers would render to ask for an answer; None if the template refuses it."""
        adaptation = self._renderer.adaptation
        messages, tools = adaptation.messages(conversation.messages), adaptation.tools(conversation.tools)
        return self._get_judge(conversation.kwargs).template.render(messages, tools, add_generation_prompt=True)

    def _get_judge(self, kwargs: Mapping[str, Json]) -> IndependentMaskJudge:
        key = to_json(dict(kwargs))
        if key not in self._judges:
            spec = self._renderer.spec
            values = {**spec.template_kwargs, **kwargs}
            kind = JinjaTemplate if self._remembers else TransformersTemplate
            template = kind(spec.text, spec.special_tokens, values, spec.now)
            self._judges[key] = IndependentMaskJudge(template, self._roles, by_blocks=self._renderer.has_blocks)
        return self._judges[key]


class RowJudge:
    """Judges the chosen rows of one dataset."""

    def __init__(self, renderer: Renderer, rules: MaskRules, share: float) -> None:
        """Judge the given share of the rows of a template, 0–1."""
        self.share = share
        counted = dict.fromkeys(get_args(DroppedKind), "count")
        self._masker = Masker(renderer, Loss(), MaskRules(rules.assistant_roles, on_dropped=counted))
        self._judge = MaskJudge(renderer, rules.assistant_roles, remembers=True)

    def reject(self, conversation: Conversation) -> Rejected | None:
        """Return the reject of a row whose text or mask is wrong; None too for a row that is not chosen."""
        if not is_judged(conversation.row_hash, self.share):
            return None
        unflagged = [{k: v for k, v in one.items() if k not in _FLAGS} for one in conversation.messages]
        conversation = replace(conversation, messages=unflagged)
        masked = self._masker.mask(conversation)
        if isinstance(masked, Rejected):
            return None
        for defect in self._judge.judge(conversation, masked) or ():
            if defect.kind == "text_differs":
                return Rejected("render_mismatch", f"character {defect.start}: {defect.text[:40]!r} by rowmill")
            return Rejected("mask_judged_wrong", f"message {defect.message}: {defect.kind} {defect.text[:40]!r}")
        return None

    def reject_prompt(self, conversation: Conversation, prompt: str) -> Rejected | None:
        """Return the reject of a chosen row whose prompt is not what transformers would render."""
        if not is_judged(conversation.row_hash, self.share) or self._judge.render_prompt(conversation) == prompt:
            return None
        return Rejected("render_mismatch", f"prompt {prompt[-40:]!r} by rowmill")
