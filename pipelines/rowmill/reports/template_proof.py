"""A template's proof as text for a terminal: wrong masks first, then facts, refusals, and a sample of each shape."""

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from rowmill.checks.mask_judge import MaskDefect, MaskDefectKind
from rowmill.core.console import BAD, DIM, GOOD, HEAD, LOOK, escape_control_characters, label_value
from rowmill.core.number_text import format_count, join_facts
from rowmill.inspection.chat_templates import ShapeProof, TemplateProof, get_remedy

DEFECT_SENTENCES: Mapping[MaskDefectKind, str] = {
    "own_text_untrained": "{whose} text {text} is not trained.",
    "other_text_trained": "{text}, text of {other}, is trained.",
    "header_trained": "{text}, printed before {whose_lower} text at inference, is trained.",
    "start_untrained": "{text}, which the model must write before {whose_lower} text, is not trained.",
    "frame_untrained": "{text}, which the model must write inside {whose_lower} text, is not trained.",
    "end_untrained": "{whose} end of turn {text} is not trained, so a model may not stop there.",
    "wrong_end": "{text}, after the end of {whose_lower} turn, is trained.",
    "empty_answer_trained": "Message {message} prints nothing, but {text} is trained as its text.",
    "text_differs": "The text differs from transformers' rendering from character {start}: {text}.",
}
WRONG_REMEDY = (
    "set loss.end_of_turn: train if only the end of turns is missing, or choose another template.chat_template, and "
    "report the template and this page"
)
MAX_TEXT_CHARS = 60
"""Characters shown of a defect's text."""


def render_proof(dataset: str, proof: TemplateProof) -> RenderableType:
    """Show a proof; trained text of the samples is in ⟦brackets⟧, and green where there are colours."""
    return Group(
        Text.assemble((dataset, HEAD), "  masks of the chat template, compared with transformers' rendering"),
        label_value("shapes", _count_shapes(proof)),
        *_render_defects(proof),
        *(label_value("" if i else "template", fact) for i, fact in enumerate(proof.facts)),
        *_render_refusals(proof),
        Text(""),
        *(line for shape in proof.shapes for line in _render_shape_sample(shape)),
    )


def _count_shapes(proof: TemplateProof) -> Text:
    wrong, unproven = proof.count("wrong"), proof.count("not_provable")
    counts = join_facts(
        [
            f"{proof.count('proven')} proven",
            f"{proof.count('refused')} refused",
            f"{unproven} not provable" if unproven else "",
            format_count(wrong, "wrong mask", "wrong masks"),
        ]
    )
    return Text(f"{format_count(len(proof.shapes), 'shape')}: {counts}", BAD if wrong else GOOD)


def _render_defects(proof: TemplateProof) -> Iterator[RenderableType]:
    for shape in proof.shapes:
        for defect in shape.defects:
            yield label_value("✗ wrong", f"{shape.probe.description}: {describe_defect(defect)}", BAD)
    if proof.defects:
        yield label_value("", WRONG_REMEDY, LOOK)


def describe_defect(defect: MaskDefect) -> str:
    """Describe a defect in one sentence."""
    message = defect.message
    return DEFECT_SENTENCES[defect.kind].format(
        text=repr(escape_control_characters(defect.text[:MAX_TEXT_CHARS])) if defect.text else "(missing)",
        whose=f"Message {message}'s",
        whose_lower=f"message {message}'s",
        other="the tools or the template" if message < 0 else f"message {message}",
        message=message,
        start=defect.start,
    )


def _render_refusals(proof: TemplateProof) -> Iterator[RenderableType]:
    for (reason, detail), count in proof.refusals.most_common():
        yield label_value("refused", join_facts([format_count(count, "shape"), reason, detail]), LOOK)
        yield label_value("", get_remedy(reason), DIM)


def _render_shape_sample(shape: ShapeProof) -> Iterator[RenderableType]:
    mark, style = {"proven": ("✓", GOOD), "wrong": ("✗", BAD)}.get(shape.outcome, ("!", LOOK))
    yield Text(f"{mark} {shape.probe.description}", style)
    if shape.outcome == "refused":
        yield Text(escape_control_characters(f"  {join_facts(['refused', shape.reason, shape.detail])}"), DIM)
    else:
        if shape.outcome == "not_provable":
            yield Text(
                "  not provable: the template reads message texts, which the proof replaces by placeholders", DIM
            )
        yield mark_trained(shape.text, shape.trained)
    yield Text("")


def mark_trained(text: str, trained: tuple[tuple[int, int], ...]) -> Text:
    """Return text with its trained ranges in ⟦brackets⟧, in green."""
    shown, position = Text(), 0
    for start, end in _join_ranges(trained):
        shown.append(escape_control_characters(text[position:start]))
        shown.append(f"⟦{escape_control_characters(text[start:end])}⟧", GOOD)
        position = end
    return shown.append(escape_control_characters(text[position:]))


def _join_ranges(ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined
