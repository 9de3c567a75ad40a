"""How far the data of a build moved from the published build: a population stability index per distribution.

    rows      ─► domains, schemas, turns, language ┐
    manifest  ─► roles                             ├─► a profile: counts by bin ─► index, and the bins that moved most
    examples  ─► lengths, trained share            ┘

For the shares p and q of a bin in both builds, the index is the sum of (q - p) ln(q / p): 0 for equal distributions,
and by the custom of credit scoring little below 0.1 and much above 0.25. Two samples of the same data have an index of
about (bins - 1)(1/m + 1/n), so a distribution of few rows is not compared (`MIN_ROWS_PER_BIN`). A bin that is empty in
one build would be infinitely far away, and the farther the more rows there are, so half a row is added to each bin, and
shares are at least `MIN_BIN_SHARE`: whatever the size of a dataset, a domain that is new warns from about 3 % on and
blocks above 5 %.

A profile is counted when it is first compared and kept beside the examples. Counts add up over files, so that of a
build is the published one's with the files that came, and without those that went.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from rowmill.core.errors import IntegrityError
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.core.storage import File, Store
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, get_stage_folder
from rowmill.schema.row_counts import MessageCounts

if TYPE_CHECKING:
    import polars as pl

PROFILES_FOLDER = "profiles"
"""Folder of the profiles of a stage's versions."""
PROFILE_VERSION = 1
"""Increase it when the bins of a distribution change: kept profiles are then counted again."""

MIN_ROWS_PER_BIN = 100
"""Rows per bin, on average and in both builds, below which a distribution is not compared. With as many, rows of the
same data have an index of 0.02 at most, a fifth of what warns; with twenty rows it would be 0.4."""
MAX_BINS = 10
"""Bins that are compared: the most frequent ones of both builds, and all others as one."""
MIN_BIN_SHARE = 0.0005
"""Smaller shares of a bin are compared as this one."""
SHOWN_BINS = 3
"""Bins that are shown of a distribution: those that moved most."""

SAMPLED_ROWS = 16_384
"""Rows whose language is looked at, about: those whose content hash is lowest. More would not change an index much, and
language takes a hundred times as long as everything else."""
SAMPLED_CHARACTERS = 400
"""Characters of a row's text that its language is told from."""

SCRIPTS: Mapping[str, str] = {
    "Chinese": r"\p{Han}",
    "Japanese": r"[\p{Hiragana}\p{Katakana}]",
    "Korean": r"\p{Hangul}",
    "Cyrillic": r"\p{Cyrillic}",
    "Arabic": r"\p{Arabic}",
    "Hebrew": r"\p{Hebrew}",
    "Greek": r"\p{Greek}",
    "Devanagari": r"\p{Devanagari}",
    "Thai": r"\p{Thai}",
}
"""Languages, or the script of several, that are told by their letters."""
FREQUENT_WORDS: Mapping[str, str] = {
    "English": "the of and to is that you it for what",
    "German": "der die und das auch nicht ein ich zu mit",
    "French": "le les des et est une que vous dans pour",
    "Spanish": "el los las que una es por con para del",
    "Italian": "il che di una per sono gli della non con",
    "Portuguese": "os uma que não para com você em do é",
    "Dutch": "de het een van en niet dat ik voor zijn",
    "Polish": "nie to jest się na że jak do co czy",
    "Turkish": "bir ve daha için ile ne var mı çok da",
    "Vietnamese": "của là và không có cho một được các người",
    "Indonesian": "yang dan di untuk dengan ini itu dari tidak adalah",
}
"""The most frequent words of languages in Latin letters; the language of a text has most of them."""

Profile: TypeAlias = dict[str, dict[str, int]]
"""Rows by distribution and bin."""


@dataclass(frozen=True, slots=True)
class Shift:
    """How far a distribution moved: its index, None if it has too few rows, and the bins that moved most.

    A bin is its name, its share in the earlier and in the later build.
    """

    distribution: str
    index: float | None
    bins: tuple[tuple[str, float, float], ...]


def compare_profiles(before: Profile, after: Profile) -> list[Shift]:
    """Return the shift of each distribution that both builds have, the largest first."""
    shifts = [
        _measure_shift(name, before[name], after[name])
        for name in before
        if name in after and any(before[name].values()) and any(after[name].values())
    ]
    return sorted(shifts, key=lambda shift: (-(shift.index or 0), shift.distribution))


