"""Locates source files: expands URLs with braces and globs to files, and opens files.

    "data/{a,b}/part-{08..10}.jsonl"   braces first, in the order written
    "data/*.jsonl"                     then globs, by code point; a glob matches files
    "data/chats" or "data/20*/"        a folder means its data files at any depth, also in linked folders

A path without a scheme is relative to the given base (the project's folder) and is recorded as relative, so that a
moved project gives the same records. `http` and `https` URLs are taken literally: their `?` begins a query, and a web
server lists no files.

A source file is a regular file: a pipe or a device has no end and cannot be read twice. Every storage error becomes one
`SourceError` that names the file without its secrets (`remote.py`).
"""

import glob
import itertools
import os
import re
import stat
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn, cast
from urllib.parse import unquote

from rowmill.core import remote
from rowmill.core.errors import ConfigError, PipelineError, SourceError
from rowmill.core.remote import public_url

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_EXPANSION_LIMIT = 100_000
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


@dataclass(frozen=True, slots=True)
class Location:
    """A URL as recorded, and the file system and path that reach it; `fs` is None for a local file."""

    url: str
    path: str
    fs: Any = None

    @property
    def identity(self) -> str:
        """Return an identity that is equal for two spellings of one file."""
        if self.fs is None:
            return os.path.realpath(self.path)
        return public_url(str(self.fs.unstrip_protocol(self.path)))


def expand_braces(pattern: str) -> list[str]:
    """Return the patterns that `{a,b}` and `{08..11}` expand to, in the order written, the last brace varying fastest.

    Braces nest. An unmatched brace, or one with neither a comma nor a range inside, is literal.
    """
    expanded = list(itertools.islice(_expand_pattern(pattern), _EXPANSION_LIMIT + 1))
    if len(expanded) > _EXPANSION_LIMIT:
        raise ConfigError(
            f"{pattern}: expands to more than {_EXPANSION_LIMIT:,} URLs; narrow it, or use a folder or a glob instead"
        )
    return expanded


def _expand_pattern(pattern: str) -> Iterator[str]:
    for start, end, commas in _find_brace_pairs(pattern):
        cuts = [start, *commas, end]
        inner = [pattern[a + 1 : b] for a, b in itertools.pairwise(cuts)]
        several = (text for part in inner for text in _expand_pattern(part))
        choices = _expand_range(inner[0]) if len(inner) == 1 else several
        if choices is None:
            continue
        for choice in choices:
            for rest in _expand_pattern(pattern[end + 1 :]):
                yield pattern[:start] + choice + rest
        return
    yield pattern


def _find_brace_pairs(pattern: str) -> Iterator[tuple[int, int, list[int]]]:
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


