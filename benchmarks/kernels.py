"""Every kernel beside its plain reference and torch's own, forward and backward, on this CPU.

    python benchmarks/kernels.py [--threads 2] [--rounds 21] [--size 6m] [--dtype bf16] [--only
    norm,rope] [--compile]

All ways of computing one operation take turns in one process. A line shows the time of ours and how
many times as fast it is as each other way: the median over the rounds of the ratio of two times of
the same round, and its quartiles. --compile adds torch.compile of the reference; it needs a C++
compiler.
"""

import argparse
import shutil
import statistics
from collections.abc import Callable
from functools import partial

import torch
from contenders.kernels import back_and_forth
from paired import Turns, take_turns, times_as_fast
from torch import Tensor

from megalith.config.kernels import Kernel
from megalith.config.model import ModelConfig
from megalith.kernels.activation import GatedActivation, reference_swiglu, swiglu, weighted_gated
from megalith.kernels.attention.dispatch import attention, reference_attention
from megalith.kernels.attention.sdpa import sdpa_documents
from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.kernels.norm import (
    add_rms_norm,
    layer_norm,
    reference_add_rms_norm,
    reference_rms_norm,
    rms_norm,
)
from megalith.kernels.packed import seq_params_from_rows
from megalith.kernels.rope import apply_rope, reference_rope, rope_frequencies, rope_tables
from megalith.parallel.cross_entropy import (
    VocabShard,
    linear_cross_entropy,
    reference_cross_entropy,
)
from megalith.parallel.group import single_rank_group
from megalith.recipes import recipes

RECIPES = {"6m": recipes()["llama_6m"], "29m": recipes()["llama_29m"]}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KERNELS: tuple[Kernel, ...] = ("auto", "torch", "reference")
SILU = GatedActivation("silu")
Ways = dict[str, Callable[[], object]]


class Shapes:
    """Random inputs of one microbatch of a recipe."""

    def __init__(self, size: str, dtype: torch.dtype) -> None:
        run = RECIPES[size]()
        self.model: ModelConfig = run.model
        self.length, self.dtype = run.train.seq_len, dtype
        self.tokens = seq_params_from_rows(run.train.micro_batch_size, run.train.seq_len)

    def random(self, *shape: int) -> Tensor:
        """Normal numbers that want a gradient; the first dim is a token unless the tensor is a
        weight."""
        return torch.randn(*shape).to(self.dtype).requires_grad_()

    def rows(self, *shape: int) -> Tensor:
        """The same for every token: [t, ...]."""
        return self.random(self.tokens.num_tokens, *shape)


def norm_ways(shapes: Shapes, compiled: bool) -> Ways:
    """RMSNorm over hidden features."""
    h = shapes.model.hidden_size
    x, weight = shapes.rows(h), shapes.random(h)
    ways: Ways = {
        k: back_and_forth(partial(rms_norm, x, weight, 1e-5, kernel=k), (x, weight))
        for k in KERNELS
    }
    ways["F.rms_norm"] = back_and_forth(
        lambda: torch.nn.functional.rms_norm(x, (h,), weight, 1e-5), (x, weight)
    )
    if compiled:
        fused = torch.compile(reference_rms_norm)
        ways["compiled"] = back_and_forth(lambda: fused(x, weight, 1e-5), (x, weight))
    return ways


def add_norm_ways(shapes: Shapes, compiled: bool) -> Ways:
    """Residual addition and RMSNorm: in one function, and one after the other."""
    h = shapes.model.hidden_size
    x, residual, weight = shapes.rows(h), shapes.rows(h), shapes.random(h)
    inputs = (x, residual, weight)

    def apart() -> tuple[Tensor, Tensor]:
        total = residual + x
        return total, rms_norm(total, weight, 1e-5)

    ways: Ways = {
        k: back_and_forth(partial(add_rms_norm, *inputs, 1e-5, kernel=k), inputs) for k in KERNELS
    }
    ways["apart"] = back_and_forth(apart, inputs)
    if compiled:
        fused = torch.compile(reference_add_rms_norm)
        ways["compiled"] = back_and_forth(lambda: fused(*inputs, 1e-5), inputs)
    return ways


def rope_ways(shapes: Shapes, compiled: bool) -> Ways:
    """Rotary positions of the query heads."""
    d = shapes.model.head_size()
    x = shapes.rows(shapes.model.num_heads, d)
    tables = rope_tables(
        shapes.tokens.position_ids, rope_frequencies(shapes.model.rope, d), shapes.dtype
    )
    ways: Ways = {
        k: back_and_forth(partial(apply_rope, x, *tables, kernel=k), (x,)) for k in KERNELS
    }
    if compiled:
        fused = torch.compile(reference_rope)
        ways["compiled"] = back_and_forth(lambda: fused(x, *tables), (x,))
    return ways


