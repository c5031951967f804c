"""The supervisor of restarts in place: who keeps a process, who is replaced, and when it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megalith.config.restart import RestartConfig
from megalith.errors import RankError, UserError
from megalith.launch import heartbeat, in_place, launcher
from megalith.launch.in_place import InPlacePolicy, InPlaceRanks, JobProcess
from megalith.launch.launcher import Failure, run_workers
from megalith.launch.rounds import HangReport, RestartClient, Round, RoundFailure
from megalith.testing.inject import patched

ROOT = Path(__file__).resolve().parent.parent.parent

WORKER = """
import json, os, signal, sys, threading, time
from pathlib import Path
from megalith.errors import ConfigError
from megalith.launch.heartbeat_process import open_heartbeat
from megalith.launch.launcher import Failure, worker_main
from megalith.launch.rounds import RestartClient

here, faults = Path(sys.argv[1]), json.loads(sys.argv[2])
aborted = threading.Event()

def work():
    signal.signal(signal.SIGUSR1, lambda *_: (here / f"usr1-{os.getpid()}").touch())
    birth = here / f"births-{os.environ['RANK']}"
    if "stillborn" in faults and birth.exists() and os.environ["RANK"] == "1":
        os._exit(9)
    birth.touch()
    client = RestartClient.from_environment(os.environ)
    client.wait_for_round()
    while True:
        place = client.round
        (here / f"round{place.number}-rank{place.rank}").write_text(str(os.getpid()))
        wait_for_all(place)
        fault = faults.get(f"{place.number}:{place.rank}")
        client.set_abort(None if fault == "stay" else aborted.set)
        client.num_steps = faults.get("steps", 1)
        print(f"round {place.number}", flush=True)
        failure = act(fault, client)
        if failure is None:
            if not any(key.startswith(f"{place.number}:") for key in faults):
                return 0
            aborted.wait()
            if fault == "die_in_abort":
                os.kill(os.getpid(), signal.SIGKILL)
            failure = Failure(place.rank, "Connection closed by peer", "", time.monotonic_ns())
        client.set_abort(None)
        aborted.clear()
        client.leave(failure)

def wait_for_all(place):
    files = [here / f"round{place.number}-rank{rank}" for rank in range(place.world)]
    while not all(file.exists() for file in files):
        time.sleep(0.005)

def act(fault, client):
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        with open_heartbeat(os.environ) as heartbeat:
            heartbeat.set_timeouts(0.3)
            heartbeat.record("step")
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)
    if fault == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    if fault == "bug":
        raise KeyError("a bug")
    if fault == "refuse":
        raise ConfigError("parallel.tp=3 is odd. Set it to 2.")
    if fault == "await_spare":
        while not (here / "births-3").exists():
            time.sleep(0.01)
    if fault in ("leave", "await_spare"):
        return Failure(client.round.rank, "OSError: the disk", "", time.monotonic_ns())
    if fault == "hang":
        text = "rank 0 did not arrive at a collective"
        client.report_hang(Failure(client.round.rank, text, text, 1, is_report=True), 0.0)
    return None

sys.exit(worker_main(work, os.environ))
"""

PARENT = """
import sys
from functools import partial
from megalith.config.restart import RestartConfig
from megalith.launch.in_place import InPlacePolicy, InPlaceRanks
from megalith.launch.launcher import run_workers

