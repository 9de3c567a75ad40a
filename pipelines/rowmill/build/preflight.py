"""Finds mistakes before a build: requirements of all datasets, then their first records through every stage in memory.

    tokenizer, template ─────────────────────────────────────► mistakes
    first records ─ raw_dataset ─ … ─ packed_shards ─ checks ─► mistakes, remarks
                         └─ columns that no option reads ─────► remarks

A dataset is tried if its options changed since its rows and examples were made, so that a project in which nothing
changed costs nothing. A trial keeps only the tokenizer as data, which the build needs next. A column is unread if
every record without it gives the same row; rejected records show nothing, since what rejects them may hide that an
option reads a column.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import orjson

from rowmill import sources
from rowmill.build import prepare
from rowmill.build.runner import open_trial, run_stage
from rowmill.build.steps import Project, Step, plan_steps
from rowmill.checks import judge
from rowmill.checks.catalog import CHECKS_BY_NAME, format_remedy
from rowmill.checks.judge import CheckResult, format_recipe_argument
from rowmill.core.arrays import format_count
from rowmill.core.errors import GateError, PipelineError, join_errors
from rowmill.core.json import Json
from rowmill.core.stage_names import CANONICAL_ROWS, PACKED_SHARDS, RAW_DATASET, TOKENIZED_EXAMPLES
from rowmill.kinds.base import DatasetReader
from rowmill.kinds.catalog import KINDS
from rowmill.kinds.reading.canonicalization import open_dataset_reader, remove_nulls
from rowmill.kinds.reading.recognition import find_wrapped_records, recognise_format, write_options
from rowmill.kinds.shared.samples import Sample
from rowmill.kinds.text import describe_printed_chats
from rowmill.parts.accounts import clean_value
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.schema.rows import MESSAGE_KEYS, ROW_KINDS, Row
from rowmill.schema.source_counts import SourceCounts
from rowmill.sources.reading import load_scans, load_source_parts
from rowmill.stages import catalog
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.tokenization import stored_tokenizers, tokenizer_source

if TYPE_CHECKING:
    import polars as pl

MAX_SHOWN_COLUMNS = 200
"""Records with more columns are compared in their first ones only."""


def _is_empty(value: Json) -> bool:
    return value is None or value in ("", [], {})


def _changes_row(reader: DatasetReader, record: Mapping[str, Json], row: Row, name: str) -> bool:
    """Return whether a record gives another row than this without a column."""
    if _is_empty(record.get(name)):
        return False
    try:
        return _read_row(reader, {key: value for key, value in record.items() if key != name}) != row
    except Exception:  # noqa: BLE001  (a kind that demands the column reads it)
        return True


def _read_row(reader: DatasetReader, record: Mapping[str, Json]) -> Row | None:
    """Return a record's row; None if it is rejected."""
    (row,) = reader.read(dict(record), arrow=False)
    return row if isinstance(row, Row) else None


FIRST_RECORDS = 20
"""Records tried of each dataset: of one file per format and split."""

