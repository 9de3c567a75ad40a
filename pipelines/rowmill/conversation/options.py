"""The option groups `template` and `loss`: which template renders a row, and which of its text trains.

Each group's class, the template that the options name, and the plain values that a renderer and a masker are made of.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from rowmill.conversation.template_registry import (
    is_template_text,
    list_known_templates,
    read_named_template,
    read_template_file,
)
from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, join_choices
from rowmill.core.json import Json

DroppedKind = Literal[
    "system",
    "user",
    "assistant_text",
    "text_beside_call",
    "call_name",
    "call_arguments",
    "tool_result",
    "tool_list",
    "reasoning",
    "unknown_role",
]


class TemplateChoice(Config):
    """One way to name a chat template; exactly one field is given."""

    name: str | None = None
    """Name of a bundled or registered template."""
    text: str | None = None
    """Text of the template."""
    file: str | None = None
    """File with the template."""
    tokenizer: str | None = None
    """Name of one of the tokenizer's templates, such as `tool_use`."""

    @model_validator(mode="after")
    def _require_one_field(self) -> "TemplateChoice":
        given = [name for name in ("name", "text", "file", "tokenizer") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"has {len(given)} of the fields name, text, file and tokenizer; exactly one is allowed; keep one"
            )
        return self


class Template(Config):
    """The options of the group `template`: which chat template renders the rows, and how strictly it is checked."""

    chat_template: str | TemplateChoice | None = None
    """A template (text with `{{` or `{%`), or the name of a bundled or registered one: alpaca, chatml, gemma3, glm4,
    llama3, llama3.1, mistral, phi3, qwen2.5, qwen3, vicuna, zephyr; null: the tokenizer's template."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Values passed to the template in every render; a row's values override them."""
    chat_template_kwargs: str | None = "chat_template_kwargs"
    """Column with a row's template values, a mapping or its JSON text, which override template_kwargs; null: none."""
    template_now: str = "2025-01-01T00:00:00"
    """ISO time that the template's clock shows, so that a recipe renders the same text on any day."""
    enable_thinking: bool | None = None
    """Template value `enable_thinking` of every render; null: not passed."""
    turns: Literal["whole", "exchange", "message", "auto"] = "whole"
    """One example per conversation, per exchange, or per supervised message; auto: per message for rows in which the
    template renders a turn differently once other turns follow."""
    spans: Literal["auto", "generation"] = "auto"
    """Where loss spans come from; auto: `{% generation %}` blocks if the template has them, else the learned text of
    turns; generation: from blocks only, and a template without them is an error."""
    control_tokens: Literal["as_text", "allow", "reject"] = "as_text"
    """How to encode control-token strings inside a row's text, with or without a template: as ordinary text, as control
    tokens (for data that means its `<|endoftext|>` inside a text), or reject the row. A BOS that begins a plain text
    and an EOS that ends it are not inside it: they are that token, once."""
    on_dropped: dict[DroppedKind, Literal["count", "untrain", "reject"]] = Field(
        default_factory=dict[DroppedKind, Literal["count", "untrain", "reject"]]
    )
    """Per kind of a row's text that the template does not print: count it, do not train the affected answers, or reject
    the row; default: reject, for reasoning count."""
    verify_render: float = 0.02
    """Share of rows, 0–1, that are judged: rendered as transformers does, and their mask checked by code that
    shares nothing with the masker."""

    @model_validator(mode="after")
    def _check_values(self) -> "Template":
        if not 0 <= self.verify_render <= 1:
            raise ValueError(
                f"verify_render is {self.verify_render}; expected a share from 0 to 1; write for example 0.02"
            )
        try:
            datetime.fromisoformat(self.template_now)
        except ValueError:
            raise ValueError(
                f"template_now is {self.template_now!r}; expected an ISO time; write for example 2025-01-01T00:00:00"
            ) from None
        return self


