"""The type check accepts right layouts at any world size, and refuses wrong collectives, shards and
losses."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import spmd_types as checker
import torch
from spmd_types import I, P, R, V
from spmd_types.checker import typecheck
from torch import Tensor
from torch.autograd import Function

from megalith.config.model import CrossConfig, DropoutConfig, ModelConfig, MTPConfig
from megalith.config.parallel import (
    ContextConfig,
    ContextKind,
    OffloadConfig,
    ParallelConfig,
    PipelineConfig,
    RecomputeConfig,
)
from megalith.config.tree import apply_overrides, from_dict, to_dict
from megalith.errors import ConfigError, PlanError
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.linear import WeightMatmul
from megalith.kernels.packed import PackedSeqParams
from megalith.models.decoder import Decoder, StageTensors
from megalith.nn import dropout as dropout_layers
from megalith.nn.build import build_context
from megalith.nn.dropout import RecomputedCore
from megalith.nn.layer import SequentialBlock
from megalith.nn.mlp import GatedMLP
from megalith.nn.norm import RMSNorm
from megalith.parallel import collectives
from megalith.parallel import tensor as layers
from megalith.parallel.collectives import mark_partial
from megalith.parallel.mesh import Mesh, build_meta_mesh
from megalith.plan.grid import model_grid
from megalith.recipes import build_recipe, resolve
from megalith.rules.run import run_problems
from megalith.testing.inject import patched
from megalith.verify.faults.plant import changed_model, load_faults, plant_fault
from megalith.verify.matrix import CROSS_LAYER, MIXTURES, NARROW, PLANNED, VARIANTS
from megalith.verify.ranks import layout_case
from megalith.verify.type_rules import find_types, our_functions
from megalith.verify.types import (
    ChildRequest,
    TrainingSettings,
    TypeReport,
    _shards_of,
    declare,
    mesh_axes,
    representative_positions,
    representative_ranks,
    type_check,
    type_check_in_child,
)

PAGE = Path(__file__).parents[2] / "docs/concepts/types.md"
MODEL = ModelConfig(
    vocab_size=100, hidden_size=24, num_layers=2, num_heads=6, num_kv_heads=2, ffn_hidden_size=40
)
BIASED = replace(MODEL, qkv_bias=True, output_bias=True, mlp_bias=True, tied_embeddings=True)
THREE = replace(MODEL, num_kv_heads=3, ffn_hidden_size=41)

LAYOUTS = [
    (MODEL, ParallelConfig(), 1),
    (MODEL, ParallelConfig(), 3),
    (MODEL, ParallelConfig(tp=2), 2),
    (MODEL, ParallelConfig(tp=2, sp=True), 4),
    (BIASED, ParallelConfig(tp=2), 6),
    (BIASED, ParallelConfig(tp=2, sp=True), 12),
    (THREE, ParallelConfig(tp=3), 6),
    (THREE, ParallelConfig(tp=3, sp=True), 12),
    (
        replace(
            MODEL,
            num_heads=8,
            num_kv_heads=4,
            head_dim=6,
            vocab_size=61,
            pad_vocab_to_multiple_of=4,
        ),
        ParallelConfig(tp=3),
        3,
    ),
    (BIASED, ParallelConfig(tp=4), 12),  # two ranks share each key/value head
    (BIASED, ParallelConfig(tp=4, sp=True), 4096),
    (replace(MODEL, num_kv_heads=1), ParallelConfig(tp=3, sp=True), 4095),  # all share the only one
    (MODEL, ParallelConfig(tp=2, sp=True, order="dp-tp"), 32768),
]


@pytest.mark.parametrize(("model", "parallel", "world"), LAYOUTS)
def test_valid_layout_has_no_problem(
    model: ModelConfig, parallel: ParallelConfig, world: int
) -> None:
    report = type_check(model, parallel, world=world)
    assert report.problems == () and report.ok
    assert report.world == world and report.parameters == len(
        _shards_of(built(model, parallel, world))
    )


STAGED = replace(BIASED, num_layers=4)
AHEAD = replace(STAGED, mtp=MTPConfig(num_layers=2), tied_embeddings=True)
PIPELINES = [
    (STAGED, ParallelConfig(pp=2), 2),
    (STAGED, ParallelConfig(pp=4, tp=2), 16),
    (STAGED, ParallelConfig(pp=2, tp=2, sp=True, pipeline=PipelineConfig(vpp=2)), 8),
    (
        STAGED,
        ParallelConfig(pp=2, tp=2, sp=True, pipeline=PipelineConfig(schedule="zb-v", vpp=2)),
        8,
    ),
    (STAGED, ParallelConfig(pp=5, tp=4, sp=True, pipeline=PipelineConfig(layout="E|tt||tt|L")), 40),
    (
        STAGED,
        ParallelConfig(pp=3, tp=2, order="pp-dp-tp", pipeline=PipelineConfig(layout="Et|ttt|L")),
        6,
    ),
    (AHEAD, ParallelConfig(pp=4, tp=2, sp=True, pipeline=PipelineConfig(layout="E|t*4|mm|L")), 16),
    (AHEAD, ParallelConfig(pp=3, tp=2, cp=2, pipeline=PipelineConfig(layout="Ett|ttmm|L")), 24),
]


@pytest.mark.parametrize(("model", "parallel", "world"), PIPELINES)
def test_valid_pipeline_has_no_problem_on_any_kind_of_stage(
    model: ModelConfig, parallel: ParallelConfig, world: int
) -> None:
    report = type_check(model, parallel, world=world)
    assert report.problems == () and report.axes["pp"] == parallel.pp


CONTEXTS = [
    (ParallelConfig(cp=2), 2, {"ring_attention over cp": 2}),
    (ParallelConfig(cp=3, tp=2, sp=True), 12, {"ring_attention over cp": 2}),
    (
        ParallelConfig(cp=4, tp=2, context=ContextConfig(kind="gather")),
        8,
        {"all_gather over cp": 2},
    ),
    (ParallelConfig(cp=3, tp=2, context=ContextConfig(kind="a2a")), 12, {"all_to_all over cp": 4}),
    (
        ParallelConfig(cp=6, tp=2, sp=True, context=ContextConfig(kind="a2a+ring", a2a=3)),
        4092,
        {"all_to_all over cp_a2a": 4, "ring_attention over cp_ring": 2},
    ),
    (
        ParallelConfig(cp=3, context=ContextConfig(layers=("ring", "gather"), slicing="document")),
        3,
        {"ring_attention over cp": 1, "all_gather over cp": 1},
    ),
    (
        ParallelConfig(cp=2, tp=4, sp=True),
        16,
        {"ring_attention over cp": 2},
    ),  # two ranks share each key/value head
    (ParallelConfig(cp=2, pp=2, tp=2), 16, {"ring_attention over cp": 2}),
]


@pytest.mark.parametrize(
    ("parallel", "world"),
    [
        (ParallelConfig(pp=2, tp=2, sp=True, cp=2), 8),
        pytest.param(ParallelConfig(tp=2), 4, marks=pytest.mark.slow),
        pytest.param(ParallelConfig(tp=2, sp=True, dp=2, cp=2), 8, marks=pytest.mark.slow),
    ],
    ids=["all", "tp", "sp, cp"],
)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_layer_variant_passes_in_every_layout(
    name: str, parallel: ParallelConfig, world: int
) -> None:
    assert type_check(VARIANTS[name], parallel, world=world).problems == ()


@pytest.mark.parametrize(("parallel", "world", "exchanges"), CONTEXTS)
def test_every_kind_of_context_parallelism_passes(
    parallel: ParallelConfig, world: int, exchanges: dict[str, int]
) -> None:
    report = type_check(MODEL, parallel, world=world)
    assert report.problems == () and "cp" not in report.unproved
    assert {name: count for name, count in report.collectives.items() if "cp" in name} == exchanges


def test_stages_with_other_context_parallel_kinds_are_checked_separately() -> None:
    layers: tuple[ContextKind, ...] = "ring", "ring", "ring", "gather", "ring", "ring"
    parallel = ParallelConfig(pp=6, cp=2, context=ContextConfig(layers=layers))
    model = replace(MODEL, num_layers=6)
    grid = model_grid(parallel, model, 12)
    looked_at = {
        grid.coordinates(rank)["pp"] for rank, _ in representative_positions(grid, parallel, model)
    }
    assert looked_at == {0, 1, 3, 5}, "the embedding, a ring, the one that gathers, the loss"


def test_every_kind_of_stage_is_checked_at_three_positions_of_other_axes() -> None:
    parallel = ParallelConfig(pp=4, tp=2, pipeline=PipelineConfig(vpp=2))
    grid = model_grid(parallel, replace(MODEL, num_layers=16), 64)
    result = representative_positions(grid, parallel, replace(MODEL, num_layers=16))
    places_of = {(grid.coordinates(rank)["pp"], chunk): set() for rank, chunk in result}
    for rank, chunk in result:
        here = grid.coordinates(rank)
        places_of[here["pp"], chunk].add((here["dp"], here["tp"]))
    # The first stage has the embedding, the second stands for all in the middle, the last has the
    # loss.
    assert places_of == {
        (0, 0): {(0, 0), (4, 1), (7, 1)},
        (1, 0): {(0, 0), (4, 1), (7, 1)},
        (3, 1): {(0, 0), (4, 1), (7, 1)},
    }


def test_problems_on_a_middle_stage_name_the_global_layer_number() -> None:
    def no_sum(model: Decoder, mesh: Mesh) -> None:
        if model.stage.layers.start == 2:
            layer(model, 0).mlp.down.tp_comm = WithoutSum(mesh)

    with changed_model(no_sum):
        (problem,) = type_check(STAGED, ParallelConfig(pp=4, tp=2), world=8, ranks=(4,)).problems
    assert problem.where == "layers.2.mlp.down" and "layers.2" not in problem.what


class WithoutSum:
    """Communication that returns partial sums without adding them."""

    def __init__(self, mesh: Mesh) -> None:
        self.group, self.invariant = mesh.tp, frozenset(mesh.tp.axes)

    def reduce_output(self, x: Tensor, matmul: WeightMatmul) -> Tensor:
        return mark_partial(matmul(x), self.group)


def test_stage_that_ignores_received_tensors_is_rejected() -> None:
    right = Decoder.forward

    def forgets(self: Decoder, *arguments: Any, received: StageTensors, **rest: Any) -> Any:
        detached = {name: x.detach() for name, x in received.items()}
        return right(self, *arguments, received=detached, **rest)

    with patched(Decoder, "forward", forgets):
        (problem,) = type_check(STAGED, ParallelConfig(pp=2), world=4, ranks=(2,)).problems
    assert str(problem).startswith("hidden (rank 2): hidden of the previous stage got no gradient.")


def test_cross_layer_source_is_typed_between_stages_and_rejected_if_ignored() -> None:
    """Taken on the first of four stages, not looked at on the second, looked at on the others."""
    for parallel in (ParallelConfig(pp=4, tp=2, sp=True), ParallelConfig(pp=4, tp=2)):
        assert not type_check(CROSS_LAYER, parallel, world=16).problems
    right, early = Decoder.forward, replace(CROSS_LAYER, cross=CrossConfig(memory=0))

    def detached(self: Decoder, *arguments: Any, received: StageTensors, **rest: Any) -> Any:
        source = {name: x.detach() for name, x in received.items() if name == "cross_layer_source"}
        return right(self, *arguments, received={**received, **source}, **rest)

    with patched(Decoder, "forward", detached):
        (problem,) = type_check(early, ParallelConfig(pp=4), world=4, ranks=(3,)).problems
    assert str(problem).startswith(
        "cross_layer_source (rank 3): cross_layer_source of the previous stage got no gradient."
    )

    def kept(self: Decoder, *arguments: Any, **rest: Any) -> Any:
        tensors = right(self, *arguments, **rest)
        return {**tensors, "cross_layer_source": tensors["cross_layer_source"].detach()}

    with patched(Decoder, "forward", kept):
        (problem,) = type_check(CROSS_LAYER, ParallelConfig(pp=2), world=2, ranks=(0,)).problems
    assert str(problem).startswith("memory_norm.weight (rank 0): this parameter got no gradient.")
    for fault in (
        "column_enter_removed",
        "row_sum_removed",
    ):
        # also where backward starts from two tensors
        with plant_fault(fault):
            assert type_check(early, ParallelConfig(pp=4, tp=2), world=8, ranks=(2,)).problems


def layer(model: Decoder, number: int) -> Any:
    return model.layers[number]


def built(model: ModelConfig, parallel: ParallelConfig, world: int) -> Decoder:
    return Decoder(
        build_context(model, build_meta_mesh(model_grid(parallel, model, world), rank=0), parallel)
    )


def test_collectives_of_a_forward_pass_are_counted() -> None:
    """The embedding and both halves of each of two layers leave divided work; they and the head
    enter it."""
    whole = type_check(MODEL, ParallelConfig(tp=4), world=8).collectives
    assert whole == {"copy_to_tp over tp": 5, "reduce_from_tp over tp": 5, "loss_sum over tp": 1}
    split = type_check(MODEL, ParallelConfig(tp=2, sp=True), world=4).collectives
    assert split == {"all_gather over tp": 5, "loss_sum over tp": 1, "reduce_scatter over tp": 5}


def test_axes_of_one_rank_are_reported_as_unchecked() -> None:
    assert type_check(MODEL, ParallelConfig(tp=2), world=2).unproved == ("dp", "cp")
    assert type_check(MODEL, ParallelConfig(), world=2).unproved == ("cp", "tp")


def test_first_middle_and_last_rank_are_checked() -> None:
    grid = model_grid(ParallelConfig(tp=4), MODEL, 4096)
    # tp_kv 1 of 2, tp_copy 1 of 2, dp 512 of 1024
    assert representative_ranks(grid) == (
        0,
        512 * 4 + 3,
        4095,
    )
    assert representative_ranks(model_grid(ParallelConfig(), MODEL, 1)) == (0,)


def test_docs_example_prints_its_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Llama 70B on 4096 ranks, at one place, in a child."""
    code, printed = re.findall(
        r"```(?:python)?\n(.*?)```", PAGE.read_text().split("## What the check does")[1], re.DOTALL
    )[:2]
    names: dict[str, Any] = {}
    exec(code, names)  # lint: allow eval-exec: our own page
    assert capsys.readouterr().out == printed
    assert names["report"].parameters == 563
    assert names["report"].seconds < 60 and names["report"].peak_gib < 4


