"""What a tracker is told of a build, and one function per kind of tracker that tells it with the tracker's own client.

Runs in a process of its own (`delivery.py`), so that no client's threads, exit handlers, retries or environment reach a
build. Every function may be called again for the same build without logging it twice: runs and events have ids that
follow from the version, since a try whose answer was lost may have succeeded.
"""

import json
import os
import pickle
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rowmill.core.errors import ConfigError, PipelineError
from rowmill.core.remote import public_text
from rowmill.core.stage_names import RAW_DATASET
from rowmill.core.telemetry import silence_libraries
from rowmill.tracking import AnyTracker, MlflowTracker, OpenLineageTracker, WandbTracker

REQUEST_TIMEOUT_S = 10
"""Seconds that a server has for one answer."""


@dataclass(frozen=True, slots=True)
class LoggedCheck:
    """The result of one check of a stage's output."""

    name: str
    outcome: str
    severity: str
    measured: str
    wanted: str
    what: str


@dataclass(frozen=True, slots=True)
class LoggedStage:
    """One stage of a build: where its output is, what it was made of, and its counts and check results.

    `inputs` are the names of the stages that it read, `sources` the addresses of raw data; `schema` is a list of column
    and Arrow type.
    """

    name: str
    stage: str
    description: str
    version: str
    fingerprint: str
    built_at: str
    address: str
    rows: int | None
    bytes: int
    files: int
    facts: Mapping[str, float]
    schema: tuple[tuple[str, str], ...]
    inputs: tuple[str, ...]
    sources: tuple[str, ...]
    checks: tuple[LoggedCheck, ...]


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """A build as trackers are told of it; `output` names the stage that was published, or the export."""

    recipe: str
    output: str
    rowmill: str
    waivers: tuple[str, ...]
    steps: str
    """Where a person sees what each step of this build trains on: a page's address, or a command."""
    stages: Mapping[str, LoggedStage]
    new: tuple[str, ...]
    """The stages that an event is sent for: all of a published build, and of an export its own."""
    manifest: bytes

    @property
    def published(self) -> LoggedStage:
        return self.stages[self.output]

    def write_files(self, folder: Path) -> list[Path]:
        """Write the files that go with a run or an artifact: the output's manifest, and this record."""
        files = {"manifest.json": self.manifest, "build.json": json.dumps(self.describe(), indent=1).encode()}
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return [folder / name for name in files]

    def describe(self) -> dict[str, Any]:
        """Return the record as JSON, without the manifest."""
        stages = {name: asdict(stage) for name, stage in self.stages.items()}
        own = {"recipe": self.recipe, "rowmill": self.rowmill, "waivers": self.waivers, "steps": self.steps}
        return own | {"stages": stages}

    @property
    def note(self) -> str:
        """What a person reads who sees a loss curve beside this record."""
        return f"{self.published.description} What each step trains on: {self.steps}"


# ── MLflow ──


