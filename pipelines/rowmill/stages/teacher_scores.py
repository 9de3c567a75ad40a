"""Asks a teacher for the likeliest ids of every trained token, and writes them beside the ids as a dataset.

    input_ids           5    6    7    8        sent as they are; no text is encoded again
    prompt_logprobs   null  p(·|5) p(·|5 6) p(·|5 6 7)     entry i predicts token i from the tokens before it
    loss_mask           0    0    1    1
    teacher_ids                  [7 3] [9 8]    of trained tokens, likeliest first
    teacher_logprobs             [-.1 -3] [-.5 -1]

So the scores of a token are those of its own place, as its label is, and nothing is shifted. An entry always holds the
token that is at its place, which is what an answer is checked by: one of another length, or whose entry lacks its own
token, is not of these tokens. It is asked for again, and its row becomes a reject if it stays so.

Like `generated_series` this is no function of its inputs, as a server may fail; it runs only on request. A part is a
few examples, so that a run that ends early goes on where it was; one with a reject is asked for again by the next run.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Bools, Tokens, compute_offsets, make_list_array, split_lists
from rowmill.core.completions import CompletionsServer, Teacher
from rowmill.core.errors import GenerationError
from rowmill.core.stage_names import RAW_DATASET, TEACHER_SCORES, TOKENIZED_EXAMPLES
from rowmill.core.storage import File
from rowmill.parts.accounts import RejectLog
from rowmill.parts.context import StageOutput, format_rejected
from rowmill.parts.functions import PartInputs, PartPlace, PartResult, part_function
from rowmill.recipe.recipe import Recipe
from rowmill.schema.counts import CountSet
from rowmill.schema.manifest import DisplayTable, Part, add_up_counts
from rowmill.schema.rows import SPLITS, Rejected, parse_row_id
from rowmill.schema.score_counts import ScoreCounts
from rowmill.stages import inputs as stage_inputs
from rowmill.stages.base import PreparedStage, StageContext, StageDeclaration
from rowmill.stats.tables import StatsInputs, count_rows_of

VERSION = 2
"""Increase it when the same answers may give other scores, or they are counted differently."""

PART_ROWS = 256
"""Examples of a part, which is what an interrupted run asks for again."""

LOWEST_LOGPROB = -9999.0
"""What vLLM itself writes for less, down to minus infinity, of which a loss would make NaN."""

TEACHER_IDS, TEACHER_LOGPROBS = "teacher_ids", "teacher_logprobs"
COLUMN_TYPES = {TEACHER_IDS: "int32", TEACHER_LOGPROBS: "float16"}
"""The columns of the scores, and their types in `format.token_fields` of a recipe that reads them."""

_MOST_MASS = 1.01
"""The probability of some ids together, with room for a server's rounding."""

_REFUSED_STATUSES = frozenset({400, 413, 422})
"""A server's answers to a row that it cannot score, such as one that is longer than its context."""


# ── One answer ─────────────────────────────────────────────────────────────────────────────────────


class MisalignedAnswerError(ConnectionError):
    """An answer that is not of the tokens that were sent; it is asked for again like one that did not come."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The `ids` int32[N, k] and `logprobs` float16[N, k] of N tokens, likeliest first, and `own` float64[N], theirs."""

    ids: Tokens
    logprobs: "np.ndarray[Any, np.dtype[np.float16]]"
    own: "np.ndarray[Any, np.dtype[np.float64]]"


def read_prompt_logprobs(
    answer: bytes, ids: Sequence[int], places: Sequence[int], top_k: int, *, vocab_size: int, model: str
) -> TokenScores:
    """Return the scores of the tokens at some places of a prompt from vLLM's answer.

    Raises MisalignedAnswerError if the answer is not one to these tokens: it names another model, it has not an entry
    for each token, an entry lacks the token at its place, or has fewer than `top_k` ids, ids outside the vocabulary, or
    numbers that are no log-probabilities.
    """
    try:
        parsed = json.loads(answer)
        # No token precedes the first one, so its entry is null.
        rows = [
            {int(token): float(given["logprob"]) for token, given in (entry or {}).items()}
            for entry in parsed["choices"][0]["prompt_logprobs"]
        ]
        named = parsed.get("model", model)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise MisalignedAnswerError("no list prompt_logprobs of mappings from ids to a logprob each") from None
    if named != model:
        raise MisalignedAnswerError(f"the answer is of model {named!r}, expected {model!r}")
    if len(rows) != len(ids):
        raise MisalignedAnswerError(f"prompt_logprobs has {len(rows)} entries for {len(ids)} tokens")
    for at, row in enumerate(rows[1:], 1):
        if ids[at] not in row:
            raise MisalignedAnswerError(f"prompt_logprobs[{at}] has no entry of token {ids[at]}, which is there")
        if len(row) < top_k:
            raise MisalignedAnswerError(f"prompt_logprobs[{at}] has {len(row)} ids, expected at least {top_k}")
        is_wrong = any(math.isnan(value) or value > 0 for value in row.values())
        if is_wrong or min(row) < 0:
            raise MisalignedAnswerError(f"prompt_logprobs[{at}] has an id or a log-probability that none can be")
        if max(row) >= vocab_size:
            raise MisalignedAnswerError(
                f"prompt_logprobs[{at}] has id {max(row)}, expected one below the vocabulary's size {vocab_size}; if "
                "the model has more embedding rows, set vocab_size to them"
            )
        mass = math.fsum(map(math.exp, row.values()))
        if mass > _MOST_MASS:
            raise MisalignedAnswerError(f"prompt_logprobs[{at}] has a mass of {mass:.2f}, expected at most 1")
    chosen = [sorted(rows[at].items(), key=lambda one: (-one[1], one[0]))[:top_k] for at in places]
    flat = np.array(chosen, np.float64).reshape(-1, top_k, 2)
    return TokenScores(
        ids=flat[..., 0].astype(np.int32),
        logprobs=np.maximum(flat[..., 1], LOWEST_LOGPROB).astype(np.float16),
        own=np.array([max(rows[at][ids[at]], LOWEST_LOGPROB) for at in places], np.float64),
    )


