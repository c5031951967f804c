"""Attention on GPUs by torch's flex_attention: windows, caps and sinks in one kernel, compiled for
each kind of scores.

Each query sees an interval of the keys. Which blocks of 128 queries and 128 keys have anything to
see, and which are seen whole, is planned on the host; only in the others is every pair looked at. A
sink is a part of softmax that has no value: it takes away a share of the output that follows from
the log of the sum of exponentials. Masks hide keys of the intervals: with them every block that is
not left out is looked at pair by pair. Source: Dong et al. 2024, arXiv:2412.05496.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megalith.kernels.gpu import has_triton
from megalith.kernels.scores import PLAIN, Scores
from megalith.kernels.sdpa import Lengths
from megalith.kernels.visible import FREE, VisiblePairs

BLOCK = 128
"""Queries, and keys, of a block: what torch's programs are tuned for."""

Ints = NDArray[np.int32]


def takes(q: Tensor, v: Tensor, scores: Scores) -> bool:
    """Whether flex_attention computes these scores here: on a GPU, with a compiler, and no weights
    dropped."""
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
    seen: VisiblePairs | None = None,
    *,
    compiled: bool = True,
) -> Tensor:
    """Softmax attention inside each document: q [t, n, d], k [t_kv, g, d], v [t_kv, g, d_v] -> [t,
    n, d_v].

    sinks [n]; `seen`: which pairs masks let see. `compiled=False`: the same in plain operations,
    with all pairs in memory, for tests on CPUs.
    """
    asked = lengths, scores.window, scores.after
    mask = block_mask(*asked, q.device) if seen is None else masked_blocks(*asked, seen)
    run: Any = _compiled() if compiled else flex_attention  # what it gives depends on return_aux
    out, found = run(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
        score_mod=None if scores.softcap is None else capped_by(scores.softcap),
        block_mask=mask,
        scale=scores.factor(q.shape[2]),
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    out = out.squeeze(0).transpose(0, 1)
    if sinks is None and not scores.off_by_one:
        return out
    lse = found.lse.squeeze(0).t()
    sink = torch.zeros((), device=q.device) if sinks is None else sinks.to(lse.dtype)
    return (out * torch.sigmoid(lse - sink).unsqueeze(-1)).to(q.dtype)


@cache
def _compiled() -> Callable[..., Any]:
    """Without its compiler flex_attention keeps all pairs in memory."""
    run: Callable[..., Any] = torch.compile(flex_attention)
    return run


def capped_by(cap: float) -> Callable[..., Tensor]:
    """What becomes of a score that is capped, as flex_attention wants it."""

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def intervals(lengths: Lengths, window: int | None, after: int | None) -> Ints:
    """First of the keys that each query sees, and one past the last: [t, 2]. A document's queries
    are the last of its keys, and it sees `after` later ones; None: all.

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
    """Of each block of queries, the blocks of keys that it has to look at."""

    mixed: Ints
    """[blocks]: how many are seen in part."""

    mixed_keys: Ints
    """[blocks, blocks of keys]: those; what comes after so many counts nothing."""

    whole: Ints
    """How many are seen by every query of the block, all of them."""

    whole_keys: Ints


def plan_blocks(
    seen: Ints, num_keys: int, block: int = BLOCK, *, borders: bool = False
) -> QueryBlocks:
    """From `intervals` [t, 2] to blocks: of t and num_keys tokens, the last block of either may be
    short. With `borders` there may be more of them in any block, and none is whole.

    >>> plan = plan_blocks(intervals(((4, 4),), None, 0), 4, block=2)
    >>> plan.mixed.tolist(), plan.whole.tolist(), plan.whole_keys[1, 0]
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
    full_queries = starts + block <= len(
        seen
    )  # the kernel takes a whole block for one without borders
    whole &= full_queries[:, None] & (edges + block <= num_keys)[None] & (not borders)
    return QueryBlocks(*_counted(touched & ~whole), *_counted(whole))


def _counted(blocks: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """How many of each row are set, and where those are, in order, the others after them."""
    order = np.argsort(~blocks, axis=1, kind="stable")
    return blocks.sum(1).astype(np.int32), order.astype(np.int32)


@lru_cache(maxsize=8)  # every layer of a forward asks for the same one or two
def block_mask(
    lengths: Lengths, window: int | None, after: int | None, device: torch.device
) -> BlockMask:
    """What each query sees, as flex_attention wants it: on `device`, without a look at all
    pairs."""
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
    lengths: Lengths, window: int | None, after: int | None, seen: VisiblePairs
) -> BlockMask:
    """The same where masks hide keys, too."""
    device, visible = seen.queries.device, seen.visible
    bounds, num_keys = intervals(lengths, window, after), sum(keys for _, keys in lengths)
    touched = plan_blocks(bounds, num_keys, borders=True)
    mixed, mixed_keys = (
        torch.from_numpy(part).to(device, non_blocking=True)[None, None] for part in touched[:2]
    )
    interval, numbers = torch.from_numpy(bounds).to(device, non_blocking=True), seen.keys
    # Tensors of which nothing is asked stand for what is not there, so that one program is compiled
    # for all.
    everything = torch.ones(1, dtype=torch.bool, device=device)
    text = (
        everything.expand(num_keys).contiguous() if visible.keys is None else visible.keys[numbers]
    )
    pairs = everything if visible.pairs is None else visible.pairs
    starts = (
        torch.full_like(seen.queries, FREE) if visible.rows is None else visible.rows[seen.queries]
    )
    last = len(pairs) - 1

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = (key >= interval[query, 0]) & (key < interval[query, 1]) & text[key]
        place = (starts[query] + numbers[key]).clamp(0, last)
        return inside & (pairs[place] | (starts[query] < FREE // 2))

    return BlockMask.from_kv_blocks(
        mixed, mixed_keys, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(len(bounds), num_keys)
    )
