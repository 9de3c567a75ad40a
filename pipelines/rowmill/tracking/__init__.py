"""Put a published build on record in trackers that people have already: MLflow, Weights & Biases, OpenLineage.

    published output ─► BuildRecord ─► is it logged already? ─► client.py, in a process of its own, with a time limit
                        (reports/build_record.py)               (delivery.py)

A tracker changes no build: one that cannot be reached is a line in the log and on the asset's page, and is tried again
by the next build. The options name secrets, and never hold them.
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from rowmill.core.config import Config
from rowmill.core.remote import public_url

__all__ = ["AnyTracker", "MlflowTracker", "OpenLineageTracker", "WandbTracker"]


def _require_no_login(address: str) -> str:
    if public_url(address) != address:
        raise ValueError("has a login or a query; expected an address without secrets; name their variables instead")
    return address


def _require_server_or_database(address: str) -> str:
    if "://" not in address and address != "databricks":
        raise ValueError(
            f"{address!r} is a folder; expected a server or a database, since MLflow 3 takes no folder; write "
            "http://HOST:PORT or sqlite:///FILE"
        )
    return address


Address = Annotated[str, AfterValidator(_require_no_login)]


class MlflowTracker(Config):
    """A run per published version in MLflow, with the datasets as inputs and the manifest as an artifact."""

    kind: Literal["mlflow"] = "mlflow"
    """Log a run with dataset inputs to MLflow."""
    tracking_uri: Annotated[Address, AfterValidator(_require_server_or_database)]
    """Address of the tracking server, `databricks`, or a database such as `sqlite:///mlflow.db`."""
    experiment: str | None = None
    """Experiment of the runs, made if there is none; null: the recipe's name."""
    token_env: str | None = None
    """Environment variable with the token of the server."""
    user_env: str | None = None
    """Environment variable with the user's name, for servers with basic authentication."""
    password_env: str | None = None
    """Environment variable with the password."""


class WandbTracker(Config):
    """An artifact per published version in Weights & Biases."""

    kind: Literal["wandb"] = "wandb"
    """Log an artifact to Weights & Biases."""
    project: str | None = None
    """Project of the artifact; null: the recipe's name."""
    entity: str | None = None
    """User or team of the project; null: the account's default."""
    mode: Literal["online", "offline"] = "online"
    """Whether the artifact is sent at once, or kept in `folder` until `wandb sync` sends it."""
    folder: str = "."
    """Folder in which a folder `wandb` is made, relative to the project."""
    base_url: Address | None = None
    """Address of a server of your own; null: the service's."""
    api_key_env: str | None = None
    """Environment variable with the API key; null: the login of `wandb login`."""


class OpenLineageTracker(Config):
    """An event per stage of a published build, to a server of OpenLineage such as Marquez, or to a file."""

    kind: Literal["openlineage"] = "openlineage"
    """Send an event per stage to OpenLineage."""
    url: Address | None = None
    """Address of the server; either this or `file` is set."""
    endpoint: str = "api/v1/lineage"
    """Path of the server that takes events."""
    file: str | None = Field(default=None, min_length=1)
    """File that gets a line of JSON per event, relative to the project."""
    namespace: str = "rowmill"
    """Namespace of the jobs."""
    api_key_env: str | None = None
    """Environment variable with the API key of the server."""

    @model_validator(mode="after")
    def _has_one_target(self) -> "OpenLineageTracker":
        if (self.url is None) == (self.file is None):
            raise ValueError("has url and file, or neither; events go to one of the two; set one")
        return self


AnyTracker: TypeAlias = Annotated[MlflowTracker | WandbTracker | OpenLineageTracker, Field(discriminator="kind")]
