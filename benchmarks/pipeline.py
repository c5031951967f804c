"""How long a pipeline takes, against the simulation of its lists, on four processes whose stages
sleep.

    python benchmarks/pipeline.py                          all schedules, 7 rounds
    python benchmarks/pipeline.py --schedule 1f1b --rounds 15
    python benchmarks/pipeline.py --slow-link              how much of slow messages is hidden
    python benchmarks/pipeline.py --json

A sleeping stage needs no core, so the figure is about the executor: what it adds to the schedule,
and whether messages hold anyone up. Every part of a stage sleeps the same time. The bubble is
measured the same way: what is left of the slowest rank's time when its own sleeps are taken off.
"""

import argparse
import json
from dataclasses import asdict, dataclass

from contenders.sleeps import Naps, run_rank
from paired import Spread, spread

from megalith.config.parallel import ScheduleName
from megalith.plan.schedule import Schedule, build_schedule, with_transfers
from megalith.plan.simulate import even_costs, simulate
from megalith.testing.ranks import run_ranks

RANKS = 4
MICROBATCHES = 8
BAR, BAR_HIDDEN = 0.05, 0.8
SCHEDULES: dict[ScheduleName, int] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "zb-h1": 1,
    "zb-v": 2,
    "dualpipe-v": 2,
}
"""With their chunks per rank."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one schedule showed."""

    schedule: str
    rounds: int
    simulated_ms: float
    against_simulation: Spread
    """Measured time / simulated time."""

    bubble: float
    """Simulated: idle time as a share of all."""

    holds: bool


def measure(name: ScheduleName, *, rounds: int, nap_ms: float) -> Report:
    """Run one schedule and its simulation."""
    schedule = planned(name)
    nap = nap_ms / 1000
    results = run_ranks(run_rank, RANKS, schedule, Naps(nap, nap, nap), rounds + 1, timeout=300.0)
    costs = even_costs(schedule.num_stages, forward=nap, backward_input=nap, backward_weight=nap)
    paper = simulate(schedule, costs)
    measured = [
        max(end for _, end in times) - min(began for began, _ in times)
        for times in zip(*results, strict=True)
    ]
    # the first round connects
    ratios = spread([seconds / float(paper.makespan) for seconds in measured[1:]])
    return Report(
        name,
        rounds,
        float(paper.makespan) * 1000,
        ratios,
        float(paper.bubble_fraction_of_total),
        ratios.median <= 1 + BAR,
    )


def planned(
    name: ScheduleName,
    *,
    ranks: int = RANKS,
    microbatches: int = MICROBATCHES,
    group: int | None = None,
    overlap: bool = True,
) -> Schedule:
    """The lists of all ranks."""
    schedule = build_schedule(
        name,
        num_ranks=ranks,
        num_chunks=SCHEDULES[name],
        num_microbatches=microbatches,
        group=group,
    )
    return with_transfers(schedule, overlap=overlap)


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a slow link costs an interleaved pipeline of two ranks."""

    rounds: int
    added: Spread
    """Of a step: what the messages add when each is received just before it is needed."""

    hidden: Spread
    """Of that: what is hidden when they are received ahead."""

    holds: bool


def measure_hidden(*, rounds: int, nap_ms: float) -> Hidden:
    """Run with and without receiving ahead over a link whose messages take 1.2 parts of a stage;
    and freely."""
    nap = nap_ms / 1000
    times = {}
    for name, overlap, latency in (
        ("free", True, 0.0),
        ("ahead", True, 1.2 * nap),
        ("late", False, 1.2 * nap),
    ):
        schedule = planned("interleaved", ranks=2, microbatches=16, group=8, overlap=overlap)
        results = run_ranks(
            run_rank, 2, schedule, Naps(nap, nap, nap), rounds + 1, latency, timeout=300.0
        )
        ranges = list(zip(*results, strict=True))[1:]
        times[name] = [
            max(end for _, end in each) - min(began for began, _ in each) for each in ranges
        ]
    every = list(zip(times["free"], times["ahead"], times["late"], strict=True))
    added = spread([(late - free) / free for free, _, late in every])
    hidden = spread([(late - prefetched) / (late - free) for free, prefetched, late in every])
    return Hidden(rounds, added, hidden, hidden.median >= BAR_HIDDEN)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schedule", action="append", choices=list(SCHEDULES), help="again for more; all if unset"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--nap-ms", type=float, default=50.0, help="what each F, I and W takes")
    parser.add_argument(
        "--slow-link", action="store_true", help="measure what is hidden of slow messages instead"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    options = parser.parse_args()
    if options.slow_link:
        hidden = measure_hidden(rounds=options.rounds, nap_ms=options.nap_ms)
        verdict = f"{'holds' if hidden.holds else 'MISSED'} median >= {BAR_HIDDEN}"
        text = (
            f"interleaved on 2 ranks over a slow link: messages add {hidden.added} of a step when "
            "received late, of "
            f"which {hidden.hidden} is hidden when received ahead  {verdict}"
        )
        print(json.dumps(asdict(hidden), indent=2) if options.json else text)
        return
    reports = []
    for name in options.schedule or SCHEDULES:
        reports.append(measure(name, rounds=options.rounds, nap_ms=options.nap_ms))
        if not options.json:
            report = reports[-1]
            print(
                f"{report.schedule:<12} simulated {report.simulated_ms:7.1f} ms, bubble "
                f"{report.bubble:.3f} of it; "
                f"measured / simulated {report.against_simulation}  "
                f"{'holds' if report.holds else 'MISSED'} median <= {1 + BAR}"
            )
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))


if __name__ == "__main__":
    main()
