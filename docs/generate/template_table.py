"""Write docs/templates.md: the masks of real chats under every chat template of a folder.

    python -m docs.generate.template_table      docs/templates.md

The chats and the templates are in a folder that is not part of the project (`ROWMILL_REAL_DATA`, else
`../shared/data`); without it the page is not written.
"""

import json
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from docs.generate.reference_pages import make_anchor
from rowmill.checks.mask_judge import MaskDefect
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_contract import TemplateBehavior, iterate_text_runs, observe_template_once
from rowmill.conversation.template_engines import replace_generation_tags
from rowmill.conversation.template_registry import read_named_template
from rowmill.core.arrays import format_count
from rowmill.core.errors import join_choices
from rowmill.core.json import Json, find_lone_surrogate, to_json
from rowmill.core.storage import digest_json
from rowmill.inspection.chat_templates import TemplateProof, make_probe_conversations, prove_template
from rowmill.kinds.base import DatasetOptions
from rowmill.kinds.catalog import Chat
from rowmill.kinds.reading.canonicalization import Canonicalizer
from rowmill.reports.row_view import describe_defect
from rowmill.schema.ledger import REASON_DESCRIPTIONS
from rowmill.schema.rows import Conversation, MaskedConversation, Rejected, Span
from rowmill.stages.tokenized_examples.conversation_examples import MaskJudge

PAGE = Path("docs/templates.md")
ROWS_OF_EACH = 300
"""Rows read from the start of each file."""
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
"""Fixed special tokens, so that the table depends on templates only, not on tokenizers."""


@dataclass(frozen=True, slots=True)
class ChatFile:
    """A file of chats; `chosen` names the preferred answer of a preference pair, which continues the conversation."""

    path: str
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    chosen: str | None = None


CHAT_FILES = (
    ChatFile("chat/fastchat_dummy_conversation.json"),
    ChatFile("chat/v1_sft_demo.jsonl"),
    ChatFile("chat/tinker_conversations.jsonl"),
    ChatFile("tools/glaive_toolcall_en_demo.json"),
    ChatFile("tools/tau_airline_gpt4o.messages.jsonl"),
    ChatFile("reasoning/reason_tool_use_demo_50.jsonl"),
    ChatFile("reasoning/toolrl_rlla_sft.json"),
    ChatFile("instruct/identity.json"),
    ChatFile(
        "instruct/gpteacher_roleplay.json",
        {"dataset_schema": "prompt_response", "prompt_fields": ["instruction"], "response_fields": ["response"]},
    ),
    ChatFile("preference/dpo_en_demo.json", chosen="chosen"),
    ChatFile("preference/kto_en_demo.json"),
    ChatFile("preference/v1_dpo_demo.jsonl", {"messages_field": "chosen_messages"}),
)


@dataclass(frozen=True, slots=True)
class TrainingTemplate:
    """A training template that renders the same text as another one, and the template values it needs."""

    name: str
    kwargs: tuple[tuple[str, Json], ...] = ()


_TEKKEN = TrainingTemplate("mistral", (("tekken", True),))
TRAINING_TEMPLATES: Mapping[str, TrainingTemplate] = {
    "axolotl__deepseek_v3": TrainingTemplate("trl__deepseekv3_training"),
    "axolotl__gemma3": TrainingTemplate("trl__gemma3_training"),
    "axolotl__mistral_v2v3": TrainingTemplate("mistral"),
    "axolotl__mistral_v3_tekken": _TEKKEN,
    "chujiezheng__llama-3-instruct": TrainingTemplate("trl__llama3_training"),
    "chujiezheng__vicuna": TrainingTemplate("vicuna"),
    "chujiezheng__zephyr": TrainingTemplate("zephyr"),
    "llamacpp__GLM-4.6": TrainingTemplate("trl__glm4moe_training"),
    "llamacpp__Qwen-Qwen2.5-7B-Instruct": TrainingTemplate("trl__qwen2_5_training"),
    "llamacpp__Qwen-Qwen3-0.6B": TrainingTemplate("qwen3"),
    "llamacpp__google-gemma-2-2b-it": TrainingTemplate("trl__gemma_training"),
    "llamacpp__meta-llama-Llama-3.1-8B-Instruct": TrainingTemplate("llama3.1"),
    "llamacpp__meta-llama-Llama-3.2-3B-Instruct": TrainingTemplate("llama3.1", (("date_string", "01 Jan 2025"),)),
    "llamacpp__microsoft-Phi-3.5-mini-instruct": TrainingTemplate("trl__phi3_training"),
    "llamacpp__mistralai-Mistral-Nemo-Instruct-2407": _TEKKEN,
    "llamacpp__openai-gpt-oss-120b": TrainingTemplate("trl__gptoss_training"),
    "vllm__template_chatml": TrainingTemplate("chatml"),
    "vllm__tool_chat_template_mistral": TrainingTemplate("mistral"),
}
"""Template → the training template, with `{% generation %}`, that renders the same text, ours or another project's."""


