"""Published builds are on record in MLflow, Weights & Biases and OpenLineage, once each, and change nothing else.

MLflow keeps its runs in a SQLite database, Weights & Biases offline, OpenLineage in a file or a server on loopback.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial, partialmethod
from http.server import BaseHTTPRequestHandler
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from socketserver import TCPServer
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmill.checks import judge
from rowmill.core.errors import ConfigError
from rowmill.core.installation import format_install_command
from rowmill.recipe import recipe
from rowmill.reports import build_record
from rowmill.tracking import MlflowTracker, OpenLineageTracker, WandbTracker
from rowmill.tracking.client import BuildRecord
from rowmill.tracking.delivery import LogResult, find_tracker_problems, log_build
from tests.alerts.test_alerts import Receiver, receiving
from tests.support.cli_project import RECIPE, CliProject, list_files
from tests.support.dagster_server import eventually
from tests.support.recipes import current


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"no {package}; pip install 'rowmill[{extra}]'")


MLFLOW, WANDB = needs("mlflow", "mlflow"), needs("wandb", "wandb")
OPENLINEAGE = needs("openlineage", "openlineage")
EVENTS_FILE = {"kind": "openlineage", "file": "lineage/events.jsonl"}

READ_RUNS = """
import json, sys
from mlflow import MlflowClient, data
from mlflow.types import Schema

client = MlflowClient("sqlite:///mlflow.db")
experiment = client.get_experiment_by_name(sys.argv[1])
runs = []
for run in client.search_runs([experiment.experiment_id]):
    inputs = {}
    for given in run.inputs.dataset_inputs:
        schema = given.dataset.schema
        inputs[given.dataset.name] = {
            **given.dataset.to_dictionary(),
            "context": given.tags[0].value,
            "uri": data.get_source(given).uri,
            "columns": schema and Schema.from_json(json.dumps(json.loads(schema)["mlflow_colspec"])).input_names(),
        }
    folder = client.download_artifacts(run.info.run_id, "")
    files = {name: open(f"{folder}/{name}").read() for name in ("manifest.json", "build.json")}
    note = run.data.tags["mlflow.note.content"]
    runs.append({"name": run.info.run_name, "note": note, "status": run.info.status, "inputs": inputs, "files": files})
print(json.dumps(runs))
"""
"""A client of its own: importing MLflow must not warn in the tests' process."""


def read_runs(folder: Path, experiment: str = "small") -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-c", READ_RUNS, experiment]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def read_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "lineage" / "events.jsonl").read_text().splitlines()]


def write(folder: Path, *trackers: Mapping[str, Any], **changes: Any) -> CliProject:
    return CliProject(folder).write(execution={"workers": 1, "log_to": list(trackers)}, **changes)


def build(project: CliProject, *options: str) -> list[str]:
    """Build a project; return what it said of trackers, in order."""
    said = project.run("build", "--skip-preflight", *options).err
    return [line for line in said.splitlines() if "logged to" in line or "log_to" in line]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> CliProject:
    project = CliProject(tmp_path_factory.mktemp("built")).write()
    project.run("build", "--skip-preflight")
    return project


@pytest.fixture(scope="module")
def record(built: CliProject) -> BuildRecord:
    return build_record.describe_build(built.project, built.current("gpu_partitions"))


# ── MLflow ──


@MLFLOW
@pytest.mark.slow
def test_mlflow_has_one_run_per_version_with_the_datasets_and_the_manifest(tmp_path: Path) -> None:
    project = write(tmp_path, {"kind": "mlflow", "tracking_uri": "sqlite:///mlflow.db"})
    said = [build(project) for _ in range(2)]
    ranks = project.current("gpu_partitions")
    raw = project.current("chats", "raw_dataset")
    # As after a try whose answer was lost.
    record = build_record.describe_build(project.project, ranks)
    [repeated] = log_build([MlflowTracker(tracking_uri="sqlite:///mlflow.db")], record, tmp_path)
    project.append_chat(40)
    build(project)
    later = project.current("gpu_partitions")
    runs = read_runs(tmp_path)
    [run] = [run for run in runs if run["name"] == f"small {ranks.version[:12]}"]

    assert [len(lines) for lines in said] == [1, 0]
    assert said[0][0] == repeated.sentence
    assert repeated.address.startswith("run ")
    assert {run["name"] for run in runs} == {f"small {one.version[:12]}" for one in (ranks, later)}
    assert len(runs) == 2
    assert run["status"] == "FINISHED"
    assert sorted(run["inputs"]) == ["small", "small/chats", "small/notes", "small/tasks"]
    published, chats = run["inputs"]["small"], run["inputs"]["small/chats"]
    assert (published["digest"], published["context"]) == (ranks.version, "training")
    assert published["uri"] == project.project.store.path("small/gpu_partitions")
    assert published["columns"] == [name for name, _ in ranks.schema]
    assert json.loads(published["profile"])["num_rows"] == 40
    assert json.loads(published["profile"])["trained_tokens"] == ranks.facts["trained_tokens"]
    assert chats["uri"] == str(tmp_path / "data" / "chats.jsonl")
    assert (chats["digest"], chats["context"]) == (raw.version, "source")
    assert json.loads(run["files"]["manifest.json"])["version"] == ranks.version
    assert json.loads(run["files"]["build.json"])["recipe"] == "small"
    argument = judge.format_recipe_argument("small", project.project.store.root)
    assert run["note"].endswith(f"What each step trains on: rowmill view {argument} 'step 0'")


class VersionPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"1.30.0")

    def log_message(self, *_: Any, **__: Any) -> None:
        pass


@MLFLOW
def test_mlflow_server_of_another_version_is_named_with_those_supported(tmp_path: Path, record: BuildRecord) -> None:
    with TCPServer(("127.0.0.1", 0), VersionPage) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        [result] = log_build([MlflowTracker(tracking_uri=address)], record, tmp_path, pauses_s=())
        server.shutdown()

    assert result.problem == (
        f"execution.log_to: {address} runs MLflow 1.30.0; supported are servers of MLflow 2 and 3; upgrade it, or name "
        "another"
    )


# ── Weights & Biases ──


@WANDB
def test_wandb_keeps_an_artifact_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROWMILL_VIEWER_URL", "http://127.0.0.1:3002")
    project = write(tmp_path, {"kind": "wandb", "mode": "offline", "project": "data"})
    said = [build(project) for _ in range(2)]
    ranks = project.current("gpu_partitions")

    [run] = (tmp_path / "wandb").glob("offline-run-*")
    [kept] = run.glob("*.wandb")
    written = kept.read_bytes()
    assert said == [[f"logged to wandb: {run}"], []]
    # A log of protocol buffers, in which texts are as they are.
    for text in ("data", "dataset", "manifest.json", "build.json", f'"{ranks.version}"', ranks.version[:12],
                 f"trains on: http://127.0.0.1:3002/small/steps/0?version={ranks.version}"):  # fmt: skip
        assert text.encode() in written
    staged = [file.read_bytes() for file in (tmp_path / "wandb" / "data").rglob("*") if file.is_file()]
    assert project.project.store.read(f"small/gpu_partitions/manifests/{ranks.fingerprint}.json") in staged


# ── OpenLineage ──


@OPENLINEAGE
def test_openlineage_gets_an_event_per_stage_and_per_export(tmp_path: Path) -> None:
    exports = [{"kind": "axolotl", "name": "axolotl", "split": "train", "unit": "unpacked", "sequence_len": 128}]
    gates = {**RECIPE["gates"], "rejects": {"at_most": 0.01, "severity": "warn"}}
    project = write(tmp_path, EVENTS_FILE, exports=exports, gates=gates)
    said = [build(project) for _ in range(2)]
    events = {event["job"]["name"]: event for event in read_events(tmp_path)}

    assert [len(lines) for lines in said] == [2, 0]
    stages = ("raw_dataset", "canonical_rows", "tokenized_examples", "truncation_stats", "packed_shards")
    named = {f"small/{dataset}/{stage}" for dataset in RECIPE["datasets"] for stage in stages}
    assert events.keys() == named | {"small/training_splits", "small/gpu_partitions", "small/exports/axolotl"}
    assert len(read_events(tmp_path)) == len(events) == len({event["run"]["runId"] for event in events.values()})
    assert {event["eventType"] for event in events.values()} == {"COMPLETE"}
    rows, tokenized = events["small/chats/canonical_rows"], events["small/chats/tokenized_examples"]
    made = project.current("chats", "canonical_rows")
    [output] = rows["outputs"]
    assert output["outputFacets"]["outputStatistics"]["rowCount"] == made.facts["kept"] == 40
    assert output["facets"]["version"]["datasetVersion"] == made.version
    assert [(field["name"], field["type"]) for field in output["facets"]["schema"]["fields"]] == list(made.schema)
    tests = {test["name"]: test for test in rows["run"]["facets"]["test"]["tests"]}
    assert (tests["rejects"]["status"], tests["rejects"]["actual"]) == ("fail", "2.439 %")
    assert tests["group_size"]["status"] == "skip"
    # What one stage wrote is what the next one reads, with what its checks said.
    [read] = tokenized["inputs"]
    assert (read["namespace"], read["name"]) == (output["namespace"], output["name"])
    checks = {one["assertion"]: one["success"] for one in read["inputFacets"]["dataQualityAssertions"]["assertions"]}
    assert (checks["rejects"], checks["accounted"]) == (False, True)
    [raw] = events["small/chats/raw_dataset"]["inputs"]
    assert (raw["namespace"], raw["name"]) == ("file", str(tmp_path / "data" / "chats.jsonl"))


