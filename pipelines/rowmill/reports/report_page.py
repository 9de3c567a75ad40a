"""The report of a recipe: one self-contained HTML file that shows the current build.

    reports/<recipe>/report.html               `#<dataset>/<stage>` links to a stage
    reports/<recipe>/expectations/….html       the expectations on each stage's facts (`expectations_page.py`)

Samples are rows of the data: whoever may read the report may read them. The file stays under `MAX_PAGE_BYTES` for any
number of datasets: sequences, samples and rejects share fixed budgets, and only the first `MAX_DRAWN_DATASETS` datasets
get plots and a sequence. It depends on the build alone, not on when or where it is written.
"""

from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib import resources

from rowmill.build import runner
from rowmill.build.steps import Project
from rowmill.core import html
from rowmill.core.html import escape_text, render_element
from rowmill.core.stage_names import TOKENIZED_EXAMPLES
from rowmill.core.storage import digest_json
from rowmill.executors import LocalPool
from rowmill.inspection.packed_sequence import view_sequence
from rowmill.reports import report_overview, report_rows, report_stages, sequence_view
from rowmill.reports.current_build import CurrentBuild, load_current_build
from rowmill.reports.report_overview import make_anchor
from rowmill.stages import tokenizer_files
from rowmill.stages.base import StageContext
from rowmill.tokenization.encoder import Encoder

PAGE_VERSION = 2
"""Increase it when the page's layout changes; a report with equal content is not written again."""
MAX_PAGE_BYTES = 2_000_000
MAX_SEQUENCE_BYTES = 250_000
"""Total size of all packed sequences."""
MAX_SEQUENCE_TOKENS = 1024
"""Tokens shown of a packed sequence."""
MAX_DRAWN_DATASETS = 16
"""Datasets that get plots and a packed sequence: four plots and two flows take some 40 kB."""


def report_path(recipe: str) -> str:
    """Return the path of a recipe's report, relative to the storage root."""
    return f"reports/{recipe}/report.html"


def write_report(project: Project) -> str:
    """Write the report of the current build; return its path or URL."""
    store, path = project.store, report_path(project.recipe.name)
    build = load_current_build(project)
    digest_comment = f"<!-- {_digest_content(build)} -->"
    if not (store.exists(path) and store.read(path).decode().endswith(f"{digest_comment}\n")):
        store.write(path, f"{render_report(build)}{digest_comment}\n".encode())
    return store.path(path)


def write_build_report(project: Project) -> str:
    """Write the report at the end of a build, and make damaged files again that it shows."""
    return runner.read_and_repair(project, partial(write_report, project))


def _digest_content(build: CurrentBuild) -> str:
    """Return a digest of a report's content: the current versions and their check results."""
    versions = [one.version if one is not None else "" for one in build.made.values()]
    results = [
        (result.check, result.threshold_digest, result.message) for found in build.results.values() for result in found
    ]
    return digest_json(PAGE_VERSION, versions, [step.code_version for step in build.steps], results)


def render_report(build: CurrentBuild) -> str:
    """Return the report of the current build as HTML."""
    encoders = _open_encoders(build)
    body = [
        _render_contents(build),
        "<main>",
        *report_overview.render_header(build),
        *report_overview.render_cards(build, drawn=MAX_DRAWN_DATASETS),
        *report_overview.render_findings(build),
        *report_overview.render_flow(build),
        *_render_datasets(build, encoders),
        *report_stages.render_recipe_stages(build),
        *report_rows.render_rows(build, encoders),
        "</main>",
    ]
    return html.render_page(
        f"{build.project.recipe.name}: report", body, style=_read_asset("report.css"), script=_read_asset("report.js")
    )


@cache
def _read_asset(name: str) -> str:
    return resources.files("rowmill.reports").joinpath(name).read_text(encoding="utf-8")


def _render_contents(build: CurrentBuild) -> str:
    """Return the links that stay in view."""
    has_findings = build.waivers or build.failed or build.missing
    names = ["summary", *(["findings"] if has_findings else []), *(["flow"] if any(build.flows.values()) else [])]
    links = [*names, *build.project.recipe.datasets, "order and ranks", "rows"]
    items = "".join(render_element("a", escape_text(name), href=f"#{make_anchor(name)}") for name in links)
    return f'<nav aria-label="contents"><b>{escape_text(build.project.recipe.name)}</b>{items}</nav>'


def _open_encoders(build: CurrentBuild) -> dict[str, Encoder]:
    """Open the tokenizer of each dataset whose examples were made with the recipe's current one."""
    found: dict[str, Encoder] = {}
    project = build.project
    for name in project.recipe.datasets:
        made = build.find_output(name, TOKENIZED_EXAMPLES)
        if made is not None:
            context = StageContext(project.recipe, project.store, project.base, made.key, name, {}, LocalPool(1))
            loaded, path = tokenizer_files.open_recipe_tokenizer(context)
            if loaded.card.digest == made.card.get("tokenizer_digest"):
                found[name] = tokenizer_files.open_encoder(project.store.root, path)
    return found


def _render_datasets(build: CurrentBuild, encoders: Mapping[str, Encoder]) -> Iterator[str]:
    for number, name in enumerate(build.project.recipe.datasets):
        drawn = number < MAX_DRAWN_DATASETS
        sequence = list(_render_dataset_sequence(build, name, encoders)) if drawn else []
        yield from report_stages.render_dataset(build, name, drawn=drawn, sequence=sequence)


def _render_dataset_sequence(build: CurrentBuild, name: str, encoders: Mapping[str, Encoder]) -> Iterator[str]:
    if name in encoders:
        most = MAX_SEQUENCE_BYTES // min(len(encoders), MAX_DRAWN_DATASETS) // sequence_view.TOKEN_BYTES
        found = view_sequence(build.project, name, encoders[name], max_tokens=min(most, MAX_SEQUENCE_TOKENS))
        yield from sequence_view.render_sequence(found) if found is not None else ()
    elif build.find_output(name, TOKENIZED_EXAMPLES) is not None:
        yield '<p class="look">The tokenizer changed since these examples were made, so none are shown.</p>'
