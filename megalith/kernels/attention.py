"""Attention of each token to others of its document: the plain definition, and the fastest way to
compute it.

Several ways serve: tiles of whole documents on CPUs, kernels/tiled_attention.py; torch's kernel,
kernels/sdpa.py; intervals of the keys for windows, caps, sinks and dropped weights,
kernels/span_attention.py; and on GPUs torch's kernels for documents of many lengths,
kernels/varlen_attention.py, and for scores of many kinds, kernels/flex_attention.py. Biases of
single pairs go to torch's kernel, too, document by document, and so do masks, but for those beside
windows, caps, sinks and dropped weights: these take the ways that know intervals.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from megalith.config.kernels import BackendName, is_explicit_backend
from megalith.kernels.dropout import DroppedWeights, weight_factors
from megalith.kernels.engine import refuse
from megalith.kernels.relative_bias import distance_biases
from megalith.kernels.scores import PLAIN, Scores, keys_seen, masked_attention
from megalith.kernels.sdpa import Lengths, Mask, mask_for_torch, sdpa_attention, sdpa_masked
from megalith.kernels.span_attention import span_attention
from megalith.kernels.tiled_attention import TILED_LENGTHS, tiled_attention
from megalith.kernels.tokens import PackedSeqParams
from megalith.kernels.visible import Visible, VisiblePairs
from megalith.plan.context import spans_of_lengths

AttentionBackend = Literal["cpu_tiled", "torch", "split_kv", "varlen", "flex"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: PackedSeqParams,
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
    *,
    kernel: BackendName = "auto",
) -> Tensor:
    """Softmax attention inside each document; every n/g query heads share one key/value head.

    q [t, n, d], k [t_kv, g, d], v [t_kv, g, d_v], any strides -> [t, n, d_v]. A document's queries
    are the last of its keys, so a KV cache may stand in front of them; where neither
    causality nor a window asks for places, they may as well be other tokens, of another number.
    `sinks` [n]: see `masked_attention`. Masks of the tokens hide keys beside what `scores` hide.
    For bf16, scores and softmax are fp32. kernel="torch": torch's kernel where it knows such
    scores, else the plain definition.
    """
    lengths = tokens.lengths
    if is_explicit_backend(kernel):
        check_forced(kernel, q, k, v, tokens, scores, sinks)
    if tokens.visible is not None:
        return _with_masks(q, k, v, tokens, tokens.visible, scores, sinks, kernel)
    if scores.window is not None and scores.chunked:
        k, v, lengths = in_chunks(k, v, lengths, scores.window)
        scores = replace(scores, window=None, chunked=False)
    if scores.window is not None:
        k, v, lengths = within_reach(k, v, lengths, scores.window)
        scores = (
            scores
            if scores.hides(max(keys for _, keys in lengths))
            else replace(scores, window=None)
        )
    if scores.relative is not None:
        return _pair_by_pair(q, k, v, lengths, tokens, scores, sinks, kernel)
    if kernel == "reference" or (kernel == "torch" and not known_to_torch(scores, sinks)):
        return _document_by_document(q, k, v, lengths, tokens, scores, sinks)
    backend = (
        select_attention_backend(q, v, lengths, scores, sinks)
        if kernel == "auto"
        else ATTENTION_BACKENDS[kernel]
    )
    if backend == "split_kv":
        # Planned on the host for the lengths at hand: a compiler would trace that, and once more
        # for all other lengths.
        run = torch.compiler.disable(_spans) if torch.compiler.is_compiling() else _spans
        return run(q, k, v, lengths, scores, sinks, dropped_between(tokens, scores))
    if backend in ("varlen", "flex"):
        return _on_gpu(backend, q, k, _alone_in_memory(v, q, k), lengths, scores, sinks)
    if backend == "cpu_tiled":
        return tiled_attention(
            q, k, v, row_of(lengths), scale=scores.factor(q.shape[2]), causal=scores.causal
        )
    return sdpa_attention(
        q, k, _alone_in_memory(v, q, k), lengths, scale=scores.scale, causal=scores.causal
    )


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: PackedSeqParams,
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `attention` computes, document by document, in plain operations."""
    return _document_by_document(q, k, v, tokens.lengths, tokens, scores, sinks)


