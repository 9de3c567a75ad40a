"""The checks: which number of which stage's output is held against which bound, and what to do when it fails.

What belongs here: one declaration per check. What does not: the options of a recipe (`gates.py`), checking an output
(`judge.py`), computing the numbers (`stages/`), and numbers that compare several outputs (`cross_stage.py`).

The list stands below recipes and stages: a recipe has an option for every check, and is validated without them.
"""

from dataclasses import dataclass
from typing import Literal

from rowmill.core.stage_names import (
    CANONICAL_ROWS,
    EXPORTS,
    GENERATED_SERIES,
    GPU_PARTITIONS,
    PACKED_SHARDS,
    PARSED_RECORDS,
    RAW_DATASET,
    TOKENIZED_EXAMPLES,
    TRAINING_SPLITS,
    TRUNCATION_STATS,
)

Severity = Literal["error", "warn"]
RESULT_VERSION = 5
"""Raise it when the meaning of a check or the shape of a result changes: what was saved is then judged anew."""


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
    of_tables: str = ""
    """The remedy for tables, where that of other rows cannot help."""
    tables_only: bool = False
    """Whether only stages of tables have the check; stages of other data count nothing for it."""
    names_samples: bool = False
    """Whether its samples are sentences that say what is wrong, which every message about it then shows."""


