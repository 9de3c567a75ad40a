"""The documentation is correct: generated pages are current, links resolve, snippets work."""

import json
import re
import shlex
import statistics
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks import against_trl
from docs.generate import reference, walkthrough
from rowmill import exports, sources
from rowmill.build.steps import Project
from rowmill.checks import catalog, gates
from rowmill.cli import main
from rowmill.core.config import Config, describe_field, parse_yaml
from rowmill.exports import base
from rowmill.kinds.catalog import Format
from rowmill.recipe import recipe
from rowmill.reports.dataset_card import write_card
from rowmill.schema import ledger
from rowmill.stats.views import query_views
from tests.support.loops import for_each

ROOT = Path(__file__).resolve().parents[2]
SMALLEST: dict[str, Any] = {
    "tokenizer": "configs/demo/tokenizer",
    "seq_len": 512,
    "datasets": {"chats": {"source": {"train_urls": ["data/chats.jsonl"]}, "format": {"kind": "chat"}}},
}
LINK = re.compile(r"(?<!`)\[(?:[^][]|`[^`]*`)*\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Return every page that people read."""
    return [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]


PAGES = for_each("page", pages())


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's code blocks of one language."""
    return [text for name, text in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    return frozenset(reference.make_anchor(title) for title in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE))


def groups() -> Iterator[type[Config]]:
    """Yield every model of a recipe."""
    waiting: list[Any] = [recipe.Recipe]
    seen: set[type[Config]] = set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, type) and issubclass(one, Config) and one not in seen:
            seen.add(one)
            yield one
            waiting.extend(field.annotation for field in one.model_fields.values())
            waiting.extend(field.metadata for field in one.model_fields.values())
        waiting.extend(one if isinstance(one, list) else get_args(one))


# ── Generated pages ──
def list_code_pages() -> list[tuple[str, str]]:
    """Return the pages that the code decides, without that of the commands where `argparse` words help otherwise."""
    pages = reference.render_code_pages(ROOT)
    return [page for page in pages.items() if sys.version_info < (3, 13) or page[0] != "docs/reference/commands.md"]


def test_generated_pages_are_what_the_code_says() -> None:
    outdated = [path for path, rendered in list_code_pages() if (ROOT / path).read_text(encoding="utf-8") != rendered]
    assert outdated == [], "run `make docs`"


@pytest.fixture(scope="module")
def demo() -> Iterator[Project]:
    with walkthrough.build_demo(ROOT) as project:
        yield project


@pytest.mark.slow
def test_walk_is_what_a_build_of_the_demo_gives(demo: Project) -> None:
    written = (ROOT / "docs/walk.md").read_text(encoding="utf-8")
    assert written == walkthrough.render_walkthrough(demo), "docs/walk.md is not current: run `make docs`"


@pytest.mark.slow
def test_answers_are_those_of_a_build_of_the_demo(demo: Project) -> None:
    path = reference.QUERIES_PAGE
    written = (ROOT / path).read_text(encoding="utf-8")
    assert written == reference.replace_answers(written, demo.store), f"{path} is not current: `make docs`"


@pytest.mark.slow
@for_each("query", blocks(ROOT / reference.QUERIES_PAGE, "sql"))
def test_every_question_has_an_answer(demo: Project, query: str) -> None:
    columns, rows = query_views(demo.store, query)
    assert columns
    assert rows


@pytest.mark.slow
# pandas and rdflib, which mlcroissant reads with, warn of their own future.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_examples_of_the_page_on_cards_run_on_the_demo(
    demo: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlcroissant", reason="mlcroissant is not installed: pip install 'rowmill[test]'")
    page = ROOT / "docs/how-to/put-the-data-on-record.md"
    (tmp_path / ".rowmill").symlink_to(demo.store.root)
    monkeypatch.chdir(tmp_path)
    readme, _ = write_card(demo)
    read_card, log_identity = blocks(page, "python")
    exec(compile(read_card, page.name, "exec", dont_inherit=True), {})
    first_length = capsys.readouterr().out
    exec(compile(log_identity, page.name, "exec", dont_inherit=True), {})
    [shown] = blocks(page, "yml")
    assert Path(readme).read_text(encoding="utf-8").startswith(f"---\n{shown}")
    assert 0 < int(first_length) <= demo.recipe.seq_len
    printed = json.loads(capsys.readouterr().out)
    listed = re.findall(r"^\| (`[^|]+) \|", page.read_text(encoding="utf-8").partition("| key |")[2], re.MULTILINE)
    assert {name for line in listed for name in re.findall(r"`(\w+)`", line)} == printed.keys()


