"""`rowmill versions`, `diff`, `use`, `gc`: the kept versions of a stage.

What belongs here: their options, one call of the engine each, its report printed. What does not: keeping versions.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rowmill.cli.arguments import add_command, parse_positive
from rowmill.cli.error_boundary import BLOCKED, DONE
from rowmill.cli.projects import open_project
from rowmill.core.errors import ConfigError

if TYPE_CHECKING:
    from rowmill.build.runner import Project, Step
    from rowmill.cli.arguments import Commands


def add_version_commands(commands: "Commands") -> None:
    """Add the commands on kept versions."""
    versions = add_command(commands, "versions", _run_versions, "list the kept versions of a stage")
    versions.add_argument("key", metavar="KEY", help="such as chats/canonical_rows, or training_splits")

    diff = add_command(commands, "diff", _run_diff, "two kept versions side by side: rows, lengths, fill, shares")
    diff.add_argument("key", metavar="KEY", help="such as chats/packed_shards, or training_splits")
    diff.add_argument("before", metavar="BEFORE", help="a version, or enough of its beginning")
    diff.add_argument("after", metavar="AFTER", nargs="?", help="another; default: the current one")

    use = add_command(commands, "use", _run_use, "make a kept version the current one again")
    use.add_argument("key", metavar="KEY", help="such as chats/canonical_rows, or training_splits")
    use.add_argument("version", metavar="VERSION", help="a version, or enough of its beginning")

    collect = add_command(commands, "gc", _run_gc, "remove versions that nothing needs")
    collect.add_argument(
        "--keep", type=parse_positive, metavar="N", default=3, help="newest versions to keep per stage (3)"
    )
    collect.add_argument("--dry-run", action="store_true", help="only say what would go")


def _run_versions(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.reports import console as reports
    from rowmill.schema import manifest

    project = open_project(given)
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

    project = open_project(given)
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

    project = open_project(given)
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
    from rowmill.build import steps

    words = [word for word in key.split("/") if word]
    name = project.recipe.name
    return steps.find_step(project, tuple(words) if words[:1] == [name] else (name, *words))


def _run_gc(given: argparse.Namespace) -> int:
    from rowmill.build import gc
    from rowmill.core import console as terminal
    from rowmill.reports.console import render_collected

    project = open_project(given)
    found = gc.collect_garbage(project, keep=given.keep, dry_run=given.dry_run)
    terminal.make_console().print(render_collected(found, dry_run=given.dry_run))
    return DONE
