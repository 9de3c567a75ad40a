"""Write the identity card and the manifest of an export, and open an export with its checks.

<export>/
├── data/            the folder that a trainer reads; it holds only the format's files
├── card.json        which recipe, tokenizer and template made the tokens
└── manifest.json    written last: if it exists, every file it names is complete
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import orjson

from rowmill.core.errors import IntegrityError
from rowmill.exports.base import WrittenFile

CARD_FILE, MANIFEST_FILE, DATA_FOLDER = "card.json", "manifest.json", "data"
MANIFEST_VERSION = 1

_BLOCK_BYTES = 1 << 20


def describe_builder() -> str:
    """Return this project's name and version."""
    try:
        return f"rowmill {version('rowmill')}"
    except PackageNotFoundError:
        return "rowmill"


def encode_json(value: object) -> bytes:
    """Encode a card or manifest: UTF-8, indented, sorted keys."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


@dataclass(frozen=True, slots=True)
class FileDigests:
    """A written file with its size and two digests: SHA-256 for users, BLAKE2b for rowmill's manifests."""

    written: WrittenFile
    size_bytes: int
    sha256: str
    digest: str


def digest_written_file(folder: Path, written: WrittenFile) -> FileDigests:
    """Read a written file once and return its size and digests."""
    sha, blake, size = sha256(), blake2b(digest_size=16), 0
    with (folder / written.path).open("rb") as handle:
        while block := handle.read(_BLOCK_BYTES):
            size += len(block)
            sha.update(block)
            blake.update(block)
    return FileDigests(written, size, sha.hexdigest(), blake.hexdigest())


def encode_manifest(files: Sequence[FileDigests], card: bytes) -> bytes:
    """Return the manifest of some files and their card."""
    named = {
        file.written.path: {
            "bytes": file.size_bytes,
            "sha256": file.sha256,
            "sequences": file.written.sequences,
            "segments": file.written.segments,
            "tokens": file.written.tokens,
            "trained_tokens": file.written.trained_tokens,
        }
        for file in files
    }
    return encode_json({"version": MANIFEST_VERSION, "card_sha256": sha256(card).hexdigest(), "files": named})


# ── Opening ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Exported:
    """A complete export: its folder, its card, and per file its size, digest and counts."""

    folder: Path
    card: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]

    @property
    def data(self) -> Path:
        """The folder that a trainer reads."""
        return self.folder / DATA_FOLDER

    def count(self, name: str) -> int:
        """Return a count over all files: `sequences`, `segments`, `tokens` or `trained_tokens`."""
        return sum(int(file[name]) for file in self.files.values())


def open_export(
    folder: str | Path, *, tokenizer: str | Path | None = None, verify: bool = False, kind: str | None = None
) -> Exported:
    """Open an export's folder after checking that a trainer may read it.

    `tokenizer` is a folder whose files must be those that made the tokens; `verify` reads every file and compares
    digests; `kind` is the format that the export must have.

    Raises
    ------
    IntegrityError
        If the manifest or a file is missing, a size or digest differs, or the tokenizer or format is another one.
    """
    at = Path(folder)
    at = at.parent if at.name == DATA_FOLDER and not (at / MANIFEST_FILE).is_file() else at
    if not (at / MANIFEST_FILE).is_file():
        raise IntegrityError(
            f"{at}: no {MANIFEST_FILE}; it is written last, so without it an export is incomplete; export again, or "
            "name the folder that holds it"
        )
    card_bytes = _read_export_file(at / CARD_FILE)
    found, card = _parse_export_json(at / MANIFEST_FILE), _parse_export_json(at / CARD_FILE)
    if sha256(card_bytes).hexdigest() != found.get("card_sha256"):
        raise IntegrityError(
            f"{at / CARD_FILE}: not the card that {MANIFEST_FILE} names; card and files must belong to one "
            "export; export again"
        )
    exported = Exported(at, card, cast("dict[str, dict[str, Any]]", found["files"]))
    for path, one in exported.files.items():
        _require_whole_file(at / path, one, verify=verify)
    if kind is not None and card.get("format") != kind:
        raise IntegrityError(f"{at}: its format is {card.get('format')}, not {kind}; name another export")
    if tokenizer is not None:
        _require_tokenizer(exported, Path(tokenizer))
    return exported


def _read_export_file(path: Path) -> bytes:
    if not path.is_file():
        raise IntegrityError(f"{path}: missing; every export has one; copy the whole folder, or export again")
    return path.read_bytes()


def _parse_export_json(path: Path) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", orjson.loads(_read_export_file(path)))
    except ValueError as error:
        raise IntegrityError(f"{path}: not JSON ({error}); expected it as it was written; export again") from error


def _require_whole_file(path: Path, expected: Mapping[str, Any], *, verify: bool) -> None:
    if not path.is_file():
        raise IntegrityError(f"{path}: missing; {MANIFEST_FILE} names it; copy the whole folder, or export again")
    if path.stat().st_size != expected["bytes"]:
        raise IntegrityError(
            f"{path}: {path.stat().st_size} bytes; {MANIFEST_FILE} says {expected['bytes']}; copy it again, or "
            "export again"
        )
    if verify and digest_written_file(path.parent, WrittenFile(path.name)).sha256 != expected["sha256"]:
        raise IntegrityError(f"{path}: its SHA-256 is not that of {MANIFEST_FILE}; copy it again, or export again")


def _require_tokenizer(exported: Exported, folder: Path) -> None:
    expected = cast("dict[str, str]", exported.card["tokenizer_files"])
    for name, digest in expected.items():
        path = folder / name
        found = sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        if found != digest:
            what = "missing" if found is None else f"SHA-256 {found[:16]}…"
            raise IntegrityError(
                f"{path}: {what}; {exported.folder} was made with a file of SHA-256 {digest[:16]}…; train with that "
                "tokenizer, or "
                "export with this one"
            )
