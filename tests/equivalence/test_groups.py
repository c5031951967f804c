"""Groups: after three steps the weights are those of torch's own optimizer with groups made by
hand, in float64."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.optim import GroupConfig, OptimConfig, ScheduleConfig
from megalith.config.parallel import ParallelConfig
from megalith.observe.metrics import read_metrics
from megalith.optim.schedule import group_rates, learning_rate, schedule_lengths, weight_decay
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.batch_schedule import constant_batch_size
from megalith.testing.inject import patched
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import FP64, assert_close
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer
from megalith.verify import ranks as proof
from megalith.verify.matrix import tiny

CPU = torch.device("cpu")
OPTIM = OptimConfig(
    eps=1e-3,
    clip_grad=0.0,
    frozen=("layers.0.mlp.*",),
    decayed_vectors=("norm.weight",),
    groups=(
        GroupConfig(name="table", match=("embed.weight",), lr=5e-2, min_lr=1e-2),
        GroupConfig(name="queries", match=("*.q",), lr_scale=0.25, weight_decay=0.8),
        GroupConfig(name="upper", match=("layers.1.mlp.*",), weight_decay_scale=0.0),
    ),
)
SCHEDULE = ScheduleConfig(lr=1e-2, min_lr=1e-3, style="linear", warmup_steps=1, weight_decay=0.1)


def by_hand(name: str, vector: bool) -> tuple[str, str]:
    """Which group decides the rate and the decay of a parameter, written down a second time."""
    rate = "table" if name == "embed.weight" else "queries" if name.endswith(".q") else ""
    if name.endswith(".q"):
        return rate, "queries"
    if name.startswith("layers.1.mlp."):
        return rate, "upper"
    return rate, "none" if vector and name != "norm.weight" else ""


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_three_steps_match_torch_with_manual_parameter_groups(kind: Any) -> None:
    case = proof.layout_case(tiny(), ParallelConfig(), 1)
    run = replace(case.run, optim=replace(OPTIM, kind=kind), schedule=SCHEDULE)
    trainer = build_trainer(run, build_single_rank_mesh(), CPU)
    loader = proof._loader(run, trainer.mesh, consumed=0, steps=3)
    slots = trainer.optimizer.slots
    reference = {slot.shard.name: torch.nn.Parameter(slot.weight.clone()) for slot in slots}
    decides = {slot.shard.name: by_hand(slot.shard.name, slot.shard.inputs == 0) for slot in slots}
    results = [{"params": [reference[name]], "name": name} for name in reference]
    o = run.optim
    oracle = (
        torch.optim.AdamW(results, betas=(o.beta1, o.beta2), eps=o.eps)
        if kind == "adamw"
        else torch.optim.SGD(results, lr=1.0, momentum=o.momentum)
    )
    seen: list[list[Tensor]] = []
    step = trainer.optimizer.step

    def noted(gradients: Sequence[Tensor], **settings: Any) -> None:
        seen.append([gradient.clone() for gradient in gradients])
        step(gradients, **settings)

    lengths = schedule_lengths(SCHEDULE, batch_schedule=constant_batch_size(12), total_steps=4)
    with patched(trainer.optimizer, "step", noted):
        for number in range(3):
            samples = 12 * (number + 1)
            lr, decay = (rule(SCHEDULE, samples, lengths) for rule in (learning_rate, weight_decay))
            groups = group_rates(run.optim.groups, SCHEDULE, samples, lengths)
            assert train_step(
                trainer, loader.next(), lr=lr, weight_decay=decay, groups=groups
            ).updated
            own = {"": lr, "table": groups["table"].lr, "queries": lr / 4}
            decays: Mapping[str, float] = {"": decay, "queries": 0.8, "upper": 0.0, "none": 0.0}
            for group, gradient in zip(oracle.param_groups, seen[-1], strict=True):
                rate, kept = decides[group["name"]]
                group["lr"], group["weight_decay"] = own[rate], decays[kept]
                group["params"][0].grad = gradient.view_as(group["params"][0])
            oracle.step()
    ours = {slot.shard.name: slot.weight for slot in slots}
    assert_close(ours, {name: parameter.detach() for name, parameter in reference.items()}, FP64)
    assert "layers.0.mlp.down" not in ours and len({*decides.values()}) == 5


def test_a_run_logs_the_rate_of_every_group_that_has_one_and_maps_its_parameters(
    tmp_path: Path,
) -> None:
    groups = (
        "[{name: table, match: [embed.weight], lr_scale: 0.5}, {name: firm, match: ['*.q'], "
        "weight_decay: 0.5}]"
    )
    run = tiny_run({"optim.groups": groups, "observe.parameters": "true", "train.steps": "2"})
    folder = RunFolder(tmp_path / "run")
    run_training(run, folder, build_single_rank_mesh(), CPU, show=False)
    rows = [row for row in read_metrics(folder.metrics) if "loss" in row]
    assert [row["lr_table"] for row in rows] == [
        row["lr"] * 0.5 for row in rows
    ] and "lr_firm" not in rows[0]
    assert '"lr": "table"' in folder.parameters.read_text().splitlines()[0]
