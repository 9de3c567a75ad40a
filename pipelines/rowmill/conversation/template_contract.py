"""Types shared by rendering and masking: a rendered conversation, its proven owners, the template's observed behavior.

*Own text* is text of the row: contents, reasoning, names and arguments of calls. All other characters of a render are
*template text*.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Literal

from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.core.json import Json
from rowmill.schema.rows import Message

CONTROL_TAG_PATTERN = r"<[|｜][^<>|｜\s]{1,40}[|｜]?>|<[^<>|｜\s]{1,40}[|｜]>"
"""How templates write control tokens: `<|…|>`, `<|…>` and `<…|>`."""


def find_first_control_token(text: str, control_tokens: Sequence[str]) -> str:
    """Return the control token that begins a text after white space; empty if there is none."""
    start = text.lstrip()
    return max((token for token in control_tokens if start.startswith(token)), key=len, default="")


@frozen_dataclass
class RenderedConversation:
    """The plain render of a conversation, and what its template was given.

    `messages`, `tools` and `kwargs` as passed to the template, with arguments, ids and reasoning adapted.
    """

    text: str
    messages: Sequence[Message] = ()
    tools: Sequence[Json] | None = None
    kwargs: Mapping[str, Json] = field(default_factory=dict[str, Json])
    inline_reasoning: Mapping[int, int] = field(default_factory=dict[int, int])
    """By message: how many characters at the start of its content are reasoning with its tags."""
    blocks: Sequence[tuple[int, int]] = ()
    """The ranges of `{% generation %}` blocks, sorted."""
    is_fast: bool = False
    """Whether the fast engine rendered it."""


@frozen_dataclass
class TemplateBehavior:
    """What a template does, observed on probe conversations.

    Masking uses the strings at the end; `printed_end` and `finish` are ends of turn, right-stripped.
    """

    prefix_preserving: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """For plain, tools and reasoning probes: whether the render of every prefix is a prefix of the whole render."""
    prompt_match: Mapping[str, str] = field(default_factory=dict[str, str])
    """By role of the preceding message: whether the text before an answer begins with what the template prints to ask
    for one, up to white space (full), or at least has a part of the generation prompt (partial, none)."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """By role of the preceding message: the generation prompt; empty if the template prints none."""
    end_of_turn: Literal["own", "next_header", "tail", "missing"] = "missing"
    end_trained: bool = False
    """Whether the end of turn trains; with `{% generation %}` blocks, whether they include it."""
    end_is_one_token: bool = False
    """Whether the end of turn is a single token of the tokenizer; otherwise no stop token ends generation there."""
    last_turn_differs: bool = False
    """Whether the last assistant turn ends differently from the earlier ones."""
    reasoning: Literal["all", "last", "none"] = "none"
    reasoning_key: str | None = None
    inline_tags_stripped: bool = False
    arguments: Literal["object", "string", "either", "dropped", "refused"] = "dropped"
    loses: tuple[str, ...] = ()
    date_dependent: bool = False
    bos: Literal["template", "none", "double"] = "none"
    system: Literal["printed", "folded", "dropped", "refused", "last_user_only"] = "printed"
    alternation: tuple[str, ...] = ()
    """What the template refuses: `two_users`, `leading_assistant`, `tool_role`."""
    tools: Literal["printed", "dropped", "refused"] = "dropped"
    no_tools: Literal["null", "[]"] = "null"
    tool_ids: Literal["any", "nine_alphanumeric"] = "any"
    content_form: Literal["string", "parts"] = "string"
    generation_blocks: Literal["none", "equal", "differs"] = "none"
    generation_differences: tuple[str, ...] = ()
    """Text of the probes that the blocks train and the closed list would not (`adds …`), and the reverse
    (`leaves out …`)."""
    render_path: Literal["fast", "reference"] = "reference"
    fast_path_obstacle: str = ""
    """Why the fast path is not used; empty if it is."""

    printed_end: str = ""
    """Text printed after the own text of an assistant turn that is not the last, right-stripped."""
    finish: str = ""
    """Text that `finish: auto` appends to a render without an end of turn; empty: the EOS token."""
    eos_token: str = ""
    control_tokens: tuple[str, ...] = ()
    reasoning_close: tuple[str, str] = ("", "")
    """Template text between reasoning and answer, and between reasoning and a call."""
    empty_reasoning: tuple[str, ...] = ()
    """Frames that the template prints for an answer without reasoning, longest first."""


def find_mismatched_prompts(contract: TemplateBehavior) -> list[str]:
    """Return the roles after which the generation prompt differs from the header in training rows."""
    return [role for role, prompt in contract.prompts.items() if prompt and contract.prompt_match.get(role) != "full"]


def list_template_warnings(contract: TemplateBehavior, *, finish: str = "auto") -> list[str]:
    """Return properties of a template that can spoil training, each with its remedy; `finish` is `loss.finish`."""
    found: list[str] = []
    if contract.end_of_turn in ("missing", "next_header") and finish == "none":
        found.append("a conversation's last turn has no end, and loss.finish: none appends none; write auto or eos")
    elif contract.end_of_turn == "missing" and not contract.eos_token and finish in ("auto", "eos"):
        found.append("no end of turn is printed and the tokenizer has no EOS; write the end into loss.finish")
    elif contract.generation_blocks != "none" and not contract.end_trained:
        found.append("{% generation %} leaves out the end of turn, so a model would not stop; loss.end_of_turn: train")
    if contract.end_of_turn != "missing" and not contract.end_is_one_token:
        found.append("the end of turn is no single token of the tokenizer; use the template that belongs to it")
    if contract.bos == "double":
        found.append("template and tokenizer both add a BOS; rowmill keeps the template's; at inference add none")
    return found


OwnTextPart = Literal["content", "reasoning", "call_name", "call_key", "call_value"]


@frozen_dataclass
class OwnedText:
    """One own text of a row, at `[start, end)` of the render; `call` is the index of its tool call, −1 without one."""

    start: int
    end: int
    message: int
    part: OwnTextPart
    call: int = -1


@frozen_dataclass
class CharacterOwnership:
    """Which characters of a render belong to which own text, proven by a render with private code points.

    `texts`: own texts rendered in full, in the order of the render, each at its first occurrence. `missing`: own texts
    rendered in part or not at all. `hidden`: own texts that could not be replaced by code points, so their positions
    are unknown.
    """

    texts: tuple[OwnedText, ...]
    missing: tuple[OwnedText, ...]
    hidden: tuple[tuple[OwnedText, str], ...]


@frozen_dataclass
class PlaceholderRendering:
    """A rendered conversation of placeholders, and the conditions under which other contents render the same way.

    Replacing the placeholders `contents` leaves the rest of `text` unchanged, provided that no new content contains
    one of `literals`, or begins or ends with the characters in its message's `edges` (None: white space).
    `is_hidden` tells whether a content could not be covered, so that its position would not be proven.
    """

    text: str
    contents: tuple[str, ...]
    literals: frozenset[str]
    edges: Mapping[int, frozenset[str | None]]
    is_hidden: Callable[[str], bool]