@dataclass(slots=True)
class TemplateResult:
    """The results of one template on all chats."""

    name: str
    rows: int = 0
    masked: int = 0
    ways: Counter[str] = field(default_factory=Counter[str])
    """Masked rows by what decides which template text trains: the template's blocks, or the learned list."""
    refused: Counter[str] = field(default_factory=Counter[str])
    details: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    """Details of refused rows by reason, such as the kinds of text that the template drops."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Rows, masked or refused, by kind of own text that the template drops."""
    judged: Counter[str] = field(default_factory=Counter[str])
    """Masked rows by what the judge says of them: right, wrong, not provable, or not judged."""
    defects: list[MaskDefect] = field(default_factory=list[MaskDefect])
    proof: TemplateProof = field(default_factory=lambda: TemplateProof((), ()))
    truth: str = ""
    compared: int = 0
    equal: int = 0
    additional: set[str] = field(default_factory=set[str])
    """Text that only the training template trains, as its contract says."""
    contract: TemplateBehavior = field(default_factory=TemplateBehavior)


# ── the chats ──


def load_chats(data: Path, rows_of_each: int = ROWS_OF_EACH) -> list[Conversation]:
    """Return the first rows of every file, in canonical form; rows without one are left out."""
    return [one for source in CHAT_FILES for one in read_chats(data, source, rows_of_each)]


def read_chats(data: Path, source: ChatFile, count: int) -> Iterator[Conversation]:
    """Yield the first rows of a file, in canonical form."""
    canonicalize = Canonicalizer(DatasetOptions(format=Chat.model_validate(dict(source.columns))))
    for record in _read_records(data / source.path)[:count]:
        row = canonicalize(record if source.chosen is None else _append_answer(record, source.chosen))
        if not isinstance(row, Rejected):
            key = bytes.fromhex(digest_json(to_json(row.messages)))
            tools, tagged = list(row.tools) if row.tools else None, row.report.extracted_think_from_content > 0
            yield Conversation(list(row.messages), tools, row.template_kwargs, key, had_think_tags=tagged)


def _append_answer(record: Mapping[str, Json], chosen: str) -> Json:
    return {"conversations": [*record["conversations"], record[chosen]]}


def _read_records(path: Path) -> list[Json]:
    text = path.read_text(encoding="utf-8")
    records = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.split("\n") if line]
    # A build refuses such lines as invalid JSON.
    return [record for record in records if find_lone_surrogate(record) is None]


# ── one template ──


def study_template(data: Path, name: str, conversations: Sequence[Conversation]) -> TemplateResult:
    """Render and mask all chats with one template, and compare with its training template."""
    renderer, rules = _open_renderer(data, TrainingTemplate(name)), MaskRules()
    line = TemplateResult(name, proof=prove_template(renderer, rules), contract=observe_template_once(renderer))
    masker, judge = _make_masker(data, TrainingTemplate(name)), MaskJudge(renderer)
    has_blocks = line.contract.generation_blocks != "none"
    # A training template is compared with itself: its own blocks with the closed list.
    truth = TrainingTemplate(name) if has_blocks else TRAINING_TEMPLATES.get(name)
    by_list = _make_masker(data, TrainingTemplate(name), removes_blocks=True) if has_blocks else masker
    theirs = _make_masker(data, truth) if truth else None
    if truth is not None:
        line.truth = truth.name
    allowed = _list_added_texts(data, truth) if truth else frozenset[str]()
    for one in conversations:
        line.rows += 1
        result = masker.mask(one)
        _count_result(line, result, "blocks" if has_blocks else "list")
        if isinstance(result, Rejected):
            continue
        _judge_mask(line, judge, one, result)
        if theirs is not None:
            _compare_masks(line, by_list.mask(one), theirs.mask(one), allowed)
    return line