def log_to_mlflow(tracker: MlflowTracker, record: BuildRecord, folder: Path) -> str:
    """Log a run with dataset inputs and the manifest; return its address."""
    variables = {"TOKEN": tracker.token_env, "USERNAME": tracker.user_env, "PASSWORD": tracker.password_env}
    os.environ |= {f"MLFLOW_TRACKING_{name}": os.environ[env] for name, env in variables.items() if env is not None}
    os.environ |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": str(REQUEST_TIMEOUT_S)}
    silence_libraries()
    _require_mlflow_server(tracker.tracking_uri)
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.tracking import MlflowClient

    def make_input(name: str, stage: LoggedStage, source: str, context: str) -> DatasetInput:
        scheme, sign, _ = source.partition("://")
        columns = [{"name": column, "required": True, **_make_column_type(kind)} for column, kind in stage.schema]
        return DatasetInput(
            Dataset(
                name=name,
                digest=stage.version,
                source_type=scheme if sign else "local",
                source=json.dumps({"uri": source}),
                schema=json.dumps({"mlflow_colspec": columns}) if columns else None,
                profile=json.dumps({"num_rows": stage.rows, "num_bytes": stage.bytes, **stage.facts}),
            ),
            [InputTag("mlflow.data.context", context)],
        )

    published, client = record.published, MlflowClient(tracker.tracking_uri)
    name = tracker.experiment or record.recipe
    known = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if known is None else known.experiment_id
    key = f"{record.output}@{published.version}"
    runs = client.search_runs([experiment], f"tags.`rowmill.output` = '{key}'", max_results=1)
    if runs:
        run_id = runs[0].info.run_id
    else:
        tags = {"rowmill.output": key, "rowmill.recipe": record.recipe, "rowmill.version": published.version}
        tags |= {"mlflow.source.name": f"rowmill {record.rowmill}", "mlflow.note.content": record.note}
        run_name = f"{record.recipe} {published.version[:12]}"
        run_id = client.create_run(experiment, tags=tags, run_name=run_name).info.run_id
    inputs = [make_input(record.recipe, published, published.address, "training")]
    inputs += [
        make_input(stage.name.removesuffix(f"/{RAW_DATASET}"), stage, (*stage.sources, stage.address)[0], "source")
        for stage in record.stages.values()
        if stage.stage == RAW_DATASET
    ]
    client.log_inputs(run_id, inputs)
    for file in record.write_files(folder):
        client.log_artifact(run_id, str(file))
    client.set_terminated(run_id)
    if tracker.tracking_uri.startswith("http"):
        return f"{tracker.tracking_uri.rstrip('/')}/#/experiments/{experiment}/runs/{run_id}"
    return f"run {run_id} in {tracker.tracking_uri}"


def _require_mlflow_server(address: str) -> None:
    if not address.startswith("http"):
        return
    request = urllib.request.Request(f"{address.rstrip('/')}/version")  # noqa: S310  (checked above)
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:  # noqa: S310
            version = answer.read(100).decode("utf-8", "replace").strip()
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise
        # Services that speak MLflow's protocol need not have this page.
        return
    except OSError as error:
        raise ConnectionError(f"{address} cannot be reached: {getattr(error, 'reason', error)}") from error
    if re.fullmatch(r"\d+\.\d+\S*", version) and version.split(".")[0] not in ("2", "3"):
        raise ConfigError(
            f"execution.log_to: {address} runs MLflow {version}; supported are servers of MLflow 2 and 3; upgrade it, "
            "or name another"
        )


def _make_column_type(arrow_type: str) -> dict[str, Any]:
    """Return an Arrow type in MLflow's terms: `{"type": "array", "items": {"type": "integer"}}`."""
    of_list = re.fullmatch(r"(?:large_|fixed_size_)?list<\w+: (.*?)(?: not null)?>(?:\[\d+\])?", arrow_type)
    if of_list is not None:
        return {"type": "array", "items": _make_column_type(of_list[1])}
    base = re.split(r"[\[(<]", arrow_type)[0]
    names = {
        **dict.fromkeys(("bool",), "boolean"),
        **dict.fromkeys(("int8", "int16", "int32", "uint8", "uint16"), "integer"),
        **dict.fromkeys(("int64", "uint32", "uint64"), "long"),
        **dict.fromkeys(("halffloat", "float"), "float"),
        "double": "double",
        **dict.fromkeys(("binary", "large_binary", "fixed_size_binary"), "binary"),
        **dict.fromkeys(("timestamp", "date32", "date64"), "datetime"),
    }
    return {"type": names.get(base, "string")}


# ── Weights & Biases ──


