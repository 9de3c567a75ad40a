"""The catalog of checks: the fact that each one tests, its stages, its bound, and the remedy for a failure.

This module is below recipes and stages in the layers: a recipe has an option for every check.
"""

from collections.abc import Iterable

from rowmill.core.stage_names import (
    CANONICAL_ROWS,
    EXPORTS,
    GENERATED_SERIES,
    GPU_PARTITIONS,
    PACKED_SHARDS,
    PARSED_RECORDS,
    RAW_DATASET,
    TEACHER_SCORES,
    TOKENIZED_EXAMPLES,
    TRAINING_SPLITS,
    TRUNCATION_STATS,
)
from rowmill.kinds.catalog import KINDS
from rowmill.schema.checks import Check
from rowmill.schema.counts import CountSet, compute_share, find_share
from rowmill.schema.example_counts import (
    ControlStringCounts,
    ExampleCounts,
    PromptCounts,
    TemplateCounts,
    TextFileCounts,
)
from rowmill.schema.export_counts import ExportCounts
from rowmill.schema.generated_counts import GenerationCounts, ParsedTextCounts
from rowmill.schema.length_counts import LengthCounts
from rowmill.schema.order_counts import (
    GroupLeakCounts,
    NearDuplicateLeakCounts,
    OrderCounts,
    PromptLeakCounts,
    RowLeakCounts,
    TimeLeakCounts,
)
from rowmill.schema.rank_counts import RankCounts
from rowmill.schema.row_counts import (
    ContaminationCounts,
    GroupCounts,
    MessageCounts,
    NearDuplicateCounts,
    RowCounts,
    TimeSplitCounts,
    UnreadCounts,
)
from rowmill.schema.score_counts import ScoreCounts
from rowmill.schema.shard_counts import PackingCounts
from rowmill.schema.source_counts import SourceCounts

RESULT_VERSION = 9
"""Increase it when judging or the form of a result changes: saved results are then judged again.

The numbers are stored with the output. Where the number of a check changes, raise the `VERSION` of its stages instead.
"""


