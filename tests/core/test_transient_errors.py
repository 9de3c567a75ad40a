"""Which errors may pass by themselves: the rule of the command line's status 3, of Dagster's retries and of Ray's."""

import errno
import pickle
from concurrent.futures.process import BrokenProcessPool
from gzip import BadGzipFile

from rowmill.core.errors import (
    BusyError,
    ConfigError,
    ContextOverflowError,
    DamagedFileError,
    GateError,
    GenerationError,
    IntegrityError,
    PipelineError,
    SourceError,
    UnreachableError,
    is_transient,
)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def make_error(module: str, name: str) -> Exception:
    return type(name, (Exception,), {"__module__": module})("gone")


PASSING = [
    OSError(errno.EIO, "input/output error"),
    OSError(errno.ESTALE, "stale file handle"),
    ConnectionResetError("peer"),
    TimeoutError("storage"),
    MemoryError(),
    BrokenProcessPool("a worker died"),
    BusyError("another build"),
    GenerationError("the backend"),
    UnreachableError("no answer"),
    pickle.loads(pickle.dumps(UnreachableError("no answer, in a worker"))),
    caused(UnreachableError("no answer"), ConnectionError("503")),
    caused(IntegrityError("a worker process died"), BrokenProcessPool("killed")),
    caused(SourceError("the storage does not answer"), ConnectionRefusedError("refused")),
    make_error("botocore.exceptions", "EndpointConnectionError"),
    make_error("ray.exceptions", "WorkerCrashedError"),
]
LASTING = [
    FileNotFoundError("gone"),
    NotADirectoryError("a file"),
    PermissionError(errno.EACCES, "no"),
    BadGzipFile("cut short"),
    OSError(errno.ENOSPC, "no space left on device"),
    OSError(errno.EROFS, "read-only file system"),
    ValueError("a bug"),
    GateError("closed"),
    ConfigError("wrong"),
    caused(ConfigError("wrong"), OSError(errno.EIO, "x")),
    ContextOverflowError("too long"),
    DamagedFileError("a file is cut", "a/b"),
    SourceError("found no data"),
    caused(SourceError("cannot be read"), FileNotFoundError("gone")),
    caused(PipelineError("no space left"), OSError(errno.ENOSPC, "x")),
    caused(UnreachableError("denied"), PermissionError("403")),
    make_error("ray.exceptions", "RayTaskError"),
]


def test_what_a_network_a_device_or_a_worker_did_may_pass_and_what_a_person_must_change_does_not() -> None:
    assert [error for error in PASSING if not is_transient(error)] == []
    assert [error for error in [*LASTING, None] if is_transient(error)] == []
