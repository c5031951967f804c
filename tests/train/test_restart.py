"""Restart in place on ranks: the process stays, the groups and the trainer are released, and the
losses are those of a run without faults."""

import gc
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megalith.cli.train import _train_round
from megalith.config.train import TrainRun
from megalith.config.tree import load_yaml
from megalith.data.loader import Loader, StepBatches
from megalith.errors import CollectiveError, DataError, RankError
from megalith.launch.heartbeat import RankHeartbeat
from megalith.launch.launcher import LAUNCHER
from megalith.launch.rounds import (
    CONTROL,
    MAX_MESSAGE,
    SERVED_STORE,
    OpenedSockets,
    RestartClient,
    Round,
    RoundFailure,
    decode_message,
    encode_message,
)
from megalith.observe import health_check
from megalith.observe.health_check import CheckSizes
from megalith.observe.metrics import read_metrics
from megalith.parallel.group import gather_objects
from megalith.parallel.mesh import build_mesh
from megalith.plan.device_health import DeviceHealth
from megalith.plan.grid import model_grid
from megalith.testing import inject
from megalith.testing.ranks import run_ranks, world_group
from megalith.testing.tiny import tiny_run, tiny_yaml
from megalith.train import restart
from megalith.train.callbacks.base import Outcome
from megalith.train.callbacks.fault_detection import read_suspect_exits
from megalith.train.callbacks.health_check import HealthCheck
from megalith.train.loop import run_training
from megalith.train.restart import RestartHealthCheck, is_recoverable, train_in_rounds
from megalith.train.run_folder import RunFolder

FIELDS = "step", "loss", "grad_norm", "lr", "tokens", "eval_loss"
SETTINGS = {"checkpoint.every": "4", "checkpoint.local.every": "1", "train.eval_every": "8"}


@dataclass(frozen=True)
class Objects:
    """What a process holds after it has released a round."""

    tensors: int
    threads: int
    files: int
    groups: int
    resident: int
    """Bytes."""


