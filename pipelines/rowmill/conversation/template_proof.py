"""Check a chat template's masks on probe conversations of many shapes, and describe the template in sentences.

What belongs here: the probe conversations, masking them as a build does, and the facts about the template. What does
not: judging a mask (`mask_judge.py`), printing the report (`reports/template_proof.py`).

A shape has one letter per message: `ucta` is a question, a call, its result, an answer. The loss options are the
defaults, so every assistant message is supervised.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from rowmill.conversation.independent_proof import TransformersTemplate
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.loss_options import Loss, MaskRules
from rowmill.conversation.mask_judge import IndependentMaskJudge, MaskDefect
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_contract import TemplateBehavior
from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.core.json import Json, to_json
from rowmill.schema.conversation import Conversation
from rowmill.schema.reject_reasons import REASON_DESCRIPTIONS
from rowmill.schema.rows import MaskedConversation, Message, Rejected

MESSAGE_NAMES: Mapping[str, str] = {
    "s": "system",
    "u": "user",
    "a": "answer",
    "r": "reasoning and answer",
    "o": "reasoning only",
    "c": "call",
    "d": "two calls",
    "b": "text and call",
    "e": "reasoning and call",
    "f": "reasoning, text and call",
    "t": "tool result",
}
"""The letters of a shape."""

PLAIN_SHAPES = "ua uaua suaua aua aaua uaa uaaua uua uuaua uasua r ur urur uaur uo uoua".split()
TOOL_SHAPES = (
    "ua ucta uctaua sucta uctcta udtta ubta uc ub ud uauc uct udtt ucua cta uctra uetra ue uft uctuctua uaca".split()
)
PROOF_TOOLS: tuple[Json, ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city"},
                    "days": {"type": "integer", "description": "Days"},
                },
                "required": ["city"],
            },
        },
    },
)
ODD_ARGUMENTS: Mapping[str, Json] = {
    "a": "1",
    "b": [1, "x", {"c": None}],
    "flag": True,
    "f": 0.5,
    "text": 'He said "hi"\nand left',
}

_SYSTEM_FACTS: Mapping[str, str] = {
    "folded": "The system message is printed inside the first user turn.",
    "dropped": "A system message is not printed.",
    "refused": "Refuses a system message.",
    "last_user_only": "The system message is printed before the last user turn only.",
}
_REASONING_FACTS: Mapping[str, str] = {
    "all": "Reasoning of every turn is printed.",
    "last": "Reasoning of earlier turns is not printed.",
    "none": "Reasoning is not printed.",
}
_ALTERNATION_FACTS: Mapping[str, str] = {
    "two_users": "Refuses two user messages in a row.",
    "leading_assistant": "Refuses a conversation that begins with the assistant.",
    "tool_role": "Refuses tool results.",
}
_DROPPED_FACTS: Mapping[str, str] = {
    "system": "a system message",
    "user": "user text",
    "assistant_text": "text of the assistant",
    "text_beside_call": "text beside a call",
    "call_name": "a call's name",
    "call_arguments": "a call's arguments",
    "tool_result": "a tool result",
    "tool_list": "the list of tools",
    "reasoning": "reasoning",
    "unknown_role": "a message of an unknown role",
}


@frozen_dataclass
class ProbeConversation:
    """A probe conversation, with its shape in letters and in words."""

    shape: str
    description: str
    messages: tuple[Message, ...]
    tools: tuple[Json, ...] | None


@frozen_dataclass
class ShapeProof:
    """The result of one probe: its judged mask, or `reason` and `detail` of the reject.

    `trained` are character ranges of `text`.
    """

    probe: ProbeConversation
    outcome: Literal["proven", "wrong", "not_provable", "refused"]
    text: str = ""
    trained: tuple[tuple[int, int], ...] = ()
    defects: tuple[MaskDefect, ...] = ()
    reason: str = ""
    detail: str = ""


@frozen_dataclass
class TemplateProof:
    """The results of all probes of a template, and facts about it."""

    facts: tuple[str, ...]
    shapes: tuple[ShapeProof, ...]

    @property
    def defects(self) -> list[MaskDefect]:
        """The defects of all shapes."""
        return [defect for shape in self.shapes for defect in shape.defects]

    def count(self, outcome: str) -> int:
        """Count the shapes with an outcome."""
        return sum(shape.outcome == outcome for shape in self.shapes)

    @property
    def refusals(self) -> Counter[tuple[str, str]]:
        """Count the refused shapes by reason and detail."""
        return Counter((shape.reason, shape.detail) for shape in self.shapes if shape.outcome == "refused")


# ── the probe conversations ──


def make_probe_conversations() -> Iterator[ProbeConversation]:
    """Yield a conversation of every shape without tools, then with tools, then conversations with unusual texts."""
    for shape in PLAIN_SHAPES:
        yield _make_probe(shape, None)
    for shape in TOOL_SHAPES:
        yield _make_probe(shape, PROOF_TOOLS, note="tools")
    for shape in ("uctua", "uetua"):
        yield _repeat_question(_make_probe(shape, PROOF_TOOLS, note="tools, a repeated question"))
    repeated = [
        _make_question("Continue, please."),
        _make_answer("One."),
        _make_question("Continue, please."),
        _make_answer("Two."),
    ]
    yield _describe_conversation("uaua", repeated, PROOF_TOOLS, note="tools, a repeated question")
    yield _make_probe("ucta", PROOF_TOOLS, note="tools, arguments of every type", arguments=ODD_ARGUMENTS)
    short = [_make_question("a"), _make_answer("I"), _make_question("user"), _make_answer("4")]
    yield _describe_conversation("uaua", short, None, note="short texts")


def _make_question(text: str) -> Message:
    return {"role": "user", "content": text}


def _make_answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _describe_conversation(
    shape: str, messages: Sequence[Message], tools: tuple[Json, ...] | None, *, note: str
) -> ProbeConversation:
    description = " → ".join(MESSAGE_NAMES[letter] for letter in shape)
    return ProbeConversation(shape, f"{description} ({note})" if note else description, tuple(messages), tools)


def _make_probe(
    shape: str, tools: tuple[Json, ...] | None, *, note: str = "", arguments: Mapping[str, Json] | None = None
) -> ProbeConversation:
    """Build a conversation in which every text is different, so that none is mistaken for another."""
    messages: list[Message] = []
    waiting: list[str] = []
    for i, letter in enumerate(shape):
        match letter:
            case "u":
                messages.append(_make_question(f"What is it, u{i}?"))
            case "s":
                messages.append({"role": "system", "content": f"Be terse about s{i}."})
            case "t":
                call = waiting.pop(0) if waiting else "call0unknown"
                content = f'{{"result": "found t{i}"}}'
                messages.append({"role": "tool", "content": content, "tool_call_id": call, "name": "get_weather"})
            case _:
                messages.append(_make_model_message(letter, i, arguments))
                waiting = [call["id"] for call in messages[-1].get("tool_calls", ())] or waiting
    return _describe_conversation(shape, messages, tools, note=note)


def _make_model_message(letter: str, index: int, arguments: Mapping[str, Json] | None) -> Message:
    message: Message = {"role": "assistant", "content": f"It is four, a{index}." if letter in "arbf" else ""}
    if letter in "refo":
        message["reasoning_content"] = f"Let me think of r{index}."
    if letter in "cdbef":
        count = 2 if letter == "d" else 1
        message["tool_calls"] = [_make_call(index, number, arguments) for number in range(count)]
    return message


def _make_call(index: int, number: int, arguments: Mapping[str, Json] | None) -> Json:
    given = dict(arguments or {"city": f"Paris c{index}{number}", "days": 3})
    function = {"name": "get_weather", "arguments": given}
    return {"id": f"call{index:03}{number:02}", "type": "function", "function": function}


def _repeat_question(probe: ProbeConversation) -> ProbeConversation:
    first = probe.messages[0]["content"]
    messages = (*probe.messages[:3], _make_answer("Go on."), _make_question(first), _make_answer("Done."))
    return replace(probe, messages=messages)


# ── the proof ──


def prove_template(renderer: Renderer, rules: MaskRules | None = None) -> TemplateProof:
    """Mask a conversation of every shape with the default loss options, and judge every mask."""
    rules = replace(rules or MaskRules(), assistant_roles=frozenset({"assistant"}), verify_render=1.0, turns="whole")
    masker = Masker(renderer, Loss(), rules)
    mask_judge = MaskJudge(renderer)
    shapes = tuple(_prove_shape(masker, mask_judge, probe) for probe in make_probe_conversations())
    return TemplateProof(tuple(_list_facts(renderer.contract, shapes, rules)), shapes)


class MaskJudge:
    """Judges masks of one template in which every assistant message is supervised."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._by_blocks = renderer.has_blocks
        self._judges: dict[str, IndependentMaskJudge] = {}

    def judge(self, conversation: Conversation, masked: MaskedConversation) -> list[MaskDefect] | None:
        """Return the defects of a conversation's mask; None if the owners of its text cannot be proven."""
        adaptation = self._renderer.adaptation
        messages, tools = adaptation.messages(conversation.messages), adaptation.tools(conversation.tools)
        trained = [(span.start, span.end) for span in masked.trained]
        return self._get_judge(conversation.kwargs).judge(messages, tools, masked.text, trained)

    def _get_judge(self, kwargs: Mapping[str, Json]) -> IndependentMaskJudge:
        key = to_json(dict(kwargs))
        if key not in self._judges:
            spec = self._renderer.spec
            values = {**spec.template_kwargs, **kwargs}
            template = TransformersTemplate(spec.text, spec.special_tokens, values, spec.now)
            self._judges[key] = IndependentMaskJudge(template, by_blocks=self._by_blocks)
        return self._judges[key]


