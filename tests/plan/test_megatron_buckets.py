"""Flat buckets of Megatron's distributed optimizer, against layouts that Megatron-core built, and
the layout of a run from its args."""

import json
import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalith.errors import CheckpointError
from megalith.plan.megatron_buckets import (
    FlatBucket,
    FlatParam,
    build_flat_buckets,
    coalesce_buckets,
    list_bucket_sizes,
    match_buckets,
)
from megalith.plan.megatron_layout import MegatronLayout, compute_registration_key, read_layout

VECTORS = json.loads((Path(__file__).parent / "megatron_bucket_vectors.json").read_text())
WEIGHTS_MODE = r"checkpoint\.load_mode=weights"


def test_buckets_match_those_of_megatron_core() -> None:
    """Vectors: tools/write_megatron_bucket_vectors.py with megatron-core 0.16.0."""
    for number, case in enumerate(VECTORS):
        params = [
            FlatParam(str(i), numel, own_bucket=i in case["shared"])
            for i, numel in enumerate(case["numels"])
        ]
        buckets = build_flat_buckets(
            params,
            bucket_size=case["bucket_size"],
            dp=case["dp"],
            high_bandwidth=case["high_bandwidth"],
            aligned=case["aligned"],
        )
        offset = 0
        positions = {}
        sizes = []
        for index, bucket in enumerate(buckets):
            sizes.append([offset, bucket.numel, bucket.numel_unpadded])
            for slot in bucket.slots:
                positions[slot.param.name] = [offset + slot.start, offset + slot.stop, index]
            offset += bucket.numel
        assert sizes == case["buckets"], number
        assert [positions[str(i)] for i in range(len(params))] == case["positions"], number


def test_slots_do_not_overlap_and_cover_every_parameter() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        params = [
            FlatParam(str(i), rng.randint(1, 5000), own_bucket=rng.random() < 0.1)
            for i in range(rng.randint(1, 20))
        ]
        dp = rng.randint(1, 64)
        buckets = build_flat_buckets(params, bucket_size=rng.choice((None, 3000)), dp=dp)
        slots = [slot for bucket in buckets for slot in bucket.slots]
        assert [slot.param for slot in slots] == params[::-1], seed
        for bucket in buckets:
            assert bucket.numel % dp == bucket.numel % 128 == 0, seed
            assert bucket.numel - bucket.numel_unpadded < dp * 128, seed
            assert all(a.stop <= b.start for a, b in pairwise(bucket.slots)), seed
            assert all(slot.stop - slot.start == slot.param.numel for slot in bucket.slots), seed
            assert bucket.slots[-1].stop <= bucket.numel_unpadded, seed
        coalesced = coalesce_buckets(buckets)
        assert all(a.stop <= b.start for a, b in pairwise(coalesced)), seed
        assert coalesced[-1].stop <= sum(bucket.numel_unpadded for bucket in buckets), seed


def test_only_the_first_chunk_of_the_first_stage_has_several_buckets() -> None:
    args = {"num_layers": 8, "pipeline_model_parallel_size": 2, "world_size": 128}
    args["virtual_pipeline_model_parallel_size"] = 2
    args["overlap_grad_reduce"] = True
    layout = read_layout(args)

    def sizes(pp_rank: int, chunk: int) -> list[int | None]:
        return list_bucket_sizes(args, layout, pp_rank=pp_rank, chunk=chunk, num_params=1000)

    assert sizes(0, 0) == [64_000_000]
    assert sizes(1, 0) == sizes(0, 1) == [None]
    args["ddp_bucket_size"] = 5
    assert sizes(0, 0) == [5]
    args["ddp_num_buckets"] = 4
    assert sizes(0, 0) == [250]
    args["overlap_grad_reduce"] = False
    assert sizes(0, 0) == [None]


def test_bucket_sizes_that_differ_from_the_file_are_named() -> None:
    buckets = build_flat_buckets([FlatParam("a", 10), FlatParam("b", 100)], bucket_size=50, dp=2)
    assert match_buckets([buckets], numel=[128, 128], numel_unpadded=[100, 10], what="x") == buckets
    with pytest.raises(CheckpointError, match=r"bucket 1 has .* \(11, 128\) in the file and \(10,"):
        match_buckets([buckets], numel=[128, 128], numel_unpadded=[100, 11], what="x")
    with pytest.raises(CheckpointError, match=rf"the file has 1 buckets .* give 2.*{WEIGHTS_MODE}"):
        match_buckets([buckets], numel=[128], numel_unpadded=[100], what="x")
    other: list[FlatBucket] = []
    assert match_buckets([other, buckets], numel=[128, 128], numel_unpadded=[100, 10], what="x")


