"""Where source files are: URLs with braces and globs to files, and files to bytes.

What belongs here: expanding, finding, stamping and opening. What does not: what a file's suffix means
(`files.py`).

    "data/{a,b}/part-{08..10}.jsonl"   braces first, in the order written
    "data/*.jsonl"                     then globs, by code point; a glob matches files
    "data/chats" or "data/20*/"        a folder means its data files, however deep

A path without a scheme is relative to the base that is handed in (the recipe's folder) and stays relative
in everything that is recorded, so that a moved project gives the same records. `http` and `https` URLs are
taken literally: their `?` begins a query, and a web server lists nothing.

A source's file is a regular file: a pipe or a device has no end and no second reading. Whatever a storage raises (each
has errors of its own) leaves here as one `SourceError` that names the file as it may be recorded (`public_urls.py`).
"""

import glob
import io
import itertools
import os
import re
import stat
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn, cast

import fsspec

from pipelines.errors import ConfigError, PipelineError, SourceError, UnreachableError
from pipelines.public_urls import public_text, public_url

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_EXPANSION_LIMIT = 100_000
_VERSION_KEYS = ("ETag", "etag", "e_tag", "md5Hash", "content_md5", "sha256", "generation")
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


@dataclass(frozen=True, slots=True)
class Location:
    """A URL as it is recorded, and the file system and path by which it is reached; `path` alone if local."""

    url: str
    path: str
    fs: Any = None

    @property
    def identity(self) -> str:
        """Return what is equal for two spellings of one file."""
        if self.fs is None:
            return os.path.realpath(self.path)
        return public_url(str(self.fs.unstrip_protocol(self.path)))


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
    # Every file system checks its URLs in its own way, some by failing on them.
    except Exception as error:  # noqa: BLE001
        raise ConfigError(
            f"{public_url(url)}: cannot be reached ({_reason(error)}); a path or any URL that fsspec can open without "
            "further arguments is allowed; correct the scheme or install the package that serves it (s3fs, gcsfs, "
            "adlfs, aiohttp)"
        ) from None
    return Location(public_url(url), path, fs)


def find(url: str, base: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return the URLs of the files that one URL without braces stands for; none if there are none.

    `suffixes` say which files of a folder are data; names that begin with `.` or `_` are not.

    Raises
    ------
    SourceError
        When the storage does not answer, or a name stands for something that is not a regular file.

    """
    where = locate(url, base)
    return _find_local(url, where.path, base, suffixes) if where.fs is None else _find_remote(url, where, suffixes)


def _find_local(url: str, path: str, base: Path, suffixes: tuple[str, ...]) -> list[str]:
    if os.path.isdir(path):
        return _files_in(url, path, suffixes)
    if os.path.lexists(path):
        _require_regular(url, path)
        return [url]
    if not is_pattern(url):
        return []
    scheme = "file://" if url.startswith("file://") else ""
    matches = sorted(glob.glob(url.removeprefix(scheme), root_dir=base, recursive=True))
    if url.endswith("/"):
        return [one for match in matches for one in _files_in(scheme + match, str(base / match), suffixes)]
    files = [match for match in matches if not os.path.isdir(base / match)]
    for match in files:
        _require_regular(scheme + match, str(base / match))
    return [scheme + match for match in files]


def _files_in(url: str, folder: str, suffixes: tuple[str, ...]) -> list[str]:
    found = (
        os.path.relpath(os.path.join(top, name), folder)
        for top, _, names in os.walk(folder, onerror=_refuse_folder)
        for name in names
    )
    files = sorted(path for path in found if _is_data(PurePosixPath(path), suffixes))
    for path in files:
        _require_regular(f"{url.rstrip('/')}/{path}", os.path.join(folder, path))
    return [f"{url.rstrip('/')}/{path}" for path in files]


def _refuse_folder(error: OSError) -> NoReturn:
    """Stop where a folder cannot be listed: its files would be missing without a word."""
    raise SourceError(
        f"{error.filename}: this folder cannot be read ({error.strerror}); all folders of a source must be readable; "
        "check its rights, or name the files"
    ) from error


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def _require_regular(url: str, path: str) -> None:
    """Refuse what cannot be read to an end twice, a link to nothing, and a name that cannot be recorded."""
    try:
        url.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(url).decode("utf-8", "backslashreplace")
        raise SourceError(
            f"{shown}: this name is not UTF-8; names are recorded as text, so they must be; rename the file"
        ) from None
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except FileNotFoundError as error:
        raise SourceError(
            f"{url}: is a link to something that is not there ({os.readlink(path)}); a source may not be missing; "
            "fetch the file, or remove the link"
        ) from error
    except OSError as error:
        raise _unreadable(url, error) from error
    if kind != stat.S_IFREG:
        raise SourceError(
            f"{url}: is {_KINDS.get(kind, 'not a file')}; only regular files can be sources; write its content to a "
            "file, or move it out of the folder"
        )


def _is_data(path: PurePosixPath, suffixes: tuple[str, ...]) -> bool:
    return path.name.lower().endswith(suffixes) and not any(step.startswith((".", "_")) for step in path.parts)


def _find_remote(url: str, where: Location, suffixes: tuple[str, ...]) -> list[str]:
    with _reaching(where):
        kind = _kind_of(where)
        if kind == "directory":
            return _remote_files_in(where, where.path, suffixes)
        if kind is not None:
            _require_file(where.url, kind)
            return [url]
        if not is_pattern(url):
            return []
        matches = cast("dict[str, dict[str, Any]]", where.fs.glob(where.path, detail=True))
        if url.endswith("/"):
            return [one for match in sorted(matches) for one in _remote_files_in(where, match, suffixes)]
        return _files_of({path: facts for path, facts in matches.items() if facts["type"] != "directory"}, where)


def _kind_of(where: Location) -> str | None:
    """Return what a storage says that a path is; None: nothing is there.

    Not `exists` or `isfile`: they take a server that answers with an error for one that has no such file.
    """
    try:
        return str(where.fs.info(where.path)["type"])
    except FileNotFoundError as error:
        if _status(refusal := _refusal(where, error)) in _ABSENT or refusal is error:
            return None
        raise


def _remote_files_in(where: Location, folder: str, suffixes: tuple[str, ...]) -> list[str]:
    found = cast("dict[str, dict[str, Any]]", where.fs.find(folder, detail=True))
    inside = len(folder.rstrip("/")) + 1
    data = {path: facts for path, facts in found.items() if _is_data(PurePosixPath(path[inside:]), suffixes)}
    return _files_of(data, where)


def _files_of(found: Mapping[str, Mapping[str, Any]], where: Location) -> list[str]:
    for path in sorted(found):
        _require_file(where.fs.unstrip_protocol(path), str(found[path]["type"]))
    return [where.fs.unstrip_protocol(path) for path in sorted(found)]


def _require_file(url: str, kind: str) -> None:
    if kind == "other":
        raise SourceError(
            f"{public_url(url)}: is not a regular file; only regular files can be sources; write its content to a "
            "file, or move it out of the folder"
        )


def stamp(where: Location) -> str:
    """Return a short text that changes when the file does; "" where the storage offers none.

    Locally the change time stands beside the modification time, since copies often keep the latter.
    """
    with _reaching(where):
        if where.fs is None:
            facts = os.stat(where.path)
            return f"{facts.st_size}-{facts.st_mtime_ns}-{facts.st_ctime_ns}"
        return _remote_stamp(where.fs.info(where.path))


def _remote_stamp(info: Mapping[str, Any]) -> str:
    for key in (*_VERSION_KEYS, *_TIME_KEYS):
        if info.get(key):
            return f"{info.get('size')}-{info[key]}"
    return ""


def open_raw(where: Location) -> BinaryIO:
    """Open a file for reading as it lies."""
    with _reaching(where):
        if where.fs is None:
            return open(where.path, "rb")
        return cast(BinaryIO, io.BufferedReader(_RemoteFile(where, where.fs.open(where.path, "rb")), 1 << 20))


class _RemoteFile(io.RawIOBase):
    """A file of a storage; what the storage raises, and an end before the file's own, are a `SourceError`."""

    def __init__(self, where: Location, file: Any) -> None:
        self._where = where
        self._file = file
        self._position = 0
        size = getattr(file, "size", None)
        self._size = size if isinstance(size, int) else 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = 0, /) -> int:
        with _reaching(self._where):
            self._file.seek(offset, whence)
            self._position = int(self._file.tell())
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: "memoryview") -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        with _reaching(self._where):
            block: bytes = self._file.read(len(buffer))
            if not block and len(buffer) and self._position < self._size:
                raise ConnectionError(f"it ends after {self._position:,} of {self._size:,} bytes")
        buffer[: len(block)] = block
        self._position += len(block)
        return len(block)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def read_range(where: Location, offset: int, length: int) -> bytes:
    """Read `length` bytes from `offset` on; fewer where the file ends before."""
    with _reaching(where):
        if where.fs is not None:
            return cast(bytes, where.fs.cat_file(where.path, start=offset, end=offset + length))
        with open(where.path, "rb") as file:
            file.seek(offset)
            return file.read(length)


