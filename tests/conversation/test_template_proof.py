"""The proof of masks: no defect in the masks of bundled and public templates, and every injected defect is named."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from docs.generate.template_table import list_template_names, read_template_file
from rowmill.checks.mask_judge import IndependentMaskJudge, MaskDefectKind, TransformersTemplate
from rowmill.cli import main
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_engines import replace_generation_tags
from rowmill.conversation.template_registry import list_bundled_templates, read_named_template
from rowmill.core.console import render_text
from rowmill.inspection.chat_templates import (
    MaskJudge,
    ProbeConversation,
    ShapeProof,
    TemplateProof,
    make_probe_conversations,
    prove_template,
)
from rowmill.reports.row_view import DEFECT_SENTENCES, describe_defect, render_proof
from rowmill.schema.ledger import REASON_DESCRIPTIONS
from rowmill.schema.rows import Conversation, MaskedConversation
from tests.end_to_end.test_real_templates import TEMPLATES
from tests.support.cli_project import FOREIGN_WARNINGS, CliProject
from tests.support.tiers import mark_all_but

pytestmark = FOREIGN_WARNINGS
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
END = "<|im_end|>"


def prove(text: str) -> TemplateProof:
    return prove_template(Renderer(RendererSpec(text, TOKENS)))


def defects_of(proof: TemplateProof) -> list[tuple[str, str]]:
    """Return the defects of all shapes, each with the description of its shape."""
    return [(shape.probe.description, describe_defect(defect)) for shape in proof.shapes for defect in shape.defects]


# ── correct masks ──


@pytest.mark.slow
@pytest.mark.parametrize("listed", [False, pytest.param(True, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", mark_all_but(["chatml", "llama3.1", "qwen3"], list_bundled_templates()))
def test_proof_of_bundled_template_finds_no_defect(name: str, listed: bool) -> None:
    text = read_named_template(name)
    proof = prove(replace_generation_tags(text) if listed else text)

    assert defects_of(proof) == []
    assert proof.count("not_provable") == 0
    assert proof.count("proven") >= 7
    assert all(reason in REASON_DESCRIPTIONS for reason, _ in proof.refusals)


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize(
    "name",
    mark_all_but(["llamacpp__openai-gpt-oss-120b", "axolotl__mistral_v3_tekken", "trl__qwen3_training"], TEMPLATES),
)
def test_proof_of_public_template_finds_no_defect(name: str, real_data: Path) -> None:
    assert name in list_template_names(real_data)
    text = read_template_file(real_data, name)
    for template in dict.fromkeys((text, replace_generation_tags(text))):
        proof = prove(template)

        assert defects_of(proof) == []
        assert proof.count("not_provable") == 0
        assert all(REASON_DESCRIPTIONS[reason].remedy for reason, _ in proof.refusals)


@pytest.mark.slow
def test_proof_of_a_template_without_an_end_after_calls_says_so() -> None:
    turn = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content or '' }}"
    printed = "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    call = "{% if m.tool_calls %}{% for c in m.tool_calls %}" + printed + "{% endfor %}\n"
    ending = "{% else %}<|end|>{% endif %}{% endfor %}"
    prompt = "{% if add_generation_prompt or messages[-1].tool_calls %}<|start|>assistant\n{% endif %}"
    renderer = Renderer(RendererSpec(turn + call + ending + prompt, TOKENS))
    proof = prove_template(renderer, MaskRules(on_dropped={"tool_list": "count"}))

    assert defects_of(proof) == []
    assert any("prints '<|start|>assistant', which is not an end of turn" in fact for fact in proof.facts)


def test_proof_does_not_take_a_result_without_letters_for_the_end_of_the_call() -> None:
    renderer = Renderer(RendererSpec(read_named_template("glm4"), TOKENS))
    [probe, *_] = [one for one in make_probe_conversations() if one.shape == "ucta"]
    conversation = Conversation([*probe.messages[:2], {**probe.messages[2], "content": "[]"}], probe.tools)
    masked = Masker(renderer, Loss(), MaskRules()).mask(conversation)

    assert isinstance(masked, MaskedConversation)
    assert "[]" in masked.text
    assert MaskJudge(renderer).judge(conversation, masked) == []


@pytest.mark.parametrize(("answer", "is_provable"), [("Yes, please.", False), ("No, thanks.", True)])
def test_proof_skips_an_answer_that_it_cannot_hide(answer: str, is_provable: bool) -> None:
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
    # A template that compares messages prints different text if equal ones are hidden.
    asked = "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    last = asked + "{{ asked[-1].content == 'Yes, please.' }}"
    now = Renderer(RendererSpec(read_named_template("chatml"), TOKENS)).spec.now
    template = TransformersTemplate(last + turns, TOKENS, {}, now)
    question = {"role": "user", "content": "Yes, please."}
    answers = [{"role": "assistant", "content": one} for one in (answer, "Done, four.")]
    messages = [question, answers[0], question, answers[1]]
    text = template.render(messages, None)
    assert text is not None
    found = IndependentMaskJudge(template).judge(messages, None, text, [])

    assert (found is not None) == is_provable


def test_probe_conversations_are_all_different_and_of_both_kinds() -> None:
    probes = list(make_probe_conversations())

    assert len({probe.description for probe in probes}) == len(probes)
    assert {probe.tools is None for probe in probes} == {True, False}


# ── wrong masks ──


@dataclass
class Mask:
    """A correct mask, to be damaged."""

    judge: IndependentMaskJudge
    conversation: Conversation
    text: str
    trains: bytearray

    @classmethod
    def of(cls, name: str, shape: str) -> "Mask":
        renderer = Renderer(RendererSpec(read_named_template(name), TOKENS))
        [probe, *_] = [one for one in make_probe_conversations() if one.shape == shape]
        adaptation = renderer.adaptation
        conversation = Conversation(adaptation.messages(probe.messages), adaptation.tools(probe.tools))
        template = TransformersTemplate(read_named_template(name), TOKENS, {}, renderer.spec.now)
        masked = Masker(renderer, Loss(), MaskRules()).mask(Conversation(probe.messages, probe.tools))
        text = (
            masked.text
            if isinstance(masked, MaskedConversation)
            else template.render(conversation.messages, conversation.tools)
        )
        assert text is not None
        mask = cls(IndependentMaskJudge(template), conversation, text, bytearray(len(text)))
        for span in masked.trained if isinstance(masked, MaskedConversation) else ():
            mask.set(span.start, span.end, train=True)
        return mask

    def set(self, start: int, end: int, *, train: bool) -> None:
        self.trains[start:end] = bytes([train]) * (end - start)

    def set_text(self, text: str, *, train: bool, after: str = "") -> None:
        start = self.text.index(text, self.text.index(after))
        self.set(start, start + len(text), train=train)

    def append(self, text: str) -> None:
        self.text += text
        self.trains += b"\1" * len(text)

    def kinds(self) -> list[str]:
        ranges = [(i, i + 1) for i, trains in enumerate(self.trains) if trains]
        found = self.judge.judge(self.conversation.messages, self.conversation.tools, self.text, ranges)
        assert found is not None
        return [defect.kind for defect in found]


def _end_masked(mask: Mask) -> None:
    mask.set_text(END, train=False, after="It is four, a1.")


def _last_end_masked(mask: Mask) -> None:
    mask.set_text(END, train=False, after="It is four, a3.")


def _header_trained(mask: Mask) -> None:
    mask.set_text("<|im_start|>assistant\n", train=True, after="u2")


def _preamble_trained(mask: Mask) -> None:
    mask.set(0, mask.text.index(END), train=True)


def _first_token_untrained(mask: Mask) -> None:
    mask.set_text("It", train=False)


def _last_character_untrained(mask: Mask) -> None:
    mask.set_text("3", train=False, after="It is four, a")


def _second_end_trained(mask: Mask) -> None:
    mask.append(END)


def _next_header_trained(mask: Mask) -> None:
    mask.set_text("<|im_start|>user", train=True, after="It is four, a1.")


def _text_changed(mask: Mask) -> None:
    mask.text = mask.text.replace("What", "Whot")


def _question_trained(mask: Mask) -> None:
    mask.set_text("it", train=True, after="What is it, u2")


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (_end_masked, "end_untrained"),
        (_last_end_masked, "end_untrained"),
        (_header_trained, "header_trained"),
        (_preamble_trained, "header_trained"),
        (_first_token_untrained, "own_text_untrained"),
        (_last_character_untrained, "own_text_untrained"),
        (_second_end_trained, "wrong_end"),
        (_next_header_trained, "wrong_end"),
        (_text_changed, "text_differs"),
        (_question_trained, "other_text_trained"),
    ],
)
def test_proof_names_a_defect_in_a_chat(spoil: Callable[[Mask], None], kind: MaskDefectKind) -> None:
    mask = Mask.of("qwen2.5", "uaua")
    assert mask.kinds() == []

    spoil(mask)
    assert set(mask.kinds()) == {kind}


@pytest.mark.parametrize(
    ("text", "after", "train", "kind"),
    [
        ("found", "<tool_response>", True, "other_text_trained"),
        ('": "', '{"result', True, "other_text_trained"),
        ('<tool_call>\n{"name', "assistant\n", False, "start_untrained"),
        ("arguments", "assistant\n<tool_call>", False, "frame_untrained"),
        ("</tool_call>", "assistant\n<tool_call>", False, "end_untrained"),
        ("Weather", "", True, "other_text_trained"),
    ],
)
def test_proof_names_a_defect_in_a_tool_dialogue(text: str, after: str, train: bool, kind: MaskDefectKind) -> None:
    mask = Mask.of("qwen2.5", "ucta")
    assert mask.kinds() == []

    mask.set_text(text, train=train, after=after)
    assert set(mask.kinds()) == {kind}


def test_proof_with_a_leading_assistant_names_the_default_system_turn_that_trains() -> None:
    mask = Mask.of("qwen2.5", "aua")
    assert mask.kinds() == []

    mask.set_text("You are", train=True)
    assert set(mask.kinds()) == {"header_trained"}


def test_proof_names_an_answer_that_trains_without_being_printed() -> None:
    mask = Mask.of("zephyr", "uo")
    assert mask.kinds() == []

    mask.set(mask.text.rindex("</s>"), len(mask.text), train=True)
    assert set(mask.kinds()) == {"empty_answer_trained"}


def test_proof_names_an_empty_think_block_that_does_not_train() -> None:
    mask = Mask.of("qwen3", "ua")
    assert mask.kinds() == []

    mask.set_text("<think>\n\n</think>", train=False)
    assert set(mask.kinds()) == {"start_untrained"}


def test_proof_of_a_template_that_depends_on_the_text_is_impossible() -> None:
    text = "{% for m in messages %}{{ m.content | length if 'What' in m.content else m.content }};{% endfor %}"
    template = TransformersTemplate(text, TOKENS, {}, Renderer(RendererSpec(text)).spec.now)
    messages = [{"role": "user", "content": "What"}, {"role": "assistant", "content": "Four"}]

    assert IndependentMaskJudge(template).judge(messages, None, "4;Four;", [(2, 7)]) is None


def test_clock_of_the_proven_template_is_fixed() -> None:
    text = "\n{{ strftime_now('%Y') }} {{ messages[0].content }}"
    template = TransformersTemplate(text, TOKENS, {}, Renderer(RendererSpec(text)).spec.now)

    assert template.render([{"role": "user", "content": "Hi"}], None) == "\n2025 Hi"


# ── the page ──


def page_of(shapes: Sequence[ShapeProof]) -> str:
    return render_text(render_proof("chats", TemplateProof(("Reasoning is not printed.",), tuple(shapes))))


def test_page_names_rejected_rows_and_the_remedy() -> None:
    shape = ShapeProof(
        ProbeConversation("ua", "user → answer", (), None), "refused", reason="content_dropped", detail="tool_list"
    )

    lines = page_of([shape]).splitlines()

    assert lines[1].split(maxsplit=1)[1] == "1 shape: 0 proven · 1 refused · 0 wrong masks"
    assert "Reasoning is not printed." in lines[2]
    assert "content_dropped · tool_list" in lines[3]
    assert REASON_DESCRIPTIONS["content_dropped"].remedy in lines[4]


def test_every_kind_of_defect_has_a_description() -> None:
    assert set(DEFECT_SENTENCES) == set(get_args(MaskDefectKind))


@pytest.mark.slow
def test_template_report_with_prove_shows_trained_text_and_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = CliProject(tmp_path).write()
    project.write_recipe(datasets=project_datasets(chat_template="chatml"))

    assert project.rowmill("template-report", "--prove") == main.ExitStatus.SUCCESS
    out = capsys.readouterr().out
    assert "42 shapes: 42 proven" in out
    assert "<|im_start|>assistant\n⟦It is four, a1.<|im_end|>⟧" in out


@pytest.mark.slow
def test_template_report_with_prove_of_a_template_without_ends_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    project = CliProject(tmp_path).write()
    project.write_recipe(datasets=project_datasets(chat_template=blocks))

    assert project.rowmill("template-report", "--prove") == main.ExitStatus.PROBLEM_FOUND
    out = capsys.readouterr().out
    assert "end of turn '<end>' is not trained" in " ".join(out.split())
    assert "set loss.end_of_turn: train" in out


def project_datasets(**template: str) -> dict[str, Any]:
    source = {"train_urls": ["data/chats.jsonl"]}
    return {"chats": {"source": source, "format": {"kind": "chat"}, "template": template}}
