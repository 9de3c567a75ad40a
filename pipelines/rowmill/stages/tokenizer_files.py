"""The recipe's tokenizer, opened once and stored as data.

What belongs here: which tokenizer a build uses, and its stored form. What does not: opening its files
(`tokenization/`).
"""

from typing import Any

from rowmill.core.storage import Store, digest_json
from rowmill.stages.base import StageContext
from rowmill.tokenization import tokenizer, tokenizer_card, tokenizer_source
from rowmill.tokenization.engines import FAST_ENGINES, REFERENCE_ENGINE, get_engine_version
from rowmill.tokenization.tokenizer_card import LoadedTokenizer
from rowmill.tokenization.tokenizer_source import FoundTokenizer

TOKENIZER_FOLDER, COMMIT_FOLDER = "tokenizers", "tokenizer_commits"
"""Folders of a store: tokenizers as data, and the last known commit of each revision on the hub."""


def open_recipe_tokenizer(work: StageContext) -> tuple[LoadedTokenizer, str]:
    """Return the recipe's tokenizer and its path in the store, loading it only if its files or an engine changed."""
    found = find_recipe_tokenizer(work)
    # Another release of an engine is another engine until it was compared with the reference.
    releases = {name: get_engine_version(name) for name in (*FAST_ENGINES, REFERENCE_ENGINE)}
    path = f"{TOKENIZER_FOLDER}/{digest_json(tokenizer.TOKENIZATION_VERSION, found.stamp, releases)}.json"
    if not work.store.exists(path):
        work.store.write(path, tokenizer_card.serialize_tokenizer(tokenizer.load_tokenizer(found)))
    return tokenizer_card.deserialize_tokenizer(work.store.read(path)), path


def find_recipe_tokenizer(work: StageContext) -> FoundTokenizer:
    """Locate the recipe's tokenizer; the current commit of a hub revision is recorded in the store."""
    choice = work.recipe.tokenizer_choice
    noted = f"{COMMIT_FOLDER}/{digest_json(choice.name, choice.revision)}.json"
    last: dict[str, Any] = work.store.read_sealed(noted) or {}
    found = tokenizer_source.find_tokenizer(choice, work.base, last_commit=last.get("commit"))
    if found.commit is not None and found.commit != last.get("commit"):
        work.store.write_sealed(noted, {"name": choice.name, "revision": choice.revision, "commit": found.commit})
    return found


def copy_tokenizers(source: Store, target: Store) -> None:
    """Copy stored tokenizers to another store, since opening one from its files takes seconds."""
    for folder in (TOKENIZER_FOLDER, COMMIT_FOLDER):
        for name in source.list(folder):
            target.write(f"{folder}/{name}", source.read(f"{folder}/{name}"))
