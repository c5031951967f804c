"""A rank that makes no progress outside of collectives is found by its heartbeat, named with its
stacks, and killed; one that is only slow is not."""

import ctypes
import json
import os
import platform
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.errors import RankError
from megalith.launch import heartbeat as heartbeat_module
from megalith.launch.heartbeat import (
    MIN_PASSES,
    RECORD_NBYTES,
    HeartbeatMonitor,
    HeartbeatReader,
    HeartbeatState,
    RankHeartbeat,
    Section,
    SectionTimes,
    find_hung_rank,
    map_heartbeat,
    merge_times,
    read_times,
    write_times,
)
from megalith.launch.launcher import run_workers

RANK = """
import os, re, signal, sys, threading, time
from megalith.launch.heartbeat_process import open_heartbeat
from megalith.launch.launcher import worker_main

def loop_with_lock():
    re.match("(a+)+$", 64 * "a" + "b")

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()

def sleep():
    threading.Event().wait()

def work_slowly():
    for _ in range(4):
        time.sleep(0.6)
        heartbeat.record()
    os._exit(0)

def run():
    global heartbeat
    with open_heartbeat(os.environ) as heartbeat:
        heartbeat.set_timeouts(60, fixed_seconds=1.0)
        heartbeat.record(sys.argv[2])
        if os.environ["RANK"] == "1":
            globals()[sys.argv[1]]()
        waits = threading.Event()
        for _ in range(100 if sys.argv[1] != "work_slowly" else 60):
            waits.wait(0.05)
            heartbeat.record_wait()
    return 0

sys.exit(worker_main(run, os.environ))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heartbeat") / "rank.py"
    path.write_text(RANK)
    return path


def launch(script: Path, how: str, section: str) -> str:
    """Return the error of a launch of two ranks, of which rank 1 has this fault."""
    command = [sys.executable, str(script), how, section]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with pytest.raises(RankError) as caught:
        run_workers([], 2, command=command, environment=environment)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "section", "state"),
    [("stop", "save", "T"), ("loop_with_lock", "step", "R"), ("sleep", "load", "S")],
)
def test_rank_without_progress_is_killed_and_reported_with_its_stacks(
    script: Path, how: str, section: str, state: str
) -> None:
    began = time.monotonic()
    text = launch(script, how, section)
    assert time.monotonic() - began < 30
    assert text.startswith("rank 1 failed first:\nrank 1 has made no progress for "), text
    assert f" s in section {section}, outside of collectives, and was killed " in text
    assert "(timeout: 1.0 s)" in text
    assert "set parallel.heartbeat_timeout_seconds to more than" in text
    assert f"State of its process: {state} (" in text
    assert 'rank.py", line ' in text and f" in {how}\n" in text, "the stack of the main thread"
    assert re.search(rf"  rank 0: {section}, heartbeat 1, last progress 0\.\d s ago", text)


def test_slow_rank_and_rank_that_waits_for_it_are_not_killed(script: Path) -> None:
    command = [sys.executable, str(script), "work_slowly", "step"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    assert run_workers([], 2, command=command, environment=environment) == 0


@pytest.mark.parametrize("how", ["stop", "loop_with_lock"])
def test_monitor_process_ends_a_rank_that_torchrun_started(
    script: Path, tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "attempt_0"
    ranks = []
    for rank in (0, 1):
        (folder / str(rank)).mkdir(parents=True)
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "TORCHELASTIC_ERROR_FILE": str(folder / str(rank) / "error.json"),
            "PYTHONPATH": os.getcwd(),
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(script), how, "step"],
                env=os.environ | variables,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    _, text = ranks[1].communicate(timeout=60)
    assert ranks[0].poll() is None and ranks[1].returncode == -signal.SIGKILL
    ranks[0].kill()
    ranks[0].communicate(timeout=60)
    record = json.loads((folder / "1" / "error.json").read_text())["message"]
    assert record["message"].startswith("has made no progress for ")
    assert f" in {how}\n" in record["extraInfo"]["py_callstack"]
    assert "rank 0: step, heartbeat 1" in record["extraInfo"]["py_callstack"]
    assert text.startswith("megalith: rank 1 has made no progress")


def shared() -> tuple[RankHeartbeat, HeartbeatReader]:
    """A heartbeat, and its reader in the same process."""
    reader = HeartbeatReader()
    return RankHeartbeat(map_heartbeat(reader.fd)), reader


class Clock:
    """Replaces the time of the heartbeat module."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(heartbeat_module, "time", fake)
    return fake


def wait(clock: Clock, reader: HeartbeatReader, seconds: float) -> HeartbeatState:
    """Check twice per second for so long, and return the last state."""
    for _ in range(int(2 * seconds)):
        clock.now += 0.5
        state = reader.check(3)
    return state


def test_record_has_16_bytes() -> None:
    assert RECORD_NBYTES == 16


def test_timeouts_are_learned_after_16_passes_and_at_least_60_seconds(clock: Clock) -> None:
    heartbeat, reader = shared()
    heartbeat.set_timeouts(600.0)
    heartbeat.record("start")
    clock.now += 300.0  # compilation in the first step is not a step
    heartbeat.record("step")
    for number in range(MIN_PASSES):
        assert reader.check(3).timeout_seconds == 600.0, number
        clock.now += 2.0
        heartbeat.record()
    assert reader.check(3).timeout_seconds == 60.0
    clock.now += 30.0
    heartbeat.record()
    assert reader.check(3).timeout_seconds == 150.0
    with heartbeat.within("save"):
        assert reader.check(3).timeout_seconds == 600.0, "each section has its own"
    assert heartbeat.times["start"] == SectionTimes(1, 300.0)


