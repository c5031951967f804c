"""Memory of CPU runs: kept by the process once it has it, because every training step needs the
same again."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
KEPT_BYTES = 2**31 - 1  # the most mallopt takes for the first
LARGEST_KEPT_BLOCK = 1 << 30  # blocks from here on are still given back at once


def keep_freed_memory() -> bool:
    """Ask the C library to keep what tensors give back; True where it does (glibc), False
    elsewhere.

    By default glibc returns blocks of megabytes to the system, which hands them out again page by
    page, zeroed: each tensor of a step then costs a page fault per 4 KiB before it is written.
    Measured on training steps of a 6M model: 2 to 4 % with one thread. The price: the process stays
    as large as it once was. A setting of the whole process, so for programs to call, at their
    start.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    )
