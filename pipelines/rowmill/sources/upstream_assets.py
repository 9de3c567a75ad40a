"""The option `source.after`: assets of a Dagster project that write what a source reads."""

from typing import Annotated

from pydantic import AfterValidator


def _require_asset_keys(keys: list[str]) -> list[str]:
    for key in keys:
        if not all(part and part == part.strip() for part in key.split("/")):
            raise ValueError(f"expected an asset's key such as raw/conversations, got {key!r}; correct it")
    return keys


AssetKeys = Annotated[list[str], AfterValidator(_require_asset_keys)]
"""Keys of assets as Dagster prints them, their parts joined by slashes."""
