"""A template's proof as text for a terminal: what is wrong first, then facts, refusals, and a sample of each shape.

What belongs here: the wording of what `template_proof.py` found. What does not: finding it, and other reports
(`row_view.py`, `reports/console.py`).
"""

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from rowmill.conversation.mask_judge import Finding, FindingKind
from rowmill.conversation.template_proof import ShapeProof, TemplateProof, remedy_of
from rowmill.core.console import BAD, DIM, GOOD, HEAD, LOOK, labelled, visible
from rowmill.core.number_text import counted, dotted

FINDING_SENTENCES: Mapping[FindingKind, str] = {
    "own_text_untrained": "{whose} own text {text} does not train.",
    "other_text_trained": "{text}, text of {other}, trains.",
    "header_trained": "{text}, printed before {whose_lower} text at inference, trains.",
    "start_untrained": "{text}, which the model must write before {whose_lower} text, does not train.",
    "frame_untrained": "{text}, which the model must write inside {whose_lower} text, does not train.",
    "end_untrained": "{whose} end of turn {text} does not train, so a model may not stop there.",
    "wrong_end": "{text} trains after the end of {whose_lower} turn.",
    "empty_answer_trained": "Nothing of message {message} is printed, but {text} trains as its answer.",
    "text_differs": "The text is not the one that transformers renders, from character {start}: {text}.",
}
WRONG_REMEDY = (
    "set template.spans: marks or choose another template.chat_template, and report the template and this page"
)
TEXT_CHARS = 60
"""Characters of a finding's text that are shown."""


def render_proof(dataset: str, proof: TemplateProof) -> RenderableType:
    """Show a proof; trained text of the samples stands in ⟦brackets⟧, green where there are colours."""
    return Group(
        Text.assemble((dataset, HEAD), "  masks of the chat template, judged by transformers' own render"),
        labelled("shapes", _count_shapes(proof)),
        *_finding_lines(proof),
        *(labelled("" if i else "template", fact) for i, fact in enumerate(proof.facts)),
        *_refusal_lines(proof),
        Text(""),
        *(line for shape in proof.shapes for line in _sample_lines(shape)),
    )


def _count_shapes(proof: TemplateProof) -> Text:
    wrong, unproven = proof.count("wrong"), proof.count("not_provable")
    words = dotted(
        [
            f"{proof.count('proven')} proven",
            f"{proof.count('refused')} refused",
            f"{unproven} not provable" if unproven else "",
            counted(wrong, "wrong mask", "wrong masks"),
        ]
    )
    return Text(f"{counted(len(proof.shapes), 'shape')}: {words}", BAD if wrong else GOOD)


def _finding_lines(proof: TemplateProof) -> Iterator[RenderableType]:
    for shape in proof.shapes:
        for finding in shape.findings:
            yield labelled("✗ wrong", f"{shape.probe.words}: {word_finding(finding)}", BAD)
    if proof.findings:
        yield labelled("", WRONG_REMEDY, LOOK)


def word_finding(finding: Finding) -> str:
    """Say in one sentence what is wrong."""
    message = finding.message
    return FINDING_SENTENCES[finding.kind].format(
        text=repr(visible(finding.text[:TEXT_CHARS])) if finding.text else "(missing)",
        whose=f"Message {message}'s",
        whose_lower=f"message {message}'s",
        other="the tools or the template" if message < 0 else f"message {message}",
        message=message,
        start=finding.start,
    )


def _refusal_lines(proof: TemplateProof) -> Iterator[RenderableType]:
    for (reason, detail), count in proof.refusals.most_common():
        yield labelled("refused", dotted([counted(count, "shape"), reason, detail]), LOOK)
        yield labelled("", remedy_of(reason), DIM)


def _sample_lines(shape: ShapeProof) -> Iterator[RenderableType]:
    mark, style = {"proven": ("✓", GOOD), "wrong": ("✗", BAD)}.get(shape.outcome, ("!", LOOK))
    yield Text(f"{mark} {shape.probe.words}", style)
    if shape.outcome == "refused":
        yield Text(visible(f"  {dotted(['refused', shape.reason, shape.detail])}"), DIM)
    else:
        if shape.outcome == "not_provable":
            yield Text("  not provable: the template looks at texts that are hidden from it", DIM)
        yield mark_trained(shape.text, shape.trained)
    yield Text("")


def mark_trained(text: str, trained: tuple[tuple[int, int], ...]) -> Text:
    """Return text with its trained ranges in ⟦brackets⟧, and green."""
    shown, position = Text(), 0
    for start, end in _joined(trained):
        shown.append(visible(text[position:start]))
        shown.append(f"⟦{visible(text[start:end])}⟧", GOOD)
        position = end
    return shown.append(visible(text[position:]))


def _joined(ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined
