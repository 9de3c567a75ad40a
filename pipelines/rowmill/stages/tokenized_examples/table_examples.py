"""Examples of records: encode each part once, plan all of them, then write examples in parts.

What belongs here: the prompt, encoding over parts, the dry run, ledgers. What does not: the plan (`table_plan.py`),
splitting it into tasks (`table_tasks.py`), the work of one worker (`table_tokens.py`), the output's facts
(`table_output.py`).

    parts of rows ─encode─► ids, lengths ─► plan ─► overflow: stop, nothing was written
                                                        │
                              ids, ledger, rejects per part of rows  +  examples in parts of about a million tokens

The ids of a part are stored under the digest of its texts and tokenizer, so a part is encoded only once. A part of
examples is stored under the digest of its content; one new row changes the shuffle of tabular and grouped data and most
of their examples, which are then assembled from the stored ids.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import orjson

from rowmill.core.arrays import Ints
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.core.storage import digest_json
from rowmill.formats import Records
from rowmill.recipe.recipe import Recipe
from rowmill.schema.manifest import File, Part
from rowmill.stages import table_plan
from rowmill.stages.base import (
    PartTask,
    StageContext,
    StageOutput,
    make_parts,
    open_host_scratch,
    require_all_shares,
    select_own_parts,
)
from rowmill.stages.kept_parts import load_kept_part, save_kept_part
from rowmill.stages.table_inputs import (
    ObservedTable,
    get_table_options,
    index_parts,
    load_observed_table,
    read_row_column,
)
from rowmill.stages.table_plan import TableOverflow, TablePlan
from rowmill.stages.tokenized_examples import table_tokens
from rowmill.stages.tokenized_examples.series_prefill import write_prefill
from rowmill.stages.tokenized_examples.table_output import build_table_output
from rowmill.stages.tokenized_examples.table_tasks import plan_example_tasks
from rowmill.stages.tokenized_examples.table_tokens import VERSION, EncodedPart, EncodeTask, LedgerTask
from rowmill.tabular import prompt
from rowmill.tabular.assembly import ExampleLimits
from rowmill.tabular.prompt import PromptFrame
from rowmill.tabular.row_index import RowIndex
from rowmill.tabular.serialization import read_json
from rowmill.tokenization import tokenizer
from rowmill.tokenization.encoder import Encoder
from rowmill.tokenization.tokenizer_card import LoadedTokenizer

ROW_STATES = ("kept", "not_sampled", "record_overflow", "group_overflow", "unserialisable", "control_token_in_content")
"""States of rows, indexed by plans and ledger tasks; from `FIRST_REASON` on, reject reasons."""


def identify_table_examples(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide examples; those of generation do not."""
    return {
        "versions": [VERSION, tokenizer.TOKENIZATION_VERSION],
        "format": recipe.datasets[name].format.model_dump(mode="json", exclude={"generation"}),
        "limit": recipe.limit_of(name),
        "seed": recipe.seed,
        "vocab_size": recipe.vocab_size,
    }


def resolve_prompt_frame(work: StageContext, loaded: LoadedTokenizer, known: ObservedTable) -> PromptFrame:
    """Return the prompt and delimiters of the dataset."""
    form, card, encoder = get_table_options(work), loaded.card, Encoder(loaded, fast_path=False)
    vocabulary = prompt.Vocabulary(
        name=work.recipe.tokenizer_choice.name,
        size=work.recipe.vocab_size or card.vocab_size,
        bos_id=card.bos_id,
        eos_id=card.eos_id,
        adds_bos=card.adds_bos,
        special={content: number for number, content, special in card.added if special and content},
    )
    return prompt.build_prompt_frame(
        known.schema,
        vocabulary,
        lambda text: encoder.reference.encode(text, add_special_tokens=False).ids,
        style=form.prompt.style,
        template=form.prompt.template,
        add_bos=form.prompt.add_bos,
        add_eos=form.prompt.add_eos,
        bos=form.tokens.bos,
        eos=form.tokens.eos,
        is_grouped=form.mode == "grouped",
        where=f"datasets.{work.dataset_name}.format",
    )


# ── Encoding and planning ──────────────────────────────────────────────────────────────────────────


def _fingerprint_tokens(
    work: StageContext, known: ObservedTable, loaded: LoadedTokenizer, frame: PromptFrame, rows: File
) -> str:
    wire = get_table_options(work).codec.wire
    return digest_json(
        "tokens", VERSION, tokenizer.TOKENIZATION_VERSION, loaded.card.digest, wire, known.schema.to_json(),
        frame.special_tokens,
        rows.digest,
    )  # fmt: skip


def _encode_parts(
    work: StageContext,
    known: ObservedTable,
    loaded: LoadedTokenizer,
    path: str,
    frame: PromptFrame,
    *,
    keep: bool,
) -> tuple[list[EncodedPart], list[str], list[bool]]:
    """Encode all parts of rows; return their lengths and facts, the fingerprints of their ids, and which are new.

    With `keep`, ids are stored part by part before planning, so that the build after an overflow or a kill reuses them.
    """
    rows = [part.files["rows"] for part in work.input(CANONICAL_ROWS).parts]
    names = [_fingerprint_tokens(work, known, loaded, frame, file) for file in rows]
    schema = orjson.dumps(known.schema.to_json()).decode()
    tasks = [
        EncodeTask(
            work.store.root, work.folder if keep else None, name, path, file, schema,
            get_table_options(work).codec.wire, frame.special_tokens, load_kept_part(work.store, work.folder, name),
        )
        for file, name in zip(rows, names, strict=True)
    ]  # fmt: skip
    missing = [task for task in tasks if task.kept is None]
    own = select_own_parts(work, missing)
    wanted = tasks if len(own) == len(missing) else own
    size = sum(4 * task.rows.bytes for task in own)
    encoded: list[EncodedPart] = []
    for task, one in zip(wanted, work.pool.map(table_tokens.encode_part, wanted, size_bytes=size), strict=True):
        if task.kept is None and one.kept is not None:
            save_kept_part(work.store, work.folder, one.kept)
        encoded.append(one)
    require_all_shares(own, missing)
    return encoded, names, [task.kept is None for task in tasks]


def _plan_dataset(
    work: StageContext, known: ObservedTable, frame: PromptFrame, encoded: Sequence[EncodedPart], index: RowIndex
) -> TablePlan:
    form = get_table_options(work)
    limits = _get_example_limits(work, frame)
    request = table_plan.TablePlanRequest(
        dataset=work.dataset_name or "",
        seed=work.recipe.seed,
        form=form,
        limits=limits,
    )
    naming = table_plan.OverflowNaming(
        names_of=lambda rows: read_row_column(work, index, rows, "row_id"),
        widest_of=lambda units: _find_widest_columns(work, index, units),
    )
    options = {
        "mode": form.mode, "bos_id": frame.bos_id, "bos": frame.bos_text, "eos_id": frame.eos_id, "eos": frame.eos_text,
        "prompt": len(frame.prompt_ids), "limit": limits.limit, "records": limits.records, "cap": limits.cap,
        "wanted": form.wanted, "prompt_text": frame.prompt_text,
        "order": None if known.order is None else known.order.name,
        "privacy_unit": ("group" if form.mode == "grouped" else "record") if form.privacy.dp_enabled else None,
        "widest_names": ", ".join(sorted(known.schema.names, key=lambda name: -len(name))[:5]),
    }  # fmt: skip
    changed = sum(int(one.facts["changed"]) for one in encoded)
    return table_plan.plan_table(
        request, index, _join_lengths(encoded), naming=naming, changed=changed, options=options
    )


MAX_EXAMINED_ROWS = 100
"""Records of a group that are examined to find its widest column."""


def _find_widest_columns(work: StageContext, index: RowIndex, units: Sequence[Ints]) -> list[str]:
    """Return the column with the most characters for each set of rows."""
    looked_at = [rows[:MAX_EXAMINED_ROWS] for rows in units]
    texts = iter(read_row_column(work, index, np.concatenate([np.empty(0, np.int64), *looked_at]), "record"))
    return [_find_widest_column(islice(texts, len(rows))) for rows in looked_at]


def _find_widest_column(texts: Iterable[str]) -> str:
    sizes: dict[str, int] = {}
    for text in texts:
        for name, value in read_json(text).items():
            sizes[name] = sizes.get(name, 0) + len(str(value))
    return max(sizes, key=lambda name: sizes[name], default="")


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """A dataset with its records encoded: `lengths` are each row's tokens (−1: rejected)."""

    form: Records
    limits: ExampleLimits
    index: RowIndex
    lengths: Ints


def dry_run_table(work: StageContext, loaded: LoadedTokenizer, path: str) -> TablePlan:
    """Plan as a build would, without writing to the store.

    Raises
    ------
    ContextOverflowError
        As `plan_table` does.

    """
    known = load_observed_table(work.input(CANONICAL_ROWS).details)
    frame = resolve_prompt_frame(work, loaded, known)
    index = index_parts(work, work.input(CANONICAL_ROWS).parts, known)
    encoded, _, _ = _encode_parts(work, known, loaded, path, frame, keep=False)
    return _plan_dataset(work, known, frame, encoded, index)