def log_to_wandb(tracker: WandbTracker, record: BuildRecord, folder: Path) -> str:
    """Log an artifact with the manifest; return the address of its run, or the folder of an offline one."""
    if tracker.api_key_env is not None:
        os.environ["WANDB_API_KEY"] = os.environ[tracker.api_key_env]
    if tracker.base_url is not None:
        os.environ["WANDB_BASE_URL"] = tracker.base_url
    kept_in = Path(tracker.folder).absolute()
    # What an offline artifact holds, too, stays in the folder: `wandb sync` reads it.
    os.environ.setdefault("WANDB_DATA_DIR", str(kept_in / "wandb" / "data"))
    # No monitoring of this machine, no list of its packages, no reports of errors to the service's maker.
    os.environ |= dict.fromkeys(("WANDB_X_DISABLE_STATS", "WANDB_X_DISABLE_META", "WANDB_SILENT"), "true")
    os.environ |= dict.fromkeys(("WANDB_X_SAVE_REQUIREMENTS", "WANDB_ERROR_REPORTING"), "false")
    os.environ["WANDB_CONSOLE"] = "off"
    import wandb

    published = record.published
    kept_in.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=tracker.project or record.recipe,
        entity=tracker.entity,
        mode=tracker.mode,
        dir=str(kept_in),
        id=f"{record.recipe}-{published.version[:16]}",
        resume="allow" if tracker.mode == "online" else None,
        name=f"{record.recipe} {published.version[:12]}",
        job_type="dataset",
        notes=record.note,
        settings=wandb.Settings(init_timeout=2 * REQUEST_TIMEOUT_S, disable_git=True),
    )
    checks = {f"{stage.name}/{check.name}": check.outcome for stage in record.stages.values() for check in stage.checks}
    datasets = {
        stage.name.removesuffix(f"/{RAW_DATASET}"): {"version": stage.version, "sources": stage.sources, **stage.facts}
        for stage in record.stages.values()
        if stage.stage == RAW_DATASET
    }
    facts = {"recipe": record.recipe, "version": published.version, "address": published.address, **published.facts}
    artifact = wandb.Artifact(
        re.sub(r"[^\w.-]", "-", record.recipe),
        type="dataset",
        description=record.note,
        metadata={**facts, "steps": record.steps, "datasets": datasets, "checks": checks, "waivers": record.waivers},
    )
    for file in record.write_files(folder):
        artifact.add_file(str(file), name=file.name)
    run.log_artifact(artifact, aliases=["latest", published.version[:12]])
    address = run.url or str(Path(run.dir).parent)
    run.finish()
    return address


# ── OpenLineage ──


def send_to_openlineage(tracker: OpenLineageTracker, record: BuildRecord) -> str:
    """Send an event per new stage; return the address that they went to."""
    from openlineage.client import OpenLineageClient

    transport, address = _open_transport(tracker)
    client = OpenLineageClient(transport=transport)
    for name in record.new:
        client.emit(_make_run_event(record, record.stages[name], tracker.namespace))
    return address


def _open_transport(tracker: OpenLineageTracker) -> tuple[Any, str]:
    """Return what sends events to the tracker's file or server, and its address."""
    from openlineage.client.transport.file import FileConfig, FileTransport
    from openlineage.client.transport.http import ApiKeyTokenProvider, HttpConfig, HttpTransport, TokenProvider

    if tracker.url is None:
        path = Path(str(tracker.file)).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileTransport(FileConfig(str(path), append=True)), str(path)
    key = {} if tracker.api_key_env is None else {"apiKey": os.environ[tracker.api_key_env]}
    config = HttpConfig(
        tracker.url,
        tracker.endpoint,
        timeout=REQUEST_TIMEOUT_S,
        retry={"total": 0},
        auth=ApiKeyTokenProvider(key) if key else TokenProvider({}),
    )
    return HttpTransport(config), tracker.url