@OPENLINEAGE
def test_server_that_fails_at_first_gets_every_event_with_the_same_ids(tmp_path: Path, record: BuildRecord) -> None:
    with receiving(200, 200, 500) as receiver:
        [result] = log_build([lineage(receiver)], record, tmp_path, pauses_s=(0,))

    assert result == LogResult("openlineage", address=address_of(receiver))
    sent = [event["run"]["runId"] for event in receiver.received]
    assert len(sent) == 17 + 2
    assert len(set(sent)) == 17


def address_of(receiver: Receiver) -> str:
    return receiver.url.partition("/hook")[0]


def lineage(receiver: Receiver) -> OpenLineageTracker:
    return OpenLineageTracker(url=address_of(receiver))


@OPENLINEAGE
@pytest.mark.slow
def test_tracker_that_was_away_gets_the_build_from_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_record, "log_build", partial(log_build, pauses_s=(0, 0)))
    with receiving(*[500] * 3) as receiver:
        address = address_of(receiver)
        project = write(tmp_path, {"kind": "openlineage", "url": address})
        project.run("build", "--skip-preflight", "--until", "training_splits")
        before = list_files(tmp_path / ".rowmill")
        first = build(project)
        second, third = build(project), build(project)

    assert "500 Server Error" in first[0]
    assert first[0].startswith("! not logged to openlineage: HTTPError: ")
    assert (second, third) == ([f"logged to openlineage: {address}"], [])
    assert len(receiver.received) == 17
    # Nothing else of the build knows of it.
    assert {name for name in before if name.endswith(".parquet")} <= list_files(tmp_path / ".rowmill").keys()


# ── Faults, by every client ──


