"""Options of records datasets replaced on the command line.

What belongs here: changing a recipe's mapping before it is read. What does not: reading it (`recipe.py`).
"""

import copy
from collections.abc import Mapping
from typing import Any, cast

from rowmill.core import config
from rowmill.core.config import describe_type
from rowmill.core.errors import ConfigError, join_choices
from rowmill.formats import KINDS


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return a recipe's mapping with options of its records datasets replaced.

    A key is the option's path in `format` with `__` between its words, `data__max_sequences_per_example`, and
    begins with the dataset's name where the recipe has several records datasets; a value is read as YAML.

    Raises
    ------
    ConfigError
        If it does not say which dataset, or its value is no YAML.

    """
    changed = copy.deepcopy(dict(values))
    datasets: Any = changed.get("datasets", changed.get("configs", {}))
    tables = [str(name) for name, one in datasets.items() if is_records(one)] if isinstance(datasets, dict) else []
    for key, text in overrides.items():
        first, *rest = key.split("__")
        name, path = (first, rest) if first in tables else (tables[0] if len(tables) == 1 else "", [first, *rest])
        if not name or not path:
            raise ConfigError(
                f"--{key}: does not say whose option it is; this recipe's records datasets are "
                f"{join_choices(tables) or 'none'}; write --NAME__{key}"
            )
        here: Any = datasets[name]["format"]
        for word in path[:-1]:
            inner = here.setdefault(word, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"--{key}: {word} is {describe_type(inner)}, which has no options; correct the option's name"
                )
            here = cast("dict[str, Any]", inner)
        here[path[-1]] = config.read_value(text, f"--{key}")
    return changed


def is_records(dataset: Any) -> bool:
    """Tell whether a dataset's mapping names a kind of table."""
    form: Any = dataset.get("format") if isinstance(dataset, dict) else None
    named = form.get("kind", form.get("type")) if isinstance(form, dict) else None
    return isinstance(named, str) and named in KINDS and KINDS[named].IS_TABLE
