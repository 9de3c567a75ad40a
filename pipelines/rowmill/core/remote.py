"""Object stores: requests with limits of time, and conditional writes.

Access to remote storage: every request has a time limit, a few retries, and one error at the end.

    retry_request(fs, address, "read", function, …)
      attempt ─► answer                                        returned
              ├► missing (404, FileNotFoundError)              FileNotFoundError: the caller decides what it means
              ├► refused (401, 403, PermissionError, …)        SourceError at once
              └► anything else: 500, 503, broken, no answer    retried, then UnreachableError

A failing server must not look like a missing file. fsspec's `exists`, `isdir`, `walk` and `glob` confuse the two, so
neither this module nor its callers use them.

Each library has its own time limits and retries, and some have none. Their limits are set where possible, and every
call runs on a thread that is abandoned after its time limit, so that a silent server cannot block a build. Only this
module retries: nested retries took half an hour to report a silent server.

Replaces a file on S3 only if it is still the one that this process saw, by conditional put.

    put, If-Match: the tag seen, or If-None-Match: * where there was no file
      ├► 200                                  written
      ├► 412, or 404 where a file was seen    read it: this process's own content if an earlier answer was lost,
      │                                       else another process's
      └► 501                                  ConfigError: the server takes no conditions

Without conditions the later of two builds would replace the pointer of the earlier one unnoticed. A server that
refuses them is therefore refused, unless the user says that there is never more than one build.
"""

import glob
import hashlib
import io
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import parse_qsl, urlencode

from rowmill.core.errors import LASTING_ERRORS, ConfigError, PipelineError, SourceError, UnreachableError

ResultT = TypeVar("ResultT")


def call_with_time_limit(function: Callable[[], ResultT], limit_s: float) -> ResultT:
    """Call a function on a thread; after the time limit the thread is abandoned, and ends when its call returns."""
    outcome: Future[ResultT] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001  (it is raised again in the waiting thread)
            outcome.set_exception(error)

    # Not an executor: at exit the interpreter would wait for its threads, and one may be blocked forever.
    threading.Thread(target=call, daemon=True, name="rowmill-limited-call").start()
    try:
        return outcome.result(limit_s)
    except TimeoutError:
        if outcome.done():
            raise
        raise TimeoutError(f"no answer within {limit_s:.0f} s") from None


# ── Access to remote storage: every request has a time limit, a few retries, and one error at the end ──


TIMEOUT_VARIABLE, TRIES_VARIABLE = "ROWMILL_STORAGE_TIMEOUT_S", "ROWMILL_STORAGE_TRIES"
"""Environment variables: seconds to wait for a silent storage, and the maximum number of attempts."""

FIRST_PAUSE_S = 0.5
"""Seconds before the second attempt, on average; each further pause is twice as long."""

_SLOWEST_BYTES_PER_S = 1 << 20
UNKNOWN_SIZE = 256 << 20
"""Assumed size in bytes of a request of unknown size, for its time limit."""
_READ_AHEAD_BYTES = 1 << 20
_CONCURRENT_ABOVE_BYTES = 50 << 20
"""The size of the pieces in which s3fs reads a file concurrently."""
_LOCAL_PROTOCOLS = frozenset({"file", "local", "memory"})
"""Protocols that stay within this process and its disk."""


@dataclass(frozen=True, slots=True)
class StorageRetryPolicy:
    """How long to wait for a silent storage, and how many attempts to make."""

    timeout_s: float = 30.0
    tries: int = 5

    def limit_of(self, size_bytes: int) -> float:
        """Return the time limit of one attempt in seconds; a storage that transfers 1 MiB/s never exceeds it."""
        return 2 * self.timeout_s + size_bytes / _SLOWEST_BYTES_PER_S


def read_retry_policy() -> StorageRetryPolicy:
    """Read the policy from the environment."""
    default = StorageRetryPolicy()
    timeout_s = _read_positive(TIMEOUT_VARIABLE, float, default.timeout_s, "seconds above 0")
    return StorageRetryPolicy(timeout_s, int(_read_positive(TRIES_VARIABLE, int, default.tries, "positive integers")))


