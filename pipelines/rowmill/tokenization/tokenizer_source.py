"""Find the tokenizer of a recipe: a folder, or a name on the Hugging Face hub at a commit.

    tokenizer: configs/demo/tokenizer                       a folder, identified by the content of its files
    tokenizer: Qwen/Qwen3-0.6B                              the hub's default branch, resolved by each build
    tokenizer: {name: Qwen/Qwen3-0.6B, revision: c1899de2…} a commit, which is fixed and needs no request

A path or a name is never part of a tokenizer's identity: a copy of a folder is the same tokenizer.
"""

import hashlib
import logging
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

from pydantic import Field

from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, UnreachableError
from rowmill.core.storage import digest_json

_LOG = logging.getLogger("rowmill.tokenizer")

_COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")

TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "sentencepiece.bpe.model",
    "special_tokens_map.json", "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "vocab.json", "vocab.txt",
)  # fmt: skip
"""The files of a saved tokenizer; a model's folder has others too, such as the index of its weights."""

_FETCHED_PATTERNS = (*TOKENIZER_FILES, "config.json", "additional_chat_templates/*.jinja", "*.model")
"""Files to fetch from the hub, including those from which `transformers` chooses the tokenizer's class."""

_HUB_TIMEOUT_S = 10.0


class TokenizerChoice(Config):
    """A tokenizer: a folder, or a name on the hub with a revision."""

    FILLED_IN: ClassVar = ("content",)

    name: str = Field(min_length=1)
    """A folder (relative to the recipe's project) or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub, of which only a commit never moves; null: the default branch."""
    content: str | None = None
    """The digest of a folder's files, filled in when the recipe is read, because other files give other tokens."""


@dataclass(frozen=True, slots=True)
class FoundTokenizer:
    """A tokenizer at a fixed state: in a folder, or on the hub at a commit."""

    choice: TokenizerChoice
    folder: Path | None
    commit: str | None

    @property
    def stamp(self) -> str:
        """An identity of its files; for a commit, computed without fetching them."""
        if self.folder is not None:
            return hash_tokenizer_folder(self.folder)
        return digest_json("hub", self.choice.name, self.commit)

    def fetch(self) -> Path:
        """Return the folder with its files; those of a commit come from the local cache, else from the hub."""
        if self.folder is not None:
            return self.folder
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        name, commit = self.choice.name, self.commit or ""
        try:
            return Path(snapshot_download(name, revision=commit, allow_patterns=list(_FETCHED_PATTERNS)))
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise _make_tokenizer_error(self.choice, f"the hub has no commit {commit[:12]} of it") from error
        # Network errors have many types.
        except Exception as error:
            raise _make_unreachable_error(self.choice, error) from error


def find_tokenizer_folder(name: str, base: Path) -> Path | None:
    """Return the folder of that name, relative to `base` or to the current folder; None if it is a name on the hub."""
    return next((folder for folder in (base / name, Path(name)) if folder.is_dir()), None)


def require_no_revision(folder: str, revision: object) -> None:
    """Refuse a revision of a folder, which would have no effect."""
    if revision is not None:
        raise ConfigError(
            f"tokenizer.revision: {revision!r} is given for the folder {folder!r}; only names on the hub have "
            "revisions; delete it"
        )


def find_tokenizer(choice: TokenizerChoice, base: Path, *, last_commit: str | None = None) -> FoundTokenizer:
    """Find a tokenizer's folder, or resolve its revision to a commit on the hub.

    `last_commit`: the commit to which the revision was resolved last, used if the hub does not answer.
    """
    folder = find_tokenizer_folder(choice.name, base)
    if folder is not None:
        require_no_revision(choice.name, choice.revision)
        return FoundTokenizer(choice, folder, None)
    if choice.name.startswith((".", "/", "~")) or choice.name.count("/") > 1:
        raise ConfigError(
            f"tokenizer: no folder {choice.name!r} (looked in {base}); expected a folder with tokenizer.json, or a hub "
            "name like Qwen/Qwen3-0.6B; correct the path"
        )
    if choice.revision is not None and _COMMIT_PATTERN.fullmatch(choice.revision):
        return FoundTokenizer(choice, None, choice.revision)
    key = (os.environ.get("HF_ENDPOINT", ""), choice.name, choice.revision)
    if key in _UNREACHABLE_REVISIONS:
        raise _UNREACHABLE_REVISIONS[key]
    if key not in _COMMIT_CACHE:
        try:
            _COMMIT_CACHE[key] = _ask_hub_for_commit(choice, last_commit)
        except UnreachableError as error:
            if _OPEN_BLOCKS:
                _UNREACHABLE_REVISIONS[key] = error
            raise
    return FoundTokenizer(choice, None, _COMMIT_CACHE[key])


