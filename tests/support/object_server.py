"""A local S3-like object store with failures on demand."""

import hashlib
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

import pytest

Outage = Literal["500", "503", "cut", "hangup", "refuse", "stall"]
"""An answer with an error, a body cut short, a closed connection, no listener, no answer at all."""
Refusal = Literal["expired"]
"""An answer that trying again does not change."""

_ERRORS = {
    "500": (500, "InternalError", "We are sorry."),
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
}

MAX_KEYS = 1000
"""Names in one answer to a listing."""

KEY_ID, SECRET = "AKIDEXAMPLE", "hunter2"


class ObjectServer:
    """Objects in memory, by bucket and key, how many requests were made and failed, and when to begin to fail."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests = 0
        self.failed = 0
        self.latency_s = 0.0
        self.takes_conditions = True
        self._failing: tuple[Outage | Refusal, ...] = ()
        self._from, self._until, self._every = 0, 0, 1
        self._lock = Lock()
        self._healed = Event()
        self._http: ThreadingHTTPServer | None = None
        self._listen(0)

    @property
    def port(self) -> int:
        return self._port

    def fail(self, *how: Outage | Refusal, after: int = 0, times: int = 1 << 30, every: int = 1) -> None:
        """Answer `after` more requests; of the `times` after them fail the first and each `every`-th, `how` in turn."""
        with self._lock:
            self._failing, self._healed = how, Event()
            self._every = every
            self._from = self.requests + after
            self._until = self._from + times
        if how == ("refuse",) and after == 0:
            self._hang_up()

    def heal(self) -> None:
        """Answer all requests again, including those that wait."""
        with self._lock:
            self._failing = ()
        self._healed.set()
        if self._http is None:
            self._listen(self._port)

    def close(self) -> None:
        self.heal()
        self._hang_up()

    def count(self) -> "Outage | Refusal | None":
        """Count a request; say how it has to fail."""
        with self._lock:
            number = self.requests
            self.requests += 1
            turn, rest = divmod(number - self._from, self._every)
            is_chosen = bool(self._failing) and self._from <= number < self._until and not rest
            how = self._failing[turn % len(self._failing)] if is_chosen else None
            self.failed += how is not None
        if how == "refuse" and self._http is not None:
            Thread(target=self._hang_up, daemon=True).start()
        return how

    def wait_until_healed(self) -> None:
        self._healed.wait(timeout=60)

    def _listen(self, port: int) -> None:
        handler = type("Handler", (_Handler,), {"server_state": self})
        self._http = _Server(("127.0.0.1", port), handler)
        self._port = self._http.server_port
        Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def _hang_up(self) -> None:
        with self._lock:
            http, self._http = self._http, None
        if http is not None:
            http.shutdown()
            http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that gave up: they are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: ObjectServer

    def do_GET(self) -> None:
        how = self.server_state.count()
        body = self._body()
        time.sleep(self.server_state.latency_s)
        if how is None or how == "cut":
            self._serve(body, is_cut=how == "cut")
        elif how == "stall":
            self.server_state.wait_until_healed()
            self.close_connection = True
        elif how in ("hangup", "refuse"):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            status, code, message = _ERRORS[how]
            self._send(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 (the names are the base class's)

    def _body(self) -> bytes:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" not in (self.headers.get("Content-Encoding") or ""):
            return content
        found, rest = b"", content
        while rest:
            head, _, rest = rest.partition(b"\r\n")
            size = int(head.split(b";")[0] or b"0", 16)
            if not size:
                break
            found, rest = found + rest[:size], rest[size + 2 :]
        return found

    def _serve(self, body: bytes, *, is_cut: bool) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path).strip("/"), parse_qs(parts.query, keep_blank_values=True)
        bucket, _, key = path.partition("/")
        objects = self.server_state.objects
        if self.command == "PUT":
            if {"If-Match", "If-None-Match"} & set(self.headers) and not self.server_state.takes_conditions:
                message = "A header you provided implies functionality that is not implemented"
                self._send(501, f"<Error><Code>NotImplemented</Code><Message>{message}</Message></Error>".encode())
                return
            if key and not self._may_put(objects.get(path)):
                self._send(412, b"<Error><Code>PreconditionFailed</Code></Error>", is_cut=is_cut)
                return
            if key:
                objects[path] = body
            self._send(200, b"", {"ETag": make_tag(body)}, is_cut=is_cut)
        elif self.command == "DELETE":
            objects.pop(path, None)
            self._send(204, b"", is_cut=is_cut)
        elif self.command == "POST" and "delete" in query:
            for one in ET.fromstring(body).iter():
                if one.tag.endswith("Key"):
                    objects.pop(f"{bucket}/{one.text}", None)
            self._send(200, b"<DeleteResult/>", is_cut=is_cut)
        elif key:
            self._object(objects.get(path), is_cut=is_cut)
        elif "list-type" in query:
            self._send(200, _listing(objects, bucket, query).encode(), is_cut=is_cut)
        else:
            self._send(200, b"", is_cut=is_cut)

    def _may_put(self, existing: bytes | None) -> bool:
        wanted = self.headers.get("If-Match")
        if self.headers.get("If-None-Match") == "*" and existing is not None:
            return False
        return wanted is None or (existing is not None and wanted == make_tag(existing))

    def _object(self, content: bytes | None, *, is_cut: bool) -> None:
        if content is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", is_cut=is_cut)
            return
        asked = self.headers.get("Range")
        headers = {"ETag": make_tag(content), "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}
        if asked is None:
            self._send(200, content, headers, is_cut=is_cut)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last or len(content) - 1), len(content) - 1)
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
        self._send(206, content[begin : end + 1], headers, is_cut=is_cut)

    def _send(
        self, status: int, content: bytes, headers: "dict[str, str] | None" = None, *, is_cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        if is_cut and (not content or self.command == "HEAD"):
            # There is no body to cut: the headers are.
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.end_headers()
        if self.command == "HEAD" or status == 204:
            return
        self.wfile.write(content[: len(content) // 2] if is_cut else content)
        self.close_connection = is_cut

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is the base class's)
        del format, args


def make_tag(content: bytes) -> str:
    """Return an object's version tag."""
    return f'"{hashlib.md5(content).hexdigest()}"'


