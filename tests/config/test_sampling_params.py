"""Sampling parameters: valid values, error texts, and conversion from and to JSON data."""

from dataclasses import fields
from typing import Any

import pytest

from megalith.config.fields import range_problems
from megalith.config.generation import (
    SamplingParams,
    _type_problems,
    sampling_problems,
    unknown_field_problem,
)
from megalith.errors import ConfigError
from tests.cases import loop_over

VOCAB = 100


def problems(vocab_size: int | None = VOCAB, **values: Any) -> list[str]:
    return sampling_problems(SamplingParams(**values), vocab_size=vocab_size)


@loop_over(
    "values",
    [
        {},
        {"n": 128, "max_new_tokens": 0, "temperature": 0, "top_k": -1, "top_p": 0, "min_p": 1},
        {"top_k": 0, "top_p": 1, "temperature": 1e-30},
        {"top_k": 10**9, "top_p": 0.5, "min_tokens": 3, "max_new_tokens": 3, "deadline_s": 1},
        {"repetition_penalty": 0.5, "presence_penalty": -2, "frequency_penalty": 2.0},
        {"logit_bias": ((0, -100), (99, 100.0)), "allowed_token_ids": (0, 99)},
        {"stop": ("x" * 256,) * 16, "bad_words": ("a",) * 1024, "stop_token_ids": (0, 99)},
        {"seed": -(2**63), "logprobs": 0, "prompt_logprobs": 20, "cache_salt": "tenant"},
        {"logprobs_mode": "processed", "priority": -5, "ignore_eos": True},
    ],
)
def test_valid_values_are_accepted(values: dict[str, Any]) -> None:
    assert problems(**values) == []


TYPES: dict[str, tuple[Any, str]] = {
    "n": (True, "n=True must be an integer. Use 1."),
    "max_new_tokens": (1.5, "max_new_tokens=1.5 must be an integer. Use 256."),
    "min_tokens": (None, "min_tokens=None must be an integer. Use 0."),
    "temperature": ("hot", "temperature=hot must be a finite number. Use 1.0."),
    "top_k": (False, "top_k=False must be an integer. Use 50."),
    "top_p": (True, "top_p=True must be a finite number. Use 0.9."),
    "min_p": (None, "min_p=None must be a finite number. Use 0.0."),
    "repetition_penalty": (
        10**400,
        f"repetition_penalty=1{'0' * 56}... must be a finite number. Use 1.0.",
    ),
    "presence_penalty": ([], "presence_penalty=[] must be a finite number. Use 0.0."),
    "frequency_penalty": ("0", "frequency_penalty=0 must be a finite number. Use 0.0."),
    "logit_bias": (
        (("7", 1.0),),
        "logit_bias=(('7', 1.0),) must be a mapping from token ids to numbers. Use {\"42\": -100}.",
    ),
    "allowed_token_ids": (
        (1, True),
        "allowed_token_ids=(1, True) must be a list of token ids. Use [42].",
    ),
    "bad_words": ((1,), 'bad_words=(1,) must be a list of strings. Use ["text"].'),
    "stop": ("END", 'stop=END must be a list of strings. Use ["text"].'),
    "stop_token_ids": (5, "stop_token_ids=5 must be a list of token ids. Use [42]."),
    "ignore_eos": (1, "ignore_eos=1 must be true or false. Use false."),
    "include_stop_str_in_output": (
        "yes",
        "include_stop_str_in_output=yes must be true or false. Use false.",
    ),
    "skip_special_tokens": (
        None,
        "skip_special_tokens=None must be true or false. Use true.",
    ),
    "visible_special_tokens": (
        "x",
        'visible_special_tokens=x must be a list of strings. Use ["</think>"].',
    ),
    "seed": (1.0, "seed=1.0 must be an integer. Use 1234."),
    "logprobs": (True, "logprobs=True must be an integer. Use 5."),
    "prompt_logprobs": ("5", "prompt_logprobs=5 must be an integer. Use 5."),
    "logprobs_mode": ("both", "logprobs_mode=both must be raw or processed. Use raw."),
    "priority": (0.5, "priority=0.5 must be an integer. Use 0."),
    "deadline_s": ("1", "deadline_s=1 must be a finite number. Use 60."),
    "structured_outputs": (
        ("json",),
        "structured_outputs=('json',) must be an object with json, json_object, regex, choice or "
        'grammar. Use {"choice": ["yes", "no"]}.',
    ),
    "cache_salt": (3, "cache_salt=3 must be a string. Use text."),
}
"""A value of another type for every field, and the message."""