def hash_tokenizer_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each of a tokenizer's files."""
    return {name: _hash_file(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}


def hash_tokenizer_folder(folder: Path) -> str:
    """Return a digest of all text and model files of a folder, since a tokenizer's class may read any of them.

    Within `hold_commits` files are read again only if they changed.
    """
    suffixes = {".json", ".jinja", ".model", ".txt"}
    paths = sorted(one for one in folder.iterdir() if one.suffix in suffixes and one.is_file())
    states = ((str(path), path.stat()) for path in paths)
    key = tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states)
    if key in _FOLDER_DIGESTS:
        return _FOLDER_DIGESTS[key]
    digest = digest_json({path.name: _hash_file(path) for path in paths})
    if _OPEN_BLOCKS:
        _FOLDER_DIGESTS[key] = digest
    return digest


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_Revision: TypeAlias = tuple[str, str, str | None]

_COMMIT_CACHE: dict[_Revision, str] = {}
_UNREACHABLE_REVISIONS: dict[_Revision, UnreachableError] = {}
_FOLDER_DIGESTS: dict[tuple[tuple[str, int, int, int], ...], str] = {}
_OPEN_BLOCKS: list[object] = []


@contextmanager
def hold_commits() -> Generator[None]:
    """Resolve each revision once in the block, so that it always is the same commit; blocks inside share the answers.

    Revisions that were resolved before the outermost block are forgotten. A hub that does not answer is asked once, and
    a folder is read once as long as its files stay as they are.
    """
    if not _OPEN_BLOCKS:
        forget_commits()
    _OPEN_BLOCKS.append(object())
    try:
        yield
    finally:
        _OPEN_BLOCKS.pop()
        if not _OPEN_BLOCKS:
            _UNREACHABLE_REVISIONS.clear()
            _FOLDER_DIGESTS.clear()


def forget_commits() -> None:
    """Forget resolved revisions."""
    _COMMIT_CACHE.clear()


def _ask_hub_for_commit(choice: TokenizerChoice, last_commit: str | None) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        commit = HfApi().model_info(choice.name, revision=choice.revision, timeout=_HUB_TIMEOUT_S).sha
    except HFValidationError as error:
        raise _make_tokenizer_error(choice, "it is neither a folder nor a valid name on the hub") from error
    except RevisionNotFoundError as error:
        raise _make_tokenizer_error(choice, f"the hub has no revision {choice.revision!r} of it") from error
    except RepositoryNotFoundError as error:
        raise _make_tokenizer_error(choice, "the hub has no such name, or you have no access to it") from error
    # Network errors have many types.
    except Exception as error:
        known_commit = last_commit or _find_cached_commit(choice)
        if known_commit is None:
            raise _make_unreachable_error(choice, error) from error
        _LOG.warning(
            "tokenizer: the hub did not resolve %s to a commit (%s); continuing with %s, the last known one",
            describe_tokenizer(choice), type(error).__name__, known_commit[:12],
        )  # fmt: skip
        return known_commit
    if commit is None:
        raise _make_tokenizer_error(choice, "the hub returned no commit for it")
    return commit


def _find_cached_commit(choice: TokenizerChoice) -> str | None:
    """Return the commit of a revision in the local cache of the hub; None if it is not cached."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            choice.name, revision=choice.revision, allow_patterns=list(_FETCHED_PATTERNS), local_files_only=True
        )
    except (OSError, ValueError):
        return None
    return Path(folder).name


def describe_tokenizer(choice: TokenizerChoice) -> str:
    """Return a tokenizer's name with its revision."""
    return f"{choice.revision or 'the default branch'} of {choice.name}"


def _make_tokenizer_error(choice: TokenizerChoice, what: str) -> ConfigError:
    return ConfigError(
        f"tokenizer: {choice.name!r} cannot be loaded ({what}); expected a folder with tokenizer.json and "
        "tokenizer_config.json, or a hub name and revision; point `tokenizer` at one"
    )


def _make_unreachable_error(choice: TokenizerChoice, error: BaseException) -> UnreachableError:
    why = " ".join(str(error).split())[:300]
    return UnreachableError(
        f"tokenizer: {choice.name!r} cannot be loaded ({type(error).__name__}: {why}); the hub must be reachable, or "
        "the tokenizer in its local cache; check the network, or give a folder"
    )
