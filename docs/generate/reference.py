"""Write the reference: every option, check, state and command, from the models and lists that the engine reads.

    python -m docs.generate.reference    docs/reference.md  docs/reference/  docs/walk.md  configs/schema/recipe.json
                                         README.md's table, docs/README.md's list of pages, answers in
                                         docs/reference/queries.md, install lines wherever they are,
                                         docs/images/pipeline.svg, docs/images/pipeline-narrow.svg

Pages are functions of the code alone (no times, no paths, no terminal width), so a test can compare what is
committed with what would be written.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from docs.generate import pipeline_picture, site, walkthrough
from docs.generate.install_lines import render_pages_with_install_lines
from docs.generate.reference_pages import divide_reference, make_anchor
from rowmill import exports, sources
from rowmill.alerts import CommandAlert, EmailAlert, WebhookAlert
from rowmill.checks import catalog, gates
from rowmill.checks.gates import Bound, Expectation, Waiver
from rowmill.conversation.options import TemplateChoice
from rowmill.core import console
from rowmill.core.completions import Teacher
from rowmill.core.config import Config, describe_field
from rowmill.core.storage import Store
from rowmill.executors import LocalExecutor, RayExecutor
from rowmill.kinds.base import OPTION_GROUPS
from rowmill.kinds.catalog import KIND_ALIASES, KINDS, Format, Records
from rowmill.kinds.shared.filters import Benchmark, Decontaminate, NearDuplicates
from rowmill.kinds.shared.splits import Boundaries
from rowmill.kinds.tables.generation import CallableBackend, Generation, OpenAIBackend
from rowmill.kinds.tables.options import FileGroups
from rowmill.kinds.tables.parsing import Validation
from rowmill.kinds.tables.table_contract import ColumnContract, TableContract
from rowmill.kinds.tokens import TokenField
from rowmill.packing.options import BlockShuffle, Mixture
from rowmill.packing.rank_assignment import Partitions
from rowmill.recipe import recipe
from rowmill.recipe.recipe import Dataset, Execution, Freshness, Recipe
from rowmill.schema import ledger
from rowmill.schema.rows import RowKind
from rowmill.sources.encodings import CODECS
from rowmill.sources.files import FORMATS_BY_SUFFIX
from rowmill.sources.options import Limits
from rowmill.stats import views
from rowmill.stats.views import list_view_names, query_views
from rowmill.tokenization.tokenizer_source import TokenizerChoice
from rowmill.tracking import MlflowTracker, OpenLineageTracker, WandbTracker

GENERATED_NOTICE = "<!-- Written by `make docs` from the code; changes by hand are lost. -->"
TABLE_BEGIN = "<!-- formats and sources: written by `make docs` -->"
TABLE_END = "<!-- end of formats and sources -->"
QUERIES_PAGE = "docs/reference/queries.md"
QUERY_PATTERN = re.compile(r"(^```sql\n(.*?)^```\n)\n```\n.*?^```\n", re.MULTILINE | re.DOTALL)
"""A query and the block after it, which shows its result."""
COLUMNS_OF_VIEWS = (
    "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE schema_name = 'main' AND NOT internal"
)
HELP_COLUMNS = 100
"""Characters per line of `--help` in the reference: a terminal's width must not decide the page."""

