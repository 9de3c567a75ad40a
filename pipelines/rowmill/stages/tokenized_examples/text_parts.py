"""The work on one part: canonical rows in, examples and their counts out; which builder takes which rows.

    conversation, prompt   fast_path.py for plain ones, conversation_examples.py for all others
    preference             conversation_examples.py, or plain_examples.py for plain text
    pair, text, record, tokens   plain_examples.py

Tokens are handled in columns; there is a Python object per message, never per token.
"""

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.conversation.options import RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_contract import (
    find_mismatched_prompts,
    list_template_warnings,
    observe_template_once,
)
from rowmill.core.arrays import Ints
from rowmill.core.errors import ContextOverflowError
from rowmill.core.stage_names import TOKENIZED_EXAMPLES
from rowmill.core.storage import Store
from rowmill.parts.accounts import RejectLog, count_accounts, row_as_bytes, write_accounts
from rowmill.parts.functions import PartPlace, PartResult, RowFileInputs, part_function
from rowmill.recipe.recipe import Dataset
from rowmill.schema.examples import WEIGHT_COLUMN, count_tokens_by_weight
from rowmill.schema.ledger import sum_counts
from rowmill.schema.rows import EXAMPLE_COLUMNS, ROW_KIND_COLUMNS, Rejected, RowKind
from rowmill.stages.tokenized_examples import prompt_parity
from rowmill.stages.tokenized_examples.conversation_examples import (
    ConversationEncoder,
    ConversationExampleBuilder,
    LengthLimit,
    PreferenceExampleBuilder,
    PromptExampleBuilder,
    RowOutcome,
)
from rowmill.stages.tokenized_examples.fast_path import BatchedChatPath
from rowmill.stages.tokenized_examples.plain_examples import (
    CustomExampleBuilder,
    PlainTextExampleBuilder,
    RawPreferenceExampleBuilder,
    TokenExampleBuilder,
)
from rowmill.stages.tokenized_examples.prompt_parity import PromptComparison
from rowmill.tokenization import encoded_batch
from rowmill.tokenization.encoded_batch import (
    Example,
    ExampleColumns,
    ExampleFields,
    TokenizationCounts,
    make_columns,
    tabulate_examples,
)
from rowmill.tokenization.reference_sample import ReferenceSample
from rowmill.tokenization.stored_tokenizers import keep_latest, open_encoder
from rowmill.tokenization.tokenizer import Encoder

BATCH_CHARS = 1 << 20
"""Characters of rows per batch: enough for the columnar steps, little for memory (some 60 MB)."""


@dataclass(frozen=True, slots=True)
class PreparedExamples:
    """The outcome of a part's rows: examples in `EXAMPLE_SCHEMA`, in row order, and rejects by row.

    `places` int64[E] are the rows of the examples, `on_fast_path` int64[N] the conversations that the fast path built;
    both ascend. `verified` counts examples whose token mask agrees with their spans (`ExampleColumns.count_by_kind`).
    """

    examples: pa.Table
    places: Ints
    on_fast_path: Ints
    rejected: list[tuple[int, Rejected]]
    verified: int


def cut_batches(sizes: Sequence[int], limit: int) -> Iterator[slice]:
    """Cut rows into consecutive batches of about `limit` characters."""
    begin, held = 0, 0
    for i, size in enumerate(sizes):
        held += size
        if held >= limit:
            yield slice(begin, i + 1)
            begin, held = i + 1, 0
    if begin < len(sizes):
        yield slice(begin, len(sizes))


_BuildRows = Callable[[pa.Table, TokenizationCounts], list[RowOutcome]]
"""Builds the examples of each of some rows, and counts what it did."""


