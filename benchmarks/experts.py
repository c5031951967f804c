"""Our experts, transformers' (every implementation that runs on a CPU) and the experts' matmuls
alone, by turns.

    python benchmarks/experts.py                              64 experts, 8 for each token, fp32 and
    bf16 python benchmarks/experts.py --tokens 512 --dtype bf16 --rounds 21 python
    benchmarks/experts.py --json

A turn is forward and backward from given choices and weights of tokens: sorting them by expert,
both matmuls with SwiGLU between, the weighted sum, and all gradients. Ours computes the activation
again in backward; `kept` is ours without that. Before measuring, all must give the same result and
gradients. The limit is the six matmuls of every expert on rows that lie ready: one after the other,
or torch's `grouped_mm`, whichever is faster. Choices are uneven, as a young router's are: the
busiest expert has several times its share. Bars: at least as fast as the fastest implementation of
transformers, and 65 % of the limit. "computing" is the time of all threads together, which other
jobs on the machine disturb less.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from contenders.expert_matmuls import Matmuls
from paired import Spread, Turns, spread, take_turns, times_as_fast
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from megalith.kernels.activation import GatedActivation, weighted_gated
from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.kernels.grouped_linear import (
    FUSED,
    LOOP,
    GroupedMatmulOps,
    Matrix,
    build_groups,
    experts,
)
from megalith.kernels.linear import RegisterRecompute, register_recompute
from megalith.kernels.routing import (
    gather_row_weights,
    gather_rows,
    permute,
    permute_choices,
    unpermute,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
PEERS = ("grouped_mm", "eager", "batched_mm")
LIMITS = {"one by one": LOOP, "grouped": FUSED}
BAR_PEER, BAR_LIMIT = 1.0, 0.65
SWIGLU = partial(weighted_gated, gate=GatedActivation("silu"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One layer of experts and its tokens."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    ffn: int


@dataclass(frozen=True, slots=True)
class Report:
    """What one dtype showed."""

    sizes: Sizes
    dtype: str
    rounds: int
    busiest: float
    """The largest expert's rows, in shares of an equal part."""

    milliseconds: dict[str, Spread]
    best_peer: str
    against_peer: Spread
    limit: str
    against_limit: Spread
    """Time of the limit / our time."""

    peer_against_limit: Spread
    computing: dict[str, Spread]
    """The three again, in computing time."""

    holds: bool


class Layer:
    """Random inputs and weights; every contender's `step` gives the result and its gradients."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (std * torch.randn(*shape, generator=draw)).to(dtype)

        self.sizes = sizes
        logits = torch.randn(sizes.tokens, sizes.experts, generator=draw)
        scores, self.chosen = (logits + 0.5 * torch.randn(sizes.experts, generator=draw)).topk(
            sizes.top_k
        )
        self.x, self.dy = normal(sizes.tokens, sizes.hidden), normal(sizes.tokens, sizes.hidden)
        self.weights = scores.softmax(-1).to(dtype)
        self.up = normal(sizes.experts * 2 * sizes.ffn, sizes.hidden, std=sizes.hidden**-0.5)
        self.down = normal(sizes.experts * sizes.hidden, sizes.ffn, std=sizes.ffn**-0.5)
        self.inputs = [each.requires_grad_() for each in (self.x, self.weights, self.up, self.down)]

    def gradients(self, y: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The result and its gradients, as flat as ours."""
        grads = torch.autograd.grad(y, inputs, self.dy)
        return [
            y.detach(),
            *(grad.reshape(local.shape) for grad, local in zip(grads, self.inputs, strict=True)),
        ]


def ours(layer: Layer, again: RegisterRecompute | None = register_recompute) -> list[Tensor]:
    """Rows are gathered again in backward, and so is the activation unless it is kept."""
    order = permute_choices(layer.chosen, layer.sizes.experts, num_rows=layer.chosen.numel())
    rows = permute(layer.x, order)
    register_recompute(rows, partial(gather_rows, order=order), (layer.x,))
    weights = gather_row_weights(layer.weights, order)
    y = experts(
        rows,
        weights,
        build_groups(order.counts),
        Matrix(layer.up),
        Matrix(layer.down),
        SWIGLU,
        register=again,
    )
    return layer.gradients(unpermute(y, order), layer.inputs)


class Transformers:
    """The experts of Qwen3-MoE with the same weights."""

    def __init__(self, layer: Layer, implementation: str) -> None:
        self.layer, sizes = layer, layer.sizes
        config = Qwen3MoeConfig(
            num_experts=sizes.experts,
            num_experts_per_tok=sizes.top_k,
            hidden_size=sizes.hidden,
            moe_intermediate_size=sizes.ffn,
        )
        config._experts_implementation = implementation
        self.module = Qwen3MoeExperts(config).to(layer.x.dtype)  # type: ignore[no-untyped-call]  # transformers' own
        with torch.no_grad():
            for reference, actual in (
                (self.module.gate_up_proj, layer.up),
                (self.module.down_proj, layer.down),
            ):
                reference.copy_(actual.view_as(reference))

    def step(self) -> list[Tensor]:
        y = self.module(self.layer.x, self.layer.chosen, self.layer.weights)
        matrices = (self.module.gate_up_proj, self.module.down_proj)
        return self.layer.gradients(y, (self.layer.x, self.layer.weights, *matrices))


