"""The viewer in a test: one request to its application, or a server on a port of its own."""

import asyncio
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from rowmill.viewer.app import make_app
from rowmill.viewer.builds import Builds
from tests.support.ports import take_free_ports


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    status: int
    headers: dict[str, str]
    text: str


def ask(builds: Builds, address: str, *, method: str = "GET", token: str = "", **headers: str) -> Answer:
    """Ask the application for a page, as a browser on this machine does unless `headers` say otherwise."""
    path, _, query = address.partition("?")
    named = {"host": "127.0.0.1:3002"} | {name.replace("_", "-"): value for name, value in headers.items()}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "client": None,
        "headers": [(name.encode(), value.encode()) for name, value in named.items()], "server": ("127.0.0.1", 3002),
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> Any:
        # Nobody reads the body of a GET, and the browser stays.
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def call() -> None:
        await make_app(builds, token=token)(scope, receive, send)

    asyncio.run(call())
    body = b"".join(message.get("body", b"") for message in sent[1:])
    shown = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], shown, body.decode())


@contextmanager
def serving(folder: Path, recipe: str, *options: str) -> Generator[str]:
    """Run `rowmill view` in a project, and lend its address."""
    port = take_free_ports()
    command = [sys.executable, "-m", "rowmill.cli.main", "view", recipe, "--port", str(port), *options]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            address = f"http://127.0.0.1:{port}"
            yield address
        finally:
            process.kill()
