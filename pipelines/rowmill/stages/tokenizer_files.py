"""The recipe's tokenizer, opened once and kept in the store as data.

What belongs here: which tokenizer a build uses, and its kept form. What does not: opening its files
(`tokenization/`).
"""

from typing import Any

from rowmill.core.storage import Store, digest
from rowmill.stages.base import Work
from rowmill.tokenization import tokenizer, tokenizer_source
from rowmill.tokenization.tokenizer import LoadedTokenizer
from rowmill.tokenization.tokenizer_source import FoundTokenizer

KEPT_TOKENIZERS, KEPT_COMMITS = "tokenizers", "tokenizer_commits"
"""Folders of a store: tokenizers as data, and which commit a revision of the hub was when it was last asked for."""


def open_tokenizer(work: Work) -> tuple[LoadedTokenizer, str]:
    """Return the recipe's tokenizer and its path in the store, loading it only if its files changed."""
    found = find_tokenizer(work)
    path = f"{KEPT_TOKENIZERS}/{digest(tokenizer.VERSION, found.stamp)}.json"
    if not work.store.exists(path):
        work.store.write(path, tokenizer.to_bytes(tokenizer.load_tokenizer(found)))
    return tokenizer.from_bytes(work.store.read(path)), path


def find_tokenizer(work: Work) -> FoundTokenizer:
    """Return where the recipe's tokenizer is; what a revision of the hub is today is noted in the store."""
    choice = work.recipe.tokenizer_choice
    noted = f"{KEPT_COMMITS}/{digest(choice.name, choice.revision)}.json"
    last: dict[str, Any] = work.store.read_sealed(noted) or {}
    found = tokenizer_source.find_tokenizer(choice, work.base, last_commit=last.get("commit"))
    if found.commit is not None and found.commit != last.get("commit"):
        work.store.write_sealed(noted, {"name": choice.name, "revision": choice.revision, "commit": found.commit})
    return found


def copy_tokenizers(source: Store, target: Store) -> None:
    """Take kept tokenizers along to another store: opening one anew takes seconds."""
    for folder in (KEPT_TOKENIZERS, KEPT_COMMITS):
        for name in source.list(folder):
            target.write(f"{folder}/{name}", source.read(f"{folder}/{name}"))
