"""The first signal is noted, handlers come back, and time runs out."""

import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

from megalith.train.callbacks.stop import Stopper


def test_first_signal_is_recorded_and_the_old_handler_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    output: list[str] = []
    with Stopper(max_minutes=None, print_line=output.append) as stopper:
        assert stopper.reason is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.reason == "SIGTERM"
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # a second signal ends the process
    assert signal.getsignal(signal.SIGTERM) == before
    assert "finishing the step and saving" in output[0]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_every_stop_signal_is_noted(number: signal.Signals) -> None:
    with Stopper(max_minutes=None, print_line=lambda text: None) as stopper:
        os.kill(os.getpid(), number)
        assert stopper.reason == number.name


def test_hangup_ignored_by_nohup_stays_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopper(max_minutes=None, print_line=print) as stopper:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stopper.reason is None
    finally:
        signal.signal(signal.SIGHUP, previous)


UNTIL_HANGUP = """
import sys, time
from pathlib import Path
from megalith.train.callbacks.stop import Stopper

with Stopper(max_minutes=None, print_line=lambda text: print(text, flush=True)) as stopper:
    Path(sys.argv[1], "ready").touch()
    deadline = time.monotonic() + 120
    while stopper.reason is None and time.monotonic() < deadline:
        time.sleep(0.01)
    print("saving", flush=True)
    Path(sys.argv[1], "saved").write_text(str(stopper.reason))
"""


@pytest.mark.usefixtures("interruptible")
def test_run_saves_when_its_terminal_is_closed(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", UNTIL_HANGUP, str(tmp_path)])
    deadline = time.monotonic() + 120
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.close(terminal)  # the kernel sends SIGHUP, and writing to the terminal fails from now on
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_time_limit_is_a_reason() -> None:
    with Stopper(max_minutes=0.0, print_line=print) as stopper:
        assert stopper.reason == "time limit"
