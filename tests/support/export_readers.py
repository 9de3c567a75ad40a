"""Readers of every export's files that share no code with the writers: from the formats' descriptions, or libraries.

Parquet is read with Polars, which has a Parquet reader of its own; the writers use Arrow's.
"""

import csv
import gzip
import json
import struct
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import polars as pl

Segment: TypeAlias = tuple[tuple[int, ...], tuple[bool, ...]]
"""A segment's ids, and for each whether it is a target."""


def parts(data: Path, pattern: str) -> list[Path]:
    found = sorted(data.glob(pattern))
    assert found, f"no {pattern} in {data}"
    return found


def rows(data: Path) -> list[dict[str, Any]]:
    """Return the rows of Parquet files."""
    return [row for path in parts(data, "*.parquet") for row in pl.read_parquet(path).to_dicts()]


def cut(values: Sequence[Any], lengths: Sequence[int]) -> Iterator[list[Any]]:
    """Split a list into pieces of these lengths, which must add up to it."""
    ends = [0, *np.cumsum(lengths).tolist()]
    assert ends[-1] == len(values)
    return (list(values[begin:end]) for begin, end in pairwise(ends))


# ── Letter A ──
def by_labels(ids: Sequence[int], labels: Sequence[int]) -> Segment:
    assert len(ids) == len(labels)
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    return tuple(ids), tuple(label != -100 for label in labels)


def packed(found: Sequence[dict[str, Any]]) -> list[list[Segment]]:
    """Return the segments of each row that has `seq_lengths`."""
    columns = [[cut(row[name], row["seq_lengths"]) for name in ("input_ids", "labels")] for row in found]
    return [[by_labels(ids, labels) for ids, labels in zip(*row, strict=True)] for row in columns]


def unpacked(found: Sequence[dict[str, Any]]) -> list[Segment]:
    for row in found:
        assert set(row) == {"input_ids", "attention_mask", "labels"}
        assert row["attention_mask"] == [1] * len(row["input_ids"])
    return [by_labels(row["input_ids"], row["labels"]) for row in found]


def json_rows(data: Path) -> list[dict[str, Any]]:
    """Return the rows of JSON Lines."""
    texts = [path.read_text(encoding="utf-8") for path in parts(data, "*.jsonl")]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def saved(data: Path, split: str) -> list[dict[str, Any]]:
    """Return the rows of a `DatasetDict` on disk, read as the Arrow streams that it consists of."""
    assert json.loads((data / "dataset_dict.json").read_text(encoding="utf-8")) == {"splits": [split]}
    names = json.loads((data / split / "state.json").read_text(encoding="utf-8"))["_data_files"]
    return [row for one in names for row in pl.read_ipc_stream(data / split / one["filename"]).to_dicts()]


def llama_factory(found: Sequence[dict[str, Any]], prefix: str = "") -> list[Segment]:
    """Return the rows of LLaMA-Factory's three columns, which are not padded; there are no media."""
    assert all(row[name] is None for row in found for name in ("images", "videos", "audios"))
    for row in found:
        assert row[f"{prefix}attention_mask"] == [1] * len(row[f"{prefix}input_ids"])
    return [by_labels(row[f"{prefix}input_ids"], row[f"{prefix}labels"]) for row in found]


def llama_factory_packed(found: Sequence[dict[str, Any]]) -> list[list[Segment]]:
    """Return the segments of LLaMA-Factory's packed rows, which are numbered from 1 and padded to one width."""
    assert len({len(row["input_ids"]) for row in found}) == 1
    segments: list[list[Segment]] = []
    for row in found:
        width, params = len(row["input_ids"]), row["packing_params"]
        borders = params["sequence_boundaries"]
        assert (borders[0], borders[-1]) == (0, width)
        assert borders[-1] - borders[-2] == params["right_padding_length"] > 0
        assert all(params[f"{name}_subseq_ids"] == [2**32] for name in ("image", "video", "audio"))
        sizes = [end - first for first, end in pairwise(borders)]
        numbers = [i for i, size in enumerate(sizes[:-1], 1) for _ in range(size)]
        padding = [0] * sizes[-1]
        assert row["attention_mask"] == numbers + padding
        assert row["position_ids"] == [i for size in sizes[:-1] for i in range(size)] + padding
        *ids, _ = cut(row["input_ids"], sizes)
        *labels, last = cut(row["labels"], sizes)
        assert set(last) == {-100}
        segments.append([by_labels(*one) for one in zip(ids, labels, strict=True)])
    return segments


