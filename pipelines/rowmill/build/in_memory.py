"""Tokenizes rows in memory, in the user's own program: the same ids and masks as in a build.

Files of Datums from a build are an export (`exports/tinker.py`).

    row ──canonicalisation──► ──rendering, mask, truncation──► Tokens ──shift──► Datum

    ids      10 20 30 40 50        model_input    10 20 30 40
    mask      0  0  1  1  1        target_tokens  20 30 40 50
                                   weights         0  1  1  1
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import make_column
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json, find_lone_surrogate
from rowmill.kinds.reading.canonicalization import Canonicalizer, hash_row_content, row_to_json
from rowmill.recipe import recipe
from rowmill.schema.examples import WEIGHT_COLUMN, ExampleTokens
from rowmill.schema.rows import ROW_SCHEMA, Rejected, Row, make_row_schema
from rowmill.stages.tokenized_examples.stage import build_renderer_spec
from rowmill.stages.tokenized_examples.text_parts import ExampleBuilder
from rowmill.tokenization.encoded_batch import PartTally
from rowmill.tokenization.tokenizer import Encoder, open_tokenizer, wrap_tokenizer

Supervise = Literal["all_assistant", "last_assistant", "last_turn"]
Reduction = Literal["none", "mean"]

MIN_DATUM_TOKENS = 2
"""Minimum tokens of a Datum: one token predicts the next."""


@dataclass(frozen=True, slots=True)
class Datum:
    """A shifted example: `model_input` and `target_tokens` int64[T − 1], `weights` float32[T − 1]."""

    model_input: NDArray[np.int64]
    target_tokens: NDArray[np.int64]
    weights: NDArray[np.float32]


def make_datum(
    ids: Sequence[int],
    loss_mask: Sequence[bool],
    *,
    loss_weights: Sequence[float] | None = None,
    reduction: Reduction = "none",
) -> Datum | None:
    """Shift an example by one; return None if it has fewer than two tokens or no target.

    Weights are the mask, or `loss_weights` if given. `reduction: mean` divides them so that they add up to 1, negative
    ones taken as positive.
    """
    weights = np.asarray(loss_mask if loss_weights is None else loss_weights, np.float32)[1:]
    total = float(np.abs(weights).sum(dtype=np.float64))
    if len(ids) < MIN_DATUM_TOKENS or total <= 0:
        return None
    tokens = np.asarray(ids, np.int64)
    return Datum(tokens[:-1], tokens[1:], (weights / total).astype(np.float32) if reduction == "mean" else weights)


def make_datums(examples: Iterable[ExampleTokens], *, reduction: Reduction = "none") -> tuple[list[Datum], int]:
    """Shift examples by one; return the Datums, and the number of examples without a target."""
    made = [_shift_example(example, reduction) for example in examples]
    kept = [one for one in made if one is not None]
    return kept, len(made) - len(kept)


def canonicalize_rows(
    rows: Iterable[Mapping[str, Json]], *, options: Mapping[str, Any] | None = None
) -> list[Row | Rejected]:
    """Return each record's canonical row or reject; `options` as for `sft_tokenize`.

    Raises
    ------
    ConfigError
        If the options are wrong.

    """
    # A context length is required, but has no effect before tokenization.
    dataset = _parse_dataset(options or {}, MIN_DATUM_TOKENS, Path.cwd())
    canonicalizer = Canonicalizer(dataset)
    return [_reject_lone_surrogate(row) or canonicalizer(row) for row in rows]


def sft_tokenize(
    rows: Iterable[Mapping[str, Json]],
    tokenizer: Any,
    *,
    max_seq_len: int,
    enable_thinking: bool | None = None,
    supervise: Supervise = "all_assistant",
    options: Mapping[str, Any] | None = None,
) -> list[list[ExampleTokens] | Rejected]:
    """Return the examples of each row, as a build makes them, or its reject.

    `tokenizer` is a fast tokenizer of `transformers`, or its folder or name. `options` are option groups of a dataset
    as in a recipe (`{"format": {"kind": "chat"}, "reasoning": {"think_mode": "drop"}}`). Duplicate rows are not
    removed.

    Raises
    ------
    ConfigError
        If the options are wrong, if rows of the kind have no single example with targets (preferences, prompts,
        tables), or if the tokenizer has no chat template and none is named.

    """
    canonicalize, builder, own_columns = _open_pipeline(
        tokenizer, max_seq_len, options or {}, enable_thinking, supervise
    )
    outcomes: list[Any] = []
    values: list[tuple[Any, ...]] = []
    kept: list[Row] = []
    for record in rows:
        row = _reject_lone_surrogate(record) or canonicalize(record)
        stored = row_to_json(row) if isinstance(row, Row) else row
        outcomes.append(stored if isinstance(stored, Rejected) else row)
        if isinstance(row, Row) and not isinstance(stored, Rejected):
            *texts, content = stored
            values.append(
                (str(len(kept)), row.kind, "train", None, hash_row_content(row), *texts,
                 row.report.extracted_think_from_content, row.text, row.output, content)
            )  # fmt: skip
            kept.append(row)
    if not kept:
        return outcomes
    table = pa.table([*zip(*values, strict=True)], schema=_READ_SCHEMA)
    for field in own_columns:
        table = table.append_column(field, make_column([row.columns.get(field.name) for row in kept], field.type))
    built = builder.build(table, PartTally())
    rejected, examples = dict(built.rejected), built.examples
    ends = np.cumsum(examples.column("tokens").to_numpy())
    columns = [
        np.split(examples.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False), ends[:-1])
        for name in ("input_ids", "loss_mask", WEIGHT_COLUMN)
        if name in examples.column_names
    ]
    made = list(map(ExampleTokens, *columns))
    # Kept rows are numbered in their order, and the examples of each follow each other.
    begins = np.searchsorted(built.places, np.arange(len(kept) + 1)).tolist()
    places = [place for place, row in enumerate(outcomes) if isinstance(row, Row)]
    for number, place in enumerate(places):
        outcomes[place] = rejected.get(number) or made[begins[number] : begins[number + 1]]
    return outcomes


def row_to_datum(
    row: Mapping[str, Json],
    tokenizer: Any,
    *,
    max_seq_len: int,
    enable_thinking: bool | None = None,
    supervise: Supervise = "all_assistant",
    options: Mapping[str, Any] | None = None,
    reduction: Reduction = "none",
) -> Datum | None:
    """Return the first Datum of one row, or None if it is rejected or has no target (`sft_tokenize` says why)."""
    (made,) = sft_tokenize(
        [row],
        tokenizer,
        max_seq_len=max_seq_len,
        enable_thinking=enable_thinking,
        supervise=supervise,
        options=options,
    )
    if isinstance(made, Rejected):
        return None
    return _shift_example(made[0], reduction)


def _shift_example(one: ExampleTokens, reduction: Reduction) -> Datum | None:
    weights = None if one.loss_weights is None else one.loss_weights.tolist()
    return make_datum(one.ids.tolist(), one.loss_mask.tolist(), loss_weights=weights, reduction=reduction)


def _parse_dataset(groups: Mapping[str, Any], max_seq_len: int, base: Path) -> recipe.Dataset:
    values = {
        "tokenizer": "given",
        "seq_len": max_seq_len,
        "datasets": {
            "rows": {"source": {"train_urls": ["given"]}, **{name: dict(one) for name, one in groups.items()}}
        },
    }
    return recipe.parse_recipe(values, name="rows", where="options", base=base).datasets["rows"]


_READ_COLUMNS = ("row_id", "kind", "split", "domain", "content_hash", "messages", "tools", "template_kwargs",
                 "extracted_think_from_content", "text", "output", "record")  # fmt: skip
_READ_SCHEMA = pa.schema([(name, ROW_SCHEMA.field(name).type) for name in _READ_COLUMNS])
"""The columns of canonical rows that tokenization reads, as a build stores them."""


_Pipeline: TypeAlias = tuple[Canonicalizer, ExampleBuilder, Sequence[pa.Field]]
"""What a build opens for rows of some options, and the columns that only their kind of rows has."""


def _reject_lone_surrogate(row: Mapping[str, Json]) -> Rejected | None:
    """Reject a row with text that is not valid Unicode, as reading a file does."""
    path = find_lone_surrogate(row)
    return None if path is None else Rejected("invalid_json", f"{path} holds a lone surrogate; UTF-8 cannot encode it")


_PIPELINES: "WeakKeyDictionary[Any, dict[str, _Pipeline]]" = WeakKeyDictionary()
_PIPELINES_BY_NAME: dict[str, _Pipeline] = {}


def _open_pipeline(
    tokenizer: Any, max_seq_len: int, options: Mapping[str, Any], enable_thinking: bool | None, supervise: Supervise
) -> _Pipeline:
    """Return a cached pipeline; it is kept as long as its tokenizer, since probing a template takes a second."""
    groups = dict(options)
    if enable_thinking is not None:
        groups["template"] = {**groups.get("template", {}), "enable_thinking": enable_thinking}
    if supervise != "all_assistant":
        groups["loss"] = {**groups.get("loss", {}), "supervise": supervise}
    named = isinstance(tokenizer, str | Path)
    kept = _PIPELINES_BY_NAME if named else _PIPELINES.setdefault(tokenizer, {})
    # A program may change its tokenizer between calls.
    state = str(tokenizer) if named else (tokenizer.chat_template, len(tokenizer))
    key = repr((state, max_seq_len, groups))
    if key in kept:
        return kept[key]
    base = Path.cwd()
    dataset = _parse_dataset({name: dict(values) for name, values in groups.items()}, max_seq_len, base)
    if not dataset.format.predicts_next_token():
        raise ConfigError(
            f"options.format.kind: {dataset.format.get_name()} rows are not examples of next-token training; expected "
            "conversations, pairs, texts or tokens; build a recipe, and read its partitions or an export"
        )
    loaded = open_tokenizer(str(tokenizer), base) if named else wrap_tokenizer(tokenizer)
    spec = build_renderer_spec(dataset, base, loaded)
    builder = ExampleBuilder(Encoder(loaded), dataset, spec, max_seq_len, base=base)
    schema = make_row_schema(dataset.row_kind, dataset.format.get_rollout_fields().columns)
    columns = [schema.field(name) for name in schema.names[len(ROW_SCHEMA) :]]
    kept[key] = (Canonicalizer(dataset), builder, columns)
    return kept[key]
