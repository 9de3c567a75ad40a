"""Failing storage: a store and sources on local servers that stall, refuse, truncate and answer with errors."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import fsspec.config
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rowmill.cli import error_boundary
from rowmill.core import remote
from rowmill.core.errors import ConfigError, PipelineError, SourceError, UnreachableError
from rowmill.core.storage import File, Store, digest_bytes
from rowmill.sources import Files, FileScan, StoreStager, find_files, scan_source
from tests.support.object_server import KEY_ID, SECRET, ObjectServer, Outage, serving_s3fs
from tests.support.recipes import Workspace, chat, lines
from tests.support.tiers import mark_all_but

pytestmark = pytest.mark.slow

OUTAGES: tuple[Outage, ...] = get_args(Outage)
SOME_OUTAGES = mark_all_but(["500", "cut"], OUTAGES)
"""All, of which the usual run takes an error that is told and one that is not."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[ObjectServer]:
    """Serve objects on this machine to s3fs, which is told to be as patient as a test."""
    # Busy machines are slow; only a call without any answer waits this long.
    timeout_s = "2" if "stall" in request.node.name else "20"
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    with serving_s3fs(monkeypatch, {remote.TIMEOUT_VARIABLE: timeout_s, remote.TRIES_VARIABLE: "2"}) as made:
        yield made


# ── A store ────────────────────────────────────────────────────────────────────────────────────────

BYTES = b'{"a": 1}' * 100
FILE = File("x/a.json", len(BYTES), digest_bytes(BYTES), 0)


def create(store: Store) -> None:
    with store.create("x/new.json") as handle:
        handle.write(BYTES)


ASKED: dict[str, Callable[[Store], Any]] = {
    "exists": lambda store: store.exists("x/a.json"),
    "exists-not": lambda store: store.exists("x/nothing.json"),
    "has": lambda store: store.has(FILE),
    "read": lambda store: store.read("x/a.json"),
    "read-sealed": lambda store: store.read_sealed("x/a.json"),
    "content": lambda store: store.content(FILE).to_pybytes(),
    "open": lambda store: store.open("x/a.json").read(),
    "list": lambda store: store.list("x"),
    "list-nothing": lambda store: store.list("y"),
    "write": lambda store: store.write("x/new.json", BYTES),
    "create": create,
    "remove": lambda store: store.remove("x"),
}


def filled() -> Store:
    store = Store("s3://bucket/root")
    store.write("x/a.json", BYTES)
    return store


@pytest.mark.parametrize("outage", mark_all_but(["500"], OUTAGES))
@pytest.mark.parametrize("asked", ASKED)
def test_store_that_fails_for_good_is_one_error_and_never_an_answer(
    server: ObjectServer, asked: str, outage: Outage
) -> None:
    store = filled()
    server.fail(outage)

    with pytest.raises(UnreachableError) as caught:
        ASKED[asked](store)

    words = str(caught.value)
    assert words.startswith("s3://bucket/root/")
    assert "cannot be " in words and "must answer" in words and "check the path or address" in words
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert error_boundary.choose_exit_status(caught.value) == error_boundary.ExitStatus.OUTSIDE_FAILURE
    assert SECRET not in words and KEY_ID not in words


@pytest.mark.parametrize("asked", ["exists", "content", "list", "write"])
def test_expired_token_is_reported_at_once(server: ObjectServer, asked: str) -> None:
    store = filled()
    server.fail("expired")

    with pytest.raises(UnreachableError, match=r"cannot be .*; it must .* check .* the credentials") as caught:
        ASKED[asked](store)

    # An answer to HEAD says nothing but 400.
    assert asked == "exists" or "(The provided token has expired.)" in str(caught.value)
    assert isinstance(caught.value.__cause__, PermissionError)
    assert server.failed <= 2


@pytest.mark.parametrize("outage", mark_all_but(["cut"], OUTAGES))
@pytest.mark.parametrize("asked", ASKED)
def test_store_that_fails_once_answers_as_if_nothing_was(server: ObjectServer, asked: str, outage: Outage) -> None:
    if outage == "refuse":
        pytest.skip("who does not listen does so for longer than one request")
    expected = ASKED[asked](filled())
    server.objects.clear()
    store = filled()
    server.fail(outage, times=1)

    assert ASKED[asked](store) == expected
    assert server.failed == 1
    assert server.objects.get("bucket/root/x/new.json", BYTES) == BYTES


BIG = random.Random(1).randbytes(1 << 20) * 56
"""More than s3fs reads at once."""


def test_file_that_is_cut_in_its_middle_is_read_on_from_there(server: ObjectServer) -> None:
    store = Store("s3://bucket/root")
    store.write("big", BIG)
    with store.open("big") as file:
        head = file.read(1 << 20)
        server.fail("cut", times=1)
        rest = file.read()

    assert head + rest == BIG
    assert server.failed == 1