def test_every_field_rejects_another_type() -> None:
    assert list(TYPES) == [field.name for field in fields(SamplingParams)]
    for name, (value, message) in TYPES.items():
        assert problems(**{name: value}) == [message]
    everything = problems(**{name: value for name, (value, _) in TYPES.items()})
    assert everything == [message for _, message in TYPES.values()]


@loop_over(
    "case",
    [
        ({"n": 0}, "n=0 must be at least 1. Set n to 1 or more."),
        ({"n": 10**6}, "n=1000000 must be at most 128. Set n to 128 or less."),
        (
            {"max_new_tokens": -1},
            "max_new_tokens=-1 must be at least 0. Set max_new_tokens to 0 or more.",
        ),
        (
            {"temperature": float("nan")},
            "temperature=nan must be a finite number of at least 0. Use 1.0.",
        ),
        (
            {"temperature": -0.5},
            "temperature=-0.5 must be a finite number of at least 0. Use 1.0.",
        ),
        ({"top_k": -2}, "top_k=-2 must be at least -1. Use 50."),
        ({"top_p": 1.5}, "top_p=1.5 must be at most 1. Set top_p to 1 or less."),
        ({"min_p": -0.1}, "min_p=-0.1 must be a finite number of at least 0. Use 0.05."),
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty=0.0 must be a finite number above 0. Use 1.0.",
        ),
        (
            {"presence_penalty": 2.5},
            "presence_penalty=2.5 must be at most 2. Set presence_penalty to 2 or less.",
        ),
        (
            {"frequency_penalty": float("-inf")},
            "frequency_penalty=-inf must be a finite number of at least -2. Use 0.0.",
        ),
        ({"logprobs": 21}, "logprobs=21 must be at most 20. Set logprobs to 20 or less."),
        (
            {"prompt_logprobs": -1},
            "prompt_logprobs=-1 must be at least 0. Set prompt_logprobs to 0 or more.",
        ),
        ({"deadline_s": 0}, "deadline_s=0 must be above 0. Use 60.0."),
        (
            {"stop": ("a",) * 17},
            "stop has 17 texts, but the limit is 16. Pass 16 or less.",
        ),
        (
            {"stop": ("a", "")},
            "stop[1] is an empty text, which is part of every text. Remove it.",
        ),
        (
            {"stop": ("a", "b" * 257)},
            f"stop[1]={'b' * 57}... has 257 characters, but the limit is 256. Use a shorter text.",
        ),
        *(
            (
                {name: ("\U0001f600", "a\udc80b", "\ud83d")},
                f"{name}[1] has the unpaired surrogate U+DC80, which is no character, so no output "
                "contains it. Remove it.",
            )
            for name in ("stop", "bad_words")
        ),
        (
            {"bad_words": ("a",) * 1025},
            "bad_words has 1025 texts, but the limit is 1024. Pass 1024 or less.",
        ),
        (
            {"logit_bias": tuple((token, 1) for token in range(1025))},
            "logit_bias has 1025 token ids, but the limit is 1024. Pass 1024 or less.",
        ),
        (
            {"logit_bias": ((3, 100.5),)},
            "logit_bias[3]=100.5 must be a finite number from -100 to 100. "
            "Use -100 to ban a token.",
        ),
        (
            {"logit_bias": ((3, float("nan")),)},
            "logit_bias[3]=nan must be a finite number from -100 to 100. Use -100 to ban a token.",
        ),
        (
            {"logit_bias": ((3, 1), (3, 2))},
            "logit_bias has the token id 3 2 times. Pass each id once.",
        ),
        (
            {"allowed_token_ids": ()},
            "allowed_token_ids is empty, so no token could be sampled. Leave it unset.",
        ),
        (
            {"stop_token_ids": (-1,)},
            "stop_token_ids has the token id -1: ids of the model are at least 0. "
            "Use an id of its tokenizer.",
        ),
        (
            {"seed": 2**63},
            "seed=9223372036854775808 must be a signed 64-bit integer. Use 1234.",
        ),
        (
            {"cache_salt": ""},
            "cache_salt is an empty text, which separates nothing. Leave it unset.",
        ),
        (
            {"min_tokens": 11, "max_new_tokens": 10},
            "min_tokens=11 is more than max_new_tokens=10, so the output could not end. "
            "Set min_tokens to 10 or less.",
        ),
    ],
)
def test_invalid_values_are_reported(case: tuple[dict[str, Any], str]) -> None:
    values, message = case
    assert problems(None, **values) == [message]


