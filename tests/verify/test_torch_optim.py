"""Updates computed by torch.optim match ours and reveal faults of ours."""

from dataclasses import replace

import pytest
import torch

from megalith.config.optim import GroupConfig, OptimConfig
from megalith.config.parallel import ParallelConfig
from megalith.optim.schedule import GroupRates
from megalith.plan.param_groups import parameter_rates
from megalith.plan.shards import Shard
from megalith.train.trainer import build_optimizer
from megalith.verify.matrix import load_matrix, tiny
from megalith.verify.ranks import layout_case
from megalith.verify.torch_optim import RecordingOptimizer, is_matrix, torch_updates

RUN = layout_case(tiny(), ParallelConfig(), 1).run
SHAPES = {
    "layers.0.attention.q": (4, 6, 24),
    "norm.weight": (24,),
    "layers.0.mlp.gate_up_bias": (2, 20),
}


def gradients_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize(
    "optim",
    [
        OptimConfig(),
        OptimConfig(decoupled_weight_decay=False, clip_grad=0.0),
        OptimConfig(kind="sgd"),
        OptimConfig(kind="sgd", nesterov=True, decayed_vectors=("norm.weight",)),
        OptimConfig(kind="sgd", momentum=0.0),
        OptimConfig(
            groups=(GroupConfig(name="queries", match=("*.q",), lr_scale=0.1, weight_decay=0.7),)
        ),
    ],
    ids=["adamw", "adam with L2", "sgd", "nesterov", "sgd without momentum", "groups"],
)
def test_updates_match_torch_optim(optim: OptimConfig) -> None:
    run = replace(RUN, optim=replace(optim, eps=1e-3))
    first = gradients_of(100)
    shards = [
        Shard.full(name, shape, inputs=1 if name.endswith(".q") else 0)
        for name, shape in SHAPES.items()
    ]
    weights = {name: weight.clone() for name, weight in first.items()}
    ours = build_optimizer(
        [(shard, weights[shard.name]) for shard in shards],
        run.optim,
        lambda shard: parameter_rates(run.model, run.optim, shard.name, shard.inputs),
    )
    recording = RecordingOptimizer(ours)
    groups = {"queries": GroupRates(lr=1e-3, weight_decay=0.7)}
    recorded, norms = [], []
    for step in range(3):
        gradients = gradients_of(step)
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        norms.append(float(norm))
        scale = (
            torch.clamp(run.optim.clip_grad / (norm + 1e-6), max=1.0)
            if run.optim.clip_grad
            else None
        )
        recording.step(
            [gradients[name] for name in SHAPES],
            lr=1e-2,
            weight_decay=0.1,
            scale=scale,
            groups=groups,
        )
        recorded.append(dict(zip(SHAPES, recording.gradients, strict=True)))
    assert recording.updates == 3
    assert all(
        torch.equal(recorded[2][name], gradient) for name, gradient in gradients_of(2).items()
    )

    expected = torch_updates(run, first, recorded, lr=1e-2, weight_decay=0.1, groups=groups)
    assert [update.grad_norm for update in expected] == pytest.approx(norms, rel=1e-12)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[-1].weights[name], rtol=1e-12, atol=1e-14)
    moments = {
        f"optimizer.{role}.{slot.shard.name}": state
        for slot in ours.slots
        for role, state in slot.state.items()
    }
    assert moments.keys() == expected[-1].states.keys()
    for name, moment in moments.items():
        torch.testing.assert_close(moment, expected[-1].states[name], rtol=1e-12, atol=1e-14)


def test_weight_decay_excludes_norms_biases_and_sinks() -> None:
    vectors = {
        "norm.weight": (24,),
        "layers.0.attention.q_norm.weight": (6, 6),
        "layers.0.mlp.gate_up_bias": (2, 20),
        "layers.0.attention.sinks": (4,),
        "layers.0.moe.experts.down_bias": (4, 24),
    }
    matrices = {
        "embed.weight": (64, 24),
        "layers.0.attention.q": (4, 6, 24),
        "layers.0.attention.q.lora_a": (3, 24),
    }
    assert not any(is_matrix(name, torch.empty(shape)) for name, shape in vectors.items())
    assert all(is_matrix(name, torch.empty(shape)) for name, shape in matrices.items())


def test_matrix_has_rows_with_every_optimizer() -> None:
    optims = [row.optim for row in load_matrix()]
    assert {(optim.kind, optim.decoupled_weight_decay) for optim in optims} == {
        ("adamw", True),
        ("adamw", False),
        ("sgd", True),
        ("muon", True),
        ("soap", True),
        ("adafactor", True),
    }
    assert any(optim.nesterov for optim in optims)
