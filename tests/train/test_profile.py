"""Profiles, memory, energy, garbage collection and dumps: results are bitwise
equal, and missing resources are reported."""

import gc
import json
import logging
import math
import os
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from megalith.config.train import TrainRun
from megalith.data.loader import StepBatches
from megalith.errors import CallbackError, ConfigError
from megalith.observe import energy
from megalith.observe.energy import open_nvml_counter, open_rapl_counter
from megalith.observe.metrics import read_metrics
from megalith.parallel.grad_sync import ShardedParam
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.rules.no_effect import unused_notes
from megalith.rules.run import run_problems
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import FP64
from megalith.train import loop
from megalith.train.callbacks import dump, memory, profile
from megalith.train.callbacks import energy as energy_callback
from megalith.train.callbacks.base import Callback, Outcome, RunView
from megalith.train.callbacks.memory import OutOfMemory, is_out_of_memory
from megalith.train.callbacks.profile import LayerRanges, Profiler, ProfileWindow, SectionRanges
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from tests.observe.test_trackers import FakeWandb

CPU = torch.device("cpu")
SHORT = {
    "train.steps": "4",
    "train.eval_every": "2",
    "train.micro_batch_size": "6",
    "checkpoint.every": "100",
}
ALL = {
    "observe.timer_level": "2",
    "observe.memory_every": "3",
    "observe.energy": "true",
    "observe.param_norm": "true",
    "observe.log_ranks": "true",
    "observe.dump.every": "2",
    "observe.dump.weights": "true",
    "observe.dump.gradients": "true",
    "train.gc_interval": "2",
}


WINDOW = {
    "profile.start": "2",
    "profile.steps": "2",
    "profile.shapes": "true",
}


def train(path: Path, settings: Mapping[str, str], *callbacks: Callback) -> Outcome:
    """Run the tiny run on one process."""
    run, mesh = tiny_run(settings), build_single_rank_mesh()
    return run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks)


def _train_rank(rank: int, world: int, run: TrainRun, path: Path) -> None:
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    run_training(run, RunFolder(path), mesh, CPU, show=False)


@pytest.fixture
def counters(tmp_path: Path) -> Path:
    """RAPL counters of two packages, of a part of one, and of the platform that contains them."""
    folder = tmp_path / "powercap"
    zones = {"0": "package-0", "0:0": "core", "1": "package-1", "2": "psys"}
    for number, name in zones.items():
        zone = folder / f"intel-rapl:{number}"
        zone.mkdir(parents=True)
        (zone / "name").write_text(f"{name}\n")
        (zone / "energy_uj").write_text("900\n")
        (zone / "max_energy_range_uj").write_text("1000\n")
    return folder


def test_run_is_bitwise_equal_with_all_measurements(tmp_path: Path) -> None:
    settings = SHORT | {"parallel.dp": "2", "parallel.zero": "1"}
    for name, added in (("plain", {}), ("measured", ALL | WINDOW | {"profile.ranks": "1"})):
        run_ranks(_train_rank, 2, tiny_run(settings | added), tmp_path / name)
    measured = read_metrics(tmp_path / "measured" / "metrics.jsonl")
    exact = ("step", "loss", "grad_norm", "eval_loss", "lr")
    rows = [
        [{name: row.get(name) for name in exact} for row in each]
        for each in (read_metrics(tmp_path / "plain" / "metrics.jsonl"), measured)
    ]
    assert rows[0] == rows[1]
    weights = [
        sorted(
            (file.name, file.read_bytes())
            for file in (tmp_path / name / "checkpoints" / "step_0000004").rglob("*.distcp")
        )
        for name in ("plain", "measured")
    ]
    assert weights[0] and weights[0] == weights[1]
    norms = [row["param_norm"] for row in measured if "loss" in row]
    assert len(norms) == 4 and all(
        norms
    )  # test_param_norm_is_that_of_one_process compares the values
    assert (tmp_path / "measured" / "logs" / "rank_00001.txt").exists()
    _check_dumps(tmp_path / "measured" / "dumps")
    # parameters were being gathered when the profiler stopped, which must wait for them
    assert [path.name for path in (tmp_path / "measured" / "profile").iterdir()] == [
        "rank_00001.json"
    ]
    log = (tmp_path / "measured" / "log.txt").read_text()
    assert log.count("GiB used") == 3  # after steps 1, 2 and 3


