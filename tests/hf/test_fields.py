"""Reading config.json field by field."""

from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.hf.config_fields import (
    ACTIVATIONS,
    ALLOWED_FALSE,
    Fields,
    hf_activation_name,
    translate_field_names,
)


def problems(fields: Fields) -> str:
    """What it would say."""
    with pytest.raises(ConfigError) as excinfo:
        fields.raise_problems()
    return str(excinfo.value)


def test_values_of_the_right_kind_are_given_as_they_are() -> None:
    fields = Fields(
        {
            "a": 3,
            "b": 2,
            "c": True,
            "d": "gelu_new",
            "e": None,
            "f": [1, 0, 0],
            "_note": "x",
            "off": None,
        }
    )
    assert (
        fields.read_int("a"),
        fields.read_number("b", 1.0),
        fields.read_flag("c"),
        fields.read_activation("d"),
    ) == (
        3,
        2.0,
        True,
        "gelu_tanh",
    )
    assert fields.read_optional_int("e") is None and fields.read_optional_number("e", 5.0) is None
    assert fields.read_layer_flags("f", 2, {1: True, 0: False}) == (True, False)
    fields.raise_problems()


def test_missing_fields_have_their_defaults() -> None:
    fields = Fields({})
    assert (fields.read_int("a", 7), fields.read_number("a", 0.5), fields.read_flag("a", True)) == (
        7,
        0.5,
        True,
    )
    assert (
        fields.read_optional_number("a", 50.0),
        fields.read_optional_int("a"),
        fields.read_value("a"),
    ) == (
        50.0,
        None,
        None,
    )
    assert (
        fields.read_choice("a", {"x": 1, "y": 2}, "y") == 2
        and fields.read_layer_flags("a", 3, {}) is None
    )
    fields.raise_problems()


@pytest.mark.parametrize(
    ("value", "ask", "message"),
    [
        (0, lambda f: f.read_int("a"), "a=0: expected a whole number above 0."),
        (None, lambda f: f.read_int("a"), "a=None: expected a whole number above 0."),
        (True, lambda f: f.read_int("a", 3), "a=True: expected a whole number above 0."),
        (0, lambda f: f.read_number("a", 1.0), "a=0: expected a number above 0."),
        (
            -1,
            lambda f: f.read_number("a", 1.0, zero=True),
            "a=-1: expected a number of at least 0.",
        ),
        ("9", lambda f: f.read_optional_number("a"), "a='9': expected a number above 0."),
        ("yes", lambda f: f.read_flag("a"), "a='yes': expected true or false."),
        (
            ["x"],
            lambda f: f.read_choice("a", {"x": 1, "y": 2}, "x"),
            "a=['x'] is not supported: it must be one of 'x', 'y'",
        ),
        (2, lambda f: f.require("a", 1), "a=2 is not supported: it must be 1."),
        (
            [1],
            lambda f: f.read_layer_flags("a", 2, {1: True, 0: False}),
            "a=[1]: expected 1 or 0 for each of 2 layers.",
        ),
        (
            False,
            lambda f: f.read_value("b"),
            "a=False: unknown field, which may change what the model computes. Remove it",
        ),
        (
            5,
            lambda f: f.read_value("b"),
            "a=5: unknown field, which may change what the model computes. Remove it",
        ),
    ],
)
def test_other_values_are_rejected(value: Any, ask: Any, message: str) -> None:
    fields = Fields({"a": value})
    ask(fields)
    assert message in problems(fields)


def test_all_problems_are_reported_together_without_duplicates() -> None:
    fields = Fields({"a": -1, "odd": 1})
    for _ in range(2):
        fields.read_int("a")
    fields.read_int("b")
    text = problems(fields)
    assert (
        text.startswith("3 settings")
        and text.count("a=-1") == 1
        and "b is missing, expected a whole" in text
    )


def test_only_fields_known_to_have_no_effect_may_be_ignored() -> None:
    fields = Fields(
        {
            "torch_dtype": "bfloat16",
            "eos_token_id": [1],
            "auto_map": {},
            "mine": 3,
            "pruned_heads": {},
        }
    )
    fields.ignore("mine")
    fields.raise_problems()


def test_optional_features_may_be_false_in_families_without_them() -> None:
    Fields(dict.fromkeys(ALLOWED_FALSE, False)).raise_problems()
    assert "attention_bias=True: unknown field" in problems(Fields({"attention_bias": True}))


def test_every_activation_has_a_hugging_face_name() -> None:
    assert {hf_activation_name(ours): ours for ours in ACTIVATIONS.values()} == {
        word: ours for word, ours in ACTIVATIONS.items() if word not in ("swish", "gelu_new")
    }


def test_a_text_about_our_settings_names_the_fields_of_a_config() -> None:
    text = (
        "model.moe.top_k=9 is more than model.moe.num_experts=8. Set model.moe.top_k to 8; or "
        "model.init=normal."
    )
    expected = (
        "num_experts_per_tok=9 is more than n_routed_experts=8. Set num_experts_per_tok to 8; "
        "or model.init=normal."
    )
    assert translate_field_names(text, {"n_routed_experts": 8}) == expected
    raw = {"n_head": 3, "rope_parameters": None, "rope_scaling": {"beta_slow": 3.0}}
    assert (
        translate_field_names("model.num_heads, model.rope.beta_slow", raw)
        == "n_head, rope_scaling.beta_slow"
    )
    assert translate_field_names("model.rope.beta_slow.", {}) == "beta_slow."
