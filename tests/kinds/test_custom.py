"""Custom formats: what a class may return, how it is found, how its failures are handled, its identity."""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.formats import RowFormat, register_format
from rowmill.inspection import inspect, trace
from rowmill.kinds import catalog, python
from rowmill.kinds.catalog import KINDS, Format, Python
from rowmill.recipe import recipe
from rowmill.schema.examples import SPAN_KINDS
from rowmill.schema.rows import Row
from tests.support.recipes import CONTROL, Built, Workspace, lines, sentence, text_of

FORMATS = '''
"""A format of a test."""
from rowmill.formats import RowFormat
from rowmill.schema.rows import Row

GREETING = "hello"


class Tickets(RowFormat):
    def __init__(self, greeting=GREETING):
        self.greeting = greeting

    def rows(self, record):
        match record["how"]:
            case "chat":
                messages = ({"role": "human", "content": record["q"]}, {"role": "gpt", "content": record["a"]})
                return Row("conversation", messages=messages, domain="talk")
            case "call":
                call = {"name": "look_up", "arguments": '{"word": "x"}'}
                said = {"role": "assistant", "content": "", "function_call": call}
                answer = {"role": "assistant", "content": "<think>t</think>" + record["a"]}
                tools = ({"name": "look_up", "parameters": {}},)
                return Row("conversation", messages=({"role": "user", "content": record["q"]}, said,
                           {"role": "function", "content": "found"}, answer), tools=tools)
            case "pair":
                return Row("pair", text=record["q"], output=record["a"])
            case "text":
                return Row("text", text=self.greeting + " " + record["a"])
            case "many":
                return [Row("text", text=f"{record['a']} {i}") for i in range(3)]
            case "some":
                return [Row("text", text=record["a"]), Row("text", text=" "), Row("pair", text="p", output="r")]
            case "none":
                return None
            case "empty":
                return []
            case "dict":
                return {"text": "x"}
            case "record":
                return Row("record", record={"x": 1})
            case "blank":
                return Row("pair", text="q", output=" ")
            case "mute":
                return Row("conversation", messages=({"role": "user", "content": "q"},))
        raise KeyError(record["how"])


class Tokens(RowFormat):
    def build(self, record, ctx):
        how = record["how"]
        if how == "none":
            return None
        if how == "raise":
            raise RuntimeError("no tokens today")
        if how == "given":
            return record["made"]
        ids = ctx.tokenizer.encode(record["a"], add_special_tokens=False)
        assert ctx.config.truncation.max_length == ctx.max_length
        return {"ids": ids, "loss_mask": [i % 2 for i in range(len(ids))], "domain": record.get("domain")}


class Neither(RowFormat):
    pass


class Both(Tickets):
    def build(self, record, ctx):
        return None


class Stranger:
    pass
'''


@pytest.fixture
def project(tmp_path: Path) -> Workspace:
    (tmp_path / "own_formats.py").write_text(textwrap.dedent(FORMATS), encoding="utf-8")
    return Workspace(tmp_path)


NO_ROWS = [
    ("none", "skipped_by_format", ""),
    ("empty", "skipped_by_format", ""),
    ("unheard", "format_error", "KeyError: 'unheard'"),
    ("dict", "format_error", "rows returned dict, expected a Row: conversation, pair or text"),
    ("record", "format_error", "rows returned a Row of kind record"),
    ("blank", "empty_text", ""),
    ("mute", "no_assistant", ""),
]


def given(**made: Json) -> dict[str, Json]:
    return {"how": "given", "made": made}