def test_docs_have_the_error_text_and_every_fault() -> None:
    page = PAGE.read_text()
    with plant_fault("column_enter_removed"):
        (problem,) = type_check(
            replace(MODEL, num_layers=1), ParallelConfig(tp=2), world=4
        ).problems
    assert f"```\n{problem}\n```" in page
    for fault in load_faults():
        verdict = (
            "not detected: numbers"
            if fault.found_by == "numbers"
            else f"rejected: {fault.found_by}"
        )
        assert re.search(rf"^\| `{fault.name}`: [^|]+ \| {verdict} \|", page, re.MULTILINE), (
            fault.name
        )


@pytest.mark.slow
def test_llama_70b_on_4096_ranks_is_checked_at_three_places_within_a_minute_and_4_gib() -> None:
    run = build_recipe("llama3_70b")
    report = type_check_in_child(run.model, run.parallel, world=4096)
    print(f"type check of 70B at 4096 ranks: {report.seconds:.1f} s, {report.peak_gib:.2f} GiB")
    assert report.ok and report.ranks == (0, 2052, 4095)
    assert report.seconds < 60 and report.peak_gib < 4


@pytest.mark.slow
def test_llama_405b_on_16384_ranks_is_type_checked_within_two_minutes_and_8_gib() -> None:
    layout = {"parallel.cp": "4", "parallel.pipeline.vpp": "4", "parallel.dp": "32"}
    run = apply_overrides(resolve("llama3_405b"), dict(layout))
    assert (run.parallel.tp, run.parallel.pp, run.parallel.sp) == (8, 16, True)
    report = type_check_in_child(run.model, run.parallel, world=16_384)
    print(f"type check of 405B at 16,384 ranks: {report.seconds:.1f} s, {report.peak_gib:.2f} GiB")
    assert report.ok and len(report.ranks) == 9, "three kinds of stages, at three places each"
    assert report.seconds < 120 and report.peak_gib < 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{}, {"parallel.tp": "8", "parallel.sp": "true", "parallel.etp": "1"}], ids=str
)
def test_deepseek_v3_on_2048_ranks_is_checked_on_both_grids_within_two_minutes_and_8_gib(
    layout: dict[str, str],
) -> None:
    run = apply_overrides(resolve("deepseek_v3"), dict(layout))
    assert (run.parallel.ep, run.parallel.pp) == (64, 16) and run_problems(run, 2048) == []
    report = type_check_in_child(
        run.model, run.parallel, world=2048, training=TrainingSettings(recompute=run.recompute)
    )
    print(f"type check of 671B at 2048 ranks: {report.seconds:.1f} s, {report.peak_gib:.2f} GiB")
    assert report.ok and any("over ep" in name for name in report.collectives)
    assert report.seconds < 120 and report.peak_gib < 8