def test_there_are_twenty_questions_each_with_its_answer() -> None:
    text = (ROOT / reference.QUERIES_PAGE).read_text(encoding="utf-8")
    asked = blocks(ROOT / reference.QUERIES_PAGE, "sql")
    assert len(asked) >= 20
    assert len(reference.QUERY_PATTERN.findall(text)) == len(asked)


@pytest.mark.slow
def test_reference_names_every_option_with_its_words() -> None:
    page = reference.render_reference()

    for model in groups():
        checks = set(catalog.CHECKS_BY_NAME) if model is gates.Gates else set[str]()
        for name, field in model.model_fields.items():
            if name in checks or name in getattr(model, "FILLED_IN", ()):
                continue
            text = describe_field(model, name)
            assert text, f"{model.__name__}.{name} has no docstring"
            assert f"| `{field.alias or name}` |" in page
            assert " ".join(text.split()).replace("|", "\\|") in page


@pytest.mark.slow
def test_reference_names_every_check_state_and_reason() -> None:
    page = reference.render_reference()
    for name in (*catalog.CHECKS_BY_NAME, *ledger.RECORD_STATES, *ledger.TOKEN_CLASSES, *ledger.REJECT_REASONS):
        assert f"`{name}`" in page


def test_readme_lists_every_kind() -> None:
    table = reference.render_readme_table()
    for model in chain.from_iterable(map(reference.list_kinds, (sources.Source, Format, exports.AnyExport))):
        assert re.search(rf"\| \[?`{model.model_fields['kind'].default}`[^|]* \|", table)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "integer"),
        (str | None, "text or null"),
        (float | int, "number"),
        (list[str], "list of text"),
        (dict[str, bool], "mapping of text to `true` · `false`"),
        (tuple[int, ...], "list of integer"),
    ],
)
def test_type_words_speak_yaml(annotation: Any, words: str) -> None:
    assert reference.describe_option_type(annotation) == words


# ── The schema ──
def resolved(schema: dict[str, Any], node: Any) -> Iterator[dict[str, Any]]:
    """Yield the alternatives of a node of a JSON Schema."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    alternatives = [*node.get("anyOf", []), *node.get("oneOf", [])]
    if not alternatives:
        yield node
    for one in alternatives:
        yield from resolved(schema, one)


def unknown_keys(schema: dict[str, Any], node: Any, value: Any, path: str = "") -> list[str]:
    """Return the keys of a value that no alternative of a schema's node knows."""
    if not isinstance(value, dict):
        return []
    found: list[list[str]] = []
    for one in resolved(schema, node):
        known, others = one.get("properties", {}), one.get("additionalProperties", True)
        if not known and not isinstance(others, dict):
            continue
        wrong: list[str] = []
        for name, inner in value.items():
            if name in known:
                wrong += unknown_keys(schema, known[name], inner, f"{path}.{name}")
            elif isinstance(others, dict):
                wrong += unknown_keys(schema, others, inner, f"{path}.{name}")
            else:
                wrong.append(f"{path}.{name}")
        found.append(wrong)
    return min(found, key=len, default=[])


def test_schema_knows_every_key_of_the_demo_and_refuses_a_mistyped_one() -> None:
    schema = json.loads((ROOT / "configs/schema/recipe.json").read_text(encoding="utf-8"))
    demo = parse_yaml((ROOT / "configs/demo/demo.yaml").read_text(encoding="utf-8"))
    wrong = {**SMALLEST, "datasets": {"chats": {**SMALLEST["datasets"]["chats"], "los": {}}}, "seqlen": 4}
    assert unknown_keys(schema, schema, demo) == []
    assert unknown_keys(schema, schema, wrong) == [".datasets.chats.los", ".seqlen"]


