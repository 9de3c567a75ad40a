"""The options of records: rows of a table, each one JSON object; alone, in groups, or in series."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import pyarrow as pa
from pydantic import BeforeValidator, field_validator, model_validator

from rowmill.core.config import Config
from rowmill.core.errors import join_choices
from rowmill.core.json import Json
from rowmill.kinds.base import DatasetKind, DatasetOptions
from rowmill.kinds.reading.canonicalization import PREFERENCE_COLUMNS
from rowmill.kinds.shared.filters import REMOVAL_FILTERS
from rowmill.kinds.shared.messages import PAIR_COLUMNS, PRINTED_MESSAGES, is_list, is_mapping
from rowmill.kinds.shared.samples import Recognition, Sample
from rowmill.kinds.tables.counts import CHECKS, count_table_rows
from rowmill.kinds.tables.generation import Generation
from rowmill.kinds.tables.schema import Mode
from rowmill.kinds.tables.serialization import Codec
from rowmill.kinds.tables.table_contract import TableContract
from rowmill.schema.checks import Check
from rowmill.schema.counts import Counts
from rowmill.schema.rows import RowKind

DEFAULT_CAP = 10
"""Records (or groups) per example if `max_sequences_per_example` is `auto`."""
DP_CAP = 1
"""The same under differential privacy: a privacy unit is in one example only."""
DEFAULT_SAMPLE_SIZE = 25_000
"""Records shown if `num_input_records_to_sample` is `auto`."""


def _require_value(allowed: str, accepts: Callable[[Json], bool]) -> BeforeValidator:
    """Return a validator whose error names everything that is allowed: a union would report one error per member."""

    def check(value: Json) -> Json:
        if not accepts(value):
            raise ValueError(f"expected {allowed}; got {value!r}; correct it")
        return value

    return BeforeValidator(check)


def _is_count(value: Json) -> bool:
    return type(value) is int and value >= 1


def _is_text(value: Json) -> bool:
    return type(value) is str and bool(value)


def _is_number(value: Json) -> bool:
    return type(value) in (int, float)


ColumnName = Annotated[str, _require_value("a column's name", _is_text)]


class FileGroups(Config):
    """Groups by source file."""

    file: bool
    """Whether each file of the source is a group; false: the rows of all files form one series."""


def _is_grouping(value: Json) -> bool:
    if type(value) is dict:
        return list(value) == ["file"] and type(value["file"]) is bool
    return value is None or _is_text(value) or (type(value) is list and bool(value) and all(map(_is_text, value)))


GroupChoice = Annotated[
    str | list[str] | FileGroups | None,
    _require_value("a column's name, a list of them, {file: true}, or null", _is_grouping),
]
OptionalColumnName = Annotated[
    str | None, _require_value("a column's name or null", lambda value: value is None or _is_text(value))
]
AutoCountChoice = Annotated[
    Literal["auto"] | int | None,
    _require_value('"auto", null or an integer >= 1', lambda value: value in (None, "auto") or _is_count(value)),
]
OptionalCount = Annotated[
    int | None, _require_value("null or an integer >= 1", lambda value: value is None or _is_count(value))
]
TokenChoice = Annotated[
    str | int,
    _require_value(
        '"auto", a token\'s text, or an id >= 0', lambda value: _is_text(value) or (type(value) is int and value >= 0)
    ),
]
TimestampChoice = Annotated[
    str | int | float | None,
    _require_value("text, a number or null", lambda value: value is None or _is_text(value) or _is_number(value)),
]


class RecordData(Config):
    """Which columns group and order the records, and how many records are in an example."""

    group_training_examples_by: GroupChoice = None
    """Column, or columns, whose equal values make a group; a group stays together. `{file: true}`: each file of the
    source is a group, or a series; `{file: false}`: a series continues from file to file, in their order."""
    order_training_examples_by: OptionalColumnName = None
    """Column that orders the records of a group; needs a group or `is_timeseries`."""
    max_sequences_per_example: AutoCountChoice = "auto"
    """Maximum records (grouped: groups) per example; `auto`: 10, under differential privacy 1; null: no maximum."""

    @field_validator("group_training_examples_by")
    @classmethod
    def _check_group_columns(cls, names: GroupChoice) -> GroupChoice:
        if isinstance(names, list) and len(set(names)) < len(names):
            raise ValueError(f"{names} names a column twice; columns must be unique; delete one")
        return names


class Privacy(Config):
    """Whether training is differentially private, which limits how often a unit is shown."""

    dp_enabled: bool = False
    """One privacy unit (a group if grouped, else a record) per example, one example per sequence, each shown at most
    once."""


class RecordTraining(Config):
    """How many records are shown."""

    num_input_records_to_sample: AutoCountChoice = None
    """Training records to show, by repeated passes over them; `auto`: 25,000; null: each once."""


class TimeSeries(Config):
    """Whether records are time series, and how their times are read."""

    is_timeseries: bool = False
    """Whether each group is a series: one group per example, in order."""
    timestamp_column: OptionalColumnName = None
    """Alias of `data.order_training_examples_by`."""
    timestamp_interval_seconds: Annotated[
        int | float | None,
        _require_value("null or a number > 0", lambda value: value is None or (_is_number(value) and value > 0)),
    ] = None
    """Seconds between two records of a series; null: the data's interval, if it is constant."""
    timestamp_format: ColumnName = "auto"
    """`auto` (the one known format that reads every value), `iso8601`, `elapsed_seconds`, or strptime text."""
    start_timestamp: TimestampChoice = None
    """Start time of generated series; null: the start of each group."""
    stop_timestamp: TimestampChoice = None
    """End time of generated series; null: the end of each group."""


