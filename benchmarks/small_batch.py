"""Matmuls of few rows on this CPU: the small-batch kernel beside torch and beside the roofline.

    OMP_NUM_THREADS=1 python benchmarks/small_batch.py [--rounds 15] [--dtype int8] [--rows 1,8]
    [--shape 4096x1024]

The kernel, torch, torch with weights packed for oneDNN and a loop that only reads take turns in one
process, over weights of 64 MiB, so that none are in the core's own cache. The roofline of a matmul
is max(weight bytes / read bandwidth, FLOPs / matmul rate), both measured in the same round: the
bandwidth is that of whatever reads the weights fastest, and the rate that of torch's square matmul
in the dtype (int8: fp32, in which it is summed). A line shows GB/s of weights and GFLOP/s of torch
and of the kernel, how many times as fast the kernel is as each (median over the rounds and
quartiles), and the fraction of the roofline that the backend reaches which the limits measured on
this machine select.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from paired import Turns, spread, take_turns, times_as_fast
from torch import Tensor

from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.kernels.linear import HAS_BF16_KERNELS, HAS_ONEDNN, torch_forward
from megalith.kernels.linear_small_batch import small_batch_linear
from megalith.kernels.small_batch_limits import MEASURED_DTYPES, describe_limits, measure_limits

SHAPES = ((512, 512), (1376, 512), (512, 1376), (768, 2048), (2048, 768), (4096, 1024))
"""[o, i] of Llamas of 29M (hidden 512) and 110M (hidden 768), and a larger one."""

ROWS = (1, 2, 4, 8, 16, 32)
WEIGHT_BYTES = 1 << 26
SQUARE = 1024
SQUARE_FLOPS = 2 * SQUARE**3


class Weights:
    """Matrices of one shape and dtype, WEIGHT_BYTES in total."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        count = max(2, WEIGHT_BYTES // (shape[0] * shape[1] * dtype.itemsize))
        numbers = torch.randn(count, *shape)
        self.matrices = list((20 * numbers if dtype == torch.int8 else numbers).to(dtype))
        self.scales = torch.rand(shape[0]) if dtype == torch.int8 else None

    @property
    def nbytes(self) -> int:
        """Bytes of one matrix."""
        return self.matrices[0].nbytes

    def contenders(self, rows: int) -> dict[str, Callable[[], object]]:
        """What computes the products of `rows` rows with all matrices."""
        x_dtype = torch.float32 if self.dtype == torch.int8 else self.dtype
        x = torch.randn(rows, self.shape[1]).to(x_dtype)
        square = torch.randn(SQUARE, SQUARE).to(x_dtype)
        ways: dict[str, Callable[[], object]] = {
            "kernel": partial(self._kernel, x),
            "torch": partial(self._torch, x),
            "read": self._read,
            "square": partial(torch.mm, square, square),
        }
        if HAS_ONEDNN and (self.dtype == torch.float32 or self._has_bf16()):
            pack = torch.ops.mkldnn._reorder_linear_weight
            packed = [pack(w, rows) for w in self.matrices]
            ways["packed"] = partial(_multiply_packed, x, packed)
        return ways

    def _has_bf16(self) -> bool:
        return self.dtype == torch.bfloat16 and HAS_BF16_KERNELS

    def _kernel(self, x: Tensor) -> None:
        for w in self.matrices:
            small_batch_linear(x, w, self.scales)

    def _torch(self, x: Tensor) -> None:
        for w in self.matrices:
            y = torch_forward(x, w.to(x.dtype))
            if self.scales is not None:
                y.mul_(self.scales)

    def _read(self) -> None:
        for w in self.matrices:
            w.view(-1).view(torch.int64).sum()


def _multiply_packed(x: Tensor, packed: Sequence[Tensor]) -> None:
    for w in packed:
        torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")


def reached_fractions(weights: Weights, rows: int, turns: Turns, way: str) -> list[float]:
    """Return the fraction of the roofline of each round that a way of computing reaches."""
    flops = 2 * rows * weights.shape[0] * weights.shape[1] * len(weights.matrices)
    fractions = []
    for number, seconds in enumerate(turns.seconds[way]):
        read = min(taken[number] for name, taken in turns.seconds.items() if name != "square")
        arithmetic = flops * turns.seconds["square"][number] / SQUARE_FLOPS
        fractions.append(max(read, arithmetic) / seconds)
    return fractions


def show(weights: Weights, rows: int, turns: Turns, limit: int) -> None:
    """Print the line of one shape, dtype and number of rows."""
    count = len(weights.matrices)
    seconds = {way: statistics.median(taken) / count for way, taken in turns.seconds.items()}
    flops = 2 * rows * weights.shape[0] * weights.shape[1]
    figures = "  ".join(
        f"{way} {weights.nbytes / taken / 1e9:.1f} GB/s {flops / taken / 1e9:.0f} GFLOP/s"
        for way, taken in seconds.items()
        if way not in ("read", "square")
    )
    ratios = "  ".join(
        f"x {way} {times_as_fast(turns.seconds['kernel'], taken)}"
        for way, taken in turns.seconds.items()
        if way in ("torch", "packed")
    )
    selected = "kernel" if rows <= limit else "torch"
    fraction = spread(reached_fractions(weights, rows, turns, selected))
    print(
        f"{rows:3} rows: {figures}; read {weights.nbytes / seconds['read'] / 1e9:.1f} GB/s, matmul "
        f"rate {SQUARE_FLOPS / count / seconds['square'] / 1e9:.0f} GFLOP/s; {ratios}; {selected} "
        f"reaches {fraction} of the roofline",
        flush=True,
    )


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=MEASURED_DTYPES, action="append")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="separated by commas")
    parser.add_argument("--shape", action="append", help="OUTPUTSxINPUTS")
    options = parser.parse_args()
    keep_freed_memory()
    chosen = [tuple(map(int, shape.split("x"))) for shape in options.shape or []]
    shapes = [(shape[0], shape[1]) for shape in chosen] or SHAPES
    limits = measure_limits(shapes)
    print(f"{torch.get_num_threads()} threads; {describe_limits(limits)}")
    for name in options.dtype or MEASURED_DTYPES:
        dtype = MEASURED_DTYPES[name]
        for shape in shapes:
            weights = Weights(shape, dtype)
            print(f"{name}, weights {shape[0]} x {shape[1]}")
            for rows in map(int, options.rows.split(",")):
                turns = take_turns(weights.contenders(rows), rounds=options.rounds, warmup=1)
                show(weights, rows, turns, limits.of(dtype))


if __name__ == "__main__":
    main()
