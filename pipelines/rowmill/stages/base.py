"""What every stage is made of: its declaration, which all else is derived from, and the context that it runs in.

The stages, one module each: what is done to all parts of a dataset, or to all datasets of a recipe.

| stage | per | reads | writes |
|---|---|---|---|
| `raw_dataset` | dataset | source files | scans: parts with digests |
| `canonical_rows` | dataset | parts | rows, rejects, ledger per part |
| `tokenized_examples` | dataset | rows | examples, rejects, ledger per part |
| `truncation_stats` | dataset | examples' lengths | histograms, what-if |
| `packed_shards` | dataset | examples | shards, segments, examples left out |
| `training_splits` | recipe | sequences' counts | the order |
| `gpu_partitions` | recipe | the order, shards | shards per rank |
| `exports` | export | the order, shards | a trainer's files |
| `parsed_records` | dataset | files of generated text | records, refused objects |
| `generated_series` | dataset | examples, rows, a trained model | records |
| `teacher_scores` | dataset | examples, a served model | token ids with scores |
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rowmill.checks.judge import CheckResult
from rowmill.core.storage import Store, digest_json
from rowmill.kinds.context import RecipeContext
from rowmill.parts.context import StageOutput
from rowmill.recipe.recipe import Dataset, Recipe
from rowmill.schema.counts import Counts, CountSet
from rowmill.schema.manifest import Manifest
from rowmill.stats.tables import StatsInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext(RecipeContext[Dataset]):
    """What a stage receives."""

    recipe: Recipe
    ranks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PreparedStage:
    """A stage ready to run: `outside` identifies its other inputs besides recipe and stages, `make` does the work.

    `outside` holds JSON values: digests of source files, of tokenizer files, of the template's text.
    """

    outside: tuple[Any, ...]
    make: Callable[[], StageOutput]


Scope = Literal["dataset", "recipe", "export"]
"""Whether a stage runs for each dataset, for the whole recipe, or for each export."""


Publish = Callable[[StageContext, Manifest, Sequence[CheckResult], Sequence[str]], None]
"""Publishes an output for trainers if no check blocks, with its check results and the loosened bounds."""


@dataclass(frozen=True, slots=True)
class ComparedNumber:
    """A number that `rowmill diff` compares, with its display name: a function of counts of a class."""

    name: str
    of: type[Counts]
    value: Callable[[Any], float | None]
    is_share: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDeclaration:
    """Everything known about a stage without running it, declared once, in the stage's module.

    `catalog.STAGES` lists the declarations in order. The graph, the plan, the runner and Dagster's assets are made
    from that list, so adding a stage takes its module and one line there.
    """

    name: str
    """The last part of its key (for exports, the one before the name), and a folder name in storage."""
    description: str
    """One sentence for users that describes the output."""
    identity: Callable[[Recipe, str], dict[str, Any]]
    """Every option that the stage reads, of the dataset or the export of that name, and the versions of the code that
    reads them, as explicit JSON values. Both identities below are computed from it, so that a build never remakes what
    Dagster calls fresh."""
    prepare: Callable[[StageContext], PreparedStage]
    """Identify the stage's other inputs, such as tokenizer files, and return the function that runs it."""
    counts: type[Counts]
    """The class of the counts that every output of the stage has."""
    scope: Scope = "dataset"
    inputs: tuple[str, ...] = ()
    """Names of the stages that it reads: of the same dataset, or, for a stage of the recipe, of every dataset. A stage
    without inputs reads source files."""
    origins: tuple[str, ...] = ()
    """Names of stages behind its inputs whose outputs it reads as well (`load_origin`). An input may be the same
    although these changed, so they are in the fingerprint."""
    gates: tuple[str, ...] = ()
    """Names of other stages of the dataset whose checks must pass first although it does not read them."""
    gates_on_every_dataset: bool = False
    """Whether the checks of all stages of all datasets must pass first."""
    applies: Callable[[Dataset], bool] = lambda _: True
    """Whether a dataset has the stage."""
    command: str = ""
    """The command that runs it, for on-demand stages, which need a trained model."""

    is_final: Callable[[Manifest], bool] = lambda _: True
    """Whether an output need not be made again although nothing changed: not if a server refused some of its rows. It
    sees nothing else, so that no other build decides it."""
    divides_into_shares: bool = False
    """Whether `rowmill work` makes its parts: only where its maps do nearly all of the work."""

    # Hooks of the runner.
    require_ready: Callable[[StageContext], None] | None = None
    """Raise ConfigError if a requirement outside the storage root is missing; called before a build."""
    find_outside_change: Callable[[StageContext, Manifest], str | None] | None = None
    """Describe what changed outside the recipe and the inputs since an earlier output, or return None."""
    publish: Publish | None = None
    """Publish an output for trainers; None for stages whose output the reader does not open."""

    list_shared_inputs: Callable[[Manifest], tuple[str, ...]] = lambda _: ()
    """Names of the inputs whose files readers of an output open, because it names them instead of copying them."""

    # Hooks of reports and statistics.
    stats_inputs: StatsInputs = field(default_factory=StatsInputs)
    """The rows of an output with their noun, and the statistics tables that it contributes to."""
    summarize: Callable[[CountSet, str], Sequence[str]] = lambda _, rows: (rows,)
    """Summarize an output in a few phrases, from its counts and its number of rows (`1,342 rows`, or empty)."""
    compared: tuple[ComparedNumber, ...] = ()
    """The numbers that a comparison of two versions shows."""
    find_content_damage: Callable[[Store, Manifest], Iterator[str]] | None = None
    """Compare the files' content with the content hashes of the manifest; yield a message per difference."""

    # Hooks of the Dagster layer.
    uses_all_cores: bool = False
    """Whether it uses all workers, so that two such stages at once would compete for cores."""
    partitions: Callable[[Recipe], tuple[str, ...]] | None = None
    """Names of the independent pieces of its output; None if there is only one."""
    shows_overdue: bool = False
    """Whether `execution.freshness` applies to this stage."""

    @property
    def on_demand(self) -> bool:
        return bool(self.command)

    def code_version(self, recipe: Recipe, name: str, waivers: Sequence[str]) -> str:
        """Return the digest of options, waivers and code version, which Dagster compares before reading anything."""
        return digest_json(self.name, name, self.identity(recipe, name), list(waivers))[:16]

    @staticmethod
    def fingerprint(
        code_version: str, inputs: Mapping[str, str], waivers: Sequence[str], outside: Sequence[Any]
    ) -> str:
        """Return the identity of an output before it is made: the code version, and everything outside the recipe.

        `inputs` maps the keys of its inputs to content versions; `waivers` are all that apply.
        """
        return digest_json(code_version, dict(inputs), list(waivers), list(outside))
