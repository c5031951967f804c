from dataclasses import replace
from typing import Any

import pytest

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.fields import range_problems
from megalith.config.lora import (
    LoraConfig,
    has_adapters,
    lora_layers,
    lora_matrices,
    lora_problems,
    lora_targets,
)
from megalith.config.model import AttentionConfig, MLAConfig, ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig
from megalith.rules.run import run_problems
from megalith.testing.tiny import tiny_run

MODEL = tiny_run().model
LOADED = CheckpointConfig(load="base")


def problems(**changes: Any) -> list[str]:
    lora = LoraConfig(**changes)
    return range_problems(lora, "lora") + lora_problems(lora, MODEL, LOADED, compiled=False)


def test_target_linear_selects_every_linear_layer() -> None:
    assert lora_targets(LoraConfig(), MODEL) == ("q", "kv", "o", "gate_up", "down")
    assert lora_targets(LoraConfig(targets=("down", "q")), MODEL) == ("q", "down")
    other = ModelConfig(vocab_size=8, gated=False, attention=AttentionConfig(gated=True), **SIZES)
    assert lora_matrices(other) == ("q", "kv", "gate", "o", "up", "down")
    latent = ModelConfig(vocab_size=8, mla=MLAConfig(kv_rank=4), **SIZES)
    assert lora_matrices(latent) == ("q", "kv_down", "kv_up", "o", "gate_up", "down")
    short = ModelConfig(vocab_size=8, mla=MLAConfig(kv_rank=4, q_rank=3), **SIZES)
    assert lora_matrices(short)[:3] == ("q_down", "q_up", "kv_down")


def test_adapters_are_limited_to_selected_layers() -> None:
    some = LoraConfig(targets=("q", "down"), layers=(1, 0, 1))
    assert lora_layers(LoraConfig(), MODEL) == tuple(range(MODEL.num_layers)) and lora_layers(
        some, MODEL
    ) == (0, 1)
    last = LoraConfig(targets=("q", "down"), layers=(1,))
    assert has_adapters("layers.1.attention.q", last, MODEL) and has_adapters(
        "layers.1.mlp.down", last, MODEL
    )
    for other in (
        "layers.0.attention.q",
        "layers.1.attention.kv",
        "layers.1.mlp.experts.down",
        "mtp.1.layer.mlp.down",
    ):
        assert not has_adapters(other, last, MODEL)


SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 2,
    "ffn_hidden_size": 8,
    "max_seq_len": 8,
}


def test_the_scale_is_alpha_over_the_rank_or_over_its_root() -> None:
    assert LoraConfig(rank=16, alpha=32).scale == 2.0
    assert LoraConfig(rank=16, alpha=32, rslora=True).scale == 8.0


def test_a_run_without_adapters_has_no_problem_with_them() -> None:
    assert lora_problems(None, MODEL, CheckpointConfig(), compiled=True) == []
    assert problems() == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rank": 0}, "lora.rank=0 must be at least 1. Use 16."),
        ({"alpha": 0.0}, "lora.alpha=0.0 must be a finite number above 0. Use 32.0."),
        ({"alpha": float("inf")}, "lora.alpha=inf must be a finite number above 0. Use 32.0."),
        ({"alpha": float("nan")}, "lora.alpha=nan must be a finite number above 0. Use 32.0."),
        (
            {"dropout": 1.0},
            "lora.dropout=1.0 must be below 1. Use 0.05.",
        ),
        (
            {"dropout": float("nan")},
            "lora.dropout=nan must be a finite number of at least 0. Use 0.05.",
        ),
        (
            {"layers": (0, 2)},
            "lora.layers=[0, 2]: model.num_layers=2 has layers 0 to 1. Use one or more of them, or",
        ),
        (
            {"layers": ()},
            "lora.layers=[]: model.num_layers=2 has layers 0 to 1. Use one or more of them, or "
            "remove",
        ),
        (
            {"targets": ()},
            "lora.targets=[] selects nothing to train. Use one or more of ['q', 'kv', 'o', "
            "'gate_up', ",
        ),
        (
            {"targets": ("gate_upp",)},
            "lora.targets=gate_upp: this model has no such target for adapters. Did you ",
        ),
        (
            {"targets": ("up",)},
            "lora.targets=up: this model has no such target for adapters. Use one or more of "
            "['q', 'kv', 'o'",
        ),
    ],
)
def test_invalid_values_are_rejected(changes: dict[str, Any], text: str) -> None:
    (result,) = problems(**changes)
    assert text in result


def test_all_problems_are_reported_with_those_of_the_run() -> None:
    run = tiny_run(
        {
            "lora.dropout": "1.0",
            "lora.targets": "[qq]",
            "train.compile": "true",
            "checkpoint.skip": "[head.*]",
        }
    )
    results = [text for text in run_problems(run, 1) if "lora" in text]
    assert len(results) == 5
    assert any(
        text.startswith("checkpoint.load=None with lora.rank=16: adapters need a pretrained")
        for text in results
    )
    assert any("Set train.compile=false." in text for text in results)
    assert any("would stay random" in text for text in results)


def test_targets_missing_in_all_selected_layers_are_rejected() -> None:
    """Experts have no adapters; attention beside them does."""
    model = replace(MODEL, moe=MoEConfig(num_experts=4, ffn_hidden_size=6, layers=(False, True)))
    result = lora_problems(
        LoraConfig(targets=("down",), layers=(1,)), model, LOADED, compiled=False
    )
    assert [text.split(":")[0] for text in result] == ["lora.targets=['down']"]
    assert "set lora.layers to other layers" in result[0]
    for good in (LoraConfig(targets=("down",)), LoraConfig(layers=(1,))):
        assert lora_problems(good, model, LOADED, compiled=False) == []


@pytest.mark.parametrize(
    "name", ["sequence_coeff", "batch_coeff", "global_batch_coeff", "z_loss_coeff"]
)
def test_aux_losses_are_rejected_with_frozen_routers(name: str) -> None:
    balance: dict[str, Any] = {name: 0.1}
    model = replace(
        MODEL, moe=MoEConfig(num_experts=4, ffn_hidden_size=6, aux_loss=AuxLossConfig(**balance))
    )
    (text,) = lora_problems(LoraConfig(rank=3), model, LOADED, compiled=False)
    assert text == (
        f"model.moe.aux_loss.{name}=0.1 with lora.rank=3: routers are frozen, so the loss would "
        f"only change the adapters below them. Set model.moe.aux_loss.{name}=0."
    )