class Assembly(Config):
    """How long an example of records may be."""

    max_seq_length: OptionalCount = None
    """Maximum tokens of an example; null: the recipe's `seq_len`, which is the upper limit."""
    on_overflow: Literal["error", "reject", "split"] = "error"
    """What happens to a record or group that does not fit into any example: stop before anything is written, reject it,
    or (grouped only) cut the group between records."""


class Prompt(Config):
    """The text before the records of an example."""

    style: Literal["keys", "names", "reference"] = "keys"
    """`keys`: a sentence with the quoted column names; `names`: the names; `reference`: Safe Synthesizer's wording."""
    template: Annotated[
        str | None,
        _require_value(
            "text with {schema}, or null", lambda value: value is None or (_is_text(value) and "{schema}" in value)
        ),
    ] = None
    """A custom prompt; `{schema}` is replaced by the columns, written according to `style`."""
    add_bos: Literal["auto"] | bool = "auto"
    """Whether the tokenizer's BOS starts the prompt; auto: if the tokenizer adds it itself."""
    add_eos: Literal["auto"] | bool = "auto"
    """Whether the tokenizer's EOS ends the prompt; auto: no."""


class Delimiters(Config):
    """The tokens around every unit of records."""

    bos: TokenChoice = "auto"
    """Token before a unit, as text or id; auto: `<|im_start|>`, else the tokenizer's BOS."""
    eos: TokenChoice = "auto"
    """Token after a unit, as text or id; auto: `<|im_end|>`, else the tokenizer's EOS."""


_SERIES_OPTIONS = ("timestamp_interval_seconds", "start_timestamp", "stop_timestamp")


TELLING_COLUMNS = frozenset(
    {
        *PREFERENCE_COLUMNS - {"label"},
        *(name for pair in PAIR_COLUMNS for name in pair if name not in ("source", "target", "user", "code")),
        *("messages", "conversations", "conversation", "role", "from", "system", "system_prompt", "context", "history"),
        *("text", "tools", "functions", "parent_id"),
    }
)
"""Columns whose names belong to conversations, pairs, preferences or prompts."""

LONG_TEXT_CHARS = 120
"""Texts of this many characters on average are no values of a table."""

LEAST_WORDS = 4
"""Texts of this many words on average are sentences, which a table may have in one column."""


