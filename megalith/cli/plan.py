"""`megalith plan`: `explain` shows how a layout distributes the model; `estimate` shows whether
it fits in memory, and its communication.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.output import print_json
from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides
from megalith.errors import ConfigError, did_you_mean
from megalith.estimate.advise import (
    Change,
    changes,
    describe_auto_recompute,
    notes,
    remedy,
    resolve_auto_recompute,
    verdict,
)
from megalith.estimate.explain import Explanation, GroupRow, StageRow, explain, trains_all
from megalith.estimate.memory import (
    PlaceMemory,
    crowded_bytes,
    distinct_places,
    memory_ledger,
    worst,
)
from megalith.estimate.times import (
    CommunicationTime,
    PhaseEstimate,
    Traffic,
    communication_time,
    estimate_phases,
    rank_flops,
    repeated_share,
    step_traffic,
    work_seconds,
)
from megalith.estimate.workload import Workload, plan_workload
from megalith.plan.devices import EFFICIENCY, GIB, USABLE, Device, device_named
from megalith.plan.grid import min_world_size
from megalith.plan.schedule import with_transfers
from megalith.plan.simulate import even_costs, simulate

# --- tables and sentences of `megalith plan` about a parallel layout and its memory

SHOWN = 9
"""Maximum rows of stages or ranks; longer tables show the first, the last and the worst."""


# --- explain


def print_layout(
    workload: Workload,
    layout: Explanation,
    ledger: Sequence[PlaceMemory],
    traffic: Sequence[Traffic],
) -> None:
    """Print grids, groups, stages and shards; `traffic` is that of the worst rank."""
    console, place = _console(), worst(ledger)
    for line in _grid_lines(workload, layout):
        console.print(line)
    for table in (
        _group_table(layout.groups),
        _stage_table(workload, layout, ledger),
        _part_table(layout),
    ):
        if table.row_count:
            console.print(table)
    for line in (
        *_expert_lines(layout),
        *_rhythm_lines(layout),
        *_matrix_rule_lines(layout),
        *_traffic_lines(traffic, place),
        *_adapter_lines(workload, place),
    ):
        console.print(line)


def _matrix_rule_lines(layout: Explanation) -> Iterator[str]:
    for row in layout.matrix_rules:
        yield (
            f"{row.rule}: {row.matrices:,} matrices, {row.fewest} to {row.most} assigned to each "
            f"of {row.ranks} ranks of a stage; the highest cost of a rank is {row.imbalance:.2f} "
            f"times the mean, that of the largest matrix {row.largest:.2f} times."
        )
        if row.flops_share is not None:
            yield (
                f"  Newton-Schulz steps: {100 * row.flops_share:.2g} % of the FLOPs of a training "
                "step, divided among the ranks."
            )
        if row.nbytes:
            yield (
                f"  Pieces of matrices and directions: a rank sends up to {_bytes(row.nbytes)} per "
                f"step, in {row.waves} waves."
            )
        if row.state:
            yield f"  States of whole matrices: up to {_bytes(row.state)} per rank."


def _grid_lines(workload: Workload, layout: Explanation) -> Iterator[str]:
    run = workload.run
    if trains_all(run):
        yield f"{run.name}: {_count(layout.parameters)} parameters on {layout.world} ranks"
    elif run.lora is None:
        share = 100 * layout.trained / layout.parameters
        yield (
            f"{run.name}: {_count(layout.parameters)} parameters, {_count(layout.trained)} of them "
            f"trained ({share:.2g} %), on {layout.world} ranks"
        )
    else:
        share = 100 * layout.trained / layout.parameters
        yield (
            f"{run.name}: {_count(layout.parameters)} frozen parameters and "
            f"{_count(layout.trained)} trained ones of adapters "
            f"({share:.2g} % of them), on {layout.world} ranks"
        )
    yield f"  layers: {layout.kind}"
    for name, rows in (("dense ", layout.dense), ("expert", layout.expert)):
        product = " · ".join(f"{row.axis} {row.size}" for row in rows)
        strides = ", ".join(f"{row.axis} {row.stride}" for row in rows if row.size > 1)
        yield f"  {name} grid  {layout.world} = {product}" + (
            f"   (rank numbers apart: {strides})" if strides else ""
        )
    grids = (
        "The model has no experts."
        if layout.experts is None
        else "Both grids contain the same ranks."
    )
    yield f"  {grids} ep divides the ranks of the dense grid and is not a factor of the world size."


def _group_table(groups: Sequence[GroupRow]) -> Table:
    table = _table("group", "ranks", "groups", "they", "which ranks")
    for row in groups:
        shown = (
            row.examples
            if len(row.examples) == row.count
            else (*row.examples[:2], "…", row.examples[-1])
        )
        table.add_row(row.axes, str(row.size), str(row.count), row.purpose, " | ".join(shown))
    return table


def _stage_table(workload: Workload, layout: Explanation, ledger: Sequence[PlaceMemory]) -> Table:
    table = _table("stage", "pp rank", "chunk", "layers", "", "weights", "work", "GiB a rank")
    by_rank = {
        pp: worst([one for one in ledger if one.pp_rank == pp])
        for pp in {one.pp_rank for one in ledger}
    }
    for row in _some(layout.stages):
        if row is None:
            table.add_row(*["…"] * 8)
            continue
        num_mtp_layers = (
            f"{row.num_mtp_layers} multi-token prediction{'s' * (row.num_mtp_layers > 1)}"
        )
        parts = (
            ("embedding", row.embedding),
            (num_mtp_layers, row.num_mtp_layers),
            ("loss", row.loss),
        )
        ends = " + ".join(name for name, count in parts if count)
        added = "" if workload.run.lora is None else f" + {_count(row.trained)}"
        table.add_row(
            str(row.stage),
            str(row.pp_rank),
            str(row.chunk),
            row.layers,
            ends,
            _count(row.parameters) + added,
            f"{100 * row.flops_share:.1f} %",
            _gib(by_rank[row.pp_rank].memory.total) if row.chunk == 0 else "",
        )
    return table


def _some(rows: Sequence[StageRow]) -> Iterator[StageRow | None]:
    """Return all rows, or the first and the last few with None between."""
    if len(rows) <= 2 * SHOWN:
        yield from rows
        return
    yield from rows[:SHOWN]
    yield None
    yield from rows[-SHOWN + 1 :]


def _part_table(layout: Explanation) -> Table:
    table = _table("tp rank", "query heads", "KV heads", "ffn features", "vocabulary rows")
    for row in layout.parts:
        shared = f" (on {row.kv_copies} ranks)" if row.kv_copies > 1 else ""
        table.add_row(
            row.tp_ranks, str(row.heads), f"{row.kv_heads}{shared}", str(row.ffn), str(row.vocab)
        )
    return table


def _expert_lines(layout: Explanation) -> Iterator[str]:
    """Describe the experts of a rank and their communication."""
    e = layout.experts
    if e is None:
        return
    yield (
        f"Experts: {e.layers} layers with {e.experts}, {e.experts_here} of them on each rank; a "
        f"token is sent to {e.top_k} and uses {_count(e.active)} parameters."
    )
    yield f"Router: {e.router}."
    yield (
        f"A rank holds up to {_count(e.parameters)} expert parameters, {_gib(e.state)} GiB "
        "with gradients and optimizer state."
    )
    yield (
        f"In a microbatch its experts of a layer process {e.rows:,} rows with a balanced load, "
        f"{e.crowded_rows:,} if all tokens are sent to them."
    )
    if e.exchanged:
        yield (
            "Each all-to-all, 4 per layer and microbatch, sends "
            f"{_bytes(e.exchanged)} from each rank."
        )
    if e.gathered:
        yield (
            f"Each all-gather of tokens, 4 per layer and microbatch, sends {_bytes(e.gathered)} "
            "from each rank."
        )


def _rhythm_lines(layout: Explanation) -> Iterator[str]:
    r = layout.rhythm
    yield (
        f"A step: {r.tokens_per_step:,} tokens; each rank has {r.microbatches} × "
        f"{r.tokens_per_microbatch:,} of them "
        f"(microbatches × tokens). Up to {r.tokens_in_flight:,} are in flight on the first "
        "pipeline rank."
    )
    yield f"Schedule {r.schedule}: the bubble adds {100 * r.bubble:.1f} % to the compute time."


def _traffic_lines(traffic: Sequence[Traffic], place: PlaceMemory) -> Iterator[str]:
    """Describe the bytes sent per axis."""
    sums: dict[str, int] = {}
    for row in traffic:
        sums[row.axis] = sums.get(row.axis, 0) + row.nbytes
    sent = ", ".join(f"{axis} {_bytes(nbytes)}" for axis, nbytes in sums.items()) or "nothing"
    yield f"A rank of pp {place.pp_rank}, tp {place.tp_rank} sends in a step: {sent}."


def _adapter_lines(workload: Workload, place: PlaceMemory) -> Iterator[str]:
    """Describe the memory of frozen and trained parameters."""
    if trains_all(workload.run):
        return
    parameters = workload.parameters(place.pp_rank, place.tp_rank)
    frozen, own = (
        sum(one.numel for one in parameters if one.frozen is is_frozen)
        for is_frozen in (True, False)
    )
    m = place.memory
    yield (
        f"It holds {_count(frozen)} frozen and {_count(own)} trained parameters: weights "
        f"{_gib(m.weights)} GiB; gradients {_gib(m.gradients)} GiB and optimizer state "
        f"{_gib(m.master + m.moments + m.ema)} GiB of the trained ones."
    )


# --- estimate


def print_estimate(
    workload: Workload,
    device: Device,
    ledger: Sequence[PlaceMemory],
    fixes: Sequence[Change],
    fix: Change | None,
) -> None:
    """Print the memory of the worst rank, the verdict, possible changes, and the traffic of each
    axis."""
    console, place = _console(), worst(ledger)
    axes = " · ".join(f"{axis} {workload.grid.size(axis)}" for axis in ("tp", "cp", "pp", "dp"))
    console.print(
        f"{workload.run.name} on {workload.world} × {device.name}: {axes}, zero "
        f"{workload.run.parallel.zero}, "
        f"{workload.num_microbatches} microbatches of {workload.tokens:,} tokens a rank"
    )
    console.print(_memory_table(place))
    if len(ledger) > 1:
        console.print(_places_table(ledger))
    console.print(_verdict_line(workload, device, place))
    if (crowded := crowded_bytes(workload, device)) is not None:
        console.print(
            f"If all tokens are sent to the experts of one rank: {_gib(crowded)} GiB on it."
        )
    host = max(one.host for one in ledger)
    if host:
        console.print(
            f"In host memory: {_gib(host)} GiB of activations per rank, {_gib(host * device.node)} "
            "GiB per node."
        )
    if fix is not None:
        console.print(
            f"Nearest fix: {_spelled(fix.overrides)}: {_gib(fix.nbytes)} GiB ({fix.price})."
        )
    elif fixes or verdict(place.memory.total, device) != "fits":
        console.print(
            f"None of the tried changes makes it fit on {workload.world} ranks. Use more ranks."
        )
    if fixes:
        console.print(_changes_table(fixes))
    for note in notes(workload, device):
        console.print(f"Note: {note}")
    console.print(_traffic_table(workload, place, device))
    console.print(_work_line(workload, device))
    if workload.run.train.batch_size_schedule:
        console.print(_phases_table(estimate_phases(workload, device)))


def _phases_table(phases: Sequence[PhaseEstimate]) -> Table:
    """Return the batch sizes of the run, with the work of a step."""
    table = _table("from sample", "batch size", "steps", "microbatches", "work", "unequal shares")
    for phase in phases:
        seconds = "" if phase.work_seconds is None else f"{phase.work_seconds:.3g} s"
        counts = (phase.start, phase.size, phase.num_steps, phase.num_microbatches)
        table.add_row(*(f"{count:,}" for count in counts), seconds, phase.idle_ranks)
    return table


def _memory_table(place: PlaceMemory) -> Table:
    table = _table("memory of the worst rank", "GiB", "what it is")
    for field in fields(place.memory):
        nbytes = getattr(place.memory, field.name)
        if nbytes:
            table.add_row(field.name, _gib(nbytes), WHAT[field.name])
    flight = "one pass" if place.in_flight == 1 else f"{place.in_flight} passes"
    table.add_row("total", _gib(place.memory.total), f"{flight} in flight, at {place.moment}")
    return table


WHAT = {
    "weights": "in the compute dtype",
    "gradients": "gradient buffers",
    "master": "fp32 master weights",
    "moments": "optimizer moments",
    "ema": "moving average of the weights",
    "activations": "saved by the layers for backward",
    "loss": "saved by the output head for backward",
    "working": "temporary buffers of the current layer and of reductions",
    "messages": "sent between pipeline stages",
    "library": "CUDA context, communicators, workspaces",
    "slack": "fragmentation of the allocator",
}


def _places_table(ledger: Sequence[PlaceMemory]) -> Table:
    """Totals of every rank position, or of the first, the worst and the last."""
    table = _table(
        "pp rank", "tp rank", "state GiB", "activations GiB", "in flight", "total GiB", ""
    )
    most = worst(ledger)
    shown = ledger if len(ledger) <= 2 * SHOWN else [*ledger[:SHOWN], ledger[-1]]
    for one in shown if most in shown else [*shown[:-1], most, shown[-1]]:
        m = one.memory
        table.add_row(
            str(one.pp_rank),
            str(one.tp_rank),
            _gib(m.state),
            _gib(m.activations),
            str(one.in_flight),
            _gib(m.total),
            "worst" if one is most else "",
        )
    if len(shown) < len(ledger):
        table.caption = f"{len(ledger) - len(shown)} others need no more than the worst"
    return table


def _verdict_line(workload: Workload, device: Device, place: PlaceMemory) -> str:
    total, answer = place.memory.total, verdict(place.memory.total, device)
    where = (
        f"rank {workload.rank_at(place.pp_rank, place.tp_rank)} (pp {place.pp_rank}, tp "
        f"{place.tp_rank})"
    )
    if device.memory is None:
        return f"{_gib(total)} GiB on {where}."
    held = f"{_gib(total)} of {_gib(device.memory)} GiB on {where}"
    if answer == "tight":
        return f"Tight: {held}, more than the {100 * USABLE:.0f} % that are safe to use."
    return f"{'Fits' if answer == 'fits' else 'Does not fit'}: {held}."


def _changes_table(fixes: Sequence[Change]) -> Table:
    table = _table("single change", "GiB", "saves", "price", "")
    for one in fixes:
        fits = one.verdict if one.verdict in ("fits", "tight") else ""
        table.add_row(_spelled(one.overrides), _gib(one.nbytes), _gib(one.saved), one.price, fits)
    return table


def _traffic_table(workload: Workload, place: PlaceMemory, device: Device) -> Table:
    table = _table(
        "axis", "sent by that rank in a step", "bytes", "link", "ms", "ms left", "can overlap with"
    )
    for row, transfer in list_transfers(workload, place, device):
        times = (
            ("", "", "")
            if transfer is None
            else ("near" if transfer.near else "far", _ms(transfer.seconds), _ms(transfer.exposed))
        )
        table.add_row(row.axis, row.what, _bytes(row.nbytes), *times, row.behind or "nothing")
    if not table.row_count:
        table.add_row("", "nothing: no communication", *[""] * 5)
    return table


def list_transfers(
    workload: Workload, place: PlaceMemory, device: Device
) -> list[tuple[Traffic, CommunicationTime | None]]:
    """Return what that rank sends in a step and how long it takes; None if the time is unknown."""
    pp, tp = place.pp_rank, place.tp_rank
    rows = step_traffic(workload, pp, tp)
    return [
        (row, communication_time(workload, row, pp_rank=pp, tp_rank=tp, device=device))
        for row in rows
    ]


def _work_line(workload: Workload, device: Device) -> str:
    seconds, again = work_seconds(workload, device), repeated_share(workload)
    work = f"A rank computes {rank_flops(workload) / 1e12:,.1f} TFLOP a step"
    work += f", and recomputes {100 * again:.1f} % of that" if again else ""
    if seconds is None:
        return work + "."
    return (
        f"{work}: {seconds:.2f} s at {100 * EFFICIENCY:.0f} % of {device.name}'s peak, without the "
        f"bubble. Use these times to compare axes, not as predictions."
    )


# --- both


def _console() -> Console:
    """Return a console without markup, since settings such as `[mlp]` are text."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        words = column in (
            "they",
            "which ranks",
            "what it is",
            "price",
            "can overlap with",
            "link",
            "layers",
            "unequal shares",
            "",
        )
        first = column == columns[0] or column.startswith("sent by")
        table.add_column(column, justify="left" if words or first else "right", overflow="fold")
    return table


