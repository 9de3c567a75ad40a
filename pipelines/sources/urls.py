"""Where source files are: URLs with braces and globs to files, and files to bytes.

What belongs here: expanding, finding, stamping and opening. What does not: what a file's suffix means
(`files.py`).

    "data/{a,b}/part-{08..10}.jsonl"   braces first, in the order written
    "data/*.jsonl"                     then globs, by code point; a glob matches files
    "data/chats" or "data/20*/"        a folder means its data files, however deep

A path without a scheme is relative to the base that is handed in (the recipe's folder) and stays relative
in everything that is recorded, so that a moved project gives the same records. `http` and `https` URLs are
taken literally: their `?` begins a query, and a web server lists nothing.
"""

import glob
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import fsspec

from pipelines.errors import ConfigError, SourceError

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_EXPANSION_LIMIT = 100_000
_VERSION_KEYS = ("ETag", "etag", "e_tag", "md5Hash", "content_md5", "sha256", "generation")
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


@dataclass(frozen=True, slots=True)
class Location:
    """A URL as recorded, and the file system and path by which it is reached; `path` alone if local."""

    url: str
    path: str
    fs: Any = None

    @property
    def identity(self) -> str:
        """Return what is equal for two spellings of one file."""
        return os.path.realpath(self.path) if self.fs is None else str(self.fs.unstrip_protocol(self.path))


def expand_braces(pattern: str) -> list[str]:
    """Return the patterns that `{a,b}` and `{08..11}` stand for, in the order written, the last one fastest.

    Braces nest. A brace without a partner, or with neither a comma nor a range inside, is text.
    """
    expanded = list(itertools.islice(_expand(pattern), _EXPANSION_LIMIT + 1))
    if len(expanded) > _EXPANSION_LIMIT:
        raise ConfigError(
            f"{pattern}: stands for more than {_EXPANSION_LIMIT:,} URLs; name fewer, or a folder or a glob instead"
        )
    return expanded


def _expand(pattern: str) -> Iterator[str]:
    for start, end, commas in _brace_pairs(pattern):
        cuts = [start, *commas, end]
        inner = [pattern[a + 1 : b] for a, b in itertools.pairwise(cuts)]
        choices = _range(inner[0]) if len(inner) == 1 else (one for part in inner for one in _expand(part))
        if choices is None:
            continue
        for choice in choices:
            for rest in _expand(pattern[end + 1 :]):
                yield pattern[:start] + choice + rest
        return
    yield pattern


def _brace_pairs(pattern: str) -> Iterator[tuple[int, int, list[int]]]:
    """Yield each brace's start, end and own commas, by the start."""
    for start in (match.start() for match in re.finditer(r"\{", pattern)):
        depth = 0
        commas: list[int] = []
        for index in range(start, len(pattern)):
            depth += {"{": 1, "}": -1}.get(pattern[index], 0)
            if pattern[index] == "," and depth == 1:
                commas.append(index)
            if depth == 0:
                yield start, index, commas
                break


def _range(text: str) -> Iterator[str] | None:
    found = _RANGE.fullmatch(text)
    if not found:
        return None
    first, last = found.groups()
    padded = any(len(end.lstrip("-")) > 1 and end.lstrip("-")[0] == "0" for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    step = 1 if int(first) <= int(last) else -1
    return (f"{number:0{width}d}" for number in range(int(first), int(last) + step, step))


def is_remote(url: str) -> bool:
    """Tell whether a URL names its own file system."""
    return "://" in url or "::" in url


def is_web(url: str) -> bool:
    """Tell whether a URL is a web address, which is taken literally and cannot be relied on for byte ranges."""
    return url.startswith(("http://", "https://"))


def is_pattern(url: str) -> bool:
    """Tell whether a URL holds a glob."""
    return glob.has_magic(url) and not is_web(url)


def suffix_text(url: str) -> str:
    """Return the part of a URL that ends in its file's suffix: no query, no fragment of a web address."""
    return re.split(r"[?#]", url, maxsplit=1)[0] if is_web(url) else url


def locate(url: str, base: Path) -> Location:
    """Return how to reach a URL; a path is relative to `base`.

    Raises
    ------
    ConfigError
        When no file system has the URL's scheme, or its package is not installed.

    """
    if not is_remote(url):
        return Location(url, str(base / url))
    if url.startswith("file://"):
        return Location(url, url.removeprefix("file://"))
    try:
        fs, path = cast("tuple[Any, str]", fsspec.core.url_to_fs(url))
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"{url}: cannot be reached ({error}); a path or any URL that fsspec knows is allowed; correct the scheme "
            "or install the package that serves it (s3fs, gcsfs, adlfs, aiohttp)"
        ) from error
    return Location(url, path, fs)