# ── Letter B ──
def datums(data: Path) -> list[Segment]:
    """Return the segments of lines in tinker's wire shape; weights are 0 or 1."""
    found: list[Segment] = []
    for line in json_rows(data):
        assert set(line) == {"model_input", "loss_fn_inputs"}
        [chunk] = line["model_input"]["chunks"]
        assert (set(chunk), chunk["type"]) == ({"type", "tokens"}, "encoded_text")
        targets, weights = line["loss_fn_inputs"]["target_tokens"], line["loss_fn_inputs"]["weights"]
        assert (targets["dtype"], weights["dtype"]) == ("int64", "float32")
        assert targets["shape"] == weights["shape"] == [len(chunk["tokens"])] == [len(targets["data"])]
        assert chunk["tokens"][1:] == targets["data"][:-1]
        ids = [*chunk["tokens"], targets["data"][-1]]
        found.append((tuple(ids), (False, *(weight > 0 for weight in weights["data"]))))
    return found


# ── Letter C ──
def bridge(data: Path) -> list[list[Segment]]:
    """Return the segments of each row of Megatron-Bridge's packed Parquet, the mask rolled back."""
    found: list[list[Segment]] = []
    for row in (row for path in parts(data, "*.idx.parquet") for row in pl.read_parquet(path).to_dicts()):
        starts = row["seq_start_id"]
        assert starts[0] == 0
        assert all(first < last for first, last in pairwise([*starts, len(row["input_ids"])]))
        lengths = [last - first for first, last in pairwise([*starts, len(row["input_ids"])])]
        masks = list(cut(row["loss_mask"], lengths))
        assert all(mask[-1] == 0 for mask in masks)
        ids = cut(row["input_ids"], lengths)
        found.append([(tuple(i), (False, *(bool(m) for m in mask[:-1]))) for i, mask in zip(ids, masks, strict=True)])
    return found


# ── Letter D ──
def masked(found: Sequence[dict[str, Any]]) -> list[Segment]:
    """Return rows of ids and a mask of zeros and ones."""
    for row in found:
        assert set(row) == {"input_ids", "loss_mask"}
        assert set(row["loss_mask"]) <= {0, 1}
        assert len(row["loss_mask"]) == len(row["input_ids"])
    return [(tuple(row["input_ids"]), tuple(map(bool, row["loss_mask"]))) for row in found]


def astrai_bin(data: Path) -> dict[str, list[Segment]]:
    """Return the segments of each of AstrAI's folders, shards in the order of their names."""
    found: dict[str, list[Segment]] = {}
    for meta in sorted(data.rglob("meta.json")):
        shape = json.loads(meta.read_text(encoding="utf-8"))
        arrays = {key: np.fromfile(meta.parent / f"{key}.bin", "<i8") for key in shape}
        assert {key: {"dtype": "int64", "shape": [len(one)]} for key, one in arrays.items()} == shape
        found.setdefault(meta.parent.relative_to(data).parts[0], []).extend(_by_positions(arrays))
    return found


def astrai_h5(data: Path) -> dict[str, list[Segment]]:
    """Return the same of HDF5 files, as h5py reads them."""
    h5py: Any = import_module("h5py")
    found: dict[str, list[Segment]] = {}
    for path in sorted(data.rglob("*.h5")):
        with h5py.File(path) as file:
            assert {tuple(group) for group in file.values()} == {("data_0",)}
            assert {group["data_0"].dtype.str for group in file.values()} == {"<i8"}
            arrays = {name: group["data_0"][:] for name, group in file.items()}
        found.setdefault(path.parent.relative_to(data).as_posix(), []).extend(_by_positions(arrays))
    return found


