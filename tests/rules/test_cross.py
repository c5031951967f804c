"""What layers that look at a memory cannot be combined with is refused, with what to set
instead."""

from dataclasses import replace
from typing import Any

import pytest

from megalith.config.model import (
    AttentionConfig,
    CrossConfig,
    LayersConfig,
    MLAConfig,
    ModelConfig,
    MTPConfig,
)
from megalith.plan.costs import layer_flops, num_parameters, step_flops
from megalith.rules.model import cross_problems, network_problems

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=10,
    max_seq_len=32,
)
HALF = CrossConfig(memory=2)


def test_valid_cross_layer_sources_violate_no_rule() -> None:
    assert cross_problems(MODEL) == []
    for memory in range(4):
        assert network_problems(replace(MODEL, cross=CrossConfig(memory=memory))) == []
    parts = LayersConfig(attention=("none", "full"), mlp=("full", "linear"))
    assert (
        network_problems(
            replace(MODEL, cross=CrossConfig(memory=1, layers=(True, False)), layers=parts)
        )
        == []
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"cross": CrossConfig(memory=4)},
            ("model.cross.memory=4 must be from 0 to 3", "Set model.cross.memory to 2"),
        ),
        ({"cross": CrossConfig(memory=-1)}, ("model.cross.memory=-1 must be from 0 to 3",)),
        (
            {"cross": CrossConfig(memory=2, layers=(True, False, True))},
            (
                "model.cross.layers has 3 values for the 2 layers from model.cross.memory=2 on",
                "Use 2 values or fewer",
            ),
        ),
        (
            {"cross": CrossConfig(memory=2, layers=(False,))},
            ("model.cross.layers=[false]: no layer attends", "to [true, false]"),
        ),
        (
            {"block": "parallel", "cross": HALF},
            ("with model.block=parallel", "Set model.block=sequential"),
        ),
        (
            {
                "cross": HALF,
                "num_kv_heads": 4,
                "mla": MLAConfig(kv_rank=5, nope_dim=3, rope_dim=2, value_dim=3),
            },
            ("with model.mla.kv_rank=5", "Remove model.mla, or model.cross"),
        ),
        (
            {"cross": HALF, "mtp": MTPConfig(num_layers=1)},
            ("with model.mtp.num_layers=1", "Set model.mtp.num_layers=0"),
        ),
        (
            {"cross": HALF, "layers": LayersConfig(mlp=("full", "none"))},
            (
                "model.layers.mlp=[full, none]: layer 3 attends to the source layer and has no",
                "or set its value in model.cross.layers to false",
            ),
        ),
    ],
)
def test_unsupported_combinations_are_rejected(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    (problem,) = network_problems(replace(MODEL, **changes))
    assert all(word in problem for word in words), problem


def test_cross_layer_source_is_needed_up_to_the_last_layer_that_uses_it() -> None:
    model = replace(MODEL, num_layers=6, cross=CrossConfig(memory=1, layers=(False, True)))
    assert [model.uses_cross_layer_source(layer) for layer in range(6)] == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]
    assert [model.needs_cross_layer_source(layer) for layer in range(7)] == [
        False,
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    assert [
        model.find_cross_layer_source(range(*ends)) for ends in ((0, 1), (0, 3), (1, 3), (2, 6))
    ] == [
        None,
        1,
        0,
        None,
    ]
    assert not any(
        MODEL.uses_cross_layer_source(layer) or MODEL.needs_cross_layer_source(layer)
        for layer in range(4)
    )


def test_cross_layer_attention_flops_are_those_of_full_attention() -> None:
    """h = 16, 4 heads on 2 of 4 features: q, kv and o have 256 elements each, and each look a norm;
    the memory one."""
    looking = replace(MODEL, cross=HALF)
    assert num_parameters(looking) - num_parameters(MODEL) == 2 * (3 * 256 + 16) + 16
    seen = {"tokens": 20, "squared_lengths": 200}
    each = layer_flops(looking, 3, **seen) - layer_flops(looking, 1, **seen)
    assert each == 6 * 20 * 3 * 256 + 6 * 200 * 4 * 4
    assert step_flops(looking, **seen) - step_flops(MODEL, **seen) == 2 * each
    windowed = replace(looking, attention=AttentionConfig(window=3))
    assert layer_flops(windowed, 3, **seen) - layer_flops(windowed, 1, **seen) == each
