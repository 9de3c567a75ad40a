"""Which split a file is named for, by the rule of the `datasets` library.

    train-00000-of-00002.parquet   train        latest.jsonl           none: `test` is part of a word
    val/cats.jsonl                 validation   train_test_logs.jsonl  none: it names two
    my_data.eval.csv               test         photo of test tubes    test: a name that means something else

A word counts if other characters than letters are around it. Folders come before the file, the innermost first, and
of both only what a URL leaves open: a file or folder that is written out is what the recipe says it is.
"""

import re
from collections.abc import Mapping

from rowmill.schema.rows import Split
from rowmill.sources import urls

SPLIT_WORDS: Mapping[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words by the split that they name."""

_SPLIT_OF_WORD = {word: split for split, words in SPLIT_WORDS.items() for word in words}
_LETTERS = re.compile(r"[^\W\d_]+")


def find_split_name(pattern: str, url: str) -> Split | None:
    """Return the split that a file is named for in what a URL without braces, by which it was found, leaves open.

    None if it is named for none, or the URL itself has the word.
    """
    fixed, varying = _split_pattern(pattern)
    inside = url[len(fixed) :] if url.startswith(fixed) else url.rpartition("/")[2]
    if not inside.strip("/"):
        return None
    found = name_split(inside)
    return None if found in {_SPLIT_OF_WORD.get(word) for word in _list_words(varying)} else found


def name_split(path: str) -> Split | None:
    """Return the split that a path names; None if it names none, or its first part with such words names two."""
    *folders, file = path.split("/")
    for part in (*reversed(folders), file):
        named = {_SPLIT_OF_WORD[word] for word in _list_words(part) if word in _SPLIT_OF_WORD}
        if len(named) == 1:
            return named.pop()
        if named == {"validation", "test"}:
            # Held out in any case, and what is tested must not be tuned on.
            return "test"
    return None


def _list_words(text: str) -> list[str]:
    return [word.lower() for word in _LETTERS.findall(text)]


def _split_pattern(pattern: str) -> tuple[str, str]:
    """Return a URL's start that has no sign of a glob, up to a slash, and the rest of a glob."""
    if not urls.is_pattern(pattern):
        return pattern, ""
    steps = pattern.split("/")
    first = next(i for i, step in enumerate(steps) if urls.is_pattern(step))
    return "/".join(steps[:first]), "/".join(steps[first:])
