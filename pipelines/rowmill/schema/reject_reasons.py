"""What each reason for a reject means, and what to do about it.

What belongs here: words for people. What does not: the closed list itself (`ledger.py`) and who gives a reason;
each room says in a detail which column, message or value it was.
"""

from typing import Literal, NamedTuple

from rowmill.schema.ledger import REJECT_REASONS


class ReasonDescription(NamedTuple):
    """Where a reason is given, what it means, and what to do."""

    of: Literal["sources", "rows", "splits", "masks", "lengths", "records", "generated"]
    what: str
    remedy: str


REASON_DESCRIPTIONS: dict[str, ReasonDescription] = {
    "too_long_record": ReasonDescription(
        "sources",
        "the record has more bytes than `source.limits.max_record_bytes`",
        "see that the file has one record a line, split the record, or raise the limit",
    ),
    "not_utf8": ReasonDescription("sources", "the line is no UTF-8", "convert the file to UTF-8"),
    "invalid_json": ReasonDescription(
        "sources",
        "the line is no JSON; half of a surrogate pair counts as none",
        "write the file with a JSON library, one record a line",
    ),
    "not_an_object": ReasonDescription("sources", "the record is no object", "write records as `{…}`"),
    "too_deep": ReasonDescription(
        "sources", "JSON is nested deeper than can be read back", "flatten the record, or leave the column out"
    ),
    "blank": ReasonDescription(
        "sources",
        "the line, paragraph or document of a text file is white space alone; does not count as a reject in the check",
        "nothing; `source.sample_by` says what a text is",
    ),
    "unknown_schema": ReasonDescription(
        "rows",
        "the columns are of no known shape, or of another one than `format.dataset_schema` names",
        "name the columns in `format.messages_field` or `format.prompt_fields` and `format.response_fields`",
    ),
    "missing_field": ReasonDescription(
        "rows", "a column that the recipe names is absent or null", "correct the name, or leave such records out"
    ),
    "bad_messages": ReasonDescription(
        "rows",
        "the messages are no list of mappings, each with a role",
        "name the role's key in `format.role_field`, or mend the records",
    ),
    "empty_conversation": ReasonDescription(
        "rows", "there are no messages, or nothing but reasoning", "leave such records out"
    ),
    "empty_assistant": ReasonDescription(
        "rows",
        "a message of the model has no text, call or reasoning",
        "mend the records, or check `reasoning.think_mode` if it had only reasoning",
    ),
    "content_not_text": ReasonDescription(
        "rows", "content is neither text nor a list of parts", "turn it into text where the data is made"
    ),
    "multimodal_content": ReasonDescription(
        "rows",
        "a part is an image, sound, video or file, or a placeholder such as `<image>` stands for one in a column",
        "leave such records out",
    ),
    "unknown_content_part": ReasonDescription(
        "rows", "a typed part is of an unknown type or without text", "use parts of type text, reasoning or tool_call"
    ),
    "unclosed_think": ReasonDescription(
        "rows",
        "reasoning opens the message and is never closed: the text was cut off",
        "generate the row again, or set `reasoning.extract_think_tags: false` if the tag is meant as text",
    ),
    "orphan_think": ReasonDescription(
        "rows",
        "a message of reasoning has no answer after it",
        "leave such records out, or set `reasoning.think_role: null` if it is an ordinary role",
    ),
    "unknown_role": ReasonDescription(
        "rows",
        "a role is not known, and `format.unknown_roles` is reject",
        "map it in `format.role_map`, or name it in `format.assistant_roles`",
    ),
    "bad_tools": ReasonDescription(
        "rows", "the tools are no JSON, or one has no name", "mend the column that `tools.tools_fields` finds first"
    ),
    "bad_tool_call": ReasonDescription("rows", "a call is no mapping with a name", "mend the records"),
    "bad_tool_arguments": ReasonDescription(
        "rows",
        "a call's arguments are no JSON object, and the template or `tools.arguments` asks for one",
        "mend the records, or choose a template that prints arguments as text",
    ),
    "flag_conflict": ReasonDescription(
        "rows", "two flags of a message contradict each other", "keep one of them in `format.message_flags`"
    ),
    "bad_weight": ReasonDescription(
        "rows",
        "a weight is negative, no number that a float32 holds, or neither 0 nor 1 without `loss.weights`",
        "use 0 and 1, set `loss.weights: true`, or use another key for what is no loss weight",
    ),
    "bad_system_prompt": ReasonDescription(
        "rows",
        "the column of `format.system_prompt` holds no text, or `format.on_existing_system: reject` met a second one",
        "correct the column, or choose merge, replace or keep",
    ),
    "bad_template_kwargs": ReasonDescription(
        "rows",
        "a row's own template variables are no mapping, or set what is not theirs",
        "mend the column, or name another in `template.chat_template_kwargs`",
    ),
    "empty_text": ReasonDescription("rows", "the document or response is blank", "leave such records out"),
    "too_short": ReasonDescription(
        "rows", "the document is shorter than `filters.min_chars`", "lower it if that is not meant"
    ),
    "too_long": ReasonDescription(
        "rows", "the document is longer than `filters.max_chars`", "raise it if that is not meant"
    ),
    "duplicate": ReasonDescription(
        "rows", "an earlier row has the same content", "set `filters.deduplicate: off` if copies are meant"
    ),
    "skipped_by_format": ReasonDescription(
        "rows", "a class of yours returned nothing for the record", "nothing, if it is meant"
    ),
    "format_error": ReasonDescription(
        "rows", "a class of yours raised an exception, or returned no row", "mend the class; the detail has its words"
    ),
    "bad_example": ReasonDescription(
        "rows",
        "a class of yours built unknown ids, unequal lengths, or a mask of other values than 0 and 1",
        "mend its `build`",
    ),
    "group_missing": ReasonDescription(
        "splits", "the column of `splits.group_key` is absent or null", "mend it, or name another"
    ),
    "order_missing": ReasonDescription(
        "splits", "the column of the row's time is absent or null", "mend it, or name another"
    ),
    "order_unparsable": ReasonDescription(
        "splits", "the row's time is neither ISO 8601 nor a number as the boundaries are", "write times in one way"
    ),
    "split_gap": ReasonDescription(
        "splits", "the row's time lies in the gap before a boundary", "lower `splits.gap` if that is not meant"
    ),
    "straddles_split": ReasonDescription(
        "splits",
        "the row's group lies on both sides of a boundary",
        "set `splits.straddle: later` to keep such groups whole",
    ),
    "template_error": ReasonDescription(
        "masks",
        "the chat template refused the row, or ran away on it; the detail has its message",
        "choose another `template.chat_template`, or leave such rows out",
    ),
    "content_dropped": ReasonDescription(
        "masks",
        "the template does not print some of the row's own text; the detail has the kinds",
        "choose another template, or set `template.on_dropped` for the kind to count or untrain",
    ),
    "span_not_found": ReasonDescription(
        "masks",
        "the template reads the row's own text, so that its place in the render can be neither found nor proven",
        "run `rowmill template-report --prove` to see which rows it prints, and choose another template for these",
    ),
    "own_text_untrained": ReasonDescription(
        "masks",
        "text of a trained message lies outside its `{% generation %}` block",
        "set `template.spans: marks`",
    ),
    "foreign_text_trained": ReasonDescription(
        "masks",
        "template text would train that is not known to belong to the model's turn, or text of another message",
        "run `rowmill template-report --prove`, and choose another template for these rows; "
        "rows of other shapes are not affected",
    ),
    "assistant_untrained": ReasonDescription(
        "masks",
        "a message that should train has no trained token: nothing of it is printed, or it lies outside the template's "
        "`{% generation %}` blocks",
        "choose a template that prints it, such as reasoning without an answer; for blocks set `template.spans: marks`",
    ),
    "reasoning_not_located": ReasonDescription(
        "masks",
        "reasoning is printed where its end cannot be told, and `loss.think_loss` must tell it from the answer",
        "set `reasoning.extract_think_tags: true`, or `loss.think_loss: all`",
    ),
    "render_mismatch": ReasonDescription(
        "masks",
        "the template prints another text when it is watched, since it reads its own output; or the row's text is "
        "found elsewhere than it is proven to be",
        "choose another template",
    ),
    "control_token_in_content": ReasonDescription(
        "masks",
        "text of the row would become a control token, or `template.control_tokens` is reject",
        "set `template.control_tokens: as_text`, or clean the text",
    ),
    "offsets_degenerate": ReasonDescription(
        "masks",
        "the tokenizer cannot say which characters a token covers",
        "use a tokenizer whose normaliser keeps lengths, or one without trimmed offsets",
    ),
    "no_assistant": ReasonDescription(
        "lengths", "no message is the model's", "name its role in `format.assistant_roles`, or leave such rows out"
    ),
    "no_loss_tokens": ReasonDescription(
        "lengths",
        "nothing of the row trains: by its flags, by the group `loss`, or after truncation",
        "check flags and `loss.mask`, or raise `truncation.max_length`",
    ),
    "overlong": ReasonDescription(
        "lengths",
        "the row is too long, and `truncation.overlong` is drop",
        "raise `truncation.max_length`, or truncate",
    ),
    "overlong_after_structure": ReasonDescription(
        "lengths",
        "the row is too long when all structure is cut, and `truncation.token_cut` is reject",
        "raise `truncation.max_length`, or set `truncation.token_cut: allow`",
    ),
    "type_mismatch": ReasonDescription(
        "records",
        "a value does not fit its column's type in the table contract; the detail has both",
        "mend the value, or say in the contract what it is: another type, an `na` word, or `on_mismatch: na`",
    ),
    "unserialisable": ReasonDescription(
        "records", "a value of the record has no exact text", "write it in a type that the codec knows"
    ),
    "record_overflow": ReasonDescription(
        "records", "a single record is longer than an example may be", "raise the limit, or drop long fields"
    ),
    "group_overflow": ReasonDescription(
        "records", "a group's records do not fit into one example", "raise the limit, or allow fewer of them"
    ),
    "number_too_large": ReasonDescription(
        "generated",
        "a number has over 4,300 digits, or is beyond what its column holds",
        "train longer, or sample cooler",
    ),
    "duplicate_column": ReasonDescription(
        "generated",
        "a key stands twice in one object, in a records dataset's JSON or in generated text",
        "write each key once; of generated text train longer, or sample cooler",
    ),
    "unknown_column": ReasonDescription(
        "generated", "a key is no column of the dataset; `detail` names it", "train longer, or sample cooler"
    ),
    "missing_column": ReasonDescription(
        "generated", "a column that every record has is absent", "train longer, or see that texts are not cut"
    ),
    "null": ReasonDescription(
        "generated", "a column is null that has no nulls in the data", "train longer, or sample cooler"
    ),
    "type": ReasonDescription("generated", "a value is not of its column's type", "train longer, or sample cooler"),
    "timestamp": ReasonDescription(
        "generated",
        "the order column's value cannot be read as the data's are",
        "train longer, or check `time_series.timestamp_format`",
    ),
    "group_incomplete": ReasonDescription(
        "generated",
        "the object stands in a piece of text without the delimiters of a group",
        "raise the tokens that a completion may have, or set `validation.group_by_accept_no_delineator`",
    ),
    "group_has_invalid": ReasonDescription(
        "generated",
        "the object is a record, but another of its group is none",
        "mend the other's reason, or set `validation.group_by_ignore_invalid_records`",
    ),
    "group_mixed_key": ReasonDescription(
        "generated",
        "the records of the group, or series, have different keys",
        "train longer, or set `validation.group_by_fix_non_unique_value`",
    ),
    "group_unordered": ReasonDescription(
        "generated",
        "the records of the group are not in order",
        "train longer, or set `validation.group_by_fix_unordered_records`",
    ),
    "step": ReasonDescription(
        "generated", "the time is not the interval after the one before", "train longer, or sample cooler"
    ),
    "order": ReasonDescription("generated", "the time is before the one before", "train longer, or sample cooler"),
    "after_failure": ReasonDescription(
        "generated", "the object comes after the first bad one of its series, or after its end", "mend the first one"
    ),
    "not_chosen": ReasonDescription(
        "generated", "another sample of the round had more valid records", "lower `generation.samples_per_prompt`"
    ),
    "past_stop": ReasonDescription(
        "generated", "the record lies behind the end of its series", "nothing; the series is complete"
    ),
    "past_bound": ReasonDescription(
        "generated", "there are as many records as were wanted", "raise `generation.max_records_per_group`, or nothing"
    ),
    "series_incomplete": ReasonDescription(
        "generated",
        "the record's series failed before its end",
        "raise `generation.patience`, or set `generation.on_failed_group: keep`",
    ),
}
"""Reason → its words, in the order in which a row can meet them."""


def format_reasons_page() -> list[str]:
    """Return the lines of tables of all reasons, by what they are of."""
    titles = {
        "sources": "Records that cannot be read",
        "rows": "Rows",
        "splits": "Splits",
        "masks": "Templates, masks and tokens",
        "lengths": "Lengths and targets",
        "records": "Records of tables",
        "generated": "Generated text",
    }
    lines: list[str] = []
    for of, title in titles.items():
        own = {
            reason: words
            for reason, words in REASON_DESCRIPTIONS.items()
            if words.of == of and reason in REJECT_REASONS
        }
        if own:
            lines += [f"## {title}", "", "| reason | what it means | what to do |", "|---|---|---|"]
            lines += [f"| `{reason}` | {words.what} | {words.remedy} |" for reason, words in own.items()]
            lines.append("")
    return lines
