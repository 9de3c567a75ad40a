"""Alerts: what is told of a build, to real servers on loopback, and that nothing they do changes the build."""

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import date, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rowmill.alerts import CommandAlert, EmailAlert, WebhookAlert
from rowmill.alerts.delivery import AlertMessage, deliver, find_missing_secrets
from rowmill.alerts.history import end_causes, load_causes, save_causes
from rowmill.cli import build_commands
from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError, GateError, PipelineError
from rowmill.core.storage import Store
from rowmill.reports import alert_text, report_page
from tests.support.cli_project import BAD_LINE, RECIPE, CliProject
from tests.support.ports import take_free_ports

MESSAGE = AlertMessage("demo", "blocked", "demo: blocked", ("chats/canonical_rows: rejects is 3 %", "Correct them."))

MARKUP = "unknown_role: 3, the first is **b** _i_ ~s~ `c` # h > q :100: [x](https://example.org/x) <!channel> & <b>"
LINK = "https://reports.example.org/demo/report.html"


class Receiver:
    """A server that answers with these statuses, then with 200, and keeps what it was sent."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.received = list(statuses), list[dict[str, Any]]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = outer.statuses.pop(0) if outer.statuses else 200
                if status == 200:
                    outer.received.append(body)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: Any, **__: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/hook?secret=s3cret"


@contextmanager
def receiving(*statuses: int) -> Generator[Receiver]:
    receiver = Receiver(*statuses)
    thread = threading.Thread(target=receiver.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()


def webhook(monkeypatch: pytest.MonkeyPatch, url: str, **options: Any) -> WebhookAlert:
    monkeypatch.setenv("HOOK", url)
    return WebhookAlert(url_env="HOOK", **options)


def test_webhook_that_refuses_twice_gets_the_message_at_the_third_try(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving(503, 429) as receiver:
        assert deliver(webhook(monkeypatch, receiver.url), MESSAGE, pauses_s=(0, 0)) is None

    assert receiver.received == [
        {
            "recipe": "demo",
            "event": "blocked",
            "title": "demo: blocked",
            "lines": ["chats/canonical_rows: rejects is 3 %", "Correct them."],
            "link": "",
        }
    ]


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ("plain", lambda body: [body["title"], *body["lines"]]),
        ("slack", lambda body: read_slack(body).splitlines()),
        ("teams", lambda body: [run["text"] for run in read_teams(body)]),
    ],
)
def test_services_get_the_lines_in_their_own_shape_and_none_of_their_markup(
    monkeypatch: pytest.MonkeyPatch, shape: str, shown: Any
) -> None:
    message = replace(MESSAGE, lines=(*MESSAGE.lines, MARKUP, LINK), link=LINK)
    with receiving() as receiver:
        assert deliver(webhook(monkeypatch, receiver.url, format=shape), message) is None

    assert shown(receiver.received[0]) == [message.title, *message.lines]


def read_slack(body: dict[str, Any]) -> str:
    """Return what Slack shows, of elements that have no markup; a link is one, and what is bold is the title alone."""
    [block] = body["blocks"]
    [section] = block["elements"]
    assert (block["type"], section["type"]) == ("rich_text", "rich_text_section")
    assert [element["text"] for element in section["elements"] if "style" in element] == [MESSAGE.title]
    assert [element for element in section["elements"] if element["type"] != "text"] == [{"type": "link", "url": LINK}]
    return "".join(element.get("text") or element["url"] for element in section["elements"])


def read_teams(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of text that Teams shows, which have no markup; a link is a button."""
    card = body["attachments"][0]["content"]
    assert {block["type"] for block in card["body"]} == {"RichTextBlock"}
    assert card["actions"] == [{"type": "Action.OpenUrl", "title": "Open the report", "url": LINK}]
    runs = [run for block in card["body"] for run in block["inlines"]]
    assert {run["type"] for run in runs} == {"TextRun"}
    assert [run["text"] for run in runs if "weight" in run] == [MESSAGE.title]
    return runs


