"""The ledger: every source record and every token ends in exactly one named state, with a reason from a closed list.

records   kept | rejected(reason) | not_taken | not_sampled | validation_surplus | tail | remainder | not_scheduled
tokens    trained | context | template | truncated | dropped | padding | shared
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeVar

import pyarrow as pa

from rowmill.core.arrow_files import make_required_schema

KEPT = "kept"
REJECTED = "rejected"
NOT_TAKEN = "not_taken"
UNUSED_STATES = (NOT_TAKEN, "not_sampled", "validation_surplus", "tail", "remainder", "not_scheduled")
"""States of valid records that are not used, named after the cause."""

RECORD_STATES = (KEPT, REJECTED, *UNUSED_STATES)
TOKEN_CLASSES = ("trained", "context", "template", "truncated", "dropped", "padding", "shared")
"""A token is shared if another example's equal token stands for it, at the end of an equal beginning."""

NO_RECORD_REASONS = frozenset({"blank", "header_again", "comment"})
"""Reasons of what is in a file and is no record: no share of records counts it."""

INTENDED_REASONS = NO_RECORD_REASONS | frozenset(
    "duplicate left_out_by_hand contaminated near_duplicate too_short too_long split_gap straddles_split tied "
    "untrained_row".split()
)
"""Reasons that the recipe requested, or that a comparison gives which ends in a tie: these records are valid, and no
check counts them as lost."""

LEDGER_SCHEMA = make_required_schema(row_id=pa.string(), stage=pa.string(), state=pa.string(), reason=pa.string())
"""One line per source record and stage."""


CountedT = TypeVar("CountedT", str, int)


def sum_counts(parts: Iterable[Mapping[CountedT, int]]) -> dict[CountedT, int]:
    """Sum counts over parts; keys are sorted, so that equal counts give equal bytes."""
    total: Counter[CountedT] = Counter()
    for counts in parts:
        total.update(counts)
    return {name: total[name] for name in sorted(total)}


def count_unaccounted(records_in: int, lines: Iterable[tuple[str, str, int]]) -> int:
    """Return how many records the ledger's lines miss, or count twice; must be zero."""
    return abs(records_in - sum(count for _, _, count in lines))


# ── The meaning and the remedy of every reason ──


class ReasonDescription(NamedTuple):
    """Where a reason occurs, what it means, and what to do."""

    of: Literal["sources", "rows", "splits", "masks", "lengths", "records", "generated"]
    what: str
    remedy: str


