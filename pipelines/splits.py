"""Decide which split a row belongs to, from its group, its content or its time, and from nothing else.

What belongs here: the options of splitting, and the decision for one row. What does not: finding a row's
group or time in its columns (`formats/`), or proving that nothing leaked (`findings.py`).

    u = key(seed, "split", group)      0 ── validation ──┬────── train ──────┬── test ── 2^64
                                                     v · 2^64           (1 - t) · 2^64

A split is an interval of a hash: adding rows moves none, raising a held-out share only takes rows from train,
and any number of workers decide alike without talking. Rejected: shuffling and cutting, where one new row
moves others from train to test.
"""

import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from hashlib import blake2b
from math import ceil
from typing import Annotated, Literal

import orjson
from pydantic import AfterValidator, Field, model_validator

from pipelines.config import Config
from pipelines.rows import Json, Rejected, canonical_json

Split = Literal["train", "validation", "test"]
Timestamp = int | float | str

_DEFAULT_VALIDATION, _DEFAULT_TEST = 0.01, 0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_DECIMAL = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def _is_share(value: float | str) -> float | str:
    if not _DECIMAL.fullmatch(str(value)):
        raise ValueError(f"{value!r} is no share; a decimal from 0 to below 1 is; write one such as 0.05")
    if Fraction(str(value)) >= 1:
        raise ValueError(
            f"{value} leaves nothing for train; a share below 1 is allowed (a count of rows is not built "
            "yet); write one such as 0.05"
        )
    return value


def _is_duration(value: float | str) -> float | str:
    if not _DURATION.fullmatch(str(value)):
        raise ValueError(f"{value!r} is no duration; a number, alone or with s, m, h, d or w, is; write one")
    return value


Share = Annotated[float | int | str, AfterValidator(_is_share)]
"""A decimal in [0, 1), meant as the fraction that is written: 0.1 is a tenth, not its binary neighbour."""


class Boundaries(Config):
    """Where in time held-out splits begin: train < boundary ≤ validation < boundary ≤ test."""

    validation: Timestamp | None = None
    """First instant of validation: ISO 8601 (UTC unless it says otherwise), or a number in the unit of
    `time_key`; null for no validation."""

    test: Timestamp | None = None
    """First instant of test, in the same form; null for no test."""

    @property
    def are_numbers(self) -> bool:
        """Whether rows' times are numbers; dates otherwise."""
        return all(isinstance(value, int | float | None) for value in (self.validation, self.test))

    @model_validator(mode="after")
    def _ascending(self) -> "Boundaries":
        given = [value for value in (self.validation, self.test) if value is not None]
        if not given:
            raise ValueError("no boundary is set; validation, test or both are needed; write one")
        instants: list[Fraction] = []
        for value in given:
            instant = _instant(value, are_numbers=self.are_numbers)
            if instant is None:
                raise ValueError(
                    f"{value!r} is no instant; both are numbers, or both ISO 8601; write such as 2024-06-30"
                )
            instants.append(instant)
        if instants != sorted(set(instants)):
            raise ValueError(
                "validation does not begin before test; train, validation, test is the order; exchange them"
            )
        return self


class Splits(Config):
    """Which rows of a dataset are held out."""

    validation: Share = _DEFAULT_VALIDATION
    """Share of rows (of groups, with `group_key`) in validation."""

    test: Share = _DEFAULT_TEST
    """Share of rows (of groups, with `group_key`) in test."""

    group_key: str | Annotated[tuple[str, ...], Field(min_length=1, strict=False)] | None = None
    """Field, or fields, whose equal values keep rows in one split; null: equal rows stay together."""

    time_key: str | None = None
    """Field with a row's time: splits are then cut at `boundaries`, not by share."""

    boundaries: Boundaries | None = None
    """Where validation and test begin, with `time_key`."""

    gap: Annotated[int | float | str, AfterValidator(_is_duration)] = 0
    """Time before each boundary whose rows are rejected: seconds (numbers: the field's own unit), or such as
    `12h` or `7d`."""

    straddle: Literal["later", "reject"] = "later"
    """Whether a group on both sides of a boundary goes whole to the later split, or is rejected."""

    seed: int = 0
    """Seed of the hash, apart from the recipe's: reshuffling training moves no row to another split."""

    @model_validator(mode="after")
    def _possible(self) -> "Splits":
        if Fraction(str(self.validation)) + Fraction(str(self.test)) >= 1:
            raise ValueError(
                f"validation {self.validation} and test {self.test} leave nothing for train; their sum is "
                "below 1; lower one"
            )
        if self.time_key is None:
            self._without_time()
        else:
            self._with_time()
        return self

    def _without_time(self) -> None:
        for option, is_set in {
            "boundaries": self.boundaries is not None,
            "gap": self.gap != 0,
            "straddle": self.straddle != "later",
        }.items():
            if is_set:
                raise ValueError(
                    f"{option} without time_key; it says how to cut in time; set time_key or delete {option}"
                )

    def _with_time(self) -> None:
        if self.group_key is not None or self.straddle != "later":
            raise ValueError(
                "time_key with group_key or straddle is not built yet; a group on both sides of a boundary "
                "needs the whole dataset; use one of the two keys"
            )
        if self.boundaries is None:
            raise ValueError(
                "time_key without boundaries is not built yet; shares of time need the whole dataset; "
                "write boundaries: {validation: …, test: …}"
            )
        if (self.validation, self.test) != (_DEFAULT_VALIDATION, _DEFAULT_TEST):
            raise ValueError("boundaries and shares both say how much is held out; one may; delete validation and test")
        if self.boundaries.are_numbers and str(self.gap)[-1] in _SECONDS:
            raise ValueError(
                f"gap {self.gap} with boundaries that are numbers; it is in the field's unit; write a number"
            )