@cache
def _open_renderer(data: Path, one: TrainingTemplate, *, removes_blocks: bool = False) -> Renderer:
    text = read_template_file(data, one.name)
    text = replace_generation_tags(text) if removes_blocks else text
    return Renderer(RendererSpec(text, SPECIAL_TOKENS, dict(one.kwargs)))


def read_template_file(data: Path, name: str) -> str:
    """Return the text of a template of the folder, or of a bundled one."""
    path = data / "templates" / f"{name}.jinja"
    text = path.read_text(encoding="utf-8") if path.is_file() else read_named_template(name)
    # That collection formats its templates over several lines and joins them before use.
    return text.replace("    ", "").replace("\n", "") if name.startswith("chujiezheng__") else text


def _make_masker(data: Path, one: TrainingTemplate, *, removes_blocks: bool = False) -> Masker:
    return Masker(_open_renderer(data, one, removes_blocks=removes_blocks), Loss(), MaskRules())


def _list_added_texts(data: Path, one: TrainingTemplate) -> frozenset[str]:
    """Return the texts that a training template's blocks train and the closed list would not."""
    differences = observe_template_once(_open_renderer(data, one)).generation_differences
    return frozenset(text.removeprefix("adds ") for text in differences if text.startswith("adds "))


def _count_result(line: TemplateResult, result: MaskedConversation | Rejected, way: str) -> None:
    if isinstance(result, Rejected):
        line.refused[result.reason] += 1
        line.details.setdefault(result.reason, Counter())[result.detail] += 1
        if result.reason == "content_dropped":
            line.dropped.update(result.detail.split(", "))
        return
    line.masked += 1
    line.dropped.update(result.dropped.keys())
    line.ways[way] += 1


def _judge_mask(line: TemplateResult, judge: MaskJudge, conversation: Conversation, masked: MaskedConversation) -> None:
    if any(
        message.get("train", message["role"] == "assistant") != (message["role"] == "assistant")
        for message in conversation.messages
    ):
        # The judge assumes that exactly the assistant messages are supervised.
        line.judged["not judged"] += 1
        return
    defects = judge.judge(conversation, masked)
    line.judged["not provable" if defects is None else "wrong" if defects else "right"] += 1
    line.defects += defects or []


def _compare_masks(
    line: TemplateResult,
    mine: MaskedConversation | Rejected,
    theirs: MaskedConversation | Rejected,
    allowed: frozenset[str],
) -> None:
    if isinstance(mine, Rejected) or isinstance(theirs, Rejected):
        return
    # One text may lack the appended end of turn.
    if not (mine.text.startswith(theirs.text) or theirs.text.startswith(mine.text)):
        return
    line.compared += 1
    found, expected = _collect_positions(mine.trained), _collect_positions(theirs.trained)
    additional = {repr(text) for text in iterate_text_runs(theirs.text, expected - found)}
    if found <= expected and additional <= allowed:
        line.equal += 1
        line.additional |= additional


def _collect_positions(spans: Iterable[Span]) -> set[int]:
    return {i for span in spans for i in range(span.start, span.end)}


# ── the page ──


def list_template_names(data: Path) -> list[str]:
    """List the templates of the folder."""
    return sorted(path.name.removesuffix(".jinja") for path in (data / "templates").glob("*.jinja"))


def render_template_page(lines: Sequence[TemplateResult]) -> str:
    """Render the page: a line for each template, remedies, comparisons, messages, and a section for each template."""
    rows, masked, judged = 0, 0, Counter[str]()
    for one in lines:
        rows, masked, judged = rows + one.rows, masked + one.masked, judged + one.judged
    opening = PAGE_OPENING.format(
        templates=len(lines),
        rows=lines[0].rows if lines else 0,
        each=ROWS_OF_EACH,
        shapes=sum(1 for _ in make_probe_conversations()),
        all_rows=format_count(rows, "row"),
        masked=masked,
        judged=_format_counts({"right": 0, "wrong": 0, **judged}, always=("right", "wrong")),
    )
    tables = [_render_overview(lines), _render_remedies(lines), _render_comparisons(lines), _render_messages(lines)]
    sections = [_render_section(one) for one in lines]
    return "\n".join(
        [opening, *(text for part in tables for text in part), *(text for part in sections for text in part), ""]
    )


