"""Causal attention inside each document: a plain reference, and `scaled_dot_product_attention` behind one face."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megalith.kernels.tokens import Tokens


def attention(q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
    """Softmax attention, causal and inside each document; every n/g query heads share one key/value head.

    q [t, n, d], k and v [t_kv, g, d], any strides -> [t, n, d]. Scores are scaled by 1/sqrt(d). A document's queries
    are the last of its keys, so a key/value cache may stand in front of them.
    """
    if tokens.uniform is not None:
        return _documents_of_one_length(q, k, v, tokens.uniform)
    queries = [length for length, _ in tokens.lengths]
    keys = [length for _, length in tokens.lengths]
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    return torch.cat([_one_document(*part) for part in parts])


def reference_attention(q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
    """What `attention` computes, document by document, in plain operations."""
    queries = [length for length, _ in tokens.lengths]
    keys = [length for _, length in tokens.lengths]
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    return torch.cat([_reference_document(*part) for part in parts])


def _documents_of_one_length(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """All documents in one call: [t, n, d] seen as [documents, n, length, d], without copying."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


def _one_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [q, n, d], k and v [kv, g, d] of one document -> [q, n, d]."""
    queries, keys = q.shape[0], k.shape[0]
    if queries == 0:
        return q
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    from_start = queries == keys
    # is_causal aligns the first query with the first key, so a cache needs the mask spelled out; one query sees all.
    mask = None if from_start or queries == 1 else _visible(queries, keys, q.device)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=from_start, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.squeeze(0).transpose(0, 1)


def _reference_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same in plain operations."""
    queries, heads, head_dim = q.shape
    keys = k.shape[0]
    shared = heads // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    scores = torch.einsum("qnd,knd->nqk", q, k) / head_dim**0.5
    scores = scores.masked_fill(~_visible(queries, keys, q.device), float("-inf"))
    weights = scores.to(torch.promote_types(q.dtype, torch.float32)).softmax(-1).to(q.dtype)
    return torch.einsum("nqk,knd->qnd", weights, v)


def _visible(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [queries, keys]: query i, which is token keys - queries + i, sees itself and what came before."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
