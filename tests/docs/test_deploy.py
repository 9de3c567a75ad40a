"""The files of the deploy page fit each other, the programs that they start, and the project's own settings."""

import configparser
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

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


class Healthcheck(Section):
    test: list[str] = Field(min_length=2)
    interval: Annotated[str, Field(pattern=DURATION)]
    retries: int


class Dependency(Section):
    condition: Literal["service_started", "service_healthy", "service_completed_successfully"]


class Service(Section):
    image: Annotated[str, Field(pattern=r"^[a-z0-9./-]+(:[\w.-]+)?$")]
    build: str | None = None
    command: str | None = None
    restart: Literal["no", "always", "on-failure", "unless-stopped"]
    # Texts only: Compose takes a bare true or 5 for other types.
    environment: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], str] = {}
    volumes: list[Annotated[str, Field(pattern=r"^(\$\{PROJECT:\?\}|[\w./-]+):/[\w./-]*(:ro)?$")]] = []
    ports: list[Annotated[str, Field(pattern=r"^\d+:\d+$")]] = []
    depends_on: list[str] | dict[str, Dependency] = []
    healthcheck: Healthcheck | None = None
    stop_grace_period: Annotated[str, Field(pattern=DURATION)] | None = None


class Compose(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    services: dict[str, Service]
    volumes: dict[str, None]
    common: Service = Field(alias="x-rowmill")


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
        waited = service.depends_on.items() if isinstance(service.depends_on, dict) else ()
        for other, dependency in waited:
            assert dependency.condition != "service_healthy" or services[other].healthcheck is not None, name
        assert service.build is None or (DEPLOY / service.build / "Dockerfile").is_file(), name
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
