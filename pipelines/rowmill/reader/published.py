"""Open `current.json`, which names everything that a trainer reads.

<root>/<recipe>/gpu_partitions/current.json     written last: every file that it names is complete
  ranks ─► layout copied: the shards of each rank        layout index: the index of each rank, and a filler
  sets  ─► the packed shards of each dataset, by split   ◄── rows of them are what an index names
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, cast

import numpy as np

from rowmill.core.arrays import Ints, view_numbers
from rowmill.core.errors import ConfigError, DamagedFileError, IntegrityError
from rowmill.core.stage_names import GPU_PARTITIONS, PACKED_SHARDS
from rowmill.core.storage import Store, digest_json
from rowmill.reader.source_losses import SourceNames

STATE_VERSION = 1
"""The version of a reader's `state_dict()`; increase it when an older one can no longer be read."""

StoredLayout: TypeAlias = Literal["copied", "index"]
"""How ranks are stored: each with shards of its own, or with an index of rows of the packed shards."""


class Shard(NamedTuple):
    """A file of sequences, or an index of them, as `current.json` names it: a tuple, since a build may have 10⁵."""

    path: str
    rows: int
    digest: str


@dataclass(frozen=True, slots=True)
class DatasetShards:
    """A dataset's sequences as they were packed, by split, and the names under which its evaluation is grouped.

    `template` is the digest of its chat template; None without one.
    """

    tags: tuple[str, ...]
    template: str | None
    shards: dict[str, tuple[Shard, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class PublishedBuild:
    """A build that trainers may read.

    `version` is that of the ranks, as `rowmill versions RECIPE gpu_partitions` lists it. `order` is the digest of the
    order, `content` that of the packed shards in it. Place p of the order is in stored rank `p mod world_size` at row
    `p // world_size`; `ranks` are the files that hold these rows, or lines of an index, and `fillers` the shard of
    one filler for each rank with an index. Step s is the places `[step_offsets[s], step_offsets[s + 1])`, and
    `step_trained_tokens[s]` its targets over all ranks; without steps (`has_steps` false), the offsets are the start
    and the end of the whole order. `source_names` are those of datasets, and
    of domains if the recipe stores them.
    """

    store: Store
    where: str
    recipe: str
    version: str
    order: str
    content: str
    world_size: int
    seq_len: int
    places: int
    has_steps: bool
    step_offsets: Ints
    step_trained_tokens: Ints
    card: dict[str, Any]
    layout: StoredLayout
    datasets: tuple[str, ...]
    ranks: dict[str, tuple[Shard, ...]]
    fillers: dict[str, Shard]
    sets: dict[str, DatasetShards]
    waivers: tuple[str, ...]
    source_names: SourceNames

    def describe_identity(self) -> dict[str, Any]:
        """Return what names these bytes, as JSON values: equal identities are equal tokens in an equal order."""
        return {
            "recipe": self.recipe,
            "version": self.version,
            "digest": self.content,
            "order": self.order,
            "tokenizer": self.card["tokenizer_digest"],
            "tokenizer_json": self.card["tokenizer_files"].get("tokenizer.json"),
            "templates": {name: dataset.template for name, dataset in self.sets.items()},
            "seq_len": self.seq_len,
            "layout": self.layout,
            "stored_ranks": self.world_size,
            "waivers": list(self.waivers),
        }

    @property
    def pad_id(self) -> int:
        """The id that pads a batch: the tokenizer's pad id, else its EOS id, else 0."""
        return int(next((self.card[name] for name in ("pad_id", "eos_id") if self.card.get(name) is not None), 0))


def raise_missing(where: str) -> NoReturn:
    """Raise the error for a file that is not there."""
    raise IntegrityError(f"{where}: missing; current.json names it; copy the whole folder, or build again")


def _current_path(recipe: str) -> str:
    return f"{recipe}/{GPU_PARTITIONS}/current.json"


def find_published_version(store: Store, recipe: str) -> str | None:
    """Return the version of a recipe's ranks that trainers open, or None if nothing was published.

    It is not always the newest or the current version: a rank that was built alone is both, and is not published.
    Raises IntegrityError if `current.json` was changed since it was written.
    """
    at = _current_path(recipe)
    return str(_read_current(store, at, recipe)["version"]) if store.exists(at) else None


def _read_current(store: Store, at: str, recipe: str) -> dict[str, Any]:
    """Return `current.json` as the build wrote it; raises DamagedFileError if it is truncated, or was changed since."""
    raw = store.read_sealed(at)
    if raw is None:
        raise DamagedFileError(
            f"{store.address(at)}: truncated, or changed since it was written; it names what trainers read, so it must "
            "be as the build wrote it",
            at,
            f"copy it again, or build {recipe!r} again",
        )
    return raw


def open_published(store: Store, recipe: str) -> PublishedBuild:
    """Open the build that a recipe published last.

    Raises IntegrityError if nothing was published, or the build is incomplete.
    """
    at = _current_path(recipe)
    where = store.path(at)
    if not store.exists(at):
        raise IntegrityError(
            f"{where}: missing; it is written once every rank of a recipe is built and no token was lost; run "
            f"`rowmill build` on {recipe!r}, or name another root or recipe"
        )
    raw = _read_current(store, at, recipe)
    try:
        ranks = {name: tuple(map(Shard._make, rank["files"])) for name, rank in raw["ranks"].items()}
        world_size, places = int(raw["world_size"]), int(raw["places"])
        offsets, trained = np.array([0, places]), np.zeros(1, np.int64)
        if raw["has_steps"]:
            offsets, trained = _read_steps(store, raw, where)
        published = PublishedBuild(
            store=store,
            where=where,
            **{name: raw[name] for name in ("recipe", "version", "order", "seq_len", "has_steps", "card", "layout")},
            content=digest_json(
                sorted((key, version) for key, version in raw["inputs"].items() if key.endswith(f"/{PACKED_SHARDS}"))
            ),
            world_size=world_size,
            places=places,
            step_offsets=offsets,
            step_trained_tokens=trained,
            datasets=tuple(raw["datasets"]),
            ranks=ranks,
            fillers={name: Shard(*rank["filler"]) for name, rank in raw["ranks"].items() if "filler" in rank},
            sets={
                name: DatasetShards(
                    tuple(dataset["tags"]),
                    dataset.get("template"),
                    {split: tuple(map(Shard._make, files)) for split, files in dataset["shards"].items()},
                )
                for name, dataset in raw["sets"].items()
            },
            waivers=tuple(raw["waivers"]),
            source_names=SourceNames(tuple(raw["sets"]), tuple(raw.get("domains", ()))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"{where}: {type(error).__name__} {error}; expected the form that this version writes; build {recipe!r} "
            "again"
        ) from error
    rows = [sum(shard.rows for shard in shards) for shards in published.ranks.values()]
    if len(rows) != published.world_size or any(count * published.world_size != published.places for count in rows):
        raise IntegrityError(
            f"{where}: {len(rows)} ranks with {rows} sequences; expected {published.world_size} equal ranks with "
            f"{published.places} sequences together; build {recipe!r} again"
        )
    return published


def _read_steps(store: Store, current: Mapping[str, Any], where: str) -> tuple[Ints, Ints]:
    """Return the first place of each step and the end, and the targets of each, over all ranks.

    A rank's folder is self-contained: its facts hold the steps, so the order's own file need not be copied too.
    """
    facts = f"{next(iter(current['ranks'].values()))['folder']}/facts.parquet"
    if not store.exists(facts):
        raise_missing(store.path(facts))
    table = store.unchecked_table(facts, ("sequences", "step_trained_tokens"))
    # Every rank of the build has the same number of sequences of a step.
    sizes = view_numbers(table.column("sequences")).astype(np.int64) * int(current["world_size"])
    offsets, places = np.concatenate(([0], np.cumsum(sizes))), int(current["places"])
    if int(offsets[-1]) != places:
        raise IntegrityError(
            f"{store.path(facts)}: its steps end at place {int(offsets[-1])}; {where} says {places}; build again"
        )
    return offsets.astype(np.int64), view_numbers(table.column("step_trained_tokens")).astype(np.int64)


def check_tokenizer(published: PublishedBuild, folder: str | Path) -> None:
    """Refuse a build that was made with a `tokenizer.json` other than the folder's."""
    expected = cast("dict[str, str]", published.card["tokenizer_files"])["tokenizer.json"]
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{file}: missing; the folder's tokenizer.json is compared; name a folder that has one")
    actual = sha256(file.read_bytes()).hexdigest()
    if actual != expected:
        raise IntegrityError(
            f"{file}: SHA-256 {actual[:16]}…, not the tokenizer of {published.where}, which is {expected[:16]}…; train "
            "with that tokenizer, or build with this one"
        )
