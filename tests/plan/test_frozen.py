"""What is left of a step when parameters are frozen is what a plain model on meta tensors
computes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megalith.config.model import CrossConfig, ModelConfig, MTPConfig
from megalith.config.optim import TRAIN_ALL, OptimConfig
from megalith.plan.costs import step_flops
from megalith.plan.frozen import (
    first_trained_layer,
    tables_trained,
    trained,
    trained_layer_flops,
    trained_names,
    trained_step_flops,
    with_frozen,
)
from megalith.plan.layers.embedding import head_flops
from megalith.plan.parameters import held_parameters
from megalith.plan.stages import single_stage
from tests.cases import loop_over

MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=12,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=6,
    ffn_hidden_size=11,
    max_seq_len=16,
)


def test_matrices_are_not_stacked_with_frozen_ones() -> None:
    held = held_parameters(MODEL, single_stage(3, MODEL.mtp.num_layers))
    assert with_frozen(held, TRAIN_ALL) == held
    results = {
        one.name: one
        for one in with_frozen(held, OptimConfig(frozen=("layers.1.attention.q", "embed.*")))
    }
    assert results["layers.0.attention.kv"].stacked and not results["layers.1.attention.kv"].stacked
    assert {name for name, one in results.items() if one.frozen} == {
        "layers.1.attention.q",
        "embed.weight",
    }
    assert len(trained(list(results.values()))) == len(held) - 2


@pytest.mark.parametrize(
    ("optim", "first"),
    [
        (TRAIN_ALL, 0),
        (OptimConfig(frozen=("embed.weight",)), 0),
        (OptimConfig(frozen=("embed.weight", "layers.[01].*")), 2),
        (OptimConfig(trained=("head.weight",)), 3),
        (OptimConfig(trained=("head.weight", "embed.weight")), 0),
        (OptimConfig(trained=("mtp.*",)), 3),
    ],
)
def test_backward_ends_at_the_first_layer_with_something_trained_at_or_before_it(
    optim: OptimConfig, first: int
) -> None:
    assert first_trained_layer(replace(MODEL, mtp=MTPConfig(num_layers=1)), optim) == first
    assert tables_trained(MODEL, optim) == ("embed.weight" in trained_names(MODEL, optim))


def test_cross_layer_source_and_relative_biases_get_gradients_through_layers() -> None:
    looking = replace(MODEL, cross=CrossConfig(memory=1))
    assert first_trained_layer(looking, OptimConfig(trained=("memory_norm.*",))) == 1
    biased = replace(MODEL, positions="relative", num_kv_heads=8)
    only = OptimConfig(trained=("relative.weight",))
    assert first_trained_layer(biased, only) == 0 and tables_trained(biased, only)


class Plain:
    """The products of a model and nothing else, on meta tensors; what is trained wants a
    gradient."""

    def __init__(self, model: ModelConfig, optim: OptimConfig) -> None:
        self.model, self.optim = model, optim

    def weight(self, name: str, *shape: int) -> Tensor:
        return torch.empty(shape, device="meta", requires_grad=self.optim.trains(name))

    def forward(self, length: int) -> Tensor:
        c = self.model
        table = self.weight("embed.weight", c.vocab_size, c.hidden_size)
        x = torch.nn.functional.embedding(
            torch.empty(length, dtype=torch.int64, device="meta"), table
        )
        for layer in range(c.num_layers):
            x = self.layer(x, f"layers.{layer}")
        head = (
            table if c.tied_embeddings else self.weight("head.weight", c.vocab_size, c.hidden_size)
        )
        return (x * self.weight("norm.weight", c.hidden_size)) @ head.T

    def layer(self, x: Tensor, name: str) -> Tensor:
        c = self.model
        n, g, d = c.num_heads, c.num_kv_heads, c.head_size()
        y = x * self.weight(f"{name}.attention_norm.weight", c.hidden_size)
        q, kv = (
            y @ self.weight(f"{name}.attention.{word}", heads * d, c.hidden_size).T
            for word, heads in (("q", n), ("kv", 2 * g))
        )
        k, v = (
            one.unflatten(-1, (g, d)).repeat_interleave(n // g, 1).transpose(0, 1)
            for one in kv.chunk(2, -1)
        )
        scores = q.unflatten(-1, (n, d)).transpose(0, 1) @ k.transpose(1, 2)
        result = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        after = x + result @ self.weight(f"{name}.attention.o", c.hidden_size, n * d).T
        read = x if c.block == "parallel" else after
        z = read * self.weight(f"{name}.mlp_norm.weight", c.hidden_size)
        gate, up = (
            z @ self.weight(f"{name}.mlp.gate_up", 2 * c.ffn_hidden_size, c.hidden_size).T
        ).chunk(2, -1)
        return (
            after
            + (gate.sigmoid() * up)
            @ self.weight(f"{name}.mlp.down", c.hidden_size, c.ffn_hidden_size).T
        )


CHOICES = [
    TRAIN_ALL,
    OptimConfig(frozen=("embed.weight",)),
    OptimConfig(frozen=("embed.weight", "layers.[01].*")),
    OptimConfig(trained=("head.weight",)),
    OptimConfig(trained=("layers.1.mlp.down", "norm.weight")),
    OptimConfig(trained=("layers.1.attention.[qk]*",)),
    OptimConfig(trained=("layers.*.mlp_norm.weight",)),
    OptimConfig(trained=("layers.2.attention.o", "layers.1.mlp.gate_up"), frozen=("layers.2.*",)),
    OptimConfig(trained=("embed.weight",)),
    OptimConfig(frozen=("*.mlp.*", "head.weight")),
]


@pytest.mark.parametrize("block", ["sequential", "parallel"])
@loop_over("number", range(len(CHOICES)))
def test_operations_equal_those_counted_in_plain_products(number: int, block: str) -> None:
    for tied in (False, True):
        model, length = replace(MODEL, block=block, tied_embeddings=tied), 24  # type: ignore[arg-type]  # a literal
        optim = CHOICES[number]
        if tied and any(name.startswith("head") for name in (*optim.trained, *optim.frozen)):
            continue
        with FlopCounterMode(display=False) as counter:
            Plain(model, optim).forward(length).sum().backward()
        reached = trained_step_flops(
            model, None, optim, tokens=length, squared_lengths=0, windowed=0
        )
        core = (
            trained_step_flops(model, None, optim, tokens=length, squared_lengths=length**2)
            - reached
        )
        # the counter sees what the mask hides
        assert counter.get_total_flops() == reached + 2 * core, (
            optim,
            tied,
        )


def test_parts_of_a_step_sum_to_the_whole() -> None:
    for optim in CHOICES:
        seen = {"tokens": 24, "squared_lengths": 24**2}
        layers = sum(trained_layer_flops(MODEL, None, layer, optim, **seen) for layer in range(3))
        rest = trained_step_flops(MODEL, None, optim, **seen) - layers
        assert rest in {head_flops(MODEL, 24) // 3 * part for part in (1, 2, 3)}
        assert layers + rest <= step_flops(MODEL, **seen)


def test_flops_of_mtp_count_its_trained_parameters() -> None:
    model = replace(MODEL, mtp=MTPConfig(num_layers=2))
    seen = {"tokens": 24, "squared_lengths": 24**2}
    assert trained_step_flops(
        model, None, OptimConfig(frozen=("norm.weight",)), **seen
    ) == step_flops(model, **seen)
    frozen = trained_step_flops(model, None, OptimConfig(frozen=("mtp.1.project",)), **seen)
    assert step_flops(model, **seen) - frozen == 4 * 24 * model.hidden_size**2