def make_tracker(kind: str, address: str) -> MlflowTracker | OpenLineageTracker | WandbTracker:
    if kind == "mlflow":
        return MlflowTracker(tracking_uri=address)
    return OpenLineageTracker(url=address) if kind == "openlineage" else WandbTracker(base_url=address)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("mlflow", marks=MLFLOW),
        pytest.param("openlineage", marks=OPENLINEAGE),
        # Its client tries for 20 s by itself.
        pytest.param("wandb", marks=[WANDB, pytest.mark.campaign]),
    ],
)
def test_address_that_refuses_is_named(
    kind: str, tmp_path: Path, record: BuildRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("HOME", str(tmp_path))
    [result] = log_build([make_tracker(kind, "http://127.0.0.1:9")], record, tmp_path, pauses_s=())

    assert result.kind == kind
    assert "127.0.0.1" in result.problem
    assert "refused" in result.problem
    assert "k" * 40 not in result.problem


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("mlflow", marks=MLFLOW),
        pytest.param("openlineage", marks=OPENLINEAGE),
        pytest.param("wandb", marks=WANDB),
    ],
)
def test_address_that_never_answers_is_given_up(
    kind: str, tmp_path: Path, record: BuildRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        [result] = log_build([make_tracker(kind, address)], record, tmp_path, limit_s=5)
        # Neither the client nor what it started is left, while the address still does not answer.
        eventually(lambda: not list_processes(home=tmp_path), "every process has ended", within_s=5)

    assert result == LogResult(kind, problem="no answer within 5 s")


@OPENLINEAGE
@pytest.mark.slow
def test_client_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, record: BuildRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openlineage.py").write_text(
        "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open('started', 'w').close()\ntime.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    [result] = log_build([OpenLineageTracker(file="events.jsonl")], record, tmp_path, limit_s=10)

    assert (tmp_path / "started").exists()
    assert result == LogResult("openlineage", problem="no answer within 10 s")
    eventually(lambda: not list_processes(home=tmp_path), "every process has ended", within_s=5)


def list_processes(home: Path) -> list[str]:
    """Return the commands of the processes that were started with a folder as their home, as no other test does."""
    found: list[str] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if f"HOME={home}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
            except OSError:
                continue
    return found


def test_secret_that_is_not_set_is_one_line_before_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LINEAGE_KEY", raising=False)
    project = write(tmp_path, {"kind": "openlineage", "url": "http://127.0.0.1:9", "api_key_env": "LINEAGE_KEY"})
    missing = (
        "execution.log_to, openlineage: api_key_env: the environment variable LINEAGE_KEY is not set; it holds the "
        "secret of this tracker, which gets nothing without it; set it"
    )

    assert build(project) == [f"! {missing}", f"! not logged to openlineage: {missing}"]
    assert current(project.project, "gpu_partitions").facts["sequences"] == 40


@pytest.mark.parametrize(
    ("kind", "name", "version"),
    [("mlflow", "mlflow", "2.22.0"), ("wandb", "wandb", "0.16.6"), ("openlineage", "openlineage-python", "0.30.1")],
)
def test_client_of_another_version_is_named_with_those_supported(
    kind: str, name: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    [problem] = find_tracker_problems([make_tracker(kind, "http://127.0.0.1:9")])

    assert problem is not None
    where, found, allowed, remedy = (part.strip() for part in f"{problem}".replace(": ", "; ", 1).split("; "))
    assert (where, found) == (f"execution.log_to, {kind}", f"{name} {version} is installed")
    assert allowed.startswith("supported are versions from ")
    assert remedy == f"run {format_install_command(kind)}"


def test_client_that_is_not_installed_is_named_with_the_extra(
    tmp_path: Path, record: BuildRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", find_none)
    [result] = log_build([OpenLineageTracker(file="events.jsonl")], record, tmp_path)

    assert result.problem == (
        "execution.log_to, openlineage: the package openlineage-python is not installed; supported are versions "
        f"from 1.48 to before 2.0; run {format_install_command('openlineage')}"
    )


@pytest.mark.parametrize(
    ("tracker", "problem"),
    [
        ({"kind": "mlflow", "tracking_uri": "mlruns"}, "'mlruns' is a folder; expected a server or a database"),
        ({"kind": "mlflow", "tracking_uri": "http://me:secret@host"}, "has a login or a query; expected an address"),
        ({"kind": "openlineage"}, "has url and file, or neither; events go to one of the two; set one"),
        ({"kind": "openlineage", "file": "a", "url": "http://host"}, "has url and file, or neither"),
        ({"kind": "neptune"}, "neptune"),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_options_that_name_no_place_are_refused_before_anything_is_built(tracker: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=r"execution\.log_to\.0") as refused:
        recipe.parse_recipe({**RECIPE, "execution": {"log_to": [tracker]}}, name="small", where="small.yaml")

    assert problem in str(refused.value)
    assert "secret" not in str(refused.value).replace("without secrets", "")


# ── Names from data ──

HOSTILE_COLUMNS = [
    "a\nb\tc",
    "\x1b[31mred\u202e",
    "long " * 2_000 + "1",
    "long " * 2_000 + "2",
    "ä 👍 `\"'{}",
    *map(str, range(900)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "tracker",
    [
        pytest.param({"kind": "mlflow", "tracking_uri": "sqlite:///mlflow.db"}, marks=MLFLOW),
        pytest.param({"kind": "wandb", "mode": "offline"}, marks=WANDB),
        pytest.param(EVENTS_FILE, marks=OPENLINEAGE),
    ],
    ids=lambda tracker: tracker["kind"],
)
def test_columns_of_any_name_and_number_are_logged_in_bounds(
    tracker: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    tasks = RECIPE["datasets"]["tasks"] | {"source": {"train_urls": ["data/tasks.parquet"]}}
    project = write(tmp_path, tracker, datasets={"tasks": tasks})
    rows = [{"prompt": f"Is {i} a number?", "response": "Yes.", **dict.fromkeys(HOSTILE_COLUMNS, i)} for i in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / "tasks.parquet")
    [said] = build(project)

    assert said.startswith(f"logged to {tracker['kind']}: ")
    record = build_record.describe_build(project.project, project.current("gpu_partitions"))
    names = [name for name, _ in record.stages["small/tasks/raw_dataset"].schema]
    assert (len(names), names[-1]) == (501, "and 407 more columns")
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 200
    assert not any(ord(letter) < 32 or letter == "\u202e" for name in names for letter in name)
    assert {"a␊b␉c", "␛[31mred\\u202e", "ä 👍 `\"'{}"} <= set(names)
    if tracker["kind"] == "mlflow":
        [run] = read_runs(tmp_path)
        assert run["inputs"]["small/tasks"]["columns"] == names
    if tracker["kind"] == "openlineage":
        [event] = [event for event in read_events(tmp_path) if event["job"]["name"] == "small/tasks/raw_dataset"]
        assert [field["name"] for field in event["outputs"][0]["facets"]["schema"]["fields"]] == names


# ── What it costs ──


@OPENLINEAGE
@pytest.mark.slow
def test_tracker_that_does_not_answer_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exports = [{"kind": "axolotl", "name": "axolotl", "split": "train", "unit": "unpacked", "sequence_len": 128}]
    project = CliProject(tmp_path).write(exports=exports)
    project.run("build", "--skip-preflight")
    outputs = [project.current("gpu_partitions"), project.current("exports", "axolotl")]
    monkeypatch.setattr(build_record, "log_build", partial(log_build, limit_s=3))
    begun: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        project.write_recipe(exports=exports, execution={"workers": 1, "log_to": [{"kind": "openlineage", "url": url}]})
        results = build_record.log_outputs(project.project, outputs, begin=begun.append)
        monkeypatch.setattr(build_record, "SILENCE_S", 0.0)
        again = build_record.log_outputs(project.project, outputs[1:], begin=begun.append)

    assert [result.problem for result in results] == [
        "no answer within 3 s",
        "it did not answer before; the next build tries again",
    ]
    assert [result.problem for result in again] == ["no answer within 3 s"]
    assert begun == [
        "logging gpu_partitions to openlineage, for 60 s at most",
        "logging exports/axolotl to openlineage, for 60 s at most",
    ]


@OPENLINEAGE
def test_quiet_night_starts_no_client_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        project = write(tmp_path, EVENTS_FILE, {"kind": "openlineage", "url": address_of(receiver)})
        assert len(build(project)) == 2
        outputs = [project.current("gpu_partitions")]
        before, sent = list_files(tmp_path / ".rowmill"), len(receiver.received)
        reads: list[str] = []
        store = project.project.store

        def count(read: Callable[..., Any], self: Any, relative: str, *how: Any) -> Any:
            reads.append(relative)
            return read(self, relative, *how)

        for name in ("read_sealed", "recall_sealed"):
            monkeypatch.setattr(type(store), name, partialmethod(partial(count, getattr(type(store), name))))
        monkeypatch.setattr(subprocess, "Popen", pytest.fail)
        logged = build_record.log_outputs(project.project, outputs)

    assert (logged, len(receiver.received)) == ([], sent)
    assert reads == [f"small/gpu_partitions/logged/{outputs[0].version}.json"]
    assert list_files(tmp_path / ".rowmill") == before


def test_no_client_is_imported_by_a_build(tmp_path: Path) -> None:
    script = """
import sys
from rowmill.cli import main
for recipe in sys.argv[1:]:
    status = main.main(["build", recipe, "--skip-preflight"])
    names = {name.split(".")[0] for name in sys.modules} & {"mlflow", "openlineage", "wandb"}
    print("found", status, sorted(names), "rowmill.tracking.client" in sys.modules)
"""
    projects = [CliProject(tmp_path / "without").write(), write(tmp_path / "with", EVENTS_FILE)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", script, *(project.recipe for project in projects)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert [line for line in said.splitlines() if line.startswith("found")] == ["found 0 [] False", "found 0 [] True"]


@OPENLINEAGE
def test_builds_at_once_log_an_output_once(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write()
    project.run("build", "--skip-preflight")
    outputs = [project.current("gpu_partitions")]
    project.write_recipe(execution={"workers": 1, "log_to": [EVENTS_FILE]})
    with ThreadPoolExecutor(3) as builds:
        results = list(builds.map(lambda _: build_record.log_outputs(project.project, outputs), range(3)))

    assert sorted(map(len, results)) == [0, 0, 1]
    names = [event["job"]["name"] for event in read_events(tmp_path)]
    assert len(names) == len(set(names))
