"""Astronomy: two planets, and what is seen in the sky.

What belongs here: facts that fit into a school book. What does not: dates (`calendar.py`).
"""

from dice import Dice
from topics.speech import Turn, listing, number, table, words

_PLANETS = tuple(
    (name, place, int(diameter), kind)
    for place, (name, diameter, kind) in enumerate(
        table("""
            Mercury | 4880 | rocky
            Venus | 12100 | rocky
            Earth | 12740 | rocky
            Mars | 6780 | rocky
            Jupiter | 139800 | gas giant
            Saturn | 116500 | gas giant
            Uranus | 50700 | ice giant
            Neptune | 49200 | ice giant
        """),
        start=1,
    )
)
"""Name, place from the Sun, diameter in km, kind."""

_ORDINALS = words("first, second, third, fourth, fifth, sixth, seventh, eighth")


def astronomy(dice: Dice) -> list[Turn]:
    """Compare two planets and explain what is seen in the sky."""
    one, two = dice.some(_PLANETS, 2)
    big, small = (one, two) if one[2] > two[2] else (two, one)
    between = [p[0] for p in _PLANETS if min(one[1], two[1]) < p[1] < max(one[1], two[1])]
    seconds = dice.between(2, 99)
    return [
        Turn(
            f"Which planet is {_ORDINALS[one[1] - 1]} from the Sun, and of what kind is it?",
            f"{one[0]}. It is {'an' if one[3][0] in 'aeiou' else 'a'} "
            f"{one[3]}{' planet' if one[3] == 'rocky' else ''}.",
            f"In order: {listing([p[0] for p in _PLANETS])}. Number {one[1]} is {one[0]}.",
        ),
        Turn(
            dice.pick((f"Is {one[0]} larger than {two[0]}?", f"Which is larger, {one[0]} or {two[0]}?")),
            f"{big[0]} is larger: about {big[2]} km across against {small[2]} km for {small[0]}, roughly "
            f"{number(round(big[2] * 10 / small[2]), 10)} times as much.",
            f"{one[0]} measures {one[2]} km and {two[0]} {two[2]} km. The larger number is {big[2]}.",
        ),
        Turn(
            f"Which planets lie between {one[0]} and {two[0]}?",
            f"{listing(between)}." if between else f"None: {one[0]} and {two[0]} are neighbours.",
            f"{one[0]} is number {one[1]} and {two[0]} number {two[1]} from the Sun.",
        ),
        Turn(
            f"How far does light travel in {seconds} seconds?",
            f"About {seconds * 300000} km.",
            f"Light covers about 300000 km each second: {seconds} × 300000 = {seconds * 300000}.",
        ),
        Turn(
            dice.pick(("Why does the Moon have phases?", "Why is the Moon not always full?")),
            "The Sun always lights one half of the Moon. As the Moon goes round us we see that half from different "
            "sides: from behind at new moon, from the side at half moon, from the front at full moon. The Earth's "
            "shadow plays no part in it.",
        ),
        Turn(
            dice.pick(("Why do stars twinkle?", "Why do stars flicker and planets hardly?")),
            "Their light crosses air of different warmth, which bends it a little this way and that. A star is a "
            "point, so the whole of it jumps; a planet is a small disc, and its jumps cancel out.",
        ),
    ]