# ── One part ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ScoreInputs(PartInputs):
    """Some examples of a file; `sources` maps the parts of their rows to a file and its first record's number."""

    examples: File
    first: int
    rows: int
    scores: Mapping[str, Any]
    vocab_size: int
    sources: Mapping[str, tuple[str, int]]
    teacher: Teacher = field(compare=False)
    where: str = field(compare=False)

    @property
    def input_rows(self) -> int:
        return self.rows


@part_function(version=2, is_reusable=lambda part: not part.get_counts(ScoreCounts).reasons)
def score_part(inputs: ScoreInputs, place: PartPlace) -> PartResult:
    """Ask for the scores of some examples, and write those of each split, with the place of each row in its source.

    Raises GenerationError if the server does not answer, or no answer of a whole part is of its tokens.
    """
    columns = ("example_id", "split", "domain", "input_ids", "loss_mask")
    table = place.store.table(inputs.examples, columns).slice(inputs.first, inputs.rows).combine_chunks()
    names: list[str] = table.column("example_id").to_pylist()
    ids: list[Tokens] = split_lists(table.column("input_ids"))
    masks: list[Bools] = split_lists(table.column("loss_mask"))
    failures: Counter[str] = Counter()
    server = inputs.teacher.open(inputs.where)

    def ask(row: int) -> TokenScores | Rejected:
        places: list[int] = np.flatnonzero(masks[row]).tolist()
        return ask_for_scores(server, inputs.teacher, ids[row].tolist(), places, failures, vocab_size=inputs.vocab_size)

    with ThreadPoolExecutor(min(inputs.teacher.concurrency, len(names))) as pool:
        answers = list(pool.map(ask, range(len(names))))
    log = RejectLog(TEACHER_SCORES)
    scored: list[tuple[int, TokenScores]] = []
    for row, answer in enumerate(answers):
        if isinstance(answer, Rejected):
            record = {"example_id": names[row], "input_ids": ids[row].tolist(), "loss_mask": masks[row].tolist()}
            log.add(names[row].rpartition("#")[0], answer, json.dumps(record).encode())
        else:
            scored.append((row, answer))
    if not scored and len(names) >= PART_ROWS:
        # Not one row: the others would be asked for in vain, each as often as may be retried.
        raise server.make_error(
            f"none of {len(names)} examples could be scored, the first because: {log.details[0]}; a server that "
            "returns prompt_logprobs for a model with the recipe's tokenizer is needed; check --base-url and --model"
        )
    files = {"rejects": place.write("rejects", log.table())}
    splits = table.column("split").to_pylist()
    for split in sorted(set(splits)):
        of_split = [(row, answer) for row, answer in scored if splits[row] == split]
        if of_split:
            files[split] = place.write_parquet(split, _tabulate_scores(inputs, table, of_split))
    own = [answer.own for _, answer in scored]
    counts = ScoreCounts(
        kept=len(scored),
        reasons=log.counts(),
        tokens=sum(map(len, own)),
        logprobs=math.fsum(value for values in own for value in values.tolist()),
        mass=math.fsum(float(np.exp(answer.logprobs.astype(np.float64)).sum()) for _, answer in scored),
        failed_requests=dict(sorted(failures.items())),
        samples_of_rejects=log.find_samples(),
    )
    return PartResult(files, counts=[counts])


def ask_for_scores(
    server: CompletionsServer,
    teacher: Teacher,
    ids: Sequence[int],
    places: Sequence[int],
    failures: Counter[str],
    *,
    vocab_size: int,
) -> TokenScores | Rejected:
    """Return the scores of the tokens at some places; counts the failed attempts by kind.

    Raises GenerationError if the server does not answer, or answers that it serves nobody: no row is to blame.
    """

    def note(failure: Exception) -> None:
        is_http = isinstance(failure, HTTPError)
        failures[f"HTTP {failure.code}" if is_http else type(failure).__name__.removesuffix("Error")] += 1

    body = {
        "model": teacher.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0,
        "prompt_logprobs": teacher.top_k,
    }  # fmt: skip
    read = partial(
        read_prompt_logprobs, ids=ids, places=places, top_k=teacher.top_k, vocab_size=vocab_size, model=teacher.model
    )
    try:
        return server.ask(body, read, note_failure=note)
    except GenerationError as error:
        match error.__cause__:
            case MisalignedAnswerError() as failure:
                return Rejected("teacher_misaligned", str(failure))
            case HTTPError(code=code) if code in _REFUSED_STATUSES:
                return Rejected("teacher_refused", str(error))
            case _:
                raise


