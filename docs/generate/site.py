"""Arranges docs/ as a site: the four kinds of pages, listed in docs/README.md too, and what a search ranks first.

`mkdocs.yml` names this file as a hook. Pages are written for the repository's host, where they are read as well; here a
link to a folder, or out of docs/, becomes plain text. The first page is the repository's README, with the kinds of
pages in place of its list of them.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from docs.generate.reference_pages import make_anchor

DOCS = Path(__file__).resolve().parents[1]
INDEX = "docs/README.md"
README = DOCS.parent / "README.md"
README_LIST = "## Documentation\n"
"""The heading of the README's last section, whose place the kinds of pages take on the site."""
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
PURPOSES = {
    "Tutorial": "Your data to a trained model in ten minutes.",
    "How-to": "One task each: templates, tables, nightly rebuilds, more machines, training.",
    "Coming from": "What the options of other projects are called here.",
    "Reference": "Every option, check, reason, command and file format.",
    "Explanation": "What goes wrong with training data, and one row followed through all stages.",
    "Decisions": "What was chosen, for which reason, and at what price.",
}
SEARCH_BOOSTS = {"Tutorial": 2.0, "How-to": 4.0, "Explanation": 2.0}
"""How much more a page's words count in the site's search: a task before the options that it uses."""
GENERATED = "<!-- Written by `make docs`"
"""How the notice of a page begins that nobody writes by hand."""
README_LINK = re.compile(r"(?<=\]\()docs/|(?<=src=\")docs/|(?<=srcset=\")docs/")
PICTURE = re.compile(r"^!\[([^][\"]+)\]\(([\w/.-]+\.png)\)$", re.MULTILINE)
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


def compose_first_page(index: str) -> str:
    """Return the site's first page: the README up to its list of pages, the kinds of pages, the rest of `index`."""
    readme = README.read_text(encoding="utf-8").partition(README_LIST)[0]
    # Files outside docs/ are not part of the site; a link to one is found by its way up.
    readme = re.sub(r"(?<=\]\()(?!docs/|https?:|#)", "../", readme)
    cards = (f"- **[{kind}]({pages[0]})**<br>{PURPOSES[kind]}" for kind, pages in group_pages().items())
    rest = index.partition(LIST_END)[2]
    readme = PICTURE.sub(offer_narrow, README_LINK.sub("", readme))
    return "\n".join([readme, '<div class="kinds" markdown>', "", *cards, "", "</div>", "", rest])


def offer_narrow(picture: re.Match[str]) -> str:
    """Return a picture with a narrow one for phones, if there is one."""
    narrow = picture[2].removesuffix(".png") + "-narrow.png"
    if not (DOCS / narrow).is_file():
        return picture[0]
    source = f'<source media="(max-width: 600px)" srcset="{narrow}">'
    return f'<picture>{source}<img alt="{picture[1]}" src="{picture[2]}"></picture>'


def unlink_outside(markdown: str, source: str) -> str:
    """Return a page with its links to folders, and to files outside docs/, as plain text."""

    def unlink(link: re.Match[str]) -> str:
        target = (DOCS / source).parent / link[2]
        return link[0] if target.resolve().is_relative_to(DOCS) and target.is_file() else link[1]

    return UPWARD_LINK.sub(unlink, markdown)


# ── Hooks of MkDocs ──


def on_config(config: Any) -> Any:
    """List the pages by kind, and give headings the anchors that they have on the repository's host."""
    config.mdx_configs["toc"]["slugify"] = lambda title, _: make_anchor(title)
    config.nav = [{"rowmill": "README.md"}, *({kind: pages} for kind, pages in group_pages().items())]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Weigh a page for the search, unlink files outside docs/, and offer to edit only what people write."""
    source = page.file.src_uri
    kind = next((kind for kind, pages in group_pages().items() if source in pages), "")
    page.meta["search"] = {"boost": SEARCH_BOOSTS.get(kind, 1.0)}
    if source == Path(INDEX).name:
        page.meta["hide"] = ["navigation", "toc"]
        markdown = compose_first_page(markdown)
    if source == Path(INDEX).name or GENERATED in markdown:
        page.edit_url = None
    return unlink_outside(markdown, source)