InPlaceRanks._start_store = lambda self: None
policy = InPlacePolicy(config=RestartConfig(max_in_place=3), num_spares=1)
build = partial(InPlaceRanks, policy=policy)
sys.exit(run_workers(sys.argv[2:], 2, command=[sys.executable, sys.argv[1]], build_ranks=build))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that joins rounds and has faults; no store, which would import torch."""
    monkeypatch.setattr(launcher, "NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(InPlaceRanks, "_start_store", lambda self: None)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = tmp_path / "worker.py"
    file.write_text(WORKER)
    return file


def launch(
    script: Path,
    faults: dict[str, Any],
    nproc: int = 3,
    *,
    max_in_place: int = 3,
    timeout: float = 30.0,
    spares: int = 0,
    fits: Callable[[int], bool] = lambda world: False,
) -> int:
    """Run the program; `faults`: by round and rank."""
    policy = InPlacePolicy(
        config=RestartConfig(max_in_place=max_in_place, rendezvous_timeout_seconds=timeout),
        num_spares=spares,
        replicas=lambda world: [(rank,) for rank in range(world)],
        fits=fits,
    )
    return run_workers(
        [str(script.parent), json.dumps(faults)],
        nproc,
        command=[sys.executable, str(script)],
        build_ranks=partial(InPlaceRanks, policy=policy),
    )


def pids(script: Path, number: int) -> list[int]:
    """Process of each rank in a round."""
    files = sorted(script.parent.glob(f"round{number}-rank*"))
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_is_replaced_and_the_others_keep_their_processes(
    script: Path, rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(script, {f"0:{rank}": "kill"}) == 0
    changed = [a != b for a, b in zip(pids(script, 0), pids(script, 1), strict=True)]
    assert changed == [each == rank for each in range(3)]
    output, errors = capfd.readouterr()
    assert errors == (
        f"megalith: rank {rank} was killed by signal 9 (SIGKILL); restart 1 in place: 2 of 3 ranks "
        f"keep their processes, ranks [{rank}] are replaced\n"
    )
    assert output == "round 0\nround 1\n", "rank 0 prints, in whichever process"


@pytest.mark.slow  # starts several processes
def test_two_ranks_that_are_killed_at_once_are_replaced_in_one_restart(script: Path) -> None:
    assert launch(script, {"0:0": "kill", "0:1": "kill"}) == 0
    changed = [a != b for a, b in zip(pids(script, 0), pids(script, 1), strict=True)]
    assert changed == [True, True, False]


def test_a_rank_that_is_killed_while_it_leaves_the_round_is_replaced(script: Path) -> None:
    assert launch(script, {"0:1": "kill", "0:2": "die_in_abort"}) == 0
    changed = [a != b for a, b in zip(pids(script, 0), pids(script, 1), strict=True)]
    assert changed == [False, True, True]


@pytest.mark.slow  # starts several processes
def test_restarts_follow_each_other(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(script, {"0:1": "bug", "1:1": "kill", "2:0": "leave"}) == 0
    assert pids(script, 3) == pids(script, 2)
    assert pids(script, 3)[1] not in (pids(script, 0)[1], pids(script, 1)[1])
    causes = [line.partition("; restart")[0] for line in capfd.readouterr().err.splitlines()]
    assert "KeyError: 'a bug'" in causes[0]
    assert causes[1] == "megalith: rank 1 was killed by signal 9 (SIGKILL)", "not the error before"
    assert "rank 0: OSError: the disk" in causes[2]


def test_a_rank_with_an_error_of_its_own_keeps_its_process(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(script, {"0:1": "leave"}) == 0
    assert pids(script, 0) == pids(script, 1)
    assert "rank 1: OSError: the disk; restart 1 in place: 3 of 3 ranks" in capfd.readouterr().err


def test_a_spare_replaces_a_dead_rank_zero_and_gets_its_output(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(script, {"0:0": "kill"}, spares=1) == 0
    assert (script.parent / "births-3").exists()
    assert pids(script, 0)[0] != pids(script, 1)[0]
    assert capfd.readouterr().out == "round 0\nround 1\n"


def test_a_rank_that_does_not_leave_the_round_is_killed_and_replaced(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(script, {"0:1": "leave", "0:2": "stay"}, timeout=1.0) == 0
    changed = [a != b for a, b in zip(pids(script, 0), pids(script, 1), strict=True)]
    assert changed == [False, False, True]
    assert "ranks [2] did not leave their step and were killed" in capfd.readouterr().err


def test_a_stopped_rank_is_killed_and_replaced(
    script: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeat is the only thing that shows that it hangs."""
    monkeypatch.setattr(heartbeat, "STACK_SECONDS", 0.2)
    assert launch(script, {"0:1": "stop"}, 2) == 0
    first, second = pids(script, 0), pids(script, 1)
    assert first[0] == second[0] and first[1] != second[1]
    errors = capfd.readouterr().err
    assert "rank 1: has made no progress for 0." in errors
    assert "restart 1 in place: 1 of 2 ranks keep their processes, ranks [1] are" in errors


