"""Fault injection: the callback that injects the fault of the settings into its own rank."""

import ctypes
import math
import os
import random
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megalith.checkpoint.save import SaveReport
from megalith.config.fault_injection import NUMERIC_KINDS, FaultInjectorConfig, FaultSection
from megalith.data.loader import StepBatches
from megalith.optim.slots import MASTER
from megalith.parallel.grad_sync import ShardedParam
from megalith.train.callbacks.base import Callback, Outcome, RunView
from megalith.train.start_records import append_record, read_records

INJECTED_FAULTS = "injected_faults.jsonl"
"""File of the run folder with one line for each injected fault, written before it occurs."""

_INT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FaultInjector(Callback):
    """Injects the fault of `fault_injector` into this rank (fault tolerance tests).

    Unlike other callbacks it may change gradients, weights and optimizer state: that is the fault.
    """

    collective = True  # an error ends the run: the kind `exception` raises one

    def __init__(self, config: FaultInjectorConfig) -> None:
        self.fault = config
        self.num_faults = 0
        """Number of faults injected into this rank in the run, over all its starts."""
        self._is_rank = False
        self._step = 0
        self._started = self._section_began = 0.0
        self._is_slow = self._corrupts_step = False
        self._file_limit: tuple[int, int] | None = None
        self._handles: list[RemovableHandle] = []
        self._timer: threading.Timer | None = None

    def on_start(self, run: RunView) -> None:
        """Count the faults of earlier starts; register the hooks that inject the fault, on
        its rank."""
        self._run, fault = run, self.fault
        self._is_rank = run.mesh.world.rank == fault.rank
        if not self._is_rank:
            return
        self._started, self._step = time.monotonic(), run.step
        self.num_faults = len(read_injected_faults(run.folder.path, fault.rank))
        run.log(f"fault_injector.kind={fault.kind}: rank {fault.rank} will inject this fault")
        if fault.kind in NUMERIC_KINDS and fault.target in ("gradient", "activation"):
            self._handles = [chunk.register_forward_hook(self._corrupt) for chunk in run.chunks]
        if fault.seconds is not None and fault.kind in _ACTIONS_OF_THREADS and self._occurs_again():
            self._timer = threading.Timer(fault.seconds, self._act)
            self._timer.daemon = True
            self._timer.start()

    def before_step(self, step: int, batches: StepBatches) -> None:
        """Inject a fault of this step."""
        self._step = step
        self._restore_file_limit()
        self._is_slow = self._corrupts_step = False
        if not self._is_due("step"):
            return
        kind, target = self.fault.kind, self.fault.target
        if kind in NUMERIC_KINDS and target in ("gradient", "activation"):
            self._corrupts_step = True  # counted where it occurs
        elif kind in NUMERIC_KINDS and target == "file":
            pass  # in `after_save`
        elif kind in NUMERIC_KINDS:
            self._record()
            self._corrupt_state()
        elif kind == "slow":
            self._record()
            self._is_slow, self._section_began = True, time.monotonic()
        elif kind == "full_disk":
            self._record()
            self._file_limit = limit_file_size()
        else:
            self._act()

    def after_microbatch(self, index: int) -> None:
        """Inject a fault in backward; slow down a microbatch."""
        if self._is_slow:
            time.sleep((self.fault.factor - 1) * (time.monotonic() - self._section_began))
            self._section_began = time.monotonic()
        elif index == 0 and self._is_due("backward"):
            self._act()

    def after_backward(self, local_params: Sequence[ShardedParam]) -> None:
        """Begin to measure the next forward and backward pass of a slow step."""
        self._section_began = time.monotonic()

    def before_evaluate(self, step: int) -> None:
        """Inject a fault in an evaluation."""
        if self._is_due("evaluate"):
            self._act()

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """Inject a fault in a save, which begins with this call; there is no state."""
        if self._is_due("save"):
            self._act()
        return {}

    def after_save(self, report: SaveReport) -> None:
        """Flip a bit of a stored file."""
        is_file_fault = self.fault.kind == "bit_flip" and self.fault.target == "file"
        if is_file_fault and self._is_due("step") and isinstance(report.path, Path):
            self._record()
            flip_stored_bit(report.path, self._random(), self.fault.bit)

    def on_error(self, error: BaseException) -> None:
        """Remove the hooks that inject faults."""
        self._close()

    def on_end(self, outcome: Outcome) -> None:
        """Remove the hooks that inject faults."""
        self._close()

    def _close(self) -> None:
        self._restore_file_limit()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _restore_file_limit(self) -> None:
        if self._file_limit is not None:
            restore_file_size_limit(self._file_limit)
            self._file_limit = None

    def _occurs_again(self) -> bool:
        return self.fault.times == 0 or self.num_faults < self.fault.times

    def _is_due(self, section: FaultSection) -> bool:
        """Return whether the fault occurs now, in this section of the run."""
        fault = self.fault
        if not self._is_rank or fault.section != section or not self._occurs_again():
            return False
        if fault.step is not None:
            return self._step >= fault.step
        assert fault.seconds is not None, "checked by the rules"
        is_of_thread = fault.kind in _ACTIONS_OF_THREADS
        return not is_of_thread and time.monotonic() - self._started >= fault.seconds

    def _record(self) -> None:
        """Count a fault and write it to the run folder, so that a restart counts it, too."""
        fault = self.fault
        line = {
            "kind": fault.kind,
            "rank": fault.rank,
            "step": self._step,
            "time": round(time.time(), 3),
            "host": socket.gethostname(),
        }
        if fault.times or self.num_faults == 0:
            append_record(self._run.folder.path / INJECTED_FAULTS, line)
        self.num_faults += 1

    def _random(self) -> random.Random:
        return random.Random(f"fault {self.fault.seed} {self.num_faults}")

    def _act(self) -> None:
        """Inject a fault of this process."""
        self._record()
        _PROCESS_ACTIONS[self.fault.kind]()

    def _corrupt(self, _chunk: nn.Module, _inputs: object, output: Mapping[str, Tensor]) -> None:
        """Change a value of the output of a model chunk, or of its gradient: a forward hook."""
        hidden = output["hidden"]
        if not self._corrupts_step or not self._occurs_again() or not hidden.requires_grad:
            return
        self._record()
        if self.fault.target == "activation":
            self._corrupt_value(hidden.detach())
        else:
            hidden.register_hook(self._corrupt_gradient)

    def _corrupt_gradient(self, gradient: Tensor) -> Tensor:
        wrong = gradient.clone()
        self._corrupt_value(wrong)
        return wrong

    def _corrupt_state(self) -> None:
        """Change a weight or a moment that this rank updates."""
        trainer, choice = self._run.prepared.trainer, self._random()
        trainer.data.wait_params()
        trainer.write_guard.wait()
        if self.fault.target == "weight":
            tensors = [param.weight for param in self._run.local_params]
        else:
            slots = trainer.optimizer.slots
            tensors = [
                tensor
                for slot in slots
                for role, tensor in slot.list_stored_tensors().items()
                if role.split(".")[0] != MASTER
                and tensor.is_floating_point()
                and tensor.element_size() > 1  # codes of one byte have no NaN or integer view
            ]
        self._corrupt_value(choice.choice([each for each in tensors if each.numel()]).detach())

    def _corrupt_value(self, tensor: Tensor) -> None:
        """Change one element of a tensor in place."""
        choice = self._random()
        index = tuple(choice.randrange(size) for size in tensor.shape)
        if self.fault.kind == "nan":
            tensor[index] = math.nan
        else:
            flip_bit(tensor[index], choice, self.fault.bit)


