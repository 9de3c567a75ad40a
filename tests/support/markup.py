"""What a browser would make of a page, without a browser."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """A page: its links, its anchors, the elements it has, the words it shows."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.markup = markup
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words = ""
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words += data

    def values(self, name: str, tag: str | None = None) -> list[str]:
        return [value for of, key, value in self.attributes if key == name and tag in (None, of)]
