"""The class that verl loads: rows of an export as verl's collator takes them, or an error before training."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import ConfigError, IntegrityError
from rowmill.exports.verl_dataset import TokenizedDataset
from tests.repository.test_base_install import BASE, ONLY_BASE
from tests.repository.test_public_api import run_python
from tests.support.built_exports import open_built_export
from tests.support.recipes import Built, Workspace, chat


class _Tokenizer:
    """What verl hands over, as far as the class looks at it."""

    def __init__(self, folder: Path | str) -> None:
        self.name_or_path = str(folder)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    workspace = Workspace(tmp_path_factory.mktemp("verl"))
    chats = workspace.dataset("a.jsonl", [chat(i, turns=1 + i % 3) for i in range(30)])
    exports = [{"kind": "verl", "name": "rows", "shard_sequences": 2}, {"kind": "skyrl", "name": "other"}]
    return workspace.recipe({"chats": chats}, exports=exports).build()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the cache of `datasets` in the test's own folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _open(built: Built, files: Any = None, **config: Any) -> TokenizedDataset:
    data = open_built_export(built, "rows").data
    return TokenizedDataset(
        files or str(data), _Tokenizer(built.project.base / "tokenizer"), {"pad_mode": "no_padding", **config}
    )


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_rows_are_the_examples_of_the_build(built: Built) -> None:
    rows = _open(built, max_length=256)
    found = [rows.get_arrays(i) for i in range(len(rows))]
    expected = [(tuple(one["input_ids"]), tuple(one["loss_mask"])) for one in built.examples("chats")]
    assert Counter((tuple(one["input_ids"]), tuple(one["loss_mask"])) for one in found) == Counter(expected)
    for one in found:
        assert one["position_ids"].tolist() == list(range(len(one["input_ids"])))
        assert {str(values.dtype) for values in one.values()} == {"int64"}
        assert one["loss_mask"][0] == 0


@pytest.mark.usefixtures("cache")
def test_files_may_be_a_folder_a_pattern_or_a_list(built: Built) -> None:
    data = open_built_export(built, "rows").data
    parts = sorted(map(str, data.glob("*.parquet")))
    lengths = [len(_open(built, files)) for files in (str(data), f"{data}/*.parquet", parts)]

    assert len(parts) > 1
    assert lengths == [30, 30, 30]
    one = TokenizedDataset(parts, _Tokenizer("some/model"), {}, max_samples=4)
    assert len(one) == 4
    assert len(TokenizedDataset(parts, _Tokenizer("some/model"), {}, max_samples=0)) == 30
    assert one.get_arrays(3)["input_ids"].tolist() == _open(built).get_arrays(3)["input_ids"].tolist()


@pytest.mark.usefixtures("cache")
def test_tensors_are_those_that_the_collator_joins(built: Built) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; rows are checked as arrays")
    rows = _open(built)
    batch = torch.nested.as_nested_tensor([rows[i]["loss_mask"] for i in range(3)], layout=torch.jagged)

    assert batch.dtype == torch.int64
    assert batch.offsets().diff().tolist() == [len(rows[i]["input_ids"]) for i in range(3)]


@pytest.mark.usefixtures("cache")
def test_longest_row_may_be_as_long_as_the_limit(built: Built) -> None:
    longest = max(len(one["input_ids"]) for one in built.examples("chats"))
    assert len(_open(built, max_length=longest)) == 30
    refusal = rf"data\.max_length: {longest - 1}, but .* has a row of \d+ tokens; .* set data\.max_length={longest}"
    with pytest.raises(ConfigError, match=refusal):
        _open(built, max_length=longest - 1)


@pytest.mark.usefixtures("cache")
def test_padding_that_would_change_rows_is_refused(built: Built) -> None:
    with pytest.raises(ConfigError, match=r"data\.pad_mode: right; .* only no_padding is possible"):
        _open(built, pad_mode="right")


def test_other_padding_files_and_tokenizers_are_refused(built: Built, tmp_path: Path) -> None:
    shutil.copytree(open_built_export(built, "rows").folder, tmp_path / "copy")
    (tmp_path / "copy/manifest.json").unlink()

    with pytest.raises(ConfigError, match="no Parquet file at"):
        _open(built, str(tmp_path / "nothing"))
    with pytest.raises(IntegrityError, match=r"no manifest\.json"):
        _open(built, str(tmp_path / "copy/data"))
    with pytest.raises(IntegrityError, match="its format is skyrl, not verl"):
        _open(built, str(open_built_export(built, "other").data))
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(IntegrityError, match=r"tokenizer\.json: SHA-256 44136fa355b3678a…; .* was made with"):
        TokenizedDataset(str(open_built_export(built, "rows").data), _Tokenizer(tmp_path), {})


@pytest.mark.slow
def test_module_needs_little_beside_the_base_install() -> None:
    brought = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "yaml")
    code = ONLY_BASE.replace(repr(BASE), repr((*BASE, *brought)))
    assert run_python(f"{code}import rowmill.exports.verl_dataset\nprint('torch' in sys.modules)") == "False"
