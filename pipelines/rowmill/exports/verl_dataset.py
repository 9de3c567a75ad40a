"""The class with which verl's trainer of supervised fine-tuning reads the export `verl`.

    data.custom_cls.path=pkg://rowmill.exports.verl_dataset   data.custom_cls.name=TokenizedDataset

verl's own class renders and encodes each message alone, and fails where that differs from the whole conversation. Here
nothing is rendered. The module imports neither torch nor `datasets`, which opening and reading rows need.
"""

from collections.abc import Iterable
from glob import glob
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rowmill.core.errors import ConfigError, IntegrityError
from rowmill.exports.base import open_export

PAD_MODE = "no_padding"
_COLUMNS = ("input_ids", "loss_mask")


class TokenizedDataset:
    """Rows of an export of kind `verl`, as verl's `SFTTensorCollator` takes them.

    `parquet_files` are the export's `data` folder, or files in it. `tokenizer` is the model's: if it was opened from a
    folder, its tokenizer.json must be that of the export. `config` is verl's group `data`, of which `pad_mode` and
    `max_length` are read. `max_samples` above 0 takes the first rows.

    A row is `input_ids`, `position_ids` and `loss_mask`, int64[T]; the mask is 1 where the token itself is a target,
    and never at the first, since verl shifts it. Raises ConfigError if there are no such files, rows are longer than
    `max_length`, or `pad_mode` is another one. Raises IntegrityError if the export is incomplete, of another kind, or
    was made with another tokenizer.
    """

    def __init__(
        self,
        parquet_files: str | Iterable[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        if config.get("pad_mode", PAD_MODE) != PAD_MODE:
            raise ConfigError(
                f"data.pad_mode: {config.get('pad_mode')}; rows of rowmill are not padded, and verl joins them; only "
                f"{PAD_MODE} is possible; set data.pad_mode={PAD_MODE}"
            )
        files = _list_files([parquet_files] if isinstance(parquet_files, str) else [*parquet_files])
        for folder in dict.fromkeys(file.parent for file in files):
            card: Any = open_export(folder, kind="verl").card
            # The tokenizer of a name on the hub cannot be compared.
            file = Path(str(getattr(tokenizer, "name_or_path", ""))) / "tokenizer.json"
            expected = card["tokenizer_files"].get(file.name)
            if expected is not None and file.is_file():
                digest = sha256(file.read_bytes()).hexdigest()
                if digest != expected:
                    raise IntegrityError(
                        f"{file}: SHA-256 {digest[:16]}…; {folder.parent} was made with a file of {expected[:16]}…; "
                        "train a model with that tokenizer, or export with this one"
                    )
        import datasets

        rows = datasets.load_dataset("parquet", data_files=[str(file) for file in files], split="train")
        rows = rows.select(range(min(max_samples, len(rows)))) if max_samples > 0 else rows
        limit = config.get("max_length", None)
        chunks = rows.data.column("input_ids").chunks
        longest = max((int(pc.max(pc.list_value_length(chunk)).as_py() or 0) for chunk in chunks), default=0)
        # verl would cut or fail at longer rows.
        if limit is not None and longest > limit:
            raise ConfigError(
                f"data.max_length: {limit}, but {files[0].parent.parent} has a row of {longest} tokens; no row may be "
                f"longer, since nothing is cut here; set data.max_length={longest}, or build with a smaller seq_len"
            )
        self._rows = rows.select_columns(list(_COLUMNS)).with_format("numpy")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """Return a row as tensors."""
        torch: Any = import_module("torch")
        return {name: torch.from_numpy(values) for name, values in self.get_arrays(i).items()}

    def get_arrays(self, i: int) -> "dict[str, np.ndarray[Any, np.dtype[np.int64]]]":
        """Return a row as arrays of int64."""
        row = self._rows[int(i)]
        ids, mask = (row[name].astype(np.int64) for name in _COLUMNS)
        return {"input_ids": ids, "position_ids": np.arange(len(ids)), "loss_mask": mask}


def _list_files(paths: Iterable[str]) -> list[Path]:
    """Return the Parquet files of folders, patterns and paths, in order."""
    files: list[Path] = []
    for path in paths:
        at = Path(path)
        matches = (
            sorted(at.glob("*.parquet")) if at.is_dir() else [at] if at.is_file() else sorted(map(Path, glob(path)))
        )
        if not matches:
            raise ConfigError(
                f"data.train_files: no Parquet file at {path}; the folder data of an export of kind verl holds some; "
                "correct the path"
            )
        files += matches
    return files