def _by_positions(arrays: dict[str, Any]) -> Iterator[Segment]:
    """Split a stream where positions restart; without a mask everything trains."""
    ids, positions = arrays["sequence"].tolist(), arrays["position_ids"].tolist()
    mask = arrays.get("loss_mask", np.ones(len(ids), np.int64)).tolist()
    assert set(arrays) - {"loss_mask"} == {"sequence", "position_ids"}
    assert set(mask) <= {0, 1}
    begins = [i for i, position in enumerate(positions) if position == 0]
    for first, last in pairwise([*begins, len(ids)]):
        assert positions[first:last] == list(range(last - first))
        yield tuple(ids[first:last]), tuple(bool(one) for one in mask[first:last])


def astrai_sft_windows(data: Path, window: int) -> list[dict[str, Any]]:
    """Return what AstrAI's train type `sft` hands its model: windows of the stream that all folders make together.

    Inputs and positions of a window are those of its tokens, targets and their mask those of the following ones.
    `document` numbers the documents that attention keeps apart: another one begins where a position is not above the
    one before it.
    """
    streams: dict[str, list[Any]] = {}
    for meta in sorted(data.rglob("meta.json")):
        for key, said in json.loads(meta.read_text(encoding="utf-8")).items():
            values = np.memmap(meta.parent / f"{key}.bin", said["dtype"], "r", shape=tuple(said["shape"]))
            streams.setdefault(key, []).append(values)
    missing = {"sequence", "loss_mask", "position_ids"} - set(streams)
    if missing:
        raise KeyError(*missing)
    joined = {key: np.concatenate(parts) for key, parts in streams.items()}
    total = min(map(len, joined.values()))
    found: list[dict[str, Any]] = []
    for begin in range(0, total - window, window):
        here, following = slice(begin, begin + window), slice(begin + 1, begin + window + 1)
        positions = joined["position_ids"][here]
        begins = np.diff(positions, prepend=positions[0] - 1) <= 0
        found.append(
            {
                "begin": begin,
                "input_ids": joined["sequence"][here],
                "target_ids": joined["sequence"][following],
                "loss_mask": joined["loss_mask"][following].astype(bool),
                "document": np.cumsum(begins),
            }
        )
    return found


def olmo(data: Path, dtype: str) -> list[Segment]:
    """Return the segments of OLMo-core's arrays by their boundary files."""
    found: list[Segment] = []
    for path in parts(data, "token_ids_part_*.npy"):
        ids = np.fromfile(path, dtype)
        mask = np.fromfile(path.with_name(path.name.replace("token_ids", "labels_mask")), "u1")
        assert set(mask.tolist()) <= {0, 1}
        assert len(mask) == len(ids)
        with gzip.open(path.with_suffix(".csv.gz"), "rt", encoding="ascii") as text:
            borders = [(int(first), int(last)) for first, last in csv.reader(text)]
        assert [first for first, _ in borders] == [0, *(last for _, last in borders[:-1])]
        assert borders[-1][1] == len(ids)
        found += [(tuple(ids[a:b].tolist()), tuple(bool(m) for m in mask[a:b])) for a, b in borders]
    return found


def megatron(data: Path, stem: str) -> list[list[int]]:
    """Return the documents of a pair of Megatron's indexed dataset; each is one sequence."""
    raw, index = (data / f"{stem}.bin").read_bytes(), (data / f"{stem}.idx").read_bytes()
    assert index[:17] == b"MMIDIDX\0\0" + struct.pack("<Q", 1)
    code, count, borders = struct.unpack_from("<BQQ", index, 17)
    assert borders == count + 1
    lengths = np.frombuffer(index, "<i4", count, 34)
    offsets = np.frombuffer(index, "<i8", count, 34 + 4 * count)
    assert np.frombuffer(index, "<i8", offset=34 + 12 * count).tolist() == list(range(count + 1))
    dtype = np.dtype({1: "u1", 4: "<i4", 8: "<u2"}[code])
    assert len(raw) == int(lengths.sum()) * dtype.itemsize
    places = zip(lengths.tolist(), offsets.tolist(), strict=True)
    return [np.frombuffer(raw, dtype, length, at).tolist() for length, at in places]


