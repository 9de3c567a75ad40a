"""Calendar: days and weekdays around one date.

What belongs here: counting days. What does not: times of one day (`travel.py`, `cooking.py`).
"""

from datetime import date, timedelta

from dice import Dice
from topics.speech import MONTHS, WEEKDAYS, Call, Turn, clock, number


def calendar(dice: Dice) -> list[Turn]:
    """Count days and find weekdays around one date."""
    day = date(2024, 1, 1) + timedelta(days=dice.below(1400))
    later = day + timedelta(days=dice.between(5, 320))
    more = dice.between(3, 200)
    then = day + timedelta(days=more)
    title = dice.pick(("dentist", "parents' evening", "choir rehearsal", "car inspection", "book club", "chess match"))
    at = clock(dice.between(32, 80) * 15)
    weekday = WEEKDAYS[day.weekday()]
    return [
        Turn(
            dice.pick(
                (f"What day of the week is {day.isoformat()}?", f"On which weekday does {day.isoformat()} fall?")
            ),
            f"It is a {weekday}.",
        ),
        Turn(
            f"How many days lie between {day.isoformat()} and {later.isoformat()}?",
            f"{(later - day).days} days.",
            f"From day {day.timetuple().tm_yday} of {day.year} to day {later.timetuple().tm_yday} of {later.year}: "
            f"{(later - day).days} days.",
        ),
        Turn(
            f"Which date is {more} days after {day.isoformat()}?",
            f"{then.isoformat()}, a {WEEKDAYS[then.weekday()]}.",
            f"{more} days are {more // 7} weeks and {more % 7} days. Counting on from {weekday} by {more % 7} gives "
            f"{WEEKDAYS[then.weekday()]}.",
        ),
        Turn(
            f"Is {day.year} a leap year?",
            f"{'Yes' if day.year % 4 == 0 else 'No'}, {day.year} {'is' if day.year % 4 == 0 else 'is not'} divisible "
            "by 4.",
            f"{day.year} divided by 4 is {number(day.year, 4)}.",
        ),
        Turn(
            f"Please note: {title} on {day.isoformat()} at {at}.",
            f"Noted: {title}, {weekday} {day.isoformat()}, {at}.",
            calls=(
                Call(
                    "add_event",
                    {"title": title, "day": day.isoformat(), "time": at},
                    {"status": "saved", "id": f"ev-{day.toordinal() % 9973}"},
                ),
            ),
        ),
        Turn(
            f"How many days does {MONTHS[day.month - 1]} {day.year} have?",
            f"{((day.replace(day=28) + timedelta(days=4)).replace(day=1) - timedelta(days=1)).day}.",
        ),
    ]
