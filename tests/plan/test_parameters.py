"""Tests of megalith/plan/parameters.py."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalith.config.model import AttentionConfig, MLAConfig, ModelConfig, MTPConfig
from megalith.config.moe import AuxLossConfig, MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig
from megalith.estimate.workload import Workload, plan_workload
from megalith.models.decoder import Decoder, build_chunks, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.grad_sync import tp_reduce_axes
from megalith.parallel.mesh import build_meta_mesh, build_single_rank_mesh
from megalith.parallel.tensor import TensorParallel
from megalith.plan.costs import num_parameters
from megalith.plan.grid import model_grid
from megalith.plan.layers.base import ExpertPart, HeldParameter, LayerRank, tensor_part
from megalith.plan.parameters import held_parameters
from megalith.plan.stages import Stage, single_stage
from megalith.testing.tiny import tiny_run
from megalith.verify.matrix import VARIANTS as KINDS

SMALL = ModelConfig(
    vocab_size=999,
    hidden_size=96,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=201,
)
VARIANTS = [
    SMALL,
    replace(SMALL, tied_embeddings=True),
    replace(SMALL, qkv_bias=True, output_bias=True, mlp_bias=True),
    replace(SMALL, num_kv_heads=8, head_dim=None, pad_vocab_to_multiple_of=1),
]
MLA = replace(
    SMALL, num_kv_heads=8, mla=MLAConfig(kv_rank=10, q_rank=14, nope_dim=6, rope_dim=4, value_dim=5)
)
LAYERNORM = replace(SMALL, norm="layer", norm_placement="around", qkv_bias=True)
MORE = {
    "mla": MLA,
    "mla, whole queries": replace(
        MLA, mla=MLAConfig(kv_rank=10, rope_dim=4), tied_embeddings=True, output_bias=True
    ),
    "mla, LayerNorm": replace(MLA, norm="layer"),
    "mtp": replace(MLA, mtp=MTPConfig(num_layers=2)),
    "mtp, tied": replace(
        SMALL, tied_embeddings=True, mtp=MTPConfig(num_layers=1), positions="learned"
    ),
    "gate with biases, norms of heads": replace(
        LAYERNORM, attention=AttentionConfig(gated=True, qk_norm="head")
    ),
}
"""Kinds of layers beside those of the matrix."""


MOE = MoEConfig(num_experts=8, top_k=3, ffn_hidden_size=21)
MIXTURES = {
    "all layers": replace(SMALL, moe=MOE),
    "ungated, every other layer": replace(
        SMALL, gated=False, moe=replace(MOE, layers=(False, True))
    ),
    "everything": replace(
        SMALL,
        mtp=MTPConfig(num_layers=1),
        mlp_bias=True,
        moe=replace(
            MOE,
            latent_size=19,
            shared_ffn_hidden_size=13,
            shared_gate=True,
            router=RouterConfig(score="sigmoid", bias=True, expert_bias=True),
        ),
    ),
    "moved logits": replace(SMALL, moe=replace(MOE, aux_loss=AuxLossConfig(quantile=True))),
    "DeepSeek": replace(
        MLA, moe=replace(MOE, layers=(False, True, True), shared_ffn_hidden_size=21)
    ),
}
BIASES = replace(SMALL, moe=replace(MOE, biases=True))
DIVIDED = [
    (8, {"ep": 2}),
    (8, {"ep": 4, "etp": 1, "tp": 2, "sp": True}),
    (8, {"etp": 2, "tp": 4, "sp": True}),
    (8, {"ep": 2, "etp": 2, "cp": 2}),
    (12, {"tp": 3, "sp": True, "etp": 2, "ep": 2}),
    (12, {"pp": 3, "ep": 2, "etp": 2}),
]


@pytest.mark.parametrize("config", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize(("world", "degrees"), DIVIDED, ids=str)
def test_a_rank_holds_the_experts_that_the_model_declares(
    config: ModelConfig, world: int, degrees: dict[str, Any]
) -> None:
    if degrees.get("tp") == 3:
        config = replace(config, num_heads=9, num_kv_heads=3 if config.mla is None else 9)
    parallel = ParallelConfig(**degrees)
    run = replace(tiny_run({}), model=config, parallel=parallel)
    run = replace(run, train=replace(run.train, global_batch_size=8, micro_batch_size=1))
    holds_what_is_declared(plan_workload(run, world))


def test_experts_with_biases_are_divided_by_ep_alone() -> None:
    holds_what_is_declared(
        plan_workload(replace(tiny_run({}), model=BIASES, parallel=ParallelConfig(ep=2)), 2)
    )


def holds_what_is_declared(workload: Workload) -> None:
    """Every rank: names, sizes, cuts and grids, in order."""
    run, grid = workload.run, workload.grid
    for rank in grid.ranks:
        mesh, place = build_meta_mesh(grid, rank=rank), grid.coordinates(rank)
        chunks = build_chunks(build_context(run.model, mesh, run.parallel, dtype=torch.float32))
        built = [
            (one, getattr(module, name))
            for chunk in chunks
            for one, module, name in iter_parameter_specs(chunk)
        ]
        part = ExpertPart(run.parallel.ep, mesh.over("etp").size, place["etp"])
        held = workload.parameters(place["pp"], place["tp"], experts=part)
        assert [(one.name, one.rows, one.columns, one.grid, one.frozen) for one in held] == [
            (
                *(one.shard.name, *one.shard.matrix_shape, 1)[:3],
                one.shard.grid,
                not weight.requires_grad,
            )
            for one, weight in built
        ]
        largest = workload.parameters(place["pp"], place["tp"])
        assert sum(one.numel for one in largest) >= sum(one.numel for one in held)


def test_expert_biases_are_saved_and_are_not_parameters() -> None:
    model = MIXTURES["everything"]
    held = held_parameters(model, single_stage(3, model.mtp.num_layers))
    biases = [one for one in held if not one.counts]
    assert [one.numel for one in biases] == [8] * 4 and all(one.frozen for one in biases)
    assert num_parameters(model) == sum(one.numel for one in held) - 32


@pytest.mark.parametrize(
    "config", [*VARIANTS, *KINDS.values(), *MORE.values()], ids=lambda config: config.norm
)
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_parameters_of_a_rank_match_the_model_in_order(config: ModelConfig, tp: int) -> None:
    if tp == 3:
        kv_heads, alike = 3 if config.mla is None else 9, replace(config.layers, num_kv_heads=())
        config = replace(config, num_heads=9, num_kv_heads=kv_heads, head_dim=16, layers=alike)
    grid = model_grid(ParallelConfig(tp=tp), config, tp)
    for rank in range(tp):
        model = Decoder(build_context(config, build_meta_mesh(grid, rank=rank)))
        built = [
            (one.shard.name, one.shard.matrix_shape) for one, _, _ in iter_parameter_specs(model)
        ]
        held = held_parameters(
            config, single_stage(config.num_layers, config.mtp.num_layers), LayerRank(tp, rank)
        )
        assert [(one.name, one.rows, one.columns) for one in held] == [
            (name, *shape, 1)[:3] for name, shape in built
        ]
        stacks = {
            f"{name}.{part}".removesuffix(".weight")
            for name, layer in model.named_modules()
            if isinstance(layer, TensorParallel)
            for part in getattr(layer, "weight_names", [])[1:]
        }
        assert len(stacks) == sum(one.stacked for one in held)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_gradient_reduction_ranks_match_the_model(tp: int, sp: bool) -> None:
    for config in (*VARIANTS, *KINDS.values(), *MORE.values()):
        mesh = build_meta_mesh(model_grid(ParallelConfig(tp=tp, sp=sp), config, tp), rank=1)
        held = held_parameters(
            config, single_stage(config.num_layers, config.mtp.num_layers), LayerRank(tp, 1)
        )
        copies = tensor_part(config, tp=tp, rank=1).kv_copies
        for one, (declared, _, _) in zip(
            held,
            iter_parameter_specs(Decoder(build_context(config, mesh, ParallelConfig(sp=sp)))),
            strict=True,
        ):
            axes = [axis for axis in tp_reduce_axes(declared.shard) if mesh.over(axis).size > 1]
            ranks = math.prod(mesh.over(axis).size for axis in axes)
            assert ranks == _summed_over(one, tp=tp, sp=sp, copies=copies), one


def _summed_over(one: HeldParameter, *, tp: int, sp: bool, copies: int) -> int:
    if one.cut:
        return 1
    return {"sp": tp if sp else 1, "heads": copies, "always": tp}[one.summed]


def test_stages_hold_every_parameter_once_and_a_tied_table_twice() -> None:
    for config in (*VARIANTS, *KINDS.values(), *MORE.values()):
        first = held_parameters(config, Stage(range(2), embedding=True))
        last_stage = Stage(
            range(2, config.num_layers), loss=True, norm=True, num_mtp_layers=config.mtp.num_layers
        )
        last = held_parameters(config, last_stage)
        table = config.padded_vocab_size() * config.hidden_size
        total = sum(one.numel for one in first + last)
        relative = config.positions == "relative"
        biases = config.relative.buckets * config.num_heads
        places = config.max_seq_len * config.hidden_size
        num_mtp_layers = config.mtp.num_layers > 0
        ends = {
            "embed.weight": config.tied_embeddings or num_mtp_layers,
            "positions.weight": config.positions == "learned" and num_mtp_layers,
        }
        again = ends["embed.weight"] * table + ends["positions.weight"] * places + relative * biases
        assert total == num_parameters(config) + again
        shared = {one.name for one in first} & {one.name for one in last}
        twice = ends | {"relative.weight": relative}
        assert shared == {name for name, is_shared in twice.items() if is_shared}
        stage = Decoder(build_context(config, build_single_rank_mesh()), stage=last_stage)
        assert [one.name for one in last] == [
            one.shard.name for one, _, _ in iter_parameter_specs(stage)
        ]


@pytest.mark.parametrize("positions", ["rope", "learned", "relative"])
@pytest.mark.parametrize("tied", [False, True])
def test_mtp_stage_holds_lookup_tables_and_no_head(positions: Any, tied: bool) -> None:
    config = replace(SMALL, positions=positions, tied_embeddings=tied, mtp=MTPConfig(num_layers=2))
    nothing = range(config.num_layers, config.num_layers)
    for stage in (
        Stage(nothing, num_mtp_layers=2),
        Stage(nothing, loss=True),
        Stage(nothing, norm=True, num_mtp_layers=2),
        Stage(nothing, loss=True, num_mtp_layers=2),
    ):
        built = iter_parameter_specs(
            Decoder(build_context(config, build_single_rank_mesh()), stage=stage)
        )
        held = held_parameters(config, stage)
        assert {one.name: one.numel for one in held} == {
            d.shard.name: d.shard.numel for d, _, _ in built
        }
        assert ("head.weight" in {one.name for one in held}) == (stage.loss and not tied)
        assert ("embed.weight" in {one.name for one in held}) == (
            tied if stage.loss and not stage.num_mtp_layers else True
        )


def test_ranks_that_share_heads_hold_the_same_ones() -> None:
    parts = [tensor_part(SMALL, tp=4, rank=rank) for rank in range(4)]
    assert [part.kv_heads for part in parts] == [1] * 4
    assert {part.kv_copies for part in parts} == {2}
    assert [part.ffn for part in parts] == [51, 50, 50, 50]
    kv = next(
        one
        for one in held_parameters(SMALL, Stage(range(1)), LayerRank(4))
        if one.name.endswith("kv")
    )
    assert not kv.cut and kv.stacked
