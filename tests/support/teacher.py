"""A teacher whose distributions follow from a table: a server's answers, and what is expected."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.completions_server import Reply


def rank(ids: Sequence[int], at: int, top_k: int) -> list[tuple[int, float]]:
    """Return the entry of a place, likeliest first: ids from the token before it and from the place, and its own."""
    likeliest = {(31 * ids[at - 1] + 7 * at + j) % 600: -(j + 1.5) for j in range(top_k)}
    return sorted(({ids[at]: -99.5} | likeliest).items(), key=lambda one: (-one[1], one[0]))


def answer(ids: Sequence[int], top_k: int) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` as vLLM does."""
    entries = [rank(ids, at, top_k) for at in range(1, len(ids))]
    return [
        None,
        *({str(token): {"logprob": value, "rank": at} for at, (token, value) in enumerate(one, 1)} for one in entries),
    ]


def reply(entries: Any, **named: Any) -> Reply:
    """Return a completion with such a list, which names other values of the answer."""
    completion = {"choices": [{"index": 0, "text": "x", "prompt_logprobs": entries}], **named}
    return Reply(body=json.dumps(completion).encode())


def teach(request: Mapping[str, Any]) -> Reply:
    """Answer a request by the table."""
    return reply(answer(request["prompt"], request["prompt_logprobs"]), model=request["model"])
