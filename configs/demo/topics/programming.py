"""Programming: a beginner's questions about Python; every printed result is computed here.

What belongs here: expressions small enough to check by eye. What does not: sums without code (`arithmetic.py`).
"""

import json

from dice import Dice
from topics.speech import Call, Turn, listing, words

_WORDS = words("""
    amber, basil, cedar, delta, ember, fjord, grove, harbor, island, juniper, kettle, lantern, meadow, needle, orchard,
    pepper, quartz, river, saffron, timber, umbrella, valley, willow, yarrow, zephyr
""")


def programming(dice: Dice) -> list[Turn]:
    """Answer a beginner's questions about Python; every printed result is computed here."""
    numbers = [dice.between(1, 60) for _ in range(dice.between(3, 7))]
    words = dice.some(_WORDS, dice.between(2, 5))
    start, stop, step = dice.between(0, 9), dice.between(12, 40), dice.between(2, 7)
    word = dice.pick(words)
    even = [n for n in numbers if n % 2 == 0]
    code = f"print(sum({numbers}))"
    return [
        Turn(
            f"What does `sum({numbers})` give in Python?",
            f"`{sum(numbers)}`",
            " + ".join(map(str, numbers)) + f" = {sum(numbers)}",
        ),
        Turn(
            f"How do I sort {json.dumps(words)} by length?",
            f"Pass a key:\n\n```python\nsorted({json.dumps(words)}, key=len)\n```\n\nThe result is "
            f"`{json.dumps(sorted(words, key=len))}`; "
            "words of equal length keep their order.",
        ),
        Turn(
            f"What is in `list(range({start}, {stop}, {step}))`?",
            f"`{list(range(start, stop, step))}`",
            f"From {start} in steps of {step}, stopping before {stop}: "
            f"{listing([str(n) for n in range(start, stop, step)])}.",
        ),
        Turn(
            f"Keep only the even numbers of {numbers}.",
            f"```python\n[n for n in {numbers} if n % 2 == 0]\n```\n\nThat leaves `{even}`.",
            "Even numbers leave no remainder when divided by 2: "
            f"{listing([str(n) for n in even]) if even else 'there are none here'}.",
        ),
        Turn(
            f"What is `{word!r}[::-1]`?",
            f"`{word[::-1]!r}`: a slice with step -1 runs backwards.",
        ),
        Turn(
            f"Run this for me:\n\n```python\n{code}\n```",
            f"It prints `{sum(numbers)}`.",
            calls=(Call("run_python", {"code": code}, {"stdout": f"{sum(numbers)}\n", "exit_code": 0}),),
        ),
        Turn(
            dice.pick(("What is the difference between a list and a tuple?", "When do I use a tuple and not a list?")),
            "A list can change: you append, remove, replace. A tuple cannot, so it may be the key of a dictionary "
            "and is safe to share. Use a list for many things of one kind, a tuple for few things that belong "
            "together.",
        ),
        Turn(
            f"Write a function that counts a letter in a word and try it on {word!r}.",
            "```python\ndef count(letter: str, word: str) -> int:\n"
            "    return sum(1 for one in word if one == letter)\n\n"
            f"count({word[1]!r}, {word!r})\n```\n\nThe call returns `{word.count(word[1])}`.",
        ),
    ]