_STAGES = catalog.list_stages_up_to(catalog.find_stage(PACKED_SHARDS))
_OPTION_BY_STAGE = {RAW_DATASET: "source", CANONICAL_ROWS: "format"}


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake, with the error that a build would end with; without one, a remark, which may be a warning."""

    text: str
    error: PipelineError | None = None
    is_warning: bool = False


def require_no_mistakes(
    project: Project,
    steps: Sequence[Step] | None = None,
    *,
    before_trial: Callable[[Sequence[str]], None] | None = None,
) -> list[Finding]:
    """Refuse a build that cannot succeed, naming all mistakes; return remarks on what may be one.

    `before_trial` is called with the names of the datasets that are tried, once nothing is known to be missing.
    Raises GateError or UnreachableError if nothing else is wrong, else ConfigError with a paragraph per mistake.
    """
    findings = find_mistakes(project, plan_steps(project) if steps is None else steps, before_trial)
    mistakes = [finding.error for finding in findings if finding.error is not None]
    if not mistakes:
        return findings
    raise join_errors(mistakes, "\n".join(finding.text for finding in findings))


@tokenizer_source.hold_commits()
def find_mistakes(
    project: Project, steps: Sequence[Step], before_trial: Callable[[Sequence[str]], None] | None = None
) -> list[Finding]:
    """Return the mistakes and remarks on all datasets of some steps, each once."""
    unmet = prepare.find_unmet_requirements(project, steps)
    found = {str(error): Finding(str(error), error) for error in unmet.values()}
    names = list(dict.fromkeys(step.dataset for step in steps if step.dataset is not None and not step.on_demand))
    tried = [step for step in plan_steps(project) if step.name in _STAGES]
    changed = [
        name
        for name in names
        if not all(prepare.has_current_options(project, step) for step in tried if step.dataset == name)
    ]
    if changed:
        if before_trial is not None and not unmet:
            before_trial(changed)
        # Few records cannot have numbers of held-out rows and sequences.
        unheld = {"validation": 0, "test": 0, "max_rows": None, "method": "hash"}
        datasets = {
            name: dataset.model_copy(update={"splits": dataset.splits.model_copy(update=unheld)})
            if dataset.splits.is_exact
            else dataset
            for name, dataset in project.recipe.datasets.items()
        }
        mixture = project.recipe.mixture.model_copy(update={"num_validation_sequences": None})
        recipe = project.recipe.model_copy(update={"mixture": mixture, "datasets": datasets})
        with open_trial(replace(project, recipe=recipe)) as trial:
            for name in changed:
                for finding in _try_dataset(project, trial, name, unmet):
                    found.setdefault(finding.text, finding)
    return list(found.values())


# ── Trying the first records ───────────────────────────────────────────────────────────────────────


def _try_dataset(project: Project, trial: Project, dataset: str, unmet: Container[StageKey]) -> Iterator[Finding]:
    """Run the first records through the stages as far as they go; yield what is wrong and what is notable."""
    outputs: dict[StageKey, Manifest] = {}
    for step in plan_steps(trial):
        if step.dataset != dataset or step.name not in _STAGES:
            continue
        if step.key in unmet or not all(key in outputs for key in step.inputs):
            return
        try:
            output = run_stage(project, trial, step, outputs, first_records=FIRST_RECORDS)
            outputs[step.key] = output
            found: list[Finding] = []
            if step.name == RAW_DATASET:
                found += _note_unexpected_formats(trial, step, output)
                found += _note_unread_columns(trial, step, output)
            elif step.name == CANONICAL_ROWS:
                found += _warn_of_printed_chats(trial, step, output)
            elif step.name == TOKENIZED_EXAMPLES:
                rows = next(outputs[key] for key in step.inputs if outputs[key].stage == CANONICAL_ROWS)
                found += _note_unread_message_keys(trial, step, rows)
            raw = next(one for one in outputs.values() if one.stage == RAW_DATASET)
            found += _judge_output(project, trial, step, output, raw)
        except PipelineError as error:
            yield Finding(_place_error(step, error), error)
            return
        yield from found
        if any(finding.error is not None for finding in found):
            # What comes after repeats it: rows that were rejected become no examples.
            return


def _place_error(step: Step, error: PipelineError) -> str:
    """Return an error with its recipe, dataset and group of options, unless it names them itself."""
    at, text = f"datasets.{step.dataset}", str(error)
    if text.startswith((f"{at}.", f"{at}:", "tokenizer")):
        return f"{step.recipe}: {text}"
    if text.startswith(tuple(f"{option}." for option in _OPTION_BY_STAGE.values())):
        return f"{step.recipe}: {at}.{text}"
    option = _OPTION_BY_STAGE.get(step.name)
    return f"{step.recipe}: {at}{f'.{option}' if option else ''}: {text}"


# ── What the first records show ────────────────────────────────────────────────────────────────────


def _judge_output(project: Project, trial: Project, step: Step, output: Manifest, raw: Manifest) -> list[Finding]:
    """Return the checks that fail for certain, and those that probably will once all records are read."""
    if step.name == PACKED_SHARDS:
        # What packing leaves over is most of a few records.
        return []
    tried = raw.get_counts(SourceCounts).records
    failed = [one for one in judge.run_checks(trial.store, output, step.thresholds) if one.failed and not one.waiver]
    failed = [one for one in failed if one.check in CHECKS_BY_NAME]
    certain = [one for one in failed if one.blocking and _is_certain(one)]
    if len(certain) > 1:
        # Why nothing came out is what another check says.
        certain = [one for one in certain if one.check != "nonempty"]
    probable = [one for one in failed if one not in certain and _is_probable(one, tried)]
    texts = {one.check: _word_result(project, trial, step, output, one, tried) for one in (*certain, *probable)}
    of_rejects = [check for check in texts if check in _CHECKS_OF_REJECTS]
    if step.name == CANONICAL_ROWS and of_rejects and (proposal := _propose_format(trial, step, raw)):
        texts[of_rejects[0]] += f"\n  {proposal}"
    mistakes = [Finding(texts[one.check], GateError(texts[one.check])) for one in certain]
    return [*mistakes, *(Finding(texts[one.check], is_warning=True) for one in probable)]


def _is_certain(result: CheckResult) -> bool:
    """Return whether a failed check fails for the whole dataset, whatever its other records are.

    Counts only grow, and a bound of nothing or all is broken by one record. If every record that was tried is affected,
    it is a mistake as well.
    """
    check = CHECKS_BY_NAME[result.check]
    if not check.is_share or result.value is None:
        return True
    return result.value >= 1 or result.bound == (0 if check.direction == "at_most" else 1)


def _is_probable(result: CheckResult, tried: int) -> bool:
    """Return whether so many records are affected that chance does not explain it."""
    check = CHECKS_BY_NAME[result.check]
    if not check.is_share or check.direction == "at_least" or result.value is None:
        return False
    # The lower end of Wilson's 95 % interval for a share that was seen in so many records.
    share, z = result.value, 1.96
    middle, margin = share + z**2 / (2 * tried), z * math.sqrt((share * (1 - share) + z**2 / (4 * tried)) / tried)
    return (middle - margin) / (1 + z**2 / tried) > result.bound


def _word_result(
    project: Project, trial: Project, step: Step, output: Manifest, result: CheckResult, tried: int
) -> str:
    """Return a failed check in four parts, with its causes and a record."""
    import polars as pl

    option = _OPTION_BY_STAGE.get(step.name)
    at = f"{step.recipe}: datasets.{step.dataset}{f'.{option}' if option else ''}"
    sentence = f"{result.check} is {result.shown} ({result.what}); wanted {result.wanted}"
    remedy = CHECKS_BY_NAME[result.check].before_build or next(
        threshold.remedy for threshold in step.thresholds if threshold.check == result.check
    )
    remedy = format_remedy(remedy, format_recipe_argument(step.recipe, project.store.root), step.dataset or "")
    causes = [_TRIAL_ROW_ID.sub("", cause) for cause in result.causes]
    files = [part.files["rejects"] for part in output.parts if "rejects" in part.files]
    if files and result.check in _CHECKS_OF_REJECTS:
        tables = [cast("pl.DataFrame", pl.from_arrow(trial.store.table(file, ["reason", "raw"]))) for file in files]
        rejects = pl.concat(tables)
        # The first record with the most frequent reason to reject.
        for reason, _ in Counter(rejects["reason"].to_list()).most_common(1):
            raw: bytes = rejects.filter(pl.col("reason") == reason)["raw"][0]
            causes += [f"the record: {clean_value(raw.decode(errors='replace'))}"] if raw else []
    return "\n  ".join([f"{at}: of {tried} records tried, {sentence}; {remedy}", *causes])


_TRIAL_ROW_ID = re.compile(r" \([0-9a-f]{16}[~0-9]*:\d+(\.\d+)?(#\d+)?\)")
"""A row's id, which begins with its part's digest: a part of the first records is none that a build has."""

_CHECKS_OF_REJECTS = frozenset({"nonempty", "rejects", "content_dropped", "zero_loss_rows"})


def _propose_format(trial: Project, step: Step, raw: Manifest) -> str:
    """Return a sentence with the format that reads the records that were tried, if it is another than the recipe's."""
    dataset = trial.recipe.datasets[step.dataset or ""]
    records = [record for record in _read_records(trial, raw) if isinstance(record, dict)]
    if (wrapped := find_wrapped_records(records, list(KINDS.values()))) is not None:
        path, rows = wrapped
        return f"the records may be the {format_count(len(rows), 'object')} of its list {path}: source.field: {path}"
    found = recognise_format(Sample(records), KINDS.values()).proposal
    says_little = found is None or KINDS[found.kind].FITS_MOST_RECORDS or found.kind == dataset.format.kind
    if found is None or (says_little and len(found.options) == 1):
        return ""
    return f"{found.fits} of {found.records} records fit format: {write_options(found.options)}"


