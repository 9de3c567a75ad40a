"""The ledger: every source record and every token ends in exactly one named state.

records   kept | rejected(reason) | not_taken | not_sampled | validation_surplus | tail | remainder | not_scheduled
tokens    trained | context | template | truncated | dropped | padding
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import pyarrow as pa

KEPT = "kept"
REJECTED = "rejected"
NOT_TAKEN = "not_taken"
UNUSED_STATES = (NOT_TAKEN, "not_sampled", "validation_surplus", "tail", "remainder", "not_scheduled")
"""States of valid records that are not used, named after the cause."""

RECORD_STATES = (KEPT, REJECTED, *UNUSED_STATES)
TOKEN_CLASSES = ("trained", "context", "template", "truncated", "dropped", "padding")

REJECT_REASONS = frozenset(
    # Unreadable records
    "too_long_record not_utf8 invalid_json duplicate_key not_an_object too_deep blank header_again comment "
    # Rows
    "unknown_schema missing_field bad_messages empty_conversation empty_assistant content_not_text multimodal_content "
    "unknown_content_part unread_prompt empty_user unclosed_think orphan_think unknown_role bad_tools bad_tool_call "
    "bad_tool_arguments flag_conflict bad_weight bad_system_prompt bad_template_kwargs empty_text too_short too_long "
    "too_long_run "
    "duplicate contaminated near_duplicate skipped_by_format format_error bad_example missing_ground_truth "
    "prompt_ends_with_assistant bad_tokens bad_mask bad_field length_mismatch labels_disagree not_append_only "
    "padded_inside unpaired_row bad_label tied bad_margin prompt_mismatch prompt_differs empty_completion "
    "identical_sides "
    # Splits
    "group_missing order_missing order_unparsable split_gap straddles_split "
    # Records
    "type_mismatch unserialisable record_overflow group_overflow "
    # Rendering and masks
    "template_error content_dropped span_not_found own_text_untrained foreign_text_trained assistant_untrained "
    "reasoning_not_located render_mismatch mask_judged_wrong control_token_in_content offsets_degenerate "
    # Generated text: an object by itself, among its group, in its series, and what generation does not keep
    "number_too_large duplicate_column unknown_column missing_column null type timestamp group_incomplete "
    "group_has_invalid group_mixed_key group_unordered step order after_failure not_chosen past_stop past_bound "
    "series_incomplete "
    # Lengths
    "no_assistant no_loss_tokens overlong overlong_after_structure overlong_prompt".split()
)
"""The closed list of reasons for a reject; a reason outside it is a bug."""

NO_RECORD_REASONS = frozenset({"blank", "header_again", "comment"})
"""Reasons of what is in a file and is no record: no share of records counts it."""

INTENDED_REASONS = NO_RECORD_REASONS | frozenset(
    "duplicate contaminated near_duplicate too_short too_long split_gap straddles_split".split()
)
"""Reasons that the recipe requested: these records are valid, and no check counts them as lost."""

LEDGER_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
    ]
)
"""One line per source record and stage."""


def sum_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum counts over parts; keys are sorted, so that equal counts give equal bytes."""
    total: Counter[str] = Counter()
    for counts in parts:
        total.update(counts)
    return {name: total[name] for name in sorted(total)}


def count_unaccounted(records_in: int, lines: Iterable[tuple[str, str, int]]) -> int:
    """Return how many records the ledger's lines miss, or count twice; must be zero."""
    return abs(records_in - sum(count for _, _, count in lines))
