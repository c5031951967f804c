"""The balancing bias moves by counts of all ranks and microbatches, once a step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.config.observe import ObserveConfig
from megalith.config.parallel import ParallelConfig, PipelineConfig, RecomputeConfig
from megalith.config.train import TrainRun
from megalith.data.loader import BatchSettings, Loader
from megalith.errors import DataError
from megalith.kernels.layer_inputs import AuxLossScale, RoutingRecord
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.batch_schedule import constant_batch_size
from megalith.plan.grid import model_grid
from megalith.rules.run import run_problems
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.loop import run_training
from megalith.train.moe import (
    LayerExpertLoad,
    attach_routing,
    collect_expert_load,
    expert_load_metrics,
    iter_routers,
    update_expert_biases,
    update_quantile_offsets,
)
from megalith.train.objective import LossTerm, build_loss_normalizer
from megalith.train.run_folder import RunFolder
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer
from megalith.verify.ranks import RaggedRows


def run_with(router: RouterConfig) -> TrainRun:
    run = tiny_run()
    return replace(
        run,
        model=replace(run.model, moe=MoEConfig(num_experts=4, ffn_hidden_size=6, router=router)),
    )


BALANCED = RouterConfig(score="sigmoid", expert_bias=True, expert_bias_update_rate=1e-3)


def test_expert_bias_falls_for_overloaded_and_rises_for_underloaded_experts() -> None:
    trainer = build_trainer(run_with(BALANCED), build_single_rank_mesh(), torch.device("cpu"))
    first, second = iter_routers(trainer.pipeline_model.modules)
    update_expert_biases(trainer.pipeline_model.modules, trainer.mesh)
    assert first.expert_bias is not None and not first.expert_bias.any(), "nothing was counted yet"
    record = first.balance.step_record(AuxLossScale(0, 2, 1.0), torch.zeros(1))
    second.balance.step_record(AuxLossScale(0, 2, 1.0), torch.zeros(1))
    record.counts[:] = torch.tensor([[2.0, 1, 0, 1], [1, 2, 1, 0]])
    update_expert_biases(trainer.pipeline_model.modules, trainer.mesh)
    assert torch.allclose(first.expert_bias, torch.tensor([-1e-3, -1e-3, 1e-3, 1e-3]))
    assert second.expert_bias is not None and not second.expert_bias.any(), (
        "all were chosen equally often"
    )
    record.counts[:] = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0]])
    update_expert_biases(trainer.pipeline_model.modules, trainer.mesh)
    assert torch.allclose(first.expert_bias, torch.tensor([-2e-3, 0, 2e-3, 2e-3])), (
        "steps of fixed size, however small the imbalance"
    )


@pytest.mark.parametrize("why", ["no label", "not finite"])
def test_skipped_step_does_not_update_expert_bias(why: str) -> None:
    run = run_with(BALANCED)
    run = replace(run, optim=replace(run.optim, nonfinite_grad="skip"))
    trainer = build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))
    masked = tuple(range(12)) if why == "no label" else ()
    loader = Loader(
        RaggedRows(12, 257, 24, masked=masked),
        BatchSettings(batch_schedule=constant_batch_size(12), micro_batch_size=6),
        trainer.mesh.dp,
        consumed=0,
        steps=2,
        device=torch.device("cpu"),
    )
    param = trainer.data.local_params[-1]
    before = param.weight.clone()
    param.weight.fill_(torch.inf if why == "not finite" else 1.0)
    trainer.data.all_gather_params()
    assert not train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.0).updated
    routers = list(iter_routers(trainer.pipeline_model.modules))
    assert not any(router.expert_bias.any() for router in routers if router.expert_bias is not None)
    param.weight.copy_(before)
    trainer.data.all_gather_params()
    assert train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.0).updated
    assert all(
        router.expert_bias is not None and bool(router.expert_bias.any()) for router in routers
    )


def test_offsets_are_decayed_means_over_microbatches_with_tokens() -> None:
    balance = AuxLossConfig(quantile=True, quantile_ema=0.25)
    run = run_with(RouterConfig())
    assert run.model.moe is not None
    run = replace(run, model=replace(run.model, moe=replace(run.model.moe, aux_loss=balance)))
    trainer = build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))
    first, second = iter_routers(trainer.pipeline_model.modules)
    update_quantile_offsets(trainer.pipeline_model.modules, trainer.mesh)
    assert first.offset is not None and not first.offset.any(), "nothing was noted yet"
    record = first.balance.step_record(AuxLossScale(0, 3, 1.0), torch.zeros(1))
    second.balance.step_record(AuxLossScale(0, 3, 1.0), torch.zeros(1))
    record.offsets[:] = torch.tensor([[4.0, 0, 0, 0, 1], [8.0, 4, 0, 0, 1], [0, 0, 0, 0, 0]])
    first.offset.data.copy_(torch.tensor([0.0, 4, 0, -4]))
    update_quantile_offsets(trainer.pipeline_model.modules, trainer.mesh)
    fresh = torch.tensor([6 * 0.75, 2 * 0.75 + 1, 0, -1.0])
    assert torch.allclose(first.offset, fresh - fresh.mean())
    assert second.offset is not None and not second.offset.any(), "nothing but padding"


def test_frozen_routers_keep_their_expert_biases() -> None:
    trainer = build_trainer(run_with(BALANCED), build_single_rank_mesh(), torch.device("cpu"))
    router, _ = iter_routers(trainer.pipeline_model.modules)
    router.balance.step_record(AuxLossScale(0, 1, 1.0), torch.zeros(1)).counts[0, 0] = 5
    for weight in router.gate.accumulated_parameters():
        weight.requires_grad_(False)
    update_expert_biases(trainer.pipeline_model.modules, trainer.mesh)
    assert router.expert_bias is not None and not router.expert_bias.any()


def test_fp16_loss_scale_applies_to_aux_losses() -> None:
    run = run_with(RouterConfig())
    assert run.model.moe is not None
    run = replace(
        run,
        model=replace(
            run.model,
            moe=replace(run.model.moe, aux_loss=AuxLossConfig(batch_coeff=0.5, z_loss_coeff=0.1)),
        ),
    )
    trainer = build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))
    loader = Loader(
        RaggedRows(12, 257, 12, masked=()),
        BatchSettings(batch_schedule=constant_batch_size(12), micro_batch_size=6),
        trainer.mesh.dp,
        consumed=0,
        steps=1,
        device=torch.device("cpu"),
    )
    step = loader.next()
    batches, objective = step.microbatches, trainer.pipeline_model.objective

    def gradients(scale: float) -> list[torch.Tensor]:
        trainer.data.begin_step(len(batches))
        normalizer = build_loss_normalizer(objective, step, trainer.mesh, scale=scale)
        trainer.pipeline_model.forward_backward(batches, normalizer)
        return [param.gradient.clone() for param in trainer.data.finish()]

    for plain, scaled in zip(gradients(1.0), gradients(1024.0), strict=True):
        torch.testing.assert_close(
            scaled, plain * 1024, rtol=1e-5, atol=1e-4 * float(plain.abs().max())
        )
    (router,) = (
        o.gradient for o in trainer.data.local_params if o.shard.name == "layers.0.moe.router"
    )
    trainer.data.begin_step(len(batches))
    without_loss = build_loss_normalizer(objective, step, trainer.mesh)
    without_loss = replace(without_loss, terms={"loss": LossTerm("labels", weight=0.0)})
    trainer.pipeline_model.forward_backward(batches, without_loss)
    trainer.data.finish()
    assert bool(router.any()), "the router learns from them alone, too"


def test_metrics_row_has_the_load_of_the_busiest_expert_of_every_layer() -> None:
    uses = [
        LayerExpertLoad("layers.2", (6.0, 2.0, 0.0, 0.0), 2.0, (0.0, 1.5, 0.0, 0.0), 0.0),
        LayerExpertLoad("mtp.0.layer", (2.0, 2.0, 2.0, 2.0), 0.0, (0.0, 1.0, 0.0, 0.0), 0.25),
    ]
    assert expert_load_metrics(uses, [0.0, 0.1, 0.0, 0.0]) == {
        "moe_batch_loss": 1.25,
        "moe_max_load": 3.0,
        "moe_entropy": 0.4056,
        "moe_idle_experts": 2,
        "moe_dropped_share": round(2 / 18, 6),
        "moe_bias_range": 0.25,
        "moe_layers_2_load": 3.0,
        "moe_mtp_0_layer_load": 1.0,
    }
    assert expert_load_metrics([], [0.0] * 4) == {}
    even = LayerExpertLoad("layers.0", (5.0,) * 8, 0.0, (0.0,) * 4, 0.0)
    for use in (even, even._replace(counts=(5.0,)), even._replace(counts=(0.0, 0.0))):
        assert expert_load_metrics([use], [0.0] * 4)["moe_entropy"] == 1.0


def test_metrics_row_has_every_layer_with_per_layer() -> None:
    uses = [
        LayerExpertLoad("layers.2", (6.0, 2.0, 0.0, 0.0), 2.0, (0.0, 1.5, 0.0, 0.25), 0.0),
        LayerExpertLoad("mtp.0.layer", (2.0, 2.0, 2.0, 2.0), 0.0, (0.0, 1.0, 0.0, 0.75), 0.25),
    ]
    weights = [0.0, 0.1, 0.0, 0.01]
    row, whole = (
        expert_load_metrics(uses, weights, per_layer=True),
        expert_load_metrics(uses, weights),
    )
    assert {name: value for name, value in row.items() if name in whole} == whole
    assert {name: value for name, value in row.items() if name not in whole} == {
        "moe_layers_2_batch_loss": 1.5,
        "moe_layers_2_z_loss": 0.25,
        "moe_layers_2_entropy": 0.4056,
        "moe_layers_2_idle_experts": 2,
        "moe_layers_2_dropped_share": 0.2,
        "moe_layers_2_tokens": [6, 2, 0, 0],
        "moe_mtp_0_layer_batch_loss": 1.0,
        "moe_mtp_0_layer_z_loss": 0.75,
        "moe_mtp_0_layer_entropy": 1.0,
        "moe_mtp_0_layer_idle_experts": 0,
        "moe_mtp_0_layer_dropped_share": 0.0,
        "moe_mtp_0_layer_bias_range": 0.25,
        "moe_mtp_0_layer_tokens": [2, 2, 2, 2],
    }
    assert expert_load_metrics([], weights, per_layer=True) == {}


def test_per_layer_metrics_need_experts() -> None:
    assert (
        run_problems(replace(run_with(RouterConfig()), observe=ObserveConfig(per_layer=True)), 1)
        == []
    )
    (problem,) = run_problems(tiny_run({"observe.per_layer": "true"}), 1)
    assert problem.startswith(
        "observe.per_layer=true with model.moe=null: these metrics are of experts. Set "
    )


def test_metrics_of_run_have_every_layer_with_per_layer(tmp_path: Path) -> None:
    run = replace(
        run_with(RouterConfig()),
        observe=ObserveConfig(per_layer=True, plots=False, peak_tflops=1.0),
    )
    run = replace(
        run,
        train=replace(run.train, steps=1, eval_steps=0),
        schedule=replace(run.schedule, decay_steps=1),
    )
    run_training(
        run, RunFolder(tmp_path), build_single_rank_mesh(), torch.device("cpu"), show=False
    )
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert {name for name in row if name.startswith("moe_layers_1_")} == {
        f"moe_layers_1_{name}"
        for name in ("load", "entropy", "idle_experts", "dropped_share", "tokens")
    }
    assert [sum(row[f"moe_layers_{layer}_tokens"]) for layer in (0, 1)] == [2 * row["tokens"]] * 2


def reported(rank: int, world: int, parallel: ParallelConfig) -> list[LayerExpertLoad]:
    run = run_with(RouterConfig())
    assert run.model.moe is not None
    run = replace(
        run,
        model=replace(
            run.model, moe=replace(run.model.moe, aux_loss=AuxLossConfig(batch_coeff=0.1))
        ),
    )
    run = replace(run, parallel=parallel)
    mesh = (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(parallel, run.model, world), rank=rank)
    )
    trainer = build_trainer(run, mesh, torch.device("cpu"))
    assert collect_expert_load(trainer.pipeline_model.modules, mesh) == []
    loader = Loader(
        RaggedRows(12, 257, 24, masked=()),
        BatchSettings(batch_schedule=constant_batch_size(12), micro_batch_size=2),
        mesh.dp,
        consumed=0,
        steps=1,
        device=torch.device("cpu"),
    )
    train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.0)
    return collect_expert_load(trainer.pipeline_model.modules, mesh)


def test_expert_load_of_ranks_matches_one_process() -> None:
    alone = reported(0, 1, ParallelConfig())
    assert [use.layer for use in alone] == ["layers.0", "layers.1"]
    assert all(sum(use.counts) == 12 * 12 * 2 for use in alone)
    staged = ParallelConfig(dp=2, pp=2, ep=2, pipeline=PipelineConfig())
    for uses in run_ranks(reported, 4, staged):
        assert [(use.layer, use.counts) for use in uses] == [
            (use.layer, use.counts) for use in alone
        ]
        assert all(abs(a.losses[1] - b.losses[1]) < 1e-6 for a, b in zip(uses, alone, strict=True))


def losses_replayed(
    rank: int, world: int, parallel: ParallelConfig, router: RouterConfig
) -> list[list[float]]:
    """The summed losses of a step that records, of one that replays it, and of one that replays
    other choices."""
    run = replace(
        run_with(router), parallel=parallel, recompute=RecomputeConfig(granularity="full")
    )
    mesh = (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(parallel, run.model, world), rank=rank)
    )
    trainer = build_trainer(run, mesh, torch.device("cpu"))
    loader = Loader(
        RaggedRows(12, 257, 24, masked=()),
        BatchSettings(batch_schedule=constant_batch_size(12), micro_batch_size=2),
        mesh.dp,
        consumed=0,
        steps=1,
        device=torch.device("cpu"),
    )
    step, routing = loader.next(), RoutingRecord()
    batches = step.microbatches
    normalizer = build_loss_normalizer(trainer.pipeline_model.objective, step, mesh)

    def total(routing: RoutingRecord) -> list[float]:
        trainer.data.begin_step(len(batches))
        result = trainer.pipeline_model.forward_backward(
            attach_routing(batches, routing), normalizer
        )
        gradients = [float(param.gradient.double().sum()) for param in trainer.data.finish()]
        return [*result.tolist(), *gradients]

    recorded = total(routing)
    assert len(routing.choices) == len(batches) * len(
        list(iter_routers(trainer.pipeline_model.modules))
    )
    others = RoutingRecord(
        {key: (chosen + 1) % 4 for key, chosen in routing.choices.items()}, followed=True
    )
    result = [recorded, total(routing.for_replay()), total(others)]
    if world > 1:  # a rank that stops alone leaves others to the launcher
        return result
    del routing.choices[next(key for key in routing.choices if key[1] == len(batches) - 1)]
    with pytest.raises(DataError, match=f"microbatch {len(batches) - 1}: no choices of layers"):
        total(routing.for_replay())
    return result


def losses_within_capacity(
    rank: int, world: int, parallel: ParallelConfig, pad: bool
) -> list[float]:
    """Of three steps in float64, in which experts refuse tokens."""
    run = tiny_run({"precision.params": "fp64"})
    capacity = CapacityConfig(factor=0.8, pad=pad)
    moe = MoEConfig(
        num_experts=4, ffn_hidden_size=6, aux_loss=AuxLossConfig(batch_coeff=0.1), capacity=capacity
    )
    run = replace(run, model=replace(run.model, moe=moe), parallel=parallel)
    mesh = (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(parallel, run.model, world), rank=rank)
    )
    trainer = build_trainer(run, mesh, torch.device("cpu"))
    loader = Loader(
        RaggedRows(12, 257, 36, masked=()),
        BatchSettings(batch_schedule=constant_batch_size(12), micro_batch_size=2),
        mesh.dp,
        consumed=0,
        steps=3,
        device=torch.device("cpu"),
    )
    losses = [train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.0).loss for _ in range(3)]
    assert (
        sum(use.num_dropped for use in collect_expert_load(trainer.pipeline_model.modules, mesh))
        > 0
    )
    return losses


def test_padding_changes_no_loss_under_any_layout() -> None:
    expected = losses_within_capacity(0, 1, ParallelConfig(), False)
    assert losses_within_capacity(0, 1, ParallelConfig(), True) == pytest.approx(
        expected, rel=1e-11
    )
    for layout in (ParallelConfig(dp=2, ep=2), ParallelConfig(tp=2, sp=True, ep=2, etp=1)):
        for losses in run_ranks(losses_within_capacity, 2, layout, True):
            assert losses == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize(
    "router",
    [RouterConfig(), RouterConfig(jitter=0.2), replace(BALANCED, num_groups=2, topk_groups=1)],
)
def test_replayed_choices_repeat_a_step_to_the_last_bit_and_others_do_not(
    router: RouterConfig,
) -> None:
    recorded, again, others = losses_replayed(0, 1, ParallelConfig(), router)
    assert again == recorded
    assert abs(others[0] - recorded[0]) > 1e-6


def test_every_rank_replays_its_own_layers_and_tokens() -> None:
    staged = ParallelConfig(dp=2, pp=2, ep=2, pipeline=PipelineConfig())
    for recorded, again, others in run_ranks(losses_replayed, 4, staged, RouterConfig()):
        assert again == recorded and others != recorded
