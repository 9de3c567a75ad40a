r"""Python literals as JSON values: what `str` writes of lists and dictionaries, as pandas puts them into a CSV's cells.

    "[{'role': 'user', 'content': \"It's 0?\"}, …]"   →   a list of objects

Only constants, lists, tuples, dictionaries and signs are read, from the syntax tree: nothing is evaluated. What JSON
cannot hold is refused (bytes, sets, keys that are no text, numbers that are not finite), and so is the text of a NumPy
array, which leaves out commas, and beyond a thousand items the items themselves.
"""

import ast
import math
import re
import warnings

from rowmill.core.json import Json, RepeatedKeyError, iterate_strings

MOST_CHARS = 1 << 19
"""Length from which a text is not parsed: its syntax tree takes a hundred times its size."""

_BEGIN = re.compile(r"\s*(?:[\[{(]|array\()")


def begins_like_literal(text: str) -> bool:
    """Return whether a text begins like a list, a dictionary, a tuple or an array."""
    return _BEGIN.match(text) is not None


def from_python(text: str) -> Json:
    """Return the JSON value of a Python literal; tuples become lists.

    Raises ValueError, with the reason, if the text is not the literal of such a value.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"{len(text):,} characters that are no JSON; as Python, at most {MOST_CHARS:,} are read")
    try:
        with warnings.catch_warnings():
            # An escape that Python warns of is not what `str` writes.
            warnings.simplefilter("error")
            tree = ast.parse(text.strip(), mode="eval")
        value = _convert(tree.body)
        # Lone surrogates cannot be stored.
        "".join(iterate_strings(value)).encode()
    except RecursionError:
        raise ValueError("nested too deep") from None
    except MemoryError:
        # The parser's own stack, not the machine's memory: the text is short.
        raise ValueError("nested too deep") from None
    except SyntaxError as error:
        raise ValueError(f"not a Python literal: {error.msg}") from None
    return value


def _convert(node: ast.expr) -> Json:
    match node:
        case ast.Constant(value=str() | bool() | int() | None as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if (
            type(value) is not bool
        ):
            return -value if math.isfinite(value) else _refuse(node)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_convert(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            found: dict[str, Json] = {}
            for key, value in zip(keys, values, strict=True):
                if not isinstance(key, ast.Constant) or type(key.value) is not str:
                    raise ValueError("a key is no text")
                if key.value in found:
                    raise RepeatedKeyError(f"the key {key.value!r} is repeated")
                found[key.value] = _convert(value)
            return found
        case ast.Call(func=ast.Name(id=name)):
            raise ValueError(f"{name}(…) is a call, as in the text of a NumPy array, and no literal")
        case _:
            return _refuse(node)


def _refuse(node: ast.expr) -> Json:
    raise ValueError(f"not a literal that JSON can hold: {type(node).__name__}")