NO_TOKENS = [
    ({"how": "none"}, "skipped_by_format", ""),
    ({"how": "raise"}, "format_error", "RuntimeError: no tokens today"),
    (given(ids=[5, 10_000], loss_mask=[0, 1]), "bad_example", "id 10000 is unknown"),
    (given(ids=[5, -1], loss_mask=[0, 1]), "bad_example", "id -1 is unknown"),
    (given(ids=[5, 6], loss_mask=[0, 1, 1]), "bad_example", "loss_mask is 3 long, ids are 2 long"),
    (given(ids=[5, 6], loss_mask=[0, 2]), "bad_example", "other values than 0 and 1"),
    (given(ids=[5, 6], loss_mask=[0, 0.5]), "bad_example", "other values than 0 and 1"),
    (given(ids=[5, 6], loss_mask=["a", "b"]), "bad_example", "other values than 0 and 1"),
    (given(ids=[5, 6.5], loss_mask=[0, 1]), "bad_example", "ids are no list of integers, or an empty one"),
    (given(ids=[[5], [6]], loss_mask=[0, 1]), "bad_example", "ids are no list of integers, or an empty one"),
    (given(ids=[], loss_mask=[]), "bad_example", "ids are no list of integers, or an empty one"),
    (given(ids=[5, 6]), "bad_example", "expected ids and loss_mask"),
    (given(ids=[5, 6], loss_mask=[0, 1], domain=3), "bad_example", "domain is an integer"),
    (given(ids=[5, 6], loss_mask=[1, 0]), "no_loss_tokens", ""),
]