def test_run_is_bitwise_equal_with_a_profile_a_tracker_and_suites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace has the sections and shapes of two steps."""
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    added = {"observe.wandb.project": "p", "evaluate.a.split": "test", "evaluate.a.every": "1"}
    train(tmp_path / "plain", SHORT)
    train(tmp_path, SHORT | WINDOW | added)
    files = [
        sorted((folder / "checkpoints" / "step_0000004").rglob("*.distcp"))
        for folder in (tmp_path / "plain", tmp_path)
    ]
    assert files[0] and [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "rank_00000.json"
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("optimizer") == 2
    assert "Input Dims" in {key for event in events for key in event.get("args", {})}
    assert "profile of rank 0 in" in (tmp_path / "log.txt").read_text()


def test_profiler_gets_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}
    monkeypatch.setattr(torch.profiler, "profile", lambda **given: options.update(given))
    settings = {"profile.stacks": "true", "profile.memory": "true", "profile.warmup": "0"}
    train(tmp_path, SHORT | {"profile.start": "3"} | settings)  # not a profiler, so it is dropped
    assert (options["with_stack"], options["profile_memory"], options["record_shapes"]) == (
        True,
        True,
        False,
    )


def _check_dumps(folder: Path) -> None:
    """Check that each rank has dumped its shards, which together are the parameters."""
    assert sorted(path.name for path in folder.iterdir()) == ["step_0000002", "step_0000004"]
    sizes: dict[str, int] = {}
    for rank in (0, 1):
        file = folder / "step_0000004" / f"rank_{rank:05d}.safetensors"
        with safe_open(file, "pt") as dump:
            boxes = dump.metadata()
            for name in boxes:
                sizes[name] = sizes.get(name, 0) + dump.get_tensor(name).numel()
                assert boxes[name].startswith("box ((0, ")
    assert (
        sizes["embed.weight/param"] == sizes["embed.weight/grad"] == 320 * 24
    )  # the vocabulary is padded


def test_dump_contains_the_selected_parameters_after_the_update(tmp_path: Path) -> None:
    class Weights(Callback):
        def after_backward(self, local_params: Sequence[ShardedParam]) -> None:
            (param,) = (each for each in local_params if each.shard.name == "embed.weight")
            self.gradient = param.gradient.clone()

    weights = Weights()
    settings = {"observe.dump.every": "4", "observe.dump.gradients": "true"}
    train(tmp_path, SHORT | settings | {"observe.dump.only": "embed.*"}, weights)
    with safe_open(tmp_path / "dumps" / "step_0000004" / "rank_00000.safetensors", "pt") as dump:
        assert [*dump.metadata()] == ["embed.weight/grad"]
        assert torch.equal(dump.get_tensor("embed.weight/grad"), weights.gradient)


def test_dumped_gradients_are_without_the_loss_scale(tmp_path: Path) -> None:
    class Gradients(Callback):
        def on_start(self, run: RunView) -> None:
            self.loss_scale = run.prepared.trainer.loss_scale

        def after_backward(self, local_params: Sequence[ShardedParam]) -> None:
            (param,) = (each for each in local_params if each.shard.name == "embed.weight")
            assert self.loss_scale is not None
            self.unscaled = param.gradient / self.loss_scale.scale

    gradients = Gradients()
    settings = {"precision.params": "fp16", "precision.loss_scale.initial": "64"}
    settings |= {"observe.dump.every": "1", "observe.dump.gradients": "true", "train.steps": "1"}
    train(tmp_path, SHORT | settings | {"observe.dump.only": "embed.weight"}, gradients)
    with safe_open(tmp_path / "dumps" / "step_0000001" / "rank_00000.safetensors", "pt") as dump:
        assert torch.equal(dump.get_tensor("embed.weight/grad"), gradients.unscaled)
    assert gradients.unscaled.any()


def test_param_norm_is_that_of_one_process(tmp_path: Path) -> None:
    """Tensor-parallel ranks have copies of the norms, which count once."""
    settings = {"train.steps": "1", "train.eval_steps": "0", "observe.param_norm": "true"}
    settings |= {"precision.params": "fp64"}
    train(tmp_path / "single", settings)
    run_ranks(_train_rank, 2, tiny_run(settings | {"parallel.tp": "2"}), tmp_path / "tp")
    norms = [
        row["param_norm"]
        for name in ("single", "tp")
        for row in read_metrics(tmp_path / name / "metrics.jsonl")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=FP64.relative)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"profile.start": "1", "profile.tool": "nsys", "profile.steps": "1"},
            "profile.tool=nsys captures GPU work, and the device of rank 0 is cpu. Set profile",
        ),
    ],
)
def test_missing_device_ends_the_run(
    tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(CallbackError) as raised:
        train(tmp_path, SHORT | settings)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"profile.start": "8"},
            "ends at step 9, and the run at train.steps=8. Set profile.start to at most 7, or "
            "profile.steps to at most 1.",
        ),
        (
            {"profile.start": "5", "profile.steps": "20"},
            "and the run at train.steps=8. Set profile.steps to at most 4.",
        ),
        (
            {"profile.start": "9", "profile.steps": "20"},
            "Set profile.start to 1 and profile.steps to at most 8.",
        ),
        ({"profile.start": "2", "profile.ranks": "1"}, "profile.ranks=1: the run has 1 ranks. Use"),
        ({"observe.dump.only": "embd.*"}, "observe.dump.only=embd.*: matches no parameter."),
        ({"observe.dump.every": "2"}, "observe.dump.every=2: nothing is dumped. Set observe.dump."),
    ],
)
def test_invalid_windows_are_rejected(settings: dict[str, str], message: str) -> None:
    (problem,) = run_problems(tiny_run(settings), 1)
    assert message in problem


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"observe.dump.weights": "true"}, "observe.dump.weights=true: no effect here, because wi"),
        (
            {"profile.start": "3", "profile.tool": "nsys", "profile.shapes": "true"},
            "profile.shapes=true: no effect here, because they belong to profile.tool=torch",
        ),
        ({"profile.start": "3", "profile.warmup": "3"}, "profile.warmup=3: no effect here, becau"),
    ],
)
def test_settings_without_effect_are_reported(settings: dict[str, str], note: str) -> None:
    (text,) = [each for each in unused_notes(tiny_run(settings), 2) if each.startswith(note[:12])]
    assert text.startswith(note)


def test_profile_settings_have_an_effect_without_a_start_step() -> None:
    settings = {"profile.shapes": "true", "profile.ranks": "[1]"}  # of `megalith request profile`
    notes = unused_notes(tiny_run(settings | {"parallel.dp": "2"}), 2)
    assert not [note for note in notes if note.startswith("profile.")]


def test_failure_of_the_profiler_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(torch.profiler, "profile", fail)
    with caplog.at_level(logging.WARNING):
        assert train(tmp_path, SHORT | {"profile.start": "2"}).kind == "done"
    assert "callback Profiler failed in before_step at step 1: RuntimeError('planted')" in (
        caplog.text
    )


def test_nsys_capture_ranges_sections_and_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the calls are recorded, in place of those of the CUDA runtime."""
    calls: list[str] = []
    runtime = types.SimpleNamespace(
        cudaProfilerStart=lambda: calls.append("capture"),
        cudaProfilerStop=lambda: calls.append("stop"),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    monkeypatch.setattr(profile.Profiler, "_find_device_problem", lambda self: None)
    settings = {"profile.start": "2", "profile.steps": "1", "profile.tool": "nsys"}
    train(tmp_path, SHORT | settings)
    assert (calls[0], calls[-1]) == ("capture", "stop")
    pushed = [call for call in calls[1:-1] if call != "end"]
    assert pushed[:4] == ["forward_backward", "forward", "layers.0", "layers.1"]
    assert "optimizer" in pushed and len(pushed) == calls.count("end")


def test_ranges_of_threads_do_not_mix() -> None:
    ranges = SectionRanges(nvtx=False)
    ranges.pop()  # of a section that began before the profile
    ranges.push("forward")
    with ThreadPoolExecutor(1) as executor:
        executor.submit(ranges.push, "pipeline_send").result()
        assert len(ranges._local.open) == 1
        executor.submit(ranges.pop).result()
    assert len(ranges._local.open) == 1
    ranges.pop()
    assert ranges._local.open == []


def test_layer_ranges_are_removed() -> None:
    hooks = torch.nn.modules.module
    before = len(hooks._global_forward_hooks)
    ranges = LayerRanges(torch.nn.ModuleList([torch.nn.Linear(1, 1)]))
    ranges.start()
    assert len(hooks._global_forward_hooks) == before + 1
    ranges.stop()
    assert len(hooks._global_forward_hooks) == before


def test_garbage_is_collected_in_the_same_steps_and_around_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append(len(calls)))
    enabled: list[bool] = []

    class Recorder(Callback):
        def after_step(self, finished: Any, metrics: Any) -> None:
            enabled.append(gc.isenabled())

    train(tmp_path, SHORT | {"train.gc_interval": "3"}, Recorder())
    assert len(calls) == 1 + 1 + 2 * 2  # at the start, after step 3, around two evaluations
    assert enabled == [False] * 4
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_energy_of_cpus_is_measured_over_wraparounds(counters: Path) -> None:
    counter = open_rapl_counter(counters)
    assert counter is not None and counter() == 0
    (counters / "intel-rapl:0" / "energy_uj").write_text("100\n")  # 900 to 1000, and 100 more
    (counters / "intel-rapl:1" / "energy_uj").write_text("950\n")
    (counters / "intel-rapl:0:0" / "energy_uj").write_text("999\n")
    (counters / "intel-rapl:2" / "energy_uj").write_text("999\n")
    assert counter() == pytest.approx(250e-6)
    assert counter() == pytest.approx(250e-6)