def _read_positive(name: str, kind: Callable[[str], float], default: float, allowed: str) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name}: {text!r} is invalid; allowed are {allowed}; correct or unset it")
    return value


# ── File systems ───────────────────────────────────────────────────────────────────────────────────


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, with its library's time limits set where possible, and the path in it."""
    import fsspec

    protocols = {link.partition("://")[0] if "://" in link else link for link in url.split("::")}
    options = {name: _merge_options(name) for name in protocols if name in _OPTION_MAKERS}
    fs, path = cast("tuple[Any, str]", fsspec.core.url_to_fs(url, **options))
    if is_remote_filesystem(fs) and isinstance(getattr(fs, "retries", None), int):
        # s3fs and gcsfs retry by themselves; only `retry_request` should.
        fs.retries = 1
    return fs, path


def is_remote_filesystem(fs: Any) -> bool:
    """Return whether a file system is remote, so that a call may block."""
    return _LOCAL_PROTOCOLS.isdisjoint(_list_protocols(fs))


def _list_protocols(fs: Any) -> tuple[str, ...]:
    protocol: str | tuple[str, ...] = fs.protocol
    return protocol if isinstance(protocol, tuple) else (protocol,)


def _make_s3_options(wait: StorageRetryPolicy) -> dict[str, Any]:
    limits = {"connect_timeout": min(10.0, wait.timeout_s), "read_timeout": wait.timeout_s}
    return {
        "config_kwargs": {**limits, "retries": {"total_max_attempts": 1, "mode": "standard"}},
        # Other processes write there as well.
        "use_listings_cache": False,
    }


def _make_http_options(wait: StorageRetryPolicy) -> dict[str, Any]:
    import aiohttp

    limits = aiohttp.ClientTimeout(total=None, sock_connect=min(10.0, wait.timeout_s), sock_read=wait.timeout_s)
    return {"client_kwargs": {"timeout": limits}, "use_listings_cache": False}


_OPTION_MAKERS: dict[str, Callable[[StorageRetryPolicy], dict[str, Any]]] = {
    "s3": _make_s3_options,
    "s3a": _make_s3_options,
    "http": _make_http_options,
    "https": _make_http_options,
}


def _merge_options(protocol: str) -> dict[str, Any]:
    """Return a protocol's options; the user's fsspec configuration takes precedence over ours."""
    try:
        ours = _OPTION_MAKERS[protocol](read_retry_policy())
    except ImportError:
        # fsspec's error names the package to install.
        return {}
    import fsspec.config

    theirs = cast("dict[str, Any]", fsspec.config.conf.get(protocol, {}))
    merged = {**ours, **theirs}
    for name in ("config_kwargs", "client_kwargs"):
        if name in ours and isinstance(theirs.get(name), dict):
            merged[name] = {**ours[name], **theirs[name]}
    return merged


# ── Requests ───────────────────────────────────────────────────────────────────────────────────────


def retry_request(
    fs: Any, address: str, action: str, function: Callable[[], ResultT], *, size_bytes: int = UNKNOWN_SIZE
) -> ResultT:
    """Send an idempotent request; for messages, `address` is the public URL and `action` a participle such as "read".

    Raises FileNotFoundError if the storage says that the path is absent, UnreachableError if no attempt succeeds.
    """
    wait = read_retry_policy()
    began, attempt = time.monotonic(), 0
    while True:
        attempt += 1
        try:
            limit_s = wait.limit_of(size_bytes)
            return call_with_time_limit(function, limit_s) if is_remote_filesystem(fs) else function()
        except (PipelineError, TypeError):
            # A TypeError is a bug of ours.
            raise
        except Exception as error:  # noqa: BLE001  (every storage has errors of its own)
            refusal = _unwrap_refusal(fs, error)
            if is_absent(refusal):
                raise FileNotFoundError(public_reason(refusal)) from None
            # An attempt on a silent server takes the whole time limit, so there are two attempts, not five.
            is_over = attempt >= wait.tries or time.monotonic() - began > 1.5 * wait.timeout_s
            if is_over or not _may_answer_later(refusal):
                # The storage's error may contain the URL's secrets, so an equivalent error replaces it.
                # Its class still tells transient and lasting failures apart.
                kind = ConnectionError if _may_answer_later(refusal) else PermissionError
                raise unreachable_error(address, action, refusal, attempt) from kind(public_reason(refusal))
        # Threads that were told to slow down at once must not come back at once.
        time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))  # noqa: S311 (no secret)


