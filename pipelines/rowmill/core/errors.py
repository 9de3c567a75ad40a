"""Every exception that leaves the engine, and the four-part sentence each one speaks.

What belongs here: exception classes and the helpers that word them. What does not: rejects. A bad
*row* is never an exception, it is a `ledger.Rejected` that is counted and kept; exceptions are for
configuration, for the outside world (files, disks) and for our own bugs.

    PipelineError
      + ConfigError       (ValueError)    the recipe is wrong; raised before any data is read
        + ContextOverflowError            `overlong: raise` or `error` met something too long; a GenerationError, too
      + SourceError       (OSError)       a source is missing, cut short or unreadable
        + UnreachableError                its disk or storage fails, refuses or does not answer
      + SchemaError       (ValueError)    a file's columns are not what the recipe says
      + IntegrityError    (RuntimeError)  stored bytes are not what their manifest says
      + GateError         (RuntimeError)  a failed check stands between a stage and its input
      + GenerationError   (RuntimeError)  a generating backend failed beyond its retries
      + MissingPackageError (ImportError) a package that an extra of rowmill brings is not installed
      - BusyError         (RuntimeError)  another build holds this recipe

A message has four parts: where, what, what was allowed, what to do. Each class is also the builtin
that it specialises, so `except ValueError` in a caller's code keeps working.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class PipelineError(Exception):
    """Base of all errors that a user can act on; its text is complete, no traceback is needed."""


class ConfigError(PipelineError, ValueError):
    """The recipe asks for something impossible."""


class SourceError(PipelineError, OSError):
    """A source cannot be found, opened or read to its end."""


class UnreachableError(SourceError):
    """A source's disk or storage fails, refuses or does not answer; it may pass."""


class SchemaError(PipelineError, ValueError):
    """A file's columns or types are not those that the recipe names."""


class IntegrityError(PipelineError, RuntimeError):
    """What is stored differs from what its manifest promises."""


class DamagedFileError(IntegrityError):
    """A stored file is missing or not what was written; `path` is relative to the storage root."""

    def __init__(self, message: str, path: str) -> None:
        """Keep the path beside the message, also through a worker's process."""
        super().__init__(message, path)
        self.path = path

    def __str__(self) -> str:
        """Return the message alone."""
        return str(self.args[0])


class GateError(PipelineError, RuntimeError):
    """An input's blocking check failed, so nothing may be built on it."""


class GenerationError(PipelineError, RuntimeError):
    """A generating backend failed beyond its retries."""


class ContextOverflowError(ConfigError, GenerationError):
    """Something is longer than the context and the recipe says that this must not happen."""


class MissingPackageError(PipelineError, ImportError):
    """A package that an extra of rowmill brings is not installed."""


class BusyError(PipelineError, RuntimeError):
    """Another build of the same recipe is running and did not finish in time."""


def join_choices(allowed: Iterable[object]) -> str:
    """Word a set of allowed values as prose: `a, b or c`."""
    names = [str(value) for value in allowed]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} or {names[-1]}"


def suggest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a mistyped one most likely meant, if one is close."""
    matches = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
