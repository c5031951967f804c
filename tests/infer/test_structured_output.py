"""Structured output: texts of random models have the structure of their requests."""

import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megalith.config.generation import SamplingParams, StructuredOutputsParams, sampling_problems
from megalith.data.huggingface import HuggingFaceTokenizer
from megalith.data.tokenizer import ByteTokenizer, NullTokenizer, StreamDecoder
from megalith.errors import ConfigError, DataError
from megalith.infer import structured_output
from megalith.infer.engine import InferenceEngine
from megalith.infer.outputs import Completion
from megalith.infer.parsers.grammars import allow_reasoning
from megalith.infer.structured_output import GrammarCompiler, GrammarState, compute_masks
from tests.cases import loop_over
from tests.infer.engines import build, run
from tests.infer.tokenizers import make_tokenizer

pytest.importorskip("llguidance", reason="matches grammars, which needs the library")
EOS = 256
PROMPT = [60, 70, 80]
TOO_COMPLEX = StructuredOutputsParams(regex="(a|aa|aaa){1000}{1000}")
"""Its matcher fails when the first token is added."""


@pytest.fixture
def engine(tiny: SimpleNamespace) -> InferenceEngine:
    """An engine whose tokens are bytes."""
    model = tiny.model(tiny.config(vocab_size=257, max_seq_len=512, init_std=0.3))
    return build(model, tokenizer=ByteTokenizer(), eos=frozenset([EOS]), max_num_seqs=32)


def sampled(seed: int = 0, *, max_new_tokens: int = 400, **structure: Any) -> SamplingParams:
    """Parameters of a request with a structure."""
    return SamplingParams(
        seed=seed,
        max_new_tokens=max_new_tokens,
        structured_outputs=StructuredOutputsParams(**structure),
    )


def generate(engine: InferenceEngine, params: SamplingParams) -> list[Completion]:
    """The choices of one request."""
    return run(engine, [(PROMPT, params)])[0].outputs


# --- JSON schemas


def random_schema(generator: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema with the keywords that clients use."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kind = generator.choice(kinds if depth > 2 else [*kinds, "object", "object", "array", "anyOf"])
    if kind == "enum":
        return {"enum": generator.sample(["x", "y\n", 3, -1.5, None, True, "é"], 3)}
    if kind == "const":
        return {"const": generator.choice(["only", 7, {"a": [1]}])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(generator, depth + 1) for _ in range(2)]}
    schema: dict[str, Any] = {"type": kind}
    if kind == "string":
        low = generator.randrange(4)
        schema |= generator.choice(
            [{"minLength": low, "maxLength": low + 3}, {"pattern": "^[a-f]{2,5}$"}]
        )
    elif kind in ("integer", "number") and generator.random() < 0.7:
        low = generator.randrange(-50, 50)
        schema |= {"minimum": low, "maximum": low + generator.randrange(30)}
    elif kind == "array":
        low = generator.randrange(3)
        schema |= {"items": random_schema(generator, depth + 1)}
        schema |= {"minItems": low, "maxItems": low + generator.randrange(3)}
    elif kind == "object":
        names = generator.sample(["a", "bc", "d e", "ü", '"'], generator.randrange(4))
        schema["properties"] = {name: random_schema(generator, depth + 1) for name in names}
        schema["required"] = [name for name in names if generator.random() < 0.6]
        schema["additionalProperties"] = False
    return schema


