"""AstrAI: one folder per domain, each with a stream of tokens and its arrays, raw or in HDF5.

    data/__default__/…      rows without a domain
    data/wiki/…             one folder per value of a dataset's format.domain_key
    data/%2E.%2Fx/…         the value ../x

    sequence       10 11  2 20  2      int64, segments end to end
    loss_mask       0  1  1  0  1      whether a token is itself a target; only where not all tokens train
    position_ids    0  1  2  0  1      from 0 in each segment

Its train type `sft` reads all three, cuts windows out of the stream, and separates documents where positions restart.
Its train type `seq` reads only `sequence`: it trains every token, and attention crosses documents.

    raw    data/wiki/meta.json      {"loss_mask": {"dtype": "int64", "shape": …}, "position_ids": {…}, "sequence": {…}}
           data/wiki/sequence.bin   N × int64, little-endian; so are loss_mask.bin and position_ids.bin
    HDF5   data/wiki/data_0000.h5   sequence/data_0, loss_mask/data_0, position_ids/data_0     1-D int64

A raw domain of several shards has folders `shard_0000`, `shard_0001`, … with these files each: the reader looks for
`meta.json` at any depth, and opens a `.bin` for each of its keys. In HDF5 each group holds one data set: the reader
takes them in the order of their names, in which `data_10` comes before `data_2`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import orjson
from pydantic import Field

from rowmill.core.arrays import Ints, group_equal
from rowmill.core.errors import ConfigError, IntegrityError
from rowmill.exports.base import (
    Export,
    ExportContext,
    ExportIndex,
    ExportJob,
    ExportLayout,
    WrittenFile,
    split_into_runs,
)
from rowmill.schema.recipe_summary import RecipeSummary
from rowmill.schema.rows import RowKind, are_running_text
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.sequences import SequenceBatch

DEFAULT_FOLDER = "__default__"
MAX_NAME_CHARS = 100
"""Bytes of a folder's name; a longer one is cut and gets a hash."""
KEPT_OF_LONG_NAME = 80

_NEEDS_ESCAPE = re.compile(rb"^\.|[^A-Za-z0-9._-]")


class AstrAI(Export):
    """Unpacked tokens and masks by domain."""

    CONVENTION: ClassVar[LabelConvention] = "unshifted_mask"
    BY_DOMAIN: ClassVar[bool] = True
    VERSION: ClassVar[int] = 2
    NOTES: ClassVar[dict[str, str]] = {}
    """More notes for the card."""

    max_tokens_per_shard: Annotated[int, Field(ge=1)] = 100_000_000
    """Maximum tokens per shard of a domain; a longer segment gets a shard to itself."""

    def allows_open_attention(self) -> bool:
        """Return true: `refuse` checks where segments that see each other are possible."""
        return True

    def refuse(self, summary: RecipeSummary) -> None:
        """Refuse segments that see each other where a mask is needed: `sft`, which reads it, separates all segments."""
        super().refuse(summary)
        opened = [name for name, facts in summary.datasets.items() if facts.is_open]
        if opened and needs_loss_mask(frozenset(dataset.kind for dataset in summary.datasets.values())):
            raise ConfigError(
                f"kind {self.kind_name} is read by AstrAI's train type sft, which separates all segments, but "
                f"attention of datasets.{opened[0]} crosses from one to the next; that is possible only if every "
                "dataset is text, for its train type seq; set packing.block_cross_document_attention: true"
            )

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Return a job per shard of each domain."""
        names = name_folders(index.domain_values)
        jobs: list[ExportJob] = []
        used: list[int] = []
        for value, of_domain in sorted(group_equal(index.domains), key=lambda group: names[group[0]]):
            used.append(value)
            runs = list(split_into_runs(index.lengths[of_domain], most=None, most_tokens=self.max_tokens_per_shard))
            for number, (first, last) in enumerate(runs):
                at = self.place(names[value], number, count=len(runs))
                segments = of_domain[first:last]
                jobs.append(ExportJob(at, segments, np.arange(len(segments) + 1), int(index.lengths[segments].sum())))
        missing = list(index.domain_values).index(None) if None in index.domain_values else -1
        notes = {
            "domains": {names[i]: index.domain_values[i] for i in used},
            "segments_without_domain": int((index.domains == missing).sum()),
            "train_type": choose_train_type(index.context.kinds),
            "boundaries": "where position_ids begin again: train type sft parts segments there, seq does not",
            "loss_mask": "written"
            if needs_loss_mask(index.context.kinds)
            else "left out: every dataset is text, all of it trains",
        }
        return ExportLayout(jobs, notes=notes | self.NOTES)

    def place(self, folder: str, number: int, *, count: int) -> str:
        """Return the name of a shard below `data/`."""
        raise NotImplementedError

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the options of AstrAI's training script."""
        return (
            f"--train_type={choose_train_type(context.kinds)} --data_root_path={data} --window_size={context.seq_len}"
        )


def needs_loss_mask(kinds: frozenset[RowKind]) -> bool:
    """Return whether masks are written: for every domain, or for none if all datasets are text.

    If only some domains had a mask, the reader would cut it to the shorter stream, and it would shift.
    """
    return not are_running_text(kinds)


