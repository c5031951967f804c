"""`megalith plan`: `explain` shows how a layout distributes the model; `estimate` shows whether
it fits in memory, and its communication."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tyro.conf import Positional

from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.output import print_json
from megalith.cli.plan_tables import list_transfers, print_estimate, print_layout
from megalith.config.suggest import did_you_mean
from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides
from megalith.errors import ConfigError
from megalith.plan.advice import Change, changes, notes, remedy, verdict
from megalith.plan.automatic import describe_auto_recompute, resolve_auto_recompute
from megalith.plan.devices import Device, device_named
from megalith.plan.explain import explain
from megalith.plan.layout import min_world_size
from megalith.plan.memory import PlaceMemory, crowded_bytes, distinct_places, memory_ledger, worst
from megalith.plan.times import rank_flops, repeated_share, work_seconds
from megalith.plan.traffic import step_traffic
from megalith.plan.workload import Workload, plan_workload

DOES_NOT_FIT = 1  # exit code


@dataclass(frozen=True, kw_only=True)
class ExplainCommand:
    """Show how a parallel layout distributes the model: rank grids, groups, layers and shards of
    each rank, memory and communication."""

    recipe: Positional[str]
    """Name of a recipe, a YAML file, or the folder of a run."""

    world: int | None = None
    """World size of the job; default: the smallest of the layout."""

    device: str = "h100"
    """Device for the memory estimate: a100, h100, h200, b200, cpu (this machine, shared by the
    ranks), or a size in GiB."""

    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, kw_only=True)
class EstimateCommand:
    """Estimate whether a run fits in device memory, the memory of the worst rank, the cheapest
    changes that help, and the communication of each axis. Exit code 1 if it does not fit."""

    recipe: Positional[str]
    """Name of a recipe, a YAML file, or the folder of a run."""

    world: int | None = None
    """World size of the job; default: the smallest of the layout."""

    device: str = "h100"
    """Device: a100, h100, h200, b200, cpu (this machine, shared by the ranks), or a size in GiB."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run `megalith plan explain RECIPE` or `megalith plan estimate RECIPE`."""
    actions = {"explain": explain_layout, "estimate": estimate}
    if not argv or argv[0] in ("-h", "--help"):
        print(
            "usage: megalith plan {explain,estimate} RECIPE [--world N] [overrides] [--json]\n\n"
            "  explain    how a layout distributes the model: grids, groups, layers, shards, "
            "memory, "
            "communication\n"
            "  estimate   whether it fits in device memory, the cheapest changes, and the "
            "communication\n\n"
            "`megalith plan explain --help` and `megalith plan estimate --help` show the options."
        )
        return 0
    if argv[0] not in actions:
        advice = did_you_mean(argv[0], actions)
        raise ConfigError(
            f"{argv[0]} is not a subcommand of `megalith plan`.{advice} Use explain or estimate."
        )
    return actions[argv[0]](argv[1:])


def build_checked_workload(
    recipe: str, overrides: dict[str, Any], world: int | None
) -> Workload:  # Any: as typed
    """Return the workload of a run on its ranks after all rules were checked.

    Raises:
        ConfigError: a rule is broken; all of them together.
    """
    from megalith.recipes import resolve
    from megalith.train.rules import check_run

    run = apply_overrides(resolve(recipe), overrides)
    ranks = world if world is not None else min_world_size(run.parallel)
    if ranks < 1:
        raise ConfigError(
            f"--world={ranks} must be at least 1. Use the world size of the real job."
        )
    check_run(run, ranks)
    chosen = resolve_auto_recompute(run, ranks)
    if chosen is not run:
        print(describe_auto_recompute(chosen.recompute), file=sys.stderr)
    return plan_workload(chosen, ranks)


def explain_layout(argv: list[str]) -> int:
    """Print how the layout distributes the model."""
    rest, overrides = split_overrides(argv, TrainRun)
    command = parse_options(ExplainCommand, rest, prog="megalith plan explain", root=TrainRun)
    from megalith.observe.limits import available_memory

    workload = build_checked_workload(command.recipe, overrides, command.world)
    device = device_named(command.device, world=workload.world, host_memory=available_memory())
    layout, ledger = explain(workload), memory_ledger(workload, device)
    place = worst(ledger)
    traffic = step_traffic(workload, place.pp_rank, place.tp_rank)
    if command.json:
        memory = {"memory": [_place_json(one) for one in ledger]}
        print_json(asdict(layout) | memory | {"traffic": [asdict(row) for row in traffic]})
    else:
        print_layout(workload, layout, ledger, traffic)
    return 0


def estimate(argv: list[str]) -> int:
    """Print whether the run fits in memory."""
    rest, overrides = split_overrides(argv, TrainRun)
    command = parse_options(EstimateCommand, rest, prog="megalith plan estimate", root=TrainRun)
    from megalith.observe.limits import available_memory
    from megalith.train.rules import run_problems

    workload = build_checked_workload(command.recipe, overrides, command.world)
    device = device_named(command.device, world=workload.world, host_memory=available_memory())
    ledger = memory_ledger(workload, device)
    place = worst(ledger)
    answer = verdict(place.memory.total, device)
    fixes = [] if answer == "fits" else changes(workload, device, run_problems)
    fix = None if answer == "fits" else remedy(workload, device, run_problems)
    if command.json:
        print_json(_estimate_json(workload, device, ledger, fixes, fix))
    else:
        print_estimate(workload, device, ledger, fixes, fix)
    return DOES_NOT_FIT if answer == "does not fit" else 0


def _estimate_json(
    workload: Workload,
    device: Device,
    ledger: Sequence[PlaceMemory],
    fixes: Sequence[Change],
    fix: Change | None,
) -> dict[str, Any]:  # Any: JSON
    place = worst(ledger)
    return {
        "run": workload.run.name,
        "world": workload.world,
        "device": asdict(device),
        "verdict": verdict(place.memory.total, device),
        "crowded_bytes": crowded_bytes(workload, device),
        "worst": _place_json(place) | {"rank": workload.rank_at(place.pp_rank, place.tp_rank)},
        "places": [_place_json(one) for one in ledger],
        "num_places": len(distinct_places(workload)),
        "nearest_fix": None if fix is None else asdict(fix),
        "changes": [asdict(one) for one in fixes],
        "notes": notes(workload, device),
        "traffic": [
            asdict(row)
            | {
                "passage": None
                if transfer is None
                else asdict(transfer) | {"exposed": transfer.exposed}
            }
            for row, transfer in list_transfers(workload, place, device)
        ],
        "flops_per_rank": rank_flops(workload),
        "repeated_share": repeated_share(workload),
        "work_seconds": work_seconds(workload, device),
    }


def _place_json(place: PlaceMemory) -> dict[str, Any]:  # Any: JSON
    return asdict(place) | {"total": place.memory.total}
