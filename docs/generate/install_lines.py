"""The commands that install rowmill, for every page: until its name is on a registry, from the clone.

    pip install 'rowmill[build]'   ◄── PUBLISHED ──►   pip install '.[build]'

A page's comment on the clone, where it has one, goes with it.
"""

import re
import tomllib
from pathlib import Path

PUBLISHED = False
"""Whether `pip install rowmill` finds rowmill; `docs/releasing.md` says when to change it."""

COMMENT = "   # in the clone"
"""Goes when the name is published."""
OF_BLOCK = re.compile(rf"^(\S*pip install )'(?:rowmill|\.)(\[[\w,]+\])'({COMMENT})?$", re.MULTILINE)
IN_TEXT = re.compile(r"`pip install '?(?:rowmill|\.)(\[[\w,]+\])?'?`")
WHEEL = re.compile(r"rowmill-[\d.]+-py3-none-any\.whl")


def replace_install_lines(text: str, version: str) -> str:
    """Return a page with its install lines as they can be typed now, and wheels of this version."""
    name = "rowmill" if PUBLISHED else "."
    text = OF_BLOCK.sub(lambda line: f"{line[1]}'{name}{line[2]}'{'' if PUBLISHED else line[3] or ''}", text)
    text = IN_TEXT.sub(lambda line: f"`pip install '{name}{line[1]}'`" if line[1] else f"`pip install {name}`", text)
    return WHEEL.sub(f"rowmill-{version}-py3-none-any.whl", text)


def render_pages_with_install_lines(root: Path, written: dict[str, str]) -> dict[str, str]:
    """Return the pages that show how to install rowmill, by path; `written` holds those that are generated anyway."""
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md")), root / "docs/how-to/compare_masks.py"]
    texts = {page.relative_to(root).as_posix(): page for page in pages}
    return {
        path: replace_install_lines(text, version)
        for path, page in texts.items()
        if "pip install" in (text := written.get(path) or page.read_text(encoding="utf-8"))
    }
