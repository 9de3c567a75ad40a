"""Deliver a message: each kind of alert has one function, and all are tried again if the other side is not ready."""

import html
import http.client
import json
import os
import smtplib
import ssl
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.message import EmailMessage
from functools import partial
from typing import Any

from rowmill.alerts import AlertEvent, AnyAlert, CommandAlert, EmailAlert, WebhookAlert
from rowmill.core.errors import PipelineError
from rowmill.core.remote import public_text

DELIVERY_TIMEOUT_S = 10
"""Seconds that an address, a mail server or a command has for its answer."""

PAUSES_S = (1.0, 5.0)
"""Seconds before the second and the third try."""


@dataclass(frozen=True, slots=True)
class AlertMessage:
    """What is told: a title, and at most six lines, of which the title is the first."""

    recipe: str
    event: AlertEvent
    title: str
    lines: tuple[str, ...]
    link: str = ""
    """Address of the report; empty if reports are not served."""

    @property
    def text(self) -> str:
        """The message as plain text."""
        return "\n".join((self.title, *self.lines))


class _UndeliveredError(PipelineError):
    """An alert that was not delivered; `may_pass` if another try may succeed."""

    def __init__(self, message: str, *, may_pass: bool) -> None:
        super().__init__(message, may_pass)
        self.message = message
        self.may_pass = may_pass


def find_missing_secrets(alerts: Iterable[AnyAlert]) -> list[str]:
    """Return a sentence per environment variable that an alert names and that is not set."""
    missing: list[str] = []
    for number, alert in enumerate(alerts):
        for name in ("url_env", "user_env", "password_env"):
            variable = getattr(alert, name, None)
            if variable is not None and not os.environ.get(variable):
                missing.append(
                    f"execution.alerts.{number}.{name}: the environment variable {variable} is not set; it holds the "
                    "secret of this alert, which is not sent without it; set it"
                )
    return missing


def deliver(alert: AnyAlert, message: AlertMessage, *, pauses_s: Sequence[float] = PAUSES_S) -> str | None:
    """Deliver a message; return None, or in one line why it was not delivered."""
    problem = find_missing_secrets([alert])
    if problem:
        return problem[0]
    for pause in (*pauses_s, None):
        try:
            match alert:
                case WebhookAlert():
                    _post(os.environ[alert.url_env], _shape_payload(message, alert.format))
                case EmailAlert():
                    _mail(alert, message)
                case CommandAlert():
                    _run(alert.run, message)
        except _UndeliveredError as error:
            if pause is None or not error.may_pass:
                return public_text(f"{alert.kind}: {error.message}")
            time.sleep(pause)
        else:
            return None
    return None


def _shape_payload(message: AlertMessage, shape: str) -> dict[str, Any]:
    # These elements are shown as they are: no `*`, `[…](…)` or `:100:` in a text from data is markup in them.
    if shape == "slack":
        elements: list[dict[str, Any]] = [{"type": "text", "text": message.title, "style": {"bold": True}}]
        for line in message.lines:
            shown = {"type": "link", "url": line} if line == message.link else {"type": "text", "text": line}
            elements += [{"type": "text", "text": "\n"}, shown]
        blocks = [{"type": "rich_text", "elements": [{"type": "rich_text_section", "elements": elements}]}]
        # What notifications show, and services that take Slack's messages; there, <!channel> would call everybody.
        return {"text": html.escape(message.text, quote=False), "blocks": blocks}
    if shape == "teams":
        runs = [{"type": "TextRun", "text": message.title, "weight": "Bolder"}]
        runs += [{"type": "TextRun", "text": line} for line in message.lines]
        body = [{"type": "RichTextBlock", "inlines": [run]} for run in runs]
        actions = [{"type": "Action.OpenUrl", "title": "Open the report", "url": message.link}] if message.link else []
        card = {"type": "AdaptiveCard", "version": "1.4", "body": body, "actions": actions}
        return {
            "type": "message",
            "attachments": [{"contentType": "application/vnd.microsoft.card.adaptive", "content": card}],
        }
    return asdict(message)


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would send the message, with what data it quotes, to an address that nobody named."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none."""


def _post(url: str, payload: dict[str, Any]) -> None:
    # The address is a secret, so that messages name its host alone.
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _UndeliveredError("its address is not one of http or https; set another", may_pass=False)
    if "@" in parts.netloc:
        raise _UndeliveredError("its address has a login, which is not sent; set another", may_pass=False)
    request = urllib.request.Request(  # noqa: S310  (checked above)
        url, json.dumps(payload).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.build_opener(_RefuseRedirects).open(request, timeout=DELIVERY_TIMEOUT_S) as answer:
            answer.read(1 << 16)
    except urllib.error.HTTPError as error:
        may_pass = error.code >= 500 or error.code in (408, 429)
        raise _UndeliveredError(f"{parts.hostname} answered {error.code} {error.reason}", may_pass=may_pass) from error
    except http.client.InvalidURL as error:
        # Its text quotes the address.
        raise _UndeliveredError(f"{parts.hostname}: its address is not valid; set another", may_pass=False) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise _UndeliveredError(f"{parts.hostname} cannot be reached: {reason}", may_pass=True) from error


def _mail(alert: EmailAlert, message: AlertMessage) -> None:
    mail = EmailMessage()
    host, _, port = alert.server.rpartition(":")
    try:
        mail["Subject"], mail["From"], mail["To"] = message.title, alert.sender, ", ".join(alert.to)
        # Every mail must have one; not every server adds it.
        mail["Date"] = datetime.now(UTC)
        mail.set_content(message.text.encode("utf-8", "replace").decode())
        # Without a context, smtplib takes any certificate.
        verified = ssl.create_default_context()
        connect = partial(smtplib.SMTP_SSL, context=verified) if alert.encryption == "tls" else smtplib.SMTP
        with connect(host or port, int(port) if host else 0, timeout=DELIVERY_TIMEOUT_S) as server:
            if alert.encryption == "starttls":
                server.starttls(context=verified)
            if alert.user_env is not None and alert.password_env is not None:
                server.login(os.environ[alert.user_env], os.environ[alert.password_env])
            refused = server.send_message(mail)
    except smtplib.SMTPResponseException as error:
        answer = (
            error.smtp_error.decode("utf-8", "replace") if isinstance(error.smtp_error, bytes) else error.smtp_error
        )
        raise _UndeliveredError(
            f"{alert.server} answered {error.smtp_code} {answer}", may_pass=400 <= error.smtp_code < 500
        ) from error
    except (OSError, ValueError) as error:
        # Errors of SMTP are errors of the system, too, but come again.
        may_pass = isinstance(error, OSError) and not isinstance(error, smtplib.SMTPException)
        raise _UndeliveredError(f"{alert.server}: {error}", may_pass=may_pass) from error
    if refused:
        raise _UndeliveredError(f"{alert.server} refused {', '.join(refused)}", may_pass=False)


def _run(command: Sequence[str], message: AlertMessage) -> None:
    try:
        done = subprocess.run(  # noqa: S603  (the recipe names it, and no shell reads it)
            list(command),
            input=json.dumps(asdict(message)).encode(),
            timeout=DELIVERY_TIMEOUT_S,
            capture_output=True,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise _UndeliveredError(f"{command[0]}: {error}", may_pass=False) from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise _UndeliveredError(f"{command[0]} ended with status {done.returncode} {' '.join(said)}", may_pass=False)
