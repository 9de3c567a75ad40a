"""Describe every view and column in one line: DuckDB's comments, and the tables of the reference."""

from collections.abc import Mapping
from typing import Final

from rowmill.schema.manifest import DisplayTable

ESTIMATE_NOTES: Final[Mapping[str, str]] = {
    "what_if": (
        "Estimated from lengths alone: an example above the length loses trained tokens in proportion to what is "
        "above, and is packed at just that length; documents that are cut into pieces lose none. Truncation that "
        "removes whole exchanges may lose more and pack into fewer sequences, also at the current limit."
    ),
}
"""Tables of estimates, and the note on how they are made; a page that shows such a table adds the note."""

PLANNED_NOTE: Final[str] = (
    "Records are planned again for each length, as a build would plan them; the tokens of records that no example "
    "could hold are lost."
)
"""The note for records datasets, whose examples are assembled from several rows."""


def describe_estimate(name: str, table: DisplayTable) -> str | None:
    """Return the note for a table that holds estimates; None for any other."""
    if name == "what_if" and "examples" in table.columns:
        return PLANNED_NOTE
    return ESTIMATE_NOTES.get(name)


VIEW_DOCS: Final[Mapping[str, str]] = {
    "builds": "Stages built: one row per version, and one for its last reuse.",
    "check_results": "Check results: the last one of each check on each current version.",
    "ledger": "Where records ended: every record of a stage is in exactly one state.",
    "token_ledger": "Where tokens ended, each in exactly one class; for packed_shards, those in no sequence, and "
    "padding after segments.",
    "rejects": "Rejected records, one row each.",
    "contamination": "Rows that have an item of a benchmark, removed or not, beside the item that they match most.",
    "near_duplicate_groups": "Rows that resemble a longer row, removed or not; those of one kept_row_id are a group.",
    "rows": "Canonical rows, without their content, of which there is a preview.",
    "examples": "Tokenized examples, without their tokens; in history without columns of their rows.",
    "lengths": "Bins of the histogram of original lengths, for each split.",
    "what_if": f"The effect of other context lengths. {ESTIMATE_NOTES['what_if']} {PLANNED_NOTE}",
    "sequences": "Packed sequences.",
    "generated_records": "Accepted records that a model generated, one row each, with their content.",
    "segments": "Segments: which example's tokens are where in which sequence; in history without columns of rows.",
    "left_out": "Examples that are not completely in the sequences: cut, dropped, a tail, or surplus of validation.",
    "splits": "Resulting sizes of the splits, for each dataset.",
    "mixture": "Datasets in training order: the wanted share and the actual one.",
    "rank_steps": "Sequences and tokens of each rank in each step.",
    "truncation": "What truncation removed, for each dataset and split.",
    "runs": "Runs: what each run built. A run that reused everything has no row.",
    "current_versions": "Which version of each stage the views show.",
}

COMMON_COLUMN_DOCS: Final[Mapping[str, str]] = {
    "recipe": "The recipe's name.",
    "dataset": "The dataset's name; _recipe if the stage belongs to the whole recipe.",
    "version": "The version of the stage's output: a digest of its content.",
    "stage": "The stage, such as canonical_rows.",
    "scope": "The dataset's name, or _recipe.",
    "split": "train, validation or test.",
    "row_id": "A row's id: the digest of its part of the source, and its number there.",
    "example_id": "An example's id: its first row, and its number among that row's examples.",
    "trained_tokens": "Tokens with loss.",
    "source": "The source file; of an example, that of its first row.",
    "record": "The record's number in that file, from 1, blank lines not counted.",
    "line": "The line of that file, from 1; null where it is not known: in files that are not JSON Lines, and in parts "
    "of a file that have blank lines. `rowmill trace` finds it.",
    "domain": "The value of format.domain_key; null without it.",
    "preview": "How the text begins, up to 200 characters: a chat's first question, a prompt, a text, a record.",
}

_CHECK_RESULT_COLUMNS: Final[Mapping[str, str]] = {
    "severity": "error closes the gate, warn only shows.",
    "value": "The measured number; null if it was not measured or is not applicable.",
    "bound": "The bound that it was compared with.",
    "outcome": "passed, failed (a waived failure too), or not_applicable: the check does not apply to this data.",
    "passed": "Whether it is within its bound; null if the check is not applicable.",
    "waiver": "The reason for which a failure is accepted; empty if none covers it.",
    "judged_at": "When it was judged, ISO 8601 in UTC.",
}