def _tabulate_scores(inputs: ScoreInputs, table: pa.Table, scored: Sequence[tuple[int, TokenScores]]) -> pa.Table:
    """Return scored examples as rows of token ids, each with the file and the record that it is of."""
    chosen = table.take(pa.array([row for row, _ in scored]))
    offsets = compute_offsets([len(answer.own) for _, answer in scored])
    names: list[str] = chosen.column("example_id").to_pylist()
    parts = [parse_row_id(name.rpartition("#")[0]) for name in names]
    found = [inputs.sources[part] for part, _ in parts]
    records = [first + number for (_, first), (_, number) in zip(found, parts, strict=True)]
    masks = chosen.column("loss_mask").combine_chunks()
    # What `rowmill trace` shows of a long record is its beginning.
    return pa.table(
        {
            "domain": chosen.column("domain"),
            "example_id": names,
            "source": [url for url, _ in found],
            "record": pa.array(records, pa.int64()),
            "input_ids": chosen.column("input_ids"),
            "loss_mask": masks.cast(pa.list_(pa.int8())),
            TEACHER_IDS: make_list_array(offsets, np.concatenate([answer.ids for _, answer in scored])),
            TEACHER_LOGPROBS: make_list_array(offsets, np.concatenate([answer.logprobs for _, answer in scored])),
        }
    )


def _identify_teacher_scores(recipe: Recipe, name: str) -> dict[str, Any]:
    teacher = recipe.datasets[name].teacher
    return {"versions": [VERSION], "scores": None if teacher is None else teacher.identify()}


def make_teacher_scores(context: StageContext) -> StageOutput:
    """Score all examples of a dataset."""
    teacher = context.dataset.teacher
    assert teacher is not None
    # A key that is not set is found before a worker starts.
    where = f"datasets.{context.dataset_name}.teacher"
    teacher.open(where)
    inputs = [
        ScoreInputs(
            examples=part.files["examples"],
            first=first,
            rows=min(PART_ROWS, part.files["examples"].rows - first),
            scores=teacher.identify(),
            vocab_size=context.recipe.vocab_size or int(context.input(TOKENIZED_EXAMPLES).card["vocab_size"]),
            sources={source.part_id: (source.url, source.first_record) for source in sources},
            teacher=teacher,
            where=where,
        )
        for part, sources in stage_inputs.list_example_sources(context)
        for first in range(0, part.files["examples"].rows, PART_ROWS)
    ]
    mapped = context.map(score_part, inputs)
    counts = add_up_counts(mapped.parts, ScoreCounts())
    scored = counts.get(ScoreCounts)
    return StageOutput(
        parts=mapped.parts,
        counts=counts,
        ledger=scored.list_ledger(),
        tables={"failed_requests": DisplayTable(("failure", "requests"), tuple(scored.failed_requests.items()))},
        samples=dict(scored.samples_of_rejects),
        card={"teacher": teacher.model, "top_k": teacher.top_k},
        parts_reused=mapped.reused,
        rows_made=mapped.rows_made,
    )


def list_scored_files(parts: Sequence[Part]) -> dict[str, list[File]]:
    """Return the Parquet files of each split, in the order of the examples."""
    return {split: [part.files[split] for part in parts if split in part.files] for split in SPLITS}


def _summarize_teacher_scores(counts: CountSet, rows: str) -> Sequence[str]:
    scored = counts.get(ScoreCounts)
    if not scored.tokens:
        return rows, format_rejected(scored.rejected)
    mass = f"{100 * scored.top_k_mass:.1f} % of the mass in the likeliest"
    mean = f"mean log-probability {scored.mean_logprob:.2f}"
    return rows, f"{scored.tokens:,} tokens", mean, mass, format_rejected(scored.rejected)


STAGE = StageDeclaration(
    name=TEACHER_SCORES,
    counts=ScoreCounts,
    description="Likeliest ids of every trained token with their log-probabilities, from a teacher's server.",
    identity=_identify_teacher_scores,
    prepare=lambda context: PreparedStage((), partial(make_teacher_scores, context)),
    is_final=lambda output: not output.get_counts(ScoreCounts).rejected,
    inputs=(TOKENIZED_EXAMPLES, RAW_DATASET),
    applies=lambda dataset: dataset.teacher is not None,
    command="score",
    uses_all_cores=True,
    stats_inputs=StatsInputs(
        count_rows_of(ScoreCounts, lambda counts: counts.kept, "row"), files={"rejects": "rejects"}
    ),
    summarize=_summarize_teacher_scores,
)
