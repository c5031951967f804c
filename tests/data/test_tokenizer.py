"""Tokenizers: round trips, streaming, and what is refused."""

import pickle
from pathlib import Path

import pytest

from megalith.config.data import TokenizerConfig
from megalith.data.huggingface import train_bpe
from megalith.data.tokenizer import (
    ByteTokenizer,
    NullTokenizer,
    StreamDecoder,
    Tokenizer,
    appends_eod,
    build_tokenizer,
)
from megalith.errors import ConfigError, DataError

TEXTS = ["", "plain", "zwei Wörter", "日本語 🧱 text\r\n\ttab", "\x00\x7f", "a" * 300]


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "byte":
        return ByteTokenizer()
    return train_bpe(TEXTS * 3, vocab_size=290, path=str(tmp_path / "bpe"))


def test_any_text_round_trips(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS


def test_batches_equal_single_texts(tokenizer: Tokenizer) -> None:
    single = [tokenizer.encode(text) for text in TEXTS]
    ids, lengths = tokenizer.encode_joined(TEXTS)
    assert tokenizer.encode_batch(TEXTS) == single
    assert ids.tolist() == [token for each in single for token in each]
    assert lengths.tolist() == [len(each) for each in single]
    assert ids.dtype.name == "int64" and lengths.dtype.name == "int32"
    assert tokenizer.encode_joined([])[0].tolist() == []


def test_ids_stay_below_the_vocabulary_and_the_end_token_has_no_text(tokenizer: Tokenizer) -> None:
    assert max(max(tokenizer.encode(text), default=0) for text in TEXTS) < tokenizer.vocab_size
    assert tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.eod]) == "ab"
    assert not appends_eod(tokenizer)


def test_streamed_text_comes_in_whole_characters_and_is_complete(tokenizer: Tokenizer) -> None:
    text = "Grüße 日本 🧱!"
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(token) for token in [*tokenizer.encode(text), tokenizer.eod]]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_shown_at_the_end_only() -> None:
    stream = StreamDecoder(ByteTokenizer())
    assert [stream.push(token) for token in "é".encode()[:1] + b"x" + "🧱".encode()[:2]] == [
        "",
        "\ufffdx",
        "",
        "",
    ]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_the_null_tokenizer_reads_numbers() -> None:
    tokenizer = NullTokenizer(100)
    assert tokenizer.encode("3 14 99") == [3, 14, 99]
    assert tokenizer.decode([3, 14, 99]) == "3 14"
    assert (tokenizer.eod, tokenizer.vocab_size) == (99, 100)
    assert tokenizer.encode_joined(["1 2", ""])[1].tolist() == [2, 0]
    assert not appends_eod(tokenizer)
    for word in ("100", "-1", "x", "²"):
        with pytest.raises(DataError, match=rf"{word}' is not an id\. Use numbers from 0 to 99"):
            tokenizer.encode(word)


def test_the_config_chooses_the_tokenizer(tmp_path: Path) -> None:
    path = str(tmp_path / "bpe")
    train_bpe(TEXTS, vocab_size=300, path=path)
    assert isinstance(build_tokenizer(TokenizerConfig()), ByteTokenizer)
    assert build_tokenizer(TokenizerConfig(kind="null", vocab_size=7)).vocab_size == 7
    assert build_tokenizer(TokenizerConfig(kind="huggingface", path=path)).vocab_size <= 300
    with pytest.raises(ConfigError, match=r"tokenizer\.kind=huggingface needs tokenizer\.path"):
        build_tokenizer(TokenizerConfig(kind="huggingface"))


def test_fingerprints_differ_between_tokenizers_and_survive_pickling(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = train_bpe(TEXTS, vocab_size=270, path=str(tmp_path / "other"))
    assert tokenizer.fingerprint != other.fingerprint != NullTokenizer(5).fingerprint
    assert pickle.loads(pickle.dumps(tokenizer)).fingerprint == tokenizer.fingerprint
