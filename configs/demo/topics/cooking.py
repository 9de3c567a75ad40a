"""Cooking: one dish at a time, for any number of people.

What belongs here: dishes and what is asked about them. What does not: food on a journey (`travel.py`).
"""

from dataclasses import dataclass

from dice import Dice
from topics.speech import Call, Turn, blocks, clock, listing, number, numbered, table

Amount = tuple[int, str, str]
"""Quantity, unit, ingredient; countable ones have no unit and stand in the singular."""


@dataclass(frozen=True, slots=True)
class _Dish:
    name: str
    minutes: int
    amounts: tuple[Amount, ...]
    """For two people."""
    steps: tuple[str, ...]
    swap: tuple[str, str]
    side: str


def _dish(text: str) -> _Dish:
    """Read a dish written as text: name, minutes, side dish and a substitute; then amounts; then steps."""
    (name, minutes, side, *swap), *rows = table(text)
    amounts = tuple((int(row[0]), row[1], row[2]) for row in rows if len(row) == 3)
    return _Dish(name, int(minutes), amounts, tuple(row[0] for row in rows if len(row) == 1), (swap[0], swap[1]), side)


_DISHES = tuple(
    _dish(text)
    for text in blocks("""
    lentil soup | 35 | flatbread | red lentils | yellow split peas, which need about 15 minutes longer
    150 | g | red lentils
    1 | | onion
    2 | | carrot
    600 | ml | vegetable stock
    1 | tsp | ground cumin
    Soften the chopped onion in a little oil.
    Add the diced carrots and the cumin and stir for a minute.
    Pour in the lentils and the stock and simmer for 20 minutes.
    Blend half of it and season with lemon.

    mushroom risotto | 40 | a green salad | hard cheese | two spoons of nutritional yeast, if it should be free of milk
    160 | g | risotto rice
    250 | g | mushrooms
    700 | ml | hot stock
    1 | | shallot
    40 | g | hard cheese
    Fry the mushrooms until they stop giving off water and set them aside.
    Soften the shallot and toast the rice.
    Add the stock ladle by ladle, stirring, until the rice is creamy.
    Fold in the mushrooms and the cheese.

    potato pancakes | 30 | apple sauce | egg | a spoon of ground flaxseed stirred into three spoons of water
    500 | g | potatoes
    1 | | onion
    1 | | egg
    2 | tbsp | flour
    Grate the potatoes and the onion and squeeze out the water.
    Mix in the egg, the flour and salt.
    Fry flat spoonfuls in hot oil until both sides are golden.

    chickpea curry | 30 | basmati rice | coconut milk | plain yogurt, stirred in at the end and not boiled
    240 | g | cooked chickpeas
    200 | ml | coconut milk
    1 | | onion
    2 | cloves | garlic
    2 | tsp | curry powder
    Fry the onion slowly until it is brown at the edges.
    Add the garlic and the curry powder for half a minute.
    Stir in the chickpeas and the coconut milk and simmer for 15 minutes.

    tomato pasta | 25 | grated cheese | tinned tomatoes | 600 g of ripe fresh ones, peeled and chopped
    200 | g | pasta
    400 | g | tinned tomatoes
    2 | cloves | garlic
    2 | tbsp | olive oil
    Warm the sliced garlic in the oil without browning it.
    Add the tomatoes and let them thicken for 15 minutes.
    Cook the pasta, keep a cup of its water, and toss everything together.

    spinach omelette | 12 | toasted bread | spinach | young chard, cut into strips
    4 | | egg
    100 | g | spinach
    20 | g | butter
    Wilt the spinach in half of the butter and drain it.
    Beat the eggs with salt and pour them into the hot pan.
    Scatter the spinach over one half when the edges have set, and fold.

    vegetable fried rice | 15 | sliced cucumber | soy sauce | a little miso thinned with water
    300 | g | cold cooked rice
    2 | | egg
    100 | g | peas
    2 | | spring onion
    2 | tbsp | soy sauce
    Scramble the eggs quickly and take them out.
    Fry the rice in a very hot pan until it smells toasted.
    Add the peas, the onions and the soy sauce, and return the eggs.

    baked salmon | 25 | new potatoes | salmon | trout fillets, which are done three minutes earlier
    300 | g | salmon
    1 | | lemon
    200 | g | green beans
    1 | tbsp | olive oil
    Heat the oven to 200 °C.
    Lay the salmon on the beans, drizzle with oil and cover with slices of lemon.
    Bake for 14 minutes and let it rest for two.

    pumpkin gratin | 55 | a sharp salad of chicory | cream | oat cream with a spoon of starch in it
    600 | g | pumpkin
    150 | ml | cream
    60 | g | grated cheese
    1 | cloves | garlic
    Rub the dish with the garlic.
    Layer thin slices of pumpkin with salt and nutmeg.
    Pour the cream over them, add the cheese and bake at 180 °C for 40 minutes.

    crème brûlée | 60 | fresh berries | vanilla pod | a teaspoon of vanilla extract
    250 | ml | cream
    3 | | egg yolk
    50 | g | sugar
    1 | | vanilla pod
    Warm the cream with the vanilla.
    Whisk the yolks with the sugar and pour the cream over them.
    Set the custard in a water bath at 150 °C for 35 minutes, chill it, and caramelise sugar on top.

    black bean tacos | 20 | pickled onions | avocado | a salsa of peas and mint
    240 | g | cooked black beans
    6 | | tortilla
    1 | | avocado
    1 | | lime
    Mash half of the beans and fry them with cumin.
    Warm the tortillas in a dry pan.
    Fill them with beans and avocado and squeeze the lime over them.

    apple crumble | 45 | vanilla sauce | flour | ground almonds and oats in equal parts
    3 | | apple
    80 | g | flour
    60 | g | butter
    50 | g | brown sugar
    Cut the apples into chunks and put them into a dish.
    Rub the flour, the butter and the sugar into crumbs.
    Cover the apples with the crumbs and bake at 180 °C for 30 minutes.
    """)
)


