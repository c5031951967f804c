from megalith.data.marked import encode_parts
from megalith.data.tokenizer import ByteTokenizer


def test_the_longest_special_token_wins_and_the_rest_is_encoded_apart() -> None:
    specials = {"<a>": 900, "<a><b>": 901}
    assert encode_parts("x<a><b>y<a>", specials, lambda text: list(text.encode())) == [120, 901, 121, 900]
    assert encode_parts("", specials, lambda text: [1]) == []


def test_bytes_know_their_end_token_by_its_text() -> None:
    assert ByteTokenizer().encode_marked("ab<|endoftext|>c") == [97, 98, 256, 99]
    assert 256 not in ByteTokenizer().encode("ab<|endoftext|>c"), "elsewhere it is text like any other"