@pytest.mark.parametrize(
    ("statuses", "problem", "tries"),
    [
        ((500, 500, 500), "webhook: 127.0.0.1 answered 500 Internal Server Error", 3),
        ((404,), "webhook: 127.0.0.1 answered 404 Not Found", 1),
        ((302,), "webhook: 127.0.0.1 answered 302 Found", 1),
    ],
    ids=["a server that fails each time", "an address that is not known", "a redirect, which is not followed"],
)
def test_refused_webhook_is_one_line_without_the_secret_address(
    monkeypatch: pytest.MonkeyPatch, statuses: tuple[int, ...], problem: str, tries: int
) -> None:
    with receiving(*statuses) as receiver:
        assert deliver(webhook(monkeypatch, receiver.url), MESSAGE, pauses_s=(0, 0)) == problem

    assert len(statuses) - len(receiver.statuses) == tries
    assert receiver.received == []


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:9/hook", "webhook: 127.0.0.1 cannot be reached: [Errno 111] Connection refused"),
        ("file:///etc/passwd", "webhook: its address is not one of http or https; set another"),
        ("http://bob:s3cret@127.0.0.1/hook", "webhook: its address has a login, which is not sent; set another"),
        ("http://127.0.0.1/hook of/s3cret", "webhook: 127.0.0.1: its address is not valid; set another"),
        ("http://127.0.0.1:s3cret/hook", "webhook: 127.0.0.1: its address is not valid; set another"),
    ],
    ids=["nobody listens", "a file", "a login", "a space", "no port"],
)
def test_address_that_cannot_take_a_message_is_named(monkeypatch: pytest.MonkeyPatch, url: str, problem: str) -> None:
    assert deliver(webhook(monkeypatch, url), MESSAGE, pauses_s=()) == problem


def test_text_from_data_calls_nobody_on_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    message = replace(MESSAGE, lines=("unknown_role: 3, the first is <!channel> & co",))
    with receiving() as receiver:
        assert deliver(webhook(monkeypatch, receiver.url, format="slack"), message) is None

    [body] = receiver.received
    assert body["text"] == "demo: blocked\nunknown_role: 3, the first is &lt;!channel&gt; &amp; co"


def test_server_that_speaks_no_http_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"220 mail\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        problem = deliver(webhook(monkeypatch, f"http://127.0.0.1:{listener.getsockname()[1]}/"), MESSAGE, pauses_s=())
        thread.join()

    assert problem == "webhook: 127.0.0.1 cannot be reached: 220 mail"


