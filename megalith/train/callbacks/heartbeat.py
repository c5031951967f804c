"""Heartbeat of a rank during training: progress within steps, and the learned timeouts in the run
folder."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from megalith.checkpoint.save import SaveReport
from megalith.config.train import TrainRun
from megalith.data.loader import StepBatches
from megalith.launch.heartbeat import RankHeartbeat, merge_times, read_times, write_times
from megalith.parallel.grad_sync import ShardedParam
from megalith.parallel.group import gather_objects
from megalith.parallel.mesh import Mesh
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics
from megalith.train.run_folder import RunFolder


@contextmanager
def start_heartbeat(
    heartbeat: RankHeartbeat, run: TrainRun, folder: RunFolder, mesh: Mesh
) -> Iterator[None]:
    """Set the timeouts of all sections, those of earlier starts included, and begin the section
    `start`, which ends with the first step. After an error this rank is not monitored any more: it
    ends, or waits for a restart."""
    heartbeat.set_timeouts(
        run.parallel.timeout_seconds,
        fixed_seconds=run.parallel.heartbeat_timeout_seconds,
        times=read_times(folder.heartbeats, mesh.world.size),
    )
    heartbeat.record("start")
    try:
        yield
    except BaseException:
        heartbeat.stop()
        raise


class HeartbeatWriter(Callback):
    """Writes this rank's heartbeat in every step, and after saves the times from which timeouts are
    learned."""

    collective = True

    def on_start(self, run: RunView) -> None:
        """Receive the run."""
        self._run, self._heartbeat = run, run.prepared.heartbeat
        self._heartbeat.record()

    def before_step(self, step: int, batches: StepBatches) -> None:
        """Record that the data was read."""
        self._heartbeat.record()

    def after_microbatch(self, index: int) -> None:
        """Record that a microbatch was computed."""
        self._heartbeat.record()

    def after_backward(self, local_params: Sequence[ShardedParam]) -> None:
        """Record that the gradients are summed."""
        self._heartbeat.record()

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Record that the step is finished. The first one, which may compile, belongs to the
        start."""
        self._heartbeat.record("step")

    def after_save(self, report: SaveReport) -> None:
        """Write the learned times."""
        self._write_times()

    def on_end(self, outcome: Outcome) -> None:
        """Write the learned times, and begin the section `exit`."""
        self._write_times()
        self._heartbeat.record("exit")

    def _write_times(self) -> None:
        """Write the longest times of all ranks to the run folder. Collective."""
        if not self._heartbeat.is_monitored:
            return
        world = self._run.mesh.world
        gathered = gather_objects(self._heartbeat.times, world)
        times = merge_times(each for each in gathered if isinstance(each, dict))
        if self._run.is_writer:
            with suppress(OSError):  # they are learned again
                write_times(self._run.folder.heartbeats, world.size, times)