TYPES: dict[str, Any] = {
    "string": str,
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value has the schema: the keywords of `random_schema`."""
    if "enum" in schema or "const" in schema:
        options = schema.get("enum", [schema.get("const")])
        return any(value == item and type(value) is type(item) for item in options)
    if "anyOf" in schema:
        return any(is_valid(value, option) for option in schema["anyOf"])
    kind = schema["type"]
    if kind in ("integer", "number"):
        is_number = type(value) is int or (kind == "number" and type(value) is float)
        low, high = schema.get("minimum", -np.inf), schema.get("maximum", np.inf)
        return is_number and low <= value <= high
    if type(value) is not TYPES[kind]:
        return False
    if kind == "string":
        in_range = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1000)
        return in_range and re.search(schema.get("pattern", ""), value) is not None
    if kind == "array":
        in_range = schema["minItems"] <= len(value) <= schema["maxItems"]
        return in_range and all(is_valid(item, schema["items"]) for item in value)
    if kind == "object":
        properties = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(properties) and all(
            is_valid(item, properties[name]) for name, item in value.items()
        )
    return True


def test_outputs_have_random_schemas(engine: InferenceEngine) -> None:
    schemas = [random_schema(random.Random(seed)) for seed in range(200)]
    requests = [
        (PROMPT, sampled(seed, json=json.dumps(schema))) for seed, schema in enumerate(schemas)
    ]
    outputs = run(engine, requests)
    truncated = []
    for seed, (schema, output) in enumerate(zip(schemas, outputs, strict=True)):
        (completion,) = output.outputs
        assert completion.finish_reason in ("stop", "length"), (seed, completion.error)
        if completion.finish_reason == "length":
            truncated.append(seed)
            continue
        assert is_valid(json.loads(completion.text), schema), (seed, schema, completion.text)
    assert len(truncated) < 10, truncated
    assert len({output.outputs[0].text for output in outputs}) > 100


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer", "minimum": 3}, 2),
        ({"type": "integer"}, 2.5),
        ({"type": "boolean"}, 1),
        ({"enum": [1, "x"]}, True),
        ({"type": "string", "minLength": 2}, "a"),
        ({"type": "string", "pattern": "^b$"}, "ab"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 0, "maxItems": 1}, [1]),
        ({"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}, {}),
        ({"type": "object", "properties": {"a": {"const": 7}}, "required": []}, {"b": 7}),
        ({"anyOf": [{"type": "null"}, {"const": "only"}]}, "other"),
    ],
)
def test_validator_rejects_values_without_the_schema(schema: dict[str, Any], value: Any) -> None:
    assert not is_valid(value, schema)


def test_any_json_object(engine: InferenceEngine) -> None:
    completions = generate(engine, replace(sampled(json_object=True), n=8))
    complete = [one.text for one in completions if one.finish_reason == "stop"]
    assert complete and all(isinstance(json.loads(text), dict) for text in complete)


# --- other structures


def test_regex_matches_the_entire_output(engine: InferenceEngine) -> None:
    completions = generate(engine, replace(sampled(regex=r"[a-c]{3}(é|[0-9]+)?;"), n=12))
    for completion in completions:
        assert re.fullmatch(r"[a-c]{3}(é|[0-9]+)?;", completion.text), completion.text
        assert completion.finish_reason == "stop" and completion.stop_reason is None
    assert len({completion.text for completion in completions}) > 6


def test_choice_is_one_of_the_texts(engine: InferenceEngine) -> None:
    options = ("yes", "no", 'é\n"\\ ', "yes, but")
    texts = {one.text for one in generate(engine, replace(sampled(choice=options), n=32))}
    assert texts <= set(options) and len(texts) > 2


def test_grammar_in_lark_syntax(engine: InferenceEngine) -> None:
    grammar = 'start: "(" start ")" | "x"'
    for completion in generate(engine, replace(sampled(grammar=grammar), n=8)):
        assert re.fullmatch(r"(\(*)x(\)*)", completion.text)
        assert completion.text.count("(") == completion.text.count(")")


def test_structure_begins_after_the_reasoning(engine: InferenceEngine) -> None:
    outer = allow_reasoning("q", {})
    params = replace(sampled(regex="[ab]{4}", outer_grammar=outer), logit_bias=((113, 5.0),))
    texts = [one.text for one in generate(engine, replace(params, n=4))]
    for text in texts:
        _, _, answer = text.partition("q")
        assert re.fullmatch(r"\n*[ab]{4}", answer), text
    assert any(text.partition("q")[0] for text in texts)


# --- combinations with other parameters


def test_end_token_is_allowed_only_where_the_text_is_complete(engine: InferenceEngine) -> None:
    params = sampled(regex="(ab)+")
    biased = replace(params, logit_bias=((EOS, 100.0),))
    assert [one.text for one in generate(engine, biased)] == ["ab"]
    (completion,) = generate(engine, replace(params, ignore_eos=True, max_new_tokens=9))
    assert (completion.text, completion.finish_reason) == ("ababababa", "length")
    (completion,) = generate(engine, replace(biased, min_tokens=5))
    assert completion.text == "ababab" and completion.stop_reason == EOS


def test_complete_structure_ends_the_output_before_min_tokens(engine: InferenceEngine) -> None:
    (completion,) = generate(engine, replace(sampled(choice=("ab",)), min_tokens=10))
    assert (completion.text, completion.finish_reason) == ("ab", "stop")


def test_last_allowed_token_that_completes_the_structure_is_a_stop(engine: InferenceEngine) -> None:
    (completion,) = generate(engine, sampled(choice=("ab",), max_new_tokens=2))
    assert (completion.text, completion.finish_reason) == ("ab", "stop")
    (completion,) = generate(engine, sampled(choice=("abc",), max_new_tokens=2))
    assert (completion.text, completion.finish_reason) == ("ab", "length")


def test_stop_string_truncates_the_structure(engine: InferenceEngine) -> None:
    (completion,) = generate(engine, replace(sampled(choice=("abcd",)), stop=("c",)))
    assert (completion.text, completion.stop_reason) == ("ab", "c")


def test_stop_token_that_the_grammar_needs_is_not_sampled_before_the_end(
    engine: InferenceEngine,
) -> None:
    (completion,) = generate(engine, replace(sampled(regex="[ab]{8}"), stop_token_ids=(97,)))
    assert completion.text == "b" * 8


def test_masks_that_exclude_each_other_end_the_request_with_an_error(
    engine: InferenceEngine,
) -> None:
    (completion,) = generate(engine, replace(sampled(choice=("ab",)), allowed_token_ids=(97,)))
    assert completion.finish_reason == "error" and completion.text == "a"
    assert completion.error is not None
    assert "allowed_token_ids and the grammar mask all tokens" in completion.error


# --- independence of requests


def test_drafts_do_not_change_structured_outputs(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(vocab_size=257, max_seq_len=512, init_std=0.3))
    schema = json.dumps({"type": "array", "items": {"enum": ["abc", 12]}, "minItems": 6})
    structures = ({"json": schema}, {"regex": "(ab){3,9}[xy]{4}"}, {"choice": ("aaaaaaaa", "b")})
    requests = [
        (PROMPT, replace(sampled(seed, max_new_tokens=70, **structure), n=2))
        for seed, structure in enumerate(structures)
    ]
    options: dict[str, Any] = {"tokenizer": ByteTokenizer(), "eos": frozenset([EOS])}
    expected = run(build(model, **options), requests)
    engine = build(model, speculation="ngram", **options)
    outputs = run(engine, requests)
    for output, other in zip(outputs, expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in other.outputs]
        assert [one.finish_reason for one in output.outputs] == ["stop", "stop"]
    assert engine.scheduler.make_stats().num_accepted_tokens > 0


def test_failing_grammar_ends_only_its_own_request(engine: InferenceEngine) -> None:
    good = replace(sampled(5, regex="[a-z]{20}"), n=2)
    plain = SamplingParams(seed=5, max_new_tokens=20)
    expected = [run(engine, [(PROMPT, params)])[0] for params in (good, plain)]
    bad = replace(sampled(), structured_outputs=TOO_COMPLEX)
    first, failed, last = run(engine, [(PROMPT, good), (PROMPT, bad), (PROMPT, plain)])
    (completion,) = failed.outputs
    assert completion.finish_reason == "error" and completion.error is not None
    assert "structured_outputs cannot be matched (lexer error" in completion.error
    assert "Use a simpler schema or grammar." in completion.error
    for output, reference in zip((first, last), expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [
            one.token_ids for one in reference.outputs
        ]


def test_failure_while_the_mask_is_computed_ends_only_its_own_request(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed_tokens = GrammarState.allowed_tokens

    def fail_after_two(self: GrammarState) -> Any:
        if b"broken" in self._matcher.compute_ff_bytes():
            self._matcher.consume_token(0)
        return allowed_tokens(self)

    monkeypatch.setattr(GrammarState, "allowed_tokens", fail_after_two)
    bad, good = sampled(choice=("broken",)), sampled(regex="[a-z]{9}")
    failed, output = run(engine, [(PROMPT, bad), (PROMPT, good)])
    assert failed.outputs[0].finish_reason == "error" and failed.outputs[0].token_ids == []
    assert output.outputs[0].finish_reason == "stop" and len(output.outputs[0].text) == 9


def test_tokens_equal_those_of_the_request_alone(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(vocab_size=257, max_seq_len=512, init_std=0.3))
    schemas = [json.dumps(random_schema(random.Random(seed))) for seed in range(12)]
    requests = [
        (PROMPT, replace(sampled(seed, json=schema, max_new_tokens=60), n=1 + seed % 3))
        for seed, schema in enumerate(schemas)
    ]
    options: dict[str, Any] = {"tokenizer": ByteTokenizer(), "eos": frozenset([EOS])}
    engine = build(model, num_blocks=40, max_model_len=100, max_num_seqs=12, **options)
    batched = run(engine, requests, {number: number % 5 for number in range(12)})
    assert sum(output.num_preemptions for output in batched) > 0
    alone = build(model, max_num_seqs=3, **options)
    for request, output in zip(requests, batched, strict=True):
        (expected,) = run(alone, [request])
        assert [one.token_ids for one in output.outputs] == [
            one.token_ids for one in expected.outputs
        ]


# --- states


def test_masks_after_drafts_are_those_of_the_state_after_them() -> None:
    compiler = GrammarCompiler(ByteTokenizer(), vocab_size=300)
    grammar = compiler.compile(StructuredOutputsParams(regex="[ab]{2}c*"))
    state = grammar.start(frozenset([EOS]))
    expected = []
    trial = state.copy()
    for token in (97, 98, 99):
        expected.append(trial.allowed_tokens().tolist())
        trial.accept(token)
    expected.append(trial.allowed_tokens().tolist())
    assert compute_masks(state, (97, 98, 99)).tolist() == expected
    assert compute_masks(state, ()).tolist() == expected[:1]
    # nothing follows a forbidden draft or the end
    assert compute_masks(state, (97, 99, 97)).tolist() == [expected[0], *[expected[1]] * 3]
    state.accept(97)
    state.accept(98)
    assert compute_masks(state, (EOS, 99)).tolist() == [expected[2]] * 3
    state.accept(EOS)  # not part of the text
    assert np.flatnonzero(state.allowed_tokens()).tolist() == [99, EOS]


@pytest.mark.parametrize("kind", ["byte", "bpe", "metaspace", "sentencepiece", "tiktoken"])
def test_allowed_tokens_of_every_tokenizer_spell_the_structure(kind: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(kind, tmp_path)
    pattern = r'\{"name": "the [a-z☕]{1,4}", "END": [0-9]{2}\}'
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size + 5)
    grammar = compiler.compile(StructuredOutputsParams(regex=pattern))
    for seed in range(10):
        generator = random.Random(seed)
        state, decoder = grammar.start(frozenset()), StreamDecoder(tokenizer)
        decoder.push(tokenizer.encode("x")[-1])
        text = ""
        while not state.is_finished:
            token = generator.choice(np.flatnonzero(state.allowed_tokens()).tolist())
            state.accept(token)
            text += decoder.push(token)
        assert re.fullmatch(pattern, text + decoder.finish()), (seed, text)


@pytest.mark.parametrize("kind", ["byte", "bpe", "metaspace", "sentencepiece", "tiktoken"])
def test_bytes_of_tokens_spell_the_text(kind: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(kind, tmp_path)
    known = tokenizer.token_bytes()
    assert len(known) == tokenizer.vocab_size
    assert all(known[token] is None for token in tokenizer.specials.values())
    for text in ("the other END", "naïve ☕\n漢字  {}", "\x00\x7f\xff"):
        ids = tokenizer.encode_marked(text)
        spelled = b"".join(known[token] or b"" for token in ids).decode()
        assert spelled.removeprefix(" ") == tokenizer.decode(ids)
        assert len(spelled) > 2


def test_token_with_a_character_that_is_no_byte_is_never_allowed(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("bpe", tmp_path)
    file = tmp_path / "bpe" / "tokenizer.json"
    description = json.loads(file.read_text())
    vocabulary, token = description["model"]["vocab"], tokenizer.vocab_size
    vocabulary["a漢"] = token
    file.write_text(json.dumps(description))
    tokenizer = HuggingFaceTokenizer(str(file.parent))
    known = tokenizer.token_bytes()
    assert known[token] is None and known[vocabulary["a"]] == b"a"
    any_text = StructuredOutputsParams(regex="(?s:.*)")
    grammar = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(any_text)
    allowed = grammar.start(frozenset()).allowed_tokens()
    assert allowed[vocabulary["a"]] and not allowed[token]


def test_tokenizer_without_bytes_is_rejected(tmp_path: Path, engine: InferenceEngine) -> None:
    with pytest.raises(DataError, match=r"tokenizer.kind=null: its ids have no text. Use a model"):
        GrammarCompiler(make_tokenizer("null", tmp_path), 12).compile(TOO_COMPLEX)
    tokenizer = make_tokenizer("metaspace", tmp_path)
    tokenizer._tokenizer.decoder = __import__("tokenizers").decoders.WordPiece()  # type: ignore[attr-defined]  # of its library
    with pytest.raises(DataError, match="not known, because it decodes with WordPiece. Use a"):
        GrammarCompiler(tokenizer, 400).compile(TOO_COMPLEX)


# --- errors

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (
            {"json": json.dumps({"properties": {"a": {"anyOf": [{}, {"type": "strin"}]}}})},
            r"structured_outputs.json is not valid at #/properties/a/anyOf/1: Invalid type: strin",
        ),
        (
            {"json": '{"properties": {"a": {"pattern": "(", "type": "string"}}}'},
            "is not valid at #/properties/a: unclosed group. Correct it.",
        ),
        (
            {"json": '{"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"not": {}}}}'},
            r'is not valid at #/properties/a: Unimplemented keys: \["not"\]. Correct it.',
        ),
        ({"json": '{"const": 1e999}'}, r"structured_outputs.json is not valid: .*(number|nfinit)"),
        ({"json": '{"properties": 5}'}, "is not valid: properties must be an object. Correct it."),
        (
            {"json": '{"type": "integer", "minimum": 5, "maximum": 3}'},
            "json is not valid: Unsatisfiable schema: minimum .5. is greater than maximum .3.",
        ),
        ({"json": '{"$ref": "#"}'}, "json matches no text, so there is no output. Correct it."),
        ({"regex": "(a"}, "structured_outputs.regex is not valid: unclosed group. Correct it."),
        ({"regex": "a(?=b)"}, "regex is not valid: look-around, including look-ahead and"),
        ({"regex": r"[^\s\S]"}, "structured_outputs.regex matches no text, so there is no output"),
        ({"grammar": "start: x"}, r'grammar is not valid: at 1\(8\): unknown name: "x". Correct'),
    ],
)
def test_invalid_structure_is_reported(
    engine: InferenceEngine, structure: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.add_request(PROMPT, sampled(**structure))
    assert not engine.has_unfinished


def test_error_in_a_schema_of_many_is_located_with_few_compilations(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[object] = []
    build_matcher = structured_output._build_matcher

    def count(*arguments: Any) -> Any:
        compiled.append(arguments)
        return build_matcher(*arguments)

    monkeypatch.setattr(structured_output, "_build_matcher", count)
    for size, message in ((9, "at #/properties/9: Invalid"), (900, "is not valid: Invalid type")):
        compiled.clear()
        properties: dict[str, Any] = {str(index): {} for index in range(size)}
        schema = {"properties": properties | {str(size): {"type": "strin"}}}
        with pytest.raises(ConfigError, match=message):
            engine.add_request(PROMPT, sampled(json=json.dumps(schema)))
        assert len(compiled) < 70


DEEP = '{"items": ' * 64 + '{"type": "null"}' + "}" * 64


def test_tokens_are_prepared_once_before_the_first_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = structured_output._import_library()
    vocabularies: list[Any] = []

    def build(vocabulary: Any) -> Any:
        vocabularies.append(vocabulary)
        return library.LLTokenizer(vocabulary)

    counting = SimpleNamespace(LLTokenizer=build, LLMatcher=library.LLMatcher)
    monkeypatch.setattr(structured_output, "_import_library", lambda: counting)
    compiler = GrammarCompiler(ByteTokenizer(), 257)
    compiler.prepare()
    assert len(vocabularies) == 1
    compiler.compile(StructuredOutputsParams(regex="a"))
    assert len(vocabularies) == 1
    GrammarCompiler(NullTokenizer(12), 12).prepare()  # its tokens have no text


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({}, "structured_outputs must have exactly one of json, json_object, regex, choice and"),
        ({"regex": "a", "choice": ["b"]}, "but has regex and choice. Use one."),
        ({"regex": "a" * 4097}, "structured_outputs.regex has 4097 bytes, but the limit is 4096."),
        ({"regex": ""}, "structured_outputs.regex is an empty text, which allows no output. Leave"),
        ({"regex": 5}, "structured_outputs.regex=5 must be a string."),
        ({"json": {"enum": ["a" * 66000]}}, "json has 66014 bytes, but the limit is 65536. Use a"),
        ({"json": DEEP}, "json has arrays and objects nested more than 64 levels. Use fewer, or"),
        ({"json": "{"}, r"structured_outputs.json is not JSON \(Expecting property name.* Use a"),
        ({"json": [1]}, r"structured_outputs.json=\[1\] must be an object. Use a schema, such as"),
        ({"choice": ["a", ""]}, r"choice\[1\] is an empty text, which is part of every text"),
        ({"choice": ["a", 1]}, r"choice=\('a', 1\) must be a list of strings."),
        ({"choice": ["a"] * 1025}, "structured_outputs.choice has 1025 texts, but the limit is"),
        ({"grammar": "a" * 262145}, "structured_outputs.grammar has 262145 bytes, but the limit"),
        ({"regex": "a", "outer_grammar": "q"}, "outer_grammar=q does not refer to @structure. Use"),
        ({"regex": "a", "outer_grammar": "@structure" * 410}, "has 4100 bytes, but the limit is"),
        ({"json_object": "yes"}, "structured_outputs.json_object=yes must be true or false."),
    ],
)
def test_structure_outside_the_limits_is_reported(structure: dict[str, Any], message: str) -> None:
    params = SamplingParams.from_dict({"structured_outputs": structure})
    (problem,) = sampling_problems(params, vocab_size=None)
    assert re.search(message, problem), problem


def test_structure_of_another_type_and_unknown_fields_are_reported() -> None:
    params = SamplingParams.from_dict({"structured_outputs": 5})
    (problem,) = sampling_problems(params, vocab_size=None)
    assert problem == (
        "structured_outputs=5 must be an object with json, json_object, regex, choice or grammar. "
        'Use {"choice": ["yes", "no"]}.'
    )
    with pytest.raises(
        ConfigError, match="outputs.regexp: there is no such field. Did you mean re"
    ):
        SamplingParams.from_dict({"structured_outputs": {"regexp": "a"}})


def test_nesting_at_the_limit_is_valid() -> None:
    text = '{"items": ' * 63 + '{"type": "null"}' + "}" * 63
    assert sampling_problems(sampled(json=text), vocab_size=None) == []


@loop_over(
    "structure",
    [{"json": SCHEMA}, {"choice": ["a", "b"]}, {"regex": "a"}, {"json_object": True}],
)
def test_parameters_survive_the_round_trip_as_plain_data(structure: dict[str, Any]) -> None:
    params = SamplingParams.from_dict({"structured_outputs": structure})
    assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params


def test_model_without_a_tokenizer_is_reported(tiny: SimpleNamespace) -> None:
    engine = build(tiny.model(tiny.config()))
    with pytest.raises(ConfigError, match="structured_outputs: the model has no tokenizer, so its"):
        engine.add_request([1], sampled(regex="a"))


def test_missing_package_is_reported_with_the_command_that_installs_it(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r'Install it with: pip install "megalith\[structured\]"'):
        engine.add_request(PROMPT, sampled(regex="a"))


def test_grammars_are_compiled_once(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.grammars is not None
    structure = StructuredOutputsParams(regex="a")
    assert not engine.grammars.is_cached(structure)
    grammar = engine.grammars.compile(structure)
    assert engine.grammars.is_cached(structure)
    assert engine.grammars.compile(StructuredOutputsParams(regex="a")) is grammar
    for number in range(64):
        engine.grammars.compile(StructuredOutputsParams(regex=f"b{number}"))
    assert not engine.grammars.is_cached(structure)
