"""Exposed communication: how much of a step's communication is not overlapped with computation."""

import time
from collections import defaultdict
from dataclasses import dataclass

import torch

from megalith.config.data import DataConfig
from megalith.config.train import TrainRun
from megalith.data.build import build_datasets
from megalith.data.loader import BatchSettings, Loader, MaskSettings
from megalith.data.sample import SampleSettings
from megalith.observe.flight import axes_name
from megalith.parallel.context import local_slicing
from megalith.parallel.group import barrier, gather_objects
from megalith.parallel.mesh import Mesh
from megalith.plan.batch_schedule import build_batch_schedule
from megalith.plan.shards import DENSE_AXES
from megalith.testing.inject import SlowLink, slow_link
from megalith.train.step import Trainer, train_step
from megalith.train.trainer import build_trainer


@dataclass(frozen=True, slots=True)
class MeasuredTraffic:
    """One kind of communication over one group of ranks: means over ranks and steps."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, isend, irecv."""

    over: str
    """Axes of the group, such as `dp` or `dp_cp`."""

    per_step: float
    """Number of operations per step."""

    megabytes: float
    """Megabytes that a rank sends per step."""

    seconds: float
    """Sum of the durations from start to result, including waiting for slower ranks."""

    exposed: float
    """Seconds of `seconds` in which the rank waited instead of computing."""

    @property
    def hidden(self) -> float:
        """Share of the communication time that overlapped with computation."""
        return max(0.0, 1 - self.exposed / self.seconds) if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class ExposedCommunication:
    """Communication time of a step, total and exposed."""

    step_seconds: float
    """Mean over ranks and steps."""

    traffic: tuple[MeasuredTraffic, ...]

    @property
    def exposed(self) -> float:
        """Exposed communication time of a step, in seconds."""
        return sum(each.exposed for each in self.traffic)


def measure_exposed_communication(
    run: TrainRun, mesh: Mesh, trainer: Trainer, *, steps: int, link: SlowLink
) -> ExposedCommunication:
    """Train `steps` steps on mock data and measure the transfers over `link`, which must be active.

    Collective.
    """
    loader = _loader(run, mesh, trainer, steps + 1)
    _step(trainer, loader)  # the first step builds caches
    num_warmup_transfers = len(link.transfers)
    barrier(mesh.world)
    started = time.perf_counter()
    for _ in range(steps):
        _step(trainer, loader)
    trainer.data.wait_params()
    seconds = (time.perf_counter() - started) / steps
    return _mean_over_ranks(
        gather_objects((seconds, _traffic_per_step(link, num_warmup_transfers, steps)), mesh.world)
    )


def summarize_exposed_communication(
    run: TrainRun, mesh: Mesh, device: torch.device, *, steps: int, latency: float, bandwidth: float
) -> ExposedCommunication:
    """Build this rank's trainer and measure it over a link with added `latency` (s) and limited
    `bandwidth`.

    Collective. On CPUs, where the cores that compute also copy gloo's messages, the slow link
    imitates a network: its time passes on a sleeping thread. On GPUs each wait is a wait of the
    host, so the result is an upper bound.
    """
    trainer = build_trainer(run, mesh, device)
    with slow_link(latency_seconds=latency, bytes_per_second=bandwidth) as link:
        return measure_exposed_communication(run, mesh, trainer, steps=steps, link=link)


def _step(trainer: Trainer, loader: Loader) -> None:
    train_step(trainer, loader.next(), lr=trainer.run.schedule.lr, weight_decay=0.0)


def _loader(run: TrainRun, mesh: Mesh, trainer: Trainer, steps: int) -> Loader:
    train = run.train
    eod = run.model.vocab_size - 1
    data = DataConfig(mock=True, mock_num_documents=1000, overlong="truncate")
    splits = build_datasets(
        data,
        SampleSettings.of_run(run, eod=eod),
        train_samples=build_batch_schedule(train).count_samples(steps),
    )
    assert splits.train is not None
    return Loader(
        splits.train,
        BatchSettings.of_run(run, MaskSettings(eod=eod)),
        mesh.dp,
        consumed=0,
        steps=steps,
        device=trainer.device,
        slicing=local_slicing(run.parallel, mesh),
        world_group=mesh.world,
    )


def _traffic_per_step(
    link: SlowLink, num_skipped: int, steps: int
) -> dict[tuple[str, str], list[float]]:
    """Return count, bytes, seconds and exposed seconds of a step by (kind, axes)."""
    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * 4)
    for transfer in link.transfers[num_skipped:]:
        row = rows[transfer.kind, _group_axes(transfer.group)]
        arrived = transfer.arrived or transfer.started + transfer.exposed_seconds
        for column, value in enumerate(
            (1, transfer.nbytes, arrived - transfer.started, transfer.exposed_seconds)
        ):
            row[column] += value / steps
    return dict(rows)


def _group_axes(description: str) -> str:
    """Return the axes of a group from the description of its process group."""
    axes = [
        axis for axis in ("pp", *DENSE_AXES) if f"_{axis}_" in f"_{description.replace('-', '_')}_"
    ]
    return axes_name(axes) if axes else description


def _mean_over_ranks(reports: list[object]) -> ExposedCommunication:
    """Return means over ranks; a rank without a kind of communication counts as zero."""
    seconds = 0.0
    total: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * 4)
    for report in reports:
        assert isinstance(report, tuple)
        seconds += report[0] / len(reports)
        for key, row in report[1].items():
            total[key] = [a + b / len(reports) for a, b in zip(total[key], row, strict=True)]
    traffic = [
        MeasuredTraffic(kind, over, count, nbytes / 1e6, spent, exposed)
        for (kind, over), (count, nbytes, spent, exposed) in total.items()
    ]
    return ExposedCommunication(seconds, tuple(sorted(traffic, key=lambda each: -each.seconds)))
