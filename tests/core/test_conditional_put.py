"""Pointers on S3 that two processes move: what the second one is told, and answers that are lost on the way."""

from collections.abc import Iterator

import pytest

from rowmill.core import remote
from rowmill.core.errors import ConfigError, UnreachableError
from rowmill.core.storage import Store
from tests.support.object_server import ObjectServer, Outage, serving_s3fs

pytestmark = pytest.mark.slow

STORE = Store("s3://bucket/root")
PATH = "stage/pointer.json"
OBJECT = f"bucket/root/{PATH}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    with serving_s3fs(monkeypatch, {remote.TRIES_VARIABLE: "3"}) as made:
        yield made


@pytest.fixture
def store(server: ObjectServer) -> Iterator[Store]:
    """Return a store whose folder `stage` has been listed, and has the pointer 1."""
    STORE.write_sealed(PATH, {"version": 1})
    with STORE.indexed(["stage"], own=["stage"]):
        assert server.objects
        yield STORE


@pytest.mark.parametrize("outage", ["500", "503", "cut", "hangup"])
def test_own_write_whose_answer_was_lost_is_no_other_process(
    store: Store, server: ObjectServer, outage: Outage
) -> None:
    server.fail(outage, times=1)

    assert store.write_pointer(PATH, {"version": 2}) is None
    assert store.write_pointer(PATH, {"version": 3}) is None
    assert STORE.read_sealed(PATH) == {"version": 3}
    assert server.failed == 1


def test_first_pointer_whose_answer_was_lost_is_no_other_process(server: ObjectServer) -> None:
    with STORE.indexed(["stage"], own=["stage"]):
        server.fail("cut", times=1)

        assert STORE.write_pointer(PATH, {"version": 1}) is None
        assert STORE.write_pointer(PATH, {"version": 2}) is None


def test_pointer_that_another_process_moved_or_removed_stays_so(store: Store, server: ObjectServer) -> None:
    Store("s3://bucket/other").write_sealed("p", {"version": 7})
    theirs = server.objects[OBJECT] = server.objects["bucket/other/p"]

    assert store.write_pointer(PATH, {"version": 2}) == {"version": 7}
    assert store.write_pointer(PATH, {"version": 2}) == {"version": 7}
    assert server.objects[OBJECT] == theirs
    del server.objects[OBJECT]
    assert store.write_pointer(PATH, {"version": 2}) == {}
    assert OBJECT not in server.objects


def test_answers_that_are_no_other_process_are_errors_of_their_own(
    store: Store, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.fail("expired")

    with pytest.raises(UnreachableError, match="The provided token has expired"):
        store.write_pointer(PATH, {"version": 2})
    server.heal()
    server.takes_conditions, server.requests = False, 0
    with pytest.raises(ConfigError, match=r"refuses a write with a condition .*; use a server that has them"):
        store.write_pointer(PATH, {"version": 2})
    assert server.requests == 1
    monkeypatch.setenv(remote.VARIABLE, "none")
    assert store.write_pointer(PATH, {"version": 2}) is None
    monkeypatch.setenv(remote.VARIABLE, "no")
    with pytest.raises(ConfigError, match=r"'no' is invalid; allowed is none; correct or unset it"):
        store.write_pointer(PATH, {"version": 3})
