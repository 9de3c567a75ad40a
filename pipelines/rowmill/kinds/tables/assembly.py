r"""Assembly of records into examples, planned on token counts alone, and the prompt that all of them share.

    lengths 85 80 79 80, prompt 36, at most 282 tokens, cap 3

    tabular      prompt BOS r0 r1 r2 EOS      36 + 2 + 244 = 282, then 36 + 2 + 80
    grouped      prompt (BOS group EOS)+      a group is never split
    sequential   as tabular, one group, in order; each example draws its token budget

Records are numbered 0 … n−1, sorted by group key and then by position; callers map the numbers to rows. Loops run per
example, never per record, so planning is linear in the records whatever the cap.

    Generate JSON Lines records with these keys: "date","amount"\n BOS {"date":…}\n{"date":…}\n EOS
    └────────────────────────── prompt ───────────────────────────┘└─ generation starts after this BOS

The generation prompt, prompt and first BOS, is token for token the start of every example.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets, expand_ranges
from rowmill.core.errors import ConfigError
from rowmill.kinds.tables.schema import Column, RecordSchema
from rowmill.kinds.tables.serialization import serialise_record

Flush = Literal["restart", "group_change", "max_records", "budget", "end"]
FLUSHES: tuple[Flush, ...] = ("restart", "group_change", "max_records", "budget", "end")
"""Why an example ended: a new pass, another group, the cap, the budget, no more records. Stored as an index."""

DELIMITERS_PER_UNIT = 2
"""One BOS before and one EOS after every unit."""


@dataclass(frozen=True, slots=True)
class ExampleLimits:
    """Limits of an example: `limit` tokens in all, `prompt` of them for the prompt, at most `cap` units."""

    limit: int
    prompt: int
    cap: int | None

    @property
    def records(self) -> int:
        """Tokens left for records after the prompt, one BOS and one EOS; may be negative."""
        return self.limit - self.prompt - DELIMITERS_PER_UNIT

    @property
    def min_budget(self) -> int:
        """The smallest budget that an example of a series may draw: seven tenths of `records`, rounded up."""
        return -(-7 * self.records // 10)


@dataclass(frozen=True, slots=True, eq=False)
class RecordLengths:
    """Token counts of the records of one split; group g owns records `[groups[g], groups[g + 1])`."""

    tokens: Ints
    groups: Ints

    @property
    def group_tokens(self) -> Ints:
        """Tokens of each group's records."""
        ends = compute_offsets(self.tokens)
        return ends[self.groups[1:]] - ends[self.groups[:-1]]

    @property
    def group_sizes(self) -> Ints:
        """Records of each group."""
        return np.diff(self.groups)


@dataclass(frozen=True, slots=True, eq=False)
class RecordPass:
    """A full or partial pass over the records, as runs `[first, last)` of records that stay together in order.

    In tabular mode a run is one record, otherwise a group (a partial pass may cut a series to a prefix).
    """

    number: int
    firsts: Ints
    lasts: Ints

    @property
    def records(self) -> Ints:
        """Record numbers in the order of the pass."""
        return expand_ranges(self.firsts, self.lasts - self.firsts)


@dataclass(frozen=True, slots=True, eq=False)
class AssembledExamples:
    """The examples of one split, as three levels of offsets.

    Unit u is records `[units[u], units[u + 1])` of `records` between a BOS and an EOS; example e is units
    `[examples[e], examples[e + 1])` after one prompt. `budgets` are tokens of records, `flushes` index `FLUSHES`.
    """

    records: Ints
    units: Ints
    examples: Ints
    passes: Ints
    budgets: Ints
    flushes: NDArray[np.int8]

    @property
    def record_offsets(self) -> Ints:
        """Offsets of the examples in `records`, the end included."""
        return self.units[self.examples]

    def lengths(self, tokens: Ints, limits: ExampleLimits) -> Ints:
        """Return the tokens of every example: the prompt, and per unit its records, BOS and EOS."""
        ends = compute_offsets(tokens[self.records])
        own = ends[self.record_offsets]
        return limits.prompt + np.diff(own) + DELIMITERS_PER_UNIT * np.diff(self.examples)


BudgetSampler = Callable[[int, int], Callable[[int], int]]
"""Samples the budgets of a series' examples: (pass, group) → index of the example in the group → tokens of records."""


