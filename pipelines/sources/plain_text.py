"""Plain text: every line with something on it is a record `{"text": line}`.

What belongs here: lines to JSON lines. What does not: joining lines to documents; a file whose documents
span lines has to say where they end, and JSON Lines does.

Blank lines stay blank lines in the staged copy, so that a record's line number is the file's.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO

import orjson

from pipelines.sources.parts import BLANKS, BOM, Slice, cut_lines


def cut(stream: BinaryIO) -> Iterator[Slice]:
    """Cut the file into parts; offsets are the file's own bytes, the content is JSON lines."""
    for piece in cut_lines(stream):
        text = piece.content.removeprefix(BOM) if piece.offset == 0 else piece.content
        yield replace(piece, content=b"\n".join([_record(line) for line in text.split(b"\n")]))


def _record(line: bytes) -> bytes:
    if not line.strip(BLANKS):
        return b""
    line = line.removesuffix(b"\r")
    try:
        return orjson.dumps({"text": line.decode()})
    except UnicodeDecodeError:
        # The bad bytes go on as they are: reading the part then rejects this one line as `not_utf8`.
        value = {"text": line.decode("utf-8", "surrogateescape")}
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")
