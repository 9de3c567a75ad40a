"""Tell people what became of a build: by webhook, by mail, or by a command of theirs.

    outcome of a build ─► message of six lines ─► was it sent this night? ─► webhook, mail, command
                          (reports/alert_text.py)   (history.py)             (delivery.py)

An alert that cannot be delivered changes no build: it is a line in the log. The options name secrets, and
never hold them.
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from rowmill.core.config import Config

__all__ = ["AlertEvent", "AnyAlert", "CommandAlert", "EmailAlert", "WebhookAlert"]

AlertEvent: TypeAlias = Literal["failed", "blocked", "warned", "overdue", "published"]
"""What became of a build: it ended with an error, a check closed a gate, a check warned, none came in time, or trainers
read a new one."""


class Alert(Config):
    """Options that all kinds of alerts have."""

    on: tuple[AlertEvent, ...] = ("failed", "blocked", "overdue")
    """Events that are told; once per cause and night."""


class WebhookAlert(Alert):
    """A POST of JSON to an address."""

    kind: Literal["webhook"] = "webhook"
    """Post JSON to an address."""
    url_env: str
    """Environment variable that holds the address, which is a secret of most services."""
    format: Literal["plain", "slack", "teams"] = "plain"
    """What the address expects: fields of the message, or what Slack or Microsoft Teams shows as a message."""


class EmailAlert(Alert):
    """A mail by SMTP."""

    kind: Literal["email"] = "email"
    """Send a mail."""
    server: str
    """Host of the mail server, with its port: `smtp.example.org:587`."""
    sender: str
    """Address that the mail comes from."""
    to: tuple[str, ...] = Field(min_length=1)
    """Addresses that the mail goes to."""
    encryption: Literal["starttls", "tls", "none"] = "starttls"
    """How the connection is encrypted; `none` is for a server on the same host."""
    user_env: str | None = None
    """Environment variable with the user's name; null: no login."""
    password_env: str | None = None
    """Environment variable with the password."""

    @model_validator(mode="after")
    def _require_whole_login(self) -> "EmailAlert":
        if (self.user_env is None) != (self.password_env is None):
            given, missing = ("user_env", "password_env") if self.user_env else ("password_env", "user_env")
            raise ValueError(f"{given} without {missing}; a login needs both; set {missing}, or delete {given}")
        return self


class CommandAlert(Alert):
    """A command of this machine, which gets the message as JSON on its standard input."""

    kind: Literal["command"] = "command"
    """Run a command of this machine."""
    run: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments; no shell reads them."""


AnyAlert: TypeAlias = Annotated[WebhookAlert | EmailAlert | CommandAlert, Field(discriminator="kind")]