def _amount(amount: Amount, people: int) -> str:
    quantity, unit, name = amount
    text = number(quantity * people, 2)
    return f"{text} {unit} {name}" if unit else f"{text} {name}{'' if quantity * people <= 2 else 's'}"


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
            dice.pick(
                (
                    f"What do I need for {dish.name} for {guests}?",
                    f"Please list the ingredients of {dish.name}; we are {people}.",
                    f"I want to make {dish.name} for {guests}. How much of everything?",
                )
            ),
            f"For {guests} you need:\n"
            + "\n".join(f"- {one}" for one in scaled)
            + "\n\nSalt, pepper and a little oil come on top.",
            f"The amounts I know are for 2 people. For {people} I multiply each by {people}/2 = {number(people, 2)}. "
            f"That gives {listing(scaled)}.",
        ),
        Turn(
            dice.pick(
                (
                    f"We want to eat {dish.name} at {clock(served)}. When should I start?",
                    f"{dish.name[0].upper()}{dish.name[1:]} is planned for {clock(served)}: at what time do I begin?",
                )
            ),
            f"It takes about {dish.minutes} minutes, so begin at {clock(served - dish.minutes)}. If you have never "
            f"made it, give yourself {rest} minutes more.",
            f"{clock(served)} minus {dish.minutes} minutes is {clock(served - dish.minutes)}.",
        ),
        Turn(
            dice.pick(
                (
                    f"How is {dish.name} made?",
                    f"Walk me through {dish.name} step by step.",
                    f"And the method for {dish.name}?",
                )
            ),
            numbered(dish.steps) + f"\n\nServe it with {dish.side}.",
        ),
        Turn(
            dice.pick(
                (
                    f"I have run out of {dish.swap[0]}. What else works in {dish.name}?",
                    f"What can replace {dish.swap[0]} here?",
                )
            ),
            f"Use {dish.swap[1]}. The taste changes a little, the method does not.",
        ),
        Turn(
            f"I still have {_amount((have * 2, unit, first), 1)}. How many portions of {dish.name} is that?",
            f"That is enough for {portions} portions.",
            f"One portion takes {number(quantity, 2)}{' ' + unit if unit else ''}. {have} divided by "
            f"{number(quantity, 2)} is {number(have * 2, quantity)}, so {portions} whole portions.",
        ),
        Turn(
            f"Please set a timer for the {dish.name}.",
            f"Done: the timer rings in {dish.minutes} minutes.",
            calls=(
                Call(
                    "set_timer",
                    {"minutes": dish.minutes, "label": dish.name},
                    {"status": "running", "minutes": dish.minutes},
                ),
            ),
        ),
    ]
