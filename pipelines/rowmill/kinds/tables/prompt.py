r"""The prompt of a table's examples: the text before the records, and the BOS and EOS around each of their units.

    Generate JSON Lines records with these keys: "date","amount"\n BOS {"date":…}\n{"date":…}\n EOS
    └────────────────────────── prompt ───────────────────────────┘└─ generation starts after this BOS

The generation prompt, prompt and first BOS, is token for token the start of every example. The reference style writes
it as Safe Synthesizer does for the family of models that the tokenizer's name belongs to.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rowmill.core.errors import ConfigError
from rowmill.kinds.tables.options import Prompt, RecordOptions
from rowmill.kinds.tables.schema import Column, RecordSchema
from rowmill.kinds.tables.serialization import Serialiser
from rowmill.tokenization.tokenizer import TokenizerCard

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
        return {**asdict(self), "prompt_ids": [*self.prompt_ids], "special_tokens": [*self.special_tokens]}


def build_prompt_frame(
    schema: RecordSchema, card: TokenizerCard, encode: Encode, form: RecordOptions, *, tokenizer: str, where: str
) -> PromptFrame:
    """Build the prompt and choose the delimiters; `tokenizer` is the name that the recipe calls it by."""
    prompt, family = form.prompt, None
    if prompt.style == "reference" and prompt.template is None:
        family = next((one for one in FAMILIES if any(part in tokenizer.lower() for part in one.names)), None)
        if family is None:
            raise ConfigError(
                f"{where}.prompt.style: reference has no template for the tokenizer {tokenizer!r}, only for "
                f"{', '.join(choice.names[0] for choice in FAMILIES)}; set prompt.template, or another style"
            )
    bos_id, bos_text = _resolve_delimiter("bos", form.tokens.bos, card, encode, where, family)
    eos_id, eos_text = _resolve_delimiter("eos", form.tokens.eos, card, encode, where, family)
    if form.mode == "grouped" and bos_id == eos_id:
        raise ConfigError(
            f"{where}.tokens: bos and eos are both {bos_text!r} ({bos_id}); with groups they must "
            "differ; set tokens.bos or tokens.eos"
        )
    ids = _find_special_tokens(card)
    special = tuple(dict.fromkeys([bos_text, eos_text, *ids]))
    body = _format_prompt_body(schema, prompt, family, special, where)
    # The ids around the prompt: `auto` puts them there as the family does, or a BOS if the tokenizer adds one itself.
    leads, trails = (card.adds_bos, False) if family is None else (family.adds_bos, family.adds_eos)
    own = (bos_id, eos_id) if prompt.style == "reference" else (card.bos_id, card.eos_id)
    around: list[tuple[int, ...]] = []
    for option, wanted, by_itself, token in (
        ("add_bos", prompt.add_bos, leads, own[0]),
        ("add_eos", prompt.add_eos, trails, own[1]),
    ):
        is_wanted = by_itself if wanted == "auto" else wanted
        if is_wanted and token is None:
            raise ConfigError(f"{where}.prompt.{option}: true, but the tokenizer has no such token; set auto or false")
        around.append((token,) if is_wanted and token is not None else ())
    prompt_ids = (*around[0], *encode(body), *around[1])
    texts = {number: text for text, number in ids.items()} | {bos_id: bos_text, eos_id: eos_text}
    before, after = ("".join(texts.get(token, "") for token in tokens) for tokens in around)
    prompt_text = f"{before}{body}{after}"
    is_parity = tuple(encode(prompt_text + bos_text)) == (*prompt_ids, bos_id)
    return PromptFrame(prompt_text, prompt_ids, bos_id, eos_id, bos_text, eos_text, special, is_parity)


def _find_special_tokens(card: TokenizerCard) -> dict[str, int]:
    return {content: number for number, content, is_special in card.added if is_special and content}


def _resolve_delimiter(
    name: str, wanted: str | int, card: TokenizerCard, encode: Encode, where: str, family: ModelFamily | None
) -> tuple[int, str]:
    at, special = f"{where}.tokens.{name}", _find_special_tokens(card)
    texts = {number: text for text, number in special.items()}
    if wanted == "auto":
        default = card.bos_id if name == "bos" else card.eos_id
        has_turns = all(text in special for text in TURN_TOKENS)
        if has_turns and (family is None or default is None or (name == "bos" and family.begins_turn)):
            text = TURN_TOKENS[name == "eos"]
            return special[text], text
        if default is None or default not in texts:
            raise ConfigError(
                f"{at}: auto, but the tokenizer has neither {TURN_TOKENS[0]} and {TURN_TOKENS[1]} nor a "
                f"{name.upper()} token; set {at} to the text or id of a special token"
            )
        return default, texts[default]
    if isinstance(wanted, int):
        if wanted >= card.vocab_size or wanted not in texts:
            raise ConfigError(
                f"{at}: {wanted} is not the id of a special token (the vocabulary has {card.vocab_size} tokens); data "
                "could contain it; choose a special token"
            )
        return wanted, texts[wanted]
    ids = encode(wanted)
    if len(ids) != 1 or wanted not in special:
        raise ConfigError(
            f"{at}: {wanted!r} is {len(ids)} tokens, not one special token; choose a special token of the "
            "tokenizer, or add this one to it"
        )
    return ids[0], wanted


def _format_prompt_body(
    schema: RecordSchema, prompt: Prompt, family: ModelFamily | None, special: tuple[str, ...], where: str
) -> str:
    if prompt.style == "keys":
        quoted: list[str] = []
        for name in schema.names:
            alone = RecordSchema((Column(name, "string", nullable=True),))
            line = Serialiser(alone, special_tokens=special)({name: None})
            assert isinstance(line, str), line
            quoted.append(line[len("{") : -len(":null}\n")])
        columns, template = ",".join(quoted), "Generate JSON Lines records with these keys: {schema}\n"
    else:
        for name in schema.names:
            if any(token in name for token in special):
                raise ConfigError(
                    f"{where}.prompt.style: {prompt.style} writes the column name {name!r} as it is, and it contains a "
                    "special token; set style: keys, which escapes it, or rename the column"
                )
        columns, template = ", ".join(schema.names), "{schema}\n"
    if prompt.style == "reference":
        columns = ",".join(f'"{name}":<unk>' for name in schema.names)
    if family is not None:
        return family.template.replace("{i}", INSTRUCTION).replace("{s}", columns)
    return (prompt.template or template).replace("{schema}", columns)