POLICIES: list[tuple[dict[str, Any], list[list[int]]]] = [
    ({}, [[40, 41, 42, 43]]),
    ({"truncate_side": "right"}, [[30, 31, 32, 33]]),
    ({"overlong": "split"}, [[30, 31, 32, 33], [34, 35, 36, 37], [38, 39, 40, 41], [42, 43]]),
    ({"overlong": "drop"}, []),
    ({"token_cut": "reject"}, []),
]
"""Options of truncation to four tokens, and what becomes of fourteen."""
FINE, SHORT = {"how": "text", "a": "fine"}, given(ids=[5, 6], loss_mask=[0, 1])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build what the classes make of records of every sort, each sort a dataset."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "own_formats.py").write_text(textwrap.dedent(FORMATS), encoding="utf-8")
    workspace = Workspace(folder)
    every = [{"how": how, "q": f"why {how}?", "a": f"because {how}"} for how in ("chat", "pair", "text", "call")]
    texts = [{"how": "text", "a": text} for text in (sentence(1, 9), f"{CONTROL[1]}x")]
    long = given(ids=list(range(30, 44)), loss_mask=[1] * 14)
    sorts: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "every": ("Tickets", every, {"template": {"on_dropped": {"tool_list": "count"}}}),
        "repeated": ("Tickets", [{"how": "many", "a": a} for a in "xxy"], {"filters": {"deduplicate": "prefix200"}}),
        "invalid": ("Tickets", [*({"how": how} for how, _, _ in NO_ROWS), FINE], {}),
        "listed": ("Tickets", b"[1]\n" + lines([FINE]), {}),
        "unchanged": ("Tokens", [given(ids=[1, 200, 201, 2], loss_mask=[1, 0, 1, 1], domain="mine")], {}),
        "encoded": ("Tokens", texts, {"truncation": {"max_length": 128}}),
        "refused": ("Tokens", [*(row for row, _, _ in NO_TOKENS), SHORT], {}),
        **{
            f"cut{number}": ("Tokens", [long, SHORT], {"truncation": {"max_length": 4} | truncation})
            for number, (truncation, _) in enumerate(POLICIES)
        },
    }
    datasets = {
        sort: workspace.dataset(f"{sort}.jsonl", rows, {"kind": "python", "class": f"own_formats:{name}"}, **groups)
        for sort, (name, rows, groups) in sorts.items()
    }
    return workspace.recipe(datasets).build()


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test a registry of its own."""
    monkeypatch.setattr(catalog, "_REGISTERED", {})


def made_by(workspace: Workspace, name: str, rows: Sequence[Mapping[str, Any]], **groups: Any) -> Built:
    form = {"kind": "python", "class": f"own_formats:{name}", **groups.pop("form", {})}
    return workspace.one("a.jsonl", rows, form, **groups).build()


# Rows


@pytest.mark.slow
def test_rows_of_each_kind_become_examples_and_conversations_are_read_like_those_of_a_source(built: Built) -> None:
    assert built.rejects("every") == []
    texts = [text_of(one) for one in built.examples("every")]
    assert texts[0] == "<|im_start|>user\nwhy chat?<|im_end|>\n<|im_start|>assistant\nbecause chat<|im_end|>\n"
    assert texts[1] == "why pair?because pair<|im_end|>"
    assert texts[2] == "hello because text<|im_end|>"
    assert '{"name": "look_up", "arguments": {"word": "x"}}' in texts[3]
    assert [one["domain"] for one in built.examples("every")] == ["talk", None, None, None]
    row = built.rows_of("every", "canonical_rows", file="rows")[3]
    assert row["schema"] == "python"
    assert row["extracted_think_from_content"] == 1
    assert row["tools_present"]
    assert '"role":"tool","content":"found","tool_call_id":"call_0"' in row["messages"]


@pytest.mark.slow
def test_rows_of_one_record_have_a_ledger_line_each_and_are_found_by_trace_and_inspect(project: Workspace) -> None:
    rows = [{"how": "many", "a": "x"}, {"how": "some", "a": "y"}, {"how": "text", "a": "z"}]

    built = made_by(project, "Tickets", rows)

    names = [row["row_id"].rpartition(":")[2] for row in built.rows_of("rows", "canonical_rows", file="rows")]
    rejects = [
        (row["row_id"].rpartition(":")[2], row["reason"])
        for row in built.rows_of("rows", "canonical_rows", file="rejects")
    ]
    assert names == ["0", "0.1", "0.2", "1", "1.2", "2"]
    assert rejects == [("1.1", "empty_text")]
    assert built.facts("rows", "canonical_rows")["accounted"] == 0
    assert len(built.segments()) == 6

    traced = trace.trace_source(built.project, "data/a.jsonl:1")
    second = trace.trace_row(built.project, traced[1].row_id)
    seen = list(inspect.inspect_rows(built.project, count=1, dataset=None, row_id=None))

    assert [one.row_id.rpartition(":")[2] for one in traced] == ["0", "0.1", "0.2"]
    assert [len(one.places) for one in traced] == [1, 1, 1]
    assert second == [traced[1]]
    assert [one.row_id for one in seen] == [one.row_id for one in traced]
    assert all(one.origin.line == 1 for one in traced)


@pytest.mark.slow
def test_rows_of_one_record_are_not_prefix_duplicates_of_each_other(built: Built) -> None:
    assert built.rejects("repeated") == [(1, "duplicate")] * 3
    assert len(built.examples("repeated")) == 6


@pytest.mark.slow
def test_invalid_rows_and_records_that_are_no_objects_are_one_reject_each(built: Built) -> None:
    assert built.rejects("invalid") == [(i, reason) for i, (_, reason, _) in enumerate(NO_ROWS)]
    assert built.kept("invalid") == [len(NO_ROWS)]
    for _, _, detail in NO_ROWS:
        assert any(detail in one for one in built.details("invalid"))
    # The class does not get them.
    assert built.rejects("listed") == [(0, "not_an_object")]


@pytest.mark.slow
def test_rows_without_a_chat_template_refuse_conversations_only(project: Workspace) -> None:
    rows = [{"how": "chat", "q": "q", "a": "a"}, {"how": "text", "a": "fine"}]
    project.one("a.jsonl", rows, {"kind": "python", "class": "own_formats:Tickets"})
    config = project.folder / "tokenizer/tokenizer_config.json"
    config.write_text(config.read_text().replace('"chat_template"', '"no_template"'), encoding="utf-8")

    built = project.build()

    assert built.rejects() == [(0, "template_error")]
    assert built.kept() == [1]


# Tokens


@pytest.mark.slow
def test_tokens_are_used_unchanged_except_that_the_first_is_not_a_target(built: Built) -> None:
    (one,) = built.examples("unchanged")

    assert one["input_ids"] == [1, 200, 201, 2]
    assert one["loss_mask"] == [False, False, True, True]
    assert one["domain"] == "mine"
    assert (one["trained_tokens"], one["context_tokens"], one["template_tokens"]) == (2, 2, 0)
    assert [SPAN_KINDS[kind] for kind in one["span_kinds"]] == ["prompt", "record"]
    assert one["span_starts"] == [0, 2]


@pytest.mark.slow
def test_tokens_can_be_made_with_the_recipes_tokenizer_and_its_control_tokens(built: Built) -> None:
    one, other = built.examples("encoded")

    assert text_of(one) == sentence(1, 9)
    assert one["loss_mask"] == [bool(i % 2) for i in range(one["tokens"])]
    assert other["input_ids"][0] == 1


@pytest.mark.slow
def test_tokens_that_cannot_be_used_are_one_reject_each(built: Built) -> None:
    assert built.rejects("refused") == [(i, reason) for i, (_, reason, _) in enumerate(NO_TOKENS)]
    assert built.kept("refused") == [len(NO_TOKENS)]
    for (_, _, expected), detail in zip(NO_TOKENS, built.details("refused"), strict=True):
        assert expected in detail


@pytest.mark.slow
def test_tokens_too_long_follow_the_policy(built: Built) -> None:
    for number, (_, ids) in enumerate(POLICIES):
        examples = built.examples(f"cut{number}")
        assert [one["input_ids"] for one in examples] == [*ids, [5, 6]], POLICIES[number]
        assert all(one["original_tokens"] == one["tokens"] + one["tokens_cut"] for one in examples)


def test_tokens_may_be_arrays(project: Workspace) -> None:
    class Arrays(RowFormat):
        def build(self, record: Mapping[str, Json], ctx: Any) -> dict[str, Any]:
            return {"ids": np.array([3, 4], np.int64), "loss_mask": np.array([False, True])}

    from rowmill.kinds.python import BuiltExample as Made
    from rowmill.kinds.python import check_built_example

    made = check_built_example(Arrays().build({}, None), vocab_size=10)

    assert isinstance(made, Made)
    assert (made.ids.tolist(), made.mask.tolist()) == ([3, 4], [False, True])


# Finding the class


def refusal(workspace: Workspace, form: Mapping[str, Any], **groups: Any) -> str:
    workspace.one("a.jsonl", [{"how": "none"}], {"kind": "python", **form}, **groups)
    with pytest.raises(ConfigError) as error:
        recipe.load_recipe(workspace.config)
    return str(error.value)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({}, "datasets.rows.format.class: is missing"),
        ({"class": "own_formats"}, "expected module:Name, such as my_formats:Tickets, got 'own_formats'"),
        ({"class": "nowhere:Tickets"}, "no module nowhere in "),
        ({"class": "own_formats:Tciket"}, "module own_formats has no Tciket; its formats are Tickets, Tokens, Neither"),
        ({"class": "own_formats:Stranger"}, "own_formats:Stranger: it is not a RowFormat"),
        ({"class": "own_formats:Neither"}, "it defines neither rows nor build"),
        ({"class": "own_formats:Both"}, "it defines both rows and build"),
        ({"class": "own_formats:Tickets", "source_digest": "x"}, "source_digest is computed from the class's file"),
        ({"class": "own_formats:Tickets", "options": []}, "datasets.rows.format.options: must be a mapping"),
        ({"class": "own_formats:Tickets", "messages_field": "m"}, "datasets.rows.format.messages_field: unknown key"),
    ],
)
def test_class_that_cannot_be_used_is_an_error_at_load(project: Workspace, form: dict[str, Any], expected: str) -> None:
    assert expected in refusal(project, form)


def test_refusal_names_unread_groups_import_errors_and_the_kinds_there_are(project: Workspace) -> None:
    text = refusal(project, {"class": "own_formats:Tokens"}, reasoning={"think_mode": "drop"})

    assert "datasets.rows.reasoning: a python dataset does not read this group; it reads filters, packing," in text

    (project.folder / "broken.py").write_text("import nothing_of_this_name\n", encoding="utf-8")

    text = refusal(project, {"class": "broken:Tickets"})

    assert "module broken cannot be loaded (ModuleNotFoundError: No module named 'nothing_of_this_name')" in text

    text = refusal(project, {"kind": "chatt"})

    assert f"'chatt' is not a kind; choose {', '.join(KINDS)}" in text


@pytest.mark.slow
def test_module_may_import_its_neighbours(project: Workspace) -> None:
    (project.folder / "neighbour_of_formats.py").write_text("WORD = 'from next door'\n", encoding="utf-8")
    (project.folder / "importing_formats.py").write_text(
        "from neighbour_of_formats import WORD\n"
        "from rowmill.formats import RowFormat\nfrom rowmill.schema.rows import Row\n"
        "class Next(RowFormat):\n    def rows(self, record):\n        return Row('text', text=WORD)\n",
        encoding="utf-8",
    )

    built = project.one("a.jsonl", [{}], {"kind": "python", "class": "importing_formats:Next"}).build()

    assert text_of(built.examples()[0]) == "from next door<|im_end|>"


def test_options_reach_the_class_and_those_it_does_not_take_are_one_error(project: Workspace) -> None:
    with pytest.raises(
        ConfigError, match=r"own_formats:Tickets cannot be instantiated with options \{'greting': 'x'\}"
    ):
        made_by(project, "Tickets", [{"how": "none"}], form={"options": {"greting": "x"}})

    built = made_by(project, "Tickets", [{"how": "text", "a": "x"}], form={"options": {"greeting": "bye"}})

    assert text_of(built.examples()[0]) == "bye x<|im_end|>"


# Identity


@pytest.mark.slow
def test_source_of_the_class_is_part_of_the_fingerprint(project: Workspace) -> None:
    rows = [{"how": "text", "a": "x"}]
    made_by(project, "Tickets", rows)

    again = made_by(project, "Tickets", rows)
    module = project.folder / "own_formats.py"
    module.write_text(module.read_text().replace('"hello"', '"good day"'), encoding="utf-8")
    changed = project.build()

    assert again.made() == set()
    assert "rows/canonical_rows" in changed.made()
    assert text_of(changed.examples()[0]) == "good day x<|im_end|>"


@pytest.mark.slow
def test_bytes_are_the_same_for_one_worker_and_two(project: Workspace) -> None:
    rows = [
        {"how": ("chat", "many", "pair", "none")[i % 4], "q": sentence(i, 4), "a": sentence(i, 6)} for i in range(40)
    ]
    files = [project.write(f"{k}.jsonl", rows[k * 10 : k * 10 + 10]) for k in range(4)]
    dataset = {"source": {"train_urls": files}, "format": {"kind": "python", "class": "own_formats:Tickets"}}

    one = Workspace(project.folder, str(project.folder / "one")).recipe({"rows": dataset}).build()
    two = (
        Workspace(project.folder, str(project.folder / "two"))
        .recipe({"rows": dataset}, execution={"workers": 2})
        .build()
    )

    assert one.versions() == two.versions()


# Registered names


@pytest.mark.slow
def test_registered_name_is_a_kind(project: Workspace) -> None:
    module = project.folder / "named_formats.py"
    module.write_text(
        "from rowmill.formats import RowFormat, register_format\nfrom rowmill.schema.rows import Row\n"
        "@register_format('named')\nclass Named(RowFormat):\n"
        "    def rows(self, record):\n        return Row('text', text=record['a'])\n",
        encoding="utf-8",
    )
    python.find_format("named_formats:Named", project.folder, "test")

    built = project.one("a.jsonl", [{"a": "by name"}], {"kind": "named"}).build()
    dataset = built.project.recipe.datasets["rows"].format

    assert isinstance(dataset, Python)
    assert dataset.class_name == "named_formats:Named"
    assert text_of(built.examples()[0]) == "by name<|im_end|>"
    assert TypeAdapter[Any](Format).validate_python({"kind": "named"}).class_name == "named_formats:Named"


def test_register_format_refuses_other_classes_and_a_name_that_is_taken() -> None:
    with pytest.raises(TypeError, match="it is not a RowFormat"):
        register_format("stranger")(object)  # pyrefly: ignore[bad-specialization]

    @register_format("taken")
    class First(RowFormat):
        def rows(self, record: Mapping[str, Json]) -> Row | None:
            return None

    class Second(RowFormat):
        def rows(self, record: Mapping[str, Json]) -> Row | None:
            return None

    with pytest.raises(ValueError, match="names must be unique"):
        register_format("taken")(Second)
    assert register_format("taken")(First) is First


def test_file_of_the_project_that_is_named_like_a_library_hides_none(tmp_path: Path) -> None:
    assert "sched" not in sys.modules
    (tmp_path / "sched.py").write_text("raise RuntimeError('a file of the project')\n", encoding="utf-8")
    (tmp_path / "beside.py").write_text("WORD = 'found'\n", encoding="utf-8")
    source = (
        "import sched\nimport beside\nfrom rowmill.formats import RowFormat\nfrom rowmill.schema.rows import Row\n"
        "class Mine(RowFormat):\n    def rows(self, record):\n"
        "        return Row('text', text=f'{beside.WORD} {sched.scheduler.__name__}')\n"
    )
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")

    format_class = python.find_format("mine:Mine", tmp_path, "here")

    made = format_class().rows({})
    assert isinstance(made, Row)
    assert made.text == "found scheduler"