class ExampleBuilder:
    """Builds examples from one dataset's rows; opened once per process."""

    def __init__(
        self,
        encoder: Encoder,
        dataset: Dataset,
        spec: RendererSpec | None,
        limit: int,
        *,
        base: Path = Path(),
        vocab_size: int | None = None,
    ) -> None:
        """Open the builder of each kind of rows; without `spec`, conversations have no template and are rejected.

        Ids must be below `vocab_size`, by default the tokenizer's.
        """
        self._dataset = dataset
        fields = dataset.format.get_rollout_fields()
        self._fields = ExampleFields(
            dataset.loss.has_weights,
            dataset.loss.prompt_weight,
            EXAMPLE_COLUMNS.get(dataset.row_kind, ()),
            fields.columns,
            fields.per_token,
        )
        self._open_with = partial(
            ExampleBuilder, dataset=dataset, spec=spec, limit=limit, base=base, vocab_size=vocab_size
        )
        self._encoder = encoder
        self._trains = dataset.format.get_objective() != "prompts"
        length = LengthLimit.of_dataset(dataset, limit)
        plain_texts = PlainTextExampleBuilder(encoder, dataset, length)
        self._steps = None if spec is None else ConversationEncoder.open(encoder, dataset, spec)
        self._fast_paths = {} if self._steps is None else _open_fast_paths(self._steps, length)
        chats = self._fast_paths.get("conversation")
        self._prompts = None if self._steps is None else PromptComparison(self._steps, chats)
        self._builders: Mapping[RowKind, _BuildRows] = {
            "conversation": _build_by_template(ConversationExampleBuilder, self._steps, length),
            "prompt": _build_by_template(PromptExampleBuilder, self._steps, length),
            "preference": _build_by_template(PreferenceExampleBuilder, self._steps, length)
            if dataset.format.uses_template()
            else RawPreferenceExampleBuilder(plain_texts, length).build,
            "pair": plain_texts.build_pairs,
            "text": plain_texts.build_documents,
            "record": CustomExampleBuilder(encoder, dataset, length, base).build,
            "tokens": TokenExampleBuilder(encoder, length, vocab_size or encoder.card.vocab_size, fields).build,
        }

    @cached_property
    def on_reference_path(self) -> "ExampleBuilder":
        """The same builder without a fast engine, for a part in which that gave other ids than the reference."""
        return self._open_with(self._encoder.without_fast_path())

    @property
    def printer(self) -> Renderer | None:
        """The renderer, for inspecting its output."""
        return None if self._steps is None else self._steps.printer

    def prepare(self, table: pa.Table, counts: TokenizationCounts) -> PreparedExamples:
        """Build examples from canonical rows; a row's outcome does not depend on other rows."""
        built: list[ExampleColumns] = []
        fast: list[ExampleColumns] = []
        on_fast_path: list[Ints] = [np.empty(0, np.int64)]
        rejected: list[tuple[int, Rejected]] = []
        counts.template = self._template
        kinds = table.column("kind").to_numpy(zero_copy_only=False)
        for kind, build in self._builders.items():
            places = np.flatnonzero(kinds == kind)
            if not len(places):
                continue
            rows = table if len(places) == table.num_rows else table.take(pa.array(places))
            lengths = np.zeros(rows.num_rows, np.int64)
            for column in ("messages", "tools", "text", "output", "record", "chosen", "rejected"):
                if column not in rows.column_names:
                    continue
                lengths += pc.fill_null(pc.binary_length(rows.column(column)), 0).to_numpy()
            if "input_ids" in rows.column_names:
                # As many bytes as the text of so many tokens has.
                lengths += 4 * pc.list_value_length(rows.column("input_ids")).to_numpy()
            for part in cut_batches(cast("list[int]", lengths.tolist()), BATCH_CHARS):
                some, some_places = rows.slice(part.start, part.stop - part.start), places[part]
                if kind in self._fast_paths:
                    plain = self._fast_paths[kind].take(some, some_places, counts)
                    if plain is not None:
                        fast.append(plain)
                        on_fast_path += [plain.rows] if kind == "conversation" else []
                        left = np.isin(some_places, plain.rows, invert=True)
                        some, some_places = some.filter(pa.array(left)), some_places[left]
                if not len(some_places):
                    continue
                placed: list[tuple[int, int, Example]] = []
                for place, outcome in zip(some_places.tolist(), build(some, counts), strict=True):
                    settled = _require_targets(outcome, counts) if self._trains else outcome
                    if isinstance(settled, Rejected):
                        rejected.append((place, settled))
                    else:
                        placed += [(place, k, example) for k, example in enumerate(settled)]
                built += [make_columns(placed)] if placed else []
        built += fast
        examples, places, verified = tabulate_examples(built, table, self._fields)
        return PreparedExamples(
            examples=examples,
            places=places,
            on_fast_path=np.concatenate(on_fast_path),
            rejected=sorted(rejected, key=itemgetter(0)),
            verified=verified,
        )

    def compare_prompts(self, table: pa.Table, prepared: PreparedExamples, counts: TokenizationCounts) -> None:
        """Encode the generation prompts of some conversations alone, as a server does, and compare."""
        if self._prompts is not None:
            self._prompts.compare(table, prepared.on_fast_path, counts)

    @cached_property
    def _template(self) -> dict[str, Any]:
        if self._steps is None:
            return {}
        contract = observe_template_once(self._steps.printer)
        return {
            "warnings": list_template_warnings(contract, finish=self._dataset.loss.finish),
            "prompts": find_mismatched_prompts(contract),
            "dated": contract.date_dependent,
        }


