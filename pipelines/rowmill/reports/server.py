"""Serves reports over HTTP on this machine: Dagster's pages can link to HTTP, but not to files.

python -m rowmill.reports.server FOLDER HOST PORT      with the reading end of a pipe as standard input
"""

import sys
import threading
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any, BinaryIO


class ReportRequestHandler(SimpleHTTPRequestHandler):
    """Serves files, and refuses to list folders."""

    server_name = ""
    """The address that the server listens on, accepted as a Host name along with localhost."""

    def handle(self) -> None:
        """Answer the requests of a connection; a browser that closes it early is no error."""
        with suppress(ConnectionError):
            super().handle()

    def send_head(self) -> BytesIO | BinaryIO | None:
        """Open the file of an address, or answer 404: an address with a null byte or half a character names none."""
        try:
            return super().send_head()
        except ValueError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return None

    def list_directory(self, path: Any) -> None:  # noqa: ARG002  (the base class hands it)
        """Answer 404: reports are reached by their links only."""
        self.send_error(HTTPStatus.NOT_FOUND)

    def end_headers(self) -> None:
        """Disable caching, since reports are rewritten, and embedding in other pages."""
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def parse_request(self) -> bool:
        """Accept only requests whose Host names this machine: any other name is a DNS rebinding attack."""
        if not super().parse_request():
            return False
        name = self.headers.get("Host", "").rpartition(":")[0].strip("[]")
        if name in ("localhost", "127.0.0.1", "::1", self.server_name):
            return True
        self.send_error(HTTPStatus.FORBIDDEN)
        return False

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the name is the base class's)
        """Log nothing."""


def serve_reports(folder: str, host: str, port: int) -> None:
    """Serve a folder until standard input ends."""
    ReportRequestHandler.server_name = host
    server = ThreadingHTTPServer((host, port), partial(ReportRequestHandler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # Dagster's process holds the writing end of the pipe; the operating system closes it however that process ends.
    # Ctrl-C in a terminal reaches both processes.
    with suppress(KeyboardInterrupt):
        sys.stdin.buffer.read()
    server.shutdown()


if __name__ == "__main__":
    serve_reports(sys.argv[1], sys.argv[2], int(sys.argv[3]))