def _prove_shape(masker: Masker, judge: MaskJudge, probe: ProbeConversation) -> ShapeProof:
    conversation = Conversation(probe.messages, probe.tools)
    masked = masker.mask(conversation)
    if isinstance(masked, Rejected):
        return ShapeProof(probe, "refused", reason=masked.reason, detail=masked.detail)
    trained = tuple((span.start, span.end) for span in masked.trained)
    defects = judge.judge(conversation, masked)
    if defects is None:
        return ShapeProof(probe, "not_provable", masked.text, trained)
    return ShapeProof(probe, "wrong" if defects else "proven", masked.text, trained, tuple(defects))


# ── the facts ──


def _list_facts(contract: TemplateBehavior, shapes: Sequence[ShapeProof], rules: MaskRules) -> Iterator[str]:
    yield _REASONING_FACTS[contract.reasoning]
    if contract.system in _SYSTEM_FACTS:
        yield _SYSTEM_FACTS[contract.system]
    yield from (_ALTERNATION_FACTS[one] for one in contract.alternation if one in _ALTERNATION_FACTS)
    if contract.tools == "dropped":
        yield "The list of tools is not printed."
    elif contract.tools == "refused":
        yield "Refuses a list of tools."
    yield from _list_dropped_facts(shapes, rules)
    yield from _list_end_facts(contract)
    yield from _list_unended_calls(shapes)
    if contract.generation_blocks != "none":
        yield "Its {% generation %} blocks decide what trains; loss.lead, end_of_turn and trailing override them."


