"""`rowmill …`: parses a command, calls one function of the engine, prints its report.

What belongs here: verbs, their options, finding the recipe. What does not: work, and words (`reports/console.py`,
`row_view.py`); what an exception means (`error_boundary.py`, which lists the exit statuses).

Nothing heavy is imported before a verb needs it, so that `rowmill --help` answers at once.
"""

import argparse
import io
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rowmill.cli.error_boundary import BLOCKED, DONE, FOUND, WRONG, choose_exit_status, explain_error
from rowmill.core import code_permission
from rowmill.core.errors import ConfigError, GateError, suggest_name

if TYPE_CHECKING:
    from rowmill.build.steps import Project, Step
    from rowmill.core.storage import Store
    from rowmill.recipe.recipe import Recipe

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

QUIET_LIBRARIES = {
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Nothing reports to anyone, and no library talks into our lines."""

Verb = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A pipe may speak ASCII; a mark that it cannot say must not end a build.
            stream.reconfigure(errors="replace")
    parser = _make_parser()
    given, unknown = parser.parse_known_args(arguments)
    verb: Verb | None = getattr(given, "verb", None)
    if verb is None:
        parser.print_help()
        return WRONG
    os.environ.update({name: value for name, value in QUIET_LIBRARIES.items() if name not in os.environ})
    if getattr(given, "no_code", False):
        os.environ[code_permission.NO_CODE_VARIABLE] = "1"
    try:
        given.overrides = _parse_overrides(parser, unknown, allowed=verb in (_run_plan, _run_build, _run_advise))
        return verb(given)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (the boundary: whatever it is, a user gets words)
        if isinstance(error, BrokenPipeError) and _is_output_unread():
            # `rowmill sql … | head`: the reader has enough. What is left to flush goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return DONE
        _print_error(explain_error(error, sys.argv[1:] if arguments is None else arguments))
        return choose_exit_status(error)


def _is_output_unread() -> bool:
    """Tell whether nobody reads what we print any more; a connection to a storage may break, too."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _parse_overrides(parser: argparse.ArgumentParser, words: Sequence[str], *, allowed: bool) -> dict[str, str]:
    """Read `--data__max_sequences_per_example 3`: options of records datasets, a path with `__` between its words."""
    found: dict[str, str] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, sign, value = word.removeprefix("--").partition("=")
        if not allowed or not word.startswith("--") or "__" not in name or (not sign and not waiting):
            parser.error(f"unrecognized arguments: {' '.join(words)}")
        found[name] = value if sign else waiting.pop(0)
    return found


def _print_error(message: str) -> None:
    from rich.text import Text

    from rowmill.core.console import BAD, make_console

    sys.stdout.flush()
    make_console(sys.stderr).print(Text(message, BAD), soft_wrap=True)


# ── Verbs and their options ────────────────────────────────────────────────────────────────────────


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rowmill",
        description="Raw datasets in, packed token shards and per-GPU partitions out.",
        epilog="RECIPE is a file, or the name of one under configs/. `rowmill VERB --help` says more. "
        "plan, build and advise take options of records datasets, such as --data__max_sequences_per_example 3. "
        "Exit status: 0 done; 1 a closed gate; 2 the recipe, the command, a source or what is stored is not as it must "
        "be; 3 a disk, a network, a storage or a permission failed; 4 `stats --strict` has a hint, or "
        "`template-report --prove` a wrong mask; 70 a bug of rowmill; 130 interrupted.",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")

    _add_building_verbs(verbs)
    inspect = _add_verb(
        verbs, "inspect", _run_inspect, "show rows as the model sees them, trained tokens marked; writes nothing"
    )
    inspect.add_argument("-n", type=_parse_positive, metavar="N", default=3, help="rows per dataset (3)")
    inspect.add_argument("--dataset", metavar="D", help="only this dataset")
    inspect.add_argument("--row", metavar="ID", help="only this row")

    verify = _add_verb(verbs, "verify", _run_verify, "print every check result on what is built")
    verify.add_argument("--deep", action="store_true", help="read all files again; compare digests and content hashes")
    verify.add_argument("--discard", action="store_true", help="with --deep: remove damage, and what was made of it")
    verify.add_argument("--facts", action="store_true", help="list the numbers that gates.expectations can name")

    sql = verbs.add_parser("sql", help="answer a SELECT over rows, examples, sequences, ledger, check_results …")
    sql.set_defaults(verb=_run_sql)
    sql.add_argument("query", metavar="QUERY", help="one SELECT; a wrong one names the views there are")
    sql.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="ask of this recipe alone; default: all of this folder's storage"
    )
    sql.add_argument("--format", choices=["table", "csv", "json"], default="table", help="table (default), csv or json")
    _add_root_option(sql)

    trace = _add_verb(verbs, "trace", _run_trace, "from a place in a shard to the source line, and back to every place")
    which = trace.add_mutually_exclusive_group(required=True)
    which.add_argument("--row", metavar="ID", help="a row: every shard, sequence, rank and step that shows it")
    which.add_argument("--source", metavar="FILE:LINE", help="a line of a source file: the same")
    which.add_argument(
        "--sequence", metavar="DATASET/SPLIT/N[:TOKEN]", help="a sequence, or one token in it: whence it came"
    )

    template = _add_verb(
        verbs, "template-report", _run_template_report, "what probes showed each dataset's chat template to do"
    )
    template.add_argument(
        "--prove", action="store_true", help="prove its masks on conversations of all shapes; status 4 if one is wrong"
    )

    _add_verb(
        verbs, "report", _run_report, "write the report: pictures, samples, rejects and check results, in one HTML file"
    )

    _add_generation_verbs(verbs)
    _add_version_verbs(verbs)

    collect = _add_verb(verbs, "gc", _run_gc, "remove versions that nothing needs")
    collect.add_argument(
        "--keep", type=_parse_positive, metavar="N", default=3, help="newest versions to keep per stage (3)"
    )
    collect.add_argument("--dry-run", action="store_true", help="only say what would go")

    ui = verbs.add_parser("ui", help="open Dagster's webserver and daemon on this machine")
    ui.set_defaults(verb=_run_ui)
    ui.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    ui.add_argument("--port", type=_parse_positive, default=3000, help="port to listen on (3000)")
    return parser


