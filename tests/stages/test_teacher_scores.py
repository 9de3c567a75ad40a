"""Scores of a teacher: from a server's answers to token rows, each score at its own token, whatever the server does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from rowmill.build.steps import plan_steps
from rowmill.cli.error_boundary import ExitStatus
from rowmill.cli.main import main
from rowmill.reader import Reader
from rowmill.schema.manifest import Manifest
from rowmill.stages import teacher_scores
from rowmill.stages.teacher_scores import MisalignedAnswerError, read_prompt_logprobs
from tests.support import teacher
from tests.support.completions_server import CompletionsServer, Reply, serving
from tests.support.recipes import (
    LENIENT,
    PAIR,
    TO_EXAMPLES,
    Built,
    Workspace,
    chat,
    current,
    current_rows,
    document,
    pair,
)

LENIENT_STUDENT = LENIENT | {"same_tokenization": {"at_least": 0}}
TOP_K = 4
FIELDS = {"teacher_ids": {"type": "int32", "size": TOP_K}, "teacher_logprobs": {"type": "float16", "size": TOP_K}}


def teach(request: Mapping[str, Any]) -> Reply:
    assert (request["max_tokens"], request["prompt_logprobs"]) == (1, TOP_K)
    return teacher.teach(request)


def answer(ids: Sequence[int]) -> list[dict[str, Any] | None]:
    return teacher.answer(ids, TOP_K)


# ── Builds ─────────────────────────────────────────────────────────────────────────────────────────


ROWS = 24


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Build chats and pairs up to their examples."""
    workspace = Workspace(tmp_path_factory.mktemp("examples"))
    datasets = {
        "chats": workspace.dataset(
            "c.jsonl", [chat(i, turns=2) for i in range(ROWS)], {"kind": "chat"}, splits={"validation": 0.2}
        ),
        "pairs": workspace.dataset("p.jsonl", [pair(i) for i in range(6)], PAIR),
    }
    workspace.recipe(datasets).build(only=TO_EXAMPLES)
    return workspace


