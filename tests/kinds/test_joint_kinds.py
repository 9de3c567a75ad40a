"""A kind whose rows depend on one another leaves none of the hooks to the answer for rows that are made alone."""

import pytest

from rowmill.kinds.base import DatasetKind
from rowmill.kinds.catalog import KINDS
from rowmill.kinds.joint_rows import JointKind

JOINT = {name: kind for name, kind in KINDS.items() if issubclass(kind, JointKind)}


@pytest.mark.parametrize("name", JOINT)
@pytest.mark.parametrize(
    "hook",
    [
        *("identify_rows", "make_rows", "assign_splits", "complete_rows", "identify_examples", "make_examples"),
        *("count_read_records", "measure_lengths", "find_near_rows"),
    ],
)
def test_joint_kind_has_its_own_hook(name: str, hook: str) -> None:
    assert getattr(JOINT[name], hook) is not getattr(DatasetKind, hook)


def test_there_is_a_joint_kind() -> None:
    assert "records" in JOINT
