"""Dispatch of the numba loops in `kernels/cpu_numba.py`, which run on torch's OpenMP threads.

A second thread pool would compete with torch's for the same cores, because both spin for a while
after their work. So a loop runs in the OpenMP library that torch has loaded. Where that library
cannot be called (macOS), no loop runs and the operations use their torch versions; both give the
same values up to the last bit or two of the dtype.
"""

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Loop = Literal[
    "rms_norm",
    "rms_norm_backward",
    "swiglu",
    "swiglu_backward",
    "gated",
    "gated_backward",
    "dropout",
    "rope",
    "rope_part",
    "rope_neighbors",
    "weighted_gated",
    "weighted_gated_backward",
    "weighted_squared_relu",
    "weighted_squared_relu_backward",
    "row_sums",
    "logit_gradients",
    "visible_softmax",
    "visible_exp",
    "gumbel_argmax",
]
"""A loop of `kernels/cpu_numba.py`."""

LoopFunction = Callable[..., None]
"""A loop of another module, which is written like those of `kernels/cpu_numba.py`."""

# elements; below, launching a loop costs more than the memory passes that it saves
MIN_LOOP_ELEMENTS = 1 << 13
MIN_THREADED_ELEMENTS = 1 << 15  # elements; below, waking a thread takes longer than the loop


DTYPES = torch.float32, torch.bfloat16
"""Element dtypes that the loops support."""


COMPILATION_LINE_SECONDS = (
    5.0  # between lines while loops are compiled: a few in the half minute that it takes
)


class CompilationProgress:
    """Reports the compilation of loops inside a `with` block: one line at the start, then one every
    few seconds."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        """`print_line`: receives each line."""
        self._print_line = print_line
        self._num_compiled = 0
        self._began = self._last_line = 0.0

    def __enter__(self) -> "CompilationProgress":
        self._token = _progress.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _progress.reset(self._token)

    def start(self, *, cached: bool) -> None:
        """Record that compilation of a loop starts; `cached`: its machine code is cached for later
        runs."""
        now = time.monotonic()
        if self._num_compiled == 0:
            self._began = self._last_line = now
            when = (
                "first run on this machine only"
                if cached
                else "in every run: numba has no folder to cache them in"
            )
            self._print_line(f"compiling CPU kernels ({when})...")
        elif now - self._last_line >= COMPILATION_LINE_SECONDS:
            self._last_line = now
            self._print_line(
                f"compiling CPU kernels: {self._num_compiled} done in {now - self._began:.0f} s"
            )
        self._num_compiled += 1


_progress: ContextVar[CompilationProgress | None] = ContextVar("compilation_progress", default=None)


def report_compilation(*, cached: bool) -> None:
    """Notify the innermost `CompilationProgress`, if any, that compilation of a loop starts."""
    progress = _progress.get()
    if progress is not None:
        progress.start(cached=cached)


class OpenMP(NamedTuple):
    """Functions of torch's OpenMP library that we call."""

    parallel: Callable[..., None]
    """GOMP_parallel(function, argument, threads, flags): runs function(argument) on every thread
    and waits for all."""

    thread_num: int
    """Address of omp_get_thread_num."""

    num_threads: int
    """Address of omp_get_num_threads."""


@cache
def openmp() -> OpenMP | None:
    """Return the OpenMP library that torch uses; None if it has no GOMP interface."""
    for path in _loaded_libraries():
        library = ctypes.CDLL(path)
        if not hasattr(library, "GOMP_parallel"):
            continue
        parallel = library.GOMP_parallel
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return OpenMP(
            parallel, _address(library.omp_get_thread_num), _address(library.omp_get_num_threads)
        )
    return None


def _loaded_libraries() -> list[str]:
    """Return the paths of the OpenMP libraries in this process, torch's own first."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    paths = {field[5] for field in fields if len(field) == 6}
    known = [
        path for path in paths if Path(path).name.startswith(("libgomp", "libiomp5", "libomp"))
    ]
    return sorted(known, key=lambda path: ("/torch" not in path, path))


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]  # a function of a CDLL may be cast
    assert address is not None
    return address


class _LoopSelection(threading.local):
    """From which size on a thread uses the loops."""

    min_elements = MIN_LOOP_ELEMENTS


_loop_selection = _LoopSelection()


@contextmanager
def loops_of_any_size(enabled: bool) -> Iterator[None]:
    """If `enabled`, use the loops also for tensors for which torch is faster, so that the backend,
    and with it the rounding, does not depend on the number of tokens."""
    before = _loop_selection.min_elements
    _loop_selection.min_elements = 0 if enabled else before
    try:
        yield
    finally:
        _loop_selection.min_elements = before


def should_use(*tensors: Tensor) -> bool:
    """Return whether the compiled loops support these tensors and are faster: on the CPU, all fp32
    or all bf16, the first large enough."""
    return tensors[0].numel() >= _loop_selection.min_elements and can_use(*tensors)


def can_use(*tensors: Tensor) -> bool:
    """Return whether the compiled loops support these tensors, of any size except 0."""
    first = tensors[0]
    return (
        first.device.type == "cpu"
        and first.dtype in DTYPES
        and all(tensor.dtype == first.dtype for tensor in tensors)
        and first.numel() > 0
        and not torch.compiler.is_compiling()
        and openmp() is not None
    )


@dataclass(slots=True)
class LoopCall:
    """A call of a compiled loop; repeating it reads and writes the same addresses."""

    address: int
    arguments: "ctypes.Array[ctypes.c_int64]"
    num_threads: int

    def __call__(self) -> None:
        """Run the loop on torch's threads."""
        openmp_library = openmp()
        assert openmp_library is not None
        openmp_library.parallel(self.address, self.arguments, self.num_threads, 0)