# --- problems


def test_problems_of_several_ranks_are_reported_once() -> None:
    with changed_model(invariant_norms):
        (problem,) = type_check(MODEL, ParallelConfig(tp=2, sp=True), world=4).problems
    assert problem.ranks == (0, 3)
    assert str(problem).startswith(
        "layers.0.attention_norm (rank 0, 3): Invariant type on axis tp cannot mix"
    )
    assert "bf16[24] {tp: I, dp: R}" in str(problem) or "bf16[24] {dp: R, tp: I}" in str(problem)


def invariant_norms(model: Decoder, mesh: Mesh) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            change_shard(module, "weight", invariant=frozenset(mesh.tp.axes))


def change_shard(module: torch.nn.Module, name: str, **changes: Any) -> None:
    notes = module.__dict__["param_specs"]
    notes[name] = replace(notes[name], shard=replace(notes[name].shard, **changes))


def test_replicated_kv_heads_declared_as_sharded_are_rejected() -> None:
    """The checker alone accepts it: V is never refused, and never summed."""

    def call_it_cut(model: Decoder, mesh: Mesh) -> None:
        change_shard(layer(model, 0).attention.qkv, "kv", cut=("tp_kv", "tp_copy"))

    with changed_model(call_it_cut):
        (problem,) = type_check(MODEL, ParallelConfig(tp=4), world=4, ranks=(2,)).problems
    assert problem.where == "layers.0.attention.kv"
    assert (
        "cut along tp_copy, but the next rank along it has the same box. Use Shard.split_dim with "
        "exactly" in problem.what
    )


