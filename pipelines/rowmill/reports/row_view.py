"""Single rows, sequences and templates as text for a terminal, close enough to see every token's class.

What belongs here: wording what `inspect.py` and `trace.py` found. What does not: finding it, and reports
on whole builds (`reports/console.py`).

Trained text is green, context plain, the template's own text grey. Where there are no colours, trained text
stands in ⟦brackets⟧.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from rowmill.conversation.template_contract import TemplateContract
from rowmill.core.console import BAD, DIM, GOOD, HEAD, LOOK, grid, labelled, number, source_text, visible
from rowmill.core.json import Json, from_json, to_json
from rowmill.core.number_text import counted, dotted, percent
from rowmill.inspection.inspect import Inspected, Sample, TemplateReport, TokenClass
from rowmill.inspection.trace import Origin, Place, RowTrace, SequenceTrace, Showing, TokenTrace

STYLES: Mapping[TokenClass, str] = {"trained": "green", "context": "", "template": "bright_black"}
RAW_CHARS = 600
"""Characters of a raw record that are shown; `rowmill trace` names its file and line."""
LINE_CHARS = 160
"""Characters of a message that are shown among the structured ones; the text has all of it."""
MESSAGES = 12
"""Messages of a conversation that are shown structured: of a longer one the first and the last four."""
MOST_SHOWINGS = 12
"""Showings of a sequence that are listed; with many passes there are as many."""


# ── A row on its way ───────────────────────────────────────────────────────────────────────────────


def inspected(one: Inspected, *, colours: bool) -> RenderableType:
    """Show one record; without colours, trained text stands in ⟦brackets⟧."""
    lines: list[RenderableType] = [
        Rule(Text.assemble((one.dataset, HEAD), f"  {one.row_id}"), align="left", style=DIM)
        if colours
        else Text(f"── {one.dataset}  {one.row_id} ──"),
        labelled("source", one.source),
        labelled("raw", _clipped(one.raw.decode(errors="replace"), RAW_CHARS)),
    ]
    if one.row is not None:
        lines += [labelled("report", _report(one.row)), *_structured(one.row)]
    if one.rejected is not None:
        stage, reason, detail = one.rejected
        lines.append(labelled("rejected", f"{reason} at {stage}: {detail}" if detail else f"{reason} at {stage}", BAD))
    for sample in one.samples:
        lines += _sample(sample, colours=colours)
    if one.shown_above:
        lines.append(labelled("also in", dotted([f"{name}, above" for name in one.shown_above[:5]])))
    if one.not_shown:
        lines.append(labelled("also in", counted(one.not_shown, "more example")))
    return Group(*lines, Text(""))


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)"


def _report(row: Mapping[str, Any]) -> str:
    """Say what canonicalisation noticed."""
    counts = {
        "extracted_think_from_content": "thoughts taken out of content",
        "moved_reasoning_keys": "reasoning keys moved",
        "dropped_think_messages": "messages of thoughts dropped",
    }
    words = [f"schema {row['schema']}", row["kind"], row["split"]]
    words += [
        f"{name} {row[key]}" for key, name in (("group_key", "group"), ("domain", "domain")) if row[key] is not None
    ]
    words += [f"{row[key]} {what}" for key, what in counts.items() if row[key]]
    words += [
        "tools" if row["tools_present"] else "",
        "tools parsed from text" if row["tools_parsed_from_string"] else "",
    ]
    words += [f"unknown role {role}" for role in row["unknown_roles"]]
    return dotted([*words, *row["notes"]])


def _structured(row: Mapping[str, Any]) -> Iterator[RenderableType]:
    if row["messages"] is None:
        for name in ("text", "output"):
            if row[name] is not None:
                yield labelled(
                    {"text": "prompt" if row["output"] is not None else "text"}.get(name, "response"), _flat(row[name])
                )
        return
    if row["tools"] is not None:
        yield labelled("tools", _flat(row["tools"]))
    messages: list[dict[str, Json]] = from_json(row["messages"])
    left_out = range(MESSAGES - 4, len(messages) - 4) if len(messages) > MESSAGES else range(0)
    for i, message in enumerate(messages):
        if i not in left_out:
            yield labelled("structured" if i == 0 else "", f"{i:>2} {message['role']:<10} {_message(message)}")
        elif i == left_out.start:
            yield labelled("", f" … {len(left_out)} more messages")


def _message(message: Mapping[str, Json]) -> str:
    reasoning, weight = message.get("reasoning_content"), message.get("weight")
    words = ["" if weight is None else f"weight {weight:g}"]
    words += [f"⟨{_flat(reasoning)}⟩" if reasoning else "", _flat(message["content"])]
    words += [
        f"{c['function']['name']}({_flat(to_json(c['function']['arguments']))})"
        for c in message.get("tool_calls") or ()
    ]
    return "  ".join(word for word in words if word)


def _flat(text: str) -> str:
    return _clipped(text.replace("\n", "⏎"), LINE_CHARS)


def _sample(sample: Sample, *, colours: bool) -> Iterator[RenderableType]:
    share = percent(sample.trained_tokens, sample.tokens)
    words = [f"{number(sample.tokens)} tokens", f"{number(sample.trained_tokens)} trained ({share})"]
    if sample.original_tokens != sample.tokens:
        took = ", ".join(f"{count:,} by {stage}" for stage, count in sample.removed.items())
        words.append(f"{number(sample.original_tokens)} before truncation{f', which took {took}' if took else ''}")
    if sample.weights:
        words.append("weights " + ", ".join(f"{weight} × {number(count)}" for weight, count in sample.weights.items()))
    yield labelled("example", dotted([sample.example_id, *words]))
    if colours:
        legend = Text("             ")
        for kind, style in STYLES.items():
            legend.append("■ ", style).append(f"{kind}   ", DIM)
        yield legend
    yield Text("")
    text = Text()
    for stretch in sample.stretches:
        content = visible(stretch.text)
        if colours:
            text.append(content, STYLES[stretch.kind])
        else:
            text.append(f"⟦{content}⟧" if stretch.kind == "trained" else content)
    yield text


# ── A row, a sequence or a token, traced ───────────────────────────────────────────────────────────


def traces(traces: Sequence[RowTrace]) -> RenderableType:
    """Show where rows came from, what became of them, and every place where their tokens stand."""
    return Group(*(line for one in traces for line in _row_lines(one)))


def _row_lines(one: RowTrace) -> Iterator[RenderableType]:
    yield Text.assemble((one.dataset, HEAD), f"  {one.row_id}")
    yield from _origin_lines(one.origin)
    for i, fate in enumerate(one.fates):
        words = dotted([f"{fate.stage:<20}{fate.state}", fate.reason, fate.detail])
        yield labelled("" if i else "fate", words, BAD if fate.state == "rejected" else "")
    for i, (name, tokens, trained) in enumerate(one.examples):
        yield labelled("" if i else "examples", f"{name} · {counted(tokens, 'token')}, {number(trained)} trained")
    for i, place in enumerate(one.places):
        yield labelled("" if i else "places", _place_words(one.dataset, place))
        yield labelled("", f"  {place.shard}, row {place.shard_row}", DIM)
        yield from _showing_lines("", place.showings)
    if one.order_note:
        yield labelled("" if one.places else "places", one.order_note, LOOK)
    yield Text("")


def _place_words(dataset: str, place: Place) -> str:
    taken = f"tokens {place.offset} to {place.offset + place.length - 1}"
    cut = f"from token {place.start} of {place.example_id}" if place.start else place.example_id
    return dotted([f"{dataset}/{place.split}/{place.sequence}", f"segment {place.segment}", taken, cut])


def _showing_lines(name: str, showings: Sequence[Showing]) -> Iterator[RenderableType]:
    indent = "" if name else "  "
    for i, one in enumerate(showings[:MOST_SHOWINGS]):
        where = f"{one.file}, row {one.file_row}" if one.file else "not built"
        words = f"{indent}rank {one.rank}, step {one.step}, pass {one.passed}  "
        yield labelled("" if i else name, Text(words).append(visible(where), DIM))
    if len(showings) > MOST_SHOWINGS:
        yield labelled("", f"{indent}and {counted(len(showings) - MOST_SHOWINGS, 'more time')}")


def _origin_lines(origin: Origin) -> Iterator[RenderableType]:
    if origin.line is None:
        yield labelled("source", f"{origin.url}, record {origin.record}")
        yield labelled("", origin.problem, LOOK)
        return
    raw = origin.raw.decode(errors="replace")
    yield labelled("source", source_text(origin.url, origin.reader, origin.line))
    yield labelled("raw", raw if len(raw) <= RAW_CHARS else f"{raw[:RAW_CHARS]} … ({len(raw):,} characters)")


def sequence(one: SequenceTrace) -> RenderableType:
    """Show a sequence, or one token of it, with the source of each segment."""
    lines: list[RenderableType] = [
        Text.assemble(
            (f"{one.dataset}/{one.split}/{one.sequence}", HEAD),
            f"  {counted(one.tokens, 'token')}, {number(one.trained_tokens)} trained",
        ),
        labelled("shard", f"{one.places[0].shard}, row {one.places[0].shard_row}"),
    ]
    lines += _showing_lines("shown", one.places[0].showings)
    if one.order_note:
        lines.append(labelled("shown", one.order_note, LOOK))
    if one.token is None:
        problems = dict.fromkeys(origin.problem for origin in one.origins if origin.problem)
        return Group(*lines, Text(""), _segments_grid(one), *(Text(f"  {visible(p)}", LOOK) for p in problems))
    at = one.token.at
    i = next(i for i, place in enumerate(one.places) if place.offset <= at < place.offset + place.length)
    lines += _token_lines(one.token, one.places[i])
    lines += _origin_lines(one.origins[i])
    return Group(*lines, Text(""))


def _segments_grid(one: SequenceTrace) -> RenderableType:
    columns = ["segment", "tokens", "length", "example", "source"]
    rows: list[Sequence[object]] = []
    for place, origin in zip(one.places, one.origins, strict=True):
        cut = f" from token {place.start}" if place.start else ""
        source = (
            source_text(origin.url, origin.reader, origin.line)
            if origin.line is not None
            else f"{origin.url}, record {origin.record}"
        )
        rows.append(
            (
                place.segment,
                f"{place.offset} to {place.offset + place.length - 1}",
                place.length,
                f"{place.example_id}{cut}",
                source,
            )
        )
    return grid(columns, rows)


def _token_lines(token: TokenTrace, place: Place) -> Iterator[RenderableType]:
    what = dotted(
        [
            token.kind,
            f"message {token.message}" if token.message >= 0 else "",
            "trained" if token.trained else "not trained",
            "" if token.weight is None else f"weight {token.weight:g}",
        ]
    )
    yield labelled("token", f"{token.at} · id {token.token_id} · {visible(token.text)!r} · {what}")
    around = Text(_one_line(token.before), DIM)
    around.append(f"⟦{_one_line(token.text)}⟧", GOOD if token.trained else HEAD).append(_one_line(token.after), DIM)
    yield labelled("text", around)
    yield labelled("example", f"{place.example_id}, its token {token.in_example} · segment {place.segment}")


def _one_line(text: str) -> str:
    return visible(text).replace("\n", "⏎")


# ── A template ─────────────────────────────────────────────────────────────────────────────────────


SECTIONS: Mapping[str, tuple[str, ...]] = {
    "what is printed": ("system", "tools", "reasoning", "inline_tags_stripped", "loses", "date_dependent", "bos"),
    "what it asks of messages": (
        "arguments", "tool_ids", "content_form", "reasoning_key", "no_tools", "alternation",
    ),
    "how a turn begins": ("prompts", "prompt_match", "prefix_preserving"),
    "how a turn ends": ("end_of_turn", "own_end", "finish", "end_trained", "end_is_one_token", "last_turn_differs"),
    "how spans are found": (
        "spans", "marks_inert", "generation_blocks", "generation_differences", "lane", "lane_reason",
    ),
    "what masks look for": (
        "eos_token", "control_tokens", "heads", "constant_lead", "reasoning_close", "empty_reasoning",
    ),
}  # fmt: skip
"""The fields of a contract as they are shown."""


def contract(one: TemplateReport) -> RenderableType:
    """Show a contract, one observation a line; empty ones are left out. Warnings stand first."""
    lines: list[RenderableType] = [Text.assemble((one.dataset, HEAD), (f"  template {one.template_digest[:16]}", DIM))]
    lines += [labelled("look", warning, LOOK) for warning in one.warnings]
    for title, names in SECTIONS.items():
        rows = [(name, Text(visible(_worded(value)))) for name in names if (value := _observed(one.contract, name))]
        if rows:
            lines += [Text(""), grid([title, "on probes"], rows)]
    return Group(*lines, Text(""))


def _observed(observed: TemplateContract, name: str) -> object:
    """Return an observation, null where there is nothing to say; a plain no is something."""
    value: object = getattr(observed, name)
    return "no" if value is False else value or None


def _worded(value: object) -> str:
    """Write an observation; white space of printed strings stays visible."""
    match value:
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{key}: {_worded(one)}" for key, one in value.items())
        case tuple():
            return ", ".join(_worded(one) for one in value)
        case str() if value.isidentifier():
            return value
        case _:
            return repr(value)
