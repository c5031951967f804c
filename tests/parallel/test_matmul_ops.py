"""Matmuls of every parallel layer are replaced by one argument of the layer."""

from tempfile import TemporaryDirectory

import pytest
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels.grouped_linear import Groups, LoopMatmulOps
from megalith.kernels.linear import MatmulOps
from megalith.nn.router import RouterGate
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import (
    ColumnParallelLinear,
    ExpertMatrix,
    ReplicatedLinear,
    RowParallelLinear,
)
from megalith.testing.ranks import run_ranks
from megalith.verify.faults.plant import changed_model
from megalith.verify.ranks import (
    LayoutCase,
    RankResult,
    compare_results,
    compute_reference,
    join_ranks,
    layout_case,
    run_case,
    run_of_one,
)
from megalith.verify.tiny_models import BIASED_CHOICE, PLAIN


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


class ReplaceOps:
    """Gives every layer of a model its own scaled matmuls."""

    def __init__(self) -> None:
        self.ops: list[ScaledOps | ScaledGroupedOps] = []

    def __call__(self, model: nn.Module, mesh: Mesh) -> None:
        for layer in model.modules():
            if isinstance(layer, RouterGate):  # always computed in the router's dtype
                continue
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear):
                layer.matmul_ops = ScaledOps()
                self.ops.append(layer.matmul_ops)
            elif isinstance(layer, ExpertMatrix):
                layer.matmul_ops = ScaledGroupedOps()
                self.ops.append(layer.matmul_ops)


def run_with_scaled_ops(rank: int, world: int, case: LayoutCase, folder: str) -> RankResult:
    """Run the case with scaled matmuls on one rank."""
    with changed_model(ReplaceOps()):
        return run_case(rank, world, case, folder)


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (PLAIN, ParallelConfig(tp=2)),
        (PLAIN, ParallelConfig(tp=2, overlap=False)),
        (PLAIN, ParallelConfig(tp=2, sp=True, zero=1)),
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
        reference = run_with_scaled_ops(0, 1, LayoutCase(run_of_one(case), 1), other)
    differences = compare_results(result, reference)
    assert all(difference.holds for difference in differences), differences


@pytest.mark.parametrize("model", [PLAIN, BIASED_CHOICE], ids=["dense", "experts"])
def test_every_layer_calls_its_own_matmuls(model: ModelConfig) -> None:
    replace_ops = ReplaceOps()
    case = layout_case(model, ParallelConfig(), 1)
    with changed_model(replace_ops), TemporaryDirectory() as folder:
        scaled = run_case(0, 1, case, folder)
    assert replace_ops.ops and all(all(ops.calls) for ops in replace_ops.ops)
    assert scaled.losses[0] != compute_reference(case).losses[0]
