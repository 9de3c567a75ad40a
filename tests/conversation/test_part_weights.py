"""Parts of a message that train apart: no character of an untrained part trains, whatever the template."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.conversation.template_registry import read_named_template
from rowmill.core.json import Json
from rowmill.schema.rows import Conversation, MaskedConversation
from tests.conversation.test_loss_mask import LETTERS, mask, masker
from tests.support.messages import assistant, trained_characters, user
from tests.support.recipes import Workspace

WRONG_RIGHT: Json = {"content": [[6, 0.0], [5, 1.0]]}


def test_template_text_trains_with_the_part_before_it() -> None:
    answer = assistant("WRONG RIGHT", part_weights=WRONG_RIGHT)

    assert mask(LETTERS, [user("U"), answer]) == "<u>U<e>\n<a>WRONG ⟦RIGHT<e>⟧\n"

    answer = assistant("RIGHT WRONG", part_weights={"content": [[6, 1.0], [5, 0.0]]})

    assert mask(LETTERS, [user("U"), answer]) == "<u>U<e>\n<a>⟦RIGHT ⟧WRONG<e>\n"
    assert mask(LETTERS, [user("WRONG RIGHT", train=True, part_weights=WRONG_RIGHT)]) == "<u>WRONG ⟦RIGHT<e>⟧\n"


def test_own_text_of_parts_is_cut_at_their_borders() -> None:
    masked = masker(LETTERS).mask(Conversation([user("U"), assistant("WRONG RIGHT", part_weights=WRONG_RIGHT)]))

    assert isinstance(masked, MaskedConversation)
    assert [masked.text[piece.start : piece.end] for piece in masked.pieces] == ["U", "WRONG ", "RIGHT"]
    assert [weight for _, _, weight in masked.part_weights] == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3.1", "glm4"])
@settings(max_examples=3, deadline=None)
@given(
    parts=st.lists(st.tuples(st.text("ab \n", min_size=1, max_size=6), st.booleans()), min_size=2, max_size=4),
    reasoning=st.none() | st.tuples(st.sampled_from(["think", "so it is"]), st.booleans()),
)
def test_parts_train_exactly_in_any_template(
    name: str, parts: list[tuple[str, bool]], reasoning: tuple[str, bool] | None
) -> None:
    """Letters in upper case mark what trains: none of the others does, and all of them do."""
    # An answer that begins with a line break is refused by templates that strip it after a line break of their own.
    parts = [("v", False), *parts, ("x", True), ("y", False)]
    content = "".join(text.upper() if trains else text for text, trains in parts)
    weights: dict[str, Json] = {"content": [[len(text), float(trains)] for text, trains in parts]}
    more: dict[str, Json] = {}
    if reasoning is not None:
        thought, trains = reasoning
        more["reasoning_content"] = thought.upper() if trains else thought
        weights["reasoning"] = [[len(thought), float(trains)]]
    messages = [user("0"), assistant(content, part_weights=weights, **more)]
    masked = masker(read_named_template(name)).mask(Conversation(messages))

    assert isinstance(masked, MaskedConversation), masked
    trained = trained_characters(masked)
    own = [at for piece in masked.pieces if piece.message == 1 for at in range(piece.start, piece.end)]
    letters = [at for at in own if masked.text[at].isalpha()]
    assert [at for at in letters if at in trained] == [at for at in letters if masked.text[at].isupper()]


def chat(*parts: tuple[str, Json], key: str = "train") -> dict[str, Any]:
    content = [{"type": "text", "text": text, key: flag} for text, flag in parts]
    return {"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": content}]}


def test_tokens_of_parts_are_encoded_apart_and_weighed(tmp_path: Any) -> None:
    rows = [chat(("wrong step ", 0.0), ("right step ", 1), ("best step", 2.5), key="weight")]
    workspace = Workspace(tmp_path).one("a.jsonl", rows, loss={"weights": True})
    [example] = workspace.examples()
    weights = example["loss_weights"]

    assert sorted(set(weights)) == [0, 1, 2.5]
    assert [weight for weight, trains in zip(weights, example["loss_mask"], strict=True) if trains and not weight] == []


def test_truncation_keeps_flags_of_parts(tmp_path: Any) -> None:
    old = [{"role": "user", "content": "why? " * 40}, {"role": "assistant", "content": "so " * 40}]
    rows = [chat(("wrong ", False), ("right", True))]
    rows[0]["messages"] = [*old, *rows[0]["messages"]]
    whole = Workspace(tmp_path / "a").one("a.jsonl", [chat(("wrong ", False), ("right", True))]).examples()
    cut = Workspace(tmp_path / "b").one("a.jsonl", rows, seq_len=48).examples()

    assert cut[0]["input_ids"] == whole[0]["input_ids"]
    assert cut[0]["loss_mask"] == whole[0]["loss_mask"]
