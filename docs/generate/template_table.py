"""Write docs/templates.md: the masks of real chats under every chat template of a folder.

What belongs here: reading the chats, rendering, masking and proving them with every template, comparing masks with
those of training templates, and the page. What does not: the proof of masks (`mask_judge.py`) and the probes of all
shapes (`template_proof.py`).

    python -m docs.generate.template_table      docs/templates.md

The chats and the templates are in a folder that is not part of the project (`ROWMILL_REAL_DATA`, else
`../shared/data`); without it the page is not written.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from rowmill.checks.mask_judge import MaskDefect
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.minijinja_engine import replace_generation_tags
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_contract import iterate_text_runs
from rowmill.conversation.template_registry import read_named_template
from rowmill.core.json import Json, find_lone_surrogate, to_json
from rowmill.core.storage import digest_json
from rowmill.formats import Chat
from rowmill.formats.canonicalization import Canonicalizer, RowOptionValues
from rowmill.inspection.template_proof import TemplateProof, make_probe_conversations, prove_template
from rowmill.schema.conversation import Conversation
from rowmill.schema.reject_reasons import REASON_DESCRIPTIONS
from rowmill.schema.rows import MaskedConversation, Rejected, Span
from rowmill.stages.tokenized_examples.judged_rows import MaskJudge

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
    """How the spans of masked rows were found: marks, generation or proof."""
    refused: Counter[str] = field(default_factory=Counter[str])
    messages: Counter[str] = field(default_factory=Counter[str])
    """The template's messages for rows that it refused."""
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


# ── the chats ──


def load_chats(data: Path, rows_of_each: int = ROWS_OF_EACH) -> list[Conversation]:
    """Return the first rows of every file, in canonical form; rows without one are left out."""
    return [one for source in CHAT_FILES for one in read_chats(data, source, rows_of_each)]


def read_chats(data: Path, source: ChatFile, count: int) -> Iterator[Conversation]:
    """Yield the first rows of a file, in canonical form."""
    canonicalize = Canonicalizer(RowOptionValues(Chat.model_validate(dict(source.columns))))
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
    line = TemplateResult(name, proof=prove_template(renderer, rules))
    masker, judge = _make_masker(data, TrainingTemplate(name)), MaskJudge(renderer)
    has_blocks = renderer.contract.generation_blocks != "none"
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
    differences = _open_renderer(data, one).contract.generation_differences
    return frozenset(text.removeprefix("adds ") for text in differences if text.startswith("adds "))


def _count_result(line: TemplateResult, result: MaskedConversation | Rejected, way: str) -> None:
    if isinstance(result, Rejected):
        line.refused[result.reason] += 1
        if result.reason == "template_error":
            line.messages[result.detail] += 1
        elif result.reason == "content_dropped":
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
    """Render the page: the table, remedies, facts, and the templates' messages."""
    rows = lines[0].rows if lines else 0
    shapes = sum(1 for _ in make_probe_conversations())
    opening = PAGE_OPENING.format(templates=len(lines), rows=rows, each=ROWS_OF_EACH, shapes=shapes)
    return "\n".join([opening, *_render_result_table(lines), *_render_closing(lines), ""])


PAGE_OPENING = """<!-- Written by `make docs` where the real data is; changes by hand are lost. -->
# Chat templates on real chats

{templates} public chat templates, each on the same {rows:,} rows.
The rows are the first {each} of every chat, instruction, tool, reasoning and preference file of the real data; of
a preference pair, the chosen side.
Every row is rendered twice, the second time with its texts covered; its mask is verified, and a row whose mask cannot
be verified is refused with a reason.
Every mask is then checked by code that shares nothing with the masker: it renders with `transformers`, proves which
message every letter comes from, and reports characters that train, or do not train, by mistake.
`rowmill template-report RECIPE --prove` does the same for your template, on conversations of {shapes} shapes.
All options have their defaults: a row is refused if the template drops any of its text other than reasoning.

* **masked**: rows with a verified mask; **by**: how the spans were found.
* **judged**: results of that check on the masks of real rows; "not provable" if the template changes or inspects the
  text by which the check identifies owners.
* **shapes**: its results on conversations of all shapes, from a leading assistant to two calls at once.
* **refused**: rows by reason; the remedies are listed below.
* **training template**: how many rows a template with `{{% generation %}}` blocks renders to the same text, and how
  many of their masks are equal.
  Text that its blocks train in addition, such as a header, a line end or a second end token, is listed after "plus";
  marks do not train it.
  A template that has blocks itself is compared with itself: its blocks against marks.
* **not printed**: rows by kind of text that the template drops.
"""


def _render_result_table(lines: Sequence[TemplateResult]) -> Iterator[str]:
    yield "| template | masked | by | judged | shapes | refused | training template | not printed |"
    yield "|---|---:|---|---|---|---|---|---|"
    for one in lines:
        ways = ", ".join(f"{way}" if len(one.ways) == 1 else f"{way} {n}" for way, n in one.ways.most_common())
        cells = [f"`{one.name}`", f"{one.masked:,}", ways, _format_counts(one.judged), _format_shapes(one.proof)]
        cells += [_format_counts(one.refused), _format_training_template(one), _format_counts(one.dropped)]
        yield f"| {' | '.join(_escape_cell(text) for text in cells)} |"


def _format_shapes(proof: TemplateProof) -> str:
    found = {one: proof.count(one) for one in ("proven", "wrong", "not_provable", "refused")}
    return ", ".join(f"{one.replace('_', ' ')} {count}" for one, count in found.items() if count)


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _format_training_template(line: TemplateResult) -> str:
    if not line.truth:
        return ""
    additional = f", plus {', '.join(f'`{text}`' for text in sorted(line.additional))}" if line.additional else ""
    name = "its own blocks" if line.truth == line.name else f"`{line.truth}`"
    return f"{name}: {line.equal:,} of {line.compared:,} equal{additional}"


def _format_counts(counted: Counter[str]) -> str:
    found = sorted(counted.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{name} {count:,}" for name, count in found)


def _render_closing(lines: Sequence[TemplateResult]) -> Iterator[str]:
    yield from ("", "## What to do about a refusal", "", "| reason | what it means | what to do |", "|---|---|---|")
    for reason in sorted({reason for one in lines for reason in one.refused}):
        yield f"| `{reason}` | {REASON_DESCRIPTIONS[reason].what} | {REASON_DESCRIPTIONS[reason].remedy} |"
    yield from ("", "## What the templates do", "", "| template | facts |", "|---|---|")
    for one in lines:
        yield f"| `{one.name}` | {_escape_cell(' '.join(one.proof.facts))} |"
    yield from ("", "## What the templates say", "", "| template | rows | its message |", "|---|---:|---|")
    for one in lines:
        for message, count in sorted(one.messages.items(), key=lambda found: (-found[1], found[0]))[:3]:
            yield f"| `{one.name}` | {count:,} | {_escape_cell(message.partition(': ')[2])} |"


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
