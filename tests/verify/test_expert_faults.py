"""Faults in mixtures of experts change what they say, and nothing where there is nothing to
change."""

import torch

from megalith.nn.init import init_param_
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.parallel.tensor import Init
from megalith.plan.shards import Shard
from megalith.verify.faults.moe import (
    division_by_ep_alone,
    division_of_dense,
    init_as_if_first_experts,
    never_undone,
    own_counts_alone,
    parts_of_own_rank,
)


def test_experts_of_the_second_rank_are_drawn_as_the_first_ranks() -> None:
    second = Shard.full("experts.down", (4, 3, 2), inputs=2).split_dim(0, [2, 2], 1, ("ep",))
    right, wrong, dense = (torch.zeros(second.matrix_shape) for _ in range(3))
    init_param_(right, second, Init(1.0), seed=0)
    init_as_if_first_experts(dense, second, Init(1.0), seed=0)
    assert torch.equal(right, dense), "what lies on the dense grid is drawn as it should be"
    init_as_if_first_experts(
        wrong,
        type(second)(
            second.name, second.shape, second.box, second.cut, grid="expert", inputs=second.inputs
        ),
        Init(1.0),
        seed=0,
    )
    assert not torch.equal(right, wrong)


def test_nobody_else_means_no_fault() -> None:
    mesh, x = build_single_rank_mesh(), torch.arange(6.0)
    assert (
        division_of_dense(0, mesh, "expert").replicas.size
        == division_by_ep_alone(0, mesh, "expert").replicas.size
    )
    assert (
        torch.equal(parts_of_own_rank(x, single_rank_group("etp")), x)
        and own_counts_alone(x, single_rank_group("dp")) is x
    )


def test_answers_stay_where_experts_had_them() -> None:
    assert never_undone([5, 6, 7], [2, 0, 1]) == ([7, 5, 6], [0, 1, 2])
