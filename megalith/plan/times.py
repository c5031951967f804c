"""Rough times of a step: its work at a usual part of the peak rate, its messages at the rate of the
links they take.

Good for telling which axis costs what and what can hide it, not for predicting a step.
"""

from dataclasses import dataclass

from megalith.config.train import TrainRun
from megalith.plan.adapters import trained_step_flops
from megalith.plan.costs import head_flops, step_flops
from megalith.plan.devices import EFFICIENCY, LINK_EFFICIENCY, Device
from megalith.plan.repeated import repeated_flops
from megalith.plan.traffic import Traffic
from megalith.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Passage:
    """How long one sort of traffic is on its way in a step, and how long what it can hide behind
    takes."""

    near: bool
    """All ranks of its group are in one node."""

    seconds: float
    room: float
    """Seconds of work that can go on meanwhile; 0 where the next thing to do needs the result."""

    @property
    def exposed(self) -> float:
        """What is left of it at best."""
        return max(0.0, self.seconds - self.room)


def rank_flops(workload: Workload) -> float:
    """Useful floating-point operations of one rank in a step, on average over stages; recomputation
    does not count."""
    run, t = workload.run, workload.run.train
    row = trained_step_flops(
        run.model, run.lora, run.optim, tokens=t.seq_len, squared_lengths=t.seq_len**2
    )
    return t.global_batch_size * row / workload.world


def work_seconds(workload: Workload, device: Device) -> float | None:
    """Computing of one step, recomputation too, without bubble and messages; None where the rate is
    not known."""
    if device.tflops is None:
        return None
    return (
        rank_flops(workload) * (1 + repeated_share(workload)) / (device.tflops * 1e12 * EFFICIENCY)
    )


def passage(
    workload: Workload, row: Traffic, *, pp_rank: int, tp_rank: int, device: Device
) -> Passage | None:
    """How long this traffic takes; None where the device's links or rate are not known."""
    work = work_seconds(workload, device)
    if work is None or device.near_gbs == 0:
        return None
    rank = workload.rank_at(pp_rank, tp_rank)
    span = ("dp", "cp") if row.axis == "dp" else tuple(row.axis.split("_"))
    ranks = workload.grid.group_of(rank, span)
    near = len({one // device.node for one in ranks}) == 1
    rate = (device.near_gbs if near else device.far_gbs) * 1e9 * LINK_EFFICIENCY
    return Passage(near, row.nbytes / rate, _share(workload, row) * work)


def _share(workload: Workload, row: Traffic) -> float:
    """The part of a step's computing that a sort of traffic can hide behind; backward is two thirds
    of it."""
    many = workload.num_microbatches
    shares = {
        "": 0.0,
        "last backward": 2 / 3 / many,
        "backward": 2 / 3,
        "next forward": 1 / 3 / many,
        "other microbatches": 1.0,
        "the other of a pair": _paired(workload),
        "the layer before": 1.0,
        "attention": attention_share(workload),
        "matmuls": (layer_share(workload.run) - attention_share(workload))
        / 3,  # of inputs' or of weights' gradients
    }
    return shares[row.behind]


def _paired(workload: Workload) -> float:
    """The part of a step's computing that is done in pairs, on the rank that has the fewest."""
    schedule = workload.schedule
    return min(map(len, schedule.pairs), default=0) / (
        schedule.num_chunks * schedule.num_microbatches
    )


def attention_share(workload: Workload) -> float:
    """The part of a step's work that attention's scores and their products with values are."""
    c, length = workload.run.model, workload.run.train.seq_len
    whole = step_flops(c, tokens=length, squared_lengths=length**2)
    return 1 - step_flops(c, tokens=length, squared_lengths=0, windowed=0) / whole


def layer_share(run: TrainRun) -> float:
    """The layers' part of a step's work; the head has the rest."""
    c, length = run.model, run.train.seq_len
    whole = step_flops(c, tokens=length, squared_lengths=length**2)
    return 1 - (1 + c.mtp.num_layers) * head_flops(c, length) / whole


def repeated_share(workload: Workload) -> float:
    """What recomputation adds, as a part of the useful work; a second forward costs the same
    whatever is trained."""
    run, length = workload.run, workload.run.train.seq_len
    useful = trained_step_flops(
        run.model, run.lora, run.optim, tokens=length, squared_lengths=length**2
    )
    return repeated_flops(run, workload.stages, tokens=length, squared_lengths=length**2) / useful