TITLES: dict[type[Config], str] = {
    Dataset: "`datasets.<name>`",
    **{model: f"`datasets.<name>.{name}`" for name, model in OPTION_GROUPS.items()},
    TokenizerChoice: "`tokenizer`",
    TemplateChoice: "Template choice",
    Decontaminate: "`datasets.<name>.filters.decontaminate`",
    Benchmark: "`filters.decontaminate.benchmarks`",
    NearDuplicates: "`datasets.<name>.filters.near_duplicates`",
    Boundaries: "Boundaries",
    **{
        model: f"Records: `{name}`"
        for name, field in Records.model_fields.items()
        if isinstance(model := field.annotation, type) and issubclass(model, Config)
    },
    FileGroups: "Records: groups by file",
    TableContract: "Records: `table`",
    ColumnContract: "Records: `table.columns.<name>`",
    Generation: "Records: `generation`",
    Validation: "Records: `generation.validation`",
    CallableBackend: "Records: `generation.backend`, `kind: callable`",
    OpenAIBackend: "Records: `generation.backend`, `kind: openai`",
    Teacher: "`datasets.<name>.teacher`",
    TokenField: "Tokens: `token_fields.<name>`",
    Limits: "Limits of records",
    Mixture: "`mixture`",
    BlockShuffle: "Block shuffle",
    Partitions: "`partitions`",
    gates.Gates: "`gates`",
    Bound: "Bounds",
    Waiver: "Waivers",
    Expectation: "Expectations",
    Execution: "`execution`",
    Freshness: "`execution.freshness`",
    LocalExecutor: "`execution.executor`, `kind: local`",
    RayExecutor: "`execution.executor`, `kind: ray`",
    WebhookAlert: "`execution.alerts`, `kind: webhook`",
    EmailAlert: "`execution.alerts`, `kind: email`",
    CommandAlert: "`execution.alerts`, `kind: command`",
    MlflowTracker: "`execution.log_to`, `kind: mlflow`",
    WandbTracker: "`execution.log_to`, `kind: wandb`",
    OpenLineageTracker: "`execution.log_to`, `kind: openlineage`",
}
"""Models with their own section, and its title."""

FAMILIES = {
    "source": "`datasets.<name>.source`",
    "format": "`datasets.<name>.format`",
    "exports": "`exports`",
}
"""Options that choose one of several kinds, and the title of the section that lists them."""


# ── One model as a table ───────────────────────────────────────────────────────────────────────────


def list_kinds(family: Any) -> tuple[type[Config], ...]:
    """Return the members of a discriminated union, in the order in which it lists them."""
    members = get_args(get_args(family)[0])
    return tuple(get_args(one)[0] if get_origin(one) is Annotated else one for one in members)


