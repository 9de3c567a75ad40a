"""The demo's documents: short plain texts of very different lengths, one subject each.

What belongs here: paragraphs and how a document is put together. What does not: files (`generate.py`).
"""

from dice import Dice
from topics import TOPICS
from topics.speech import listing, words

_PLACES = words("""
    mill, harbour, orchard, library, workshop, lighthouse, bakery, observatory, greenhouse, station, market hall,
    ferry landing, quarry, vineyard, weaving shed, bridge house
""")
_TRAITS = words("""
    quiet, narrow, sunlit, crooked, spacious, windy, restored, half-forgotten, busy, modest
""")
_PEOPLE = words("""
    a miller, two sisters, the town's only watchmaker, a retired pilot, a family of beekeepers, students in summer,
    a ferryman, a choir, an amateur astronomer, the fire brigade, a bookbinder, a cook from the coast
""")
_SEASONS = words("""
    In spring, In early summer, When autumn comes, On winter mornings, After the first frost, During the harvest
""")
_WORK = words("""
    repair what the storm has loosened, count the stock and write it on a slate, sweep the floor before anyone
    arrives, oil the hinges of the great door, compare the clock with the sun, carry water up the ninety steps, copy
    the figures of the week into a ledger, test every rope twice, open the shutters one after another, sort the
    apples by size, heat the oven with last year's cuttings, measure the level of the river
""")
_CAUSES = words("""
    because wood moves with the weather, since nobody remembers who began it, so that the next one finds everything
    in its place, because a small fault is mended faster than a large one, for the sound carries far over the water,
    as the ground is never quite dry, because visitors ask for it, since habit is cheaper than memory
""")
_ENDS = (
    "Little has changed since, and that is what most people come for.",
    "The rest is patience.",
    "What remains is a matter of taste.",
    "Whoever wants to know more should ask on the spot.",
    "The figures are in the appendix; the smell is not.",
    "It could have been simpler, but not by much.",
)
_ASKED = ("Visitors ask:", "A child wanted to know:", "A note on the wall asks:")


def _opening(dice: Dice, trait: str, place: str) -> str:
    year = dice.between(1640, 1968)
    return (
        f"The {trait} {place} was built in {year} and has been used by {dice.pick(_PEOPLE)} ever since. It stands "
        f"{dice.between(2, 90)} metres above the river and measures {dice.between(6, 40)} by {dice.between(5, 25)} "
        "metres."
    )


def _habits(dice: Dice, place: str) -> str:
    first, second, third = dice.some(_WORK, 3)
    season, hour, cause = dice.pick(_SEASONS), dice.between(4, 8), dice.pick(_CAUSES)
    weekday = dice.pick(("Mondays", "Thursdays", "Saturdays"))
    return (
        f"{season} the day at the {place} begins at {hour} o'clock. The first task is to {first}; then it is time to "
        f"{second}, {cause}. Only on {weekday} do they {third} as well."
    )


def _count(dice: Dice, place: str) -> str:
    visitors = [dice.between(120, 980) for _ in range(3)]
    busiest = "last" if visitors[2] == max(visitors) else "first" if visitors[0] == max(visitors) else "second"
    return (
        f"The {place} counts its visitors. In three years there were {listing([str(n) for n in visitors])}, together "
        f"{sum(visitors)}, and the {busiest} year was the busiest. A ticket costs {dice.between(2, 9)} euros, children "
        "pay half."
    )


def _digression(dice: Dice) -> str:
    """Turn some questions and answers of one topic into a paragraph of prose."""
    write, _ = TOPICS[dice.pick(tuple(TOPICS))]
    turns = [turn for turn in write(dice) if not turn.calls and "\n" not in turn.answer]
    return " ".join(
        f'{dice.pick(_ASKED)} "{turn.question}" {turn.answer}' for turn in dice.some(turns, min(2, len(turns)))
    )


def document(dice: Dice, paragraphs: int) -> str:
    """Write a text of a heading, an opening and so many further paragraphs."""
    trait, place = dice.pick(_TRAITS), dice.pick(_PLACES)
    parts = [f"# The {trait} {place}", _opening(dice, trait, place)]
    for _ in range(paragraphs):
        kind = dice.below(4)
        parts.append(_habits(dice, place) if kind < 2 else _count(dice, place) if kind == 2 else _digression(dice))
    return "\n\n".join([*parts, dice.pick(_ENDS)])