def _add_generation_verbs(verbs: "Verbs") -> None:
    """Add the verbs that come after training."""
    parse = _add_verb(verbs, "parse", _run_parse, "take generated texts apart: records, and why the rest is none")
    parse.add_argument(
        "files", metavar="FILE", nargs="*", help="parse these alone and store nothing; default: generation.text_urls"
    )
    generate = _add_verb(verbs, "generate", _run_generate, "ask the recipe's backend for series, groups or records")
    for verb in (parse, generate):
        verb.add_argument("--dataset", metavar="D", help="only this dataset")
        verb.add_argument("--output", metavar="FILE", help="write the accepted records there, as JSON Lines")


def _add_version_verbs(verbs: "Verbs") -> None:
    """Add the verbs that speak of kept versions."""
    versions = _add_verb(verbs, "versions", _run_versions, "list the kept versions of a stage")
    versions.add_argument("key", metavar="KEY", help="such as chats/canonical_rows, or training_splits")

    diff = _add_verb(verbs, "diff", _run_diff, "two kept versions side by side: rows, lengths, fill, shares")
    diff.add_argument("key", metavar="KEY", help="such as chats/packed_shards, or training_splits")
    diff.add_argument("before", metavar="BEFORE", help="a version, or enough of its beginning")
    diff.add_argument("after", metavar="AFTER", nargs="?", help="another; default: the current one")

    use = _add_verb(verbs, "use", _run_use, "make a kept version the current one again")
    use.add_argument("key", metavar="KEY", help="such as chats/canonical_rows, or training_splits")
    use.add_argument("version", metavar="VERSION", help="a version, or enough of its beginning")


