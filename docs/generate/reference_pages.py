"""Divide the reference into pages, one per group of options, with an index of every option by its name."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

INDEX = "docs/reference.md"
FOLDER = "docs/reference"
RECIPE_SECTIONS = ("The file", "`tokenizer`", "`datasets.<name>`")
"""Sections that share the page of the recipe; every other section has a page of its own."""
RECIPE_PAGE = "recipe"

SECTION = re.compile(r"^## (.+)\n", re.MULTILINE)
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)\)")
OPTION = re.compile(r"^\| `([\w-]+)` \|", re.MULTILINE)
OPTION_TABLE = "| option | type |"


def make_anchor(title: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@dataclass(frozen=True)
class Page:
    """One page of the reference: `text` starts with its title, and its links are relative to `docs/`."""

    name: str
    title: str
    text: str

    @property
    def purpose(self) -> str:
        """The first sentence below the title."""
        return self.text.split("\n\n")[1].split("\n")[0]


def divide_reference(reference: str, notice: str) -> dict[str, str]:
    """Return the index and the pages of a reference in one text, by their paths in the project."""
    head, *parts = SECTION.split(reference)
    pages = list(_make_pages(dict(zip(parts[::2], parts[1::2], strict=True))))
    places = {anchor: page for page in pages for anchor in _list_anchors(page)}
    # A page's title wins over a section of the same name on another page.
    places |= {make_anchor(page.title): page for page in pages}
    made = {f"{FOLDER}/{page.name}.md": _finish_page(page, places, notice) for page in pages}
    return {INDEX: _make_index(head, pages), **made}


def _make_pages(sections: Mapping[str, str]) -> Iterator[Page]:
    joined = "\n\n".join(f"## {title}\n{sections[title].rstrip()}" for title in RECIPE_SECTIONS)
    yield Page(
        RECIPE_PAGE, "The recipe", f"# The recipe\n\nThe keys of a recipe's file, and of each dataset.\n\n{joined}"
    )
    for title, text in sections.items():
        if title not in RECIPE_SECTIONS:
            name = make_anchor(title.removeprefix("`datasets.<name>."))
            yield Page(name, title, _raise_headings(f"## {title}\n{text}"))


def _raise_headings(text: str) -> str:
    return HEADING.sub(lambda found: f"{found[1][1:]} {found[2]}", text)


def _list_anchors(page: Page) -> Iterable[str]:
    return (make_anchor(title) for _, title in HEADING.findall(page.text))


def _finish_page(page: Page, places: Mapping[str, Page], notice: str) -> str:
    def lead(found: re.Match[str]) -> str:
        target = found[1]
        if "://" in target:
            return found[0]
        if not target.startswith("#"):
            return f"](../{target})"
        there = places[target[1:]]
        if there is page:
            return found[0]
        anchor = "" if make_anchor(there.title) == target[1:] else target
        return f"]({there.name}.md{anchor})"

    title, _, rest = page.text.partition("\n")
    return f"{title}\n\n{notice}\n{LINK.sub(lead, rest)}".rstrip("\n") + "\n"


def _make_index(head: str, pages: Iterable[Page]) -> str:
    lines = [head.rstrip("\n"), "", "| page | what it lists |", "|---|---|"]
    places: defaultdict[str, list[str]] = defaultdict(list)
    for page in pages:
        lines.append(f"| [{page.title}](reference/{page.name}.md) | {page.purpose} |")
        for option, link in _list_options(page):
            places[option].append(link)
    lines += ["", "## Every option by name", "", "| option | where |", "|---|---|"]
    lines += [f"| `{option}` | {' · '.join(places[option])} |" for option in sorted(places)]
    return "\n".join(lines) + "\n"


def _list_options(page: Page) -> Iterator[tuple[str, str]]:
    """Yield the options of a page, with a link to the section that has their table."""
    title = page.title
    for part in re.split(r"^(?=#)", page.text, flags=re.MULTILINE):
        heading = HEADING.match(part)
        title = heading[2] if heading else title
        anchor = "" if title == page.title else f"#{make_anchor(title)}"
        inner = title.replace("`", "").removeprefix("datasets.<name>.")
        shown = page.name if title == page.title else f"{page.name}, {inner}"
        for table in re.findall(rf"^{re.escape(OPTION_TABLE)}.*?(?=\n\n|\Z)", part, re.MULTILINE | re.DOTALL):
            for option in OPTION.findall(table):
                yield option, f"[{shown}](reference/{page.name}.md{anchor})"