def measure_table(work: StageContext, loaded: LoadedTokenizer, path: str) -> MeasuredTable:
    """Encode all records and return their lengths, without writing to the store."""
    known = load_observed_table(work.input(CANONICAL_ROWS).details)
    frame = resolve_prompt_frame(work, loaded, known)
    index = index_parts(work, work.input(CANONICAL_ROWS).parts, known)
    encoded, _, _ = _encode_parts(work, known, loaded, path, frame, keep=False)
    return MeasuredTable(get_table_options(work), _get_example_limits(work, frame), index, _join_lengths(encoded))


def _get_example_limits(work: StageContext, frame: PromptFrame) -> ExampleLimits:
    return ExampleLimits(
        work.recipe.limit_of(work.dataset_name or ""), len(frame.prompt_ids), get_table_options(work).cap
    )


def _join_lengths(encoded: Sequence[EncodedPart]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *(one.lengths for one in encoded)])


def make_table_examples(work: StageContext, loaded: LoadedTokenizer, path: str) -> StageOutput:
    """Encode, plan, and write examples; if planning fails, only the ids of records are written."""
    known = load_observed_table(work.input(CANONICAL_ROWS).details)
    frame = resolve_prompt_frame(work, loaded, known)
    rows = work.input(CANONICAL_ROWS).parts
    index = index_parts(work, rows, known)
    encoded, names, fresh = _encode_parts(work, known, loaded, path, frame, keep=True)
    plan = _plan_dataset(work, known, frame, encoded, index)
    accounts = _write_ledgers(work, plan, index, encoded, names)
    with open_host_scratch(work) as scratch:
        tasks = plan_example_tasks(work, frame, plan, index, encoded, names, loaded, scratch)
        built, reused, _ = make_parts(work, table_tokens.build_part, tasks)
    rows_made = sum(one.lengths.size for one, is_fresh in zip(encoded, fresh, strict=True) if is_fresh)
    prefill = write_prefill(work, known, frame, plan, index)
    return build_table_output(
        work, known, frame, plan, accounts, [*built, *prefill], loaded, reused=reused, rows_made=rows_made
    )


# ── Ledgers of the parts of rows ─────────────────────────────────────────────────────────────────


def _write_ledgers(
    work: StageContext, plan: TablePlan, index: RowIndex, encoded: Sequence[EncodedPart], names: Sequence[str]
) -> list[Part]:
    """Write the ledger and rejects of each part of rows."""
    states = plan.states.copy()
    overflows = _OverflowDetails.of(plan.overflows)
    planned: list[PartTask] = []
    rows = [part.files["rows"] for part in work.input(CANONICAL_ROWS).parts]
    for i, (file, one, name) in enumerate(zip(rows, encoded, names, strict=True)):
        first, last = int(index.first_rows[i]), int(index.first_rows[i + 1])
        details = overflows.between(first, last)
        for place, reason, detail in one.facts["rejects"]:
            states[first + place] = ROW_STATES.index(reason)
            details[place] = detail
        task = LedgerTask(
            root=work.store.root,
            folder=work.folder,
            fingerprint=digest_json(name, "account", states[first:last].tobytes().hex(), details),
            rows=file,
            tokens=one.require_kept().files["tokens"],
            facts=one.facts,
            states=states[first:last].tobytes(),
            names=ROW_STATES,
            details=details,
        )
        planned.append(PartTask(task.fingerprint, task, file.rows, 4 * file.bytes))
    return make_parts(work, table_tokens.account_part, planned)[0]


@dataclass(frozen=True, slots=True, eq=False)
class _OverflowDetails:
    """Why rows do not fit: `rows` ascend, each with the index of its message."""

    rows: Ints
    which: Ints
    sentences: tuple[str, ...]

    @classmethod
    def of(cls, overflows: Sequence[TableOverflow]) -> "_OverflowDetails":
        rows = np.array([row for one in overflows for row in one.rows], np.int64)
        which = np.repeat(np.arange(len(overflows)), np.array([len(one.rows) for one in overflows], np.int64))
        order = np.argsort(rows, kind="stable")
        return cls(rows[order], which[order], tuple(one.description for one in overflows))

    def between(self, first: int, last: int) -> dict[int, str]:
        """Return the messages of a part's rows, by their index in the part."""
        begin, end = np.searchsorted(self.rows, (first, last)).tolist()
        places = (self.rows[begin:end] - first).tolist()
        return {place: self.sentences[i] for place, i in zip(places, self.which[begin:end].tolist(), strict=True)}
