"""All exceptions that the engine raises for its callers, and whether a recipe may run a user's code.

A bad *row* never raises: it becomes a `Rejected`, which is counted and kept. Exceptions are for configuration, for the
outside world (files, disks) and for our own bugs.

    PipelineError
      + ConfigError       (ValueError)    the recipe is wrong; raised before any data is read
        + NewerStoreError                 the storage root belongs to a newer rowmill
        + ContextOverflowError            too long under `overlong: raise` or `error`; also a GenerationError
      + SourceError       (OSError)       a source is missing, truncated or unreadable
        + UnreachableError                its disk or storage fails, refuses or does not answer
      + SchemaError       (ValueError)    a file's columns are not what the recipe says
      + IntegrityError    (RuntimeError)  stored bytes are not what their manifest says
        + DamagedFileError                one stored file; a build makes it again
      + GateError         (RuntimeError)  a failed check blocks an input of a stage
      + GenerationError   (RuntimeError)  a generating backend failed beyond its retries
      + MissingPackageError (ImportError) a package that an extra of rowmill brings is not installed, or is too old
      - BusyError         (RuntimeError)  another build holds this recipe

A message has four parts: where, what, what was allowed, what to do. Each class is also the builtin
that it specialises, so `except ValueError` in a caller's code keeps working.

User code is a format class, or the function of a generation backend. With the switch on, an untrusted recipe is only
data: templates run in a sandbox, and dataset scripts never run.
"""

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from difflib import get_close_matches
from gzip import BadGzipFile
from typing import Final

from rowmill.core.own_process import let_pandas_in


class PipelineError(Exception):
    """Base of all errors that a user can act on; its text is complete, no traceback is needed."""

    place: str = ""
    """Stage of the build that it ended, such as `chats/raw_dataset`; empty if it was raised elsewhere."""


class ConfigError(PipelineError, ValueError):
    """The recipe asks for something impossible."""


class SourceError(PipelineError, OSError):
    """A source cannot be found, opened or read to its end."""


class UnreachableError(SourceError):
    """A source's disk or storage fails, refuses or does not answer; it may pass."""


class SchemaError(PipelineError, ValueError):
    """A file's columns or types are not those that the recipe names."""


class IntegrityError(PipelineError, RuntimeError):
    """Stored bytes differ from what their manifest records."""


class DamagedFileError(IntegrityError):
    """A stored file is missing or not what was written.

    `damage` says which and how; `path` is relative to the storage root, or absolute below it. A build makes the file
    again; `remedy` is for those who read outside a build.
    """

    def __init__(self, damage: str, path: str, remedy: str = "") -> None:
        """Store all as arguments, so that pickling between processes keeps them."""
        super().__init__(damage, path, remedy)
        self.damage = damage
        self.path = path
        self.remedy = remedy or REMOVE_DAMAGE

    def __str__(self) -> str:
        return f"{self.damage}; {self.remedy}"


REMOVE_DAMAGE: Final = (
    "check the disk, remove damaged files with `rowmill verify RECIPE --deep --discard`, and build again"
)


class GateError(PipelineError, RuntimeError):
    """A blocking check of an input failed, so nothing may be built on it."""


class GenerationError(PipelineError, RuntimeError):
    """A generating backend failed beyond its retries."""


class ContextOverflowError(ConfigError, GenerationError):
    """An example is longer than the context, and the recipe makes that an error."""


class NewerStoreError(ConfigError):
    """A file of a store was written by a newer rowmill; this one leaves the store alone."""


class MissingPackageError(PipelineError, ImportError):
    """A package that an extra of rowmill brings is not installed, or is too old."""


class BusyError(PipelineError, RuntimeError):
    """Another build of the same recipe is running and did not finish in time."""


def join_errors(errors: Sequence[PipelineError], message: str) -> PipelineError:
    """Return one error with this message: a GateError or an UnreachableError if all are, else a ConfigError.

    A closed gate waits for a person, and a failing storage may answer later; the cause decides whether Dagster retries.
    """
    for kind in (GateError, UnreachableError):
        if all(isinstance(error, kind) for error in errors):
            joined = kind(message)
            joined.__cause__ = errors[0].__cause__
            return joined
    return ConfigError(message)


DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The operating system's errors for a full disk."""

LASTING_ERRORS: Final = (
    BadGzipFile, FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, NotImplementedError,
    PermissionError,
)  # fmt: skip
_LASTING_ERRNOS = DISK_FULL_ERRNOS | {errno.EROFS, errno.ENAMETOOLONG}

_OUTSIDE_LIBRARIES = frozenset(
    "adlfs aiobotocore aiohttp azure botocore fsspec gcsfs google httpx huggingface_hub ocifs paramiko ray requests "
    "s3fs urllib3".split()
)
"""Libraries that reach the outside world, by name: none of them is imported for its classes of errors."""


