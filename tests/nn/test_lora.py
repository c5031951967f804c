"""LoRA matches the paper, leaves other weights unchanged, and the type check finds missing
reductions."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.config.lora import STACKED, LoraConfig
from megalith.config.model import MLAConfig, ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_lengths
from megalith.models.decoder import Decoder, allocate, initialize, iter_parameter_specs
from megalith.nn import lora
from megalith.nn.build import build_context
from megalith.nn.lora import ColumnLora, RowLora
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.shards import Shard
from megalith.testing.inject import patched
from megalith.testing.tolerance import FP64, assert_equals
from megalith.verify.types import TrainingSettings, type_check

MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    ffn_hidden_size=7,
    max_seq_len=16,
    qkv_bias=True,
)


LATENT = MLAConfig(kv_rank=7, q_rank=9, nope_dim=5, rope_dim=4)
SHORT = replace(MODEL, num_kv_heads=4, qkv_bias=False, mla=LATENT)
"""Its attention goes through short vectors."""


def built(adapters: LoraConfig | None, config: ModelConfig = MODEL) -> Decoder:
    """A model in float64 with adapters that do something."""
    context = build_context(config, build_single_rank_mesh(), dtype=torch.float64, lora=adapters)
    model = Decoder(context)
    allocate(model, torch.device("cpu"))
    initialize(model, seed=1)
    for declared, module, name in iter_parameter_specs(model):
        if declared.shard.name.endswith("lora_b"):
            getattr(module, name).data.normal_(
                generator=torch.Generator().manual_seed(len(declared.shard.name))
            )
    return model


def weights(model: Decoder) -> dict[str, Tensor]:
    return {
        d.shard.name: getattr(m, name).data.view(d.shard.shape)
        for d, m, name in iter_parameter_specs(model)
    }


def hidden(model: Decoder) -> Tensor:
    ids = torch.arange(9) * 5 % 61
    with torch.no_grad():
        result: Tensor = model.hidden_states(
            ids, LayerInputs(seq_params_from_lengths([9], device="cpu"))
        )
    return result


@pytest.mark.parametrize("model", [MODEL, SHORT, replace(SHORT, mla=replace(LATENT, q_rank=None))])
@pytest.mark.parametrize(
    "adapters",
    [
        LoraConfig(rank=3, alpha=5.0),
        LoraConfig(rank=2, rslora=True, targets=("kv", "kv_up", "down")),
        LoraConfig(rank=2, layers=(1,), dropout=0.5),
    ],
)
def test_adapted_matrix_is_the_sum_of_weight_and_scaled_product(
    adapters: LoraConfig, model: ModelConfig
) -> None:
    adapted, plain = built(adapters, model), built(None, model)
    result = weights(adapted)
    for name, value in weights(plain).items():
        if f"{name}.lora_a" in result:
            a, b = result[f"{name}.lora_a"], result[f"{name}.lora_b"]
            count = STACKED.get(name.rsplit(".", 1)[1], 1)
            left, right = b.reshape(count, -1, adapters.rank), a.reshape(count, adapters.rank, -1)
            value.add_((left @ right).view(value.shape), alpha=adapters.scale)
    assert not torch.equal(hidden(built(None, model)), hidden(plain))
    assert_equals("hidden states", hidden(adapted), hidden(plain), FP64)


def test_names_and_shapes_are_a_file_format() -> None:
    shapes = {
        name: tuple(value.shape)
        for name, value in weights(built(LoraConfig(rank=3))).items()
        if "lora" in name
    }
    assert {name: shape for name, shape in shapes.items() if "layers.1" in name} == {
        "layers.1.attention.q.lora_a": (3, 12),
        "layers.1.attention.q.lora_b": (4, 6, 3),
        "layers.1.attention.kv.lora_a": (2, 3, 12),
        "layers.1.attention.kv.lora_b": (2, 2, 6, 3),
        "layers.1.attention.o.lora_a": (3, 4, 6),
        "layers.1.attention.o.lora_b": (12, 3),
        "layers.1.mlp.gate_up.lora_a": (2, 3, 12),
        "layers.1.mlp.gate_up.lora_b": (2, 7, 3),
        "layers.1.mlp.down.lora_a": (3, 7),
        "layers.1.mlp.down.lora_b": (12, 3),
    }


def test_only_adapters_are_trained_and_their_initial_output_is_zero() -> None:
    model = Decoder(build_context(MODEL, build_single_rank_mesh(), lora=LoraConfig()))
    for declared, module, name in iter_parameter_specs(model):
        assert getattr(module, name).requires_grad == ("lora" in declared.shard.name), (
            declared.shard.name
        )
        if declared.shard.name.endswith("lora_b"):
            assert (declared.init.std, declared.init.offset) == (0.0, 0.0)
        if declared.shard.name.endswith("down.lora_a"):
            # the variance of a uniform distribution in +-1 / sqrt(7)
            assert declared.init.std == (3 * 7) ** -0.5


def test_matrices_without_adapters_are_unchanged() -> None:
    lora = LoraConfig(targets=("o", "gate_up"))
    model = Decoder(build_context(MODEL, build_single_rank_mesh(), lora=lora))
    kinds = [type(m) for m in model.modules() if isinstance(m, ColumnLora | RowLora)]
    assert kinds == [RowLora, ColumnLora] * 2
    assert not any(isinstance(m, ColumnLora | RowLora) for m in built(None).modules())


class Made(TorchDispatchMode):
    """Counts the results of operations that are as wide as a given number of columns, unless they
    are written over."""

    def __init__(self, columns: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.columns, self.count = columns, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        new = isinstance(result, Tensor) and function.name() != "aten::add_.Tensor"
        self.count += int(new and result.ndim == 2 and result.shape[1] == self.columns)
        return result


@pytest.mark.parametrize("targets", [("q",), ("kv",), ("q", "kv")])
def test_columns_without_adapters_are_not_computed(targets: tuple[str, ...]) -> None:
    """Nothing as wide as all columns is made beside what the frozen layer makes, in forward or in
    backward."""
    layer = built(LoraConfig(rank=3, targets=targets)).get_submodule("layers.0.attention.qkv")
    counts = []
    for module in (layer, layer.get_submodule("base")):
        x = torch.ones(5, 12, dtype=torch.float64, requires_grad=True)
        with Made(columns=4 * 6 + 2 * 2 * 6) as result:
            y = module(x)
            y.backward(torch.ones_like(y))
        counts.append(result.count)
    assert counts[0] == counts[1] > 0


def test_add_columns_matches_the_reference() -> None:
    draw = torch.Generator().manual_seed(2)
    y, one, two = (
        torch.randn(3, n, dtype=torch.float64, generator=draw, requires_grad=True)
        for n in (9, 2, 3)
    )
    weights = torch.randn(3, 9, dtype=torch.float64, generator=draw)
    result, expected = (
        function(y * 1, (1, 5), one, two)
        for function in (lora.AddColumnsFunction.apply, lora.AddColumnsFunction.reference)
    )
    assert torch.equal(result, expected)
    reference = torch.autograd.grad((expected * weights).sum(), (y, one, two))
    assert all(
        map(torch.equal, torch.autograd.grad((result * weights).sum(), (y, one, two)), reference)
    )


def test_adapter_dropout_affects_only_adapters_in_training() -> None:
    model, plain = built(LoraConfig(rank=3, dropout=0.5)), built(LoraConfig(rank=3))
    ids, tokens = torch.arange(9) * 5 % 61, LayerInputs(seq_params_from_lengths([9], device="cpu"))
    training = replace(tokens, dropout_key=DropoutKey(7, torch.arange(9)))
    with torch.no_grad():
        assert torch.equal(model.hidden_states(ids, tokens), plain.hidden_states(ids, tokens))
        dropped = model.hidden_states(ids, training)
        assert torch.equal(dropped, model.hidden_states(ids, training)) and not torch.equal(
            dropped, plain.hidden_states(ids, tokens)
        )
        for declared, module, name in iter_parameter_specs(model):
            if declared.shard.name.endswith("lora_b"):
                getattr(module, name).zero_()
        assert_equals(
            "without adapters",
            model.hidden_states(ids, training),
            built(None).hidden_states(ids, tokens),
            FP64,
        )


def test_mla_kv_cache_uses_adapters() -> None:
    """While text is generated, the projection up to keys is applied to queries."""
    model = built(LoraConfig(rank=3), SHORT)
    up = model.get_submodule("layers.0.attention.kv_up")
    both = built(LoraConfig(rank=3, targets=("kv",))).get_submodule("layers.0.attention.qkv")
    x = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert isinstance(up, ColumnLora) and isinstance(both, ColumnLora)
    (weight,) = up.accumulated_parameters()
    assert_equals("absorbed", x @ weight.T, up(x), FP64)
    x = torch.randn(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert_equals("stacked", x @ torch.cat(both.accumulated_parameters()).T, both(x), FP64)


def test_routed_experts_get_no_adapters() -> None:
    mixed = replace(MODEL, moe=MoEConfig(num_experts=4, ffn_hidden_size=6, layers=(False, True)))
    names = {
        name
        for name in weights(built(LoraConfig(rank=3, dropout=0.1), mixed))
        if name.endswith("lora_a")
    }
    assert {name for name in names if ".mlp." in name or ".moe." in name} == {
        "layers.0.mlp.gate_up.lora_a",
        "layers.0.mlp.down.lora_a",
    }
    assert "layers.1.attention.o.lora_a" in names


def test_layers_below_all_adapters_have_no_backward() -> None:
    """Neither in one process nor on a stage that has nothing else; a stage above has one as
    ever."""
    adapters, tokens = (
        LoraConfig(rank=3, layers=(1,)),
        LayerInputs(seq_params_from_lengths([3], device="cpu")),
    )
    ids = torch.arange(3)
    model = built(adapters)
    entered = model.input_embedding(model.embed(ids), tokens)
    turned = model.rotations.add_to(tokens)
    assert (
        not entered.requires_grad
        and not model.run_layers(list(model.layers)[:1], entered, turned)[0].requires_grad
    )
    seen: list[Tensor] = []
    model.layers[1].register_forward_pre_hook(lambda layer, arguments: seen.append(arguments[0]))
    assert (
        model.hidden_states(ids, tokens).requires_grad and seen[0].is_leaf and seen[0].requires_grad
    )
    with torch.no_grad():
        model.hidden_states(ids, tokens)
    assert not seen[-1].requires_grad


def test_input_embedding_requires_grad_below_frozen_layers() -> None:
    model = built(LoraConfig(targets=("q",)))
    x = model.input_embedding(
        model.embed(torch.arange(3)), LayerInputs(seq_params_from_lengths([3], device="cpu"))
    )
    assert x.requires_grad and x.grad_fn is None
    with torch.no_grad():
        assert not model.input_embedding(
            model.embed(torch.arange(3)), LayerInputs(seq_params_from_lengths([3], device="cpu"))
        ).requires_grad


# --- planted faults


def _invariant(which: str, number: int) -> AbstractContextManager[None]:
    """The whole half of an adapter, declared as if every rank had its whole gradient, or none
    had."""
    right = getattr(lora, which)

    def wrong(weight: Shard, adapters: LoraConfig, tp_comm: Any) -> tuple[Shard, Shard]:
        pair = list(right(weight, adapters, tp_comm))
        flipped = frozenset(tp_comm.group.axes) - pair[number].invariant
        pair[number] = replace(pair[number], invariant=flipped)
        return pair[0], pair[1]

    return patched(lora, which, wrong)


@pytest.mark.parametrize("sp", [True, False])
def test_type_check_accepts_adapters(sp: bool) -> None:
    report = type_check(
        MODEL,
        ParallelConfig(tp=4, sp=sp),
        world=8,
        ranks=(5,),
        training=TrainingSettings(lora=LoraConfig(rank=3)),
    )
    assert report.problems == ()
    assert report.parameters == len(weights(built(LoraConfig())))


@pytest.mark.parametrize(("which", "number"), [("column_adapter", 0), ("row_adapter", 1)])
def test_type_check_rejects_missing_tp_reduction(which: str, number: int) -> None:
    with _invariant(which, number):
        result = type_check(
            MODEL,
            ParallelConfig(tp=2, sp=True),
            world=2,
            ranks=(1,),
            training=TrainingSettings(lora=LoraConfig(rank=3)),
        ).problems
    assert result and "layers.0" in result[0].where, result


@pytest.mark.parametrize(("which", "number"), [("column_adapter", 0), ("row_adapter", 1)])
def test_type_check_rejects_double_reduction(which: str, number: int) -> None:
    with _invariant(which, number):
        result = type_check(
            MODEL,
            ParallelConfig(tp=2),
            world=2,
            ranks=(1,),
            training=TrainingSettings(lora=LoraConfig(rank=3)),
        ).problems
    assert result, which