def masked_megatron(data: Path, name: str) -> list[Segment]:
    """Return documents with the masks of their companion."""
    ids, masks = (megatron(data, f"{name}_{what}_document") for what in ("text", "loss_mask"))
    return [(tuple(one), tuple(map(bool, mask))) for one, mask in zip(ids, masks, strict=True)]


# ── MDS ──
def mds(data: Path) -> list[dict[str, Any]]:
    """Return the samples of MDS shards, decoded from their bytes.

    A shard is uint32 N, uint32[N + 1] absolute offsets, the JSON of its columns, the samples; a sample is a uint32
    size per column of variable length, in the order of names, then the values.
    """
    index = json.loads((data / "index.json").read_text(encoding="utf-8"))
    assert index["version"] == 2
    found: list[dict[str, Any]] = []
    for shard in index["shards"]:
        assert (shard["compression"], shard["hashes"], shard["version"]) == (None, ["sha256"], 2)
        raw = (data / shard["raw_data"]["basename"]).read_bytes()
        assert len(raw) == shard["raw_data"]["bytes"]
        [count] = struct.unpack_from("<I", raw)
        assert count == shard["samples"]
        offsets = struct.unpack_from(f"<{count + 1}I", raw, 4)
        assert offsets[-1] == len(raw)
        found += [_sample(raw[begin:end], shard) for begin, end in pairwise(offsets)]
    return found


def _sample(raw: bytes, shard: dict[str, Any]) -> dict[str, Any]:
    columns = list(zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True))
    assert shard["column_names"] == sorted(shard["column_names"])
    at, sizes = 0, {}
    for name, _, size in columns:
        if size is None:
            [sizes[name]] = struct.unpack_from("<I", raw, at)
            at += 4
    values: dict[str, Any] = {}
    for name, encoding, size in columns:
        piece = raw[at : at + (sizes[name] if size is None else size)]
        at += len(piece)
        values[name] = _value(piece, encoding)
    assert at == len(raw)
    return values


def _value(piece: bytes, encoding: str) -> Any:
    if encoding == "json":
        return json.loads(piece)
    return struct.unpack("<q", piece)[0] if encoding == "int" else _array(piece, encoding)


def llm_foundry(samples: Sequence[dict[str, Any]], eos: int | None) -> list[Segment]:
    """Return what LLM Foundry's finetuning loader makes of samples, with `target_responses: all`.

    A sample without turns is one turn. Turns are joined, contexts without loss and responses with it; an EOS is put
    after a last response that does not end in one. Each example's labels are unshifted.
    """
    found: list[Segment] = []
    for sample in samples:
        joined = sample.get("turns") or [sample]
        if eos is not None and joined[-1]["labels"][-1] != eos:
            joined = [*joined[:-1], joined[-1] | {"labels": [*joined[-1]["labels"], eos]}]
        ids = [token for turn in joined for token in [*turn["input_ids"], *turn["labels"]]]
        masks = [[False] * len(turn["input_ids"]) + [True] * len(turn["labels"]) for turn in joined]
        found.append((tuple(ids), tuple(one for mask in masks for one in mask)))
    return found


def _array(raw: bytes, encoding: str) -> list[Any]:
    kind, dtype = encoding.split(":")
    assert kind == "ndarray"
    dimensions, width = divmod(raw[0], 4)
    assert dimensions == 1
    size = np.dtype(("u1", "<u2", "<u4")[width])
    [length] = np.frombuffer(raw, size, 1, 1).tolist()
    values = np.frombuffer(raw, np.dtype(dtype).newbyteorder("<"), offset=1 + size.itemsize)
    assert len(values) == length
    return values.tolist()
