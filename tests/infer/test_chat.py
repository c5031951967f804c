from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.data import TokenizerConfig
from megalith.config.generation import SamplingParams
from megalith.config.serve import EngineConfig
from megalith.data.chat_template import BUILT_IN, ChatTemplate
from megalith.data.tokenizer import ByteTokenizer
from megalith.errors import ConfigError, DataError
from megalith.hf.convert import find_turn_end
from megalith.hf.peft import AdaptedWeights
from megalith.hf.pretrained import Pretrained
from megalith.infer.chat import Chat, select_template
from megalith.infer.engine import InferenceEngine
from megalith.infer.load import TextGenerator
from megalith.infer.outputs import TokenOutput
from megalith.infer.stopping_criteria import add_turn_end
from megalith.models.decoder import Decoder

NOTHING: Any = None  # weights that nobody reads
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)


def test_turn_ends_at_a_token_or_at_its_text() -> None:
    tokenizer = ByteTokenizer()
    specials = {"eos_token": "<|endoftext|>"}
    assert find_turn_end(ChatTemplate("t", BUILT_IN["identity"], specials), tokenizer) == (
        frozenset({256}),
        (),
    )
    assert find_turn_end(ChatTemplate("t", BUILT_IN["chatml"], specials), tokenizer) == (
        frozenset(),
        ("<|im_end|>",),
    )


def test_too_many_stop_strings_with_a_turn_end_are_rejected() -> None:
    chatml, tokenizer = ChatTemplate("t", BUILT_IN["chatml"], {}), ByteTokenizer()
    stops = tuple(f"stop {index}" for index in range(16))
    params = add_turn_end(replace(GREEDY, stop=stops[:15]), *find_turn_end(chatml, tokenizer))
    assert params.stop == (*stops[:15], "<|im_end|>")
    with pytest.raises(ConfigError, match="stop has 16 texts, and the chat template adds 1; "):
        add_turn_end(replace(GREEDY, stop=stops), *find_turn_end(chatml, tokenizer))


def new_chat(model: Decoder, template: str = "chatml", system: str | None = None) -> Chat:
    specials = {"eos_token": "<|endoftext|>"}
    return Chat(
        TextGenerator(model, ByteTokenizer(), frozenset({256})),
        ChatTemplate("t", BUILT_IN[template], specials),
        GREEDY,
        EngineConfig(max_num_seqs=1),
        system,
    )


def hit_tokens(chat: Chat) -> int:
    return chat.engine.scheduler.make_stats().prefix_hit_tokens


@pytest.mark.parametrize("template", ["identity", "chatml"])
def test_turn_processes_only_its_tokens_and_equals_that_of_a_new_chat(
    template: str, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(vocab_size=257, max_seq_len=400), dtype=torch.float64)
    chat = new_chat(model, template)
    for turn, text in enumerate(("hello", "and then?", "why", "x")):
        before, hits = list(chat.messages), hit_tokens(chat)
        answer = chat.reply(text, lambda shown: None)
        other = new_chat(model, template)
        other.messages = before
        assert other.reply(text, lambda shown: None) == answer
        assert hit_tokens(other) == 0
        # with "identity" the answer, whose bytes are no text, is encoded otherwise
        assert template == "identity" or (hit_tokens(chat) > hits) == (turn > 0)
    chat.reset()
    expected = new_chat(model, template).reply("hello", lambda shown: None)
    assert chat.reply("hello", lambda shown: None) == expected


def test_prompt_is_the_conversation_with_the_generation_prompt(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = new_chat(tiny.model(tiny.config(vocab_size=257, max_seq_len=400)), system="be kind")
    read: list[list[int]] = []

    def add_request(ids: list[int], params: SamplingParams, adapter: str | None = None) -> int:
        read.append(ids)
        assert adapter is None
        assert params.stop == ("<|im_end|>",)
        monkeypatch.setattr(InferenceEngine, "has_unfinished", True)
        return 0

    def step() -> list[TokenOutput]:
        monkeypatch.setattr(InferenceEngine, "has_unfinished", False)
        return [TokenOutput(0, 0, ord("y"), "y"), TokenOutput(0, 0, 256, finish_reason="stop")]

    monkeypatch.setattr(chat.engine, "add_request", add_request)
    monkeypatch.setattr(chat.engine, "step", step)
    assert [chat.reply(text, lambda shown: None) for text in ("hello", "why")] == ["y", "y"]
    first = (
        "<|im_start|>system\nbe "
        "kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    second = first + "y<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    assert [ByteTokenizer().decode(ids) for ids in read] == [first, second]


def test_interrupted_answer_is_part_of_the_conversation(tiny: SimpleNamespace) -> None:
    chat = new_chat(tiny.model(tiny.config(vocab_size=257, max_seq_len=400)))
    shown: list[str] = []

    def interrupt(text: str) -> None:
        shown.append(text)
        if len(shown) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.reply("hello", interrupt)
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(shown)}
    assert not chat.engine.has_unfinished
    chat.reply("go on", lambda text: None)


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