def _measure_shift(distribution: str, before: Mapping[str, int], after: Mapping[str, int]) -> Shift:
    totals = sum(before.values()), sum(after.values())
    both = {name: before.get(name, 0) / totals[0] + after.get(name, 0) / totals[1] for name in {**before, **after}}
    names = sorted((name for name in both if both[name]), key=lambda name: (-both[name], name))
    bins = {name: (before.get(name, 0), after.get(name, 0)) for name in names[: MAX_BINS - (len(names) > MAX_BINS)]}
    if len(names) > MAX_BINS:
        bins["all others"] = (
            totals[0] - sum(counts[0] for counts in bins.values()),
            totals[1] - sum(counts[1] for counts in bins.values()),
        )
    shares = {name: (counts[0] / totals[0], counts[1] / totals[1]) for name, counts in bins.items()}
    moved = sorted((name for name in shares if shares[name][0] != shares[name][1]),
                   key=lambda name: (-round(abs(shares[name][1] - shares[name][0]), 9), name))  # fmt: skip
    shown = tuple((name, round(shares[name][0], 6), round(shares[name][1], 6)) for name in moved[:SHOWN_BINS])
    if min(totals) < MIN_ROWS_PER_BIN * len(bins):
        return Shift(distribution, None, shown)
    smoothed = [
        [
            max((count + 0.5) / (total + 0.5 * len(bins)), MIN_BIN_SHARE)
            for count, total in zip(counts, totals, strict=True)
        ]
        for counts in bins.values()
    ]
    return Shift(distribution, round(sum((q - p) * math.log(q / p) for p, q in smoothed), 4), shown)


# ── Profiles ───────────────────────────────────────────────────────────────────────────────────────


def load_profile(store: Store, examples: Manifest, published: Manifest | None = None) -> Profile:
    """Return the profile of a version of tokenized examples, counted if it is not kept.

    `published` is the version whose profile it is counted from: only files that one of the two lacks are read. Raises
    IntegrityError if a file of the version is damaged or gone.
    """
    path = f"{get_stage_folder(examples.key)}/{PROFILES_FOLDER}/{examples.version}.json"
    kept = store.read_sealed(path)
    # One version of examples may have been made from several of the rows, whose schemas are not in it.
    asked = [PROFILE_VERSION, examples.inputs]
    if kept is not None and kept["asked"] == asked:
        return cast("Profile", kept["profile"])
    try:
        profile = _count_profile(store, examples, published)
    except IntegrityError:
        if published is None:
            raise
        profile = _count_profile(store, examples, None)
    store.write_sealed(path, {"asked": asked, "profile": profile})
    return profile


def _count_profile(store: Store, examples: Manifest, published: Manifest | None) -> Profile:
    rows = _load_rows(store, examples)
    step = _choose_sampling_step(rows)
    start = None if published is None else load_profile(store, published)
    files = _list_files(examples, rows)
    before: list[tuple[str, File]] = []
    if published is not None and start is not None:
        earlier = _load_rows(store, published)
        before = _list_files(published, earlier)
        if _choose_sampling_step(earlier) != step:
            before, start = [], None
    kept = {(name, file.digest) for name, file in before} & {(name, file.digest) for name, file in files}
    profile: Profile = {name: dict(bins) for name, bins in (start or {}).items()}
    for sign, several in ((1, files), (-1, before)):
        for name, file in several:
            if file.rows and (name, file.digest) not in kept:
                counted = _count_rows(store, file, step) if name == "rows" else _count_examples(store, file)
                for distribution, bins in counted.items():
                    known = profile.setdefault(distribution, {})
                    for label, count in bins.items():
                        known[label] = known.get(label, 0) + sign * count
    # Counted by the stage itself.
    messages = rows.get_counts(MessageCounts)
    profile["roles"] = {
        "system": messages.system_messages,
        "user": messages.user_messages,
        "assistant": messages.assistant_messages,
        "tool": messages.tool_messages,
        "other": messages.other_messages,
    }
    return {name: {label: n for label, n in sorted(bins.items()) if n} for name, bins in sorted(profile.items())}


def _load_rows(store: Store, examples: Manifest) -> Manifest:
    return next(made for made in manifest.load_inputs(store, examples).values() if made.stage == CANONICAL_ROWS)


def _list_files(examples: Manifest, rows: Manifest) -> list[tuple[str, File]]:
    return [("rows", file) for file in rows.files("rows")] + [("examples", file) for file in examples.files("examples")]