def count_objects() -> Objects:
    """Count what should not grow."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Objects(
        sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        len(dist.distributed_c10d._world.pg_map),
        int(status["VmRSS"].split()[0]) * 1024,
    )


def assign_rounds(control: socket.socket, rank: int, world: int) -> None:
    """Act as a launcher that assigns this rank the next round when it leaves one."""
    number = 0
    while True:
        place = Round(number, rank, world, "a fault" if number else "")
        control.send(encode_message(place))
        message = decode_message(control.recv(MAX_MESSAGE))
        while not isinstance(message, RoundFailure):
            message = decode_message(control.recv(MAX_MESSAGE))
        assert message.number == number
        number += 1


def join_rounds(rank: int, world: int) -> tuple[RestartClient, object]:
    """Leave the pool's group; return a client, and the store that rank 0 must keep."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 0 else None
    port = gather_objects(store and store.port, world_group(rank, world, "world"))[0]
    dist.barrier()  # a rank that leaves while another still connects would take it down
    dist.destroy_process_group()
    control, rank_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    thread = threading.Thread(target=assign_rounds, args=(control, rank, world), daemon=True)
    thread.start()
    os.environ |= {
        CONTROL: str(rank_control.detach()),
        SERVED_STORE: "1",
        LAUNCHER: "1:/nonexistent",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    client = RestartClient.from_environment(os.environ)
    assert client is not None
    client.wait_for_round()
    return client, store


def train_with_faults(
    rank: int, world: int, file: Path, folder: Path, num_faults: int, steps_between: int
) -> list[Objects]:
    """Train; in each of the first rounds, a rank cannot read its data after some steps."""
    client, store = join_rounds(rank, world)
    counts, read, release = [], Loader.next, restart.release_round
    checked_rounds: list[int] = []

    def read_or_fail(loader: Loader) -> StepBatches:
        number = client.round.number
        is_due = client.num_steps == steps_between and number < num_faults
        if is_due and number % world == rank:
            raise OSError("Input/output error")
        return read(loader)

    def release_and_count() -> None:
        release()
        counts.append(count_objects())

    run = load_yaml(file, TrainRun)
    with (
        inject.patched(Loader, "next", read_or_fail),
        inject.patched(restart, "release_round", release_and_count),
        inject.patched(
            HealthCheck, "_check", lambda check, step: checked_rounds.append(client.round.number)
        ),
    ):
        heartbeat = RankHeartbeat()
        train = partial(_train_round, run, folder, (), client, heartbeat)

        def find_device_errors() -> Sequence[str]:
            # the groups of the last round are gone, and those of the next one are not built yet
            assert not dist.is_initialized()
            checked_rounds.append(-client.round.number)
            return ()

        outcome = train_in_rounds(client, train, heartbeat, find_device_errors)
    assert outcome.kind == "done"
    assert client.round.number == num_faults
    if run.fault_detector.health_check_every is not None:
        expected = [0]  # before the first step of a round, and after it, if it ended by a fault
        for number in range(num_faults):
            expected += [-number, number + 1]
        assert checked_rounds == expected
    del store
    return counts


def train_without_faults(rank: int, world: int, file: Path, folder: Path) -> None:
    """The same run on the pool's group."""
    run = load_yaml(file, TrainRun)
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    run_training(run, RunFolder(folder), mesh, torch.device("cpu"), show=False)


def rows(folder: Path) -> list[dict[str, object]]:
    """metrics.jsonl without what depends on the clock."""
    return [
        {name: row[name] for name in FIELDS if name in row}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def hashes(folder: Path) -> dict[str, list[str]]:
    """SHA-256 of the boxes of every tensor of the last checkpoint."""
    manifest = max((folder / "checkpoints").glob("step_*/manifest.json"))
    tensors = json.loads(manifest.read_text())["tensors"]
    return {key: [box["sha256"] for box in tensor["boxes"]] for key, tensor in tensors.items()}


def check_equal_run(
    tmp_path: Path,
    world: int,
    settings: dict[str, str],
    *,
    num_faults: int,
    steps_between: int = 2,
) -> Sequence[Sequence[Objects]]:
    """Compare a run with faults and one without; return what each rank held after each fault."""
    local = {"checkpoint.local.folder": str(tmp_path / "local")}
    file = tiny_yaml(tmp_path / "tiny.yaml", SETTINGS | local | settings)
    run_ranks(train_without_faults, world, file, tmp_path / "whole")
    counts = run_ranks(
        train_with_faults, world, file, tmp_path / "run", num_faults, steps_between, timeout=500
    )
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert hashes(tmp_path / "run") == hashes(tmp_path / "whole")
    return counts


def test_ranks_that_restart_in_place_equal_an_undisturbed_run(tmp_path: Path) -> None:
    settings = {
        "train.steps": "5",
        "checkpoint.local.replication_factor": "1",
        "fault_detector.health_check_every": "0",
    }
    check_equal_run(tmp_path, 2, settings, num_faults=2)


@pytest.mark.slow  # 21 rounds
@pytest.mark.parametrize(
    "settings",
    [
        {"parallel.pp": "2", "parallel.tp": "2"},
        {"parallel.zero": "3", "checkpoint.async_save": "true", "train.micro_batch_size": "1"},
    ],
)
def test_twenty_restarts_in_place_leave_nothing_behind(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    settings |= {"train.steps": "42", "train.eval_every": "20"}
    for rank, counts in enumerate(check_equal_run(tmp_path, 4, settings, num_faults=20)):
        assert len(counts) == 20
        first, last = counts[2], counts[-1]
        print(f"after restart 3: {first}\nafter restart 20: {last}")
        assert (last.tensors, last.threads, last.groups) == (first.tensors, first.threads, 0)
        # in this test rank 0 serves the store, and has a connection to each rank
        assert last.files <= first.files + (4 if rank == 0 else 0)
        assert last.resident <= 1.05 * first.resident


FAULTS = """
import json, os, signal
from pathlib import Path
from megalith.train.callbacks.base import Callback

HERE = Path(__file__).parent
FAULTS = json.loads((HERE / "faults.json").read_text())  # point, step, rank, signal, in order

def die_if_due(point, step):
    num_done = len(list(HERE.glob("done-*")))
    group = FAULTS[num_done] if num_done < len(FAULTS) else []
    for fault in group:
        if fault[:3] == [point, step, int(os.environ["RANK"])]:
            (HERE / f"killed-{num_done}-{fault[2]}").touch()
            if len(list(HERE.glob(f"killed-{num_done}-*"))) == len(group):
                (HERE / f"done-{num_done}").touch()
            os.kill(os.getpid(), getattr(signal, fault[3] if len(fault) > 3 else "SIGKILL"))

class Fault(Callback):
    def __init__(self):
        die_if_due("rendezvous", 0)

    def on_start(self, run):
        self.step = run.step
        die_if_due("load", 0)

    def before_step(self, step, batches):
        self.step = step
        die_if_due("step", step)

    def before_evaluate(self, step):
        die_if_due("evaluate", step)

    def state_dict(self):
        die_if_due("save", self.step)
        return {"faults": 1}
"""


PlantedFault = tuple[str, int, int] | tuple[str, int, int, str]
"""Point, step and rank, and the signal if it is not SIGKILL."""


def train_by_command(
    tmp_path: Path,
    settings: dict[str, str],
    faults: Sequence[Sequence[PlantedFault]],
    *options: str,
    nproc: int = 4,
) -> str:
    """Train with `megalith train`; send ranks a signal at these points, one group after the other.
    Return what it writes to standard error."""
    (tmp_path / "faults.py").write_text(FAULTS)
    (tmp_path / "faults.json").write_text(json.dumps(faults))
    local = {"checkpoint.local.folder": str(tmp_path / "local")}
    file = tiny_yaml(tmp_path / "tiny.yaml", SETTINGS | local | settings)
    words = ["train", str(file), "--run", str(tmp_path / "run"), "--nproc", str(nproc)]
    done = subprocess.run(
        [sys.executable, "-m", "megalith", *words, "--callback", "faults:Fault", *options],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("done-*"))) == len(faults), done.stderr
    run_ranks(train_without_faults, nproc, file, tmp_path / "whole")
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert hashes(tmp_path / "run") == hashes(tmp_path / "whole")
    return done.stderr


@pytest.mark.slow  # ten starts of processes
@pytest.mark.parametrize("options", [(), ("--spares", "2")])
def test_ranks_killed_at_every_point_of_a_run_leave_the_losses_unchanged(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    faults: list[list[PlantedFault]] = [
        [("step", 1, 3)],  # before the first checkpoint
        [("step", 3, 0)],
        [("save", 4, 1)],
        [("step", 6, 2), ("step", 6, 0)],
        [("evaluate", 8, 0)],
        [("step", 10, 1)],
        [("rendezvous", 0, 2)],
        [("load", 0, 3)],
    ]
    settings = {"parallel.tp": "2", "train.steps": "12", "restart.max_in_place": "9"}
    errors = train_by_command(tmp_path, settings, faults, *options)
    assert errors.count("in place: ") >= 7
    assert "ranks [0, 2] are replaced" in errors


@pytest.mark.slow  # waits for the timeout of the heartbeat
def test_stopped_rank_is_killed_and_replaced_in_place(tmp_path: Path) -> None:
    """Only the heartbeat shows that a stopped process hangs: its watchdog does not run either."""
    settings = {
        "train.steps": "4",
        "restart.max_in_place": "1",
        "parallel.heartbeat_timeout_seconds": "20",
        "fault_detector.health_check_every": "0",
        "checkpoint.local.replication_factor": "1",
    }
    errors = train_by_command(tmp_path, settings, [[("step", 3, 0, "SIGSTOP")]], nproc=2)
    assert "rank 0: has made no progress for 20." in errors
    kept = "restart 1 in place: 1 of 2 ranks keep their processes"
    assert f"{kept}, ranks [0] are replaced" in errors


class _StubClient:
    """A client whose rank leaves a round and must not join another."""

    round, is_aborted = Round(3, 1, 2), False

    def leave(self, failure: object) -> Round:
        """Fail the test."""
        raise AssertionError("the rank has joined another round")


def _fail_to_read() -> Outcome:
    raise OSError("Input/output error")


def test_rank_whose_device_fails_the_health_check_joins_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    monkeypatch.setattr(health_check, "CPU_SIZES", CheckSizes(32, 1024, 1024))
    run = tiny_run({"train.threads": str(torch.get_num_threads())})
    check = RestartHealthCheck(run, tmp_path, environment)
    assert check.find_errors() == [] and not (tmp_path / "suspects.jsonl").exists()

    measure = health_check.check_device

    def flip_bits(*arguments: Any) -> DeviceHealth:
        health = measure(*arguments)
        bits = {name: each ^ 1 for name, each in health.bits.items()}
        return replace(health, bits=bits, errors=("memory pattern 0xaa: 1 of 8 bytes changed",))

    monkeypatch.setattr(restart, "check_device", flip_bits)
    client: Any = _StubClient()
    reason = (
        "memory pattern 0xaa: 1 of 8 bytes changed; "
        "matmul float32 has different bits than at the start of the process"
    )
    with pytest.raises(RankError) as caught:
        train_in_rounds(client, _fail_to_read, RankHeartbeat(), check.find_errors)
    assert str(caught.value) == (
        f"rank 1 does not join round 4: its device fails the health check ({reason}). "
        "It left round 3 because of: OSError: Input/output error"
    )
    (record,) = map(json.loads, (tmp_path / "suspects.jsonl").read_text().splitlines())
    shown = {name: record[name] for name in ("kind", "rank", "host", "reason", "exits")}
    assert shown == {
        "kind": "health_check",
        "rank": 1,
        "host": socket.gethostname(),
        "reason": reason,
        "exits": False,
    }
    assert read_suspect_exits(tmp_path) == ()


def test_device_that_raises_an_error_fails_the_health_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = RestartHealthCheck(tiny_run(), tmp_path, {})

    def fail(*arguments: Any) -> DeviceHealth:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(restart, "check_device", fail)
    text = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert check.find_errors() == [text]


@pytest.mark.parametrize(
    ("error", "is_aborted", "expected"),
    [
        (OSError("Input/output error"), False, True),
        (RankError("Traceback of rank 1"), False, True),
        (RuntimeError("[gloo] Connection closed by peer"), False, True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, False),
        (DataError("data.path=x: no such file."), False, False),
        (CollectiveError("different operations"), False, False),
        (KeyError("a bug"), False, False),
        (KeyError("a consequence"), True, True),
    ],
)
def test_errors_after_which_a_process_may_continue(
    error: Exception, is_aborted: bool, expected: bool
) -> None:
    assert is_recoverable(error, is_aborted=is_aborted) == expected


def test_connections_are_shut_down_if_they_were_opened_during_the_recording() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        pairs = []

        def connect() -> None:
            pairs.append((socket.create_connection(address), server.accept()[0]))

        connect()
        sockets = OpenedSockets()
        connect()
        with sockets.excluded():
            connect()
        sockets.close_recording()
        connect()
        sockets.shut_down()
        states = []
        for client, peer in pairs:
            peer.settimeout(0.05)
            try:
                states.append(peer.recv(1) == b"")
            except TimeoutError:
                states.append(False)
            client.close()
            peer.close()
    assert states == [False, True, False, False]
