"""A Hugging Face dataset as a source, through the `datasets` library: by name at a commit, or a local folder.

No dataset script is ever run: `trust_remote_code` is not offered. Rows are staged as JSON lines from the same batches,
streamed or not, so `streaming` changes speed and disk use, never a byte.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from rowmill.core.config import Config
from rowmill.core.errors import SourceError, join_choices
from rowmill.schema.rows import Split
from rowmill.sources import urls
from rowmill.sources.arrow_files import encode_batch
from rowmill.sources.files import AssetKeys, ContentStager, is_valid_scan, stage_parts
from rowmill.sources.options import Limits
from rowmill.sources.parts import FileScan, assign_split_hint, cut_rows

_BATCH_ROWS = 256


class HuggingFaceSource(Config):
    """A dataset of the Hugging Face hub, or a local folder that `datasets` can load."""

    MEANT_BY: ClassVar = ("hf", "hub", "datasets")

    kind: Literal["huggingface"] = "huggingface"
    """May be omitted if `id` is set."""

    id: str = Field(min_length=1)
    """`owner/name` on the hub, or a folder, relative to the project's; an existing folder wins."""

    name: str | None = None
    """The dataset's configuration; null if it has only one."""

    split: str = "train"
    """The split to train on."""

    validation_split: str | None = None
    """The split used for validation only; null: `validation`, if the dataset has it."""

    test_split: str | None = None
    """The split used for test only, which replaces the share `splits.test`; null: none, and the dataset's is not
    read."""

    revision: str | None = None
    """Branch, tag or commit on the hub; resolved to a commit, which is recorded."""

    streaming: bool = Field(default=True, validation_alias=AliasChoices("streaming", "stream"))
    """Read without first copying the dataset to the local cache. Does not change the bytes."""

    limits: Limits = Limits()
    """Limits on the size of a record."""

    license: str | None = Field(default=None, min_length=1)
    """Licence of the records, which `rowmill card` states: an SPDX identifier such as `apache-2.0`, a name or a URL.
    Does not change the bytes."""

    tags: list[str] = Field(default=[])
    """Names under which the dataset's evaluation is grouped; the dataset's name is always added."""

    after: AssetKeys = Field(default=[])
    """Keys of assets in your own Dagster project that write this source, such as `raw/conversations`: the dataset then
    depends on them, and its sensor follows them instead of the files. Does not change the bytes."""

    def list_validation_options(self) -> tuple[str, ...]:
        """Return the option that names rows for validation, if it is set."""
        return ("validation_split",) if self.validation_split else ()


def scan_dataset(
    source: HuggingFaceSource,
    base: Path,
    stager: ContentStager,
    earlier_scans: Mapping[str, FileScan],
    *,
    keeps_non_finite: bool = False,
    first_records: int | None = None,
) -> list[FileScan]:
    """Read each split once and return its parts; a split whose commit or files are unchanged is not read.

    With `first_records`, read no more of each split than that.
    """
    path, revision, stamp = _pin_dataset(source, base)
    earlier, asked = _find_earlier_scans(source, stamp, earlier_scans, base), {"keeps_non_finite": keeps_non_finite}
    if earlier is not None and all(scan.asked == asked for scan in earlier):
        return earlier
    import datasets

    limit = source.limits.max_record_bytes
    scans: list[FileScan] = []
    try:
        available = datasets.get_dataset_split_names(path, source.name, revision=revision)
    except _list_load_errors() as error:
        raise _unloadable_error(source, error) from error
    for split, hint in _choose_splits(source, available):
        # Streaming reads the first rows without preparing the whole split; a slice such as `train[:10%]` cannot stream.
        streams = source.streaming or (first_records is not None and re.search(r"[\[+]", split) is None)
        try:
            dataset: Any = datasets.load_dataset(path, source.name, split=split, revision=revision, streaming=streams)
        except _list_load_errors() as error:
            raise _unloadable_error(source, error) from error
        columns = {name: str(feature) for name, feature in (dataset.features or {}).items()}
        scan = FileScan(
            _make_split_url(source, split), hint, "huggingface", stamp, 0, (), columns, revision,
            max_record_bytes=limit, asked=asked,
        )  # fmt: skip
        rows = _encode_dataset_rows(source, dataset, keeps_non_finite)
        parts = stage_parts(cut_rows(islice(rows, first_records), limit), scan, stager, is_staged=True, is_arrow=True)
        scans.append(replace(scan, parts=parts, records=sum(part.records for part in parts)))
    return scans