PAGE_OPENING = """<!-- Written by `make docs` where the real data is; changes by hand are lost. -->
# Chat templates on real chats

This page shows what becomes of {rows:,} real rows under each of {templates} public chat templates: which rows get a \
loss mask, whether an independent judge finds it right, and why the others are refused.

The rows are the first {each} of every chat, instruction, tool, reasoning and preference file of the real data; of a \
preference pair, the chosen side.
Each is rendered twice, the second time with its texts covered by private code points, which proves the \
owner of each character; a row whose mask cannot be verified is refused with a reason.
The judge shares no code with the masker: it renders with `transformers`, proves by itself which message every \
character comes from, and reports text that trains, or does not train, by mistake.
All options have their defaults: a row is refused if the template drops any of its text other than reasoning.

**Result**: {all_rows} rendered, {masked:,} masked; judged {judged}.

`rowmill template-report RECIPE --prove` judges your template in the same way, on conversations of {shapes} shapes.

## All templates

* **masked**: rows with a verified mask, of {rows:,}.
* **judged**: what the judge finds; "not provable" if the template changes or inspects the text by which it identifies \
owners, "not judged" if other messages than the assistant's are trained.
* **shapes**: conversations of {shapes} shapes, from a leading assistant to two calls at once: how many of their masks \
are judged right; the others are refused unless the cell says more.
* **refused**: rows without a mask; the link leads to the reasons and remedies, and to what else is known of the \
template.
"""


def _render_overview(lines: Sequence[TemplateResult]) -> Iterator[str]:
    yield "| template | masked | judged | shapes | what it prints | refused |"
    yield "|---|---:|---|---|---|---|"
    for one in lines:
        refused, shapes = sum(one.refused.values()), one.proof.count("refused")
        counts = [format_count(refused, "row") if refused else "", format_count(shapes, "shape") if shapes else ""]
        link = f"[{next(filter(None, counts), 'none')}](#{make_anchor(one.name)})"
        cells = [f"`{one.name}`", f"{one.masked:,}", _format_judged(one), _format_shapes(one.proof)]
        yield _format_row([*cells, describe_template(one.contract), link])


def _format_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_escape_cell(text) for text in cells)} |"


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _format_judged(line: TemplateResult) -> str:
    if not line.masked:
        return "none"
    return "all right" if line.judged["right"] == line.masked else _format_counts(line.judged)


def _format_shapes(proof: TemplateProof) -> str:
    others = _format_counts({name: proof.count(name) for name in ("wrong", "not_provable")})
    return ", ".join(filter(None, [f"{proof.count('proven')} of {len(proof.shapes)}", others]))


def _format_counts(counted: Mapping[str, int], always: Sequence[str] = ()) -> str:
    """Format counts, the highest first, wrong masks in bold; zeros are left out, but for the names of `always`."""
    found = [(name, count) for name, count in _sort_counts(counted) if count or name in always]
    texts = [(f"{name.replace('_', ' ')} {count:,}", name == "wrong" and count > 0) for name, count in found]
    return ", ".join(f"**{text}**" if is_wrong else text for text, is_wrong in texts)


def describe_template(contract: TemplateBehavior) -> str:
    """Describe a template in one short sentence: what it prints besides plain text, and what it demands."""
    has_lists, has_calls = contract.tools == "printed", contract.arguments not in ("dropped", "refused")
    are_printed = {"tools": has_lists} if has_lists == has_calls else {"tool lists": has_lists, "calls": has_calls}
    are_printed[_REASONING_NOTES[contract.reasoning]] = contract.reasoning != "none"
    printed = [name for name, is_printed in are_printed.items() if is_printed]
    absent = [name for name, is_printed in are_printed.items() if not is_printed]
    prints = [" and ".join(printed), f"no {join_choices(absent)}" if absent else ""]
    parts = [f"Prints {', but '.join(filter(None, prints))}"]
    parts += ["roles must alternate"] if "two_users" in contract.alternation else []
    parts += [_SYSTEM_NOTES[contract.system]] if contract.system in _SYSTEM_NOTES else []
    return f"{'; '.join(parts)}."


