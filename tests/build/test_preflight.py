"""Mistakes that users make, each with when it is noticed and what is said: before anything is built, all at once."""

import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rowmill.build import preflight, prepare
from rowmill.build.steps import plan_steps
from rowmill.cli.error_boundary import ExitStatus
from rowmill.core.errors import ConfigError, GateError, PipelineError, UnreachableError
from rowmill.core.remote import TRIES_VARIABLE
from rowmill.executors import LocalPool
from tests.support.cli_project import CHATS, RECIPE, CliProject
from tests.support.tables import RECORDS

KTO = Path(__file__).resolve().parents[3] / "shared" / "data" / "preference" / "kto_en_demo.json"


@pytest.fixture
def unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of a hub at which nothing answers; every address is asked once."""
    address = "http://127.0.0.1:1"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv(TRIES_VARIABLE, "1")
    return address


# ── Thirty mistakes ────────────────────────────────────────────────────────────────────────────────
def write_lines(project: CliProject, name: str, records: Iterable[Mapping[str, Any] | str]) -> None:
    lines = (one if isinstance(one, str) else json.dumps(one) for one in records)
    project.write_data(name, "".join(f"{line}\n" for line in lines))


def dialogue(i: int, *, user: str = "user", model: str = "assistant") -> dict[str, Any]:
    return {"messages": [{"role": user, "content": f"Question {i}?"}, {"role": model, "content": f"Answer {i}."}]}


def chats_only(**changes: Any) -> dict[str, Any]:
    """Return the change of a recipe to one dataset of chats."""
    return {"datasets": {"chats": RECIPE["datasets"]["chats"] | changes}}


def chats_of(records: Iterable[Mapping[str, Any] | str], **changes: Any) -> "Change":
    kept = list(records)

    def change(project: CliProject) -> dict[str, Any]:
        write_lines(project, "rows.jsonl", kept)
        return chats_only(source={"train_urls": ["data/rows.jsonl"]}, **changes)

    return change


def dataset_of(name: str, content: str, source: Mapping[str, Any] | None = None, **options: Any) -> "Change":
    def change(project: CliProject) -> dict[str, Any]:
        project.write_data(name, content)
        return {"datasets": {"rows": {"source": {"train_urls": [f"data/{name}"], **(source or {})}, **options}}}

    return change


def without_template(project: CliProject) -> dict[str, Any]:
    copied = project.folder / "bare"
    shutil.copytree(RECIPE["tokenizer"], copied)
    settings = json.loads((copied / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("chat_template", None)
    (copied / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (copied / "chat_template.jinja").unlink(missing_ok=True)
    return {"tokenizer": "bare"}


def given(**changes: Any) -> "Change":
    return lambda _: changes


def chats(**changes: Any) -> "Change":
    return given(**chats_only(**changes))


Change = Callable[[CliProject], dict[str, Any]]
Mistake = tuple[Change, *tuple[str, ...]]
"""A change of the small project, and the patterns of what is said, each on a line of its own."""
DIALOGUES = [dialogue(i) for i in range(30)]
CSV_QUESTIONS = "question,answer\n" + "".join(f"What is {i}?,It is {i}.\n" for i in range(50))
CSV_SEMICOLONS = "prompt;response\n" + "".join(f"What is {i}?;It is {i}.\n" for i in range(50))
SALES = "customer,amount\n" + "".join(f"c{i % 5},{i}\n" for i in range(50))

LOADING: dict[str, Mistake] = {
    "option misspelt": (given(seq_length=128), "seq_length: unknown key; .*did you mean seq_len"),
    "nested option misspelt": (
        chats(source={"train_url": ["data/chats.jsonl"]}),
        r"datasets\.chats\.source\.train_url: unknown key; .*did you mean train_urls",
    ),
    "unknown kind": (chats(format={"kind": "dialogs"}), r"datasets\.chats\.format: 'dialogs' is not a kind; choose"),
    "word instead of options": (
        chats(format="chat"),
        r"datasets\.chats\.format: must be a mapping; got 'chat', which is a string; write \{kind: chat\}$",
    ),
    "name instead of a template": (
        chats(template="qwen3"), r"datasets\.chats\.template: .*; write \{chat_template: qwen3\}$",
    ),
    "shape instead of a kind": (
        chats(format={"kind": "sharegpt"}),
        r"datasets\.chats\.format: 'sharegpt' is not a kind; .*dataset_schema: sharegpt of kind chat\?$",
    ),
    "group one level too low": (
        chats(format={"kind": "chat", "template": {}}),
        r"datasets\.chats\.format\.template: unknown key here; template belongs under datasets\.chats; move it",
    ),
    "option one level too high": (
        given(batch_size=4), "batch_size: unknown key here; batch_size belongs under mixture; move it there$",
    ),
    "option of another kind": (
        chats(format={"kind": "chat", "text_key": "body"}),
        r"datasets\.chats\.format\.text_key: unknown key here; text_key is an option of kind text or auto",
    ),
    "length of one token": (given(seq_len=1), "seq_len: .*greater than or equal to 2; got 1"),
    "limit above seq_len": (
        chats(truncation={"max_length": 4096}), r"datasets\.chats\.truncation\.max_length is 4096, seq_len 128",
    ),
    "ranks that do not divide the batch": (
        given(mixture={"batch_size": 3}), "world_size: 2 does not divide batch_size 3; .*choose 1 or 3",
    ),
    "weight of another dataset": (
        given(mixture={"train_weights": {"chat": 1.0}, "steps": 4, "batch_size": 4}),
        "'chat' is not a dataset; choose chats, tasks",
    ),
    "waiver for another dataset": (
        given(gates={"waivers": [{"check": "rejects", "dataset": "chat", "at_most": 1, "reason": "only a test"}]}),
        "gates.waivers: 'chat' is not a dataset; choose chats, tasks",
    ),
    "unknown export": (
        given(exports=[{"kind": "trl", "name": "x"}]), r"exports\.0: 'trl' is not a kind; choose native, hf",
    ),
    "unknown suffix": (
        chats(source={"train_urls": ["data/chats.xlsx"]}),
        r"datasets\.chats\.source: 'data/chats\.xlsx' has no known suffix",
    ),
    "class that is not there": (
        chats(format={"kind": "python", "class": "nowhere:Format"}),
        r"datasets\.chats\.format\.class: no module nowhere",
    ),
}  # fmt: skip
"""Refused when the recipe is loaded, by every command and by Dagster."""

REQUIREMENTS: dict[str, Mistake] = {
    "tokenizer that is not there": (given(tokenizer="./nowhere"), r"small: tokenizer: no folder './nowhere'"),
    "tokenizer without a template": (
        without_template, r"small: datasets\.chats: template\.chat_template: the tokenizer has no chat template",
    ),
    "template misspelt": (
        chats(template={"chat_template": "qwen-3"}),
        r"small: datasets\.chats: template\.chat_template: 'qwen-3' is not a bundled .*did you mean qwen3",
    ),
    "template file that is not there": (
        chats(template={"chat_template": {"file": "t.jinja"}}),
        r"small: datasets\.chats: template\.chat_template\.file: .*t\.jinja cannot be read",
    ),
}  # fmt: skip
"""Noticed before any record is read."""

FIRST_RECORDS: dict[str, Mistake] = {
    "file that is not there": (
        chats(source={"train_urls": ["data/chat.jsonl"]}),
        r"small: datasets\.chats\.source: found no data at data/chat\.jsonl",
    ),
    "empty file": (chats_of([]), r"small: datasets\.chats\.source: of 0 records tried, nonempty is 0"),
    "file that is not Parquet": (
        dataset_of("rows.parquet", "prompt,response\n", format={"kind": "supervised"}),
        r"small: datasets\.rows\.source: data/rows\.parquet: not readable as Parquet",
    ),
    "lines that are not JSON": (
        chats_of(["What is 1 plus 1?"] * 30),
        r"small: datasets\.chats\.format: of 20 records tried, rejects is 100 %",
        # Without a row's id: no build would have it.
        r"invalid_json: 20, the first is data/rows\.jsonl line 1: ",
        r"the record: What is 1 plus 1\?",
    ),
    "another delimiter": (
        dataset_of("rows.csv", CSV_SEMICOLONS, {"delimiter": ","}, format={"kind": "supervised"}),
        r"small: datasets\.rows\.source: .*one column with source\.delimiter ',', and 2 columns with ';'",
    ),
    "columns of other names": (
        dataset_of("rows.csv", CSV_QUESTIONS, format={"kind": "supervised"}),
        r"small: datasets\.rows\.format: of 20 records tried, rejects is 100 %.*`rowmill inspect small --d",
        r"missing_field: 20, the first is data/rows\.csv line 2: .*prompt is absent or null; the record has a",
        r'the record: \{"question":"What is 0\?","answer":"It is 0\."\}',
    ),
    "messages under other keys": (
        chats_of(
            {"dialog": [{"speaker": "user", "text": f"Is it {i}?"}, {"speaker": "assistant", "text": f"It is {i}."}]}
            for i in range(30)
        ),
        r"bad_messages: 20, the first is data/rows\.jsonl line 1: .*role is null, expected text",
        "the record: ",
        r"20 of 20 records fit format: \{kind: chat, role_field: speaker, content_field: text\}",
    ),
    "roles that no template prints": (
        chats_of(dialogue(i, user="Seeker", model="Guru") for i in range(30)),
        r"small: datasets\.chats\.format: .*unknown_roles is 100 %.*map the role in format\.role_map",
        "role 'Guru': 20",
    ),
    "answers marked as bad": (
        chats_of(dialogue(i) | {"label": i % 2 == 0} for i in range(30)),
        r"`label` is not read; 10 of 20 are false: is this preference data\?",
        r"preference_data is 100 %",
    ),
    "group column that is not there": (
        chats_of(DIALOGUES, splits={"group_key": "conversation"}),
        r"group_missing: 20, the first is data/rows\.jsonl line 1: .*conversation is absent or null",
    ),
    "time column that is not there": (
        chats_of(DIALOGUES, splits={"time_key": "date", "boundaries": {"validation": "2024-01-01"}}),
        r"order_missing: 20, the first is data/rows\.jsonl line 1: .*date is absent or null",
    ),
    "text column of another name": (
        dataset_of("rows.jsonl", '{"content": "A document."}\n' * 30, format={"kind": "text"}),
        r"missing_field: 20, the first is data/rows\.jsonl line 1: .*text is absent or null",
    ),
    "answers that nothing trains": (
        chats_of(DIALOGUES, loss={"mask": {"assistant": "mask"}}),
        r"small: datasets\.chats: of 20 records tried, zero_loss_rows is 100 %",
    ),
    "flags by which nothing trains": (
        chats_of({"messages": [one | {"train": False} for one in dialogue(i)["messages"]]} for i in range(30)),
        r"small: datasets\.chats: of 20 records tried, zero_loss_rows is 100 %",
    ),
    "answers that nothing trains, where that is allowed": (
        given(gates={"zero_loss_rows": {"at_most": 1}}, **chats_only(loss={"mask": {"assistant": "mask"}})),
        r"small: datasets\.chats: of 20 records tried, nonempty is 0",
    ),
    "context that no chat fits into": (
        given(seq_len=8), r"small: datasets\.chats: of 20 records tried, context_overflow is 100 %.*raise seq_len",
    ),
    "long rows that stop the build": (
        given(seq_len=8, **chats_only(truncation={"overlong": "raise"})),
        r"small: datasets\.chats: 19 rows are longer than 8 tokens",
    ),
    "vocabulary of another model": (
        given(vocab_size=20), r"small: datasets\.chats: of 20 records tried, token_ids is ",
    ),
    "column of groups that is not there": (
        dataset_of("rows.csv", SALES, format=RECORDS | {"data": {"group_training_examples_by": "customer_id"}}),
        r"small: datasets\.rows\.format\.data\.group_training_examples_by: no record has a column 'customer_id'",
    ),
}  # fmt: skip
"""Noticed on the first records of each dataset, in memory."""


def test_there_are_thirty_mistakes_and_more() -> None:
    assert len(LOADING) + len(REQUIREMENTS) + len(FIRST_RECORDS) >= 30


@pytest.fixture
def project(tmp_path: Path) -> CliProject:
    return CliProject(tmp_path).write()


@pytest.mark.parametrize("mistake", LOADING.values(), ids=LOADING)
def test_mistake_of_the_recipe_alone_is_said_when_it_is_loaded(project: CliProject, mistake: Mistake) -> None:
    change, *said = mistake
    project.write_recipe(**change(project))
    with pytest.raises(ConfigError) as refused:
        _ = project.project
    require_said(str(refused.value), said)


@pytest.mark.parametrize("mistake", REQUIREMENTS.values(), ids=REQUIREMENTS)
def test_missing_requirement_is_said_before_a_record_is_read(project: CliProject, mistake: Mistake) -> None:
    change, *said = mistake
    project.write_recipe(**change(project))
    shutil.rmtree(project.folder / "data")
    require_said(refusal(project, ConfigError), said)
    assert written_outputs(project) == set()


@pytest.mark.parametrize("mistake", FIRST_RECORDS.values(), ids=FIRST_RECORDS)
def test_mistake_is_said_of_the_first_records_before_anything_is_written(project: CliProject, mistake: Mistake) -> None:
    change, *said = mistake
    project.write_recipe(**change(project))
    require_said(refusal(project, ConfigError, GateError), said)
    assert written_outputs(project) == set()


def refusal(project: CliProject, *errors: type[PipelineError]) -> str:
    """Return what stops a build before anything is built: one of these errors."""
    with pytest.raises(errors) as refused:
        preflight.require_no_mistakes(project.project)
    return str(refused.value)


def require_said(message: str, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        assert any(re.search(pattern, line) for line in message.splitlines()), f"{pattern}\n\n{message}"


def written_outputs(project: CliProject) -> set[str]:
    """Return what is in the storage besides the tokenizer, which is opened once and kept as data."""
    return {path.name for path in (project.folder / ".rowmill").glob("*")} - {"tokenizers"}


# ── All at once, and only where something changed ──────────────────────────────────────────────────
NOTES_OF_ANOTHER_COLUMN = RECIPE["datasets"]["notes"] | {"format": {"kind": "text", "text_key": "body"}}
SAID_OF_NOTES = r"^small: datasets\.notes\.format: of 6 records tried, rejects is 100 %"


@pytest.mark.parametrize("command", ["plan", "build"])
def test_mistakes_of_all_datasets_are_said_at_once(project: CliProject, command: str) -> None:
    elsewhere = {"source": {"train_urls": ["data/chat.jsonl"]}, "format": {"kind": "chat"}}
    datasets = RECIPE["datasets"] | {"chats": elsewhere, "notes": NOTES_OF_ANOTHER_COLUMN}
    project.write_recipe(tokenizer="./nowhere", datasets=datasets)
    require_said(
        project.run(command, status=ExitStatus.INVALID).err,
        [
            r"^small: tokenizer: no folder",
            r"^small: datasets\.chats\.source: found no data",
            SAID_OF_NOTES,
        ],
    )
    assert written_outputs(project) == set()


@pytest.mark.parametrize("command", ["plan", "build"])
def test_unreachable_tokenizer_is_said_with_its_recipe_beside_all_mistakes(
    project: CliProject, command: str, unreachable_hub: str
) -> None:
    elsewhere = {"source": {"train_urls": [f"{unreachable_hub}/chats.jsonl"]}, "format": {"kind": "chat"}}
    project.write_recipe(tokenizer="nowhere/x", datasets={"elsewhere": elsewhere, "notes": NOTES_OF_ANOTHER_COLUMN})
    require_said(
        project.run(command, status=ExitStatus.INVALID).err,
        [
            r"^small: tokenizer: 'nowhere/x' cannot be loaded .*; check the network, or give a folder$",
            rf"^small: datasets\.elsewhere\.source: {unreachable_hub}/chats\.jsonl: cannot be read",
            SAID_OF_NOTES,
        ],
    )


@pytest.mark.usefixtures("unreachable_hub")
@pytest.mark.parametrize("command", [("plan",), ("build",), ("build", "--skip-preflight"), ("work", "--share", "1/2")])
def test_unreachable_tokenizer_alone_is_an_outside_failure(project: CliProject, command: tuple[str, ...]) -> None:
    """A scheduler tries again: the recipe is sound, and so are the first records."""
    printed = project.write_recipe(tokenizer="nowhere/x").run(*command, status=ExitStatus.OUTSIDE_FAILURE)
    require_said(printed.err, [r"^small: tokenizer: 'nowhere/x' cannot be loaded"])


@pytest.mark.usefixtures("unreachable_hub")
def test_requirement_that_cannot_be_reached_keeps_its_cause(project: CliProject) -> None:
    """Dagster retries what a connection caused."""
    opened = project.write_recipe(tokenizer="nowhere/x").project
    with pytest.raises(UnreachableError, match=r"^small: tokenizer: ") as refused:
        prepare.require_ready(opened, plan_steps(opened))
    assert refused.value.__cause__ is not None


def test_class_that_cannot_be_made_hides_no_other_mistake(project: CliProject) -> None:
    (project.folder / "own_rows.py").write_text(OWN_ROWS, encoding="utf-8")
    own = RECIPE["datasets"]["notes"] | {"format": {"kind": "python", "class": "own_rows:OwnRows"}}
    project.write_recipe(datasets={"own": own, "notes": NOTES_OF_ANOTHER_COLUMN})
    said_of_own = r"^small: datasets\.own\.format\.class: own_rows:OwnRows cannot be instantiated"
    require_said(refusal(project, ConfigError), [said_of_own, SAID_OF_NOTES])


OWN_ROWS = """
from rowmill import RowFormat