def find(url: str, base: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return the URLs of the files that one URL without braces stands for; none if there are none.

    `suffixes` say which files of a folder are data; names that begin with `.` or `_` are not.
    """
    where = locate(url, base)
    return _find_local(where, base, suffixes) if where.fs is None else _find_remote(where, suffixes)


def _find_local(where: Location, base: Path, suffixes: tuple[str, ...]) -> list[str]:
    if os.path.isdir(where.path):
        return _files_in(where.url, where.path, suffixes)
    if os.path.exists(where.path):
        return [where.url]
    if not is_pattern(where.url):
        return []
    scheme = "file://" if where.url.startswith("file://") else ""
    matches = sorted(glob.glob(where.url.removeprefix(scheme), root_dir=base, recursive=True))
    if where.url.endswith("/"):
        return [one for match in matches for one in _files_in(scheme + match, str(base / match), suffixes)]
    return [scheme + match for match in matches if os.path.isfile(base / match)]


def _files_in(url: str, folder: str, suffixes: tuple[str, ...]) -> list[str]:
    found = (
        PurePosixPath(os.path.relpath(os.path.join(top, name), folder))
        for top, _, names in os.walk(folder)
        for name in names
    )
    return [f"{url.rstrip('/')}/{path}" for path in sorted(str(path) for path in found if _is_data(path, suffixes))]


def _is_data(path: PurePosixPath, suffixes: tuple[str, ...]) -> bool:
    return path.name.lower().endswith(suffixes) and not any(step.startswith((".", "_")) for step in path.parts)


def _find_remote(where: Location, suffixes: tuple[str, ...]) -> list[str]:
    try:
        if is_web(where.url) or where.fs.isfile(where.path):
            return [where.url] if where.fs.exists(where.path) else []
        if where.fs.isdir(where.path):
            return _remote_files_in(where, where.path, suffixes)
        if not is_pattern(where.url):
            return []
        matches = cast("list[str]", sorted(where.fs.glob(where.path)))
        if where.url.endswith("/"):
            return [one for match in matches for one in _remote_files_in(where, match, suffixes)]
        return [where.fs.unstrip_protocol(match) for match in matches if where.fs.isfile(match)]
    except FileNotFoundError:
        return []
    except (OSError, RuntimeError) as error:
        raise SourceError(
            f"{where.url}: the storage does not answer ({error}); it must be reachable and readable; check the "
            "address, the network and the credentials"
        ) from error


def _remote_files_in(where: Location, folder: str, suffixes: tuple[str, ...]) -> list[str]:
    found = cast("list[str]", sorted(where.fs.find(folder)))
    inside = len(folder.rstrip("/")) + 1
    return [where.fs.unstrip_protocol(path) for path in found if _is_data(PurePosixPath(path[inside:]), suffixes)]


def stamp(where: Location) -> str:
    """Return a short text that changes when the file does; "" where the storage offers none.

    Locally the change time stands beside the modification time, since copies often keep the latter.
    """
    try:
        if where.fs is None:
            facts = os.stat(where.path)
            return f"{facts.st_size}-{facts.st_mtime_ns}-{facts.st_ctime_ns}"
        return _remote_stamp(where.fs.info(where.path))
    except OSError as error:
        raise _unreadable(where, error) from error


def _remote_stamp(info: Mapping[str, Any]) -> str:
    for key in (*_VERSION_KEYS, *_TIME_KEYS):
        if info.get(key):
            return f"{info.get('size')}-{info[key]}"
    return ""


def open_raw(where: Location) -> BinaryIO:
    """Open a file for reading as it lies."""
    try:
        return cast(BinaryIO, open(where.path, "rb") if where.fs is None else where.fs.open(where.path, "rb"))
    except OSError as error:
        raise _unreadable(where, error) from error


def read_range(where: Location, offset: int, length: int) -> bytes:
    """Read `length` bytes from `offset` on; fewer where the file ends before."""
    try:
        if where.fs is not None:
            return cast(bytes, where.fs.cat_file(where.path, start=offset, end=offset + length))
        with open(where.path, "rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        raise _unreadable(where, error) from error


def read_whole(where: Location) -> bytes:
    """Read a whole file."""
    try:
        return Path(where.path).read_bytes() if where.fs is None else cast(bytes, where.fs.cat_file(where.path))
    except OSError as error:
        raise _unreadable(where, error) from error


def exists(where: Location) -> bool:
    """Tell whether there is a file."""
    return os.path.isfile(where.path) if where.fs is None else bool(where.fs.exists(where.path))


def _unreadable(where: Location, error: OSError) -> SourceError:
    why = error.strerror or str(error) or type(error).__name__
    return SourceError(
        f"{where.url}: cannot be read ({why}); it must exist and be readable; check the path and its rights"
    )
