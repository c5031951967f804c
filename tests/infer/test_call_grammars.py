"""Grammars of tool calls and reasoning, with markers that are special tokens and with text ones."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from megalith.config.generation import SamplingParams, StructuredOutputsParams
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.infer.parsers.grammars import (
    allow_reasoning,
    build_harmony_calls_grammar,
    build_harmony_final_grammar,
    build_optional_calls_grammar,
)
from megalith.infer.parsers.harmony import END, HarmonyParser
from megalith.infer.parsers.reasoning import ThinkParser
from megalith.infer.parsers.registry import TOOL_CALL_FORMATS, OutputParser
from megalith.infer.parsers.tool_calls import CLOSE, OPEN, PYTHON_TAG
from megalith.infer.structured_output import GrammarCompiler
from tests.infer.engines import build, run
from tests.infer.tokenizers import make_marked_tokenizer

pytest.importorskip("llguidance", reason="matches grammars, which needs the library")
MARKERS = (OPEN, CLOSE, PYTHON_TAG, *ThinkParser.markers, *HarmonyParser.markers)
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMAS = {"add": ADD, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
CALL = '{"name": "add", "arguments": {"a": 1, "b": "x"}}'
OTHER = '{"name": "add", "arguments": {"a": 12, "b": "x"}}'
LLAMA_CALL = CALL.replace("arguments", "parameters")
HARMONY_CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":1,"b":"x"}'
NOTE = "<|channel|>analysis<|message|>a<b<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its tokens are bytes and the markers."""
    return make_marked_tokenizer(tmp_path_factory.mktemp("marked"), MARKERS)


def matches(
    tokenizer: Tokenizer, params: StructuredOutputsParams, text: str, *, marked: bool
) -> bool:
    """Whether a text is complete in a structure; `marked`: its markers are special tokens."""
    state = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(params).start(frozenset([256]))
    pieces = [text] if marked else list(text)
    for token in [token for piece in pieces for token in tokenizer.encode_marked(piece)]:
        if not state.allowed_tokens()[token]:
            return False
        state.accept(token)
    return bool(state.allowed_tokens()[256])


CASES: list[tuple[str, bool, str, bool]] = [
    # parser, parallel, text, whether it matches
    ("hermes", True, "", True),
    ("hermes", True, "text < <tool_cal", True),
    ("hermes", True, f"a {OPEN}\n{CALL}\n{CLOSE}\n{OPEN}{CALL}{CLOSE} b", True),
    ("hermes", True, f"{OPEN}{OTHER}{CLOSE}", False),
    ("hermes", True, f"{OPEN}{CALL}", False),
    ("hermes", False, f"a {OPEN}{CALL}{CLOSE}", True),
    ("hermes", False, f"{OPEN}{CALL}{CLOSE}{OPEN}{CALL}{CLOSE}", False),
    ("qwen3-coder", False, f"a{OPEN}<function=now></function>{CLOSE}", True),
    ("qwen3-coder", False, f"{OPEN}x{CLOSE}{OPEN}x{CLOSE}", False),
    ("json", True, "no { call", True),
    ("json", True, f"{CALL}; {CALL}", True),
    ("json", False, CALL, True),
    ("json", False, f"{CALL}; {CALL}", False),
    ("json", True, OTHER, False),
    ("llama3-json", True, LLAMA_CALL, True),
    ("llama3-json", True, CALL, False),
    ("gpt-oss", True, f"{FINAL}text", True),
    ("gpt-oss", True, f"{NOTE}{NOTE}{FINAL}", True),
    ("gpt-oss", True, f"{NOTE}{HARMONY_CALL}", True),
    ("gpt-oss", True, HARMONY_CALL.replace(":1", ":12"), False),
    ("gpt-oss", True, HARMONY_CALL.replace("add", "other"), False),
    ("gpt-oss", True, NOTE, False),
    ("gpt-oss", True, "text", False),
]


@pytest.mark.parametrize("marked", [True, False])
def test_optional_calls_have_the_schemas_of_the_tools(tokenizer: Tokenizer, marked: bool) -> None:
    specials = tokenizer.specials if marked else {}
    for parser, parallel, text, expected in CASES:
        grammar = build_optional_calls_grammar(parser, SCHEMAS, specials, parallel=parallel)
        params = StructuredOutputsParams(grammar=grammar)
        result = matches(tokenizer, params, text, marked=marked)
        assert result == expected, (parser, parallel, text)


