"""What an output is counted by: the numbers that its checks hold against bounds, and that others read by name.

    TeacherScoresFacts(kept=2, …) ─name_facts─► Manifest.values {"kept": 2, …} ─read_facts─► the same

A fact is a number that is compared, or a few more that people are shown. None says that its check has nothing to ask
of this output.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FactsT = TypeVar("FactsT", bound="DataclassInstance")


def name_facts(facts: "DataclassInstance") -> dict[str, Any]:
    """Return a stage's facts by name, in the order of its fields, as a manifest stores them."""
    return {field.name: getattr(facts, field.name) for field in fields(facts)}


def read_facts(kind: type[FactsT], stored: Mapping[str, Any]) -> FactsT:
    """Return the facts that a manifest stores, as a stage declares them."""
    return kind(**stored)
