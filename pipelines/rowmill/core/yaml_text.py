"""Parse YAML text into plain values: PyYAML's safe loader within bounds; every error names its line.

    a key twice in a mapping      refused: PyYAML silently keeps the last one
    `<<: *name`                   merged, as YAML 1.1 describes; a mapping's own keys win
    aliases                       copied out, up to `SIZE_LIMIT`; one inside its own anchor is refused
    nesting                       up to `DEPTH_LIMIT` levels
    a value that Python refuses   an error with its line: the 31st of February, an integer of 5,000 digits

Sizes and depths are counted while the text is composed, so a small text that expands to a huge value is refused before
the value exists.
"""

from collections.abc import Hashable
from typing import Any, cast

import yaml

from rowmill.core.errors import ConfigError

SIZE_LIMIT = 4 << 20
"""Characters of a text with its aliases written out, each value counted with eight more; a recipe of a hundred datasets
takes about a hundredth of it."""

DEPTH_LIMIT = 64
"""Lists and mappings inside each other."""

_VALUE_SIZE = 8
_INTEGER_DIGITS = 1_000
_MERGE_TAG = "tag:yaml.org,2002:merge"
_BOOLEAN_TAG = "tag:yaml.org,2002:bool"


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text: dictionaries, lists and scalars, none of them shared.

    Raises ConfigError for anything that the text may not hold; the message begins with the line.
    """
    if len(text) > SIZE_LIMIT:
        raise ConfigError(
            f"the text has {len(text):,} characters; at most {SIZE_LIMIT:,} are allowed; name files by a glob or a "
            "folder instead of one by one"
        )
    try:
        value = yaml.load(text, Loader=_BoundedLoader)  # noqa: S506  (a SafeLoader subclass)
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}; correct the line named") from error
    return _copy_value(value)


def _copy_value(value: Any) -> Any:
    """Give every place of an alias its own copy, so that changing one place changes no other."""
    if isinstance(value, dict):
        return {key: _copy_value(one) for key, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [_copy_value(one) for one in cast("list[Any]", value)]
    return value


class _BoundedLoader(yaml.SafeLoader):
    """YAML's safe loader with bounds; a node is measured once its children are composed."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0
        self._extents: dict[yaml.Node, tuple[int, int]] = {}
        """Each finished node's size and depth."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node and refuse what is too deep, too large or inside itself."""
        event: yaml.Event = self.peek_event()
        if self._level >= DEPTH_LIMIT:
            raise _depth_error(event)
        self._level += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._level -= 1
        if node is None:
            return None
        if node not in self._extents:
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(
                    f"{_describe_line(event)}: the alias *{event.anchor} is inside the value that it names; an alias "
                    "names a value that ends before it; write the value out"
                )
            if isinstance(node, yaml.ScalarNode):
                self._extents[node] = _VALUE_SIZE + len(node.value), 0
            else:
                is_list = isinstance(node, yaml.SequenceNode)
                children = node.value if is_list else [child for pair in node.value for child in pair]
                extents = [self._extents[child] for child in children]
                longest = max((depth for _, depth in extents), default=0)
                self._extents[node] = _VALUE_SIZE + sum(size for size, _ in extents), 1 + longest
        size, depth = self._extents[node]
        if self._level + depth > DEPTH_LIMIT:
            raise _depth_error(event)
        if size > SIZE_LIMIT:
            raise ConfigError(
                f"{_describe_line(event)}: with its aliases written out, this value has more than {SIZE_LIMIT:,} "
                "characters; at most so many are allowed; use fewer aliases of aliases"
            )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value; an error that Python raises for it gets the line."""
        if isinstance(node, yaml.ScalarNode) and len(node.value) > _INTEGER_DIGITS and node.tag.endswith(":int"):
            raise ConfigError(
                f"{_describe_line(node)}: an integer of {len(node.value):,} digits; at most {_INTEGER_DIGITS:,} are "
                "read; write it in quotes if it is a text"
            )
        try:
            return super().construct_object(node, deep=deep)
        except ConfigError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = node.tag.rpartition(":")[2]
            text = str(node.value) if isinstance(node, yaml.ScalarNode) else node.tag
            shortened = repr(text if len(text) <= 60 else f"{text[:57]}...")
            raise ConfigError(
                f"{_describe_line(node)}: {shortened} cannot be read as YAML's {kind} ({error}); write it in quotes if "
                "it is a text"
            ) from error

    def construct_unique_mapping(self, node: yaml.MappingNode) -> dict[Any, Any]:
        """Construct a mapping whose keys are given once, with the mappings merged that `<<` names."""
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == _BOOLEAN_TAG:
                # A key is a name: `on:` is the option of that name, not the truth.
                key_node.tag = yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG
            key: object = "<<" if key_node.tag == _MERGE_TAG else self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                what = "list" if isinstance(key_node, yaml.SequenceNode) else "mapping"
                raise ConfigError(
                    f"{_describe_line(key_node)}: a {what} is a key; keys are texts or numbers; put quotes around it "
                    "if it is a text"
                )
            if key in seen:
                raise ConfigError(
                    f"{_describe_line(key_node)}: key {key!r} is given twice in one mapping; a key may occur once; "
                    "delete one of the two"
                )
            seen.add(key)
        # Merged pairs are put before the mapping's own, so that a dictionary keeps its own.
        self.flatten_mapping(node)
        return dict(self.construct_pairs(node, deep=True))


_BoundedLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _BoundedLoader.construct_unique_mapping)


def _depth_error(event: yaml.Event) -> ConfigError:
    return ConfigError(
        f"{_describe_line(event)}: lists and mappings are nested in more than {DEPTH_LIMIT} levels; at most "
        f"{DEPTH_LIMIT} are allowed; correct the brackets or the indentation"
    )


def _describe_line(where: yaml.Event | yaml.Node) -> str:
    return f"line {where.start_mark.line + 1}"
