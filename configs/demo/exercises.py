"""The demo's instruction pairs: small tasks with an input and the one right output, computed here.

What belongs here: kinds of task. What does not: files and broken pairs (`generate.py`, `flaws.py`).
"""

import json
from collections.abc import Callable
from datetime import date, timedelta

from dice import Dice
from topics import TOPICS
from topics.speech import clock, listing, numbered, table, words

Pair = tuple[str, str, str]
"""Instruction, input (may be empty) and output."""

_NOUNS = words("""
    apple, bridge, candle, drawer, engine, feather, garden, hammer, island, jacket, kitchen, ladder, mirror, napkin,
    oven, pencil, quilt, ribbon, saddle, table, umbrella, violin, window, yard, zipper
""")
_ADJECTIVES = words("""
    red, heavy, wooden, small, bright, old, quiet, round, broken, polished, striped, cold
""")
_PLURALS = table("""
    child | children
    mouse | mice
    leaf | leaves
    city | cities
    tooth | teeth
    box | boxes
    knife | knives
    sheep | sheep
    potato | potatoes
    baby | babies
    goose | geese
    bus | buses
""")
_ORDERS = words("""
    Send me the report, Close the window, Give me the key, Call me back, Move your car, Sign the form, Bring the
    ladder, Wait outside, Turn the music down, Check the numbers again, Feed the cat, Book a table
""")
_OPINIONS = table("""
    The soup was cold and nobody apologised. | negative
    Best holiday we ever had! | positive
    The parcel arrived on Tuesday. | neutral
    I would buy this lamp again at once. | positive
    The zip broke on the second day. | negative
    The shop opens at nine. | neutral
    Lovely staff, spotless room. | positive
    Two hours late, and no seat. | negative
    The manual has forty pages. | neutral
    My old phone did this better. | negative
    The children did not want to leave. | positive
    It comes in three colours. | neutral
""")
_ONES = words("""
    zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen,
    sixteen, seventeen, eighteen, nineteen
""")
_TENS = words("zero, ten, twenty, thirty, forty, fifty, sixty, seventy, eighty, ninety")


def in_words(number: int) -> str:
    """Write an integer from 0 to 999 in words."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")
    rest = number % 100
    return f"{_ONES[number // 100]} hundred" + (f" and {in_words(rest)}" if rest else "")


def _sort_words(dice: Dice) -> Pair:
    words = dice.some(_NOUNS, dice.between(3, 9))
    return "Sort the words alphabetically.", ", ".join(words), ", ".join(sorted(words))


def _count_letters(dice: Dice) -> Pair:
    phrase = " ".join([*dice.some(_ADJECTIVES, 2), dice.pick(_NOUNS)])
    letter = dice.pick("aeiou")
    return f'How often does the letter "{letter}" occur?', phrase, str(phrase.count(letter))


def _reverse(dice: Dice) -> Pair:
    words = [f"{dice.pick(_ADJECTIVES)} {dice.pick(_NOUNS)}" for _ in range(dice.between(2, 5))]
    return "Turn the list round, last item first.", numbered(words), numbered(words[::-1])


def _arithmetic(dice: Dice) -> Pair:
    a, b = dice.between(20, 999), dice.between(2, 99)
    text, value = dice.pick(
        ((f"{a} + {b}", a + b), (f"{a} - {b}", a - b), (f"{a} × {b}", a * b), (f"{a * b} ÷ {b}", a))
    )
    return dice.pick(("Calculate.", "Work this out.", "Give the result only.")), text, str(value)


def _words_to_number(dice: Dice) -> Pair:
    number = dice.below(1000)
    pair = (str(number), in_words(number))
    shown, wanted = pair if dice.percent(50) else pair[::-1]
    return f"Write the number in {'words' if shown == pair[0] else 'digits'}.", shown, wanted


def _extract(dice: Dice) -> Pair:
    name, noun, look = (
        dice.pick(("Ada", "Bruno", "Chen", "Dalia", "Emil", "Fatima")),
        dice.pick(_NOUNS),
        dice.pick(_ADJECTIVES),
    )
    count, price = dice.between(2, 60), dice.between(3, 400)
    return (
        "Extract the order as JSON with the keys buyer, item, count and price.",
        f"Hello, this is {name}. I would like {count} of the {look} ones, the {noun} I mean, at {price} euros each.",
        json.dumps({"buyer": name, "item": noun, "count": count, "price": price}),
    )


def _polite(dice: Dice) -> Pair:
    order = dice.pick(_ORDERS)
    when = dice.pick(("", " today", " before noon", " by Friday", " when you have a moment"))
    return (
        "Make this sound friendly.",
        f"{order}{when}!",
        f"Could you please {order[0].lower()}{order[1:]}{when}? Thank you.",
    )


def _sentiment(dice: Dice) -> Pair:
    text, label = dice.pick(_OPINIONS)
    day = dice.pick(("Monday", "last week", "yesterday", "in May", "this morning"))
    return (
        "Is the opinion positive, negative or neutral? Answer with one word.",
        f"{text} ({day}, order {dice.between(100, 999)})",
        label,
    )


def _plural(dice: Dice) -> Pair:
    chosen = dice.some(_PLURALS, dice.between(1, 4))
    return "Give the plural.", ", ".join(one for one, _ in chosen), ", ".join(many for _, many in chosen)


def _date(dice: Dice) -> Pair:
    day = date(2023, 1, 1) + timedelta(days=dice.below(1800))
    return "Rewrite the date as day.month.year.", day.isoformat(), f"{day.day}.{day.month}.{day.year}"


def _duration(dice: Dice) -> Pair:
    start, length = dice.between(300, 1000), dice.between(15, 400)
    return "When does it end?", f"Start {clock(start)}, {length} minutes", clock(start + length)


def _convert(dice: Dice) -> Pair:
    value = dice.between(2, 800)
    big, small, factor = dice.pick(
        (("km", "m", 1000), ("kg", "g", 1000), ("h", "min", 60), ("m", "cm", 100), ("l", "ml", 1000))
    )
    return f"Convert into {small}.", f"{value} {big}", f"{value * factor} {small}"


def _largest(dice: Dice) -> Pair:
    numbers = [dice.between(10, 9999) for _ in range(dice.between(3, 8))]
    return (
        "Name the largest and the smallest number.",
        listing([str(n) for n in numbers]),
        f"{max(numbers)} and {min(numbers)}",
    )


def _explain(dice: Dice) -> Pair:
    """Take a question of a topic as the instruction, without input."""
    write, _ = TOPICS[dice.pick(tuple(TOPICS))]
    turn = dice.pick([one for one in write(dice) if not one.calls])
    return turn.question, "", turn.answer


_KINDS: tuple[Callable[[Dice], Pair], ...] = (
    _sort_words,
    _count_letters,
    _reverse,
    _arithmetic,
    _words_to_number,
    _extract,
    _polite,
    _sentiment,
    _plural,
    _date,
    _duration,
    _convert,
    _largest,
    *[_explain] * 4,
)


def pair(dice: Dice) -> Pair:
    """Write one instruction pair."""
    return dice.pick(_KINDS)(dice)