def _add_building_verbs(verbs: "Verbs") -> None:
    """Add the verbs that build, and `stats`, which builds as far as lengths are known."""
    _add_verb(verbs, "plan", _run_plan, "say what a build would make, what it would reuse, and why")
    build = _add_verb(verbs, "build", _run_build, "build what is missing or changed, stage by stage")
    build.add_argument(
        "--only", action="append", metavar="STAGE", default=[], help="only stages of this name; may be repeated"
    )
    build.add_argument(
        "--workers", type=_parse_positive, metavar="N", help="worker processes, instead of execution.workers"
    )

    advise = _add_verb(
        verbs,
        "advise",
        _run_advise,
        "propose the table contract of records, judge their columns as groups, and say how long examples become",
    )
    advise.add_argument("--dataset", metavar="D", help="only this dataset")
    advise.add_argument(
        "--write", action="store_true", help="write each table contract to RECIPE/DATASET.table.yaml, which pins it"
    )

    export = _add_verb(
        verbs, "export", _run_export, "write the recipe's exports, and say how to point their trainers at them"
    )
    export.add_argument(
        "--name", action="append", metavar="N", default=[], help="only the export of this name; may be repeated"
    )
    export.add_argument("--to", metavar="FOLDER", help="put a copy of one export into a new folder")
    export.add_argument(
        "--workers", type=_parse_positive, metavar="N", help="worker processes, instead of execution.workers"
    )

    stats = _add_verb(
        verbs, "stats", _run_stats, "lengths, truncation, rejects, and what another limit would do; packs nothing"
    )
    stats.add_argument("--strict", action="store_true", help="exit with 4 if there is a hint")
    stats.add_argument(
        "--workers", type=_parse_positive, metavar="N", help="worker processes, instead of execution.workers"
    )


def _add_verb(
    verbs: "Verbs",
    name: str,
    verb: Verb,
    words: str,
) -> argparse.ArgumentParser:
    """Add a verb that works on a recipe."""
    parser = verbs.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
    parser.set_defaults(verb=verb)
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of one under configs/")
    _add_root_option(parser)
    return parser


def _add_root_option(parser: argparse.ArgumentParser) -> None:
    words = "where built things lie: a folder or URL (default: $ROWMILL_STORE, or .rowmill in the project)"
    parser.add_argument("--root", metavar="R", help=words)
    parser.add_argument("--no-code", action="store_true", help="refuse a recipe that names Python code of its own")


def _parse_positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return value


# ── Finding the recipe and the storage ─────────────────────────────────────────────────────────────


def _open_project(given: argparse.Namespace) -> "Project":
    from rowmill.build.steps import open_project

    overrides: dict[str, str] = getattr(given, "overrides", {})
    project = open_project(recipe_path(given.recipe), _choose_root(given), overrides)
    workers = getattr(given, "workers", None)
    if workers is None:
        return project
    execution = project.recipe.execution.model_copy(update={"workers": workers})
    return replace(project, recipe=project.recipe.model_copy(update={"execution": execution}))


def _choose_root(given: argparse.Namespace) -> str | None:
    return given.root or os.environ.get("ROWMILL_STORE") or None


def configs_folder() -> Path | None:
    """Return $ROWMILL_CONFIGS, or the `configs` folder here or above; None if there is none."""
    if os.environ.get("ROWMILL_CONFIGS"):
        return Path(os.environ["ROWMILL_CONFIGS"])
    here = Path.cwd()
    return next((folder / "configs" for folder in (here, *here.parents) if (folder / "configs").is_dir()), None)


def recipe_path(name: str) -> Path:
    """Return the file of a recipe given by its path or its name.

    Raises
    ------
    ConfigError
        Naming the recipes there are, and the nearest.

    """
    from rowmill.recipe import recipe

    given = Path(name)
    if given.is_file() or given.suffix in (".yaml", ".yml"):
        return given
    configs = configs_folder()
    if configs is None:
        raise ConfigError(
            f"{name}: no such recipe; there is no configs folder here or above; name a recipe file, or run in a project"
        )
    known = {path.stem: path for path in recipe.find_recipes(configs)}
    if name not in known:
        guess = suggest_name(name, known)
        hint = f"did you mean {guess}?" if guess else "name one of them, or a recipe file"
        raise ConfigError(
            f"{name}: no recipe of this name; there are {', '.join(known) or 'none'} in {configs}; {hint}"
        )
    return known[name]


def _open_folder_store(given: argparse.Namespace) -> "Store":
    """Return the storage of the folder's recipes, whichever they are."""
    from rowmill.core.storage import Store

    configs = configs_folder()
    root = _choose_root(given) or str((configs.parent if configs else Path.cwd()) / ".rowmill")
    return Store(root)


# ── plan, build, stats, verify ─────────────────────────────────────────────────────────────────────


