"""Aux losses: gradients match one rank, and recomputation does not change the record."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels.layer_inputs import AuxLossScale, LayerInputs, RouterInputs
from megalith.kernels.packed import seq_params_from_lengths
from megalith.kernels.routing import (
    choose_experts,
    count_choices,
    load_balancing_loss,
    normalized_scores,
)
from megalith.models.decoder import allocate, initialize
from megalith.nn.build import build_context
from megalith.nn.moe import LOSS_COEFFS, LOSSES, Router
from megalith.parallel.group import all_reduce_
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.parallel.tensor import SequenceParallelComm, TensorParallelComm
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.verify.faults.moe import step_of_own_tokens

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
X = torch.randn(2, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
KINDS = [replace(MOE, aux_loss=AuxLossConfig(**{name: 0.7})) for name in LOSS_COEFFS]


def training(microbatch: int = 0, weight: float = 0.5, num_valid: int = 11) -> LayerInputs:
    """Three documents; the tokens after the first `num_valid` are padding."""
    seq_params = replace(seq_params_from_lengths([5, 3, 4]), valid=torch.arange(12) < num_valid)
    return LayerInputs(seq_params, router_inputs=RouterInputs(AuxLossScale(microbatch, 2, weight)))


def router_of(moe: MoEConfig) -> Router:
    mesh = build_single_rank_mesh()
    router = Router("layers.0.moe", MODEL, moe, build_context(MODEL, mesh, dtype=torch.float64))
    allocate(router, torch.device("cpu"))
    initialize(router, seed=3)
    return router


def gradient_of_losses(router: Router, batches: list[Tensor]) -> Tensor:
    """Of the gate, where nothing but the losses of balance is asked for."""
    for number, x in enumerate(batches):
        (router(x, training(number)).weights * 0).sum().backward()
    (weight,) = router.gate.accumulated_parameters()
    assert weight.grad is not None
    return weight.grad


def divided(rank: int, world: int, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    mesh = build_mesh(model_grid(ParallelConfig(tp=world, sp=True), MODEL, world), rank=rank)
    tp_comm = SequenceParallelComm(mesh.tp)
    router = Router(
        "layers.0.moe", MODEL, moe, build_context(MODEL, mesh, tp_comm=tp_comm, dtype=torch.float64)
    )
    allocate(router, torch.device("cpu"))
    initialize(router, seed=3)
    gradient = gradient_of_losses(router, [tp_comm.select_local(x) for x in X])
    assert router.balance.record is not None
    return all_reduce_(gradient, mesh.tp), all_reduce_(
        router.balance.record.losses.clone(), mesh.tp
    )


@pytest.mark.parametrize("moe", KINDS, ids=LOSSES)
def test_aux_loss_gradients_match_one_rank(moe: MoEConfig) -> None:
    router = router_of(moe)
    gradient = gradient_of_losses(router, list(X))
    assert bool(gradient.abs().max() > 1e-3)
    assert router.balance.record is not None
    for other, losses in run_ranks(divided, 2, moe):
        assert torch.allclose(other, gradient, rtol=1e-11)
        assert torch.allclose(losses, router.balance.record.losses, rtol=1e-12)


def test_aux_loss_is_scaled_by_its_coefficient_and_microbatch_weight() -> None:
    def gradient(coefficient: float, share: float) -> Tensor:
        router = router_of(replace(MOE, aux_loss=AuxLossConfig(batch_coeff=coefficient)))
        (router(X[0], training(weight=share)).weights * 0).sum().backward()
        (weight,) = router.gate.accumulated_parameters()
        assert weight.grad is not None
        return weight.grad

    assert torch.allclose(gradient(0.6, 0.5), 0.3 * gradient(1.0, 1.0))
    router = router_of(MOE)
    logits = router.gate(X[0])
    shares, valid = logits.softmax(1), training().seq_params.valid
    zeros = torch.zeros(12, dtype=torch.int32)
    counts = count_choices(logits.topk(2).indices, zeros, valid, sequences=1, num_experts=5)
    load_balancing_loss(shares, counts, zeros, valid, top_k=2).backward()
    (weight,) = router.gate.accumulated_parameters()
    assert torch.allclose(gradient(1.0, 1.0), weight.grad)  # type: ignore[arg-type]


def test_loss_counts_choices_by_score_and_the_record_actual_choices() -> None:
    moe = replace(
        MOE,
        router=RouterConfig(score="sigmoid", expert_bias=True),
        aux_loss=AuxLossConfig(batch_coeff=0.1),
    )
    router, tilted = router_of(moe), router_of(moe)
    assert tilted.expert_bias is not None
    tilted.expert_bias.data.copy_(torch.tensor([9.0, 0, 0, 0, 0]))
    for each in (router, tilted):
        each(X[0], training())
    first, second = router.balance.record, tilted.balance.record
    assert first is not None and second is not None
    assert torch.equal(first.losses, second.losses)
    assert second.counts[0, 0] == 11 and first.counts[0, 0] < 11


def test_loss_of_choices_counts_choices_before_token_dropping() -> None:
    """Biases and groups then show in it, and capacities do not hide who is asked for too much."""
    balance = AuxLossConfig(batch_coeff=0.1, of_choices=True)
    moe = replace(MOE, router=RouterConfig(score="sigmoid", expert_bias=True), aux_loss=balance)
    losses, plain = [], replace(moe, aux_loss=replace(balance, of_choices=False))
    for each in (plain, moe, replace(moe, capacity=CapacityConfig(factor=0.5))):
        router = router_of(each)
        assert router.expert_bias is not None
        router.expert_bias.data.copy_(torch.tensor([9.0, 0, 0, 0, 0]))
        router(X[0], training())
        assert router.balance.record is not None
        losses.append(float(router.balance.record.losses[0, 1]))
    assert losses[1] != pytest.approx(losses[0], rel=1e-3) and losses[1] == losses[2]
    shares, chosen = (
        normalized_scores(router_of(moe).gate(X[0]), "sigmoid")[:11],
        torch.zeros(5, dtype=torch.float64),
    )
    requested = choose_experts(
        router_of(moe).gate(X[0]), moe.router, 2, torch.tensor([9.0, 0, 0, 0, 0])
    ).experts[:11]
    chosen += requested.flatten().bincount(minlength=5)
    assert losses[1] == pytest.approx(
        float(5 / (2 * 11**2) * (chosen * shares.detach().sum(0)).sum()), rel=1e-12
    )


def test_recomputation_and_evaluation_do_not_change_the_record() -> None:
    router = router_of(replace(MOE, aux_loss=AuxLossConfig(global_batch_coeff=0.1)))
    for number, x in enumerate(X):
        router(x, training(number))
    record = router.balance.record
    assert record is not None
    before = [part.clone() for part in (record.counts, record.chosen, record.losses)]
    router(X[0], training(0))
    router(X[1], LayerInputs(seq_params_from_lengths([12])))
    assert all(map(torch.equal, before, (record.counts, record.chosen, record.losses)))
    assert record.counts.sum(1).tolist() == [22, 22]


def test_global_batch_loss_counts_all_microbatches_so_far() -> None:
    router = router_of(
        replace(MOE, aux_loss=AuxLossConfig(global_batch_coeff=1.0, batch_coeff=1.0))
    )
    for number, x in enumerate(X):
        router(x, training(number))
    assert router.balance.record is not None
    by_batch, by_step = router.balance.record.losses[:, 1], router.balance.record.losses[:, 2]
    assert by_batch[0] == pytest.approx(float(by_step[0]), rel=1e-12)
    assert by_batch[1] != pytest.approx(float(by_step[1]), rel=1e-6)


# --- over the global batch

GLOBAL = replace(MOE, aux_loss=AuxLossConfig(global_batch_coeff=0.7))
ROWS = torch.randn(2, 2, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
"""Of two ranks along dp, two microbatches each."""
REAL = 11, 7
"""Tokens that are no padding, of each rank's microbatches."""
OVER_DP = {
    "dp2": ParallelConfig(dp=2),
    "dp2 ep2": ParallelConfig(dp=2, ep=2),
    "dp2 tp2 sp ep2 etp1": ParallelConfig(dp=2, tp=2, sp=True, ep=2, etp=1),
}


