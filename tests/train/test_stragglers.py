"""A slow rank of a run is reported with its section, host and device; its waiting peers are not."""

import platform
import re
import sys
import time
import types
from collections.abc import Callable
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.train import TrainRun
from megalith.data.loader import Loader, StepBatches
from megalith.models.decoder import Decoder
from megalith.observe.busy import BusyMeter
from megalith.observe.flight import FlightRecorder
from megalith.observe.metrics import read_metrics
from megalith.optim.optimizer import RuleOptimizer
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks import stragglers
from megalith.train.callbacks.stragglers import StragglerDetector
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

SLOW: dict[str, tuple[Any, str]] = {
    "data": (Loader, "next"),
    "forward": (Decoder, "outputs"),
    "backward": (torch.autograd, "backward"),
    "optimizer": (RuleOptimizer, "step"),
}
"""Function that the section calls."""

DELAY = 0.3


def _delayed(original: Callable[..., Any], is_slow: Callable[[], bool]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        if is_slow():
            time.sleep(DELAY)
        return original(*arguments, **options)

    return run


def _train(
    rank: int, world: int, run: TrainRun, path: Path, section: str, ranks: list[int], calls: int
) -> None:
    """Train; the section is slow on `ranks` after the first `calls` calls."""
    num_calls = 0

    def is_slow() -> bool:
        nonlocal num_calls
        num_calls += 1
        return rank in ranks and num_calls > calls

    grid = model_grid(run.parallel, run.model, world)
    mesh = build_mesh(grid, rank=rank, flight=FlightRecorder())
    owner, name = SLOW[section]
    with ExitStack() as stack:
        stack.enter_context(patched(owner, name, _delayed(getattr(owner, name), is_slow)))
        run_training(run, RunFolder(path), mesh, torch.device("cpu"), show=False)


def report(
    tmp_path: Path,
    section: str,
    *,
    ranks: list[int],
    calls: int = 0,
    steps: int = 6,
    every: int = 1,
) -> list[str]:
    """Return the lines about stragglers in the log of a run of two ranks that compares them
    every `every` steps."""
    settings = {
        "parallel.dp": "2",
        "train.steps": str(steps),
        "train.micro_batch_size": "6",
        "train.eval_steps": "0",
        "observe.straggler_check_every": str(every),
    }
    run_ranks(_train, 2, tiny_run(settings), tmp_path / "run", section, ranks, calls)
    log = (tmp_path / "run" / "log.txt").read_text()
    return [line for line in log.splitlines() if " is slow in " in line and f" {section}:" in line]


def check_slow_rank(tmp_path: Path, section: str) -> None:
    lines = report(tmp_path, section, ranks=[1])
    (line,) = (line for line in lines if "fastest rank" in line)
    where = rf"step \d: rank 1 \(dp=1\) on {re.escape(platform.node())}, cpu is slow in {section}: "
    assert re.search(where + r"[\d.]+ ms per step, [\d.]+ ms on the fastest rank of ", line), line
    row = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))[-1]
    assert row["slowest_rank"] == 1


@pytest.mark.slow
def test_slow_rank_is_reported_with_section_host_and_device(tmp_path: Path) -> None:
    check_slow_rank(tmp_path, "forward")
    share = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))[-1]["waiting_share"]
    assert isinstance(share, float) and 0.1 < share < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("section", ["data", "backward", "optimizer"])
def test_slow_rank_is_reported_in_every_section(tmp_path: Path, section: str) -> None:
    check_slow_rank(tmp_path, section)


@pytest.mark.slow
def test_ranks_that_become_slower_are_reported_apart_from_slow_ranks(tmp_path: Path) -> None:
    """The first step compiles: the later ones are compared with the second one."""
    lines = report(tmp_path, "backward", ranks=[0, 1], calls=2, steps=8, every=2)
    for rank in (0, 1):
        (line,) = (line for line in lines if f": rank {rank} (dp={rank}) on " in line)
        assert " ms in its first 2 steps (score " in line


def test_comparison_can_be_turned_off(tmp_path: Path) -> None:
    settings = {"train.steps": "2", "observe.straggler_check_every": "none"}
    mesh, folder = build_single_rank_mesh(), RunFolder(tmp_path / "run")
    run_training(tiny_run(settings), folder, mesh, torch.device("cpu"), show=False)
    assert all("slowest_rank" not in row for row in read_metrics(folder.metrics))


