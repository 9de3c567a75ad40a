"""Write the demo's data and train its tokenizer, the same bytes every time: `python configs/demo/generate.py [folder]`.

What belongs here: how turns become records in the shapes that real collections have, which files there are, and the
tokenizer's training. What does not: wording (`topics/`, `essays.py`, `exercises.py`), broken records (`flaws.py`), the
chat template, which is written by hand (`tokenizer/chat_template.jinja`).

    data/chats-{1,2}.jsonl     OpenAI messages: systems, tools, reasoning, long ones, duplicates, flaws
    data/sharegpt.json         one JSON list in ShareGPT's shape
    data/instructions.csv      instruction, input, output
    data/documents.jsonl.zst   short and long texts
    tokenizer/tokenizer.json, tokenizer_config.json    byte-level BPE of 4,000 tokens, trained on the text above

What `documents.jsonl.zst` holds is fixed, too; how it is packed is the choice of zstandard's release.
"""

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dice import Dice
from essays import document
from exercises import Pair, pair
from flaws import CSV_FLAWS, DOCUMENT_FLAWS, SHAREGPT_FLAWS, chat_flaws
from topics import TOPICS
from topics.speech import Call, Turn
from topics.tools import TOOLS

SEED = 20250101
CHATS, SHAREGPT, PAIRS, DOCUMENTS = 1130, 130, 1500, 300
VOCABULARY = 4000
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Words and the space before them, digits one by one (for arithmetic), other signs in runs, white space.
PIECES = r" ?\p{L}[\p{L}\p{M}]*| ?\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_SYSTEMS = {
    "kitchen": (
        "You are a patient cook who writes for beginners.",
        "You help in a kitchen. Be brief and exact about amounts.",
    ),
    "classroom": (
        "You are a tutor. Show the way to the result, then the result.",
        "Answer pupils kindly and correctly.",
    ),
    "travel_desk": (
        "You work at a travel desk. Name facts first, advice second.",
        "You plan trips for people who dislike hurry.",
    ),
    "field_notes": (
        "You answer practical questions from house and garden.",
        "Give instructions that work without special tools.",
    ),
    "office": ("You keep a calendar. Dates are written as YYYY-MM-DD.", "You are an assistant in a small office."),
}
_LINKS = ("", "", "Thanks. ", "Good. ", "One more question. ", "And now this: ", "I see. ")
_FILLERS = ("One moment.", "I will look that up.", "Let me check.")
_CLOSINGS = (("Thank you, that helps.", "You are welcome!"), ("Great, thanks 🙂", "Happy to help. Come back any time."))

Message = dict[str, Any]
Record = dict[str, Any]


def openings(dice: Dice, used: set[str], topic: str, count: int) -> list[Turn]:
    """Draw turns of one topic whose first question was not asked before, so that splits are honestly apart."""
    while True:
        turns: list[Turn] = []
        while len(turns) < count:
            turns += TOPICS[topic][0](dice)
        chosen = dice.some(turns, count)
        if chosen[0].question not in used:
            used.add(chosen[0].question)
            return chosen


