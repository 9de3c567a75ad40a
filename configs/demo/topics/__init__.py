"""What the demo's conversations are about: questions with right answers. The folder means: choose one.

What belongs here: the table of topics. What does not: how turns become records (`generate.py`), how records are
broken (`flaws.py`).

Every topic is a function `topic(dice) -> list[Turn]` about one subject (one dish, one trip, one plant), so that any
selection of its turns, in any order, reads as one conversation. All text is our own; numbers are computed, not written.
"""

from collections.abc import Callable

from dice import Dice
from topics.arithmetic import arithmetic
from topics.astronomy import astronomy
from topics.calendar import calendar
from topics.cooking import cooking
from topics.gardening import gardening
from topics.household import household
from topics.languages import languages
from topics.programming import programming
from topics.speech import Turn
from topics.travel import travel
from topics.weather import weather

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