def test_layers_are_assigned_as_megatron_assigns_them() -> None:
    def layers(**args: object) -> list[list[list[int]]]:
        stages = read_layout({"num_layers": 8, **args}).stages
        return [[list(chunk.layers) for chunk in rank] for rank in stages]

    assert layers(pipeline_model_parallel_size=2) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    uneven = layers(
        pipeline_model_parallel_size=3,
        decoder_first_pipeline_num_layers=2,
        decoder_last_pipeline_num_layers=4,
        virtual_pipeline_model_parallel_size=2,
    )
    assert uneven == [[[0], [4]], [[1], [5]], [[2, 3], [6, 7]]]
    accounted = layers(
        num_layers=6,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert accounted == [[[0], [3, 4]], [[1, 2], [5]]]
    by_layout = layers(
        num_layers=3,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Et|t||tL",
    )
    assert by_layout == [[[0], []], [[1], [2]]]
    # Megatron stores an object, PipelineParallelLayerLayout
    stored = layers(
        num_layers=3,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout=SimpleNamespace(state={"input_data": "Et|t||tL"}),
    )
    assert stored == by_layout


def test_malformed_args_are_named_with_their_value() -> None:
    cases: dict[str, dict[str, object]] = {
        r"decoder_first_pipeline_num_layers='x'": {
            "decoder_first_pipeline_num_layers": "x",
            "pipeline_model_parallel_size": 2,
        },
        r"tensor_model_parallel_size=0": {"tensor_model_parallel_size": 0},
        r"tensor_model_parallel_size=1000000000": {"tensor_model_parallel_size": 10**9},
        r"expert_model_parallel_size=True": {"expert_model_parallel_size": True},
        r"are more than 1048576 parts": {
            "tensor_model_parallel_size": 65536,
            "pipeline_model_parallel_size": 64,
        },
        r"world_size=3 is not a multiple of the 2 ranks": {
            "tensor_model_parallel_size": 2,
            "world_size": 3,
        },
        r"untie_embeddings_and_output_weights='no'": {"untie_embeddings_and_output_weights": "no"},
        r"num_layers=8 cannot be split over pipeline_model_parallel_size=3": {
            "pipeline_model_parallel_size": 3
        },
        r"virtual_pipeline_model_parallel_size=3 .* does not divide the 4 layers": {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 3,
        },
        r"virtual_pipeline_model_parallel_size=2 .* needs": {
            "virtual_pipeline_model_parallel_size": 2
        },
        r"leaves no room for": {
            "num_layers": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
            "decoder_last_pipeline_num_layers": 0,
        },
        r"pipeline_model_parallel_layout of the checkpoint is a int": {
            "pipeline_model_parallel_layout": 3
        },
        r"pipeline_model_parallel_layout='Et\|\(' of the checkpoint": {
            "pipeline_model_parallel_layout": "Et|("
        },
        r"has 2 stages, not pipeline_model_parallel_size=1": {
            "pipeline_model_parallel_layout": "Et|tL"
        },
        r"has 2 layers, not num_layers=8": {"pipeline_model_parallel_layout": "EttL"},
        r"num_layers='x'": {"num_layers": "x"},
    }
    for message, args in cases.items():
        with pytest.raises(CheckpointError, match=message):
            read_layout({"num_layers": 8, **args})
    args = {"num_layers": 8, "overlap_grad_reduce": True, "ddp_bucket_size": "x"}
    with pytest.raises(CheckpointError, match=r"ddp_bucket_size='x'"):
        list_bucket_sizes(args, read_layout(args), pp_rank=0, chunk=0, num_params=1)


def _sorted(names: list[str], layout: MegatronLayout) -> list[str]:
    return sorted(names, key=lambda name: compute_registration_key(name, layout))


def test_norms_are_registered_by_the_layer_spec() -> None:
    layer = "decoder.layers.0."
    fused = [
        f"{layer}self_attention.linear_proj.weight",
        f"{layer}self_attention.linear_qkv.layer_norm_weight",
        f"{layer}self_attention.linear_qkv.weight",
        f"{layer}self_attention.linear_qkv.bias",
        f"{layer}self_attention.q_layernorm.weight",
        f"{layer}mlp.linear_fc1.layer_norm_weight",
        f"{layer}mlp.linear_fc1.weight",
        f"{layer}mlp.linear_fc2.weight",
        "decoder.layers.10.self_attention.linear_proj.weight",
        "decoder.final_layernorm.weight",
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight",
        "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight",
        "mtp.layers.0.final_layernorm.weight",
        "output_layer.weight",
    ]
    layout = read_layout({"num_layers": 11})
    assert _sorted(fused[::-1], layout) == fused
    local = read_layout({"num_layers": 11, "transformer_impl": "local"})
    assert [fused.index(name) for name in _sorted(fused[:8], local)] == [1, 0, 2, 3, 4, 5, 6, 7]
    with pytest.raises(
        CheckpointError, match=rf"conv\.weight has no known position.*{WEIGHTS_MODE}"
    ):
        compute_registration_key(f"{layer}conv.weight", layout)


def test_experts_are_registered_by_their_kind() -> None:
    names = [
        (f"decoder.layers.0.mlp.experts.experts.linear_fc{linear}.weight", expert)
        for linear in (1, 2)
        for expert in range(12)
    ]
    for grouped in (False, True):
        layout = read_layout({"num_layers": 1, "moe_grouped_gemm": grouped})
        ordered = sorted(names, key=lambda n: compute_registration_key(n[0], layout, expert=n[1]))
        assert ordered == (names if grouped else sorted(names, key=lambda n: n[1]))
