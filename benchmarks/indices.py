"""Order of samples and of blends, beside megatron-core doing the same work on this CPU.

    python benchmarks/indices.py [--documents 10000000] [--rounds 7]

Two jobs: the document, sample and shuffle index of 10 million documents, and the order of 10
million samples over 8 sets. Ours and theirs run in turns and must give equal arrays; the figure is
the median of the paired ratios of times (bar: at most 1.5), with the memory that ours takes beyond
its result (bar: at most twice the result). Where megatron-core is not installed, it says so and
prints our times alone.
"""

import argparse
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paired import spread, take_turns

from megalith.data.build import build_weighted_order, normalize_weights
from megalith.data.pretrain import WindowPlan, build_sample_index, plan_epochs

Arrays = tuple[NDArray[Any], ...]
BAR = 1.5
MEMORY_BAR = 2.0
WEIGHTS = (0.31, 0.23, 0.17, 0.11, 0.08, 0.05, 0.03, 0.02)


@dataclass(frozen=True)
class Job:
    """One piece of work, ours and the peer's."""

    name: str
    ours: Callable[[], Arrays]
    peer: Callable[[], Arrays] | None  # None: the peer is not installed


def index_job(num_documents: int, epochs: float) -> Job:
    """All three index arrays of a corpus whose documents have 1 to 1000 tokens."""
    lengths = np.random.default_rng(0).integers(1, 1001, num_documents, dtype=np.int32)
    indices = np.arange(num_documents, dtype=np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    plan = WindowPlan(seq_len=2048, num_samples=int(tokens * epochs) // 2048 - 1, seed=1234)

    def ours() -> Arrays:
        index = build_sample_index(lengths, indices, plan)
        return index.documents, index.samples, index.shuffle

    name = f"indices of {num_documents:,} documents, {epochs:g} epochs"
    return Job(name, ours, megatron_indices(lengths, indices, plan))


def megatron_indices(
    lengths: NDArray[np.int32], indices: NDArray[np.int32], plan: WindowPlan
) -> Callable[[], Arrays] | None:
    """The same three arrays by megatron-core's own functions; it makes the same decisions about
    epochs beforehand."""
    try:
        from megatron.core.datasets import gpt_dataset, helpers  # type: ignore[import-not-found]
    except ImportError:
        return None
    epoch = plan_epochs(int(lengths[indices].sum(dtype=np.int64)), plan)

    def peer() -> Arrays:
        draw = np.random.RandomState(plan.seed)
        documents = gpt_dataset._build_document_index(indices, epoch.epochs, draw, epoch.separate)
        samples = helpers.build_sample_idx(
            lengths, documents, plan.seq_len, epoch.epochs, epoch.tokens_per_epoch, True, True
        )
        first = epoch.samples_before_last if epoch.separate else len(samples) - 1
        return documents, samples, gpt_dataset._build_shuffle_index(first, len(samples) - 1, draw)

    return peer


def blend_job(num_samples: int) -> Job:
    """The order of a blend of eight sets."""

    def ours() -> Arrays:
        order = build_weighted_order(WEIGHTS, num_samples)
        return order.members, order.samples

    return Job(
        f"blend order of {num_samples:,} samples over {len(WEIGHTS)} sets",
        ours,
        megatron_blend(num_samples),
    )


def megatron_blend(num_samples: int) -> Callable[[], Arrays] | None:
    """The same order by megatron-core's compiled helper."""
    try:
        from megatron.core.datasets import helpers
    except ImportError:
        return None

    def peer() -> Arrays:
        members, samples = np.zeros(num_samples, np.int16), np.zeros(num_samples, np.int64)
        helpers.build_blending_indices(
            members, samples, normalize_weights(WEIGHTS), len(WEIGHTS), num_samples, False
        )
        return members, samples

    return peer


def measure(job: Job, rounds: int) -> bool:
    """Print the figures of one job; False when a bar is missed."""
    result = job.ours()  # compiles, too
    extra = extra_memory(job.ours, result)
    fits = extra <= MEMORY_BAR
    memory = f"extra memory {extra:.2f}x the result (bar {MEMORY_BAR:g})"
    if job.peer is None:
        turns = take_turns({"ours": job.ours}, rounds=rounds, warmup=0)
        time = spread(turns.seconds["ours"])
        print(
            f"{job.name}: {time} s; no ratio, because megatron-core is not installed here; {memory}"
        )
        return fits
    if not all(np.array_equal(a, b) for a, b in zip(result, job.peer(), strict=True)):
        print(f"{job.name}: ours and megatron-core's arrays DIFFER")
        return False
    turns = take_turns({"ours": job.ours, "peer": job.peer}, rounds=rounds, warmup=0)
    ours, peer = turns.seconds["ours"], turns.seconds["peer"]
    ratio = spread([own_time / its for own_time, its in zip(ours, peer, strict=True)])
    times = f"{spread(ours).median:.3f} s and {spread(peer).median:.3f} s"
    print(
        f"{job.name}: {ratio} times the time of megatron-core ({times}; bar {BAR:g}), equal "
        f"arrays; {memory}"
    )
    return fits and ratio.median <= BAR


def extra_memory(work: Callable[[], Arrays], result: Arrays) -> float:
    """The most memory held beyond the result, in sizes of the result."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / sum(array.nbytes for array in result) - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run all jobs; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # the peer's imports warn about GPU packages
    jobs = [
        index_job(options.documents, 1.0),
        index_job(options.documents, 1.3),
        blend_job(options.documents),
    ]
    met = [measure(job, options.rounds) for job in jobs]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
