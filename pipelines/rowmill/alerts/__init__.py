"""Tell people what became of a build: by webhook, by mail, or by a command of theirs.

    outcome of a build ─► message of six lines ─► was it sent this night? ─► webhook, mail, command
                          (reports/alert_text.py)   (history.py)             (delivery.py)

An alert that cannot be delivered changes no build: it is a line in the log.
"""

from rowmill.alerts.options import AlertEvent, AnyAlert, CommandAlert, EmailAlert, WebhookAlert

__all__ = ["AlertEvent", "AnyAlert", "CommandAlert", "EmailAlert", "WebhookAlert"]