def describe_option_type(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """Describe a field's type in terms of YAML: `integer ≥ 1`, `list of text`, `a` · `b`, null."""
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        own = [limit for mark in marks for limit in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
        return describe_option_type(inner, own)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " · ".join(f"`{json.dumps(one) if not isinstance(one, str) else one}`" for one in arguments)
    if origin in (Union, UnionType):
        return _join_alternatives([describe_option_type(one, limits) for one in arguments])
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return f"list of {describe_option_type(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(describe_option_type(one) for one in arguments)}]"
    if origin is dict:
        return f"mapping of {describe_option_type(arguments[0])} to {describe_option_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        title = TITLES[annotation]
        return f"[{title}](#{make_anchor(title)})"
    plain = {str: "text", int: "integer", float: "number", bool: "`true` · `false`", NoneType: "null", Any: "anything"}
    least = next((limit.ge for limit in limits if hasattr(limit, "ge")), None)
    most = next((limit.le for limit in limits if hasattr(limit, "le")), None)
    bounds = [f"≥ {least:g}" if least is not None else "", f"≤ {most:g}" if most is not None else ""]
    return " ".join([plain[annotation], *(bound for bound in bounds if bound and annotation in (int, float))])


def _join_alternatives(words: list[str]) -> str:
    """Join alternatives; `number` includes `integer`, and literals are joined."""
    kept = [one for one in dict.fromkeys(words) if not (one.startswith("integer") and "number" in words)]
    joined = ""
    for one in kept:
        literals = joined.endswith("`") and one.startswith("`")
        joined += (" · " if literals else " or ") + one if joined else one
    return joined


def describe_default(field: FieldInfo) -> str:
    """Return a field's default as YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    assert value is not PydanticUndefined
    if isinstance(value, Config):
        return f"`{_kind_name(value)}`" if "kind" in type(value).model_fields else "`{}`"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def render_option_table(model: type[Config], names: Iterable[str] | None = None) -> Iterator[str]:
    """Yield the lines of a table of a model's fields, or of the named ones."""
    yield "| option | type | default | what it does |"
    yield "|---|---|---|---|"
    # A kind's fields follow inherited ones; `kind` comes first.
    for name in sorted(model.model_fields, key=lambda one: one != "kind") if names is None else names:
        field = model.model_fields[name]
        if name in getattr(model, "FILLED_IN", ()):
            continue
        words = " ".join(describe_field(model, name).split())
        family = (
            f"[{FAMILIES[name]}](#{make_anchor(FAMILIES[name])})"
            if name in FAMILIES and model in (Dataset, Recipe)
            else None
        )
        yield _format_table_row(
            f"`{field.alias or name}`",
            family or describe_option_type(field.annotation, field.metadata),
            describe_default(field),
            words,
        )


def _format_table_row(*cells: str) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _first_sentence(model: type[Config]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


# ── docs/reference.md, docs/reference/ ──────────────────────────────────────────────────────────────────────────────


def render_reference() -> str:
    """Return the reference in one text, which `reference_pages.py` divides."""
    sections = (
        _render_recipe_section(),
        _render_dataset_section(),
        _render_source_section(),
        _render_format_section(),
        *(_render_group_section(model) for model in OPTION_GROUPS.values()),
        _render_group_section(Teacher),
        _render_group_section(Mixture),
        _render_section(Partitions),
        _render_exports_section(),
        _render_gates_section(),
        _render_group_section(Execution),
        _render_names_section(),
        _render_checks_section(),
        _render_ledger_section(),
        _render_views_section(),
        _render_commands_section(),
    )
    head = [
        "# Reference",
        "",
        GENERATED_NOTICE,
        "",
        "A recipe is one YAML file, `configs/<name>.yaml` or `configs/<folder>/<name>.yaml`.",
        "The file's name is the recipe's.",
        "An unknown key, a wrong value or an impossible combination is an error before any data is read.",
        "With `# yaml-language-server: $schema=schema/recipe.json` as its first line, editors complete and check it.",
        "",
    ]
    text = "\n".join([*head, *(line for section in sections for line in (*section, ""))])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _render_section(model: type[Config], level: int = 2, title: str | None = None) -> Iterator[str]:
    yield from (f"{'#' * level} {title or TITLES[model]}", "", _first_sentence(model), "")
    yield from render_option_table(model)


def _render_recipe_section() -> Iterator[str]:
    yield from ("## The file", "", "`execution` does not affect the output; every other option may.", "")
    yield from render_option_table(Recipe, [name for name in Recipe.model_fields if name != "name"])
    words = "Groups for all datasets; a dataset's own value wins, and a kind takes only the groups it reads."
    yield _format_table_row("`defaults`", "mapping of groups", "`{}`", words)
    yield from ("", *_render_section(TokenizerChoice))


def _render_dataset_section() -> Iterator[str]:
    yield from _render_section(Dataset)
    yield from ("", "The groups that each kind reads; any other group in a dataset of that kind is an error:", "")
    yield f"| kind | {' | '.join(f'`{name}`' for name in OPTION_GROUPS)} |"
    yield f"|---|{'---|' * len(OPTION_GROUPS)}"
    for name, kind in KINDS.items():
        yield f"| `{name}` | {' | '.join('yes' if group in kind.GROUPS else '' for group in OPTION_GROUPS)} |"
    yield from (
        "",
        "Options of these groups that a kind does not read; setting one in a dataset of that kind is an error:",
        "",
    )
    yield from ("| kind | options |", "|---|---|")
    for name, kind in KINDS.items():
        unread = [f"`{group}.{field}`" for group, fields in kind.FIELDS_NOT_READ.items() for field in sorted(fields)]
        if unread:
            yield f"| `{name}` | {', '.join(unread)} |"


def _render_source_section() -> Iterator[str]:
    yield from (
        f"## {FAMILIES['source']}",
        "",
        "Where raw records are: one of these kinds; `kind` may be omitted, since `train_urls` or `id` implies it.",
        "",
    )
    for model in list_kinds(sources.Source):
        yield from (*_render_section(model, level=3, title=_kind_title(model)), "")
    yield from (*_render_section(Limits, level=3), "")
    suffixes = ", ".join(f"`{suffix}`" for suffix in FORMATS_BY_SUFFIX)
    yield (
        f"Files are read by their suffix: {suffixes}, each also with {_join_names(codec for codec in CODECS if codec)}."
    )
    yield "A `.txt` file is one document, unless `sample_by` splits it into paragraphs or lines."


def _join_names(names: Iterable[str]) -> str:
    *first, last = [f"`{name}`" for name in names]
    return f"{', '.join(first)} or {last}"


def _render_format_section() -> Iterator[str]:
    yield from (
        f"## {FAMILIES['format']}",
        "",
        "How records become rows: one of these kinds; the default is `auto`.",
        "",
    )
    seen: list[type[Config]] = []
    for model in list_kinds(Format):
        like = next((one for one in seen if _extends_kind(model, one)), None)
        if like is None:
            yield from (*_render_section(model, level=3, title=_kind_title(model)), "")
            for inner in (one for one in TITLES if one in _find_inner_models(model)):
                yield from (*_render_section(inner, level=4), "")
        else:
            own = ["kind", *(name for name in model.model_fields if name not in like.model_fields)]
            yield from (f"### {_kind_title(model)}", "", _first_sentence(model))
            yield f"It has all options of [{_kind_title(like)}](#{make_anchor(_kind_title(like))}), and these:"
            yield from ("", *render_option_table(model, own), "")
        seen.append(model)


def _render_exports_section() -> Iterator[str]:
    yield from (
        f"## {FAMILIES['exports']}",
        "",
        "The same tokens in the file formats of trainers: a list of these kinds, each written to its own folder.",
        "[Exports](formats.md) has the line with which its trainer loads each.",
        "",
    )
    for model in list_kinds(exports.AnyExport):
        yield from (*_render_section(model, level=3, title=_kind_title(model)), "")


def _extends_kind(model: type[Config], other: type[Config]) -> bool:
    """Return whether a kind has every option of another kind except `kind`, with the same descriptions."""
    return all(
        name == "kind" or (name in model.model_fields and describe_field(model, name) == describe_field(other, name))
        for name in other.model_fields
    )


def _kind_name(model: type[Config] | Config) -> str:
    fields = model.model_fields if isinstance(model, type) else type(model).model_fields
    return str(fields["kind"].default)


def _kind_title(model: type[Config]) -> str:
    return f"`kind: {_kind_name(model)}`"


def _render_group_section(model: type[Config]) -> Iterator[str]:
    yield from _render_section(model)
    for inner in TITLES:
        if inner in _find_inner_models(model):
            yield from ("", *_render_section(inner, level=3))


def _find_inner_models(model: type[Config]) -> set[type[Config]]:
    found: set[type[Config]] = set()
    waiting: list[Any] = [field.annotation for field in model.model_fields.values()]
    while waiting:
        one = waiting.pop()
        if isinstance(one, type) and issubclass(one, Config) and one not in found:
            found.add(one)
            waiting.extend(field.annotation for field in one.model_fields.values())
        waiting.extend(get_args(one))
    return found


def _render_gates_section() -> Iterator[str]:
    yield from (f"## {TITLES[gates.Gates]}", "", _first_sentence(gates.Gates), "")
    yield from render_option_table(gates.Gates, ["waivers", "expectations"])
    bound = f"[{TITLES[Bound]}](#{make_anchor(TITLES[Bound])}) or null"
    yield _format_table_row(
        "a [check](#checks)'s name", bound, "`null`", "The check's bound and severity in this recipe."
    )
    for model in (Bound, Waiver, Expectation):
        yield from ("", *_render_section(model, level=3))


def _render_names_section() -> Iterator[str]:
    """List the aliases of options, which recipes of other tools use."""
    yield from (
        "## Other names",
        "",
        "Aliases of options: each is accepted in place of the name next to it; giving both is an error.",
        "",
    )
    yield from ("| written | meant |", "|---|---|")
    lines = {"configs": "datasets", "chat_template (top level)": "defaults.template.chat_template"}
    lines |= {
        "enforce_eos (top level)": "defaults.format.add_eos",
        "ignore_token_id (top level)": "defaults.packing.ignore_token_id",
    }
    lines |= {f"format.{alias}": f"format.{name}" for alias, name in recipe.FORMAT_ALIASES.items()}
    lines |= {f"format.kind: {alias}": f"format.kind: {name}" for alias, name in KIND_ALIASES.items()}
    lines |= {f"format.{alias}": f"truncation.{name}" for alias, name in recipe.FIELD_ALIASES.items()}
    for written, meant in lines.items():
        yield f"| `{written}` | `{meant}` |"
    yield "| an option of a group, written directly under `format` | the same option in its group |"


def _render_checks_section() -> Iterator[str]:
    yield from (
        "## Checks",
        "",
        "A check compares a number of a stage's output with a bound.",
        "While a check of severity `error` fails, nothing is built from that output.",
        "A [waiver](#waivers) allows a failure up to the waiver's bound.",
        "The bounds below are defaults; `gates` overrides them.",
        "A check that does not apply to a dataset is *not applicable*: it neither passes nor fails.",
        "",
        "| check | stage | bound | severity | number | applies to | remedy | waivable |",
        "|---|---|---|---|---|---|---|---|",
    )
    for check in catalog.CHECKS:
        sign = "≤" if check.direction == "at_most" else "≥"
        stages = ", ".join(f"`{stage}`" for stage in check.stages)
        cells = (
            f"`{check.name}`",
            stages,
            f"{sign} {check.bound:,.6g}",
            check.severity if check.warn_from is None else f"{check.severity}; warn from {check.warn_from:g}",
            check.what,
            check.applies_to or "all data",
            catalog.format_remedy(check.choose_remedy(get_args(RowKind)), "RECIPE", "DATASET"),
            "yes" if check.waivable else "no",
        )
        yield _format_table_row(*cells)


def _render_views_section() -> Iterator[str]:
    yield from (
        "## Statistics",
        "",
        (
            "The views of `rowmill sql` and `stats.duckdb`; "
            "[query the statistics](how-to/query-the-statistics.md) has examples."
        ),
        "DuckDB has these descriptions as comments: `from duckdb_columns() select column_name, comment`.",
    )
    with tempfile.TemporaryDirectory() as folder:
        _, columns = query_views(Store(folder), COLUMNS_OF_VIEWS)
    for view in list_view_names():
        yield from (
            "",
            f"### `{view}`",
            "",
            views.VIEW_DOCS[view],
            "",
            "| column | type | what |",
            "|---|---|---|",
        )
        own = [(str(name), str(kind)) for table, name, kind in columns if table == view]
        yield from (
            _format_table_row(f"`{name}`", f"`{kind.lower()}`", views.describe_column(view, name)) for name, kind in own
        )


def _render_ledger_section() -> Iterator[str]:
    yield from (
        "## Ledger",
        "",
        "After every stage, every record has exactly one state, and every token exactly one class.",
        "",
        f"States: {', '.join(f'`{state}`' for state in ledger.RECORD_STATES)}.",
        "",
        f"Classes of tokens: {', '.join(f'`{one}`' for one in ledger.TOKEN_CLASSES)}.",
        "",
        "Reasons for `rejected`, a closed list; [Reasons](reasons.md) explains what to do about each:",
        "",
    )
    yield ", ".join(f"`{reason}`" for reason in sorted(ledger.REJECT_REASONS)) + "."


# ── The command line ───────────────────────────────────────────────────────────────────────────────


def capture_help(*words: str) -> str:
    """Return the output of `rowmill … --help`, its usage on one line, which versions of Python wrap differently."""
    usage, _, rest = walkthrough.capture_command(*words, "--help", columns=HELP_COLUMNS).partition("\n\n")
    return f"{' '.join(usage.split())}\n\n{rest}"


def list_verbs() -> list[str]:
    """Return the commands of `rowmill`, in the order of its help."""
    return re.findall(r"^    ([a-z-]+)(?: |$)", capture_help(), re.MULTILINE)


def _render_commands_section() -> Iterator[str]:
    yield from ("## Commands", "", "Every command and its options, as `--help` prints them.", "")
    yield from ("```", capture_help(), "```")
    for verb in list_verbs():
        yield from ("", f"### `rowmill {verb}`", "", "```", capture_help(verb), "```")


# ── configs/schema/recipe.json and README.md ───────────────────────────────────────────────────────


def _format_reasons() -> list[str]:
    """Return Markdown lines: a table of the reasons of each group."""
    titles = {
        "sources": "Records that cannot be read",
        "rows": "Rows",
        "splits": "Splits",
        "masks": "Templates, masks and tokens",
        "lengths": "Lengths and targets",
        "records": "Records of tables",
        "generated": "Generated text",
    }
    lines: list[str] = []
    for of, title in titles.items():
        group = {
            reason: description
            for reason, description in ledger.REASON_DESCRIPTIONS.items()
            if description.of == of and reason in ledger.REJECT_REASONS
        }
        if group:
            lines += [f"## {title}", "", "| reason | what it means | what to do |", "|---|---|---|"]
            lines += [
                f"| `{reason}` | {description.what} | {description.remedy} |" for reason, description in group.items()
            ]
            lines.append("")
    return lines


def render_reasons_page() -> str:
    """Return docs/reasons.md."""
    head = [
        "# Reasons",
        "",
        GENERATED_NOTICE,
        "",
        "An invalid record is rejected with one of these reasons; the list is closed.",
        "Nothing is lost: the raw record is kept, with the reason and a detail.",
        "",
        "```",
        'rowmill sql "from rejects select reason, detail, row_id limit 20" <recipe>',
        "rowmill inspect <recipe> --row <row_id>",
        "```",
        "",
    ]
    return "\n".join([*head, *_format_reasons()]).rstrip("\n") + "\n"


def render_schema() -> str:
    """Return configs/schema/recipe.json."""
    return json.dumps(recipe.json_schema(), indent=2, ensure_ascii=False) + "\n"


def render_readme_table() -> str:
    """Return README's table of sources, formats and exports, between its markers."""
    reads = [[f"`{_kind_name(model)}`" for model in list_kinds(family)] for family in (sources.Source, Format)]
    names = [_kind_name(model) for model in list_kinds(exports.AnyExport)]
    writes = [f"[`{name}`](docs/formats.md#{name})" for name in names]
    half = (len(writes) + 1) // 2
    titles = (
        "[source](docs/reference/source.md)",
        "[format](docs/reference/format.md)",
        "[export](docs/formats.md)",
        "",
    )
    lines = [TABLE_BEGIN, "", f"| {' | '.join(titles)} |", "|---|---|---|---|"]
    rows = zip_longest(*reads, writes[:half], writes[half:], fillvalue="")
    lines += [f"| {' | '.join(row)} |" for row in rows]
    suffixes = " ".join(f"`{suffix}`" for suffix in FORMATS_BY_SUFFIX)
    codecs = " ".join(f"`{codec}`" for codec in CODECS if codec)
    lines += ["", f"Files are read by suffix: {suffixes}, each plain or under {codecs}.", "", TABLE_END]
    return "\n".join(lines)


def replace_readme_table(readme: str) -> str:
    """Return README.md with its table replaced."""
    begin, end = readme.index(TABLE_BEGIN), readme.index(TABLE_END) + len(TABLE_END)
    return readme[:begin] + render_readme_table() + readme[end:]


def render_code_pages(root: Path) -> dict[str, str]:
    """Return every file that is written from the code alone, by its path in the project."""
    written = {
        **divide_reference(render_reference(), GENERATED_NOTICE),
        "docs/reasons.md": render_reasons_page(),
        "configs/schema/recipe.json": render_schema(),
        "README.md": replace_readme_table((root / "README.md").read_text(encoding="utf-8")),
        site.INDEX: site.replace_page_list((root / site.INDEX).read_text(encoding="utf-8")),
        **pipeline_picture.render_pictures(),
    }
    return written | render_pages_with_install_lines(root, written)


def render_demo_pages(root: Path) -> dict[str, str]:
    """Return every file that describes a build of the demo, by its path in the project."""
    with walkthrough.build_demo(root) as project:
        questions = (root / QUERIES_PAGE).read_text(encoding="utf-8")
        return {
            "docs/walk.md": walkthrough.render_walkthrough(project),
            QUERIES_PAGE: replace_answers(questions, project.store),
        }


def replace_answers(text: str, store: Store) -> str:
    """Return a page with the block after each query replaced by its result on a build of the demo."""
    return QUERY_PATTERN.sub(lambda found: f"{found[1]}\n```\n{_render_answer(store, found[2])}\n```\n", text)


def _render_answer(store: Store, query: str) -> str:
    columns, rows = query_views(store, query)
    shown = console.render_text(console.make_grid(columns, rows, indent=0))
    return "\n".join(line.rstrip() for line in shown.splitlines())


def main() -> int:
    """Write the pages of the project in this folder, and those that describe a build of the demo."""
    root = Path.cwd()
    for path, text in (render_code_pages(root) | render_demo_pages(root)).items():
        changed = not (root / path).exists() or (root / path).read_text(encoding="utf-8") != text
        (root / path).write_text(text, encoding="utf-8")
        print(f"{path}  {'written' if changed else 'unchanged'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
