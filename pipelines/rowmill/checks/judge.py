"""Checks of a stage's output: one number, one bound, one result; and the lock that a failed one keeps shut.

What belongs here: the list of checks, the thresholds a recipe may set, judging a manifest's facts, reading
a saved result. What does not: computing the numbers; whoever writes a stage's output counts them into
`Manifest.facts`, and a check never re-reads the data (`rowmill verify --deep` does, on purpose).

The bounds are a Great Expectations suite over the one-row table of facts, so a recipe can add its own
expectations beside ours and its users read one kind of result. Two traps of that library are closed here:
its range expectations pass on null, NaN and empty columns, so a missing or non-finite fact fails before
the suite runs as `not_measured`; and an expectation that raised is reported as unsuccessful without a
value, so it becomes `not_judged`. Results are saved per (content version, thresholds) and never judged twice:
a quiet night does not import the library, which takes two seconds.

A fact that is `manifest.NOT_APPLICABLE` neither passes nor fails. Only a check that says where it applies may have such
a fact; for every other check it is not measured, which fails.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import AliasChoices, Field, create_model, field_validator, model_validator

from rowmill.checks import cross_stage
from rowmill.core.config import Config
from rowmill.core.errors import GateError, join_choices, suggest_name
from rowmill.core.storage import Store, digest_json
from rowmill.schema.manifest import NOT_APPLICABLE, Manifest, StageKey, get_stage_folder
from rowmill.schema.rows import RowKind

Severity = Literal["error", "warn"]
CheckOutcome = Literal["passed", "failed", "not_applicable"]
RESULT_VERSION = 5
"""Raise it when the meaning of a check or the shape of a result changes: what was saved is then judged anew."""
RESULTS_FOLDER = "check_results"
"""Where a stage keeps the results of its checks."""
OLD_RESULTS_FOLDER = "verdicts"
"""Where versions of rowmill before `RESULT_VERSION` 5 kept them; nothing reads these."""


@dataclass(frozen=True, slots=True)
class Check:
    """A number that a stage's output must keep within a bound.

    `name` is its key in `Manifest.facts`. A check without `waivable` guards correctness itself. `applies_to` names the
    data that it has a meaning for, "" is all; a stage says of other data that it is not applicable.
    """

    name: str
    stages: tuple[str, ...]
    direction: Literal["at_most", "at_least"]
    bound: float
    severity: Severity
    what: str
    remedy: str
    """`{recipe}` in it stands for the recipe's name; see `format_remedy`."""
    waivable: bool = True
    warn_from: float | None = None
    """A value beyond it fails, and blocks only beyond `bound`; None: whatever fails blocks."""
    applies_to: str = ""
    of_records: str = ""
    """The remedy for tables, where that of other rows cannot help."""
    row_kind: RowKind | None = None
    """The kind of rows whose stages have the check, None is every kind; stages of others count nothing for it."""
    names_samples: bool = False
    """Whether its samples are sentences that say what is wrong, which every message about it then shows."""