COLUMN_DOCS: Final[Mapping[str, Mapping[str, str]]] = {
    "builds": {
        "built_at": "When it was built, ISO 8601 in UTC.",
        "run_id": "The Dagster run that built it, or build-… for `rowmill build`.",
        "seconds": "How long building it took.",
        "reused": "Whether this row records a reuse; run_id, built_at and seconds are then those of the build.",
        "parts": "Parts of the output; of raw_dataset, parts of its source files.",
        "parts_reused": "Parts that an earlier build had written.",
        "rows": "Rows of the output, as its page counts them: records, rows, examples, sequences, places or segments.",
    },
    "check_results": {
        "check_name": "The check, or the name of an expectation that the recipe adds.",
        **_CHECK_RESULT_COLUMNS,
    },
    "ledger": {
        "state": "kept, rejected, or left out: not_taken, not_sampled, tail, remainder, not_scheduled …",
        "reason": "Why, from a closed list; empty for kept.",
        "records": "Records, rows or sequences in this state.",
    },
    "token_ledger": {
        "split": "train, validation or test; rejected or all if no split is known.",
        "class": "trained, context, template, truncated, dropped or padding; template is context after packing.",
        "tokens": "Tokens of this class.",
    },
    "rejects": {
        "reason": "Why, from a closed list.",
        "detail": "What was found in this record.",
        "domain": "The value of format.domain_key; null without it, in a record that cannot be read, and for "
        "rows removed among equal ones.",
        "preview": "How its text begins, or its raw record if it could not be read, up to 200 characters.",
    },
    "contamination": {
        "benchmark": "The benchmark's name.",
        "item": "The item's number in the benchmark, from 0 through its files.",
        "source": "The benchmark's file.",
        "record": "The item's record in that file, from 1.",
        "coverage": "Share of the item's words in n-grams that the row has too.",
        "ngram": "The first n-gram that both have.",
        "text": "The text of the row that has the n-gram, its first 300 characters.",
        "item_text": "The item's text, its first 300 characters.",
    },
    "near_duplicate_groups": {
        "kept_row_id": "The row that stays instead.",
        "similarity": "Share of common n-grams among those of either row.",
        "displaced": "Whether the row that stays comes after it in the source.",
    },
    "rows": {
        "kind": "conversation, pair, text, record, prompt, tokens or preference.",
        "group_key": "The group that must not be split; null without splits.group_key.",
        "schema": "The schema that the record was recognized as.",
        "extracted_think_from_content": "Reasoning passages extracted from messages' content.",
        "moved_reasoning_keys": "Messages whose reasoning was under another key.",
        "dropped_think_messages": "Messages of only reasoning, which were dropped.",
        "tools_present": "Whether the row has tools.",
        "tools_parsed_from_string": "Whether the tools were JSON text.",
        "unknown_roles": "Roles that no template is known to print.",
        "notes": "Other observations of canonicalization.",
    },
    "examples": {
        "row_ids": "The rows that it was made from.",
        "original_tokens": "Tokens before truncation.",
        "tokens": "Tokens that are kept.",
        "removed_tokens": "Tokens that truncation removed.",
        "exchanges_removed": "Tokens of whole exchanges that truncation removed.",
        "reasoning_removed": "Tokens of reasoning that truncation removed.",
        "tokens_cut": "Tokens that the final cut removed.",
    },
    "lengths": {
        "lower": "Tokens: the bin begins here.",
        "upper": "Tokens: the bin ends before this.",
        "examples": "Examples with such a length.",
    },
    "what_if": {
        "seq_len": "Tokens: a candidate context length.",
        "examples_over": "Examples that would be longer; for records, those that no example could hold.",
        "trained_lost": "Trained tokens that would be lost, estimated; for records, counted.",
        "sequences": "Sequences that packing would make, estimated; for records, planned.",
    },
    "sequences": {
        "shard": "The file, relative to the storage root.",
        "sequence_id": "The sequence's number in its split, from 0.",
        "tokens": "Tokens in it.",
        "fill": "Share of seq_len that holds tokens.",
    },
    "generated_records": {
        "text_id": "The generated text that holds it: its line in the file of texts.",
        "number": "Its number among the text's accepted records, from 0.",
        "record": "The record as JSON text.",
    },
    "segments": {
        "sequence_id": "The sequence's number in its split, from 0.",
        "segment": "Its number in the sequence, from 0.",
        "start": "Token of the example at which the segment begins.",
        "length": "Tokens of the segment.",
    },
    "left_out": {
        "state": "Its state; `kept`: the rest of it is in sequences.",
        "reason": "Why, if it was rejected.",
        "tokens": "Its tokens that are in no sequence.",
        "of_tokens": "Its tokens.",
    },
    "splits": {
        "rows": "Examples in the split.",
        "sequences": "Packed sequences in the split.",
    },
    "mixture": {
        "weight": "The weight in the recipe.",
        "wanted_share": "The weight as a share of all weights.",
        "passes": "Passes over the dataset.",
        "sequences": "Places in the order.",
    },
    "rank_steps": {
        "rank": "The rank's number, from 0.",
        "world_size": "Number of ranks.",
        "step": "The step, from 0.",
        "sequences": "Sequences that the rank gets.",
        "fillers": "How many of them are fillers, which make ranks equally long.",
        "tokens": "Tokens in the other sequences.",
    },
    "truncation": {
        "examples": "Examples.",
        "shortened": "Examples that lost tokens.",
        "shortened_share": "Their share.",
        "original_tokens": "Tokens before truncation.",
        "tokens_removed": "Tokens that truncation removed.",
        "exchanges_removed": "Of these, tokens of whole exchanges.",
        "reasoning_removed": "Of these, tokens of reasoning.",
        "tokens_cut": "Of these, tokens that the final cut removed.",
    },
    "runs": {
        "run_id": "The Dagster run, or build-… for `rowmill build`.",
        "began": "When its first stage was finished, ISO 8601 in UTC.",
        "ended": "When its last stage was finished.",
        "stages": "Stages that it built; reused stages are not counted.",
        "seconds": "Seconds spent in them.",
        "rows": "The sum of their rows, as in builds.",
        "parts": "Parts of these stages.",
        "parts_reused": "Of these, parts that an earlier run had written.",
    },
    "current_versions": {},
}


def describe_column(view: str, column: str) -> str:
    """Return the description of a view's column; every column has one, as a test checks."""
    return COLUMN_DOCS[view].get(column) or COMMON_COLUMN_DOCS[column]
