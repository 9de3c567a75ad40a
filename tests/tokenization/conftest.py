"""The tiny byte-level tokenizer, opened as a build opens it."""

import pytest

from rowmill.tokenization.tokenizer import Encoder, LoadedTokenizer, open_tokenizer
from tests.support.recipes import write_tokenizer


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedTokenizer:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return open_tokenizer(str(folder), folder)


@pytest.fixture(scope="module")
def encoder(loaded: LoadedTokenizer) -> Encoder:
    return Encoder(loaded)