def choose_train_type(kinds: frozenset[RowKind]) -> str:
    """Return AstrAI's name for the training that these files are for."""
    return "sft" if needs_loss_mask(kinds) else "seq"


def list_array_names(kinds: frozenset[RowKind]) -> tuple[str, ...]:
    """Return the names of a shard's arrays."""
    return ("sequence", "loss_mask", "position_ids") if needs_loss_mask(kinds) else ("sequence", "position_ids")


def make_arrays(sequences: SequenceBatch) -> dict[str, Ints]:
    """Return the arrays of a chunk whose sequences are single segments, int64, concatenated."""
    return {
        "sequence": sequences.ids.astype("<i8"),
        "loss_mask": label_conventions.make_unshifted_mask(sequences.trained).astype("<i8"),
        "position_ids": sequences.position_ids.astype("<i8"),
    }


# ── Names of folders ──


def name_folders(values: Sequence[str | None]) -> list[str]:
    """Return a folder's name for each of some distinct values; None and the empty value are `__default__`.

    Names differ by more than case, none leaves its parent folder, none is longer than a file system allows. Raises
    IntegrityError if a name is not directly below its parent; that is a bug.
    """
    plain: list[str] = []
    for value in values:
        name = DEFAULT_FOLDER
        if value:
            # A lone surrogate is not valid UTF-8, but JSON can hold one.
            raw = value.encode("utf-8", "surrogatepass")
            name = _NEEDS_ESCAPE.sub(lambda match: b"%%%02X" % match.group()[0], raw).decode()
            name = name if len(name) <= MAX_NAME_CHARS else f"{name[:KEPT_OF_LONG_NAME]}-{_hash_name(value)}"
        plain.append(name)
    shared = Counter(name.lower() for name in set(plain))
    named = [
        name
        if not value or (shared[name.lower()] == 1 and name != DEFAULT_FOLDER)
        else f"{name}-{_hash_name(value)[:8]}"
        for name, value in zip(plain, values, strict=True)
    ]
    for name, value in zip(named, values, strict=True):
        if PurePosixPath("data", name).parent != PurePosixPath("data") or name in {"", ".", ".."}:
            raise IntegrityError(f"domain {value!r}: its folder {name!r} is not below data/; report this name")
    return named


def _hash_name(value: str) -> str:
    return blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class AstrAIBin(AstrAI):
    """AstrAI's raw binary files: tokens, masks and positions as int64, a folder per domain."""

    kind: Literal["astrai_bin"] = "astrai_bin"
    """AstrAI with `storage_format: bin`."""
    unit: Literal["unpacked"] = "unpacked"
    """A stream of tokens per domain."""

    def place(self, folder: str, number: int, *, count: int) -> str:
        """Return the domain's folder, or a folder in it if there are several shards."""
        return folder if count == 1 else f"{folder}/shard_{number:04d}"

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write one shard's files."""
        at = folder / "data" / job.name
        at.mkdir(parents=True)
        names, sequence = list_array_names(context.kinds), WrittenFile(f"data/{job.name}/sequence.bin")
        with ExitStack() as opened:
            sinks = {name: opened.enter_context((at / f"{name}.bin").open("wb")) for name in names}
            for chunk in chunks:
                values = make_arrays(chunk)
                for name, sink in sinks.items():
                    sink.write(values[name].tobytes())
                sequence.add(chunk, trained=int(values["loss_mask"].sum()))
        shape = {"dtype": "int64", "shape": [sequence.tokens]}
        (at / "meta.json").write_bytes(orjson.dumps(dict.fromkeys(names, shape), option=orjson.OPT_SORT_KEYS))
        beside = [*(f"{name}.bin" for name in names if name != "sequence"), "meta.json"]
        return [sequence, *(WrittenFile(f"data/{job.name}/{name}") for name in beside)]


class AstrAIH5(AstrAI):
    """AstrAI's HDF5 files: tokens, masks and positions as int64, a folder per domain."""

    NEEDS: ClassVar[tuple[str, str] | None] = ("h5py", "h5")
    # Later revisions of AstrAI do not read HDF5.
    NOTES: ClassVar[dict[str, str]] = {"reader_revision": "AstrAI 553a42702d927b09710c4bb62f5f9455fd24461b"}

    kind: Literal["astrai_h5"] = "astrai_h5"
    """AstrAI with `storage_format: h5`."""
    unit: Literal["unpacked"] = "unpacked"
    """A stream of tokens per domain."""

    def place(self, folder: str, number: int, *, count: int) -> str:
        """Return a file in the domain's folder."""
        return f"{folder}/data_{number:04d}.h5"

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        # Untyped, and optional.
        h5py: Any = import_module("h5py")
        written = WrittenFile(f"data/{job.name}")
        (folder / written.path).parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(folder / written.path, "w") as file:
            # Creation times would change the bytes of every build.
            datasets = {
                name: file.create_group(name).create_dataset(
                    "data_0", shape=(job.tokens,), dtype="<i8", track_times=False
                )
                for name in list_array_names(context.kinds)
            }
            for chunk in chunks:
                begin, values = written.tokens, make_arrays(chunk)
                written.add(chunk, trained=int(values["loss_mask"].sum()))
                for name, dataset in datasets.items():
                    dataset[begin : written.tokens] = values[name]
        return [written]
