"""The reference is divided into pages without losing a line, and its index finds every option."""

import re

import pytest

from docs.generate import reference
from docs.generate.reference_pages import FOLDER, INDEX, divide_reference

SMALL = """# Reference

What a recipe has.

## The file

The keys.

| option | type |
|---|---|
| `mixture` | [`mixture`](#mixture) |

## `tokenizer`

A tokenizer.

## `datasets.<name>`

One dataset.

## `mixture`

How datasets are mixed, see [a page](how-to/train.md).

### Block shuffle

| option | type |
|---|---|
| `io_block_size` | integer |

## Statistics

Views.

### `mixture`

A view; the option is [`io_block_size`](#block-shuffle).
"""


def test_sections_become_pages_whose_links_lead_to_each_other_and_an_index() -> None:
    pages = divide_reference(SMALL, "<!-- notice -->")

    assert pages.keys() == {INDEX, *(f"{FOLDER}/{name}.md" for name in ("recipe", "mixture", "statistics"))}
    mixture = pages[f"{FOLDER}/mixture.md"]
    first = "# `mixture`\n\n<!-- notice -->\n\nHow datasets are mixed, see [a page](../how-to/train.md)."
    assert mixture.startswith(first)
    assert "\n## Block shuffle\n" in mixture
    # The page of that title, not the view of the same name.
    assert "| `mixture` | [`mixture`](mixture.md) |" in pages[f"{FOLDER}/recipe.md"]
    assert "[`io_block_size`](mixture.md#block-shuffle)" in pages[f"{FOLDER}/statistics.md"]
    index = pages[INDEX]
    assert "| [`mixture`](reference/mixture.md) | How datasets are mixed, see [a page](how-to/train.md). |" in index
    assert "| `io_block_size` | [mixture, Block shuffle](reference/mixture.md#block-shuffle) |" in index


@pytest.mark.slow
def test_pages_have_every_table_of_the_reference() -> None:
    whole = reference.render_reference()
    pages = divide_reference(whole, "")
    for name in set(re.findall(r"^\| (`[\w-]+`) \|", whole, re.MULTILINE)):
        assert any(f"| {name} |" in text for path, text in pages.items() if path != INDEX), name
    rows = sum(len(re.findall(r"^\|", text, re.MULTILINE)) for path, text in pages.items() if path != INDEX)
    assert rows == len(re.findall(r"^\|", whole, re.MULTILINE))