def layer_norm_ways(shapes: Shapes, compiled: bool) -> Ways:
    """LayerNorm over hidden features."""
    h = shapes.model.hidden_size
    inputs = shapes.rows(h), shapes.random(h), shapes.random(h)
    return {
        k: back_and_forth(partial(layer_norm, *inputs, 1e-5, kernel=k), inputs) for k in KERNELS
    }


def weighted_ways(shapes: Shapes, compiled: bool) -> Ways:
    """SwiGLU times a weight of each token, as experts compute it; beside it the two one after the
    other."""
    inputs = shapes.rows(2 * shapes.model.ffn_hidden_size), shapes.rows()
    gate_up, weights = inputs
    ways: Ways = {
        k: back_and_forth(partial(weighted_gated, *inputs, SILU, kernel=k), inputs) for k in KERNELS
    }
    ways["apart"] = back_and_forth(lambda: swiglu(gate_up) * weights.unsqueeze(-1), inputs)
    return ways


def swiglu_ways(shapes: Shapes, compiled: bool) -> Ways:
    """SwiGLU of the MLP's inner features."""
    x = shapes.rows(2 * shapes.model.ffn_hidden_size)
    ways: Ways = {k: back_and_forth(partial(swiglu, x, kernel=k), (x,)) for k in KERNELS}
    if compiled:
        fused = torch.compile(reference_swiglu)
        ways["compiled"] = back_and_forth(lambda: fused(x), (x,))
    return ways


def attention_ways(shapes: Shapes, compiled: bool) -> Ways:
    """Causal attention, every row one document."""
    d = shapes.model.head_size()
    q, k, v = (
        shapes.rows(heads, d)
        for heads in (shapes.model.num_heads, *[shapes.model.num_kv_heads] * 2)
    )
    return {
        "auto": back_and_forth(lambda: attention(q, k, v, shapes.tokens), (q, k, v)),
        "sdpa": back_and_forth(lambda: sdpa_documents(q, k, v, shapes.length), (q, k, v)),
        "reference": back_and_forth(lambda: reference_attention(q, k, v, shapes.tokens), (q, k, v)),
    }


def loss_ways(shapes: Shapes, compiled: bool) -> Ways:
    """The output head with its cross entropy; beside it the three matmuls that it cannot do
    without."""
    h, v = shapes.model.hidden_size, shapes.model.vocab_size
    x, weight = shapes.rows(h), shapes.random(v, h)
    labels = torch.randint(0, v, (x.shape[0],))

    def matmuls() -> object:
        with torch.no_grad():
            logits = x @ weight.t()
            return logits @ weight, logits.t() @ x

    def whole(kernel: Kernel) -> Tensor:
        return linear_cross_entropy(
            x,
            weight,
            labels,
            vocab=VocabShard(single_rank_group("tp"), 0, v),
            kernel=kernel,
        )

    ways: Ways = {k: back_and_forth(partial(whole, k), (x, weight)) for k in KERNELS}
    ways["its matmuls"] = matmuls
    if compiled:
        fused = torch.compile(reference_cross_entropy)
        ways["compiled"] = back_and_forth(
            lambda: fused(x, weight, labels, vocab_size=v).sum(), (x, weight)
        )
    return ways


CASES: dict[str, Callable[[Shapes, bool], Ways]] = {
    "norm": norm_ways,
    "add_norm": add_norm_ways,
    "rope": rope_ways,
    "swiglu": swiglu_ways,
    "layer_norm": layer_norm_ways,
    "weighted": weighted_ways,
    "attention": attention_ways,
    "loss": loss_ways,
}


def show(name: str, turns: Turns) -> None:
    """One line: our time, and how many times as fast ours is as each other way."""
    ours = turns.seconds["auto"]
    ratios = "; ".join(
        f"{way} {times_as_fast(ours, taken)}"
        for way, taken in turns.seconds.items()
        if way != "auto"
    )
    print(f"{name:10} {statistics.median(ours) * 1e3:8.2f} ms, times as fast as: {ratios}")


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--size", choices=RECIPES, action="append")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument("--compile", action="store_true", help="add torch.compile of the reference")
    options = parser.parse_args()
    if options.compile and not shutil.which("c++"):
        parser.error(
            "--compile needs a C++ compiler (`c++` on the path). Install one, or run without "
            "--compile."
        )
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    for size in options.size or RECIPES:
        for dtype in options.dtype or DTYPES:
            print(f"{size}, {dtype}, {options.threads} threads, forward + backward")
            for name in options.only.split(","):
                ways = CASES[name](Shapes(size, DTYPES[dtype]), options.compile)
                show(name, take_turns(ways, rounds=options.rounds, warmup=2))


if __name__ == "__main__":
    main()
