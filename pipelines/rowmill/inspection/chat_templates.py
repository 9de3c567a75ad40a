"""What chat templates do, and whether their masks hold: checked on probe conversations of many shapes.

A shape has one letter per message: `ucta` is a question, a call, its result, an answer. A proof's loss options are the
defaults, so every assistant message is supervised.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Literal

from rowmill.build.runner import make_context, open_trial
from rowmill.build.steps import Project
from rowmill.checks.mask_judge import MaskDefect
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.probe_conversations import ProbeTexts, make_tool
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_contract import (
    TemplateBehavior,
    find_mismatched_prompts,
    list_template_warnings,
    observe_template_once,
)
from rowmill.core.json import Json
from rowmill.core.storage import digest_json
from rowmill.recipe.recipe import Dataset
from rowmill.schema.rows import Conversation, Message, Rejected
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.tokenized_examples.conversation_examples import MaskJudge
from rowmill.tokenization import stored_tokenizers

PROOF_TEXTS = ProbeTexts(
    user="What is it, u{}?".format,
    system="Be terse about s{}.".format,
    answer="It is four, a{}.".format,
    reasoning="Let me think of r{}.".format,
    result='{{"result": "found t{}"}}'.format,
    arguments=lambda number, index: {"city": f"Paris c{number}{index}", "days": 3},
    tool=make_tool(
        "get_weather",
        "Weather of a city",
        {"city": {"type": "string", "description": "The city"}, "days": {"type": "integer", "description": "Days"}},
        ["city"],
    ),
)
_PROVEN_PLAIN_SHAPES = "ua uaua suaua aua aaua uaa uaaua uua uuaua uasua r ur urur uaur uo uoua".split()
_PROVEN_TOOL_SHAPES = (
    "ua ucta uctaua sucta uctcta udtta ubta uc ub ud uauc uct udtt ucua cta uctra uetra ue uft uctuctua uaca".split()
)
_ODD_ARGUMENTS: Json = {"a": "1", "b": [1, "x", {"c": None}], "flag": True, "f": 0.5, "text": 'He said "hi"\nand left'}

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

LETTER_NAMES: Mapping[str, str] = {
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


@dataclass(frozen=True, slots=True)
class ProbeConversation:
    """A conversation on which a mask is proven, with its shape in letters and in words."""

    shape: str
    description: str
    messages: tuple[Message, ...]
    tools: tuple[Json, ...] | None


def make_probe_conversations() -> Iterator[ProbeConversation]:
    """Yield a conversation of every shape without tools, then with tools, then conversations with unusual texts."""
    for shape in _PROVEN_PLAIN_SHAPES:
        yield _describe(shape, PROOF_TEXTS.make(shape), "")
    for shape in _PROVEN_TOOL_SHAPES:
        yield _describe(shape, PROOF_TEXTS.make(shape), "tools")
    for shape in ("uctua", "uetua"):
        first, *rest = PROOF_TEXTS.make(shape)[:3]
        answers = [{"role": "assistant", "content": text} for text in ("Go on.", "Done.")]
        yield _describe(shape, [first, *rest, answers[0], first, answers[1]], "tools, a repeated question")
    repeated = ("Continue, please.", "One.", "Continue, please.", "Two.")
    yield _describe("uaua", _say(repeated), "tools, a repeated question")
    odd = PROOF_TEXTS.make("ucta", arguments=lambda _, __: _ODD_ARGUMENTS)
    yield _describe("ucta", odd, "tools, arguments of every type")
    yield _describe("uaua", _say(("a", "I", "user", "4")), "short texts")


def _say(texts: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), texts)]


def _describe(shape: str, messages: Sequence[Message], note: str) -> ProbeConversation:
    description = " → ".join(LETTER_NAMES[letter] for letter in shape)
    tools = (PROOF_TEXTS.tool,) if note.startswith("tools") else None
    return ProbeConversation(shape, f"{description} ({note})" if note else description, tuple(messages), tools)


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class TemplateProof:
    """The results of all probes of a template, and facts about it."""

    facts: tuple[str, ...]
    shapes: tuple[ShapeProof, ...]

    @property
    def defects(self) -> list[MaskDefect]:
        return [defect for shape in self.shapes for defect in shape.defects]

    def count(self, outcome: str) -> int:
        """Count the shapes with an outcome."""
        return sum(shape.outcome == outcome for shape in self.shapes)

    @property
    def refusals(self) -> Counter[tuple[str, str]]:
        """Count the refused shapes by reason and detail."""
        return Counter((shape.reason, shape.detail) for shape in self.shapes if shape.outcome == "refused")


# ── Proofs ─────────────────────────────────────────────────────────────────────────────────────────


def prove_template(renderer: Renderer, rules: MaskRules | None = None) -> TemplateProof:
    """Mask a conversation of every shape with the default loss options, and judge every mask."""
    rules = replace(rules or MaskRules(), assistant_roles=frozenset({"assistant"}), turns="whole")
    masker = Masker(renderer, Loss(), rules)
    mask_judge = MaskJudge(renderer)
    shapes: list[ShapeProof] = []
    for probe in make_probe_conversations():
        conversation = Conversation(probe.messages, probe.tools)
        masked = masker.mask(conversation)
        if isinstance(masked, Rejected):
            shapes.append(ShapeProof(probe, "refused", reason=masked.reason, detail=masked.detail))
            continue
        defects = mask_judge.judge(conversation, masked)
        outcome = "not_provable" if defects is None else "wrong" if defects else "proven"
        trained = tuple((span.start, span.end) for span in masked.trained)
        shapes.append(ShapeProof(probe, outcome, masked.text, trained, tuple(defects or ())))
    return TemplateProof(tuple(_list_facts(observe_template_once(renderer), shapes, rules)), tuple(shapes))


# ── Facts ──────────────────────────────────────────────────────────────────────────────────────────


def _list_facts(contract: TemplateBehavior, shapes: Sequence[ShapeProof], rules: MaskRules) -> Iterator[str]:
    yield _REASONING_FACTS[contract.reasoning]
    if contract.system in _SYSTEM_FACTS:
        yield _SYSTEM_FACTS[contract.system]
    yield from (_ALTERNATION_FACTS[one] for one in contract.alternation if one in _ALTERNATION_FACTS)
    if contract.tools == "dropped":
        yield "The list of tools is not printed."
    elif contract.tools == "refused":
        yield "Refuses a list of tools."
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
    for shape in shapes:
        # Text other than an end of turn follows a final call.
        rest = shape.text[shape.trained[-1][1] :].strip() if shape.trained else ""
        if shape.outcome == "proven" and shape.probe.shape[-1] in "cdbef" and rest:
            yield (
                f"After a final call it prints {rest[:40]!r}, which is not an end of turn and does not train: "
                "the model may not learn to stop after its calls."
            )
            break
    if contract.generation_blocks != "none":
        yield "Its {% generation %} blocks decide what trains; loss.lead, end_of_turn and trailing override them."


# ── The templates of a recipe ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Behaviour of one dataset's chat template on probes, and warnings for its user."""

    dataset: str
    template_digest: str
    contract: TemplateBehavior
    warnings: tuple[str, ...]