def test_sharded_weight_declared_as_replicated_is_rejected() -> None:
    def call_it_whole(model: Decoder, mesh: Mesh) -> None:
        change_shard(layer(model, 1).mlp.down, "down", cut=())

    with changed_model(call_it_whole):
        problems = type_check(MODEL, ParallelConfig(tp=2), world=2, ranks=(0,)).problems
    assert [(problem.where, problem.what[:70]) for problem in problems] == [
        (
            "layers.1.mlp.down",
            "its shard is whole along tp_kv, but the next rank along it has another box"[:70],
        )
    ]


def test_parameter_without_gradient_is_named() -> None:
    def without_weight(self: RMSNorm, x: Tensor) -> Tensor:
        return x * 1.0

    with patched(RMSNorm, "forward", without_weight):
        problems = type_check(MODEL, ParallelConfig(tp=2), world=2, ranks=(0,)).problems
    assert [problem.where for problem in problems] == [
        *(
            f"layers.{layer}.attention_norm.weight" for layer in range(2)
        ),  # the MLP's norm is used by `add_and_normalize`
        "norm.weight",
    ]
    assert "this parameter got no gradient. Use it in the loss, or remove it." in str(problems[0])


def test_undeclared_partial_sum_is_rejected() -> None:
    with patched(layers, "mark_partial", lambda x, group: x):
        (problem,) = type_check(MODEL, ParallelConfig(tp=2), world=2, ranks=(0,)).problems
    assert problem.where == "embed"
    assert "reduce_from_tp over tp expects P (partial sum), but got V" in problem.what
    assert "Use `mark_partial` in the line that contracts a sharded dimension" in problem.what


