"""Starts the application: a port on this machine, an address to print, a token where others can reach the port.

python -m rowmill.viewer.server CONFIGS ROOT HOST PORT      with the reading end of a pipe as standard input
"""

import os
import secrets
import sys
import threading
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

import uvicorn

from rowmill.viewer.app import make_app
from rowmill.viewer.builds import Builds


def needs_token(host: str) -> bool:
    """Return whether others than this machine can reach an address."""
    if host == "localhost":
        return False
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return True


def serve(
    builds: Builds, *, host: str, port: int, page: str = "", announce: Callable[[str], None], token: str | None = None
) -> None:
    """Serve until interrupted; `announce` gets the address of a page once the port is open."""
    token = token if token is not None else secrets.token_urlsafe(24) if needs_token(host) else ""
    config = uvicorn.Config(
        make_app(builds, host=host, token=token), host=host, port=port, log_config=None, access_log=False,
        server_header=False, lifespan="off", timeout_graceful_shutdown=2,
    )  # fmt: skip
    listening = config.bind_socket()
    # From now on a browser waits for its page in place of being refused.
    listening.listen()
    shown = f"[{host}]" if ":" in host else host
    asked = f"{'&' if '?' in page else '?'}token={token}" if token else ""
    announce(f"http://{shown}:{listening.getsockname()[1]}/{page}{asked}")
    uvicorn.Server(config).run([listening])


def serve_beside_dagster(configs: str, root: str, host: str, port: int) -> None:
    """Serve a project's recipes until standard input ends.

    Dagster's process holds the writing end of the pipe; the operating system closes it however that process ends.
    """
    builds = Builds.of_folder(Path(configs), root)

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
    # Dagster has no login either: who may reach one of the two ports may reach the other.
    serve(builds, host=host, port=port, announce=lambda _: None, token="")


if __name__ == "__main__":
    serve_beside_dagster(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