def _open_fast_paths(encoder: ConversationEncoder, limit: LengthLimit) -> dict[RowKind, BatchedChatPath]:
    """Open the fast path of each kind that has one; rows over the limit leave it again, unless they are kept whole."""
    if encoder.cuts_apart or encoder.bos is not None:
        return {}
    kinds: tuple[RowKind, ...] = ("conversation", "prompt")
    return {
        kind: BatchedChatPath(
            encoder.masker,
            encoder.encoder,
            encoder.control,
            trains=kind == "conversation",
            limit=None if limit.keeps_all(kind) else limit.tokens,
            judge=encoder.judge,
        )
        for kind in kinds
    }


def _build_by_template(
    builder: type[ConversationExampleBuilder], steps: ConversationEncoder | None, limit: LengthLimit
) -> _BuildRows:
    return _reject_without_template if steps is None else builder(steps, limit).build


def _reject_without_template(rows: pa.Table, counts: TokenizationCounts) -> list[RowOutcome]:
    """Reject the conversations of a dataset for which there is no chat template; nothing is counted of them."""
    return [Rejected("template_error", "neither the tokenizer nor the recipe has a chat template")] * rows.num_rows


def _require_targets(outcome: RowOutcome, counts: TokenizationCounts) -> RowOutcome:
    """Reject a row none of whose examples has a trained token; drop its examples that have none."""
    if isinstance(outcome, Rejected):
        return outcome
    trained: list[Example] = []
    for one in outcome:
        if one.mask.any():
            trained.append(one)
        else:
            counts.dropped_tokens += one.original_tokens
            counts.dropped_trained += one.original_trained
    return trained or Rejected("no_loss_tokens", "no trained token is left")


@dataclass(frozen=True, slots=True)
class TokenizeInputs(RowFileInputs):
    """One part of canonical rows to tokenize; `options` identifies everything else that decides its examples.

    `tokenizer` is a file of the store, `renderer` plain data. At least `min_compared_chars` of its texts are compared
    with the reference tokenizer.
    """

    options: str
    tokenizer: str = field(compare=False)
    dataset: Dataset = field(compare=False)
    renderer: RendererSpec | None = field(compare=False)
    limit: int = field(compare=False)
    vocab_size: int = field(compare=False)
    min_compared_chars: int = field(compare=False)
    base: Path = field(compare=False)


READ_COLUMNS = (
    *("row_id", "content_hash", "kind", "split", "domain", "messages", "tools", "template_kwargs"),
    *("extracted_think_from_content", "text", "output", "record"),
)
"""The columns of canonical rows that decide examples, beside those of one kind of rows."""