def test_file_that_changes_while_it_is_read_is_refused(server: ObjectServer) -> None:
    store = Store("s3://bucket/root")
    store.write("big", BIG)
    with store.open("big") as file:
        file.read(1 << 20)
        store.write("big", BIG[::-1])
        server.fail("500", times=1)

        with pytest.raises(SourceError, match=r"s3://bucket/root/big: changed while it was read"):
            file.read()


def test_file_that_failed_while_it_was_written_does_not_appear(server: ObjectServer) -> None:
    store = filled()

    def write() -> None:
        with store.create("x/new.json") as handle:
            handle.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write()

    assert store.list("x") == ["a.json"]


class SizelessFiles(MemoryFileSystem):
    """Files whose size is not known, as of a web server that sends them in chunks."""

    protocol = "sizeless"

    def info(self, path: str, **options: Any) -> Any:
        return super().info(path, **options) | {"size": None}


def test_end_of_a_file_of_unknown_size_is_one_error() -> None:
    fsspec.register_implementation("sizeless", SizelessFiles, clobber=True)
    fsspec.filesystem("sizeless").pipe("sizeless://a/b", BYTES)

    with pytest.raises(SourceError, match=r"a/b: the storage does not report the file's size; .* Content-Length"):
        remote.read_end("sizeless://a/b", "sizeless://a/b", 4)


def test_call_that_never_returns_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(remote.TIMEOUT_VARIABLE, "0.1")
    monkeypatch.setenv(remote.TRIES_VARIABLE, "2")
    let_go = threading.Event()

    class Silent:
        protocol = "silent"

    with pytest.raises(UnreachableError, match=r"^silent://x: cannot be read \(no answer within 0 s"):
        remote.retry_request(Silent(), "silent://x", "read", let_go.wait, size_bytes=0)
    let_go.set()


@pytest.mark.parametrize(
    ("name", "value"),
    [(remote.TIMEOUT_VARIABLE, "soon"), (remote.TIMEOUT_VARIABLE, "-1"), (remote.TRIES_VARIABLE, "0.5")],
)
def test_patience_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match=rf"{name}: '{value}' is invalid; allowed are .*; correct or unset it"):
        remote.read_retry_policy()


def test_users_own_limits_for_a_storage_go_before_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="object stores need s3fs: pip install 's3fs'")
    own = {"s3": {"config_kwargs": {"read_timeout": 7, "s3": {"addressing_style": "path"}}, "anon": True}}
    monkeypatch.setattr(fsspec.config, "conf", own)
    fs, _ = remote.open_filesystem("s3://bucket/x")

    assert fs.config_kwargs["read_timeout"] == 7
    assert fs.config_kwargs["connect_timeout"] == 10.0
    assert fs.anon is True


# ── Sources ────────────────────────────────────────────────────────────────────────────────────────

ROWS = lines(chat(n) for n in range(20))


def scan_all(folder: Path, *urls: str) -> list[FileScan]:
    return scan_source(Files(train_urls=list(urls)), folder, StoreStager(Store(str(folder / "stage")), "raw"), {})


@pytest.mark.parametrize("outage", SOME_OUTAGES)
@pytest.mark.parametrize("url", ["s3://data/a/x.jsonl", "s3://data/a", "s3://data/*/*.jsonl", "s3://data/a/*.jsonl"])
@pytest.mark.parametrize("after", mark_all_but([1], [0, 1, 2]))
def test_source_that_fails_is_never_without_data(
    server: ObjectServer, tmp_path: Path, url: str, outage: Outage, after: int
) -> None:
    server.objects["data/a/x.jsonl"] = ROWS
    server.fail(outage, after=after)

    with pytest.raises(UnreachableError, match=r"^s3://data/\S+: cannot be (read|listed) \("):
        scan_all(tmp_path, url)


def test_missing_source_is_still_reported(server: ObjectServer, tmp_path: Path) -> None:
    server.objects["data/a/x.jsonl"] = ROWS

    for url in ("s3://data/a/y.jsonl", "s3://data/b", "s3://data/b/*.jsonl"):
        with pytest.raises(SourceError, match="found no data at"):
            find_files(Files(train_urls=[url]), tmp_path)


