"""The work on one part: canonical rows in, examples and their counts out; which builder takes which rows.

    conversation, prompt   fast_path.py for plain ones, conversation_examples.py for all others
    preference             conversation_examples.py, or plain_examples.py for plain text
    pair, text, record, tokens   plain_examples.py

Tokens are handled in columns; there is a Python object per message, never per token.
"""

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import cast

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
from rowmill.parts.accounts import RejectLog, row_as_bytes, write_accounts
from rowmill.parts.functions import PartPlace, PartResult, RowFileInputs, part_function
from rowmill.recipe.recipe import Dataset
from rowmill.schema.counts import Counts
from rowmill.schema.example_counts import (
    JUDGE_REASONS,
    NO_TARGET_REASONS,
    TEMPLATE_REASON,
    ControlStringCounts,
    ExampleCounts,
    PromptCounts,
    RowExampleCounts,
    TemplateCounts,
    count_text_files,
    count_tokens_by_split,
)
from rowmill.schema.examples import WEIGHT_COLUMN, count_tokens_by_weight
from rowmill.schema.rows import ROW_KINDS, Rejected, RowKind
from rowmill.stages.tokenized_examples import prompt_parity
from rowmill.stages.tokenized_examples.conversation_examples import (
    ConversationExampleBuilder,
    ConversationSteps,
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
    PartTally,
    make_columns,
    tabulate_examples,
)
from rowmill.tokenization.reference_sample import ReferenceSample
from rowmill.tokenization.stored_tokenizers import keep_latest, open_encoder
from rowmill.tokenization.tokenizer import Encoder

BATCH_CHARS = 1 << 20
"""Characters of rows per batch: enough for the columnar steps, little for memory (some 60 MB)."""


@dataclass(frozen=True, slots=True)
class BuiltExamples:
    """The outcome of a part's rows: examples in `EXAMPLE_SCHEMA`, in row order, and rejects by row.

    `places` int64[E] are the rows of the examples, `on_fast_path` int64[N] the conversations that the fast path built;
    both ascend. `verified` counts examples whose token mask agrees with their spans (`ExampleColumns.count_verified`).
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


_BuildRows = Callable[[pa.Table, PartTally], list[RowOutcome]]
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
            ROW_KINDS[dataset.row_kind].example_columns,
            fields.columns,
            fields.per_token,
        )
        self._open_with = partial(
            ExampleBuilder, dataset=dataset, spec=spec, limit=limit, base=base, vocab_size=vocab_size
        )
        self._encoder = encoder
        self._trains = dataset.format.has_targets()
        length = LengthLimit.of_dataset(dataset, limit)
        plain_texts = PlainTextExampleBuilder(encoder, dataset, length)
        self._steps = None if spec is None else ConversationSteps.open(encoder, dataset, spec)
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
    def renderer(self) -> Renderer | None:
        """The renderer, for inspecting its output."""
        return None if self._steps is None else self._steps.renderer

    def build(self, table: pa.Table, counts: PartTally) -> BuiltExamples:
        """Build examples from canonical rows; a row's outcome does not depend on other rows."""
        built: list[ExampleColumns] = []
        fast: list[ExampleColumns] = []
        on_fast_path: list[Ints] = [np.empty(0, np.int64)]
        rejected: list[tuple[int, Rejected]] = []
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
                        on_fast_path += [plain.rows] if self._fast_paths[kind].trains else []
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
                        placed += zip(repeat(place), range(len(settled)), settled, strict=False)
                built += [make_columns(placed)] if placed else []
        built += fast
        examples, places, verified = tabulate_examples(built, table, self._fields)
        return BuiltExamples(
            examples=examples,
            places=places,
            on_fast_path=np.concatenate(on_fast_path),
            rejected=sorted(rejected, key=itemgetter(0)),
            verified=verified,
        )

    def compare_prompts(self, table: pa.Table, built: BuiltExamples, counts: PartTally) -> None:
        """Encode the generation prompts of some conversations alone, as a server does, and compare."""
        if self._prompts is not None:
            self._prompts.compare(table, built.on_fast_path, counts)

    @cached_property
    def template_behavior(self) -> TemplateCounts:
        """What is known of the template before any row is rendered."""
        if self._steps is None:
            return TemplateCounts()
        contract = observe_template_once(self._steps.renderer)
        return TemplateCounts(
            template_warnings=tuple(list_template_warnings(contract, finish=self._dataset.loss.finish)),
            mismatched_prompts=tuple(find_mismatched_prompts(contract)),
            prints_date=bool(contract.date_dependent),
        )


