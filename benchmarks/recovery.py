"""Recovery of replica groups after a kill, against torchft: three groups of one process each, of
which one is killed within a step and started again.

    pip install torchft
    python benchmarks/recovery.py                  5 rounds
    python benchmarks/recovery.py --heartbeat 5    timeout of a group without messages, in seconds

Both take turns, in an order drawn anew each round. `recovery`: seconds from the kill (after
backward, before the gradients are summed) to the first step that the others commit. `rejoin`:
seconds from the moment when the new process has imported everything to the first step that it
commits. torchft runs with gloo, a lighthouse with the same heartbeat timeout, and join and tick
timeouts of 0.1 s. Every step sleeps for 0.1 s, as if a GPU computed. The bar: our median recovery
is at most that of torchft. Without torchft, only ours is measured, against three steps and the
heartbeat timeout. torchft loses the samples of the discarded step; our groups compute them again.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from megalith.parallel.mesh import build_single_rank_mesh
from megalith.train.callbacks.base import Callback
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.train.replica_group_jobs import RunningCoordinator, group_run, patch_phases

GROUPS = ("g0", "g1", "g2")
KILL_STEP = 8
COMPUTE_SECONDS = 0.1
STEPS = 400
"""Steps of a run, more than it finishes: it ends when the new process has committed one."""


class Event(NamedTuple):
    """An event of one group."""

    group: str
    name: str
    """start, commit or kill."""

    step: int
    """Steps that the group has committed."""

    when: float


def write_event(file: Path, name: str, step: int) -> None:
    """Append an event and its time to the file of a group."""
    with file.open("a") as opened:
        opened.write(json.dumps(Event(file.stem, name, step, time.monotonic())) + "\n")


def kill_self(file: Path, step: int) -> None:
    """Note the time and end this process by SIGKILL."""
    write_event(file, "kill", step)
    os.kill(os.getpid(), signal.SIGKILL)


class CommitTimes(Callback):
    """Writes the time of each step."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def before_step(self, step: int, batches: Any) -> None:  # Any: see `Callback`
        """Sleep as long as a GPU would compute."""
        time.sleep(COMPUTE_SECONDS)

    def after_step(self, finished: Any, metrics: Any) -> None:  # Any: see `Callback`
        """Write the time."""
        write_event(self.file, "commit", finished.step)


def train_ours(address: str, group: str, folder: Path, is_killed: bool, heartbeat: float) -> None:
    """Train as one of our replica groups."""
    torch.set_num_threads(1)
    events = folder / f"{group}.events"
    settings = {
        "replica_group.timeout_seconds": str(heartbeat),
        "train.steps": str(STEPS),
        "train.global_batch_size": "12",
        "train.eval_steps": "0",
        "checkpoint.every": "0",
    }
    run = group_run(address, group, settings, folder)

    def die(groups: Any, step: int, phase: str) -> None:  # Any: see `patch_phases`
        if is_killed and step == KILL_STEP and phase == "before_exchange":
            kill_self(events, step - 1)

    write_event(events, "start", 0)
    with patch_phases(die):
        run_training(
            run,
            RunFolder(folder / group),
            build_single_rank_mesh(),
            torch.device("cpu"),
            callbacks=[CommitTimes(events)],
            show=False,
        )


def train_torchft(
    address: str, group: str, folder: Path, is_killed: bool, heartbeat: float
) -> None:
    """Train as one replica group of torchft, with a model of a similar step time."""
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo

    torch.set_num_threads(1)
    events = folder / f"{group}.events"
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    write_event(events, "start", 0)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=heartbeat)),
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=1,
        replica_id=group,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=4 * heartbeat),
    )
    num_committed = 0
    try:
        while manager.current_step() < STEPS:
            manager.start_quorum()
            optimizer.zero_grad()
            time.sleep(COMPUTE_SECONDS)
            model(torch.randn(64, 64)).square().mean().backward()
            if is_killed and num_committed == KILL_STEP:
                kill_self(events, manager.current_step())
            gradients = [parameter.grad for parameter in model.parameters()]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            manager.allreduce(flat).wait()
            if manager.should_commit():
                optimizer.step()
                num_committed += 1
                write_event(events, "commit", manager.current_step())
    finally:
        manager.shutdown(wait=False)


