"""Shares of the parts, for jobs that a batch service starts as an array.

    --share 1/3   parts whose fingerprint modulo 3 is 0
    --share 2/3   parts whose fingerprint modulo 3 is 1
    --share 3/3   parts whose fingerprint modulo 3 is 2

Shares know nothing of each other: they meet in the store, where parts are named by their fingerprints. A fingerprint
depends on a part's own input alone, so appended data moves no part to another share.
"""

import re
from dataclasses import dataclass

from rowmill.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Share:
    """One of `total` shares of the parts; `number` counts from 1."""

    number: int
    total: int

    def __str__(self) -> str:
        """Return the share as the command line takes it."""
        return f"{self.number}/{self.total}"

    def has(self, fingerprint: str) -> bool:
        """Return whether the share makes the part of a fingerprint, which is hexadecimal."""
        return int(fingerprint, 16) % self.total == self.number - 1


class OtherSharesMissingError(Exception):
    """Ends the run of a stage whose next pass needs parts of other shares: `made` were made now, `missing` are left."""

    def __init__(self, made: int, missing: int) -> None:
        """Note how many parts were made, and how many belong to other shares and are not finished."""
        super().__init__(f"{made} parts made, {missing} of other shares are missing")
        self.made = made
        self.missing = missing


def parse_share(text: str) -> Share:
    """Parse `I/N`.

    Raises
    ------
    ConfigError
        If it has another form, or I is not one of 1 to N.

    """
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    share = Share(int(found[1]), int(found[2])) if found else None
    if share is None or not 1 <= share.number <= share.total:
        raise ConfigError(
            f"--share {text}: not one of N shares; allowed is I/N with I from 1 to N, such as 1/8; number the jobs of "
            "an array from 1, or add 1 to an index that begins at 0"
        )
    return share
