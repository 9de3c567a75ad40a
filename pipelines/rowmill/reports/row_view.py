"""Single rows, sequences and templates as text for a terminal, showing every token's class.

Trained text is green, context plain, the template's text grey. Without colours, trained text is in ⟦brackets⟧.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, starmap
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from rowmill.build.steps import Project
from rowmill.checks.mask_judge import MaskDefect, MaskDefectKind
from rowmill.core.arrays import format_count, format_percent, join_facts
from rowmill.core.console import (
    BAD,
    DIM,
    GOOD,
    HEAD,
    LOOK,
    escape_control_characters,
    format_source_line,
    format_value,
    label_value,
    make_grid,
)
from rowmill.core.json import Json, from_json, to_json
from rowmill.inspection.chat_templates import TemplateProof, TemplateReport
from rowmill.inspection.inspect import InspectedExample, InspectedRecord, TokenClass, classify_token
from rowmill.inspection.trace import (
    NEIGHBOR_TOKENS,
    RowOrigin,
    RowTrace,
    SegmentLocation,
    SequenceOccurrence,
    SequenceTrace,
    SequenceTree,
    describe_segment,
    format_range,
)
from rowmill.reports.console import format_view_command, link_rows
from rowmill.schema.examples import ROW_FIELDS, WEIGHT_COLUMN, find_token_fields
from rowmill.schema.ledger import REASON_DESCRIPTIONS
from rowmill.schema.rows import ROW_KINDS

CLASS_STYLES: Mapping[TokenClass, str] = {"trained": "green", "context": "", "template": "bright_black"}
MAX_RAW_CHARS = 600
"""Characters shown of a raw record; `rowmill trace` gives its file and line."""
MAX_LINE_CHARS = 160
"""Characters shown of a structured message; the rendered text shows all of it."""
MAX_SHOWN_MESSAGES = 12
"""Structured messages shown of a conversation; of a longer one, the first eight and the last four."""
MAX_SHOWN_OCCURRENCES = 12
"""Occurrences listed of a sequence, which has one per pass, and rows of a token shown with their raw record."""
MAX_SHOWN_TARGETS = 6
"""Stretches listed of what an example trains."""


# ── A record through the stages ───────────────────────────────────────────────────────────────────────────────


def render_inspected_record(record: InspectedRecord, *, colours: bool, look: str = "") -> RenderableType:
    """Show one record; without colours, trained text is in ⟦brackets⟧. `look` is the command that shows more of it."""
    lines: list[RenderableType] = [
        Rule(Text.assemble((record.dataset, HEAD), f"  {record.row_id}"), align="left", style=DIM)
        if colours
        else Text(f"── {record.dataset}  {record.row_id} ──"),
        label_value("source", record.source),
        label_value("raw", _clip_text(record.raw.decode(errors="replace"), MAX_RAW_CHARS)),
    ]
    if record.row is not None:
        lines += [label_value("report", format_parse_report(record.row)), *_render_row(record.row)]
    if record.rejected is not None:
        stage, reason, detail = record.rejected
        lines.append(
            label_value("rejected", f"{reason} at {stage}: {detail}" if detail else f"{reason} at {stage}", BAD)
        )
    for sample in record.samples:
        lines += _render_example(sample, colours=colours)
    if record.shown_above:
        lines.append(label_value("also in", join_facts([f"{name}, above" for name in record.shown_above[:5]])))
    if record.not_shown:
        lines.append(label_value("also in", format_count(record.not_shown, "more example")))
    if look:
        lines += [Text(""), label_value("look", look, DIM)]
    return Group(*lines, Text(""))


def _clip_text(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]} … ({len(text):,} characters)"


def format_parse_report(row: Mapping[str, Any]) -> str:
    """Summarize what canonicalization noted about a row."""
    counts = {
        "extracted_think_from_content": "reasoning blocks extracted from content",
        "moved_reasoning_keys": "reasoning keys renamed",
        "dropped_think_messages": "reasoning-only messages dropped",
    }
    notes = [f"schema {row['schema']}", row["kind"], row["split"]]
    notes += [
        f"{name} {row[key]}" for key, name in (("group_key", "group"), ("domain", "domain")) if row[key] is not None
    ]
    notes += [f"{row[key]} {label}" for key, label in counts.items() if row[key]]
    notes += [
        "tools" if row["tools_present"] else "",
        "tools parsed from text" if row["tools_parsed_from_string"] else "",
    ]
    notes += [f"unknown role {role}" for role in row["unknown_roles"]]
    return join_facts([*notes, *row["notes"]])


def _render_row(row: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Show a row's texts or messages, then what a row of its kind has beside them, and the fields that are declared."""
    if row["messages"] is None:
        labels = {"text": "text" if row["output"] is None else "prompt", "output": "response"}
        for name, label in labels.items():
            if row[name] is not None:
                yield label_value(label, _flatten_text(row[name]))
    else:
        if row["tools"] is not None:
            yield label_value("tools", _flatten_text(row["tools"]))
        messages: list[dict[str, Json]] = from_json(row["messages"])
        left_out = range(MAX_SHOWN_MESSAGES - 4, len(messages) - 4) if len(messages) > MAX_SHOWN_MESSAGES else range(0)
        for i, message in enumerate(messages):
            if i not in left_out:
                reasoning, weight = message.get("reasoning_content"), message.get("weight")
                calls = [call["function"] for call in message.get("tool_calls") or ()]
                fields = [
                    "" if weight is None else f"weight {weight:g}",
                    f"⟨{_flatten_text(reasoning)}⟩" if reasoning else "",
                    _flatten_text(message["content"]),
                    *(f"{call['name']}({_flatten_text(to_json(call['arguments']))})" for call in calls),
                ]
                shown = f"{i:>2} {message['role']:<10} {'  '.join(field for field in fields if field)}"
                yield label_value("structured" if i == 0 else "", shown)
            elif i == left_out.start:
                yield label_value("", f" … {len(left_out)} more messages")
    for name, text in list_kind_fields(row):
        yield label_value(name, _flatten_text(text))


