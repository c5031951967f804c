"""Matmuls of every parallel layer are replaced by one argument of the layer."""

from contextlib import AbstractContextManager
from functools import partial
from tempfile import TemporaryDirectory
from typing import cast

import pytest
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels.grouped_linear import Groups, LoopMatmulOps
from megalith.kernels.linear import MatmulOps
from megalith.nn.build import build_context
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.train import trainer as trainer_module
from megalith.verify.matrix import BIASED_CHOICE, PLAIN
from megalith.verify.ranks import (
    LayoutCase,
    RankResult,
    compare_results,
    compute_reference,
    join_ranks,
    layout_case,
    one_process_run,
    run_case,
)


class ScaledOps(MatmulOps):
    """Matmuls with other results, which count their calls."""

    def __init__(self) -> None:
        self.calls = [0, 0, 0]

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        self.calls[0] += 1
        return 0.5 * super().forward(x, w)

    def input_grad(self, dy: Tensor, w: Tensor) -> Tensor:
        self.calls[1] += 1
        return 0.25 * super().input_grad(dy, w)

    def weight_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        self.calls[2] += 1
        return 3.0 * super().weight_grad(dy, x)


class ScaledGroupedOps(LoopMatmulOps):
    """Grouped matmuls with other results, which count their calls."""

    def __init__(self) -> None:
        self.calls = [0, 0, 0]

    def forward(self, x: Tensor, w: Tensor, groups: Groups) -> Tensor:
        self.calls[0] += 1
        return 0.5 * super().forward(x, w, groups)

    def input_grad(self, dy: Tensor, w: Tensor, groups: Groups) -> Tensor:
        self.calls[1] += 1
        return 0.25 * super().input_grad(dy, w, groups)

    def weight_grad(self, dy: Tensor, x: Tensor, groups: Groups) -> Tensor:
        self.calls[2] += 1
        return 3.0 * super().weight_grad(dy, x, groups)


class ScaledOpsOfLayers:
    """Gives every layer of a model its own scaled matmuls."""

    def __init__(self) -> None:
        self.ops: dict[str, ScaledOps | ScaledGroupedOps] = {}

    def build(self, weight: str) -> ScaledOps:
        return cast(ScaledOps, self.ops.setdefault(weight, ScaledOps()))

    def build_grouped(self, weight: str) -> ScaledGroupedOps:
        return cast(ScaledGroupedOps, self.ops.setdefault(weight, ScaledGroupedOps()))

    def used(self) -> AbstractContextManager[None]:
        """Return a context in which models are built with these matmuls."""
        build = partial(
            build_context,
            build_matmul_ops=self.build,
            build_grouped_matmul_ops=self.build_grouped,
        )
        return patched(trainer_module, "build_context", build)


def run_with_scaled_ops(rank: int, world: int, case: LayoutCase, folder: str) -> RankResult:
    """Run the case with scaled matmuls on one rank."""
    with ScaledOpsOfLayers().used():
        return run_case(rank, world, case, folder)


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (PLAIN, ParallelConfig(tp=2)),
        pytest.param(PLAIN, ParallelConfig(tp=2, overlap=False), marks=pytest.mark.slow),
        pytest.param(PLAIN, ParallelConfig(tp=2, sp=True, zero=1), marks=pytest.mark.slow),
        (PLAIN, ParallelConfig(tp=2, sp=True, tp_comm_overlap=True)),
        (BIASED_CHOICE, ParallelConfig(tp=2, ep=2, etp=1, sp=True)),
    ],
    ids=["tp2", "tp2 without overlap", "sp", "sp with collective matmul", "experts"],
)
def test_replaced_matmuls_give_the_results_of_one_process(
    model: ModelConfig, parallel: ParallelConfig
) -> None:
    case = layout_case(model, parallel, 2)
    with TemporaryDirectory() as folder, TemporaryDirectory() as other:
        result = join_ranks(run_ranks(run_with_scaled_ops, 2, case, folder))
        reference = run_with_scaled_ops(0, 1, LayoutCase(one_process_run(case), 1), other)
    differences = compare_results(result, reference)
    assert all(difference.holds for difference in differences), differences


@pytest.mark.parametrize("model", [PLAIN, BIASED_CHOICE], ids=["dense", "experts"])
def test_every_layer_calls_its_own_matmuls(model: ModelConfig) -> None:
    layers = ScaledOpsOfLayers()
    case = layout_case(model, ParallelConfig(), 1)
    with layers.used(), TemporaryDirectory() as folder:
        scaled = run_case(0, 1, case, folder)
    names = {"q", "o", "gate_up", "down", "weight"} | ({"router"} if model.moe else set())
    assert {name.rsplit(".", 1)[1] for name in layers.ops} >= names
    assert all(all(ops.calls) for ops in layers.ops.values())
    assert scaled.losses[0] != compute_reference(case).losses[0]
