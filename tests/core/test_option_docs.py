"""Checks that options are described from their docstrings, and only when someone asks."""

from pydantic import Field

from rowmill.core.config import Config, DescribedJsonSchema, describe_field


class _Parent(Config):
    inherited: int = 1
    """What the parent says,
    on two lines."""
    untold: int = 2


class _Child(_Parent):
    own: int = Field(3, alias="written")
    """What the child says."""
    explicit: int = Field(4, description="As given.")
    parent: _Parent = _Parent()
    """A model inside."""


def test_json_schema_describes_fields_of_all_models_under_the_names_that_people_write() -> None:
    schema = _Child.model_json_schema(schema_generator=DescribedJsonSchema)

    assert schema["properties"]["written"]["description"] == "What the child says."
    assert schema["properties"]["parent"]["description"] == "A model inside."
    assert schema["$defs"]["_Parent"]["properties"]["inherited"]["description"].startswith("What the parent says")
    assert "description" not in schema["properties"]["untold"]


def test_field_is_described_by_its_docstring_its_parent_or_its_description_when_someone_asks() -> None:
    assert _Child.model_fields["own"].description is None
    assert describe_field(_Child, "own") == "What the child says."
    assert describe_field(_Child, "inherited") == "What the parent says,\non two lines."
    assert describe_field(_Child, "explicit") == "As given."
    assert describe_field(_Child, "untold") == ""