def _expand_range(text: str) -> Iterator[str] | None:
    match = _RANGE.fullmatch(text)
    if not match:
        return None
    first, last = match.groups()
    padded = any(len(end.lstrip("-")) > 1 and end.lstrip("-")[0] == "0" for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    step = 1 if int(first) <= int(last) else -1
    return (f"{number:0{width}d}" for number in range(int(first), int(last) + step, step))


def is_remote(url: str) -> bool:
    """Return whether a URL names its own file system."""
    return "://" in url or "::" in url


def is_web(url: str) -> bool:
    """Return whether a URL is a web address, which is taken literally and cannot be relied on for byte ranges."""
    return url.startswith(("http://", "https://"))


def is_pattern(url: str) -> bool:
    """Return whether a URL holds a glob."""
    return glob.has_magic(url) and not is_web(url)


def extract_suffix_text(url: str) -> str:
    """Return the part of a URL that ends in its file's suffix: no query, no fragment of a web address."""
    return re.split(r"[?#]", url, maxsplit=1)[0] if is_web(url) else url


def locate_url(url: str, base: Path) -> Location:
    """Return how to reach a URL; a path is relative to `base`."""
    if not is_remote(url):
        return Location(url, str(base / url))
    if url.startswith("file://"):
        return Location(url, url.removeprefix("file://"))
    try:
        fs, path = remote.open_filesystem(url)
    # Every file system checks its URLs in its own way, some by failing on them.
    except Exception as error:  # noqa: BLE001
        raise ConfigError(
            f"{public_url(url)}: cannot be reached ({remote.public_reason(error)}); expected a path, or a URL that "
            "fsspec can open without further arguments; correct the scheme or install the package that serves it "
            "(s3fs, gcsfs, adlfs, aiohttp)"
        ) from None
    return Location(public_url(url), path, fs)


_FOLDER_COLUMN = re.compile(r"([A-Za-z_][\w.-]*)=(.*)")
_NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"


def read_folder_columns(url: str) -> dict[str, str | None]:
    """Return the columns that a file's folders name, as Hive and Spark write them: `year=2024/lang=en/a.parquet`."""
    folders = extract_suffix_text(url).split("/")[:-1]
    columns = [match for folder in folders if (match := _FOLDER_COLUMN.fullmatch(folder)) is not None]
    return {unquote(column[1]): None if column[2] == _NULL_FOLDER else unquote(column[2]) for column in columns}


def find_urls(url: str, base: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return the URLs of the files that one URL without braces matches, if any.

    `suffixes` select the data files of a folder; names that start with `.` or `_` are ignored.
    """
    where = locate_url(url, base)
    if where.fs is not None:
        return _find_remote(url, where, suffixes)
    path = where.path
    if os.path.isdir(path):
        return _list_local_files(url, path, suffixes)
    if os.path.lexists(path):
        _require_regular_file(url, path)
        return [url]
    if not is_pattern(url):
        return []
    scheme = "file://" if url.startswith("file://") else ""
    matches = sorted(glob.glob(url.removeprefix(scheme), root_dir=base, recursive=True))
    if url.endswith("/"):
        return [file for match in matches for file in _list_local_files(scheme + match, str(base / match), suffixes)]
    files = [match for match in matches if not os.path.isdir(base / match)]
    for match in files:
        _require_regular_file(scheme + match, str(base / match))
    return [scheme + match for match in files]


def _list_local_files(url: str, folder: str, suffixes: tuple[str, ...]) -> list[str]:
    paths = (os.path.relpath(path, folder) for path in walk_files(folder))
    files = select_data_files(paths, url, suffixes)
    for path in files:
        _require_regular_file(f"{url.rstrip('/')}/{path}", os.path.join(folder, path))
    return [f"{url.rstrip('/')}/{path}" for path in files]


def walk_files(folder: str) -> Iterator[str]:
    """Yield the paths of a folder's files at any depth, also in linked folders.

    Folders whose names start with `.` or `_` are ignored, as in a source. A link to a folder around it is an error.
    """
    for top, folders, names in os.walk(folder, onerror=_raise_unreadable_folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        above = [top]
        while len(above[-1]) > len(folder):
            above.append(os.path.dirname(above[-1]))
        for path in (os.path.join(top, name) for name in folders):
            if os.path.islink(path) and (target := os.path.realpath(path)) in map(os.path.realpath, above):
                raise SourceError(
                    f"{path}: is a link to {target}, a folder that contains it, so its files have no end; linked "
                    "folders are followed, and must lead elsewhere; remove the link, or name the files"
                )
        yield from (os.path.join(top, name) for name in names)


def _raise_unreadable_folder(error: OSError) -> NoReturn:
    """Refuse a folder that cannot be listed: its files would be missing silently."""
    raise SourceError(
        f"{error.filename}: this folder cannot be read ({error.strerror}); all folders of a source must be readable; "
        "check its permissions, or name the files"
    ) from error


_DEVICES = (stat.S_IFCHR, stat.S_IFBLK)
_FILE_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", **dict.fromkeys(_DEVICES, "a device")}


def _require_regular_file(url: str, path: str) -> None:
    """Refuse a file that is not regular, a broken link, and a name that is not UTF-8."""
    try:
        url.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(url).decode("utf-8", "backslashreplace")
        raise SourceError(
            f"{shown}: this name is not UTF-8; names are recorded as text, so they must be UTF-8; rename the file"
        ) from None
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except FileNotFoundError as error:
        raise SourceError(
            f"{url}: is a broken link to {os.readlink(path)}; a source must not be missing; "
            "fetch the file, or remove the link"
        ) from error
    except OSError as error:
        raise remote.unreachable_error(url, "read", error) from error
    if kind != stat.S_IFREG:
        raise SourceError(
            f"{url}: is {_FILE_KINDS.get(kind, 'not a file')}; only regular files can be sources; write its content to "
            "a file, or move it out of the folder"
        )


_SAVED_SPLITS = "dataset_dict.json"
_HUB_NOTES = "dataset_infos.json"
_SAVED_NOTES = ("dataset_info.json", "state.json")
_ARROW_CACHE = re.compile(r"(?:cache-[0-9a-f]{16}.*|tmp[^/]{8})\.arrow|tmp[^/]{8}")


def select_data_files(paths: Iterable[str], url: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the data files of a folder, by code point; of one that `datasets` saved, neither notes nor caches."""
    files = [PurePosixPath(path) for path in sorted(paths)]
    saved = {path.parent for path in files if path.name == _SAVED_NOTES[1]} & {
        path.parent for path in files if path.suffix == ".arrow"
    }
    parents = {path.parent for path in files if path.name == _SAVED_SPLITS}
    splits = sorted({folder.name for folder in saved if folder.parent in parents})
    if len(splits) > 1:
        raise SourceError(
            f"{public_url(url)}: is a saved dataset with the splits {', '.join(splits)}; a source names the splits "
            f"that it reads; write train_urls: [{public_url(url).rstrip('/')}/"
            f"{'train' if 'train' in splits else splits[0]}], and validation_urls if one is held out"
        )
    return [
        str(path)
        for path in files
        if path.name.lower().endswith(suffixes)
        and not any(step.startswith((".", "_")) for step in path.parts)
        and not (path.parent in saved and (path.name in _SAVED_NOTES or _ARROW_CACHE.fullmatch(path.name)))
        and path.name not in (_SAVED_SPLITS, _HUB_NOTES)
    ]


def _find_remote(url: str, location: Location, suffixes: tuple[str, ...]) -> list[str]:
    facts = remote.fetch_info(location.fs, location.path, location.url)
    kind = None if facts is None else str(facts["type"])
    if kind == "directory":
        return _list_remote_files(location, location.path, suffixes)
    if kind is not None:
        _require_remote_file(location.url, kind)
        return [url]
    if not is_pattern(url):
        return []
    matches = remote.match_glob(location.fs, location.path, location.url)
    if url.endswith("/"):
        return [file for match in sorted(matches) for file in _list_remote_files(location, match, suffixes)]
    files = {path: facts for path, facts in matches.items() if facts["type"] != "directory"}
    return _list_regular_urls(files, location)


def _list_remote_files(location: Location, folder: str, suffixes: tuple[str, ...]) -> list[str]:
    entries = remote.find_files(location.fs, folder, location.url)
    inside = len(folder.rstrip("/")) + 1
    chosen = set(select_data_files((path[inside:] for path in entries), location.url, suffixes))
    return _list_regular_urls({path: facts for path, facts in entries.items() if path[inside:] in chosen}, location)


def _list_regular_urls(entries: Mapping[str, Mapping[str, Any]], location: Location) -> list[str]:
    for path in sorted(entries):
        _require_remote_file(location.fs.unstrip_protocol(path), str(entries[path]["type"]))
    return [location.fs.unstrip_protocol(path) for path in sorted(entries)]


def _require_remote_file(url: str, kind: str) -> None:
    if kind == "other":
        raise SourceError(
            f"{public_url(url)}: is not a regular file; only regular files can be sources; write its content to a "
            "file, or move it out of the folder"
        )


def stamp_file(location: Location) -> str:
    """Return a short text that changes when the file does; "" if the storage offers none.

    A local stamp has the change time as well as the modification time, which copies often keep.
    """
    with _explain_failure(location):
        if location.fs is None:
            facts = os.stat(location.path)
            return f"{facts.st_size}-{facts.st_mtime_ns}-{facts.st_ctime_ns}"
        ask = partial(location.fs.info, location.path)
        info = remote.retry_request(location.fs, location.url, "read", ask, size_bytes=0)
        for key in (*remote.VERSION_KEYS, *_TIME_KEYS):
            if info.get(key):
                return f"{info.get('size')}-{info[key]}"
        return ""


def open_raw(location: Location) -> BinaryIO:
    """Open a file for reading, without decompression."""
    with _explain_failure(location):
        if location.fs is None:
            return open(location.path, "rb")
        return remote.open_file(location.fs, location.path, location.url)


def read_range(location: Location, offset: int, length: int) -> bytes:
    """Read `length` bytes from `offset` on; fewer if the file ends before."""
    with _explain_failure(location):
        if location.fs is not None:
            cut = partial(location.fs.cat_file, location.path, start=offset, end=offset + length)
            return cast(bytes, remote.retry_request(location.fs, location.url, "read", cut, size_bytes=length))
        with open(location.path, "rb") as file:
            file.seek(offset)
            return file.read(length)


def read_whole(location: Location) -> bytes:
    """Read a whole file."""
    with open_raw(location) as file, _explain_failure(location):
        return file.read()


def file_exists(location: Location) -> bool:
    """Return whether the file exists."""
    if location.fs is None:
        return os.path.isfile(location.path)
    return remote.fetch_info(location.fs, location.path, location.url) is not None


@contextmanager
def _explain_failure(location: Location) -> Generator[None]:
    """Turn an OSError of a disk, or a storage's FileNotFoundError, into a `SourceError` that names the file."""
    try:
        yield
    except PipelineError:
        raise
    except OSError as error:
        if location.fs is None or isinstance(error, FileNotFoundError):
            raise remote.unreachable_error(location.url, "read", error) from error
        raise