CHECKS: tuple[Check, ...] = (
    Check("nonempty", (RAW_DATASET, CANONICAL_ROWS, TOKENIZED_EXAMPLES), "at_least", 1, "error",
        "records, rows or examples that came out",
        "check the source's paths and files, or read the rejects with `rowmill sql \"from rejects\" {recipe}`"),
    Check("accounted", (CANONICAL_ROWS, TOKENIZED_EXAMPLES), "at_most", 0, "error",
        "records or tokens that the ledger cannot place",
        "this is a bug of rowmill: report it with the manifest", waivable=False),
    Check("empty_files", (RAW_DATASET,), "at_most", 0, "warn",
        "source files without a single record", "take them out of the source, or fetch them again"),
    Check("unknown_roles", (CANONICAL_ROWS,), "at_most", 0.01, "error",
        "share of rows with a role that no template is known to print",
        "map the role in format.role_map, or set format.unknown_roles: reject", applies_to="conversations"),
    Check("group_size", (CANONICAL_ROWS,), "at_most", 10_000, "error",
        "rows in the largest group of splits.group_key",
        "choose a finer splits.group_key, or raise gates.group_size if one group may be that large",
        applies_to="datasets with splits.group_key, and records in groups that are not cut",
        of_tables="choose a finer group column (`rowmill advise {recipe}`), cut groups by format.assembly."
        "on_overflow: split, or raise gates.group_size if one group may be that large"),
    Check("group_advice", (CANONICAL_ROWS,), "at_most", 0, "warn",
        "points against the chosen group column",
        "read table group_advice on this page, or try other columns with `rowmill advise {recipe}`",
        applies_to="records in groups, and time series"),
    Check("interval_mismatch", (CANONICAL_ROWS,), "at_most", 0, "warn",
        "share of steps in time that are not timestamp_interval_seconds",
        "set the interval of the data, or leave it out: a constant one is found",
        applies_to="time series with timestamp_interval_seconds"),
    Check("table_drift", (CANONICAL_ROWS,), "at_most", 0, "error",
        "changes of the table against its contract, pinned or the last build's",
        "mend the data where the cell stands; or accept it: write the contract of today's data with "
        "`rowmill advise {recipe} --write`, look through it, and build again", applies_to="records",
        tables_only=True, names_samples=True),
    Check("type_mismatch", (CANONICAL_ROWS,), "at_most", 0, "warn",
        "values that do not fit the type of their column; their records are rejected, or the values null, as the table "
        "contract says",
        "look at the table type_mismatch; mend the values, name them in the column's na words, or give the column "
        "another type in the table contract (`rowmill advise {recipe} --write`)", applies_to="records",
        tables_only=True, names_samples=True),
    Check("preference_data", (CANONICAL_ROWS,), "at_most", 0, "error",
        "share of records with a column of preference data that the recipe does not read, such as label or rejected",
        "good and bad answers would train alike: keep the good ones in the source, or name the answer to train on in "
        "format.messages_field or format.response_fields; if the column means something else, waive the check",
        applies_to="chats and pairs in columns"),
    Check("rejects", (CANONICAL_ROWS, TOKENIZED_EXAMPLES), "at_most", 0.05, "error",
        "share of records rejected at this stage",
        'read the reasons with `rowmill sql "from rejects select dataset, reason, count(*) group by all" {recipe}` '
        "and mend the data or the format options", names_samples=True),
    Check("unpinned_boundaries", (CANONICAL_ROWS,), "at_most", 0, "warn",
        "boundaries in time that came from shares, so that new rows move them",
        "write them into splits.boundaries, as they stand in the table of this page",
        applies_to="splits by time"),
    Check("duplicates", (CANONICAL_ROWS,), "at_most", 0.2, "warn",
        "share of rows that repeat an earlier row",
        "look where the copies come from; filters.deduplicate: off keeps them"),
    Check("mask_verified", (TOKENIZED_EXAMPLES,), "at_least", 1, "error",
        "share of examples whose loss mask was verified",
        "this is a bug of rowmill: report it with the manifest", waivable=False, applies_to="datasets with examples"),
    Check("render_equal", (TOKENIZED_EXAMPLES,), "at_most", 0, "error",
        "sampled rows whose marked render differs from the plain one",
        "set template.verify_render: 1 and read the rejects named render_mismatch; report the template",
        applies_to="chat templates, unless template.verify_render is 0"),
    Check("short_documents", (TOKENIZED_EXAMPLES,), "at_most", 0.5, "warn",
        "share of the documents of text files that are shorter than 20 tokens",
        "set source.sample_by to paragraph or document, unless each line of the files is a document",
        applies_to="documents of text files (.txt)"),
    Check("content_dropped", (TOKENIZED_EXAMPLES,), "at_most", 0.02, "error",
        "share of rows rejected because the template does not print all of their content",
        "choose another template, or allow the kind in template.on_dropped", applies_to="chat templates"),
    Check("zero_loss_rows", (TOKENIZED_EXAMPLES,), "at_most", 0.05, "error",
        "share of rows without a single trained token",
        "check loss.supervise, loss.mask and the rows' train flags, or raise seq_len if truncation took the answer"),
    Check("contract", (TOKENIZED_EXAMPLES,), "at_most", 0, "warn",
        "warnings about what the chat template does",
        "read them with `rowmill template-report {recipe}`; each says what to write", applies_to="chat templates"),
    Check("prompt_match", (TOKENIZED_EXAMPLES,), "at_most", 0, "warn",
        "roles after which inference prompts otherwise than the training text goes on",
        "read prompts and prompt_match in `rowmill template-report {recipe}`; set template.template_kwargs or "
        "template.enable_thinking as at inference", applies_to="chat templates"),
    Check("date_pinned", (TOKENIZED_EXAMPLES,), "at_most", 0, "warn",
        "templates that print a date, which is template.template_now in every row",
        "set template.template_now to the date the model shall believe in", applies_to="chat templates"),
    Check("control_strings", (TOKENIZED_EXAMPLES,), "at_most", 0.05, "warn",
        "share of rows whose own text holds strings of control tokens",
        "look at the table control_strings; template.control_tokens: as_text keeps them text, reject refuses the rows",
        applies_to="chat templates, and records",
        of_tables="nothing is lost: such strings are written escaped and never become control tokens; gates."
        "control_strings says how many may hold one"),
    Check("text_roundtrip", (TOKENIZED_EXAMPLES,), "at_most", 0.01, "warn",
        "share of texts whose ids decode to other text, because the tokenizer normalises",
        "expected of tokenizers that lower or recompose text; normalise the source yourself if it must not happen",
        applies_to="datasets with examples"),
    Check("token_ids", (TOKENIZED_EXAMPLES,), "at_most", 0, "error",
        "token ids outside the vocabulary",
        "set vocab_size to the model's embedding rows, or use the model's tokenizer", waivable=False),
    Check("prompt_parity", (TOKENIZED_EXAMPLES,), "at_most", 0, "warn",
        "share of generation prompts whose text is tokenized otherwise than in training",
        "records: send the generation prompt as ids (`prompt_as: ids`), not as text; chats: set loss.boundary: split, "
        "so that a prompt is tokenized apart from its answer",
        applies_to="records, and chats of which a sample has a generation prompt to compare"),
    Check("context_overflow", (TRUNCATION_STATS,), "at_most", 0.1, "error",
        "share of examples that were longer than the context and lost tokens, or were dropped for it; of records, of "
        "those that no example could hold",
        "raise seq_len, shorten or filter the long rows, or accept the loss in gates.context_overflow",
        of_tables="raise seq_len or format.assembly.max_seq_length, choose a finer group column (`rowmill advise "
        "{recipe}`), cut groups by format.assembly.on_overflow: split, or accept the loss in gates.context_overflow"),
    Check("conservation", (PACKED_SHARDS, GPU_PARTITIONS, EXPORTS), "at_most", 0, "error",
        "tokens or segments that differ between what went in and the shards read back",
        "remove the stage's folder and build again; if it returns, report it", waivable=False),
    Check("shard_digests", (PACKED_SHARDS,), "at_most", 0, "error",
        "shard files whose bytes are not what was written",
        "check the disk, remove the stage's folder and build again", waivable=False),
    Check("packing_loss", (PACKED_SHARDS,), "at_most", 0.1, "error",
        "larger of the shares of examples and of trained tokens that enter packing and stand in no sequence",
        "raise seq_len, shorten rows by truncation.overlong instead of packing.slice_strategy, or accept the loss in "
        "gates.packing_loss", applies_to="datasets with examples"),
    Check("end_to_end_loss", (PACKED_SHARDS,), "at_most", 0.25, "error",
        "larger of the shares of records and of trained tokens that entered and stand in no sequence",
        "read what each stage rejected with `rowmill stats {recipe}`; raise seq_len, mend the data, or accept the loss "
        "in gates.end_to_end_loss", warn_from=0.1, applies_to="datasets with examples"),
    Check("shrunk", (RAW_DATASET, CANONICAL_ROWS, PACKED_SHARDS, TRAINING_SPLITS), "at_most", 0.5, "error",
        "largest share by which its files, records, rows, tokens or share of the mixture fell since the published "
        "build; it only warns if options changed, too",
        "see that the source is whole and every file was fetched; if there is to be less, accept it for one build by a "
        "waiver in gates.waivers",
        warn_from=0.1, applies_to="recipes whose ranks were published before"),
    Check("limit_cost", (PACKED_SHARDS,), "at_most", 0.05, "warn",
        "share of sequences that packing.max_segments_per_example costs, against no limit",
        "raise packing.max_segments_per_example, or set it to null"),
    Check("fill", (PACKED_SHARDS,), "at_least", 0.9, "warn",
        "share of each sequence's room that holds tokens",
        "set packing.pack_strategy to best_fit where it is greedy, raise packing.max_segments_per_example, or lower "
        "seq_len if most rows are short",
        of_tables="set format.assembly.max_seq_length to a half of seq_len or less, so that several examples share a "
        "sequence, raise format.data.max_sequences_per_example where examples end at it, or lower seq_len"),
    Check("order_nonempty", (TRAINING_SPLITS,), "at_least", 1, "error",
        "places of the training order that hold a sequence",
        "lower mixture.batch_size below the number of train sequences, or set partitions.remainder: pad"),
    Check("dropped_share", (TRAINING_SPLITS,), "at_most", 0.1, "error",
        "share of the scheduled sequences that partitions.remainder: drop leaves out of the training order",
        "lower mixture.batch_size, or set partitions.remainder: pad or carry", warn_from=0.01),
    Check("filler_share", (TRAINING_SPLITS,), "at_most", 0.1, "error",
        "share of the training order's places that hold no sequence but a filler, which trains nothing",
        "lower mixture.batch_size or partitions.world_size, or set partitions.remainder: carry or drop",
        warn_from=0.01),
    Check("same_row", (TRAINING_SPLITS,), "at_most", 0, "error",
        "rows with equal content in two splits",
        "this is a bug of rowmill: report it with the manifest", waivable=False),
    Check("same_group", (TRAINING_SPLITS,), "at_most", 0, "error",
        "groups with rows in two splits", "set splits.group_key to the field that names the group",
        applies_to="datasets with groups"),
    Check("time_order", (TRAINING_SPLITS,), "at_most", 0, "error",
        "rows in an earlier split than their time belongs to, or inside splits.gap",
        "this is a bug of rowmill: report it with the manifest", applies_to="splits by time"),
    Check("mixture_share", (TRAINING_SPLITS,), "at_most", 1, "error",
        "largest distance, in sequences, of a dataset from its share at the end of a block",
        "this is a bug of rowmill: report it with the manifest"),
    Check("same_prompt", (TRAINING_SPLITS,), "at_most", 0.01, "warn",
        "share of evaluation rows whose first user message also opens a training row",
        "set splits.group_key so that equal prompts stay together, or deduplicate prompts",
        applies_to="all data but tables"),
    Check("near_duplicate", (TRAINING_SPLITS,), "at_most", 0.01, "warn",
        "share of evaluation examples of whose 13-token n-grams half or more stand in train; of tables, of records "
        "that equal one of train in all columns but one",
        "set splits.group_key so that versions of one text stay together (tables: group_training_examples_by), or take "
        "the copies out", applies_to="all data but tables, and tables of which something is held out"),
    Check("split_share", (TRAINING_SPLITS,), "at_most", 0.05, "warn",
        "largest distance between a split's share of rows and the share asked for",
        "expected on few rows or large groups; change splits.seed only before you have trained"),
    Check("rank_balance", (TRAINING_SPLITS,), "at_most", 0.05, "warn",
        "mean over steps of how far the busiest rank's trained tokens lie above the mean rank's",
        "use partitions.balance: trained_tokens and a larger batch_size"),
    Check("empty_step", (TRAINING_SPLITS,), "at_most", 0, "warn",
        "(step, rank) pairs without a trained token", "use a larger batch_size or fewer ranks"),
    Check("valid_fraction", (PARSED_RECORDS, GENERATED_SERIES), "at_least", 0.8, "warn",
        "share of generated objects that are records of the dataset",
        "read the reasons in the ledger; the model may need more training, another temperature, or a knob of "
        "generation.validation", applies_to="generated texts"),
    Check("failed_series", (GENERATED_SERIES,), "at_most", 0.99, "error",
        "share of series that ended before their stop; of single records and groups, whether none came at all",
        "read last_error and the reasons; see that the backend runs, or raise generation.patience", warn_from=0),
    Check("exact_copies", (PARSED_RECORDS, GENERATED_SERIES), "at_most", 0.01, "warn",
        "share of generated records that equal a training row",
        "compare with what repeats in train (table `beside train`): rows of few values agree by chance; a model that "
        "learned rows by heart needs fewer epochs, more data, or differential privacy",
        applies_to="generated records of a table that is kept"),
    Check("stale_rank", (GPU_PARTITIONS,), "at_most", 0, "warn",
        "ranks that were built from another order", "materialize all ranks"),
)  # fmt: skip


CHECKS_BY_NAME = {check.name: check for check in CHECKS}


def format_remedy(remedy: str, name: str) -> str:
    """Return a check's remedy with its commands written out for a recipe."""
    return remedy.replace("{recipe}", name)
