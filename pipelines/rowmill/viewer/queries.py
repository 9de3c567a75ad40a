"""The page with a text box over the views: a SELECT, its result as a table, and each row id a link."""

from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from threading import Timer
from time import perf_counter
from typing import TYPE_CHECKING

from markupsafe import Markup

from rowmill.core import html
from rowmill.core.errors import ConfigError
from rowmill.stats import views
from rowmill.viewer import pages
from rowmill.viewer.builds import Build, Builds
from rowmill.viewer.links import Links

if TYPE_CHECKING:
    from collections.abc import Generator

    import duckdb

MAX_ROWS = 1_000
QUERY_TIMEOUT_S = 30.0
EXAMPLES = (
    "from rejects select reason, count(*) as records group by all order by records desc",
    "from rows select domain, split, count(*) as rows group by all order by rows desc",
    "from examples select example_id, original_tokens, tokens order by removed_tokens desc limit 20",
    "from check_results where not passed",
)


LOSS_EXAMPLES = (
    "from losses select example_id, avg(loss) as loss group by all order by loss desc limit 50",
    "select domain, avg(loss) as loss, count(*) as lines from losses join examples using (example_id) group by all",
)


def show_sql(builds: Builds, build: Build, sql: str) -> str:
    """Return the page of a query, with its result or with what is wrong with it."""
    links, problem, table, note = Links(build), "", Markup(), ""
    if sql.strip():
        import duckdb

        began = perf_counter()
        try:
            with builds.query_recipe(build.project, sql) as connection, _interrupt_after(connection, QUERY_TIMEOUT_S):
                columns, rows = views.run_select(connection, sql, max_rows=MAX_ROWS + 1)
            shown = html.render_table(
                columns, rows[:MAX_ROWS], link=partial(_link_cell, links), show=links.mention_rows
            )
            table = Markup(shown)  # noqa: S704  (escaped)
            cut = f"the first {MAX_ROWS:,} rows" if len(rows) > MAX_ROWS else f"{len(rows):,} rows"
            note = f"{cut} in {perf_counter() - began:.2f} s"
        except duckdb.InterruptException:
            problem = (
                f"the query ran for {QUERY_TIMEOUT_S:g} s and was stopped; select less, or run it with rowmill sql"
            )
        except ConfigError as error:
            problem = str(error)
    docs = [(name, about, list(views.COLUMN_DOCS[name])) for name, about in views.VIEW_DOCS.items()]
    return pages.render("sql", build=build, to=links, sql=sql, problem=problem, table=table, note=note, docs=docs,
                        examples=(*LOSS_EXAMPLES, *EXAMPLES) if builds.losses else EXAMPLES)  # fmt: skip


def _link_cell(links: Links, column: str, row: Mapping[str, object]) -> str:
    """Return the address of a step or of a sequence that a query names; row ids are found in any text."""
    if column == "step":
        return links.of("steps", row[column])
    if column == "sequence_id" and "dataset" in row and "split" in row:
        return links.of_sequence(str(row["dataset"]), str(row["split"]), int(str(row[column])))
    return ""


@contextmanager
def _interrupt_after(connection: "duckdb.DuckDBPyConnection", seconds: float) -> "Generator[None]":
    timer = Timer(seconds, connection.interrupt)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
