"""Failure records of worker processes, and the report of several ranks' failures as one text.

One rank's failure makes all others fail, because their peers lose the connection. So failures are
sorted by cause: the first is shown completely and the others in one line each.
"""

import ctypes
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import NoReturn

_CONSEQUENCES = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Socket closed|Connection refused|connection was "
    r"likely closed|failed to recv|remote process exited|Timed out waiting|Wait timeout|wait "
    r"timeout|aborted|stopped in a hang",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL, the stores and the hang watch on a rank whose peer has failed."""

STOPPED_IN_A_HANG = "stopped in a hang"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

MAX_SUMMARY = 300
"""Maximum length of the line of a rank that failed after another."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Record of how one rank failed."""

    rank: int
    summary: str
    """One line: the exception and its message, or the exit status of the process."""

    text: str
    """Complete description: the traceback, if there was one."""

    when_ns: int
    """`time.monotonic_ns()` at the failure: the same clock for all processes of a machine."""

    is_report: bool = False
    """Whether the text describes all ranks, so that nothing else is reported."""

    @property
    def is_consequence(self) -> bool:
        """Whether the failure only shows that another rank has failed."""
        return _CONSEQUENCES.search(self.summary) is not None


def exception_failure(rank: int, error: BaseException, *, frames_to_skip: int = 0) -> Failure:
    """Return the record of an exception caught on `rank`, without its outermost `frames_to_skip`
    frames."""
    frames = error.__traceback__
    for _ in range(frames_to_skip):
        frames = frames.tb_next if frames is not None and frames.tb_next is not None else frames
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    summary = " ".join("".join(traceback.format_exception_only(error)).split())
    return Failure(rank, summary, text, time.monotonic_ns())


def exit_failure(rank: int, code: int) -> Failure:
    """Return the record of a process that ended without leaving its own."""
    text = explain_exit(code)
    return Failure(rank, text, text, time.monotonic_ns())


def explain_exit(code: int) -> str:
    """Describe a return code of `subprocess`; negative means a signal.

    >>> explain_exit(-9)
    'was killed by signal 9 (SIGKILL)'
    """
    if code >= 0:
        return f"ended with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by signal {-code} ({known.get(-code, 'unknown')})"


def sort_failures(failures: Iterable[Failure]) -> list[Failure]:
    """Sort failures, the cause first: the earliest one that is not the loss of a peer."""
    return sorted(failures, key=lambda failure: (failure.is_consequence, failure.when_ns))


def describe(failures: Iterable[Failure], ended: Mapping[int, str] = MappingProxyType({})) -> str:
    """Describe the first failure completely, then each other rank in a line; `ended`: text for each
    rank that did not fail."""
    first, *others = sort_failures(failures)
    if first.is_report:
        return first.text
    lines = [
        f"rank {first.rank} {first.text}" if first.text == first.summary else _with_traceback(first)
    ]
    lines += ["then:"] if others or ended else []
    lines += [f"  rank {other.rank}: {other.summary[:MAX_SUMMARY]}" for other in others]
    lines += [f"  rank {rank}: {words}" for rank, words in ended.items()]
    return "\n".join(lines)


def _with_traceback(failure: Failure) -> str:
    return f"rank {failure.rank} failed first:\n{failure.text}"


class InterruptHandler:
    """SIGINT handler that raises KeyboardInterrupt and records that it did.

    Libraries whose import is interrupted may turn KeyboardInterrupt into another exception.
    """

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        """Raise KeyboardInterrupt in the main thread."""
        self.received = True
        raise KeyboardInterrupt


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent process `parent` ends in any way.

    Linux provides this. Elsewhere a thread checks once a second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(
            target=_watch_parent, args=(parent,), daemon=True, name="watch-parent"
        ).start()
    if os.getppid() != parent:  # the parent ended before the request
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
