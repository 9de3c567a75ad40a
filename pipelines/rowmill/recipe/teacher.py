"""Options of a dataset's teacher: the model whose likeliest tokens `rowmill score` asks a server for."""

from typing import Any, Literal

from pydantic import Field

from rowmill.core.completions import URL_PATTERN, CompletionsServer, read_api_key
from rowmill.core.config import Config


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
        """Return the client; nothing is sent yet.

        Raises ConfigError if the key's environment variable is not set.
        """
        return CompletionsServer(
            self.base_url,
            read_api_key(self.api_key_env, where),
            where=where,
            timeout_seconds=self.timeout_seconds,
            retries=self.retries,
        )
