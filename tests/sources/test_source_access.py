"""Access to sources: names that are not regular files, failing servers, and that no secret is recorded."""

import hashlib
import os
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import duckdb
import pyarrow.parquet as pq
import pytest

from rowmill.core import remote
from rowmill.core.errors import ConfigError, SourceError
from rowmill.reports import report_page
from rowmill.sources import Files, find_files, public_url, sum_local_bytes
from tests.support.recipes import CHAT, Workspace, chat, lines
from tests.support.source_files import scan_files, values


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one good file."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_bytes(b'{"a": 1}\n')
    return tmp_path / "data"


ODD = {
    "pipe": (os.mkfifo, "is a named pipe; only regular files can be sources"),
    "device-link": (lambda path: path.symlink_to("/dev/zero"), "is a device; only regular files can be sources"),
    "socket": (make_socket, "is a socket; only regular files can be sources"),
    "dangling-link": (lambda path: path.symlink_to("gone.txt"), r"is a broken link to gone\.txt"),
    "link-to-itself": (
        lambda path: path.symlink_to(path.name),
        r"cannot be read \(Too many levels of symbolic links\)",
    ),
}


@pytest.mark.parametrize("urls", [["."], ["*"], ["x.txt"], ["{a.jsonl,x.txt}"], ["../data/"], ["local://{}"]])
@pytest.mark.parametrize("name", ODD)
def test_source_that_is_not_a_regular_file_is_named(folder: Path, name: str, urls: list[str]) -> None:
    make, words = ODD[name]
    make(folder / "x.txt")
    if urls == ["local://{}"]:
        if "link" in name and name != "device-link":
            pytest.skip("fsspec leaves such links out of what it lists")
        urls, words = [f"local://{folder}"], "is not a regular file; only regular files can be sources"

    with pytest.raises(SourceError, match=rf"x\.txt: {words}"):
        scan_files(folder, *urls)


def find(folder: Path, *urls: str) -> list[str]:
    return [file.url for file in find_files(Files(train_urls=list(urls or ["."])), folder)]


@pytest.mark.parametrize("url", [".", "**/*.jsonl", "../*/"])
def test_linked_folder_is_followed(folder: Path, url: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("other") / "disk"
    (elsewhere / "deep").mkdir(parents=True)
    for path in (elsewhere / "b.jsonl", elsewhere / "deep/c.jsonl"):
        path.write_bytes(b'{"a": 2}\n')
    (folder / "linked").symlink_to(elsewhere, target_is_directory=True)
    found = sorted(os.path.normpath(folder / one) for one in find(folder, url))

    assert found == [str(folder / name) for name in ("a.jsonl", "linked/b.jsonl", "linked/deep/c.jsonl")]


@pytest.mark.parametrize("target", [".", "..", "../..", "deep"])
def test_linked_folder_without_an_end_is_named(folder: Path, target: str) -> None:
    (folder / "deep/deeper").mkdir(parents=True)
    if target == "deep":
        (folder / "one").mkdir()
        (folder / "one/to").symlink_to(folder / "deep")
        (folder / "deep/from").symlink_to(folder / "one")
    else:
        (folder / "deep/deeper/back").symlink_to((folder / "deep/deeper" / target).resolve(), target_is_directory=True)
    refusal = r"(back|to|from): is a link to /.*, a folder that contains it, .*; remove the link"
    with pytest.raises(SourceError, match=refusal):
        find(folder)


def test_file_that_a_linked_folder_shows_twice_is_named(folder: Path) -> None:
    (folder / "one").mkdir()
    (folder / "one/b.jsonl").write_bytes(b"{}\n")
    (folder / "same").symlink_to(folder / "one", target_is_directory=True)
    with pytest.raises(ConfigError, match="this file is already named"):
        find(folder)


def test_hidden_folders_and_files_that_are_no_data_are_ignored(folder: Path) -> None:
    (folder / ".loop").symlink_to(folder, target_is_directory=True)
    (folder / "_loop").symlink_to(folder, target_is_directory=True)
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / ".x.txt")
    assert find(folder) == [one.url for one in scan_files(folder)] == ["./a.jsonl"]


@pytest.mark.parametrize(("url", "place"), [(".", "deep"), ("*", ""), ("*/", "deep")])
def test_file_name_that_is_not_utf8_is_named(folder: Path, url: str, place: str) -> None:
    (folder / "deep").mkdir()
    Path(os.fsdecode(os.fsencode(folder / place) + b"/f\xe9.jsonl")).write_bytes(b"{}\n")
    with pytest.raises(SourceError, match=r"f\\xe9\.jsonl: this name is not UTF-8; .*; rename the file$"):
        find(folder, url)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_folder_that_cannot_be_listed_is_named(folder: Path) -> None:
    (folder / "shut").mkdir(mode=0)
    with pytest.raises(SourceError, match=r"shut: this folder cannot be read \(Permission denied\)"):
        find(folder)


