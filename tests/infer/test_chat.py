from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.data import TokenizerConfig
from megalith.config.generation import SampleConfig
from megalith.data.chat_template import BUILT_IN, ChatTemplate
from megalith.data.tokenizer import ByteTokenizer
from megalith.errors import DataError
from megalith.hf.convert import find_turn_end
from megalith.hf.peft import AdaptedWeights
from megalith.hf.pretrained import Pretrained
from megalith.infer.chat import Chat, StopFilter, select_template
from megalith.infer.generate import GeneratedToken
from megalith.infer.load import TextGenerator
from megalith.models.decoder import Decoder

NOTHING: Any = None  # weights that nobody reads
GREEDY = SampleConfig(temperature=0.0, max_new_tokens=12)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_stop_filter_shows_text_up_to_the_stop_text(size: int) -> None:
    text = "a < b <|im_ <|im_end|> never"
    until, shown = StopFilter("<|im_end|>"), ""
    for at in range(0, len(text), size):
        shown += until.push(text[at : at + size])
        if until.found:
            break
    assert shown == "a < b <|im_ " and until.found and until.finish() == ""


def test_held_back_text_is_returned_at_the_end() -> None:
    until = StopFilter("<|im_end|>")
    assert (until.push("yes <|im"), until.finish(), until.found) == ("yes ", "<|im", False)
    assert StopFilter("").push("all of it") == "all of it"


def test_turn_ends_at_a_token_or_at_its_text() -> None:
    tokenizer = ByteTokenizer()
    specials = {"eos_token": "<|endoftext|>"}
    assert find_turn_end(ChatTemplate("t", BUILT_IN["identity"], specials), tokenizer) == (
        frozenset({256}),
        "",
    )
    assert find_turn_end(ChatTemplate("t", BUILT_IN["chatml"], specials), tokenizer) == (
        frozenset(),
        "<|im_end|>",
    )


class Counting:
    """A model that says how many tokens each of its forwards reads."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.config, self.counts = model, model.config, list[int]()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.model.parameters()

    def logits(self, ids: Tensor, *rest: Any) -> Tensor:
        self.counts.append(len(ids))
        return self.model.logits(ids, *rest)


@pytest.mark.parametrize("template", ["identity", "chatml"])
def test_turn_processes_only_its_tokens_and_equals_that_of_a_new_chat(
    template: str, tiny: SimpleNamespace
) -> None:
    model = Counting(tiny.model(tiny.config(vocab_size=257, max_seq_len=400), dtype=torch.float64))
    specials = {"eos_token": "<|endoftext|>"}
    generator: Any = TextGenerator(model, ByteTokenizer(), frozenset({256}))  # type: ignore[arg-type]  # as far as it is used

    def fresh() -> Chat:
        return Chat(generator, ChatTemplate("t", BUILT_IN[template], specials), GREEDY)

    chat = fresh()
    for turn, text in enumerate(("hello", "and then?", "why", "x")):
        before, read = list(chat.messages), sum(model.counts)
        answer = chat.reply(text, lambda shown: None)
        cost = sum(model.counts) - read
        other = fresh()
        other.messages = before
        assert other.reply(text, lambda shown: None) == answer
        whole = sum(model.counts) - read - cost
        # bytes that are no text are written otherwise
        assert cost == whole if turn == 0 else cost < whole
    chat.reset()
    assert chat.reply("hello", lambda shown: None) == fresh().reply("hello", lambda shown: None)


def test_prompt_is_the_conversation_with_the_generation_prompt(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[int]] = []

    def noted(
        model: Decoder, prompts: list[list[int]], *others: Any, **named: Any
    ) -> Iterator[GeneratedToken]:
        read.extend(prompts)
        yield GeneratedToken(0, ord("y"), None)
        yield GeneratedToken(0, 256, "stop")

    monkeypatch.setattr("megalith.infer.chat.generate", noted)
    model, tokenizer = tiny.model(tiny.config(vocab_size=257, max_seq_len=400)), ByteTokenizer()
    chat = Chat(
        TextGenerator(model, tokenizer, frozenset({256})),
        ChatTemplate("t", BUILT_IN["chatml"], {}),
        GREEDY,
        "be kind",
    )
    assert [chat.reply(text, lambda shown: None) for text in ("hello", "why")] == ["y", "y"]
    first = (
        "<|im_start|>system\nbe "
        "kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    second = first + "y<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    assert [tokenizer.decode(ids) for ids in read] == [first, second]


@pytest.mark.parametrize("adapted", [False, True])
def test_template_is_the_requested_one_or_that_of_the_run(
    adapted: bool, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    weights: Any = (
        AdaptedWeights(tmp_path, tiny.config(), NOTHING, tmp_path / "base", NOTHING)
        if adapted
        else NOTHING
    )
    settings = {"data": {"sft": {"path": ["talks.jsonl"], "template": "llama3"}}}
    tuned = Pretrained(tmp_path, tiny.config(), TokenizerConfig(), weights, {}, settings)
    assert select_template(tuned, ByteTokenizer(), None).name == "llama3"
    assert select_template(tuned, ByteTokenizer(), "identity").name == "identity"
    with pytest.raises(DataError, match="has no chat template.* set --template to one of chatml"):
        select_template(replace(tuned, settings={}), ByteTokenizer(), None)
