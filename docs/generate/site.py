"""Arranges docs/ as a site: the four kinds of pages, listed in docs/README.md too, and what a search ranks first.

`mkdocs.yml` names this file as a hook. Pages are written for the repository's host, where they are read as well; here a
link to a folder, or out of docs/, becomes plain text.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from docs.generate.reference_pages import make_anchor

DOCS = Path(__file__).resolve().parents[1]
INDEX = "docs/README.md"
LIST_BEGIN, LIST_END = "<!-- pages: written by `make docs` -->", "<!-- end of pages -->"
KINDS = {
    "Tutorial": ("tutorial.md",),
    "How-to": (
        "install.md",
        "how-to/*.md",
        "troubleshooting.md",
        "your-own-format.md",
        "extend-the-engine.md",
        "releasing.md",
    ),
    "Coming from": ("coming-from/*.md",),
    "Reference": (
        "reference.md",
        "formats.md",
        "api.md",
        "stability.md",
        "glossary.md",
        "reasons.md",
        "templates.md",
        "reference/*.md",
    ),
    "Explanation": ("why.md", "walk.md", "what-is-verified.md", "explanation/*.md"),
    "Decisions": ("decisions/*.md",),
}
"""The kinds of pages, in the order of the site's tabs, with the patterns of their files."""
SEARCH_BOOSTS = {"Tutorial": 2.0, "How-to": 4.0, "Explanation": 2.0}
"""How much more a page's words count in the site's search: a task before the options that it uses."""
UPWARD_LINK = re.compile(r"\[([^][]+)\]\((\.\./[^()\s#]+)[^()\s]*\)")


@cache
def group_pages() -> dict[str, list[str]]:
    """Return the pages of each kind, relative to docs/."""
    return {
        kind: [path.relative_to(DOCS).as_posix() for pattern in patterns for path in sorted(DOCS.glob(pattern))]
        for kind, patterns in KINDS.items()
    }


def read_title(page: str) -> str:
    """Return a page's title without Markdown."""
    found = re.search(r"^# (.+)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1].replace("`", "")


def replace_page_list(index: str) -> str:
    """Return docs/README.md with its lists of pages replaced."""
    lines = [LIST_BEGIN]
    for kind, pages in group_pages().items():
        lines += ["", f"## {kind}", "", *(f"- [{read_title(page)}]({page})" for page in pages)]
    begin, end = index.index(LIST_BEGIN), index.index(LIST_END)
    return index[:begin] + "\n".join([*lines, "", ""]) + index[end:]


# ── Hooks of MkDocs ──


def on_config(config: Any) -> Any:
    """List the pages by kind, and give headings the anchors that they have on the repository's host."""
    config.mdx_configs["toc"]["slugify"] = lambda title, _: make_anchor(title)
    config.nav = [{"rowmill": "README.md"}, *({kind: pages} for kind, pages in group_pages().items())]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Weigh a page for the search, and take links to files outside docs/ out of it."""
    kind = next((kind for kind, pages in group_pages().items() if page.file.src_uri in pages), "")
    page.meta["search"] = {"boost": SEARCH_BOOSTS.get(kind, 1.0)}

    def unlink(link: re.Match[str]) -> str:
        target = (DOCS / page.file.src_uri).parent / link[2]
        return link[0] if target.resolve().is_relative_to(DOCS) and target.is_file() else link[1]

    return UPWARD_LINK.sub(unlink, markdown)
