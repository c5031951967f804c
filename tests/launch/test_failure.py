"""Of several failing ranks, the one that explains the others comes first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalith.launch.launcher import (
    MAX_SUMMARY,
    Failure,
    describe,
    exception_failure,
    exit_failure,
    explain_exit,
    sort_failures,
)

ROOT = Path(__file__).resolve().parent.parent.parent


def _inner() -> None:
    raise KeyError("two\nlines")


def caught(rank: int) -> Failure:
    """A failure with two frames of this file."""
    try:
        _inner()
    except KeyError as error:
        return exception_failure(rank, error)
    raise AssertionError


def lost_peer(rank: int, when_ns: int) -> Failure:
    summaries = (
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]:1. GLHF"
    )
    return Failure(rank, summaries, f"Traceback\n{summaries}", when_ns)


def test_a_caught_exception_keeps_its_traceback_and_one_line() -> None:
    before = time.monotonic_ns()
    failure = caught(3)
    assert (failure.rank, failure.summary) == (3, "KeyError: 'two\\nlines'")
    assert failure.text.startswith("Traceback (most recent call last):")
    assert "in caught" in failure.text
    assert "in _inner" in failure.text
    assert before <= failure.when_ns <= time.monotonic_ns()


def test_frames_of_the_caller_can_be_omitted() -> None:
    with pytest.raises(KeyError) as raised:
        _inner()
    for skipped, is_local in ((0, True), (1, False), (9, False)):
        text = exception_failure(0, raised.value, frames_to_skip=skipped).text
        assert "in _inner" in text
        assert ("in test_frames" in text) == is_local


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with exit code 3"),
        (0, "ended with exit code 0"),
        (-9, "was killed by signal 9 (SIGKILL)"),
        (-15, "was killed by signal 15 (SIGTERM)"),
        (-99, "was killed by signal 99 (unknown)"),
    ],
)
def test_exit_codes_are_described(code: int, words: str) -> None:
    assert explain_exit(code) == words


def test_cause_is_sorted_before_lost_peers_that_were_detected_earlier() -> None:
    dead = Failure(1, "was killed by signal 9 (SIGKILL)", "was killed by signal 9 (SIGKILL)", 50)
    assert [
        failure.rank for failure in sort_failures([lost_peer(0, 10), lost_peer(2, 5), dead])
    ] == [
        1,
        2,
        0,
    ]


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: Read error [127.0.0.1]:1: Connection reset by peer",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a "
        "network error",
        "RuntimeError: Timed out waiting 30000ms for recv operation to complete",
        "RuntimeError: Broken pipe",
    ],
)
def test_backend_messages_of_a_lost_peer_are_consequences(message: str) -> None:
    assert Failure(0, message, message, 0).is_consequence


def test_other_exceptions_are_not_consequences() -> None:
    assert not caught(0).is_consequence
    assert not exit_failure(0, -6).is_consequence


def test_first_failure_is_shown_in_full_and_the_others_in_one_line() -> None:
    first, later = (
        caught(1),
        Failure(2, "ValueError: " + "x" * 999, "Traceback\nValueError", time.monotonic_ns()),
    )
    head, tail = describe([lost_peer(0, 1), later, first]).split("\nthen:\n")
    assert head == f"rank 1 failed first:\n{first.text}"
    assert [line[:23] for line in tail.splitlines()] == [
        "  rank 2: ValueError: x",
        "  rank 0: RuntimeError:",
    ]
    assert max(map(len, tail.splitlines())) == len("  rank 2: ") + MAX_SUMMARY


def test_ranks_that_did_not_fail_themselves_come_last() -> None:
    text = describe([lost_peer(0, 1), exit_failure(4, 3)], {1: "was ended"})
    assert [line[:9] for line in text.splitlines()] == [
        "rank 4 en",
        "then:",
        "  rank 0:",
        "  rank 1:",
    ]
    assert describe([exit_failure(4, 3)], {1: "was ended"}).endswith("\nthen:\n  rank 1: was ended")


def test_killed_process_is_described_in_one_line() -> None:
    assert describe([exit_failure(4, -9)]) == "rank 4 was killed by signal 9 (SIGKILL)"


CHILD = """
import os, sys, time
from megalith.launch.launcher import die_with_parent
sys.platform = sys.argv[2]
die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]]).wait()
"""


@pytest.mark.parametrize("platform", [sys.platform, "without prctl"])
def test_a_child_ends_with_a_parent_that_was_killed(platform: str) -> None:
    command, environment = (
        [sys.executable, "-c", PARENT, CHILD, platform],
        os.environ | {"PYTHONPATH": str(ROOT)},
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.send_signal(signal.SIGKILL)
        # ends when the child, who holds the other end of the pipe, does
        assert parent.stdout.read() == ""


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "1", sys.platform],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=30,
    )
    assert done.returncode == 1