def cut_runs(costs: Ints, starts: Ints, budget: int, cap: int | None) -> Ints:
    """Cut elements into the longest runs that fit into one example each; return the runs' offsets, the end included.

    `costs[i]` is at most `budget`; a run also ends after `cap` elements and where the next pass begins (`starts` are
    the offsets of the passes, the end included). One search over cumulative sums finds the end of a run from every
    index, so that only the runs are looped over.
    """
    count = len(costs)
    sums = compute_offsets(costs)
    ends = np.searchsorted(sums, sums[:-1] + budget, "right") - 1
    if cap is not None:
        ends = np.minimum(ends, np.arange(count) + cap)
    jump: list[int] = np.minimum(ends, starts[np.searchsorted(starts, np.arange(count), "right")]).tolist()
    offsets, position = [0], 0
    while position < count:
        position = jump[position]
        offsets.append(position)
    return np.array(offsets, np.int64)


def explain_flushes(offsets: Ints, starts: Ints, cap: int | None) -> NDArray[np.int8]:
    """Return why each example `[offsets[e], offsets[e + 1])` ended: by a pass, the cap or the budget."""
    ends = offsets[1:]
    found = np.full(len(ends), FLUSHES.index("budget"), np.int8)
    if cap is not None:
        found[np.diff(offsets) == cap] = FLUSHES.index("max_records")
    found[np.isin(ends, starts)] = FLUSHES.index("restart")
    found[-1:] = FLUSHES.index("end")
    return found


def join_passes(passes: "list[RecordPass]") -> tuple[Ints, Ints, Ints]:
    """Return the concatenated runs of all passes, and the passes' offsets (the end included)."""
    none = np.empty(0, np.int64)
    firsts = np.concatenate([none, *(one.firsts for one in passes)])
    lasts = np.concatenate([none, *(one.lasts for one in passes)])
    starts = compute_offsets([len(one.firsts) for one in passes])
    return firsts, lasts, starts


def assemble_records(records: RecordLengths, passes: list[RecordPass], limits: ExampleLimits) -> AssembledExamples:
    """Assemble the records of the passes into examples of one unit each; every record fits `limits.records`."""
    order, _, starts = join_passes(passes)
    offsets = cut_runs(records.tokens[order], starts, limits.records, limits.cap)
    count = len(offsets) - 1
    return AssembledExamples(
        records=order,
        units=offsets,
        examples=np.arange(count + 1, dtype=np.int64),
        passes=np.searchsorted(starts, offsets[:-1], "right") - 1,
        budgets=np.full(count, limits.records, np.int64),
        flushes=explain_flushes(offsets, starts, limits.cap),
    )


def assemble_groups(records: RecordLengths, passes: list[RecordPass], limits: ExampleLimits) -> AssembledExamples:
    """Assemble the units of the passes; every unit with its delimiters fits after the prompt."""
    firsts, lasts, starts = join_passes(passes)
    sums = compute_offsets(records.tokens)
    costs = sums[lasts] - sums[firsts] + DELIMITERS_PER_UNIT
    offsets = cut_runs(costs, starts, limits.limit - limits.prompt, limits.cap)
    count = len(offsets) - 1
    return AssembledExamples(
        records=expand_ranges(firsts, lasts - firsts),
        units=compute_offsets(lasts - firsts),
        examples=offsets,
        passes=np.searchsorted(starts, offsets[:-1], "right") - 1,
        budgets=np.full(count, limits.records, np.int64),
        flushes=explain_flushes(offsets, starts, limits.cap),
    )


def split_large_runs(records: RecordLengths, firsts: Ints, lasts: Ints, limits: ExampleLimits) -> tuple[Ints, Ints]:
    """Split the runs that are too large for an example at record boundaries, each piece as long as fits.

    Every record fits `limits.records`; pieces of a run stay consecutive.
    """
    sums = compute_offsets(records.tokens)
    large = sums[lasts] - sums[firsts] > limits.records
    if not large.any():
        return firsts, lasts
    begins: list[Ints] = []
    ends: list[Ints] = []
    for first, last, is_large in zip(firsts.tolist(), lasts.tolist(), large.tolist(), strict=True):
        borders = np.array([first, last])
        if is_large:
            own = records.tokens[first:last]
            borders = first + cut_runs(own, np.array([0, len(own)]), limits.records, None)
        begins.append(borders[:-1])
        ends.append(borders[1:])
    return np.concatenate(begins), np.concatenate(ends)


_END, _RESTART, _GROUP = (FLUSHES.index(name) for name in ("end", "restart", "group_change"))
_CAP, _BUDGET = FLUSHES.index("max_records"), FLUSHES.index("budget")