def resolve_template(template: Template, *, tokenizer_chat_template: str | Mapping[str, str] | None) -> str:
    """Return the text of the template that the options name.

    `tokenizer_chat_template`: the tokenizer's template, or several by name, of which `default` is used unless the
    options name another.
    """
    choice = template.chat_template
    if choice is None:
        choice = TemplateChoice(tokenizer="default")
    if isinstance(choice, str):
        choice = TemplateChoice(text=choice) if is_template_text(choice) else TemplateChoice(name=choice)
    named = (
        {"default": tokenizer_chat_template} if isinstance(tokenizer_chat_template, str) else tokenizer_chat_template
    )
    if choice.text is not None:
        return choice.text
    if choice.file is not None:
        return read_template_file(Path(choice.file))
    if choice.name is not None:
        return read_named_template(choice.name)
    wanted = choice.tokenizer or "default"
    if not named or wanted not in named:
        has = f"it has {join_choices(sorted(named))}" if named else "it has none"
        raise ConfigError(
            f"template.chat_template: the tokenizer has no chat template {wanted!r}; {has}; "
            f"give the name of a bundled one ({join_choices(list_known_templates())}), a file or the text"
        )
    return named[wanted]


@dataclass(frozen=True, slots=True)
class RendererSpec:
    """Everything that determines a renderer's output, as plain values that can be sent to workers."""

    text: str
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    """By name (`bos_token`, `eos_token`, …); absent ones print an empty string."""
    template_kwargs: Mapping[str, Json] = field(default_factory=dict[str, Json])
    now: datetime = datetime(2025, 1, 1)  # noqa: DTZ001  (a template's clock has no zone)
    control_tokens: tuple[str, ...] = ()
    """The tokenizer's added tokens that a template may print."""
    adds_bos: bool = False
    """Whether the tokenizer adds a BOS itself."""
    arguments: Literal["auto", "object", "string"] = "auto"
    tool_ids: Literal["auto", "keep"] = "auto"
    """`arguments` and `tool_ids` as in the group `tools`; auto: the form that probes show the template to read."""
    render_path: Literal["auto", "reference"] = "auto"


def make_renderer_spec(
    template: Template,
    text: str,
    *,
    special_tokens: Mapping[str, str],
    control_tokens: Iterable[str] = (),
    adds_bos: bool = False,
    arguments: Literal["auto", "object", "string"] = "auto",
    tool_ids: Literal["auto", "keep"] = "auto",
) -> RendererSpec:
    """Collect what a renderer needs from the options and the template."""
    kwargs = dict(template.template_kwargs)
    if template.enable_thinking is not None:
        kwargs["enable_thinking"] = template.enable_thinking
    return RendererSpec(
        text=text,
        special_tokens=dict(special_tokens),
        template_kwargs=kwargs,
        now=datetime.fromisoformat(template.template_now),
        control_tokens=tuple(control_tokens),
        adds_bos=adds_bos,
        arguments=arguments,
        tool_ids=tool_ids,
    )


# ── the loss ──


MIN_WEIGHT = 2.0**-126
MAX_WEIGHT = (2 - 2.0**-23) * 2.0**127
"""Range of normal float32 values: outside it, a weight would become 0, imprecise or infinite."""