def _calls(calls: tuple[Call, ...], first: int) -> list[Message]:
    return [
        {"id": f"call_{place}", "type": "function",
         "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
        for place, call in enumerate(calls, first)
    ]  # fmt: skip


def _spoken(dice: Dice, turn: Turn, style: str) -> Message:
    """Return the assistant's answer, its reasoning where the conversation's style puts it."""
    match style if turn.reasoning else "none":
        case "field":
            return {"role": "assistant", "content": turn.answer, "reasoning_content": turn.reasoning}
        case "thinking":
            return {"role": "assistant", "content": turn.answer, "thinking": turn.reasoning}
        case "inline":
            gap = dice.pick(("\n", "\n\n"))
            return {"role": "assistant", "content": f"<think>\n{turn.reasoning}\n</think>{gap}{turn.answer}"}
        case _:
            return {"role": "assistant", "content": turn.answer}


def exchange(dice: Dice, turn: Turn, style: str, place: int) -> list[Message]:
    """Return the messages of one question: asked, tools used, answered."""
    link = dice.pick(_LINKS) if place else ""
    messages: list[Message] = [{"role": "user", "content": link + turn.question}]
    if turn.calls:
        calls = _calls(turn.calls, place * 10 + 1)
        beside = dice.pick(_FILLERS) if dice.percent(30) else None
        messages.append({"role": "assistant", "content": beside, "tool_calls": calls})
        for call, asked in zip(turn.calls, calls, strict=True):
            result = json.dumps(call.result, ensure_ascii=False)
            messages.append({"role": "tool", "tool_call_id": asked["id"], "content": result})
    if style == "role" and turn.reasoning:
        messages.append({"role": "think", "content": turn.reasoning})
    messages.append(_spoken(dice, turn, style))
    return messages


def _tools(dice: Dice, turns: list[Turn]) -> list[Record]:
    names = {call.name for turn in turns for call in turn.calls}
    names |= set(dice.some(sorted(TOOLS), dice.between(0, 1)))
    return [TOOLS[name] for name in sorted(names)]


def conversation(dice: Dice, number: int, topic: str, turns: list[Turn]) -> Record:
    """Return one record of `chats-*.jsonl`."""
    source = TOPICS[topic][1]
    style = (
        ("none", "none", "none", "field", "field", "inline", "inline", "thinking")[dice.below(8)]
        if dice.percent(98)
        else "role"
    )
    messages = [{"role": "system", "content": dice.pick(_SYSTEMS[source])}] if dice.percent(40) else []
    for place, turn in enumerate(turns):
        messages += exchange(dice, turn, style, place)
    if dice.percent(12):
        thanks, welcome = dice.pick(_CLOSINGS)
        messages += [{"role": "user", "content": thanks}, {"role": "assistant", "content": welcome}]
    record: Record = {"conversation_id": f"chat-{number:04d}", "topic": topic, "source": source, "messages": messages}
    if any(turn.calls for turn in turns) or dice.percent(6):
        record["tools"] = _tools(dice, turns)
    return record


def _legacy(record: Record) -> Record:
    """Rewrite a record to the older API: `functions`, `function_call`, and a null column where the tools now are."""
    messages: list[Message] = []
    for message in record["messages"]:
        content = message["content"]
        if "tool_calls" in message:
            call = message["tool_calls"][0]["function"]
            messages.append({"role": "assistant", "content": content, "function_call": call})
        elif message["role"] == "tool":
            messages.append({"role": "function", "name": "result", "content": content})
        else:
            messages.append(message)
    return record | {"messages": messages, "tools": None, "functions": [tool["function"] for tool in record["tools"]]}


def _in_parts(record: Record) -> Record:
    """Write every text as a list of typed parts."""
    messages = [
        message | {"content": [{"type": "text", "text": message["content"]}]} if message["content"] else message
        for message in record["messages"]
    ]
    return record | {"messages": messages}


def _with_role(dice: Dice, record: Record) -> Record:
    """Let somebody speak whose role no template knows."""
    word = dice.pick(("Please keep to the topic.", "This conversation is recorded.", "A short break, please."))
    before, after = record["messages"][:-2], record["messages"][-2:]
    return record | {"messages": [*before, {"role": "moderator", "content": word}, *after]}


def _unweighted(record: Record, flag: str) -> Record:
    """Take the loss off the first answer, which is kept as context."""
    place = next(i for i, message in enumerate(record["messages"]) if message["role"] == "assistant")
    mark = {"weight": 0} if flag == "weight" else {"train": False}
    messages = list(record["messages"])
    messages[place] = messages[place] | mark
    return record | {"messages": messages}


def _varied(dice: Dice, record: Record, number: int, exchanges: int) -> Record:
    """Give a few records each of the rarer shapes; which ones follows from the number."""
    if "tools" in record and number % 9 == 0:
        return _legacy(record)
    if number % 131 == 7 and exchanges > 1:
        return record | {"messages": json.dumps(record["messages"], ensure_ascii=False)}
    if number % 89 == 5:
        return _in_parts(record)
    if number % 149 == 11:
        return _with_role(dice, record)
    if number % 41 == 3 and exchanges > 1:
        return _unweighted(record, "weight" if number % 2 else "train")
    if number % 211 == 13:
        return record | {"chat_template_kwargs": {"enable_thinking": True}}
    return record


def long_by_exchanges(dice: Dice, used: set[str], topic: str) -> list[Turn]:
    """Return so many turns that the oldest have to go."""
    return openings(dice, used, topic, dice.between(11, 24))


def long_by_reasoning(dice: Dice, used: set[str]) -> list[Turn]:
    """Return a question whose reasoning is longer than the context."""
    factor, times = dice.between(13, 97), dice.between(60, 110)
    question = f"Add {factor} to itself until it stands there {times} times. What is the sum?"
    steps = "; ".join(f"{n} times {factor} is {n * factor}" for n in range(2, times + 1))
    used.add(question)
    return [
        *openings(dice, used, "arithmetic", 1),
        Turn(question, f"{times} × {factor} = {times * factor}", f"I add step by step: {steps}."),
    ]


def long_by_quotation(dice: Dice, used: set[str]) -> list[Turn]:
    """Return a question about a quoted text that alone fills the context."""
    text = document(dice, dice.between(12, 18))
    word = dice.pick(("the", "and", "day", "is"))
    count = text.lower().split().count(word)
    used.add(text)
    return [
        Turn(
            f"How often does the word “{word}” stand alone in this text?\n\n{text}",
            f"It stands there {count} times.",
            f"I go through the text word by word and count “{word}”, without regard to capitals: {count}.",
        )
    ]


def about_control_tokens(dice: Dice) -> list[Turn]:
    """Return a question that quotes a control token; in a record's content it is only characters."""
    token, name = dice.pick(SPECIAL_TOKENS), dice.pick(("log", "export", "transcript", "dump", "database"))
    place = dice.between(2, 900)
    return [
        Turn(
            f"Line {place} of my {name} ends in {token}. What is that?",
            f"`{token}` is a control token of a chat model. In your {name} it is {len(token)} ordinary characters: "
            "somebody printed the conversation together with its markers.",
        )
    ]


def _turns(dice: Dice, used: set[str], number: int, topic: str) -> list[Turn]:
    """Draw what a conversation is about; most are short, about one in twenty does not fit the context."""
    if number % 53 == 1:
        return long_by_exchanges(dice, used, topic)
    if number % 89 == 2:
        return long_by_reasoning(dice, used)
    if number % 97 == 4:
        return long_by_quotation(dice, used)
    if number % 191 == 6:
        return about_control_tokens(dice)
    return openings(dice, used, topic, (1, 1, 1, 1, 2, 2, 2, 3, 3, 4)[dice.below(10)])


def chats(dice: Dice, used: set[str]) -> list[bytes]:
    """Return the lines of `chats-*.jsonl`: records, second endings, repeated openings, exact duplicates, flaws."""
    lines: list[bytes] = []
    for number in range(CHATS):
        topic = dice.pick(tuple(TOPICS))
        turns = _turns(dice, used, number, topic)
        record = conversation(dice, number, topic, turns)
        lines.append(_line(_varied(dice, record, number, len(turns))))
        if number % 29 == 10 and len(turns) > 1:
            # The same conversation, ended otherwise: same group, so never in two splits.
            lines.append(_line(conversation(dice, number, topic, [*turns[:-1], *openings(dice, used, topic, 1)])))
        if number % 83 == 20:
            # Somebody else asked the same, in another group: what `same_prompt` looks for.
            lines.append(_line(conversation(dice, CHATS + number, topic, [turns[0], *openings(dice, used, topic, 1)])))
    # A line separator inside a string is no line end; only \n is.
    lines[17] = lines[17].replace(b". ", ".\u2028".encode(), 1)
    lines += [lines[place * 97 + 40] for place in range(10)]
    return _scattered(dice, lines, [flaw for _, flaw in chat_flaws()])


def _line(record: Record) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()


def _scattered(dice: Dice, lines: list[bytes], flaws: list[bytes]) -> list[bytes]:
    """Put each flaw at a random place among the lines."""
    lines = list(lines)
    for flaw in flaws:
        lines.insert(dice.below(len(lines)), flaw)
    return lines


def sharegpt(dice: Dice, used: set[str]) -> list[Record]:
    """Return the elements of `sharegpt.json`."""
    records: list[Record] = []
    for number in range(SHAREGPT):
        topic = dice.pick(tuple(TOPICS))
        turns = openings(dice, used, topic, dice.between(1, 4))
        record: Record = {
            "conversation_id": f"share-{number:03d}",
            "topic": topic,
            "source": TOPICS[topic][1],
            "conversations": [],
        }
        for turn in turns:
            record["conversations"] += list(_sharegpt_turns(turn))
        if any(turn.calls for turn in turns):
            # As in the wild: tools as JSON text, bare schemas.
            record["tools"] = json.dumps([tool["function"] for tool in _tools(dice, turns)], ensure_ascii=False)
        if dice.percent(30):
            record["system"] = dice.pick(_SYSTEMS[record["source"]])
        records.append(record)
    for _, flaw in SHAREGPT_FLAWS:
        records.insert(dice.below(len(records)), flaw)
    return records


def _sharegpt_turns(turn: Turn) -> Iterator[Message]:
    yield {"from": "human", "value": turn.question}
    for call in turn.calls:
        yield {
            "from": "function_call",
            "value": json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False),
        }
        yield {"from": "observation", "value": json.dumps(call.result, ensure_ascii=False)}
    yield {"from": "gpt", "value": turn.answer}


