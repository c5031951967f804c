"""Fused attention of PyTorch: `scaled_dot_product_attention` and `varlen_attn` (FlashAttention)."""

import math
from functools import cache, lru_cache
from importlib.util import find_spec
from inspect import signature

import numpy as np
import torch
from torch import Tensor

from megalith.kernels.attention.scores import PLAIN, Mask, Scores, causal_mask, unmask_blind_queries
from megalith.kernels.linear import scaled_dot_product_attention

Lengths = tuple[tuple[int, int], ...]
"""(queries, keys) of each document; its queries are the last of its keys."""


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    *,
    scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention inside each document: q [t, n, d], k [t_kv, g, d], v [t_kv, g, d_v] -> [t, n, d_v].

    `scale`: of the scores; unset: 1 / sqrt(d). Unless `causal`, all queries of a document see all
    its keys.
    """
    queries, keys = lengths[0]
    if queries == keys and len(set(lengths)) == 1:
        return sdpa_documents(q, k, v, keys, scale=scale, causal=causal)
    counts, every = [queries for queries, _ in lengths], [keys for _, keys in lengths]
    parts = zip(q.split(counts), k.split(every), v.split(every), strict=True)
    return torch.cat([_sdpa_document(*part, scale, causal) for part in parts])


def sdpa_documents(
    q: Tensor, k: Tensor, v: Tensor, length: int, *, scale: float | None = None, causal: bool = True
) -> Tensor:
    """Attention of documents of equal length, without copies: [t, n, d] viewed as [documents, n,
    length, d]."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1], scale=scale
    )
    return out.transpose(1, 2).flatten(0, 1)


def _sdpa_document(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Tensor:
    """Attention of one document: q [q, n, d], k [kv, g, d] and v [kv, g, d_v] -> [q, n, d_v]."""
    queries, keys = q.shape[0], k.shape[0]
    if queries == 0 or keys == 0:
        return q.new_zeros(queries, q.shape[1], v.shape[2])
    # is_causal aligns the first query with the first key, so cached keys need an explicit mask; a
    # single query attends to all keys.
    plain = queries == keys or not causal or queries == 1
    mask = None if plain else causal_mask(queries, keys, device=q.device)
    return _call(q, k, v, mask, causal=causal and queries == keys, scale=scale)


def sdpa_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | Mask | None,
    bias: Tensor | None = None,
    *,
    rows: int = 1,
    scale: float | None = None,
) -> Tensor:
    """Attention of documents of equal length where query i sees key j if mask[i, j]; None: all see
    all.

    The mask applies to every row: bool [q, kv], or a `Mask`. `bias` [n, q, kv] is added to the
    scores. Queries without visible keys give 0.
    """
    if mask is None and bias is None and rows == 1:
        return _sdpa_document(q, k, v, scale, False)
    if not q.numel() or not k.numel():
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    if mask is None:
        return _call(q, k, v, bias, causal=False, scale=scale, rows=rows)
    if isinstance(mask, Tensor):
        seen, blind = unmask_blind_queries(mask)
        given = seen if bias is None else bias.to(q.dtype).masked_fill(~seen, -math.inf)
    else:
        added, blind = mask
        added = added.unsqueeze(1) if added.dim() == 3 else added  # the same for all heads
        given = added if bias is None else bias.to(q.dtype) + added
    out = _call(q, k, v, given, causal=False, scale=scale, rows=rows)
    return out.masked_fill(blind.expand(rows, q.shape[0] // rows, 1).reshape(-1, 1, 1), 0)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    rows: int = 1,
) -> Tensor:
    q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa, scale=scale
    )
    return out.transpose(1, 2).flatten(0, 1)


# --- attention on GPUs by torch's varlen_attn (FlashAttention): one call for documents of several
# lengths, with windows
#
# Does not support soft caps and sinks; requires 16 bits and values as wide as keys. Source: Dao
# 2023, arXiv:2307.08691.


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
