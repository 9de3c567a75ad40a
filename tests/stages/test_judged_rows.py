"""The share of rows that is judged: which rows, that wrong masks are found, and what becomes of such rows."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.checks.mask_judge import MaskDefect
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_registry import list_bundled_templates, read_named_template
from rowmill.inspection.chat_templates import make_probe_conversations
from rowmill.schema.rows import Conversation, MaskedConversation, Span
from rowmill.stages.tokenized_examples import conversation_examples
from rowmill.stages.tokenized_examples.conversation_examples import MaskJudge, RowJudge, is_judged
from rowmill.stages.tokenized_examples.fast_path import choose_by_hash
from tests.support.recipes import CHAT, TO_EXAMPLES, Workspace, chat

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


# ── which rows ──


@given(st.binary(min_size=8, max_size=16))
def test_number_of_rechecked_rows_grows_with_the_share(row_hash: bytes) -> None:
    assert not is_judged(row_hash, 0.0)
    assert is_judged(row_hash, 1.0)
    assert is_judged(row_hash, 0.9) or not is_judged(row_hash, 0.1)


@given(st.lists(st.binary(min_size=16, max_size=16)), st.floats(0, 1), st.integers(0, 3))
def test_column_of_hashes_is_checked_again_as_each_hash_is(hashes: list[bytes], share: float, start: int) -> None:
    column = pa.array(hashes, pa.binary(16)).slice(start)

    assert choose_by_hash(column, share, half=1).tolist() == [is_judged(one, share) for one in hashes[start:]]


# ── what is found ──


@pytest.mark.parametrize("name", list_bundled_templates())
def test_judge_that_remembers_judges_as_one_that_does_not(name: str) -> None:
    renderer = Renderer(RendererSpec(read_named_template(name), TOKENS))
    masker = Masker(renderer, Loss(), MaskRules())
    remembering, forgetting = MaskJudge(renderer, remembers=True), MaskJudge(renderer)
    judged = found = 0
    for probe in make_probe_conversations():
        conversation = Conversation(probe.messages, probe.tools)
        masked = masker.mask(conversation)
        if isinstance(masked, MaskedConversation):
            for one in (masked, *damage(masked)):
                defects = remembering.judge(conversation, one)
                assert defects == forgetting.judge(conversation, one)
                judged += 1
                found += bool(defects)

    assert judged > 20
    assert found > judged // 3


def damage(masked: MaskedConversation) -> list[MaskedConversation]:
    """Return the mask without its first trained span, with one cut short, and with one that begins too early."""
    first, *rest = masked.trained
    changed = ((), (Span(first.start, first.end - 3, 0),), (Span(max(0, first.start - 9), first.end, 0),))
    return [MaskedConversation(masked.text, (*spans, *rest), masked.pieces) for spans in changed]


def test_mask_that_was_made_is_the_one_that_is_judged_and_flags_do_not_make_it_wrong() -> None:
    renderer = Renderer(RendererSpec(read_named_template("qwen3"), TOKENS))
    messages = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So.", "train": False},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Then.", "weight": 0.5},
    ]

    assert RowJudge(renderer, MaskRules(), Loss(), 1.0).reject(Conversation(messages)) is None

    row = Conversation([{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}])
    made = Masker(renderer, Loss(), MaskRules()).mask(row)
    assert isinstance(made, MaskedConversation)
    judge = RowJudge(renderer, MaskRules(), Loss(), 1.0)

    assert judge.reject(row, made) is None
    assert judge.reject(row, damage(made)[0]) is not None
    # With another loss the row is masked once more.
    assert RowJudge(renderer, MaskRules(), Loss(lead="train"), 1.0).reject(row, damage(made)[0]) is None


# ── what becomes of it ──


@pytest.mark.parametrize(
    ("kind", "reason"), [("own_text_untrained", "mask_judged_wrong"), ("text_differs", "render_mismatch")]
)
@pytest.mark.parametrize("on_fast_path", [True, False])
def test_row_that_is_judged_wrong_is_rejected_and_closes_the_gate(
    kind: Any, reason: str, on_fast_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(self: MaskJudge, conversation: Conversation, masked: MaskedConversation) -> list[MaskDefect]:
        wrong = conversation.messages[0]["content"] == rows[1]["messages"][0]["content"]
        return [MaskDefect(kind, 1, 0, 4, masked.text[:4])] if wrong else []

    rows = [chat(i) for i in range(12)]
    monkeypatch.setattr(conversation_examples.MaskJudge, "judge", judge)
    if not on_fast_path:
        rows = [
            {**row, "tools": [{"type": "function", "function": {"name": "find", "parameters": {}}}]} for row in rows
        ]
    template = {"chat_template": "qwen3", "verify_render": 1.0, "on_dropped": {"tool_list": "count"}}
    workspace = Workspace(tmp_path).one("rows.jsonl", rows, CHAT, template=template)

    built = workspace.build(only=TO_EXAMPLES)

    made = built.manifest("rows", "tokenized_examples")
    assert built.rejects("rows") == [(1, reason)]
    assert made.facts["render_equal"] == 1
