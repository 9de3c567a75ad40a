"""Replaces options of records datasets with values from the command line."""

import copy
from collections.abc import Mapping
from typing import Any, cast

from rowmill.core import config
from rowmill.core.config import describe_type
from rowmill.core.errors import ConfigError, join_choices
from rowmill.formats import KINDS


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return a recipe's mapping with options of its records datasets replaced.

    A key is the option's path in `format`, joined by `__`: `data__max_sequences_per_example`. It starts with the
    dataset's name if the recipe has several records datasets. A value is parsed as YAML.

    Raises
    ------
    ConfigError
        If the dataset is ambiguous, or a value is not YAML.

    """
    changed = copy.deepcopy(dict(values))
    datasets: Any = changed.get("datasets", changed.get("configs", {}))
    tables = [str(name) for name, one in datasets.items() if is_records(one)] if isinstance(datasets, dict) else []
    for key, text in overrides.items():
        first, *rest = key.split("__")
        name, path = (first, rest) if first in tables else (tables[0] if len(tables) == 1 else "", [first, *rest])
        if not name or not path:
            raise ConfigError(
                f"--{key}: the dataset is ambiguous; this recipe's records datasets are "
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
    """Return whether a dataset's mapping names a kind of records dataset."""
    form: Any = dataset.get("format") if isinstance(dataset, dict) else None
    named = form.get("kind", form.get("type")) if isinstance(form, dict) else None
    return isinstance(named, str) and named in KINDS and KINDS[named].IS_TABLE