def _document_by_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    tokens: PackedSeqParams,
    scores: Scores,
    sinks: Tensor | None,
) -> Tensor:
    counts, every = zip(*lengths, strict=True)
    masks = _masks(tokens, lengths, scores, q.device)
    numbers = None
    if scores.dropout is not None and tokens.dropout is not None:
        numbers = list(
            zip(tokens.dropout.numbers.split(counts), tokens.dropout.numbers_of_keys.split(every))
        )
    outs = []
    for n, (queries, keys, values) in enumerate(
        zip(q.split(counts), k.split(every), v.split(every), strict=True)
    ):
        mask, factors = next(masks), None
        if scores.dropout is not None and numbers is not None:
            first = scores.dropout.first_head
            heads = range(first, first + q.shape[1])
            factors = weight_factors(scores.dropout, *numbers[n], heads, q.dtype)
        bias = _bias(tokens, *lengths[n], scores)
        outs.append(
            masked_attention(queries, keys, values, mask, scores, sinks, bias=bias, factors=factors)
        )
    return torch.cat(outs)


def _bias(tokens: PackedSeqParams, queries: int, keys: int, scores: Scores) -> Tensor | None:
    """What the scores of a document gain: [n, queries, keys]; None: nothing."""
    if scores.relative is None:
        return None
    assert tokens.biases is not None, "the model gives its table of biases to the tokens"
    return distance_biases(
        tokens.biases, queries, keys, max_distance=scores.relative, causal=scores.causal
    )


def _masks(
    tokens: PackedSeqParams, lengths: Lengths, scores: Scores, device: torch.device
) -> Iterator[Tensor | None]:
    """For each document, of whose keys the last may be left: what its queries see by `scores`
    and by its mask, bool [queries or 1, keys]; None: everything."""
    own: list[Tensor | None] = [None] * len(lengths)
    if tokens.visible is not None:
        own, scores = (
            tokens.visible.of_documents(tokens.lengths, lengths),
            tokens.visible.scores(scores),
        )
    for (queries, keys), mask in zip(lengths, own, strict=True):
        seen = keys_seen(queries, keys, scores, device=device)
        yield seen if mask is None else mask if seen is None else seen & mask


def dropped_between(tokens: PackedSeqParams, scores: Scores) -> DroppedWeights | None:
    """Which weights of these tokens among themselves are dropped; None: none."""
    if scores.dropout is None or tokens.dropout is None:
        return None
    return DroppedWeights(scores.dropout, tokens.dropout.numbers, tokens.dropout.numbers_of_keys)


def _pair_by_pair(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    tokens: PackedSeqParams,
    scores: Scores,
    sinks: Tensor | None,
    kernel: BackendName,
) -> Tensor:
    """Attention with masks or biases of pairs: by torch's kernel, unless it does not know the
    rest."""
    known = known_to_torch(replace(scores, window=None, relative=None), sinks)
    if kernel == "reference" or not known:
        return _document_by_document(q, k, v, lengths, tokens, scores, sinks)
    # as a part of the projection it would keep all of it for backward; of the rest copies are kept
    v = v.contiguous()
    rows = len(lengths) if len(set(lengths)) == 1 else 1  # alike: one call, and one bias for all
    masks: Iterator[Tensor | Mask | None] = _masks(tokens, lengths, scores, q.device)
    if tokens.visible is not None:
        masks = iter(_masks_for_torch(tokens.visible, tokens, lengths, scores, q))
    lengths = lengths[:1] if rows > 1 else lengths
    counts, every = [queries * rows for queries, _ in lengths], [keys * rows for _, keys in lengths]
    outs = []
    for n, (queries, keys, values) in enumerate(
        zip(q.split(counts), k.split(every), v.split(every), strict=True)
    ):
        seen, bias = next(masks), _bias(tokens, *lengths[n], scores)
        outs.append(sdpa_masked(queries, keys, values, seen, bias, rows=rows, scale=scores.scale))
    return torch.cat(outs)


