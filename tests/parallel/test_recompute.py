"""Recomputation changes what is kept and when it is computed, and not one bit of a loss or a
gradient."""

from dataclasses import replace
from functools import cache
from itertools import accumulate, combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from megalith.config.lora import LoraConfig
from megalith.config.model import DropoutConfig, MLAConfig, ModelConfig
from megalith.config.parallel import (
    OffloadConfig,
    ParallelConfig,
    RecomputeConfig,
    RecomputedModule,
)
from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides
from megalith.kernels import activation, norm
from megalith.kernels.attention import cpu_tiled
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.linear import LinearFunction, recompute_recipe, register_recompute
from megalith.kernels.packed import seq_params_from_lengths
from megalith.models.decoder import iter_parameter_specs
from megalith.nn import mlp as mlp_module
from megalith.parallel import data, recompute
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.parallel.recompute import Recomputed, shard_saved_input
from megalith.plan.grid import model_grid
from megalith.testing.meter import measure_saved_activations
from megalith.testing.ranks import run_ranks, world_group
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import FP64, assert_equals
from megalith.train.step import Trainer, train_step
from megalith.train.trainer import build_trainer
from megalith.verify.matrix import VARIANTS
from megalith.verify.ranks import _loader, layout_case

RUN = tiny_run({"model.num_layers": "4"})
KEEP = RecomputeConfig()
MODULES: tuple[RecomputedModule, ...] = "core_attention", "norm", "mlp", "mlp_act"
UNIFORM = [RecomputeConfig(granularity="full", num_layers=count) for count in (1, 2, 3, 9)]
BLOCK = [RecomputeConfig(granularity="full", method="block", num_layers=count) for count in (1, 4)]
SELECTIVE = [
    RecomputeConfig(granularity="selective", modules=chosen)
    for count in range(1, 5)
    for chosen in combinations(MODULES, count)
]
CHUNKS = RecomputeConfig(granularity="selective", modules=("mlp",), mlp_chunks=3)


def name(one: RecomputeConfig) -> str:
    return (
        "+".join(one.modules)
        if one.granularity == "selective"
        else f"{one.method} {one.num_layers}"
    )


def step(trainer: Trainer, *, backward: bool = True) -> list[Tensor]:
    """Loss and every gradient of two microbatches of packed documents."""
    results: list[Tensor] = []
    trainer.data.begin_step(2)
    for shift in (3, 5):
        ids = torch.arange(72) * shift % 257
        loss = trainer.model.loss(ids, ids.flip(0), LayerInputs(seq_params_from_lengths([40, 32])))
        results.append(loss.detach().clone())
        if backward:
            loss.backward()
    return results + [param.gradient.clone() for param in trainer.data.finish()]


def built(one: RecomputeConfig, dtype: str = "fp32", run: TrainRun = RUN) -> Trainer:
    run = apply_overrides(replace(run, recompute=one), {"precision.params": dtype})
    return build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))


@cache
def reference(dtype: str) -> tuple[Tensor, ...]:
    return tuple(step(built(KEEP, dtype)))


