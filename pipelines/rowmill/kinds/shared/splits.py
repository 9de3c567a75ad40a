"""Decides the split of a row from its group, its content or its time, and nothing else.

    u = key(seed, "split", group)      0 ── validation ──┬────── train ──────┬── test ── 2^64
                                                     v · 2^64           (1 - t) · 2^64

A split is an interval of a hash: adding rows moves no other row, raising a held-out share only moves rows out of train,
and any number of workers decide alike without communicating. Rejected: shuffling and cutting, where one new row moves
others from train to test.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from hashlib import blake2b
from itertools import groupby
from math import ceil
from typing import Annotated, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from rowmill.core.config import Config
from rowmill.core.errors import ConfigError
from rowmill.schema.rows import SPLITS, Rejected, Split

Timestamp = int | float | str

_DEFAULT_VALIDATION, _DEFAULT_TEST = 0.01, 0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_DECIMAL_PATTERN = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DURATION_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([smhdw]?)")
_SECONDS_PER_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def is_row_count(value: float | str) -> bool:
    """Return whether a value is a number of rows rather than a share."""
    return isinstance(value, int) and value >= 1


def _check_share(value: float | str) -> float | str:
    if is_row_count(value):
        return value
    if not _DECIMAL_PATTERN.fullmatch(str(value)):
        raise ValueError(f"expected a share, a decimal from 0 to below 1, got {value!r}; write, for example, 0.05")
    if Fraction(str(value)) >= 1:
        raise ValueError(
            f"{value} leaves nothing for train; expected a share below 1, or for records a whole number of rows; "
            "write, for example, 0.05"
        )
    return value


def _check_duration(value: float | str) -> float | str:
    if not _DURATION_PATTERN.fullmatch(str(value)):
        raise ValueError(f"expected a duration, a number alone or with s, m, h, d or w, got {value!r}; correct it")
    return value


Share = Annotated[float | int | str, AfterValidator(_check_share)]
"""A decimal in [0, 1), read as the written fraction: 0.1 is a tenth, not its nearest binary number; for records, also
an integer from 1, a number of rows."""


class Boundaries(Config):
    """Start times of the held-out splits: train < boundary ≤ validation < boundary ≤ test."""

    validation: Timestamp | None = None
    """First instant of validation: ISO 8601 (UTC without an offset), or a number in the unit of `time_key`; null: no
    validation."""

    test: Timestamp | None = None
    """First instant of test, in the same form; null: no test."""

    @property
    def are_numbers(self) -> bool:
        """Whether rows' times are numbers; dates otherwise."""
        return all(isinstance(value, int | float | None) for value in (self.validation, self.test))

    @model_validator(mode="after")
    def _check_order(self) -> "Boundaries":
        given = [value for value in (self.validation, self.test) if value is not None]
        if not given:
            raise ValueError("no boundary is set; expected validation, test or both; set one")
        instants: list[Fraction] = []
        for value in given:
            instant = _parse_instant(value, are_numbers=self.are_numbers)
            if instant is None:
                raise ValueError(
                    f"expected an instant, got {value!r}; both must be numbers, or both ISO 8601, such as 2024-06-30"
                )
            instants.append(instant)
        if instants != sorted(set(instants)):
            raise ValueError("validation must start before test; the order is train, validation, test; exchange them")
        return self


