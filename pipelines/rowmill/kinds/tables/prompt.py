r"""The prompt of records and the delimiter tokens, which are the same in every example of a dataset.

    Generate JSON Lines records with these keys: "date","amount"\n BOS {"date":…}\n{"date":…}\n EOS
    └────────────────────────── prompt ───────────────────────────┘└─ generation starts after this BOS

The generation prompt, prompt and first BOS, is token for token the start of every example.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rowmill.core.errors import ConfigError
from rowmill.kinds.tables.schema import Column, RecordSchema
from rowmill.kinds.tables.serialization import serialise_record

INSTRUCTION = "Generate a JSONL dataset with the following columns: "
"""Safe Synthesizer's instruction; it ends with one space."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How Safe Synthesizer prompts a family of models, recognized by the tokenizer's name.

    `adds_bos` and `adds_eos`: whether the prompt, too, has the sequence's BOS and EOS around it. `begins_turn`:
    sequences begin with `<|im_start|>` instead of the tokenizer's BOS. All end with the tokenizer's EOS.
    """

    names: tuple[str, ...]
    template: str
    adds_bos: bool
    adds_eos: bool
    begins_turn: bool = False


_TURN_TEMPLATE = "user\n {i} {s} \n assistant\n"
FAMILIES = (
    ModelFamily(("tinyllama",), "[INST] {i} {s} [/INST]", adds_bos=True, adds_eos=True),
    ModelFamily(("qwen",), _TURN_TEMPLATE, adds_bos=True, adds_eos=False),
    # It begins sequences with id 151644, Qwen's <|im_start|>, which Llama lacks; here Llama's BOS is used.
    ModelFamily(("llama32", "llama-3.2", "llama3.2"), _TURN_TEMPLATE, adds_bos=False, adds_eos=False),
    ModelFamily(("smollm2",), _TURN_TEMPLATE, adds_bos=False, adds_eos=False, begins_turn=True),
    ModelFamily(
        ("smollm3",), "user\n {i} {s} <|im_end|> \n assistant\n", adds_bos=True, adds_eos=False, begins_turn=True
    ),
    ModelFamily(("mistral",), "[INST] {i} \n\n {s} [/INST]", adds_bos=True, adds_eos=True),
    ModelFamily(("nemotron",), "[INST] {i} \n\n {s} [/INST]", adds_bos=True, adds_eos=True),
    ModelFamily(("granite",), _TURN_TEMPLATE, adds_bos=False, adds_eos=True),
)
"""In the order of comparison: the first whose name is contained in the tokenizer's name applies."""
TURN_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Delimiters of a tokenizer that has both tokens, instead of its BOS and EOS."""

Encode = Callable[[str], Sequence[int]]
"""Encodes a text: special tokens in it are recognized, none are added."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The properties of a tokenizer that the prompt depends on."""

    name: str
    size: int
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    special: Mapping[str, int]

    def text_of(self, token_id: int) -> str | None:
        """Return the text of a special token."""
        return next((text for text, own in self.special.items() if own == token_id), None)


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """Prompt and delimiters of every example, as ids and as text.

    `special_tokens` are the texts that a record must not contain unescaped.
    """

    prompt_text: str
    prompt_ids: tuple[int, ...]
    bos_id: int
    eos_id: int
    bos_text: str
    eos_text: str
    special_tokens: tuple[str, ...]
    is_parity: bool

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON value for the manifest, where generation reads it."""
        return {
            "prompt_text": self.prompt_text, "prompt_ids": list(self.prompt_ids), "bos_id": self.bos_id,
            "eos_id": self.eos_id, "bos_text": self.bos_text, "eos_text": self.eos_text,
            "special_tokens": list(self.special_tokens), "is_parity": self.is_parity,
        }  # fmt: skip

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "PromptFrame":
        """Read what `to_json` returned."""
        values: dict[str, Any] = {**stored}
        for name in ("prompt_ids", "special_tokens"):
            values[name] = tuple(values[name])
        return cls(**values)


def build_prompt_frame(
    schema: RecordSchema,
    vocabulary: Vocabulary,
    encode: Encode,
    *,
    style: Literal["keys", "names", "reference"],
    template: str | None,
    add_bos: Literal["auto"] | bool,
    add_eos: Literal["auto"] | bool,
    bos: str | int,
    eos: str | int,
    is_grouped: bool,
    where: str,
) -> PromptFrame:
    """Build the prompt and choose the delimiters.

    Raises
    ------
    ConfigError
        If a delimiter is not a single token of the tokenizer, or the prompt cannot be written.

    """
    family: ModelFamily | None = None
    if style == "reference" and template is None:
        tokenizer = vocabulary.name.lower()
        family = next((choice for choice in FAMILIES if any(part in tokenizer for part in choice.names)), None)
        if family is None:
            raise ConfigError(
                f"{where}.prompt.style: reference has no template for the tokenizer {vocabulary.name!r}, only for "
                f"{', '.join(choice.names[0] for choice in FAMILIES)}; set prompt.template, or another style"
            )
    bos_id, bos_text = _resolve_delimiter("bos", bos, vocabulary, encode, where, family)
    eos_id, eos_text = _resolve_delimiter("eos", eos, vocabulary, encode, where, family)
    if is_grouped and bos_id == eos_id:
        raise ConfigError(
            f"{where}.tokens: bos and eos are both {bos_text!r} ({bos_id}); with groups they must "
            "differ; set tokens.bos or tokens.eos"
        )
    special = tuple(dict.fromkeys([bos_text, eos_text, *vocabulary.special]))
    body, leads, trails = _format_prompt_body(schema, vocabulary, style, template, special, where, family)
    first = _resolve_prompt_delimiter(
        "add_bos", add_bos, bos_id if style == "reference" else vocabulary.bos_id, leads, where
    )
    last = _resolve_prompt_delimiter(
        "add_eos", add_eos, eos_id if style == "reference" else vocabulary.eos_id, trails, where
    )
    prompt_ids = (*first, *encode(body), *last)
    texts = {bos_id: bos_text, eos_id: eos_text}
    around = [texts.get(token) or vocabulary.text_of(token) or "" for token in (*first, *last)]
    prompt_text = "".join([*around[: len(first)], body, *around[len(first) :]])
    is_parity = tuple(encode(prompt_text + bos_text)) == (*prompt_ids, bos_id)
    return PromptFrame(prompt_text, prompt_ids, bos_id, eos_id, bos_text, eos_text, special, is_parity)


def _resolve_delimiter(
    name: str, wanted: str | int, vocabulary: Vocabulary, encode: Encode, where: str, family: ModelFamily | None
) -> tuple[int, str]:
    at = f"{where}.tokens.{name}"
    if wanted == "auto":
        default = vocabulary.bos_id if name == "bos" else vocabulary.eos_id
        has_turns = all(text in vocabulary.special for text in TURN_TOKENS)
        if has_turns and (family is None or default is None or (name == "bos" and family.begins_turn)):
            text = TURN_TOKENS[name == "eos"]
            return vocabulary.special[text], text
        text = None if default is None else vocabulary.text_of(default)
        if default is None or text is None:
            raise ConfigError(
                f"{at}: auto, but the tokenizer has neither {TURN_TOKENS[0]} and {TURN_TOKENS[1]} nor a "
                f"{name.upper()} token; set {at} to the text or id of a special token"
            )
        return default, text
    if isinstance(wanted, int):
        text = vocabulary.text_of(wanted)
        if wanted >= vocabulary.size or text is None:
            raise ConfigError(
                f"{at}: {wanted} is not the id of a special token (the vocabulary has {vocabulary.size} tokens); data "
                "could contain it; choose a special token"
            )
        return wanted, text
    ids = encode(wanted)
    if len(ids) != 1 or wanted not in vocabulary.special:
        raise ConfigError(
            f"{at}: {wanted!r} is {len(ids)} tokens, not one special token; choose a special token of the "
            "tokenizer, or add this one to it"
        )
    return ids[0], wanted


def _resolve_prompt_delimiter(
    option: str, wanted: Literal["auto"] | bool, token_id: int | None, by_itself: bool, where: str
) -> tuple[int, ...]:
    if wanted is False or (wanted == "auto" and not by_itself):
        return ()
    if token_id is None:
        raise ConfigError(f"{where}.prompt.{option}: true, but the tokenizer has no such token; set auto or false")
    return (token_id,)


def _format_prompt_body(
    schema: RecordSchema,
    vocabulary: Vocabulary,
    style: Literal["keys", "names", "reference"],
    template: str | None,
    special: tuple[str, ...],
    where: str,
    family: ModelFamily | None,
) -> tuple[str, bool, bool]:
    """Return the prompt's text, and whether `auto` puts a BOS before and an EOS after it."""
    if style == "keys":
        quoted: list[str] = []
        for name in schema.names:
            record_schema = RecordSchema((Column(name, "string", nullable=True),))
            line = serialise_record({name: None}, record_schema, special_tokens=special)
            assert isinstance(line, str), line
            quoted.append(line[len("{") : -len(":null}\n")])
        names = ",".join(quoted)
        text = f"Generate JSON Lines records with these keys: {names}\n"
        return (text if template is None else template.replace("{schema}", names)), vocabulary.adds_bos, False
    for name in schema.names:
        if any(token in name for token in special):
            raise ConfigError(
                f"{where}.prompt.style: {style} writes the column name {name!r} as it is, and it contains a special "
                "token; set style: keys, which escapes it, or rename the column"
            )
    if style == "names":
        names = ", ".join(schema.names)
        return (f"{names}\n" if template is None else template.replace("{schema}", names)), vocabulary.adds_bos, False
    columns = ",".join(f'"{name}":<unk>' for name in schema.names)
    if template is not None:
        return template.replace("{schema}", columns), vocabulary.adds_bos, False
    assert family is not None, "without a template the reference style has a family"
    return family.template.replace("{i}", INSTRUCTION).replace("{s}", columns), family.adds_bos, family.adds_eos