def _spelled(overrides: dict[str, str]) -> str:
    return " ".join(f"--{name} {quote(value)}" for name, value in overrides.items())


def _gib(nbytes: int) -> str:
    gib = nbytes / GIB
    return f"{gib:.1f}" if gib >= 10 else f"{gib:.2f}" if gib >= 0.1 else f"{gib:.2g}"


def _bytes(nbytes: int) -> str:
    for unit, name in ((1024 * GIB, "TiB"), (GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.{1 if nbytes < 100 * unit else 0}f} {name}"
    return f"{nbytes} B"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.{0 if seconds >= 0.01 else 1 if seconds >= 1e-4 else 3}f}"


def _count(count: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= 0.99995 * unit:  # rounds to 1 at four digits
            return f"{count / unit:.4g}{name}"
    return str(count)


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

    timeline: Path | None = None
    """Write the timeline of a simulated pipeline step to this file: text (.txt), an image (.png), a
    page (.html) or a trace for chrome://tracing (.json)."""

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
    from megalith.rules.run import check_run

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
    if command.timeline is not None:
        from megalith.observe.timeline import draw_timeline

        schedule = with_transfers(workload.schedule)
        draw_timeline(simulate(schedule, even_costs(schedule.num_stages)), command.timeline)
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
    from megalith.rules.run import run_problems

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
        "batch_sizes": [asdict(phase) for phase in estimate_phases(workload, device)],
    }


def _place_json(place: PlaceMemory) -> dict[str, Any]:  # Any: JSON
    return asdict(place) | {"total": place.memory.total}
