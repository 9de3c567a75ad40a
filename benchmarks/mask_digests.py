"""What every chat template does with every chat: one digest of text, mask and pieces each, to compare two versions.

Rewriting `rowmill/conversation/` must not change any mask by accident. `record` takes the chats of the real data, the
conversations of all shapes from which templates are learned and by which they are proven, and the hostile templates of
the tests, and notes what a build makes of each of them. `compare` lists what is different in another record.

    python -m benchmarks.mask_digests record --out A                  # before a change; minutes
    python -m benchmarks.mask_digests record --like A --out B         # after it, the same templates and shapes
    python -m benchmarks.mask_digests compare A B                     # status 1 if anything but refusals less
    python -m benchmarks.mask_digests show TEMPLATE DATASET ROW       # one outcome in full, trained text in brackets

With `--like` a record takes the texts of templates and the shapes from an earlier one, so their code may change too.
`--only` limits a record, or a comparison, to the templates whose names contain a text. The path `default` is what a
build takes: plain chats by their layout, others one by one; `slow` takes all one by one.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from docs.generate import template_table
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.template_contract import observe_template_once
from rowmill.conversation.turn_layouts import TurnLayout
from rowmill.kinds.shared.reasoning import inline_reasoning
from rowmill.schema.rows import Conversation, MaskedConversation, Message, Rejected
from rowmill.stages.tokenized_examples.conversation_examples import open_renderer

HOSTILE = (
    "REBUILT", "MERGED", "MACRO", "COUNTED", "REVERSED_LOOKUP", "QUOTING", "NAMED_END", "INDENTED", "SPLIT_THOUGHT",
    "SORTED_ARGUMENTS",
)  # fmt: skip
"""Templates of tests/conversation/test_mask_regressions.py."""
MORE_CHATS = ("shapes/*.jsonl", "odd_files/chat_cases.jsonl")
"""Files of chats beside those of docs/templates.md; those without a chat give no row."""
DROPPED = (
    "system", "user", "assistant_text", "text_beside_call", "call_name", "call_arguments", "tool_result", "tool_list",
    "reasoning", "unknown_role",
)  # fmt: skip
KEPT: dict[Any, Any] = dict.fromkeys(DROPPED, "count")

Way = Literal["default", "slow"]
OPTIONS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "kept": ({}, {"on_dropped": KEPT}),
    "prompt": ({}, {"on_dropped": KEPT}),
    "untrained": ({}, {"on_dropped": dict.fromkeys(DROPPED, "untrain")}),
    "answer_only": ({"think_loss": "answer_only"}, {"on_dropped": KEPT}),
    "answer_plus_think": ({"think_loss": "answer_plus_think"}, {"on_dropped": KEPT}),
    "wide": ({"lead": "train", "trailing": "train"}, {"on_dropped": KEPT}),
    "bare": ({"lead": "mask", "end_of_turn": "mask", "trailing": "mask"}, {"on_dropped": KEPT}),
    "eos": ({"finish": "eos"}, {"on_dropped": KEPT}),
    "last_turn": ({"supervise": "last_turn"}, {"on_dropped": KEPT}),
    "every_role": ({"mask_default": "train"}, {"on_dropped": KEPT}),
    "everything": ({"mask_user_turns": False}, {"on_dropped": KEPT}),
    "turns": ({}, {"turns": "auto", "on_dropped": KEPT}),
    "no_thinking": ({}, {"on_dropped": KEPT}),
}
"""Name → the options of the loss and the rules that are not the defaults. `prompt`: without the last answer;
`no_thinking`: with the template value `enable_thinking: false`."""
OPTIONS_OF_ROWS = ("default", "kept", "prompt")
"""Rows and rough texts are masked under these, shapes under all."""

ROUGH_SHAPES = "ua uaua suaua uaa ur urur ucta udtta ubta ueta uetra uctuctua".split()
ROUGH_TEXTS = (
    "a", "12", "user", "  padded \n", "one\n\n\ttwo\n", "漢字 é 🙂", '"said" \\ {"k": 1}', "<b>&amp;</b>", "%s {{ x }}",
    "</think>", "<think>\nwhy\n</think>\n\nso", "<|im_end|>", "</s>", "[/INST] <|eot_id|>", "tool_calls</tool_call>",
)  # fmt: skip
"""Texts that are hard to find: each replaces every own text of each of these shapes, so all are equal as well."""

SCHEMA = pa.schema(
    [
        *((name, pa.dictionary(pa.int32(), pa.string())) for name in ("template", "dataset")),
        ("row", pa.string()),
        *((name, pa.dictionary(pa.int32(), pa.string())) for name in ("options", "path")),
        *((name, pa.int64()) for name in ("text", "trained", "pieces")),
        ("reason", pa.dictionary(pa.int32(), pa.string())),
        ("detail", pa.string()),
    ]
)
"""`trained` covers weights too, `pieces` what the template dropped; `path` is the one taken, and `detail` that of the
reject: both are shown, not compared. The fields of a template's contract are rows of the dataset `contract`, with the
value as detail."""
KEY = ["template", "dataset", "row", "options"]
KINDS = {"text": "text differs", "trained": "mask differs", "pieces": "pieces differ"}
IGNORABLE = ("pieces", "contract")
FINE_NOW = "refused before and now fine"


class Subject(NamedTuple):
    """A conversation, its dataset or set of shapes, and its name there."""

    dataset: str
    row: str
    conversation: Conversation


class Subjects(NamedTuple):
    """The texts of templates by name, and the conversations of all shapes."""

    templates: dict[str, str]
    shapes: list[Subject]


Made = list[MaskedConversation] | Rejected
"""The examples that a build makes of a conversation."""


# ── what a build does: the only code here that calls `rowmill.conversation` ──


def open_template(text: str, path: Way) -> tuple[dict[str, Any], Callable[[Conversation, str], tuple[str, Made]]]:
    """Return a template's contract, and the function that makes a conversation's examples and names the path taken."""
    renderer = open_renderer(RendererSpec(text, template_table.SPECIAL_TOKENS))
    contract = observe_template_once(renderer)
    prints_no_reasoning = contract.reasoning == "none"

    @cache
    def open_masker(options: str) -> Masker:
        loss, given = OPTIONS[options]
        return Masker(renderer, Loss(**loss), MaskRules(**given))

    @cache
    def find_layout(options: str, roles: tuple[str, ...]) -> TurnLayout | None:
        masker = open_masker(options)
        return masker.find_prompt_layout(roles) if options == "prompt" else masker.find_layout(roles)

    def make(one: Conversation, options: str) -> tuple[str, Made]:
        masker = open_masker(options)
        if path == "default" and not one.tools and not one.kwargs and all(len(m) == 2 for m in one.messages):
            layout = find_layout(options, tuple(message["role"] for message in one.messages))
            contents = [message["content"] for message in one.messages]
            # As a part's rows are chosen: a text that the template tests for is not printed as the layout says.
            if (
                layout is not None
                and layout.holds(contents)
                and not any(one in content for one in layout.literals for content in contents)
            ):
                return "fast", [layout.mask(contents)]
        if one.had_think_tags and prints_no_reasoning:
            one = replace(one, messages=inline_reasoning(one.messages, ("<think>", "</think>")))
        if options == "prompt":
            results = [masker.render_prompt(one)]
        else:
            results = [masker.mask(part, only=only) for part, only in masker.split_turns(one)]
        rejects = [result for result in results if isinstance(result, Rejected)]
        return "slow", rejects[0] if rejects else [one for one in results if isinstance(one, MaskedConversation)]

    return asdict(contract), make


# ── the conversations and the templates ──


@cache
def read_rows(data: Path) -> list[Subject]:
    """Return all chats of the real data."""
    files = [*template_table.CHAT_FILES]
    for pattern in MORE_CHATS:
        files += [template_table.ChatFile(path.relative_to(data).as_posix()) for path in sorted(data.glob(pattern))]
    found: list[Subject] = []
    for one in files:
        chats = template_table.read_chats(data, one, sys.maxsize)
        found += [Subject(one.path, str(number), chat) for number, chat in enumerate(chats)]
    return found


def collect_subjects(data: Path) -> Subjects:
    """Return the templates of the data, the bundled and the hostile ones, and the shapes, as the code has them now."""
    from rowmill.conversation.probe_conversations import make_learning_probes
    from rowmill.conversation.template_registry import list_bundled_templates
    from rowmill.inspection.chat_templates import make_probe_conversations
    from tests.conversation import test_mask_regressions

    names = template_table.list_template_names(data)
    templates = {name: template_table.read_template_file(data, name) for name in names}
    templates |= {f"bundled {name}": template_table.read_template_file(data, name) for name in list_bundled_templates()}
    templates |= {f"hostile {name.lower()}": getattr(test_mask_regressions, name) for name in HOSTILE}
    shapes = [
        Subject("shapes of probes", str(number), Conversation(messages, tools))
        for number, (messages, tools) in enumerate(make_learning_probes("assistant"))
    ]
    shapes += [
        Subject("shapes of proofs", f"{number} {one.shape}", Conversation(one.messages, one.tools))
        for number, one in enumerate(make_probe_conversations())
    ]
    shapes += [
        Subject("rough texts", f"{number} {one.shape} {text!r}", Conversation(_put_text(one.messages, text), one.tools))
        for text in ROUGH_TEXTS
        for number, one in enumerate(make_probe_conversations())
        if one.shape in ROUGH_SHAPES
    ]
    return Subjects(templates, shapes)


def _put_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return a conversation of which all own texts are the same text; names of functions and keys stay."""
    changed: list[Message] = []
    for message in messages:
        new = {
            key: text if key in ("content", "reasoning_content") and value else value for key, value in message.items()
        }
        if "tool_calls" in message:
            new["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": {"city": text, "days": 3, "all": [text]}}}
                for call in message["tool_calls"]
            ]
        changed.append(new)
    return changed


