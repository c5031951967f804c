"""Chooses another layout under which the float64 verification loads a checkpoint."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from megalith.config.parallel import ParallelConfig
from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.config.train import TrainRun
from megalith.train.rules import run_problems

LEVELS: tuple[Literal[0, 1, 3], ...] = (0, 1, 3)
"""ZeRO levels that differ in the sharding of weights and optimizer states; 2 also shards
gradients."""


def resharded_run(run: TrainRun, world: int) -> TrainRun | None:
    """Return `run` under the most different layout of `world` ranks; None if there is no other
    valid layout.

    Weights and optimizer states are then sharded along other dimensions, over other ranks and at
    other offsets. The run is built and loaded, not trained, so its batch fits any layout.
    """
    known = set(run_problems(run, world))
    for parallel in reload_layouts(run.parallel, world):
        if parallel.ep > 1 and run.model.moe is None:
            continue
        candidate = replace(
            run,
            parallel=parallel,
            recompute=RecomputeConfig(),
            offload=OffloadConfig(),
            train=replace(
                run.train,
                global_batch_size=12 * world,
                micro_batch_size=1,
                tokens_per_microbatch=None,
                loss_backward="kept",
                loss_chunk=None,
            ),
        )
        if known.issuperset(run_problems(candidate, world)):
            return candidate
    return None


def reload_layouts(saved: ParallelConfig, world: int) -> Iterator[ParallelConfig]:
    """Yield all other layouts of `world` ranks by tp, pp, dp, ZeRO level and ep, the most different
    first.

    >>> for saved in ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig(dp=2, zero=1):
    ...     first = next(reload_layouts(saved, 2))
    ...     print(f"tp {first.tp}, dp {first.dp}, zero {first.zero}")
    tp 1, dp 2, zero 1
    tp 1, dp 2, zero 3
    tp 2, dp 1, zero 0
    """
    before = _degrees(saved, world)
    degrees = [(tp, pp) for tp in _divisors(world) for pp in _divisors(world // tp)]
    layouts = [
        ParallelConfig(
            tp=tp,
            pp=pp,
            dp=world // (tp * pp),
            zero=zero,
            ep=ep,
            sp=sp,
            bucket_numel=saved.bucket_numel,
        )
        for tp, pp in degrees
        for zero in LEVELS[: 3 if tp * pp < world else 1]
        for ep in _divisors(world // pp)
        for sp in ((False, True) if tp > 1 else (False,))
    ]
    level = 3 if saved.pp > 1 else 1  # so that both levels are tested

    def changes(layout: ParallelConfig) -> int:
        return sum(a != b for a, b in zip(before, _degrees(layout, world), strict=True))

    # Of equally different layouts, those with more tensor-parallel ranks reshard the most tensors.
    layouts.sort(key=lambda p: (-changes(p), -p.tp, p.pp, p.zero != level, p.zero, p.ep, p.sp))
    yield from (layout for layout in layouts if changes(layout) > 0)


def _degrees(p: ParallelConfig, world: int) -> tuple[object, ...]:
    """Return what determines which part of weights and optimizer states a rank holds."""
    return p.tp, p.pp, p.dp or world // (p.tp * p.cp * p.pp), p.cp, p.zero > 0, p.ep


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