def instructions(dice: Dice, used: set[str]) -> bytes:
    """Return `instructions.csv`: pairs, some exact duplicates, flaws."""
    pairs: dict[tuple[str, str], Pair] = {}
    while len(pairs) < PAIRS:
        one = pair(dice)
        if one[0] not in used:
            pairs.setdefault(one[:2], one)
    rows = [_csv_row(one) for one in pairs.values()]
    rows += rows[100:108]
    return _csv_row(("instruction", "input", "output")) + b"".join(
        _scattered(dice, rows, [flaw for _, flaw in CSV_FLAWS])
    )


def _csv_row(cells: tuple[str, ...]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def documents(dice: Dice) -> list[bytes]:
    """Return the lines of `documents.jsonl.zst`; one in eight texts is longer than the context."""
    lines: list[bytes] = []
    for number in range(DOCUMENTS):
        long = number % 8 == 3
        paragraphs = dice.between(10, 22) if long else dice.between(0, 6)
        lines.append(_line({"title": f"Notes {number + 1}", "text": document(dice, paragraphs)}))
    lines += lines[50:54]
    # One text that the recipe's max_chars leaves out.
    lines.append(_line({"title": "Collected notes", "text": document(dice, 60)}))
    return _scattered(dice, lines, [flaw for _, flaw in DOCUMENT_FLAWS])


def strings(value: object) -> Iterator[str]:
    """Yield every text inside a decoded JSON value, and the value itself where templates print it as JSON."""
    match value:
        case str():
            yield value
        case list():
            for one in value:
                yield from strings(one)
        case dict():
            if "parameters" in value or "arguments" in value:
                yield json.dumps(value, ensure_ascii=False)
            for one in value.values():
                yield from strings(one)
        case _:
            return


def decoded(lines: list[bytes]) -> Iterator[str]:
    """Yield the texts of the lines that are JSON."""
    for line in lines:
        try:
            yield from strings(json.loads(line))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
            continue


def train(texts: list[str]) -> Tokenizer:
    """Train the tokenizer: byte-level BPE, so that every text decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        # Control tokens stand in the text as examples only; they must not teach merges.
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """Return what `transformers` reads beside `tokenizer.json`; the template lies in a file of its own."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1_000_000,
        "bos_token": None,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
    }


def write(folder: Path) -> None:
    """Write all files under `folder`; the chat template is left as it is."""
    used: set[str] = set()
    dice = [Dice(SEED + place) for place in range(4)]
    chat_lines = chats(dice[0], used)
    shares = sharegpt(dice[1], used)
    table = instructions(dice[2], used)
    texts = documents(dice[3])
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    half = len(chat_lines) // 2
    (data / "chats-1.jsonl").write_bytes(b"\n".join(chat_lines[:half]) + b"\n")
    (data / "chats-2.jsonl").write_bytes(b"\n".join(chat_lines[half:]) + b"\n")
    (data / "sharegpt.json").write_text(json.dumps(shares, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (data / "instructions.csv").write_bytes(table)
    packed = zstandard.ZstdCompressor(level=10, write_checksum=True).compress(b"\n".join(texts) + b"\n")
    (data / "documents.jsonl.zst").write_bytes(packed)
    corpus = [*decoded(chat_lines), *strings(shares), table.decode(errors="ignore"), *decoded(texts)]
    home = folder / "tokenizer"
    home.mkdir(exist_ok=True)
    train(corpus).save(str(home / "tokenizer.json"), pretty=False)
    (home / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
