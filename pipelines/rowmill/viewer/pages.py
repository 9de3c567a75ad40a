"""What each page shows: asked of the functions that the commands of the same name use.

/  /RECIPE  /RECIPE/rows  /RECIPE/rows/ID  /RECIPE/rejects  /RECIPE/left_out  /RECIPE/sequences/DATASET/SPLIT/N
/RECIPE/steps/N  /RECIPE/compare/VERSION  /RECIPE/sql  /RECIPE/search
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from rowmill.core import html
from rowmill.core.arrays import format_count, format_percent, format_time, join_facts
from rowmill.core.errors import ConfigError, PipelineError, hint_at_name
from rowmill.core.json import from_json
from rowmill.core.stage_names import CANONICAL_ROWS, GPU_PARTITIONS, TRAINING_SPLITS
from rowmill.inspection import inspect, trace
from rowmill.inspection.inspect import InspectedExample, InspectedRecord
from rowmill.inspection.trace import RowTrace
from rowmill.reports import report_page
from rowmill.reports.links import ROW_ID
from rowmill.schema.examples import SPAN_KINDS
from rowmill.schema.ledger import REASON_DESCRIPTIONS, REJECT_REASONS
from rowmill.schema.order_counts import OrderCounts
from rowmill.schema.rank_counts import RankCounts
from rowmill.schema.rows import HELD_OUT, is_row_id, parse_row_id
from rowmill.viewer import lists
from rowmill.viewer.builds import Build, Builds
from rowmill.viewer.links import IN_NO_STEP, STATES_OF_SEQUENCES, Links
from rowmill.viewer.lists import ListQuery

if TYPE_CHECKING:
    import duckdb
    from jinja2 import Environment

    from rowmill.build.comparison import RowChange

MAX_SHOWN_CHARS = 100_000
"""Characters shown of a raw record or of a message; more would make a browser slow."""


@cache
def open_templates() -> "Environment":
    """Return the report's environment with the templates of the pages beside its own."""
    from jinja2 import ChoiceLoader, FunctionLoader

    environment = report_page.open_templates().overlay()
    own = FunctionLoader(lambda name: read_template(name) if name.startswith("view_") else None)
    environment.loader = ChoiceLoader([own, *([environment.loader] if environment.loader else [])])
    functions: dict[str, Any] = {
        "clip": clip,
        "count": format_count,
        "percent": format_percent,
        "place_of": format_place,
    }
    environment.globals.update(functions)
    return environment


@cache
def read_template(name: str) -> str:
    """Return a template, style or script of this package."""
    return resources.files("rowmill.viewer").joinpath("templates", name).read_text(encoding="utf-8")


def render(name: str, **values: Any) -> str:
    """Return a page."""
    return open_templates().get_template(f"view_{name}.html.jinja").render(**values)