def write_subjects(subjects: Subjects) -> bytes:
    """Return templates and shapes as JSON, which a record holds as metadata."""
    shapes = [[one.dataset, one.row, one.conversation.messages, one.conversation.tools] for one in subjects.shapes]
    return json.dumps({"templates": subjects.templates, "shapes": shapes}).encode()


def read_subjects(record: Path) -> Subjects:
    """Return the templates and shapes of a record."""
    known = json.loads((pq.read_schema(record).metadata or {})[b"subjects"])
    shapes = [Subject(dataset, row, Conversation(*rest)) for dataset, row, *rest in known["shapes"]]
    return Subjects(known["templates"], shapes)


# ── recording ──


def list_cases(data: Path, name: str, shapes: Sequence[Subject]) -> Iterator[tuple[Subject, str]]:
    """Yield the conversations that a template is given, each with the options."""
    for one in [*([] if name.startswith("hostile ") else read_rows(data)), *shapes]:
        is_shape = one.dataset in ("shapes of probes", "shapes of proofs")
        yield from ((one, options) for options in (OPTIONS if is_shape else OPTIONS_OF_ROWS))


def study_template(data: Path, name: str, text: str, shapes: Sequence[Subject], path: Way) -> pa.Table:
    """Return the outcomes of one template."""
    contract, make = open_template(text, path)
    found: list[tuple[Any, ...]] = [
        (name, "contract", field, "default", "", _hash(value), None, None, None, repr(value))
        for field, value in contract.items()
    ]
    for subject, options in list_cases(data, name, shapes):
        conversation = prepare(subject.conversation, options)
        if not conversation.messages:
            continue
        way, made = make(conversation, options)
        found.append((name, subject.dataset, subject.row, options, way, *digest(made)))
    columns = zip(*found, strict=True)
    return pa.table([pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], SCHEMA)


