"""The proof of masks: no defect in the masks of bundled and public templates, and every injected defect is named."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

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
from tests.support.cli_project import CliProject
from tests.support.messages import assistant, trained_characters, user
from tests.support.tiers import mark_all_but

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
END = "<|im_end|>"


def prove(text: str) -> TemplateProof:
    return prove_template(Renderer(RendererSpec(text, TOKENS)))


def defects_of(proof: TemplateProof) -> list[tuple[str, str]]:
    """Return the defects of all shapes, each with the description of its shape."""
    return [(shape.probe.description, describe_defect(defect)) for shape in proof.shapes for defect in shape.defects]


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
        assert (defects_of(proof), proof.count("not_provable")) == ([], 0)
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


def probe_of(shape: str) -> ProbeConversation:
    """Return the first probe of a shape: `u` asks, `c` calls, `t` answers the call, `a` answers."""
    return next(probe for probe in make_probe_conversations() if probe.shape == shape)


def test_proof_does_not_take_a_result_without_letters_for_the_end_of_the_call() -> None:
    renderer, probe = Renderer(RendererSpec(read_named_template("glm4"), TOKENS)), probe_of("ucta")
    conversation = Conversation([*probe.messages[:2], {**probe.messages[2], "content": "[]"}], probe.tools)
    masked = Masker(renderer, Loss(), MaskRules()).mask(conversation)

    assert isinstance(masked, MaskedConversation)
    assert "[]" in masked.text
    assert MaskJudge(renderer).judge(conversation, masked) == []


NOW = RendererSpec("").now


@pytest.mark.parametrize(("answer", "is_provable"), [("Yes, please.", False), ("No, thanks.", True)])
def test_proof_skips_an_answer_that_it_cannot_hide(answer: str, is_provable: bool) -> None:
    # A template that compares messages prints different text if equal ones are hidden.
    last = (
        "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ asked[-1].content == 'Yes, please.' }}"
    )
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
    template = TransformersTemplate(last + turns, TOKENS, {}, NOW)
    messages = [user("Yes, please."), assistant(answer), user("Yes, please."), assistant("Done, four.")]
    text = template.render(messages, None)

    assert text is not None
    found = IndependentMaskJudge(template).judge(messages, None, text, [])
    assert (found is not None) == is_provable


@dataclass
class Mask:
    """A correct mask, to be damaged."""

    judge: IndependentMaskJudge
    conversation: Conversation
    text: str
    trains: bytearray

    @classmethod
    def of(cls, name: str, shape: str) -> "Mask":
        renderer, probe = Renderer(RendererSpec(read_named_template(name), TOKENS)), probe_of(shape)
        adaptation = renderer.adaptation
        conversation = Conversation(adaptation.messages(probe.messages), adaptation.tools(probe.tools))
        template = TransformersTemplate(read_named_template(name), TOKENS, {}, renderer.spec.now)
        masked = Masker(renderer, Loss(), MaskRules()).mask(Conversation(probe.messages, probe.tools))
        if isinstance(masked, MaskedConversation):
            text, trained = masked.text, trained_characters(masked)
        else:
            text, trained = template.render(conversation.messages, conversation.tools), set[int]()
        assert text is not None
        return cls(
            IndependentMaskJudge(template), conversation, text, bytearray(i in trained for i in range(len(text)))
        )

    def set(self, start: int, end: int, *, train: bool) -> None:
        self.trains[start:end] = bytes([train]) * (end - start)

    def set_text(self, text: str, *, train: bool, after: str = "") -> None:
        start = self.text.index(text, self.text.index(after))
        self.set(start, start + len(text), train=train)

    def set_until(self, text: str) -> None:
        self.set(0, self.text.index(text), train=True)

    def set_last(self, text: str) -> None:
        self.set(self.text.rindex(text), len(self.text), train=True)

    def append(self, text: str) -> None:
        self.text += text
        self.trains += b"\1" * len(text)

    def replace(self, old: str, new: str) -> None:
        self.text = self.text.replace(old, new)

    def kinds(self) -> list[str]:
        ranges = [(i, i + 1) for i, trains in enumerate(self.trains) if trains]
        found = self.judge.judge(self.conversation.messages, self.conversation.tools, self.text, ranges)
        assert found is not None
        return [defect.kind for defect in found]


CHAT, CALLS = ("qwen2.5", "uaua"), ("qwen2.5", "ucta")
CALL_HEADER = "assistant\n<tool_call>"


@pytest.mark.parametrize(
    ("probe", "spoil", "kind"),
    [
        (CHAT, lambda mask: mask.set_text(END, train=False, after="It is four, a1."), "end_untrained"),
        (CHAT, lambda mask: mask.set_text(END, train=False, after="It is four, a3."), "end_untrained"),
        (CHAT, lambda mask: mask.set_text("<|im_start|>assistant\n", train=True, after="u2"), "header_trained"),
        (CHAT, lambda mask: mask.set_until(END), "header_trained"),
        (CHAT, lambda mask: mask.set_text("It", train=False), "own_text_untrained"),
        (CHAT, lambda mask: mask.set_text("3", train=False, after="It is four, a"), "own_text_untrained"),
        (CHAT, lambda mask: mask.append(END), "wrong_end"),
        (CHAT, lambda mask: mask.set_text("<|im_start|>user", train=True, after="It is four, a1."), "wrong_end"),
        (CHAT, lambda mask: mask.replace("What", "Whot"), "text_differs"),
        (CHAT, lambda mask: mask.set_text("it", train=True, after="What is it, u2"), "other_text_trained"),
        (CALLS, lambda mask: mask.set_text("found", train=True, after="<tool_response>"), "other_text_trained"),
        (CALLS, lambda mask: mask.set_text('": "', train=True, after='{"result'), "other_text_trained"),
        (CALLS, lambda mask: mask.set_text('<tool_call>\n{"name', train=False, after="assistant\n"), "start_untrained"),
        (CALLS, lambda mask: mask.set_text("arguments", train=False, after=CALL_HEADER), "frame_untrained"),
        (CALLS, lambda mask: mask.set_text("</tool_call>", train=False, after=CALL_HEADER), "end_untrained"),
        (CALLS, lambda mask: mask.set_text("Weather", train=True), "other_text_trained"),
        # The default system turn before a leading answer, an answer that is not printed, an empty think block.
        (("qwen2.5", "aua"), lambda mask: mask.set_text("You are", train=True), "header_trained"),
        (("zephyr", "uo"), lambda mask: mask.set_last("</s>"), "empty_answer_trained"),
        (("qwen3", "ua"), lambda mask: mask.set_text("<think>\n\n</think>", train=False), "start_untrained"),
    ],
)  # fmt: skip
def test_proof_names_a_defect(probe: tuple[str, str], spoil: Callable[[Mask], None], kind: MaskDefectKind) -> None:
    mask = Mask.of(*probe)
    assert mask.kinds() == []
    spoil(mask)
    assert set(mask.kinds()) == {kind}


def test_proof_of_text_that_decides_is_impossible_and_its_clock_is_fixed() -> None:
    text = "{% for m in messages %}{{ m.content | length if 'What' in m.content else m.content }};{% endfor %}"
    judge = IndependentMaskJudge(TransformersTemplate(text, TOKENS, {}, NOW))
    assert judge.judge([user("What"), assistant("Four")], None, "4;Four;", [(2, 7)]) is None

    template = TransformersTemplate("\n{{ strftime_now('%Y') }} {{ messages[0].content }}", TOKENS, {}, NOW)
    assert template.render([user("Hi")], None) == "\n2025 Hi"


RESULTS_WITHIN_CALLS = """{% for m in messages %}{% if m.role != "tool" %}{% set here = loop.index %}<|turn>{{ m.role }}
{% for c in m.tool_calls or [] %}<|call>{{ c.function.name }}{{ c.function.arguments | tojson }}<call|><|result>
{%- if here < messages | length and messages[here].role == "tool" %}{{ messages[here].content }}<result|>{% endif %}
{% endfor %}{{ m.content }}{% if m.content %}<turn|>{% endif %}
{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role != "tool" %}<|turn>assistant
{% endif %}"""
"""Prints the result of a call before the text beside the call."""
NO_PROMPT_AFTER_RESULTS = """{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == "user" %}
{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == "tool" %}<|result>{{ m.content }}<result|>{% else %}<|turn>{{ m.role }}
{% if m.reasoning_content and loop.index0 > last.user %}<|think>{{ m.reasoning_content }}<think|>{% endif %}
{% for c in m.tool_calls or [] %}<|call>{{ c.function.name }}{{ c.function.arguments | tojson }}<call|>{% endfor %}
{{ m.content }}{% if m.content %}<turn|>{% endif %}
{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role != "tool" %}<|turn>assistant
{% endif %}"""
"""Begins a turn after a result, but asks for it without a word; reasoning is printed after the last question only."""


@pytest.mark.parametrize(
    ("text", "content", "result"), [(RESULTS_WITHIN_CALLS, "I look.", "[]"), (NO_PROMPT_AFTER_RESULTS, "", "cold")]
)
def test_judge_agrees_with_the_mask_around_a_result(text: str, content: str, result: str) -> None:
    renderer = Renderer(RendererSpec(text, TOKENS))
    call = {"id": "call_abc12", "type": "function", "function": {"name": "find", "arguments": {"city": "Oslo"}}}
    called = {"role": "assistant", "content": content, "reasoning_content": "I must look.", "tool_calls": [call]}
    answered = {"role": "tool", "content": result, "tool_call_id": "call_abc12", "name": "find"}
    row = Conversation([user("Weather?"), called, answered, assistant("It is cold."), user("Why?"), assistant("So.")])
    masked = Masker(renderer, Loss(), MaskRules()).mask(row)

    assert isinstance(masked, MaskedConversation)
    assert MaskJudge(renderer).judge(row, masked) == []


def test_page_names_rejected_rows_and_every_defect_and_probe_is_described() -> None:
    probe = ProbeConversation("ua", "user → answer", (), None)
    shape = ShapeProof(probe, "refused", reason="content_dropped", detail="tool_list")

    page = render_text(render_proof("chats", TemplateProof(("Reasoning is not printed.",), (shape,))))

    _, counts, facts, refusal, remedy = page.splitlines()[:5]
    assert counts.split(maxsplit=1)[1] == "1 shape: 0 proven · 1 refused · 0 wrong masks"
    assert "Reasoning is not printed." in facts
    assert "content_dropped · tool_list" in refusal
    assert REASON_DESCRIPTIONS["content_dropped"].remedy in remedy

    assert set(DEFECT_SENTENCES) == set(get_args(MaskDefectKind))

    probes = list(make_probe_conversations())
    assert len({probe.description for probe in probes}) == len(probes)
    assert {probe.tools is None for probe in probes} == {True, False}


WITHOUT_ENDS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "status", "said"),
    [
        (
            "chatml",
            main.ExitStatus.SUCCESS,
            ["42 shapes: 42 proven", "<|im_start|>assistant\n⟦It is four, a1.<|im_end|>⟧"],
        ),
        (
            WITHOUT_ENDS,
            main.ExitStatus.PROBLEM_FOUND,
            ["end of turn '<end>' is not trained", "set loss.end_of_turn: train"],
        ),
    ],
    ids=["shows trained text and ends well", "blocks a template whose ends do not train"],
)
def test_template_report_with_prove(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, status: main.ExitStatus, said: list[str]
) -> None:
    project = CliProject(tmp_path).write()
    source = {"train_urls": ["data/chats.jsonl"]}
    chats = {"source": source, "format": {"kind": "chat"}, "template": {"chat_template": template}}
    project.write_recipe(datasets={"chats": chats})

    assert project.rowmill("template-report", "--prove") == status
    out = capsys.readouterr().out
    assert [words for words in said if words not in out and words not in " ".join(out.split())] == []