@pytest.mark.parametrize("marked", [True, False])
def test_structures_around_reasoning_and_required_calls(tokenizer: Tokenizer, marked: bool) -> None:
    specials = tokenizer.specials if marked else {}
    think, final = allow_reasoning("</think>", specials), build_harmony_final_grammar(specials)
    calls = StructuredOutputsParams(grammar=build_harmony_calls_grammar({"add": ADD}, specials))
    for params, text, expected in (
        (StructuredOutputsParams(regex="[ab]+", outer_grammar=think), "x<</think>\n\nab", True),
        (StructuredOutputsParams(regex="[ab]+", outer_grammar=think), "</think>c", False),
        (StructuredOutputsParams(regex="[ab]+", outer_grammar=think), "ab", False),
        (StructuredOutputsParams(json_object=True, outer_grammar=final), f"{FINAL}{{}}", True),
        (
            StructuredOutputsParams(json_object=True, outer_grammar=final),
            f"{NOTE}{FINAL}{{}}",
            True,
        ),
        (StructuredOutputsParams(json_object=True, outer_grammar=final), f"{FINAL}x", False),
        (
            StructuredOutputsParams(json_object=True, outer_grammar=final),
            NOTE.replace("analysis", "commentary") + f"{FINAL}{{}}",
            False,
        ),
        (calls, NOTE + HARMONY_CALL, True),
        (calls, f"{FINAL}text", False),
    ):
        assert matches(tokenizer, params, text, marked=marked) == expected, (params, text)


def test_text_of_a_special_token_in_a_structure_is_plain_text(tokenizer: Tokenizer) -> None:
    params = StructuredOutputsParams(choice=(f"a{OPEN}",))
    assert matches(tokenizer, params, f"a{OPEN}", marked=False)
    assert not matches(tokenizer, params, f"a{OPEN}", marked=True)


def test_invalid_outer_grammar_is_reported(tokenizer: Tokenizer) -> None:
    params = StructuredOutputsParams(regex="a", outer_grammar="begin: @structure")
    with pytest.raises(ConfigError, match="structured_outputs.outer_grammar is not valid: "):
        GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(params)


@pytest.mark.parametrize("parser", ["hermes", "gpt-oss"])
def test_special_tokens_of_a_format_reach_its_parser(
    tiny: SimpleNamespace, tokenizer: Tokenizer, parser: str
) -> None:
    size = tokenizer.vocab_size
    model = tiny.model(tiny.config(vocab_size=size, max_seq_len=512, init_std=0.3))
    engine = build(model, tokenizer=tokenizer, eos=frozenset([256]), max_num_seqs=32)
    grammar = build_optional_calls_grammar(parser, SCHEMAS, tokenizer.specials, parallel=False)
    build_parser = TOOL_CALL_FORMATS[parser]
    markers = build_parser(SCHEMAS).markers
    likely = {"c": 4.0, " ": 9.0, END: 8.0} if parser == "gpt-oss" else {"a": 3.0, OPEN: 8.0}
    biases = tuple((tokenizer.encode_marked(text)[0], bias) for text, bias in likely.items())
    params = SamplingParams(
        n=16,
        seed=1,
        max_new_tokens=300,
        structured_outputs=StructuredOutputsParams(grammar=grammar),
        logit_bias=(*biases, (256, 4.0)),
        visible_special_tokens=markers,
    )
    (output,) = run(engine, [([60, 70], params)])
    calls = []
    for one in output.outputs:
        if one.finish_reason != "length":
            text_parser = OutputParser(None, build_parser(SCHEMAS), hidden=markers)
            result = text_parser.push(one.text)
            result.add(text_parser.finish())
            calls += result.tool_calls
            assert not any(marker in result.content for marker in markers)
    assert calls and {call.name for call in calls} <= {"add", "now"}
    for call in calls:
        values = json.loads(call.arguments)
        assert values == {} if call.name == "now" else values["a"] in range(10)