CHECKS: tuple[Check, ...] = (
    Check("nonempty", ("raw_dataset", "canonical_rows", "tokenized_examples"), "at_least", 1, "error",
        "records, rows or examples that came out",
        "check the source's paths and files, or read the rejects with `rowmill sql \"from rejects\" {recipe}`"),
    Check("accounted", ("canonical_rows", "tokenized_examples"), "at_most", 0, "error",
        "records or tokens that the ledger cannot place",
        "this is a bug of rowmill: report it with the manifest", waivable=False),
    Check("empty_files", ("raw_dataset",), "at_most", 0, "warn",
        "source files without a single record", "take them out of the source, or fetch them again"),
    Check("unknown_roles", ("canonical_rows",), "at_most", 0.01, "error",
        "share of rows with a role that no template is known to print",
        "map the role in format.role_map, or set format.unknown_roles: reject", applies_to="conversations"),
    Check("group_size", ("canonical_rows",), "at_most", 10_000, "error",
        "rows in the largest group of splits.group_key",
        "choose a finer splits.group_key, or raise gates.group_size if one group may be that large",
        applies_to="datasets with splits.group_key, and records in groups that are not cut",
        of_records="choose a finer group column (`rowmill advise {recipe}`), cut groups by format.assembly."
        "on_overflow: split, or raise gates.group_size if one group may be that large"),
    Check("group_advice", ("canonical_rows",), "at_most", 0, "warn",
        "points against the chosen group column",
        "read table group_advice on this page, or try other columns with `rowmill advise {recipe}`",
        applies_to="records in groups, and time series"),
    Check("interval_mismatch", ("canonical_rows",), "at_most", 0, "warn",
        "share of steps in time that are not timestamp_interval_seconds",
        "set the interval of the data, or leave it out: a constant one is found",
        applies_to="time series with timestamp_interval_seconds"),
    Check("table_drift", ("canonical_rows",), "at_most", 0, "error",
        "changes of the table against its contract, pinned or the last build's",
        "mend the data where the cell stands; or accept it: write the contract of today's data with "
        "`rowmill advise {recipe} --write`, look through it, and build again", applies_to="records", row_kind="record",
        names_samples=True),
    Check("type_mismatch", ("canonical_rows",), "at_most", 0, "warn",
        "values that do not fit the type of their column; their records are rejected, or the values null, as the table "
        "contract says",
        "look at the table type_mismatch; mend the values, name them in the column's na words, or give the column "
        "another type in the table contract (`rowmill advise {recipe} --write`)", applies_to="records",
        row_kind="record", names_samples=True),
    Check("preference_data", ("canonical_rows",), "at_most", 0, "error",
        "share of records with a column of preference data that the recipe does not read, such as label or rejected",
        "good and bad answers would train alike: keep the good ones in the source, or name the answer to train on in "
        "format.messages_field or format.response_fields; if the column means something else, waive the check",
        applies_to="chats and pairs in columns"),
    Check("rejects", ("canonical_rows", "tokenized_examples"), "at_most", 0.05, "error",
        "share of records rejected at this stage",
        'read the reasons with `rowmill sql "from rejects select dataset, reason, count(*) group by all" {recipe}` '
        "and mend the data or the format options", names_samples=True),
    Check("unpinned_boundaries", ("canonical_rows",), "at_most", 0, "warn",
        "boundaries in time that came from shares, so that new rows move them",
        "write them into splits.boundaries, as they stand in the table of this page",
        applies_to="splits by time"),
    Check("duplicates", ("canonical_rows",), "at_most", 0.2, "warn",
        "share of rows that repeat an earlier row",
        "look where the copies come from; filters.deduplicate: off keeps them"),
    Check("mask_verified", ("tokenized_examples",), "at_least", 1, "error",
        "share of examples whose loss mask was verified",
        "this is a bug of rowmill: report it with the manifest", waivable=False, applies_to="datasets with examples"),
    Check("render_equal", ("tokenized_examples",), "at_most", 0, "error",
        "sampled rows whose marked render differs from the plain one",
        "set template.verify_render: 1 and read the rejects named render_mismatch; report the template",
        applies_to="chat templates, unless template.verify_render is 0"),
    Check("short_documents", ("tokenized_examples",), "at_most", 0.5, "warn",
        "share of the documents of text files that are shorter than 20 tokens",
        "set source.sample_by to paragraph or document, unless each line of the files is a document",
        applies_to="documents of text files (.txt)"),
    Check("content_dropped", ("tokenized_examples",), "at_most", 0.02, "error",
        "share of rows rejected because the template does not print all of their content",
        "choose another template, or allow the kind in template.on_dropped", applies_to="chat templates"),
    Check("zero_loss_rows", ("tokenized_examples",), "at_most", 0.05, "error",
        "share of rows without a single trained token",
        "check loss.supervise, loss.mask and the rows' train flags, or raise seq_len if truncation took the answer"),
    Check("contract", ("tokenized_examples",), "at_most", 0, "warn",
        "warnings about what the chat template does",
        "read them with `rowmill template-report {recipe}`; each says what to write", applies_to="chat templates"),
    Check("prompt_match", ("tokenized_examples",), "at_most", 0, "warn",
        "roles after which inference prompts otherwise than the training text goes on",
        "read prompts and prompt_match in `rowmill template-report {recipe}`; set template.template_kwargs or "
        "template.enable_thinking as at inference", applies_to="chat templates"),
    Check("date_pinned", ("tokenized_examples",), "at_most", 0, "warn",
        "templates that print a date, which is template.template_now in every row",
        "set template.template_now to the date the model shall believe in", applies_to="chat templates"),
    Check("control_strings", ("tokenized_examples",), "at_most", 0.05, "warn",
        "share of rows whose own text holds strings of control tokens",
        "look at the table control_strings; template.control_tokens: as_text keeps them text, reject refuses the rows",
        applies_to="chat templates, and records",
        of_records="nothing is lost: such strings are written escaped and never become control tokens; gates."
        "control_strings says how many may hold one"),
    Check("text_roundtrip", ("tokenized_examples",), "at_most", 0.01, "warn",
        "share of texts whose ids decode to other text, because the tokenizer normalises",
        "expected of tokenizers that lower or recompose text; normalise the source yourself if it must not happen",
        applies_to="datasets with examples"),
    Check("token_ids", ("tokenized_examples",), "at_most", 0, "error",
        "token ids outside the vocabulary",
        "set vocab_size to the model's embedding rows, or use the model's tokenizer", waivable=False),
    Check("prompt_parity", ("tokenized_examples",), "at_most", 0, "warn",
        "share of generation prompts whose text is tokenized otherwise than in training",
        "records: send the generation prompt as ids (`prompt_as: ids`), not as text; chats: set loss.boundary: split, "
        "so that a prompt is tokenized apart from its answer",
        applies_to="records, and chats of which a sample has a generation prompt to compare"),
    Check("context_overflow", ("truncation_stats",), "at_most", 0.1, "error",
        "share of examples that were longer than the context and lost tokens, or were dropped for it; of records, of "
        "those that no example could hold",
        "raise seq_len, shorten or filter the long rows, or accept the loss in gates.context_overflow",
        of_records="raise seq_len or format.assembly.max_seq_length, choose a finer group column (`rowmill advise "
        "{recipe}`), cut groups by format.assembly.on_overflow: split, or accept the loss in gates.context_overflow"),
    Check("conservation", ("packed_shards", "gpu_partitions", "exports"), "at_most", 0, "error",
        "tokens or segments that differ between what went in and the shards read back",
        "remove the stage's folder and build again; if it returns, report it", waivable=False),
    Check("shard_digests", ("packed_shards",), "at_most", 0, "error",
        "shard files whose bytes are not what was written",
        "check the disk, remove the stage's folder and build again", waivable=False),
    Check("packing_loss", ("packed_shards",), "at_most", 0.1, "error",
        "larger of the shares of examples and of trained tokens that enter packing and stand in no sequence",
        "raise seq_len, shorten rows by truncation.overlong instead of packing.slice_strategy, or accept the loss in "
        "gates.packing_loss", applies_to="datasets with examples"),
    Check("end_to_end_loss", ("packed_shards",), "at_most", 0.25, "error",
        "larger of the shares of records and of trained tokens that entered and stand in no sequence",
        "read what each stage rejected with `rowmill stats {recipe}`; raise seq_len, mend the data, or accept the loss "
        "in gates.end_to_end_loss", warn_from=0.1, applies_to="datasets with examples"),
    Check("shrunk", ("raw_dataset", "canonical_rows", "packed_shards", "training_splits"), "at_most", 0.5, "error",
        "largest share by which its files, records, rows, tokens or share of the mixture fell since the published "
        "build; it only warns if options changed, too",
        "see that the source is whole and every file was fetched; if there is to be less, accept it for one build by a "
        "waiver in gates.waivers",
        warn_from=0.1, applies_to="recipes whose ranks were published before"),
    Check("limit_cost", ("packed_shards",), "at_most", 0.05, "warn",
        "share of sequences that packing.max_segments_per_example costs, against no limit",
        "raise packing.max_segments_per_example, or set it to null"),
    Check("fill", ("packed_shards",), "at_least", 0.9, "warn",
        "share of each sequence's room that holds tokens",
        "set packing.pack_strategy to best_fit where it is greedy, raise packing.max_segments_per_example, or lower "
        "seq_len if most rows are short",
        of_records="set format.assembly.max_seq_length to a half of seq_len or less, so that several examples share a "
        "sequence, raise format.data.max_sequences_per_example where examples end at it, or lower seq_len"),
    Check("order_nonempty", ("training_splits",), "at_least", 1, "error",
        "places of the training order that hold a sequence",
        "lower mixture.batch_size below the number of train sequences, or set partitions.remainder: pad"),
    Check("dropped_share", ("training_splits",), "at_most", 0.1, "error",
        "share of the scheduled sequences that partitions.remainder: drop leaves out of the training order",
        "lower mixture.batch_size, or set partitions.remainder: pad or carry", warn_from=0.01),
    Check("filler_share", ("training_splits",), "at_most", 0.1, "error",
        "share of the training order's places that hold no sequence but a filler, which trains nothing",
        "lower mixture.batch_size or partitions.world_size, or set partitions.remainder: carry or drop",
        warn_from=0.01),
    Check("same_row", ("training_splits",), "at_most", 0, "error",
        "rows with equal content in two splits",
        "this is a bug of rowmill: report it with the manifest", waivable=False),
    Check("same_group", ("training_splits",), "at_most", 0, "error",
        "groups with rows in two splits", "set splits.group_key to the field that names the group",
        applies_to="datasets with groups"),
    Check("time_order", ("training_splits",), "at_most", 0, "error",
        "rows in an earlier split than their time belongs to, or inside splits.gap",
        "this is a bug of rowmill: report it with the manifest", applies_to="splits by time"),
    Check("mixture_share", ("training_splits",), "at_most", 1, "error",
        "largest distance, in sequences, of a dataset from its share at the end of a block",
        "this is a bug of rowmill: report it with the manifest"),
    Check("same_prompt", ("training_splits",), "at_most", 0.01, "warn",
        "share of evaluation rows whose first user message also opens a training row",
        "set splits.group_key so that equal prompts stay together, or deduplicate prompts",
        applies_to="all data but tables"),
    Check("near_duplicate", ("training_splits",), "at_most", 0.01, "warn",
        "share of evaluation examples of whose 13-token n-grams half or more stand in train; of tables, of records "
        "that equal one of train in all columns but one",
        "set splits.group_key so that versions of one text stay together (tables: group_training_examples_by), or take "
        "the copies out", applies_to="all data but tables, and tables of which something is held out"),
    Check("split_share", ("training_splits",), "at_most", 0.05, "warn",
        "largest distance between a split's share of rows and the share asked for",
        "expected on few rows or large groups; change splits.seed only before you have trained"),
    Check("rank_balance", ("training_splits",), "at_most", 0.05, "warn",
        "mean over steps of how far the busiest rank's trained tokens lie above the mean rank's",
        "use partitions.balance: trained_tokens and a larger batch_size"),
    Check("empty_step", ("training_splits",), "at_most", 0, "warn",
        "(step, rank) pairs without a trained token", "use a larger batch_size or fewer ranks"),
    Check("valid_fraction", ("parsed_records", "generated_series"), "at_least", 0.8, "warn",
        "share of generated objects that are records of the dataset",
        "read the reasons in the ledger; the model may need more training, another temperature, or a knob of "
        "generation.validation", applies_to="generated texts"),
    Check("failed_series", ("generated_series",), "at_most", 0.99, "error",
        "share of series that ended before their stop; of single records and groups, whether none came at all",
        "read last_error and the reasons; see that the backend runs, or raise generation.patience", warn_from=0),
    Check("exact_copies", ("parsed_records", "generated_series"), "at_most", 0.01, "warn",
        "share of generated records that equal a training row",
        "compare with what repeats in train (table `beside train`): rows of few values agree by chance; a model that "
        "learned rows by heart needs fewer epochs, more data, or differential privacy",
        applies_to="generated records of a table that is kept"),
    Check("stale_rank", ("gpu_partitions",), "at_most", 0, "warn",
        "ranks that were built from another order", "materialize all ranks"),
)  # fmt: skip