@pytest.mark.parametrize(
    "url", mark_all_but(["s3://data/*/*.jsonl"], ["s3://data/a/x.jsonl", "s3://data/a", "s3://data/*/*.jsonl"])
)
@pytest.mark.parametrize("outage", mark_all_but(["cut"], ["500", "cut", "503", "hangup"]))
def test_source_that_fails_now_and_then_is_read_whole(
    server: ObjectServer, tmp_path: Path, url: str, outage: Outage
) -> None:
    server.objects["data/a/x.jsonl"] = ROWS
    [whole] = scan_all(tmp_path / "whole", url)
    began, server.requests = server.requests, 0

    for after in range(began):
        server.fail(outage, after=after, times=1)
        [found] = scan_all(tmp_path / str(after), url)
        assert [part.sha256 for part in found.parts] == [part.sha256 for part in whole.parts]


class _Stubborn(threading.Thread):
    """A web server of one file that treats its first answers to GET badly, one connection at a time."""

    def __init__(self, how: str, times: int) -> None:
        super().__init__(daemon=True)
        self.how, self.left = how, times
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.held: list[socket.socket] = []

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            with connection.makefile("rb") as asked:
                verb = asked.readline().split(b" ")[0]
                while asked.readline().strip():
                    pass
            self.answer(connection, verb)

    def answer(self, connection: socket.socket, verb: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nETag: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(ROWS)
        body = ROWS if verb == b"GET" else b""
        if verb == b"GET" and self.left:
            self.left -= 1
            if self.how == "stall":
                self.held.append(connection)
                return
            if self.how == "stall-inside":
                connection.sendall(head + body[:1000])
                self.held.append(connection)
                return
            if self.how == "cut":
                body = body[:1000]
            if self.how == "500":
                head, body = b"HTTP/1.1 500 Oh\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", b""
        connection.sendall(head + body)
        connection.close()

    def close(self) -> None:
        for one in [self.listening, *self.held]:
            one.close()


@pytest.fixture
def stubborn(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Callable[[str, int], str]]:
    """Return a function that begins to serve a file and gives its address."""
    pytest.importorskip("aiohttp", reason="web addresses need aiohttp: pip install 'rowmill[http]'")
    monkeypatch.setenv(remote.TIMEOUT_VARIABLE, "2" if "stall" in request.node.name else "20")
    monkeypatch.setenv(remote.TRIES_VARIABLE, "3")
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    made: list[_Stubborn] = []

    def start(how: str, times: int) -> str:
        made.append(_Stubborn(how, times))
        made[-1].start()
        return f"http://bob:hunter2@127.0.0.1:{made[-1].port}/a.jsonl?X-Amz-Signature=5ec2e7"

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize("how", ["cut", "500"])
def test_web_server_that_fails_twice_gives_the_whole_file(
    stubborn: Callable[[str, int], str], tmp_path: Path, how: str
) -> None:
    [expected] = scan_all(tmp_path / "expected", stubborn("none", 0))
    [found] = scan_all(tmp_path / "found", stubborn(how, 2))

    assert [part.sha256 for part in found.parts] == [part.sha256 for part in expected.parts]


@pytest.mark.parametrize("how", mark_all_but(["cut", "500"], ["stall", "stall-inside", "cut", "500"]))
def test_web_server_that_fails_for_good_is_one_error(
    stubborn: Callable[[str, int], str], tmp_path: Path, how: str
) -> None:
    with pytest.raises(UnreachableError, match=r"^http://127\.0\.0\.1:\d+/a\.jsonl: cannot be read \(.*\); it must"):
        scan_all(tmp_path, stubborn(how, 100))


# ── A campaign ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.campaign
def test_builds_that_a_store_left_end_as_a_clean_one(
    server: ObjectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trials: Callable[[int], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Twenty outages at random requests of a build: each is one error, and the next build ends as a clean one."""
    count = trials(20)
    chance = random.Random(20)
    expected = Workspace(tmp_path).one("rows.jsonl", [chat(i) for i in range(20)]).build().versions()
    before = server.requests
    assert Workspace(tmp_path, root="s3://bucket/clean").build().versions() == expected
    requests = server.requests - before

    for number in range(count):
        outage = OUTAGES[number % len(OUTAGES)]
        moment = chance.randrange(requests - 20)
        workspace = Workspace(tmp_path, root=f"s3://bucket/{number}")
        server.fail(outage, after=moment)
        # Only here: a busy machine may answer late, and a store that works has time for that.
        with monkeypatch.context() as patch:
            patch.setenv(remote.TIMEOUT_VARIABLE, "4")
            with pytest.raises(PipelineError) as caught:
                workspace.build()
        server.heal()

        where = f"outage {number}: {outage} after {moment} of {requests} requests"
        assert isinstance(caught.value, UnreachableError), where
        # What is read before the first stage is named with its recipe.
        assert str(caught.value).removeprefix("mini: ").startswith(f"s3://bucket/{number}/"), where
        assert workspace.build().versions() == expected, where
    with capsys.disabled():
        print(f"\n{count} outages over {requests} requests of a build: each one error, and the next build a clean one")