class Splits(Config):
    """Which rows of a dataset are held out."""

    validation: Share = _DEFAULT_VALIDATION
    """Share of rows in validation (of groups with `group_key`, of the latest rows with `time_key`). If the source has
    its own rows for validation, those are the validation split, and no others are."""

    test: Share = _DEFAULT_TEST
    """Share of rows in test (of groups with `group_key`, of the latest rows with `time_key`). If the source has its own
    rows for test, those are the test split, and no others are."""

    group_key: str | Annotated[tuple[str, ...], Field(min_length=1, strict=False)] | None = None
    """Field, or fields, whose equal values keep rows in one split; null: rows with equal content stay together."""

    time_key: str | None = None
    """Field with a row's time: rows are then split by time, and the latest rows are held out."""

    boundaries: Boundaries | None = None
    """Start times of validation and test, with `time_key`; null: computed from the shares of the latest rows, and
    recorded."""

    gap: Annotated[int | float | str, AfterValidator(_check_duration)] = 0
    """Time before each boundary whose rows are rejected: seconds (for numbers, the field's unit), or a duration such as
    `12h` or `7d`."""

    crossing_groups: Literal["later", "reject"] = "later"
    """Whether a group with rows on both sides of a boundary goes completely to the later split, or is rejected."""

    method: Literal["hash", "exact"] = "hash"
    """`hash`: a unit's own hash decides, so that new rows move no others; `exact` (records only): complete units in the
    order of their hashes, until the rows come nearest to the wanted number; a number of rows or `max_rows` implies
    it."""

    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Maximum rows of each held-out split of records; null: no limit."""

    seed: int = 0
    """Seed of the hash, separate from the recipe's seed: reshuffling training moves no row to another split."""

    @property
    def is_exact(self) -> bool:
        """Whether splits are cut by number of rows, which requires all rows."""
        return self.method == "exact" or self.max_rows is not None or self.has_counts

    @property
    def has_counts(self) -> bool:
        """Whether the size of a split is set as a number of rows."""
        return is_row_count(self.validation) or is_row_count(self.test)

    def wanted_rows(self, split: Split, rows: int) -> Fraction:
        """Return the wanted number of rows of a held-out split, out of `rows`."""
        value = self.validation if split == "validation" else self.test
        wanted = Fraction(value) if is_row_count(value) else Fraction(str(value)) * rows
        return wanted if self.max_rows is None else min(wanted, Fraction(self.max_rows))

    @model_validator(mode="after")
    def _check_shares(self) -> "Splits":
        if not self.has_counts and Fraction(str(self.validation)) + Fraction(str(self.test)) >= 1:
            raise ValueError(
                f"validation {self.validation} and test {self.test} leave nothing for train; their sum must be below "
                "1; lower one"
            )
        if self.time_key is None:
            for option in ("boundaries", "gap", "crossing_groups"):
                if getattr(self, option) != Splits.model_fields[option].default:
                    raise ValueError(
                        f"{option} without time_key; it applies only to splits by time; set time_key or delete {option}"
                    )
            return self
        if self.crossing_groups != "later" and self.group_key is None:
            raise ValueError(
                f"crossing_groups: {self.crossing_groups} without group_key; only a group can have rows on both sides "
                "of a boundary; set group_key or delete crossing_groups"
            )
        if self.boundaries is None:
            return self
        if (self.validation, self.test) != (_DEFAULT_VALIDATION, _DEFAULT_TEST):
            raise ValueError(
                "boundaries and shares both decide what is held out; only one is allowed; delete validation and test"
            )
        if self.boundaries.are_numbers and str(self.gap)[-1] in _SECONDS_PER_UNIT:
            raise ValueError(
                f"gap {self.gap} with boundaries that are numbers; a gap is then in the field's unit; write a number"
            )
        return self

    @property
    def needs_all_rows(self) -> bool:
        """Whether a row's split depends on other rows: on the times of all, or on those of its group."""
        return self.time_key is not None and (self.boundaries is None or self.group_key is not None)


