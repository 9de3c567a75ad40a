"""Replaces a file on S3 only if it is still the one that this process saw, by conditional put.

    put, If-Match: the tag seen, or If-None-Match: * where there was no file
      ├► 200                                  written
      ├► 412, or 404 where a file was seen    read it: this process's own content if an earlier answer was lost,
      │                                       else another process's
      └► 501                                  ConfigError: the server takes no conditions

Without conditions the later of two builds would replace the pointer of the earlier one unnoticed. A server that
refuses them is therefore refused, unless the user says that there is never more than one build.
"""

import os
from dataclasses import dataclass
from typing import Any

from rowmill.core import remote
from rowmill.core.errors import ConfigError

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
    """Return whether a storage is to take conditions: S3, unless the environment says otherwise.

    Raises
    ------
    ConfigError
        If the environment variable has another value than `none`.

    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", "none"):
        raise ConfigError(f"{VARIABLE}: {chosen!r} is invalid; allowed is none; correct or unset it")
    protocol: str | tuple[str, ...] = fs.protocol
    return not chosen and "s3" in (protocol if isinstance(protocol, tuple) else (protocol,))


def put_if_unchanged(fs: Any, path: str, address: str, content: bytes, tag: str | None) -> PutResult:
    """Write a file if it still has a version tag, or, without one, if it is still absent.

    Raises
    ------
    ConfigError
        If the server takes no conditions.
    UnreachableError
        If it fails, refuses or does not answer in every attempt.

    """

    def put() -> str | None:
        return _put(fs, path, address, content, tag)

    new = remote.retry_request(fs, address, "written", put, size_bytes=len(content))
    if new is not None:
        return PutResult(new)
    try:
        found = remote.retry_request(fs, address, "read", lambda: remote.read_file(fs, path))
    except FileNotFoundError:
        return PutResult(other=b"")
    if found != content:
        return PutResult(other=found)
    # An attempt has written although its answer was lost, and the next one met its own file.
    facts = remote.fetch_info(fs, path, address) or {}
    return PutResult(str(facts.get("ETag", "")))


def _put(fs: Any, path: str, address: str, content: bytes, tag: str | None) -> str | None:
    """Return the tag of the written file; None if the condition is not met."""
    condition: dict[str, str] = {"mode": "create"} if tag is None else {"IfMatch": tag}
    try:
        written: Any = fs.pipe_file(path, content, **condition)
    except OSError as error:
        code = remote.find_s3_code(error)
        if code in remote.UNMET_S3_CODES or (tag is not None and remote.is_absent(error)):
            return None
        if code in remote.UNSUPPORTED_S3_CODES:
            raise ConfigError(
                f"{address}: the server refuses a write with a condition ({remote.public_reason(error)}); If-Match and "
                "If-None-Match keep one build from replacing the output of another unnoticed; use a server that has "
                f"them, or set {VARIABLE}=none and never run two builds at once"
            ) from None
        raise
    return str(written["ETag"])