@pytest.mark.parametrize("url", ["reference://x.jsonl", "zip://x.jsonl", "nosuch://x.jsonl", "git://x.jsonl"])
def test_url_with_required_options_is_refused(folder: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{url}: cannot be reached \(.+\); expected .*; correct the scheme"):
        find(folder, url)


ROWS = lines(chat(n) for n in range(20))


class _Failing(BaseHTTPRequestHandler):
    """Fails as the path says: a status, a truncated body, a closed connection."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, *, body: bool = True) -> None:
        what = urlsplit(self.path).path.strip("/").partition("/")[0]
        if what.isdecimal():
            self.send_error(int(what))
            return
        if what == "hangup":
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Content-Length" if what != "chunked" else "X-Length", str(len(ROWS)))
        if what == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if not body:
            return
        if what == "chunked":
            self.wfile.write(b"%x\r\n%s\r\n" % (len(ROWS) // 2, ROWS[: len(ROWS) // 2]))
        else:
            self.wfile.write(ROWS[: len(ROWS) // 2] if what == "short" else ROWS)
        self.close_connection = what in ("short", "chunked")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is the base class's)
        del format, args


@pytest.fixture(autouse=True)
def no_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without delay: these servers fail permanently."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def address() -> Iterator[str]:
    """Serve failures on this machine; yield the host and port."""
    pytest.importorskip("aiohttp", reason="web addresses need aiohttp: pip install 'rowmill[http]'")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Failing) as http:
        thread = Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "words", "may_pass"),
    [
        ("500/a.jsonl", "HTTP status 500 Internal Server Error", True),
        ("503/a.jsonl", "HTTP status 503 Service Unavailable", True),
        ("429/a.jsonl", "HTTP status 429 Too Many Requests", True),
        ("403/a.jsonl", "HTTP status 403 Forbidden", False),
        ("401/a.csv.gz", "HTTP status 401 Unauthorized", False),
        ("hangup/a.jsonl", "Server disconnected", True),
        ("short/a.jsonl", "Response payload is not completed", True),
        ("short/a.parquet", "Response payload is not completed", True),
        ("chunked/a.jsonl", "Response payload is not completed", True),
    ],
)
def test_web_server_failure_is_reported_by_its_kind(
    address: str, tmp_path: Path, path: str, words: str, may_pass: bool
) -> None:
    url = f"http://bob:hunter2@{address}/{path}?X-Amz-Signature=5ec2e7"

    with pytest.raises(SourceError) as caught:
        scan_files(tmp_path, url)

    assert str(caught.value).startswith(f"http://{address}/{path}: cannot be read ({words}")
    assert isinstance(caught.value.__cause__, ConnectionError) is may_pass
    assert_public(f"{caught.value} {caught.value.__cause__!r}")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["404/a.jsonl", "410/a.jsonl"])
def test_missing_web_address_and_unreachable_server_are_reported(address: str, tmp_path: Path, path: str) -> None:
    with pytest.raises(SourceError, match=rf"found no data at http://{address}/{path} \("):
        scan_files(tmp_path, f"http://bob:hunter2@{address}/{path}?X-Amz-Signature=5ec2e7")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        with pytest.raises(SourceError, match=rf"127\.0\.0\.1:{port}/a\.jsonl: cannot be read \(Connect call failed"):
            scan_files(tmp_path, f"http://127.0.0.1:{port}/a.jsonl")


SECRETS = ("hunter2", "bob", "5ec2e7", "AKIDEXAMPLE")


def assert_public(text: str) -> None:
    assert [secret for secret in SECRETS if secret in text] == []


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("data/a?b@c#d.jsonl", "data/a?b@c#d.jsonl"),
        ("s3://bucket/part-?.jsonl", "s3://bucket/part-?.jsonl"),
        ("https://h/a.jsonl", "https://h/a.jsonl"),
        ("https://bob:hunter2@h:8080/a.jsonl", "https://h:8080/a.jsonl"),
        ("HTTPS://bob:hunter2@h/a.jsonl?sig=5ec2e7", "HTTPS://h/a.jsonl"),
        ("https://hunter2@h/a.jsonl", "https://h/a.jsonl"),
        ("https://h/a.jsonl?X-Amz-Credential=AKIDEXAMPLE&X-Amz-Signature=5ec2e7", "https://h/a.jsonl"),
        ("https://h/a.jsonl?AWSAccessKeyId=AKIDEXAMPLE&Signature=5ec2e7&Expires=1", "https://h/a.jsonl"),
        ("https://h/a.jsonl?X-Goog-Signature=5ec2e7#hunter2", "https://h/a.jsonl"),
        ("https://h/a.jsonl?sv=2024&se=2030&sr=b&sp=r&sig=5ec2e7", "https://h/a.jsonl"),
        ("https://h?access_token=hunter2", "https://h"),
        ("ftp://bob:hunter2@h/a.jsonl", "ftp://h/a.jsonl"),
        ("sftp://bob@h/a.jsonl", "sftp://h/a.jsonl"),
        ("abfs://container@account.dfs.core.windows.net/a.jsonl", "abfs://container@account.dfs.core.windows.net/a.jsonl"),
        ("github://org:repo@main/a.jsonl", "github://org:repo@main/a.jsonl"),
        ("simplecache::https://bob:hunter2@h/a.jsonl?sig=5ec2e7::5ec2e7", "simplecache::https://h/a.jsonl"),
        ("zip://a.jsonl::ftp://bob:hunter2@h/a.zip", "zip://a.jsonl::ftp://h/a.zip"),
    ],
)  # fmt: skip
def test_public_url_has_no_login_and_no_signature(url: str, public: str) -> None:
    assert public_url(url) == public
    assert public_url(public) == public


def test_public_url_distinguishes_files_by_their_queries() -> None:
    one, other = (public_url(f"https://h/a.jsonl?id={n}&sig=5ec2e7") for n in (1, 2))

    assert one != other
    assert one == f"https://h/a.jsonl?query={hashlib.sha256(b'id=1').hexdigest()[:12]}", "of the query, not of a repr"
    assert public_url("https://h/a.jsonl?sig=0ther&id=1") == one
    assert public_url(one) == one


def signed(address: str, signature: str = "5ec2e7") -> str:
    return f"http://bob:hunter2@{address}/ok/a.jsonl?X-Amz-Credential=AKIDEXAMPLE&X-Amz-Signature={signature}"


@pytest.mark.slow
def test_two_signatures_of_one_file_have_one_identity_and_two_queries_are_two_files(
    address: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"this file is already named") as caught:
        scan_files(tmp_path, signed(address), signed(address, "5ec2e7b"))
    assert_public(str(caught.value))
    first, second = (Files(train_urls=[signed(address, one)]) for one in ("5ec2e7", "5ec2e7b"))
    assert first.model_dump() == second.model_dump()
    [scan] = scans = scan_files(tmp_path, signed(address))
    assert scans == scan_files(tmp_path, signed(address, "5ec2e7b"))
    # The part is read from its copy.
    assert scan.records == len(values(scans, tmp_path)) == 20
    scans = scan_files(tmp_path, *(f"http://{address}/ok/a.jsonl?id={n}" for n in (1, 2)))
    assert len({one.url for one in scans}) == 2


def contents(store: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file of a store as text, tables as their cells."""
    for path in sorted(one for one in store.rglob("*") if one.is_file()):
        if path.suffix == ".parquet":
            yield path, repr([pq.read_schema(path), pq.read_table(path).to_pylist()])
        elif path.suffix == ".duckdb":
            with duckdb.connect(str(path), read_only=True) as database:
                yield path, repr(database.execute("select sql from duckdb_views()").fetchall())
        yield path, path.read_bytes().decode("latin-1")


@pytest.mark.slow
def test_secrets_of_an_address_are_in_no_output_of_a_build(address: str, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    source = {"train_urls": [signed(address)]}
    built = workspace.recipe({"rows": {"source": source, "format": CHAT}}).build()
    report_page.write_report(workspace.project)
    found = list(contents(workspace.store))

    assert len(built.segments()) == 20
    assert any(f"http://{address}/ok/a.jsonl" in text for path, text in found if path.suffix == ".json")
    assert [(path, secret) for path, text in found for secret in SECRETS if secret in text] == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ({"train_urls": ["*.jsonl"]}, 42),
        ({"train_urls": ["a.jsonl"], "validation_urls": ["b.jsonl"]}, 42),
        ({"train_urls": ["a.jsonl", "absent.jsonl"]}, 0),
        ({"train_urls": ["a.jsonl", "s3://nowhere/b.jsonl"]}, 0),
    ],
)
def test_bytes_of_local_files_are_summed_and_nothing_else_is_an_error(
    folder: Path, source: dict[str, Any], count: int
) -> None:
    (folder / "a.jsonl").write_bytes(b"x" * 30)
    (folder / "b.jsonl").write_bytes(b"x" * 12)
    assert sum_local_bytes(Files(**source), folder) == count