CHECKS_BY_NAME = {check.name: check for check in CHECKS}


class Bound(Config):
    """The threshold of one check in this recipe; what is left out keeps its default."""

    at_most: float | int | None = None
    """Highest value that passes; for checks with an upper bound."""
    at_least: float | int | None = None
    """Lowest value that passes; for checks with a lower bound."""
    severity: Severity | None = None
    """`error` closes the gate, `warn` only shows."""


class Waiver(Config):
    """A failed check that someone looked at and accepted, within a bound; shown on every page below."""

    check: str = Field(validation_alias=AliasChoices("check", "law"))
    """The check that may fail; `law` is an older name of this option."""
    dataset: str | None = None
    """The dataset it may fail for; null for checks of the whole recipe."""
    at_most: float | int | None = None
    """How far an upper bound may be exceeded."""
    at_least: float | int | None = None
    """How far a lower bound may be missed."""
    reason: str = Field(min_length=10)
    """Why this is right; shown with every failure that it covers."""

    @model_validator(mode="after")
    def _require_waivable_check(self) -> "Waiver":
        check = CHECKS_BY_NAME.get(self.check)
        if check is None:
            guess = suggest_name(self.check, CHECKS_BY_NAME)
            raise ValueError(
                f"{self.check!r} is not a check; choose "
                f"{join_choices(sorted(CHECKS_BY_NAME))}{f'; did you mean {guess}?' if guess else ''}"
            )
        if not check.waivable:
            raise ValueError(
                f"{self.check} guards correctness and cannot be waived; remove the waiver and mend the cause"
            )
        if getattr(self, check.direction) is None:
            raise ValueError(f"{self.check} needs {check.direction}; say how far it may fail")
        return self