def _read_records(trial: Project, raw: Manifest) -> list[Json]:
    return [
        remove_nulls(record.value) if part.arrow else record.value
        for part in load_source_parts(raw)
        for record in sources.read_records(part, trial.base)
        if record.value is not None
    ]


def _note_unexpected_formats(trial: Project, step: Step, raw: Manifest) -> Iterator[Finding]:
    """Name a file that is read in another way than its name says."""
    at = f"{trial.recipe.name}: datasets.{step.dataset}.source"
    alike: dict[str, list[str]] = {}
    for scan in load_scans(raw):
        for described in sources.describe_reading(scan):
            alike.setdefault(described, []).append(scan.url)
    for described, found in alike.items():
        others = f", and {format_count(len(found) - 1, 'other file')} like it" if len(found) > 1 else ""
        yield Finding(f"{at}: {clean_value(found[0])} is read {described}{others}")


def _warn_of_printed_chats(trial: Project, step: Step, rows: Manifest) -> Iterator[Finding]:
    """Warn of documents that are chats as a template prints them, whose prompts train like answers."""
    tables = [trial.store.table(file, ["kind", "text"]) for file in rows.files("rows")]
    texts = [row["text"] for table in tables for row in table.to_pylist() if ROW_KINDS[row["kind"]].is_running_text]
    if printed := describe_printed_chats(texts):
        yield Finding(
            f"{trial.recipe.name}: datasets.{step.dataset}.format: the documents hold {printed}; a chat needs its "
            "messages, by format.kind: chat",
            is_warning=True,
        )


