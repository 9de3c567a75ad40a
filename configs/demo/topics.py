"""What the demo's conversations are about: questions with right answers, by topic, and the tools that help.

What belongs here: the wording, the small tables of facts behind it, and the arithmetic that makes answers right. What
does not: how turns become records (`generate.py`) or how records are broken (`flaws.py`).

Every topic is a function `topic(dice) -> list[Turn]` about one subject (one dish, one trip, one plant), so that any
selection of its turns, in any order, reads as one conversation. All text is our own; numbers are computed, not written.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from dice import Dice


@dataclass(frozen=True, slots=True)
class Call:
    """One use of a tool, and what the tool answered."""

    name: str
    arguments: dict[str, Any]
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer; with reasoning where there is something to think about, with calls where a tool helps."""

    question: str
    answer: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


def _tool(name: str, description: str, required: tuple[str, ...], **parameters: tuple[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": text} for key, (kind, text) in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: dict[str, dict[str, Any]] = {
    tool["function"]["name"]: tool
    for tool in (
        _tool("calculate", "Evaluate an arithmetic expression.", ("expression",),
              expression=("string", "Such as 12 * (3 + 4)")),
        _tool("get_weather", "Report the weather of one day in a city.", ("city",),
              city=("string", "Name of the city"), day=("string", "ISO date; today if absent")),
        _tool("find_trains", "List trains between two cities.", ("origin", "destination"),
              origin=("string", "City of departure"), destination=("string", "City of arrival"),
              after=("string", "Earliest departure, HH:MM")),
        _tool("set_timer", "Ring after some minutes.", ("minutes",),
              minutes=("integer", "Minutes from now"), label=("string", "What the timer is for")),
        _tool("add_event", "Write an event into the calendar.", ("title", "day"),
              title=("string", "Name of the event"), day=("string", "ISO date"), time=("string", "HH:MM")),
        _tool("look_up_plant", "Give sowing facts of a plant.", ("plant",), plant=("string", "Common name")),
        _tool("run_python", "Run a short Python program and return what it prints.", ("code",),
              code=("string", "The program")),
    )
}  # fmt: skip
"""Every tool of the demo by name, in the shape that chat APIs take."""


# ---------------------------------------------------------------- cooking

Amount = tuple[int, str, str]


@dataclass(frozen=True, slots=True)
class _Dish:
    name: str
    amounts: tuple[Amount, ...]
    """For two people: quantity, unit, ingredient (countable ones, without a unit, in the singular)."""
    minutes: int
    steps: tuple[str, ...]
    swap: tuple[str, str]
    side: str


_DISHES = (
    _Dish("lentil soup", ((150, "g", "red lentils"), (1, "", "onion"), (2, "", "carrot"), (600, "ml", "vegetable stock"),
          (1, "tsp", "ground cumin")), 35,
          ("Soften the chopped onion in a little oil.", "Add the diced carrots and the cumin and stir for a minute.",
           "Pour in the lentils and the stock and simmer for 20 minutes.", "Blend half of it and season with lemon."),
          ("red lentils", "yellow split peas, which need about 15 minutes longer"), "flatbread"),
    _Dish("mushroom risotto", ((160, "g", "risotto rice"), (250, "g", "mushrooms"), (700, "ml", "hot stock"),
          (1, "", "shallot"), (40, "g", "hard cheese")), 40,
          ("Fry the mushrooms until they stop giving off water and set them aside.", "Soften the shallot and toast the rice.",
           "Add the stock ladle by ladle, stirring, until the rice is creamy.", "Fold in the mushrooms and the cheese."),
          ("hard cheese", "two spoons of nutritional yeast, if it should be free of milk"), "a green salad"),
    _Dish("potato pancakes", ((500, "g", "potatoes"), (1, "", "onion"), (1, "", "egg"), (2, "tbsp", "flour")), 30,
          ("Grate the potatoes and the onion and squeeze out the water.", "Mix in the egg, the flour and salt.",
           "Fry flat spoonfuls in hot oil until both sides are golden."),
          ("egg", "a spoon of ground flaxseed stirred into three spoons of water"), "apple sauce"),
    _Dish("chickpea curry", ((240, "g", "cooked chickpeas"), (200, "ml", "coconut milk"), (1, "", "onion"),
          (2, "cloves", "garlic"), (2, "tsp", "curry powder")), 30,
          ("Fry the onion slowly until it is brown at the edges.", "Add the garlic and the curry powder for half a minute.",
           "Stir in the chickpeas and the coconut milk and simmer for 15 minutes."),
          ("coconut milk", "plain yogurt, stirred in at the end and not boiled"), "basmati rice"),
    _Dish("tomato pasta", ((200, "g", "pasta"), (400, "g", "tinned tomatoes"), (2, "cloves", "garlic"),
          (2, "tbsp", "olive oil")), 25,
          ("Warm the sliced garlic in the oil without browning it.", "Add the tomatoes and let them thicken for 15 minutes.",
           "Cook the pasta, keep a cup of its water, and toss everything together."),
          ("tinned tomatoes", "600 g of ripe fresh ones, peeled and chopped"), "grated cheese"),
    _Dish("spinach omelette", ((4, "", "egg"), (100, "g", "spinach"), (20, "g", "butter")), 12,
          ("Wilt the spinach in half of the butter and drain it.", "Beat the eggs with salt and pour them into the hot pan.",
           "Scatter the spinach over one half when the edges have set, and fold."),
          ("spinach", "young chard, cut into strips"), "toasted bread"),
    _Dish("vegetable fried rice", ((300, "g", "cold cooked rice"), (2, "", "egg"), (100, "g", "peas"),
          (2, "", "spring onion"), (2, "tbsp", "soy sauce")), 15,
          ("Scramble the eggs quickly and take them out.", "Fry the rice in a very hot pan until it smells toasted.",
           "Add the peas, the onions and the soy sauce, and return the eggs."),
          ("soy sauce", "a little miso thinned with water"), "sliced cucumber"),
    _Dish("baked salmon", ((300, "g", "salmon"), (1, "", "lemon"), (200, "g", "green beans"), (1, "tbsp", "olive oil")), 25,
          ("Heat the oven to 200 °C.", "Lay the salmon on the beans, drizzle with oil and cover with slices of lemon.",
           "Bake for 14 minutes and let it rest for two."),
          ("salmon", "trout fillets, which are done three minutes earlier"), "new potatoes"),
    _Dish("pumpkin gratin", ((600, "g", "pumpkin"), (150, "ml", "cream"), (60, "g", "grated cheese"), (1, "cloves", "garlic")), 55,
          ("Rub the dish with the garlic.", "Layer thin slices of pumpkin with salt and nutmeg.",
           "Pour the cream over them, add the cheese and bake at 180 °C for 40 minutes."),
          ("cream", "oat cream with a spoon of starch in it"), "a sharp salad of chicory"),
    _Dish("crème brûlée", ((250, "ml", "cream"), (3, "", "egg yolk"), (50, "g", "sugar"), (1, "", "vanilla pod")), 60,
          ("Warm the cream with the vanilla.", "Whisk the yolks with the sugar and pour the cream over them.",
           "Set the custard in a water bath at 150 °C for 35 minutes, chill it, and caramelise sugar on top."),
          ("vanilla pod", "a teaspoon of vanilla extract"), "fresh berries"),
    _Dish("black bean tacos", ((240, "g", "cooked black beans"), (6, "", "tortilla"), (1, "", "avocado"), (1, "", "lime")), 20,
          ("Mash half of the beans and fry them with cumin.", "Warm the tortillas in a dry pan.",
           "Fill them with beans and avocado and squeeze the lime over them."),
          ("avocado", "a salsa of peas and mint"), "pickled onions"),
    _Dish("apple crumble", ((3, "", "apple"), (80, "g", "flour"), (60, "g", "butter"), (50, "g", "brown sugar")), 45,
          ("Cut the apples into chunks and put them into a dish.", "Rub the flour, the butter and the sugar into crumbs.",
           "Cover the apples with the crumbs and bake at 180 °C for 30 minutes."),
          ("flour", "ground almonds and oats in equal parts"), "vanilla sauce"),
)  # fmt: skip


def _number(numerator: int, denominator: int = 1) -> str:
    """Write a fraction as a decimal without trailing zeros."""
    return f"{round(numerator / denominator, 2):g}" if numerator % denominator else str(numerator // denominator)


def _amount(amount: Amount, people: int) -> str:
    quantity, unit, name = amount
    text = _number(quantity * people, 2)
    return f"{text} {unit} {name}" if unit else f"{text} {name}{'' if quantity * people <= 2 else 's'}"


def clock(minutes: int) -> str:
    """Write minutes since midnight as HH:MM."""
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def listing(items: list[str] | tuple[str, ...]) -> str:
    """Join items as prose: `a, b and c`."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def numbered(items: list[str] | tuple[str, ...]) -> str:
    """Write items as a numbered list, one per line."""
    return "\n".join(f"{place}. {item}" for place, item in enumerate(items, 1))


def cooking(dice: Dice) -> list[Turn]:
    """Talk about one dish: amounts, time, method, substitutes, portions."""
    dish = dice.pick(_DISHES)
    people = dice.between(1, 12)
    guests = f"{people} {'person' if people == 1 else 'people'}"
    served = dice.between(34, 42) * 30
    quantity, unit, first = dish.amounts[0]
    have = quantity * dice.between(2, 9) + (quantity // 2)
    portions = have * 2 // quantity
    scaled = [_amount(one, people) for one in dish.amounts]
    rest = dice.between(3, 12)
    return [
        Turn(
            dice.pick((f"What do I need for {dish.name} for {guests}?", f"Please list the ingredients of {dish.name}; we are {people}.",
                       f"I want to make {dish.name} for {guests}. How much of everything?")),
            f"For {guests} you need:\n" + "\n".join(f"- {one}" for one in scaled) + "\n\nSalt, pepper and a little oil come on top.",
            f"The amounts I know are for 2 people. For {people} I multiply each by {people}/2 = {_number(people, 2)}. "
            f"That gives {listing(scaled)}.",
        ),
        Turn(
            dice.pick((f"We want to eat {dish.name} at {clock(served)}. When should I start?",
                       f"{dish.name[0].upper()}{dish.name[1:]} is planned for {clock(served)}: at what time do I begin?")),
            f"It takes about {dish.minutes} minutes, so begin at {clock(served - dish.minutes)}. "
            f"If you have never made it, give yourself {rest} minutes more.",
            f"{clock(served)} minus {dish.minutes} minutes is {clock(served - dish.minutes)}.",
        ),
        Turn(
            dice.pick((f"How is {dish.name} made?", f"Walk me through {dish.name} step by step.", f"And the method for {dish.name}?")),
            numbered(dish.steps) + f"\n\nServe it with {dish.side}.",
        ),
        Turn(
            dice.pick((f"I have run out of {dish.swap[0]}. What else works in {dish.name}?", f"What can replace {dish.swap[0]} here?")),
            f"Use {dish.swap[1]}. The taste changes a little, the method does not.",
        ),
        Turn(
            f"I still have {_amount((have * 2, unit, first), 1)}. How many portions of {dish.name} is that?",
            f"That is enough for {portions} portions.",
            f"One portion takes {_number(quantity, 2)}{' ' + unit if unit else ''}. {have} divided by {_number(quantity, 2)} is "
            f"{_number(have * 2, quantity)}, so {portions} whole portions.",
        ),
        Turn(
            f"Please set a timer for the {dish.name}.",
            f"Done: the timer rings in {dish.minutes} minutes.",
            calls=(Call("set_timer", {"minutes": dish.minutes, "label": dish.name}, {"status": "running", "minutes": dish.minutes}),),
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------- arithmetic

_NAMES = ("Amara", "Bilal", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hana", "Ines", "Jonas", "Kofi", "Lena", "Mateo",
          "Noor", "Oskar", "Priya", "Quentin", "Rosa", "Sven", "Tariq", "Uma", "Viktor", "Wanda", "Yuki", "Zoé")  # fmt: skip
_THINGS = ("pencils", "stamps", "marbles", "postcards", "tickets", "seed packets", "shells", "buttons", "notebooks", "candles")


def arithmetic(dice: Dice) -> list[Turn]:
    """Work out sums of one pupil's exercise sheet."""
    name, other = dice.some(_NAMES, 2)
    thing = dice.pick(_THINGS)
    a, b, c = dice.between(12, 98), dice.between(3, 29), dice.between(2, 9)
    packs, each, given = dice.between(3, 19), dice.between(6, 36), dice.between(2, 17)
    speed, hours = dice.between(4, 24) * 5, dice.between(2, 9)
    share, people = dice.between(11, 99), dice.between(3, 9)
    percent, price = dice.pick((5, 10, 15, 20, 25, 40)), dice.between(4, 60) * 20
    length, width = dice.between(3, 30), dice.between(2, 25)
    expression = f"{a} * {b} + {c}"
    return [
        Turn(
            dice.pick((f"What is {a} × {b}?", f"Multiply {a} by {b}, please.", f"{a} times {b}?")),
            f"{a} × {b} = {a * b}",
            f"I split {a} into {a // 10 * 10} and {a % 10}. {a // 10 * 10} × {b} = {a // 10 * 10 * b} and {a % 10} × {b} = {a % 10 * b}. "
            f"Together {a // 10 * 10 * b} + {a % 10 * b} = {a * b}.",
        ),
        Turn(
            f"{name} buys {packs} packs of {each} {thing} and gives {given} of them to {other}. How many {thing} does {name} keep?",
            f"{name} keeps {packs * each - given} {thing}.",
            f"{packs} × {each} = {packs * each}. Giving away {given} leaves {packs * each} - {given} = {packs * each - given}.",
        ),
        Turn(
            f"A cyclist rides {hours} hours at {speed} km/h without a break. How far is that?"
            if speed <= 25 else f"A train runs {hours} hours at {speed} km/h. How far does it get?",
            f"{hours} × {speed} = {hours * speed}, so the answer is {hours * speed} km.",
            f"Distance is speed times time: {hours} × {speed} = {hours * speed}.",
        ),
        Turn(
            f"{share * people + c % people} {thing} are shared equally among {people} children. How many does each get, and how many are left?",
            f"Each child gets {share} and {c % people} {'is' if c % people == 1 else 'are'} left over.",
            f"{people} × {share} = {people * share}, and {share * people + c % people} - {people * share} = {c % people}.",
        ),
        Turn(
            f"What is {percent} % of {price}?",
            f"{percent} % of {price} is {_number(percent * price, 100)}.",
            f"One per cent of {price} is {_number(price, 100)}; {percent} times that is {_number(percent * price, 100)}.",
        ),
        Turn(
            f"A garden is {length} m long and {width} m wide. What are its area and its fence?",
            f"The area is {length} × {width} = {length * width} square metres, and the fence measures "
            f"2 × ({length} + {width}) = {2 * (length + width)} metres.",
        ),
        Turn(
            f"Use the calculator: {expression.replace('*', '×')}.",
            f"The result is {a * b + c}.",
            calls=(Call("calculate", {"expression": expression}, {"value": a * b + c}),),
        ),
        Turn(
            f"Is {a * b + c % 2} divisible by {b}?",
            f"Yes: {a} × {b} = {a * b}." if c % 2 == 0 else f"No: {a} × {b} = {a * b}, and 1 remains.",
            f"I look for the nearest multiple of {b}. {a} × {b} = {a * b}, which leaves {c % 2}.",
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------- travel

_CITIES = (
    ("Lisbon", 38.72, -9.14, "the tiled houses of the old town", "custard tarts"),
    ("Madrid", 40.42, -3.70, "the art museums along the boulevard", "chocolate with churros"),
    ("Lyon", 45.76, 4.84, "the covered passages on the hill", "cheese with herbs"),
    ("Brussels", 50.85, 4.35, "the guild houses of the main square", "waffles"),
    ("Hamburg", 53.55, 9.99, "the brick warehouses by the harbour", "fish rolls"),
    ("Prague", 50.08, 14.44, "the bridge with its statues at dawn", "plum dumplings"),
    ("Vienna", 48.21, 16.37, "the coffee houses", "apple strudel"),
    ("Budapest", 47.50, 19.04, "the thermal baths", "chimney cake"),
    ("Kraków", 50.06, 19.94, "the cloth hall on the market square", "filled dumplings"),
    ("Zürich", 47.37, 8.54, "the lake promenade", "sliced meat with rösti"),
    ("Milan", 45.46, 9.19, "the roof of the cathedral", "saffron risotto"),
    ("Ljubljana", 46.06, 14.51, "the dragon bridge", "walnut roll"),
    ("Copenhagen", 55.68, 12.57, "the coloured houses of the new harbour", "open sandwiches"),
    ("Gothenburg", 57.71, 11.97, "the islands off the coast", "cinnamon buns"),
    ("Tallinn", 59.44, 24.75, "the town wall with its towers", "black bread"),
    ("Athens", 37.98, 23.73, "the hill of temples at sunset", "spinach pie"),
)
_KM_PER_RADIAN = 6371.0


def distance_km(a: tuple[str, float, float, str, str], b: tuple[str, float, float, str, str]) -> int:
    """Return the great-circle distance of two cities, rounded to 10 km, so that no machine's sine shows."""
    p, q = math.radians(a[1]), math.radians(b[1])
    half = math.sin((q - p) / 2) ** 2 + math.cos(p) * math.cos(q) * math.sin(math.radians(b[2] - a[2]) / 2) ** 2
    return round(2 * _KM_PER_RADIAN * math.asin(math.sqrt(half)) / 10) * 10


def travel(dice: Dice) -> list[Turn]:
    """Plan one trip between two cities."""
    here, there = dice.some(_CITIES, 2)
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
            dice.pick((f"How far is it from {here[0]} to {there[0]}?", f"What is the distance between {here[0]} and {there[0]}?")),
            f"As the crow flies it is about {far} km.",
        ),
        Turn(
            dice.pick((f"What should I see in {there[0]}?", f"I have one afternoon in {there[0]}. Any ideas?")),
            f"Start with {there[3]}, walk without a plan for an hour, and try {there[4]} before you leave.",
        ),
        Turn(
            f"I stay in {there[0]} for {days} days. A night costs {night} € and I spend {food} € a day on food. What is the total?",
            f"{days} × ({night} + {food}) = {total}, so plan for {total} € and a reserve of {_number(total, 10)} €.",
            f"One day costs {night} + {food} = {night + food} €. For {days} days: {days} × {night + food} = {total} €.",
        ),
        Turn(
            f"Find me a train from {here[0]} to {there[0]} after {clock(leave - 30)}.",
            f"There are two: {trains[0]['train']} at {trains[0]['departs']} with {trains[0]['changes']} changes, and "
            f"{trains[1]['train']} at {trains[1]['departs']} with {trains[1]['changes']}.",
            calls=(Call("find_trains", {"origin": here[0], "destination": there[0], "after": clock(leave - 30)}, {"trains": trains}),),
        ),
        Turn(
            f"If the ride to {there[0]} takes {ride} minutes and I leave at {clock(leave)}, when am I there?",
            f"You arrive at {clock(leave + ride)}" + (" the next day." if leave + ride >= 1440 else "."),
            f"{ride} minutes are {ride // 60} h {ride % 60} min. {clock(leave)} plus that is {clock(leave + ride)}.",
        ),
        Turn(
            f"What should I pack for {days} days in {there[0]}?",
            f"- {days + 1} sets of underwear and socks\n- {(days + 1) // 2} shirts\n- one warm layer and a rain jacket\n"
            "- shoes that you have already worn in\n- charger, papers, and any medicine you need",
        ),
        Turn(
            "Is it better to fly or to take the train?",
            f"For {far} km, " + ("the train: door to door it is about as fast, and you can work on the way."
                                 if far < 800 else "it depends: flying saves half a day, the night train saves a night in a hotel."),
            f"The distance is {far} km. Below roughly 800 km the way to and from airports eats the gain of a flight.",
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------- weather

_SKIES = ("clear", "partly cloudy", "overcast", "light rain", "heavy rain", "fog", "snow showers", "thunderstorms")


def weather(dice: Dice) -> list[Turn]:
    """Ask what a day brings, with the weather tool and without."""
    city = dice.pick(_CITIES)[0]
    day = (date(2025, 1, 1) + timedelta(days=dice.below(365))).isoformat()
    sky = dice.pick(_SKIES)
    high = dice.between(-8, 2) if sky == "snow showers" else dice.between(3, 34)
    low, wind = high - dice.between(2, 9), dice.between(1, 16) * 5
    wet = sky in {"light rain", "heavy rain", "thunderstorms", "snow showers"}
    report = {"city": city, "day": day, "sky": sky, "high": high, "low": low, "wind_kmh": wind}
    advice = "Take a rain jacket." if wet else "You can leave the umbrella at home."
    layer = "A warm coat and gloves." if high < 5 else "A jumper and a light jacket." if high < 16 else "Light clothes are enough."
    return [
        Turn(
            dice.pick((f"What will the weather be like in {city} on {day}?", f"Weather in {city}, {day}?", f"Do I need an umbrella in {city} on {day}?")),
            f"{city} expects {sky} with {low} to {high} °C and wind around {wind} km/h. {advice}",
            calls=(Call("get_weather", {"city": city, "day": day}, report),),
        ),
        Turn(
            f"What do I wear at {high} °C with {sky}?",
            f"{layer} {advice}",
            f"{high} °C decides the layers, the sky decides the outside. With {sky}, {'something waterproof is needed' if wet else 'it stays dry'}.",
        ),
        Turn(
            f"How much is {high} °C in Fahrenheit?",
            f"{high} °C is {_number(high * 9 + 160, 5)} °F.",
            f"Multiply by 9, divide by 5, add 32: {high} × 9 = {high * 9}, divided by 5 is {_number(high * 9, 5)}, plus 32 is {_number(high * 9 + 160, 5)}.",
        ),
        Turn(
            f"Is a wind of {wind} km/h a problem for cycling?",
            "Hardly; you will notice it on open roads only." if wind < 20 else "Ride, but plan more time against it."
            if wind < 45 else "Yes. Side gusts push you across the lane; take the train instead.",
        ),
        Turn(
            f"By how much does the temperature change during the day if it goes from {low} to {high} °C?",
            f"By {high - low} degrees.",
            f"{high} - ({low}) = {high - low}.",
        ),
        Turn(
            dice.pick(("Why does fog form at night?", "Where does morning fog come from?")),
            "The ground loses its heat to a clear sky, the air above it cools, and cool air can hold less vapour. What it can no "
            "longer hold condenses into droplets: fog. It goes when the sun warms the ground again.",
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------- gardening

_PLANTS = (
    # name, first month to sow, depth in mm, spacing in cm, days to harvest
    ("radishes", 3, 10, 5, 28), ("carrots", 3, 10, 4, 90), ("peas", 3, 40, 6, 75), ("lettuce", 3, 5, 25, 55),
    ("spinach", 3, 20, 8, 45), ("beetroot", 4, 20, 10, 70), ("bush beans", 5, 30, 10, 60), ("courgettes", 5, 25, 90, 55),
    ("pumpkins", 5, 30, 150, 110), ("sweetcorn", 5, 30, 30, 95), ("sunflowers", 4, 20, 40, 90), ("parsley", 3, 10, 15, 80),
)  # fmt: skip
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December")


def gardening(dice: Dice) -> list[Turn]:
    """Grow one plant, from the seed to the harvest."""
    name, month, depth, spacing, days = dice.pick(_PLANTS)
    row = dice.between(2, 20) * 50
    sown = date(2025, month, 1) + timedelta(days=dice.below(40))
    ripe = sown + timedelta(days=days)
    facts = {"plant": name, "sow_from": _MONTHS[month - 1], "depth_mm": depth, "spacing_cm": spacing, "days": days}
    title = f"{name[0].upper()}{name[1:]}"
    return [
        Turn(
            dice.pick((f"When do I sow {name}?", f"From which month can {name} go into the ground?")),
            f"{title} can be sown outdoors from {_MONTHS[month - 1]}, about {_number(depth, 10)} cm deep.",
            calls=(Call("look_up_plant", {"plant": name}, facts),),
        ),
        Turn(
            f"How many {name} fit into a row of {row} cm?",
            f"With {spacing} cm between plants there is room for {row // spacing + 1}.",
            f"{row} divided by {spacing} is {_number(row, spacing)}. The row holds {row // spacing} gaps, and one plant more than gaps: {row // spacing + 1}.",
        ),
        Turn(
            f"I sowed {name} on {sown.isoformat()}. When can I harvest?",
            f"Around {ripe.day} {_MONTHS[ripe.month - 1]} {ripe.year}, that is {days} days later.",
            f"They take about {days} days. {sown.isoformat()} plus {days} days is {ripe.isoformat()}.",
        ),
        Turn(
            f"Put the harvest of the {name} into my calendar, please.",
            f"It is in your calendar on {ripe.isoformat()}.",
            calls=(Call("add_event", {"title": f"Harvest {name}", "day": ripe.isoformat()}, {"status": "saved", "id": f"ev-{sown.toordinal() % 9973}"}),),
        ),
        Turn(
            f"The leaves of my {name} are turning yellow. What is wrong?",
            "Three things are likely:\n" + numbered(dice.some((
                "Too much water: the soil is wet a finger deep. Let it dry before you water again.",
                "Too little nitrogen: old leaves pale first. Work in some compost.",
                "Not enough light: the stems grow long and thin. Thin out the neighbours.",
                "Slugs or beetles: look under the leaves in the evening.",
                "Roots without room: a pot of at least five litres helps."), 3)),
        ),
        Turn(
            dice.pick((f"How often should {name} be watered?", f"How much water do {name} want?")),
            f"Rarely and deeply: once or twice a week, in the morning, about {dice.between(8, 20)} litres for each square metre. "
            "Water that only wets the surface draws the roots upwards.",
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------- astronomy

_PLANETS = (
    # name, place from the Sun, diameter in km, kind
    ("Mercury", 1, 4880, "rocky"), ("Venus", 2, 12100, "rocky"), ("Earth", 3, 12740, "rocky"), ("Mars", 4, 6780, "rocky"),
    ("Jupiter", 5, 139800, "gas giant"), ("Saturn", 6, 116500, "gas giant"), ("Uranus", 7, 50700, "ice giant"),
    ("Neptune", 8, 49200, "ice giant"),
)  # fmt: skip
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def astronomy(dice: Dice) -> list[Turn]:
    """Compare two planets and explain what is seen in the sky."""
    one, two = dice.some(_PLANETS, 2)
    big, small = (one, two) if one[2] > two[2] else (two, one)
    between = [p[0] for p in _PLANETS if min(one[1], two[1]) < p[1] < max(one[1], two[1])]
    seconds = dice.between(2, 99)
    return [
        Turn(
            f"Which planet is {_ORDINALS[one[1] - 1]} from the Sun, and of what kind is it?",
            f"{one[0]}. It is {'an' if one[3][0] in 'aeiou' else 'a'} {one[3]}{' planet' if one[3] == 'rocky' else ''}.",
            f"In order: {listing([p[0] for p in _PLANETS])}. Number {one[1]} is {one[0]}.",
        ),
        Turn(
            dice.pick((f"Is {one[0]} larger than {two[0]}?", f"Which is larger, {one[0]} or {two[0]}?")),
            f"{big[0]} is larger: about {big[2]} km across against {small[2]} km for {small[0]}, "
            f"roughly {_number(round(big[2] * 10 / small[2]), 10)} times as much.",
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
            "The Sun always lights one half of the Moon. As the Moon goes round us we see that half from different sides: from "
            "behind at new moon, from the side at half moon, from the front at full moon. The Earth's shadow plays no part in it.",
        ),
        Turn(
            dice.pick(("Why do stars twinkle?", "Why do stars flicker and planets hardly?")),
            "Their light crosses air of different warmth, which bends it a little this way and that. A star is a point, so the "
            "whole of it jumps; a planet is a small disc, and its jumps cancel out.",
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------- programming

_WORDS = ("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "harbor", "island", "juniper", "kettle", "lantern", "meadow",
          "needle", "orchard", "pepper", "quartz", "river", "saffron", "timber", "umbrella", "valley", "willow", "yarrow", "zephyr")  # fmt: skip


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
            f"Pass a key:\n\n```python\nsorted({json.dumps(words)}, key=len)\n```\n\nThe result is `{json.dumps(sorted(words, key=len))}`; "
            "words of equal length keep their order.",
        ),
        Turn(
            f"What is in `list(range({start}, {stop}, {step}))`?",
            f"`{list(range(start, stop, step))}`",
            f"From {start} in steps of {step}, stopping before {stop}: {listing([str(n) for n in range(start, stop, step)])}.",
        ),
        Turn(
            f"Keep only the even numbers of {numbers}.",
            f"```python\n[n for n in {numbers} if n % 2 == 0]\n```\n\nThat leaves `{even}`.",
            f"Even numbers leave no remainder when divided by 2: {listing([str(n) for n in even]) if even else 'there are none here'}.",
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
            "A list can change: you append, remove, replace. A tuple cannot, so it may be the key of a dictionary and is safe to "
            "share. Use a list for many things of one kind, a tuple for few things that belong together.",
        ),
        Turn(
            f"Write a function that counts a letter in a word and try it on {word!r}.",
            f"```python\ndef count(letter: str, word: str) -> int:\n    return sum(1 for one in word if one == letter)\n\n"
            f"count({word[1]!r}, {word!r})\n```\n\nThe call returns `{word.count(word[1])}`.",
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------- calendar

_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def calendar(dice: Dice) -> list[Turn]:
    """Count days and find weekdays around one date."""
    day = date(2024, 1, 1) + timedelta(days=dice.below(1400))
    later = day + timedelta(days=dice.between(5, 320))
    more = dice.between(3, 200)
    then = day + timedelta(days=more)
    title = dice.pick(("dentist", "parents' evening", "choir rehearsal", "car inspection", "book club", "chess match"))
    at = clock(dice.between(32, 80) * 15)
    weekday = _WEEKDAYS[day.weekday()]
    return [
        Turn(dice.pick((f"What day of the week is {day.isoformat()}?", f"On which weekday does {day.isoformat()} fall?")), f"It is a {weekday}."),
        Turn(
            f"How many days lie between {day.isoformat()} and {later.isoformat()}?",
            f"{(later - day).days} days.",
            f"From day {day.timetuple().tm_yday} of {day.year} to day {later.timetuple().tm_yday} of {later.year}: {(later - day).days} days.",
        ),
        Turn(
            f"Which date is {more} days after {day.isoformat()}?",
            f"{then.isoformat()}, a {_WEEKDAYS[then.weekday()]}.",
            f"{more} days are {more // 7} weeks and {more % 7} days. Counting on from {weekday} by {more % 7} gives {_WEEKDAYS[then.weekday()]}.",
        ),
        Turn(
            f"Is {day.year} a leap year?",
            f"{'Yes' if day.year % 4 == 0 else 'No'}, {day.year} {'is' if day.year % 4 == 0 else 'is not'} divisible by 4.",
            f"{day.year} divided by 4 is {_number(day.year, 4)}.",
        ),
        Turn(
            f"Please note: {title} on {day.isoformat()} at {at}.",
            f"Noted: {title}, {weekday} {day.isoformat()}, {at}.",
            calls=(Call("add_event", {"title": title, "day": day.isoformat(), "time": at}, {"status": "saved", "id": f"ev-{day.toordinal() % 9973}"}),),
        ),
        Turn(
            f"How many days does {_MONTHS[day.month - 1]} {day.year} have?",
            f"{((day.replace(day=28) + timedelta(days=4)).replace(day=1) - timedelta(days=1)).day}.",
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------- household

_TASKS = (
    ("a dripping tap", ("Turn off the water under the sink.", "Open the tap until nothing comes.", "Unscrew the handle and take out the cartridge.",
     "Replace the worn washer.", "Put it together and turn the water on slowly."), "an adjustable spanner", 25),
    ("a flat bicycle tyre", ("Take the wheel out and one side of the tyre off the rim.", "Find the hole by pumping the tube up and listening.",
     "Roughen the spot, spread the glue and wait until it is dull.", "Press the patch on hard.", "Feel inside the tyre for the thorn before you close it."),
     "a patch kit", 30),
    ("a squeaking door", ("Find the hinge that squeaks by moving the door slowly.", "Lift the pin a little with a screwdriver.",
     "Wipe it and put on a drop of oil.", "Move the door a few times and wipe off the rest."), "a drop of oil", 10),
    ("a blocked drain", ("Take out the sieve and pull out the hair.", "Pour in hot, not boiling, water.", "Work with the plunger a dozen times.",
     "If that fails, put a bucket under the trap, open it and clean it."), "a plunger", 20),
    ("a wobbly chair", ("Turn the chair over and find the loose joint.", "Clean off the old glue.", "Glue the joint and clamp it with a strap.",
     "Leave it alone for a day."), "wood glue and a strap", 40),
    ("a bicycle chain that skips", ("Clean the chain with a rag and a little degreaser.", "Measure its wear.", "Oil each link and wipe off the rest.",
     "Turn the barrel adjuster a quarter turn at a time until it runs quietly."), "a chain gauge", 35),
)  # fmt: skip


def household(dice: Dice) -> list[Turn]:
    """Mend one thing at home."""
    name, steps, tool, minutes = dice.pick(_TASKS)
    rooms, litres, wall = dice.between(2, 7), dice.between(5, 14), dice.between(12, 70)
    hour = dice.between(20, 90)
    return [
        Turn(
            dice.pick((f"How do I fix {name}?", f"What should I do about {name}?", f"Can I repair {name} myself?")),
            f"You can do it with {tool}:\n\n{numbered(steps)}\n\nIt takes about {minutes} minutes the first time.",
        ),
        Turn(
            f"A craftsman takes {hour} € an hour and needs {minutes} minutes for {name}. What does it cost?",
            f"{hour} × {minutes} / 60 = {_number(hour * minutes, 60)}, so about {_number(hour * minutes, 60)} € without the way there.",
            f"{minutes} minutes are {_number(minutes, 60)} hours. Times {hour} € gives {_number(hour * minutes, 60)} €.",
        ),
        Turn(
            f"How much paint do I need for {wall} square metres in {rooms} rooms each, if one litre covers {litres} square metres?",
            f"{rooms} × {wall} = {rooms * wall} square metres; at {litres} per litre that is {math.ceil(rooms * wall / litres)} litres, rounded up.",
            f"{rooms} × {wall} = {rooms * wall}. Divided by {litres} that is {_number(rooms * wall, litres)}; paint is sold in whole litres.",
        ),
        Turn(
            f"Remind me in {minutes} minutes to look at {name} again.",
            f"I will ring in {minutes} minutes.",
            calls=(Call("set_timer", {"minutes": minutes, "label": name}, {"status": "running", "minutes": minutes}),),
        ),
        Turn(
            f"Which tool do I need for {name}?",
            f"Mainly {tool}, besides a rag and good light.",
        ),
        Turn(
            dice.pick(("When should I call a professional?", "What should I leave to a professional?")),
            "Gas, mains electricity, anything that carries the roof, and every leak that you cannot stop by closing a valve.",
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------- languages

_GREETINGS = (
    # language, hello, thank you, goodbye
    ("Japanese", "こんにちは", "ありがとう", "さようなら"), ("Greek", "γεια σας", "ευχαριστώ", "αντίο"),
    ("Russian", "здравствуйте", "спасибо", "до свидания"), ("Turkish", "merhaba", "teşekkürler", "hoşça kal"),
    ("Spanish", "hola", "gracias", "adiós"), ("German", "guten Tag", "danke", "auf Wiedersehen"),
    ("French", "bonjour", "merci", "au revoir"), ("Hindi", "नमस्ते", "धन्यवाद", "अलविदा"),
    ("Arabic", "مرحبا", "شكرا", "مع السلامة"), ("Korean", "안녕하세요", "감사합니다", "안녕히 가세요"),
    ("Finnish", "hei", "kiitos", "näkemiin"), ("Polish", "dzień dobry", "dziękuję", "do widzenia"),
)  # fmt: skip
_MEANINGS = ("hello", "thank you", "goodbye")


def languages(dice: Dice) -> list[Turn]:
    """Learn three phrases of two languages."""
    one, two = dice.some(_GREETINGS, 2)
    place = dice.below(3)
    meaning, other = _MEANINGS[place], _MEANINGS[(place + 1) % 3]
    name = dice.pick(_NAMES)
    return [
        Turn(
            dice.pick((f"How do I say “{meaning}” in {one[0]}?", f"What is “{meaning}” in {one[0]}, please?",
                       f"{name} speaks {one[0]}. How do I say “{meaning}”?")),
            f"In {one[0]} it is “{one[place + 1]}”.",
        ),
        Turn(f"What does “{two[place + 1]}” mean?", f"It is {two[0]} and means “{meaning}”."),
        Turn(
            f"Which language is “{one[(place + 1) % 3 + 1]}”?",
            f"{one[0]}. It means “{other}”.",
            f"I compare it with the phrases I know: in {one[0]}, “{other}” is “{one[(place + 1) % 3 + 1]}”.",
        ),
        Turn(
            f"Write {name} a card: “{other}” in {one[0]} and in {two[0]}.",
            f"{one[(place + 1) % 3 + 1]}, {name}!\n{two[(place + 1) % 3 + 1]}, {name}! 🙂",
        ),
        Turn(
            f"Make a table of {' and '.join(f'“{m}”' for m in _MEANINGS[:2])} for {one[0]} and {two[0]}.",
            f"| | {one[0]} | {two[0]} |\n|---|---|---|\n| {_MEANINGS[0]} | {one[1]} | {two[1]} |\n| {_MEANINGS[1]} | {one[2]} | {two[2]} |",
        ),
    ]  # fmt: skip


TOPICS: dict[str, tuple[Callable[[Dice], list[Turn]], str]] = {
    "cooking": (cooking, "kitchen"),
    "arithmetic": (arithmetic, "classroom"),
    "travel": (travel, "travel_desk"),
    "weather": (weather, "travel_desk"),
    "gardening": (gardening, "field_notes"),
    "astronomy": (astronomy, "classroom"),
    "programming": (programming, "classroom"),
    "calendar": (calendar, "office"),
    "household": (household, "field_notes"),
    "languages": (languages, "travel_desk"),
}
"""Topic → what writes its turns, and the source (domain) that its records name."""
