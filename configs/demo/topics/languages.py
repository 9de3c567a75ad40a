"""Languages: three phrases in two of twelve languages.

What belongs here: greetings that every phrase book has. What does not: grammar.
"""

from dice import Dice
from topics.speech import NAMES, Turn, table, words

_GREETINGS = table("""
    Japanese | こんにちは | ありがとう | さようなら
    Greek | γεια σας | ευχαριστώ | αντίο
    Russian | здравствуйте | спасибо | до свидания
    Turkish | merhaba | teşekkürler | hoşça kal
    Spanish | hola | gracias | adiós
    German | guten Tag | danke | auf Wiedersehen
    French | bonjour | merci | au revoir
    Hindi | नमस्ते | धन्यवाद | अलविदा
    Arabic | مرحبا | شكرا | مع السلامة
    Korean | 안녕하세요 | 감사합니다 | 안녕히 가세요
    Finnish | hei | kiitos | näkemiin
    Polish | dzień dobry | dziękuję | do widzenia
""")
"""Language, hello, thank you, goodbye."""

_MEANINGS = words("hello, thank you, goodbye")


def languages(dice: Dice) -> list[Turn]:
    """Learn three phrases of two languages."""
    one, two = dice.some(_GREETINGS, 2)
    place = dice.below(3)
    meaning, other = _MEANINGS[place], _MEANINGS[(place + 1) % 3]
    name = dice.pick(NAMES)
    return [
        Turn(
            dice.pick(
                (
                    f"How do I say “{meaning}” in {one[0]}?",
                    f"What is “{meaning}” in {one[0]}, please?",
                    f"{name} speaks {one[0]}. How do I say “{meaning}”?",
                )
            ),
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
            f"| | {one[0]} | {two[0]} |\n|---|---|---|\n| {_MEANINGS[0]} | {one[1]} | {two[1]} |\n| {_MEANINGS[1]} | "
            f"{one[2]} | {two[2]} |",
        ),
    ]