def _list_dropped_facts(shapes: Sequence[ShapeProof], rules: MaskRules) -> Iterator[str]:
    details = (shape.detail for shape in shapes if shape.reason == "content_dropped")
    kinds = sorted({kind for detail in details for kind in detail.split(", ")})
    for kind in kinds:
        what = _DROPPED_FACTS.get(kind, kind)
        yield (
            f"Does not always print {what}: rows that have it are rejected; "
            f"set template.on_dropped: {{{kind}: count}} to keep them, or choose another template."
        )
    for kind, policy in (rules.on_dropped or {}).items():
        if policy != "reject":
            yield f"May drop {_DROPPED_FACTS.get(kind, kind)}: template.on_dropped is {policy}."


def _list_end_facts(contract: TemplateBehavior) -> Iterator[str]:
    match contract.end_of_turn:
        case "own" | "tail":
            shown = f" with {contract.printed_end.strip()!r}" if contract.printed_end.strip() else ""
            yield f"The template ends the assistant's turn{shown}, and the end trains."
        case "next_header":
            yield "The next message's header ends the assistant's turn, and is appended to the last one."
        case "missing":
            ending = contract.finish or contract.eos_token
            added = f"; {ending!r} is appended to the last one" if ending else ""
            yield f"The template prints no end of turn{added}."


def _list_unended_calls(shapes: Sequence[ShapeProof]) -> Iterator[str]:
    """Yield a warning if text other than an end of turn follows a final call: the model may not learn to stop there."""
    for shape in shapes:
        rest = shape.text[shape.trained[-1][1] :].strip() if shape.trained else ""
        if shape.outcome == "proven" and shape.probe.shape[-1] in "cdbef" and rest:
            yield (
                f"After a final call it prints {rest[:40]!r}, which is not an end of turn and does not train: "
                "the model may not learn to stop after its calls."
            )
            return


def get_remedy(reason: str) -> str:
    """Return the remedy for a reject reason."""
    return REASON_DESCRIPTIONS[reason].remedy