# ── Measured figures ──


def test_plot_of_the_readme_is_drawn_from_the_results() -> None:
    assert (ROOT / against_trl.PICTURE).read_text(encoding="utf-8") == against_trl.draw()


def test_benchmarks_page_has_the_last_results_against_peers() -> None:
    page = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    times = r"([\d.]+) s \| (TRL|axolotl|`encode_batch`) ([\d.]+) s \| ([\d.]+) ×"
    rows = re.findall(rf"^\| .* \| {times} .* `benchmarks\.against_trl (\w+)` \|$", page, re.MULTILINE)
    last = against_trl.find_last_results()
    shown = {(name, label.strip("`")) for _, label, _, _, name in rows}
    assert shown == {
        (name, label) for name, of_peer in last.items() for peer, label in against_trl.PEERS if peer in of_peer
    }
    for ours, label, theirs, ratio, name in rows:
        peer = label.strip("`").lower()
        found = last[name][peer]
        seconds = statistics.median(found[f"{peer}_runs_s"])
        assert float(ours) == found["median_s"]
        assert float(theirs) == pytest.approx(seconds, abs=0.051)
        assert float(ratio) == pytest.approx(seconds / float(ours), rel=0.03)


# ── First sentences, links, commands, snippets ──


# A decision begins with its context, a file of the root with commands.
@for_each("page", [page for page in pages() if page.parent != ROOT and page.parent.name != "decisions"])
def test_page_begins_with_what_it_is_for(page: Path) -> None:
    text = re.sub(r"^<!--.*?-->$\n*", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    title, first, *_ = text.split("\n\n")
    assert re.fullmatch(r"# .+", title)
    # Prose: no heading, code block, table or list.
    assert re.match(r"[A-Z0-9`*\[]", first), f"a page begins with a sentence on what it is for, not with {first[:40]!r}"
    assert not first.startswith("```")
    assert re.search(r"[.:]$", first.rstrip())


@PAGES
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target}: no such file"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{target}: no such heading"


def test_how_to_pages_are_few_and_short() -> None:
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs/how-to").glob("*.md")}

    assert len(words) <= 18
    assert {name: count for name, count in words.items() if count >= 600} == {}


@pytest.mark.slow
@PAGES
def test_commands_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    words = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

    # Commands are in code: on a line of a block, or directly after a backtick.
    assert set(re.findall(r"(?:^|`|\$ )make ([a-z]+)\b", text, re.MULTILINE)) <= words
    verbs = set(re.findall(r"(?:^|`|\$ )rowmill ([a-z][a-z-]*)\b(?=[ `\n])", text, re.MULTILINE))
    first_words_of_sentences = re.findall(r"^rowmill ([a-z]+)", prose(page), re.MULTILINE)
    assert verbs <= {*reference.list_verbs(), *first_words_of_sentences}


def shown_commands(page: Path) -> Iterator[tuple[str, bool]]:
    """Yield every `rowmill` command of a page, and whether it is in a block: a sentence may leave out arguments."""
    for _, text in FENCE.findall(page.read_text(encoding="utf-8")):
        joined = re.sub(r"\\\n\s*", " ", text)
        yield from (
            (line, True) for line in re.findall(r"^ *(?:\$ )?(?:time )?(rowmill [^\s][^\n]*)", joined, re.MULTILINE)
        )
    yield from ((line, False) for line in re.findall(r"`(rowmill [^`\n]+)`", prose(page)))


def parse_shown_command(line: str) -> str:
    """Parse a command as the program does; return the parser's error, or nothing."""
    # A variable of a shell or a batch system is a number.
    words = shlex.split(re.sub(r"\$\(\(.*?\)\)|\$\w+", "1", re.sub(r"  +#.*| [|>&].*|…", "", line)), comments=True)
    printed = StringIO()
    try:
        with redirect_stderr(printed), redirect_stdout(StringIO()):
            main.parse_command_line(words[1:])
    except SystemExit as ended:
        return printed.getvalue() if ended.code else ""
    return ""