def _pin_dataset(source: HuggingFaceSource, base: Path) -> tuple[str, str | None, str]:
    """Return what to load, its commit on the hub, and a stamp of its content.

    Without an answer of the hub there is no commit: the local cache may still have the dataset.
    """
    folder = base / source.id
    if folder.is_dir():
        files = (Path(path) for path in sorted(urls.walk_files(str(folder))))
        facts = ((path, path.stat()) for path in files if path.is_file())
        listing = [
            f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
            for path, status in facts
        ]
        return str(folder), None, hashlib.sha256("\n".join(listing).encode()).hexdigest()[:32]
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        commit = HfApi().dataset_info(source.id, revision=source.revision, timeout=10.0).sha
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise _unloadable_error(source, error) from error
    # Network failures have many types; the following load reports one if it matters.
    except Exception:  # noqa: BLE001
        commit = None
    return source.id, commit or source.revision, commit or ""


def _make_split_url(source: HuggingFaceSource, split: str) -> str:
    return f"huggingface:{source.id}/{source.name or 'default'}/{split}"


def _find_earlier_scans(
    source: HuggingFaceSource, stamp: str, earlier_scans: Mapping[str, FileScan], base: Path
) -> list[FileScan] | None:
    """Return the known scans of the splits if they are still valid, without listing the splits again."""
    scans: dict[str, FileScan] = {}
    for name in filter(None, (source.split, source.validation_split or "validation", source.test_split)):
        scan = earlier_scans.get(_make_split_url(source, name))
        if scan is not None and is_valid_scan(scan, stamp, source.limits, base):
            scans[name] = scan
    # Scanned at this same state of the dataset, so its splits are known.
    train = scans.get(source.split)
    if train is None:
        return None
    chosen = _choose_splits(
        source, [source.split, *(["validation"] if train.split_hint in ("train", "validation") else [])], known=True
    )
    known = [scans.get(name) for name, hint in chosen]
    if any(scan is None for scan in known):
        return None
    return [assign_split_hint(scan, hint) for scan, (_, hint) in zip(known, chosen, strict=True) if scan is not None]


def _choose_splits(
    source: HuggingFaceSource, available: list[str], *, known: bool = False
) -> list[tuple[str, Split | None]]:
    """Return the splits that are read, with their hints; one that is missing is an error unless all are `known`."""
    validation = source.validation_split
    if validation is None and "validation" in available and source.split != "validation":
        validation = "validation"
    for split in () if known else (source.split, validation, source.test_split):
        # `train[:10%]` is a slice of the split `train`.
        if split is not None and re.split(r"[\[+]", split)[0] not in available:
            raise SourceError(
                f"{source.id}: has no split {split!r}; it has {join_choices(available)}; name one of them in split, "
                "validation_split or test_split"
            )
    chosen: list[tuple[str, Split | None]] = [(source.split, None if validation is None else "train")]
    if validation is not None:
        chosen.append((validation, "validation"))
    if source.test_split is not None:
        chosen.append((source.test_split, "test"))
    names = [name for name, _ in chosen]
    if len(set(names)) < len(names):
        raise SourceError(
            f"{source.id}: split, validation_split and test_split are {', '.join(names)}; each must be another, since "
            "a row of two splits would train and be held out; correct one of them"
        )
    return chosen


def _encode_dataset_rows(source: HuggingFaceSource, dataset: Any, keeps_non_finite: bool) -> Iterator[bytes]:
    batches = iter(dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS))
    done = 0
    while True:
        try:
            batch = next(batches, None)
        except _list_load_errors() as error:
            raise _unloadable_error(source, error, after=f" after {done:,} rows") from error
        if batch is None:
            return
        yield from encode_batch(batch, keeps_non_finite=keeps_non_finite)
        done += batch.num_rows


def _list_load_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that the library raises for a missing, unreachable or damaged dataset."""
    from datasets.exceptions import DatasetsError

    return (DatasetsError, OSError, ValueError, RuntimeError)


def _unloadable_error(source: HuggingFaceSource, error: Exception, after: str = "") -> SourceError:
    why = " ".join(str(error).split())
    return SourceError(
        f"{source.id}: the datasets library cannot load it{after} ({type(error).__name__}: {why}); expected a dataset "
        "of the hub at an existing revision, or a folder of data files; check id, name, revision and the network"
    )