def matmuls(layer: Layer, matmul_ops: GroupedMatmulOps) -> Matmuls:
    """The six matmuls of its experts alone, one way."""
    return Matmuls(
        layer.x,
        layer.dy,
        layer.chosen,
        layer.up,
        layer.down,
        experts=layer.sizes.experts,
        matmul_ops=matmul_ops,
    )


def require_equal(steps: dict[str, Callable[[], list[Tensor]]], tolerance: float) -> None:
    """All compute the same: result, and gradients of tokens, weights and both matrices."""
    expected = steps["ours"]()
    for name, step in steps.items():
        for what, actual, reference in zip(
            ("y", "dx", "dweights", "dup", "ddown"), expected, step(), strict=True
        ):
            error = float((actual - reference).abs().max() / actual.abs().max())
            assert error <= tolerance, f"{what} of {name} is off by {error:.1e}"


def measure(sizes: Sizes, dtype: str, *, peers: Sequence[str], rounds: int) -> Report:
    """All by turns."""
    layer = Layer(sizes, DTYPES[dtype])
    steps: dict[str, Callable[[], list[Tensor]]] = {
        "ours": partial(ours, layer),
        "kept": partial(ours, layer, None),
    }
    steps |= {name: Transformers(layer, name).step for name in peers}
    require_equal(steps, TOLERANCE[dtype])
    limits = {name: matmuls(layer, matmul_ops).step for name, matmul_ops in LIMITS.items()}
    turns = take_turns({**steps, **limits}, rounds=rounds, warmup=1)
    best, limit = _fastest(turns, peers), _fastest(turns, list(LIMITS))
    wall, computing = (
        _compared(turns.seconds, best, limit),
        _compared(turns.cpu_seconds, best, limit),
    )
    milliseconds = {
        name: spread([1e3 * each for each in taken]) for name, taken in turns.seconds.items()
    }
    busiest = int(layer.chosen.flatten().bincount().max()) * sizes.experts / layer.chosen.numel()
    return Report(
        sizes,
        dtype,
        rounds,
        busiest,
        milliseconds,
        best,
        wall["against_peer"],
        limit,
        wall["against_limit"],
        wall["peer_against_limit"],
        computing,
        wall["against_peer"].median >= BAR_PEER and wall["against_limit"].median >= BAR_LIMIT,
    )


def _compared(seconds: Mapping[str, list[float]], peer: str, limit: str) -> dict[str, Spread]:
    return {
        "against_peer": times_as_fast(seconds["ours"], seconds[peer]),
        "against_limit": times_as_fast(seconds["ours"], seconds[limit]),
        "peer_against_limit": times_as_fast(seconds[peer], seconds[limit]),
    }


def _fastest(turns: Turns, names: Sequence[str]) -> str:
    return min(names, key=lambda name: statistics.median(turns.seconds[name]))


def text_of(report: Report) -> str:
    """A few lines."""
    times = "".join(
        f"\n  {name:12}{taken.median:9.1f} ms" for name, taken in report.milliseconds.items()
    )
    busy, (peer, limit, reference) = (
        report.computing,
        (report.best_peer, report.limit, report.peer_against_limit),
    )
    return (
        f"{report.dtype}, {report.sizes}, busiest expert {report.busiest:.1f} x its share, "
        f"{report.rounds} rounds"
        f"{times}\n  {report.against_peer} times as fast as transformers' {peer} (bar {BAR_PEER}); "
        f"computing {busy['against_peer']}\n  {report.against_limit} of the matmuls {limit} (bar "
        f"{BAR_LIMIT}); computing {busy['against_limit']}\n  {peer} reaches {reference} of them; "
        f"computing {busy['peer_against_limit']}\n  {'holds' if report.holds else 'MISSED'}"
    )


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("tokens", 2048),
        ("experts", 64),
        ("top-k", 8),
        ("hidden", 512),
        ("ffn", 256),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="unset: both")
    parser.add_argument(
        "--peer",
        choices=PEERS,
        action="append",
        help="unset: grouped_mm and eager; batched_mm copies a matrix for every row, which takes 2 "
        "MiB x rows",
    )
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    sizes = Sizes(
        tokens=options.tokens,
        experts=options.experts,
        top_k=options.top_k,
        hidden=options.hidden,
        ffn=options.ffn,
    )
    peers = options.peer or PEERS[:2]
    reports = [
        measure(sizes, dtype, peers=peers, rounds=options.rounds)
        for dtype in options.dtype or DTYPES
    ]
    print(
        json.dumps([asdict(each) for each in reports], indent=2)
        if options.json
        else "\n".join(map(text_of, reports))
    )


if __name__ == "__main__":
    main()