_REASONING_NOTES = {"all": "all reasoning", "last": "the last turn's reasoning", "none": "reasoning"}
_SYSTEM_NOTES = {
    "dropped": "drops system text",
    "refused": "refuses system text",
    "last_user_only": "moves system text",
}


# ── the tables below the overview ──


def _render_remedies(lines: Sequence[TemplateResult]) -> Iterator[str]:
    yield from ("", "## What to do about a refusal", "", "| reason | what it means | what to do |", "|---|---|---|")
    for reason in sorted({reason for one in lines for reason in one.refused}):
        yield f"| `{reason}` | {REASON_DESCRIPTIONS[reason].what} | {REASON_DESCRIPTIONS[reason].remedy} |"


COMPARISON_OPENING = """
## Compared with training templates

A template with `{% generation %}` blocks says itself what trains.
The table has the rows that such a template renders to the same text, and how many of their masks are equal.
Its blocks may train more, such as a header, a line end or a second end token; the learned list does not train that.
A template that has blocks is compared with itself: its blocks with the learned list.

| template | compared with | equal masks | its blocks train in addition |
|---|---|---|---|"""


def _render_comparisons(lines: Sequence[TemplateResult]) -> Iterator[str]:
    yield COMPARISON_OPENING
    for one in lines:
        if one.truth:
            equal = f"{one.equal:,} of {one.compared:,}"
            cells = [f"`{one.name}`", "its own blocks" if one.truth == one.name else f"`{one.truth}`"]
            cells += [equal if one.equal == one.compared else f"**{equal}**"]
            yield _format_row([*cells, ", ".join(f"`{text}`" for text in sorted(one.additional))])


def _render_messages(lines: Sequence[TemplateResult]) -> Iterator[str]:
    yield from ("", "## What the templates say", "", "| template | rows | its message |", "|---|---:|---|")
    for one in lines:
        for message, count in _sort_counts(one.details.get("template_error", {}))[:SHOWN_DETAILS]:
            yield _format_row([f"`{one.name}`", f"{count:,}", message.partition(": ")[2]])
    yield from ("", "## Each template", "", "Numbers in parentheses are rows; what has none was found in shapes only.")


def _sort_counts(counted: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counted.items(), key=lambda one: (-one[1], one[0]))


# ── the section of one template ──

SHOWN_DETAILS = 3
"""Details shown of one reason, and wrong masks shown of one template."""
_WAYS = {"blocks": "its `{% generation %}` blocks", "list": "the learned list"}
_DROPPED_FACT = "Does not always print "
"""The facts that a section leaves out, because its refusals say the same with counts."""


def _render_section(line: TemplateResult) -> Iterator[str]:
    ways = "".join(f", by {_WAYS[way]}" for way in line.ways)
    refused = line.proof.count("refused")
    yield from ("", f"### `{line.name}`", "")
    yield f"{line.masked:,} of {line.rows:,} rows are masked{ways}; judged: {_format_judged(line)}."
    yield f"Shapes proven: {_format_shapes(line.proof)}{f', refused {refused}' if refused else ''}."
    yield from _render_wrong_masks(line)
    yield ""
    for fact in line.proof.facts:
        if not fact.startswith(_DROPPED_FACT):
            yield f"- {_put_in_code(fact)}"
    left_out = line.dropped - Counter(_iterate_dropped_kinds(line.details.get("content_dropped", {})))
    if left_out:
        yield f"- Left out of masked rows: {_format_kinds(left_out)}."
    yield from _render_refusals(line)


def _render_wrong_masks(line: TemplateResult) -> Iterator[str]:
    defects = [*line.defects, *line.proof.defects]
    if defects:
        yield from ("", "**Wrong masks**:", "")
        yield from (f"- {_put_in_code(describe_defect(one))}" for one in defects[:SHOWN_DETAILS])
        if len(defects) > SHOWN_DETAILS:
            yield f"- … and {len(defects) - SHOWN_DETAILS:,} more."