def clip(text: str, limit: int = MAX_SHOWN_CHARS) -> str:
    """Return the beginning of a long text, and how long it is."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text):,} characters)"


def format_place(line: Mapping[str, Any]) -> str:
    """Return the file and the line of a row of the views, or its record where lines are not known."""
    name = str(line["source"] or "").rpartition("/")[2]
    return f"{name}:{line['line']}" if line["line"] is not None else f"{name}, record {line['record']}"


# ── Recipes and the report ─────────────────────────────────────────────────────────────────────────


def show_recipes(builds: Builds) -> str:
    """Return the page of all recipes: their state, tokens, checks, age and last failures."""
    recipes: list[dict[str, Any]] = []
    for name in builds.recipes:
        try:
            build = builds.open_build(name)
        except PipelineError as error:
            recipes.append({"name": name, "error": str(error)})
            continue
        order = build.find_output(None, TRAINING_SPLITS)
        built = [output.built_at for output in build.made.values() if output is not None]
        passed = sum(result.passed for results in build.results.values() for result in results)
        recipes.append(
            {
                "name": name,
                "error": "",
                "verdict": build.verdict if built else ("!", "look", f"Not built yet: run rowmill build {name}"),
                "tokens": "" if order is None else f"{order.get_counts(OrderCounts).tokens:,}",
                "passed": passed,
                "failed": build.failed,
                "built": format_time(max(built)) if built else "",
                "to": Links(build),
            }
        )
    return render("recipes", recipes=recipes, build=None)


def show_report(build: Build) -> str:
    """Return the report, in which numbers are links."""
    links = Links(build)
    body = Markup(report_page.render_report_body(build, links))  # noqa: S704  (the report escapes its values)
    return render("report", build=build, to=links, body=body)


# ── Lists ──────────────────────────────────────────────────────────────────────────────────────────


CHOICES: Mapping[lists.ListName, tuple[str, ...]] = {
    "rows": ("dataset", "split", "domain", "schema", "file"),
    "rejects": ("dataset", "reason", "file"),
    "left_out": ("dataset", "split", "state"),
}
"""The columns of each list of which a person chooses a value."""


def show_list(builds: Builds, build: Build, query: ListQuery, values: Mapping[str, str]) -> Iterator[str]:
    """Yield a list's page; of a search, piece by piece as hits are found."""
    links = Links(build)
    sampled = _list_check_samples(build, query)
    if sampled is not None:
        query = ListQuery(query.name, query.filters, query.text, query.order, query.page, sampled)
    with builds.query_builds(build) as connection:
        page = None if query.text else lists.read_list(connection, build, query)
        choices = {name: _list_choices(connection, build, query, name) for name in CHOICES[query.name]}
        reasons = _describe_reasons(connection, build, query) if query.name == "rejects" else []
        kept = {name: value for name, value in values.items() if name not in ("page", "version", "start")}
        has_losses = bool(builds.losses) and query.name != "rejects"
        shows_domains = has_losses and query.name == "rows" and page is not None and not kept
        losses_by_domain = lists.read_losses_by_domain(connection, build) if shows_domains else []
        if page is not None and has_losses:
            _add_losses(connection, page.lines)
        template = open_templates().get_template("view_list.html.jinja")
        context: dict[str, Any] = {
            "build": build, "to": links, "query": query, "page": page, "choices": choices, "reasons": reasons,
            "kept": kept, "has_losses": has_losses, "losses_by_domain": losses_by_domain,
            "reason": REASON_DESCRIPTIONS.get(query.filters.get("reason", "")),
            "check": _find_check(build, query), "page_rows": lists.PAGE_ROWS,
            "missing_file": _describe_missing_file(build, query.text),
            "lines": () if page is not None else _search(connection, build, query, values, has_losses=has_losses),
        }  # fmt: skip
        yield from template.generate(**context)


def _list_choices(connection: "duckdb.DuckDBPyConnection", build: Build, query: ListQuery, name: str) -> list[str]:
    """Return the values of a filter that a list offers, with the chosen one; none where there is no choice."""
    if name == "dataset":
        return list(build.project.recipe.datasets)
    if name == "file":
        files = _list_files(build, query.filters.get("dataset"))
        values = files[: lists.MAX_CHOICES] if len(files) > 1 else []
    else:
        values = [value for value, _ in lists.count_values(connection, build, query, name)]
        splits = build.find_output(None, TRAINING_SPLITS) if name == "state" else None
        if splits is not None and any(state in STATES_OF_SEQUENCES and count for state, _, count in splits.ledger):
            values.append(IN_NO_STEP)
    chosen = query.filters.get(name)
    return values if chosen is None or chosen in values else [chosen, *values]


