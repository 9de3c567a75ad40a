"""The export for Megatron-LM: both pairs to the byte, and what it refuses to train."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rowmill.core.errors import ConfigError, IntegrityError
from tests.support import export_readers as readers
from tests.support.built_exports import open_built_export
from tests.support.export_cases import VECTOR, export, sequences, shape, terms, write
from tests.support.recipes import TEXT, Workspace, document

INDEX = "4d4d494449445800 00 0100000000000000 {code} 0200000000000000 0300000000000000 03000000 02000000"


def test_pairs_of_the_vector(tmp_path: Path) -> None:
    data, written = write(
        export(kind="megatron", loss_mask="companion"), sequences(VECTOR), tmp_path, name="tested", pad_id=0
    )

    assert {path.name for path in data.iterdir()} == {Path(one.path).name for one in written}
    assert (data / "tested_text_document.bin").read_bytes().hex() == "0a000b00020014000200"
    assert (data / "tested_loss_mask_document.bin").read_bytes().hex() == "0001010001"
    for what, code, second in (("text", "08", 6), ("loss_mask", "01", 3)):
        index = (data / f"tested_{what}_document.idx").read_bytes()
        assert len(index) == 82
        assert index[:42] == bytes.fromhex(INDEX.format(code=code))
        assert [int.from_bytes(index[at : at + 8], "little") for at in range(42, 82, 8)] == [0, second, 0, 1, 2]


def test_wide_vocabulary_is_stored_in_32_bits_and_documents_get_an_end(tmp_path: Path) -> None:
    rows = sequences([[([7, 65_600, 2], [0, 1, 1])]])
    data, [tokens, _] = write(export(kind="megatron"), rows, tmp_path / "wide", name="tested", vocab_size=65_601)
    assert readers.megatron(data, "tested_text_document") == [[7, 65_600, 2]]
    assert (tokens.tokens, tokens.trained_tokens) == (3, 2)
    assert not list(data.glob("*loss_mask*"))
    rows = sequences([[([10, 11], [0, 1]), ([20, 2], [0, 1])], [([2, 5], [0, 1])]])
    data, _ = write(export(kind="megatron", loss_mask="companion"), rows, tmp_path / "ends", name="tested")
    assert readers.masked_megatron(data, "tested") == [
        ((10, 11, 2), (False, True, False)),
        ((20, 2), (False, True)),
        ((2, 5, 2), (False, True, False)),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([[([10, 11, 12, 2], [0, 0, 1, 0]), ([20, 2], [0, 0])]], r"tokens without loss: 3, the first in e0#0"),
        ([[([20, 2], [0, 1]), ([10, 11], [0, 1])]], r"tokens without loss: 1, the first in e1#0; ends of documents"),
    ],
    ids=["masked", "added"],
)
def test_untrained_tokens_without_masks_are_refused_or_accepted(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        write(export(kind="megatron"), sequences(content), tmp_path / "refused")
    accepted = export(kind="megatron", accept_untrained_as_trained=True)
    data, _ = write(accepted, sequences(content), tmp_path / "accepted", name="tested")

    assert [one[0] for one in readers.megatron(data, "tested_text_document")] == [ids[0] for ids, _ in content[0]]
    assert accepted.lay_out(shape([3], [1])).notes["accept_untrained_as_trained"] is True


def test_pad_id_as_target_and_a_tokenizer_without_an_end_are_refused(tmp_path: Path) -> None:
    rows = sequences([[([20, 2], [0, 1]), ([10, 0, 2], [0, 1, 1])]])

    with pytest.raises(IntegrityError, match=r"exports\.tested: the pad id 0 is a target in e1#0"):
        write(export(kind="megatron"), rows, tmp_path / "pad", pad_id=0)
    # Megatron looks for no padding where padding is also the end of a document.
    write(export(kind="megatron"), rows, tmp_path / "same", pad_id=0, bos_id=0)
    with pytest.raises(ConfigError, match="documents end in EOD"):
        export(kind="megatron").lay_out(shape([3], [1], eos_id=None))


def test_pointer_names_the_pair_and_masks_ends_of_text_alone() -> None:
    one = export(kind="megatron", split="validation")
    text = one.pointer("/data", terms(kinds=frozenset({"text"})))
    masked = export(kind="megatron", loss_mask="companion").pointer("/data", terms())

    assert text == (
        "--valid-data-path /data/tested_text_document --seq-length 64 --dataloader-inter-document-masking "
        "--eod-mask-loss"
    )
    assert "--eod-mask-loss" not in one.pointer("/data", terms())
    assert yaml.safe_load(masked)["data"] == {
        "train_data_path": "/data/tested_text_document",
        "apply_sft_dataset_separated_loss_mask_if_existed": True,
    }


@pytest.mark.slow
def test_documents_of_a_build_are_its_examples(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    packing = {"pack_strategy": "best_fit"}
    texts = workspace.dataset("a.jsonl", [document(i) for i in range(30)], TEXT, packing=packing)
    built = workspace.recipe({"texts": texts}, exports=[{"kind": "megatron", "name": "mine"}]).build()
    exported = open_built_export(built, "mine")
    documents = readers.megatron(exported.data, "mine_text_document")
    assert sorted(documents) == sorted(one["input_ids"] for one in built.examples("texts"))
    assert all(one[-1] == exported.card["eos_id"] for one in documents)
    assert exported.card["label_convention"] == "none"
