"""Columns of conversations: the option fields that the kinds with messages share, with their aliases."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rowmill.core.json import Json
from rowmill.kinds.base import PAIR_SIDES, DatasetKind, DatasetOptions, TokenOptions, refuse_mask_names
from rowmill.kinds.shared.messages import rename_aliases
from rowmill.kinds.shared.unread import CONTEXT_COLUMNS
from rowmill.schema.rows import RowKind

MAPPED_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatbot": "assistant",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
}


KNOWN_ROLES = ("system", "user", "assistant", "tool")


class MessageColumns(DatasetKind):
    """Keys of a message, the mapping of its role, and the system message: what every kind with messages reads."""

    ROW_KIND: ClassVar[RowKind] = "conversation"

    role_field: str | None = None
    """Key of a message's role; null: `role`, and `from` in ShareGPT."""
    content_field: str | None = None
    """Key of a message's content; null: `content`, and `value` in ShareGPT."""
    role_map: dict[str, str] = Field(default={})
    """Role of the source → role of the template; adds to the built-in names (human, gpt, observation, …)."""
    unknown_roles: Literal["warn", "reject"] = "warn"
    """How to treat a role that no template is known to print: keep and list it, or reject the row."""
    system_prompt: str | None = None
    """Column whose text, or whose mapping's `content`, is the system message; null: `system` or `system_prompt`, if the
    record has one."""
    on_existing_system: Literal["merge", "replace", "keep", "reject"] = "merge"
    """If the conversation already has a system message; merge: the column's text, a blank line, the existing one."""
    assistant_roles: list[str] = Field(default=["assistant"], min_length=1)
    """Roles of the model's messages."""
    message_flags: list[str] = Field(default=["train", "weight", "loss", "loss_weight"])
    """Keys of a message that decide whether it is trained (true, false), or with which weight (a number; 0: not)."""
    ignore_columns: list[str] = Field(default=[])
    """Columns of text that are left out on purpose; others that nothing reads are reported, and refused if their name
    says that they belong to the prompt."""
    domain_key: str | None = None
    """Column that names the row's domain; a row without text there is in `__default__`."""
    add_bos: Literal["auto"] | bool = "auto"
    """Whether the beginning-of-text token starts a row; auto: as the template prints it."""

    @field_validator("role_map")
    @classmethod
    def _check_role_names(cls, role_map: dict[str, str]) -> dict[str, str]:
        blank = sorted(source for source, role in role_map.items() if not role.strip())
        if blank:
            raise ValueError(f"{blank[0]!r} is mapped to a blank role; expected a role name, such as user")
        return role_map

    def check_options(self, options: DatasetOptions) -> None:
        """Refuse a mask that names the sides of a pair, unless they are roles of this dataset."""
        roles = {*self.assistant_roles, *self.role_map.values()}
        wrong = (set(options.loss.mask) & PAIR_SIDES) - roles
        refuse_mask_names(self.get_name(), wrong, "roles, such as user and assistant")
        super().check_options(options)

    def list_ignored_columns(self) -> Sequence[str]:
        """Return the columns that are left out on purpose."""
        return self.ignore_columns

    def get_token_options(self) -> TokenOptions:
        """Return the model's roles and BOS."""
        return TokenOptions(assistant_roles=frozenset(self.assistant_roles), add_bos=self.add_bos)


class ConversationColumns(MessageColumns):
    """Columns of a whole conversation, in any known shape."""

    ALIASES: ClassVar[Mapping[str, str]] = {"messages_key": "messages_field"}

    dataset_schema: Literal[
        "auto", "messages", "prompt_response", "sharegpt", "alpaca", "exchanges", "turns", "transcript", "calls"
    ] = "auto"
    """Shape of every record; `auto` decides per record. A record of another shape is rejected as `unknown_schema`."""
    messages_field: str = "messages"
    """Column with the list of messages, its JSON text, or a transcript; `messages` is also looked for under the names
    that public datasets use, such as `conversations`."""
    prompt_fields: list[str] = Field(
        default=["prompt", "question", "instruction", "query", "problem", "input", "inputs"], min_length=1
    )
    """Columns that may hold the prompt, as text or messages; the first that is not null is used."""
    context_fields: list[str] = Field(default=[*CONTEXT_COLUMNS])
    """Columns whose text belongs to a prompt that is text: each is appended to it on a new line."""
    response_fields: list[str] = Field(
        default=["response", "completion", "answer", "output", "outputs", "targets", "target", "solution"], min_length=1
    )
    """Columns that may hold the response, as text or messages; the first that is not null is used."""
    single_turn: bool = False
    """Keep only the system message, the first user message and the next assistant message."""

    @model_validator(mode="before")
    @classmethod
    def _conversation_aliases(cls, values: Json) -> Json:
        return rename_aliases(values, cls.ALIASES)

    def list_answer_columns(self) -> Sequence[str | None]:
        """Return the columns of messages, prompts and responses."""
        return [self.messages_field, *self.prompt_fields, *self.response_fields, self.system_prompt, self.domain_key]