def report_templates(project: Project) -> list[TemplateReport]:
    """Probe the chat template of each dataset; datasets without one are skipped."""
    found: list[TemplateReport] = []
    for name, dataset, spec in _iterate_templates(project):
        observed = observe_template_once(Renderer(spec))
        warnings = list_template_warnings(observed, finish=dataset.loss.finish)
        mismatches = (
            f"after {role}, inference prompts with {observed.prompts[role]!r}, but training text continues otherwise"
            for role in find_mismatched_prompts(observed)
        )
        found.append(TemplateReport(name, digest_json(spec.text), observed, (*warnings, *mismatches)))
    return found


def prove_templates(project: Project) -> Iterator[tuple[str, TemplateProof]]:
    """Prove the masks of each dataset's chat template on probes of all shapes; datasets without one are skipped."""
    for name, dataset, spec in _iterate_templates(project):
        on_dropped = {str(kind): policy for kind, policy in dataset.template.on_dropped.items()}
        yield name, prove_template(Renderer(spec), MaskRules(spans=dataset.template.spans, on_dropped=on_dropped))


def _iterate_templates(project: Project) -> Iterator[tuple[str, Dataset, RendererSpec]]:
    for name, dataset in project.recipe.datasets.items():
        with open_trial(project) as trial:
            context = make_context(trial, name, tokenized_examples.STAGE, {})
            loaded, _ = stored_tokenizers.open_recipe_tokenizer(context)
            spec = tokenized_examples.resolve_renderer_spec(context, loaded)
            if spec is not None:
                yield name, dataset, spec