def same(mine: list[Tensor], theirs: tuple[Tensor, ...]) -> bool:
    return len(mine) == len(theirs) and all(
        torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("one", UNIFORM + BLOCK + SELECTIVE, ids=name)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_loss_and_every_gradient_are_bitwise_equal(one: RecomputeConfig, dtype: str) -> None:
    assert same(step(built(one, dtype)), reference(dtype))


def test_bf16_is_bitwise_equal_with_full_and_selective_recomputation() -> None:
    for one in (UNIFORM[1], SELECTIVE[-1]):
        assert same(step(built(one, "bf16")), reference("bf16"))


def step_of_packed_rows(model: ModelConfig, one: RecomputeConfig) -> list[Tensor]:
    """Loss and every gradient of a step in fp32 over rows of short documents, with places and
    dropout where asked."""
    run = layout_case(model, ParallelConfig(), 1, micro_batch_size=4, documents=True).run
    trainer = built(one, run=run)
    recomputed = train_step(
        trainer, _loader(run, trainer.mesh, consumed=0, steps=1).next(), lr=0.0, weight_decay=0.0
    )
    return [
        torch.tensor(recomputed.loss),
        *(param.gradient.clone() for param in trainer.data.local_params),
    ]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=[]
            if kind in ("heterogeneous", "gated", "normed after", "normed around")
            else [pytest.mark.slow],
        )
        for kind in VARIANTS
    ],
)
def test_recomputation_of_every_layer_type_is_bitwise_equal(kind: str) -> None:
    """Other sizes and parts left out, gates, L2 norms, layers without positions and with three,
    norms after."""
    kept = step_of_packed_rows(VARIANTS[kind], KEEP)
    assert all(bool(tensor.any()) for tensor in kept)
    for one in (UNIFORM[0], UNIFORM[1], BLOCK[0], SELECTIVE[-1], SELECTIVE[0]):
        assert same(step_of_packed_rows(VARIANTS[kind], one), tuple(kept)), name(one)


@pytest.mark.parametrize("one", [UNIFORM[1], SELECTIVE[-1]], ids=name)
def test_layers_get_gradients_although_their_input_requires_none(
    one: RecomputeConfig,
) -> None:
    def frozen(one: RecomputeConfig) -> list[Tensor]:
        trainer = built(one)
        for declared, module, attribute in iter_parameter_specs(trainer.model):
            if not declared.shard.name.startswith("layers.3."):
                getattr(module, attribute).requires_grad_(False)
        return step(trainer)

    actual, expected = frozen(one), frozen(KEEP)
    assert same(actual, tuple(expected))
    assert sum(bool(gradient.any()) for gradient in actual[2:]) == 7


@pytest.mark.parametrize("one", [KEEP, UNIFORM[0], UNIFORM[2], SELECTIVE[-1]], ids=name)
def test_recompute_adds_each_weight_gradient_once(
    one: RecomputeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[data.BucketGradAccumulator] = []
    product = data.BucketGradAccumulator.product

    def noted(self: data.BucketGradAccumulator, *arguments: Any) -> None:
        given.append(self)
        product(self, *arguments)

    monkeypatch.setattr(data.BucketGradAccumulator, "product", noted)
    step(built(one))
    assert len(given) == 2 * 4 * 4 and all(
        given.count(grad_accumulator) == 2 for grad_accumulator in given
    )


@pytest.mark.parametrize("one", [UNIFORM[1], SELECTIVE[-1]], ids=name)
def test_evaluation_saves_and_recomputes_nothing(
    one: RecomputeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **others: Any) -> None:
        raise AssertionError("nothing is kept without gradients")

    monkeypatch.setattr(recompute, "checkpoint", refuse)
    trainer = built(one)
    with torch.no_grad(), measure_saved_activations(trainer.model) as meter:
        losses = step(trainer, backward=False)[:2]
    assert meter.peak == 0 and same(losses, reference("fp32")[:2])


UP = RecomputeConfig(granularity="selective", modules=("mla_up_proj",))
LATENT = replace(
    RUN,
    model=replace(
        RUN.model,
        num_layers=2,
        num_kv_heads=4,
        head_dim=None,
        mla=MLAConfig(
            kv_rank=7,
            q_rank=9,
            nope_dim=5,
            rope_dim=4,
            value_dim=3,
        ),
    ),
)
DROPPED = replace(LATENT, model=replace(LATENT.model, dropout=DropoutConfig(attention=0.2)))
ADAPTED = replace(
    LATENT, lora=LoraConfig(rank=3, targets=("q_up", "kv_up", "kv_down", "o"), dropout=0.3)
)
FROM_X = replace(
    LATENT,
    model=replace(LATENT.model, mla=MLAConfig(kv_rank=7, nope_dim=5, rope_dim=4, value_dim=5)),
)


def interleaved_step(trainer: Trainer) -> list[Tensor]:
    """Losses and gradients of two microbatches with dropout, of which both run forward before one
    runs backward."""
    draw = torch.Generator().manual_seed(3)
    for declared, module, attribute in iter_parameter_specs(trainer.model):
        if declared.shard.name.endswith("lora_b"):
            weight = getattr(module, attribute).data
            weight.copy_(torch.randn(weight.shape, generator=draw) / 5)
    trainer.data.begin_step(2)
    losses = []
    for shift in (3, 5):
        ids = torch.arange(72) * shift % 257
        tokens = LayerInputs(
            seq_params_from_lengths([40, 32]),
            dropout_key=DropoutKey(7, torch.arange(72) + 100 * shift),
        )
        losses.append(trainer.model.loss(ids, ids.flip(0), tokens))
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses] + [
        param.gradient.clone() for param in trainer.data.finish()
    ]