class RecordOptions(DatasetKind):
    """The options of the kind `records`, which its own modules read."""

    MEANT_BY: ClassVar = ("csv", "table", "tabular")

    ROW_KIND: ClassVar[RowKind] = "record"
    GROUPS: ClassVar[frozenset[str]] = frozenset({"filters", "splits", "packing"})
    FIELDS_NOT_READ: ClassVar[Mapping[str, frozenset[str]]] = {
        "filters": frozenset({"min_chars", "max_chars"}) | REMOVAL_FILTERS,
        "packing": frozenset({"slice_strategy", "tail", "ignore_token_id"}),
        "splits": frozenset({"gap", "crossing_groups"}),
    }

    WRITES_ALL_COLUMNS: ClassVar[bool] = True
    WORKER_MODULES: ClassVar[tuple[str, ...]] = ("polars",)
    FITS_MOST_RECORDS: ClassVar[bool] = True
    PRECEDENCE: ClassVar[int] = 90
    CHECKS: ClassVar[tuple[Check, ...]] = CHECKS

    kind: Literal["records"] = "records"
    """Rows of tables, in tabular, grouped or sequential mode; the mode follows from the options."""
    data: RecordData = RecordData()
    """Groups, order, records per example."""
    table: TableContract | None = None
    """The table contract: columns, types, texts for missing values, signs. Null: the contract in
    `<recipe>/<dataset>.table.yaml` next to the recipe, if the file exists; otherwise the first build's contract, which
    later builds are checked against."""
    privacy: Privacy = Privacy()
    """Differential privacy."""
    training: RecordTraining = RecordTraining()
    """How many records are shown."""
    time_series: TimeSeries = TimeSeries()
    """Time series."""
    assembly: Assembly = Assembly()
    """Lengths of examples."""
    codec: Codec = Codec()
    """The text of a record."""
    prompt: Prompt = Prompt()
    """The text before the records."""
    tokens: Delimiters = Delimiters()
    """The tokens around the records."""
    generation: Generation | None = None
    """How records are generated with a trained model, and how its texts are parsed; null: not at all."""
    domain_key: OptionalColumnName = None
    """Column that names the row's domain; a row without text there is in `__default__`."""

    @classmethod
    def recognise(cls, sample: Sample) -> Recognition | None:
        """Recognise rows of single values: the last resort, since any file of texts would be a table.

        A file that is no table by its kind is one only if no column is long text and none has a name of another kind.
        One that is may have either, but not both.
        """
        records, columns = sample.whole, sample.columns
        flat = [
            record for record in records if not any(is_list(value) or is_mapping(value) for value in record.values())
        ]
        if not flat or not columns:
            return None
        told = sorted(name for name in columns if name.lower() in TELLING_COLUMNS)
        long: list[str] = []
        sentences: list[str] = []
        for name in columns:
            texts = [value for record in flat if type(value := record.get(name)) is str]
            if texts and sum(map(len, texts)) > LONG_TEXT_CHARS * len(texts):
                long.append(name)
            if texts and sum(text.count(" ") for text in texts) >= (LEAST_WORDS - 1) * len(texts):
                sentences.append(name)
        problem = ""
        # A table has short texts under names like these, such as `text`; a file of conversations has long ones. Two
        # columns of sentences may be a text and its translation, or whatever else a model reads and writes.
        is_text = len(sentences) > 1 or len(sentences) == len(columns)
        if (told and long) if sample.is_table_file else (told or long or is_text):
            what = f"{told[0]} is a name" if told else f"{(long or sentences)[0]} is text, as"
            problem = f"{what} of prompts, answers or documents, so that it is a table only if the recipe says so"
        if held := [
            name
            for name in columns
            if sample.is_mostly(
                type(text := one.get(name)) is str and bool(PRINTED_MESSAGES.match(text)) for one in flat
            )
        ]:
            problem = f"{held[0]} holds the text of messages, so that it is a table only if the recipe says so"
        notes = [
            f"records: each of the {len(columns)} columns holds single values in {len(flat)} of {len(records)} records",
            "where rows belong together, name their column: data: {group_training_examples_by: COLUMN}",
        ]
        return Recognition(
            {"kind": "records"},
            len(flat),
            len(records),
            len(sample.records),
            problem=problem,
            notes=notes,
            precedence=cls.PRECEDENCE,
        )

    def count_rows(self, rows: pa.Table) -> Sequence[Counts]:
        """Count the characters of the records."""
        return [count_table_rows(rows)]

    @property
    def mode(self) -> Mode:
        """How examples are assembled; computed from the options."""
        if self.time_series.is_timeseries:
            return "sequential"
        return "grouped" if self.has_keys else "tabular"

    @property
    def has_keys(self) -> bool:
        """Whether the records have group keys, from columns or from files; those of a lone series have none."""
        return bool(self.group_columns) or self.is_grouped_by_file

    @property
    def is_grouped_by_file(self) -> bool:
        """Whether each source file is a group."""
        names = self.data.group_training_examples_by
        return isinstance(names, FileGroups) and names.file

    @property
    def group_columns(self) -> tuple[str, ...]:
        """The columns of the group's key, none without groups and for groups by file."""
        names = self.data.group_training_examples_by
        if names is None or isinstance(names, FileGroups):
            return ()
        return (names,) if isinstance(names, str) else tuple(names)

    @property
    def order_column(self) -> str | None:
        """The column that orders records, if one does."""
        return self.data.order_training_examples_by or self.time_series.timestamp_column

    @property
    def leading_columns(self) -> tuple[str, ...]:
        """The columns that come first in a record's text: for a series, the group's, then the order's."""
        if self.mode != "sequential":
            return ()
        return (*self.group_columns, *([self.order_column] if self.order_column is not None else []))

    @property
    def cap(self) -> int | None:
        """Maximum records, or groups, per example."""
        given = self.data.max_sequences_per_example
        return (DP_CAP if self.privacy.dp_enabled else DEFAULT_CAP) if given == "auto" else given

    @property
    def wanted(self) -> int | None:
        """Training records to show; None: each once."""
        given = self.training.num_input_records_to_sample
        return DEFAULT_SAMPLE_SIZE if given == "auto" else given

    @classmethod
    def select_group_defaults(
        cls, options: Mapping[str, Any], groups: Mapping[str, Any]
    ) -> Mapping[str, Mapping[str, Any]]:
        """Keep equal rows, which are separate observations, and hold out a test split.

        Splits in time have no shares, and private examples are not packed.
        """
        own: dict[str, Mapping[str, Any]] = {"filters": {"deduplicate": "off"}}
        splits: Any = groups.get("splits")
        if not isinstance(splits, dict) or splits.get("time_key") is None:
            own["splits"] = {"validation": 0, "test": 0.05}
        privacy: Any = options.get("privacy")
        if isinstance(privacy, dict) and privacy.get("dp_enabled") is True:
            own["packing"] = {"pack": False}
        return own

    def check_options(self, options: DatasetOptions) -> None:
        """Require splits that respect groups, and one sequence per private example."""
        splits, columns = options.splits, self.group_columns
        asked = (splits.group_key,) if isinstance(splits.group_key, str) else splits.group_key
        if self.mode != "tabular" and (asked not in (None, columns) or splits.time_key is not None):
            raise ValueError(
                f"splits.{'group_key' if asked not in (None, columns) else 'time_key'}: in {self.mode} mode a split "
                f"takes complete groups of {join_choices(columns) or 'one series'}; no other key is allowed; delete it"
            )
        if splits.is_exact and splits.time_key is not None:
            raise ValueError(
                "splits.time_key with a number of rows or method: exact; only one can decide; delete one of them"
            )
        if self.privacy.dp_enabled and options.packing.pack is not False:
            raise ValueError(
                f"packing.pack: {str(options.packing.pack).lower()} under format.privacy.dp_enabled; one example per "
                "sequence is allowed, so that a sequence holds one privacy unit; set it to false, or delete it"
            )

    def get_length_limit(self, options: DatasetOptions) -> tuple[str, int | None]:
        """Return the option that limits an example of records, and its value."""
        return "format.assembly.max_seq_length", self.assembly.max_seq_length

    def has_groups(self, options: DatasetOptions) -> bool:
        """Return whether the records have groups, by `splits` or by `data`."""
        return super().has_groups(options) or self.has_keys

    @model_validator(mode="after")
    def _check_columns(self) -> "RecordOptions":
        order, alias = self.data.order_training_examples_by, self.time_series.timestamp_column
        name = "data.order_training_examples_by" if order is not None else "time_series.timestamp_column"
        if order is not None and alias is not None and order != alias:
            raise ValueError(
                f"data.order_training_examples_by is {order!r} and time_series.timestamp_column {alias!r}; they are "
                "the same option; keep one of them"
            )
        if self.order_column is not None and self.mode == "tabular":
            raise ValueError(
                f"{name}: {self.order_column!r} without a group; rows of a table have no order; set "
                "data.group_training_examples_by or time_series.is_timeseries, or delete it"
            )
        if self.order_column is not None and self.order_column in self.group_columns:
            raise ValueError(
                f"data: {self.order_column!r} is both group and order column; a column is one of them; choose another"
            )
        table = self.table
        # A contract for other groups or another order, or without their columns, is refused.
        for name, own, wanted in (
            ("group", table and table.group, self.group_columns or None),
            ("order", table and table.order, self.order_column),
        ):
            if own is not None and own != wanted:
                option = "group_training_examples_by" if name == "group" else "order_training_examples_by"
                raise ValueError(
                    f"table.{name}: {own!r}, but data.{option} is {wanted!r}; a contract holds only for its group and "
                    "order; correct one of them"
                )
        for column in (*self.group_columns, *([self.order_column] if self.order_column is not None else [])):
            if table is not None and column not in table.used:
                raise ValueError(
                    f"table.columns: {column!r} groups or orders the records, and the contract has no such column in "
                    f"use; it has {', '.join(table.used) or 'none'}; add it, or name another column"
                )
        times = self.time_series
        if not times.is_timeseries:
            given = [name for name in _SERIES_OPTIONS if getattr(times, name) is not None]
            given += [] if times.timestamp_format == "auto" else ["timestamp_format"]
            if given:
                raise ValueError(
                    f"time_series.{given[0]} without is_timeseries; it is about the times of series; set "
                    "is_timeseries: true, or delete it"
                )
            return self
        for name in _SERIES_OPTIONS:
            if getattr(times, name) is not None and self.order_column is None:
                raise ValueError(
                    f"time_series.{name} without an order column; without one there are no times; set "
                    "data.order_training_examples_by, or delete it"
                )
        return self

    @model_validator(mode="after")
    def _check_overflow_and_privacy(self) -> "RecordOptions":
        if self.assembly.on_overflow == "split" and self.mode != "grouped":
            raise ValueError(
                f"assembly.on_overflow: split in {self.mode} mode; only groups can be cut between records; choose "
                "error or reject"
            )
        if not self.privacy.dp_enabled:
            return self
        cap = self.data.max_sequences_per_example
        if cap not in ("auto", DP_CAP):
            raise ValueError(
                f"data.max_sequences_per_example: {'null' if cap is None else cap} under privacy.dp_enabled; a unit of "
                'privacy has its own example, so only "auto" or 1 is allowed; delete it'
            )
        if self.assembly.on_overflow == "split":
            raise ValueError(
                "assembly.on_overflow: split under privacy.dp_enabled; a group may be used only once; choose error or "
                "reject"
            )
        # Training data must not be published, which includes the start and end times of series.
        if self.generation is None:
            return self
        if self.generation.prefill == "records":
            raise ValueError(
                "generation.prefill: records under privacy.dp_enabled; it would show the model, and whoever reads its "
                "prompts, real records; auto and partial show none; choose one of them"
            )
        for name in ("start_timestamp", "stop_timestamp") if self.mode == "sequential" and self.order_column else ():
            if getattr(self.time_series, name) is None:
                raise ValueError(
                    f"time_series.{name}: null under privacy.dp_enabled; each group's own time would be published; "
                    "set it"
                )
        return self


def require_records(dataset: DatasetOptions) -> RecordOptions:
    """Return the kind of a dataset that is known to hold records."""
    return cast("RecordOptions", dataset.format)
