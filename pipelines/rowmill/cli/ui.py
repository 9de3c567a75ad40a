"""`rowmill ui`: prepares DAGSTER_HOME, then replaces this process with Dagster's development server."""

import errno
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from rowmill.core.errors import ConfigError, MissingPackageError
from rowmill.core.installation import format_install_command
from rowmill.core.telemetry import NO_TELEMETRY


def default_settings() -> Path:
    """Return the `dagster.yaml` to copy into a new DAGSTER_HOME; the Dagster layer is found, not imported."""
    spec = importlib.util.find_spec("dagster_rowmill")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "rowmill ui: the package dagster_rowmill is not installed; it defines the assets that Dagster shows; "
            f"run {format_install_command('dagster')}"
        )
    return Path(spec.origin).parent / "dagster.yaml"


SERVER_ENVIRONMENT = NO_TELEMETRY | {
    # `python -m` would put the project's folder before all libraries, where a file named `click` hides one.
    "PYTHONSAFEPATH": "1",
}
"""Turns telemetry off, and keeps the project's files from being imported as libraries."""


def serve_ui(root: Path, *, host: str = "127.0.0.1", port: int = 3000) -> None:
    """Replace this process with `dagster dev` on the project in `root`.

    SIGINT or SIGTERM ends it with all that it started, also where it was started in the background.
    """
    missing = [name for name in ("dagster", "dagster_webserver") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"rowmill ui: the package {missing[0]} is not installed; rowmill ui runs Dagster's webserver; run "
            f"{format_install_command('dagster')}"
        )
    if not (root / "workspace.yaml").is_file() and not (root / "configs").is_dir():
        raise ConfigError(
            f"{root}: no project; rowmill ui needs a folder with configs/, or a workspace.yaml; run it in the "
            "project's folder, or start a project with rowmill init"
        )
    require_free_port(host, port, "Dagster", "stop that program, or choose another port with --port")
    environment = os.environ | SERVER_ENVIRONMENT | {"DAGSTER_HOME": str(prepare_home(root))}
    if "ROWMILL_REPORTS_URL" not in environment:
        environment["ROWMILL_REPORTS_URL"] = environment["ROWMILL_VIEWER_URL"] = _start_viewer(root, host, port + 1)
    # Dagster shows what builds made before its history began, or on another machine. If that fails, it has said so, and
    # the daemon reports the outputs later.
    subprocess.run([sys.executable, "-m", "dagster_rowmill.outside_builds"], env=environment, cwd=root, check=False)
    os.chdir(root)
    # Dagster has no login, and anyone who reaches the port can run code, so the default address is loopback.
    loaded = ["-w", "workspace.yaml"] if (root / "workspace.yaml").is_file() else ["-m", "dagster_rowmill.definitions"]
    # `dagster dev` warns that `dg dev` replaces it; that command is in a package that nothing else here needs.
    quiet = ["-W", "ignore:Function `dev_command` is superseded"]
    command = [sys.executable, *quiet, "-m", "dagster", "dev", "-h", host, "-p", str(port), *loaded]
    # A shell's job in the background ignores SIGINT. So would Dagster, and SIGTERM with it, which it handles as SIGINT.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execvpe(command[0], command, environment)  # noqa: S606  (the arguments are ours, and no shell is wanted)


def require_free_port(host: str, port: int, server: str, remedy: str) -> None:
    """Refuse an address that cannot be listened on, so that no server dies with a traceback of another library."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the servers do: a connection that was closed just now does not keep its port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # The resolver wraps a port above 65535 instead of refusing it.
            probe.bind((address[0], port, *address[2:]))
    except (OSError, OverflowError) as error:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        problem = "another program already listens there" if in_use else str(getattr(error, "strerror", None) or error)
        raise ConfigError(f"{host}:{port}: {problem}; {server} needs a free port; {remedy}") from error


def _start_viewer(root: Path, host: str, port: int) -> str:
    """Start the pages of the project's builds, and return their address, to which Dagster's pages link."""
    configs = Path(os.environ.get("ROWMILL_CONFIGS") or root / "configs").absolute()
    store = os.environ.get("ROWMILL_STORE") or str(configs.parent / ".rowmill")
    remedy = f"stop that program, or choose another --port: builds are shown on the next one, here {port}"
    require_free_port(host, port, "the viewer of builds", remedy)
    reading, writing = os.pipe()
    # Only the Dagster process inherits the writing end, so the viewer ends when Dagster does.
    os.set_inheritable(writing, True)  # noqa: FBT003  (the standard library's own parameter)
    command = [sys.executable, "-m", "rowmill.viewer.server", str(configs), store, host, str(port)]
    subprocess.Popen(command, stdin=reading)  # noqa: S603  (the arguments are ours)
    os.close(reading)
    return f"http://{host}:{port}"


def prepare_home(root: Path) -> Path:
    """Return an absolute DAGSTER_HOME that holds a `dagster.yaml`: the variable's folder, or `.dagster` in `root`.

    Without one, Dagster keeps its history in a temporary folder and deletes it on exit. Existing settings are never
    overwritten.
    """
    home = Path(os.environ.get("DAGSTER_HOME") or root / ".dagster").expanduser().absolute()
    home.mkdir(parents=True, exist_ok=True)
    settings = home / "dagster.yaml"
    if not settings.exists():
        shutil.copyfile(default_settings(), settings)
    return home