LoopObserver = Callable[[LoopCall, Sequence[Tensor]], None]
"""Called after every call of a loop, with the tensors that it reads and writes."""


class _ObservedLoops(threading.local):
    """Observer of the loops of a thread."""

    observer: LoopObserver | None = None


_observed = _ObservedLoops()


@contextmanager
def observe_loops(observer: LoopObserver | None) -> Iterator[None]:
    """Call `observer` after every loop that this thread runs inside a `with` block."""
    before = _observed.observer
    _observed.observer = observer
    try:
        yield
    finally:
        _observed.observer = before


def run(
    loop: Loop | LoopFunction,
    dtype: torch.dtype,
    *arguments: Tensor | int | float,
    elements: int,
) -> None:
    """Run a compiled loop on torch's threads: tensors of `dtype`, `elements` elements of work,
    arguments in the order of the loop's docstring."""
    tensors: Sequence[Tensor] = ()
    if _observed.observer is not None:
        tensors = [each for each in arguments if isinstance(each, Tensor)]
    launch(loop, dtype, list(map(_bits, arguments)), elements=elements, tensors=tensors)


def launch(
    loop: Loop | LoopFunction,
    dtype: torch.dtype,
    block: Sequence[int],
    *,
    elements: int,
    tensors: Sequence[Tensor] = (),
) -> None:
    """`run` for arguments that are integers already, such as addresses: takes half the time.
    `tensors`: those at the addresses, for an observer."""
    call = prepare(loop, dtype, block, elements=elements)
    call()
    if _observed.observer is not None:
        _observed.observer(call, tensors)


def prepare(
    loop: Loop | LoopFunction, dtype: torch.dtype, block: Sequence[int], *, elements: int
) -> LoopCall:
    """Return the call that `launch` would execute."""
    argument_block = _block_type(len(block))(*block)
    return LoopCall(_loop_address(loop, dtype), argument_block, num_threads(elements))


@cache
def _block_type(length: int) -> type[ctypes.Array[ctypes.c_int64]]:
    return ctypes.c_int64 * length


@cache
def _loop_address(loop: Loop | LoopFunction, dtype: torch.dtype) -> int:
    from megalith.kernels.cpu_numba import address  # importing numba takes half a second

    return address(loop, dtype)


def num_threads(elements: int) -> int:
    """Return the number of threads for work of this size."""
    return torch.get_num_threads() if elements >= MIN_THREADED_ELEMENTS else 1


def _bits(argument: Tensor | int | float) -> int:
    """Return the 8 bytes that represent an argument: a tensor's address, an integer, or the bits of
    a double."""
    if type(argument) is int:  # first, because an instance check of tensors is slow
        return argument
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return float_bits(argument) if isinstance(argument, float) else argument


def float_bits(number: float) -> int:
    """Return the bits of a double as an integer."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


# Allocator settings of CPU runs: the process keeps freed memory, because every training step
# allocates the same sizes again.

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
KEPT_BYTES = 2**31 - 1  # mallopt's limit for M_TRIM_THRESHOLD
LARGEST_KEPT_BLOCK = 1 << 30  # larger blocks are still returned to the system at once


def keep_freed_memory() -> bool:
    """Configure the C library to keep freed memory; return True if it does (glibc), else False.

    By default glibc returns blocks of megabytes to the system, which hands them out again zeroed,
    page by page: each tensor of a step then costs a page fault per 4 KiB. Measured on training
    steps of a 6M model: 2 to 4 % with one thread. The process then stays at its peak size. The
    setting affects the whole process, so programs call this at their start.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    )


def return_freed_memory() -> bool:
    """Return the freed memory of this process to the system, also after `keep_freed_memory`; return
    True if the C library has a function for it (glibc), else False."""
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return False
    malloc_trim(0)
    return True
