"""Adapters compute what the paper says, leave everything else alone, and a missing sum of theirs is refused."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.lora import STACKED, LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels.tokens import tokens_of_lengths
from megalith.models.decoder import Decoder, allocate, declared_parameters, initialise
from megalith.nn import lora
from megalith.nn.lora import ColumnLora, RowLora, attach_adapters
from megalith.parallel.mesh import mesh_of_one
from megalith.plan.shards import Shard
from megalith.testing.inject import replaced
from megalith.testing.tolerance import FP64, assert_equals
from megalith.verify.types import type_check

MODEL = ModelConfig(
    vocab_size=61, hidden_size=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, ffn_hidden_size=7,
    max_seq_len=16, qkv_bias=True,
)  # fmt: skip


def built(adapters: LoraConfig | None) -> Decoder:
    """A model in float64 with adapters that do something."""
    model = Decoder(MODEL, mesh_of_one(), dtype=torch.float64)
    attach_adapters([model], MODEL, adapters)
    allocate(model, torch.device("cpu"))
    initialise(model, seed=1)
    for declared, module, name in declared_parameters(model):
        if declared.shard.name.endswith("lora_b"):
            getattr(module, name).data.normal_(generator=torch.Generator().manual_seed(len(declared.shard.name)))
    return model


def weights(model: Decoder) -> dict[str, Tensor]:
    return {d.shard.name: getattr(m, name).data.view(d.shard.shape) for d, m, name in declared_parameters(model)}


def hidden(model: Decoder) -> Tensor:
    ids = torch.arange(9) * 5 % 61
    with torch.no_grad():
        return model(ids, tokens_of_lengths([9], device="cpu"))


@pytest.mark.parametrize(
    "adapters", [LoraConfig(rank=3, alpha=5.0), LoraConfig(rank=2, rslora=True, targets=("kv", "down"))]
)
def test_a_matrix_acts_as_the_sum_of_itself_and_the_scaled_product(adapters: LoraConfig) -> None:
    adapted, plain = built(adapters), built(None)
    found = weights(adapted)
    for name, value in weights(plain).items():
        if f"{name}.lora_a" in found:
            a, b = found[f"{name}.lora_a"], found[f"{name}.lora_b"]
            count = STACKED.get(name.rsplit(".", 1)[1], 1)
            left, right = b.reshape(count, -1, adapters.rank), a.reshape(count, adapters.rank, -1)
            value.add_((left @ right).view(value.shape), alpha=adapters.scale)
    assert not torch.equal(hidden(built(None)), hidden(plain))
    assert_equals("hidden states", hidden(adapted), hidden(plain), FP64)


def test_names_and_shapes_are_a_file_format() -> None:
    shapes = {name: tuple(value.shape) for name, value in weights(built(LoraConfig(rank=3))).items() if "lora" in name}
    assert {name: shape for name, shape in shapes.items() if "layers.1" in name} == {
        "layers.1.attention.q.lora_a": (3, 12), "layers.1.attention.q.lora_b": (4, 6, 3),
        "layers.1.attention.kv.lora_a": (2, 3, 12), "layers.1.attention.kv.lora_b": (2, 2, 6, 3),
        "layers.1.attention.o.lora_a": (3, 4, 6), "layers.1.attention.o.lora_b": (12, 3),
        "layers.1.mlp.gate_up.lora_a": (2, 3, 12), "layers.1.mlp.gate_up.lora_b": (2, 7, 3),
        "layers.1.mlp.down.lora_a": (3, 7), "layers.1.mlp.down.lora_b": (12, 3),
    }  # fmt: skip


def test_only_adapters_are_trained_and_they_begin_as_nothing() -> None:
    model = Decoder(MODEL, mesh_of_one())
    attach_adapters([model], MODEL, LoraConfig())
    for declared, module, name in declared_parameters(model):
        assert getattr(module, name).requires_grad == ("lora" in declared.shard.name), declared.shard.name
        if declared.shard.name.endswith("lora_b"):
            assert (declared.init.std, declared.init.offset) == (0.0, 0.0)
        if declared.shard.name.endswith("down.lora_a"):
            assert declared.init.std == (3 * 7) ** -0.5  # the variance of a uniform distribution in +-1 / sqrt(7)


def test_matrices_that_are_no_targets_stay_what_they_were() -> None:
    model = Decoder(MODEL, mesh_of_one())
    attach_adapters([model], MODEL, LoraConfig(targets=("o", "gate_up")))
    kinds = [type(m) for m in model.modules() if isinstance(m, ColumnLora | RowLora)]
    assert kinds == [RowLora, ColumnLora] * 2
    assert not any(isinstance(m, ColumnLora | RowLora) for m in built(None).modules())


def test_backward_has_somewhere_to_end_below_frozen_layers() -> None:
    model = built(LoraConfig(targets=("q",)))
    x = model.entrance(model.embed(torch.arange(3)), tokens_of_lengths([3], device="cpu"))
    assert x.requires_grad and x.grad_fn is None
    with torch.no_grad():
        assert not model.entrance(model.embed(torch.arange(3)), tokens_of_lengths([3], device="cpu")).requires_grad


# --- planted faults


def _invariant(which: str, number: int) -> AbstractContextManager[None]:
    """The whole half of an adapter, declared as if every rank had its whole gradient, or none had."""
    right = getattr(lora, which)

    def wrong(weight: Shard, adapters: LoraConfig, region: Any) -> tuple[Shard, Shard]:
        pair = list(right(weight, adapters, region))
        flipped = frozenset(region.group.axes) - pair[number].invariant
        pair[number] = lora.replace(pair[number], invariant=flipped)
        return pair[0], pair[1]

    return replaced(lora, which, wrong)


@pytest.mark.parametrize("sp", [True, False])
def test_the_type_check_passes_adapters_as_they_are(sp: bool) -> None:
    report = type_check(MODEL, ParallelConfig(tp=4, sp=sp), world=8, ranks=(5,), lora=LoraConfig(rank=3))
    assert report.problems == ()
    assert report.parameters == len(weights(built(LoraConfig())))


@pytest.mark.parametrize(("which", "number"), [("column_adapter", 0), ("row_adapter", 1)])
def test_a_gradient_that_is_not_summed_over_tp_is_refused(which: str, number: int) -> None:
    with _invariant(which, number):
        found = type_check(MODEL, ParallelConfig(tp=2, sp=True), world=2, ranks=(1,), lora=LoraConfig(rank=3)).problems
    assert found and "layers.0" in found[0].where, found


@pytest.mark.parametrize(("which", "number"), [("column_adapter", 0), ("row_adapter", 1)])
def test_one_that_is_summed_twice_is_refused(which: str, number: int) -> None:
    with _invariant(which, number):
        found = type_check(MODEL, ParallelConfig(tp=2), world=2, ranks=(1,), lora=LoraConfig(rank=3)).problems
    assert found, which