ExpectationType = Literal[
    "expect_column_max_to_be_between",
    "expect_column_mean_to_be_between",
    "expect_column_median_to_be_between",
    "expect_column_min_to_be_between",
    "expect_column_sum_to_be_between",
    "expect_column_values_to_be_between",
]
"""The library's expectations that ask whether a number lies between bounds.

They are listed so that a recipe is checked without importing the library. Its others ask for other arguments, cannot
be asked about one number, or have the same answer for every number.
"""


class Expectation(Config):
    """A Great Expectations rule of your own over a stage's facts."""

    name: str = Field(pattern=r"^[A-Za-z0-9_]+$")
    """How the rule is called in results and checks; must not be the name of a check."""
    type: ExpectationType = "expect_column_max_to_be_between"
    """The expectation's snake-case name; a fact is one number, so all of them ask the same of it."""
    column: str
    """The fact it looks at, as `rowmill verify --facts` lists them."""
    min_value: float | int | None = None
    """Lowest value that passes."""
    max_value: float | int | None = None
    """Highest value that passes."""
    severity: Severity = "error"
    """`error` closes the gate, `warn` only shows."""

    @field_validator("type", mode="before")
    @classmethod
    def _require_range_type(cls, value: object) -> object:
        allowed = get_args(ExpectationType)
        if not isinstance(value, str) or value in allowed:
            return value
        guess = suggest_name(value, allowed)
        raise ValueError(
            f"{value!r} is no expectation that asks for a number between bounds; choose {join_choices(allowed)}; "
            f"{f'did you mean {guess}?' if guess else 'say it with min_value and max_value'}"
        )

    @model_validator(mode="after")
    def _require_bound(self) -> "Expectation":
        if self.min_value is None and self.max_value is None:
            raise ValueError(
                f"{self.name}: has no bound; min_value, max_value or both say what passes; give at least one"
            )
        if self.min_value is not None and self.max_value is not None and self.min_value > self.max_value:
            raise ValueError(
                f"{self.name}: min_value {self.min_value:g} is above max_value {self.max_value:g}, so that nothing "
                "passes; the lower bound must not be above the upper; correct one"
            )
        if self.name in CHECKS_BY_NAME:
            raise ValueError(f"{self.name} is the name of a check; a rule of your own needs another; rename it")
        return self