def read_file(fs: Any, path: str, *, size_bytes: int = UNKNOWN_SIZE) -> bytes:
    """Return a whole file. One request, unless it is known to be large and the library reads pieces concurrently."""
    is_large = UNKNOWN_SIZE != size_bytes > _CONCURRENT_ABOVE_BYTES
    # To cut a file into pieces s3fs first asks for its size.
    options = {"max_concurrency": 1} if hasattr(fs, "max_concurrency") and not is_large else {}
    return cast(bytes, fs.cat_file(path, **options))


def read_range(url: str, address: str, begin: int, end: int) -> bytes:
    """Read the bytes `[begin, end)` of a file in one request; fewer count as a failure."""
    fs, path = open_filesystem(url)
    fetch = partial(_fetch_range, fs, path, begin, end)
    return retry_request(fs, address, "read", fetch, size_bytes=end - begin)


def _fetch_range(fs: Any, path: str, begin: int, end: int) -> bytes:
    content = cast(bytes, fs.cat_file(path, start=begin, end=end))
    if len(content) != end - begin:
        raise ConnectionError(f"{len(content):,} bytes came of the {end - begin:,} from {begin:,} on")
    return content


def read_end(url: str, address: str, length: int) -> tuple[bytes, int]:
    """Return the last bytes of a file, at most `length`, and the file's size: a request for each."""
    fs, path = open_filesystem(url)

    def fetch() -> tuple[bytes, int]:
        size = fs.info(path)["size"]
        if size is None:
            # A web server that sends a file in chunks.
            raise SourceError(
                f"{address}: the storage does not report the file's size; it is needed to read the file's end; serve "
                "the file with its Content-Length, or copy it to this machine"
            )
        begin = max(0, size - length)
        return _fetch_range(fs, path, begin, size), size

    return retry_request(fs, address, "read", fetch, size_bytes=length)


def fetch_info(fs: Any, path: str, address: str) -> dict[str, Any] | None:
    """Return the storage's facts about a path, such as `type` and `size`; None if it does not exist."""
    try:
        return cast("dict[str, Any]", retry_request(fs, address, "read", lambda: fs.info(path), size_bytes=0))
    except FileNotFoundError:
        return None


def list_folder(fs: Any, path: str, address: str) -> list[dict[str, Any]]:
    """Return the storage's facts about each entry of a folder; empty if the folder does not exist."""
    try:
        found = retry_request(fs, address, "listed", lambda: fs.ls(path, detail=True), size_bytes=0)
    except FileNotFoundError:
        return []
    # Listing a file returns the file itself.
    return [one for one in found if str(one["name"]).rstrip("/") != path.rstrip("/")]


def find_files(fs: Any, folder: str, address: str) -> dict[str, dict[str, Any]]:
    """Return the storage's facts about all files below a folder, by path."""

    def find() -> dict[str, dict[str, Any]]:
        try:
            return fs.find(folder, detail=True, on_error="raise")
        except TypeError:
            # File systems that list with one request cannot omit a folder, and lack the option `on_error`.
            return fs.find(folder, detail=True)

    try:
        return retry_request(fs, address, "listed", find)
    except FileNotFoundError:
        return {}


def match_glob(fs: Any, pattern: str, address: str) -> dict[str, dict[str, Any]]:
    """Return the storage's facts about the files and folders that a glob matches, by path.

    The file system's own `glob` is not used, because it treats folders that cannot be listed as empty.
    """
    head, *steps = pattern.rstrip("/").split("/")
    return dict(_match_steps(fs, head, steps, address))


