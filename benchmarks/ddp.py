"""Our data parallelism against torch's DistributedDataParallel: the same model, two processes of one thread each, fp32.

    python benchmarks/ddp.py                          all cases, 15 pairs
    python benchmarks/ddp.py --case 29m --rounds 31
    python benchmarks/ddp.py --json

Both live in the same two processes and take turns, one whole training step each: forward, backward with the gradients
summed over the ranks meanwhile, clipping, AdamW. Before that, both must compute the same loss.
"""

import argparse
import json
from dataclasses import asdict, dataclass

from contenders.ranks import run_rank
from paired import Spread, times_as_fast
from train import check_losses, tiny

from megalith.recipes.small import llama_6m, llama_29m
from megalith.testing.ranks import run_ranks

WORLD = 2
BAR = 0.98
CASES = {"6m": llama_6m, "29m": llama_29m}
TINY = {"tiny": tiny}
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Report:
    """What one case showed."""

    case: str
    rounds: int
    against_ddp: Spread
    computing: Spread
    """The same ratio of the computing time of rank 0, which other jobs on the machine disturb less."""

    holds: bool


def measure(name: str, *, rounds: int, warmup: int, timeout: float) -> Report:
    """Run both contenders on fresh ranks; rank 0 has the clock."""
    recipe = (CASES | TINY)[name]
    losses, turns = run_ranks(run_rank, WORLD, recipe(), rounds, warmup, timeout=timeout)[0]
    check_losses(dict(zip(("ours", "ddp"), losses, strict=True)), LOSS_TOLERANCE)
    found = times_as_fast(turns.seconds["ours"], turns.seconds["ddp"])
    computing = times_as_fast(turns.cpu_seconds["ours"], turns.cpu_seconds["ddp"])
    return Report(name, rounds, found, computing, found.median >= BAR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[*CASES, *TINY], help="again for more; 6m and 29m if unset")
    parser.add_argument("--rounds", type=int, default=15, help="pairs that count")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that a case may take")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    options = parser.parse_args()
    reports = []
    for name in options.case or CASES:
        reports.append(measure(name, rounds=options.rounds, warmup=options.warmup, timeout=options.timeout))
        if not options.json:
            report = reports[-1]
            print(f"{report.case} on {WORLD} ranks, {report.rounds} pairs: ours / DDP {report.against_ddp}")
            print(f"  by computing time {report.computing}")
            print(f"  {'holds ' if report.holds else 'MISSED'} median >= {BAR}")
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))


if __name__ == "__main__":
    main()