@pytest.mark.parametrize(
    "run", [LATENT, DROPPED, ADAPTED, FROM_X], ids=["plain", "dropped", "adapted", "from x"]
)
def test_mla_recomputed_from_latent_vectors_is_bitwise_equal(
    run: TrainRun,
) -> None:
    expected = interleaved_step(built(KEEP, run=run))
    assert all(bool(tensor.any()) for tensor in expected)
    for one in (UP, replace(UP, modules=("norm", "core_attention", "mla_up_proj"), check=True)):
        assert same(interleaved_step(built(one, run=run)), tuple(expected))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recompute_of_latent_attention_adds_each_weight_gradient_once(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[data.BucketGradAccumulator] = []
    product = data.BucketGradAccumulator.product

    def noted(self: data.BucketGradAccumulator, *arguments: Any) -> None:
        given.append(self)
        product(self, *arguments)

    expected = step(built(KEEP, dtype, LATENT))
    monkeypatch.setattr(data.BucketGradAccumulator, "product", noted)
    assert same(step(built(UP, dtype, LATENT)), tuple(expected))
    assert len(given) == 2 * 2 * 7 and all(
        given.count(grad_accumulator) == 2 for grad_accumulator in given
    )


@pytest.mark.slow
@pytest.mark.parametrize("one", [UNIFORM[0], UNIFORM[1], BLOCK[0]], ids=name)
def test_recomputation_of_compiled_layers_is_bitwise_equal(one: RecomputeConfig) -> None:
    def compiled(one: RecomputeConfig) -> list[Tensor]:
        trainer = build_trainer(
            apply_overrides(replace(RUN, recompute=one), {"train.compile": "true"}),
            build_single_rank_mesh(),
            torch.device("cpu"),
        )
        for layer in trainer.model.layers:
            layer.compile(backend="aot_eager")  # no C++ compiler needed
        return step(trainer)

    assert same(compiled(one), tuple(compiled(KEEP)))


def test_second_backward_through_a_graph_recomputes_the_region_again() -> None:
    calls: list[int] = []

    def tp_comm(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return (x.exp() * y).sin()

    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    out = Recomputed(tp_comm)(x, y).sum()
    first = torch.autograd.grad(out, [x, y], retain_graph=True)
    second = torch.autograd.grad(out, [x, y])
    expected = torch.autograd.grad(tp_comm(x, y).sum(), [x, y])
    for result in (first, second):
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert len(calls) == 4


def test_region_with_recomputed_input_saves_the_inputs_of_that_input() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    middle = x * 1
    again: list[int] = []

    def double(source: Tensor) -> Tensor:
        again.append(1)
        return source * 2

    with measure_saved_activations() as meter:
        y = Recomputed(lambda doubled: doubled.exp().sin())(
            register_recompute(double(middle), double, (middle,))
        )
    assert meter.live == 5 * 4 * 4
    (result,) = torch.autograd.grad(y.sum(), x)
    assert (
        torch.equal(result, torch.autograd.grad((x * 2).exp().sin().sum(), x)[0])
        and len(again) == 2
    )


def test_slices_of_a_saved_input_join_to_it() -> None:
    x = torch.randn(5, 3)
    shard_saved_input(x, single_rank_group("tp_kv", "tp_copy"))
    recipe = recompute_recipe(x)
    assert recipe is not None and torch.equal(recipe.function(x.flatten()), x)
    run_ranks(joined, 2)


def joined(rank: int, world: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    shard_saved_input(x, world_group(rank, world, "tp_kv", "tp_copy"))
    recipe = recompute_recipe(x)
    assert recipe is not None and recipe.inputs[0].shape == (8,)
    assert torch.equal(recipe.function(*recipe.inputs), x)


@pytest.mark.parametrize(
    ("sp", "rings"), [(False, False), (True, False), (True, True)], ids=["tp2", "sp", "rings"]
)
def test_recomputation_under_tensor_parallelism_is_bitwise_equal(sp: bool, rings: bool) -> None:
    run_ranks(on_two_ranks, 2, sp, rings)


def on_two_ranks(rank: int, world: int, sp: bool, rings: bool) -> None:
    run = replace(RUN, parallel=replace(RUN.parallel, tp=2, sp=sp, tp_comm_overlap=rings))
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    sharding = replace(UNIFORM[1], shard_inputs=True)
    away = OffloadConfig(layers=2, min_numel=1)
    settings = [(KEEP, OffloadConfig()), (KEEP, away)]
    settings += [
        (one, OffloadConfig()) for one in [*UNIFORM, BLOCK[0], *SELECTIVE[:4], SELECTIVE[-1]]
    ]
    settings += [(UNIFORM[1], away)] if sp else [(sharding, OffloadConfig()), (sharding, away)]
    results = [
        step(build_trainer(replace(run, recompute=one, offload=offload), mesh, torch.device("cpu")))
        for one, offload in settings
    ]
    for setting, actual in zip(settings[1:], results[1:], strict=True):
        assert same(actual, tuple(results[0])), setting


@pytest.mark.parametrize("one", [UNIFORM[1], BLOCK[0], SELECTIVE[-1]], ids=name)
def test_check_passes_if_recomputation_is_bitwise_equal(
    one: RecomputeConfig,
) -> None:
    assert same(step(built(replace(one, check=True))), reference("fp32"))


@pytest.mark.parametrize("one", [UNIFORM[1], *SELECTIVE[:4]], ids=name)
def test_check_rejects_recomputation_with_other_values(
    one: RecomputeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = built(replace(one, check=True))
    trainer.data.begin_step(1)
    ids = torch.arange(72) * 3 % 257
    loss = trainer.model.loss(ids, ids, LayerInputs(seq_params_from_lengths([40, 32])))
    for table in (norm.FORWARD, activation.FORWARD, activation.SWIGLU_FORWARD):
        for backend, function in table.items():
            monkeypatch.setitem(table, backend, slightly_off(function))
    monkeypatch.setattr(cpu_tiled, "_probabilities", slightly_off(cpu_tiled._probabilities))
    with pytest.raises(RuntimeError, match="did not give the same bits a second time"):
        loss.backward()


def slightly_off(function: Any) -> Any:
    """As a kernel whose sums run in another order each time."""

    def changed(*arguments: Any) -> Any:
        result = function(*arguments)
        # of a norm: sum, result, scale
        out = result[1] if isinstance(result, tuple) and len(result) > 2 else result
        (out[0] if isinstance(out, tuple) else out).view(-1)[0] += 1e-6
        return result

    return changed


# --- planted faults


def test_norm_recomputed_from_the_wrong_input_changes_the_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(x: Tensor, function: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        return register_recompute(x, function, (inputs[0].detach() * 0.5, *inputs[1:]))

    monkeypatch.setattr(mlp_module, "register_recompute", wrong)
    assert not same(step(built(SELECTIVE[3])), reference("fp32"))
    assert SELECTIVE[3].modules == ("mlp_act",)


@pytest.mark.parametrize("chunks", [2, 5])
@pytest.mark.parametrize("modules", [("mlp",), MODULES], ids="+".join)
@pytest.mark.parametrize("check", [False, True])
def test_an_mlp_in_chunks_of_uneven_size_gives_the_same_gradients(
    chunks: int, modules: tuple[RecomputedModule, ...], check: bool
) -> None:
    one = replace(CHUNKS, modules=modules, mlp_chunks=chunks, check=check)
    names = ["loss", "loss", *(param.shard.name for param in built(one, "fp64").data.finish())]
    for name, actual, expected in zip(
        names, step(built(one, "fp64")), reference("fp64"), strict=True
    ):
        assert_equals(name, actual, expected, FP64)


def test_mlp_in_chunks_holds_the_inner_features_of_one_chunk() -> None:
    run = tiny_run({"model.num_layers": "1", "model.ffn_hidden_size": "1024"})
    peaks = []
    for chunks in (1, 2, 4, 8):
        trainer, ids = built(replace(CHUNKS, mlp_chunks=chunks), run=run), torch.arange(72)
        with profile(profile_memory=True) as profiler:
            trainer.model.loss(ids, ids, LayerInputs(seq_params_from_lengths([72]))).backward()
        changes = [
            e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"
        ]
        peaks.append(max(accumulate(changes)))
    features = 72 * 1024 * 4  # bytes of one inner tensor [t, f] of all tokens
    assert peaks[0] > 3 * features and peaks[1] < peaks[0] - features, peaks
    assert peaks[2] < peaks[1] - features and peaks[3] < peaks[2] - features / 2, peaks


def test_each_mlp_chunk_adds_one_weight_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[int, int]] = []
    product = data.BucketGradAccumulator.product

    def noted(self: data.BucketGradAccumulator, x: Tensor, *others: Any) -> None:
        given.append((x.shape[1], len(x)))
        product(self, x, *others)

    monkeypatch.setattr(data.BucketGradAccumulator, "product", noted)
    step(built(replace(CHUNKS, mlp_chunks=5)))
    down = [tokens for features, tokens in given if features == RUN.model.ffn_hidden_size]
    assert sorted(set(down)) == [14, 15] and sum(down) == 2 * 4 * 72 and len(down) == 2 * 4 * 5


def test_expecting_one_of_several_chunks_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the engine did not know of chunks, and sent buckets on their way after the first."""
    monkeypatch.setattr(data, "count_forward_passes", lambda chunk: {})
    with pytest.raises(
        AssertionError, match=r"more gradient contributions than backward passes: .*mlp"
    ):
        step(built(CHUNKS))


def test_weight_gradient_added_twice_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if backward also went through the graph of the second run."""
    backward = LinearFunction.backward

    def twice(ctx: Any, dy: Tensor) -> Any:
        result = backward(ctx, dy)
        if ctx.grad_accumulator is not None:
            (x,) = (saved for saved in ctx.saved_tensors if saved.shape[0] == dy.shape[0])
            ctx.grad_accumulator.product(x, dy, ctx.matmul_ops)
        return result

    monkeypatch.setattr(LinearFunction, "backward", staticmethod(twice))
    with pytest.raises(
        AssertionError, match=r"more gradient contributions than backward passes: .*attention\.q"
    ):
        step(built(KEEP))


def test_region_that_saves_other_tensors_in_recomputation_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    forward = norm.RMSNormFunction.forward

    def shorter(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        calls.append(1)
        return forward(ctx, x if len(calls) == 1 else x.double(), *others)

    monkeypatch.setattr(norm.RMSNormFunction, "forward", staticmethod(shorter))
    x, weight = torch.randn(5, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    y = Recomputed(lambda x, weight: norm.rms_norm(x, weight, 1e-5))(x, weight)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
        y.sum().backward()