def test_energy_is_logged_or_omitted(
    tmp_path: Path, counters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy_callback, "open_rapl_counter", lambda: open_rapl_counter(counters))
    train(tmp_path / "a", SHORT | {"observe.energy": "true"})
    rows = [row for row in read_metrics(tmp_path / "a" / "metrics.jsonl") if "loss" in row]
    assert {row["energy_joules"] for row in rows} == {0.0}
    monkeypatch.setattr(energy_callback, "open_rapl_counter", lambda: open_rapl_counter(tmp_path))
    train(tmp_path / "b", SHORT | {"observe.energy": "true"})
    rows = read_metrics(tmp_path / "b" / "metrics.jsonl")
    assert not any("energy_joules" in row or "power_watts" in row for row in rows)
    log = (tmp_path / "b" / "log.txt").read_text()
    assert "energy is not logged, because there is no readable counter on rank 0." in log


@pytest.mark.parametrize("tool", ["torch", "nsys"])
def test_failed_profile_leaves_no_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    """The export fails, or the start of the capture."""

    def fail(*arguments: object) -> None:
        raise OSError("no space left on device")

    class Ranges(Callback):
        def on_start(self, run: RunView) -> None:
            self.timers = run.prepared.trainer.timers

        def on_end(self, outcome: Outcome) -> None:
            self.ranges = self.timers.ranges

    hooks = torch.nn.modules.module
    before, ranges = len(hooks._global_forward_hooks), Ranges()
    monkeypatch.setattr(profile.Profiler, "_write", fail)
    monkeypatch.setattr(torch.cuda, "cudart", fail)
    if tool == "nsys":
        monkeypatch.setattr(profile.Profiler, "_find_device_problem", lambda self: None)
    settings = {"profile.start": "2", "profile.steps": "1", "profile.tool": tool}
    train(tmp_path, SHORT | settings, ranges)
    assert "callback Profiler failed in" in (tmp_path / "log.txt").read_text()
    assert ranges.ranges is None
    assert len(hooks._global_forward_hooks) == before


