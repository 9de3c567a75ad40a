"""The documentation builds as a site without a dead link, and its search answers what a newcomer asks.

The scores are those of the search in a reader's browser: lunr's, for every word as the beginning of words, weighted by
Material as its `search/_/index.ts` does.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate import site as arrangement
from tests.docs.test_docs import ROOT
from tests.support.site import build_site

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
TERMS = {
    "end_of_turn": "reference/loss.html",
    "context_overflow": "reference/checks.html",
    "resume": "how-to/train.html#resume-on-other-gpus",
    "loss mask": "walk.html#5-tokens-and-the-loss-mask-tokenized_examples",
}
"""Names and terms, and a section that must be among the first three that the search finds."""
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
    return build_site(tmp_path_factory.mktemp("site"))


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


@pytest.mark.slow
@pytest.mark.parametrize("term", TERMS)
def test_search_finds_the_section_of_a_term(term: str, index: dict[str, Any]) -> None:
    assert TERMS[term] in rank_sections(index, term)[:3]


def test_first_page_is_the_readme_with_every_link_and_picture_inside_the_site() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = arrangement.compose_first_page((ROOT / arrangement.INDEX).read_text(encoding="utf-8"))

    first_screen, _, _ = readme.partition("## Why")
    before, picture, after = re.split(r"!\[[^]]+\]\(docs/(images/mask\.png)\)", first_screen)
    assert page.startswith(before)
    assert after in page
    # A phone shows the same picture with lines that it has room for.
    assert 'srcset="images/mask-narrow.png"' in page
    assert f'src="{picture}"' in page
    assert all(f"**[{kind}]({pages[0]})**" in page for kind, pages in arrangement.group_pages().items())
    assert "images/pipeline.svg" in page
    named = re.findall(
        r"""(?:\]\(|src="|srcset=")([^)"\s]+)""", arrangement.unlink_outside(page, Path(arrangement.INDEX).name)
    )
    inside = [target.partition("#")[0] for target in named if "://" not in target]
    assert len(inside) > 20
    assert [target for target in inside if target and not (ROOT / "docs" / target).is_file()] == []


@pytest.mark.slow
def test_pages_have_a_link_to_edit_them_only_where_the_forge_names_one(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/site.yml").read_text(encoding="utf-8"))
    [build] = [step for step in workflow["jobs"]["build"]["steps"] if "run" in step]
    [variable] = build["env"]
    monkeypatch.setenv(variable, "https://forge.invalid/rowmill/edit/main/docs/")
    there = build_site(tmp_path)

    link = "https://forge.invalid/rowmill/edit/main/docs/"
    assert f"{link}why.md" in (there / "why.html").read_text(encoding="utf-8")
    for generated in ("index.html", "reference/loss.html", "walk.html"):
        assert link not in (there / generated).read_text(encoding="utf-8")
    assert "/edit/" not in (site / "why.html").read_text(encoding="utf-8")