def test_hidden_states_of_the_wrong_type_are_rejected_at_the_layer_boundary() -> None:
    right = SequentialBlock.forward

    def wrong(self: SequentialBlock, x: Tensor, inputs: LayerInputs) -> Tensor:
        return collectives.copy_to_tp(right(self, x, inputs), self.mlp.down.tp_comm.group)

    with patched(SequentialBlock, "forward", wrong):
        (problem,) = type_check(MODEL, ParallelConfig(tp=2), world=2, ranks=(0,)).problems
    assert problem.where == "layers.0"
    assert problem.what == (
        "hidden states after layers.0 must be I (replicated, used for the same work) over "
        "tp, but they are R (replicated, used for different work)."
    )


def test_operation_without_meta_shape_is_an_internal_error_with_traceback() -> None:
    def reads_a_number(self: GatedMLP, x: Tensor, inputs: object = None) -> Tensor:
        return x * x.sum().item()

    with (
        patched(GatedMLP, "forward", reads_a_number),
        pytest.raises(RuntimeError, match="meta tensors"),
    ):
        type_check(MODEL, ParallelConfig(tp=2), world=2, ranks=(0,))


def test_dropout_is_type_checked() -> None:
    model = replace(MODEL, dropout=DropoutConfig(embedding=0.1, residual=0.1, attention=0.1))
    assert type_check(model, ParallelConfig(tp=2, sp=True), world=2, ranks=(1,)).problems == ()
    with patched(dropout_layers, "dropout", lambda x, *given: x.relu() + x.sum().item()):
        with pytest.raises(RuntimeError, match="meta tensors"):
            type_check(model, ParallelConfig(tp=2), world=2, ranks=(0,))