class CounterWriter(Callback):
    """Advances the counter of one package by 600 of its 1000 microjoules before every step, and
    removes it before the last one."""

    def __init__(self, counters: Path) -> None:
        self._file = counters / "intel-rapl:0" / "energy_uj"

    def before_step(self, step: int, batches: StepBatches) -> None:
        if int(os.environ["RANK"]) == 0:
            self._file.write_text(f"{(900 + 600 * step) % 1000}\n")
            if step == 6:
                self._file.unlink()


def _measure_energy(rank: int, world: int, run: TrainRun, path: Path, counters: Path) -> None:
    os.environ["RANK"] = str(rank)
    energy_callback.open_rapl_counter = lambda: open_rapl_counter(counters)  # type: ignore[attr-defined]
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    callbacks = [CounterWriter(counters)]
    run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks)


def test_energy_of_a_machine_counts_once_until_a_counter_cannot_be_read(
    tmp_path: Path, counters: Path
) -> None:
    """The counter wraps around in every step, and only the first rank reads it."""
    settings = {"parallel.dp": "2", "train.steps": "6", "train.log_every": "2"}
    run = tiny_run(SHORT | settings | {"observe.energy": "true"})
    run_ranks(_measure_energy, 2, run, tmp_path, counters)
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert [
        (row["step"], row["energy_joules_per_token"] * rows[0]["tokens"])
        for row in rows
        if "energy_joules_per_token" in row
    ] == [(2, pytest.approx(1200e-6)), (4, pytest.approx(1200e-6))]
    log = (tmp_path / "log.txt").read_text()
    assert log.count("step 6: energy is no longer logged, because a counter could not") == 1