class Splitter:
    """Decides the split of one row after another by `Splits`; a decision depends on no other row."""

    def __init__(self, splits: Splits, *, by_group: bool = False) -> None:
        """Prepare the decision; `by_group` if options other than `group_key` define groups."""
        # Exact splits are cut when all rows are known; until then every row is in train.
        validation, test = (Fraction(0 if splits.is_exact else str(v)) for v in (splits.validation, splits.test))
        # u is an integer, so u < x exactly when u < ceil(x), and u >= x exactly when u >= ceil(x).
        self._below_is_validation = ceil(validation * 2**64)
        self._from_is_test = ceil((1 - test) * 2**64)
        self._is_all_train = not self._below_is_validation and self._from_is_test == 2**64
        self._labels = orjson.dumps([splits.seed, "split"])[:-1] + b","
        self._grouped = by_group or splits.group_key is not None
        self._by_time = splits.time_key is not None
        self._boundaries = boundaries = splits.boundaries
        if boundaries is None:
            return
        self._starts: list[tuple[Split, Fraction]] = []
        for split in SPLITS[1:]:
            value: Timestamp | None = getattr(boundaries, split)
            instant = None if value is None else _parse_instant(value, are_numbers=boundaries.are_numbers)
            if instant is not None:
                self._starts.append((split, instant))
        duration = _DURATION_PATTERN.fullmatch(str(splits.gap))
        assert duration is not None
        unit = 1 if boundaries.are_numbers else 10**6
        self._gap = Fraction(duration[1]) * _SECONDS_PER_UNIT[duration[2]] * unit

    def __call__(self, group_key: str | None, order_key: str | None, content_hash: bytes) -> Split | Rejected:
        """Decide by time, group or content, according to the options; Rejected if the key is missing."""
        if self._by_time:
            return self.assign_by_time(order_key)
        if self._grouped and group_key is None:
            return Rejected("group_missing")
        if self._is_all_train:
            return "train"
        u = self.hash_unit(group_key, content_hash)
        if u < self._below_is_validation:
            return "validation"
        return "test" if u >= self._from_is_test else "train"

    def hash_unit(self, group_key: str | None, content_hash: bytes) -> int:
        """Return u, the number below 2^64 that decides: from a row's group, as JSON text, else from its content."""
        if self._grouped and group_key is not None:
            return self.place(group_key.encode("utf-8", "surrogatepass"))
        return self.place(b'"' + content_hash.hex().encode() + b'"')

    def assign_by_time(self, value: Timestamp | None) -> Split | Rejected:
        """Decide for a row's time; Rejected `order_missing`, `order_unparsable` or `split_gap`.

        Without boundaries, every row with a time is train for now: shares of time are computed from all rows.
        """
        if value is None:
            return Rejected("order_missing")
        if self._boundaries is None:
            readable = any(_parse_instant(value, are_numbers=kind) is not None for kind in (True, False))
            return "train" if readable else Rejected("order_unparsable", str(value)[:80])
        instant = _parse_instant(value, are_numbers=self._boundaries.are_numbers)
        if instant is None:
            return Rejected("order_unparsable", str(value)[:80])
        split: Split = "train"
        for name, start in self._starts:
            if instant < start:
                return Rejected("split_gap", str(value)[:80]) if instant > start - self._gap else split
            split = name
        return split

    def place(self, key_json: bytes) -> int:
        """Return a unit's position in the hash range, 0 … 2^64: `permutation.key` of its canonical JSON."""
        # The constant part of the key's labels is encoded once.
        return int.from_bytes(blake2b(self._labels + key_json + b"]", digest_size=8).digest(), "little")

    def assign_by_contents(self, content_hashes: Sequence[bytes], *, source: Split | None) -> NDArray[np.int8]:
        """Decide for many rows that go by their content, as `assign_split` does; return for each which of `SPLITS`."""
        start, digest_of = self._labels + b'"', blake2b
        if source is not None and source != "train":
            return np.full(len(content_hashes), SPLITS.index(source), np.int8)
        if self._is_all_train:
            return np.zeros(len(content_hashes), np.int8)
        digests = [digest_of(start + one.hex().encode() + b'"]', digest_size=8).digest() for one in content_hashes]
        places = np.frombuffer(b"".join(digests), "<u8")
        decided = np.zeros(len(places), np.int8)
        decided[places >= np.uint64(min(self._from_is_test, 2**64 - 1))] = SPLITS.index("test")
        if self._below_is_validation and source != "train":
            decided[places <= np.uint64(self._below_is_validation - 1)] = SPLITS.index("validation")
        return decided