REASON_DESCRIPTIONS: dict[str, ReasonDescription] = {
    "too_long_record": ReasonDescription("sources", "the record has more bytes than `source.limits.max_record_bytes`",
        "check that the file has one record per line, split the record, or raise the limit"),
    "not_utf8": ReasonDescription("sources", "the line is not valid UTF-8",
        "name the file's encoding in `source.encoding`, or convert it to UTF-8"),
    "invalid_json": ReasonDescription("sources",
        "the line is not valid JSON; a lone half of a surrogate pair is invalid",
        "write the file with a JSON library, one record per line"),
    "not_an_object": ReasonDescription("sources", "the record is not an object", "write records as `{…}`"),
    "too_deep": ReasonDescription("sources", "JSON is nested too deeply to be read back",
        "flatten the record, or remove the column"),
    "duplicate_key": ReasonDescription("sources", "an object has a key twice, and JSON does not say which value counts",
        "write one value, or give the other one a key of its own"),
    "blank": ReasonDescription("sources",
        "the line, paragraph or document of a text file is only white space, or the line of a CSV file only "
        "delimiters; the check does not count it as a reject", "nothing; `source.sample_by` defines what a text is"),
    "header_again": ReasonDescription("sources",
        "the line of a CSV file is its header again, as in files that were joined; the check does not count it as a "
        "reject", "nothing; `source.header: false` takes the first line as a record"),
    "comment": ReasonDescription("sources",
        "the line of a CSV file begins with `source.comment`; the check does not count it as a reject",
        "nothing; `source.comment` says what a comment begins with"),
    "unknown_schema": ReasonDescription("rows",
        "the columns match no known schema, or not the one that `format.dataset_schema` names",
        "name the columns in `format.messages_field` or `format.prompt_fields` and `format.response_fields`; of "
        "preferences in `format.chosen_fields` and `format.rejected_fields`, of token rows in `format.ids_fields` and "
        "`format.mask_fields`"),
    "missing_field": ReasonDescription("rows", "a column that the recipe names is absent or null",
        "correct the name, or remove such records"),
    "bad_messages": ReasonDescription("rows", "the messages are not a list of mappings, each with a role",
        "name the role's key in `format.role_field`, or fix the records"),
    "empty_conversation": ReasonDescription("rows", "there are no messages, or only reasoning", "remove such records"),
    "empty_assistant": ReasonDescription("rows", "a message of the model has no text, call or reasoning",
        "fix the records, or check `reasoning.think_mode` if the message had only reasoning"),
    "unread_prompt": ReasonDescription("rows",
        "a column whose name says that it belongs to the prompt, such as `context` or `system`, holds text that "
        "nothing reads",
        "name it in `format.context_fields` or `format.system_prompt`, or accept that it is left out in "
        "`format.ignore_columns`"),
    "empty_user": ReasonDescription("rows",
        "a message of the user has no content, so that the model would be trained to answer nothing",
        "remove such records, or name the key of the content in `format.content_field`"),
    "content_not_text": ReasonDescription("rows", "content is neither text nor a list of parts",
        "convert it to text where the data is made"),
    "multimodal_content": ReasonDescription("rows",
        "a part is an image, sound, video or file, or a column has a placeholder for one, such as `<image>`",
        "remove such records"),
    "unknown_content_part": ReasonDescription("rows", "a typed part has an unknown type or no text",
        "use parts of type text, reasoning or tool_call"),
    "unclosed_think": ReasonDescription("rows",
        "reasoning opens the message and is never closed: the text was truncated",
        "generate the row again, or set `reasoning.extract_think_tags: false` if the tag is ordinary text"),
    "orphan_think": ReasonDescription("rows", "a message of reasoning has no answer after it",
        "remove such records, or set `reasoning.think_role: null` if it is an ordinary role"),
    "unknown_role": ReasonDescription("rows", "a role is unknown, and `format.unknown_roles` is reject",
        "map it in `format.role_map`, or name it in `format.assistant_roles`"),
    "bad_tools": ReasonDescription("rows", "the tools are not valid JSON, or one has no name",
        "fix the first column that `tools.tools_fields` finds"),
    "bad_tool_call": ReasonDescription("rows", "a call is not a mapping with a name", "fix the records"),
    "bad_tool_arguments": ReasonDescription("rows",
        "a call's arguments are not a JSON object, and the template or `tools.arguments` needs one",
        "fix the records, or choose a template that prints arguments as text"),
    "flag_conflict": ReasonDescription("rows",
        "two flags of a message contradict each other, or flags of its parts do not fit its text",
        "write `{name: ignore}` of one of them in `format.message_flags`"),
    "untrained_row": ReasonDescription("rows", "a column of the row says that it does not train, or its weight is 0",
        "nothing, or write `{name: ignore}` in `format.message_flags` if the column means something else"),
    "bad_weight": ReasonDescription("rows",
        "a weight is negative without `loss.allow_negative`, not a float32, or neither 0 nor 1 without `loss.weights`",
        "use 0 and 1, set `loss.weights: true` (not for preferences), also `loss.allow_negative: true`, or rename a "
        "key that is not a loss weight"),
    "bad_system_prompt": ReasonDescription("rows",
        "the column of `format.system_prompt` is not text, or there is a second system prompt and "
        "`format.on_existing_system` is reject", "correct the column, or choose merge, replace or keep"),
    "bad_template_kwargs": ReasonDescription("rows",
        "a row's template variables are not a mapping, or set a reserved name",
        "fix the column, or name another in `template.chat_template_kwargs`"),
    "empty_text": ReasonDescription("rows", "the document or response is blank", "remove such records"),
    "too_short": ReasonDescription("rows", "the document is shorter than `filters.min_chars`",
        "lower it if that is not intended"),
    "too_long": ReasonDescription("rows", "the document is longer than `filters.max_chars`",
        "raise it if that is not intended"),
    "too_long_run": ReasonDescription("rows",
        "a text has more characters in a row that are only letters and digits, only white space or only signs than "
        "`source.limits.max_run_chars`; its tokens would take minutes",
        "remove what is no text, such as an encoded file or filler, or raise the limit"),
    "duplicate": ReasonDescription("rows", "an earlier row has the same content",
        "set `filters.deduplicate: off` if copies are intended"),
    "left_out_by_hand": ReasonDescription("rows",
        "a person left the row out: its content is in a file of `filters.leave_out`; the detail is that entry's note",
        "delete the entry if the row should train"),
    "contaminated": ReasonDescription("rows",
        "the row has an item of a benchmark of `filters.decontaminate`; the detail names the item, the share of its "
        "words that the row has, and the first n-gram that both have",
        "read both texts in the view `contamination`; raise `filters.decontaminate.coverage` if they only share "
        "phrases"),
    "near_duplicate": ReasonDescription("rows",
        "the row resembles a longer row that is kept; the detail has its id and their similarity",
        "compare both with `rowmill trace`; raise `filters.near_duplicates.threshold` if such rows should stay"),
    "skipped_by_format": ReasonDescription("rows", "the custom class returned nothing for the record",
        "nothing, if that is intended"),
    "format_error": ReasonDescription("rows", "the custom class raised an exception, or did not return a row",
        "fix the class; the detail has its message"),
    "missing_ground_truth": ReasonDescription("rows",
        "no column of `format.ground_truth_fields` has a ground truth, or `format.ground_truth_pattern` has no match",
        "name the column or correct the pattern; `format.require_ground_truth: false` takes prompts without one"),
    "prompt_ends_with_assistant": ReasonDescription("rows",
        "the prompt ends with a message of the model, and `format.trailing_assistant` is `reject`",
        "set `format.trailing_assistant` to `drop` or `ground_truth`"),
    "bad_tokens": ReasonDescription("rows",
        "the ids are no flat list of integers, or one is negative or not below the vocabulary's size",
        "correct the ids, or set `vocab_size` to the model's embedding rows"),
    "bad_mask": ReasonDescription("rows",
        "a mask holds other values than 0 and 1, labels are no integers, or a length is no count",
        "correct the column, or name another in `format.mask_fields`"),
    "bad_field": ReasonDescription("rows",
        "a column of `format.token_fields` is no list of finite numbers, or of lists of them, or holds an id that no "
        "token has, or a log-probability above 0; a reward is no number; a group's id is neither text nor an integer",
        "correct the column, or take it off the list"),
    "length_mismatch": ReasonDescription("rows",
        "ids and their mask, labels, attention mask or a field of their tokens have different lengths, or messages and "
        "a column with a flag of each",
        "correct the record; a mask of the last tokens needs `response_length`; a column of flags has one of each "
        "message, or of each answer"),
    "labels_disagree": ReasonDescription("rows", "a label is neither -100 nor its own id",
        "write labels unshifted: each is the id at its own place; the detail says so where they are shifted"),
    "not_append_only": ReasonDescription("rows", "the prompt of a turn does not begin with all ids before it",
        "record rollouts whose history is not rewritten, or make each turn a record"),
    "padded_inside": ReasonDescription("rows", "`attention_mask` is 0 between tokens that it keeps",
        "remove the padding between prompt and response"),
    "unpaired_row": ReasonDescription("rows",
        "the record has one answer with a label, and the dataset's objective is `paired`",
        "set `format.objective: unpaired`, or give such records a recipe of their own"),
    "bad_label": ReasonDescription("rows", "the label of an answer is neither true nor false, 1 nor 0",
        "correct it, or name another column in `format.label_fields`"),
    "tied": ReasonDescription("rows", "all completions of the record are ranked alike",
        "nothing; none of them is better than another"),
    "bad_margin": ReasonDescription("rows", "the margin or a score is no finite number",
        "correct it, or set `format.margin_field: null`"),
    "prompt_mismatch": ReasonDescription("rows", "the sides do not go on from one prompt with an answer of the model",
        "correct the record; `rowmill inspect` shows it"),
    "prompt_differs": ReasonDescription("masks",
        "the prompt's tokens before a chosen answer are not those before the rejected one",
        "set `loss.boundary: split`, which encodes the prompt apart"),
    "empty_completion": ReasonDescription("rows", "a side is empty, or only the beginning of the other",
        "correct the record, or leave it out"),
    "identical_sides": ReasonDescription("rows", "the chosen answer is the rejected one",
        "nothing; such a pair prefers nothing"),
    "bad_example": ReasonDescription("rows",
        "the custom class built unknown ids, unequal lengths, or a mask with values other than 0 and 1",
        "fix its `build`"),
    "group_missing": ReasonDescription("splits",
        "the column of `splits.group_key`, or of a table's `format.data.group_training_examples_by`, is absent or null",
        "fix it, or name another"),
    "order_missing": ReasonDescription("splits", "the column of the row's time is absent or null",
        "fix it, or name another"),
    "order_unparsable": ReasonDescription("splits",
        "the row's time is not in the format of the others: neither ISO 8601 nor a number like the boundaries; an "
        "infinite number is no time", "write all times in one form"),
    "split_gap": ReasonDescription("splits", "the row's time is in the gap before a boundary",
        "lower `splits.gap` if that is not intended"),
    "straddles_split": ReasonDescription("splits", "the row's group has rows on both sides of a boundary",
        "set `splits.crossing_groups: later` to keep such groups whole"),
    "template_error": ReasonDescription("masks",
        "the chat template refused the row, or exceeded its budget; the detail has the message",
        "choose another `template.chat_template`, or remove such rows"),
    "content_dropped": ReasonDescription("masks",
        "the template does not print some of the row's text; the detail has the kinds",
        "choose another template, or set `template.on_dropped` for the kind to count or untrain"),
    "span_not_found": ReasonDescription("masks",
        "the template reads the row's text, so the text's position in the render can be neither found nor proven",
        "run `rowmill template-report --prove` to see which rows it supports, and choose another template for these"),
    "own_text_untrained": ReasonDescription("masks",
        "text of a trained message is outside its `{% generation %}` block",
        "correct the blocks in a copy of the template (`template.chat_template: {file: …}`), or remove their tags "
        "there: then the template's turns are learned"),
    "foreign_text_trained": ReasonDescription("masks",
        "template text that is not known to belong to the model's turn, or text of another message, would be trained",
        "run `rowmill template-report --prove`, and choose another template for these rows; rows of other shapes are "
        "not affected"),
    "assistant_untrained": ReasonDescription("masks",
        "a message that should be trained has no trained token: nothing of it is printed, or it is outside the "
        "template's `{% generation %}` blocks",
        "choose a template that prints it, such as reasoning without an answer; for blocks correct them in a copy of "
        "the template (`template.chat_template: {file: …}`)"),
    "reasoning_not_located": ReasonDescription("masks",
        "the end of printed reasoning cannot be found, and `loss.think_loss` must separate it from the answer",
        "set `reasoning.extract_think_tags: true`, or `loss.think_loss: all`"),
    "render_mismatch": ReasonDescription("masks",
        "a row of the share `template.verify_render` that the judge, set up as transformers, renders otherwise",
        "report the template; until then choose another"),
    "mask_judged_wrong": ReasonDescription("masks",
        "a row of the share `template.verify_render` of which a character trains, or does not train, by mistake, as is "
        "found by code that shares nothing with the masker",
        "run `rowmill template-report --prove`, report the template and what it prints; until then choose another"),
    "control_token_in_content": ReasonDescription("masks",
        "text of the row would become a control token, or `template.control_tokens` is reject",
        "set `template.control_tokens: as_text`, or clean the text"),
    "offsets_degenerate": ReasonDescription("masks", "the tokenizer does not report which characters a token covers",
        "use a tokenizer whose normalizer keeps lengths, or one without trimmed offsets"),
    "no_assistant": ReasonDescription("lengths", "no message has a role of the model",
        "name its role in `format.assistant_roles`, or remove such rows"),
    "no_loss_tokens": ReasonDescription("lengths",
        "no token of the row is trained: because of its flags, the group `loss`, or truncation",
        "check flags and `loss.mask`, of token rows the columns of `format.mask_fields`, or raise "
        "`truncation.max_length`"),
    "overlong": ReasonDescription("lengths", "the row is too long, and `truncation.overlong` is drop",
        "raise `truncation.max_length`, or truncate"),
    "overlong_prompt": ReasonDescription("lengths", "the prompt of a pair leaves no place for an answer",
        "raise `truncation.max_length` and `seq_len`, or shorten the prompt"),
    "overlong_after_structure": ReasonDescription("lengths",
        "the row is too long after structured truncation, and `truncation.token_cut` is reject",
        "raise `truncation.max_length`, or set `truncation.token_cut: allow`"),
    "type_mismatch": ReasonDescription("records",
        "a value does not fit its column's type in the table contract; the detail has both",
        "fix the value, or change the contract: another type, an `na` text, or `on_mismatch: na`"),
    "unserialisable": ReasonDescription("records", "a value of the record has no exact text form",
        "write it in a type that the codec supports"),
    "record_overflow": ReasonDescription("records", "a single record is longer than an example may be",
        "raise the limit, or drop long fields"),
    "group_overflow": ReasonDescription("records", "a group's records do not fit into one example",
        "raise the limit, or allow fewer of them"),
    "number_too_large": ReasonDescription("generated",
        "a number has over 4,300 digits, or is beyond what its column holds", "train longer, or sample cooler"),
    "duplicate_column": ReasonDescription("generated",
        "one object has a key twice, in a records dataset's JSON or in generated text",
        "write each key once; for generated text train longer, or sample cooler"),
    "unknown_column": ReasonDescription("generated", "a key is not a column of the dataset; `detail` names it",
        "train longer, or sample cooler"),
    "missing_column": ReasonDescription("generated", "a column that every record has is absent",
        "train longer, or check that texts are not truncated"),
    "null": ReasonDescription("generated", "a column without nulls in the data is null",
        "train longer, or sample cooler"),
    "type": ReasonDescription("generated", "a value is not of its column's type", "train longer, or sample cooler"),
    "timestamp": ReasonDescription("generated", "the order column's value cannot be read like those of the data",
        "train longer, or check `time_series.timestamp_format`"),
    "group_incomplete": ReasonDescription("generated",
        "the object is in a piece of text without the delimiters of a group",
        "raise the tokens that a completion may have, or set `validation.group_by_accept_no_delineator`"),
    "group_has_invalid": ReasonDescription("generated",
        "the object is a record, but another object of its group is not",
        "fix the other object's reason, or set `validation.group_by_ignore_invalid_records`"),
    "group_mixed_key": ReasonDescription("generated", "the records of the group, or series, have different keys",
        "train longer, or set `validation.group_by_fix_non_unique_value`"),
    "group_unordered": ReasonDescription("generated", "the records of the group are not in order",
        "train longer, or set `validation.group_by_fix_unordered_records`"),
    "step": ReasonDescription("generated", "the time is not one interval after the previous one",
        "train longer, or sample cooler"),
    "order": ReasonDescription("generated", "the time is before the previous one", "train longer, or sample cooler"),
    "after_failure": ReasonDescription("generated",
        "the object comes after the first invalid one of its series, or after its end", "fix the first one"),
    "not_chosen": ReasonDescription("generated", "another sample of the round had more valid records",
        "lower `generation.samples_per_prompt`"),
    "past_stop": ReasonDescription("generated", "the record comes after the end of its series",
        "nothing; the series is complete"),
    "past_bound": ReasonDescription("generated", "the wanted number of records is reached",
        "raise `generation.max_records_per_group`, or nothing"),
    "series_incomplete": ReasonDescription("generated", "the record's series failed before its end",
        "raise `generation.patience`, or set `generation.on_failed_group: keep`"),
    "teacher_misaligned": ReasonDescription("generated",
        "the teacher's server answered with another length, with entries that lack the tokens that were sent, with ids "
        "outside the vocabulary, or for another model",
        "serve a model with the recipe's tokenizer, by a server that returns `prompt_logprobs`, and score again"),
    "teacher_refused": ReasonDescription("generated",
        "the teacher's server refused the tokens, such as more of them than its context has",
        "read the detail; serve the model with a longer context, or score shorter rows"),
}  # fmt: skip
"""Description of each reason, in the order of the stages."""

REJECT_REASONS = frozenset(REASON_DESCRIPTIONS)
"""The closed list of reasons for a reject; a reason outside it is a bug."""
