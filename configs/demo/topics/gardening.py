"""Gardening: one plant from the seed to the harvest.

What belongs here: plants and their numbers. What does not: cooking what was harvested.
"""

from datetime import date, timedelta

from dice import Dice
from topics.speech import MONTHS, Call, Turn, number, numbered, table

_PLANTS = tuple(
    (name, int(month), int(depth), int(spacing), int(days))
    for name, month, depth, spacing, days in table("""
    radishes | 3 | 10 | 5 | 28
    carrots | 3 | 10 | 4 | 90
    peas | 3 | 40 | 6 | 75
    lettuce | 3 | 5 | 25 | 55
    spinach | 3 | 20 | 8 | 45
    beetroot | 4 | 20 | 10 | 70
    bush beans | 5 | 30 | 10 | 60
    courgettes | 5 | 25 | 90 | 55
    pumpkins | 5 | 30 | 150 | 110
    sweetcorn | 5 | 30 | 30 | 95
    sunflowers | 4 | 20 | 40 | 90
    parsley | 3 | 10 | 15 | 80
    """)
)
"""Name, first month to sow in, depth in mm, spacing in cm, days to the harvest."""


def gardening(dice: Dice) -> list[Turn]:
    """Grow one plant, from the seed to the harvest."""
    name, month, depth, spacing, days = dice.pick(_PLANTS)
    row = dice.between(2, 20) * 50
    sown = date(2025, month, 1) + timedelta(days=dice.below(40))
    ripe = sown + timedelta(days=days)
    facts = {"plant": name, "sow_from": MONTHS[month - 1], "depth_mm": depth, "spacing_cm": spacing, "days": days}
    title = f"{name[0].upper()}{name[1:]}"
    return [
        Turn(
            dice.pick((f"When do I sow {name}?", f"From which month can {name} go into the ground?")),
            f"{title} can be sown outdoors from {MONTHS[month - 1]}, about {number(depth, 10)} cm deep.",
            calls=(Call("look_up_plant", {"plant": name}, facts),),
        ),
        Turn(
            f"How many {name} fit into a row of {row} cm?",
            f"With {spacing} cm between plants there is room for {row // spacing + 1}.",
            f"{row} divided by {spacing} is {number(row, spacing)}. The row holds {row // spacing} gaps, and one "
            f"plant more than gaps: {row // spacing + 1}.",
        ),
        Turn(
            f"I sowed {name} on {sown.isoformat()}. When can I harvest?",
            f"Around {ripe.day} {MONTHS[ripe.month - 1]} {ripe.year}, that is {days} days later.",
            f"They take about {days} days. {sown.isoformat()} plus {days} days is {ripe.isoformat()}.",
        ),
        Turn(
            f"Put the harvest of the {name} into my calendar, please.",
            f"It is in your calendar on {ripe.isoformat()}.",
            calls=(
                Call(
                    "add_event",
                    {"title": f"Harvest {name}", "day": ripe.isoformat()},
                    {"status": "saved", "id": f"ev-{sown.toordinal() % 9973}"},
                ),
            ),
        ),
        Turn(
            f"The leaves of my {name} are turning yellow. What is wrong?",
            "Three things are likely:\n"
            + numbered(
                dice.some(
                    (
                        "Too much water: the soil is wet a finger deep. Let it dry before you water again.",
                        "Too little nitrogen: old leaves pale first. Work in some compost.",
                        "Not enough light: the stems grow long and thin. Thin out the neighbours.",
                        "Slugs or beetles: look under the leaves in the evening.",
                        "Roots without room: a pot of at least five litres helps.",
                    ),
                    3,
                )
            ),
        ),
        Turn(
            dice.pick((f"How often should {name} be watered?", f"How much water do {name} want?")),
            f"Rarely and deeply: once or twice a week, in the morning, about {dice.between(8, 20)} litres for each "
            "square metre. Water that only wets the surface draws the roots upwards.",
        ),
    ]