def test_power_is_the_energy_over_the_time_that_it_was_measured_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device uses 2 W; every message to other ranks takes 10 s, every step 5 s."""
    now = 0.0

    def send(values: Any, group: Any) -> Any:
        nonlocal now
        now += 10.0
        return values

    run: Any = types.SimpleNamespace(
        mesh=build_single_rank_mesh(), device=CPU, is_logged=lambda step: step % 2 == 0
    )
    monkeypatch.setattr(energy_callback, "all_reduce_", send)
    monkeypatch.setattr(energy_callback, "time", types.SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(energy_callback, "open_rapl_counter", lambda: lambda: 2.0 * now)
    meter, rows = energy_callback.EnergyMeter(), []
    meter.on_start(run)
    for step in range(1, 7):
        now += 5.0
        finished: Any = types.SimpleNamespace(
            step=step, batches=types.SimpleNamespace(num_tokens=10)
        )
        meter.after_step(finished, row := {})
        rows.append(row)
        if step == 5:
            meter.after_rollback(4)
    assert [row["power_watts"] for row in rows if row] == [2.0, 2.0, 2.0]
    # steps 3 and 4 with the message of step 2; step 6 alone, because step 5 was discarded
    assert [row["energy_joules"] for row in rows if row] == [10.0, 20.0, 10.0]


def test_energy_of_gpus_is_that_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml: Any = types.ModuleType("pynvml")
    nvml.__spec__ = ModuleSpec("pynvml", None)
    nvml.NVMLError = OSError
    nvml.nvmlInit = lambda: None
    handles = {b"GPU-1234": "device"}
    nvml.nvmlDeviceGetHandleByUUID = handles.__getitem__
    readings = {"device": [7500, 5000]}
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: readings[handle].pop()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    uuids = iter(["1234", "5678"])
    properties = lambda device: types.SimpleNamespace(uuid=next(uuids))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    counter = open_nvml_counter(CPU)
    assert counter is not None and counter() == 2.5
    readings.clear()  # the driver has stopped: an error of another type than NVMLError
    assert math.isnan(counter())
    assert open_nvml_counter(CPU) is None  # the driver does not know the device
    monkeypatch.setattr(energy, "find_spec", lambda name: None)
    assert open_nvml_counter(CPU) is None


def test_energy_of_a_gpu_that_ranks_share_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine and each GPU has one source."""
    properties = lambda device: types.SimpleNamespace(uuid=f"uuid-{device.index}")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    devices: list[Any] = [types.SimpleNamespace(type="cuda", index=n) for n in (0, 0, 1)]
    sources = [energy_callback.describe_source(device) for device in devices]
    assert sources == ["GPU-uuid-0", "GPU-uuid-0", "GPU-uuid-1"]
    monkeypatch.setattr(energy_callback.platform, "node", lambda: "another")
    if energy_callback.BOOT_ID.exists():
        assert energy_callback.describe_source(CPU) == energy_callback.BOOT_ID.read_text().strip()