def test_invalid_layout_is_rejected_with_values_that_work() -> None:
    with pytest.raises(PlanError, match="set parallel.tp to one of"):
        type_check(MODEL, ParallelConfig(tp=3), world=4)
    with pytest.raises(PlanError, match="rank=4 is not in this grid. Pass one of ranks 0 to 3."):
        type_check_in_child(MODEL, ParallelConfig(), world=4, ranks=(4,))
    with pytest.raises(ConfigError, match="fault=none: unknown fault"):
        type_check_in_child(MODEL, ParallelConfig(), world=4, fault="none")


# --- the child, and what is left behind


def test_child_process_gives_the_same_report() -> None:
    parallel, fault = ParallelConfig(tp=4, sp=True), "row_sum_removed"
    with plant_fault(fault):
        here = type_check(MODEL, parallel, world=8, ranks=(0, 7))
    there = type_check_in_child(MODEL, parallel, world=8, ranks=(0, 7), fault=fault)
    assert replace(there, seconds=0.0, peak_gib=0.0) == replace(here, seconds=0.0, peak_gib=0.0)
    assert there.problems and from_dict(TypeReport, to_dict(there)) == there


def test_type_check_restores_patched_functions() -> None:
    apply = Function.__dict__["apply"]
    type_check(MODEL, ParallelConfig(tp=2), world=2)
    assert Function.__dict__["apply"] is apply and checker.current_mesh() is None
    assert not any(
        hasattr(cls, name)
        for cls in our_functions()
        for name in ("spmd_typecheck", "typecheck_forward")
    )


def test_parameters_are_typed_from_their_shards() -> None:
    parallel = ParallelConfig(tp=4)
    model, grid = built(BIASED, parallel, 8), model_grid(parallel, BIASED, 8)
    with typecheck(), checker.set_current_mesh(mesh_axes(grid)):
        declare(model, grid)
        first = layer(model, 0)
        results = {
            "q": find_types(first.attention.qkv.q),
            "kv": find_types(first.attention.qkv.kv),
            "o_bias": find_types(first.attention.out.o_bias),
            "norm": find_types(first.mlp_norm.weight),
            "last norm": find_types(model.norm.weight),
        }
    assert results == {
        "q": {"dp_shard": R, "tp_kv": V, "tp_copy": V},
        "kv": {"dp_shard": R, "tp_kv": V, "tp_copy": R},
        "o_bias": {"dp_shard": R, "tp_kv": I, "tp_copy": I},
        "norm": {"dp_shard": R, "tp_kv": I, "tp_copy": I},
        "last norm": {"dp_shard": R, "tp_kv": I, "tp_copy": I},
    }


# --- what backward computes again

