"""How likely a build notices that its fast engine is wrong on one character in 100,000, and what the comparison costs.

    python -m benchmarks.engine_sample

Texts are cut into parts as a source of that size is, and the stretches that a build compares with the reference are
chosen in each. Then wrong characters are drawn, spread over all texts, or gathered in one text of a hundred, where one
in 1,000 is wrong; a trial notices them if one lies in a stretch. For the smallest size an engine that is wrong on the
drawn characters is put in as well, and each trial encodes and compares as a build does.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import orjson

from benchmarks import corpus, measure
from rowmill.core.arrays import Ints, compute_offsets
from rowmill.sources.parts import part_bytes
from rowmill.stages.tokenized_examples.text_parts import BATCH_CHARS, cut_batches
from rowmill.tokenization import tokenizer
from rowmill.tokenization.encoded_batch import PartTally, encode_and_compare
from rowmill.tokenization.reference_sample import ReferenceSample, divide_minimum
from rowmill.tokenization.tokenizer import Encoder, open_tokenizer

SIZES = (1_000_000, 10_000_000, 100_000_000)
ONE_IN = 100_000
TRIALS, TRIALS_WITH_ENGINE = 2000, 40
GATHERED_IN = 100
"""Gathered errors are in one text of so many, and there so many times as frequent."""


def iterate_chats() -> Iterator[str]:
    """Yield real chats, numbered, over and over: 600 characters each."""
    chats = list(corpus.conversations())
    for number in count():
        for one in chats:
            yield f"[{number}]" + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in one)


def iterate_dialogues() -> Iterator[str]:
    """Yield real dialogues with tools, numbered, over and over: 24,000 characters each."""
    lines = (corpus.DATA / "tools/tau_airline_gpt4o.messages.jsonl").read_bytes().splitlines()
    for number in count():
        for line in lines:
            row = orjson.loads(line)
            tools = "".join(orjson.dumps(tool).decode() + "\n" for tool in row["tools"])
            yield f"[{number}]{tools}" + "".join(
                f"<|im_start|>{m['role']}\n{orjson.dumps(m).decode()}<|im_end|>\n" for m in row["messages"]
            )


class Coverage(NamedTuple):
    """The texts of a build by where they begin, and where the compared stretches begin and end, all ascending."""

    texts: Ints
    begins: Ints
    ends: Ints
    seconds: float

    @property
    def share(self) -> float:
        """The share of the characters that is compared."""
        return float((self.ends - self.begins).sum() / self.texts[-1])


def cut_parts(texts: Iterator[str], chars: int) -> Iterator[list[str]]:
    """Cut texts of so many characters into parts, as a file of as many bytes is cut."""
    held, part = 0, list[str]()
    begin = 0
    for text in texts:
        part.append(text)
        held += len(text)
        if held - begin >= part_bytes(begin) or held >= chars:
            yield part
            begin, part = held, []
        if held >= chars:
            return


def count_parts(chars: int) -> int:
    """Return the number of parts of a file of so many bytes."""
    begin, parts = 0, 0
    while begin < chars:
        begin, parts = begin + part_bytes(begin), parts + 1
    return parts


def find_coverage(texts: Iterator[str], chars: int) -> Coverage:
    """Choose the stretches of every part."""
    lengths, begins, ends = list[int](), list[int](), list[int]()
    total, seconds = 0, 0.0
    minimum = divide_minimum(count_parts(chars))
    for part in cut_parts(texts, chars):
        sample = ReferenceSample(minimum)
        for batch in cut_batches([len(text) for text in part], BATCH_CHARS):
            own = part[batch]
            bases = compute_offsets([len(text) for text in own]) + total
            started = time.perf_counter()
            chosen = sorted(sample.choose(own, ()), key=lambda one: (one.text, one.begin))
            seconds += time.perf_counter() - started
            begins += [int(bases[one.text]) + one.begin for one in chosen]
            ends += [int(bases[one.text]) + one.end for one in chosen]
            lengths += [len(text) for text in own]
            total = int(bases[-1])
    return Coverage(compute_offsets(lengths), np.array(begins), np.array(ends), seconds)


def draw_spread(drawn: np.random.Generator, texts: Ints) -> Ints:
    """Draw wrong characters, each equally likely."""
    return drawn.integers(0, texts[-1], drawn.poisson(texts[-1] / ONE_IN))


def draw_gathered(drawn: np.random.Generator, texts: Ints) -> Ints:
    """Draw wrong characters in one text of `GATHERED_IN`."""
    has_errors = np.flatnonzero(drawn.random(len(texts) - 1) < 1 / GATHERED_IN)
    counts = drawn.poisson(np.diff(texts)[has_errors] / ONE_IN * GATHERED_IN)
    sizes = np.repeat(np.diff(texts)[has_errors], counts)
    return np.repeat(texts[:-1][has_errors], counts) + drawn.integers(0, np.maximum(sizes, 1))


def measure_chance(covered: Coverage, draw: Callable[[np.random.Generator, Ints], Ints]) -> float:
    """Return the share of trials in which a wrong character lies in a compared stretch."""
    drawn = np.random.default_rng(0)
    noticed = 0
    for _ in range(TRIALS):
        places = draw(drawn, covered.texts)
        at = np.searchsorted(covered.begins, places, "right") - 1
        noticed += bool((places < covered.ends[at])[at >= 0].any())
    return noticed / TRIALS


class WrongEngine:
    """An engine that takes some characters for others of as many bytes."""

    def __init__(self) -> None:
        """Be right until characters are named."""
        self.wrong: dict[str, str] = {}
        """The texts that it is wrong on, and what it takes them for."""
        self._open_right = tokenizer.FAST_ENGINES["gigatoken"]
        tokenizer.FAST_ENGINES["gigatoken"] = self._open

    def _open(self, backend: str) -> tokenizer.EncodeTexts:
        encode = self._open_right(backend)
        return lambda texts: encode([self.wrong.get(text, text) for text in texts])

    def err_at(self, texts: Sequence[str], bases: Ints, places: Ints) -> None:
        """Name the wrong characters, by their place in all texts."""
        self.wrong = {}
        for place in places.tolist():
            number = int(np.searchsorted(bases, place, "right")) - 1
            text, at = texts[number], place - int(bases[number])
            changed = self.wrong.get(text, text)
            other = {1: "~", 2: "ø", 3: "話", 4: "🎈"}[len(changed[at].encode())]
            self.wrong[text] = changed[:at] + other + changed[at + 1 :]


def measure_with_engine(texts: Callable[[], Iterator[str]], chars: int) -> dict[str, float]:
    """Return the share of trials in which a build with a wrong engine notices it, and what a right one costs."""
    engine = WrongEngine()
    encoder = Encoder(open_tokenizer(str(corpus.TOKENIZER), corpus.DATA))
    encoder.open_engines()
    parts, minimum = list(cut_parts(texts(), chars)), divide_minimum(count_parts(chars))
    drawn, noticed, compared = np.random.default_rng(1), 0, 0.0
    for _ in range(TRIALS_WITH_ENGINE):
        differs = False
        for part in parts:
            bases = compute_offsets([len(text) for text in part])
            engine.err_at(part, bases, draw_spread(drawn, bases))
            counts = PartTally(sample=ReferenceSample(minimum))
            for batch in cut_batches([len(text) for text in part], BATCH_CHARS):
                encode_and_compare(encoder, part[batch], counts)
            differs |= counts.engine_differs
        noticed += differs
    engine.wrong = {}
    for part in parts:
        started = time.process_time()
        encode_and_compare(encoder, part, PartTally(sample=ReferenceSample(minimum)))
        compared += time.process_time() - started
        started = time.process_time()
        encoder.encode(part)
        compared -= time.process_time() - started
    return {
        "noticed_with_engine": noticed / TRIALS_WITH_ENGINE,
        "compare_cpu_ms_per_million": round(compared * 1e9 / chars),
    }


def main() -> None:
    """Measure every kind of text at every size."""
    for name, texts in (("chats", iterate_chats), ("dialogues with tools", iterate_dialogues)):
        for chars in SIZES:
            covered = find_coverage(texts(), chars)
            with_engine = measure_with_engine(texts, chars) if chars == SIZES[0] else {}
            measure.emit(
                "engine_sample",
                texts=name,
                million_characters=chars // 1_000_000,
                compared_share=round(covered.share, 4),
                choose_ms_per_million=round(covered.seconds * 1e9 / chars, 2),
                noticed_spread=measure_chance(covered, draw_spread),
                noticed_gathered=measure_chance(covered, draw_gathered),
                **with_engine,
            )


if __name__ == "__main__":
    main()