def _listing(objects: "dict[str, bytes]", bucket: str, query: "dict[str, list[str]]") -> str:
    """Return one answer: the files and folders after a token, at most `MAX_KEYS`."""
    prefix, delimiter, after = (query.get(name, [""])[0] for name in ("prefix", "delimiter", "continuation-token"))
    lines: dict[str, str] = {}
    for path in sorted(objects):
        own, _, key = path.partition("/")
        if own != bucket or not key.startswith(prefix):
            continue
        head, sign, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        name = f"{prefix}{head}{delimiter}" if sign else key
        if name <= after or name in lines:
            continue
        if len(lines) == MAX_KEYS:
            after = next(reversed(lines))
            break
        content = objects[path]
        lines[name] = (
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            if sign
            else f"<Contents><Key>{escape(key)}</Key><Size>{len(content)}</Size><ETag>{make_tag(content)}</ETag>"
            "<LastModified>2025-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
        )
    else:
        after = ""
    token = f"<NextContinuationToken>{escape(after)}</NextContinuationToken>" if after else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(lines)}</KeyCount>"
        f"<MaxKeys>{MAX_KEYS}</MaxKeys><IsTruncated>{'true' if after else 'false'}</IsTruncated>{token}"
        f"{''.join(lines.values())}</ListBucketResult>"
    )


def list_s3_variables(server: ObjectServer) -> dict[str, str]:
    """Return the environment variables that lead s3fs to a server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def serving() -> Generator[ObjectServer]:
    """Provide a server."""
    made = ObjectServer()
    try:
        yield made
    finally:
        made.close()


@contextmanager
def serving_s3fs(patch: pytest.MonkeyPatch, variables: Mapping[str, str] | None = None) -> Generator[ObjectServer]:
    """Provide a server that s3fs is led to, with further environment variables; skip the test without s3fs."""
    s3fs = pytest.importorskip("s3fs", reason="object stores need s3fs: pip install 's3fs'")
    # Opened file systems are kept with the address that the environment named then.
    s3fs.S3FileSystem.clear_instance_cache()
    with serving() as made:
        for name, value in {**list_s3_variables(made), **(variables or {})}.items():
            patch.setenv(name, value)
        yield made
