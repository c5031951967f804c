"""Router: equal choices under every layout, with noise, capacity and sinkhorn."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.moe import (
    AuxLossConfig,
    CapacityConfig,
    MoEConfig,
    RouterConfig,
    TokenDropPolicy,
)
from megalith.config.parallel import ParallelConfig
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.layer_inputs import AuxLossScale, LayerInputs, RouterInputs
from megalith.kernels.packed import seq_params_from_rows, seq_params_from_slices
from megalith.kernels.routing import Choice
from megalith.models.decoder import allocate, initialize
from megalith.nn.build import build_context
from megalith.nn.moe import Router
from megalith.parallel.context import local_slicing
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.parallel.tensor import SequenceParallelComm, TensorParallelComm
from megalith.plan.context import plan_slices
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks

MOE = MoEConfig(num_experts=5, top_k=2, ffn_hidden_size=4)
MODEL = ModelConfig(
    vocab_size=8,
    hidden_size=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    ffn_hidden_size=8,
    init_std=1.0,
    moe=MOE,
)
X = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def training(seed: int = 0, valid: Tensor | None = None) -> LayerInputs:
    seq_params = seq_params_from_rows(2, 6)
    return LayerInputs(
        seq_params if valid is None else replace(seq_params, valid=valid),
        router_inputs=RouterInputs(AuxLossScale(0, 1, 1.0)),
        dropout_key=DropoutKey(seed, torch.arange(12)),
    )


def alone(moe: MoEConfig, dtype: torch.dtype = torch.float64) -> Router:
    mesh = build_single_rank_mesh()
    return filled(Router("layers.0.moe", MODEL, moe, build_context(MODEL, mesh, dtype=dtype)))


def filled(router: Router) -> Router:
    allocate(router, torch.device("cpu"))
    initialize(router, seed=3)
    return router


def divided(rank: int, world: int, moe: MoEConfig) -> Choice:
    mesh = build_mesh(model_grid(ParallelConfig(tp=world, sp=True), MODEL, world), rank=rank)
    tp_comm = SequenceParallelComm(mesh.tp)
    choice = filled(
        Router(
            "layers.0.moe",
            MODEL,
            moe,
            build_context(MODEL, mesh, tp_comm=tp_comm, dtype=torch.float64),
        )
    )(tp_comm.select_local(X), training())
    return Choice(choice.experts, choice.weights.detach())


def same_on_two(moe: MoEConfig) -> bool:
    whole = alone(moe)(X, training())
    parts = run_ranks(divided, 2, moe)
    return all(
        torch.equal(torch.cat([part[i] for part in parts]), expected)
        if i == 0
        else torch.allclose(torch.cat([part[i] for part in parts]), expected, rtol=1e-12)
        for i, expected in enumerate(whole)
    )


def test_ranks_of_a_microbatch_drop_the_same_choices() -> None:
    for drop in ("least", "last"):
        moe = replace(MOE, capacity=CapacityConfig(factor=0.7, drop=drop))
        refused = alone(moe)(X, training()).experts < 0
        assert 0 < int(refused.sum()) < 24
        assert same_on_two(moe)


def shared(rank: int, world: int, moe: MoEConfig, order: str) -> tuple[Tensor, Tensor]:
    parallel = ParallelConfig(tp=2, cp=2, sp=True, order=order)
    mesh = build_mesh(model_grid(parallel, MODEL, world), rank=rank)
    slicing, tp_comm = local_slicing(parallel, mesh), SequenceParallelComm(mesh.tp)
    slices = plan_slices([12], row=12, slicing=slicing)
    numbers = tp_comm.select_local(torch.from_numpy(slices.numbers[slicing.rank]))
    tokens = LayerInputs(
        seq_params_from_slices(slices, slicing), router_inputs=RouterInputs(AuxLossScale(0, 1, 1.0))
    )
    router = filled(
        Router(
            "layers.0.moe",
            MODEL,
            moe,
            build_context(MODEL, mesh, tp_comm=tp_comm, dtype=torch.float64),
        )
    )
    return numbers, router(X[numbers], tokens).experts


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "cp-tp-ep-dp-pp"])
def test_last_tokens_are_dropped_for_every_rank_order(
    order: str,
) -> None:
    moe = replace(MOE, capacity=CapacityConfig(factor=0.7, drop="last"))
    expected = alone(moe)(
        X,
        LayerInputs(
            seq_params_from_rows(1, 12), router_inputs=RouterInputs(AuxLossScale(0, 1, 1.0))
        ),
    ).experts
    numbers, experts = map(torch.cat, zip(*run_ranks(shared, 4, moe, order), strict=True))
    assert torch.equal(experts[numbers.argsort()], expected)


@pytest.mark.parametrize("drop", ["least", "last"])
def test_padding_does_not_use_expert_capacity(drop: TokenDropPolicy) -> None:
    # 3 places, of 12 tokens with 2 choices
    router = alone(replace(MOE, capacity=CapacityConfig(factor=0.5, drop=drop)))
    text = torch.arange(12) >= 9
    tokens, x = training(valid=text), torch.where(text.unsqueeze(1), X[11], X[11] * 9)
    assert bool((router(x, tokens).experts[9:] >= 0).all()), "all there is room for"
    assert bool((router(x, tokens).experts[:9] < 0).all())


def test_sinkhorn_plan_is_computed_over_all_ranks() -> None:
    moe = replace(MOE, aux_loss=AuxLossConfig(sinkhorn=True))
    free = alone(MOE)(X, training())
    tilted = alone(replace(moe, router=RouterConfig(bias=True)))
    with torch.no_grad():
        tilted.router_bias.copy_(torch.tensor([9.0, 0, 0, 0, 0]))  # type: ignore[operator]
    most = [
        int((tilted(X, tokens).experts == 0).sum())
        for tokens in (LayerInputs(seq_params_from_rows(2, 6)), training())
    ]
    assert most[0] == 12 and most[1] < 8
    assert torch.equal(
        alone(moe)(X, LayerInputs(seq_params_from_rows(2, 6))).experts, free.experts
    ), "none outside training"
    assert same_on_two(moe)


def test_noise_depends_on_the_token_and_only_in_training() -> None:
    for router in (RouterConfig(jitter=0.5), RouterConfig(force_load_balancing=True)):
        moe = replace(MOE, router=router)
        noisy = alone(moe)(X, training())
        assert not torch.equal(noisy.weights, alone(MOE)(X, training()).weights)
        assert torch.equal(noisy.weights, alone(moe)(X, training()).weights)
        assert not torch.equal(noisy.weights, alone(moe)(X, training(seed=1)).weights)
        assert torch.equal(
            alone(moe)(X, LayerInputs(seq_params_from_rows(2, 6))).weights,
            alone(MOE)(X, LayerInputs(seq_params_from_rows(2, 6))).weights,
        )
        assert same_on_two(moe)


def test_noise_differs_between_layers() -> None:
    for settings in (RouterConfig(jitter=0.5), RouterConfig(force_load_balancing=True)):
        router = alone(replace(MOE, router=settings))
        first = router(X, training()).weights
        router.noise = replace(router.noise, layer=1)
        assert not torch.equal(first, router(X, training()).weights)


def test_force_load_balancing_balances_the_experts() -> None:
    router = alone(replace(MOE, router=RouterConfig(force_load_balancing=True)))
    tokens = LayerInputs(
        seq_params_from_rows(1, 3000),
        dropout_key=DropoutKey(0, torch.arange(3000)),
        router_inputs=RouterInputs(AuxLossScale(0, 1, 1.0)),
    )
    counts = (
        router(torch.ones(3000, 6, dtype=torch.float64), tokens)
        .experts.flatten()
        .bincount(minlength=5)
    )
    assert int(counts.min()) > 1050 and int(counts.max()) < 1350


def test_force_biased_shifts_the_same_experts_in_every_step() -> None:
    router = RouterConfig(force_biased=3.0)
    result = alone(replace(MOE, router=router))
    drawn = result.noise.expert_shift(0, X)
    assert torch.equal(drawn, result.noise.expert_shift(0, X)) and not torch.equal(
        drawn, result.noise.expert_shift(1, X)
    )
    other = replace(result.noise, layer=1).expert_shift(0, X)
    many = replace(result.noise, router=replace(router, force_biased=1.0)).expert_shift(
        0, X.new_zeros(1, 4000)
    )
    assert not torch.equal(drawn, other)
    assert abs(float(many.mean())) < 0.05 and abs(float(many.std()) - 1) < 0.05
    (first, second) = (result(X, training()), alone(MOE)(X, training()))
    busy = [int(choice.experts.flatten().bincount(minlength=5).max()) for choice in (first, second)]
    assert busy[0] > busy[1]
    plain = LayerInputs(seq_params_from_rows(2, 6))
    assert torch.equal(result(X, plain).weights, alone(MOE)(X, plain).weights), (
        "none outside training"
    )
    assert same_on_two(replace(MOE, router=router))


def offsets_noted(rank: int, world: int, moe: MoEConfig) -> Tensor:
    mesh = (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(ParallelConfig(tp=2, sp=True), MODEL, 2), rank=rank)
    )
    tp_comm = SequenceParallelComm(mesh.tp) if world > 1 else TensorParallelComm(mesh.tp)
    router = filled(
        Router(
            "layers.0.moe",
            MODEL,
            moe,
            build_context(MODEL, mesh, tp_comm=tp_comm, dtype=torch.float64),
        )
    )
    router(tp_comm.select_local(X), training(valid=torch.arange(12) < 10))
    assert router.balance.record is not None
    return router.balance.record.offsets


def test_offsets_are_computed_over_all_shared_tokens_without_padding() -> None:
    moe = replace(MOE, aux_loss=AuxLossConfig(quantile=True))
    (result,) = offsets_noted(0, 1, moe)
    assert result[-1] == 1 and bool(result[:-1].any())
    assert all(torch.equal(each[0], result) for each in run_ranks(offsets_noted, 2, moe))
    router = alone(moe)
    assert router.offset is not None and not router.offset.requires_grad
    router(X, training(valid=torch.zeros(12, dtype=torch.bool)))
    assert router.balance.record is not None and not router.balance.record.offsets.any(), (
        "nothing but padding"
    )
    before = router.balance.record.offsets.clone()
    router(X, LayerInputs(seq_params_from_rows(2, 6)))
    assert torch.equal(before, router.balance.record.offsets), "evaluation notes nothing"
    router.offset.copy_(torch.tensor([9.0, 0, 0, 0, 0]))
    assert not bool((router(X, LayerInputs(seq_params_from_rows(2, 6))).experts == 0).any()), (
        "but goes by them"
    )


def test_gradients_reach_the_logits_with_random_routing() -> None:
    router = alone(replace(MOE, router=RouterConfig(force_load_balancing=True)))
    choice = router(X, training())
    (choice.weights * torch.arange(24).view(12, 2)).sum().backward()
    (weight,) = router.gate.accumulated_parameters()
    assert weight.grad is not None and bool(weight.grad.any())


def test_router_scores_are_fp32_in_a_bf16_model_by_default() -> None:
    def weights(dtype: str) -> Tensor:
        router = alone(replace(MOE, router=RouterConfig(dtype=dtype)), torch.bfloat16)  # type: ignore[arg-type]
        result: Tensor = router(X.bfloat16(), training()).weights
        return result

    assert [weights(dtype).dtype for dtype in ("fp32", "fp64", "model")] == [
        torch.float32,
        torch.float64,
        torch.bfloat16,
    ]


def test_expert_bias_is_fp32_and_not_trained() -> None:
    router = alone(
        replace(MOE, router=RouterConfig(score="sigmoid", expert_bias=True)), torch.bfloat16
    )
    assert router.expert_bias is not None
    assert router.expert_bias.dtype == torch.float32 and not router.expert_bias.requires_grad
    assert alone(MOE).expert_bias is None