def _open_fast_paths(steps: ConversationSteps, limit: LengthLimit) -> dict[RowKind, BatchedChatPath]:
    """Open the fast path of each kind that has one; rows over the limit leave it again, unless they are kept whole."""
    if steps.cuts_apart or steps.bos is not None:
        return {}
    trains: dict[RowKind, bool] = {"conversation": True, "prompt": False}
    return {
        kind: BatchedChatPath(
            steps.masker,
            steps.encoder,
            steps.control,
            trains=has_targets,
            limit=None if limit.keeps_all(kind) else limit.tokens,
            judge=steps.judge,
        )
        for kind, has_targets in trains.items()
    }


def _build_by_template(
    builder: type[ConversationExampleBuilder], steps: ConversationSteps | None, limit: LengthLimit
) -> _BuildRows:
    return _reject_without_template if steps is None else builder(steps, limit).build


def _reject_without_template(rows: pa.Table, counts: PartTally) -> list[RowOutcome]:
    """Reject the conversations of a dataset for which there is no chat template; nothing is counted of them."""
    return [Rejected("template_error", "neither the tokenizer nor the recipe has a chat template")] * rows.num_rows


def _require_targets(outcome: RowOutcome, counts: PartTally) -> RowOutcome:
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
    is_text_file: bool
    """Whether the rows are documents of a text file, which may be lines of longer ones."""
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


@part_function(version=2)
def tokenize_part(inputs: TokenizeInputs, place: PartPlace) -> PartResult:
    """Tokenize one part of canonical rows."""
    store, builder = place.store, _get_example_builder(place.store, inputs)
    kind_columns = (field.name for field in ROW_KINDS[inputs.dataset.row_kind].columns)
    rows = store.table(inputs.rows, (*READ_COLUMNS, *kind_columns, *inputs.dataset.format.get_rollout_fields().names))
    counts = PartTally(sample=ReferenceSample(inputs.min_compared_chars))
    built = builder.build(rows, counts)
    if counts.engine_differs:
        # What the sample showed of some texts may be so in all: nothing of the engine's is kept.
        builder, mismatches = builder.on_reference_path, counts.fast_path_mismatches
        counts = PartTally()
        built = builder.build(rows, counts)
        counts.fast_path_mismatches = mismatches
    builder.compare_prompts(rows, built, counts)
    log = RejectLog(TOKENIZED_EXAMPLES)
    for at, rejected in built.rejected:
        row = rows.slice(at, 1).to_pylist()[0]
        log.add(row["row_id"], rejected, row_as_bytes(row))
    kept = rows.select(("row_id", "tools"))
    if built.rejected:
        is_kept = np.ones(rows.num_rows, bool)
        is_kept[[at for at, _ in built.rejected]] = False
        kept = kept.filter(pa.array(is_kept))
    counted = _count_examples(inputs, rows, built, counts, log)
    if builder.renderer is not None:
        counted += _count_template(inputs, builder, counts, log.counts(), kept.column("tools"), place)
    files = {
        "examples": place.write("examples", built.examples),
        **write_accounts(place, kept.column("row_id"), log),
    }
    return PartResult(files, counts=counted)