@PAGES
def test_every_command_that_a_page_shows_is_parsed_by_the_program(page: Path) -> None:
    for line, is_whole in shown_commands(page):
        error = parse_shown_command(line)
        is_part = not is_whole and "arguments are required" in error
        assert not error or is_part, f"{line}\n{error}"


@pytest.mark.parametrize("line", ["rowmill bild demo", "rowmill build demo --untill rows", "rowmill plan a b"])
def test_wrong_command_is_noticed(line: str) -> None:
    assert parse_shown_command(line)


WITHOUT_EXAMPLE = {
    "decisions/*.md": "A decision is a choice and its price; what it led to is used on the how-to pages.",
    "reference/*.md": "Written from the code, and compared with it.",
    "reference.md": "Written from the code, and compared with it.",
    "templates.md": "Written from forty templates on real chats; its script is its example.",
    "README.md": "A list of pages, written from their titles.",
    "install.md": "Its lines are typed into empty environments by a test of the campaign.",
    "releasing.md": "Its command is run, on a copy of the repository, by the tests of releases.",
    "stability.md": "A list of what is public; a test compares its names with the packages.",
    "glossary.md": "Words, and what other projects call them.",
    "why.md": "Failures of other programs; each is shown by the README or a how-to.",
    "what-is-verified.md": "Names the tests that are its examples.",
    "how-to/train.md": "Its program train.py and its options of TRL are run by the tests of training.",
    "how-to/run-it-on-kubernetes.md": "Its values are checked against the chart and the other files of the deployment.",
    "how-to/run-it-for-a-team.md": "Its files are checked against each other and the programs that they start.",
    "extend-the-engine.md": "Its edits are made in a copy of the engine, which then builds its recipe.",
    "explanation/*.md": "What a build costs and what Dagster shows; the commands are on the how-to pages.",
    "coming-from/levanter.md": "A table of options; each is set in a recipe by a test of its own.",
    "coming-from/safe-synthesizer.md": "A table of options; each is set in a recipe by a test of its own.",
    "coming-from/evsys.md": "Its program is run by a test of the example recipes.",
    "coming-from/qlora-train.md": "Its program is run by a test of the example recipes.",
}
"""Pages without a recipe or a command, relative to docs/, and why."""


def test_every_page_has_an_example_that_a_test_runs_or_a_reason() -> None:
    folder = ROOT / "docs"
    excused = {page for pattern in WITHOUT_EXAMPLE for page in folder.glob(pattern)}
    # Recipes are loaded and commands parsed by the tests above and below.
    with_example = {
        page
        for page in folder.glob("**/*.md")
        if blocks(page, "yaml") or any(is_whole for _, is_whole in shown_commands(page))
    }

    assert set(folder.glob("**/*.md")) - with_example - excused == set()
    # A reason that is needed no longer is deleted.
    for pattern in WITHOUT_EXAMPLE:
        assert set(folder.glob(pattern)) - with_example, pattern


def test_readme_shows_the_two_commands_first() -> None:
    first = FENCE.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert first is not None
    assert first.group(2) == "make demo\nmake test\n"


@PAGES
def test_yaml_of_a_page_is_a_recipe_or_a_part_of_one(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some exports are refused where their library is missing; here nothing is written.
    monkeypatch.setattr(base, "find_spec", str)
    for text in blocks(page, "yaml"):
        given = parse_yaml(text)
        if not {"datasets", "configs"} & given.keys():
            # A part of a recipe, or of a dataset, is inserted into the smallest one.
            own = {name: value for name, value in given.items() if name in recipe.Dataset.model_fields}
            top = {name: value for name, value in given.items() if name not in own}
            given = {**SMALLEST, **top, "datasets": {"chats": {**SMALLEST["datasets"]["chats"], **own}}}

        recipe.parse_recipe(given, name="page", where=page.name)