def is_transient(error: BaseException | None) -> bool:
    """Return whether an error may pass by itself, so that the same work, done again unchanged, may succeed.

    The one rule of all that tries again: the command line's status 3, the retries of Dagster and those of Ray. A
    network, a storage or a device that fails, a killed worker, used up memory, another build's lock and a generating
    backend may be well in a minute. A person must act where a file is absent, a permission is refused or a disk is
    full or read-only, and where the data, the recipe or rowmill is wrong: to try that again only hides it for longer.

    Of our own errors the cause decides. One that names a storage may have lost its cause on the way from a worker.
    """
    match error:
        case ConfigError() | GateError() | DamagedFileError():
            return False
        case BusyError() | GenerationError():
            return True
        case UnreachableError():
            return not _is_lasting(error.__cause__)
        case PipelineError():
            return is_transient(error.__cause__)
        case OSError() | MemoryError() | BrokenExecutor():
            return not _is_lasting(error)
        case _:
            bases = type(error).__mro__
            # Ray raises a task's own error as one of its own.
            is_of_task = any(one.__name__.startswith("RayTaskError") for one in bases)
            return not is_of_task and any(one.__module__.partition(".")[0] in _OUTSIDE_LIBRARIES for one in bases)


def _is_lasting(error: BaseException | None) -> bool:
    return isinstance(error, LASTING_ERRORS) or (isinstance(error, OSError) and error.errno in _LASTING_ERRNOS)


def join_choices(allowed: Iterable[object]) -> str:
    """Join allowed values for a message: `a, b or c`."""
    names = [str(value) for value in allowed]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} or {names[-1]}"


def suggest_name(name: str, known: Iterable[str]) -> str | None:
    """Return what was probably meant by an unknown name, None if nothing is near: `astrai_bin or astrai_h5`."""
    names = sorted(known)
    return (
        join_choices(find_related_names(name, names) or get_close_matches(name, names, n=1, cutoff=LEAST_LIKENESS))
        or None
    )


def hint_at_name(name: str, known: Iterable[str], otherwise: str = "name one of them") -> str:
    """Return the last part of a message about an unknown name: what was probably meant, or what to do otherwise."""
    guess = suggest_name(name, known)
    return f"did you mean {guess}?" if guess else otherwise


def find_related_names(
    name: str, known: Iterable[str], meant_by: Mapping[str, Iterable[str]] | None = None
) -> list[str]:
    """Return the known names that an unknown one surely refers to, empty if there is only some likeness.

    A typing error comes first: a known name in another spelling, or nearly the same. Then those that begin as it does
    or have it as a word, and those for which `meant_by` lists it: users know a trainer, not our name of its format.
    """
    names, asked = sorted(known), _spell_plainly(name)
    if typed := find_mistyped_names(name, names):
        return typed
    related = [one for one in names if _begins_alike(name, one) or asked in _split_words(one)]
    related += [one for one, words in (meant_by or {}).items() if asked in map(_spell_plainly, words)]
    return list(dict.fromkeys(related))[:MAX_SUGGESTED]


def find_mistyped_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names of which a name is another spelling, or else the one that is nearly the same."""
    names, asked = sorted(known), _spell_plainly(name)
    same = [one for one in names if _spell_plainly(one) == asked]
    return same or get_close_matches(name, names, n=1, cutoff=TYPING_ERROR_LIKENESS)


TYPING_ERROR_LIKENESS: Final = 0.85
LEAST_LIKENESS: Final = 0.6
"""Shares of common letters, as `difflib` counts them."""

MAX_SUGGESTED: Final = 3
LEAST_BEGINNING: Final = 3
"""Characters of a name's beginning that are no coincidence."""


def _spell_plainly(name: str) -> str:
    return "".join(_split_words(name))


def _split_words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _begins_alike(name: str, known: str) -> bool:
    """Return whether one name is the beginning of the other, by whole words or by some letters."""
    first, second = sorted((_split_words(name), _split_words(known)), key=len)
    if first and second[: len(first)] == first:
        return True
    return len(name) >= LEAST_BEGINNING and known.lower().startswith(name.lower())


# ── Decides whether a recipe may run user code: a format class, or the function of a generation backend ──


NO_CODE_VARIABLE = "ROWMILL_NO_CODE"
"""The environment variable, which workers, Ray and Dagster's processes inherit; `--no-code` sets it."""


def require_code_permission(target: str, where: str) -> None:
    """Refuse to run the code that a recipe names, if the user has forbidden it; it may hand pandas objects to Arrow."""
    if os.environ.get(NO_CODE_VARIABLE, "0") not in ("", "0"):
        raise ConfigError(
            f"{where}: {target} is Python code, which --no-code or {NO_CODE_VARIABLE} forbids to run; built-in "
            "kinds are allowed; read the code and remove the switch, or choose another kind"
        )
    let_pandas_in()