_OF_ALL_DATA: tuple[Check, ...] = (
    Check("nonempty", (RAW_DATASET, CANONICAL_ROWS, TOKENIZED_EXAMPLES), "at_least", 1, "error",
        "records, rows or examples that came out",
        "check the source's paths and files, or read the rejects with "
        "`rowmill sql \"from rejects where dataset = '{dataset}' limit 20\" {recipe}`",
        before_build="check the source's paths and files",
        of=(SourceCounts, RowCounts, ExampleCounts), value=lambda c: c.count_output()),
    Check("accounted", (CANONICAL_ROWS, TOKENIZED_EXAMPLES), "at_most", 0, "error",
        "records or tokens that are missing from the ledger",
        "this is a bug of rowmill: report it with the manifest", waivable=False,
        of=(RowCounts, ExampleCounts), value=lambda c: c.count_unaccounted()),
    Check("empty_files", (RAW_DATASET,), "at_most", 0, "warn",
        "source files without a single record", "remove them from the source, or fetch them again",
        of=(SourceCounts,), value=lambda c: c.files_without_records),
    Check("doubtful_header", (RAW_DATASET,), "at_most", 0, "warn",
        "CSV files whose header looks like the rows below it: its first record may be the header",
        "write source.header: false if the files have no header, or source.header: true if they have",
        applies_to="CSV and TSV files", names_samples=True),
    Check("unknown_roles", (CANONICAL_ROWS,), "at_most", 0.01, "error",
        "share of rows with a role that no template is known to print",
        "map the role in format.role_map, or set format.unknown_roles: reject", applies_to="conversations",
        names_samples=True, is_share=True,
        of=(MessageCounts,), value=lambda c: find_share(c.rows_with_unknown_roles, c.rows_of_messages)),
    Check("group_size", (CANONICAL_ROWS,), "at_most", 10_000, "error",
        "rows in the largest group of splits.group_key",
        "choose a finer splits.group_key, or raise gates.group_size if one group may be that large",
        applies_to="datasets with splits.group_key, and records in groups that are not cut",
        of_kinds={"record": "choose a finer group column (`rowmill advise {recipe}`), cut groups by format.assembly."
        "on_overflow: split, or raise gates.group_size if one group may be that large"},
        of=(GroupCounts,), value=lambda c: None if c.is_group_cut else c.rows_of_largest_group),
    Check("preference_data", (CANONICAL_ROWS,), "at_most", 0, "error",
        "share of records with a column of preference data that the recipe does not read, such as label or rejected",
        "bad answers would be trained like good ones: keep only good ones in the source, or name the answer to train "
        "in format.messages_field or format.response_fields; if the column means something else, waive the check",
        of_kinds={"pair": "bad answers would be trained like good ones: keep only good ones in the source, or name the "
        "answer to train in format.output_field; if the column means something else, waive the check"},
        applies_to="chats and pairs in columns", names_samples=True, is_share=True,
        of=(UnreadCounts,), value=lambda c: find_share(c.records_with_preferences, c.answer_records)),
    Check("unread_flags", (CANONICAL_ROWS,), "at_most", 0, "error",
        "rows with a key or a column that looks as if it said what trains, and that nothing reads",
        "say what it means in format.message_flags (train, mask or ignore), or leave a column out by "
        "format.ignore_columns",
        of_kinds=dict.fromkeys(("pair", "text", "tokens"), "leave out the rows that must not train, or leave the "
        "column out by format.ignore_columns if it says nothing of training"), applies_to="all data but tables",
        names_samples=True,
        of=(UnreadCounts,), value=lambda c: c.rows_with_unread_flags),
    Check("unread_text", (CANONICAL_ROWS,), "at_most", 0.5, "error",
        "share of a record's text in a column that nothing reads",
        "name the column among those of the format if it belongs to the rows, or in format.ignore_columns if it does "
        "not", warn_from=0.1, applies_to="chats, pairs, texts, preferences and prompts", names_samples=True,
        is_share=True,
        of=(UnreadCounts,),
        value=lambda c: max(c.share_unread_text().values(), default=0.0) if c.rows_searched else None),
    Check("rejects", (CANONICAL_ROWS, TOKENIZED_EXAMPLES), "at_most", 0.05, "error",
        "share of records rejected at this stage",
        "correct the data or the format options; "
        "`rowmill sql \"select reason, detail, count(*) as records from rejects where dataset = '{dataset}' "
        'group by all order by records desc limit 20" {recipe}` lists what was rejected', names_samples=True,
        is_share=True, before_build="correct the data or the format options; "
        "`rowmill inspect {recipe} --dataset {dataset} -n 20` shows the records",
        of=(RowCounts, ExampleCounts), value=lambda c: c.share_rejected()),
    Check("unpinned_boundaries", (CANONICAL_ROWS,), "at_most", 0, "warn",
        "time boundaries that were computed from shares, so that new rows move them",
        "copy them to splits.boundaries",
        applies_to="splits by time",
        of=(TimeSplitCounts,), value=lambda c: len(c.boundaries)),
    Check("duplicates", (CANONICAL_ROWS,), "at_most", 0.2, "warn",
        "share of rows that repeat an earlier row",
        "find the origin of the copies; filters.deduplicate: off keeps them", is_share=True,
        of=(RowCounts,), value=lambda c: compute_share(c.reasons.get("duplicate", 0), c.count_taken())),
    Check("decontamination_items", (CANONICAL_ROWS,), "at_least", 1, "error",
        "items in the file of filters.decontaminate that has fewest",
        "name columns in filters.decontaminate.benchmarks.fields that the records of every file have; the table "
        "benchmarks counts the items of each", applies_to="datasets with filters.decontaminate",
        requested_by=("filters.decontaminate",),
        of=(ContaminationCounts,), value=lambda c: c.items_of_smallest_benchmark),
    Check("contaminated", (CANONICAL_ROWS,), "at_most", 0.05, "warn",
        "share of rows that have an item of a benchmark, removed or not",
        "read the rows beside their items in the table contamination; ask where the data is from, or raise "
        "filters.decontaminate.coverage if they only share phrases",
        applies_to="datasets with filters.decontaminate", requested_by=("filters.decontaminate",), is_share=True,
        of=(ContaminationCounts,), value=lambda c: compute_share(c.contaminated_records, c.records_beside_benchmarks)),
    Check("near_duplicates", (CANONICAL_ROWS,), "at_most", 0.2, "warn",
        "share of rows that resemble a longer row of the dataset, removed or not",
        "compare some pairs in the table near_duplicates; find the origin of the copies, or raise "
        "filters.near_duplicates.threshold",
        applies_to="datasets with filters.near_duplicates", requested_by=("filters.near_duplicates",), is_share=True,
        of=(NearDuplicateCounts,), value=lambda c: compute_share(c.near_duplicate_records, c.records_compared)),
    Check("mask_verified", (TOKENIZED_EXAMPLES,), "at_least", 1, "error",
        "share of examples whose loss mask was verified",
        "this is a bug of rowmill: report it with the manifest", waivable=False, applies_to="datasets with examples",
        is_share=True,
        of=(ExampleCounts,), value=lambda c: find_share(c.verified_examples, c.examples)),
    Check("render_equal", (TOKENIZED_EXAMPLES,), "at_most", 0, "error",
        "judged rows whose text is not what transformers renders, or whose mask is wrong",
        "set template.verify_render: 1 and read the rejects named render_mismatch and mask_judged_wrong; report the "
        "template",
        applies_to="chat templates, unless template.verify_render is 0",
        of=(TemplateCounts,), value=lambda c: c.rows_judged_wrong if c.is_judged else None),
    Check("short_documents", (TOKENIZED_EXAMPLES,), "at_most", 0.5, "warn",
        "share of the documents of text files that are shorter than 20 tokens",
        "set source.sample_by to paragraph or document, unless each line of the files is a document",
        applies_to="documents of text files (.txt)", is_share=True,
        of=(TextFileCounts,), value=lambda c: find_share(c.documents_under_20_tokens, c.documents)),
    Check("content_dropped", (TOKENIZED_EXAMPLES,), "at_most", 0.02, "error",
        "share of rows that are rejected or lose reasoning because the template does not print all of their content",
        "choose another template, or allow the kind in template.on_dropped", applies_to="chat templates",
        names_samples=True, is_share=True,
        of=(TemplateCounts,),
        value=lambda c: compute_share(c.rows_not_printed + c.rows_losing_reasoning, c.rendered_rows)),
    Check("reasoning_dropped", (TOKENIZED_EXAMPLES,), "at_most", 0.01, "error",
        "share of rows of which an answer trains without its reasoning, because the template prints none",
        "set reasoning.think_mode to inline, which puts it into the answer, or to drop, which accepts the loss, or "
        "choose a template that prints reasoning", applies_to="chat templates", names_samples=True, is_share=True,
        of=(TemplateCounts,), value=lambda c: compute_share(c.rows_losing_reasoning, c.rendered_rows)),
    Check("zero_loss_rows", (TOKENIZED_EXAMPLES,), "at_most", 0.05, "error",
        "share of rows without a single trained token",
        "check loss.supervise, loss.mask and the rows' train flags, or raise seq_len if truncation removed the answer",
        of_kinds={"pair": "check loss.mask, or raise seq_len if truncation removed the response",
        "text": "remove documents of a single token, which has nothing to predict",
        "record": "this is a bug of rowmill: report it with the manifest",
        "tokens": "check the columns of format.mask_fields, or raise seq_len if truncation removed the targets"},
        applies_to="all data but prompts", names_samples=True, is_share=True,
        of=(ExampleCounts,), value=lambda c: find_share(c.untrained_rows, c.rows_to_train)),
    Check("contract", (TOKENIZED_EXAMPLES,), "at_most", 0, "warn",
        "warnings about the chat template's behaviour",
        "read them with `rowmill template-report {recipe}`; each names its remedy", applies_to="chat templates",
        of=(TemplateCounts,), value=lambda c: len(c.template_warnings)),
    Check("prompt_match", (TOKENIZED_EXAMPLES,), "at_most", 0, "warn",
        "roles after which the inference prompt differs from the training text",
        "read prompts and prompt_match in `rowmill template-report {recipe}`; set template.template_kwargs or "
        "template.enable_thinking as at inference", applies_to="chat templates",
        of=(TemplateCounts,), value=lambda c: len(c.mismatched_prompts)),
    Check("date_pinned", (TOKENIZED_EXAMPLES,), "at_most", 0, "warn",
        "templates that print a date, which is template.template_now for every row",
        "set template.template_now to the date that the model should assume", applies_to="chat templates",
        of=(TemplateCounts,), value=lambda c: int(c.prints_date)),
    Check("control_strings", (TOKENIZED_EXAMPLES,), "at_most", 0.05, "warn",
        "share of rows whose text contains strings of control tokens",
        "read the table control_strings; template.control_tokens: as_text keeps them as text, allow makes control "
        "tokens of them, for data that means its <|endoftext|>, and reject rejects the rows",
        applies_to="texts and records",
        of_kinds={"record": "nothing is lost: such strings are escaped and never become control tokens; raise gates."
        "control_strings to accept their number"}, is_share=True,
        of=(ControlStringCounts,), value=lambda c: compute_share(c.rows_with_control_strings, c.searched_rows)),
    Check("text_roundtrip", (TOKENIZED_EXAMPLES,), "at_most", 0.01, "warn",
        "share of texts whose ids decode to other text, because the tokenizer normalizes",
        "expected for tokenizers that lowercase or recompose text; normalize the source yourself to prevent it",
        applies_to="datasets with examples", is_share=True,
        of=(ExampleCounts,),
        value=lambda c: find_share(min(c.altered_texts, c.rows), c.rows) if c.examples else None),
    Check("token_ids", (TOKENIZED_EXAMPLES,), "at_most", 0, "error",
        "token ids outside the vocabulary",
        "set vocab_size to the model's embedding rows, or use the model's tokenizer", waivable=False,
        of=(ExampleCounts,), value=lambda c: c.ids_outside_vocabulary),
    Check("prompt_parity", (TOKENIZED_EXAMPLES,), "at_most", 0, "warn",
        "share of generation prompts whose text is tokenized differently than in training",
        "set loss.boundary: split, so that a prompt is tokenized apart from its answer",
        of_kinds={"record": "send the generation prompt as ids, not as text (format.generation.backend: {prompt_as: "
        "ids})"},
        applies_to="records, and chats of which a sample has a generation prompt to compare",
        of=(PromptCounts,), value=lambda c: find_share(c.prompts_that_differ, c.prompts_compared)),
    Check("context_overflow", (TRUNCATION_STATS,), "at_most", 0.1, "error",
        "share of examples that were longer than the context and lost tokens, or were dropped for it; for records, of "
        "those that fit into no example",
        "raise seq_len, shorten or filter the long rows, or accept the loss in gates.context_overflow",
        of_kinds={"record": "raise seq_len or format.assembly.max_seq_length, choose a finer group column (`rowmill "
        "advise {recipe}`), cut groups by format.assembly.on_overflow: split, or accept the loss in "
        "gates.context_overflow"},
        names_samples=True, is_share=True,
        of=(LengthCounts,), value=lambda c: c.share_overlong()),
    Check("conservation", (PACKED_SHARDS, GPU_PARTITIONS, EXPORTS), "at_most", 0, "error",
        "tokens or segments that differ between the stage's inputs and the files read back",
        "remove the stage's folder and build again; if it returns, report it", waivable=False,
        of=(PackingCounts, RankCounts, ExportCounts), value=lambda c: c.count_unconserved()),
    Check("shard_digests", (PACKED_SHARDS,), "at_most", 0, "error",
        "shard files whose bytes differ from what was written",
        "check the disk, remove the stage's folder and build again", waivable=False,
        of=(PackingCounts,), value=lambda c: c.damaged_files),
    Check("packing_loss", (PACKED_SHARDS,), "at_most", 0.1, "error",
        "larger of the shares of examples and of trained tokens that enter packing but are in no sequence",
        "raise seq_len, shorten rows by truncation.overlong instead of packing.slice_strategy, or accept the loss in "
        "gates.packing_loss",
        of_kinds={"record": "raise seq_len, or accept the loss in gates.packing_loss",
        "preference": "raise seq_len, shorten the rows, or accept the loss in gates.packing_loss",
        "prompt": "raise seq_len, shorten the rows, or accept the loss in gates.packing_loss"},
        applies_to="datasets with examples", is_share=True,
        of=(PackingCounts,), value=lambda c: c.share_lost()),
    Check("end_to_end_loss", (PACKED_SHARDS,), "at_most", 0.25, "error",
        "larger of the shares of records and of trained tokens that enter the pipeline but are in no sequence",
        "read what each stage rejected with `rowmill stats {recipe}`; raise seq_len, correct the data, or accept the "
        "loss "
        "in gates.end_to_end_loss", warn_from=0.1, applies_to="datasets with examples", is_share=True),
    Check("shrunk", (RAW_DATASET, CANONICAL_ROWS, PACKED_SHARDS, TRAINING_SPLITS), "at_most", 0.5, "error",
        "largest share by which its files, records, rows, tokens or share of the mixture fell since the published "
        "build; only a warning if options changed as well",
        "check that the source is complete and every file was fetched; if the decrease is intended, accept it for one "
        "build with a waiver in gates.waivers",
        warn_from=0.1, applies_to="recipes whose ranks were published before", is_share=True),
    Check("drift", (TOKENIZED_EXAMPLES,), "at_most", 0.25, "error",
        "population stability index of the distribution that moved most since the published build, of lengths, "
        "domains, roles, schemas, turns, languages and trained shares; only a warning if options changed as well",
        "look which files are new or gone in the section on the last build of `rowmill report {recipe}`, and correct "
        "the source; if the data is meant to differ, accept it for one build with a waiver in gates.waivers",
        of_kinds={"record": "read which columns changed in the table contract (`rowmill advise {recipe}`), and correct "
        "the source; if the data is meant to differ, accept it for one build with a waiver in gates.waivers"},
        warn_from=0.1, applies_to="datasets with enough rows in this build and in one published before"),
    Check("limit_cost", (PACKED_SHARDS,), "at_most", 0.05, "warn",
        "share of sequences added by packing.max_segments_per_example, compared with no limit",
        "raise packing.max_segments_per_example, or set it to null",
        applies_to="all but prompts, which are never packed", not_for="prompt", is_share=True,
        of=(PackingCounts,),
        value=lambda c: compute_share(c.sequences - c.unlimited_sequences, c.sequences)),
    Check("fill", (PACKED_SHARDS,), "at_least", 0.9, "warn",
        "share of each sequence's capacity that holds tokens",
        "set packing.pack_strategy to best_fit if it is greedy, raise packing.max_segments_per_example, or lower "
        "seq_len if most rows are short",
        of_kinds={"record": "set format.assembly.max_seq_length to a half of seq_len or less, so that several examples "
        "share a sequence, raise format.data.max_sequences_per_example if it limits examples, or lower seq_len"},
        applies_to="all but prompts, which are never packed", not_for="prompt", is_share=True,
        of=(PackingCounts,), value=lambda c: c.share_filled()),
    Check("padding_share", (PACKED_SHARDS,), "at_most", 0.05, "warn",
        "share of pad tokens after segments among all tokens of the sequences",
        "lower packing.segment_multiple_of to what the trainer needs; short segments cost most, so leave out or join "
        "the shortest rows", applies_to="recipes with packing.segment_multiple_of",
        requested_by=("packing.segment_multiple_of",), is_share=True,
        of=(PackingCounts,), value=lambda c: c.share_padding()),
    Check("order_nonempty", (TRAINING_SPLITS,), "at_least", 1, "error",
        "places of the training order that hold a sequence",
        "lower mixture.batch_size below the number of train sequences, or set partitions.remainder: pad",
        of=(OrderCounts,), value=lambda c: c.count_shown()),
    Check("dropped_share", (TRAINING_SPLITS,), "at_most", 0.1, "error",
        "share of the scheduled sequences that partitions.remainder: drop leaves out of the training order",
        "lower mixture.batch_size, or set partitions.remainder: pad or carry", warn_from=0.01, is_share=True,
        of=(OrderCounts,), value=lambda c: c.share_dropped()),
    Check("filler_share", (TRAINING_SPLITS,), "at_most", 0.1, "error",
        "share of the training order's places that hold a filler without targets instead of a sequence",
        "lower mixture.batch_size or partitions.world_size, or set partitions.remainder: carry or drop",
        warn_from=0.01, is_share=True,
        of=(OrderCounts,), value=lambda c: compute_share(c.fillers, c.places)),
    Check("same_row", (TRAINING_SPLITS,), "at_most", 0, "error",
        "rows with equal content in two splits",
        "this is a bug of rowmill: report it with the manifest", waivable=False,
        of=(RowLeakCounts,), value=lambda c: c.contents_in_two_splits),
    Check("same_group", (TRAINING_SPLITS,), "at_most", 0, "error",
        "groups with rows in two splits", "set splits.group_key to the field that names the group",
        of_kinds={"record": "set format.data.group_training_examples_by to the column that names the group"},
        applies_to="datasets with groups",
        of=(GroupLeakCounts,), value=lambda c: c.groups_in_two_splits),
    Check("time_order", (TRAINING_SPLITS,), "at_most", 0, "error",
        "rows in an earlier split than their time belongs to, or inside splits.gap",
        "this is a bug of rowmill: report it with the manifest", applies_to="splits by time",
        of=(TimeLeakCounts,), value=lambda c: c.early_rows),
    Check("mixture_share", (TRAINING_SPLITS,), "at_most", 1, "error",
        "largest distance, in sequences, of a dataset from its share at the end of a block",
        "this is a bug of rowmill: report it with the manifest",
        of=(OrderCounts,), value=lambda c: c.largest_share_error),
    Check("same_prompt", (TRAINING_SPLITS,), "at_most", 0.01, "warn",
        "share of evaluation rows whose first user message also opens a training row",
        "set splits.group_key so that equal prompts stay together, or deduplicate prompts",
        applies_to="all data but tables", is_share=True,
        of=(PromptLeakCounts,), value=lambda c: compute_share(c.rows_with_train_prompt, c.compared_rows)),
    Check("near_duplicate", (TRAINING_SPLITS,), "at_most", 0.01, "warn",
        "share of evaluation examples of whose 13-token n-grams half or more are in train; for tables, of records that "
        "equal a training record in all columns but one",
        "set splits.group_key so that versions of one text stay together, or remove the copies",
        of_kinds={"record": "set format.data.group_training_examples_by so that versions of one record stay together, "
        "or remove the copies"},
        applies_to="all data but tables, and tables of which something is held out", is_share=True,
        of=(NearDuplicateLeakCounts,),
        value=lambda c: compute_share(c.near_train_examples, c.compared_examples)),
    Check("split_share", (TRAINING_SPLITS,), "at_most", 0.05, "warn",
        "largest distance between a split's share of rows and the configured share",
        "expected on few rows or large groups; change splits.seed only before you have trained", is_share=True,
        of=(RowLeakCounts,), value=lambda c: c.largest_split_error),
    Check("rank_balance", (TRAINING_SPLITS,), "at_most", 0.05, "warn",
        "mean over steps of the excess of the largest rank's load over the mean; the load is partitions.balance's, "
        "trained tokens where it is none",
        "use partitions.balance: trained_tokens or flops, and a larger batch_size", is_share=True,
        of=(OrderCounts,), value=lambda c: c.average_excess()),
    Check("empty_step", (TRAINING_SPLITS,), "at_most", 0, "warn",
        "(step, rank) pairs without a trained token", "use a larger batch_size or fewer ranks",
        applies_to="all data but prompts",
        of=(OrderCounts,), value=lambda c: c.untrained_rank_steps if c.has_targets else None),
    Check("valid_fraction", (PARSED_RECORDS, GENERATED_SERIES), "at_least", 0.8, "warn",
        "share of generated objects that are records of the dataset",
        "read the reasons in the ledger; the model may need more training, another temperature, or other options of "
        "generation.validation", applies_to="generated texts", is_share=True,
        of=(ParsedTextCounts, GenerationCounts), value=lambda c: c.share_valid()),
    Check("failed_series", (GENERATED_SERIES,), "at_most", 0.99, "error",
        "share of series that ended before their stop; for single records and groups, 1 if none was generated",
        "read last_error and the reasons; check that the backend runs, or raise generation.patience", warn_from=0,
        is_share=True,
        of=(GenerationCounts,), value=lambda c: c.share_unfinished()),
    Check("unscored", (TEACHER_SCORES,), "at_most", 0.01, "error",
        "share of examples that the teacher's server refused, or answered with other tokens than were sent",
        "read the reasons; check that the served model has the recipe's tokenizer, a context as long as the longest "
        "example, and --max-logprobs of at least teacher.top_k", is_share=True,
        of=(ScoreCounts,), value=lambda c: c.share_unscored()),
    Check("stale_rank", (GPU_PARTITIONS,), "at_most", 0, "warn",
        "ranks that were built from another order", "materialize all ranks",
        of=(RankCounts,), value=lambda c: c.stale_ranks),
)  # fmt: skip