def _masks_for_torch(
    visible: Visible, tokens: PackedSeqParams, lengths: Lengths, scores: Scores, q: Tensor
) -> list[Mask | None]:
    """`_masks`, made once for all layers that hide the same; of documents of one length as one."""
    hiding = visible.scores(scores)
    asked = q.dtype, lengths, hiding.window, hiding.right, hiding.causal, hiding.chunked
    if asked in visible.found:
        return visible.found[asked]
    masks = list(_masks(tokens, lengths, scores, q.device))
    masks = [_stacked(masks)] if len(masks) > 1 and len(set(lengths)) == 1 else masks
    found = [None if mask is None else mask_for_torch(mask, q.dtype) for mask in masks]
    if not torch.compiler.is_compiling():
        visible.found[asked] = found
    return found


def _stacked(masks: list[Tensor | None]) -> Tensor | None:
    """Masks [queries or 1, keys] of documents of one length as one: [documents, queries or 1,
    keys]."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    shape = torch.broadcast_shapes(*(mask.shape for mask in given))
    everything = given[0].new_ones(())
    return torch.stack([(everything if mask is None else mask).expand(shape) for mask in masks])


def _with_masks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: PackedSeqParams,
    visible: Visible,
    scores: Scores,
    sinks: Tensor | None,
    kernel: BackendName,
) -> Tensor:
    """Attention where tokens have masks. No way that knows none is asked."""
    hiding = visible.scores(scores)
    kept = seen_at_most(tokens.lengths, hiding)
    k, v = _last_keys(k, v, tokens.lengths, kept)
    window = (
        hiding.window if hiding.chunked or hiding.hides(max(keys for _, keys in kept)) else None
    )
    scores, hiding = replace(scores, window=window), replace(hiding, window=window)
    auto = kernel == "auto"
    backend = (
        select_masked_backend(q, v, kept, scores, sinks, visible)
        if auto
        else ATTENTION_BACKENDS.get(kernel, "torch")
    )
    if backend == "torch":
        return _pair_by_pair(q, k, v, kept, tokens, scores, sinks, kernel)
    lengths = kept
    if hiding.window is not None and hiding.chunked:
        lengths, hiding = (
            lengths_of_chunks(kept, hiding.window),
            replace(hiding, window=None, chunked=False),
        )
    seen = VisiblePairs(
        visible,
        torch.arange(len(q), device=q.device),
        _numbers_of_keys(tokens.lengths, kept, q.device),
    )
    if backend == "flex":
        from megalith.kernels.flex_attention import flexible_attention

        return flexible_attention(q, k, _alone_in_memory(v, q, k), lengths, hiding, sinks, seen)
    run = (
        torch.compiler.disable(_spans) if torch.compiler.is_compiling() else _spans
    )  # as without masks
    return run(q, k, v, lengths, hiding, sinks, dropped_between(tokens, scores), seen)


def select_masked_backend(
    q: Tensor, v: Tensor, lengths: Lengths, scores: Scores, sinks: Tensor | None, visible: Visible
) -> AttentionBackend:
    """The fastest way that knows these scores and masks: torch's kernel has all pairs in its
    mask, so it is none for windows. Nor is it, on CPUs, for long documents of which nothing but
    padding is hidden beside causality: intervals cost them the same (2048 tokens, 8 heads: 1.01
    of torch's time in fp32, 0.96 in bf16), and no mask of all pairs. Biases by distance go to
    torch's kernel, or to the plain definition, whatever else there is."""
    cpu = q.device.type == "cpu"
    long = any(keys >= TILED_LENGTHS.stop and queries > 1 for queries, keys in lengths)
    intervals = cpu and long and scores.causal and visible.pairs is None
    if scores.relative is not None or (known_to_torch(scores, sinks) and not intervals):
        return "torch"
    if cpu:
        return "split_kv"
    from megalith.kernels import flex_attention

    return "flex" if flex_attention.takes(q, v, scores) else "split_kv"


def seen_at_most(lengths: Lengths, scores: Scores) -> Lengths:
    """(queries, keys) of each document without the keys of a cache that lie before every query's
    window or chunk."""
    if scores.window is None:
        return lengths
    return (
        _of_chunks(lengths, scores.window)
        if scores.chunked
        else _of_windows(lengths, scores.window)
    )


def _numbers_of_keys(lengths: Lengths, kept: Lengths, device: torch.device) -> Tensor:
    """Which of all keys are left of documents of which the last keys are: int64 [t_kv]."""
    ends = accumulate(keys for _, keys in lengths)
    return torch.cat(
        [
            torch.arange(end - left, end, device=device)
            for end, (_, left) in zip(ends, kept, strict=True)
        ]
    )


def _spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    scores: Scores,
    sinks: Tensor | None,
    dropped: DroppedWeights | None,
    seen: VisiblePairs | None = None,
) -> Tensor:
    spans = spans_of_lengths(lengths, scores.window, causal=scores.causal, right=scores.right)
    return span_attention(q, k, v, spans, scores, sinks, dropped, seen=seen)