def _search(
    connection: "duckdb.DuckDBPyConnection",
    build: Build,
    query: ListQuery,
    values: Mapping[str, str],
    *,
    has_losses: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a search as they are found, and after each piece of the data how much was read."""
    shown = 0
    for step in lists.search_texts(build, query, values.get("start", "")):
        if step.row_ids:
            of_step = ListQuery(query.name, query.filters, ids=step.row_ids[: lists.PAGE_ROWS * 4])
            found = lists.read_list(connection, build, of_step, counts=False).lines
            if has_losses:
                _add_losses(connection, found)
            for line in found:
                yield {"row": line}
            shown += len(found)
        is_last = step.read >= step.of
        yield {"read": step.read, "of": step.of, "shown": shown, "place": "" if is_last else step.place,
               "stops": shown >= lists.PAGE_ROWS and not is_last}  # fmt: skip
        if shown >= lists.PAGE_ROWS:
            return


def _add_losses(connection: "duckdb.DuckDBPyConnection", lines: Sequence[dict[str, Any]]) -> None:
    losses = lists.read_losses(connection, [line["row_id"] for line in lines])
    for line in lines:
        line["loss"], line["above_step"] = losses.get(line["row_id"], (None, None))


def _find_check(build: Build, query: ListQuery) -> Any:
    """Return the result of the check whose rows a list shows."""
    name, dataset = query.filters.get("check"), query.filters.get("dataset")
    found = [
        result
        for step in build.steps
        for result in build.results[step.key]
        if result.check == name and dataset in (None, step.dataset) and query.filters.get("stage") in (None, step.name)
    ]
    return found[0] if found else None


def _list_check_samples(build: Build, query: ListQuery) -> list[str] | None:
    """Return the rows that a check's samples name, where no filter of the list finds them; None without any."""
    if "check" not in query.filters or not query.filters.keys() <= {"check", "dataset", "stage"}:
        return None
    result = _find_check(build, query)
    output = None if result is None else build.made[result.key]
    named = " ".join(output.samples.get(query.filters["check"], ())) if output is not None else ""
    return [one.partition("#")[0] for one in ROW_ID.findall(named)] or None


def _describe_reasons(
    connection: "duckdb.DuckDBPyConnection", build: Build, query: ListQuery
) -> list[tuple[str, int, str]]:
    counted = lists.count_values(connection, build, query, "reason")
    return [
        (reason, n, REASON_DESCRIPTIONS[reason].what if reason in REASON_DESCRIPTIONS else "") for reason, n in counted
    ]


# ── A row ──────────────────────────────────────────────────────────────────────────────────────────


def show_row(builds: Builds, build: Build, row_id: str) -> str:
    """Return the page of a row's whole life, in each dataset that has it."""
    links = Links(build)
    views: list[dict[str, Any]] = []
    name = row_id.partition("#")[0]
    for lineage in build.lineages.values() if is_row_id(name) else ():
        if parse_row_id(name)[0] not in lineage.parts:
            continue
        records = (record for record in inspect.inspect_row(lineage, name) if record.row_id == name)
        views += [_describe_row(record, trace.trace_row_of(lineage, name)) for record in records]
    if not views:
        raise ConfigError(
            f"{row_id}: no row of this build of {build.recipe} has this id; expected a row id, <part>:<number>; search "
            "for its text, or for its file and line"
        )
    losses: list[dict[str, Any]] = []
    if builds.losses:
        with builds.query_builds(build) as connection:
            losses = lists.read_row_losses(connection, name)
    return render(
        "row",
        build=build,
        to=links,
        row_id=name,
        views=views,
        losses=losses,
        drawn=_draw_losses(losses, links) if losses else "",
        neighbors=_find_neighbors(name),
    )


def _draw_losses(losses: Sequence[Mapping[str, Any]], links: Links) -> Markup:
    """Draw a row's losses: a point for each time that a step trained on it, so one for each epoch."""
    from rowmill.reports.plots import draw_lines_svg

    of_step = "mean of the step"
    lines: dict[str, list[tuple[int, float]]] = {}
    for line in losses:
        lines.setdefault(line["example_id"], []).append((line["step"], line["loss"]))
    lines[of_step] = sorted({(line["step"], line["of_step"]) for line in losses})
    title = f"loss by step; dashed: {of_step}"
    link = partial(links.of, "steps")
    return Markup(draw_lines_svg(title, lines, dashed=(of_step,), link=link))  # noqa: S704  (it escapes its values)


def find_entry(build: Build, row_id: str) -> dict[str, Any]:
    """Return the line of a file of `filters.leave_out` that leaves a row out."""
    for lineage in build.lineages.values() if is_row_id(row_id) else ():
        part_id, number = parse_row_id(row_id)
        files = lineage.find_files(CANONICAL_ROWS, part_id) if part_id in lineage.parts else {}
        rows = (
            trace.filter_rows(build.project.store.table(files["rows"], ("row_id", "content_hash")), "row_id", row_id)
            if files
            else []
        )
        if rows:
            part = lineage.parts[part_id][1]
            line = part.first_line + number if part.lines == part.records else None
            entry = {"content_hash": rows[0]["content_hash"].hex(), "row_id": row_id, "dataset": lineage.dataset}
            return entry | {
                "file": part.url,
                **({"line": line} if line is not None else {"record": part.first_record + number}),
            }
    raise ConfigError(
        f"{row_id}: no row of this build of {build.recipe} has this id; expected a row; choose one of a list"
    )


def _find_neighbors(row_id: str) -> tuple[str, str]:
    part, number = parse_row_id(row_id)
    return f"{part}:{number - 1}" if number else "", f"{part}:{number + 1}"


def _describe_row(record: InspectedRecord, traced: RowTrace) -> dict[str, Any]:
    from rowmill.reports import row_view

    raw = record.raw.decode(errors="replace")
    row, description = record.row, None
    if record.rejected is not None:
        description = REASON_DESCRIPTIONS.get(record.rejected[1])
    messages = [] if row is None or row["messages"] is None else from_json(row["messages"])
    facts = row_view.format_parse_report(row) if row is not None else ""
    fields = [] if row is None else [
        *((name, _mark_lost_text(name, row[name], record.samples)) for name in ("text", "output") if row[name]),
        *((name, [("", row[name])]) for name in ("record", "tools", "template_kwargs") if row[name] is not None),
        *((name, [("", text)]) for name, text in row_view.list_kind_fields(row) if name not in ("chosen", "rejected")),
    ]  # fmt: skip
    where = row_view.format_origin(traced.origin)
    return {
        "record": record, "trace": traced, "raw": _mark_raw(raw, record),
        "messages": _describe_messages(messages, record.samples),
        "sides": [] if row is None else _describe_sides(row, record.samples),
        "facts": facts, "fields": fields, "where": where, "description": description, "row": row,
        "samples": [_describe_sample(sample) for sample in record.samples],
        "fate": _describe_fate(record, traced), "removed": _describe_removed(record),
        "content_hash": row["content_hash"].hex() if row is not None else "",
    }  # fmt: skip


def _describe_fate(record: InspectedRecord, traced: RowTrace) -> tuple[str, str]:
    """Return what became of a row in one sentence, and its style."""
    if record.rejected is not None:
        return "bad", "✗ Not in the training data"
    if any(place.showings for place in traced.places):
        return "good", "✓ Trains"
    held_out = [place.split for place in traced.places if place.split in HELD_OUT]
    if held_out:
        return "dim", f"In the {held_out[0]} split, which no step trains on"
    return "look", "In a sequence that no step reads" if traced.places else "In no sequence"


def _describe_removed(record: InspectedRecord) -> str:
    """Return how much of a row's tokens truncation removed; empty if it removed none."""
    removed = sum(sum(sample.removed.values()) for sample in record.samples)
    of = f" of {record.samples[0].original_tokens:,}" if len(record.samples) == 1 else ""
    return f"truncation removed {removed:,}{of} tokens" if removed else ""


def _describe_messages(
    messages: Sequence[Mapping[str, Any]], samples: Sequence[InspectedExample]
) -> list[dict[str, Any]]:
    """Return the messages of a row, with what truncation removed of each."""
    removed = {number for sample in samples for number in sample.removed_messages or ()}
    cut = samples[0] if len(samples) == 1 and samples[0].kept_texts else None
    if cut is not None and "tokens" in cut.removed:
        # A cut at a token leaves one stretch of the text.
        removed |= {*range(len(messages))} - {*range(min(cut.kept_texts), max(cut.kept_texts) + 1)}
    return [
        _describe_message(number, message, cut, None if cut is None else cut.kept_texts.get(number), removed)
        for number, message in enumerate(messages)
    ]


def _describe_sides(
    row: Mapping[str, Any], samples: Sequence[InspectedExample]
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the answers of a pair, each with its messages and what truncation removed of them."""
    cut = samples[0] if len(samples) == 1 and "tokens" in samples[0].removed else None
    kept_texts = {side.column: side.kept_texts for side in cut.sides} if cut is not None else {}
    described: list[tuple[str, list[dict[str, Any]]]] = []
    for column in ("chosen", "rejected"):
        if row.get(column) is None:
            continue
        messages, kept = from_json(row[column]), kept_texts.get(column)
        removed = set() if kept is None else {*range(len(messages))} - kept.keys()
        shown = [
            _describe_message(number, message, cut, None if kept is None else kept.get(number), removed)
            for number, message in enumerate(messages)
        ]
        described.append((column, shown))
    return described


def _describe_message(
    number: int,
    message: Mapping[str, Any],
    cut: InspectedExample | None,
    kept: Mapping[str, str] | None,
    removed: AbstractSet[int],
) -> dict[str, Any]:
    """Return a message, of which an example that truncation `cut` has the texts `kept`."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    shown = {"role", "content", "reasoning_content", "tool_calls"}
    others = {name: value for name, value in message.items() if name not in shown}
    kept = None if number in removed else kept
    content, reasoning = _mark_lost(message["content"], message.get("reasoning_content"), kept, cut)
    return {
        "number": number, "role": message["role"], "content": content, "reasoning": reasoning,
        "is_removed": number in removed,
        "is_cut": any(style == "lost" for style, _ in (*content, *reasoning)),
        "calls": [(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls],
        "others": json.dumps(others, ensure_ascii=False, default=str) if others else "",
    }  # fmt: skip


def _mark_lost(
    content: str | None, reasoning: str | None, kept: Mapping[str, str] | None, cut: InspectedExample | None
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return a message's content and reasoning as pieces of a style: `lost` for what a shortened example lacks."""
    whole = [("", content)] if content else [], [("", reasoning)] if reasoning else []
    if kept is None or cut is None:
        return whole
    pieces = whole[0]
    if content and "tokens" in cut.removed:
        of_content = "".join(text for kind, text in kept.items() if kind not in ("reasoning", "tool_call"))
        pieces = _split_at_kept(content, of_content)
    of_reasoning = kept.get("reasoning", "")
    if not reasoning or not (of_reasoning or "reasoning" in cut.removed or len(pieces) > 1):
        return pieces, whole[1]
    return pieces, _split_at_kept(reasoning, of_reasoning)


_TEXT_KINDS: Mapping[str, tuple[str, ...]] = {"text": ("record", "prompt"), "output": ("assistant",)}
"""The kinds of the spans that a column of a text, or of a prompt and its response, becomes."""


def _mark_lost_text(column: str, text: str, samples: Sequence[InspectedExample]) -> list[tuple[str, str]]:
    """Return a text as pieces of a style: `lost` for what its example lacks since truncation cut it at a token."""
    if len(samples) != 1 or "tokens" not in samples[0].removed:
        return [("", text)]
    kept = "".join(span.text for span in samples[0].spans if span.kind[0] in _TEXT_KINDS[column])
    return _split_at_kept(text, kept)


def _split_at_kept(text: str, kept: str) -> list[tuple[str, str]]:
    """Return a text as pieces before, in and after what is kept of it; as it is if that is not found."""
    kept = kept.strip("\ufffd \t\n")
    at = 0 if text.startswith(kept) else text.rfind(kept)
    if not kept or at < 0:
        return [("" if kept else "lost", text)]
    pieces = (text[:at], "lost"), (kept, ""), (text[at + len(kept) :], "lost")
    return [(style if piece.strip() else "", piece) for piece, style in pieces if piece]


def _describe_sample(sample: InspectedExample) -> dict[str, Any]:
    cut = ", ".join(f"{count:,} by {stage}" for stage, count in sample.removed.items())
    facts = [
        format_count(sample.tokens, "token"),
        f"{sample.trained_tokens:,} trained ({format_percent(sample.trained_tokens, sample.tokens)})",
        f"{sample.original_tokens:,} before truncation, which removed {cut}" if cut else "",
        *(f"{count:,} with weight {weight}" for weight, count in sample.weights.items()),
    ]
    left, sides = MAX_SHOWN_CHARS, [(side.column, side.tokens) for side in sample.sides] or [("", sample.tokens)]
    texts: list[tuple[str, list[tuple[str, str, str]]]] = []
    unread = iter(sample.spans)
    for column, tokens in sides:
        shown: list[tuple[str, str, str]] = []
        of_side = 0
        while of_side < tokens:
            span = next(unread)
            of_side += span.tokens
            kind, trained = span.kind
            title = f"{format_count(span.tokens, 'token')}, {kind.replace('_', ' ')}{', trained' if trained else ''}"
            if left > 0:
                shown.append((f"{kind} trained" if trained else kind, title, clip(span.text, left)))
                left -= len(span.text)
            elif shown and shown[-1][0] != "dim":
                shown.append(("dim", "", " … truncated"))
        texts.append((column, shown))
    return {
        "sample": sample,
        "facts": join_facts(facts),
        "texts": texts,
        "kinds": [kind for kind in SPAN_KINDS if any(kind == span.kind[0] for span in sample.spans)],
    }


def _mark_raw(raw: str, record: InspectedRecord) -> list[tuple[str, str]]:
    """Return a raw record as pieces of a style: columns that nothing reads, and the place that a reject names."""
    raw = clip(raw)
    marks: list[tuple[int, int, str]] = []
    for name in record.unread:
        for found in re.finditer(re.escape(json.dumps(name, ensure_ascii=False)) + r"\s*:", raw):
            marks.append((found.start(), found.end(), "unread"))
            break
    if record.rejected is not None:
        _, reason, detail = record.rejected
        if reason in ("invalid_json", "duplicate_key"):
            try:
                json.loads(raw)
            except json.JSONDecodeError as error:
                marks.append((min(error.pos, max(len(raw) - 1, 0)), error.pos + 1, "problem"))
        elif reason == "not_utf8" and "\ufffd" in raw:
            marks.append((raw.index("\ufffd"), raw.index("\ufffd") + 1, "problem"))
        else:
            # What the record lacks may be elsewhere in it: "a call has no name", but a tool has one.
            there = re.sub(r"\bno \w+", "", detail)
            words = [word for word in re.findall(r"[A-Za-z_][A-Za-z0-9_]+", there) if f'"{word}"' in raw]
            if words:
                at = raw.index(f'"{words[0]}"')
                marks.append((at, at + len(words[0]) + 2, "problem"))
    pieces, end = list[tuple[str, str]](), 0
    for first, last, style in sorted(marks):
        if first < end:
            continue
        pieces += [("", raw[end:first]), (style, raw[first:last])]
        end = last
    return [piece for piece in [*pieces, ("", raw[end:])] if piece[1]]


# ── Sequences and steps ────────────────────────────────────────────────────────────────────────────


def show_sequence(build: Build, dataset: str, split: str, number: str) -> str:
    """Return the page of a packed sequence."""
    from rowmill.reports import row_view

    if dataset not in build.lineages:
        raise ConfigError(f"{dataset}: no such dataset; there are {', '.join(build.lineages)}; name one of them")
    traced = trace.trace_sequence(build.project, f"{dataset}/{split}/{number}", whole=True, lineages=build.lineages)
    rows = [
        (place, row_view.format_origin(origin)) for place, origin in zip(traced.places, traced.origins, strict=True)
    ]
    return render(
        "sequence",
        build=build,
        to=Links(build),
        trace=traced,
        shown=report_page.describe_sequence(traced),
        rows=rows,
        showings=traced.places[0].showings if traced.places else (),
        trained=format_percent(traced.row["trained_tokens"], traced.tokens),
    )


STEP_ORDERS = ("sequence", "tokens", "loss", "domain", "preview")
"""The columns of a step's tables, by which their lines can be ordered."""


def show_step(builds: Builds, build: Build, number: str, order: str = "") -> str:
    """Return the page of what a step trains on, rank by rank; ordered as the ranks read it, or by a column."""
    column = order.removeprefix("-")
    if order and column not in STEP_ORDERS:
        raise ConfigError(
            f"order={order}: no such column; there are {', '.join(STEP_ORDERS)}; name one, with - for the largest first"
        )
    splits, ranks = build.find_output(None, TRAINING_SPLITS), build.find_output(None, GPU_PARTITIONS)
    if splits is None:
        raise ConfigError(f"{build.recipe}: the order of training is not built; a step needs one; run rowmill build")
    if not number.isdecimal() or len(number) > 12:
        raise ConfigError(f"step {number}: expected a number from 0; give one")
    width = build.project.recipe.partitions.world_size if ranks is None else ranks.get_counts(RankCounts).world_size
    step = trace.list_step(build.project.store, splits, world_size=width, step=int(number))
    with builds.query_builds(build) as connection:
        held = lists.read_segments(connection, build, [(one.dataset, one.sequence) for one in step if one.dataset])
        losses = lists.read_step_losses(connection, int(number)) if builds.losses else None
    by_rank: dict[int, list[dict[str, Any]]] = {}
    lines: dict[int, list[dict[str, Any]]] = {}
    shares: dict[tuple[str, str], list[int]] = {}
    for one in step:
        segments = held.get((one.dataset, one.sequence), [])
        tokens = sum(segment["length"] for segment in segments)
        by_rank.setdefault(one.rank, []).append({"tokens": tokens})
        of_rank = lines.setdefault(one.rank, [])
        for segment in segments or [None]:
            is_first = segment is None or segment is segments[0] or bool(order)
            of_rank.append({"one": one, "segment": segment, "names_sequence": is_first})
        for segment in segments:
            share = shares.setdefault((one.dataset, segment["domain"] or ""), [0] * width)
            share[one.rank] += segment["length"]
    for of_rank in lines.values() if order else ():
        _sort_step_lines(of_rank, column, losses or {}, is_descending=order.startswith("-"))
    return render(
        "step",
        build=build,
        order=order,
        lines=lines,
        to=Links(build),
        step=int(number),
        steps=splits.get_counts(OrderCounts).steps,
        ranks=sorted(by_rank.items()),
        shares=sorted(shares.items(), key=lambda pair: -sum(pair[1])),
        has_domains=any(domain for _, domain in shares),
        losses=losses,
        width=width,
        outdated=""
        if all(name in lineage.made for lineage in build.lineages.values() for name in (TRAINING_SPLITS,))
        else "Shards changed since this order was built: run rowmill build.",
    )


def _sort_step_lines(
    lines: list[dict[str, Any]], column: str, losses: Mapping[str, float], *, is_descending: bool
) -> None:
    """Sort the segments of a rank's sequences; those without a value come last, and fillers after them."""

    def read(line: Mapping[str, Any]) -> Any:
        one, segment = line["one"], line["segment"]
        if segment is None:
            return None
        values = {"sequence": (one.dataset, one.sequence), "tokens": segment["length"]}
        if column == "loss":
            return losses.get(segment["example_id"])
        return values[column] if column in values else segment[column]

    lines.sort(key=lambda line: line["segment"] is None)
    known = [line for line in lines if read(line) is not None]
    lines[:] = [
        *sorted(known, key=read, reverse=is_descending),
        *(line for line in lines if read(line) is None),
    ]


CHANGES: "Mapping[RowChange, str]" = {
    "came": "came", "went": "went", "text": "with another text", "split": "in another split",
    "tokens": "with other tokens", "mask": "with another mask", "rejected": "newly rejected",
}  # fmt: skip
MAX_CHANGED_ROWS = 50
"""Rows that are shown of each change of a dataset."""


def show_comparison(builds: Builds, build: Build, version: str) -> str:
    """Return the page of what changed between a kept build and this one, row by row."""
    from rowmill.build.comparison import list_changed_rows

    versions = builds.list_versions(build)
    others = [one for one in versions if not one[0].startswith(build.version or "-")]
    if not version:
        version = next((name for name, at in others if not build.version or at < dict(versions)[build.version]), "")
    if not version:
        return render("compare", build=build, to=Links(build), other=None, others=others, changes=[], labels=CHANGES)
    other = builds.open_build(build.recipe, version)
    sides = [{key: output for key, output in one.made.items() if output is not None} for one in (other, build)]
    changes: list[dict[str, Any]] = []
    with builds.query_builds(build, other) as connection:
        for dataset in build.project.recipe.datasets:
            for changed in list_changed_rows(build.project, dataset, *sides, limit=MAX_CHANGED_ROWS):
                of = other if changed.change == "went" else build
                query = ListQuery("rejects" if changed.change == "rejected" else "rows", {}, ids=changed.rows)
                shown = lists.read_list(connection, of, query, counts=False).lines
                changes.append({"one": changed, "rows": shown, "to": Links(of)})
    built_at = dict(versions).get(other.version, "")
    return render(
        "compare",
        build=build,
        to=Links(build),
        other=other,
        since=format_time(built_at) if built_at else other.version,
        others=others,
        changes=changes,
        labels=CHANGES,
    )


# ── Search and SQL ─────────────────────────────────────────────────────────────────────────────────


def find_address(build: Build, text: str) -> str:
    """Return the address that a search leads to: an id, `file:line`, `step N rank M`, a reason, or a text."""
    links, words = Links(build), text.strip()
    if found := re.fullmatch(r"step\s+([\d,]+)(?:\s+rank\s+(\d+))?", words, re.IGNORECASE):
        return links.of("steps", found[1].replace(",", "")) + (f"#rank-{found[2]}" if found[2] else "")
    if (found := re.fullmatch(r"([^/\s]+)/([^/\s]+)/(\d+)", words)) and found[1] in build.lineages:
        return links.of_sequence(found[1], found[2], int(found[3]))
    name = words.partition("#")[0]
    if is_row_id(name) and any(parse_row_id(name)[0] in lineage.parts for lineage in build.lineages.values()):
        return links.of_row(words)
    if words in REJECT_REASONS:
        return links.of("rejects", reason=words)
    if found := re.fullmatch(r"(.+):(\d+)", words):
        lineages = list(build.lineages.values())
        rows = trace.find_rows_of_line(build.project, lineages, words) if _names_file(build, found[1]) else []
        if rows:
            return links.of_row(rows[0][1])
    if words in build.project.recipe.datasets:
        return links.of("rows", dataset=words)
    return links.of("rows", q=words)


def _names_file(build: Build, name: str) -> bool:
    return any(url == name or url.endswith(f"/{name}") for url in _list_files(build))


def _list_files(build: Build, dataset: str | None = None) -> list[str]:
    """Return the source files of a dataset, or of all."""
    lineages = (lineage for name, lineage in build.lineages.items() if dataset in (None, name))
    return sorted({part.url for lineage in lineages for _, part in lineage.parts.values()})


def _describe_missing_file(build: Build, text: str) -> str:
    """Return what is wrong with the file of a text such as `chats.jsonl:78`; empty if nothing is."""
    found = re.fullmatch(r"(\S+\.\w+):\d+", text)
    if found is None or _names_file(build, found[1]):
        return ""
    names = [url.rpartition("/")[2] for url in _list_files(build)]
    otherwise = f"there are {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"
    hint = hint_at_name(found[1], names, otherwise)
    return f"{found[1]}: no file of this build has this name, so the text is searched for; {hint}"


def show_error(error: BaseException, build: Build | None) -> str:
    """Return the page of an error: its message, which says what to do."""
    return render("error", message=str(error), build=build, to=None if build is None else Links(build))


def join_styles() -> str:
    """Return the styles of all pages: of every page, of the report, and the viewer's own."""
    return html.STYLE + report_page.read_asset("report.css") + read_template("viewer.css")


def join_scripts() -> str:
    """Return the script of all pages."""
    return report_page.read_asset("report.js") + read_template("viewer.js")
