"""A training step of a mixture of experts with its exchanges behind computing, against the same
step without.

    python benchmarks/expert_overlap.py                    messages as fast as the machine carries
    them python benchmarks/expert_overlap.py --latency-ms 20    over a link that takes 20 ms longer
    python benchmarks/expert_overlap.py --gbps 0.05        over a link of 50 MB a second python
    benchmarks/expert_overlap.py --json

Two processes of one thread each divide the experts. `in order` waits for every exchange, `shared`
computes shared experts meanwhile, `pairs` (parallel.overlap_experts) another microbatch besides.
All live in the same two processes and take turns, a whole training step each. Before that, all must
compute the same loss, to the bit. The link adds its time on a thread that sleeps, so that there is
something to hide on a machine whose cores carry messages themselves.
"""

import argparse
import json
from dataclasses import asdict, dataclass

from contenders.overlapped import KINDS, run_rank
from paired import Spread, spread, times_as_fast

from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.optim import ScheduleConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.testing.ranks import run_ranks

WORLD = 2


@dataclass(frozen=True, slots=True)
class Report:
    """What a link showed."""

    latency_ms: float
    gbps: float
    rounds: int
    step_ms: Spread
    """In order."""

    faster: dict[str, Spread]
    """How many times as fast as in order, by kind."""

    exposed_ms: dict[str, float]
    """Of a step, waiting for exchanges over a slow link."""


def run_of(*, hidden: int, layers: int, microbatches: int, seq_len: int) -> TrainRun:
    """Eight experts, of which a token chooses two, and a shared one."""
    moe = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=hidden, shared_ffn_hidden_size=hidden)
    model = ModelConfig(
        vocab_size=1024,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=2 * hidden,
        max_seq_len=seq_len,
        moe=moe,
    )
    return TrainRun(
        name="expert_overlap",
        model=model,
        parallel=ParallelConfig(dp=WORLD, ep=WORLD),
        data=DataConfig(mock=True),
        train=LoopConfig(
            steps=1, global_batch_size=WORLD * microbatches, micro_batch_size=1, seq_len=seq_len
        ),
        schedule=ScheduleConfig(lr=1e-4, style="constant"),
    )


def measure(
    run: TrainRun, *, rounds: int, warmup: int, latency_ms: float, gbps: float, timeout: float
) -> Report:
    """Run all kinds on fresh ranks; rank 0 has the clock."""
    seen = run_ranks(run_rank, WORLD, run, rounds, warmup, latency_ms, gbps, timeout=timeout)[0]
    if len(set(seen.losses.values())) > 1:
        raise SystemExit(f"all kinds must compute the same loss, but found {dict(seen.losses)}")
    seconds = seen.turns.seconds
    return Report(
        latency_ms,
        gbps,
        rounds,
        spread([1000 * each for each in seconds["in order"]]),
        {kind: times_as_fast(seconds[kind], seconds["in order"]) for kind in KINDS[1:]},
        {kind: 1000 * each for kind, each in seen.exposed.items()},
    )


def show(report: Report) -> None:
    """For people."""
    slow = report.latency_ms > 0 or report.gbps > 0
    link = (
        f"a link of {report.latency_ms:g} ms and {report.gbps or float('inf'):g} GB/s"
        if slow
        else "this machine"
    )
    print(f"over {link}, {report.rounds} rounds: a step in order takes {report.step_ms} ms")
    for kind, ratio in report.faster.items():
        print(f"  {kind:<7} {ratio} times as fast")
    if slow:
        waits = ", ".join(f"{kind} {waited:.0f} ms" for kind, waited in report.exposed_ms.items())
        print(f"  of a step, waiting for exchanges: {waits}")


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--hidden", type=int, default=256)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--microbatches", type=int, default=4)
    options.add_argument("--seq-len", type=int, default=512)
    options.add_argument(
        "--latency-ms", type=float, default=0.0, help="that the link adds to every message"
    )
    options.add_argument(
        "--gbps", type=float, default=0.0, help="gigabytes a second that the link carries"
    )
    options.add_argument("--rounds", type=int, default=15, help="rounds that count")
    options.add_argument("--warmup", type=int, default=2, help="rounds before those that count")
    options.add_argument("--timeout", type=float, default=1800.0, help="seconds that it may take")
    options.add_argument("--json", action="store_true", help="one JSON document instead of text")
    given = options.parse_args()
    run = run_of(
        hidden=given.hidden,
        layers=given.layers,
        microbatches=given.microbatches,
        seq_len=given.seq_len,
    )
    report = measure(
        run,
        rounds=given.rounds,
        warmup=given.warmup,
        latency_ms=given.latency_ms,
        gbps=given.gbps,
        timeout=given.timeout,
    )
    if given.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        show(report)


if __name__ == "__main__":
    main()