ATTENTION_BACKENDS: Mapping[BackendName, AttentionBackend] = {
    "torch": "torch",
    "sdpa": "torch",
    "cpu_tiled": "cpu_tiled",
    "split_kv": "split_kv",
    "varlen": "varlen",
    "flex": "flex",
}
"""Of ways that are asked for."""


def check_forced(
    kernel: BackendName,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: PackedSeqParams,
    scores: Scores,
    sinks: Tensor | None,
) -> None:
    """Refuse a way that was asked for by name and does not take these.

    Raises:
        ConfigError: it does not; with one that does.
    """
    plain = known_to_torch(scores, sinks)
    if scores.relative is not None:
        fits = kernel == "sdpa" and known_to_torch(
            replace(scores, window=None, relative=None), sinks
        )
    elif tokens.visible is not None and kernel in ("sdpa", "cpu_tiled", "varlen"):
        fits = kernel == "sdpa" and known_to_torch(replace(scores, window=None), sinks)
    elif kernel in ("sdpa", "cpu_tiled"):
        whole = all(queries == keys for queries, keys in tokens.lengths)
        fits = plain and (kernel == "sdpa" or (whole and q.device.type == "cpu"))
    elif kernel == "split_kv":
        fits = True
    else:
        from megalith.kernels import flex_attention, varlen_attention

        by_varlen = varlen_attention.takes(q, v, scores, sinks)
        fits = by_varlen if kernel == "varlen" else flex_attention.takes(q, v, scores)
    if not fits:
        refuse("attention", kernel, q)


def select_attention_backend(
    q: Tensor, v: Tensor, lengths: Lengths, scores: Scores, sinks: Tensor | None
) -> AttentionBackend:
    """The fastest way that knows these scores; a window that reaches over whole documents is none.

    - spans: windows, caps, sinks and dropped weights, which torch's kernel does not know, or,
      windows, only as a mask over all pairs. On CPUs also long documents whose values have another
      width than keys, since torch has no fused kernel for those and keeps all scores.
    - tiles: on CPUs, documents without a cache that are neither very short nor very long.
    - varlen: on GPUs, documents of several lengths, and windows, in 16 bits.
    - flex: on GPUs, caps and sinks, and windows that varlen does not take.
    - torch: everything else.

    On GPUs the choice is by what each way does, not by measurements: none was at hand.
    """
    if q.device.type != "cpu":
        return _select_gpu_backend(q, v, lengths, scores, sinks)
    if not known_to_torch(scores, sinks):
        return "split_kv"
    if torch.compiler.is_compiling():
        return "torch"
    whole = all(queries == keys for queries, keys in lengths)
    if whole and _tiles_pay(q.dtype, row_of(lengths)):
        return "cpu_tiled"
    unfused = v.shape[2] != q.shape[2] and any(
        keys >= TILED_LENGTHS.stop and queries > 1 for queries, keys in lengths
    )
    return "split_kv" if unfused else "torch"


def _select_gpu_backend(
    q: Tensor, v: Tensor, lengths: Lengths, scores: Scores, sinks: Tensor | None
) -> AttentionBackend:
    """On devices other than CPUs, by what their torch has."""
    from megalith.kernels import (
        flex_attention,
        varlen_attention,
    )  # here: they load parts of torch that CPUs never need

    known, alike = known_to_torch(scores, sinks), len(set(lengths)) == 1
    if not (known and alike) and varlen_attention.takes(q, v, scores, sinks):
        return "varlen"
    if not known:
        return "flex" if flex_attention.takes(q, v, scores) else "split_kv"
    return "torch"


def _on_gpu(
    backend: AttentionBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    scores: Scores,
    sinks: Tensor | None,
) -> Tensor:
    from megalith.kernels.flex_attention import flexible_attention
    from megalith.kernels.varlen_attention import varlen_attention

    if backend == "varlen":
        return varlen_attention(q, k, v, lengths, scores)
    return flexible_attention(q, k, v, lengths, scores, sinks)


