"""Attention on GPUs by torch's flex_attention: windows, soft caps and sinks in one kernel, compiled
for each kind of scores.

Each query sees an interval of the keys. The host plans which blocks of 128 queries and 128 keys are
visible in part, which entirely; pairs are masked only in the former. A sink contributes to the
softmax denominator but has no value: it scales the output by a factor that follows from the
logsumexp. With an attention mask, every visible block is masked pair by pair. Source: Dong et al.
2024, arXiv:2412.05496.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megalith.kernels.attention.scores import NO_MASK, PLAIN, MaxScores, PairMask, Scores
from megalith.kernels.attention.sdpa import Lengths
from megalith.kernels.attention.split_kv import max_span_scores
from megalith.kernels.triton.launch import has_triton
from megalith.plan.context import plan_length_spans

BLOCK = 128
"""Queries, and keys, of a block: the size that torch's kernels are tuned for."""

Ints = NDArray[np.int32]


def can_use(q: Tensor, v: Tensor, scores: Scores) -> bool:
    """Return whether flex_attention supports these scores on this device: a GPU with Triton,
    without attention dropout."""
    return (
        q.device.type == "cuda"  # lint: allow cuda-literal: it is compiled to Triton programs
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and min(q.shape[2], v.shape[2]) >= 16
        and len(q) > 0
        and len(v) > 0
        and scores.dropout is None
        and not torch.compiler.is_compiling()
        and has_triton()
    )


def flexible_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
    seen: PairMask | None = None,
    *,
    max_scores: MaxScores | None = None,
    compiled: bool = True,
) -> Tensor:
    """Softmax attention inside each document: q [t, n, d], k [t_kv, g, d], v [t_kv, g, d_v] -> [t,
    n, d_v].

    sinks [n]; `seen`: the attention mask. `max_scores` records the largest scores; where the kernel
    does not return them, by a second pass over q and k. `compiled=False` computes the same in plain
    operations with all pairs in memory, for tests on CPUs.
    """
    interval_args = lengths, scores.window, scores.after
    mask = (
        block_mask(*interval_args, q.device)
        if seen is None
        else masked_blocks(*interval_args, seen)
    )
    # torch 2.13 does not return them on CPUs; with a soft cap, they are those after it
    returns_max = max_scores is not None and scores.softcap is None and q.device.type != "cpu"
    run: Any = _compiled() if compiled else flex_attention  # the result type depends on return_aux
    out, aux = run(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
        score_mod=None if scores.softcap is None else soft_cap_score_mod(scores.softcap),
        block_mask=mask,
        scale=scores.factor(q.shape[2]),
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True, max_scores=returns_max),
    )
    if max_scores is not None:
        if aux.max_scores is None:
            spans = plan_length_spans(
                lengths, scores.window, causal=scores.causal, right=scores.right
            )
            max_scores.update(max_span_scores(q, k, spans, scores, seen))
        else:
            max_scores.update(aux.max_scores.squeeze(0).t())
    out = out.squeeze(0).transpose(0, 1)
    if sinks is None and not scores.off_by_one:
        return out
    lse = aux.lse.squeeze(0).t()
    sink = torch.zeros((), device=q.device) if sinks is None else sinks.to(lse.dtype)
    return (out * torch.sigmoid(lse - sink).unsqueeze(-1)).to(q.dtype)


@cache
def _compiled() -> Callable[..., Any]:
    """Return the compiled flex_attention; uncompiled, it materializes all pairs."""
    run: Callable[..., Any] = torch.compile(flex_attention)
    return run


def soft_cap_score_mod(cap: float) -> Callable[..., Tensor]:
    """Return flex_attention's score_mod of a soft cap."""

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def intervals(lengths: Lengths, window: int | None, after: int | None) -> Ints:
    """Return the first key that each query sees, and one past the last: [t, 2].

    A document's queries are the last of its keys; each attends to `after` later keys; None: all.

    >>> intervals(((2, 2), (1, 3)), 2, 0).tolist()
    [[0, 1], [0, 2], [3, 5]]
    """
    queries, keys = np.array(lengths, np.int64).reshape(-1, 2).T
    document = np.repeat(np.arange(len(lengths)), queries)
    start = (np.cumsum(keys) - keys)[document]
    place = (
        np.arange(len(document))
        - (np.cumsum(queries) - queries)[document]
        + (keys - queries)[document]
    )
    first = np.zeros_like(place) if window is None else np.maximum(place - window + 1, 0)
    last = keys[document] if after is None else np.minimum(place + after + 1, keys[document])
    return np.stack([start + first, start + last], axis=1).astype(np.int32)