@pytest.fixture
def built(examples: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Copy the built project; a part of scores has few examples."""
    monkeypatch.setattr(teacher_scores, "PART_ROWS", 5)
    return Workspace(shutil.copytree(examples.folder, tmp_path / "project"))


def make_command(workspace: Workspace, server: CompletionsServer | str, *options: str) -> list[str]:
    base_url = server if isinstance(server, str) else server.base_url
    return ["score", str(workspace.config), "--base-url", base_url, "--model", "m", "--top-k", str(TOP_K), *options]


def score(workspace: Workspace, server: CompletionsServer | str, *options: str, dataset: str = "chats") -> int:
    return main(make_command(workspace, server, "--dataset", dataset, *options))


def learn(folder: Path, name: str, *urls: str, held: Sequence[str] = (), **options: Any) -> Built:
    """Build a student of one dataset of scored examples; options are of the dataset or of the recipe."""
    groups = {group: options.pop(group) for group in ("truncation", "packing") if group in options}
    source = {"train_urls": [*urls], **({"validation_urls": [*held]} if held else {})}
    dataset = {"source": source, "format": {"kind": "tokens", "token_fields": FIELDS}, **groups}
    return Workspace(folder).recipe({name: dataset}, gates=LENIENT_STUDENT, **options).build()


def scores_of(workspace: Workspace, dataset: str = "chats") -> Manifest:
    return current(workspace.project, dataset, "teacher_scores")


def scored_files(workspace: Workspace, dataset: str = "chats") -> dict[str, bytes]:
    folder = workspace.folder / "scored" / "mini" / dataset
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.parquet"))}


def scored_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.rglob("scored/**/*.parquet")) for row in pq.read_table(file).to_pylist()]


def failed_requests(workspace: Workspace, dataset: str = "chats") -> dict[str, int]:
    return dict(scores_of(workspace, dataset).tables["failed_requests"].rows)


def require_own_scores(ids: Sequence[int], trained: Sequence[int], rows: list[Any], logprobs: list[Any]) -> None:
    """Assert that the scores of some trained places are the teacher's of these places."""
    for at, of_token, values in zip(trained, rows, logprobs, strict=True):
        assert list(zip(of_token, values, strict=True)) == teacher.rank(ids, at, TOP_K)[:TOP_K]


def test_scores_are_those_of_their_tokens_and_rows_name_their_source(
    built: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(teach) as server:
        assert score(built, server) == 0

    rows = scored_rows(built.folder)
    assert len(rows) == len(server.requests) == ROWS
    assert sorted(row["record"] for row in rows) == list(range(1, ROWS + 1))
    examples = {one["example_id"]: one for one in current_examples(built, "chats")}
    for row in rows:
        trained = np.flatnonzero(row["loss_mask"]).tolist()
        assert row["source"].endswith("c.jsonl")
        assert row["input_ids"] == examples[row["example_id"]]["input_ids"]
        assert [bool(flag) for flag in row["loss_mask"]] == examples[row["example_id"]]["loss_mask"]
        require_own_scores(row["input_ids"], trained, row["teacher_ids"], row["teacher_logprobs"])
    facts = scores_of(built).facts
    assert (facts["unscored"], facts["kept"], facts["rejected"]) == (0, ROWS, 0)
    assert facts["tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    assert facts["top_k_mass"] == pytest.approx(sum(np.exp(-(j + 1.5)) for j in range(TOP_K)), abs=1e-3)
    own = [one for row in rows for one in own_logprobs(row)]
    assert facts["mean_logprob"] == pytest.approx(sum(own) / len(own), abs=1e-6)
    card = json.loads((built.folder / "scored/mini/chats/scores.json").read_text())
    assert (card["teacher"], card["top_k"], card["mean_logprob"]) == ("m", TOP_K, facts["mean_logprob"])
    assert "token_fields: {teacher_ids: {type: int32, size: 4}" in capsys.readouterr().out


def own_logprobs(row: Mapping[str, Any]) -> list[float]:
    """Return the teacher's log-probability of each trained token of a row."""
    ids = row["input_ids"]
    return [dict(teacher.rank(ids, at, TOP_K))[ids[at]] for at in np.flatnonzero(row["loss_mask"]).tolist()]


def current_examples(workspace: Workspace, dataset: str) -> list[dict[str, Any]]:
    return current_rows(workspace.project, dataset, "tokenized_examples", file="examples")


def test_scored_dataset_is_built_with_each_score_at_its_token(built: Workspace, tmp_path: Path) -> None:
    with serving(teach) as server:
        assert score(built, server, "--output", str(tmp_path / "scored")) == 0
    train, held = (f"{tmp_path}/scored/chats/{split}/" for split in ("train", "validation"))
    student = learn(tmp_path / "student", "chats", train, held=[held], exports=[{"kind": "native", "name": "own"}])

    seen = 0
    for rank in range(2):
        for batch in Reader(student.project.store.root, "mini", rank=rank, world_size=2, as_torch=False):
            borders = batch["cu_seq_lens_q"].tolist()
            for begin, end in pairwise(borders):
                ids, labels = batch["input_ids"][0, begin:end].tolist(), batch["labels"][0, begin:end]
                trained = np.flatnonzero(labels != -100)
                own = [batch[name][0, begin:end] for name in FIELDS]
                require_own_scores(ids, trained.tolist(), *(values[trained].tolist() for values in own))
                assert not any(np.delete(values, trained, axis=0).any() for values in own)
                seen += len(trained)
    trained = [row for file in sorted(Path(train).rglob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    assert seen == sum(sum(row["loss_mask"]) for row in trained) > 0


def test_printed_lines_read_every_score_of_a_build(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path / "a, b: [c]")
    datasets = {
        "chats": workspace.dataset("chats.jsonl", [chat(i) for i in range(9)]),
        "null": workspace.dataset("null.jsonl", [document(i, words=300) for i in range(7)], {"kind": "text"}),
        "none": workspace.dataset("none.jsonl", [{"messages": []}]),
    }
    workspace.recipe(datasets).build(only=TO_EXAMPLES)
    monkeypatch.chdir(workspace.folder)
    with serving(teach) as server:
        assert main(make_command(workspace, server, "--output", "out")) == 0
    said = capsys.readouterr().out

    student = Workspace(tmp_path / "student")
    student.recipe(yaml.safe_load(said[said.index("datasets:") :])["datasets"], gates=LENIENT_STUDENT).build()

    # From another folder, whose name YAML reads otherwise; a dataset named null; texts longer than a sequence.
    lengths = [len(request["prompt"]) for request in server.requests]
    assert max(lengths) > 256
    assert list(student.project.recipe.datasets) == ["chats", "null"]
    packed = [current(student.project, name, "packed_shards").facts["tokens"] for name in ("chats", "null")]
    assert sum(packed) == sum(lengths)


@pytest.mark.slow
def test_first_token_of_a_slice_keeps_its_scores_and_has_no_label(tmp_path: Path) -> None:
    scored = Workspace(tmp_path / "teacher").one(
        "t.jsonl", [document(i, words=300) for i in range(4)], {"kind": "text"}
    )
    scored.build(only=TO_EXAMPLES)
    with serving(teach) as server:
        assert score(scored, server, dataset="rows") == 0
    cut = {"truncation": {"overlong": "keep"}, "packing": {"slice_strategy": "split"}}
    built = learn(tmp_path / "student", "rows", str(scored.folder / "scored/mini/rows/train/"), **cut)

    whole, slices = {one["example_id"]: one for one in built.examples()}, 0
    for row in built.rows_of("rows", "packed_shards", file="shard"):
        begin = 0
        for name, start, length in zip(row["example_ids"], row["starts"], row["segment_lengths"], strict=True):
            example, own = whole[name], slice(start, start + length)
            for field in FIELDS:
                assert row[field][begin : begin + length] == example[field][own]
            assert row["labels"][begin] == -100
            if start:
                slices += 1
                assert example["loss_mask"][start]
                require_own_scores(example["input_ids"], [start], *([row[field][begin]] for field in FIELDS))
            begin += length
    assert slices >= 4


def test_output_at_a_url_or_beside_other_files_is_refused(built: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert score(built, NOWHERE, "--output", "s3://bucket/scored") != 0
    assert "--output s3://bucket/scored: a URL; scored datasets are written to a folder" in capsys.readouterr().err

    (built.folder / "own" / "pairs").mkdir(parents=True)
    (built.folder / "own" / "pairs" / "notes.txt").write_text("mine")
    with serving(teach) as server:
        assert score(built, server, "--output", str(built.folder / "own"), dataset="pairs") != 0

    assert "holds files of something else" in capsys.readouterr().err
    assert (built.folder / "own" / "pairs" / "notes.txt").read_text() == "mine"


def test_recipe_that_cannot_be_scored_is_told_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = Workspace(tmp_path).one("p.jsonl", [{"prompt": "Why?"}], {"kind": "prompts"})
    assert main(["score", str(workspace.config), "--base-url", NOWHERE, "--model", "m"]) != 0
    assert "mini: no dataset can be scored; their examples are for prompts" in capsys.readouterr().err

    workspace = Workspace(tmp_path).one("c.jsonl", [chat(0)])
    assert score(workspace, NOWHERE, dataset="rows") != 0
    assert "run `rowmill build mini --until tokenized_examples`" in capsys.readouterr().err


@pytest.mark.campaign
@pytest.mark.real_data
def test_real_questions_under_a_real_tokenizer_are_scored_token_by_token(tmp_path: Path, real_data: Path) -> None:
    lines = (real_data / "math/gsm8k_train.jsonl").read_bytes().splitlines(keepends=True)[:60]
    form = {"kind": "supervised", "input_field": "question", "output_field": "answer"}
    model: dict[str, Any] = {"tokenizer": str(real_data / "tokenizers/qwen3"), "seq_len": 1024}
    workspace = Workspace(tmp_path).one("gsm8k.jsonl", b"".join(lines), form, **model)
    workspace.build(only=TO_EXAMPLES)
    with serving(teach) as server:
        assert score(workspace, server, dataset="rows") == 0

    built = learn(tmp_path / "student", "math", str(workspace.folder / "scored/mini/rows/train/"), **model)

    examples = built.examples("math")
    assert len(examples) == 60
    for one in examples:
        trained = np.flatnonzero(one["loss_mask"]).tolist()
        own = [[one[name][at] for at in trained] for name in FIELDS]
        require_own_scores(one["input_ids"], trained, *own)
    assert sum(row["trained_tokens"] for row in examples) == scores_of(workspace, "rows").facts["tokens"]


# ── A server that fails, and one that lies ─────────────────────────────────────────────────────────


def fails_once(fault: Callable[[dict[str, Any]], Reply]) -> Callable[[dict[str, Any]], Reply]:
    """Return a script that answers every prompt wrongly first, and rightly when it is asked again."""
    asked = Counter[str]()
    lock = threading.Lock()

    def script(request: dict[str, Any]) -> Reply:
        key = json.dumps(request["prompt"])
        with lock:
            asked[key] += 1
        return fault(request) if asked[key] == 1 else teach(request)

    return script


def shifted(request: dict[str, Any]) -> Reply:
    """Answer with each distribution one place too late, at the same length."""
    entries = answer(request["prompt"])
    return teacher.reply([None, *[entries[at - 1] or {} for at in range(1, len(entries))]])


def outside(request: dict[str, Any]) -> Reply:
    """Answer with an id beyond the vocabulary, and within what an int32 holds, in every entry."""
    entries = [one and {**one, "600000": {"logprob": -9}} for one in answer(request["prompt"])]
    return teacher.reply(entries, model=request["model"])


FAULTS: list[tuple[str, Callable[[dict[str, Any]], Reply], str]] = [
    ("drops", lambda _: Reply(drops=True), "RemoteDisconnected"),
    ("ends early", lambda request: Reply(body=teach(request).body, promises_bytes=9), "Connection"),
    ("fails", lambda _: Reply(status=500), "HTTP 500"),
    ("is busy", lambda _: Reply(status=503, headers={"Retry-After": "0"}), "HTTP 503"),
    ("is late", lambda _: Reply(is_slow=True), "Timeout"),
    ("is shifted", shifted, "MisalignedAnswer"),
    ("is of ids outside the vocabulary", outside, "MisalignedAnswer"),
    ("is of another model", lambda request: teach({**request, "model": "other"}), "MisalignedAnswer"),
]
"""Answers and how they are counted; what makes one misaligned is tested at the end, without a server."""


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "failure"), [one[1:] for one in FAULTS], ids=[one[0] for one in FAULTS])
def test_failed_answer_is_counted_and_asked_for_again(
    built: Workspace, fault: Callable[[dict[str, Any]], Reply], failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rowmill.core.completions._FIRST_WAIT_S", 0.01)
    with serving(teach) as server:
        score(built, server, dataset="pairs")
    expected = scored_files(built, "pairs")
    first_scores = built.folder / ".rowmill" / "mini" / "pairs" / "teacher_scores"
    shutil.rmtree(first_scores)

    with serving(fails_once(fault)) as server:
        assert score(built, server, "--timeout", "0.5", "--concurrency", "2", dataset="pairs") == 0

    assert scored_files(built, "pairs") == expected
    assert failed_requests(built, "pairs") == {failure: 6}
    assert len(server.requests) == 12


def test_row_that_is_always_answered_wrongly_is_rejected_and_scored_by_the_next_run(built: Workspace) -> None:
    lied_to = current_examples(built, "chats")[7]

    def lie(request: dict[str, Any]) -> Reply:
        return shifted(request) if request["prompt"] == lied_to["input_ids"] else teach(request)

    with serving(lie) as server:
        assert score(built, server, "--retries", "0") == ExitStatus.GATE_CLOSED
    first = scores_of(built)
    rejects = current_rows(built.project, "chats", "teacher_scores", file="rejects")
    assert not (built.folder / "scored").exists()
    with serving(teach) as again:
        assert score(built, again) == 0

    assert [(row["row_id"], row["reason"]) for row in rejects] == [(lied_to["row_ids"][0], "teacher_misaligned")]
    assert json.loads(rejects[0]["raw"])["input_ids"] == lied_to["input_ids"]
    assert "has no entry of token" in rejects[0]["detail"]
    assert (first.facts["rejected"], first.facts["kept"], len(server.requests)) == (1, ROWS - 1, ROWS)
    # Only the part with the reject is made again.
    assert len(again.requests) == 5
    assert len(scored_rows(built.folder)) == ROWS


@pytest.mark.slow
@pytest.mark.parametrize(("reply", "detail"), [
    (Reply(texts=["x"]), "no list prompt_logprobs"),
    (Reply(status=400, body=b"unknown parameter prompt_logprobs"), "HTTP 400 unknown parameter prompt_logprobs"),
])  # fmt: skip
def test_server_that_scores_nothing_ends_the_run_at_once(
    built: Workspace, reply: Reply, detail: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda _: reply) as server:
        assert score(built, server, "--retries", "0", "--workers", "1") == ExitStatus.OUTSIDE_FAILURE

    assert len(server.requests) == teacher_scores.PART_ROWS < ROWS
    error = " ".join(capsys.readouterr().err.split())
    assert f"none of {teacher_scores.PART_ROWS} examples could be scored, the first because: " in error
    assert detail in error
    assert "is needed; check --base-url and --model" in error


@pytest.mark.slow
@pytest.mark.parametrize(("reply", "problem"), [
    (Reply(status=500), "HTTP 500 after 1 retries"), (Reply(is_slow=True), "timed out after 1 retries"),
])  # fmt: skip
def test_server_that_always_fails_ends_the_run(
    built: Workspace, reply: Reply, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda _: reply) as server:
        options = ("--retries", "1", "--timeout", "0.2")
        assert score(built, server, *options, dataset="pairs") == ExitStatus.OUTSIDE_FAILURE

    assert problem in " ".join(capsys.readouterr().err.split())
    assert not (built.folder / "scored").exists()


def test_refused_row_is_rejected_with_the_servers_words(built: Workspace) -> None:
    longest = max(current_examples(built, "chats"), key=lambda one: len(one["input_ids"]))["input_ids"]

    def refuse(request: dict[str, Any]) -> Reply:
        return Reply(status=400, body=b"maximum context length") if request["prompt"] == longest else teach(request)

    with serving(refuse) as server:
        score(built, server)

    [reject] = current_rows(built.project, "chats", "teacher_scores", file="rejects")
    assert reject["reason"] == "teacher_refused"
    assert "HTTP 400 maximum context length" in reject["detail"]
    assert failed_requests(built) == {"HTTP 400": 1}


# ── Runs that end early, and workers ───────────────────────────────────────────────────────────────


def test_server_that_stops_ends_the_run_and_the_next_one_goes_on(
    built: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = count()
    with serving(lambda request: teach(request) if next(numbers) < 10 else Reply(status=401)) as server:
        assert score(built, server, "--concurrency", "1") == ExitStatus.OUTSIDE_FAILURE
    error = capsys.readouterr().err
    assert "datasets.chats.teacher" in error
    assert "HTTP 401" in error
    assert not (built.folder / "scored").exists()

    with serving(teach) as server:
        assert score(built, server) == 0

    assert len(server.requests) == ROWS - 10
    assert len(scored_rows(built.folder)) == ROWS


@pytest.mark.slow
def test_files_are_the_same_for_any_number_of_workers_and_after_a_kill(tmp_path: Path) -> None:
    one = Workspace(tmp_path / "one").one("c.jsonl", [chat(i, turns=2) for i in range(900)])
    one.build(only=TO_EXAMPLES)
    two, killed = (Workspace(shutil.copytree(one.folder, tmp_path / name)) for name in ("two", "killed"))
    with serving(teach) as server:
        assert score(one, server, "--workers", "1", dataset="rows") == 0
        assert score(two, server, "--workers", "2", dataset="rows") == 0
    asked, enough = count(1), threading.Event()

    def teach_and_tell(request: dict[str, Any]) -> Reply:
        if next(asked) == 600:
            enough.set()
        return teach(request)

    with serving(teach_and_tell) as server:
        command = make_command(killed, server, "--workers", "1")
        program = f"from rowmill.cli.main import main; raise SystemExit(main({command!r}))"
        process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
        assert enough.wait(60)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (killed.folder / "scored").exists()
    # Another server, which the killed process cannot have asked.
    with serving(teach) as server:
        assert score(killed, server, "--workers", "1", dataset="rows") == 0

    assert len(server.requests) <= 900 - 2 * teacher_scores.PART_ROWS
    assert scored_files(one, "rows") == scored_files(two, "rows") == scored_files(killed, "rows")
    assert len(scored_files(one, "rows")) == 4


def test_server_that_moved_changes_nothing(built: Workspace) -> None:
    with serving(teach) as server:
        score(built, server)
    version = scores_of(built).version
    with serving(teach) as other:
        assert score(built, other, "--timeout", "5", "--concurrency", "2") == 0

    assert (other.requests, scores_of(built).version) == ([], version)


# ── What is refused ────────────────────────────────────────────────────────────────────────────────


def test_recipe_without_a_teacher_has_no_such_stage(built: Workspace) -> None:
    assert "teacher_scores" not in {step.name for step in plan_steps(built.project)}


NOWHERE = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "m"], "mini: datasets.chats.teacher: base_url: is missing and has no default; add it"),
        (["--base-url", "ftp://host/v1", "--model", "m"], "teacher: base_url: string should match pattern '^https?://"),
        (["--base-url", NOWHERE, "--model", "m", "--top-k", "0"], "teacher: top_k: input should be greater than or"),
        ([], "mini: no dataset has a teacher block; score needs the address"),
        (["--dataset", "others"], "mini: --dataset others: no such dataset; there is chats or pairs; name one"),
        (["--base-url", NOWHERE, "--model", "m", "--api-key-env", "ROWMILL_NO_KEY"],
         "datasets.chats.teacher.api_key_env: the environment variable ROWMILL_NO_KEY is not set"),
    ],
)  # fmt: skip
def test_option_that_cannot_work_is_refused(
    built: Workspace, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", str(built.config), *options]) != 0
    assert message in capsys.readouterr().err


def test_key_is_sent_and_written_nowhere(built: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWMILL_TEST_KEY", "secret-key-7")
    with serving(teach) as server:
        assert score(built, server, "--api-key-env", "ROWMILL_TEST_KEY", dataset="pairs") == 0

    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret-key-7"}
    files = [file for file in built.folder.rglob("*") if file.is_file()]
    assert not [file for file in files if b"secret-key-7" in file.read_bytes()]


# ── One answer ─────────────────────────────────────────────────────────────────────────────────────


def body(*entries: Any) -> bytes:
    return json.dumps({"choices": [{"prompt_logprobs": entries}]}).encode()


def entry(**logprobs: Any) -> dict[str, Any]:
    return {name.lstrip("t"): {"logprob": value} for name, value in logprobs.items()}


def test_likeliest_come_first_and_minus_infinity_is_the_lowest_that_is_stored() -> None:
    first = entry(t5=-3.0, t7=-0.5, t9=-1.5)
    second = entry(t6=-0.5, t8=-2.0, t4=-2.0)

    found = read_prompt_logprobs(body(None, first, second), [3, 5, 6], [1, 2], 2, vocab_size=10, model="m")

    # Of equal ones, the lower id comes first, whatever the order of the answer.
    assert found.ids.tolist() == [[7, 9], [6, 4]]
    assert found.logprobs.tolist() == [[-0.5, -1.5], [-0.5, -2.0]]
    assert found.own.tolist() == [-3.0, -0.5]
    assert (found.ids.dtype, found.logprobs.dtype) == (np.int32, np.float16)

    answered = b'{"choices": [{"prompt_logprobs": [null, {"5": {"logprob": -Infinity}, "6": {"logprob": 0}}]}]}'

    found = read_prompt_logprobs(answered, [3, 5], [1], 2, vocab_size=10, model="m")

    assert found.logprobs.tolist() == [[0, -10000]]


FIVE, SIX = entry(t5=-1, t6=-2), entry(t6=-1, t7=-2)
"""Sound entries of the tokens 5 and 6."""
BAD_ANSWERS: list[tuple[bytes, str]] = [
    (body(None, FIVE), "2 entries for 3 tokens"),
    (body(None, FIVE, SIX, {}), "4 entries for 3 tokens"),
    (body(None, SIX, SIX), r"prompt_logprobs\[1\] has no entry of token 5"),
    (body(FIVE, SIX, None), r"prompt_logprobs\[1\] has no entry of token 5"),
    (body(None, entry(t5=-1), SIX), r"prompt_logprobs\[1\] has 1 ids, expected at least 2"),
    (body(None, entry(t5=-1, t6=0.5), SIX), r"prompt_logprobs\[1\] has an id or a log-probability"),
    (body(None, entry(t5=-1, t6=float("nan")), SIX), r"\[1\] has an id or a log-probability"),
    (body(None, {"5": {"logprob": -1}, "-6": {"logprob": -2}}, SIX), r"\[1\] has an id or a log"),
    (body(None, {"5": {"logprob": -1}, f"{2**32 + 6}": {"logprob": -2}}, SIX),
     r"\[1\] has id 4294967302, expected one below the vocabulary's size 10; if the .*, set vocab_size"),
    (body(None, entry(t5=-1, t9=-2), entry(t6=-1, t10=-2)), r"\[2\] has id 10, expected one below"),
    (body(None, FIVE, SIX)[:-1] + b', "model": "n"}', "the answer is of model 'n', expected 'm'"),
    (body(None, FIVE, SIX)[:-5], "no list prompt_logprobs"),
    (body(None, entry(t5=-0.1, t6=-0.2), SIX), r"\[1\] has a mass of 1\.72"),
    (body(None, entry(t5=-1, t6="x"), SIX), "no list prompt_logprobs"),
    (body(None, {"five": {"logprob": -1}}, SIX), "no list prompt_logprobs"),
    (body(None, {"5": -1}, SIX), "no list prompt_logprobs"),
    (b'{"choices": []}', "no list prompt_logprobs"),
    (b'{"choices": [{"prompt_logprobs": null}]}', "no list prompt_logprobs"),
    (b"[" * 100000, "no list prompt_logprobs"),
    (b"", "no list prompt_logprobs"),
]  # fmt: skip


@pytest.mark.parametrize(("answered", "message"), BAD_ANSWERS, ids=range(len(BAD_ANSWERS)))
def test_answer_that_is_not_of_these_tokens_is_refused(answered: bytes, message: str) -> None:
    with pytest.raises(MisalignedAnswerError, match=message):
        read_prompt_logprobs(answered, [3, 5, 6], [1, 2], 2, vocab_size=10, model="m")
