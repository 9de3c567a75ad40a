"""Arithmetic: the sums of one exercise sheet, each with the way to its result.

What belongs here: sums with one right answer. What does not: sums about a topic of its own.
"""

from dice import Dice
from topics.speech import NAMES, Call, Turn, number, words

_THINGS = words("pencils, stamps, marbles, postcards, tickets, seed packets, shells, buttons, notebooks, candles")


def arithmetic(dice: Dice) -> list[Turn]:
    """Work out sums of one pupil's exercise sheet."""
    name, other = dice.some(NAMES, 2)
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
            f"I split {a} into {a // 10 * 10} and {a % 10}. {a // 10 * 10} × {b} = {a // 10 * 10 * b} and {a % 10} × "
            f"{b} = {a % 10 * b}. Together {a // 10 * 10 * b} + {a % 10 * b} = {a * b}.",
        ),
        Turn(
            f"{name} buys {packs} packs of {each} {thing} and gives {given} of them to {other}. How many {thing} does "
            f"{name} keep?",
            f"{name} keeps {packs * each - given} {thing}.",
            f"{packs} × {each} = {packs * each}. Giving away {given} leaves {packs * each} - {given} = "
            f"{packs * each - given}.",
        ),
        Turn(
            f"A cyclist rides {hours} hours at {speed} km/h without a break. How far is that?"
            if speed <= 25
            else f"A train runs {hours} hours at {speed} km/h. How far does it get?",
            f"{hours} × {speed} = {hours * speed}, so the answer is {hours * speed} km.",
            f"Distance is speed times time: {hours} × {speed} = {hours * speed}.",
        ),
        Turn(
            f"{share * people + c % people} {thing} are shared equally among {people} children. How many does each "
            "get, and how many are left?",
            f"Each child gets {share} and {c % people} {'is' if c % people == 1 else 'are'} left over.",
            f"{people} × {share} = {people * share}, and {share * people + c % people} - {people * share} = "
            f"{c % people}.",
        ),
        Turn(
            f"What is {percent} % of {price}?",
            f"{percent} % of {price} is {number(percent * price, 100)}.",
            f"One per cent of {price} is {number(price, 100)}; {percent} times that is {number(percent * price, 100)}.",
        ),
        Turn(
            f"A garden is {length} m long and {width} m wide. What are its area and its fence?",
            f"The area is {length} × {width} = {length * width} square metres, and the fence measures 2 × ({length} + "
            f"{width}) = {2 * (length + width)} metres.",
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
    ]