def list_kind_fields(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a row of its kind has beside texts and messages, then the fields that are declared, as text."""
    of_kind = (field.name for field in ROW_KINDS[row["kind"]].columns)
    for name in (*of_kind, *find_token_fields(row), *ROW_FIELDS):
        value = row.get(name)
        if value is not None:
            yield name, value if type(value) is str else to_json(value)


def _flatten_text(text: str) -> str:
    return _clip_text(text.replace("\n", "⏎"), MAX_LINE_CHARS)


def _render_example(sample: InspectedExample, *, colours: bool) -> Iterator[RenderableType]:
    share = format_percent(sample.trained_tokens, sample.tokens)
    counts = [f"{format_value(sample.tokens)} tokens", f"{format_value(sample.trained_tokens)} trained ({share})"]
    if sample.original_tokens != sample.tokens:
        took = ", ".join(f"{count:,} by {stage}" for stage, count in sample.removed.items())
        counts.append(
            f"{format_value(sample.original_tokens)} before truncation{f', which removed {took}' if took else ''}"
        )
    if sample.weights:
        counts.append(
            "weights " + ", ".join(f"{weight} × {format_value(count)}" for weight, count in sample.weights.items())
        )
    yield label_value("example", join_facts([sample.example_id, *counts]))
    if colours:
        yield _render_legend()
    yield Text("")
    yield _mark_classes(((stretch.kind, stretch.text) for stretch in sample.stretches), colours=colours)


def _render_legend() -> RenderableType:
    legend = Text("             ")
    for kind, style in CLASS_STYLES.items():
        legend.append("■ ", style).append(f"{kind}   ", DIM)
    return legend


def _mark_classes(stretches: Iterable[tuple[TokenClass, str]], *, colours: bool) -> Text:
    text = Text()
    for kind, own in stretches:
        content = escape_control_characters(own)
        if colours:
            text.append(content, CLASS_STYLES[kind])
        else:
            text.append(f"⟦{content}⟧" if kind == "trained" else content)
    return text


# ── A packed sequence ──────────────────────────────────────────────────────────────────────────────


def render_packed_sequence(sequence: SequenceTrace, *, colours: bool) -> RenderableType:
    """Show a whole sequence: where its segments come from, or the tree that its examples share, then their texts."""
    lines: list[RenderableType] = [render_sequence_trace(sequence), Text("")]
    if colours:
        lines.append(_render_legend())
    classes = list(starmap(classify_token, sequence.classes))
    for place in sequence.segments:
        places = range(place.offset, place.offset + place.length)
        runs = groupby(places, key=classes.__getitem__)
        stretches = ((kind, "".join(sequence.texts[at] for at in run)) for kind, run in runs)
        text = _mark_classes(stretches, colours=colours)
        lines += [Text(f"── {describe_segment(sequence, place)}", DIM), text, Text("")]
    return Group(*lines)


def _render_tree(trace: SequenceTrace, tree: SequenceTree) -> Iterator[RenderableType]:
    """Show a tree: a line for each segment, below the one that it continues, and one for each example."""
    total = sum(example.tokens for example in tree.examples)
    shared = f"{format_count(total - trace.tokens, 'token')} of {total:,} shared"
    yield label_value("tree", join_facts([format_count(len(tree.examples), "example"), shared]))
    yield Text("")
    children = Counter(segment.parent for segment in tree.segments)
    levels: list[int] = []
    segments: list[Sequence[object]] = []
    for number, segment in enumerate(tree.segments):
        # What goes on alone stays in its column, so that long dialogues do.
        is_branch = segment.parent >= 0 and children[segment.parent] > 1
        levels.append(levels[segment.parent] + is_branch if segment.parent >= 0 else 0)
        segments.append(
            (
                f"{'  ' * levels[-1]}{number}",
                "" if segment.parent < 0 else segment.parent,
                format_range(segment.offset, segment.length),
                format_range(segment.position, segment.length),
                segment.length,
                segment.trained_tokens,
                format_range(segment.examples.start, len(segment.examples)),
            )
        )
    yield make_grid(["segment", "continues", "tokens", "positions", "length", "trained", "examples"], segments)
    origins = {place.example_id: origin for place, origin in zip(trace.places, trace.origins, strict=True)}
    examples: list[Sequence[object]] = []
    for number, example in enumerate(tree.examples):
        # Numbers that follow each other as a range: `0 to 3, 7`.
        runs = groupby(enumerate(example.segments), key=lambda pair: pair[1] - pair[0])
        listed = [[segment for _, segment in run] for _, run in runs]
        # The positions that it trains, with the weight of those that do not have 1.
        targets = [
            f"{format_range(first, count)}{'' if weight == 1 else f' × {weight:g}'}"
            for first, count, weight in example.targets
        ]
        if len(targets) > MAX_SHOWN_TARGETS:
            targets[MAX_SHOWN_TARGETS:] = [f"{len(targets) - MAX_SHOWN_TARGETS} more"]
        examples.append(
            (
                number,
                ", ".join(format_range(run[0], len(run)) for run in listed),
                example.tokens,
                ", ".join(targets),
                example.example_id,
                format_origin(origins[example.example_id]),
            )
        )
    yield Text("")
    yield make_grid(["example", "segments", "tokens", "trains positions", "id", "source"], examples)


# ── Traces of rows, sequences and tokens ───────────────────────────────────────────────────────────


def render_row_traces(project: Project, traces: Sequence[RowTrace]) -> RenderableType:
    """Show each row's source, its outcome at each stage, every place that holds its tokens, and where to look at it."""
    lines: list[RenderableType] = []
    for trace in traces:
        head = Text.assemble((trace.dataset, HEAD), "  ", link_rows(trace.row_id, project.recipe.name))
        lines += [head, *_render_origin(trace.origin)]
        for i, fate in enumerate(trace.fates):
            outcome = join_facts([f"{fate.stage:<20}{fate.state}", fate.reason, fate.detail])
            lines.append(label_value("" if i else "fate", outcome, BAD if fate.state == "rejected" else ""))
        for i, (name, tokens, trained) in enumerate(trace.examples):
            counts = f"{format_count(tokens, 'token')}, {format_value(trained)} trained"
            lines.append(label_value("" if i else "examples", f"{name} · {counts}"))
        for i, place in enumerate(trace.places):
            facts = [
                f"{trace.dataset}/{place.split}/{place.sequence}",
                f"segment {place.segment}",
                f"tokens {place.offset} to {place.offset + place.length - 1}",
                f"from token {place.start} of {place.example_id}" if place.start else place.example_id,
            ]
            lines.append(label_value("" if i else "places", join_facts(facts)))
            lines.append(label_value("", f"  {place.shard}, row {place.shard_row}", DIM))
            lines += _render_occurrences("", place.showings)
        if trace.order_note:
            lines.append(label_value("" if trace.places else "places", trace.order_note, LOOK))
        lines += [label_value("look", format_view_command(project, trace.row_id), DIM), Text("")]
    return Group(*lines)


def _render_occurrences(name: str, showings: Sequence[SequenceOccurrence]) -> Iterator[RenderableType]:
    indent = "" if name else "  "
    for i, occurrence in enumerate(showings[:MAX_SHOWN_OCCURRENCES]):
        where = f"{occurrence.file}, row {occurrence.file_row}" if occurrence.file else "not built"
        place = f"{indent}rank {occurrence.rank}, step {occurrence.step}, pass {occurrence.passed}  "
        yield label_value("" if i else name, Text(place).append(escape_control_characters(where), DIM))
    if len(showings) > MAX_SHOWN_OCCURRENCES:
        yield label_value("", f"{indent}and {format_count(len(showings) - MAX_SHOWN_OCCURRENCES, 'more time')}")


def _render_origin(origin: RowOrigin) -> Iterator[RenderableType]:
    yield label_value("source", format_origin(origin))
    if origin.line is None:
        yield label_value("", origin.problem, LOOK)
    else:
        yield label_value("raw", _clip_text(origin.raw.decode(errors="replace"), MAX_RAW_CHARS))


def format_origin(origin: RowOrigin) -> str:
    """Return a row's file and line, or its record where the line is not known."""
    if origin.line is None:
        return f"{origin.url}, record {origin.record}"
    return format_source_line(origin.url, origin.reader, origin.line)


def render_sequence_trace(trace: SequenceTrace) -> RenderableType:
    """Show a sequence, or one token of it, with the source of each segment."""
    lines: list[RenderableType] = [
        Text.assemble(
            (f"{trace.dataset}/{trace.split}/{trace.sequence}", HEAD),
            f"  {format_count(trace.tokens, 'token')}, {format_value(trace.row['trained_tokens'])} trained",
        ),
        label_value("shard", f"{trace.places[0].shard}, row {trace.places[0].shard_row}"),
    ]
    lines += _render_occurrences("shown", trace.places[0].showings)
    if trace.order_note:
        lines.append(label_value("shown", trace.order_note, LOOK))
    if trace.token is None:
        problems = dict.fromkeys(origin.problem for origin in trace.origins if origin.problem)
        if trace.tree is not None:
            lines += _render_tree(trace, trace.tree)
        else:
            rows = [
                (
                    place.segment,
                    f"{place.offset} to {place.offset + place.length - 1}",
                    place.length,
                    f"{place.example_id}{f' from token {place.start}' if place.start else ''}",
                    format_origin(origin),
                )
                for place, origin in zip(trace.places, trace.origins, strict=True)
            ]
            lines += [Text(""), make_grid(["segment", "tokens", "length", "example", "source"], rows)]
        return Group(*lines, *(Text(f"  {escape_control_characters(problem)}", LOOK) for problem in problems))
    at = trace.token
    holding = [i for i, place in enumerate(trace.places) if place.offset <= at < place.offset + place.length]
    place = trace.places[holding[0]]
    lines += _render_token(trace, at, place)
    if trace.tree is not None:
        # Which of the examples that share the token train it, and with what weight.
        examples = [trace.tree.examples[number] for number in trace.tree.segments[place.segment].examples]
        position = trace.row["position_ids"][at]
        weights = [(example.example_id, example.find_weight(position)) for example in examples]
        trained = [f"{name} × {weight:g}" for name, weight in weights if weight is not None]
        shared = f"by {format_count(len(examples), 'example')}, of which {len(trained)} train it"
        lines.append(label_value("shared", shared if len(examples) > 1 else "by no other example"))
        lines += [label_value("" if i else "trained by", name) for i, name in enumerate(trained)]
    # A token of a shared segment comes from the rows of all its examples.
    origins = list({(trace.origins[i].url, trace.origins[i].record): trace.origins[i] for i in holding}.values())
    for origin in origins[:MAX_SHOWN_OCCURRENCES]:
        lines += _render_origin(origin)
    lines += [label_value("source", format_origin(origin)) for origin in origins[MAX_SHOWN_OCCURRENCES:]]
    return Group(*lines, Text(""))


def _render_token(trace: SequenceTrace, at: int, place: SegmentLocation) -> Iterator[RenderableType]:
    number = at - trace.shown.start
    (kind, trained), message, weights = trace.classes[number], trace.messages[number], trace.row.get(WEIGHT_COLUMN)
    about = join_facts(
        [
            kind,
            f"message {message}" if message >= 0 else "",
            "trained" if trained else "not trained",
            "" if weights is None else f"weight {weights[at]:g}",
        ]
    )
    text, token_id = trace.texts[number], trace.row["input_ids"][at]
    yield label_value("token", f"{at} · id {token_id} · {escape_control_characters(text)!r} · {about}")
    first = max(place.offset - trace.shown.start, number - NEIGHBOR_TOKENS, 0)
    last = min(place.offset + place.length - trace.shown.start, number + NEIGHBOR_TOKENS + 1)
    before, after = ("".join(trace.texts[own]) for own in (slice(first, number), slice(number + 1, last)))
    around = Text(_mark_line_ends(before), DIM)
    around.append(f"⟦{_mark_line_ends(text)}⟧", GOOD if trained else HEAD).append(_mark_line_ends(after), DIM)
    yield label_value("text", around)
    in_example = place.start + at - place.offset
    yield label_value("example", f"{place.example_id}, its token {in_example} · segment {place.segment}")


def _mark_line_ends(text: str) -> str:
    return escape_control_characters(text).replace("\n", "⏎")


# ── A template ─────────────────────────────────────────────────────────────────────────────────────


BEHAVIOR_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "what is printed": ("system", "tools", "reasoning", "inline_tags_stripped", "loses", "date_dependent", "bos"),
    "what it asks of messages": (
        "arguments", "tool_ids", "content_form", "reasoning_key", "no_tools", "alternation",
    ),
    "how a turn begins": ("prompts", "prompt_match", "prefix_preserving"),
    "how a turn ends": ("end_of_turn", "printed_end", "finish", "end_trained", "end_is_one_token", "last_turn_differs"),
    "how it is rendered": ("generation_blocks", "generation_differences", "render_path", "fast_path_obstacle"),
    "what masks look for": ("eos_token", "control_tokens", "reasoning_close", "empty_reasoning"),
}  # fmt: skip
"""The fields of a template's contract, grouped as shown."""