def prepare(one: Conversation, options: str) -> Conversation:
    """Return a conversation as some options need it: for a prompt without its last answer and all after it."""
    if options == "no_thinking":
        return replace(one, kwargs={**one.kwargs, "enable_thinking": False})
    answers = [index for index, message in enumerate(one.messages) if message["role"] == "assistant"]
    return replace(one, messages=one.messages[: answers[-1]]) if options == "prompt" and answers else one


def digest(made: Made) -> tuple[int | None, int | None, int | None, str | None, str | None]:
    """Return the last five columns of an outcome."""
    if isinstance(made, Rejected):
        return None, None, None, made.reason, made.detail
    texts = [one.text for one in made]
    trained = [
        ([(s.start, s.end, s.message) for s in one.trained], sorted(one.weights.items()), one.reasoning_untrained)
        for one in made
    ]
    pieces = [([(p.start, p.end, p.message, p.kind) for p in one.pieces], sorted(one.dropped.items())) for one in made]
    return _hash(texts), _hash(trained), _hash(pieces), None, None


def _hash(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)


def record(data: Path, out: Path, subjects: Subjects, only: str, path: Way, workers: int) -> None:
    """Write the outcomes of all templates to a Parquet file."""
    begin = time.monotonic()
    names = [name for name in subjects.templates if only in name]
    texts = [subjects.templates[name] for name in names]
    count = len(names)
    tasks = ([data] * count, names, texts, [subjects.shapes] * count, [path] * count)
    schema = SCHEMA.with_metadata({b"subjects": write_subjects(subjects)})
    reasons = Counter[str]()
    with pq.ParquetWriter(out, schema, compression="zstd") as file, ProcessPoolExecutor(workers) as pool:
        # A single worker is this process.
        tables = map(study_template, *tasks) if workers == 1 else pool.map(study_template, *tasks)
        for number, (name, table) in enumerate(zip(names, tables, strict=True), start=1):
            file.write_table(table.replace_schema_metadata(schema.metadata))
            found = zip(table["dataset"].to_pylist(), table["reason"].to_pylist(), strict=True)
            reasons.update(reason or "masked" for dataset, reason in found if dataset != "contract")
            passed = time.monotonic() - begin
            print(f"{number}/{count}  {passed:5.0f} s  {name}  {len(table):,} outcomes", file=sys.stderr, flush=True)
    print(f"{out}  {reasons.total():,} outcomes, {count} templates, {time.monotonic() - begin:.0f} s")
    for reason, times in reasons.most_common():
        print(f"{times:10,}  {reason}")


# ── comparing ──


