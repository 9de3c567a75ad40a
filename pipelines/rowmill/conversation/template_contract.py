"""What rendering and masking must both know of a chat template: a conversation, its print, and the template's contract.

What belongs here: plain values, and the protocol through which masking asks for renders. What does not:
how a template is run (`rendering/`), or which characters train (`masking/`).

    Conversation ──Printer.render──► Printed ──Masker──► Masked
                        └─ contract: what probes with sentinels showed the template to do
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rowmill.core.json import Json
from rowmill.schema.rows import Message, Rejected, RenderedText, Span

CONTROL_TAG_PATTERN = r"<[|｜][^<>|｜\s]{1,40}[|｜]?>|<[^<>|｜\s]{1,40}[|｜]>"
"""How templates write control tokens: `<|…|>`, `<|…>` and `<…|>`."""


@dataclass(frozen=True, slots=True)
class RenderedConversation(RenderedText):
    """A render with all that its marks told.

    `generation` are the characters inside `{% generation %}` blocks. `loop_end` is where the last loop
    over messages ended: what follows is the template's tail, with `add_generation_prompt` the prompt.
    `messages` are the messages as the template saw them (arguments, ids and reasoning adapted).
    """

    generation: tuple[Span, ...] = ()
    loop_end: int = 0
    messages: Sequence[Message] = ()


@dataclass(frozen=True, slots=True)
class TemplateBehavior:
    """What a template does, observed on probes; the fields of the specification's contract table.

    The strings at the end are what masking uses: `own_end` and `finish` are ends of turn, right-stripped.
    """

    prefix_preserving: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """For plain, tools and reasoning probes: does the render of each prefix begin the whole render?"""
    prompt_match: Mapping[str, str] = field(default_factory=dict[str, str])
    """Per predecessor role: does the generation prompt begin the assistant's span (full, partial, none)?"""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Per predecessor role: the generation prompt itself; empty where the template prints none."""
    end_of_turn: Literal["own", "next_header", "tail", "missing"] = "missing"
    end_trained: bool = False
    """Whether the end of turn trains: with `{% generation %}` blocks, whether they hold it."""
    end_is_one_token: bool = False
    """Whether the end of turn is one token of the tokenizer; if not, no stop token ends generation there."""
    last_turn_differs: bool = False
    """The last assistant turn ends otherwise than the earlier ones."""
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
    spans: Literal["marks", "proof"] = "marks"
    marks_inert: bool = True
    generation_blocks: Literal["none", "equal", "differs"] = "none"
    generation_differences: tuple[str, ...] = ()
    """What the blocks train otherwise than marks would, on probes: text they add, and text they leave out."""
    render_path: Literal["fast", "reference"] = "reference"
    fast_path_obstacle: str = ""
    """Why the fast lane is not used, empty where it is."""

    own_end: str = ""
    """What earlier assistant turns print after their own text, right-stripped; empty where nothing."""
    finish: str = ""
    """What `finish: auto` appends where a render ends without an end of turn; empty = the EOS token."""
    eos_token: str = ""
    control_tokens: tuple[str, ...] = ()
    headers: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Per role that is not the model's: what its span prints before its own text."""
    constant_prefix: str = ""
    """The prefix that all plain assistant spans share."""
    reasoning_close: tuple[str, str] = ("", "")
    """What is printed between reasoning and answer, and between reasoning and a call."""
    empty_reasoning: tuple[str, ...] = ()
    """Frames that the template prints around no reasoning at all, longest first."""


def find_mismatched_prompts(contract: TemplateBehavior) -> list[str]:
    """Name the roles after which inference prompts otherwise than training prints."""
    return [role for role, asked in contract.prompts.items() if asked and contract.prompt_match.get(role) != "full"]


def list_template_warnings(contract: TemplateBehavior, *, finish: str = "auto") -> list[str]:
    """Say what about a template a trainer should know before training: each with its remedy.

    `finish` is the recipe's `loss.finish`.
    """
    found: list[str] = []
    if contract.end_of_turn in ("missing", "next_header") and finish == "none":
        found.append("a conversation's last turn has no end, and loss.finish: none appends none; write auto or eos")
    elif contract.end_of_turn == "missing" and not contract.eos_token and finish in ("auto", "eos"):
        found.append("no end of turn is printed and the tokenizer has no EOS; write the end into loss.finish")
    elif contract.generation_blocks != "none" and not contract.end_trained:
        found.append("{% generation %} leaves out the end of turn, so a model would not stop; template.spans: marks")
    if contract.end_of_turn != "missing" and not contract.end_is_one_token:
        found.append("the end of turn is no single token of the tokenizer; use the template that belongs to it")
    if contract.bos == "double":
        found.append("template and tokenizer both add a BOS; rowmill keeps the template's; at inference add none")
    if not contract.marks_inert:
        found.append(
            "the template reads what it printed, so every row is rendered twice; if many differ, choose another"
        )
    return found


OwnTextPart = Literal["content", "reasoning", "call_name", "call_key", "call_value"]


@dataclass(frozen=True, slots=True)
class OwnedText:
    """One own text of a row and the characters `[start, end)` of the render that are it.

    `call` is the number of the message's call that it is part of, −1 for other texts.
    """

    start: int
    end: int
    message: int
    part: OwnTextPart
    call: int = -1


@dataclass(frozen=True, slots=True)
class CharacterOwnership:
    """What a render with private code points proved: whose its characters are.

    `texts` are the own texts that are printed whole, in the order of the render, each at the first place where it
    is. `missing` are printed not at all or in part. `hidden` could not be covered, so nothing is known of them.
    """

    texts: tuple[OwnedText, ...]
    missing: tuple[OwnedText, ...]
    hidden: tuple[tuple[OwnedText, str], ...]


@dataclass(frozen=True, slots=True)
class PlaceholderRendering:
    """A conversation of placeholders as the template prints it, and what that print rests on.

    Any contents that hold none of `literals`, and neither begin nor end with the characters of their message's
    `edges` (None: white space), stand where the placeholders `contents` stand, and the rest of the text is the same.
    """

    text: str
    contents: tuple[str, ...]
    literals: frozenset[str]
    edges: Mapping[int, frozenset[str | None]]


class ChatRenderer(Protocol):
    """What masking needs from rendering, handed in by the caller."""

    @property
    def identity(self) -> str:
        """A digest of all that decides what is printed."""
        ...

    @property
    def contract(self) -> TemplateBehavior:
        """What the template does."""
        ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, kwargs: Mapping[str, Json]
    ) -> RenderedConversation | Rejected:
        """Print a conversation and say whose the characters are."""
        ...

    def plain(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, kwargs: Mapping[str, Json]
    ) -> str | Rejected:
        """Print without marks."""
        ...

    def prove_ownership(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None,
        kwargs: Mapping[str, Json],
        text: str,
        roles: frozenset[str],
    ) -> CharacterOwnership | None:
        """Prove whose the characters of a render are, by private code points; None where the template hinders it."""
        ...

    def generation_prompt(self, role: str, *, has_tools: bool, kwargs: Mapping[str, Json]) -> str:
        """Return what is printed after a message of that role to prompt the assistant."""
        ...

    def render_placeholders(self, roles: Sequence[str]) -> PlaceholderRendering | None:
        """Print a placeholder per role, with proof that any contents are printed so; null where there is none."""
        ...
