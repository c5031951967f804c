"""Byte-pair vocabularies of tiktoken: the library's own ids, shifted where special tokens come
first."""

import base64
import json
import pickle
import sys
from pathlib import Path

import pytest

from megalith.config.data import TokenizerConfig
from megalith.data.tokenizer import build_tokenizer
from megalith.data.tokenizer_formats import PATTERNS, TiktokenTokenizer
from megalith.errors import DataError

library = pytest.importorskip(
    "tiktoken", reason="reads tiktoken vocabularies, which needs the library"
)
PIECES = [bytes([byte]) for byte in range(256)] + [
    b"th",
    b"the",
    b" the",
    b"er",
    b"12",
    b"\xe2\x98",
]
TEXT = "the other 123 naïve ☕\n\n the"


def lines(path: Path) -> str:
    path.write_bytes(
        b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(PIECES))
    )
    return str(path)


def listed(path: Path) -> str:
    entries = [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(piece).decode(),
            "token_str": piece.decode(errors="replace"),
        }
        for rank, piece in enumerate(PIECES)
    ]
    path.write_text(json.dumps(entries))
    return str(path)


def theirs(text: str, pattern: str) -> list[int]:
    ranks = {piece: rank for rank, piece in enumerate(PIECES)}
    found: list[int] = library.Encoding(
        "x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
    ).encode_ordinary(text)
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
def test_ids_of_a_tiktoken_file_match_the_library_and_special_tokens_follow(
    pattern: str, tmp_path: Path
) -> None:
    names = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
    tokenizer = TiktokenTokenizer(lines(tmp_path / "m"), pattern=pattern, special_tokens=names)  # type: ignore[arg-type]
    expected = theirs(TEXT, PATTERNS[pattern])  # type: ignore[index]
    assert tokenizer.encode(TEXT) == [262, *expected]
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (265, 262, 263)
    assert tokenizer.decode([*tokenizer.encode(TEXT), 264]) == TEXT
    assert tokenizer.num_bytes([*tokenizer.encode(TEXT), 264]) == len(TEXT.encode())


def test_in_a_json_vocabulary_special_tokens_come_first_and_all_have_names(tmp_path: Path) -> None:
    tokenizer = TiktokenTokenizer(listed(tmp_path / "m.json"), num_special=10)
    assert tokenizer.encode("the") == [1, 257 + 10] and tokenizer.vocab_size == 272
    assert (tokenizer.bos, tokenizer.eod) == (1, 2)
    named = TiktokenTokenizer(
        listed(tmp_path / "m.json"), num_special=10, eod="<SPECIAL_9>", add_special_tokens=False
    )
    assert named.eod == 9 and named.encode("the") == [267] and named.decode([9, 267, 2]) == "the"


def test_smaller_vocabulary_omits_the_last_tokens(tmp_path: Path) -> None:
    tokenizer = TiktokenTokenizer(listed(tmp_path / "m.json"), num_special=4, vocab_size=4 + 257)
    assert tokenizer.vocab_size == 261
    # "th" is still a piece, "the" is not
    assert tokenizer.encode("the") == [
        1,
        256 + 4,
        ord("e") + 4,
    ]


def test_special_tokens_written_in_a_text_are_text(tmp_path: Path) -> None:
    tokenizer = TiktokenTokenizer(lines(tmp_path / "m"), special_tokens=("<|endoftext|>",))
    assert tokenizer.decode(tokenizer.encode("a<|endoftext|>")) == "a<|endoftext|>"
    assert 262 not in tokenizer.encode("a<|endoftext|>") and tokenizer.eod == 262


def test_tokenizer_can_be_pickled_and_is_built_from_a_config(tmp_path: Path) -> None:
    config = TokenizerConfig(
        kind="tiktoken", path=listed(tmp_path / "m.json"), num_special_tokens=9, pattern="v1"
    )
    tokenizer = build_tokenizer(config)
    again = pickle.loads(
        pickle.dumps(tokenizer)
    )  # lint: allow pickle-load: what we pickled a moment ago
    assert (
        again.encode(TEXT) == tokenizer.encode(TEXT) and again.fingerprint == tokenizer.fingerprint
    )
    ids, lengths = tokenizer.encode_joined(["the", ""])
    assert ids.tolist() == [1, 266, 1] and lengths.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"AA== 0\n", r"not a BPE vocabulary \(no token for byte 1\)"),
        (b"not base64 at all", "not a BPE vocabulary"),
        (b"[1, 2]", r"JSON list of rank and token_bytes"),
    ],
)
def test_other_files_are_rejected(contents: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(contents)
    with pytest.raises(DataError, match=message):
        TiktokenTokenizer(str(tmp_path / "m"))


@pytest.mark.parametrize("size", [10, 265, 273])
def test_sizes_that_no_vocabulary_has_are_rejected(size: int, tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=rf"vocab_size={size}: .*m\.json has 262 tokens.* a number from 266 to 272\.",
    ):
        TiktokenTokenizer(listed(tmp_path / "m.json"), num_special=10, vocab_size=size)
    with pytest.raises(
        DataError, match=rf"vocab_size={size}: .* followed by .*\. Remove tokenizer\.vocab_size"
    ):
        TiktokenTokenizer(lines(tmp_path / "m"), vocab_size=size)


def test_missing_file_and_end_token_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        DataError,
        match=r"cannot be read \(No such file or directory\)\. Set it to a \.tiktoken file",
    ):
        TiktokenTokenizer(str(tmp_path / "absent"))
    with pytest.raises(
        DataError, match=r"none of its special tokens is known to end a document\. Set tokenizer"
    ):
        _ = TiktokenTokenizer(lines(tmp_path / "m")).eod
    with pytest.raises(
        DataError,
        match=r"eod='<end>' is not a special token of .*Set it to one of \['<unk>', '<s>'",
    ):
        TiktokenTokenizer(listed(tmp_path / "m.json"), eod="<end>")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match=r'Install it with pip install "megalith\[tiktoken\]"'):
        TiktokenTokenizer(lines(tmp_path / "m"))


@pytest.mark.parametrize("in_json", [True, False])
def test_tokens_have_the_character_spans_of_their_bytes(in_json: bool, tmp_path: Path) -> None:
    path = listed(tmp_path / "m.json") if in_json else lines(tmp_path / "m")
    tokenizer = TiktokenTokenizer(path, num_special=10, special_tokens=("<s>", "</s>"))
    text = f"<s>{TEXT}</s>☕"
    ids, offsets = tokenizer.encode_spans(text)
    assert ids == tokenizer.encode_marked(text) and len(offsets) == len(ids)
    assert [text[start:end] for start, end in (offsets[0], offsets[1], offsets[-1])] == [
        "<s>",
        "the",
        "☕",
    ]
    assert [end for _, end in offsets if end == len(text)] == [len(text)] * 2, (
        "a character of two tokens has both"
    )
