"""Kernels in the precisions of training on one device, against their plain references in float64 on
the CPU."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalith.kernels.activation import (
    GatedActivation,
    gated,
    reference_gated,
    reference_swiglu,
    reference_weighted_gated,
    swiglu,
    weighted_gated,
)
from megalith.kernels.attention.dispatch import attention, reference_attention
from megalith.kernels.attention.scores import Scores
from megalith.kernels.embedding import embedding, reference_embedding
from megalith.kernels.linear import linear, reference_linear
from megalith.kernels.norm import (
    add_layer_norm,
    add_rms_norm,
    reference_add_layer_norm,
    reference_add_rms_norm,
    reference_rms_norm,
    rms_norm,
)
from megalith.kernels.packed import seq_params_from_lengths, seq_params_from_rows
from megalith.kernels.rope import apply_rope, reference_rope
from megalith.parallel.cross_entropy import (
    VocabShard,
    linear_cross_entropy,
    reference_cross_entropy,
    token_losses,
)
from megalith.parallel.group import single_rank_group
from megalith.testing.tolerance import BF16, FP32_DEEP, relative_error

TOLERANCES = {torch.float32: FP32_DEEP.relative, torch.bfloat16: BF16.relative}
EPS, T, H, V = 1e-5, 384, 96, 1000
"""Odd enough that no block of a kernel fits evenly."""

CLAMPED = GatedActivation("quick_gelu", clamp=7.0, up_offset=1.0)

LOGIT_SCALE = 0.3
"""Of the head's inputs: logits have then a deviation of about 1. bf16 rounds large ones to eighths,
for any library."""

Computation = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation: how we compute it, its definition, and the shapes of what it
    differentiates."""

    name: str
    ours: Computation
    reference: Computation
    shapes: Sequence[tuple[int, ...]]
    scale: float = 1.0
    """Standard deviation of the inputs."""


@dataclass(frozen=True, slots=True)
class Error:
    """The largest difference of a kernel's results and gradients, relative to each one's largest
    entry."""

    kernel: str
    dtype: str
    relative: float
    holds: bool


def compare_kernels(device: torch.device) -> Iterator[Error]:
    """Forward and backward of every kernel, on the same inputs as its reference."""
    for kernel in kernels(device):
        for dtype, allowed in TOLERANCES.items():
            draw = torch.Generator().manual_seed(0)
            inputs = [
                torch.randn(shape, generator=draw).mul(kernel.scale).to(dtype)
                for shape in kernel.shapes
            ]
            expected = _results(kernel.reference, [x.double() for x in inputs])
            got = _results(kernel.ours, [x.to(device) for x in inputs])
            worst = max(relative_error(a.cpu(), b) for a, b in zip(got, expected, strict=True))
            yield Error(kernel.name, str(dtype).removeprefix("torch."), worst, worst <= allowed)


def kernels(device: torch.device) -> list[Kernel]:
    """Every kernel whose inputs can be random; `ours` takes them on `device`, the reference on the
    CPU."""
    angles = torch.arange(T).unsqueeze(1) / 7 ** torch.arange(16)
    rows, packed = (
        seq_params_from_rows(3, T // 3),
        seq_params_from_lengths([200, 1, T - 201]),
    )
    rows_there, packed_there = (
        seq_params_from_rows(3, T // 3, device=device),
        seq_params_from_lengths([200, 1, T - 201], device=device),
    )
    ids = torch.arange(T) * 37 % V
    labels = ids.roll(-1).where(torch.arange(T) % 5 > 0, -1)
    ids_there, labels_there = ids.to(device), labels.to(device)

    def our_rope(x: Tensor) -> Tensor:
        return apply_rope(x, angles.cos().to(x), angles.sin().to(x))

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(
            x, w, labels_there, vocab=VocabShard(single_rank_group("tp"), 0, V)
        )

    def losses(x: Tensor, w: Tensor) -> Tensor:
        return token_losses(x, w, labels_there, vocab=VocabShard(single_rank_group("tp"), 0, V))

    def their_losses(x: Tensor, w: Tensor) -> Tensor:
        return reference_cross_entropy(x, w, labels, vocab_size=V)

    def their_rope(x: Tensor) -> Tensor:
        return reference_rope(x, angles.cos().to(x), angles.sin().to(x))

    hidden, attended = (T, H), [(T, 6, 32), (T, 2, 32), (T, 2, 32)]
    head = [hidden, (V, H)]
    return [
        Kernel(
            "linear",
            lambda x, *w: linear(x, w),
            lambda x, *w: reference_linear(x, w),
            [hidden, (50, H), (7, H)],
        ),
        Kernel(
            "rms_norm",
            partial(rms_norm, eps=EPS),
            partial(reference_rms_norm, eps=EPS),
            [hidden, (H,)],
        ),
        Kernel(
            "add_rms_norm",
            partial(add_rms_norm, eps=EPS),
            partial(reference_add_rms_norm, eps=EPS),
            [hidden, hidden, (H,)],
        ),
        Kernel("rope", our_rope, their_rope, [(T, 3, 32)]),
        Kernel("swiglu", swiglu, reference_swiglu, [(T, 2 * H)]),
        Kernel(
            "clamped gate",
            partial(gated, gate=CLAMPED),
            partial(reference_gated, gate=CLAMPED),
            [(T, 2 * H)],
        ),
        Kernel(
            "weighted gate",
            partial(weighted_gated, gate=CLAMPED),
            partial(reference_weighted_gated, gate=CLAMPED),
            [(T, 2 * H), (T,)],
        ),
        Kernel(
            "add_layer_norm",
            partial(add_layer_norm, eps=EPS),
            partial(reference_add_layer_norm, eps=EPS),
            [hidden, hidden, (H,), (H,)],
        ),
        *[
            Kernel(
                f"attention, {name}",
                partial(attention, seq_params=packed_there, scores=scores),
                partial(reference_attention, seq_params=packed, scores=scores),
                attended,
            )
            for name, scores in (
                ("window", Scores(window=50)),
                ("cap", Scores(softcap=2.0, off_by_one=True)),
            )
        ],
        Kernel(
            "attention of equal rows",
            partial(attention, seq_params=rows_there),
            partial(reference_attention, seq_params=rows),
            attended,
        ),
        Kernel(
            "attention of documents",
            partial(attention, seq_params=packed_there),
            partial(reference_attention, seq_params=packed),
            attended,
        ),
        Kernel(
            "embedding",
            partial(embedding, ids_there),
            partial(reference_embedding, ids, first_row=0),
            [(V, H)],
        ),
        Kernel(
            "head and loss", loss, lambda x, w: their_losses(x, w).sum(), head, scale=LOGIT_SCALE
        ),
        Kernel("head and losses", losses, their_losses, head, scale=LOGIT_SCALE),
    ]


def _results(function: Computation, inputs: Sequence[Tensor]) -> list[Tensor]:
    """What it computes, and the gradients of a weighted sum of that."""
    inputs = [x.requires_grad_() for x in inputs]
    out = function(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    draw = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=draw).to(y) for y in outs]
    return [*(y.detach() for y in outs), *torch.autograd.grad(outs, inputs, upstream)]