class GatesBase(Config):
    """Thresholds of the checks; what is left out keeps its default."""

    waivers: tuple[Waiver, ...] = ()
    """Failures accepted with a reason."""
    expectations: dict[str, tuple[Expectation, ...]] = Field(default_factory=dict)
    """Rules of your own: stage name → rules over that stage's facts."""

    @model_validator(mode="after")
    def _require_fitting_bounds(self) -> "GatesBase":
        for check in CHECKS:
            bound: Bound | None = getattr(self, check.name, None)
            other = "at_least" if check.direction == "at_most" else "at_most"
            if bound is not None and getattr(bound, other) is not None:
                raise ValueError(
                    f"{check.name} has an {check.direction} bound, {other} means nothing for it; use {check.direction}"
                )
            if bound is not None and not check.waivable and _is_loosened_bound(check, bound):
                raise ValueError(
                    f"{check.name} guards correctness; allowed is {check.direction} {check.bound:g} or stricter, and "
                    "severity error; take the line out and mend the cause"
                )
        for stage in self.expectations:
            stages = {s for check in CHECKS for s in check.stages}
            if stage not in stages:
                guess = suggest_name(stage, stages)
                hint = f"; did you mean {guess}?" if guess else ""
                raise ValueError(f"expectations.{stage}: no such stage; choose {join_choices(sorted(stages))}{hint}")
            for one in self.expectations[stage]:
                check = CHECKS_BY_NAME.get(one.column)
                if check is not None and stage not in check.stages:
                    raise ValueError(
                        f"expectations.{stage}: rule {one.name} looks at {one.column}, which this stage does not "
                        f"measure; {join_choices(check.stages)} does; write the rule under "
                        f"expectations.{check.stages[0]}"
                    )
            names = Counter(one.name for one in self.expectations[stage])
            repeated = [name for name, count in names.items() if count > 1]
            if repeated:
                raise ValueError(
                    f"expectations.{stage}: {names[repeated[0]]} rules are called {repeated[0]}; each needs a name of "
                    "its own, by which its result is kept; rename all but one"
                )
        return self


def _is_loosened_bound(check: Check, bound: Bound) -> bool:
    own = getattr(bound, check.direction)
    if own is None:
        return bound.severity == "warn"
    looser = own > check.bound if check.direction == "at_most" else own < check.bound
    return looser or bound.severity == "warn"


def list_loosened_checks(key: StageKey, thresholds: Iterable["Threshold"]) -> Iterator[str]:
    """Name the checks that a recipe holds a stage to less strictly than the defaults, with both bounds."""
    for one in thresholds:
        check = CHECKS_BY_NAME.get(one.check)
        if check is None:
            continue
        wider = one.bound > check.bound if check.direction == "at_most" else one.bound < check.bound
        if wider or (one.severity, check.severity) == ("warn", "error"):
            yield (
                f"{'/'.join(key)}: {one.check} {one.direction.replace('_', ' ')} {one.bound:g} ({one.severity}); the "
                f"default is {check.bound:g} ({check.severity})"
            )


def _define_bound_field(check: Check) -> tuple[Any, Any]:
    sign = "≤" if check.direction == "at_most" else "≥"
    where = f" Applies to {check.applies_to}." if check.applies_to else ""
    warned = "" if check.warn_from is None else f"; a warning from {check.warn_from:g} on"
    text = f"{check.what[0].upper()}{check.what[1:]}; default {sign} {check.bound:g}, {check.severity}{warned}.{where}"
    return Bound | None, Field(default=None, description=text)


if TYPE_CHECKING:
    Gates = GatesBase
else:
    Gates = create_model(
        "Gates",
        __base__=GatesBase,
        __doc__=GatesBase.__doc__,
        **{check.name: _define_bound_field(check) for check in CHECKS},
    )
    """`GatesBase` plus one optional `Bound` per check, so that a mistyped check is an unknown key."""


