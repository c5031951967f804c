"""Profiles of a run: torch's profiler and NVTX ranges, garbage collection, energy, parameter norms,
dumps of tensors."""

import gc
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megalith.checkpoint.safetensors import PlannedTensor, write_file
from megalith.config.observe import ProfileConfig
from megalith.config.train import TrainRun
from megalith.data.loader import StepBatches
from megalith.errors import ConfigError
from megalith.observe.energy import EnergyCounter, open_nvml_counter, open_rapl_counter
from megalith.optim.optimizers import sum_of_squares
from megalith.parallel.grad_sync import ShardedParam
from megalith.parallel.group import all_reduce_, gather_objects
from megalith.plan.shards import is_first_replica
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics
from megalith.train.callbacks.memory import MemoryHistory, MemoryReport
from megalith.train.suites import SuiteResults

_log = logging.getLogger(__name__)

NUM_LISTED_OPERATIONS = 10


class SectionMarker:
    """Marks sections in a profile: as ranges of torch's profiler, or as NVTX ranges."""

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
        """Mark layers from now on."""
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


class Profiler(Callback):
    """Profiles a window of steps on some ranks (profile.start)."""

    def __init__(self) -> None:
        self._profiler: Any = None  # Any: torch.profiler.profile has no types for its arguments
        self._layers: LayerRanges | None = None

    def on_start(self, run: RunView) -> None:
        """Check that this rank has the device that the tool needs.

        Raises:
            ConfigError: it does not.
        """
        self._run, config = run, run.config.profile
        if config.tool == "nsys" and run.device.type == "cpu":
            raise ConfigError(
                f"profile.tool={config.tool} captures GPU work, and the device of rank "
                f"{run.mesh.world.rank} is {run.device.type}. Set profile.tool=torch."
            )
        self._is_profiled = not config.ranks or run.mesh.world.rank in config.ranks
        self._first = max(1, _start(config) - (config.warmup if config.tool == "torch" else 0))
        if run.step >= self._first and run.is_writer:
            run.log(f"nothing is profiled: step {self._first} is before this start of the run")

    def before_step(self, step: int, batches: StepBatches) -> None:
        """Start the profiler before the first step of the window."""
        if not self._is_profiled or step != self._first or self._is_open:
            return
        config, trainer = self._run.config.profile, self._run.prepared.trainer
        if config.tool == "nsys":
            torch.cuda.cudart().cudaProfilerStart()
            self._layers = LayerRanges(trainer.pipeline_model.modules)
            self._layers.start()
        else:
            self._profiler = self._build(_start(config) - step)
            self._profiler.start()
        trainer.timers.marker = SectionMarker(nvtx=config.tool == "nsys")

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
            on_trace_ready=self._write,
            record_shapes=config.shapes,
            with_stack=config.stacks,
            profile_memory=config.memory,
        )

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Count a step of the window; write the profile after the last one."""
        config = self._run.config.profile
        is_last = self._is_open and finished.step >= _start(config) + config.steps - 1
        try:
            if self._profiler is not None:
                self._wait_for_collectives()
                self._profiler.step()
        except BaseException:  # this callback is not called again
            self._stop_marking()
            raise
        if is_last:
            self._close()

    def _wait_for_collectives(self) -> None:
        """Wait for the parameters that are gathered: a collective that ends after the profiler has
        freed its events corrupts the heap (torch 2.13 with gloo)."""
        self._run.prepared.trainer.data.wait_params()

    def _write(self, profiler: Any) -> None:  # Any: as above
        rank = self._run.mesh.world.rank
        path = self._run.folder.path / "profile" / f"rank_{rank:05d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        kind = "cpu_op" if self._run.device.type == "cpu" else "kernel"
        events = json.loads(path.read_bytes())["traceEvents"]
        lines = describe_longest_operations([e for e in events if e.get("cat") == kind])
        _log.info("profile of rank %d in %s:\n%s", rank, path, "\n".join(lines))

    def after_rollback(self, step: int) -> None:
        """Keep the window open: the steps that follow belong to it."""

    def on_error(self, error: BaseException) -> None:
        """Stop the profiler, unless that would wait for other ranks, which may have ended."""
        if self._run.mesh.world.size == 1:
            self._close()

    def on_end(self, outcome: Outcome) -> None:
        """Stop the profiler if the run ends within the window."""
        self._close()

    def _close(self) -> None:
        if not self._is_open:
            return
        profiler, layers = self._profiler, self._layers
        self._stop_marking()
        if profiler is not None:
            self._wait_for_collectives()
            profiler.stop()
        if layers is not None:
            torch.cuda.cudart().cudaProfilerStop()

    def _stop_marking(self) -> None:
        """Remove the section marker and the ranges of layers."""
        self._run.prepared.trainer.timers.marker = None
        if self._layers is not None:
            self._layers.stop()
        self._profiler = self._layers = None


def describe_longest_operations(events: Sequence[Mapping[str, Any]]) -> list[str]:  # Any: JSON
    """Return the operations with the longest self time, which excludes the operations that they
    call, as lines of text.

    `events`: complete events of a Chrome trace. torch's own table takes 13 s for 20,000 events, and
    the trace is read in a tenth of a second.

    >>> event = {"pid": 1, "tid": 1, "name": "linear", "ts": 0, "dur": 2500}
    >>> describe_longest_operations([event, event | {"name": "mm", "ts": 500, "dur": 1500}])
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