def test_dump_of_a_step_that_is_repeated_replaces_the_file(tmp_path: Path) -> None:
    """The run fails after step 4 was dumped, and resumes from step 2."""

    class Failure(Callback):
        collective = True

        def after_step(self, finished: Any, metrics: Any) -> None:
            if finished.step == 4:
                raise RuntimeError("planted")

    settings = SHORT | {"checkpoint.every": "2", "observe.dump.every": "4"}
    settings |= {"observe.dump.weights": "true"}
    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, settings, Failure())
    file = tmp_path / "dumps" / "step_0000004" / "rank_00000.safetensors"
    first = file.read_bytes()
    file.write_bytes(b"of the first run")
    (file.parent / f"{file.name}.tmp").write_bytes(b"of a killed run")
    (file.parent / "rank_00001.safetensors").write_bytes(b"of more ranks")
    train(tmp_path, settings)
    assert "TensorDump failed" not in (tmp_path / "log.txt").read_text()
    assert file.read_bytes() == first
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_rollback_removes_the_dumps_of_discarded_steps(tmp_path: Path) -> None:
    tensor_dump = dump.TensorDump()
    folder = RunFolder(tmp_path)
    run: Any = types.SimpleNamespace(
        config=tiny_run({"observe.dump.every": "2", "observe.dump.weights": "true"}),
        folder=folder,
        mesh=build_single_rank_mesh(),
        is_writer=True,
        step=0,
    )
    tensor_dump.on_start(run)
    for step in (2, 4):
        file = tmp_path / "dumps" / f"step_{step:07d}" / "rank_00000.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x")
    tensor_dump.after_rollback(2)
    assert [path.parent.name for path in (tmp_path / "dumps").glob("*/*")] == ["step_0000002"]


@pytest.mark.parametrize(("start", "is_profiled"), [("3", True), ("2", False)])
def test_window_after_the_resumed_step_is_profiled_with_a_shorter_warmup(
    start: str, is_profiled: bool, tmp_path: Path
) -> None:
    settings = SHORT | {"train.steps": "2", "checkpoint.every": "2"}
    train(tmp_path, settings)
    settings |= {"train.steps": "4", "profile.start": start, "profile.steps": "1"}
    train(tmp_path, settings)
    assert (tmp_path / "profile" / "rank_00000.json").exists() == is_profiled
    text = "profile.start=2 is not after step 2, at which this run starts; no profile is written"
    assert (text in (tmp_path / "log.txt").read_text()) != is_profiled


def test_rollback_does_not_profile_a_complete_window_again() -> None:
    profiler = Profiler()
    profiler.window = ProfileWindow(3, 3, 4, Path("profile"))
    profiler._is_profiled, profiler._is_finished = True, True
    profiler.before_step(3, [])
    assert not profiler._is_open


def test_dumps_are_copied_to_the_host_by_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def copy(clones: Any, cloned: Any) -> Any:
        threads.append(threading.current_thread().name)
        return clones

    monkeypatch.setattr(dump, "copy_to_host", copy)
    train(tmp_path, SHORT | {"observe.dump.every": "4", "observe.dump.weights": "true"})
    assert threads == ["dump_0"]


