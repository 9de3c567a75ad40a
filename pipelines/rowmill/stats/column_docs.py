"""What every view and column means, in one line each: DuckDB's comments, and the tables of the reference.

What belongs here: words. What does not: names and types (`schemas.py`), how a view is made (`views.py`).
"""

from collections.abc import Mapping
from typing import Final

from rowmill.schema.manifest import DisplayTable

ESTIMATE_NOTES: Final[Mapping[str, str]] = {
    "what_if": (
        "Estimated from lengths alone: an example above the length loses trained tokens in proportion to what is "
        "above, and is packed at just that length; documents that are cut into pieces lose none. Truncation that takes "
        "whole exchanges may lose more and pack into fewer sequences, at the present limit, too."
    ),
}
"""Tables that hold no counts, and how they come about; whoever shows such a table says it."""

PLANNED_NOTE: Final[str] = (
    "Records are planned anew at each length, as a build would plan them; what is lost are the tokens of records that "
    "no example could hold."
)
"""How the same table comes about for records, whose examples are no rows but are put together of them."""


def describe_estimate(name: str, table: DisplayTable) -> str | None:
    """Return what must be said beside a table that holds no counts; None of any other."""
    if name == "what_if" and "examples" in table.columns:
        return PLANNED_NOTE
    return ESTIMATE_NOTES.get(name)


VIEW_DOCS: Final[Mapping[str, str]] = {
    "builds": "Stages built: one line for each version, and for its last reuse.",
    "check_results": "Check results: the last one of each check on each current version.",
    "findings": "An older name of check_results, with its column check_name called law.",
    "ledger": "Where records ended: every record of a stage is in exactly one state.",
    "token_ledger": "Where tokens ended, each in exactly one class; of packed_shards, what stands in no sequence.",
    "rejects": "Records that were refused, one line each.",
    "rows": "Canonical rows, without their content.",
    "examples": "Tokenized examples, without their tokens.",
    "lengths": "Bins of the histogram of original lengths, for each split.",
    "what_if": f"What another context length would do. {ESTIMATE_NOTES['what_if']} {PLANNED_NOTE}",
    "sequences": "Packed sequences.",
    "generated_records": "Records that a model generated: accepted ones, one line each, with their content.",
    "segments": "Examples in sequences: whose tokens stand where.",
    "left_out": "Examples that are not whole in the sequences: cut, dropped, a tail, or surplus of validation.",
    "splits": "Splits as they came out, for each dataset.",
    "mixture": "Datasets in the order of training: the share asked for and what came.",
    "rank_steps": "What each rank gets in each step.",
    "truncation": "What truncation took, for each dataset and split.",
    "runs": "Runs from end to end: what each made. A run that found everything made has no line.",
    "current_versions": "Which version of each stage the views show.",
}

COMMON_COLUMN_DOCS: Final[Mapping[str, str]] = {
    "recipe": "The recipe's name.",
    "dataset": "The dataset's name; _recipe where a stage belongs to the whole recipe.",
    "version": "The version of the stage's output: a digest of its content.",
    "stage": "The stage, such as canonical_rows.",
    "scope": "The dataset's name, or _recipe.",
    "split": "train, validation or test.",
    "row_id": "A row: the digest of its part of the source, and its number there.",
    "example_id": "An example: its first row, and its number among that row's examples.",
    "trained_tokens": "Tokens that loss is taken on.",
}

_CHECK_RESULT_COLUMNS: Final[Mapping[str, str]] = {
    "severity": "error shuts the gate, warn only shows.",
    "value": "The number that was judged; null if it was not measured or is not applicable.",
    "bound": "The bound that it was held against.",
    "outcome": "passed, failed (a waived failure too), or not_applicable: the check has no meaning for this data.",
    "passed": "Whether it is within its bound; null where the check is not applicable.",
    "waiver": "The reason for which a failure is accepted; empty if none covers it.",
    "judged_at": "When it was judged, ISO 8601 in UTC.",
}

