"""Estimate the time of a step: computation at a typical fraction of the peak rate, communication at
link rate.

Shows which parallel axis costs how much and what can be overlapped; it does not predict a step
time.
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
class CommunicationTime:
    """Time of one kind of communication in a step, and the computation time that can overlap it."""

    near: bool
    """Whether all ranks of its group are in one node."""

    seconds: float
    room: float
    """Seconds of computation that can overlap it; 0 if the next operation needs the result."""

    @property
    def exposed(self) -> float:
        """Exposed communication time in seconds, at best."""
        return max(0.0, self.seconds - self.room)


def rank_flops(workload: Workload) -> float:
    """Return the model FLOPs of one rank in a step, averaged over stages, without recomputation."""
    run, t = workload.run, workload.run.train
    row = trained_step_flops(
        run.model, run.lora, run.optim, tokens=t.seq_len, squared_lengths=t.seq_len**2
    )
    return t.global_batch_size * row / workload.world


def work_seconds(workload: Workload, device: Device) -> float | None:
    """Return the computation time of a step, with recomputation, without bubble and communication;
    None if the device's rate is not known."""
    if device.tflops is None:
        return None
    return (
        rank_flops(workload) * (1 + repeated_share(workload)) / (device.tflops * 1e12 * EFFICIENCY)
    )


def communication_time(
    workload: Workload, row: Traffic, *, pp_rank: int, tp_rank: int, device: Device
) -> CommunicationTime | None:
    """Return the time of this communication; None if the device's bandwidths or rate are not
    known."""
    work = work_seconds(workload, device)
    if work is None or device.near_gbs == 0:
        return None
    rank = workload.rank_at(pp_rank, tp_rank)
    span = ("dp", "cp") if row.axis == "dp" else tuple(row.axis.split("_"))
    ranks = workload.grid.group_of(rank, span)
    near = len({one // device.node for one in ranks}) == 1
    rate = (device.near_gbs if near else device.far_gbs) * 1e9 * LINK_EFFICIENCY
    return CommunicationTime(near, row.nbytes / rate, _overlap_share(workload, row) * work)


def _overlap_share(workload: Workload, row: Traffic) -> float:
    """Return the fraction of a step's computation that can overlap this communication; backward is
    two thirds."""
    num_microbatches = workload.num_microbatches
    shares = {
        "": 0.0,
        "last backward": 2 / 3 / num_microbatches,
        "backward": 2 / 3,
        "next forward": 1 / 3 / num_microbatches,
        "other microbatches": 1.0,
        "the other of a pair": _paired_share(workload),
        "the layer before": 1.0,
        "attention": attention_share(workload),
        "matmuls": (layer_share(workload.run) - attention_share(workload))
        / 3,  # of inputs' or of weights' gradients
    }
    return shares[row.behind]


def _paired_share(workload: Workload) -> float:
    """Return the fraction of computation that runs in pairs, on the rank with the fewest."""
    schedule = workload.schedule
    return min(map(len, schedule.pairs), default=0) / (
        schedule.num_chunks * schedule.num_microbatches
    )


def attention_share(workload: Workload) -> float:
    """Return core attention's share of the FLOPs of a step."""
    c, length = workload.run.model, workload.run.train.seq_len
    whole = step_flops(c, tokens=length, squared_lengths=length**2)
    return 1 - step_flops(c, tokens=length, squared_lengths=0, windowed=0) / whole


def layer_share(run: TrainRun) -> float:
    """Return the layers' share of the FLOPs of a step; the head has the rest."""
    c, length = run.model, run.train.seq_len
    whole = step_flops(c, tokens=length, squared_lengths=length**2)
    return 1 - (1 + c.mtp.num_layers) * head_flops(c, length) / whole


def repeated_share(workload: Workload) -> float:
    """Return the recomputed FLOPs as a fraction of the model FLOPs."""
    run, length = workload.run, workload.run.train.seq_len
    useful = trained_step_flops(
        run.model, run.lora, run.optim, tokens=length, squared_lengths=length**2
    )
    return repeated_flops(run, workload.stages, tokens=length, squared_lengths=length**2) / useful