AGAIN = [
    (RecomputeConfig(granularity="full"), ParallelConfig(tp=2, sp=True), 4, ()),
    (RecomputeConfig(granularity="full", num_layers=2), ParallelConfig(tp=2, cp=2), 8, ()),
    (RecomputeConfig(granularity="full", method="block"), ParallelConfig(tp=2, pp=2), 8, ()),
    (
        RecomputeConfig(granularity="full", shard_inputs=True),
        ParallelConfig(tp=2),
        4,
        ("recompute.shard_inputs",),
    ),
    (
        RecomputeConfig(granularity="full", check=True),
        ParallelConfig(tp=2),
        4,
        ("recompute.check",),
    ),
    (
        RecomputeConfig(granularity="selective", modules=("core_attention", "norm", "mlp")),
        ParallelConfig(tp=4, sp=True),
        8,
        ("recompute.modules=['norm']",),
    ),
    (
        RecomputeConfig(granularity="selective", modules=("core_attention", "mlp_act"), check=True),
        ParallelConfig(tp=2, cp=2),
        4,
        ("recompute.check", "recompute.modules=['mlp_act']"),
    ),
    # Rows are reordered inside the region.
    (
        RecomputeConfig(granularity="selective"),
        ParallelConfig(cp=4, tp=2, context=ContextConfig(kind="gather")),
        8,
        (),
    ),
    (
        RecomputeConfig(granularity="selective"),
        ParallelConfig(cp=3, tp=2, context=ContextConfig(kind="a2a")),
        12,
        (),
    ),
]


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=2, cp=2, sp=True),
        ParallelConfig(tp=2, pp=2),
        ParallelConfig(cp=5, tp=2, context=ContextConfig(kind="a2a")),
    ],
)
def test_recomputed_latent_attention_is_type_checked(parallel: ParallelConfig) -> None:
    again = RecomputeConfig(granularity="selective", modules=("mla_up_proj",))
    model = VARIANTS["latent"]
    report = type_check(
        model, parallel, world=20, ranks=(19,), training=TrainingSettings(recompute=again)
    )
    assert report.ok and report.untyped == ()
    assert report.collectives == type_check(model, parallel, world=20, ranks=(19,)).collectives


@pytest.mark.parametrize(("recompute", "parallel", "world", "untyped"), AGAIN)
def test_recomputed_tensors_have_the_types_of_the_first_pass(
    recompute: RecomputeConfig, parallel: ParallelConfig, world: int, untyped: tuple[str, ...]
) -> None:
    model = replace(MODEL, num_layers=4)
    ranks = (world - 1,)
    report = type_check(
        model, parallel, world=world, ranks=ranks, training=TrainingSettings(recompute=recompute)
    )
    assert report.problems == ()
    assert report.collectives == type_check(model, parallel, world=world, ranks=ranks).collectives
    assert [text.split(":")[0] for text in report.untyped] == list(untyped)


def test_recomputed_attention_is_type_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = RecomputedCore._attend

    def attend(
        self: RecomputedCore,
        seq_params: PackedSeqParams,
        arguments: Any,
        records: Any,
        q: Tensor,
        *others: Tensor,
    ) -> Tensor:
        if torch._C._current_graph_task_id() != -1:  # in backward
            # it is not
            q = q + checker.assert_type(torch.ones(()), dict.fromkeys(checker.get_local_type(q), P))
        return plain(self, seq_params, arguments, records, q, *others)

    again = RecomputeConfig(granularity="selective", modules=("core_attention",))
    assert type_check(
        MODEL, ParallelConfig(tp=2), world=2, ranks=(0,), training=TrainingSettings(recompute=again)
    ).ok
    monkeypatch.setattr(RecomputedCore, "_attend", attend)
    (problem,) = type_check(
        MODEL, ParallelConfig(tp=2), world=2, ranks=(0,), training=TrainingSettings(recompute=again)
    ).problems
    assert problem.where == "backward" and "expected PerMeshAxisLocalSpmdType.P" in problem.what


def test_activation_offload_is_reported_as_untyped() -> None:
    report = type_check(
        MODEL,
        ParallelConfig(tp=2),
        world=2,
        ranks=(0,),
        training=TrainingSettings(offload=OffloadConfig(layers=1)),
    )
    assert report.ok and report.untyped == ("offload.layers=1: copies to host memory and back",)
    assert type_check(MODEL, ParallelConfig(tp=2), world=2, ranks=(0,)).untyped == ()


def test_alltoall_is_typed_in_place_of_a_dispatcher_of_another_package() -> None:
    report = type_check(NARROW, ParallelConfig(dp=2, ep=2, dispatcher="fast"), world=2, ranks=(0,))
    assert report.ok
    assert report.untyped == ("parallel.dispatcher=fast: external package; checked with alltoall",)


