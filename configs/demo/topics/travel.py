"""Travel: one trip between two cities.

What belongs here: cities, distances, trains, budgets. What does not: what the sky does there (`weather.py`).
"""

import math
from dataclasses import dataclass

from dice import Dice
from topics.speech import Call, Turn, clock, number, table

_KM_PER_RADIAN = 6371.0


@dataclass(frozen=True, slots=True)
class City:
    """A place to go: its position in degrees north and east, a sight, a speciality."""

    name: str
    north: float
    east: float
    sight: str
    food: str


CITIES = tuple(
    City(name, float(north), float(east), sight, food)
    for name, north, east, sight, food in table("""
    Lisbon | 38.72 | -9.14 | the tiled houses of the old town | custard tarts
    Madrid | 40.42 | -3.70 | the art museums along the boulevard | chocolate with churros
    Lyon | 45.76 | 4.84 | the covered passages on the hill | cheese with herbs
    Brussels | 50.85 | 4.35 | the guild houses of the main square | waffles
    Hamburg | 53.55 | 9.99 | the brick warehouses by the harbour | fish rolls
    Prague | 50.08 | 14.44 | the bridge with its statues at dawn | plum dumplings
    Vienna | 48.21 | 16.37 | the coffee houses | apple strudel
    Budapest | 47.50 | 19.04 | the thermal baths | chimney cake
    Kraków | 50.06 | 19.94 | the cloth hall on the market square | filled dumplings
    Zürich | 47.37 | 8.54 | the lake promenade | sliced meat with rösti
    Milan | 45.46 | 9.19 | the roof of the cathedral | saffron risotto
    Ljubljana | 46.06 | 14.51 | the dragon bridge | walnut roll
    Copenhagen | 55.68 | 12.57 | the coloured houses of the new harbour | open sandwiches
    Gothenburg | 57.71 | 11.97 | the islands off the coast | cinnamon buns
    Tallinn | 59.44 | 24.75 | the town wall with its towers | black bread
    Athens | 37.98 | 23.73 | the hill of temples at sunset | spinach pie
    """)
)


def distance_km(a: City, b: City) -> int:
    """Return the great-circle distance of two cities, rounded to 10 km, so that no machine's sine shows."""
    p, q = math.radians(a.north), math.radians(b.north)
    turned = math.sin(math.radians(b.east - a.east) / 2) ** 2
    half = math.sin((q - p) / 2) ** 2 + math.cos(p) * math.cos(q) * turned
    return round(2 * _KM_PER_RADIAN * math.asin(math.sqrt(half)) / 10) * 10


def travel(dice: Dice) -> list[Turn]:
    """Plan one trip between two cities."""
    here, there = dice.some(CITIES, 2)
    far = distance_km(here, there)
    days, night, food = dice.between(2, 9), dice.between(9, 28) * 5, dice.between(4, 12) * 5
    leave = dice.between(24, 44) * 15
    ride = max(60, far // 5 // 5 * 5)
    numbers = dice.some((1, 2, 3, 4, 5, 6, 7, 8, 9), 2)
    trains = [
        {"train": f"IC {numbers[0]}0{numbers[1]}", "departs": clock(leave), "changes": far // 500},
        {"train": f"EC {numbers[1]}{numbers[0]}", "departs": clock(leave + 120), "changes": far // 700},
    ]
    total = days * (night + food)
    return [
        Turn(
            dice.pick(
                (
                    f"How far is it from {here.name} to {there.name}?",
                    f"What is the distance between {here.name} and {there.name}?",
                )
            ),
            f"As the crow flies it is about {far} km.",
        ),
        Turn(
            dice.pick((f"What should I see in {there.name}?", f"I have one afternoon in {there.name}. Any ideas?")),
            f"Start with {there.sight}, walk without a plan for an hour, and try {there.food} before you leave.",
        ),
        Turn(
            f"I stay in {there.name} for {days} days. A night costs {night} € and I spend {food} € a day on food. "
            "What is the total?",
            f"{days} × ({night} + {food}) = {total}, so plan for {total} € and a reserve of {number(total, 10)} €.",
            f"One day costs {night} + {food} = {night + food} €. For {days} days: {days} × {night + food} = {total} €.",
        ),
        Turn(
            f"Find me a train from {here.name} to {there.name} after {clock(leave - 30)}.",
            f"There are two: {trains[0]['train']} at {trains[0]['departs']} with {trains[0]['changes']} changes, and "
            f"{trains[1]['train']} at {trains[1]['departs']} with {trains[1]['changes']}.",
            calls=(
                Call(
                    "find_trains",
                    {"origin": here.name, "destination": there.name, "after": clock(leave - 30)},
                    {"trains": trains},
                ),
            ),
        ),
        Turn(
            f"If the ride to {there.name} takes {ride} minutes and I leave at {clock(leave)}, when am I there?",
            f"You arrive at {clock(leave + ride)}" + (" the next day." if leave + ride >= 1440 else "."),
            f"{ride} minutes are {ride // 60} h {ride % 60} min. {clock(leave)} plus that is {clock(leave + ride)}.",
        ),
        Turn(
            f"What should I pack for {days} days in {there.name}?",
            f"- {days + 1} sets of underwear and socks\n- {(days + 1) // 2} shirts\n- one warm layer and a rain "
            "jacket\n"
            "- shoes that you have already worn in\n- charger, papers, and any medicine you need",
        ),
        Turn(
            "Is it better to fly or to take the train?",
            f"For {far} km, "
            + (
                "the train: door to door it is about as fast, and you can work on the way."
                if far < 800
                else "it depends: flying saves half a day, the night train saves a night in a hotel."
            ),
            f"The distance is {far} km. Below roughly 800 km the way to and from airports eats the gain of a flight.",
        ),
    ]
