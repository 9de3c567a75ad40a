"""Maps an exception that ends a command to an exit status, a message, and a file for the traceback.

    0     done
    1     a closed gate: a blocking check failed
    2     invalid recipe, command or source, or a permission or space that is missing: the message says what to do
    3     outside failure: disk, network, storage, killed worker; it may pass by itself (`core.errors.is_transient`)
    4     `stats --strict` has a hint, or `template-report --prove` found a wrong mask
    70    a bug of rowmill
    74    a stored file is damaged, and this command could not make it again
    75    `work`: a stage has to be built before a share of the next can be made
    130   interrupted

A scheduler can act on these alone: wait for a person at 1, 2 and 74, retry at 3, report 70, try again later at 75.
"""

import errno
import os
import platform
import tempfile
import traceback
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

from rowmill.core.errors import DamagedFileError, GateError, PipelineError, is_transient


class ExitStatus(IntEnum):
    """The exit statuses of the command line."""

    SUCCESS = 0
    GATE_CLOSED = 1
    """A blocking check failed; what is published is the last build that passed."""
    INVALID = 2
    """The recipe, the command or a source is not valid, what the command reads was not built, or a permission or space
    is missing."""
    OUTSIDE_FAILURE = 3
    """A disk, a network or a worker failed; the same command may succeed later."""
    PROBLEM_FOUND = 4
    """`--strict` or `--prove` found what it looked for."""
    INTERNAL_ERROR = 70
    DAMAGED = 74
    """A stored file is not what was written (`EX_IOERR` of sysexits.h); a build makes again what it can."""
    INPUTS_MISSING = 75
    """A share waits for a stage that is not built; the same command succeeds later (`EX_TEMPFAIL` of sysexits.h)."""
    INTERRUPTED = 130


def choose_exit_status(error: BaseException) -> int:
    """Return the exit status for the exception that ended a command."""
    match error:
        case KeyboardInterrupt():
            return ExitStatus.INTERRUPTED
        case GateError():
            return ExitStatus.GATE_CLOSED
        case DamagedFileError():
            return ExitStatus.DAMAGED
        case _ if is_transient(error):
            return ExitStatus.OUTSIDE_FAILURE
        case PipelineError() | OSError():
            return ExitStatus.INVALID
        case _:
            return ExitStatus.INTERNAL_ERROR


def explain_error(error: BaseException, arguments: Sequence[str]) -> str:
    """Return the user's message for an exception; a traceback that is not of our own errors is written to a file."""
    if isinstance(error, PipelineError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "stopped; finished parts are kept, and the next build resumes from them"
    kept = _keep_traceback(error, arguments)
    if isinstance(error, OSError) or is_transient(error):
        return (
            f"{_describe_outside_error(error)}; a command needs its sources and storage reachable, with free space "
            "and permissions; restore that and run the command again: it resumes from the finished parts "
            f"(the traceback is in {kept})"
        )
    return (
        f"a bug of rowmill, not of your recipe or data: {type(error).__name__}: {error}; the traceback is in {kept}; "
        "please report it with that file to the maintainers of rowmill; stored data is intact, and other commands "
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
    """Write the traceback to a temporary file; return its path, or why it could not be written."""
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
