"""Attention by torch's scaled_dot_product_attention (SDPA): one call for documents of equal length,
else one call per document.

Supports causality, attention masks, pairwise biases, any scale, and values of another width than
keys (on CPUs with an unfused kernel that materializes all scores of a document). Does not support
soft caps and sinks.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.kernels.attention.scores import causal_mask
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
    # single query sees all keys.
    plain = queries == keys or not causal or queries == 1
    mask = None if plain else causal_mask(queries, keys, device=q.device)
    return _call(q, k, v, mask, causal=causal and queries == keys, scale=scale)


class Mask(NamedTuple):
    """An additive attention mask for SDPA; from a bool mask each call would build, and save, its
    own."""

    added: Tensor
    """[q or 1, kv], or [rows, q or 1, kv]: 0 or -inf, added to the scores; all 0 for queries that
    see nothing."""

    blind: Tensor
    """bool [q or 1, 1] or [rows, q or 1, 1]: queries that see nothing."""


def mask_for_torch(mask: Tensor, dtype: torch.dtype) -> Mask:
    """Return the additive mask of a bool mask, for queries in `dtype`."""
    seen, blind = _unmask_blind_queries(mask)
    return Mask(torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf), blind)


def _unmask_blind_queries(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mask with queries that see nothing seeing all, since torch's kernels disagree on
    their output and gradient; and which queries these are."""
    blind = ~mask.any(-1, keepdim=True)
    return mask | blind, blind


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
    scores. Queries that see nothing give 0.
    """
    if mask is None and bias is None and rows == 1:
        return _sdpa_document(q, k, v, scale, False)
    if not q.numel() or not k.numel():
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    if mask is None:
        return _call(q, k, v, bias, causal=False, scale=scale, rows=rows)
    if isinstance(mask, Tensor):
        seen, blind = _unmask_blind_queries(mask)
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