def step_by_hand(weight: Tensor) -> tuple[Tensor, list[list[float]]]:
    """Gradient of the gate, and losses by rank and microbatch: E Σ_i f_i P_i, with f_i the share
    of expert i in all choices of all ranks up to the microbatch, and P_i its mean score in the
    rank's own microbatch."""
    gate = weight.clone().requires_grad_()
    seen, total = [0] * 5, torch.zeros((), dtype=torch.float64)
    losses: list[list[float]] = [[], []]
    for number in range(2):
        shares = [(ROWS[rank, number] @ gate.T).softmax(1)[: REAL[rank]] for rank in range(2)]
        for row in torch.cat(shares).tolist():
            for expert in sorted(range(5), key=lambda e: -row[e])[:2]:
                seen[expert] += 1
        for rank, local in enumerate(shares):
            loss = torch.stack(
                [5 * seen[e] / sum(seen) * local[:, e].mean() for e in range(5)]
            ).sum()
            losses[rank].append(loss.item())
            # 0.7: its weight in the config; 0.25: of one of two microbatches, dp 2
            total = total + 0.7 * 0.25 * loss
    total.backward()
    assert gate.grad is not None
    return gate.grad, losses


def step_over_dp(
    rank: int, world: int, parallel: ParallelConfig, fault: bool
) -> tuple[int, Tensor, Tensor, Tensor]:
    """My place along dp; the gate, its gradient over all ranks, and the losses of ranks that share
    my tokens."""
    mesh = build_mesh(model_grid(parallel, replace(MODEL, moe=GLOBAL), world), rank=rank)
    tp_comm = SequenceParallelComm(mesh.tp) if parallel.sp else TensorParallelComm(mesh.tp)
    router = Router(
        "layers.0.moe",
        MODEL,
        GLOBAL,
        build_context(MODEL, mesh, tp_comm=tp_comm, dtype=torch.float64),
    )
    allocate(router, torch.device("cpu"))
    initialize(router, seed=3)
    place = mesh.dp.rank
    with step_of_own_tokens.context() if fault else nullcontext():
        for number, x in enumerate(ROWS[place]):
            tokens = training(number, weight=0.25, num_valid=REAL[place])
            (router(tp_comm.select_local(x), tokens).weights * 0).sum().backward()
    (weight,), record = router.gate.accumulated_parameters(), router.balance.record
    assert weight.grad is not None and record is not None
    losses = all_reduce_(record.losses[:, 2].clone(), mesh.tp)
    return (
        place,
        weight.detach(),
        all_reduce_(weight.grad.clone(), mesh.over("dp", "cp", "tp")),
        losses,
    )


@pytest.mark.parametrize("name", OVER_DP)
def test_the_loss_over_the_global_batch_counts_all_ranks_and_microbatches_so_far(name: str) -> None:
    layout = OVER_DP[name]
    for place, weight, gradient, losses in run_ranks(step_over_dp, layout.tp * 2, layout, False):
        expected, by_rank = step_by_hand(weight)
        assert bool(expected.abs().max() > 1e-3)
        assert torch.allclose(gradient, expected, rtol=1e-11, atol=1e-15)
        assert losses.tolist() == pytest.approx(by_rank[place], rel=1e-12)


@pytest.mark.parametrize("name", OVER_DP)
def test_global_batch_loss_requires_the_sum_over_dp(name: str) -> None:
    layout = OVER_DP[name]
    for place, weight, gradient, losses in run_ranks(step_over_dp, layout.tp * 2, layout, True):
        expected, by_rank = step_by_hand(weight)
        assert not torch.allclose(gradient, expected, rtol=1e-2, atol=1e-4)
        assert losses.tolist() != pytest.approx(by_rank[place], rel=1e-3)