@dataclass(frozen=True)
class Threshold:
    """What a fact is held against: the check's bound as this recipe sets it."""

    check: str
    direction: str
    bound: float
    severity: Severity
    what: str
    remedy: str
    waiver_bound: float | None = None
    waiver_reason: str = ""
    expectation: dict[str, Any] | None = None
    applies_to: str = ""
    warn_from: float | None = None
    """A value beyond it fails, and blocks only beyond `bound`."""

    @property
    def passing(self) -> float:
        """The bound of what passes."""
        return self.bound if self.warn_from is None else self.warn_from

    @cached_property
    def digest(self) -> str:
        """Identify the threshold: a result under another one says nothing about this one."""
        return digest_json(RESULT_VERSION, asdict(self))

    @property
    def wanted(self) -> str:
        """Word the bound: `at most 0.05`."""
        own = self.expectation or {}
        if own.get("min_value") is not None and own.get("max_value") is not None:
            return f"from {own['min_value']:g} to {own['max_value']:g}"
        blocks = "" if self.passing == self.bound else f", and {self.bound:g} before it blocks"
        return f"{self.direction.replace('_', ' ')} {self.passing:g}{blocks}"

    @property
    def rule(self) -> tuple[str, dict[str, float | str]]:
        """Return the Great Expectations rule for the check: its snake-case name and arguments.

        Range expectations on values pass over no rows; on the maximum and the minimum they do not.
        """
        if self.expectation is not None:
            limits = {k: self.expectation[k] for k in ("min_value", "max_value") if self.expectation[k] is not None}
            return str(self.expectation["type"]), {"column": self.expectation["column"], **limits}
        if self.direction == "at_most":
            return "expect_column_max_to_be_between", {"column": self.check, "max_value": self.passing}
        return "expect_column_min_to_be_between", {"column": self.check, "min_value": self.passing}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check judged on one version of one stage's output.

    `blocking` is true when it failed, its severity is error and no waiver covers the value. What is not applicable
    has neither passed nor failed: ask for the `outcome`, or for `failed`.
    """

    check: str
    key: StageKey
    version: str
    threshold_digest: str
    value: float | None
    bound: float
    wanted: str
    severity: Severity
    passed: bool
    blocking: bool
    what: str
    remedy: str
    waiver: str = ""
    note: str = ""
    samples: tuple[str, ...] = ()
    applies_to: str = ""

    @property
    def outcome(self) -> CheckOutcome:
        """Which of the three ways of ending it is."""
        if self.note == NOT_APPLICABLE:
            return "not_applicable"
        return "passed" if self.passed else "failed"

    @property
    def failed(self) -> bool:
        """Whether something is wrong, waived or not."""
        return self.outcome == "failed"

    @property
    def sentence(self) -> str:
        """Say it in one line: check, number, bound, remedy."""
        if self.outcome == "not_applicable":
            return f"{self.check}: not applicable ({self.what}); applies to {self.applies_to}"
        shown = "not measured" if self.value is None else f"{self.value:.6g}"
        if self.passed:
            return f"{self.check}: {shown} ({self.what}); wanted {self.wanted}"
        excuse = f"; waived: {self.waiver}" if self.waiver and not self.blocking else f"; {self.remedy}"
        return f"{self.check}: {shown} ({self.what}); wanted {self.wanted}{excuse}"


def list_thresholds(
    gates: GatesBase, stage: str, dataset: str | None, kind: RowKind | None = None
) -> tuple[Threshold, ...]:
    """Return the thresholds of every check of a stage under a recipe's gates, in the order of `CHECKS`.

    `kind` is that of the dataset's rows, None for a stage of the whole recipe: checks of another kind alone are left
    out.
    """
    ours = tuple(
        _make_threshold(check, gates, dataset, kind)
        for check in CHECKS
        if stage in check.stages and check.row_kind in (None, kind)
    )
    return ours + tuple(_convert_expectation(expectation) for expectation in gates.expectations.get(stage, ()))


def list_output_thresholds(gates: GatesBase, made: Manifest, dataset: str | None) -> tuple[Threshold, ...]:
    """Return the thresholds of an output whose dataset the recipe may no longer have; its facts show its kind."""
    kinds: Iterator[RowKind | None] = (
        check.row_kind for check in CHECKS if check.row_kind and check.name in made.facts
    )
    return list_thresholds(gates, made.stage, dataset, next(kinds, None))


def _make_threshold(check: Check, gates: GatesBase, dataset: str | None, kind: RowKind | None) -> Threshold:
    bound: Bound | None = getattr(gates, check.name, None)
    own = getattr(bound, check.direction) if bound else None
    covering = [w for w in gates.waivers if w.check == check.name and w.dataset in (None, dataset)]
    # One that names the dataset goes before one for all.
    waiver = min(covering, key=lambda w: w.dataset is None, default=None)
    limit = check.bound if own is None else own
    stricter = min if check.direction == "at_most" else max
    return Threshold(
        check=check.name,
        direction=check.direction,
        bound=limit,
        severity=(bound.severity if bound else None) or check.severity,
        what=check.what,
        remedy=(kind == "record" and check.of_records) or check.remedy,
        waiver_bound=getattr(waiver, check.direction) if waiver else None,
        waiver_reason=waiver.reason if waiver else "",
        warn_from=None if check.warn_from is None else stricter(check.warn_from, limit),
        applies_to=check.applies_to,
    )


def _convert_expectation(expectation: Expectation) -> Threshold:
    upper = expectation.max_value is not None
    bound = expectation.max_value if upper else expectation.min_value
    assert bound is not None  # its validator let none through without one
    return Threshold(
        check=expectation.name,
        direction="at_most" if upper else "at_least",
        bound=bound,
        severity=expectation.severity,
        what=f"{expectation.type} on {expectation.column}",
        remedy=f"see gates.expectations, rule {expectation.name}",
        expectation=expectation.model_dump(),
        # A rule holds for a stage of every dataset; where its fact has no meaning, neither has the rule.
        applies_to=CHECKS_BY_NAME[expectation.column].applies_to if expectation.column in CHECKS_BY_NAME else "",
    )


def run_checks(store: Store, manifest: Manifest, thresholds: Sequence[Threshold]) -> list[CheckResult]:
    """Return a result for each of the thresholds, judging only what was not judged before on this version."""
    saved = {one.check: _load_check_result(store, manifest, one) for one in thresholds}
    unsaved = [one for one in thresholds if saved[one.check] is None]
    fresh = {result.check: result for result in _evaluate_checks(store, manifest, unsaved)}
    for one in unsaved:
        store.write_sealed(_check_result_path(store, manifest, one), asdict(fresh[one.check]))
    return [saved[one.check] or fresh[one.check] for one in thresholds]


def load_check_results(store: Store, manifest: Manifest, thresholds: Iterable[Threshold]) -> list[CheckResult]:
    """Return the saved results on a version under these thresholds; what was never judged is left out."""
    saved = (_load_check_result(store, manifest, one) for one in thresholds)
    return [result for result in saved if result is not None]


def require_passing_checks(store: Store, manifest: Manifest, thresholds: Iterable[Threshold]) -> None:
    """Refuse a manifest that has a failed blocking check, or one without a result under these thresholds.

    Raises
    ------
    GateError
        Naming each closed check with its number, threshold and remedy.

    """
    closed: list[str] = []
    for one in thresholds:
        # What is measured against other outputs may have to be judged anew though this one did not change.
        result = (
            run_checks(store, manifest, [one])[0]
            if one.check in cross_stage.CROSS_STAGE_FACTS
            else _load_check_result(store, manifest, one)
        )
        if one.severity == "error" and result is None:
            closed.append(
                f"{'/'.join(manifest.key)}: {one.check} was never judged on version {manifest.version[:12]}; "
                "run `rowmill verify`"
            )
        elif result is not None and result.blocking:
            closed.append(f"{'/'.join(manifest.key)}: {result.sentence}{_format_samples(result)}")
    if closed:
        raise GateError("\n".join(closed))


def _format_samples(result: CheckResult) -> str:
    """Return what is wrong, line by line, where the samples of a check say it."""
    check = CHECKS_BY_NAME.get(result.check)
    return "".join(f"\n  {one}" for one in result.samples) if check is not None and check.names_samples else ""


def _load_check_result(store: Store, manifest: Manifest, threshold: Threshold) -> CheckResult | None:
    raw = store.read_sealed(_check_result_path(store, manifest, threshold))
    if raw is None:
        return None
    values: dict[str, Any] = {**raw, "key": tuple(raw["key"]), "samples": tuple(raw["samples"])}
    return CheckResult(**values)


def _check_result_path(store: Store, manifest: Manifest, threshold: Threshold) -> str:
    across = cross_stage.CROSS_STAGE_FACTS.get(threshold.check)
    asked = threshold.digest if across is None else digest_json(threshold.digest, across.basis(store, manifest))
    return f"{get_stage_folder(manifest.key)}/{RESULTS_FOLDER}/{manifest.version}-{asked}.json"


def _evaluate_checks(store: Store, manifest: Manifest, thresholds: Sequence[Threshold]) -> list[CheckResult]:
    across = {
        one.check: cross_stage.CROSS_STAGE_FACTS[one.check].measure(store, manifest)
        for one in thresholds
        if one.check in cross_stage.CROSS_STAGE_FACTS
    }
    whole = replace(manifest, facts=manifest.facts | {check: found.value for check, found in across.items()})
    explained = [_explain_threshold(one, across.get(one.check)) for one in thresholds]
    measured = [one for one in explained if _read_fact(whole.facts, one) is not None]
    passed = _ask_expectations(whole.facts, measured) if measured else {}
    results = [_make_check_result(whole, one, passed.get(one.check)) for one in explained]
    # A result is kept for the thresholds that were asked, whatever was said in its words.
    return [replace(result, threshold_digest=one.digest) for result, one in zip(results, thresholds, strict=True)]


def _explain_threshold(threshold: Threshold, measured: cross_stage.CrossStageMeasurement | None) -> Threshold:
    """Return a threshold that says what the number was made of; a change that the recipe explains blocks nothing."""
    if measured is None:
        return threshold
    return replace(
        threshold, what=measured.what or threshold.what, severity="warn" if measured.is_intended else threshold.severity
    )


def _fact_name(threshold: Threshold) -> str:
    return threshold.expectation["column"] if threshold.expectation else threshold.check


def _read_fact(facts: Mapping[str, Any], threshold: Threshold) -> float | None:
    value = facts.get(_fact_name(threshold))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _make_check_result(manifest: Manifest, threshold: Threshold, success: bool | None) -> CheckResult:
    value = _read_fact(manifest.facts, threshold)
    # A rule of one's own names facts that other kinds of data may not count at all.
    absent = None if threshold.expectation is None or not threshold.applies_to else NOT_APPLICABLE
    applies = not threshold.applies_to or manifest.facts.get(_fact_name(threshold), absent) != NOT_APPLICABLE
    note = (
        NOT_APPLICABLE if not applies else "not_measured" if value is None else "not_judged" if success is None else ""
    )
    passed = bool(success)
    covered = not passed and value is not None and _is_within(value, threshold.waiver_bound, threshold.direction)
    # Between where a warning begins and the bound, a failure only shows.
    severity = (
        "warn" if threshold.warn_from is not None and _is_within(value, threshold.bound, threshold.direction) else None
    )
    return CheckResult(
        check=threshold.check,
        key=manifest.key,
        version=manifest.version,
        threshold_digest=threshold.digest,
        value=value,
        bound=float(threshold.bound),
        wanted=threshold.wanted,
        severity=severity or threshold.severity,
        passed=passed,
        blocking=applies and not passed and (severity or threshold.severity) == "error" and not covered,
        what=threshold.what,
        remedy=format_remedy(threshold.remedy, manifest.key[0]),
        waiver=threshold.waiver_reason if covered else "",
        note=note,
        samples=manifest.samples.get(threshold.check, ()),
        applies_to=threshold.applies_to,
    )


def format_remedy(remedy: str, name: str) -> str:
    """Return a check's remedy with its commands written out for a recipe."""
    return remedy.replace("{recipe}", name)