def test_a_hang_aborts_the_round(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(script, {"0:1": "hang"}) == 0
    assert pids(script, 0) == pids(script, 1)
    expected = "megalith: rank 0 did not arrive at a collective; restart 1 in place"
    assert capfd.readouterr().err.startswith(expected)


@pytest.mark.slow  # starts several processes
def test_a_hang_after_the_last_restart_ends_the_job_with_its_report(script: Path) -> None:
    with pytest.raises(RankError, match=r"^rank 0 did not arrive at a collective") as caught:
        launch(script, {"0:1": "leave", "1:1": "hang"}, max_in_place=1)
    expected = "No restart in place followed: there were 1 restarts in the last 60 minutes"
    assert expected in str(caught.value)


def test_replicas_without_their_processes_are_removed(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = {"0:1": "kill", "stillborn": True}
    assert launch(script, faults, 4, fits=lambda world: world in (1, 2)) == 0
    before = pids(script, 0)
    assert pids(script, 1) == [before[0], before[2]]
    errors = capfd.readouterr().err
    assert "2 of 4 ranks keep their processes, the run continues on 2 of 4 ranks" in errors


@pytest.mark.slow  # starts several processes
def test_a_job_that_cannot_shrink_ends_with_the_reason(script: Path) -> None:
    with pytest.raises(RankError, match=r"^rank 1 was killed by signal 9") as caught:
        launch(script, {"0:1": "kill", "stillborn": True})
    assert str(caught.value).endswith(
        "No restart in place followed: no process took the place of ranks [1] within "
        "restart.rendezvous_timeout_seconds=30, and the run cannot continue with fewer replicas."
    )


def test_rounds_without_a_step_end_the_job(script: Path) -> None:
    faults = {f"{number}:1": "leave" for number in range(9)} | {"steps": 0}
    with pytest.raises(RankError, match="the last 3 starts did not finish a step"):
        launch(script, faults, 2, max_in_place=9)
    assert pids(script, 2) and not pids(script, 3)


def test_a_users_error_ends_the_job_at_once(script: Path) -> None:
    with pytest.raises(UserError, match=r"^rank 1: parallel\.tp=3 is odd\. Set it to 2\.$"):
        launch(script, {"0:1": "refuse"})
    assert not pids(script, 1)


def test_a_rank_that_someone_terminates_is_not_replaced(script: Path) -> None:
    with pytest.raises(RankError, match="a signal has ended the job"):
        launch(script, {"0:1": "terminate"})
    assert not pids(script, 1)


@pytest.mark.slow  # starts several processes
def test_a_job_without_survivors_ends(script: Path) -> None:
    with pytest.raises(RankError, match="no rank has survived"):
        launch(script, {"0:0": "bug", "0:1": "bug"}, 2)


@pytest.mark.slow  # starts several processes
def test_spares_are_replaced_and_not_signaled_before_they_have_a_rank(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [sys.executable, "-c", PARENT, str(script), str(script.parent)]
    words.append(json.dumps({"0:1": "wait"}))
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 30
        expected = [script.parent / name for name in ("round0-rank0", "round0-rank1", "births-2")]
        while not all(file.exists() and file.read_text() is not None for file in expected):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        while len(list(script.parent.glob("usr1-*"))) < 2:
            assert time.monotonic() < deadline
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    signaled = {int(file.name.partition("-")[2]) for file in script.parent.glob("usr1-*")}
    assert signaled == set(pids(script, 0))
    assert (process.returncode, errors) == (143, "megalith: interrupted by SIGTERM\n")
    assert not pids(script, 1)


@pytest.mark.slow  # starts several processes
def test_used_spares_are_started_again(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "SPARE_DELAY_SECONDS", 0.0)
    assert launch(script, {"0:1": "kill", "1:0": "await_spare"}, 2, spares=1) == 0
    assert pids(script, 1) == pids(script, 2), "a spare that is not needed stays without a rank"


def test_messages_of_an_earlier_round_do_not_end_the_current_one(tmp_path: Path) -> None:
    policy = InPlacePolicy(config=RestartConfig(max_in_place=1))
    ranks = InPlaceRanks([], 1, tmp_path, {}, policy=policy)
    ranks.round = 3
    process: Any = None  # not used
    failure = asdict(Failure(0, "late", "late", 1, is_report=True))
    with ranks._server, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
        member = JobProcess(process, control, 0.0)
        ranks._handle(member, RoundFailure(2, 1, failure))
        ranks._handle(member, HangReport(2, failure))
        assert (member.round_failure, ranks._hang) == (None, None)
        ranks._handle(member, RoundFailure(3, 1, failure))
        ranks._handle(member, HangReport(3, failure))
        assert member.round_failure is not None and ranks._hang is not None


def test_abort_of_an_earlier_round_does_not_close_the_connections_of_the_current_one() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
        with patched(RestartClient, "_receive", lambda client: None):
            client = RestartClient(control, {})
        client.round = Round(2, 0, 1)
        aborts: list[int] = []
        client.set_abort(lambda: aborts.append(client.round.number))
        client._abort_round(1)
        assert aborts == [] and not client.is_aborted
        client._abort_round(2)
        assert aborts == [2] and client.is_aborted