def _choose_sampling_step(rows: Manifest) -> int:
    """Return how many rows there are for each whose language is looked at: a power of two, 65,536 at most."""
    count = sum(file.rows for file in rows.files("rows"))
    return 1 << min(max((count // SAMPLED_ROWS).bit_length() - 1, 0), 16)


def _count_rows(store: Store, file: File, step: int) -> Profile:
    """Count the rows of a file by domain, schema, number of messages, and, of every `step`th, language."""
    import polars as pl

    columns = ("content_hash", "kind", "domain", "schema", "messages", "text", "output")
    rows = cast("pl.DataFrame", pl.from_arrow(store.table(file, columns)))
    # Canonical messages begin with their role. An argument of a call that does the same is one more turn.
    turns = pl.col("messages").str.count_matches('{"role":', literal=True)
    counted: dict[str, pl.Expr] = {
        "domains": pl.col("domain").fill_null("none"),
        "schemas": pl.col("schema"),
        "turns": _name_ranges(turns, (1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 33)),
    }
    labels = rows.select(**counted)
    profile = {name: _count_labels(labels[name]) for name in counted}
    # Two bytes of a digest, so the same rows are looked at in every build.
    low = pl.col("content_hash").cast(pl.Binary).bin.slice(0, 2).bin.encode("hex").str.to_integer(base=16) % step == 0
    texts = rows.filter(pl.col("kind").is_in(["conversation", "pair", "text", "prompt", "preference"]) & low)
    return profile | {"languages": _count_labels(_tell_languages(texts))}


def _count_examples(store: Store, file: File) -> Profile:
    """Count the examples of a file by their tokens before truncation, and by the share of tokens that train."""
    import polars as pl

    columns = ("original_tokens", "tokens", "trained_tokens")
    examples = cast("pl.DataFrame", pl.from_arrow(store.table(file, columns)))
    tenths = (pl.col("trained_tokens") * 10 // pl.col("tokens").clip(1)).clip(0, 9)
    labels = examples.select(
        lengths=_name_ranges(pl.col("original_tokens"), [1, *(1 << power for power in range(4, 25))]),
        trained=tenths.replace_strict({i: f"{10 * i} to {10 * i + 10} %" for i in range(10)}, return_dtype=pl.String),
    )
    return {"lengths": _count_labels(labels["lengths"]), "trained share": _count_labels(labels["trained"])}


def _name_ranges(number: "pl.Expr", begins: Sequence[int]) -> "pl.Expr":
    """Name the ranges that numbers are in: 3, 5 to 8, 33 and more; null for what is below the first."""
    import polars as pl

    named = pl.lit(None, pl.String)
    for begin, following in zip(begins, [*begins[1:], None], strict=True):
        name = f"{begin:,} and more" if following is None else f"{begin:,} to {following - 1:,}"
        single = following == begin + 1
        named = pl.when(number >= begin).then(pl.lit(f"{begin:,}" if single else name)).otherwise(named)
    return named


def _count_labels(labels: "pl.Series") -> dict[str, int]:
    counts: Iterable[tuple[str, int]] = labels.drop_nulls().value_counts().iter_rows()
    return dict(counts)


# ── Language ───────────────────────────────────────────────────────────────────────────────────────


def _tell_languages(rows: "pl.DataFrame") -> "pl.Series":
    """Tell the language of each row's first characters: by script, among Latin letters by frequent words."""
    import polars as pl

    # Of messages only what was said: keys and roles are English.
    contents = pl.col("messages").str.slice(0, 4 * SAMPLED_CHARACTERS).str.extract_all(r'"content":"(?:[^"\\]|\\.)*')
    said = contents.list.join(" ").str.replace_all('"content":"', "", literal=True)
    said = said.str.replace_all(r"\\(?:u[0-9a-fA-F]{4}|.)", " ")
    plain = pl.concat_str([pl.col("text"), pl.col("output")], separator=" ", ignore_nulls=True)
    is_chat = pl.col("messages").is_not_null() & (pl.col("messages") != "[]")
    text = pl.when(is_chat).then(said).otherwise(plain).str.slice(0, SAMPLED_CHARACTERS).alias("text")
    letters = {name: pl.col("text").str.count_matches(pattern) for name, pattern in SCRIPTS.items()}
    words = {
        name: pl.col("text").str.count_matches(rf"(?i)\b(?:{several.replace(' ', '|')})\b")
        for name, several in FREQUENT_WORDS.items()
    }
    counts = rows.select(text).select(
        *(expression.alias(name) for name, expression in {**letters, **words}.items()),
        latin=pl.col("text").str.count_matches(r"\p{Latin}"),
    )
    # Japanese has Chinese characters as well, so few kana decide. Other texts may have words in Latin letters.
    kana = pl.col("Japanese") * 5 >= pl.col("Chinese")
    most = pl.max_horizontal(*SCRIPTS)
    script = pl.when(kana & (pl.col("Japanese") > 0)).then(pl.lit("Japanese"))
    for name in SCRIPTS:
        script = script.when(pl.col(name) == most).then(pl.lit(name))
    most_words = pl.max_horizontal(*FREQUENT_WORDS)
    language = pl.when(most_words == 0).then(pl.lit("Latin letters"))
    for name in FREQUENT_WORDS:
        language = language.when(pl.col(name) == most_words).then(pl.lit(name))
    told = (
        pl.when((most == 0) & (pl.col("latin") == 0))
        .then(pl.lit("no letters"))
        .when(most * 3 >= pl.col("latin"))
        .then(script.otherwise(pl.lit("")))
        .otherwise(language.otherwise(pl.lit("")))
    )
    return counts.select(told.alias("language"))["language"]