class QueryBlocks(NamedTuple):
    """The key blocks that each query block attends to."""

    mixed: Ints
    """[blocks]: number of partially visible key blocks."""

    mixed_keys: Ints
    """[blocks, key blocks]: their indices; entries after that number are ignored."""

    whole: Ints
    """[blocks]: number of key blocks of which every query attends to every key."""

    whole_keys: Ints


def plan_blocks(
    seen: Ints, num_keys: int, block: int = BLOCK, *, borders: bool = False
) -> QueryBlocks:
    """Return the block structure of `intervals` [t, 2] over num_keys keys; the last block of either
    may be short.

    With `borders`, an attention mask may hide any pair, so no block counts as whole.

    >>> plan = plan_blocks(intervals(((4, 4),), None, 0), 4, block=2)
    >>> plan.mixed.tolist(), plan.whole.tolist(), int(plan.whole_keys[1, 0])
    ([1, 1], [0, 1], 0)
    """
    starts = np.arange(0, len(seen), block)
    edges = np.arange(0, num_keys, block)
    ends = np.minimum(edges + block, num_keys)
    lowest, highest = (
        f.reduceat(seen[:, i], starts) for f, i in ((np.minimum, 0), (np.maximum, 1))
    )
    touched = (edges[None] < highest[:, None]) & (ends[None] > lowest[:, None])
    latest, earliest = (
        f.reduceat(seen[:, i], starts) for f, i in ((np.maximum, 0), (np.minimum, 1))
    )
    whole = (edges[None] >= latest[:, None]) & (ends[None] <= earliest[:, None])
    # The kernel does not check bounds inside whole blocks.
    full_queries = starts + block <= len(seen)
    whole &= full_queries[:, None] & (edges + block <= num_keys)[None] & (not borders)
    return QueryBlocks(*_count_and_sort(touched & ~whole), *_count_and_sort(whole))


def _count_and_sort(blocks: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return how many entries of each row are set, and the indices of these in order, followed by
    the others."""
    order = np.argsort(~blocks, axis=1, kind="stable")
    return blocks.sum(1).astype(np.int32), order.astype(np.int32)


@lru_cache(maxsize=8)  # all layers of a forward use the same one or two
def block_mask(
    lengths: Lengths, window: int | None, after: int | None, device: torch.device
) -> BlockMask:
    """Return flex_attention's block mask on `device`, built without enumerating all pairs."""
    seen, num_keys = intervals(lengths, window, after), sum(keys for _, keys in lengths)
    plan = plan_blocks(seen, num_keys)
    bounds = torch.from_numpy(seen).to(device, non_blocking=True)
    mixed, mixed_keys, whole, whole_keys = (
        torch.from_numpy(part).to(device, non_blocking=True)[None, None] for part in plan
    )

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= bounds[query, 0]) & (key < bounds[query, 1])

    return BlockMask.from_kv_blocks(
        mixed,
        mixed_keys,
        whole,
        whole_keys,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(len(seen), num_keys),
    )


def masked_blocks(
    lengths: Lengths, window: int | None, after: int | None, seen: PairMask
) -> BlockMask:
    """Return flex_attention's block mask combined with an attention mask."""
    device, visible = seen.queries.device, seen.visible
    bounds, num_keys = intervals(lengths, window, after), sum(keys for _, keys in lengths)
    touched = plan_blocks(bounds, num_keys, borders=True)
    mixed, mixed_keys = (
        torch.from_numpy(part).to(device, non_blocking=True)[None, None] for part in touched[:2]
    )
    interval, numbers = torch.from_numpy(bounds).to(device, non_blocking=True), seen.keys
    # Placeholder tensors stand for absent masks, so that a single kernel is compiled.
    everything = torch.ones(1, dtype=torch.bool, device=device)
    text = (
        everything.expand(num_keys).contiguous() if visible.keys is None else visible.keys[numbers]
    )
    pairs = everything if visible.pairs is None else visible.pairs
    starts = (
        torch.full_like(seen.queries, NO_MASK)
        if visible.rows is None
        else visible.rows[seen.queries]
    )
    last = len(pairs) - 1

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = (key >= interval[query, 0]) & (key < interval[query, 1]) & text[key]
        place = (starts[query] + numbers[key]).clamp(0, last)
        return inside & (pairs[place] | (starts[query] < NO_MASK // 2))

    return BlockMask.from_kv_blocks(
        mixed, mixed_keys, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(len(bounds), num_keys)
    )
