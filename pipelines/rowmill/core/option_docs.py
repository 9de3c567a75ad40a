"""What the options of a model mean: the docstring under each field, read when a page or a JSON Schema is written.

pydantic would read them itself (`use_attribute_docstrings`), but in every process that imports a model: 0.2 s of each
command and each worker.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from rowmill.core.config import Config


def describe_field(model: type[Config], name: str) -> str:
    """Return what a field means; empty if it has neither a description nor a docstring."""
    return model.model_fields[name].description or _read_field_docstrings(model).get(name, "")


class DescribedJsonSchema(GenerateJsonSchema):
    """A JSON Schema whose properties are described, for `Config.model_json_schema(schema_generator=…)`."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        """Add the descriptions of a model's fields."""
        made = super().model_schema(schema)
        model: type[Any] = schema["cls"]
        if issubclass(model, Config):
            for name, field in model.model_fields.items():
                text, written = describe_field(model, name), made["properties"].get(_get_written_name(name, field))
                if text and written is not None:
                    written["description"] = text
        return made


def _get_written_name(name: str, field: FieldInfo) -> str:
    return field.alias or name


@cache
def _read_field_docstrings(model: type[Config]) -> dict[str, str]:
    """Return the docstrings of a model's own and inherited fields."""
    inherited = [_read_field_docstrings(base) for base in reversed(model.__bases__) if issubclass(base, Config)]
    own = dict(_iterate_field_docstrings(model))
    return {name: text for docstrings in (*inherited, own) for name, text in docstrings.items()}


def _iterate_field_docstrings(model: type[Config]) -> Iterator[tuple[str, str]]:
    try:
        source = textwrap.dedent(inspect.getsource(model))
    except (OSError, TypeError):
        # A model made by `create_model` has no source; its fields have descriptions.
        return
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.ClassDef)
    for field, behind in pairwise(tree.body):
        match field, behind:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)
            case _:
                pass
