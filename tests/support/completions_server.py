"""A real HTTP server on this machine that speaks `/v1/completions` with a scripted model."""

import json
import socket
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """What the server does with a request: `texts` as choices, or the raw `body`; `drops` closes without an answer."""

    texts: Sequence[str] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes | None = None
    drops: bool = False
    promises_bytes: int = 0
    """Bytes that the answer says it has beyond those that come."""
    is_slow: bool = False
    """Whether the answer comes only when the server closes."""
    finish_reason: str | None = "stop"


Script = Callable[[dict[str, Any]], Reply]


@dataclass
class CompletionsServer:
    """A running server: its address, and the requests that came, with their headers."""

    base_url: str
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    paths: list[str] = field(default_factory=list[str])


@contextmanager
def serving(script: Script) -> Generator[CompletionsServer]:
    """Serve on a free port of this machine until the block ends."""
    running = CompletionsServer("")
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            running.paths.append(self.path)
            running.requests.append(request)
            running.headers.append(dict(self.headers))
            self.answer(script(request))

        def answer(self, reply: Reply) -> None:
            if reply.is_slow:
                closing.wait(10)
            if reply.drops:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            choices = [
                {"index": index, "text": text, "finish_reason": reply.finish_reason}
                for index, text in enumerate(reply.texts)
            ]
            # Servers may send choices in any order.
            body = json.dumps({"choices": choices[::-1]}).encode() if reply.status == 200 else b""
            body = body if reply.body is None else reply.body
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) + reply.promises_bytes))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class's name)
            """Keep quiet."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Keep quiet of clients that have given up."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    running.base_url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield running
    finally:
        closing.set()
        server.shutdown()
        thread.join(timeout=60)
        server.server_close()
