"""Tiny copies of a layout keep its difficult properties and violate no rule."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from megalith.config.kernels import KernelsConfig
from megalith.config.model import CrossConfig, ModelConfig, MTPConfig, RopeConfig
from megalith.config.optim import GroupConfig, OptimConfig
from megalith.config.parallel import (
    ContextConfig,
    OffloadConfig,
    ParallelConfig,
    PipelineConfig,
    RecomputeConfig,
)
from megalith.config.train import TrainRun
from megalith.plan.shards import split_evenly, split_heads
from megalith.plan.stages import plan_stages
from megalith.recipes import recipes
from megalith.rules.run import model_problems, run_problems
from megalith.testing.tiny import tiny_run
from megalith.verify.matrix import FOUR, VARIANTS
from megalith.verify.ranks import LayoutCase, compare_with_one_process, one_process_run
from megalith.verify.shrink import MOST_RANKS, _shrink_choice, describe_copy, shrink


def run_of(
    heads: int, keys: int, tp: int, dp: int, *, ffn: int = 64, sp: bool = False, tied: bool = False
) -> TrainRun:
    """A run of that shape."""
    sizes = {
        "num_heads": heads,
        "num_kv_heads": keys,
        "ffn_hidden_size": ffn,
        "tied_embeddings": tied,
    }
    layout = {"tp": tp, "dp": dp, "sp": sp}
    settings = {f"model.{name}": value for name, value in sizes.items()} | {
        f"parallel.{name}": value for name, value in layout.items()
    }
    return tiny_run({name: str(value) for name, value in settings.items()})


def world_of(parallel: ParallelConfig) -> int:
    return parallel.tp * parallel.cp * parallel.pp * (parallel.dp or 1)


def only(run: TrainRun, world: int | None = None) -> LayoutCase:
    """The copy of a run that needs no second one."""
    (case,) = shrink(run, world or world_of(run.parallel))
    return case


def layouts() -> Iterator[TrainRun]:
    """Every way in which up to 16 ranks divide up to 16 heads, as far as the rules allow it."""
    for heads, tp, dp in product(range(1, 17), range(1, 17), (1, 2, 3, 6)):
        for keys in (number for number in range(1, heads + 1) if heads % number == 0):
            run = run_of(heads, keys, tp, dp, sp=tp > 1 and heads % 2 == 0)
            if not model_problems(run):
                yield run


def parts(model: ModelConfig, tp: int) -> tuple[bool, bool, bool, bool]:
    """Whether ranks share a key/value head, whether all share one, and whether heads and features
    part unevenly."""
    heads = split_heads(model.num_heads, model.num_kv_heads, tp)
    uneven = len(set(heads.queries)) > 1
    return (
        len(heads.keys) < tp,
        tp > 1 and len(heads.keys) == 1,
        uneven,
        len(set(split_evenly(model.ffn_hidden_size, tp))) > 1,
    )


def test_every_layout_has_a_valid_tiny_copy_with_its_properties() -> None:
    count = 0
    for run in layouts():
        case = only(run)
        where = (run.model.num_heads, run.model.num_kv_heads, run.parallel)
        assert run_problems(case.run, case.world) == [], where
        assert case.world <= MOST_RANKS, where
        p, small = run.parallel, case.run.parallel
        assert ((small.tp > 1), (small.dp or 1) > 1, small.sp) == (
            p.tp > 1,
            (p.dp or 1) > 1,
            p.sp,
        ), where
        assert parts(case.run.model, small.tp) == parts(run.model, p.tp), where
        count += 1
    assert count > 1000


@pytest.mark.parametrize(
    ("run", "tp", "dp", "keys", "heads"),
    [
        (run_of(8, 2, 4, 2), 4, 2, 2, 4),  # two ranks for each of the key/value heads
        (run_of(8, 1, 8, 1), 2, 1, 1, 2),  # all share one
        (run_of(6, 1, 3, 1), 3, 1, 1, 3),
        (run_of(6, 2, 4, 1), 4, 1, 2, 6),  # two and one query heads
        (run_of(64, 8, 8, 512), 2, 2, 2, 4),
        (run_of(9, 9, 9, 1), 3, 1, 3, 3),
        (run_of(10, 10, 4, 1), 2, 1, 3, 3),  # uneven
        (run_of(8, 8, 1, 12), 1, 3, 1, 1),
        (run_of(8, 8, 1, 1), 1, 1, 1, 1),
    ],
)
def test_copy_has_the_smallest_sizes(
    run: TrainRun, tp: int, dp: int, keys: int, heads: int
) -> None:
    case = only(run)
    assert (case.run.parallel.tp, case.run.parallel.dp, case.world) == (tp, dp, tp * dp)
    assert (case.run.model.num_kv_heads, case.run.model.num_heads) == (keys, heads)


def test_copy_keeps_ties_biases_order_and_overlap() -> None:
    run = run_of(4, 4, 2, 2, tied=True)
    settings = {
        "model.qkv_bias": "true",
        "parallel.order": "dp-tp-cp-ep-pp",
        "parallel.overlap": "false",
    }
    case = only(
        tiny_run(
            {"model.tied_embeddings": "true", "parallel.tp": "2", "parallel.dp": "2"} | settings
        )
    )
    assert case.run.model.tied_embeddings and case.run.model.qkv_bias
    assert (case.run.parallel.order, case.run.parallel.overlap) == ("dp-tp-cp-ep-pp", False)
    assert only(run).run.model.tied_embeddings


def test_unset_dp_follows_from_the_world_size() -> None:
    assert only(tiny_run({"parallel.tp": "2"}), 12).run.parallel.dp == 2
    assert only(tiny_run(), 1).world == 1


def test_copy_has_the_loss_settings_of_the_run() -> None:
    (case,) = shrink(tiny_run({"kernels": "reference", "parallel.tp": "2"}), 2)
    assert case.run.kernels == "reference"


def test_copy_keeps_the_planted_fault() -> None:
    (case,) = shrink(tiny_run(), 2, fault="dp_sum_averaged")
    assert case.fault == "dp_sum_averaged"


@pytest.mark.parametrize("name", list(recipes()))
def test_every_recipe_has_a_copy(name: str) -> None:
    run = recipes()[name]()
    for case in shrink(run, world_of(run.parallel)):
        assert run_problems(case.run, case.world) == []


@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_layer_variant_has_a_valid_copy(name: str) -> None:
    model = replace(
        VARIANTS[name], hidden_size=240, num_layers=24, max_seq_len=4096, vocab_size=5000
    )
    run = replace(run_of(4, 4, 2, 2), model=model)
    for case in shrink(run, 4):
        small, large = case.run.model, model
        assert run_problems(case.run, case.world) == []
        for same in (
            "norm",
            "norm_placement",
            "block",
            "positions",
            "activation",
            "gated",
            "dropout",
            "qkv_bias",
        ):
            assert getattr(small, same) == getattr(large, same)
        assert {small.has_window(n) for n in range(small.num_layers)} == {
            large.has_window(n) for n in range(24)
        }
        assert {small.uses_rope(n) for n in range(small.num_layers)} == {
            large.uses_rope(n) for n in range(24)
        }
        assert (small.width_factor() > 1) == (large.width_factor() > 1)
        parts = [
            {(m.attention_part(n), m.mlp_part(n)) for n in range(m.num_layers)}
            for m in (small, large)
        ]
        assert parts[0] <= parts[1] and (len(parts[0]) > 1) == (len(parts[1]) > 1)
        assert (small.mla is None, small.mtp.num_layers > 0) == (
            large.mla is None,
            large.mtp.num_layers > 0,
        )
        assert small.attention.window is None or small.attention.window < case.run.train.seq_len
        assert {small.uses_cross_layer_source(n) for n in range(small.num_layers)} == {
            large.uses_cross_layer_source(n) for n in range(24)
        }


@pytest.mark.parametrize("memory", [0, 12, 23])
def test_cross_layer_source_is_sent_between_stages_as_in_the_run(memory: int) -> None:
    run = run_of(2, 2, 1, 2)
    model = replace(run.model, num_layers=24, cross=CrossConfig(memory=memory))
    case = only(replace(run, model=model, parallel=replace(run.parallel, pp=4)), 8)
    small, p = case.run.model, case.run.parallel
    stages = plan_stages(p.pipeline, pp=p.pp, num_layers=small.num_layers)
    assert run_problems(case.run, case.world) == []
    assert any(small.needs_cross_layer_source(stage.layers.start) for stage in stages) == (
        memory < 18
    )
    assert small.cross is not None and small.cross.memory <= memory


def test_rope_scaling_starts_within_a_row_of_the_copy() -> None:
    scaled = {
        "model.rope.scaling": "dynamic",
        "model.rope.original_max_position": "32",
        "model.rope.fraction": "0.5",
    }
    (case,) = shrink(tiny_run(scaled | {"parallel.tp": "2"}), 2)
    assert case.run.model.rope.original_max_position < case.run.train.seq_len
    assert case.run.model.rotary_size() == 4 and model_problems(case.run) == []


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(sections=(1, 1, 1)),
        RopeConfig(sections=(1, 0, 1), fraction=0.7),
        RopeConfig(
            scaling="longrope",
            short_factors=(1.0,) * 3,
            long_factors=(2.0,) * 3,
            original_max_position=32,
        ),
    ],
)
def test_rope_of_the_copy_fits_its_heads(rope: RopeConfig) -> None:
    run = tiny_run({"parallel.tp": "2"})
    run = replace(run, model=replace(run.model, rope=rope))
    assert model_problems(run) == []
    (case,) = shrink(run, 2)
    small = case.run.model.rope
    assert model_problems(case.run) == []
    assert bool(small.sections) == bool(rope.sections) and small.scaling == rope.scaling


# --- stages, shared rows, divided state, memory


def large(
    parallel: ParallelConfig,
    *,
    layers: int = 48,
    seq_len: int = 1024,
    rows: int = 1,
    batch: int = 0,
) -> TrainRun:
    """A run with many heads and layers, of 64 microbatches or `batch` rows a step."""
    run = run_of(96, 96, 1, 1, ffn=192)
    train = replace(
        run.train,
        seq_len=seq_len,
        micro_batch_size=rows,
        global_batch_size=batch or 64 * rows * (parallel.dp or 1),
    )
    model = replace(run.model, num_layers=layers, max_seq_len=seq_len)
    return replace(run, parallel=parallel, train=train, model=model)


def staged(pp: int, **pipeline: object) -> ParallelConfig:
    return ParallelConfig(pp=pp, dp=1, pipeline=PipelineConfig(**pipeline))  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("parallel", "pp", "expected"),
    [
        (staged(16), 3, PipelineConfig()),
        (staged(2), 2, PipelineConfig()),
        (staged(8, vpp=6), 2, PipelineConfig(vpp=2)),
        (staged(8, vpp=3, group=16), 2, PipelineConfig(vpp=2, group=3)),
        (staged(8, schedule="zb-v", vpp=2), 2, PipelineConfig(schedule="zb-v", vpp=2)),
        (staged(16, schedule="zb-h1"), 3, PipelineConfig(schedule="zb-h1")),
        (staged(4, layout="E|t*24|t*24|L"), 3, PipelineConfig(layout="E|t|L")),
        (staged(4, layout="Et*12|t*12||t*24L"), 3, PipelineConfig(layout="Ett|t|tL")),
        (
            staged(2, vpp=2, layout="Et*12||t*12|t*24L"),
            2,
            PipelineConfig(vpp=2, layout="Ett||t|tL"),
        ),
        (staged(2, layout="Et*16|t*32L"), 2, PipelineConfig(layout="Ett|tL")),
        (staged(8, first_layers=6), 3, PipelineConfig(first_layers=1)),
        (
            staged(2, first_layers=16, last_layers=32),
            2,
            PipelineConfig(first_layers=1, last_layers=2),
        ),
        (staged(7, count_embedding=True), 3, PipelineConfig(count_embedding=True)),
    ],
)
def test_copy_keeps_schedule_and_stage_layout(
    parallel: ParallelConfig, pp: int, expected: PipelineConfig
) -> None:
    run = large(parallel)
    assert run_problems(run, parallel.pp) == []
    case = only(run)
    assert run_problems(case.run, case.world) == []
    assert (case.run.parallel.pp, case.run.parallel.pipeline) == (pp, expected)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("E|t*24|t*24|mmm|L", "Et|mm|L"),
        ("Et*16|t*16|t*16mmm||L", "Et|tmm|L"),
        ("Et*16|t*16||t*16|mmmL", "Et|t|mmL"),
        ("Et*12|t*12|t*12|t*11|tmmmL", "Ett|t|tmmL"),
    ],
)
def test_copy_keeps_the_stage_of_mtp_layers(layout: str, expected: str) -> None:
    parallel = staged(5, layout=layout)
    run = replace(
        large(parallel), model=replace(large(parallel).model, mtp=MTPConfig(num_layers=3))
    )
    assert run_problems(run, 5) == []
    case = only(run)
    assert run_problems(case.run, case.world) == []
    assert (case.run.parallel.pipeline.layout, case.run.model.mtp.num_layers) == (expected, 2)


@pytest.mark.parametrize(("microbatches", "expected"), [(2, 2), (4, 3), (64, 4)])
def test_copy_keeps_the_relation_of_microbatches_to_stages(
    microbatches: int, expected: int
) -> None:
    case = only(large(staged(4), batch=microbatches))
    train = case.run.train
    assert train.global_batch_size // train.micro_batch_size == expected


def test_copy_keeps_kinds_padding_and_slicing_of_context_parallelism() -> None:
    kinds = ("ring", "gather", "a2a") * 16
    mixed = only(large(ParallelConfig(cp=8, dp=1, context=ContextConfig(layers=kinds))))  # type: ignore[arg-type]  # its words
    assert (
        mixed.run.parallel.context.layers == ("ring", "gather", "a2a")
        and mixed.run.parallel.cp == 2
    )
    context = ContextConfig(kind="a2a+ring", a2a=4, slicing="document")
    groups = only(large(ParallelConfig(cp=16, tp=2, sp=True, dp=1, context=context), seq_len=1001))
    p = groups.run.parallel
    assert (p.cp, p.tp, p.context.a2a, p.context.slicing, groups.run.train.seq_len) == (
        4,
        2,
        2,
        "document",
        15,
    )
    assert only(large(ParallelConfig(cp=3, dp=1), seq_len=1026)).run.parallel.cp == 3


def test_copy_keeps_replicas_and_reduces_gradients_in_float64() -> None:
    halves = only(
        large(ParallelConfig(dp=16, zero=2, dp_replicate=4, reduce_dtype="bf16"))
    ).run.parallel
    assert (halves.dp, halves.zero, halves.dp_replicate, halves.reduce_dtype) == (4, 2, 2, "fp32")
    alone = only(large(ParallelConfig(dp=16, zero=1, dp_replicate=16))).run.parallel
    assert (alone.dp, alone.dp_replicate) == (2, 2)


def test_copy_recomputes_some_or_all_layers_as_the_run() -> None:
    run = large(staged(4))
    for number, expected in ((4, 1), (12, 2)):
        recompute = RecomputeConfig(granularity="full", method="block", num_layers=number)
        case = only(replace(run, recompute=recompute, offload=OffloadConfig(layers=3)))
        assert (
            case.run.recompute.num_layers,
            case.run.offload.layers,
            case.run.offload.min_numel,
        ) == (expected, 1, 1)
        stages = plan_stages(case.run.parallel.pipeline, pp=3, num_layers=case.run.model.num_layers)
        assert {len(stage.layers) for stage in stages} == {2}


def test_axes_that_do_not_fit_together_are_split_over_copies() -> None:
    run = large(ParallelConfig(tp=4, sp=True, cp=4, pp=8, dp=4))
    cases = shrink(run, 512)
    axes = [
        tuple(axis for axis in ("tp", "cp", "pp", "dp") if getattr(case.run.parallel, axis) > 1)
        for case in cases
    ]
    assert sorted(axes) == [
        ("cp", "pp", "dp"),
        ("tp", "cp", "dp"),
        ("tp", "cp", "pp"),
        ("tp", "pp", "dp"),
    ]
    words = [describe_copy(run, 512, case) for case in cases]
    assert words[0] == (
        "tp 2 of 4, sp, cp 2 of 4, pp 2 of 8, no dp (in another copy), context ring, 2 of 48 "
        "layers, 16 tokens a row"
    )


def any_run(draw: random.Random) -> TrainRun:
    """Some run; it may break rules."""
    tp, cp, pp, dp = (draw.choice((1, 1, 2, 3, 4, 8)) for _ in range(4))
    schedule, vpp = draw.choice(
        (("auto", 1), ("auto", 2), ("auto", 4), ("gpipe", 1), ("zb-h1", 1), ("zb-v", 2))
    )
    kind = draw.choice(("ring", "gather", "a2a", "a2a+ring"))
    layers = draw.choice(((), ("ring", "a2a", "gather", kind) * 12))
    pipeline = PipelineConfig(
        schedule=schedule,
        vpp=vpp,
        group=draw.choice((None, None, 5)),  # type: ignore[arg-type]  # one of its words
        count_loss=draw.random() < 0.2,
        first_layers=draw.choice((None, None, None, 4)),
    )
    context = ContextConfig(
        kind=kind,
        layers=layers,
        a2a=2 if kind == "a2a+ring" else None,
        slicing=draw.choice(("row", "document")),  # type: ignore[arg-type]
    )
    parallel = ParallelConfig(
        tp=tp,
        sp=(sp := tp > 1 and draw.random() < 0.7),
        tp_comm_overlap=sp and draw.random() < 0.5,
        cp=cp,
        context=context,
        pp=pp,
        pipeline=pipeline,
        dp=dp,
        zero=draw.choice((0, 1, 2, 3)),
        dp_replicate=draw.choice((1, 1, 2, dp)),
    )
    recompute = draw.choice(
        (
            RecomputeConfig(),
            RecomputeConfig(granularity="selective"),
            RecomputeConfig(granularity="full", num_layers=3),
            RecomputeConfig(
                granularity="full", method="block", shard_inputs=tp > 1 and not parallel.sp
            ),
        )
    )
    run = large(
        parallel,
        layers=48 - pipeline.count_loss,
        seq_len=draw.choice((1001, 1152)),
        rows=draw.choice((1, 2)),
    )
    model = replace(run.model, num_heads=96, num_kv_heads=draw.choice((1, 2, 4, 96)))
    documents = replace(run.data, document_masking=draw.random() < 0.5)
    fused = parallel.tp_comm_overlap and draw.random() < 0.5
    run = replace(run, parallel=replace(parallel, collective_matmul="fused" if fused else "auto"))
    return replace(
        run,
        model=model,
        recompute=recompute,
        data=documents,
        offload=OffloadConfig(layers=draw.choice((0, 2))),
    )


@pytest.mark.slow
def test_every_valid_layout_has_valid_copies() -> None:
    draw, count = random.Random(5), 0
    for _ in range(1500):
        run = any_run(draw)
        world = world_of(run.parallel)
        if run_problems(run, world):
            continue
        count += 1
        cases = shrink(run, world)
        for axis in ("tp", "cp", "pp", "dp"):
            assert (getattr(run.parallel, axis) > 1) == any(
                getattr(case.run.parallel, axis) > 1 for case in cases
            )
        for case in cases:
            assert (
                case.run.parallel.collective_matmul == "fused"
            ) <= case.run.parallel.tp_comm_overlap
            assert run_problems(case.run, case.world) == [], (run.parallel, case.run.parallel)
            assert case.world <= MOST_RANKS
            assert describe_copy(run, world, case).endswith("tokens a row")
    assert count > 150


def test_copy_keeps_the_layers_of_adapters() -> None:
    settings = {
        "model.num_layers": "12",
        "lora.layers": "[1, 10, 11]",
        "lora.rank": "64",
        "checkpoint.load": "base",
    }
    for case in shrink(tiny_run(settings), 1):
        copy = case.run
        assert copy.lora is not None and copy.lora.rank == 3 and copy.lora.layers is not None
        assert set(copy.lora.layers) == {n * copy.model.num_layers // 12 for n in (1, 10, 11)}


def with_experts(settings: dict[str, str], moe: dict[str, str] | None = None) -> TrainRun:
    """A run with 64 experts, of which a token chooses 8."""
    mixture = {"num_experts": "64", "top_k": "8", "ffn_hidden_size": "96"} | (moe or {})
    given = {
        "train.global_batch_size": "128",
        "train.seq_len": "16",
        "model.num_layers": "8",
        "model.num_heads": "8",
        "model.num_kv_heads": "8",
    }
    named = {f"parallel.{name}": value for name, value in settings.items()}
    return tiny_run(given | named | {f"model.moe.{name}": value for name, value in mixture.items()})


MIXED = {
    "ep alone, edp 2": ({"dp": "16", "ep": "8"}, {}, (2, None, 4)),
    "ep alone, edp 1": ({"dp": "8", "ep": "8"}, {}, (3, None, 3)),
    "one expert on each rank": (
        {"dp": "64", "ep": "64"},
        {"top_k": "1", "router.score": "sigmoid"},
        (3, None, 3),
    ),
    "etp is tp": ({"tp": "4", "sp": "true", "dp": "16", "ep": "8"}, {}, (2, None, 4)),
    "etp 1": ({"tp": "4", "sp": "true", "dp": "8", "ep": "16", "etp": "1"}, {}, (2, 1, 4)),
    "etp 2 without tp": ({"dp": "8", "ep": "2", "etp": "2"}, {}, (2, 2, 4)),
    "stages": ({"pp": "4", "dp": "16", "ep": "8", "zero": "1"}, {}, (2, None, 8)),
    "replicas": ({"dp": "16", "ep": "4", "zero": "1", "dp_replicate": "2"}, {}, (2, None, 4)),
    "contexts": ({"cp": "4", "dp": "2", "ep": "8"}, {}, (2, None, 4)),
    "groups": (
        {"dp": "16", "ep": "8"},
        {"router.score": "sigmoid", "router.num_groups": "8", "router.topk_groups": "4"},
        (2, None, 4),
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_copy_shards_experts_as_the_run(name: str) -> None:
    settings, moe, (ep, etp, world) = MIXED[name]
    if moe.get("top_k") == "1":
        moe = moe | {"router.norm_topk_prob": "false"}
    run = with_experts(settings, moe)
    case = only(run)
    assert (
        run_problems(run, world_of(run.parallel)) == [] and run_problems(case.run, case.world) == []
    )
    assert (case.run.parallel.ep, case.run.parallel.etp, case.world) == (ep, etp, world)
    mixture = case.run.model.moe
    assert mixture is not None and mixture.num_experts <= 6 and mixture.top_k <= 2
    assert (mixture.num_experts == ep) == (name == "one expert on each rank")
    assert (mixture.router.num_groups is None) == (name != "groups")
    assert f"{mixture.num_experts} of 64 experts" in describe_copy(
        run, world_of(run.parallel), case
    )


def test_copy_keeps_dense_layers_and_all_moe_settings() -> None:
    run = with_experts(
        {"dp": "4", "ep": "2"},
        {
            "layers": "[false,true,true,true]",
            "shared_ffn_hidden_size": "128",
            "shared_gate": "true",
            "latent_size": "32",
            "capacity.factor": "1.25",
            "aux_loss.global_batch_coeff": "0.1",
        },
    )
    case = only(run)
    mixture = case.run.model.moe
    assert mixture is not None and mixture.layers == (False, True)
    assert (mixture.shared_ffn_hidden_size, mixture.latent_size, mixture.capacity.factor) == (
        9,
        14,
        1.25,
    )
    assert mixture.shared_gate and mixture.capacity.drop == "least"
    assert (mixture.aux_loss.global_batch_coeff, mixture.aux_loss.batch_coeff) == (0.0, 0.1)
    assert "aux loss per microbatch, as other parts of it are" in describe_copy(run, 4, case)


def test_copy_keeps_the_global_aux_loss_if_one_process_can_compute_it() -> None:
    for moe, kept in (
        (
            {
                "aux_loss.global_batch_coeff": "0.1",
                "aux_loss.z_loss_coeff": "0.1",
                "aux_loss.sequence_coeff": "0.2",
            },
            0.1,
        ),
        ({"aux_loss.global_batch_coeff": "0.1", "aux_loss.batch_coeff": "0.2"}, 0.0),
    ):
        run = with_experts({"dp": "4", "ep": "2"}, moe)
        case = only(run)
        mixture = case.run.model.moe
        assert mixture is not None and mixture.aux_loss.global_batch_coeff == kept
        assert mixture.aux_loss.batch_coeff == pytest.approx(0.0 if kept else 0.3)
        assert ("aux loss per microbatch" in describe_copy(run, 4, case)) == (not kept)
        rows = one_process_run(case).train.micro_batch_size
        assert rows == case.run.train.micro_batch_size * (
            (case.run.parallel.dp or 1) if kept else 1
        )


def full_experts_and_documents() -> LayoutCase:
    """The copy of a run whose full experts refuse those of least weight, among packed documents
    that begin alike."""
    run = with_experts(
        {"cp": "2", "ep": "2"}, {"capacity.factor": "1.0", "aux_loss.sequence_coeff": "0.01"}
    )
    return only(
        replace(
            run, data=replace(run.data, document_masking=True), train=replace(run.train, seq_len=64)
        )
    )


def test_copy_with_documents_keeps_token_dropping() -> None:
    run = full_experts_and_documents().run
    assert (
        run.data.document_masking
        and run.model.moe is not None
        and run.model.moe.capacity.drop == "least"
    )


@pytest.mark.slow  # two processes and one, a few seconds
def test_rounding_does_not_decide_which_first_token_is_dropped() -> None:
    """By all digits of their weights, experts of this copy get other tokens than on one process in
    its fourth step."""
    differences = compare_with_one_process(full_experts_and_documents())
    assert (
        differences
        and [str(difference) for difference in differences if not difference.holds] == []
    )


def test_each_of_several_copies_shards_experts() -> None:
    run = with_experts(
        {"tp": "2", "sp": "true", "cp": "2", "pp": "2", "dp": "2", "ep": "4", "etp": "1"}
    )
    for case in shrink(run, 16):
        assert run_problems(case.run, case.world) == []
        assert case.run.parallel.ep == 2 and case.run.parallel.etp == 1


@pytest.mark.parametrize(
    "settings", [{}, {"parallel.pp": "2", "parallel.pipeline.vpp": "2", "model.num_layers": "4"}]
)
def test_copy_of_a_run_with_a_token_budget_has_one(settings: dict[str, str]) -> None:
    packed = {
        "train.micro_batch_size": "1",
        "train.tokens_per_microbatch": "64",
        "parallel.dp": "2",
        "train.seq_len": "30",
    }
    for added in ({}, {"parallel.cp": "2", "parallel.context.slicing": "document"}):
        run = tiny_run({**packed, **settings, **added})
        world = 2 * run.parallel.pp * run.parallel.cp
        assert run_problems(run, world) == []
        for case in shrink(run, world):
            assert (
                case.run.train.tokens_per_microbatch is not None
                and run_problems(case.run, case.world) == []
            )
            assert "tokens a document" in describe_copy(run, world, case)


def test_copy_uses_the_kernels_of_the_run_that_support_float64() -> None:
    named = tiny_run(
        {
            "kernels.all": "torch",
            "kernels.norm": "numba",
            "train.z_loss": "0.01",
            "train.loss_chunk": "5",
        }
    )
    (case,) = shrink(replace(named, parallel=replace(named.parallel, tp=2)), 2)
    assert case.run.kernels == KernelsConfig(all="torch")
    assert (case.run.train.z_loss, case.run.train.loss_chunk) == (0.01, 5)


def test_layer_numbers_in_patterns_are_scaled() -> None:
    group = GroupConfig(name="a", match=("layers.31.mlp.*", "*.q"), lr_scale=0.5)
    given = OptimConfig(
        trained=("layers.16.*", "norm.*"), frozen=("layers.[0-3].*",), groups=(group,)
    )
    model = replace(FOUR, num_layers=4)
    result = _shrink_choice(given, 32, model)
    assert (result.trained, result.frozen) == (("layers.2.*", "norm.*"), ("layers.[0-3].*",))
    assert result.groups[0].match == ("layers.3.mlp.*", "*.q") and result.groups[0].lr_scale == 0.5
    assert _shrink_choice(OptimConfig(trained=("layers.2[0-9].*",)), 32, model).trains_all()
