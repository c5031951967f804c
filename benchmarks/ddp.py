"""Our data parallelism against torch's DistributedDataParallel: the same model, two processes of
one thread each, fp32.

    python benchmarks/ddp.py                          all cases, 15 pairs
    python benchmarks/ddp.py --case 29m --rounds 31
    python benchmarks/ddp.py --json

Both live in the same two processes and take turns, one whole training step each: forward, backward
with the gradients summed over the ranks meanwhile, clipping, AdamW. Before that, both must compute
the same loss.
"""

from dataclasses import dataclass

from contenders.ranks import run_rank
from paired import Spread, times_as_fast
from train import check_losses
from two_ranks import CASES, LOSS_TOLERANCE, RECIPES, WORLD, parser, report_each

from megalith.testing.ranks import run_ranks

BAR = 0.98


@dataclass(frozen=True, slots=True)
class Report:
    """What one case showed."""

    case: str
    rounds: int
    against_ddp: Spread
    computing: Spread
    """The same ratio of the computing time of rank 0, which other jobs on the machine disturb
    less."""

    holds: bool


def measure(name: str, *, rounds: int, warmup: int, timeout: float) -> Report:
    """Run both contenders on fresh ranks; rank 0 has the clock."""
    losses, turns = run_ranks(run_rank, WORLD, RECIPES[name](), rounds, warmup, timeout=timeout)[0]
    check_losses(losses, LOSS_TOLERANCE)
    result = times_as_fast(turns.seconds["ours"], turns.seconds["ddp"])
    computing = times_as_fast(turns.cpu_seconds["ours"], turns.cpu_seconds["ddp"])
    return Report(name, rounds, result, computing, result.median >= BAR)


def show(report: Report) -> None:
    """For people."""
    print(f"{report.case} on {WORLD} ranks, {report.rounds} pairs: ours / DDP {report.against_ddp}")
    print(f"  by computing time {report.computing}")
    print(f"  {'holds ' if report.holds else 'MISSED'} median >= {BAR}")


def main() -> None:
    options = parser(__doc__).parse_args()

    def measured(name: str) -> Report:
        return measure(name, rounds=options.rounds, warmup=options.warmup, timeout=options.timeout)

    report_each(options.case or CASES, measured, show, as_json=options.json)


if __name__ == "__main__":
    main()