COLUMN_DOCS: Final[Mapping[str, Mapping[str, str]]] = {
    "builds": {
        "built_at": "When it was made, ISO 8601 in UTC.",
        "run_id": "The run of Dagster that made it, or build-… for `rowmill build`.",
        "seconds": "How long it took to make.",
        "reused": "Whether this line tells of finding it made; who made it, when and in what time stays as it was.",
        "parts": "Parts of the output; of raw_dataset, parts of its source files.",
        "parts_reused": "Parts that an earlier build had made.",
        "rows": "Rows of the output, as its page counts them: records, rows, examples, sequences, places or segments.",
    },
    "check_results": {
        "check_name": "The check, or the name of an expectation that the recipe adds.",
        **_CHECK_RESULT_COLUMNS,
    },
    "findings": {"law": "The check's name.", **_CHECK_RESULT_COLUMNS},
    "ledger": {
        "state": "kept, rejected, or left out: not_taken, not_sampled, tail, remainder, not_scheduled …",
        "reason": "Why, from a closed list; empty for kept.",
        "records": "Records, rows or sequences in this state.",
    },
    "token_ledger": {
        "split": "train, validation or test; rejected or all where no split is known.",
        "class": "trained, context, template, truncated, dropped or padding; template is context behind packing.",
        "tokens": "Tokens of this class.",
    },
    "rejects": {
        "reason": "Why, from a closed list.",
        "detail": "What exactly was found in this record.",
    },
    "rows": {
        "kind": "conversation, pair, text or record.",
        "group_key": "The group that must not be split; null without splits.group_key.",
        "domain": "The value of format.domain_key; null without it.",
        "schema": "The shape in which the record was recognised.",
        "extracted_think_from_content": "Thoughts taken out of messages' content.",
        "moved_reasoning_keys": "Messages whose reasoning stood under another key.",
        "dropped_think_messages": "Messages that held thoughts only and were dropped.",
        "tools_present": "Whether the row brings tools.",
        "tools_parsed_from_string": "Whether they came as text.",
        "unknown_roles": "Roles that no template is known to print.",
        "notes": "What else canonicalisation noticed.",
    },
    "examples": {
        "row_ids": "The rows that it was made of.",
        "original_tokens": "Tokens before truncation.",
        "tokens": "Tokens that are kept.",
        "exchanges_removed": "Tokens that truncation took by leaving whole exchanges out.",
        "reasoning_removed": "Tokens that it took by leaving reasoning out.",
        "tokens_cut": "Tokens that it cut off after that.",
    },
    "lengths": {
        "lower": "Tokens: the bin begins here.",
        "upper": "Tokens: the bin ends before this.",
        "examples": "Examples of such a length.",
    },
    "what_if": {
        "seq_len": "Tokens: a context length that might be chosen.",
        "examples_over": "Examples that would be longer; of records, those that no example could hold.",
        "trained_lost": "Trained tokens that would be lost, estimated; of records, counted.",
        "sequences": "Sequences that packing would give, estimated; of records, planned.",
    },
    "sequences": {
        "shard": "The file, relative to the storage root.",
        "sequence_id": "Its number in its split, from 0.",
        "tokens": "Tokens in it.",
        "fill": "Share of seq_len that holds tokens.",
    },
    "generated_records": {
        "text_id": "The generated text that it stands in; its line in the file of texts.",
        "number": "Its number among the text's accepted records, from 0.",
        "record": "The record as JSON text.",
    },
    "segments": {
        "sequence_id": "The sequence's number in its split, from 0.",
        "segment": "Its number in the sequence, from 0.",
        "source": "The source file.",
        "record": "The record's number in that file, from 1.",
        "start": "Token of the example at which the segment begins.",
        "length": "Tokens of the segment.",
    },
    "left_out": {
        "state": "What became of it; `kept`: the rest of it stands in sequences.",
        "reason": "Why, if it was rejected.",
        "tokens": "Its tokens that stand in no sequence.",
        "of_tokens": "Its tokens.",
    },
    "splits": {
        "rows": "Examples in the split.",
        "sequences": "Packed sequences in the split.",
    },
    "mixture": {
        "weight": "The weight asked for.",
        "wanted_share": "The weight as a share of all weights.",
        "passes": "How often the dataset is gone through.",
        "sequences": "Places in the order.",
    },
    "rank_steps": {
        "rank": "The rank's number, from 0.",
        "world_size": "Number of ranks.",
        "step": "The step, from 0.",
        "sequences": "Sequences that the rank gets.",
        "fillers": "How many of them are empty and only make the numbers even.",
        "tokens": "Tokens in the others.",
    },
    "truncation": {
        "examples": "Examples.",
        "shortened": "Examples that lost tokens.",
        "shortened_share": "Their share.",
        "original_tokens": "Tokens before truncation.",
        "tokens_removed": "Tokens that truncation took.",
        "exchanges_removed": "Of these, tokens of whole exchanges.",
        "reasoning_removed": "Of these, tokens of reasoning.",
        "tokens_cut": "Of these, tokens cut off after that.",
    },
    "runs": {
        "run_id": "The run of Dagster, or build-… for `rowmill build`.",
        "began": "When the first stage that it made was done, ISO 8601 in UTC.",
        "ended": "When the last one was done.",
        "stages": "Stages that it made; what it found made is not counted.",
        "seconds": "Seconds spent in them.",
        "rows": "The sum of their rows, as builds has them.",
        "parts": "Parts of what it made.",
        "parts_reused": "Of these, parts that an earlier run had made.",
    },
    "current_versions": {},
}


def describe_column(view: str, column: str) -> str:
    """Return what a column of a view means; every column has words, as a test checks."""
    return COLUMN_DOCS[view].get(column) or COMMON_COLUMN_DOCS[column]
