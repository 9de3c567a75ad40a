"""`rowmill inspect`, `verify`, `sql`, `trace`, `template-report`, `report`: questions about rows, recipes and builds.

What belongs here: their options, one call of the engine each, its answer printed. What does not: answering.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from rowmill.cli.arguments import add_command, add_root_option, parse_positive
from rowmill.cli.error_boundary import BLOCKED, DONE, FOUND
from rowmill.cli.projects import open_folder_store, open_project
from rowmill.core.errors import ConfigError

if TYPE_CHECKING:
    from rowmill.build.runner import Project
    from rowmill.cli.arguments import Commands


def add_inspection_commands(commands: "Commands") -> None:
    """Add the commands that answer questions and build nothing."""
    inspect = add_command(
        commands, "inspect", _run_inspect, "show rows as the model sees them, trained tokens marked; writes nothing"
    )
    inspect.add_argument("-n", type=parse_positive, metavar="N", default=3, help="rows per dataset (3)")
    inspect.add_argument("--dataset", metavar="D", help="only this dataset")
    inspect.add_argument("--row", metavar="ID", help="only this row")

    verify = add_command(commands, "verify", _run_verify, "print every check result on what is built")
    verify.add_argument("--deep", action="store_true", help="read all files again; compare digests and content hashes")
    verify.add_argument("--discard", action="store_true", help="with --deep: remove damage, and what was made of it")
    verify.add_argument("--facts", action="store_true", help="list the numbers that gates.expectations can name")

    sql = commands.add_parser("sql", help="answer a SELECT over rows, examples, sequences, ledger, check_results …")
    sql.set_defaults(command=_run_sql)
    sql.add_argument("query", metavar="QUERY", help="one SELECT; a wrong one names the views there are")
    sql.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="ask of this recipe alone; default: all of this folder's storage"
    )
    sql.add_argument("--format", choices=["table", "csv", "json"], default="table", help="table (default), csv or json")
    add_root_option(sql)

    trace = add_command(
        commands, "trace", _run_trace, "from a place in a shard to the source line, and back to every place"
    )
    which = trace.add_mutually_exclusive_group(required=True)
    which.add_argument("--row", metavar="ID", help="a row: every shard, sequence, rank and step that shows it")
    which.add_argument("--source", metavar="FILE:LINE", help="a line of a source file: the same")
    which.add_argument(
        "--sequence", metavar="DATASET/SPLIT/N[:TOKEN]", help="a sequence, or one token in it: whence it came"
    )

    template = add_command(
        commands, "template-report", _run_template_report, "what probes showed each dataset's chat template to do"
    )
    template.add_argument(
        "--prove", action="store_true", help="prove its masks on conversations of all shapes; status 4 if one is wrong"
    )

    add_command(
        commands,
        "report",
        _run_report,
        "write the report: pictures, samples, rejects and check results, in one HTML file",
    )


def _run_inspect(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection import inspect as inspection
    from rowmill.reports import row_view

    project = open_project(given)
    screen = terminal.make_console()
    for one in inspection.inspect_rows(project, count=given.n, dataset=given.dataset, row_id=given.row):
        screen.print(row_view.render_inspected_record(one, colours=screen.is_terminal and not screen.no_color))
    return DONE


def _run_verify(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection import verify as verification
    from rowmill.reports import console as reports

    project = open_project(given)
    checked = verification.verify_recipe(project, deep=given.deep)
    terminal.make_console().print(reports.render_verification(project, checked, facts=given.facts, deep=given.deep))
    if any(one.damaged for one in checked):
        gone = verification.discard_damage(project, checked) if given.discard else None
        terminal.make_console().print(reports.render_discarded(project, gone))
    return BLOCKED if any(one.fails for one in checked) else DONE


def _run_sql(given: argparse.Namespace) -> int:
    from rowmill import stats
    from rowmill.core import console as terminal
    from rowmill.reports.console import render_query_rows

    project = None if given.recipe is None else open_project(given)
    store = open_folder_store(given) if project is None else project.store
    if not store.exists("stats"):
        raise ConfigError(
            f"{store.path('')}: no statistics here; a storage root with a build in it is needed; build a recipe, or "
            "name another --root"
        )
    columns, rows = stats.query_views(store, given.query, recipe=project.recipe.name if project else None)
    if given.format == "csv":
        import csv

        csv.writer(sys.stdout, lineterminator="\n").writerows([columns, *rows])
    elif given.format == "json":
        import orjson

        lines = [dict(zip(columns, row, strict=True)) for row in rows]
        print(orjson.dumps(lines, default=str, option=orjson.OPT_INDENT_2).decode())
    else:
        terminal.make_console().print(render_query_rows(columns, rows))
    return DONE


def _run_trace(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection.sequence_trace import trace_sequence
    from rowmill.inspection.trace import trace_row, trace_source
    from rowmill.reports import row_view

    project, screen = open_project(given), terminal.make_console()
    if given.sequence is not None:
        screen.print(row_view.render_sequence_trace(trace_sequence(project, given.sequence)))
    elif given.row is not None:
        screen.print(row_view.render_row_traces(trace_row(project, given.row)))
    else:
        screen.print(row_view.render_row_traces(trace_source(project, given.source)))
    return DONE


def _run_template_report(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection.inspect import report_templates
    from rowmill.reports import row_view

    project, screen = open_project(given), terminal.make_console()
    if given.prove:
        return _prove_templates(project)
    for report in report_templates(project):
        screen.print(row_view.render_template_report(report))
    return DONE


def _prove_templates(project: "Project") -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection.inspect import prove_templates
    from rowmill.reports import template_proof

    screen, are_right = terminal.make_console(), True
    for dataset, proof in prove_templates(project):
        screen.print(template_proof.render_proof(dataset, proof))
        are_right = are_right and not proof.defects
    return DONE if are_right else FOUND


def _run_report(given: argparse.Namespace) -> int:
    from rowmill.reports import report_page

    print(report_page.write_report(open_project(given)))
    return DONE
