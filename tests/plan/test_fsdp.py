"""Rows of fully sharded weights on paper, and the texts that refuse what ZeRO-3 cannot serve."""

from dataclasses import replace

import pytest
import torch

from megalith.config.parallel import OffloadConfig, ParallelConfig, PipelineConfig, ScheduleName
from megalith.plan.shards import Shard, fully_sharded_problems, padded_numel, shard_rows
from megalith.rules.run import run_problems
from megalith.testing.tiny import tiny_run

SHARDS = [
    Shard.full("vector", (7,), inputs=0),
    Shard.full("one", (1,), inputs=0),
    Shard.full("matrix", (10, 3)),
    replace(Shard.full("o", (6, 4, 5), inputs=2), box=((0, 6), (1, 3), (0, 5)), cut=("tp_kv",)),
    replace(Shard.full("kv", (2, 3, 4, 6)), box=((0, 2), (1, 2), (0, 4), (0, 6)), cut=("tp_kv",)),
]


@pytest.mark.parametrize("shard", SHARDS, ids=lambda shard: shard.name)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_rows_are_those_of_torch_chunk_and_all_are_owned_once(shard: Shard, ranks: int) -> None:
    numbers = torch.arange(shard.numel).view(shard.matrix_shape)
    chunks = [chunk.flatten().tolist() for chunk in numbers.chunk(ranks)]
    chunks += [[]] * (ranks - len(chunks))
    for rank, chunk in enumerate(chunks):
        local = shard_rows(shard, rank, ranks, ("dp_shard",))
        assert local.flat is not None and list(range(*local.flat)) == chunk
        assert local.cut == (*shard.cut, "dp_shard") and local.box == shard.box
        assert padded_numel(shard, ranks) == len(chunks[0])


def refused(parallel: ParallelConfig, *, offload: int = 0) -> str:
    (text,) = fully_sharded_problems(parallel, OffloadConfig(layers=offload))
    assert fully_sharded_problems(replace(parallel, zero=2), OffloadConfig(layers=offload)) == []
    return text


def test_unsupported_settings_of_zero3_are_rejected_with_valid_values() -> None:
    zero = ParallelConfig(zero=3)
    assert fully_sharded_problems(replace(zero, pp=2, tp=2, sp=True, cp=2), OffloadConfig()) == []
    assert refused(replace(zero, reduce_dtype="bf16")) == (
        "parallel.reduce_dtype=bf16 with parallel.zero=3: its reduce-scatter is "
        "torch's, which would also add in bf16. Set parallel.reduce_dtype=fp32, or "
        "parallel.zero=2."
    )
    assert refused(zero, offload=2) == (
        "offload.layers=2 with parallel.zero=3: the tensors a layer saves for backward include "
        "its gathered weights, which would be offloaded too. Set offload.layers=0, or "
        "parallel.zero=2."
    )


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipe-v"])
def test_schedules_with_deferred_weight_gradients_are_rejected(schedule: ScheduleName) -> None:
    parallel = ParallelConfig(zero=3, pp=2, pipeline=PipelineConfig(schedule=schedule))
    text = refused(parallel)
    assert text.startswith(f"parallel.pipeline.schedule={schedule} with parallel.zero=3: ")
    assert (
        "Set parallel.pipeline.schedule to one of 1f1b, interleaved, gpipe, or parallel.zero=2."
        in text
    )
    assert fully_sharded_problems(replace(parallel, pp=1), OffloadConfig()) == []


def test_a_run_is_checked_for_it() -> None:
    run = tiny_run({"parallel.zero": "3", "offload.layers": "1"})
    texts = [text for text in run_problems(run, 2) if "parallel.zero=3" in text]
    assert [text.split(" ")[0] for text in texts] == ["offload.layers=1"]