def _put_in_code(sentence: str) -> str:
    """Put quoted text and template tags into code, since Markdown would take `<end>` for HTML."""
    return re.sub(r"'([^'`]*<[^'`]*)'|({%[^%]*%})", lambda found: f"`{found[1] or found[2]}`", sentence)


def _render_refusals(line: TemplateResult) -> Iterator[str]:
    by_shapes: dict[str, Counter[str]] = {}
    for (reason, detail), count in line.proof.refusals.items():
        by_shapes.setdefault(reason, Counter())[detail] += count
    reasons = sorted({*line.refused, *by_shapes}, key=lambda reason: (-line.refused[reason], reason))
    yield from ("", "Refused:", "") if reasons else ("", "Nothing is refused.")
    for reason in reasons:
        rows, shapes = line.details.get(reason, Counter[str]()), by_shapes.get(reason, Counter[str]())
        counts = [
            format_count(rows.total(), "row") if rows else "",
            format_count(shapes.total(), "shape") if shapes else "",
        ]
        yield f"- `{reason}`, {' and '.join(filter(None, counts))}: {_explain_refusal(reason, rows, shapes)}"


def _explain_refusal(reason: str, rows: Counter[str], shapes: Counter[str]) -> str:
    """Return why rows and shapes are refused, and the remedy."""
    if reason == "content_dropped":
        kinds = Counter(_iterate_dropped_kinds(rows))
        kinds.update(dict.fromkeys(_iterate_dropped_kinds(shapes), 0))
        options = ", ".join(f"{kind}: count" for kind, _ in _sort_counts(kinds))
        return (
            f"it does not always print {_format_kinds(kinds)}. "
            f"To keep such rows without that text set `template.on_dropped: {{{options}}}`; or choose another template."
        )
    what, remedy = (
        text.partition(";")[0] for text in (REASON_DESCRIPTIONS[reason].what, REASON_DESCRIPTIONS[reason].remedy)
    )
    cause = what.partition(":")[0]
    if reason == "template_error":
        said = [(_shorten(text.partition(": ")[2]), count) for text, count in _sort_counts(rows or shapes)]
        cause = "it says " + ", ".join(
            f"“{text}”{f' ({count:,})' if rows else ''}" for text, count in said[:SHOWN_DETAILS]
        )
    elif any(":" in detail for detail in rows or shapes):
        # A detail that is only the number of a message explains nothing.
        cause = "; ".join(_shorten(detail) for detail, _ in _sort_counts(rows or shapes)[:SHOWN_DETAILS])
    return f"{_put_in_code(cause)}. {remedy[0].upper()}{remedy[1:]}."


def _iterate_dropped_kinds(details: Mapping[str, int]) -> Iterator[str]:
    """Yield the kinds of text in details of `content_dropped`, each once for every row."""
    return (kind for detail, count in details.items() for kind in detail.split(", ") * count)


def _format_kinds(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"`{kind}` ({count:,})" if count else f"`{kind}`" for kind, count in _sort_counts(kinds))


def _shorten(text: str) -> str:
    return textwrap.shorten(text, 160, placeholder=" …")


def _study_on_all_chats(data: Path, name: str) -> TemplateResult:
    line = study_template(data, name, load_chats(data))
    print(f"{name}  {_format_counts(line.judged)}", file=sys.stderr, flush=True)
    for defect in line.defects[:3]:
        print(f"  {defect}", file=sys.stderr, flush=True)
    return line


def main() -> int:
    """Write the page, or report why it is not written."""
    data = Path(os.environ.get("ROWMILL_REAL_DATA", Path.cwd().parent / "shared" / "data"))
    if not (data / "templates").is_dir():
        print(f"{PAGE}  left as it is: no templates at {data / 'templates'}; set ROWMILL_REAL_DATA")
        return 0
    with ProcessPoolExecutor() as workers:
        text = render_template_page(list(workers.map(partial(_study_on_all_chats, data), list_template_names(data))))
    changed = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE}  {'written' if changed else 'unchanged'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