def render_template_report(report: TemplateReport) -> RenderableType:
    """Show a template's contract, warnings first, then one observation per line; empty observations are left out."""
    lines: list[RenderableType] = [
        Text.assemble((report.dataset, HEAD), (f"  template {report.template_digest[:16]}", DIM))
    ]
    lines += [label_value("look", warning, LOOK) for warning in report.warnings]
    for title, names in BEHAVIOR_SECTIONS.items():
        rows = [
            (name, Text(escape_control_characters(_format_observation(value))))
            for name in names
            # False is "no"; an empty observation is left out.
            if (value := "no" if (observed := getattr(report.contract, name)) is False else observed)
        ]
        if rows:
            lines += [Text(""), make_grid([title, "on probes"], rows)]
    return Group(*lines, Text(""))


def _format_observation(value: object) -> str:
    """Format an observation; white space in strings stays visible."""
    match value:
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{key}: {_format_observation(inner)}" for key, inner in value.items())
        case tuple():
            return ", ".join(_format_observation(inner) for inner in value)
        case str() if value.isidentifier():
            return value
        case _:
            return repr(value)


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
    wrong, unproven = proof.count("wrong"), proof.count("not_provable")
    counts = join_facts(
        [
            f"{proof.count('proven')} proven",
            f"{proof.count('refused')} refused",
            f"{unproven} not provable" if unproven else "",
            format_count(wrong, "wrong mask", "wrong masks"),
        ]
    )
    lines: list[RenderableType] = [
        Text.assemble((dataset, HEAD), "  masks of the chat template, compared with transformers' rendering"),
        label_value("shapes", Text(f"{format_count(len(proof.shapes), 'shape')}: {counts}", BAD if wrong else GOOD)),
    ]
    for shape in proof.shapes:
        sentences = (f"{shape.probe.description}: {describe_defect(defect)}" for defect in shape.defects)
        lines += [label_value("✗ wrong", sentence, BAD) for sentence in sentences]
    if proof.defects:
        lines.append(label_value("", WRONG_REMEDY, LOOK))
    lines += [label_value("" if i else "template", fact) for i, fact in enumerate(proof.facts)]
    for (reason, detail), count in proof.refusals.most_common():
        lines.append(label_value("refused", join_facts([format_count(count, "shape"), reason, detail]), LOOK))
        lines.append(label_value("", REASON_DESCRIPTIONS[reason].remedy, DIM))
    lines.append(Text(""))
    for shape in proof.shapes:
        mark, style = {"proven": ("✓", GOOD), "wrong": ("✗", BAD)}.get(shape.outcome, ("!", LOOK))
        lines.append(Text(f"{mark} {shape.probe.description}", style))
        if shape.outcome == "refused":
            refusal = join_facts(["refused", shape.reason, shape.detail])
            lines.append(Text(escape_control_characters(f"  {refusal}"), DIM))
        else:
            if shape.outcome == "not_provable":
                why = "the template reads message texts, which the proof replaces by placeholders"
                lines.append(Text(f"  not provable: {why}", DIM))
            # Adjoining trained ranges are one.
            shown, position, ranges = Text(), 0, shape.trained
            for i, (start, end) in enumerate(ranges):
                opens = i == 0 or ranges[i - 1][1] != start
                closes = i + 1 == len(ranges) or ranges[i + 1][0] != end
                shown.append(escape_control_characters(shape.text[position:start]))
                own = escape_control_characters(shape.text[start:end])
                shown.append(f"{'⟦' if opens else ''}{own}{'⟧' if closes else ''}", GOOD)
                position = end
            lines.append(shown.append(escape_control_characters(shape.text[position:])))
        lines.append(Text(""))
    return Group(*lines)


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