class OwnRows(RowFormat):
    def __init__(self, field):
        self.field = field

    def rows(self, record):
        return None
"""


def test_build_that_skips_the_preflight_ends_at_the_closed_gate(project: CliProject) -> None:
    change, *_ = FIRST_RECORDS["columns of other names"]
    project.write_recipe(**change(project))
    assert "missing_field: 50" in project.run("build", "--skip-preflight", status=ExitStatus.GATE_CLOSED).err
    assert "small" in written_outputs(project)


def test_dataset_is_tried_again_only_if_its_options_changed(project: CliProject) -> None:
    project.run("build")
    for name in ("chats.jsonl", "tasks.csv", "notes.jsonl"):
        project.write_data(name, "nothing that any kind reads\n")

    assert preflight.require_no_mistakes(project.project) == []
    datasets = RECIPE["datasets"]
    project.write_recipe(datasets=datasets | {"tasks": datasets["tasks"] | {"loss": {"boundary": "split"}}})
    assert {line.split(":")[1] for line in refusal(project, PipelineError).splitlines()} == {" datasets.tasks.source"}


@pytest.mark.parametrize(("command", "started"), [("plan", []), ("build", ["big.jsonl"])])
def test_workers_start_while_the_first_records_are_tried_only_for_a_build(
    project: CliProject, monkeypatch: pytest.MonkeyPatch, command: str, started: list[str]
) -> None:
    """The mistake ends both commands after the trial, so no worker would have started later."""
    found: list[int] = []
    monkeypatch.setattr(LocalPool, "start", lambda _, size_bytes: found.append(size_bytes))
    write_lines(project, "big.jsonl", [{"text": "no conversation"}] * 1000)
    project.write_recipe(**chats_only(source={"train_urls": ["data/big.jsonl"]}))
    project.run(command, status=ExitStatus.GATE_CLOSED)
    assert found == [(project.folder / "data" / name).stat().st_size for name in started]


def test_first_records_are_read_without_the_rest_of_the_file(project: CliProject) -> None:
    # A record too many for one part: whoever reads on meets bytes that end the reading.
    write_lines(project, "rows.jsonl", (dialogue(i) for i in range(20_000)))
    packed = gzip.compress((project.folder / "data/rows.jsonl").read_bytes(), compresslevel=0)
    shutil.rmtree(project.folder / "data")
    (project.folder / "data").mkdir()
    (project.folder / "data/rows.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    project.write_recipe(**chats_only(source={"train_urls": ["data/rows.jsonl.gz"]}))

    assert preflight.require_no_mistakes(project.project) == []


# ── What stops a build, and what is only remarked ──────────────────────────────────────────────────
def test_share_that_the_other_records_may_mend_is_a_remark(project: CliProject) -> None:
    # 19 of 20 chats are sound: their share says nothing of all records, but 7 of 20 does.
    assert preflight.require_no_mistakes(project.project) == []
    write_lines(project, "chats.jsonl", (dialogue(i) if i % 3 else {"other": i} for i in range(30)))

    [remark] = preflight.require_no_mistakes(project.project)
    assert remark.is_warning
    require_said(remark.text, [r"rejects is 35 %", r"unknown_schema: 7", r'the record: \{"other": 0\}'])


def test_waived_check_does_not_stop_a_build(project: CliProject) -> None:
    waiver = {"check": "preference_data", "at_most": 1, "reason": "label is the topic"}
    change, *_ = FIRST_RECORDS["answers marked as bad"]
    project.write_recipe(gates={"waivers": [waiver]}, **change(project))
    remarks = [one.text for one in preflight.require_no_mistakes(project.project)]
    require_said("\n".join(remarks), [r"`label` is not read; 10 of 20 are false"])


def test_columns_that_no_option_reads_are_named_once(project: CliProject) -> None:
    more = {"lang": "en", "source": "web", "tools": [], "note": None}
    change = chats_of([dialogue(i) | {"group": f"g{i}"} | more for i in range(9)], splits={"group_key": "group"})
    project.write_recipe(**change(project))
    [remark] = preflight.require_no_mistakes(project.project)
    assert remark.text == "small: datasets.chats.format: no option reads the columns `lang`, `source`"
    assert not remark.is_warning


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("", "keys `annotations` (9 messages), `mood` (4 messages)"),
        ("{{ m.mood }}", "key `annotations` (9 messages)"),
        ("{{ m['mood'] }}{% if m['annotations'] %}{% endif %}", None),
    ],
)
def test_keys_of_messages_that_neither_an_option_nor_the_template_reads_are_named(
    printed: str, said: str | None, project: CliProject
) -> None:
    rows = [dialogue(i) for i in range(9)]
    for i, row in enumerate(rows):
        # Those that are read, and an empty one, are not named.
        row["messages"][0] |= {"name": "bo", "mood": "glad" if i % 2 else None}
        row["messages"][1] |= {"annotations": {"by": "me"}, "weight": 1, "thinking": f"because {i}"}
        row["messages"][1] |= {"tool_calls": [{"name": "find", "arguments": '{"city": "Oslo"}'}]}
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
        f"{printed}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}"
    )
    project.write_recipe(**chats_of(rows, template={"chat_template": {"text": template}})(project))
    found = [remark for remark in preflight.require_no_mistakes(project.project) if "neither an option" in remark.text]
    told = f"small: datasets.chats.format: neither an option nor the chat template reads the {said}"
    assert [remark.text for remark in found] == ([] if said is None else [told])
    assert not any(remark.is_warning for remark in found)


@pytest.mark.parametrize("kind", ["text", "auto"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<|im_start|>user\nWhy {}?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>", "such as chatml has printed"),
        ("[{{'role': 'user', 'content': 'Why {}?'}}]", "messages as JSON or Python values"),
        ("<human>: Why {}?\n<bot>: So.", "whose turns begin with the speaker"),
        ("Users of {} ask: why?\nA bot: so.", None),
    ],
)
def test_documents_that_are_printed_chats_are_a_warning(
    kind: str, text: str, said: str | None, project: CliProject
) -> None:
    records = [{"text": text.format(i)} for i in range(9)]
    project.write_recipe(**chats_of(records, format={"kind": kind})(project))

    found = [one for one in preflight.require_no_mistakes(project.project) if "the documents hold" in one.text]

    assert [one.is_warning for one in found] == ([] if said is None else [True])
    assert all(str(said) in one.text for one in found)


def test_ties_are_left_out_and_are_no_lost_records(project: CliProject) -> None:
    records = [
        {"prompt": f"Why {i}?", "response_a": "So.", "response_b": "No.", "winner": ("a", "tie")[i % 2]}
        for i in range(9)
    ]
    project.write_recipe(**chats_of(records, format={"kind": "preference"})(project))

    assert not [one.text for one in preflight.require_no_mistakes(project.project) if "rejects" in one.text]


def test_sound_records_are_no_mistake_whatever_the_executor_and_what_is_held_out(project: CliProject) -> None:
    project.write_data("sales.csv", SALES)
    source, splits = {"train_urls": ["data/sales.csv"]}, {"validation": 0, "test": 30}
    datasets = {
        "chats": RECIPE["datasets"]["chats"] | {"splits": {"validation": 0}},
        "sales": {"source": source, "format": RECORDS, "splits": splits},
    }
    project.write_recipe(datasets=datasets, mixture={"num_validation_sequences": {"chats": 5}})

    assert preflight.require_no_mistakes(project.project) == []
    assert CHATS > preflight.FIRST_RECORDS
    # No cluster answers at the address, and none could read the trial's store.
    project.write_recipe(execution={"workers": 1, "executor": {"kind": "ray", "address": "127.0.0.1:1"}})
    assert preflight.require_no_mistakes(project.project) == []


@pytest.mark.skipif(not KTO.exists(), reason="needs ../shared/data/preference")
def test_real_preference_data_is_noticed(project: CliProject) -> None:
    project.write_recipe(**chats_only(source={"train_urls": [str(KTO)]}))
    require_said(refusal(project, GateError), [r"`label` is not read; .* are false: is this preference data"])
