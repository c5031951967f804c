"""How the ranks divide the work."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the ranks divide the work; the degrees multiply to the world size."""

    tp: int = 1
    """Tensor parallel: ranks that split every weight matrix. Keep inside one node."""

    sp: bool = False
    """Sequence parallel: between tensor-parallel regions each rank keeps only its part of the tokens. Needs tp > 1."""

    dp: int | None = None
    """Data parallel: ranks that read different rows of the batch; unset: world size / tp."""

    order: str = "tp-cp-ep-dp-pp"
    """Which axis varies fastest over neighbouring ranks, fastest first."""

    bucket_numel: int = 4_000_000
    """Gradients are summed over dp in buckets of at least this many elements, each as soon as it is full."""

    overlap: bool = True
    """Sum full gradient buckets while backward goes on; off: all of them after backward. Same numbers either way."""

    timeout_seconds: float = 600.0
    """A collective that waits longer than this ends the run and names the ranks that did not arrive."""