_MAX_BUILDERS = 8
"""Example builders that a process keeps: those of the datasets that were tried before a build are used by it."""

_EXAMPLE_BUILDERS: dict[str, "ExampleBuilder"] = {}


def _get_example_builder(store: Store, inputs: TokenizeInputs) -> "ExampleBuilder":
    """Return this process's example builder for some options; the latest are cached, for any store."""
    key = (
        repr((inputs.tokenizer, inputs.renderer, inputs.limit, inputs.base, inputs.vocab_size))
        + inputs.dataset.model_dump_json()
    )

    def open_builder() -> ExampleBuilder:
        encoder = open_encoder(store.root, inputs.tokenizer)
        builder = ExampleBuilder(
            encoder, inputs.dataset, inputs.renderer, inputs.limit, base=inputs.base, vocab_size=inputs.vocab_size
        )
        if multiprocessing.parent_process() is not None:
            # Opened objects live as long as the worker: scanning them at every garbage collection cost 10 % of a part.
            gc.collect()
            gc.freeze()
        return builder

    return keep_latest(_EXAMPLE_BUILDERS, key, _MAX_BUILDERS, open_builder)


@part_function(version=1)
def tokenize_part(inputs: TokenizeInputs, place: PartPlace) -> PartResult:
    """Tokenize one part of canonical rows."""
    store, preparer = place.store, _get_example_builder(place.store, inputs)
    kind_columns = (field.name for field in ROW_KIND_COLUMNS.get(inputs.dataset.row_kind, ()))
    rows = store.table(inputs.rows, (*READ_COLUMNS, *kind_columns, *inputs.dataset.format.get_rollout_fields().names))
    counts = TokenizationCounts(sample=ReferenceSample(inputs.min_compared_chars))
    prepared = preparer.prepare(rows, counts)
    if counts.engine_differs:
        # What the sample showed of some texts may be so in all: nothing of the engine's is kept.
        preparer, mismatches = preparer.on_reference_path, counts.fast_path_mismatches
        counts = TokenizationCounts()
        prepared = preparer.prepare(rows, counts)
        counts.fast_path_mismatches = mismatches
    preparer.compare_prompts(rows, prepared, counts)
    log = RejectLog(TOKENIZED_EXAMPLES)
    for at, rejected in prepared.rejected:
        row = rows.slice(at, 1).to_pylist()[0]
        log.add(row["row_id"], rejected, row_as_bytes(row))
    kept = rows.select(("row_id", "tools"))
    if prepared.rejected:
        is_kept = np.ones(rows.num_rows, bool)
        is_kept[[at for at, _ in prepared.rejected]] = False
        kept = kept.filter(pa.array(is_kept))
    is_text = pc.equal(rows.column("kind"), "text").to_numpy(zero_copy_only=False)
    original = prepared.examples.column("original_tokens").to_numpy()
    tokens = np.bincount(prepared.places, weights=original, minlength=rows.num_rows)[is_text]
    lengths = {
        "documents": int((tokens > 0).sum()),
        "short_documents": int(((tokens > 0) & (tokens < SHORT_TOKENS)).sum()),
    }
    tools = {"rows_with_tools": 0, "tool_tokens": 0, "most_tool_tokens": 0}
    if preparer.printer is not None:
        encoder = open_encoder(store.root, inputs.tokenizer)
        tools = prompt_parity.measure_tools(kept.column("tools"), preparer.printer, encoder)
    kept_ids = kept.column("row_id")
    table = prepared.examples
    names = {"trained": "trained_tokens", "context": "context_tokens", "template": "template_tokens"}
    columns = {name: table.column(column).to_numpy().astype(np.int64) for name, column in names.items()}
    removed = table.column("original_tokens").to_numpy().astype(np.int64) - table.column("tokens").to_numpy()
    columns["truncated"] = removed
    splits = table.column("split").to_numpy(zero_copy_only=False)
    by_split = {
        str(split): {name: int(values[splits == split].sum()) for name, values in columns.items()}
        for split in sorted(set(splits.tolist()))
    }
    overlong = _list_overlong_rows(inputs, table)
    facts: dict[str, Any] = {
        "rows": len(kept_ids) + len(log.row_ids),
        "kept": len(kept_ids),
        "examples": table.num_rows,
        **lengths,
        "verified": prepared.verified,
        **count_accounts(log),
        "tokens": int(table.column("tokens").to_numpy().sum()),
        "original_tokens": int(table.column("original_tokens").to_numpy().sum()),
        "tokens_by_split": by_split,
        "tokens_by_class": sum_counts(by_split.values()),
        **(
            {"tokens_by_weight": count_tokens_by_weight(table.column(WEIGHT_COLUMN).combine_chunks().flatten())}
            if WEIGHT_COLUMN in table.column_names
            else {}
        ),
        "outside_vocabulary": encoded_batch.count_outside_vocabulary(table, inputs.vocab_size),
        "overlong": overlong[:20],
        "overlong_rows": len(overlong),
        "dropped": dict(sorted(counts.dropped.items())),
        "rows_losing_reasoning": counts.rows_losing_reasoning,
        "reference_path_texts": counts.reference_path_texts,
        "fast_path_mismatches": counts.fast_path_mismatches,
        "control_counts": dict(sorted(counts.control_strings.items())),
        "controlled_rows": counts.controlled_rows,
        "altered": counts.altered,
        "template": counts.template,
        "boundary_tokens": counts.boundary_tokens,
        "untrained_boundary_tokens": counts.untrained_boundary_tokens,
        "prompts_compared": counts.prompts_compared,
        "prompts_that_differ": len(counts.prompts_that_differ),
        "examples_of_prompts": counts.prompts_that_differ[:3],
        "dropped_tokens": counts.dropped_tokens,
        "dropped_trained": counts.dropped_trained,
        "trained_removed": int(table.column("trained_removed").to_numpy().sum()),
        **tools,
        **dict(sorted(counts.of_kind.items())),
    }
    files = {"examples": place.write("examples", table), **write_accounts(place, kept_ids, log)}
    return PartResult(files, facts)