def read_events(folder: Path) -> list[Event]:
    """Return the events of a run, in order of time."""
    lines = [
        line
        for file in folder.glob("*.events")
        for line in file.read_text().splitlines()
        if line.endswith("]")
    ]
    return sorted((Event(*json.loads(line)) for line in lines), key=lambda event: event.when)


def run_once(
    train: Callable[..., None], address: str, folder: Path, heartbeat: float
) -> dict[str, float]:
    """Train, kill the last group, start it again; return the seconds of recovery and of the way
    back."""
    context = multiprocessing.get_context("forkserver")

    def start(group: str, is_killed: bool) -> Any:  # Any: a process of a context
        process = context.Process(
            target=train, args=(address, group, folder, is_killed, heartbeat), daemon=True
        )
        process.start()
        return process

    processes = {group: start(group, group == GROUPS[-1]) for group in GROUPS}
    try:
        processes[GROUPS[-1]].join(120)
        assert processes[GROUPS[-1]].exitcode == -signal.SIGKILL, "the group was not killed"
        kill = next(event for event in read_events(folder) if event.name == "kill")
        recovered = wait_for(
            folder,
            lambda event: event.name == "commit" and event.step > kill.step,
        )
        processes[GROUPS[-1]] = start(GROUPS[-1], False)
        started = wait_for(folder, lambda event: event.name == "start" and event.when > kill.when)
        rejoined = wait_for(
            folder,
            lambda event: (
                (event.group, event.name) == (GROUPS[-1], "commit") and event.when > started.when
            ),
        )
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    own = [
        event.when
        for event in read_events(folder)
        if (event.group, event.name) == (GROUPS[-1], "commit") and event.when < kill.when
    ]
    steps = [later - earlier for earlier, later in itertools.pairwise(own)]
    return {
        "recovery": recovered.when - kill.when,
        "rejoin": rejoined.when - started.when,
        "step": statistics.median(steps),
    }


def wait_for(folder: Path, matches: Callable[[Event], bool]) -> Event:
    """Return the first event that matches."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for event in read_events(folder):
            if matches(event):
                return event
        time.sleep(0.02)
    raise TimeoutError(f"no such event in {folder}: {read_events(folder)[-9:]}")


def measure_ours(folder: Path, heartbeat: float) -> dict[str, float]:
    """Measure one kill of one of our groups."""
    with RunningCoordinator(folder / "coordinator") as coordinator:
        return run_once(train_ours, coordinator.address, folder, heartbeat)


def measure_torchft(folder: Path, heartbeat: float) -> dict[str, float]:
    """Measure one kill of a group of torchft."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=100,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=round(1000 * heartbeat),
    )
    try:
        port = lighthouse.address().rsplit(":", 1)[1]
        return run_once(train_torchft, f"http://127.0.0.1:{port}", folder, heartbeat)
    finally:
        lighthouse.shutdown()


def main() -> int:
    """Measure and print; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heartbeat", type=float, default=5.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    contenders = {"megalith": measure_ours}
    if find_spec("torchft") is not None:
        contenders["torchft"] = measure_torchft
    draw = random.Random(0)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name in draw.sample([*contenders], len(contenders)):
            with tempfile.TemporaryDirectory() as folder:
                results[name].append(contenders[name](Path(folder), options.heartbeat))
            print(name, results[name][-1], file=sys.stderr, flush=True)
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in results.items()
    }
    ours = medians["megalith"]
    bar = 3 * ours["step"] + options.heartbeat
    if "torchft" in medians:
        bar = medians["torchft"]["recovery"]
    print(json.dumps({"seconds": results, "medians": medians, "bar": bar}) if options.json else "")
    for name, values in medians.items():
        print(name, ", ".join(f"{key} {value:.3f} s" for key, value in values.items()))
    print(f"recovery {ours['recovery']:.3f} s, bar {bar:.3f} s")
    return int(ours["recovery"] > bar)


if __name__ == "__main__":
    sys.exit(main())
