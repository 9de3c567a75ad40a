"""`rowmill inspect`, `verify`, `sql`, `trace`, `template-report`, `report`, `card`: questions about builds."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rowmill.cli.error_boundary import ExitStatus
from rowmill.cli.projects import (
    add_command,
    add_json_option,
    add_root_option,
    choose_root,
    configs_folder,
    open_project,
    parse_positive,
    show,
)
from rowmill.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rowmill.cli.projects import Commands
    from rowmill.inspection.verify import StageVerification


def add_inspection_commands(commands: "Commands") -> None:
    """Add the commands that answer questions and build nothing."""
    inspect = add_command(
        commands,
        "inspect",
        _run_inspect,
        "show rows as the model sees them, with trained tokens marked; writes nothing",
    )
    inspect.add_argument("-n", type=parse_positive, metavar="N", default=3, help="rows per dataset (3)")
    inspect.add_argument("--dataset", metavar="D", help="only this dataset")
    inspect.add_argument("--row", metavar="ID", help="only this row")
    inspect.add_argument(
        "--sequence", metavar="DATASET/SPLIT/N", help="instead of rows, a packed sequence of the current build"
    )

    verify = add_command(commands, "verify", _run_verify, "check the current build; show failures, warnings and counts")
    verify.add_argument("--all", action="store_true", help="show every check, passed and not applicable ones too")
    verify.add_argument("--deep", action="store_true", help="read all files again; compare digests and content hashes")
    verify.add_argument(
        "--discard", action="store_true", help="with --deep: remove damaged files and everything built from them"
    )
    add_json_option(verify)
    verify.add_argument("--facts", action="store_true", help="list the facts that gates.expectations can name")

    sql = commands.add_parser("sql", help="run a SELECT over rows, examples, sequences, ledger, check_results …")
    sql.set_defaults(command=_run_sql)
    sql.add_argument("query", metavar="QUERY", help="one SELECT; the error of an invalid one lists the views")
    sql.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="query only this recipe (default: every recipe in the storage root)"
    )
    sql.add_argument(
        "--all-recipes", action="store_true", help="with RECIPE: query every recipe in its storage root, too"
    )
    sql.add_argument(
        "--losses", metavar="DIR", default="", help="folder of a trainer's ExampleLosses, queried as the view losses"
    )
    sql.add_argument(
        "--format", choices=["table", "csv", "json"], default="table", help="output format (default: table)"
    )
    add_root_option(sql)

    trace = add_command(
        commands, "trace", _run_trace, "trace a token or sequence to its source line, or a row to every place it trains"
    )
    which = trace.add_mutually_exclusive_group(required=True)
    which.add_argument("--row", metavar="ID", help="list every shard, sequence, rank and step that holds a row")
    which.add_argument("--source", metavar="FILE:LINE", help="the same for a line of a source file")
    which.add_argument(
        "--sequence", metavar="DATASET/SPLIT/N[:TOKEN]", help="show where a sequence, or one of its tokens, comes from"
    )

    template = add_command(
        commands, "template-report", _run_template_report, "show how each dataset's chat template behaves on probes"
    )
    template.add_argument(
        "--prove",
        action="store_true",
        help="prove its masks on conversations of every shape; exit with status 4 if one is wrong",
    )

    add_command(
        commands,
        "report",
        _run_report,
        "write the report, one HTML file with plots, samples, rejects and check results",
    )
    card = add_command(
        commands, "card", _run_card, "write the dataset card of the published build: README.md and croissant.json"
    )
    card.add_argument("--out", metavar="DIR", help="folder of the two files (default: the recipe's in the storage)")


def _run_inspect(args: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection import inspect as inspection
    from rowmill.inspection.trace import load_lineage, trace_sequence
    from rowmill.reports import row_view
    from rowmill.reports.console import format_view_command
    from rowmill.schema.rows import parse_row_id

    project = open_project(args)
    console = terminal.make_console()
    colours = console.is_terminal and not console.no_color
    if args.sequence is not None:
        if args.dataset is not None or args.row is not None:
            raise ConfigError(
                f"--sequence {args.sequence} with {'--row' if args.dataset is None else '--dataset'}: a sequence names "
                "its dataset, and holds several rows; expected one of them; omit the other"
            )
        trace = trace_sequence(project, args.sequence, whole=True)
        console.print(row_view.render_packed_sequence(trace, colours=colours))
        return ExitStatus.SUCCESS
    built_parts: dict[str, Collection[str]] = {}
    for record in inspection.inspect_rows(project, count=args.n, dataset=args.dataset, row_id=args.row):
        if record.dataset not in built_parts:
            built_parts[record.dataset] = load_lineage(project, record.dataset).parts
        # A row that no build has read has no page.
        is_built = parse_row_id(record.row_id)[0] in built_parts[record.dataset]
        look = format_view_command(project, record.row_id) if is_built else ""
        console.print(row_view.render_inspected_record(record, colours=colours, look=look))
    return ExitStatus.SUCCESS


def _run_verify(args: argparse.Namespace) -> int:
    from rowmill.inspection import verify as verification
    from rowmill.reports import console as reports

    project = open_project(args)
    checked = verification.verify_recipe(project, deep=args.deep)
    if args.json:
        if args.discard:
            verification.discard_damage(project, checked)
        print(reports.format_object(project, reports.describe_verification(checked)))
        return _choose_verification_status(checked)
    shown = reports.render_verification(project, checked, facts=args.facts, deep=args.deep, every=args.all)
    show(shown)
    if any(stage.damaged for stage in checked):
        removed = verification.discard_damage(project, checked) if args.discard else None
        show(reports.render_discarded(project, removed))
    return _choose_verification_status(checked)


def _choose_verification_status(checked: "Sequence[StageVerification]") -> int:
    if any(stage.damage for stage in checked):
        return ExitStatus.DAMAGED
    return ExitStatus.GATE_CLOSED if any(stage.fails for stage in checked) else ExitStatus.SUCCESS


def _run_sql(args: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.core.storage import DEFAULT_ROOT_NAME, Store
    from rowmill.stats.views import query_views

    project = None if args.recipe is None else open_project(args)
    if project is not None:
        store = project.store
    else:
        # The storage that all recipes of the working directory's project share.
        configs = configs_folder()
        folder = configs.parent if configs else Path.cwd()
        store = Store(choose_root(args) or str(folder / DEFAULT_ROOT_NAME))
    if not store.exists("stats"):
        raise ConfigError(
            f"{store.path('')}: no statistics here; expected a storage root that holds a build; build a recipe, or "
            "choose another --root"
        )
    columns, rows = query_views(
        store,
        args.query,
        recipe=None if project is None or args.all_recipes else project.recipe.name,
        losses=args.losses,
    )
    if args.format == "csv":
        import csv

        csv.writer(sys.stdout, lineterminator="\n").writerows([columns, *rows])
    elif args.format == "json":
        import orjson

        lines = [dict(zip(columns, row, strict=True)) for row in rows]
        print(orjson.dumps(lines, default=str, option=orjson.OPT_INDENT_2).decode())
    else:
        from rich.text import Text

        from rowmill.core.arrays import format_count

        count = Text(f"\n{format_count(len(rows), 'row')}", terminal.DIM)
        if project is not None:
            from rowmill.reports.console import link_rows

            name = project.recipe.name
            rows = [tuple(link_rows(cell, name) if type(cell) is str else cell for cell in row) for row in rows]
        show(terminal.make_grid(columns, list(rows), indent=0), count, sep="\n")
    return ExitStatus.SUCCESS


def _run_trace(args: argparse.Namespace) -> int:
    from rowmill.inspection.trace import trace_row, trace_sequence, trace_source
    from rowmill.reports import row_view

    project = open_project(args)
    if args.sequence is not None:
        show(row_view.render_sequence_trace(trace_sequence(project, args.sequence)))
    elif args.row is not None:
        show(row_view.render_row_traces(project, trace_row(project, args.row)))
    else:
        show(row_view.render_row_traces(project, trace_source(project, args.source)))
    return ExitStatus.SUCCESS


def _run_template_report(args: argparse.Namespace) -> int:
    from rowmill.inspection.chat_templates import prove_templates, report_templates
    from rowmill.reports import row_view

    project = open_project(args)
    if args.prove:
        all_right = True
        for dataset, proof in prove_templates(project):
            show(row_view.render_proof(dataset, proof))
            all_right = all_right and not proof.defects
        return ExitStatus.SUCCESS if all_right else ExitStatus.PROBLEM_FOUND
    for report in report_templates(project):
        show(row_view.render_template_report(report))
    return ExitStatus.SUCCESS


def _run_report(args: argparse.Namespace) -> int:
    from rowmill.reports import report_page

    print(report_page.write_report(open_project(args)))
    return ExitStatus.SUCCESS


def _run_card(args: argparse.Namespace) -> int:
    from rowmill.reports import dataset_card

    print("\n".join(dataset_card.write_card(open_project(args), args.out)))
    return ExitStatus.SUCCESS
