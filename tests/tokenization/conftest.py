"""The tiny byte-level tokenizer, opened as a build opens it."""

import pytest

from rowmill.tokenization.encoder import Encoder
from rowmill.tokenization.tokenizer import open_tokenizer
from rowmill.tokenization.tokenizer_card import LoadedTokenizer
from tests.support.recipes import write_tokenizer


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedTokenizer:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return open_tokenizer(str(folder), folder)


@pytest.fixture(scope="module")
def encoder(loaded: LoadedTokenizer) -> Encoder:
    return Encoder(loaded)