def _run_plan(given: argparse.Namespace) -> int:
    from rowmill.build import plan
    from rowmill.core import console as terminal
    from rowmill.inspection import dry_run
    from rowmill.reports import table_plans
    from rowmill.reports.console import render_plan

    project, screen = _open_project(given), terminal.make_console()
    screen.print(render_plan(project, plan.forecast_steps(project)))
    if not dry_run.list_table_datasets(project):
        return DONE
    planned = list(dry_run.plan_tables(project))
    screen.print(table_plans.render_table_plans(planned))
    return WRONG if any(one.plan is None for one in planned) else DONE


def _run_advise(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection import dry_run
    from rowmill.reports import table_plans

    project, screen = _open_project(given), terminal.make_console()
    if not dry_run.list_table_datasets(project, given.dataset):
        raise ConfigError(f"{project.recipe.name}: no records dataset; advice is on their columns; name another recipe")
    for name, proposal in dry_run.propose_contracts(project, given.dataset):
        if proposal is None:
            continue
        if given.write:
            print(_write_table_contract(recipe_path(given.recipe), project.recipe, name, proposal.document))
        else:
            print(proposal.document)
    if not given.write:
        screen.print(table_plans.render_advice(dry_run.advise_on_columns(project, given.dataset)))
    return DONE


def _write_table_contract(recipe_path: Path, loaded: "Recipe", dataset: str, document: str) -> str:
    """Write a table contract beside its recipe; return what is to be said of it."""
    from rowmill.recipe.recipe import table_contract_file

    path = table_contract_file(recipe_path, dataset)
    table = loaded.datasets[dataset].format.as_table()
    if table is not None and table.table is not None and not path.exists():
        raise ConfigError(
            f"datasets.{dataset}.format.table: the contract stands in the recipe; a file would be a second one; "
            "correct it there, or delete it and ask again"
        )
    path.parent.mkdir(exist_ok=True)
    path.write_text(document, encoding="utf-8")
    return f"{path}  written; look through it: the next build follows it"


def _run_build(given: argparse.Namespace) -> int:
    from rowmill.build.steps import plan_steps
    from rowmill.reports import report_page
    from rowmill.reports.summary import summarize_recipe

    project = _open_project(given)
    steps = [step for step in plan_steps(project) if _is_selected_step(step, given.only)]
    _require_known_stages(given.only, {name for step in plan_steps(project) for name in (step.name, step.label)})
    blocked = _build_stages(project, steps, given.only)
    if not given.only:
        print(f"\n{summarize_recipe(project)}\n\nreport  {report_page.write_report(project)}")
    return BLOCKED if blocked else DONE


def _is_selected_step(step: "Step", only: Sequence[str]) -> bool:
    return bool({step.name, step.label} & set(only)) if only else not step.on_demand


def _require_known_stages(only: Sequence[str], known: set[str]) -> None:
    for name in only:
        if name not in known:
            guess = suggest_name(name, known)
            hint = f"did you mean {guess}?" if guess else "name one of them"
            raise ConfigError(f"--only {name}: no such stage; there are {', '.join(sorted(known))}; {hint}")


def _build_stages(
    project: "Project", steps: "Sequence[Step]", only: Sequence[str], datasets: Sequence[str] | None = None
) -> bool:
    """Build some stages with their progress shown; return whether a blocking check failed."""
    from rowmill.build import runner
    from rowmill.core import console as terminal
    from rowmill.reports.progress import BuildProgress

    # First of all, so that it answers while the build runs.
    runner.publish_statistics(project)
    with BuildProgress(project, steps, terminal.make_console(), terminal.make_console(sys.stderr)) as watch:
        done = runner.build(project, progress=watch, tell=watch.tell, only=only, datasets=datasets)
    return any(result.blocking for _, _, results in done for result in results)


def _run_export(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.reports.summary import render_export_pointers

    project = _open_project(given)
    known = [one.name for one in project.recipe.exports]
    for name in given.name or known or [""]:
        if name not in known:
            guess = suggest_name(name, known)
            hint = f"did you mean {guess}?" if guess else "add one under exports: in the recipe"
            raise ConfigError(f"--name {name}: no such export; there are {', '.join(known) or 'none'}; {hint}")
    if given.to is not None and len(given.name) != 1:
        raise ConfigError(f"--to {given.to}: a folder takes one export; name it with --name; run once per export")
    from rowmill.build import runner
    from rowmill.build.steps import plan_steps
    from rowmill.stages import exports

    labels = [f"{exports.STAGE.name}/{name}" for name in given.name or known]
    steps = [step for step in plan_steps(project) if step.label in labels]
    if _build_stages(project, steps, labels):
        return BLOCKED
    if given.to is not None:
        runner.copy_export(project, given.name[0], Path(given.to))
    terminal.make_console().print(render_export_pointers(project, given.name, given.to))
    return DONE


def _run_parse(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection import generated_output
    from rowmill.reports.console import render_parsed_files
    from rowmill.stages import parsed_records

    stage = parsed_records.STAGE.name
    if not given.files:
        return _run_after_training(given, stage)
    project = _open_project(given)
    dataset = _require_one_dataset(generated_output.select_datasets(project, stage, given.dataset))
    parsed = generated_output.parse_files(project, dataset, given.files)
    terminal.make_console().print(render_parsed_files(parsed))
    if given.output:
        generated_output.write_json_lines(Path(given.output), parsed.records)
    return DONE


def _run_generate(given: argparse.Namespace) -> int:
    from rowmill.stages import generated_series

    return _run_after_training(given, generated_series.STAGE.name)


def _run_after_training(given: argparse.Namespace, stage: str) -> int:
    """Run a stage behind a trained model, show what came of it, and write its records where that is asked for."""
    from rowmill.build.steps import plan_steps
    from rowmill.core import console as terminal
    from rowmill.inspection import generated_output
    from rowmill.reports.console import render_generated, render_outdated_builds
    from rowmill.schema import manifest

    project = _open_project(given)
    datasets = generated_output.select_datasets(project, stage, given.dataset)
    steps = [step for step in plan_steps(project) if step.name == stage and step.dataset in datasets]
    terminal.make_console(sys.stderr).print(
        render_outdated_builds(generated_output.find_outdated_builds(project, datasets))
    )
    blocked = _build_stages(project, steps, [stage], datasets)
    made = [one for step in steps if (one := manifest.load_current(project.store, step.key)) is not None]
    terminal.make_console().print(render_generated(made))
    if given.output:
        records = [text for one in made for text in generated_output.iterate_accepted_records(project.store, one)]
        generated_output.write_json_lines(Path(given.output), records)
    return BLOCKED if blocked else DONE


def _require_one_dataset(datasets: Sequence[str]) -> str:
    if len(datasets) > 1:
        raise ConfigError(f"several datasets are generated: {', '.join(datasets)}; one is needed; add --dataset")
    return datasets[0]


def _run_stats(given: argparse.Namespace) -> int:
    from rowmill.build.steps import plan_steps
    from rowmill.core import console as terminal
    from rowmill.reports.statistics import list_hints, render_statistics
    from rowmill.stages import catalog
    from rowmill.stages.truncation_stats import stage as truncation_stats

    project = _open_project(given)
    stages = catalog.list_stages_up_to(truncation_stats.STAGE)
    steps = [step for step in plan_steps(project) if step.name in stages]
    try:
        blocked = _build_stages(project, steps, stages)
    except GateError:
        # A shut gate is a reason to look at the numbers, not to hide them.
        terminal.make_console().print(render_statistics(project))
        raise
    terminal.make_console().print(render_statistics(project))
    if blocked:
        return BLOCKED
    return FOUND if given.strict and list_hints(project) else DONE


def _run_verify(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection import verify as verification
    from rowmill.reports import console as reports

    project = _open_project(given)
    checked = verification.verify_recipe(project, deep=given.deep)
    terminal.make_console().print(reports.render_verification(project, checked, facts=given.facts, deep=given.deep))
    if any(one.damaged for one in checked):
        gone = verification.discard_damage(project, checked) if given.discard else None
        terminal.make_console().print(reports.render_discarded(project, gone))
    return BLOCKED if any(one.fails for one in checked) else DONE


def _run_report(given: argparse.Namespace) -> int:
    from rowmill.reports import report_page

    print(report_page.write_report(_open_project(given)))
    return DONE


# ── sql ────────────────────────────────────────────────────────────────────────────────────────────


def _run_sql(given: argparse.Namespace) -> int:
    from rowmill import stats
    from rowmill.core import console as terminal
    from rowmill.reports.console import render_query_rows

    project = None if given.recipe is None else _open_project(given)
    store = _open_folder_store(given) if project is None else project.store
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


# ── inspect, trace, template-report ────────────────────────────────────────────────────────────────


def _run_inspect(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection import inspect as inspection
    from rowmill.reports import row_view

    project = _open_project(given)
    screen = terminal.make_console()
    for one in inspection.inspect_rows(project, count=given.n, dataset=given.dataset, row_id=given.row):
        screen.print(row_view.render_inspected_record(one, colours=screen.is_terminal and not screen.no_color))
    return DONE


def _run_trace(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection.sequence_trace import trace_sequence
    from rowmill.inspection.trace import trace_row, trace_source
    from rowmill.reports import row_view

    project, screen = _open_project(given), terminal.make_console()
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

    project, screen = _open_project(given), terminal.make_console()
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
        are_right = are_right and not proof.findings
    return DONE if are_right else FOUND


# ── versions, use, gc, ui ──────────────────────────────────────────────────────────────────────────


def _run_versions(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.reports import console as reports
    from rowmill.schema import manifest

    project = _open_project(given)
    step = _find_step(project, given.key)
    kept = manifest.list_versions(project.store, step.key)
    terminal.make_console().print(
        reports.render_versions(project, kept, manifest.load_current(project.store, step.key))
    )
    return DONE


def _run_diff(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection.diff import compare_versions
    from rowmill.reports import console as reports
    from rowmill.schema import manifest

    project = _open_project(given)
    step = _find_step(project, given.key)
    kept = {one.version: one for one in manifest.list_versions(project.store, step.key)}
    now = manifest.load_current(project.store, step.key)
    chosen = (given.before, given.after or (now.version if now is not None else ""))
    before, after = (kept[_match_version(one, list(kept), f"{project.recipe.name}/{given.key}")] for one in chosen)
    terminal.make_console().print(reports.render_comparison(before, after, compare_versions(project, before, after)))
    return DONE


def _run_use(given: argparse.Namespace) -> int:
    from rowmill.build import runner
    from rowmill.core import console as terminal
    from rowmill.reports.console import render_step
    from rowmill.reports.summary import render_used_version
    from rowmill.schema import manifest

    project = _open_project(given)
    runner.publish_statistics(project)
    step = _find_step(project, given.key)
    known = [one.version for one in manifest.list_versions(project.store, step.key)]
    version = _match_version(given.version, known, f"{project.recipe.name}/{given.key}")
    report = runner.run_step(project, step, {}, version=version)
    results = runner.check_step(project, step, report.manifest)
    screen = terminal.make_console()
    screen.print(render_used_version(project, step, report.version))
    screen.print(render_step(step, report, results))
    return BLOCKED if any(result.blocking for result in results) else DONE


def _match_version(given: str, known: Sequence[str], where: str) -> str:
    """Return the version that begins as given; every other case is an error that names those there are."""
    found = [version for version in known if version.startswith(given)]
    if len(found) == 1:
        return found[0]
    what = "no kept version begins so" if not found else f"{len(found)} versions begin so"
    raise ConfigError(f"{where}: {given!r}: {what}; there are {', '.join(known) or 'none'}; name one of them")


def _find_step(project: "Project", key: str) -> "Step":
    from rowmill.build.steps import find_step

    words = [word for word in key.split("/") if word]
    name = project.recipe.name
    return find_step(project, tuple(words) if words[:1] == [name] else (name, *words))


def _run_gc(given: argparse.Namespace) -> int:
    from rowmill.build import gc
    from rowmill.core import console as terminal
    from rowmill.reports.console import render_collected

    project = _open_project(given)
    found = gc.collect_garbage(project, keep=given.keep, dry_run=given.dry_run)
    terminal.make_console().print(render_collected(found, dry_run=given.dry_run))
    return DONE


def _run_ui(given: argparse.Namespace) -> int:
    from rowmill.cli import ui

    configs = configs_folder()
    ui.serve_ui(configs.parent if configs else Path.cwd(), host=given.host, port=given.port)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