def make_overlong_error(
    limit: int, count: int, found: Sequence[tuple[str, int]], where: str, remedies: str
) -> ContextOverflowError:
    """Return the error of `overlong: raise`, with the number of rows, the longest, and up to twenty ids."""
    longest = max(length for _, length in found)
    names = ", ".join(row_id for row_id, _ in found[:20])
    return ContextOverflowError(
        f"{where}: {count} {'row is' if count == 1 else 'rows are'} longer than {limit} tokens, the longest {longest}: "
        f"{names}; at most {limit} fit; {remedies}"
    )


SHORT_TOKENS = 20
"""Shorter documents are probably lines of a document that was cut wrongly."""


def _list_overlong_rows(inputs: TokenizeInputs, table: pa.Table) -> list[tuple[str, int]]:
    """List the rows over the limit with their lengths, longest first, if such rows stop the build.

    The length of a pair is that of its longer side.
    """
    if inputs.dataset.truncation.overlong != "raise":
        return []
    lengths = table.column("tokens").to_numpy().astype(np.int64)
    if "side_lengths" in table.column_names and len(lengths):
        sides = table.column("side_lengths").combine_chunks()
        values = sides.flatten().to_numpy().astype(np.int64)
        lengths = np.maximum.reduceat(values, np.asarray(sides.offsets, np.int64)[:-1])
    places = np.flatnonzero(lengths > inputs.limit)
    places = places[np.argsort(-lengths[places], kind="stable")]
    names: list[str] = table.column("example_id").take(pa.array(places)).to_pylist()
    return [(name.rpartition("#")[0], int(n)) for name, n in zip(names, lengths[places].tolist(), strict=True)]
