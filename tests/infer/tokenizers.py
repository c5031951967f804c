"""Small tokenizers of every type."""

import base64
import importlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers

from megalith.data.huggingface import HuggingFaceTokenizer, train_bpe
from megalith.data.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer
from megalith.data.tokenizer_formats import SentencePieceTokenizer, TiktokenTokenizer

WORDS = "the quick brown fox jumps over the lazy dog and the other STOP END"


def make_tokenizer(kind: str, folder: Path) -> Tokenizer:
    """Return a tokenizer of a type, trained or written to a folder; skips the test if its library
    is missing."""
    if kind == "byte":
        return ByteTokenizer()
    if kind == "null":
        return NullTokenizer(12)
    if kind == "bpe":
        texts = [
            "ab END cd",
            "the other STO STOP the",
            "naïve ☕\n\n漢字 END",
            '{"a": 12, "b": true}',
        ]
        return train_bpe(texts * 4, vocab_size=300, path=str(folder / "bpe"))
    if kind == "metaspace":
        return make_metaspace_tokenizer(folder)
    pytest.importorskip(kind)
    if kind == "tiktoken":
        pieces = [bytes([byte]) for byte in range(256)]
        pieces += [b"th", b"the", b" the", b"ST", b" ST", b"END", b" \xf0\x9f", b"\xe2\x98", b"aa"]
        lines = [base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces)]
        (folder / "vocabulary").write_bytes(b"".join(lines))
        return TiktokenTokenizer(str(folder / "vocabulary"))
    library = importlib.import_module(kind)
    (folder / "text").write_text("\n".join(WORDS[n:] for n in range(40)) * 4)
    library.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return SentencePieceTokenizer(str(folder))


def make_metaspace_tokenizer(folder: Path) -> Tokenizer:
    """Return a tokenizer.json with the pieces, byte pieces and decoders of Llama 2's."""
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *map(chr, range(33, 127)),
    ]
    pieces += ["▁", "▁t", "▁th", "▁the", "en", "me"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("e", "n"), ("m", "e")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(
        vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(str(folder))


def make_marked_tokenizer(folder: Path, markers: Sequence[str]) -> Tokenizer:
    """Return a tokenizer whose tokens are bytes, and special tokens: markers and <|endoftext|>."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(
        vocab={character: number for number, character in enumerate(alphabet)}, merges=[]
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", *markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return HuggingFaceTokenizer(str(folder))
