"""A tiny copy of a user's run that keeps what makes its layout hard: shared heads, uneven parts, ties, biases."""

from dataclasses import replace

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.plan.shards import key_value_ranks
from megalith.verify.ranks import LayoutCase, layout_case

MOST_RANKS = 8
"""Processes that a laptop still runs in seconds."""


def shrink(run: TrainRun, world: int, *, most: int = MOST_RANKS, fault: str | None = None) -> LayoutCase:
    """A float64 case of at most `most` ranks with the layout of `run` on `world` ranks, every axis at its smallest.

    It recomputes and offloads as the run does; counts of layers beyond its own mean all of them.
    """
    parallel = run.parallel
    dp = parallel.dp or world // parallel.tp
    small_dp = min(dp, 2 if parallel.tp > 1 else 3)
    small_tp, model = _shrink_heads(run.model, parallel.tp, most=max(1, most // small_dp))
    tiny = replace(parallel, tp=small_tp, dp=small_dp, sp=parallel.sp and small_tp > 1)
    assert isinstance(tiny, ParallelConfig)
    case = layout_case(model, tiny, small_tp * small_dp, fault=fault)
    offload = replace(run.offload, min_numel=1)  # no tensor of the tiny model is large
    return replace(case, run=replace(case.run, recompute=run.recompute, offload=offload))


def _shrink_heads(model: ModelConfig, tp: int, *, most: int) -> tuple[int, ModelConfig]:
    """The tensor-parallel degree and a model for it: ranks share key/value heads, or parts are uneven, as before."""
    per_key = model.num_heads // model.num_kv_heads
    if key_value_ranks(model.num_kv_heads, tp) < tp:
        sharing = tp // model.num_kv_heads
        keys = 1 if model.num_kv_heads == 1 else 2
        copies = 3 if sharing % 3 == 0 and 3 * keys <= most else 2
        small_tp, small_per_key = keys * copies, copies + (per_key % sharing != 0)
    else:
        small_tp = min(tp, 3 if tp % 3 == 0 else 2, most)
        keys, small_per_key = small_tp + (model.num_kv_heads % tp != 0), min(2, per_key)
    uneven = model.ffn_hidden_size % tp != 0
    ffn = next(size for size in range(20, 30) if small_tp == 1 or (size % small_tp != 0) == uneven)
    small = replace(
        model, vocab_size=61, vocab_multiple=4, hidden_size=24, num_layers=2, num_heads=keys * small_per_key,
        num_kv_heads=keys, head_dim=6, ffn_hidden_size=ffn, max_seq_len=64,
    )  # fmt: skip
    return small_tp, small
