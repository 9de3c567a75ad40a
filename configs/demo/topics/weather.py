"""Weather: what one day brings in one city.

What belongs here: forecasts, clothes, degrees. What does not: seasons in the garden (`gardening.py`).
"""

from datetime import date, timedelta

from dice import Dice
from topics.speech import Call, Turn, number, words
from topics.travel import CITIES

_SKIES = words("clear, partly cloudy, overcast, light rain, heavy rain, fog, snow showers, thunderstorms")


def weather(dice: Dice) -> list[Turn]:
    """Ask what a day brings, with the weather tool and without."""
    city = dice.pick(CITIES).name
    day = (date(2025, 1, 1) + timedelta(days=dice.below(365))).isoformat()
    sky = dice.pick(_SKIES)
    high = dice.between(-8, 2) if sky == "snow showers" else dice.between(3, 34)
    low, wind = high - dice.between(2, 9), dice.between(1, 16) * 5
    wet = sky in {"light rain", "heavy rain", "thunderstorms", "snow showers"}
    report = {"city": city, "day": day, "sky": sky, "high": high, "low": low, "wind_kmh": wind}
    advice = "Take a rain jacket." if wet else "You can leave the umbrella at home."
    layer = (
        "A warm coat and gloves."
        if high < 5
        else "A jumper and a light jacket."
        if high < 16
        else "Light clothes are enough."
    )
    return [
        Turn(
            dice.pick(
                (
                    f"What will the weather be like in {city} on {day}?",
                    f"Weather in {city}, {day}?",
                    f"Do I need an umbrella in {city} on {day}?",
                )
            ),
            f"{city} expects {sky} with {low} to {high} °C and wind around {wind} km/h. {advice}",
            calls=(Call("get_weather", {"city": city, "day": day}, report),),
        ),
        Turn(
            f"What do I wear at {high} °C with {sky}?",
            f"{layer} {advice}",
            f"{high} °C decides the layers, the sky decides the outside. With {sky}, "
            f"{'something waterproof is needed' if wet else 'it stays dry'}.",
        ),
        Turn(
            f"How much is {high} °C in Fahrenheit?",
            f"{high} °C is {number(high * 9 + 160, 5)} °F.",
            f"Multiply by 9, divide by 5, add 32: {high} × 9 = {high * 9}, divided by 5 is {number(high * 9, 5)}, "
            f"plus 32 is {number(high * 9 + 160, 5)}.",
        ),
        Turn(
            f"Is a wind of {wind} km/h a problem for cycling?",
            "Hardly; you will notice it on open roads only."
            if wind < 20
            else "Ride, but plan more time against it."
            if wind < 45
            else "Yes. Side gusts push you across the lane; take the train instead.",
        ),
        Turn(
            f"By how much does the temperature change during the day if it goes from {low} to {high} °C?",
            f"By {high - low} degrees.",
            f"{high} - ({low}) = {high - low}.",
        ),
        Turn(
            dice.pick(("Why does fog form at night?", "Where does morning fog come from?")),
            "The ground loses its heat to a clear sky, the air above it cools, and cool air can hold less vapour. "
            "What it can no longer hold condenses into droplets: fog. It goes when the sun warms the ground again.",
        ),
    ]
