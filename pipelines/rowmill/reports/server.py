"""Reports over HTTP on this machine, so that Dagster's pages can link to them: it opens no file links itself.

What belongs here: serving the folder of reports, read only, as long as whoever started us lives. What does not:
writing reports (`report_page.py`), serving them to anyone else; behind a proxy of your own, say where with
`execution.reports_url`.

    python -m rowmill.reports.server FOLDER HOST PORT      with the reading end of a pipe as standard input
"""

import sys
import threading
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ReportRequestHandler(SimpleHTTPRequestHandler):
    """Serves files and lists no folder."""

    server_name = ""
    """What else this machine is called here: the address that we were told to listen on."""

    def list_directory(self, path: Any) -> None:  # noqa: ARG002  (the base class hands it)
        """Refuse: a report is reached by its link."""
        self.send_error(HTTPStatus.NOT_FOUND)

    def end_headers(self) -> None:
        """Say that a report may have been written anew, and that no other page may embed it."""
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def parse_request(self) -> bool:
        """Accept only requests that name this machine: a foreign name that leads here is an attack on a browser."""
        if not super().parse_request():
            return False
        name = self.headers.get("Host", "").rpartition(":")[0].strip("[]")
        if name in ("localhost", "127.0.0.1", "::1", self.server_name):
            return True
        self.send_error(HTTPStatus.FORBIDDEN)
        return False

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the name is the base class's)
        """Stay quiet."""


def serve_reports(folder: str, host: str, port: int) -> None:
    """Serve a folder until standard input ends."""
    ReportRequestHandler.server_name = host
    server = ThreadingHTTPServer((host, port), partial(ReportRequestHandler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # The writing end is held by the server whose pages link here; the operating system closes it however it ends.
    sys.stdin.buffer.read()
    server.shutdown()


if __name__ == "__main__":
    serve_reports(sys.argv[1], sys.argv[2], int(sys.argv[3]))
