from types import SimpleNamespace

import pytest

from megalith.config.generation import SampleConfig
from megalith.data.huggingface import HuggingFaceTokenizer, train_bpe
from megalith.data.tokenizer import ByteTokenizer, NullTokenizer
from megalith.errors import DataError
from megalith.infer.generate import (
    GeneratedToken,
    OrderedPrinter,
    Transcript,
    encode_prompt,
    encode_prompts,
    generate,
    generate_text,
)
from megalith.infer.load import TextGenerator

BYTES = ByteTokenizer()


def transcript(prompt: str = "ab", tokenizer: ByteTokenizer | NullTokenizer = BYTES) -> Transcript:
    return Transcript(prompt, tokenizer.encode(prompt), tokenizer)


def test_empty_prompt_starts_a_document() -> None:
    assert encode_prompt("", BYTES) == [256]
    assert encode_prompt("ab", BYTES) == [97, 98]

    class Beginning(ByteTokenizer):
        bos = 7  # type: ignore[assignment]  # the byte tokenizer has none

    assert encode_prompt("", Beginning()) == [7]


def test_end_token_added_by_the_tokenizer_is_removed() -> None:
    class Ending(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [*super().encode(text), 256]

    assert encode_prompt("ab", Ending()) == [97, 98]
    assert encode_prompt("", Ending()) == [256]


def test_a_prompt_that_cannot_be_encoded_is_named() -> None:
    with pytest.raises(
        DataError, match=r"prompt 2 \('x'\): .*'x' is not an id.*Use another prompt"
    ):
        encode_prompts(["1 2", "x"], NullTokenizer(5))


def test_prompt_that_is_not_text_is_reported() -> None:
    with pytest.raises(
        DataError, match=r"prompt 1 \('a\\udcff'\): character 2 is '\\udcff': .*Use another prompt"
    ):
        encode_prompts(["a\udcff"], BYTES)


def test_text_is_streamed_in_whole_characters_without_the_end_token() -> None:
    result, parts = transcript(), []
    for token in [*"é!".encode(), 256]:
        result.add(GeneratedToken(0, token, "stop" if token == 256 else None))
        parts.append(result.text)
    assert (
        parts == ["", "é", "é!", "é!"]
        and result.ids == [195, 169, 33, 256]
        and result.finish == "stop"
    )


def test_incomplete_character_is_shown_at_the_end() -> None:
    result = transcript()
    result.add(GeneratedToken(0, 195, "length"))
    assert result.text == "\ufffd"


def test_an_ignored_end_token_is_not_part_of_the_text() -> None:
    result = transcript()
    for token in (256, 99):
        result.add(GeneratedToken(0, token, None))
    assert result.text == "c"


def test_stop_token_of_another_name_is_not_text() -> None:
    result = transcript()
    result.add(GeneratedToken(0, 99, "stop"))
    assert result.text == ""


def test_space_after_the_prompt_is_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("words")
    train_bpe(["hello world, hello there"] * 4, vocab_size=280, path=str(folder))
    words = HuggingFaceTokenizer(str(folder))
    ids = words.encode("hello world, hello there")
    for cut in range(1, len(ids)):
        result = Transcript(words.decode(ids[:cut]), ids[:cut], words)
        for number, token in enumerate(ids[cut:], cut + 1):
            result.add(GeneratedToken(0, token, "length" if number == len(ids) else None))
        assert result.echo + result.text == "hello world, hello there"


def test_ids_are_the_text_of_a_model_without_a_tokenizer() -> None:
    result = transcript("5 17", NullTokenizer(37))
    result.add(GeneratedToken(0, 9, None))
    result.add(GeneratedToken(0, 3, "length"))
    assert result.echo + result.text == "5 17 9 3"


def test_one_text_streams_and_several_follow_one_another() -> None:
    one = transcript("ab")
    stream = OrderedPrinter([one])
    assert stream.unread_text() == "ab"
    one.add(GeneratedToken(0, 99, None))
    assert stream.unread_text() == "c" and stream.unread_text() == ""
    one.add(GeneratedToken(0, 100, "length"))
    assert stream.unread_text() == "d\n" and stream.unread_text() == ""

    first, second = transcript("a"), transcript("x")
    stream = OrderedPrinter([first, second])
    second.add(GeneratedToken(1, 121, None))
    assert stream.unread_text() == "--- 1 of 2 ---\na"
    second.add(GeneratedToken(1, 122, "length"))
    first.add(GeneratedToken(0, 98, "stop"))
    assert stream.unread_text() == "\n--- 2 of 2 ---\nxyz\n"
    assert stream.unread_text() == ""


@pytest.mark.parametrize("ignore_eod", [False, True])
def test_streamed_text_equals_the_returned_text(ignore_eod: bool, tiny: SimpleNamespace) -> None:
    model, sample = tiny.model(tiny.config(vocab_size=257)), SampleConfig(max_new_tokens=30, seed=5)
    free = [written.token for written in generate(model, [[97]], sample)]
    shown: list[str] = []
    generator = TextGenerator(model, BYTES, frozenset({free[9]}))
    (result,) = generate_text(generator, ["a"], sample, ignore_eod=ignore_eod, show=shown.append)
    assert "".join(shown) == "a" + result.text + "\n" and len(shown) == len(result.ids)
    assert result.ids == (free if ignore_eod else free[: free.index(free[9]) + 1])
