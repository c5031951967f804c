"""Profiles of a run: torch's profiler and NVTX ranges; garbage collection, parameter norms, and the
list of all callbacks that measure."""

import gc
import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megalith import storage
from megalith.config.train import TrainRun
from megalith.data.loader import StepBatches
from megalith.errors import ConfigError
from megalith.optim.clip import sum_of_squares
from megalith.parallel.group import all_reduce_
from megalith.plan.shards import is_first_replica
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics
from megalith.train.callbacks.dump import TensorDump
from megalith.train.callbacks.energy import EnergyMeter
from megalith.train.callbacks.memory import MemoryReport
from megalith.train.suites import SuiteResults

_log = logging.getLogger(__name__)

NUM_LISTED_OPERATIONS = 10

MAX_LISTED_NBYTES = 256 * 2**20
"""Largest trace whose operations are listed: reading 256 MiB takes a thread about 10 s (measured:
28 MiB/s, 2-core Xeon), which shares the interpreter with the steps."""


class SectionRanges:
    """Annotates sections in a profile: as ranges of torch's profiler, or as NVTX ranges."""

    def __init__(self, *, nvtx: bool) -> None:
        self._nvtx, self._local = nvtx, threading.local()  # dual-batch overlap runs two threads

    def push(self, name: str) -> None:
        """Start a range."""
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)
            return
        if not hasattr(self._local, "open"):
            self._local.open = []
        section: AbstractContextManager[object] = torch.profiler.record_function(name)
        section.__enter__()
        self._local.open.append(section)

    def pop(self) -> None:
        """End the innermost range of this thread."""
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
            return
        if getattr(self._local, "open", None):  # empty if the section began before the profile
            self._local.open.pop().__exit__(None, None, None)


