"""Client of servers with OpenAI's completions API, over HTTP.

Each prompt is its own request, several at once, so that one failing prompt affects no other. 408, 409, 429, 5xx,
timeouts and lost connections are retried after a delay that doubles, or that the server asks for; anything else is not.
Redirects are not followed: they would send the key and the prompt to a host that is not in the recipe. The key is read
from the environment when the backend is opened, and is removed from every text that leaves this module.
"""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from typing import Any, Literal

from pydantic import Field

from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, GenerationError
from rowmill.kinds.tables.backends.completions import Completion, PromptText

_RETRIED_STATUSES = frozenset({408, 409, 425, 429, *range(500, 600)})
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_MAX_CONCURRENT_REQUESTS = 32
_MAX_ANSWER_BYTES = 256 << 20
_MAX_ERROR_CHARS = 300


class OpenAIBackend(Config):
    """A server that answers `POST {base_url}/completions`, such as vLLM, SGLang, llama.cpp or OpenAI's own."""

    kind: Literal["openai"] = "openai"
    """A completions server."""
    base_url: str = Field(pattern=r"^https?://[^\s/?#]+[^\s?#]*$")
    """The URL that `/completions` is appended to, such as `http://127.0.0.1:8000/v1`."""
    model: str = Field(min_length=1)
    """The model's name on the server."""
    api_key_env: str | None = None
    """Environment variable that holds the API key; null: no key is sent. The key itself is never part of a recipe."""
    timeout_seconds: float = Field(default=120, gt=0)
    """Seconds until an attempt times out."""
    retries: int = Field(default=5, ge=0)
    """Retries of transient failures."""
    prompt_as: Literal["text", "ids"] = "text"
    """Whether prompts are sent as text or as token ids; send ids where the check `prompt_parity` recommends it."""

    def open(self) -> "OpenAICompleter":
        """Return the client; nothing is sent yet.

        Raises
        ------
        ConfigError
            If the key's environment variable is not set.

        """
        key = None
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if not key:
                raise ConfigError(
                    f"generation.backend.api_key_env: the environment variable {self.api_key_env} is not set; "
                    "set it to the server's key, or delete api_key_env if the server needs none"
                )
        return OpenAICompleter(self, key)


class OpenAICompleter:
    """Sends prompts to a completions server; `wait` sleeps between attempts."""

    def __init__(self, config: OpenAIBackend, key: str | None, *, wait: Callable[[float], None] = time.sleep) -> None:
        self._config = config
        self._key = key
        self._wait = wait
        self._url = f"{config.base_url.rstrip('/')}/completions"
        self._opener = urllib.request.build_opener(_NoRedirect)

    def __repr__(self) -> str:
        """Name the server, not the key."""
        return f"{type(self).__name__}({self._url!r}, model={self._config.model!r})"

    def complete(
        self,
        prompts: Sequence[PromptText],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        repetition_penalty: float,
        stop: Sequence[str],
        seeds: Sequence[int],
    ) -> Sequence[Sequence[Completion] | Exception]:
        """Return `n` completions per prompt, or the error of the last attempt."""
        # At temperature 0 all samples are equal, and servers refuse to draw several.
        drawn = n if temperature > 0 else 1
        options: dict[str, Any] = {
            "model": self._config.model, "n": drawn, "max_tokens": max_tokens, "temperature": temperature,
            "top_p": top_p, "stop": list(stop),
        }  # fmt: skip
        if repetition_penalty != 1:
            options["repetition_penalty"] = repetition_penalty

        def ask(prompt: PromptText, seed: int) -> Sequence[Completion] | Exception:
            is_text = self._config.prompt_as == "text"
            sent = prompt.text if is_text or prompt.ids is None else list(prompt.ids)
            try:
                found = self._send_with_retries({**options, "prompt": sent, "seed": seed}, drawn)
            except GenerationError as error:
                return error
            return found * n if drawn < n else found

        with ThreadPoolExecutor(min(len(prompts), _MAX_CONCURRENT_REQUESTS) or 1) as pool:
            return list(pool.map(ask, prompts, seeds))

    def _send_with_retries(self, body: dict[str, Any], n: int) -> list[Completion]:
        """Send one request until it is answered, fails permanently, or has no retries left."""
        sent = json.dumps(body).encode()
        pause, problem = _FIRST_WAIT_S, ""
        for attempt in range(self._config.retries + 1):
            asked_for = None
            try:
                return self._parse_answer(self._post_request(sent), n)
            except urllib.error.HTTPError as error:
                problem = self._describe_http_error(error)
                # The header may be absent, or a date.
                with suppress(ValueError):
                    asked_for = max(0.0, float(error.headers.get("Retry-After") or ""))
                if error.code not in _RETRIED_STATUSES:
                    raise self._make_error(problem, attempt) from None
            except (OSError, HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < self._config.retries:
                self._wait(min(_LONGEST_WAIT_S, pause if asked_for is None else asked_for))
                pause *= 2
        raise self._make_error(problem, self._config.retries) from None

    def _post_request(self, sent: bytes) -> bytes:
        """Return the response body; an attempt ends at its deadline even while bytes still arrive."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, sent, headers, method="POST")  # noqa: S310  (http or https, checked)
        limit = self._config.timeout_seconds
        deadline = time.monotonic() + limit
        with self._opener.open(request, timeout=limit) as answer:
            read: list[bytes] = []
            size = 0
            while piece := answer.read1(1 << 16):
                read.append(piece)
                size += len(piece)
                if time.monotonic() > deadline:
                    raise TimeoutError("the answer did not end in time")
                if size > _MAX_ANSWER_BYTES:
                    raise GenerationError(self._format_problem(f"the answer is over {_MAX_ANSWER_BYTES} bytes"))
            length = answer.headers.get("Content-Length")
            if length is not None and length.isdigit() and int(length) != size:
                raise ConnectionError(f"the answer ended after {size} of {length} bytes")
            return b"".join(read)

    def _parse_answer(self, answer: bytes, n: int) -> list[Completion]:
        """Return the completions of a response, in the order of their index."""
        try:
            choices: list[dict[str, Any]] = json.loads(answer)["choices"]
            ordered = sorted(choices, key=lambda one: one.get("index", 0))
            found = [Completion(one["text"], one.get("finish_reason")) for one in ordered]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise GenerationError(
                self._format_problem(
                    "the answer is not a completions object; check that base_url is that of a completions server"
                )
            ) from None
        if len(found) != n or not all(isinstance(one.text, str) for one in found):
            raise GenerationError(self._format_problem(f"the answer has {len(found)} texts; {n} were requested"))
        return found

    def _describe_http_error(self, error: urllib.error.HTTPError) -> str:
        """Return the server's error message, shortened."""
        try:
            said = error.read(1 << 16).decode("utf-8", "replace")
        except (OSError, HTTPException):
            said = ""
        finally:
            error.close()
        return f"HTTP {error.code} {' '.join(said.split())[:_MAX_ERROR_CHARS]}".rstrip()

    def _make_error(self, problem: str, retries: int) -> GenerationError:
        after = f" after {retries} retries" if retries else ""
        return GenerationError(
            self._format_problem(f"{problem}{after}; check that the server runs and accepts this request")
        )

    def _format_problem(self, problem: str) -> str:
        """Format a problem without the key, which the server may have repeated."""
        text = f"generation.backend: {self._url}: {problem}"
        return text if not self._key else text.replace(self._key, "***")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        """Follow none."""