def _count_examples(
    inputs: TokenizeInputs, rows: pa.Table, built: BuiltExamples, counts: PartTally, log: RejectLog
) -> list[Counts]:
    """Return what is counted of a part's rows and of the examples that were made of them."""
    table, reasons, row_count = built.examples, log.counts(), rows.num_rows
    by_split = count_tokens_by_split(table)
    original = table.column("original_tokens").to_numpy().astype(np.int64)
    trains = inputs.dataset.format.has_targets()
    overlong = _list_overlong_rows(inputs, table)
    counted: list[Counts] = [
        ExampleCounts(
            rows=row_count,
            kept=row_count - len({at for at, _ in built.rejected}),
            examples=table.num_rows,
            reasons=reasons,
            tokens_by_split=by_split,
            dropped_tokens=counts.dropped_tokens,
            unaccounted_tokens=abs(sum(sum(own.values()) for own in by_split.values()) - int(original.sum())),
            verified_examples=built.verified,
            rows_to_train=row_count if trains else 0,
            untrained_rows=sum(reasons.get(reason, 0) for reason in NO_TARGET_REASONS) if trains else 0,
            ids_outside_vocabulary=encoded_batch.count_outside_vocabulary(table, inputs.vocab_size),
            altered_texts=counts.altered,
            reference_path_texts=counts.reference_path_texts,
            fast_path_mismatches=counts.fast_path_mismatches,
            samples_of_rejects=log.find_samples(),
        ),
        RowExampleCounts(
            trained_removed=int(table.column("trained_removed").to_numpy().sum()),
            dropped_trained=counts.dropped_trained,
            boundary_tokens=counts.boundary_tokens,
            untrained_boundary_tokens=counts.untrained_boundary_tokens,
            tokens_by_weight=count_tokens_by_weight(table.column(WEIGHT_COLUMN).combine_chunks().flatten())
            if WEIGHT_COLUMN in table.column_names
            else {},
            overlong_rows=len(overlong),
            longest_overlong=max((length for _, length in overlong), default=0),
            samples_of_overlong={"": tuple(row_id for row_id, _ in overlong[:20])} if overlong else {},
        ),
        *counts.of_kind.by_class.values(),
    ]
    if inputs.dataset.format.has_control_strings():
        counted.append(
            ControlStringCounts(
                searched_rows=row_count,
                rows_with_control_strings=counts.controlled_rows,
                control_string_occurrences=dict(sorted(counts.control_strings.items())),
            )
        )
    if inputs.is_text_file:
        is_text = pc.equal(rows.column("kind"), "text").to_numpy(zero_copy_only=False)
        counted.append(count_text_files(np.bincount(built.places, weights=original, minlength=row_count)[is_text]))
    return counted


def _count_template(
    inputs: TokenizeInputs,
    builder: ExampleBuilder,
    counts: PartTally,
    reasons: Mapping[str, int],
    tools: pa.ChunkedArray,
    place: PartPlace,
) -> list[Counts]:
    """Return what the chat template did to a part's rows; `tools` are those of the kept ones."""
    assert builder.renderer is not None
    measured = prompt_parity.measure_tools(tools, builder.renderer, open_encoder(place.store.root, inputs.tokenizer))
    differ = counts.prompts_that_differ
    return [
        replace(
            builder.template_behavior,
            rendered_rows=sum(reasons.values()) + len(tools),
            rows_not_printed=reasons.get(TEMPLATE_REASON, 0),
            rows_losing_reasoning=counts.rows_losing_reasoning,
            dropped_kinds=dict(sorted(counts.dropped.items())),
            is_judged=inputs.dataset.template.verify_render > 0,
            rows_judged_wrong=sum(reasons.get(reason, 0) for reason in JUDGE_REASONS),
            rows_with_tools=measured.rows,
            tool_tokens=measured.tokens,
            most_tool_tokens=measured.most,
        ),
        PromptCounts(
            prompts_compared=counts.prompts_compared,
            prompts_that_differ=len(differ),
            samples_of_prompts={"": tuple(differ[:3])} if differ else {},
        ),
    ]


def make_overlong_error(limit: int, counts: RowExampleCounts, where: str, remedies: str) -> ContextOverflowError:
    """Return the error of `overlong: raise`, with the number of rows, the longest, and up to twenty ids."""
    count, names = counts.overlong_rows, ", ".join(counts.samples_of_overlong.get("", ()))
    return ContextOverflowError(
        f"{where}: {count} {'row is' if count == 1 else 'rows are'} longer than {limit} tokens, the longest "
        f"{counts.longest_overlong}: {names}; at most {limit} fit; {remedies}"
    )


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