def _make_run_event(record: BuildRecord, stage: LoggedStage, namespace: str) -> Any:
    """Return the event of a stage: a completed run with its tests, what it read, and what it wrote."""
    from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
    from openlineage.client.facet_v2 import (
        documentation_job,
        job_type_job,
        output_statistics_output_dataset,
        processing_engine_run,
        test_run,
    )
    from openlineage.client.uuid import generate_static_uuid

    statuses = {"passed": "pass", "failed": "fail", "not_applicable": "skip"}
    tests = [
        test_run.TestExecution(
            check.name,
            statuses[check.outcome],
            severity="error" if check.severity == "error" else "warn",
            description=check.what,
            expected=check.wanted,
            actual=check.measured,
        )
        for check in stage.checks
    ]
    built_at = datetime.fromisoformat(stage.built_at)
    identity = f"{stage.name}@{stage.version}@{stage.fingerprint}"
    written = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
        rowCount=stage.rows, size=stage.bytes, fileCount=stage.files
    )
    return RunEvent(
        eventType=RunState.COMPLETE,
        eventTime=stage.built_at,
        producer=f"urn:rowmill:{record.rowmill}",
        run=Run(
            str(generate_static_uuid(built_at, identity.encode())),
            {
                "processing_engine": processing_engine_run.ProcessingEngineRunFacet(record.rowmill, "rowmill"),
                **({"test": test_run.TestRunFacet(tests)} if tests else {}),
            },
        ),
        job=Job(
            namespace,
            stage.name,
            {
                "documentation": documentation_job.DocumentationJobFacet(stage.description),
                "jobType": job_type_job.JobTypeJobFacet("BATCH", "ROWMILL", "STAGE"),
            },
        ),
        inputs=[
            *(InputDataset(*_name_dataset(source)) for source in stage.sources),
            *(_describe_input(record.stages[name]) for name in stage.inputs),
        ],
        outputs=[
            OutputDataset(
                *_name_dataset(stage.address),
                facets=_describe_output(stage),
                outputFacets={"outputStatistics": written},
            )
        ],
    )


def _describe_input(stage: LoggedStage) -> Any:
    """Return a stage's output as the input of another one, with the results of its checks."""
    from openlineage.client.event_v2 import InputDataset
    from openlineage.client.facet_v2 import data_quality_assertions_dataset

    assertions = [
        data_quality_assertions_dataset.Assertion(
            check.name, check.outcome == "passed", severity="error" if check.severity == "error" else "warn"
        )
        for check in stage.checks
        if check.outcome != "not_applicable"
    ]
    facet = data_quality_assertions_dataset.DataQualityAssertionsDatasetFacet(assertions)
    return InputDataset(
        *_name_dataset(stage.address),
        facets=_describe_output(stage),
        inputFacets={"dataQualityAssertions": facet} if assertions else {},
    )


def _describe_output(stage: LoggedStage) -> dict[str, Any]:
    """Return the version and the columns of a stage's output."""
    from openlineage.client.facet_v2 import dataset_version_dataset, schema_dataset

    columns = [schema_dataset.SchemaDatasetFacetFields(name, kind) for name, kind in stage.schema]
    return {
        "version": dataset_version_dataset.DatasetVersionDatasetFacet(stage.version),
        **({"schema": schema_dataset.SchemaDatasetFacet(columns)} if columns else {}),
    }


def _name_dataset(address: str) -> tuple[str, str]:
    """Return the namespace and the name of a dataset: `s3://bucket` and `path`; of a local one, `file` and its path."""
    scheme, sign, rest = address.partition("://")
    if not sign:
        return "file", address
    authority, _, path = rest.partition("/")
    return f"{scheme}://{authority}", path or "/"


# ── The process ──


def main() -> None:
    """Read a tracker and a record from stdin, log it, and write as JSON its address, or what went wrong, to stdout."""
    # Clients print on stdout, too.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Of the process that started this one; the folder takes temporary files.
    told: tuple[AnyTracker, BuildRecord, str] = pickle.load(sys.stdin.buffer)  # noqa: S301
    tracker, record, folder = told
    try:
        match tracker:
            case MlflowTracker():
                address = log_to_mlflow(tracker, record, Path(folder))
            case WandbTracker():
                address = log_to_wandb(tracker, record, Path(folder))
            case OpenLineageTracker():
                address = send_to_openlineage(tracker, record)
        json.dump({"address": address}, answer)
    except Exception as error:  # noqa: BLE001  (whatever a client raises is its answer)
        name = "" if isinstance(error, PipelineError) else f"{type(error).__name__}: "
        text = " ".join(public_text(f"{name}{error}").split())
        json.dump({"problem": text[:500], "may_pass": not isinstance(error, PipelineError)}, answer)
    answer.flush()