CHECKS: tuple[Check, ...] = (
    *_OF_ALL_DATA,
    *dict.fromkeys(check for kind in KINDS.values() for check in kind.CHECKS),
)
"""Every check: of all data, then of each kind of data."""

CHECKS_BY_NAME = {check.name: check for check in CHECKS}


def compute_values(checks: Iterable[str], counts: CountSet) -> dict[str, float | None]:
    """Return the numbers of some checks by name, None where a check has nothing to ask of what was counted.

    A check of several stages is left out. Raises ValueError for a share above 1: what was counted and what it is
    divided by are not the same rows.
    """
    values: dict[str, float | None] = {}
    for check in (CHECKS_BY_NAME[name] for name in checks if name in CHECKS_BY_NAME):
        if check.value is None:
            continue
        counted = [own for kind in check.of if (own := counts.find(kind)) is not None]
        values[check.name] = value = check.value(counted[0]) if counted else None
        if check.is_share and value is not None and value > 1:
            raise ValueError(f"{check.name} is {value:g}; a share is at most 1")
    return values


def format_measure(check: str, value: float) -> str:
    """Return a check's number or bound for people: a share as `5 %`, any other number as it is."""
    declared = CHECKS_BY_NAME.get(check)
    return f"{100 * value:.4g} %" if declared is not None and declared.is_share else f"{value:.6g}"


def format_remedy(remedy: str, recipe: str, dataset: str) -> str:
    """Return a check's remedy with its commands' arguments: the recipe with its storage root, and the dataset."""
    return remedy.replace("{recipe}", recipe).replace("{dataset}", dataset)