def _is_within(value: float | None, bound: float | None, direction: str) -> bool:
    if value is None or bound is None:
        return False
    return value <= bound if direction == "at_most" else value >= bound


ExpectationQuestion = tuple[str, tuple[tuple[str, float | str], ...], float | None]
"""An expectation's name, its arguments, and the number that it is asked about."""
_ANSWER_CACHE: dict[ExpectationQuestion, bool] = {}
"""What this process has asked: a number has one answer to an expectation, and asking takes ten milliseconds."""
_MAX_CACHED_ANSWERS = 10_000


def _ask_expectations(facts: Mapping[str, Any], thresholds: Sequence[Threshold]) -> dict[str, bool]:
    """Return which thresholds the facts keep; a check absent from the answer was not judged."""
    questions = {one.check: _make_question(facts, one) for one in thresholds}
    unasked = [one for one in thresholds if questions[one.check] not in _ANSWER_CACHE]
    if unasked:
        if len(_ANSWER_CACHE) > _MAX_CACHED_ANSWERS:
            _ANSWER_CACHE.clear()
        _ANSWER_CACHE.update(
            {questions[check]: passed for check, passed in _run_expectation_suite(facts, unasked).items()}
        )
    return {check: _ANSWER_CACHE[question] for check, question in questions.items() if question in _ANSWER_CACHE}