def test_sum_missing_in_recomputation_is_rejected() -> None:
    full, away = RecomputeConfig(granularity="full"), OffloadConfig(layers=1)
    with plant_fault("second_sum_removed"):
        # nothing runs a second time
        assert type_check(MODEL, ParallelConfig(tp=2), world=2, ranks=(0,)).ok
        (problem,) = type_check(
            MODEL,
            ParallelConfig(tp=2),
            world=2,
            ranks=(0,),
            training=TrainingSettings(recompute=full),
        ).problems
    assert problem.where == "layers.1" and "Found types: [I, P]" in problem.what
    requested = ChildRequest(
        model=MODEL, parallel=ParallelConfig(), world=2, training=TrainingSettings(full, away)
    )
    assert from_dict(ChildRequest, to_dict(requested)) == requested  # so a child is asked the same


def test_load_balancing_is_type_checked_except_sinkhorn() -> None:
    layout = ParallelConfig(tp=2, cp=2, sp=True, ep=2, etp=1)
    report = type_check(NARROW, layout, world=8, ranks=(5,))
    assert report.ok and report.untyped == ()
    assert {axis: report.axes[axis] for axis in ("edp", "ep", "etp")} == {
        "edp": 4,
        "ep": 2,
        "etp": 1,
    }
    planned = type_check(PLANNED, replace(layout, ep=1, cp=4), world=8, ranks=(5,))
    assert planned.ok and [text.split(":")[0] for text in planned.untyped] == [
        "model.moe.aux_loss.sinkhorn"
    ]


ON_EIGHT = ParallelConfig(tp=2, cp=2, sp=True, ep=2, etp=1)
STAGED_EXPERTS = ParallelConfig(tp=2, pp=2, sp=True, ep=2, etp=2)
PAIRED = replace(STAGED_EXPERTS, etp=1, overlap_experts=True)
MIXED = {
    "narrow": ParallelConfig(tp=2, dp=4, sp=True, ep=2, zero=1),
    "biased choice": ON_EIGHT,
    "noisy": replace(ON_EIGHT, etp=2),
    "planned": replace(ON_EIGHT, ep=1),
    "offset": STAGED_EXPERTS,
    "clamped": replace(ON_EIGHT, dispatcher="reference", ep=4),
    "mtp experts": PAIRED,
    "padded": replace(ON_EIGHT, etp=2, zero=2),
    "whole latent": replace(PAIRED, order="dp-tp-cp-ep-pp"),
    "planned pairs": replace(STAGED_EXPERTS, dispatcher="allgather"),
    "over the step": replace(ON_EIGHT, zero=1),
}
"""Of every mixture one layout of 8 ranks: every dispatcher, etp 1 and tp, stages, pairs, state that
is divided."""
SLOW_MIXED = "narrow", "planned", "clamped", "padded", "over the step"


def test_every_moe_model_and_dispatcher_has_a_type_checked_layout() -> None:
    assert MIXED.keys() == MIXTURES.keys()
    assert {one.dispatcher for one in MIXED.values()} == {"alltoall", "allgather", "reference"}
    assert {one.overlap_experts for one in MIXED.values()} == {True, False}
    for name, parallel in MIXED.items():
        assert run_problems(layout_case(MIXTURES[name], parallel, 8, seq_len=16).run, 8) == [], name


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_MIXED else []) for name in MIXED],
)
def test_every_moe_model_passes(name: str) -> None:
    report = type_check(MIXTURES[name], MIXED[name], world=8, ranks=(5,))
    assert report.problems == ()
    assert any("over ep" in collective for collective in report.collectives) or MIXED[name].ep == 1
    kinds = [text.split(":")[0] for text in report.untyped]
    assert kinds == ["model.moe.aux_loss.sinkhorn"] * name.startswith("planned")


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(granularity="full"),
        RecomputeConfig(granularity="selective", modules=("mlp",)),
    ],
    ids=["full", "mlp"],
)
@pytest.mark.parametrize("name", MIXED)
def test_every_moe_model_passes_with_recomputation(name: str, recompute: RecomputeConfig) -> None:
    assert (
        type_check(
            MIXTURES[name],
            MIXED[name],
            world=8,
            ranks=(5,),
            training=TrainingSettings(recompute=recompute),
        ).problems
        == ()
    )
