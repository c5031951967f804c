"""The balancing bias moves by counts of all ranks and microbatches, once a step."""

from dataclasses import replace

import torch

from megalith.config.moe import MoEConfig, RouterConfig
from megalith.config.train import TrainRun
from megalith.kernels.tokens import BalanceShare
from megalith.parallel.mesh import mesh_of_one
from megalith.testing.tiny import tiny_run
from megalith.train.build import build_trainer
from megalith.train.experts import move_balancing_biases, routers_of


def run_with(router: RouterConfig) -> TrainRun:
    run = tiny_run()
    return replace(run, model=replace(run.model, moe=MoEConfig(experts=4, ffn_hidden_size=6, router=router)))


BALANCED = RouterConfig(score="sigmoid", balancing_bias=True, balancing_rate=1e-3)


def test_experts_chosen_more_than_others_lose_and_those_chosen_less_gain() -> None:
    trainer = build_trainer(run_with(BALANCED), mesh_of_one(), torch.device("cpu"))
    first, second = routers_of(trainer.staged.modules)
    move_balancing_biases(trainer.staged.modules, trainer.mesh)
    assert first.moved is not None and not first.moved.any(), "nothing was counted yet"
    record = first.balance.record_of(BalanceShare(0, 2, 1.0), torch.zeros(1))
    second.balance.record_of(BalanceShare(0, 2, 1.0), torch.zeros(1))
    record.counts[:] = torch.tensor([[2.0, 1, 0, 1], [1, 2, 1, 0]])
    move_balancing_biases(trainer.staged.modules, trainer.mesh)
    assert torch.allclose(first.moved, torch.tensor([-1e-3, -1e-3, 1e-3, 1e-3]))
    assert second.moved is not None and not second.moved.any(), "all were chosen equally often"


def test_routers_that_are_not_trained_keep_their_biases() -> None:
    trainer = build_trainer(run_with(BALANCED), mesh_of_one(), torch.device("cpu"))
    router, _ = routers_of(trainer.staged.modules)
    router.balance.record_of(BalanceShare(0, 1, 1.0), torch.zeros(1)).counts[0, 0] = 5
    for weight in router.gate.sunk():
        weight.requires_grad_(False)
    move_balancing_biases(trainer.staged.modules, trainer.mesh)
    assert router.moved is not None and not router.moved.any()