def assign_split(
    splitter: Splitter,
    *,
    source: Split | None,
    group_key: str | None,
    order_key: str | None,
    content_hash: bytes,
) -> Split | Rejected:
    """Return the split of a row of any kind, or the reject if it has none.

    `source` is the split hint of the row's file, if the dataset has separate files for validation or test: their rows
    are that split, and no other rows are validation.
    """
    if source is not None and source != "train":
        return source
    split = splitter(group_key, order_key, content_hash)
    return "train" if source == "train" and split == "validation" else split


def assign_exact_splits(splits: Splits, places: NDArray[np.uint64], rows: NDArray[np.int64]) -> NDArray[np.int8]:
    """Cut units into splits by number of rows; return 0 for train, 1 for validation, 2 for test.

    `places[u]` and `rows[u]` are a unit's hash position and its number of rows. Units are taken completely in the order
    of their positions, validation from the first on and test from the last back, until the rows are nearest to the
    wanted number (a tie: fewer). Every wanted split gets a unit, and so does train, which takes precedence if units are
    few.
    """
    decided = np.zeros(len(places), np.int8)
    order = np.argsort(places, kind="stable")
    total, left = int(rows.sum()), len(order) - 1
    wanted = {split: splits.wanted_rows(split, total) for split in ("test", "validation")}
    for number, split in ((2, "test"), (1, "validation")):
        if not wanted[split] or left <= 0:
            continue
        spare = 1 if split == "test" and wanted["validation"] and left > 1 else 0
        ends = np.cumsum(rows[order[::-1] if split == "test" else order])
        above = int(np.searchsorted(ends, ceil(wanted[split])))
        count = min(above + 1, len(ends))
        if above and (above == len(ends) or wanted[split] - int(ends[above - 1]) <= int(ends[above]) - wanted[split]):
            count = above
        if splits.max_rows is not None and int(ends[count - 1]) > splits.max_rows:
            count = int(np.searchsorted(ends, splits.max_rows, "right"))
        count = min(max(count, 1), left - spare)
        decided[order[-count:] if split == "test" else order[:count]] = number
        left -= count
    return decided


def compute_boundaries(splits: Splits, times: Iterable[tuple[str, int]]) -> Boundaries | None:
    """Turn shares into boundaries: the latest rows are test, those before them validation, never more than the shares.

    `times` are the rows' times as written, each with its number of rows. They are numbers if all are, else dates. Rows
    with equal times stay together. None if the shares amount to no row. Raises ConfigError if `gap` has a unit and the
    times are numbers.
    """
    counted = list(times)
    are_numbers = all(_parse_instant(value, are_numbers=True) is not None for value, _ in counted)
    if are_numbers and counted and str(splits.gap)[-1] in _SECONDS_PER_UNIT:
        raise ConfigError(
            f"splits.gap: {splits.gap}, but the times of splits.time_key are numbers; a gap is then in their unit; "
            "write a number"
        )
    read = ((_parse_instant(value, are_numbers=are_numbers), value, count) for value, count in counted)
    # Whole instants as integers, which sort ten times as fast as fractions.
    known = [
        (int(when) if when.denominator == 1 else when, value, count) for when, value, count in read if when is not None
    ]
    known.sort(reverse=True)
    total = sum(count for _, _, count in known)
    test, validation = (splits.wanted_rows(split, total) for split in ("test", "validation"))
    starts: dict[str, Timestamp] = {}
    after = 0
    for when, same in groupby(known, key=lambda one: one[0]):
        members = list(same)
        after += sum(count for _, _, count in members)
        written = (when if isinstance(when, int) else float(when)) if are_numbers else members[0][1]
        if after <= test:
            starts["test"] = written
        elif after <= test + validation:
            starts["validation"] = written
        else:
            break
    return Boundaries.model_validate(starts) if starts else None


def _parse_instant(value: Timestamp, *, are_numbers: bool) -> Fraction | None:
    """Read a time as a number: microseconds since 1970, or the number itself; None if it is neither."""
    if are_numbers:
        try:
            return Fraction(str(value))
        except (ValueError, ZeroDivisionError):
            return None
    try:
        read = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    aware = read if read.tzinfo is not None else read.replace(tzinfo=UTC)
    return Fraction((aware - _EPOCH) // _MICROSECOND)