def test_command_gets_the_message_on_its_standard_input(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    script = f"import sys, pathlib; pathlib.Path({str(kept)!r}).write_bytes(sys.stdin.buffer.read())"

    assert deliver(CommandAlert(run=(sys.executable, "-c", script)), MESSAGE) is None
    assert json.loads(kept.read_bytes())["title"] == "demo: blocked"
    assert deliver(CommandAlert(run=(sys.executable, "-c", "import sys; sys.exit('no')")), MESSAGE) == (
        f"command: {sys.executable} ended with status 1 no"
    )


def test_signature_of_an_address_is_told_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signed = "https://example.org/a.jsonl?X-Amz-Signature=s3cret"
    run = [sys.executable, "-c", f"import sys; sys.exit('no answer of {signed}')"]
    alerts = [{"kind": "webhook", "url_env": "HOOK"}, {"kind": "command", "run": run}]
    project = write_alerts(CliProject(tmp_path), *alerts)
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        [problem] = alert_text.announce(project.project, errors=[OSError(f"cannot read {signed}")])

    assert receiver.received[0]["lines"][0] == "cannot read https://example.org/a.jsonl"
    assert problem.endswith("ended with status 1 no answer of https://example.org/a.jsonl")


def test_mail_that_cannot_be_written_is_one_line() -> None:
    alert = EmailAlert(server="127.0.0.1:9", sender="a@example.org\nBcc: c@example.org", to=("b@example.org",))
    problem = deliver(alert, replace(MESSAGE, lines=("half a character: \ud800",)), pauses_s=())

    assert problem is not None
    assert problem.startswith("email: 127.0.0.1:9: Header values may not contain linefeed")


def test_secret_that_is_not_set_is_named_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOBODY", raising=False)
    monkeypatch.setenv("THE_PASSWORD", "secret")
    login = {"user_env": "NOBODY", "password_env": "THE_PASSWORD"}
    alert = EmailAlert(server="127.0.0.1:9", sender="a@example.org", to=("b@example.org",), **login)
    [missing] = find_missing_secrets([alert])

    assert missing == (
        "execution.alerts.0.user_env: the environment variable NOBODY is not set; it holds the secret of this alert, "
        "which is not sent without it; set it"
    )
    assert deliver(alert, MESSAGE) == missing


@pytest.mark.parametrize(
    ("given", "missing"), [("user_env", "password_env"), ("password_env", "user_env")], ids=["user", "password"]
)
def test_half_a_login_is_refused(given: str, missing: str) -> None:
    options = {"server": "127.0.0.1:9", "sender": "a@example.org", "to": ["b@example.org"], given: "MAIL"}

    with pytest.raises(ConfigError, match=f"{given} without {missing}; a login needs both; set {missing}, or delete"):
        validate_options(EmailAlert, options, "execution.alerts.0")


def test_mail_reaches_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = pytest.importorskip("aiosmtpd.controller", reason="aiosmtpd is not installed")
    received: list[Any] = []

    class Keeper:
        async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
            received.append(envelope)
            return "250 OK"

    port = take_free_ports()
    server = controller.Controller(Keeper(), hostname="127.0.0.1", port=port)
    server.start()
    try:
        mail: dict[str, Any] = {"server": f"127.0.0.1:{port}", "sender": "a@example.org", "to": ("b@example.org",)}
        assert deliver(EmailAlert(**mail, encryption="none"), MESSAGE) is None
        refused = deliver(EmailAlert(**mail), MESSAGE, pauses_s=())
    finally:
        server.stop()

    text = received[0].content.decode()
    assert "Subject: demo: blocked" in text
    assert "\nDate: " in text
    assert "chats/canonical_rows: rejects is 3 %" in text
    # A server that cannot encrypt gets no mail unless the recipe says so.
    assert refused == f"email: 127.0.0.1:{port}: STARTTLS extension not supported by server."
    assert len(received) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_mail_goes_to_no_server_whose_certificate_nobody_signed(tmp_path: Path) -> None:
    pair = [str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")]
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-keyout", pair[0], "-out", pair[1]]
    subprocess.run(["openssl", "req", *options], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair[1], pair[0])
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError), context.wrap_socket(connection, server_side=True) as encrypted:
                encrypted.sendall(b"220 mail\r\n")
                said.append(encrypted.recv(100))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        server = f"127.0.0.1:{listener.getsockname()[1]}"
        alert = EmailAlert(server=server, sender="a@example.org", to=("b@example.org",), encryption="tls")
        problem = deliver(alert, MESSAGE, pauses_s=())
        thread.join()

    assert problem is not None
    assert "certificate verify failed" in problem
    assert said == []


# ── Once a night, to everybody ────────────────────────────────────────────────────────────────────


def announce_nights(
    project: CliProject, monkeypatch: pytest.MonkeyPatch, *nights: tuple[int, *tuple[BaseException, ...]]
) -> None:
    """Announce the errors of some builds, each on a night of November."""
    for night, *errors in nights:
        monkeypatch.setattr(alert_text, "datetime", FrozenDate(night))
        alert_text.announce(project.project, errors=errors)


class FrozenDate:
    """Stands for `datetime`: its now is a night of November."""

    def __init__(self, night: int) -> None:
        self.night = night

    def now(self, zone: Any) -> datetime:
        return datetime(2026, 11, self.night, 2, tzinfo=zone)


def write_alerts(project: CliProject, *alerts: dict[str, Any]) -> CliProject:
    return project.write(execution={"workers": 1, "alerts": list(alerts)})


def test_cause_is_told_once_a_night_with_the_number_of_nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = write_alerts(CliProject(tmp_path), {"kind": "webhook", "url_env": "HOOK", "on": ["failed", "published"]})
    disk, network = PipelineError("the disk is gone"), OSError("the network is gone")
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        announce_nights(project, monkeypatch, (1, disk), (1, disk), (2, disk), (2, network), (3, disk), (3, disk))

    assert [message["title"] for message in receiver.received] == [
        "small: failed",
        "small: failed on the second night",
        "small: failed",
        "small: failed on the third night",
    ]


def test_different_failures_of_a_night_are_both_told_and_the_same_one_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = write_alerts(CliProject(tmp_path), {"kind": "webhook", "url_env": "HOOK"})
    chats, full = PipelineError("chats/raw_dataset: no such file"), "no space left; {} bytes are free, at 0x7f{}"
    texts = [full.format("12,345", "a1"), full.format("9,876", "b2")]
    notes = [PipelineError(f"notes/raw_dataset: {text}\nmore") for text in texts]
    closed = GateError("tasks/canonical_rows: the gate is closed")
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        builds = [(1, chats), (1, chats, notes[0]), (1, notes[1], chats), (2, notes[0], chats), (2, closed, notes[1])]
        announce_nights(project, monkeypatch, *builds)

    said = [(message["title"], *message["lines"][:2]) for message in receiver.received]
    assert [lines[0] for lines in said] == [
        "small: failed",
        "small: failed",
        "small: failed on the second night",
        "small: blocked",
    ]
    # What is new comes first, and nothing is told of the third build: only its numbers differ.
    assert said[0][1] == "chats/raw_dataset: no such file"
    assert said[1][1:] == (f"notes/raw_dataset: {texts[0]} (and 1 more)", "more")
    assert said[2][1:] == (f"notes/raw_dataset: {texts[0]} (and 1 more)", "more")
    assert said[3][1] == "tasks/canonical_rows: the gate is closed"
    # Each of the others has its line, also below the reasons of the first.
    assert [message["lines"][2] for message in receiver.received[1:3]] == ["also chats/raw_dataset: no such file"] * 2


def test_failure_of_a_command_and_of_dagster_is_one_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = write_alerts(CliProject(tmp_path), {"kind": "webhook", "url_env": "HOOK"})
    (tmp_path / "data" / "tasks.csv").unlink()
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        status = project.rowmill("build", "--alert", "--skip-preflight")
        told = receiver.received[0]["lines"][0]
        # What Dagster keeps of the error is its text, behind the stage.
        alert_text.announce(project.project, errors=[PipelineError(told)])

    assert status == 2
    assert told.startswith("tasks/raw_dataset: found no data at data/tasks.csv (")
    assert len(receiver.received) == 1


def test_line_from_data_begins_no_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = write_alerts(CliProject(tmp_path), {"kind": "webhook", "url_env": "HOOK"})
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        announce_nights(project, monkeypatch, (1, PipelineError("a\x1b[31m\u202eb\u2028c")))

    assert receiver.received[0]["lines"][:2] == ["a␛[31m\\u202eb", "c"]


def test_published_build_ends_a_cause(tmp_path: Path) -> None:
    store, night = Store(str(tmp_path)), date(2026, 11, 1)
    for days in (0, 1):
        save_causes(store, "demo", load_causes(store, "demo", "blocked", {"rejects"}, night + timedelta(days)))
    [before] = load_causes(store, "demo", "blocked", {"rejects"}, night + timedelta(2)).values()
    published = load_causes(store, "demo", "published", {"1f2e"}, night + timedelta(2))
    end_causes(store, "demo", published, night + timedelta(2))
    [after] = load_causes(store, "demo", "blocked", {"rejects"}, night + timedelta(3)).values()

    assert (before.nights, after.nights) == (3, 1)


def test_published_build_with_a_warning_is_told_as_both_and_counts_the_nights_of_the_warning_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alert = {"kind": "webhook", "url_env": "HOOK", "on": ["blocked", "warned"]}
    # Sequences of few rows are not full, which warns.
    gates = {**RECIPE["gates"], "fill": {"at_least": 0.9}}
    project = CliProject(tmp_path).write(execution={"workers": 1, "alerts": [alert]}, gates=gates)
    rows = (tmp_path / "data" / "chats.jsonl").read_text().splitlines()
    nights = [[*rows, *[BAD_LINE] * 39], rows, rows[:-1], [*rows, *[BAD_LINE] * 39]]
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        for night, lines in enumerate(nights, 1):
            monkeypatch.setattr(alert_text, "datetime", FrozenDate(night))
            project.write_data("chats.jsonl", "\n".join(lines))
            project.rowmill("build", "--alert", "--skip-preflight")

    assert [message["title"] for message in receiver.received] == [
        "small: blocked",
        "small: warned",
        "small: warned on the second night",
        "small: blocked",
    ]


def test_message_is_sent_again_only_to_those_who_missed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = [{"kind": "webhook", "url_env": name} for name in ("HOOK", "OTHER")]
    project = write_alerts(CliProject(tmp_path), *hooks)
    gone = PipelineError("the disk is gone")
    with receiving() as first, receiving(404) as second:
        monkeypatch.setenv("HOOK", first.url)
        monkeypatch.setenv("OTHER", second.url)
        said, pages = list[list[str]](), list[str]()
        for _ in range(3):
            said.append(alert_text.announce(project.project, errors=[gone]))
            report_page.write_report(project.project)
            pages.append(project.project.store.read(report_page.report_path("small")).decode())

    assert said == [["an alert was not delivered: webhook: 127.0.0.1 answered 404 Not Found"], [], []]
    assert [len(receiver.received) for receiver in (first, second)] == [1, 1]
    shown = "An alert was not delivered: webhook: 127.0.0.1 answered 404 Not Found"
    assert [shown in page for page in pages] == [True, False, False]
    assert not any(
        url in (tmp_path / ".rowmill" / "small" / "alerts.json").read_text() for url in (first.url, "s3cret")
    )


@pytest.mark.slow
def test_alert_that_was_not_delivered_is_one_line_of_the_terminal(tmp_path: Path) -> None:
    project = write_alerts(CliProject(tmp_path), {"kind": "webhook", "url_env": "HOOK", "on": ["published"]})
    command = [sys.executable, "-c", "import sys; from rowmill.cli.main import main; sys.exit(main(sys.argv[1:]))"]
    command += ["build", project.recipe, "--alert", "--skip-preflight"]
    done = subprocess.run(
        command, env={**os.environ, "HOOK": "file:///nowhere"}, capture_output=True, text=True, check=True
    )

    assert [line for line in (done.stdout + done.stderr).splitlines() if "not delivered" in line] == [
        "! an alert was not delivered: webhook: its address is not one of http or https; set another"
    ]


def test_build_tells_what_blocked_it_and_then_that_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        alerts = [{"kind": "webhook", "url_env": "HOOK", "on": ["blocked", "failed", "published"]}]
        execution = {"workers": 1, "alerts": alerts, "reports_url": "https://reports.example.org"}
        project = CliProject(tmp_path).write(execution=execution)
        good = (tmp_path / "data" / "chats.jsonl").read_text()
        project.write_data("chats.jsonl", "\n".join([*good.splitlines(), *[BAD_LINE] * 39]))
        statuses = [project.rowmill("build", "--alert", "--skip-preflight") for _ in range(2)]
        project.write_data("chats.jsonl", good)
        statuses += [project.rowmill("build", "--alert", "--skip-preflight") for _ in range(2)]
        project.write_data("chats.jsonl", "\n".join(good.splitlines()[:-2]))
        statuses += [project.rowmill("build", "--alert", "--skip-preflight") for _ in range(2)]

    assert statuses == [1, 1, 0, 0, 0, 0]
    blocked, published, smaller = receiver.received
    assert blocked["title"] == "small: blocked"
    assert "rejects is 50 %" in blocked["lines"][0]
    assert "Trainers have no build of this recipe yet." in blocked["lines"]
    assert blocked["link"] == "https://reports.example.org/small/report.html"
    assert published["event"] == "published"
    assert any(line.startswith("Trainers read version ") for line in published["lines"])
    assert ": files: 1 changed; rows +0 -2; tokens +0 -" in smaller["lines"][0]
    assert "an alert was not delivered" not in capsys.readouterr().err


def test_earlier_build_that_trainers_read_again_is_told_and_a_quiet_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        project = write_alerts(CliProject(tmp_path), {"kind": "webhook", "url_env": "HOOK", "on": ["published"]})
        good = (tmp_path / "data" / "chats.jsonl").read_text()
        versions = list[str | None]()
        for night, chats in enumerate([good, good, "\n".join(good.splitlines()[:-2]), good, good], 1):
            monkeypatch.setattr(alert_text, "datetime", FrozenDate(night))
            project.write_data("chats.jsonl", chats)
            # A run that published and was killed before it told anybody.
            project.rowmill("build", "--skip-preflight")
            project.rowmill("build", "--alert", "--skip-preflight")
            versions.append(alert_text.find_published_version(project.project))

    first, same, smaller, again, quiet = versions
    assert first == same == again == quiet != smaller
    lines = [line for message in receiver.received for line in message["lines"] if "Trainers read version" in line]
    assert [line.split()[3].strip(",") for line in lines] == [str(one)[:12] for one in (first, smaller, again)]


def test_interrupted_build_tells_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        alerts = [{"kind": "webhook", "url_env": "HOOK", "on": ["warned", "published"]}]
        gates = {**RECIPE["gates"], "fill": {"at_least": 0.9}}
        project = CliProject(tmp_path).write(execution={"workers": 1, "alerts": alerts}, gates=gates)
        project.rowmill("build", "--skip-preflight")
        monkeypatch.setattr(build_commands, "build_stages", Mock(side_effect=KeyboardInterrupt))
        status = project.rowmill("build", "--alert", "--skip-preflight")

    assert (status, receiver.received) == (130, [])


def test_build_beside_another_tells_nobody_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = write_alerts(CliProject(tmp_path), {"kind": "webhook", "url_env": "HOOK"})
    gone = PipelineError("the disk is gone")
    with receiving() as receiver, ThreadPoolExecutor(4) as builds:
        monkeypatch.setenv("HOOK", receiver.url)
        said = list(builds.map(lambda _: alert_text.announce(project.project, errors=[gone]), range(4)))

    assert (said, len(receiver.received)) == ([[]] * 4, 1)
