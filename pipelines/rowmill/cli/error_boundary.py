"""What ends a command: its exit status, the sentence a user gets, and where the traceback is kept.

What belongs here: one answer for every exception. What does not: commands (`*_commands.py`), the errors that we raise
ourselves and their sentences (`errors.py`).

    0     done
    1     a closed gate: a blocking check failed
    2     the recipe, the command, a source or what is stored is not as it must be: the message says what to do
    3     the outside world: a disk, a network, a storage, a permission, a worker that was killed; it may pass by itself
    4     `stats --strict` has a hint, or `template-report --prove` found a wrong mask
    70    a bug of rowmill
    130   interrupted

A scheduler needs no more to decide: wait for a person at 1 and 2, try again at 3, report 70.
"""

import errno
import os
import platform
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from gzip import BadGzipFile
from pathlib import Path

from rowmill.core.errors import BusyError, ConfigError, GateError, GenerationError, PipelineError, UnreachableError

DONE, BLOCKED, WRONG, OUTSIDE, FOUND, BUG, INTERRUPTED = 0, 1, 2, 3, 4, 70, 130

_STORAGE_LIBRARIES = frozenset(
    "adlfs aiobotocore aiohttp azure botocore fsspec gcsfs google httpx huggingface_hub ocifs paramiko requests s3fs "
    "urllib3".split()
)
"""Libraries that reach the outside world; an error class of theirs is the world's, whatever it derives from."""


def choose_exit_status(error: BaseException) -> int:
    """Return the exit status for what ended a command."""
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED
        case GateError():
            return BLOCKED
        case ConfigError():
            return WRONG
        case UnreachableError() | BusyError() | GenerationError():
            return OUTSIDE
        case PipelineError():
            return OUTSIDE if _is_caused_outside(error.__cause__) else WRONG
        case _:
            return OUTSIDE if _is_outside(error) else BUG


def name_missing_package(error: BaseException, arguments: Sequence[str]) -> BaseException:
    """Return the error for a package that an extra of rowmill brings, if that is what is missing; else the error."""
    if not isinstance(error, ModuleNotFoundError):
        return error
    from rowmill.core.extras import explain_missing_package

    return explain_missing_package(f"rowmill {' '.join(arguments[:1])}", error) or error


def _is_caused_outside(cause: BaseException | None) -> bool:
    """Tell whether the outside world stands behind one of our own errors; a wrong path or a broken file does not."""
    if isinstance(cause, PipelineError):
        return choose_exit_status(cause) == OUTSIDE
    absent = FileNotFoundError | IsADirectoryError | NotADirectoryError | BadGzipFile
    return cause is not None and not isinstance(cause, absent) and _is_outside(cause)


def _is_outside(error: BaseException) -> bool:
    if isinstance(error, OSError | MemoryError | BrokenExecutor):
        return True
    return any(one.__module__.partition(".")[0] in _STORAGE_LIBRARIES for one in type(error).__mro__)


def explain_error(error: BaseException, arguments: Sequence[str]) -> str:
    """Return what a user is told of an exception; the traceback of one that is not ours is kept in a file."""
    if isinstance(error, PipelineError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "stopped; finished parts are kept, and the next build goes on from them"
    kept = _keep_traceback(error, arguments)
    if _is_outside(error):
        return (
            f"{_describe_outside_error(error)}; what a command reads and writes must be reachable, with room "
            "and rights; see to it "
            f"and run the command again, which goes on from what is finished (the traceback is in {kept})"
        )
    return (
        f"a bug of rowmill, not of your recipe or data: {type(error).__name__}: {error}; the traceback is in {kept}; "
        "please report it with that file to the maintainers of rowmill; what is stored is whole, and another command "
        "may still work"
    )


def _describe_outside_error(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "this machine: out of memory"
    if not isinstance(error, OSError) or error.errno is None:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    code = errno.errorcode.get(error.errno, str(error.errno))
    return f"{' → '.join(names) or 'a file or connection'}: {error.strerror} ({code})"


def _keep_traceback(error: BaseException, arguments: Sequence[str]) -> str:
    """Write the traceback to a file of its own; return its path, or the reason why there is none."""
    lines = [
        f"command: rowmill {' '.join(arguments)}\n",
        f"Python {platform.python_version()} on {platform.platform()}\n\n",
        *traceback.format_exception(error),
    ]
    try:
        descriptor, path = tempfile.mkstemp(prefix="rowmill-", suffix=".traceback.txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)
    except OSError as refused:
        return f"no file, since none could be written ({refused.strerror})"
    return str(Path(path))