def read_whole(where: Location) -> bytes:
    """Read a whole file."""
    with _reaching(where):
        return Path(where.path).read_bytes() if where.fs is None else cast(bytes, where.fs.cat_file(where.path))


def exists(where: Location) -> bool:
    """Tell whether there is a file."""
    with _reaching(where):
        return os.path.isfile(where.path) if where.fs is None else bool(where.fs.exists(where.path))


_ABSENT = frozenset({404, 410})
_BUSY = frozenset({408, 425, 429})


@contextmanager
def _reaching(where: Location) -> Generator[None]:
    """Turn whatever a disk or a storage raises in the block into a `SourceError` that names the file."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        if where.fs is None:
            if isinstance(error, OSError):
                raise _unreadable(where.url, error) from error
            raise
        refusal = _refusal(where, error)
        # The storage's own error may show the whole address, so one that says as much takes its place as the cause, by
        # which is decided whether to try again.
        raise _unreadable(where.url, refusal) from _public_cause(refusal)


def _refusal(where: Location, error: BaseException) -> BaseException:
    """Return what a web server did, which fsspec reports as a missing file whatever it was."""
    is_of_web = any(is_web(link) for link in where.url.split("::"))
    cause = error.__cause__ if is_of_web and isinstance(error, FileNotFoundError) else None
    return cause or error


def _public_cause(error: BaseException) -> OSError:
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status in _ABSENT:
        return FileNotFoundError(_reason(error))
    if isinstance(error, PermissionError) or (status is not None and status < 500 and status not in _BUSY):
        return PermissionError(_reason(error))
    return ConnectionError(_reason(error))


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of a server's refusal."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _reason(error: BaseException) -> str:
    """Word another library's error, without an address that holds a secret."""
    if (status := _status(error)) is not None:
        return f"HTTP status {status} {getattr(error, 'message', '')}".strip()
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return public_text(" ".join(text.split()))


def _unreadable(url: str, error: BaseException) -> SourceError:
    is_absent = (
        isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError) or _status(error) in _ABSENT
    )
    kind = SourceError if is_absent else UnreachableError
    return kind(
        f"{url}: cannot be read ({_reason(error)}); it must exist and be readable; check the path or address, its "
        "rights, the network and the credentials"
    )