@pytest.mark.parametrize("num_rows", [(2, 1), (1, 1)])
def test_ranks_with_more_rows_than_others_are_no_stragglers(
    monkeypatch: pytest.MonkeyPatch, num_rows: tuple[int, int]
) -> None:
    """A global batch that does not divide gives one rank twice the work."""
    detector, lines = StragglerDetector(), []
    train = SimpleNamespace(tokens_per_microbatch=None, balance_rows=False)
    detector._run = SimpleNamespace(  # type: ignore[assignment]  # what a report needs of it
        config=SimpleNamespace(train=train),
        mesh=build_single_rank_mesh(),
        device=torch.device("cpu"),
        record_event=lambda event, fields: None,
        log=lines.append,
    )
    detector._meter, detector._stages, detector._every = BusyMeter(torch.device("cpu")), [0, 0], 1
    times = [({"forward": seconds}, 0.0, 3.0) for seconds in (2.0, 1.0)]
    gathered = [(*each, float(rows)) for each, rows in zip(times, num_rows, strict=True)]
    monkeypatch.setattr(stragglers, "gather_objects", lambda value, group: gathered)
    finished = SimpleNamespace(step=1, batches=StepBatches([], 0))
    for _ in range(3):
        detector._step_seconds = [3.0]
        detector._compare(finished)  # type: ignore[arg-type]  # what a report needs of it
    assert len(lines) == (num_rows == (1, 1))


class NvmlError(Exception):
    """An error of the stand-in for nvidia-ml-py."""

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for nvidia-ml-py, with a GPU that provides nothing yet."""
    module: Any = types.ModuleType("pynvml")
    module.__spec__ = ModuleSpec("pynvml", None)
    module.NVMLError = NvmlError
    module.NVML_NVLINK_MAX_LINKS = 18
    module.NVML_NVLINK_ERROR_DL_REPLAY, module.NVML_NVLINK_ERROR_DL_RECOVERY = 0, 1
    module.NVML_NVLINK_ERROR_DL_CRC_FLIT = 2
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = {b"GPU-1234": "device"}.__getitem__
    monkeypatch.setitem(sys.modules, "pynvml", module)
    properties = lambda device: SimpleNamespace(uuid="1234")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return module


def add_nvlinks(nvml: Any, states: list[int], error: int = 2) -> None:
    """Add links with these states; of others NVML raises an error."""

    def read_state(handle: str, link: int) -> int:
        if link >= len(states):
            raise NvmlError(error)
        return states[link]

    nvml.nvmlDeviceGetNvLinkState = read_state
    counts = {0: 2, 1: 1, 2: 30}
    nvml.nvmlDeviceGetNvLinkErrorCounter = lambda handle, link, kind: counts[kind] + link


def test_gpu_of_a_straggler_is_described_with_pcie_and_nvlink_errors(nvml: Any) -> None:
    nvml.nvmlDeviceGetTemperature = lambda handle, sensor: 81
    nvml.nvmlDeviceGetPcieReplayCounter = lambda handle: 7
    add_nvlinks(nvml, [1, 0, 1])  # link 1 is not active; the GPU has fewer links than NVML allows
    gpu: Any = SimpleNamespace(type="cuda")
    counts = "7 PCIe replays, 6 NVLink replays, 4 NVLink recoveries, 62 NVLink CRC errors"
    assert stragglers.describe_device(gpu).endswith(f" (81 degrees C, {counts})")


def test_counters_that_a_gpu_does_not_provide_are_omitted(nvml: Any) -> None:
    gpu: Any = SimpleNamespace(type="cuda")
    assert " (" not in stragglers.describe_device(gpu)
    add_nvlinks(nvml, [0, 0])  # no active link: 0 errors would be a guess
    assert "NVLink" not in stragglers.describe_device(gpu)
    add_nvlinks(nvml, [1, 1], error=15)  # the GPU is lost: a part of the links is no count
    nvml.nvmlDeviceGetPcieReplayCounter = lambda handle: 0
    assert stragglers.describe_device(gpu).endswith(" (0 PCIe replays)")