class Splitter:
    """`Splits` made ready to decide row by row; decisions depend on no other row."""

    def __init__(self, splits: Splits) -> None:
        validation, test = Fraction(str(splits.validation)), Fraction(str(splits.test))
        # u is an integer, so u < x exactly when u < ceil(x), and u >= x exactly when u >= ceil(x).
        self._below_is_validation = ceil(validation * 2**64)
        self._from_is_test = ceil((1 - test) * 2**64)
        self._labels = orjson.dumps([splits.seed, "split"])[:-1] + b","
        self._grouped = splits.group_key is not None
        self._boundaries = splits.boundaries
        if splits.boundaries is not None:
            self._starts = _starts(splits.boundaries)
            self._gap = _gap(splits)

    def __call__(self, group_key: str | None, order_key: str | None, content_hash: bytes) -> Split | Rejected:
        """Decide by time, group or content, whichever the options say; Rejected where the key is missing."""
        if self._boundaries is not None:
            return self.of_time(order_key)
        if self._grouped:
            return Rejected("group_missing") if group_key is None else self.of_group(group_key)
        return self.of_content(content_hash)

    def of_group(self, value: Json) -> Split:
        """Decide for a group's value: equal values, as canonical JSON, are one group."""
        return self._of(canonical_json(value))

    def of_content(self, content_hash: bytes) -> Split:
        """Decide for a row without a group by its content, so that exact duplicates stay together."""
        return self._of(b'"' + content_hash.hex().encode() + b'"')

    def of_time(self, value: Timestamp | None) -> Split | Rejected:
        """Decide for a row's time; Rejected `order_missing`, `order_unparsable` or `split_gap`."""
        assert self._boundaries is not None
        if value is None:
            return Rejected("order_missing")
        instant = _instant(value, are_numbers=self._boundaries.are_numbers)
        if instant is None:
            return Rejected("order_unparsable", str(value)[:80])
        split: Split = "train"
        for name, start in self._starts:
            if instant < start:
                return Rejected("split_gap", str(value)[:80]) if instant > start - self._gap else split
            split = name
        return split

    def _of(self, key_json: bytes) -> Split:
        # `permutation.key`, with the part of its labels that never changes encoded once.
        digest = blake2b(self._labels + key_json + b"]", digest_size=8).digest()
        u = int.from_bytes(digest, "little")
        if u < self._below_is_validation:
            return "validation"
        return "test" if u >= self._from_is_test else "train"


def _starts(boundaries: Boundaries) -> list[tuple[Split, Fraction]]:
    starts: list[tuple[Split, Fraction]] = []
    held_out: tuple[tuple[Split, Timestamp | None], ...] = (
        ("validation", boundaries.validation),
        ("test", boundaries.test),
    )
    for split, value in held_out:
        instant = None if value is None else _instant(value, are_numbers=boundaries.are_numbers)
        if instant is not None:
            starts.append((split, instant))
    return starts


def _gap(splits: Splits) -> Fraction:
    found = _DURATION.fullmatch(str(splits.gap))
    assert found is not None
    unit = 1 if splits.boundaries is not None and splits.boundaries.are_numbers else 10**6
    return Fraction(found[1]) * _SECONDS[found[2]] * unit


def _instant(value: Timestamp, *, are_numbers: bool) -> Fraction | None:
    """Read a time as a number: microseconds since 1970, or the number itself; None where it is neither."""
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
