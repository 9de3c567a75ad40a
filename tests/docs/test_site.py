"""The documentation builds as a site without a dead link, and its search answers what a newcomer asks.

The scores are those of the search in a reader's browser: lunr's, for every word as the beginning of words, weighted by
Material as its `search/_/index.ts` does.
"""

import json
import math
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_docs import ROOT

ANSWERS = {
    "how do I keep system prompts": "Write a recipe",
    "which template do I need": "Choose a chat template",
    "why is my row gone": "Troubleshooting",
    "how do I resume on other GPUs": "Train on a build",
    "what does it cost at 1 B tokens": "What a build costs, and how large it can get",
    "how do I train with TRL": "Train on a build",
    "how do I choose what trains": "Choose a chat template",
    "how do I read my own format": "Bring token ids, or your own format",
    "how do I run it on Slurm": "Run it on more machines",
    "how do I remove near duplicates": "Remove contamination and near duplicates",
}
"""What a newcomer asks, and the title of the page that the search must find first."""
SATURATION = 1.2
"""Lunr's k1; its b is 0, so the length of a text does not count."""
STOP_WORDS = frozenset(
    "a able about across after all almost also am among an and any are as at be because been but by can cannot could "
    "dear did do does either else ever every for from get got had has have he her hers him his how however i if in "
    "into is it its just least let like likely may me might most must my neither no nor not of off often on only or "
    "other our own rather said say says she should since so some than that the their them then there these they this "
    "tis to too twas us wants was we were what when where which while who whom why will with would yet you your".split()
)
"""Words that lunr does not index."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make site` does."""
    pytest.importorskip("material", reason="MkDocs is not installed: pip install 'rowmill[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture(scope="module")
def index(site: Path) -> dict[str, Any]:
    """Return the index that a reader's browser searches."""
    return json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))


def split_words(text: str, separator: str) -> list[str]:
    """Return the words of a text, without the tags of its code and links."""
    return [word for word in re.split(separator, re.sub(r"<[^>]+>", " ", text).lower()) if word]


def rank_sections(index: Mapping[str, Any], question: str) -> list[str]:
    """Return the locations of the sections that have a word of the question, the best first."""
    sections = {section["location"]: section for section in index["docs"]}
    fields, separator = index["config"]["fields"], index["config"]["separator"]
    counts: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for location, section in sections.items():
        for field in fields:
            for word in split_words(section.get(field, ""), separator):
                counts[word][location, field] += 1
    scores: defaultdict[str, float] = defaultdict(float)
    found: defaultdict[str, set[str]] = defaultdict(set)
    wanted = split_words(question, separator)
    for term in wanted:
        for word in counts.keys() - STOP_WORDS:
            if word.startswith(term):
                rarity = math.log(1 + abs((len(sections) - len(counts[word]) + 0.5) / (len(counts[word]) + 0.5)))
                for (location, field), count in counts[word].items():
                    weight = fields[field]["boost"] * sections[location].get("boost", 1)
                    scores[location] += weight * rarity * (SATURATION + 1) * count / (SATURATION + count)
                    found[location].add(term)
    for location in scores:
        share = len(found[location]) / len(found[location] | set(wanted) - STOP_WORDS)
        scores[location] *= 1 + (("#" not in location) + share) ** 2
    return sorted(scores, key=lambda location: scores[location], reverse=True)


@pytest.mark.slow
def test_site_is_built_without_a_warning_with_every_page_in_its_search_and_nothing_from_elsewhere(
    index: dict[str, Any], site: Path
) -> None:
    found = {Path(section["location"].partition("#")[0]).with_suffix("") for section in index["docs"]}
    pages = [path.relative_to(ROOT / "docs").with_suffix("") for path in ROOT.glob("docs/**/*.md")]

    assert {path for path in pages if path.name != "README"} <= found
    loaded = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^\s>]+""")
    assert [found for path in site.rglob("*.html") for found in loaded.findall(path.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
@pytest.mark.parametrize("question", ANSWERS)
def test_first_page_that_the_search_finds_answers(question: str, index: dict[str, Any]) -> None:
    titles = {section["location"]: section["title"] for section in index["docs"]}
    pages = [titles[location.partition("#")[0]] for location in rank_sections(index, question)]

    assert pages[0] == ANSWERS[question], f"found first: {list(dict.fromkeys(pages))[:4]}"