def _start(config: ProfileConfig) -> int:
    """Return profile.start, which is set."""
    assert config.start is not None
    return config.start


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


class EnergyMeter(Callback):
    """Measures the energy of all devices (observe.energy)."""

    collective = True

    def __init__(self) -> None:
        self._counter: EnergyCounter | None = None
        self._is_measured = False

    def on_start(self, run: RunView) -> None:
        """Open the counters; nothing is measured unless all ranks have one."""
        self._run = run
        world, is_gpu = run.mesh.world, run.device.type != "cpu"
        # CPU counters are of the whole machine, so its first rank reads them
        hosts = gather_objects(socket.gethostname(), world)
        reads = is_gpu or hosts.index(hosts[world.rank]) == world.rank
        counter = None
        if reads:
            counter = open_nvml_counter(run.device) if is_gpu else open_rapl_counter()
        missing = [
            str(rank)
            for rank, has_counter in zip(
                world.ranks,
                gather_objects(counter is not None or not reads, world),
                strict=True,
            )
            if not has_counter
        ]
        if missing:
            run.log(
                "observe.energy=true: energy is not logged, because there is no readable counter "
                f"on rank {', '.join(missing[:5])}. GPUs need nvidia-ml-py, CPUs a readable "
                "/sys/class/powercap."
            )
            return
        self._is_measured, self._counter = True, counter
        self._reset(time.perf_counter(), self._read())

    def _reset(self, since: float, before: float) -> None:
        self._num_steps = self._num_tokens = 0
        self._since, self._before = since, before

    def _read(self) -> float:
        return 0.0 if self._counter is None else self._counter()

    def after_rollback(self, step: int) -> None:
        """Do not count discarded steps."""
        if self._is_measured:
            self._reset(time.perf_counter(), self._read())

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Add the energy since the last logged step, including callbacks and evaluations; stop on
        all ranks if a counter cannot be read."""
        if not self._is_measured:
            return
        self._num_steps += 1
        self._num_tokens += finished.batches.num_tokens
        now = self._read()  # in every step, because CPU counters wrap around
        if not self._run.is_logged(finished.step):
            return
        ended = time.perf_counter()  # the wait for other ranks belongs to the next interval
        used = torch.tensor([now - self._before], dtype=torch.float64)
        joules = all_reduce_(used.to(self._run.device), self._run.mesh.world).item()
        if math.isnan(joules):
            self._is_measured = False
            self._run.log(
                f"step {finished.step}: energy is no longer logged, because a counter could not "
                "be read"
            )
            return
        metrics |= {
            "energy_joules": round(joules / self._num_steps, 3),
            "energy_joules_per_token": joules / max(1, self._num_tokens),
            "power_watts": round(joules / (ended - self._since), 3),
        }
        self._reset(ended, now)


class ParamNorm(Callback):
    """Measures the L2 norm of all trained parameters in logged steps (observe.param_norm)."""

    collective = True

    def on_start(self, run: RunView) -> None:
        """Select the parameters of which this rank has the first replica."""
        self._run = run
        coordinates = run.mesh.coordinates
        self._master_weights = [
            slot.master
            for slot in run.prepared.trainer.optimizer.slots
            if is_first_replica(slot.shard, coordinates)
        ]

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Add the norm after the update."""
        if self._run.is_logged(finished.step):
            squares = sum_of_squares(self._master_weights, self._run.device)
            metrics["param_norm"] = all_reduce_(squares, self._run.mesh.world).sqrt().item()


