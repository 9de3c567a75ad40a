"""Checks that ids and positions of the fast path are those of the reference, above all for SentencePiece tokenizers."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rowmill.core.storage import Store
from rowmill.tokenization.reference_sample import Stretch
from rowmill.tokenization.stored_tokenizers import read_tokenizer, write_tokenizer
from rowmill.tokenization.tokenizer import EncodedTexts, Encoder, LoadedTokenizer, open_tokenizer, wrap_tokenizer
from rowmill.tokenization.vocabulary import TokenLengths, read_token_bytes, read_token_lengths
from tests.support.tiers import draw, mark_all_but

SPACE = "\u2581"
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPEND = {"type": "Prepend", "prepend": SPACE}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}

# How tokenizers of the Llama 2 family put a space before texts: in the normalizer, before every section between added
# tokens; in the pre-tokenizer, before the text only; not at all, as Gemma.
PIPELINES: dict[str, dict[str, Any]] = {
    "before_section": {
        "normalizer": {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}, "pre_tokenizer": None, "strips": [STRIP],
    },
    "before_text": {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False},
        "strips": [STRIP],
    },
    "never": {
        "normalizer": REPLACE,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False
        },
        "strips": [],
    },
}  # fmt: skip

WORDS = ("the", "a", "in", "b", "é", "日", "本")


def _sentencepiece_json(pipeline: dict[str, Any]) -> str:
    """Return a small SentencePiece tokenizer with byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *"thainbe日本é", SPACE * 2]
    merges = [("t", "h"), ("th", "e"), (SPACE, "the"), (SPACE, "a"), (SPACE, SPACE), ("i", "n"), (SPACE, "in")]
    pieces += [left + right for left, right in merges if left + right not in pieces]
    added = [
        {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, content in enumerate(pieces[:3])
    ]  # fmt: skip
    steps = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}]
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": pipeline["normalizer"], "pre_tokenizer": pipeline["pre_tokenizer"], "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [*steps, {"type": "Fuse"}, *pipeline["strips"]]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": [list(pair) for pair in merges],
        },
    }  # fmt: skip
    return json.dumps(whole)


def _wrap_file(path: Path) -> LoadedTokenizer:
    """Open a tokenizer.json as it is written; `AutoTokenizer` writes some pipelines anew."""
    return wrap_tokenizer(PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="</s>"))


@pytest.fixture(scope="module", params=sorted(PIPELINES))
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """Return an encoder over a small SentencePiece tokenizer."""
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.json"
    path.write_text(_sentencepiece_json(PIPELINES[request.param]), encoding="utf-8")
    loaded = _wrap_file(path)
    assert loaded.card.engine == "gigatoken", loaded.card.refused
    return Encoder(loaded)


def assert_same(fast: EncodedTexts, reference: EncodedTexts) -> None:
    """Compare all that later steps read of encoded texts."""
    for name in ("offsets", "ids", "starts", "ends"):
        assert getattr(fast, name).tolist() == getattr(reference, name).tolist(), name


PIECES = st.one_of(
    st.sampled_from(
        [" ", "  ", "\n", "\t", "\0", SPACE, "<s>", "</s>", "<unk>", "<0x0A>", "e\u0301", "\u00a0", *WORDS]
    ),
    st.characters(codec="utf-8"),
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


@pytest.mark.slow
@settings(max_examples=draw(300))
@given(texts=st.lists(TEXTS, min_size=1, max_size=5))
def test_fast_path_of_sentencepiece_equals_the_reference_for_any_text(encoder: Encoder, texts: list[str]) -> None:
    reference = encoder.without_fast_path()

    fast, expected = encoder.encode(texts), reference.encode(texts)

    assert_same(fast, expected)
    assert fast.altered == expected.altered
    assert_same(encoder.encode(texts, continuation=True), reference.encode(texts, continuation=True))


def test_fast_path_of_sentencepiece_takes_plain_controlled_and_empty_texts(encoder: Encoder, tmp_path: Path) -> None:
    texts = ["the a in", "日本 龘a\n", "<s>the</s>\n<s> a</s>", "e\u0301\0", ""]
    assert encoder.encode(texts).reference_texts == 0
    assert encoder.encode([f"a{SPACE}"]).reference_texts == 1

    reference = encoder.without_fast_path()
    for empty in (encoder.encode([]), reference.encode([]), encoder.encode_pieces([""], [[]]), reference.encode([""])):
        assert [len(empty.ids), len(empty.starts), len(empty.ends), int(empty.offsets[-1])] == [0, 0, 0, 0]

    write_tokenizer(Store(str(tmp_path)), "a.json", encoder.loaded)
    stored = read_tokenizer(Store(str(tmp_path)), "a.json")
    kept = stored.token_lengths
    computed = read_token_lengths(encoder.loaded.backend, byte_level=False)
    kept_bytes, token_bytes = stored.token_bytes, read_token_bytes(encoder.loaded.backend, byte_level=False)
    assert kept_bytes is not None
    assert token_bytes is not None
    assert kept_bytes.content == token_bytes.content
    assert kept_bytes.offsets.tolist() == token_bytes.offsets.tolist()

    assert isinstance(computed, TokenLengths)
    assert kept is not None
    assert kept.prefix is computed.prefix
    assert computed.added.any()
    for name in ("lengths", "added", "partial"):
        one, other = getattr(kept, name), getattr(computed, name)
        assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())


