"""Requests to a server that speaks OpenAI's `/completions`, with retries and deadlines; no error holds the key.

A teacher is such a server: the model whose likeliest tokens `rowmill score` asks it for.
"""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import Any, Literal, TypeVar

from pydantic import Field

from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, GenerationError

URL_PATTERN = r"^https?://[^\s/?#]+[^\s?#]*$"
"""The addresses that servers may have."""

_RETRIED_STATUSES = frozenset({408, 409, 425, 429, *range(500, 600)})
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_MAX_ANSWER_BYTES = 256 << 20
_MAX_ERROR_CHARS = 300

AnswerT = TypeVar("AnswerT")


def read_api_key(variable: str | None, where: str) -> str | None:
    """Return the key in an environment variable; None if no variable is named."""
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not key:
        raise ConfigError(
            f"{where}.api_key_env: the environment variable {variable} is not set; "
            "set it to the server's key, or delete api_key_env if the server needs none"
        )
    return key


class CompletionsServer:
    """Sends bodies to `POST {base_url}/completions`; `where` begins its errors, `wait` sleeps between attempts."""

    def __init__(
        self,
        base_url: str,
        key: str | None,
        *,
        where: str,
        timeout_seconds: float,
        retries: int,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = f"{base_url.rstrip('/')}/completions"
        self._key = key
        self._where = where
        self._timeout_seconds = timeout_seconds
        self._retries = retries
        self._wait = wait
        self._opener = urllib.request.build_opener(_NoRedirect)

    def ask(
        self,
        body: Mapping[str, Any],
        parse: Callable[[bytes], AnswerT],
        *,
        note_failure: Callable[[Exception], object] | None = None,
    ) -> AnswerT:
        """Send one request until it is answered, fails permanently, or has no retries left.

        An `OSError` of `parse` is retried like one of the connection. `note_failure` gets the error of each attempt.
        Raises GenerationError with the last attempt's error as its cause.
        """
        sent = json.dumps(body).encode()
        pause, attempt = _FIRST_WAIT_S, 0
        while True:
            asked_for = None
            try:
                return parse(self._post(sent))
            except urllib.error.HTTPError as error:
                try:
                    said = error.read(1 << 16).decode("utf-8", "replace")
                except (OSError, HTTPException):
                    said = ""
                finally:
                    error.close()
                failure, problem = error, f"HTTP {error.code} {' '.join(said.split())[:_MAX_ERROR_CHARS]}".rstrip()
                # The header may be absent, or a date.
                with suppress(ValueError):
                    asked_for = max(0.0, float(error.headers.get("Retry-After") or ""))
                is_final = error.code not in _RETRIED_STATUSES
            except (OSError, HTTPException) as error:
                failure, problem, is_final = error, f"{type(error).__name__}: {error}", False
            if note_failure is not None:
                note_failure(failure)
            if is_final or attempt == self._retries:
                after = f" after {attempt} retries" if attempt else ""
                raise self.make_error(
                    f"{problem}{after}; check that the server runs and accepts this request"
                ) from failure
            self._wait(min(_LONGEST_WAIT_S, pause if asked_for is None else asked_for))
            pause *= 2
            attempt += 1

    def make_error(self, problem: str) -> GenerationError:
        """Return an error without the key, which the server may have repeated."""
        text = f"{self._where}: {self.url}: {problem}"
        return GenerationError(text if not self._key else text.replace(self._key, "***"))

    def _post(self, sent: bytes) -> bytes:
        """Return the response body; an attempt ends at its deadline even while bytes still arrive."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url, sent, headers, method="POST")  # noqa: S310  (http or https, checked)
        deadline = time.monotonic() + self._timeout_seconds
        with self._opener.open(request, timeout=self._timeout_seconds) as answer:
            read: list[bytes] = []
            size = 0
            while piece := answer.read1(1 << 16):
                read.append(piece)
                size += len(piece)
                if time.monotonic() > deadline:
                    raise TimeoutError("the answer did not end in time")
                if size > _MAX_ANSWER_BYTES:
                    raise self.make_error(f"the answer is over {_MAX_ANSWER_BYTES} bytes")
            length = answer.headers.get("Content-Length")
            if length is not None and length.isdigit() and int(length) != size:
                raise ConnectionError(f"the answer ended after {size} of {length} bytes")
            return b"".join(read)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        """Follow none."""


class Teacher(Config):
    """A server that returns `prompt_logprobs`, such as vLLM, and how many of a token's likeliest ids are kept.

    The block adds `teacher_scores` to the dataset's stages, for `rowmill score`. It does not affect the shards.
    """

    kind: Literal["openai"] = "openai"
    """A completions server."""
    base_url: str = Field(pattern=URL_PATTERN)
    """The URL that `/completions` is appended to, such as `http://127.0.0.1:8000/v1`. Does not change the scores."""
    model: str = Field(min_length=1)
    """The model's name on the server; its tokenizer must be the recipe's."""
    top_k: int = Field(default=8, ge=1, le=1024)
    """Likeliest ids of each trained token that are kept with their log-probabilities; vLLM allows as many as its
    `--max-logprobs`, 20 by default."""
    api_key_env: str | None = None
    """Environment variable that holds the API key; null: no key is sent. The key itself is never part of a recipe."""
    timeout_seconds: float = Field(default=120, gt=0)
    """Seconds until an attempt times out."""
    retries: int = Field(default=5, ge=0)
    """Further attempts after a failure of the connection, or an answer that does not fit the tokens."""
    concurrency: int = Field(default=16, ge=1, le=256)
    """Requests of each worker at once."""

    def identify(self) -> dict[str, Any]:
        """Return the options that decide the scores."""
        return {"model": self.model, "top_k": self.top_k}

    def open(self, where: str) -> CompletionsServer:
        """Return the client; nothing is sent yet."""
        return CompletionsServer(
            self.base_url,
            read_api_key(self.api_key_env, where),
            where=where,
            timeout_seconds=self.timeout_seconds,
            retries=self.retries,
        )