class TensorDump(Callback):
    """Dumps this rank's shards of weights and gradients every few steps (observe.dump)."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._boxes: dict[str, str] = {}
        self._written: Future[None] | None = None

    def on_start(self, run: RunView) -> None:
        """Start the thread that writes."""
        self._run, self._config = run, run.config.observe.dump
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dump")

    def _is_due(self, step: int) -> bool:
        assert self._config.every is not None
        return step % self._config.every == 0

    def after_backward(self, local_params: Sequence[ShardedParam]) -> None:
        """Copy the gradients without the loss scale; a rerun replaces them."""
        if self._config.gradients and self._is_due(self._run.step + 1):
            loss_scale = self._run.prepared.trainer.loss_scale
            scale = 1.0 if loss_scale is None else loss_scale.scale
            self._copy("grad", {param: param.gradient for param in self._select()}, scale)

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Copy the weights, and write the file from a thread."""
        if not self._is_due(finished.step):
            return
        if self._config.weights:
            self._copy("param", {param: param.weight for param in self._select()})
        if self._written is not None:
            self._written.result()  # an error of the last dump ends this callback
        tensors, boxes = self._tensors, self._boxes
        self._tensors, self._boxes = {}, {}
        self._written = self._pool.submit(self._write, finished.step, tensors, boxes)

    def _select(self) -> list[ShardedParam]:
        only = self._config.only or ("*",)
        return [
            param
            for param in self._run.local_params
            if any(fnmatchcase(param.shard.name, pattern) for pattern in only)
        ]

    def _copy(self, role: str, tensors: Mapping[ShardedParam, Tensor], scale: float = 1.0) -> None:
        """Copy tensors to the host, divided by `scale`."""
        for param, tensor in tensors.items():
            name = f"{param.shard.name}/{role}"
            copy = tensor.detach().to("cpu", copy=True).contiguous()
            self._tensors[name] = copy if scale == 1.0 else copy.div_(scale)
            self._boxes[name] = f"box {param.shard.box} elements {param.shard.flat or 'all'}"

    def _write(self, step: int, tensors: dict[str, Tensor], boxes: dict[str, str]) -> None:
        rank = self._run.mesh.world.rank
        folder = self._run.folder.path / "dumps" / f"step_{step:07d}"
        folder.mkdir(parents=True, exist_ok=True)
        plan = [PlannedTensor(name, x.dtype, tuple(x.shape)) for name, x in tensors.items()]
        write_file(folder / f"rank_{rank:05d}.safetensors", plan, tensors.values(), boxes)

    def after_rollback(self, step: int) -> None:
        """Forget the gradients of a discarded step."""
        self._tensors.clear()
        self._boxes.clear()

    def on_error(self, error: BaseException) -> None:
        """Wait for the last dump."""
        self._pool.shutdown()

    def on_end(self, outcome: Outcome) -> None:
        """Wait for the last dump."""
        self._pool.shutdown()
        if self._written is not None:
            self._written.result()


def build_profiling_callbacks(run: TrainRun, world: int) -> list[Callback]:
    """Return the callbacks for the measurements that the settings ask for."""
    observe, interval = run.observe, run.train.gc_interval
    collects = world > 1 if interval is None else interval > 0
    wanted: list[tuple[bool, type[Callback]]] = [
        (run.profile.start is not None, Profiler),
        (observe.memory_every is not None, MemoryReport),
        (observe.memory_history, MemoryHistory),
        (observe.energy, EnergyMeter),
        (collects, GarbageCollector),
        (observe.dump.every is not None, TensorDump),
        (observe.param_norm, ParamNorm),
    ]
    return [cls() for is_wanted, cls in wanted if is_wanted]