def known_to_torch(scores: Scores, sinks: Tensor | None) -> bool:
    """Whether torch's kernel computes these scores without a mask over all pairs."""
    strange = (
        scores.off_by_one
        or scores.dropout is not None
        or scores.relative is not None
        or sinks is not None
    )
    return scores.window is None and scores.softcap is None and not strange


def _tiles_pay(dtype: torch.dtype, lengths: tuple[int, ...]) -> bool:
    """Whether tiles are faster on a CPU: for documents that are neither very short nor very
    long."""
    typical = sum(lengths) // max(1, sum(length > 0 for length in lengths))
    # Short documents: torch's bf16 backward is slow (4 to 9 times); and packed, a tile holds
    # several, a call just one.
    shortest = 16 if dtype == torch.bfloat16 or len(lengths) > 1 else TILED_LENGTHS.start
    return shortest <= typical and max(lengths) < TILED_LENGTHS.stop


def row_of(lengths: Lengths) -> tuple[int, ...]:
    """Lengths of the documents of one row: of one, where all are alike, else of all."""
    return tuple(keys for _, keys in (lengths[:1] if len(set(lengths)) == 1 else lengths))


def within_reach(
    k: Tensor, v: Tensor, lengths: Lengths, window: int
) -> tuple[Tensor, Tensor, Lengths]:
    """Without the keys of a cache that lie before every query's window: k, v and the lengths that
    are left.

    So a token that is read from a cache costs no more than its window. A cache may have dropped
    those keys itself.
    """
    kept = _of_windows(lengths, window)
    return *_last_keys(k, v, lengths, kept), kept


def _of_windows(lengths: Lengths, window: int) -> Lengths:
    return tuple(
        (queries, min(keys, queries + window - 1) if queries else 0) for queries, keys in lengths
    )


def in_chunks(k: Tensor, v: Tensor, lengths: Lengths, size: int) -> tuple[Tensor, Tensor, Lengths]:
    """Runs of `size` tokens as documents of their own: k and v without runs that no query is in,
    and lengths.

    Whatever knows documents so computes attention in chunks, at no more than its cost. A cache may
    have dropped whole runs itself.
    """
    kept = _of_chunks(lengths, size)
    return *_last_keys(k, v, lengths, kept), lengths_of_chunks(kept, size)


def _of_chunks(lengths: Lengths, size: int) -> Lengths:
    return tuple(
        (queries, queries + (keys - queries) % size if queries else 0) for queries, keys in lengths
    )


def lengths_of_chunks(lengths: Lengths, size: int) -> Lengths:
    """(queries, keys) of each run of `size` tokens, where documents' queries begin in their first
    run.

    >>> lengths_of_chunks(((3, 4), (5, 5)), 2)
    ((1, 2), (2, 2), (2, 2), (2, 2), (1, 1))
    """
    found: list[tuple[int, int]] = []
    for queries, keys in lengths:
        seen = [min(size, keys - start) for start in range(0, keys, size)] or [0]
        found += zip([seen[0] - (keys - queries), *seen[1:]], seen, strict=True)
    return tuple(found)


def _last_keys(k: Tensor, v: Tensor, lengths: Lengths, kept: Lengths) -> tuple[Tensor, Tensor]:
    """The last keys and values of each document, as many as are `kept`; they may be all that there
    are."""
    if len(k) == sum(keys for _, keys in kept):
        return k, v
    counts = [keys for _, keys in lengths]
    k, v = (
        torch.cat(
            [
                part[len(part) - left :]
                for part, (_, left) in zip(x.split(counts), kept, strict=True)
            ]
        )
        for x in (k, v)
    )
    return k, v


def _alone_in_memory(v: Tensor, *others: Tensor) -> Tensor:
    """v, copied where it is a part of a larger tensor that backward would keep whole for it.

    Values are a part of what the projection gives for queries, keys and values, while rotated
    queries and keys are new. In a layer of Llama-3 8B this is 10 KiB of the 146 that it keeps of
    each token in bf16.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and v.requires_grad):
        return v
    storage = v.untyped_storage()
    shared = any(storage._cdata == other.untyped_storage()._cdata for other in others)
    return v if shared or storage.nbytes() == v.numel() * v.element_size() else v.contiguous()