def _note_unread_message_keys(trial: Project, step: Step, rows: Manifest) -> Iterator[Finding]:
    """Name keys that messages have after canonicalization, which keeps what a template may print."""
    context = prepare.make_stage_context(trial, step, {rows.key: rows})
    spec = tokenized_examples.resolve_renderer_spec(context, stored_tokenizers.open_recipe_tokenizer(context)[0])
    if spec is None:
        return
    tables = [trial.store.table(file, ["messages"]) for file in rows.files("rows")]
    texts = [text for table in tables for text in table.column("messages").to_pylist() if text]
    present = Counter(key for text in texts for message in orjson.loads(text) for key in message)
    unread = [
        (key, count)
        for key, count in present.items()
        # A template may read a key in any way, but not without its name.
        if key not in MESSAGE_KEYS and not re.search(rf"\b{re.escape(key)}\b", spec.text)
    ]
    if unread:
        named = ", ".join(f"`{clean_value(key)}` ({format_count(count, 'message')})" for key, count in unread)
        keys = "key" if len(unread) == 1 else "keys"
        yield Finding(
            f"{trial.recipe.name}: datasets.{step.dataset}.format: neither an option nor the chat template reads the "
            f"{keys} {named}"
        )


def _note_unread_columns(trial: Project, step: Step, raw: Manifest) -> Iterator[Finding]:
    """Name the columns that no option reads; all columns of a table are written, and user code may read any."""
    dataset = step.dataset or ""
    options = trial.recipe.datasets[dataset]
    if options.format.WRITES_ALL_COLUMNS:
        return
    reader = open_dataset_reader(options, trial.base, dataset)
    if reader.read_elsewhere is None:
        return
    records = _read_records(trial, raw)
    made = [(record, row) for record in records if (row := _read_row(reader, record)) is not None]
    present = Counter(name for record, _ in made for name, value in record.items() if not _is_empty(value))
    at = f"{trial.recipe.name}: datasets.{dataset}.format"
    ignored, others = options.format.list_ignored_columns(), list[str]()
    for name, count in list(present.items())[:MAX_SHOWN_COLUMNS]:
        if any(_changes_row(reader, record, row, name) for record, row in made):
            continue
        if name in reader.unread_preferences:
            false = sum(record.get(name) is False for record, _ in made)
            share = f"{false} of {len(made)} are false" if false else f"{count} of {len(made)} have a value"
            asked = f"`{name}` is not read; {share}: is this preference data?"
            yield Finding(f"{at}: {asked}", is_warning=True)
        elif name not in ignored:
            others.append(f"`{clean_value(name)}`")
    if others:
        yield Finding(f"{at}: no option reads the {'column' if len(others) == 1 else 'columns'} {', '.join(others)}")