def test_token_ids_are_compared_with_the_vocabulary() -> None:
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        value: Any = ((VOCAB, 1.0),) if name == "logit_bias" else (5, VOCAB)
        assert problems(**{name: value}) == [
            f"{name} has the token id 100: ids of the model are from 0 to 99. "
            "Use an id of its tokenizer."
        ]
        assert problems(None, **{name: value}) == []


def test_all_problems_are_reported_together() -> None:
    assert len(problems(n=0, top_k=-2, top_p=2, stop=("",), seed=2**70, min_p=True)) == 6


def test_json_data_round_trips() -> None:
    data = {"stop": "END", "logit_bias": {"5": 1.5, "3": -2}, "bad_words": ["x"], "top_k": 5}
    params = SamplingParams.from_dict(data)
    assert params == SamplingParams(
        stop=("END",), logit_bias=((5, 1.5), (3, -2)), bad_words=("x",), top_k=5
    )
    assert params.to_dict() == data | {"stop": ["END"]}
    assert SamplingParams.from_dict(params.to_dict()) == params
    assert hash(params) == hash(SamplingParams.from_dict(data))
    pairs = SamplingParams.from_dict({"logit_bias": {"x": 1}, "stop_token_ids": 3})
    assert len(sampling_problems(pairs, vocab_size=None)) == 2  # rejected, not a crash


def test_unknown_names_are_rejected_with_the_nearest_name() -> None:
    message = "topk: there is no such sampling parameter. Did you mean top_k"
    assert unknown_field_problem("topk").startswith(message)
    assert unknown_field_problem("zzz").startswith(
        "zzz: there is no such sampling parameter. Use one of n, max_new_tokens,"
    )
    with pytest.raises(ConfigError, match=r"(?s)topk: .*\nseeed: .*Did you mean seed"):
        SamplingParams.from_dict({"topk": 1, "seeed": 1, "n": 1})


def test_values_that_turn_a_filter_off_are_equal_to_unset() -> None:
    for value in (None, 0, -1):
        assert SamplingParams(top_k=value).active_top_k is None
    for share in (None, 0, 0.0, 1, 1.0):
        assert SamplingParams(top_p=share).active_top_p is None
    assert SamplingParams(top_k=7).active_top_k == 7
    assert SamplingParams(top_p=0.5).active_top_p == 0.5
    assert SamplingParams(temperature=0.0).is_greedy and SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy
    assert SamplingParams(presence_penalty=-1).has_penalties
    assert not SamplingParams(min_p=0.5).has_penalties


def test_defaults_are_valid_so_that_only_changed_fields_are_checked() -> None:
    params = SamplingParams()
    assert _type_problems(params, [field.name for field in fields(params)]) == {}
    assert range_problems(params) == []
    changed = range_problems(SamplingParams(n=0, min_p=2.0, top_p=-1.0), names=["min_p", "n"])
    assert [problem.split(" ")[0] for problem in changed] == ["min_p=2.0", "n=0"]
