"""Choose which messages of a conversation train.

What belongs here: the choice by flag, role and `supervise`, and the answers that dropped text affects. What does not:
which characters of a chosen message train (`turn_cutting.py`).
"""

from collections.abc import Iterator, Sequence

from rowmill.conversation.loss_options import Loss
from rowmill.schema.rows import Message


def choose_supervised(messages: Sequence[Message], loss: Loss, roles: frozenset[str]) -> list[int]:
    """Choose messages by their own flag, else by role, else (for the model's roles) by `supervise`."""
    by_default = not loss.mask and loss.mask_default == "mask"
    if by_default and loss.supervise == "all_assistant":
        return [
            index
            for index, message in enumerate(messages)
            if (
                message["role"] in roles
                if "train" not in message and "weight" not in message
                else _is_trained(message, roles)
            )
        ]
    first = 0
    if loss.supervise == "last_turn":
        first = max((i + 1 for i, m in enumerate(messages) if m["role"] == "user"), default=0)
    elif loss.supervise == "last_assistant":
        first = max((i for i, m in enumerate(messages) if m["role"] in roles), default=len(messages))
    chosen: list[int] = []
    for index, message in enumerate(messages):
        role = message["role"]
        flag = _read_train_flag(message)
        if flag is None:
            is_model = role in roles
            trains = is_model if by_default else loss.mask.get(role, loss.mask_default) == "train"
            flag = trains and (not is_model or index >= first)
        if flag:
            chosen.append(index)
    return chosen


def find_affected_answers(messages: Sequence[Message], origin: int, roles: frozenset[str]) -> Iterator[int]:
    """Yield the assistant messages that text dropped from message `origin` affects.

    The message itself if it is the assistant's; every later one for a system message or the tools (−1); else the next.
    """
    if origin >= 0 and messages[origin]["role"] in roles:
        yield origin
        return
    following = [i for i, m in enumerate(messages) if i > origin and m["role"] in roles]
    everywhere = origin < 0 or messages[origin]["role"] == "system"
    yield from following if everywhere else following[:1]


def _is_trained(message: Message, roles: frozenset[str]) -> bool:
    flag = _read_train_flag(message)
    return message["role"] in roles if flag is None else flag


def _read_train_flag(message: Message) -> bool | None:
    train = message.get("train")
    if train is not None:
        return bool(train)
    weight = message.get("weight")
    return None if weight is None else weight > 0