def _make_question(facts: Mapping[str, Any], threshold: Threshold) -> ExpectationQuestion:
    kind, arguments = threshold.rule
    return kind, tuple(sorted(arguments.items())), _read_fact(facts, threshold)


def _run_expectation_suite(facts: Mapping[str, Any], thresholds: Sequence[Threshold]) -> dict[str, bool]:
    """Run the thresholds as one Great Expectations suite over the facts; what raised is left out."""
    import great_expectations as gx
    import pandas as pd

    batch = _open_facts_batch()
    suite: Any = gx.ExpectationSuite(name="checks")
    for one in thresholds:
        suite.add_expectation(_make_gx_expectation(one))
    frame = pd.DataFrame([{_fact_name(one): _read_fact(facts, one) for one in thresholds}])
    result: Any = batch.get_batch({"dataframe": frame}).validate(suite)
    return {
        one.expectation_config.meta["check"]: bool(one.success)
        for one in result.results
        if not _has_raised(one.exception_info)
    }


@cache
def _open_facts_batch() -> Any:
    """Return the library's handle on a frame of facts; made once per process, for it takes a third of a second."""
    import great_expectations as gx

    context: Any = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    source: Any = context.data_sources.add_pandas("facts")
    return source.add_dataframe_asset("facts").add_batch_definition_whole_dataframe("all")


def _make_gx_expectation(threshold: Threshold) -> Any:
    kind, arguments = threshold.rule
    return _find_expectation_class(kind)(
        meta={"check": threshold.check}, severity=_GX_SEVERITIES[threshold.severity], **arguments
    )


_GX_SEVERITIES: Mapping[Severity, str] = {"error": "critical", "warn": "warning"}
"""Our words for how bad a failure is → the library's."""


def _find_expectation_class(name: str) -> Any:
    """Return the class of the library that a snake-case name means."""
    import great_expectations.expectations as gxe

    return getattr(gxe, "".join(word.capitalize() for word in name.split("_")))


def _has_raised(info: Mapping[str, Any]) -> bool:
    """Read the library's exception record, which is flat or one mapping per metric."""
    if "raised_exception" in info:
        return bool(info["raised_exception"])
    return any(bool(one.get("raised_exception")) for one in info.values() if isinstance(one, dict))