class LayerRanges:
    """NVTX ranges around the forward of every layer, by global module hooks."""

    def __init__(self, chunks: nn.ModuleList) -> None:
        self._names = {
            id(module): name.partition(".")[2]
            for name, module in chunks.named_modules()
            if name.rpartition(".")[0].endswith(".layers")
        }
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Annotate the layers."""
        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._push),
            hooks.register_module_forward_hook(self._pop, always_call=True),
        ]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _push(self, module: nn.Module, inputs: object) -> None:
        if id(module) in self._names:
            torch.cuda.nvtx.range_push(self._names[id(module)])

    def _pop(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if id(module) in self._names:
            torch.cuda.nvtx.range_pop()


@dataclass(frozen=True, slots=True)
class ProfileWindow:
    """Steps of a profile, and the folder of its traces."""

    first: int
    """First step in which the profiler runs, to warm up."""
    start: int
    """First recorded step."""
    last: int
    folder: Path


class Profiler(Callback):
    """Profiles a window of steps on some ranks: that of profile.start, and requested ones."""

    def __init__(self) -> None:
        self._profiler: Any = None  # Any: torch.profiler.profile has no types for its arguments
        self._layers: LayerRanges | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="profile")
        self._written: Future[None] | None = None
        self.window: ProfileWindow | None = None
        """The current, next or last window; None: no profile was set or requested."""
        self._is_finished = False
        """Whether the window is complete; a rollback does not open it again."""

    def on_start(self, run: RunView) -> None:
        """Check that this rank has the device that the tool needs.

        Raises:
            ConfigError: it does not.
        """
        self._run, config = run, run.config.profile
        self._is_profiled = not config.ranks or run.mesh.world.rank in config.ranks
        if config.start is None:
            return
        if (problem := self._find_device_problem()) is not None:
            raise ConfigError(problem)
        warmup = config.warmup if config.tool == "torch" else 0
        self.window = ProfileWindow(
            max(run.step + 1, config.start - warmup),
            config.start,
            config.start + config.steps - 1,
            run.folder.path / "profile",
        )
        self._is_finished = run.step >= config.start
        if self._is_finished and run.is_writer:
            run.log(
                f"profile.start={config.start} is not after step {run.step}, at which this run "
                "starts; no profile is written"
            )

    def _find_device_problem(self) -> str | None:
        if self._run.config.profile.tool == "nsys" and self._run.device.type == "cpu":
            return (
                f"profile.tool={self._run.config.profile.tool} captures GPU work, and the device "
                f"of rank {self._run.mesh.world.rank} is {self._run.device.type}. Set "
                "profile.tool=torch."
            )
        return None

    def find_problem(self) -> str | None:
        """Return why no window can be opened now, or None."""
        window = self.window
        if window is not None and not self._is_finished:
            return (
                f"steps {window.start} to {window.last} are profiled already. Request it again "
                "after them."
            )
        return self._find_device_problem()

    def open_window(self) -> None:
        """Profile the steps that follow, after profile.warmup; called on all ranks in the same
        step. An open window stays as it is."""
        if self.find_problem() is not None:
            return
        config, step = self._run.config.profile, self._run.step
        warmup = config.warmup if config.tool == "torch" else 0
        start = step + 1 + warmup
        folder = self._run.folder.path / "profile" / f"step_{start:07d}"
        self.window = ProfileWindow(step + 1, start, start + config.steps - 1, folder)
        self._is_finished = False

    def list_missing_traces(self) -> list[Path]:
        """Return the traces of the window that the profiled ranks have not written."""
        config = self._run.config.profile
        if self.window is None or config.tool == "nsys":
            return []
        ranks = config.ranks or self._run.mesh.world.ranks
        paths = [_trace_path(self.window.folder, rank) for rank in ranks]
        return [path for path in paths if not path.exists()]

    def before_step(self, step: int, batches: StepBatches) -> None:
        """Start the profiler before the first step of the window."""
        window = self.window
        if window is None or self._is_finished or self._is_open:
            return
        if step != window.first or not self._is_profiled:
            return
        config, trainer = self._run.config.profile, self._run.prepared.trainer
        if config.tool == "nsys":
            torch.cuda.cudart().cudaProfilerStart()
            self._layers = LayerRanges(trainer.pipeline_model.modules)
            self._layers.start()
        else:
            self._profiler = self._build(window.start - step)
            self._profiler.start()
        trainer.timers.ranges = SectionRanges(nvtx=config.tool == "nsys")

    @property
    def _is_open(self) -> bool:
        return self._profiler is not None or self._layers is not None

    def _build(self, warmup: int) -> Any:  # Any: as above
        config, activities = self._run.config.profile, [torch.profiler.ProfilerActivity.CPU]
        if self._run.device.type != "cpu":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        return torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=warmup, active=config.steps, repeat=1),
            record_shapes=config.shapes,
            with_stack=config.stacks,
            profile_memory=config.memory,
        )

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Count a step of the window; write the profile after the last one."""
        window = self.window
        if window is None or self._is_finished:
            return
        is_last = finished.step >= window.last
        try:
            if self._profiler is not None:
                self._wait_for_collectives()
                self._profiler.step()
        except BaseException:  # this callback is not called again
            self._stop_ranges()
            raise
        if is_last:
            self._close()
            self._is_finished = True

    def _wait_for_collectives(self) -> None:
        """Wait for the parameters that are gathered: a collective that ends after the profiler has
        freed its events corrupts the heap (torch 2.13 with gloo)."""
        self._run.prepared.trainer.data.wait_params()

    def _write(self, profiler: Any, folder: Path) -> None:  # Any: as above
        """Write the trace, and log the operations with the longest self time, in a thread."""
        rank = self._run.mesh.world.rank
        path = _trace_path(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.stem}.tmp.json")
        profiler.export_chrome_trace(str(temporary))
        storage.rename(temporary, path)
        kind = "cpu_op" if self._run.device.type == "cpu" else "kernel"
        text = describe_trace(path, kind)
        _log.info("profile of rank %d in %s:\n%s", rank, path, text)

    def after_rollback(self, step: int) -> None:
        """Continue the profiled window: the steps that follow belong to it."""

    def on_error(self, error: BaseException) -> None:
        """Stop the profiler, unless that would wait for other ranks, which may have ended."""
        if self._run.mesh.world.size == 1:
            self._close()
        self._pool.shutdown()

    def on_end(self, outcome: Outcome) -> None:
        """Stop the profiler if the run ends within the window, and wait for the trace."""
        self._close()
        self._pool.shutdown()
        if self._written is not None:
            self._written.result()

    def _close(self) -> None:
        if not self._is_open:
            return
        profiler, layers = self._profiler, self._layers
        self._is_finished = True
        self._stop_ranges()
        if profiler is not None:
            self._wait_for_collectives()
            profiler.stop()
            assert self.window is not None
            self._written = self._pool.submit(self._write, profiler, self.window.folder)
        if layers is not None:
            torch.cuda.cudart().cudaProfilerStop()

    def _stop_ranges(self) -> None:
        """Remove the ranges of sections and layers."""
        self._run.prepared.trainer.timers.ranges = None
        if self._layers is not None:
            self._layers.stop()
        self._profiler = self._layers = None


def describe_trace(path: Path, kind: str) -> str:
    """Return the list of the operations of one kind in a Chrome trace as text, or why there is
    none."""
    if (nbytes := path.stat().st_size) > MAX_LISTED_NBYTES:
        return (
            f"its operations are not listed, because it has {nbytes >> 20} MiB, more than "
            f"{MAX_LISTED_NBYTES >> 20}"
        )
    events = [event for event in read_events(path) if event.get("cat") == kind]
    return "\n".join(list_operations_by_self_time(events))


