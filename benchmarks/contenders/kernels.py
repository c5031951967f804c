"""Every kernel's ways beside one another on one device, forward and backward, at the sizes of a
layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalith.config.kernels import Kernel
from megalith.kernels.activation import GatedActivation, swiglu, weighted_gated
from megalith.kernels.attention import flex, sdpa
from megalith.kernels.attention.dispatch import attention
from megalith.kernels.attention.scores import Scores
from megalith.kernels.attention.sdpa import Lengths, sdpa_attention
from megalith.kernels.attention.split_kv import span_attention
from megalith.kernels.norm import add_layer_norm, add_rms_norm
from megalith.kernels.packed import seq_params_from_lengths
from megalith.kernels.rope import apply_rope
from megalith.parallel.cross_entropy import VocabShard, linear_cross_entropy
from megalith.parallel.group import single_rank_group
from megalith.plan.context import plan_length_spans

EPS = 1e-5
KERNELS: tuple[Kernel, ...] = ("auto", "torch", "reference")
Ways = Mapping[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """A layer's sizes and its tokens, cut into documents."""

    tokens: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    documents: tuple[int, ...]


LARGE = Sizes(8192, 4096, 14336, 32, 8, 128, 128_256, (4096, 100, 900, 2048, 1048))
"""Of Llama-3 8B; documents of uneven lengths."""

SMALL = Sizes(48, 32, 40, 4, 2, 16, 100, (30, 1, 17))
"""For a rehearsal."""

SCORES: Mapping[str, Scores] = {
    "attention": Scores(),
    "attention, window": Scores(window=1024),
    "attention, cap": Scores(softcap=50.0),
    "attention, off by one": Scores(off_by_one=True),
}


def contests(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[tuple[str, Ways]]:
    """(operation, its ways): each way computes it forward and backward; "auto" is the one that runs
    use."""
    draw = torch.Generator().manual_seed(0)

    def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [
            torch.randn(shape, generator=draw).to(device, dtype).requires_grad_()
            for shape in shapes
        ]

    t, h, f, d = sizes.tokens, sizes.hidden, sizes.ffn, sizes.head_dim
    yield "add_rms_norm", by_kernel(partial(add_rms_norm, eps=EPS), inputs((t, h), (t, h), (h,)))
    yield (
        "add_layer_norm",
        by_kernel(partial(add_layer_norm, eps=EPS), inputs((t, h), (t, h), (h,), (h,))),
    )
    angles = torch.randn(t, d // 2, generator=draw).to(device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    yield "rope", by_kernel(partial(apply_rope, cos=cos, sin=sin), inputs((t, sizes.heads, d)))
    turned = partial(apply_rope, cos=cos, sin=sin, interleaved=True)
    yield "rope, interleaved", by_kernel(turned, inputs((t, sizes.heads, d)))
    yield "swiglu", by_kernel(swiglu, inputs((t, 2 * f)))
    yield (
        "weighted gate",
        by_kernel(partial(weighted_gated, gate=GatedActivation("silu")), inputs((t, 2 * f), (t,))),
    )
    labels = torch.randint(0, sizes.vocab, (t,), generator=draw).to(device)
    loss = partial(
        linear_cross_entropy,
        labels=labels,
        vocab=VocabShard(single_rank_group("tp"), 0, sizes.vocab),
    )
    yield "head and loss", by_kernel(loss, inputs((t, h), (sizes.vocab, h)), ("auto", "torch"))
    qkv = inputs((t, sizes.heads, d), *[(t, sizes.kv_heads, d)] * 2)
    lengths = tuple((length, length) for length in sizes.documents)
    for name, scores in SCORES.items():
        yield name, attention_ways(qkv, lengths, scores)


def by_kernel(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    kernels: Sequence[Kernel] = KERNELS,
) -> Ways:
    """One way for each kernel: `function` of the inputs, which are all differentiated."""
    return {
        kernel: back_and_forth(partial(function, *inputs, kernel=kernel), inputs)
        for kernel in kernels
    }


def attention_ways(qkv: Sequence[Tensor], lengths: Lengths, scores: Scores) -> Ways:
    """Every way that knows these scores on this device; "auto" is what runs use."""
    q, k, v = qkv
    tokens = seq_params_from_lengths([keys for _, keys in lengths], device=q.device)
    plain = scores == Scores()
    known: dict[str, Callable[[], Tensor]] = {
        "split_kv": lambda: span_attention(
            q, k, v, plan_length_spans(lengths, scores.window), scores
        )
    }
    if plain:
        known["documents"] = lambda: sdpa_attention(q, k, v, lengths)
    if sdpa.can_use(q, v, scores, None):
        known["varlen"] = lambda: sdpa.varlen_attention(q, k, v, lengths, scores)
    if flex.can_use(q, v, scores):
        known["flex"] = lambda: flex.flexible_attention(q, k, v, lengths, scores)
    ways: dict[str, Callable[[], Tensor]] = {
        "auto": lambda: attention(q, k, v, tokens, scores),
        **known,
    }
    return {name: back_and_forth(way, qkv) for name, way in ways.items()}


def back_and_forth(
    function: Callable[[], Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor]
) -> Callable[[], object]:
    """Forward, then backward from ones."""

    def both() -> object:
        out = function()
        outs = out if isinstance(out, tuple) else (out,)
        return torch.autograd.grad(outs, inputs, [torch.ones_like(each) for each in outs])

    return both