class Loss(Config):
    """The options of the group `loss`: which text trains."""

    mask: dict[str, Literal["mask", "train"]] = Field(default_factory=dict[str, Literal["mask", "train"]])
    """Role (or `prompt`, `response` of pairs) → whether it trains; replaces the default, the model's roles."""
    mask_default: Literal["mask", "train"] = "mask"
    """Whether roles that `mask` does not name train."""
    mask_user_turns: bool = True
    """False: every token but the first trains; excludes mask, supervise, think_loss, weights and prompt_weight."""
    mask_inputs: bool = True
    """The same option for pairs."""
    supervise: Literal["all_assistant", "last_assistant", "last_turn"] = "all_assistant"
    """Which of the model's messages train: all, the last one, or all after the last user message."""
    think_loss: Literal["all", "answer_only", "answer_plus_think"] = "all"
    """Whether reasoning trains together with its tags, not at all, or without its tags."""
    lead: Literal["mask", "train"] | None = None
    """Whether the assistant's header trains, which is part of the prompt at inference; null: as the template's
    `{% generation %}` blocks decide, mask without blocks."""
    end_of_turn: Literal["train", "mask"] | None = None
    """Whether the end-of-turn token trains; a model that is not trained on it never stops; null: as the blocks
    decide, train without blocks."""
    trailing: Literal["mask", "train"] | None = None
    """Whether white space after the end of turn trains; null: as the blocks decide, mask without blocks."""
    finish: str = "auto"
    """Text appended to a render that lacks an end of turn: auto, none, eos, or the text itself."""
    boundary: Literal["whole", "split"] | None = None
    """Encode the text as a whole, or split it where training starts; null: split for pairs, else whole."""
    weights: bool = False
    """Whether messages may have weights other than 0 and 1; tokens then have float32 `loss_weights`, 1 by default."""
    prompt_weight: float = 0
    """Weight of the prompt: the text of system, user and tool messages, or of a pair's prompt, that is not trained
    otherwise. Its tokens count as trained, and batches have `loss_weights`. Template text, such as headers and tool
    definitions, and the model's untrained text stay context. 0: the prompt does not train."""
    allow_negative: bool = False
    """Whether `prompt_weight` and the weights of messages may be negative, which makes their text less likely."""

    @model_validator(mode="after")
    def _require_usable_prompt_weight(self) -> "Loss":
        if self.prompt_weight and not MIN_WEIGHT <= abs(self.prompt_weight) <= MAX_WEIGHT:
            raise ValueError(
                f"prompt_weight: {self.prompt_weight:g} is not a float32; weights are 0, or {MIN_WEIGHT:.3g} to "
                f"{MAX_WEIGHT:.3g}; choose one of these"
            )
        if self.prompt_weight < 0 and not self.allow_negative:
            raise ValueError(
                f"prompt_weight: {self.prompt_weight:g} is negative; weights are at least 0 unless a recipe says "
                "otherwise; set loss.allow_negative: true, or choose a positive weight"
            )
        if self.allow_negative and self.prompt_weight >= 0 and not self.weights:
            raise ValueError(
                "allow_negative: true has no effect: no weight is read that could be negative; set weights: true for "
                "those of messages or a negative prompt_weight, or delete allow_negative"
            )
        return self

    @model_validator(mode="after")
    def _check_contradictions(self) -> "Loss":
        everything = not self.mask_user_turns or not self.mask_inputs
        chosen = [
            name
            for name, given in (
                ("mask", bool(self.mask) or self.mask_default != "mask"),
                ("supervise", self.supervise != "all_assistant"),
                ("think_loss", self.think_loss != "all"),
                ("weights", self.weights),
                ("prompt_weight", bool(self.prompt_weight)),
            )
            if given
        ]
        if everything and chosen:
            raise ValueError(
                f"mask_user_turns/mask_inputs: false trains every token, but {' and '.join(chosen)} selects text to "
                "train; only one of the two is allowed; delete the other"
            )
        return self

    @property
    def has_weights(self) -> bool:
        """Whether examples have a weight per token."""
        return self.weights or bool(self.prompt_weight)

    @property
    def trains_everything(self) -> bool:
        """Whether every token but the first trains."""
        return not self.mask_user_turns or not self.mask_inputs


@dataclass(frozen=True, slots=True)
class MaskRules:
    """Options of other groups that a masker reads, as plain values."""

    assistant_roles: frozenset[str] = frozenset({"assistant"})
    spans: Literal["auto", "generation"] = "auto"
    on_dropped: Mapping[str, str] | None = None
    turns: Literal["whole", "exchange", "message", "auto"] = "whole"
