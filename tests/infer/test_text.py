from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megalith.config.generation import SamplingParams
from megalith.data.huggingface import HuggingFaceTokenizer, train_bpe
from megalith.data.tokenizer import ByteTokenizer, NullTokenizer
from megalith.errors import CheckpointError, DataError
from megalith.infer.generate import (
    OrderedPrinter,
    Transcript,
    encode_prompt,
    encode_prompts,
    generate_text,
    open_transcript,
)
from megalith.infer.load import TextGenerator
from megalith.infer.outputs import TokenOutput
from megalith.infer.stopping_criteria import FinishReason, TextStream
from megalith.plan.keys import key
from tests.infer.engines import build, run

BYTES = ByteTokenizer()


def transcript(prompt: str = "ab", tokenizer: ByteTokenizer | NullTokenizer = BYTES) -> Transcript:
    return open_transcript(prompt, tokenizer.encode(prompt), tokenizer)


def output(text: str, finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(0, 0, 7, text, finish_reason=finish)


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


def test_space_after_the_prompt_is_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("words")
    train_bpe(["hello world, hello there"] * 4, vocab_size=280, path=str(folder))
    words = HuggingFaceTokenizer(str(folder))
    ids = words.encode("hello world, hello there")
    for cut in range(1, len(ids)):
        result = open_transcript(words.decode(ids[:cut]), ids[:cut], words)
        stream = TextStream(words, prompt_ids=ids[:cut])
        for token in ids[cut:]:
            result.add(output(stream.push(token)))
        result.add(output(stream.finish(), "length"))
        assert result.echo + result.text == "hello world, hello there"


def test_ids_are_the_text_of_a_model_without_a_tokenizer() -> None:
    result, stream = (
        transcript("5 17", NullTokenizer(37)),
        TextStream(NullTokenizer(37), prompt_ids=[5, 17]),
    )
    result.add(output(stream.push(9)))
    result.add(output(stream.push(3) + stream.finish(), "length"))
    assert result.echo + result.text == "5 17 9 3"


def test_one_text_streams_and_several_follow_one_another() -> None:
    one = transcript("ab")
    stream = OrderedPrinter([one])
    assert stream.unread_text() == "ab"
    one.add(output("c"))
    assert stream.unread_text() == "c" and stream.unread_text() == ""
    one.add(output("d", "length"))
    assert stream.unread_text() == "d\n" and stream.unread_text() == ""

    first, second = transcript("a"), transcript("x")
    stream = OrderedPrinter([first, second])
    second.add(output("y"))
    assert stream.unread_text() == "--- 1 of 2 ---\na"
    second.add(output("z", "length"))
    first.add(output("", "stop"))
    assert stream.unread_text() == "\n--- 2 of 2 ---\nxyz\n"
    assert stream.unread_text() == ""


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_streamed_text_equals_the_returned_text(ignore_eos: bool, tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(vocab_size=257))
    params = SamplingParams(max_new_tokens=30, seed=5, ignore_eos=ignore_eos)
    own_seed = replace(params, seed=key(5, "prompt", "0"))
    free = run(build(model), [([97], own_seed)])[0].outputs[0].token_ids
    shown: list[str] = []
    generator = TextGenerator(model, BYTES, frozenset({free[9]}))
    (result,) = generate_text(generator, ["a"], params, show=shown.append)
    assert "".join(shown) == "a" + result.text + "\n" and len(shown) == len(result.ids)
    assert result.ids == (free if ignore_eos else free[: free.index(free[9]) + 1])
    # each prompt has random numbers of its own
    several = generate_text(generator, ["a", "a"], params, show=shown.append)
    assert several[0].ids == result.ids != several[1].ids


def test_invalid_prompts_and_weights_are_named(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(vocab_size=257))
    generator = TextGenerator(model, BYTES, frozenset())
    with pytest.raises(DataError, match="prompt 2: the prompt has 96 tokens, but the context is 9"):
        generate_text(generator, ["a", "b" * 96], SamplingParams(), show=print)
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    with pytest.raises(CheckpointError, match="prompt 1: the logits at position 1 are not finite"):
        generate_text(generator, ["a"], SamplingParams(), show=print)