def compare(before: Path, after: Path, only: str, ignored: Sequence[str]) -> int:
    """Print the differences of two records by kind and template; return the exit status."""
    digests = [name for name in KINDS if name not in ignored]
    one, other = (
        pl.read_parquet(path, columns=[*KEY, *digests, "reason", "detail"])
        .cast(dict.fromkeys((*KEY, "reason"), pl.String))
        .filter(pl.col("template").str.contains(only, literal=True) & ~pl.col("dataset").is_in(ignored))
        for path in (before, after)
    )
    joined = one.with_columns(there=True).join(
        other.with_columns(there=True), on=KEY, how="full", suffix="_after", coalesce=True
    )
    refused, refused_after = pl.col("reason").is_not_null(), pl.col("reason_after").is_not_null()
    kind = (
        pl.when((pl.col("dataset") == "contract") & pl.col("text").ne_missing(pl.col("text_after")))
        .then(pl.lit("contract differs"))
        .when(pl.col("there").is_null())
        .then(pl.lit("only after"))
        .when(pl.col("there_after").is_null())
        .then(pl.lit("only before"))
        .when(refused & ~refused_after)
        .then(pl.lit(FINE_NOW))
        .when(~refused & refused_after)
        .then(pl.lit("fine before and now refused"))
        .when(pl.col("reason").ne_missing(pl.col("reason_after")))
        .then(pl.lit("refused for another reason"))
    )
    for name in digests:
        kind = kind.when(pl.col(name).ne_missing(pl.col(f"{name}_after"))).then(pl.lit(KINDS[name]))
    sorted_out = joined.with_columns(kind=kind.otherwise(pl.lit("same"))).sort(KEY)
    totals = sorted_out.group_by("kind").len().sort("len", descending=True)
    for name, count in totals.iter_rows():
        print(f"{count:10,}  {name}")
    different = sorted_out.filter(pl.col("kind") != "same")
    for (name, template), group in different.group_by("kind", "template", maintain_order=True):
        example = group.row(0, named=True)
        print(f"{name}: {template}: {len(group):,}, such as {example['dataset']!r} {example['row']!r}, ", end="")
        print(f"options {example['options']}")
        for when, end in (("before", ""), ("after", "_after")):
            if example[f"detail{end}"] is not None:
                print(f"    {when}: {example[f'reason{end}'] or 'value'}: {example[f'detail{end}']}")
    return int(bool(set(different["kind"]) - {FINE_NOW}))


def show(data: Path, subjects: Subjects, template: str, dataset: str, row: str, options: str, path: Way) -> None:
    """Print one outcome: its text with trained characters in brackets, and its pieces."""
    found = [one for one in [*read_rows(data), *subjects.shapes] if (one.dataset, one.row) == (dataset, row)]
    if not found or template not in subjects.templates:
        raise SystemExit(f"no row {row!r} of {dataset!r}, or no template {template!r}; take them from a comparison")
    conversation = prepare(found[0].conversation, options)
    way, made = open_template(subjects.templates[template], path)[1](conversation, options)
    print(f"path: {way}")
    for one in [made] if isinstance(made, Rejected) else made:
        if isinstance(one, Rejected):
            print(f"{one.reason}: {one.detail}")
            continue
        position = 0
        for span in one.trained:
            print(f"{one.text[position : span.start]}⟦{one.text[span.start : span.end]}⟧", end="")
            position = span.end
        print(one.text[position:])
        for piece in one.pieces:
            print(f"{piece.message:3} {piece.kind:12} {piece.start}–{piece.end} {one.text[piece.start : piece.end]!r}")
        print(f"dropped {one.dropped}")


def main() -> int:
    """Carry out one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording, comparing, showing = (commands.add_parser(name) for name in ("record", "compare", "show"))
    recording.add_argument("--out", type=Path, required=True)
    recording.add_argument("--workers", type=int, default=1)
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--ignore", choices=IGNORABLE, nargs="*", default=[], help="what may differ")
    for name in ("template", "dataset", "row"):
        showing.add_argument(name)
    showing.add_argument("--options", choices=OPTIONS, default="default")
    for one in (recording, showing):
        one.add_argument("--like", type=Path, help="a record whose templates and shapes are taken")
        one.add_argument("--path", choices=("default", "slow", "proven"), default="default")
    for one in (recording, comparing):
        one.add_argument("--only", default="", help="only templates whose names contain this")
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.before, given.after, given.only, given.ignore)
    data = Path(os.environ.get("ROWMILL_REAL_DATA", Path.cwd().parent / "shared" / "data"))
    subjects = read_subjects(given.like) if given.like else collect_subjects(data)
    if given.command == "record":
        record(data, given.out, subjects, given.only, given.path, given.workers)
    else:
        show(data, subjects, given.template, given.dataset, given.row, given.options, given.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