def assemble_series(
    records: RecordLengths, passes: list[RecordPass], limits: ExampleLimits, draw: BudgetSampler | None
) -> AssembledExamples:
    """Assemble the series of the passes into examples of one unit each; `draw` is None for held-out splits."""
    firsts, lasts, starts = join_passes(passes)
    order = expand_ranges(firsts, lasts - firsts)
    sums: list[int] = compute_offsets(records.tokens[order]).tolist()
    groups: list[int] = (np.searchsorted(records.groups, firsts, "right") - 1).tolist()
    bounds: list[int] = compute_offsets(lasts - firsts).tolist()
    pass_of: list[int] = (np.searchsorted(starts, np.arange(len(firsts)), "right") - 1).tolist()
    offsets, budgets, flushes, numbers = [0], list[int](), list[int](), list[int]()
    cap = limits.cap if limits.cap is not None else len(order)
    for run, group in enumerate(groups):
        here, end, ordinal = bounds[run], bounds[run + 1], 0
        budget_of = None if draw is None else draw(pass_of[run], group)
        while here < end:
            budget = limits.records if budget_of is None else budget_of(ordinal)
            most = min(here + cap, end)
            # One record always fits, so the search begins after it.
            stop = most if most == here + 1 else bisect_right(sums, sums[here] + budget, here + 2, most + 1) - 1
            offsets.append(stop)
            budgets.append(budget)
            numbers.append(pass_of[run])
            flushes.append(_GROUP if stop == end else _CAP if stop == most else _BUDGET)
            here, ordinal = stop, ordinal + 1
    units = np.array(offsets, np.int64)
    reasons = np.array(flushes, np.int8)
    reasons[np.isin(units[1:], np.array(bounds, np.int64)[starts])] = _RESTART
    reasons[-1:] = _END
    return AssembledExamples(
        records=order,
        units=units,
        examples=np.arange(len(offsets), dtype=np.int64),
        passes=np.array(numbers, np.int64),
        budgets=np.maximum(np.array(budgets, np.int64), records.tokens[order[units[:-1]]]),
        flushes=reasons,
    )


# ── Passes over records ────────────────────────────────────────────────────────────────────────────


Permute = Callable[[int, int], Ints]
"""(pass, n) → a permutation of 0 … n−1."""


def resample_records(records: RecordLengths, wanted: int | None, permute: Permute) -> list[RecordPass]:
    """Return passes over single records: exactly `wanted` in all; None means each once."""
    passes: list[RecordPass] = []
    for number, size in _pass_sizes(len(records.tokens), wanted):
        order = permute(number, len(records.tokens))[:size]
        passes.append(RecordPass(number, order, order + 1))
    return passes


def resample_groups(records: RecordLengths, wanted: int | None, permute: Permute) -> list[RecordPass]:
    """Return passes over whole groups; the last one adds groups until its share is reached."""
    sizes = records.group_sizes
    passes: list[RecordPass] = []
    for number, size in _pass_sizes(len(records.tokens), wanted):
        order = permute(number, len(sizes))
        kept = order[: int(np.searchsorted(np.cumsum(sizes[order]), size)) + 1]
        passes.append(RecordPass(number, records.groups[kept], records.groups[kept + 1]))
    return passes


def resample_series(records: RecordLengths, wanted: int | None, permute: Permute) -> list[RecordPass]:
    """Return passes over series: exactly `wanted` records, the last series truncated to a prefix.

    A full first pass is in key order; other passes permute the groups, never the records.
    """
    sizes = records.group_sizes
    passes: list[RecordPass] = []
    for number, size in _pass_sizes(len(records.tokens), wanted):
        whole_first = number == 0 and size == len(records.tokens)
        order = np.arange(len(sizes)) if whole_first else permute(number, len(sizes))
        ends = np.cumsum(sizes[order])
        kept = order[: int(np.searchsorted(ends, size)) + 1]
        lasts = records.groups[kept + 1].copy()
        lasts[-1:] -= ends[len(kept) - 1] - size
        passes.append(RecordPass(number, records.groups[kept], lasts))
    return passes


def _pass_sizes(count: int, wanted: int | None) -> list[tuple[int, int]]:
    """Return each pass as (number, number of its records)."""
    if not count:
        return []
    full, rest = (1, 0) if wanted is None else divmod(wanted, count)
    return [*((number, count) for number in range(full)), *([(full, rest)] if rest else [])]


# ── Prompt ───────────────────────────────────────────────────────────────────────────────────────────