@pytest.mark.parametrize("name", ["before_section", "before_text"])
def test_tokenizers_that_change_text_take_the_reference_path(tmp_path: Path, name: str) -> None:
    parsed = json.loads(_sentencepiece_json(PIPELINES[name]))
    parsed["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, REPLACE]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed), encoding="utf-8")
    loaded = _wrap_file(tmp_path / "tokenizer.json")

    assert (loaded.card.engine, set(loaded.card.refused)) == ("tokenizers", {"gigatoken", "fastokens"})
    assert Encoder(loaded).encode(["The"]).reference_texts == 1


def test_added_token_in_normalized_text_is_a_reason_for_the_reference_path() -> None:
    parsed = json.loads(_sentencepiece_json(PIPELINES["before_section"]))
    parsed["added_tokens"][2]["normalized"] = True
    assert read_token_lengths(json.dumps(parsed), byte_level=False) == "an added token is searched in normalized text"


SCRIPTS = (
    "Съешь ещё этих мягких французских булок, да выпей чаю. ",
    "निज भाषा उन्नति अहै, सब उन्नति को मूल। ",
    "いろはにほへと ちりぬるを 我が世誰ぞ 常ならむ。",
    "ഞാൻ മലയാളം സംസാരിക്കും ",
    "نص حكيم له سر قاطع وذو شأن عظيم ",
    "👩\u200d👩\u200d👧 🇩🇪 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ",
    "다람쥐 헌 쳇바퀴에 타고파. ",
    "ẞ ﬁ ½ Å\u030a \ufeff\u200b\u2028 \x00\x7f ",
    "แมวกินปลา ",
    "    \n\n\t  ",
)


def _read_real_texts(data: Path) -> Iterator[str]:
    """Yield chats with control tokens, documents, JSON and tables, every 24th of each file, shortened to 4,000."""
    for path in sorted(data.rglob("*")):
        if "odd_files" in path.parts:
            # What is odd about them is their encoding, among other things.
            continue
        if path.suffix in (".jsonl", ".csv", ".txt", ".jinja"):
            lines = path.read_text(encoding="utf-8").split("\n")
            yield from (line[:4000] for line in islice(lines, 0, None, 24))
        elif path.suffix == ".json" and "tokenizer" not in str(path):
            for row in orjson.loads(path.read_bytes())[::24] if path.read_bytes()[:1] == b"[" else []:
                yield orjson.dumps(row).decode()[:4000]
        elif path.suffix == ".parquet":
            yield from (str(row)[:4000] for row in pq.read_table(path).to_pylist()[::24])
    for row in orjson.loads((data / "chat/fastchat_dummy_conversation.json").read_bytes())[::2]:
        turns = [f"<|{turn['from']}|>\n{turn['value']}</s>\n" for turn in row["conversations"]]
        yield "".join(turns)
        yield "".join(turns).replace("<|", "<|im_start|>").replace("</s>", "<|im_end|>")
    yield from SCRIPTS
    yield from (one + other for one in SCRIPTS for other in SCRIPTS)


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize(
    "name", mark_all_but(["qwen3"], ["gpt2", "qwen3", "smollm3", "tinyllama", "tinyllama, as written"])
)
def test_ids_and_positions_of_real_texts_are_those_of_the_reference(real_data: Path, name: str) -> None:
    folder = real_data / "tokenizers" / name.split(",", maxsplit=1)[0]
    loaded = _wrap_file(folder / "tokenizer.json") if "," in name else open_tokenizer(str(folder), folder)
    texts = list(_read_real_texts(real_data))
    encoder = Encoder(loaded)

    encoded = encoder.encode(texts)

    assert loaded.card.engine == "gigatoken"
    assert len(texts) > 1500
    assert encoded.reference_texts < len(texts) // 5
    assert encoder.matches_reference(texts, encoded, [Stretch(i, 0, len(text)) for i, text in enumerate(texts)])
    if not loaded.card.byte_level:
        assert_same(
            encoder.encode(texts, continuation=True), encoder.without_fast_path().encode(texts, continuation=True)
        )