def test_timeout_shorter_than_60_seconds_is_kept(clock: Clock) -> None:
    heartbeat, reader = shared()
    heartbeat.set_timeouts(10.0)
    for _ in range(MIN_PASSES + 1):
        clock.now += 0.5
        heartbeat.record("step")
    assert reader.check(3).timeout_seconds == 10.0


def test_time_in_which_a_rank_waited_for_others_is_not_learned(clock: Clock) -> None:
    heartbeat, _ = shared()
    heartbeat.set_timeouts(600.0)
    heartbeat.record("step")
    clock.now += 100.0
    heartbeat.record_wait()
    heartbeat.record()
    clock.now += 1.0
    heartbeat.record()
    assert heartbeat.times == {"step": SectionTimes(1, 1.0)}


def test_rank_is_hung_after_its_timeout_without_heartbeat_or_wait(clock: Clock) -> None:
    heartbeat, reader = shared()
    assert wait(clock, reader, 1000).section is None, "not monitored before the first heartbeat"
    heartbeat.set_timeouts(60.0)
    heartbeat.record("step")
    assert not wait(clock, reader, 60).is_hung
    heartbeat.record_wait()
    assert not wait(clock, reader, 60).is_hung
    heartbeat.record()
    assert not wait(clock, reader, 60).is_hung
    state = wait(clock, reader, 1)
    assert state.is_hung and find_hung_rank([state]) == state
    heartbeat.stop()
    assert not wait(clock, reader, 100).is_hung, "it is not monitored after an error"


def test_time_in_which_the_monitor_was_stopped_does_not_count(clock: Clock) -> None:
    heartbeat, reader = shared()
    heartbeat.set_timeouts(60.0)
    heartbeat.record("step")
    reader.check(3)
    clock.now += 3600.0
    assert reader.check(3).idle_seconds <= 1.0


def test_monitor_releases_the_memory_of_processes_that_ended() -> None:
    monitor, reader = HeartbeatMonitor(), HeartbeatReader()
    monitor.add(17, reader)
    assert monitor.find_hung_rank({0: 17, 1: 18}) is None
    monitor.remove(17)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader.fd)
    monitor.close()


def test_longest_hung_rank_is_the_root_cause() -> None:
    states = [HeartbeatState(rank, "step", 1, 60.0 + rank % 2, 50.0) for rank in range(4)]
    found = find_hung_rank(states)
    assert found is not None and found.rank == 1


def test_times_are_stored_by_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "heartbeats.json"
    assert read_times(path, 4) == {}
    first: dict[Section, SectionTimes] = {"step": SectionTimes(20, 1.5)}
    write_times(path, 4, first)
    write_times(path, 2, {"save": SectionTimes(3, 9.0)})
    assert read_times(path, 4) == first
    assert read_times(path, 2) == {"save": SectionTimes(3, 9.0)}
    for damaged in (
        "",
        "[]",
        '{"4": []}',
        '{"4": {"step": {"passes": "x"}}}',
        '{"4": {"step": 1}}',
        '{"4": {"step": {"passes": 20, "longest_seconds": Infinity}}}',
        '{"4": {"step": {"passes": 20, "longest_seconds": 1e999}}}',
        '{"4": {"step": {"passes": 20, "longest_seconds": 1' + 400 * "0" + "}}}",
        100_000 * "[",
    ):
        path.write_text(damaged)
        assert read_times(path, 4) == {}, damaged
    write_times(path, 4, first)
    assert read_times(path, 4) == first


def test_largest_times_of_all_ranks_are_kept() -> None:
    ranks: list[dict[Section, SectionTimes]] = [
        {"step": SectionTimes(5, 1.0), "save": SectionTimes(1, 2.0)},
        {"step": SectionTimes(4, 3.0)},
    ]
    assert merge_times(ranks) == {"step": SectionTimes(5, 3.0), "save": SectionTimes(1, 2.0)}


NUMBERS = {"x86_64": (1, 231), "aarch64": (64, 94)}
"""System calls write and exit_group of an architecture."""


def _permit_only(numbers: tuple[int, ...]) -> bool:
    """Have the kernel kill this process at any other system call (seccomp); return whether it
    can."""
    load_number = (0x20, 0, 0, 0)
    permit, kill = (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x80000000)
    compare = [(0x15, len(numbers) - index, 0, each) for index, each in enumerate(numbers)]
    program = b"".join(struct.pack("HBBI", *each) for each in [load_number, *compare, kill, permit])
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    return bool(libc.prctl(22, 2, ctypes.create_string_buffer(header, len(header)), 0, 0) == 0)


def _needs_no_system_call(work: Callable[[], object]) -> bool:
    """Return whether a child process that may only write and exit survives `work`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if not _permit_only(NUMBERS[platform.machine()]):
            os.write(writer, b"unsupported")
            os._exit(0)
        work()
        os.write(writer, b"done")
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    text = os.read(reader, 100)
    os.close(reader)
    if text == b"unsupported":
        pytest.skip("this kernel has no seccomp filters")
    return text == b"done"


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in NUMBERS, reason="seccomp is Linux's"
)
def test_heartbeat_is_written_without_a_system_call() -> None:
    heartbeat, reader = shared()
    heartbeat.set_timeouts(600.0)

    def record() -> None:
        for _ in range(1000):
            heartbeat.record("step")
            heartbeat.record_wait()

    heartbeat.record("step")
    assert _needs_no_system_call(record)
    assert reader.check(3).num_heartbeats == 1001, "the memory is shared with the child"
    assert not _needs_no_system_call(os.getppid), "the filter detects a system call"


def test_section_that_begins_without_monitoring_ends_without_it() -> None:
    heartbeat = RankHeartbeat()
    with heartbeat.within("load"):
        assert heartbeat.section == "load"
    assert heartbeat.section is None