def _match_steps(fs: Any, folder: str, steps: Sequence[str], address: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if not steps:
        return
    from fsspec.utils import glob_translate

    step, rest = steps[0], steps[1:]
    if "**" in step:
        wanted = re.compile(glob_translate("/".join([folder, *steps])))
        yield from ((path, one) for path, one in find_files(fs, folder, address).items() if wanted.match(path))
        return
    if rest and not glob.has_magic(step):
        yield from _match_steps(fs, f"{folder}/{step}", rest, address)
        return
    wanted = re.compile(glob_translate(step))
    for one in list_folder(fs, folder, address):
        path = str(one["name"]).rstrip("/")
        if not wanted.match(path.rpartition("/")[2]):
            continue
        if not rest:
            yield path, one
        elif one["type"] == "directory":
            yield from _match_steps(fs, path, rest, address)


def open_file(fs: Any, path: str, address: str) -> BinaryIO:
    """Open a file for reading."""
    opened = retry_request(fs, address, "read", lambda: fs.open(path, "rb"), size_bytes=0)
    return cast(BinaryIO, io.BufferedReader(_RemoteFile(fs, path, address, opened), _READ_AHEAD_BYTES))


class _RemoteFile(io.RawIOBase):
    """A remote file that is reopened after a failed read; a premature end counts as a failure."""

    def __init__(self, fs: Any, path: str, address: str, opened: Any) -> None:
        self._fs, self._path, self._address = fs, path, address
        self._file: Any = opened
        self._position = 0
        self._version = _read_file_version(opened)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file is None or bool(self._file.seekable())

    def seek(self, offset: int, whence: int = 0, /) -> int:
        def seek(opened: Any) -> int:
            opened.seek(offset, whence)
            return int(opened.tell())

        self._position = self._retry_request(seek, 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: "memoryview") -> int:  # pyrefly: ignore[bad-override]
        size = len(buffer)

        def read(opened: Any) -> bytes:
            block: bytes = opened.read(size)
            if not block and size and self._position < self._version[0]:
                raise ConnectionError(f"it ended after {self._position:,} of {self._version[0]:,} bytes")
            return block

        block = self._retry_request(read, size)
        buffer[: len(block)] = block
        self._position += len(block)
        return len(block)

    def _retry_request(self, function: Callable[[Any], ResultT], size_bytes: int) -> ResultT:
        def attempt() -> ResultT:
            is_new = self._file is None
            opened = self._fs.open(self._path, "rb") if self._file is None else self._file
            # If this does not return, the open file belongs to the abandoned thread.
            self._file = None
            try:
                if is_new:
                    self._restore_position(opened)
                result = function(opened)
            except BaseException:
                opened.close()
                raise
            self._file = opened
            return result

        try:
            return retry_request(self._fs, self._address, "read", attempt, size_bytes=size_bytes)
        except FileNotFoundError as error:
            raise unreachable_error(self._address, "read", error) from error

    def _restore_position(self, opened: Any) -> None:
        """Move a reopened file to the current position."""
        if _read_file_version(opened) != self._version:
            raise SourceError(
                f"{self._address}: changed while it was read; a source must not change until it is read to its "
                "end; run the command again"
            )
        try:
            opened.seek(self._position)
        except ValueError:
            # A web server without byte ranges starts at the first byte.
            left = self._position
            while left and (block := opened.read(min(left, _READ_AHEAD_BYTES))):
                left -= len(block)

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()


def _read_file_version(opened: Any) -> tuple[int, str]:
    """Return an open file's size and its storage's version tag, which change with its content."""
    size: Any = getattr(opened, "size", None)
    details: Any = getattr(opened, "details", None)
    facts = cast("dict[str, Any]", details) if isinstance(details, dict) else {}
    return size if isinstance(size, int) else 0, str(next((facts[key] for key in VERSION_KEYS if facts.get(key)), ""))


VERSION_KEYS = ("ETag", "etag", "e_tag", "md5Hash", "content_md5", "sha256", "generation")
"""Storages' names of the tag that changes with a file's content."""


# ── What storages raise ────────────────────────────────────────────────────────────────────────────

_ABSENT_STATUSES = frozenset({404, 410})
_BUSY_STATUSES = frozenset({408, 425, 429})
UNMET_S3_CODES = frozenset({"412", "PreconditionFailed"})
UNSUPPORTED_S3_CODES = frozenset({"501", "NotImplemented"})
_LASTING_S3_CODES = UNMET_S3_CODES | UNSUPPORTED_S3_CODES | {"400", "InvalidToken", "TokenRefreshRequired"}
"""What a retry does not resolve, and s3fs has no class of its own for. An answer to HEAD has no body: 400 alone is then
what a server says of an expired token."""


def _unwrap_refusal(fs: Any, error: BaseException) -> BaseException:
    """Return the web server's error, which fsspec reports as a missing file whatever it is."""
    is_web = "http" in _list_protocols(fs)
    cause = error.__cause__ if is_web or _find_http_status(error.__cause__) is not None else None
    return cause if cause is not None and isinstance(error, FileNotFoundError) else error


def is_absent(error: BaseException) -> bool:
    """Return whether an error means that the path does not exist."""
    return isinstance(error, FileNotFoundError) or _find_http_status(error) in _ABSENT_STATUSES


def _may_answer_later(error: BaseException) -> bool:
    """Return whether a storage that refused a request may answer it if it is sent again."""
    status = _find_http_status(error)
    if status is not None:
        return status >= 500 or status in _BUSY_STATUSES
    return not isinstance(error, LASTING_ERRORS) and find_s3_code(error) not in _LASTING_S3_CODES


def unreachable_error(address: str, action: str, error: BaseException, attempts: int = 1) -> SourceError:
    """Return the error for a failure of a disk or a storage."""
    lasting = is_absent(error) or isinstance(error, IsADirectoryError | NotADirectoryError)
    often = f", tried {attempts} times" if attempts > 1 else ""
    kind = SourceError if lasting else UnreachableError
    return kind(
        f"{address}: cannot be {action} ({public_reason(error)}{often}); it must exist, and its storage must answer "
        "and permit access; check the path or address, its permissions, the network and the credentials"
    )


def _find_http_status(error: BaseException | None) -> int | None:
    """Return the HTTP status of a server's refusal."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def find_s3_code(error: BaseException) -> str:
    """Return the code of an S3 server's refusal, from botocore's error, which s3fs replaces by one of its own."""
    response: Any = getattr(error.__cause__, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def public_reason(error: BaseException) -> str:
    """Return another library's error message without secrets in URLs."""
    if (status := _find_http_status(error)) is not None:
        return f"HTTP status {status} {getattr(error, 'message', '')}".strip()
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return public_text(" ".join(text.split()))


# ── Replaces a file on S3 only if it is still the one that this process saw, by conditional put ──


VARIABLE = "ROWMILL_STORAGE_CONDITIONS"
"""Environment variable: `none` writes without conditions."""


@dataclass(frozen=True, slots=True)
class PutResult:
    """A conditional put: the version tag of what was written, or the content that another process left instead.

    That content is empty if the file was removed.
    """

    tag: str = ""
    other: bytes | None = None


def can_put_conditionally(fs: Any) -> bool:
    """Return whether a storage is to take conditions: S3, unless the environment says otherwise."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", "none"):
        raise ConfigError(f"{VARIABLE}: {chosen!r} is invalid; allowed is none; correct or unset it")
    return not chosen and "s3" in _list_protocols(fs)


def put_if_unchanged(fs: Any, path: str, address: str, content: bytes, tag: str | None) -> PutResult:
    """Write a file if it still has a version tag, or, without one, if it is still absent."""
    condition: dict[str, str] = {"mode": "create"} if tag is None else {"IfMatch": tag}

    def put() -> str | None:
        """Return the tag of the written file; None if the condition is not met."""
        try:
            written: Any = fs.pipe_file(path, content, **condition)
        except OSError as error:
            code = find_s3_code(error)
            if code in UNMET_S3_CODES or (tag is not None and is_absent(error)):
                return None
            if code in UNSUPPORTED_S3_CODES:
                raise ConfigError(
                    f"{address}: the server refuses a write with a condition ({public_reason(error)}); If-Match and "
                    "If-None-Match keep one build from replacing the output of another unnoticed; use a server that "
                    f"has them, or set {VARIABLE}=none and never run two builds at once"
                ) from None
            raise
        return str(written["ETag"])

    new = retry_request(fs, address, "written", put, size_bytes=len(content))
    if new is not None:
        return PutResult(new)
    try:
        found = retry_request(fs, address, "read", lambda: read_file(fs, path))
    except FileNotFoundError:
        return PutResult(other=b"")
    if found != content:
        return PutResult(other=found)
    # An attempt has written although its answer was lost, and the next one met its own file.
    facts = fetch_info(fs, path, address) or {}
    return PutResult(str(facts.get("ETag", "")))


# ── URLs without user names, passwords, signatures and tokens, before they are recorded ──


#     https://bob:secret@host/a.jsonl?X-Amz-Signature=…      https://host/a.jsonl
#     https://host/a.jsonl?version=3&sig=…                   https://host/a.jsonl?query=5e2f0c1b9a7d
#     abfs://container@account.dfs.core.windows.net/a.jsonl  unchanged: the container is not a login
#
# The whole query of a web address is removed, since no list of names covers every secret. The query without signatures
# still decides which file is meant, so its digest is kept: two signatures of one file are recorded alike, two versions
# of a file are not.

SCHEMES_WITHOUT_LOGIN = frozenset(
    {"abfs", "abfss", "adl", "az", "gist", "git", "github", "hf", "oci", "ocilake", "wasb", "wasbs"}
)
"""Schemes in which the part before `@` is not a login but a container, a namespace or a repository."""

_WEB_SCHEMES = ("http://", "https://")
_DIGEST_CHARS = 12
_RECORDED_QUERY = re.compile(rf"query=[0-9a-f]{{{_DIGEST_CHARS}}}")

_SIGNATURE_PARAMETER = re.compile(
    r"x-(amz|goog|oss|cos|ms|tos|obs|bce)-.*|.*(sig|signature|token|password|passwd|pwd|secret|credential|accesskeyid"
    r"|apikey|api[-_]key|auth|authorization|hmac)|googleaccessid|key-pair-id|policy|expires?|exp|verify|q-.*",
    re.IGNORECASE,
)
"""Names of the parameters that sign an address; they change while the file stays the same."""

_AZURE_SIGNATURE_PARAMETERS = frozenset(
    "sv ss srt sp st se spr sip si sr sdd ses sks skv ske skt skoid sktid saoid suoid scid".split()
)
"""Parameters of Azure's shared access signatures, too short to mean the same elsewhere."""

_WEB_ADDRESS = re.compile(r"https?://[^\s'\"<>]+")


def public_url(url: str) -> str:
    """Return a URL without its secrets; a path, and a URL without secrets, are unchanged."""
    if "://" not in url:
        return url
    links = url.split("::")
    # A web address is the last link of a chain, and may hold "::" itself.
    last = next((number for number, one in enumerate(links) if one.lower().startswith(_WEB_SCHEMES)), len(links) - 1)
    return "::".join(_strip_link_secrets(one) for one in [*links[:last], "::".join(links[last:])])


def public_text(text: str) -> str:
    """Return a text, such as another library's message, without the secrets of the web addresses in it."""
    return _WEB_ADDRESS.sub(lambda found: public_url(found[0]), text)


def _strip_link_secrets(url: str) -> str:
    scheme, sign, rest = url.partition("://")
    if not sign:
        return url
    is_web = url.lower().startswith(_WEB_SCHEMES)
    authority = re.split(r"[/?#]" if is_web else "/", rest, maxsplit=1)[0]
    after = rest[len(authority) :]
    if scheme.lower() not in SCHEMES_WITHOUT_LOGIN:
        authority = authority.rpartition("@")[2]
    if is_web:
        path, _, query = after.partition("#")[0].partition("?")
        if not _RECORDED_QUERY.fullmatch(query):
            given = parse_qsl(query, keep_blank_values=True)
            signing = _AZURE_SIGNATURE_PARAMETERS if any(name == "sig" for name, _ in given) else frozenset[str]()
            kept = [one for one in given if not _SIGNATURE_PARAMETER.fullmatch(one[0]) and one[0] not in signing]
            digest = hashlib.sha256(urlencode(kept).encode()).hexdigest()[:_DIGEST_CHARS]
            query = f"query={digest}" if kept else ""
        after = f"{path}?{query}" if query else path
    return f"{scheme}://{authority}{after}"
