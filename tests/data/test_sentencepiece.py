"""SentencePiece models: the library's own ids, first tokens, ends, and errors that name the
file."""

import pickle
import sys
from pathlib import Path

import pytest

from megalith.config.data import TokenizerConfig
from megalith.data.tokenizer import StreamDecoder, build_tokenizer
from megalith.data.tokenizer_formats import SentencePieceTokenizer, is_sentencepiece
from megalith.errors import DataError

library = pytest.importorskip(
    "sentencepiece", reason="reads SentencePiece models, which needs the library"
)
TEXT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-pair model of 300 pieces, as Llama 2's is made."""
    made = tmp_path_factory.mktemp("model")
    (made / "text").write_text("\n".join(TEXT[n:] for n in range(40)) * 4)
    library.SentencePieceTrainer.train(
        input=str(made / "text"),
        model_prefix=str(made / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return made


def test_ids_equal_those_of_the_library_after_the_first_token(folder: Path) -> None:
    tokenizer = SentencePieceTokenizer(str(folder))
    theirs = library.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert tokenizer.encode(TEXT) == [theirs.bos_id(), *theirs.encode(TEXT)]
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (
        300,
        theirs.bos_id(),
        theirs.eos_id(),
    )
    plain = SentencePieceTokenizer(str(folder / "tokenizer.model"), add_special_tokens=False)
    assert plain.encode(TEXT) == theirs.encode(TEXT) and plain.fingerprint != tokenizer.fingerprint


def test_every_text_round_trips_and_special_tokens_have_no_text(folder: Path) -> None:
    tokenizer = SentencePieceTokenizer(str(folder))
    for text in (TEXT, "naïve ☕ 漢字", "a b"):
        ids = [*tokenizer.encode(text), tokenizer.eod]
        assert tokenizer.decode(ids) == text and tokenizer.num_bytes(ids) == len(text.encode())
    joined, lengths = tokenizer.encode_joined(["fox", "", "the dog"])
    assert lengths.tolist() == [len(tokenizer.encode(text)) for text in ("fox", "", "the dog")]
    assert joined[lengths[0] + lengths[1] :].tolist() == tokenizer.encode("the dog")
    decoder = StreamDecoder(tokenizer)
    assert "".join(map(decoder.push, tokenizer.encode("漢 fox"))) + decoder.finish() == "漢 fox"


def test_tokenizer_can_be_pickled_and_is_built_from_a_config(folder: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(kind="sentencepiece", path=str(folder), eod="<s>"))
    again = pickle.loads(
        pickle.dumps(tokenizer)
    )  # lint: allow pickle-load: what we pickled a moment ago
    assert (
        again.encode(TEXT) == tokenizer.encode(TEXT) and again.eod == tokenizer.eod == tokenizer.bos
    )


def test_folder_is_recognized_by_its_file(folder: Path, tmp_path: Path) -> None:
    assert is_sentencepiece(folder) and not is_sentencepiece(tmp_path)
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    assert not is_sentencepiece(tmp_path)


def test_invalid_files_and_tokens_are_reported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        DataError, match=r"no tokenizer\.model found\. Set it to a SentencePiece model"
    ):
        SentencePieceTokenizer(str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"nothing of the kind")
    with pytest.raises(
        DataError, match=r"tokenizer\.model: not a SentencePiece model \(.*\)\. Use the model's own"
    ):
        SentencePieceTokenizer(str(tmp_path))
    with pytest.raises(
        DataError, match=r"eod='<end>' is not a piece of .* such as \['<unk>', '<s>', '</s>'"
    ):
        SentencePieceTokenizer(str(folder), eod="<end>")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r'Install it with pip install "megalith\[sentencepiece\]"'):
        SentencePieceTokenizer(str(folder))


def test_tokens_have_their_character_spans(folder: Path) -> None:
    tokenizer, text = SentencePieceTokenizer(str(folder)), " the  ö\U0001f600 quick</s>dog <s>"
    ids, offsets = tokenizer.encode_spans(text)
    assert ids == tokenizer.encode_marked(text) and all(
        0 <= start < end <= len(text) for start, end in offsets
    )
    found = {
        tokenizer.decode([token]).strip(): text[start:end].strip()
        for token, (start, end) in zip(ids, offsets)
    }
    assert found["the"] == "the" and offsets[ids.index(tokenizer.eod)] == (
        text.index("</s>"),
        text.index("dog"),
    )
    assert text[offsets[-1][0] :] == "<s>"
