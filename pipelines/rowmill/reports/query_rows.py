"""The answer to a query as a table for a terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from rowmill.core.console import DIM, make_grid
from rowmill.core.number_text import format_count


def render_query_rows(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> RenderableType:
    """Show the rows of a query's answer."""
    return Group(make_grid(columns, list(rows), indent=0), Text(f"\n{format_count(len(rows), 'row')}", DIM))
