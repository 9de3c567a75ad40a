"""The tools that conversations may use, in the shape that chat APIs take.

What belongs here: names, descriptions and parameters. What does not: what a tool answers; its topic knows.
"""

from typing import Any

from topics.speech import blocks, table


def _tool(name: str, description: str, *parameters: tuple[str, ...]) -> dict[str, Any]:
    properties = {key.removesuffix("?"): {"type": kind, "description": text} for key, kind, text in parameters}
    required = [key for key, _, _ in parameters if not key.endswith("?")]
    schema = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _tools(text: str) -> dict[str, dict[str, Any]]:
    """Read blocks of a tool's name and description, and a line for each parameter; `?` marks an optional one."""
    tools = [table(block) for block in blocks(text)]
    return {rows[0][0]: _tool(rows[0][0], rows[0][1], *rows[1:]) for rows in tools}


TOOLS = _tools("""
    calculate | Evaluate an arithmetic expression.
    expression | string | Such as 12 * (3 + 4)

    get_weather | Report the weather of one day in a city.
    city | string | Name of the city
    day? | string | ISO date; today if absent

    find_trains | List trains between two cities.
    origin | string | City of departure
    destination | string | City of arrival
    after? | string | Earliest departure, HH:MM

    set_timer | Ring after some minutes.
    minutes | integer | Minutes from now
    label? | string | What the timer is for

    add_event | Write an event into the calendar.
    title | string | Name of the event
    day | string | ISO date
    time? | string | HH:MM

    look_up_plant | Give sowing facts of a plant.
    plant | string | Common name

    run_python | Run a short Python program and return what it prints.
    code | string | The program
""")
"""Every tool of the demo by name."""
