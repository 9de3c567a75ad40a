"""Household: mending one thing at home.

What belongs here: repairs, paint, what a craftsman costs. What does not: the garden (`gardening.py`).
"""

import math
from dataclasses import dataclass

from dice import Dice
from topics.speech import Call, Turn, blocks, number, numbered, table


@dataclass(frozen=True, slots=True)
class _Task:
    name: str
    minutes: int
    tool: str
    steps: tuple[str, ...]


def _task(text: str) -> _Task:
    """Read a task written as text: name, minutes and tool, then a step on each line."""
    (name, minutes, tool), *steps = table(text)
    return _Task(name, int(minutes), tool, tuple(step for (step,) in steps))


_TASKS = tuple(
    _task(text)
    for text in blocks("""
    a dripping tap | 25 | an adjustable spanner
    Turn off the water under the sink.
    Open the tap until nothing comes.
    Unscrew the handle and take out the cartridge.
    Replace the worn washer.
    Put it together and turn the water on slowly.

    a flat bicycle tyre | 30 | a patch kit
    Take the wheel out and one side of the tyre off the rim.
    Find the hole by pumping the tube up and listening.
    Roughen the spot, spread the glue and wait until it is dull.
    Press the patch on hard.
    Feel inside the tyre for the thorn before you close it.

    a squeaking door | 10 | a drop of oil
    Find the hinge that squeaks by moving the door slowly.
    Lift the pin a little with a screwdriver.
    Wipe it and put on a drop of oil.
    Move the door a few times and wipe off the rest.

    a blocked drain | 20 | a plunger
    Take out the sieve and pull out the hair.
    Pour in hot, not boiling, water.
    Work with the plunger a dozen times.
    If that fails, put a bucket under the trap, open it and clean it.

    a wobbly chair | 40 | wood glue and a strap
    Turn the chair over and find the loose joint.
    Clean off the old glue.
    Glue the joint and clamp it with a strap.
    Leave it alone for a day.

    a bicycle chain that skips | 35 | a chain gauge
    Clean the chain with a rag and a little degreaser.
    Measure its wear.
    Oil each link and wipe off the rest.
    Turn the barrel adjuster a quarter turn at a time until it runs quietly.
    """)
)


def household(dice: Dice) -> list[Turn]:
    """Mend one thing at home."""
    task = dice.pick(_TASKS)
    name, steps, tool, minutes = task.name, task.steps, task.tool, task.minutes
    rooms, litres, wall = dice.between(2, 7), dice.between(5, 14), dice.between(12, 70)
    hour = dice.between(20, 90)
    return [
        Turn(
            dice.pick((f"How do I fix {name}?", f"What should I do about {name}?", f"Can I repair {name} myself?")),
            f"You can do it with {tool}:\n\n{numbered(steps)}\n\nIt takes about {minutes} minutes the first time.",
        ),
        Turn(
            f"A craftsman takes {hour} € an hour and needs {minutes} minutes for {name}. What does it cost?",
            f"{hour} × {minutes} / 60 = {number(hour * minutes, 60)}, so about {number(hour * minutes, 60)} € without "
            "the way there.",
            f"{minutes} minutes are {number(minutes, 60)} hours. Times {hour} € gives {number(hour * minutes, 60)} €.",
        ),
        Turn(
            f"How much paint do I need for {wall} square metres in {rooms} rooms each, if one litre covers {litres} "
            "square metres?",
            f"{rooms} × {wall} = {rooms * wall} square metres; at {litres} per litre that is "
            f"{math.ceil(rooms * wall / litres)} litres, rounded up.",
            f"{rooms} × {wall} = {rooms * wall}. Divided by {litres} that is {number(rooms * wall, litres)}; paint is "
            "sold in whole litres.",
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
            "Gas, mains electricity, anything that carries the roof, and every leak that you cannot stop by closing "
            "a valve.",
        ),
    ]