def test_trace_is_written_by_a_thread_and_a_large_one_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    read = profile.read_events

    def read_events(path: Path) -> Any:
        threads.append(threading.current_thread().name)
        return read(path)

    monkeypatch.setattr(profile, "read_events", read_events)
    train(tmp_path / "small", SHORT | {"profile.start": "2"})
    assert threads == ["profile_0"]
    assert " calls  aten::" in (tmp_path / "small" / "log.txt").read_text()
    trace = tmp_path / "small" / "profile" / "rank_00000.json"
    assert [*read(trace)] == json.loads(trace.read_text())["traceEvents"]
    monkeypatch.setattr(profile, "MAX_LISTED_NBYTES", 1)
    train(tmp_path / "large", SHORT | {"profile.start": "2"})
    assert "its operations are not listed, because" in (tmp_path / "large" / "log.txt").read_text()
    assert threads == ["profile_0"]


def test_memory_is_logged_after_steps_1_and_2_by_default(tmp_path: Path) -> None:
    train(tmp_path, SHORT)
    log = (tmp_path / "log.txt").read_text()
    assert [log.count(f"memory after step {step},") for step in (1, 2, 3, 4)] == [1, 1, 0, 0]


def test_memory_history_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="observe.memory_history=true records the allocator of a"):
        train(tmp_path, SHORT | {"observe.memory_history": "true"})


def test_memory_history_is_written_if_the_weights_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the calls are recorded, in place of those of the allocator."""
    calls: list[object] = []
    record = lambda **options: calls.append(options)  # noqa: E731
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    with pytest.raises(torch.OutOfMemoryError):
        with memory.record_memory_history(tmp_path, torch.device("cuda"), 3):
            raise torch.OutOfMemoryError("planted")
    assert calls[1:] == [str(tmp_path / "memory" / "rank_3.pickle"), {"enabled": None}]


def test_out_of_memory_of_an_evaluation_names_it(tmp_path: Path) -> None:
    class HugeEvaluation(Callback):
        collective = True

        def before_evaluate(self, step: int) -> None:
            torch.empty(1 << 60)

    with pytest.raises(OutOfMemory, match="ran out of memory during evaluation after step 2: "):
        train(tmp_path, SHORT, HugeEvaluation())


def _fail_to_estimate(*arguments: object, **options: object) -> None:
    raise RuntimeError("planted")


def test_memory_is_logged_if_the_estimate_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "estimate_rank_memory", _fail_to_estimate)
    settings = SHORT | {"train.steps": "1", "observe.memory_every": "1"}
    assert train(tmp_path, settings).kind == "done"
    log = (tmp_path / "log.txt").read_text()
    assert "GiB used; there is no estimate (RuntimeError('planted'))" in log


def test_out_of_memory_error_names_the_categories_and_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HugeAllocation(Callback):
        collective = True

        def after_step(self, finished: Any, metrics: Any) -> None:
            if finished.step == 3:
                torch.empty(1 << 60)

    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 20)
    with pytest.raises(OutOfMemory) as raised:
        train(tmp_path, SHORT, HugeAllocation())
    text = str(raised.value)
    assert text.startswith("rank 0 ran out of memory in callbacks after step 3: ")
    assert "The estimate of its memory is 0.00" in text and "weights 0.00" in text
    assert "Nearest change: --" in text
    monkeypatch.setattr(memory, "estimate_rank_memory", _fail_to_estimate)
    with pytest.raises(OutOfMemory) as raised:
        train(tmp_path / "without", SHORT, HugeAllocation())
    text = str(raised.value)
    assert text.startswith("rank 0 ran out of memory in callbacks after step 3: ")
    assert "There is no estimate of its memory (RuntimeError('planted')). Use more ranks" in text


def test_out_of_memory_before_the_first_step_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*arguments: object) -> None:
        torch.empty(1 << 60)

    monkeypatch.setattr(loop, "PreparedRun", allocate)
    with pytest.raises(OutOfMemory, match="rank 0 ran out of memory while its weights and opti"):
        train(tmp_path, SHORT)


def test_errors_of_memory_are_recognized() -> None:
    texts = "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"
    assert all(is_out_of_memory(RuntimeError(text)) for text in texts)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("another"))
    assert not is_out_of_memory(ValueError("out of memory"))