INSTRUCTION = "Generate a JSONL dataset with the following columns: "
"""Safe Synthesizer's instruction; it ends with one space."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How Safe Synthesizer prompts a family of models, recognized by the tokenizer's name.

    `adds_bos` and `adds_eos`: whether the prompt, too, has the sequence's BOS and EOS around it. `begins_turn`:
    sequences begin with `<|im_start|>` instead of the tokenizer's BOS. All end with the tokenizer's EOS.
    """

    names: tuple[str, ...]
    template: str
    adds_bos: bool
    adds_eos: bool
    begins_turn: bool = False


_TURN_TEMPLATE = "user\n {i} {s} \n assistant\n"
FAMILIES = (
    ModelFamily(("tinyllama",), "[INST] {i} {s} [/INST]", adds_bos=True, adds_eos=True),
    ModelFamily(("qwen",), _TURN_TEMPLATE, adds_bos=True, adds_eos=False),
    # It begins sequences with id 151644, Qwen's <|im_start|>, which Llama lacks; here Llama's BOS is used.
    ModelFamily(("llama32", "llama-3.2", "llama3.2"), _TURN_TEMPLATE, adds_bos=False, adds_eos=False),
    ModelFamily(("smollm2",), _TURN_TEMPLATE, adds_bos=False, adds_eos=False, begins_turn=True),
    ModelFamily(
        ("smollm3",), "user\n {i} {s} <|im_end|> \n assistant\n", adds_bos=True, adds_eos=False, begins_turn=True
    ),
    ModelFamily(("mistral",), "[INST] {i} \n\n {s} [/INST]", adds_bos=True, adds_eos=True),
    ModelFamily(("nemotron",), "[INST] {i} \n\n {s} [/INST]", adds_bos=True, adds_eos=True),
    ModelFamily(("granite",), _TURN_TEMPLATE, adds_bos=False, adds_eos=True),
)
"""In the order of comparison: the first whose name is contained in the tokenizer's name applies."""
TURN_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Delimiters of a tokenizer that has both tokens, instead of its BOS and EOS."""

Encode = Callable[[str], Sequence[int]]
"""Encodes a text: special tokens in it are recognized, none are added."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The properties of a tokenizer that the prompt depends on."""

    name: str
    size: int
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    special: Mapping[str, int]

    def text_of(self, token_id: int) -> str | None:
        """Return the text of a special token."""
        return next((text for text, own in self.special.items() if own == token_id), None)


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """Prompt and delimiters of every example, as ids and as text.

    `special_tokens` are the texts that a record must not contain unescaped.
    """

    prompt_text: str
    prompt_ids: tuple[int, ...]
    bos_id: int
    eos_id: int
    bos_text: str
    eos_text: str
    special_tokens: tuple[str, ...]
    is_parity: bool

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON value for the manifest, where generation reads it."""
        return {**asdict(self), "prompt_ids": [*self.prompt_ids], "special_tokens": [*self.special_tokens]}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "PromptFrame":
        """Read what `to_json` returned."""
        values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in stored.items()}
        return cls(**values)


def build_prompt_frame(
    schema: RecordSchema,
    vocabulary: Vocabulary,
    encode: Encode,
    *,
    style: Literal["keys", "names", "reference"],
    template: str | None,
    add_bos: Literal["auto"] | bool,
    add_eos: Literal["auto"] | bool,
    bos: str | int,
    eos: str | int,
    is_grouped: bool,
    where: str,
) -> PromptFrame:
    """Build the prompt and choose the delimiters.

    Raises
    ------
    ConfigError
        If a delimiter is not a single token of the tokenizer, or the prompt cannot be written.

    """
    family: ModelFamily | None = None
    if style == "reference" and template is None:
        tokenizer = vocabulary.name.lower()
        family = next((choice for choice in FAMILIES if any(part in tokenizer for part in choice.names)), None)
        if family is None:
            raise ConfigError(
                f"{where}.prompt.style: reference has no template for the tokenizer {vocabulary.name!r}, only for "
                f"{', '.join(choice.names[0] for choice in FAMILIES)}; set prompt.template, or another style"
            )
    bos_id, bos_text = _resolve_delimiter("bos", bos, vocabulary, encode, where, family)
    eos_id, eos_text = _resolve_delimiter("eos", eos, vocabulary, encode, where, family)
    if is_grouped and bos_id == eos_id:
        raise ConfigError(
            f"{where}.tokens: bos and eos are both {bos_text!r} ({bos_id}); with groups they must "
            "differ; set tokens.bos or tokens.eos"
        )
    special = tuple(dict.fromkeys([bos_text, eos_text, *vocabulary.special]))
    body, leads, trails = _format_prompt_body(schema, vocabulary, style, template, special, where, family)
    first = _resolve_prompt_delimiter(
        "add_bos", add_bos, bos_id if style == "reference" else vocabulary.bos_id, leads, where
    )
    last = _resolve_prompt_delimiter(
        "add_eos", add_eos, eos_id if style == "reference" else vocabulary.eos_id, trails, where
    )
    prompt_ids = (*first, *encode(body), *last)
    texts = {bos_id: bos_text, eos_id: eos_text}
    around = [texts.get(token) or vocabulary.text_of(token) or "" for token in (*first, *last)]
    prompt_text = "".join([*around[: len(first)], body, *around[len(first) :]])
    is_parity = tuple(encode(prompt_text + bos_text)) == (*prompt_ids, bos_id)
    return PromptFrame(prompt_text, prompt_ids, bos_id, eos_id, bos_text, eos_text, special, is_parity)


def _resolve_delimiter(
    name: str, wanted: str | int, vocabulary: Vocabulary, encode: Encode, where: str, family: ModelFamily | None
) -> tuple[int, str]:
    at = f"{where}.tokens.{name}"
    if wanted == "auto":
        default = vocabulary.bos_id if name == "bos" else vocabulary.eos_id
        has_turns = all(text in vocabulary.special for text in TURN_TOKENS)
        if has_turns and (family is None or default is None or (name == "bos" and family.begins_turn)):
            text = TURN_TOKENS[name == "eos"]
            return vocabulary.special[text], text
        text = None if default is None else vocabulary.text_of(default)
        if default is None or text is None:
            raise ConfigError(
                f"{at}: auto, but the tokenizer has neither {TURN_TOKENS[0]} and {TURN_TOKENS[1]} nor a "
                f"{name.upper()} token; set {at} to the text or id of a special token"
            )
        return default, text
    if isinstance(wanted, int):
        text = vocabulary.text_of(wanted)
        if wanted >= vocabulary.size or text is None:
            raise ConfigError(
                f"{at}: {wanted} is not the id of a special token (the vocabulary has {vocabulary.size} tokens); data "
                "could contain it; choose a special token"
            )
        return wanted, text
    ids = encode(wanted)
    if len(ids) != 1 or wanted not in vocabulary.special:
        raise ConfigError(
            f"{at}: {wanted!r} is {len(ids)} tokens, not one special token; choose a special token of the "
            "tokenizer, or add this one to it"
        )
    return ids[0], wanted


def _resolve_prompt_delimiter(
    option: str, wanted: Literal["auto"] | bool, token_id: int | None, by_itself: bool, where: str
) -> tuple[int, ...]:
    if wanted is False or (wanted == "auto" and not by_itself):
        return ()
    if token_id is None:
        raise ConfigError(f"{where}.prompt.{option}: true, but the tokenizer has no such token; set auto or false")
    return (token_id,)


def _format_prompt_body(
    schema: RecordSchema,
    vocabulary: Vocabulary,
    style: Literal["keys", "names", "reference"],
    template: str | None,
    special: tuple[str, ...],
    where: str,
    family: ModelFamily | None,
) -> tuple[str, bool, bool]:
    """Return the prompt's text, and whether `auto` puts a BOS before and an EOS after it."""
    if style == "keys":
        quoted: list[str] = []
        for name in schema.names:
            record_schema = RecordSchema((Column(name, "string", nullable=True),))
            line = serialise_record({name: None}, record_schema, special_tokens=special)
            assert isinstance(line, str), line
            quoted.append(line[len("{") : -len(":null}\n")])
        names = ",".join(quoted)
        text = f"Generate JSON Lines records with these keys: {names}\n"
        return (text if template is None else template.replace("{schema}", names)), vocabulary.adds_bos, False
    for name in schema.names:
        if any(token in name for token in special):
            raise ConfigError(
                f"{where}.prompt.style: {style} writes the column name {name!r} as it is, and it contains a special "
                "token; set style: keys, which escapes it, or rename the column"
            )
    if style == "names":
        names = ", ".join(schema.names)
        return (f"{names}\n" if template is None else template.replace("{schema}", names)), vocabulary.adds_bos, False
    columns = ",".join(f'"{name}":<unk>' for name in schema.names)
    if template is not None:
        return template.replace("{schema}", columns), vocabulary.adds_bos, False
    assert family is not None, "without a template the reference style has a family"
    return family.template.replace("{i}", INSTRUCTION).replace("{s}", columns), family.adds_bos, family.adds_eos