def read_injected_faults(folder: Path, rank: int) -> list[dict[str, Any]]:  # Any: JSON
    """Return the faults injected into a rank of a run, over all starts; lines that a kill has
    truncated are left out."""
    faults, _ = read_records(folder / INJECTED_FAULTS)
    return [fault for fault in faults if fault.get("rank") == rank]


def flip_bit(element: Tensor, choice: random.Random, bit: int | None = None) -> None:
    """Flip a bit of a tensor of one element in place; `bit` None: chosen at random.

    >>> element = torch.tensor(1.0)
    >>> flip_bit(element, random.Random(0), 31)
    >>> element
    tensor(-1.)
    """
    num_bits = 8 * element.element_size()
    number = (choice.randrange(num_bits) if bit is None else bit) % num_bits
    values = element.view(_INT_DTYPES[element.element_size()])
    mask = 1 << number
    if values.dtype.is_signed and number == num_bits - 1:
        mask = -mask
    values.bitwise_xor_(mask)


def flip_stored_bit(folder: Path, choice: random.Random, bit: int | None = None) -> Path:
    """Flip a bit in the largest file of a checkpoint folder, and return the file."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path = max(files, key=lambda file: file.stat().st_size)
    with path.open("r+b") as file:
        place = choice.randrange(path.stat().st_size)
        file.seek(place)
        (value,) = file.read(1)
        file.seek(place)
        file.write(bytes([value ^ 1 << (choice.randrange(8) if bit is None else bit % 8)]))
    return path


# --- faults of a process


def raise_injected_error() -> None:
    """Raise an error that is not for users, as a bug would.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("this error was injected by fault_injector.kind=exception")


def hang_with_gil() -> None:
    """Wait forever with the GIL held: no other thread of this process runs."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.pause()


def shut_down_connections() -> int:
    """Shut down all TCP connections of this process; return their number.

    The processes at the other ends notice at once, as after a reset of a switch port.
    """
    num_connections = 0
    for name in os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.shutdown(socket.SHUT_RDWR)
                    num_connections += 1
    return num_connections


def limit_file_size() -> tuple[int, int]:
    """Make all writes to files of this process and of its children fail; return the old limits."""
    import resource  # not on every platform

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    _set_file_size_limit(0, before[1])
    return before


def restore_file_size_limit(limits: tuple[int, int]) -> None:
    """Allow writes again."""
    _set_file_size_limit(*limits)


def _set_file_size_limit(soft: int, hard: int) -> None:
    import resource  # not on every platform

    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for process in _list_children():  # writers of asynchronous saves
        with suppress(ProcessLookupError, PermissionError):
            resource.prlimit(process, resource.RLIMIT_FSIZE, (soft, hard))


def _list_children() -> list[int]:
    """Return the child processes of this process; none where the system does not list them."""
    files = Path("/proc/self/task").glob("*/children")
    return [int(number) for file in files for number in file.read_text().split()]


_PROCESS_ACTIONS: Mapping[str, Callable[[], object]] = {
    "exception": raise_injected_error,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: threading.Event().wait(),
    "hang_with_gil": hang_with_gil,
    "segfault": lambda: ctypes.string_at(0),
    "lost_link": shut_down_connections,
}
"""What each kind of fault of a process does."""

_ACTIONS_OF_THREADS = "kill", "stop", "hang_with_gil", "segfault", "lost_link"
"""Kinds that any thread can inject, so that they occur after `seconds` in any section of the
run."""
