"""Attention on GPUs by torch's varlen_attn (FlashAttention): one call for documents of several
lengths, with windows.

Does not support soft caps and sinks; requires 16 bits and values as wide as keys. Source: Dao 2023,
arXiv:2307.08691.
"""

from functools import cache, lru_cache
from importlib.util import find_spec
from inspect import signature

import numpy as np
import torch
from torch import Tensor

from megalith.kernels.attention.scores import PLAIN, Scores
from megalith.kernels.attention.sdpa import Lengths


@cache
def has_varlen() -> bool:
    """Return whether torch has varlen_attn with windows and grouped-query attention, by its
    signature."""
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return {"window_size", "enable_gqa", "scale"} <= set(signature(varlen_attn).parameters)


def can_use(q: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None) -> bool:
    """Return whether varlen_attn supports these scores on this device: GPUs since Ampere."""
    has_unsupported = scores.off_by_one or scores.dropout is not None or sinks is not None
    return (
        q.device.type == "cuda"  # lint: allow cuda-literal: the kernel only supports CUDA
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] == v.shape[2]
        and q.shape[2] % 8 == 0
        and q.shape[2] <= 256
        and len(q) > 0
        and not (has_unsupported or scores.softcap is not None)
        and not torch.compiler.is_compiling()
        and has_varlen()
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scores: Scores = PLAIN
) -> Tensor:
    """Softmax attention inside each document: q [t, n, d], k, v [t_kv, g, d] -> [t, n, d].

    A document's queries are the last of its keys, as varlen_attn assumes.
    """
    from torch.nn.attention.varlen import varlen_attn

    starts_q, starts_kv = starts(lengths, q.device)
    longest_q, longest_kv = (max(counts) for counts in zip(*lengths, strict=True))
    out = varlen_attn(
        q,
        k,
        v,
        starts_q,
        starts_kv,
        longest_q,
        longest_kv,
        scale=scores.factor(q.shape[2]),
        window_size=varlen_window(scores),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


@lru_cache(maxsize=8)  # all layers of a forward use the same one
def starts(lengths: Lengths, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cumulative lengths of queries and keys: int32 [documents + 1] each."""
    both = np.cumsum(np.array([(0, 0), *lengths], np.int32), axis=0, dtype=np.int32)
    queries, keys = torch.from_numpy(both.T.copy()).to(device, non_blocking=True)
    return queries, keys


def varlen_window(scores: Scores) -> tuple[int, int]:
    """Return how many keys before and after its own position a query sees; -1: all.

    >>> both_sides = Scores(window=4, right=1, causal=False)
    >>> varlen_window(PLAIN), varlen_window(Scores(window=4)), varlen_window(both_sides)
    ((-1, 0), (3, 0), (3, 1))
    """
    return (
        -1 if scores.window is None else scores.window - 1,
        -1 if scores.after is None else scores.after,
    )