def read_events(path: Path) -> Iterator[dict[str, Any]]:  # Any: JSON
    """Yield the events of a Chrome trace, each parsed by a call of its own: a single call for all
    events would stop other threads (measured: 4.4 s for 131 MiB)."""
    text, decoder = path.read_text(encoding="utf-8"), json.JSONDecoder()
    start = re.search(r'"traceEvents"\s*:\s*\[\s*', text)
    assert start is not None, f"{path} has no traceEvents"
    position, separator = start.end(), re.compile(r"\s*,?\s*")
    while text[position] != "]":
        event, position = decoder.raw_decode(text, position)
        yield event
        space = separator.match(text, position)
        assert space is not None
        position = space.end()


def list_operations_by_self_time(events: Sequence[Mapping[str, Any]]) -> list[str]:  # Any: JSON
    """Return the operations with the longest self time, which excludes the operations that they
    call, as lines of text.

    `events`: complete events of a Chrome trace. torch's own table takes 13 s for 20,000 events.

    >>> event = {"pid": 1, "tid": 1, "name": "linear", "ts": 0, "dur": 2500}
    >>> list_operations_by_self_time([event, event | {"name": "mm", "ts": 500, "dur": 1500}])
    ['     1.500 ms      1 calls  mm', '     1.000 ms      1 calls  linear']
    """
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    open_events: list[tuple[float, str]] = []  # end and name of the events around the current one
    thread: tuple[object, object] | None = None
    for event in sorted(events, key=lambda e: (str(e["pid"]), str(e["tid"]), e["ts"], -e["dur"])):
        name, start, duration = str(event["name"]), event["ts"], event["dur"]
        if thread != (event["pid"], event["tid"]):
            thread, open_events = (event["pid"], event["tid"]), []
        while open_events and open_events[-1][0] <= start:
            open_events.pop()
        if open_events:
            seconds[open_events[-1][1]] -= duration
        seconds[name] = seconds.get(name, 0.0) + duration
        calls[name] = calls.get(name, 0) + 1
        open_events.append((start + duration, name))
    longest = sorted(seconds, key=lambda name: -seconds[name])[:NUM_LISTED_OPERATIONS]
    return [f"{seconds[name] / 1000:10.3f} ms {calls[name]:6} calls  {name}" for name in longest]


def _trace_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.json"


class GarbageCollector(Callback):
    """Collects garbage on all ranks in the same step, and around evaluations."""

    DEFAULT_INTERVAL = 100  # as Megatron's recommendation for thousands of ranks

    def on_start(self, run: RunView) -> None:
        """Disable automatic collection, and freeze the objects that exist now."""
        interval = run.config.train.gc_interval
        self._interval = self.DEFAULT_INTERVAL if interval is None else interval
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Collect every few steps."""
        if finished.step % self._interval == 0:
            gc.collect()

    def before_evaluate(self, step: int) -> None:
        """Collect before an evaluation."""
        gc.collect()

    def after_evaluate(self, results: SuiteResults, metrics: StepMetrics) -> None:
        """Collect after an evaluation."""
        gc.collect()

    def on_error(self, error: BaseException) -> None:
        """Restore automatic collection."""
        self._restore()

    def on_end(self, outcome: Outcome) -> None:
        """Restore automatic collection."""
        self._restore()

    def _restore(self) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()


class ParamNorm(Callback):
    """Measures the L2 norm of all trained parameters in logged steps (observe.param_norm)."""

    collective = True

    def on_start(self, run: RunView) -> None:
        """Select the parameters of which this rank has the first replica."""
        self._run = run
        coordinates = run.mesh.coordinates
        self._slots = [
            slot
            for slot in run.prepared.trainer.optimizer.slots
            if is_first_replica(slot.shard, coordinates)
        ]

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Add the norm after the update."""
        if self._run.is_logged(finished.step):
            master_weights = [slot.read_master() for slot in self._slots]
            squares = sum_of_squares(master_weights, self._run.device)
            metrics["param_norm"] = all_reduce_(squares, self._run.mesh.world).sqrt().item()


def build_profiling_callbacks(run: TrainRun, world: int, profiler: Profiler) -> list[Callback]:
    """Return the callbacks for the measurements that the settings enable, after `profiler`."""
    observe, interval = run.observe, run.train.gc_interval
    collects = world > 1 if interval is None else interval > 0
    enabled: list[tuple[bool, type[Callback]]] = [
        (True, MemoryReport),
        (observe.energy, EnergyMeter),
        (collects, GarbageCollector),
        (observe.dump.every is not None, TensorDump),
        (observe.param_norm, ParamNorm),
    ]
    return [profiler, *(cls() for is_enabled, cls in enabled if is_enabled)]
