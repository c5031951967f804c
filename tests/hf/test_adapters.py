"""Adapters of any form are boxes of W + scale · B · A, and a base is known by its values."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.config.lora import LoraConfig, lora_matrices
from megalith.config.model import ModelConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.families import GPT2, LLAMA
from megalith.hf.peft import (
    AdaptedWeights,
    Adapters,
    adapter_shape,
    check_adapter_names,
    describe_adapter_differences,
    find_peft_layers,
    fingerprint,
)
from megalith.hf.release import parameters
from megalith.plan.shards import Box

MODEL = ModelConfig(
    vocab_size=61,
    pad_vocab_to_multiple_of=4,
    hidden_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    ffn_hidden_size=10,
    max_seq_len=16,
)
SHAPES = {shard.name: shard.shape for shard in parameters(MODEL)}


class Values:
    """Made-up weights."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, factor: float = 1.0) -> None:
        self.kept, self.factor = dtype, factor

    def dtype(self, parameter: str) -> torch.dtype:
        return self.kept

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        values = drawn(parameter, SHAPES[parameter]) * self.factor
        return values[tuple(slice(*span) for span in box)].to(self.kept).to(dtype)


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))


def adapters(lora: LoraConfig) -> Adapters:
    def read(name: str) -> Tensor:
        parameter, _, word = name.rpartition(".lora_")
        return drawn(name, adapter_shape(SHAPES[parameter], parameter, lora.rank, word))

    names = [
        name
        for name in SHAPES
        if name.startswith("layers.") and name.rsplit(".", 1)[1] in lora_matrices(MODEL)
    ]
    return Adapters(
        Path("adapters"),
        lora,
        frozenset(f"{name}.lora_{word}" for name in names for word in "ab"),
        read,
    )


@pytest.mark.parametrize(
    "word", ["attention.q", "attention.kv", "attention.o", "mlp.gate_up", "mlp.down"]
)
def test_every_box_equals_that_of_the_merged_weights(word: str) -> None:
    lora = LoraConfig(rank=3, alpha=6.0)
    built, name = adapters(lora), f"layers.1.{word}"
    weights = AdaptedWeights(Path("adapters"), MODEL, Values(), Path("base"), built)
    whole: Box = tuple((0, size) for size in SHAPES[name])
    a, b = built.read(f"{name}.lora_a"), built.read(f"{name}.lora_b")
    if word == "attention.kv":
        product = torch.einsum("sgdr,sri->sgdi", b, a)
    elif word == "mlp.gate_up":
        product = torch.einsum("sfr,sri->sfi", b, a)
    elif word == "attention.o":
        product = torch.einsum("hr,rnd->hnd", b, a)
    else:
        product = torch.einsum("...r,ri->...i", b, a)
    expected = Values().read(name, whole, torch.float32) + 2.0 * product
    torch.testing.assert_close(weights.read(name, whole, torch.float32), expected)
    for start in (0, 1):
        box: Box = tuple((start * (size // 2), size // 2 + start) for size in SHAPES[name])
        part = expected[tuple(slice(*span) for span in box)]
        torch.testing.assert_close(
            weights.read(name, box, torch.float64), part.double(), rtol=1e-5, atol=1e-5
        )


def test_reading_merged_weights_does_not_modify_the_base() -> None:
    class InMemoryWeights(Values):
        values = drawn("down", SHAPES["layers.0.mlp.down"])

        def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
            return self.values.to(dtype)

    before, box = (
        InMemoryWeights.values.clone(),
        tuple((0, size) for size in InMemoryWeights.values.shape),
    )
    weights = AdaptedWeights(
        Path("adapters"), MODEL, InMemoryWeights(), Path("base"), adapters(LoraConfig(rank=3))
    )
    assert not torch.equal(weights.read("layers.0.mlp.down", box, torch.float32), before)
    assert torch.equal(InMemoryWeights.values, before)


def test_parameters_without_adapters_equal_the_base_bit_for_bit() -> None:
    weights = AdaptedWeights(
        Path("adapters"), MODEL, Values(torch.bfloat16), Path("base"), adapters(LoraConfig())
    )
    box: Box = ((0, 12),)
    assert torch.equal(
        weights.read("norm.weight", box, torch.bfloat16),
        Values().read("norm.weight", box, torch.bfloat16),
    )
    assert weights.dtype("norm.weight") == torch.bfloat16


def test_base_is_identified_by_its_values_and_not_by_its_padding() -> None:
    plain = fingerprint(Values(), MODEL)
    assert (
        plain == fingerprint(Values(), replace(MODEL, pad_vocab_to_multiple_of=1))
        and len(plain) == 32
    )
    assert plain != fingerprint(Values(factor=1.001), MODEL)


def test_linear_layers_of_transformers_are_found_by_family() -> None:
    parts = find_peft_layers(LLAMA, MODEL, ("kv", "down"))
    assert [(part.module, part.parameter, part.part, part.shape) for part in parts[:3]] == [
        ("model.layers.0.self_attn.k_proj", "layers.0.attention.kv", 0, (12, 12)),
        ("model.layers.0.self_attn.v_proj", "layers.0.attention.kv", 1, (12, 12)),
        ("model.layers.0.mlp.down_proj", "layers.0.mlp.down", None, (12, 10)),
    ]
    assert parts[0].key("A") == "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"


def test_transposed_matrices_have_no_peft_adapters() -> None:
    model = ModelConfig(
        vocab_size=61,
        hidden_size=12,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        ffn_hidden_size=10,
        max_seq_len=16,
        gated=False,
        activation="gelu_tanh",
        norm="layer",
        positions="learned",
        tied_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )
    with pytest.raises(
        ConfigError,
        match=r"GPT2LMHeadModel stores matrices fused or transposed \(down is in .*c_proj",
    ):
        find_peft_layers(GPT2, model, ("down",))


def test_differences_from_what_a_run_trains_are_all_named() -> None:
    wanted = LoraConfig(rank=4, alpha=8.0, rslora=True, targets=("q",))
    assert describe_adapter_differences(adapters(LoraConfig()), wanted, MODEL) == [
        "lora.rank is 16 in the adapters and 4 in this run",
        "lora.alpha is 32.0 in the adapters and 8.0 in this run",
        "lora.rslora is False in the adapters and True in this run",
        "lora.targets is ('q', 'kv', 'o', 'gate_up', 'down') in the adapters "
        "and ('q',) in this run",
    ]
    assert describe_adapter_differences(adapters(LoraConfig()), LoraConfig(), MODEL) == []


def test_names_are_those_of_the_model_matrix_by_matrix() -> None:
    result = adapters(LoraConfig())
    check_adapter_names(result, LoraConfig(), MODEL)
    with pytest.raises(
        CheckpointError,
        match=r"another model: not of this model: .*layers.1.* Use adapters of a model",
    ):
        check_adapter_names(result, LoraConfig(), replace(MODEL, num_layers=1))
    with pytest.raises(CheckpointError, match=r"another model: missing: .*layers.2.*"):
        check_adapter_names(result, LoraConfig(), replace(MODEL, num_layers=3))
    with pytest.raises(CheckpointError, match=r"not of this model: .*"):
        check_adapter_names(result, LoraConfig(targets=("q",)), MODEL)
