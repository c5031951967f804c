from pathlib import Path

from megalith.data.huggingface import train_bpe
from megalith.data.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer
from megalith.data.tokenizer_formats import byte_to_char_spans, encode_parts


def test_longest_special_token_is_matched_and_the_rest_encoded_separately() -> None:
    specials = {"<a>": 900, "<a><b>": 901}
    assert encode_parts("x<a><b>y<a>", specials, lambda text: list(text.encode())) == [
        120,
        901,
        121,
        900,
    ]
    assert encode_parts("", specials, lambda text: [1]) == []


def test_byte_tokenizer_recognizes_its_end_token_by_its_text() -> None:
    assert ByteTokenizer().encode_marked("ab<|endoftext|>c") == [97, 98, 256, 99]
    assert 256 not in ByteTokenizer().encode("ab<|endoftext|>c"), (
        "elsewhere it is text like any other"
    )


TEXT = "  two  spaces, höhe\n\U0001f600 <|endoftext|> x "


def test_every_token_has_its_character_span(tmp_path: Path) -> None:
    trained = train_bpe(
        ["two spaces and two more"] * 9, vocab_size=280, path=str(tmp_path / "tokenizer")
    )
    tokenizers: list[Tokenizer] = [ByteTokenizer(), trained]
    for tokenizer in tokenizers:
        ids, places = tokenizer.encode_spans(TEXT)
        assert ids == tokenizer.encode_marked(TEXT) and len(places) == len(ids)
        assert all(0 <= start < end <= len(TEXT) for start, end in places)
        for token, (start, end) in zip(ids, places, strict=True):
            text = tokenizer.decode([token])
            assert (
                "\ufffd" in text
                or text.strip() == TEXT[start:end].replace("<|endoftext|>", "").strip()
            )
    assert NullTokenizer(40).encode_spans("3 17") == ([3, 17], [(0, 1), (2, 4)])


def test_token_of_spaces_excludes_the_text_after_it(tmp_path: Path) -> None:
    """Byte-level tokenizers leave spaces out of where they say tokens lie."""
    trained = train_bpe(["ab ab"] * 9, vocab_size=258, path=str(tmp_path / "tokenizer"))
    ids, places = trained.encode_spans("ab  ab")
    spaces = [
        place
        for token, place in zip(ids, places, strict=True)
        if not trained.decode([token]).strip()
    ]
    assert spaces and all(end <= 4 for _, end in spaces)


def test_empty_bytes_have_no_span() -> None:
    assert byte_to_char_spans("", []) == []
