"""Ports for servers that are told where to listen, and that nobody else takes before they do."""

import os
import socket

FIRST, LAST = 21_000, 31_000
"""Below the ports that a system gives to whoever asks for any (from 32,768 on Linux)."""

_next = FIRST + os.getpid() * 37 % (LAST - FIRST)


def take_free_ports(length: int = 1) -> int:
    """Return the first of some consecutive ports on which nobody listens; no later call returns them again.

    A port found by binding to port 0 may be given to another process as soon as it is let go. Processes of tests begin
    at different places.
    """
    global _next  # noqa: PLW0603 - ports are the whole process's
    for _ in range(LAST - FIRST):
        first = _next
        _next = first + length if first + 2 * length < LAST else FIRST
        if all(_is_free(first + offset) for offset in range(length)):
            return first
    raise RuntimeError(f"no {length} consecutive ports from {FIRST} to {LAST} are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
