"""Softmax attention inside documents of packed sequences: the reference and the selection of a
backend.

Backends: `cpu_tiled` (kernels/attention/cpu_tiled.py) for whole documents on CPUs; `sdpa`
(kernels/attention/sdpa.py), PyTorch's kernel; `split_kv` (kernels/attention/split_kv.py) for
windows, soft caps, sinks and attention dropout; on GPUs `varlen` (kernels/attention/sdpa.py) for
documents of several lengths and `flex` (kernels/attention/flex.py) for soft caps and sinks. A bias
per (query, key) pair and an attention mask use sdpa, one document at a time; a mask together with a
window, cap, sink or dropout uses split_kv or flex.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from megalith.config.kernels import BackendName, is_explicit_backend
from megalith.kernels.attention.cpu_tiled import TILED_LENGTHS, tiled_attention
from megalith.kernels.attention.scores import (
    PLAIN,
    AttentionMask,
    Mask,
    MaxScores,
    PairMask,
    Scores,
    build_scores_mask,
    distance_biases,
    mask_for_torch,
    masked_attention,
)
from megalith.kernels.attention.sdpa import (
    Lengths,
    sdpa_attention,
    sdpa_masked,
)
from megalith.kernels.attention.split_kv import max_span_scores, span_attention
from megalith.kernels.backend import raise_unsupported
from megalith.kernels.dropout import DropoutKey, DroppedWeights, weight_factors
from megalith.kernels.packed import PackedSeqParams
from megalith.plan.context import plan_length_spans

AttentionBackend = Literal["cpu_tiled", "torch", "split_kv", "varlen", "flex"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_params: PackedSeqParams,
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
    *,
    attention_bias: Tensor | None = None,
    dropout_key: DropoutKey | None = None,
    max_scores: MaxScores | None = None,
    kernel: BackendName = "auto",
) -> Tensor:
    """Softmax attention inside each document; n/g query heads share one key/value head.

    q [t, n, d], k [t_kv, g, d], v [t_kv, g, d_v], any strides -> [t, n, d_v]. A document's queries
    are the last of its keys, so earlier keys may come from a KV cache. Without causality and
    window, queries and keys may be different tokens (cross-attention). `sinks` [n]: see
    `masked_attention`; `attention_bias` [buckets, n]: table of `scores.relative`; `dropout_key`:
    key of `scores.dropout`. An attention mask of the tokens hides keys in addition to `scores`. For
    bf16, scores and softmax are fp32. kernel="torch" uses SDPA where it supports `scores`, else the
    reference. `max_scores` records the largest score of each head over queries that are no padding:
    backends that do not return it need a second pass over q and k.
    """
    lengths = seq_params.lengths
    if max_scores is not None:
        max_scores = replace(max_scores, valid=seq_params.valid)
    if is_explicit_backend(kernel):
        check_explicit_backend(kernel, q, k, v, seq_params, scores, sinks)
    if seq_params.visible is not None:
        return _with_masks(
            q, k, v, seq_params, scores, sinks, attention_bias, dropout_key, max_scores, kernel
        )
    if scores.window is not None and scores.chunked:
        k, v, lengths = split_into_chunks(k, v, lengths, scores.window)
        scores = replace(scores, window=None, chunked=False)
    if scores.window is not None:
        k, v, lengths = drop_keys_before_window(k, v, lengths, scores.window)
        scores = (
            scores
            if scores.hides(max(keys for _, keys in lengths))
            else replace(scores, window=None)
        )
    if scores.relative is not None:
        _measure_max_scores(max_scores, q, k, lengths, scores)
        return _sdpa_or_reference(
            q, k, v, lengths, seq_params, scores, sinks, attention_bias, dropout_key, kernel
        )
    if kernel == "reference" or (kernel == "torch" and not sdpa_supports(scores, sinks)):
        _measure_max_scores(max_scores, q, k, lengths, scores)
        return _reference_by_document(
            q, k, v, lengths, seq_params, scores, sinks, attention_bias, dropout_key
        )
    backend = (
        select_attention_backend(q, v, lengths, scores, sinks)
        if kernel == "auto"
        else ATTENTION_BACKENDS[kernel]
    )
    if backend == "split_kv":
        # The plan is computed on the host from the lengths: torch.compile would trace it, once for
        # each set of lengths.
        run = torch.compiler.disable(_spans) if torch.compiler.is_compiling() else _spans
        dropped = build_dropped_weights(dropout_key, scores)
        return run(q, k, v, lengths, scores, sinks, dropped, max_scores=max_scores)
    if backend in ("varlen", "flex"):
        v = _contiguous_if_view(v, q, k)
        return _on_gpu(backend, q, k, v, lengths, scores, sinks, max_scores)
    if backend == "cpu_tiled":
        return tiled_attention(
            q,
            k,
            v,
            distinct_row_lengths(lengths),
            scale=scores.factor(q.shape[2]),
            causal=scores.causal,
            max_scores=max_scores,
        )
    _measure_max_scores(max_scores, q, k, lengths, scores)
    return sdpa_attention(
        q, k, _contiguous_if_view(v, q, k), lengths, scale=scores.scale, causal=scores.causal
    )


def _measure_max_scores(
    max_scores: MaxScores | None,
    q: Tensor,
    k: Tensor,
    lengths: Lengths,
    scores: Scores,
    pair_mask: PairMask | None = None,
) -> None:
    """Record the largest scores by a pass over q and k, for backends that do not return them."""
    if max_scores is None:
        return
    # see `attention`
    run = torch.compiler.disable(_update_max_scores) if torch.compiler.is_compiling() else None
    (run or _update_max_scores)(max_scores, q, k, lengths, scores, pair_mask)


def _update_max_scores(
    max_scores: MaxScores,
    q: Tensor,
    k: Tensor,
    lengths: Lengths,
    scores: Scores,
    pair_mask: PairMask | None,
) -> None:
    spans = plan_length_spans(lengths, scores.window, causal=scores.causal, right=scores.right)
    max_scores.update(max_span_scores(q, k, spans, scores, pair_mask))


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_params: PackedSeqParams,
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
    *,
    attention_bias: Tensor | None = None,
    dropout_key: DropoutKey | None = None,
) -> Tensor:
    """Reference implementation of `attention`, document by document in plain PyTorch operations."""
    return _reference_by_document(
        q, k, v, seq_params.lengths, seq_params, scores, sinks, attention_bias, dropout_key
    )


def _reference_by_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    seq_params: PackedSeqParams,
    scores: Scores,
    sinks: Tensor | None,
    attention_bias: Tensor | None,
    dropout_key: DropoutKey | None,
) -> Tensor:
    query_counts, key_counts = zip(*lengths, strict=True)
    masks = _masks(seq_params, lengths, scores, q.device)
    token_numbers = None
    if scores.dropout is not None and dropout_key is not None:
        token_numbers = list(
            zip(
                dropout_key.numbers.split(query_counts),
                dropout_key.key_numbers.split(key_counts),
            )
        )
    outs = []
    for n, (queries, keys, values) in enumerate(
        zip(q.split(query_counts), k.split(key_counts), v.split(key_counts), strict=True)
    ):
        mask, factors = next(masks), None
        if scores.dropout is not None and token_numbers is not None:
            first = scores.dropout.first_head
            heads = range(first, first + q.shape[1])
            factors = weight_factors(scores.dropout, *token_numbers[n], heads, q.dtype)
        bias = _bias(attention_bias, *lengths[n], scores)
        outs.append(
            masked_attention(queries, keys, values, mask, scores, sinks, bias=bias, factors=factors)
        )
    return torch.cat(outs)


def _bias(table: Tensor | None, queries: int, keys: int, scores: Scores) -> Tensor | None:
    """Return the relative position bias of a document's scores, [n, queries, keys], or None."""
    if scores.relative is None:
        return None
    assert table is not None, "relative position biases need an attention_bias"
    return distance_biases(table, queries, keys, max_distance=scores.relative, causal=scores.causal)


def _masks(
    seq_params: PackedSeqParams, lengths: Lengths, scores: Scores, device: torch.device
) -> Iterator[Tensor | None]:
    """Yield the attention mask of each document, bool [queries or 1, keys], from `scores` and the
    tokens' own mask; None: every key is visible. `lengths` may omit leading keys."""
    document_masks: list[Tensor | None] = [None] * len(lengths)
    if seq_params.visible is not None:
        document_masks, scores = (
            seq_params.visible.of_documents(seq_params.lengths, lengths),
            seq_params.visible.scores(scores),
        )
    for (queries, keys), mask in zip(lengths, document_masks, strict=True):
        visible = build_scores_mask(queries, keys, scores, device=device)
        yield visible if mask is None else mask if visible is None else visible & mask


def build_dropped_weights(dropout_key: DropoutKey | None, scores: Scores) -> DroppedWeights | None:
    """Return the attention dropout of the tokens of `dropout_key`, or None."""
    if scores.dropout is None or dropout_key is None:
        return None
    return DroppedWeights(scores.dropout, dropout_key.numbers, dropout_key.key_numbers)


def _sdpa_or_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    seq_params: PackedSeqParams,
    scores: Scores,
    sinks: Tensor | None,
    attention_bias: Tensor | None,
    dropout_key: DropoutKey | None,
    kernel: BackendName,
) -> Tensor:
    """Attention with an attention mask or a pairwise bias: SDPA if it supports the other settings,
    else the reference."""
    sdpa_supported = sdpa_supports(replace(scores, window=None, relative=None), sinks)
    if kernel == "reference" or not sdpa_supported:
        return _reference_by_document(
            q, k, v, lengths, seq_params, scores, sinks, attention_bias, dropout_key
        )
    # a view would keep the whole QKV projection alive for backward; the others are copies anyway
    v = v.contiguous()
    rows = len(lengths) if len(set(lengths)) == 1 else 1  # equal lengths: one call and one bias
    masks: Iterator[Tensor | Mask | None] = _masks(seq_params, lengths, scores, q.device)
    if seq_params.visible is not None:
        masks = iter(_masks_for_torch(seq_params.visible, seq_params, lengths, scores, q))
    lengths = lengths[:1] if rows > 1 else lengths
    query_counts, key_counts = (
        [queries * rows for queries, _ in lengths],
        [keys * rows for _, keys in lengths],
    )
    outs = []
    for n, (queries, keys, values) in enumerate(
        zip(q.split(query_counts), k.split(key_counts), v.split(key_counts), strict=True)
    ):
        mask, bias = next(masks), _bias(attention_bias, *lengths[n], scores)
        outs.append(sdpa_masked(queries, keys, values, mask, bias, rows=rows, scale=scores.scale))
    return torch.cat(outs)


def _masks_for_torch(
    visible: AttentionMask, seq_params: PackedSeqParams, lengths: Lengths, scores: Scores, q: Tensor
) -> list[Mask | None]:
    """Return `_masks` in SDPA's format, cached for all layers with the same settings; stacked if
    all documents have one length."""
    hiding_scores = visible.scores(scores)
    cache_key = (
        q.dtype,
        lengths,
        hiding_scores.window,
        hiding_scores.right,
        hiding_scores.causal,
        hiding_scores.chunked,
    )
    if cache_key in visible.torch_masks:
        return visible.torch_masks[cache_key]
    masks = list(_masks(seq_params, lengths, scores, q.device))
    masks = [_stack_masks(masks)] if len(masks) > 1 and len(set(lengths)) == 1 else masks
    torch_masks = [None if mask is None else mask_for_torch(mask, q.dtype) for mask in masks]
    if not torch.compiler.is_compiling():
        visible.torch_masks[cache_key] = torch_masks
    return torch_masks


def _stack_masks(masks: list[Tensor | None]) -> Tensor | None:
    """Stack masks [queries or 1, keys] of documents of one length: [documents, queries or 1,
    keys]."""
    present_masks = [mask for mask in masks if mask is not None]
    if not present_masks:
        return None
    shape = torch.broadcast_shapes(*(mask.shape for mask in present_masks))
    all_visible = present_masks[0].new_ones(())
    return torch.stack([(all_visible if mask is None else mask).expand(shape) for mask in masks])


def _with_masks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_params: PackedSeqParams,
    scores: Scores,
    sinks: Tensor | None,
    attention_bias: Tensor | None,
    dropout_key: DropoutKey | None,
    max_scores: MaxScores | None,
    kernel: BackendName,
) -> Tensor:
    """Attention with an attention mask, by a backend that supports masks."""
    visible = seq_params.visible
    assert visible is not None
    hiding_scores = visible.scores(scores)
    kept = visible_key_lengths(seq_params.lengths, hiding_scores)
    k, v = _keep_last_keys(k, v, seq_params.lengths, kept)
    window = (
        hiding_scores.window
        if hiding_scores.chunked or hiding_scores.hides(max(keys for _, keys in kept))
        else None
    )
    scores, hiding_scores = replace(scores, window=window), replace(hiding_scores, window=window)
    is_auto = kernel == "auto"
    backend = (
        select_masked_backend(q, v, kept, scores, sinks, visible)
        if is_auto
        else ATTENTION_BACKENDS.get(kernel, "torch")
    )
    if backend == "torch" and max_scores is None:
        return _sdpa_or_reference(
            q, k, v, kept, seq_params, scores, sinks, attention_bias, dropout_key, kernel
        )
    lengths = kept
    if hiding_scores.window is not None and hiding_scores.chunked:
        lengths, hiding_scores = (
            split_lengths_into_chunks(kept, hiding_scores.window),
            replace(hiding_scores, window=None, chunked=False),
        )
    pair_mask = PairMask(
        visible,
        torch.arange(len(q), device=q.device),
        _remaining_key_indices(seq_params.lengths, kept, q.device),
    )
    if backend == "torch":
        _measure_max_scores(max_scores, q, k, lengths, hiding_scores, pair_mask)
        return _sdpa_or_reference(
            q, k, v, kept, seq_params, scores, sinks, attention_bias, dropout_key, kernel
        )
    if backend == "flex":
        from megalith.kernels.attention.flex import flexible_attention

        v = _contiguous_if_view(v, q, k)
        return flexible_attention(
            q, k, v, lengths, hiding_scores, sinks, pair_mask, max_scores=max_scores
        )
    # see `attention`
    run = torch.compiler.disable(_spans) if torch.compiler.is_compiling() else _spans
    return run(
        q,
        k,
        v,
        lengths,
        hiding_scores,
        sinks,
        build_dropped_weights(dropout_key, scores),
        pair_mask,
        max_scores,
    )


def select_masked_backend(
    q: Tensor,
    v: Tensor,
    lengths: Lengths,
    scores: Scores,
    sinks: Tensor | None,
    visible: AttentionMask,
) -> AttentionBackend:
    """Return the fastest backend that supports `scores` and the attention mask.

    SDPA needs a mask over all pairs, so it is not used for windows, nor on CPUs for long causal
    documents with a padding mask only: split_kv takes the same time there (2048 tokens, 8 heads:
    1.01 of SDPA's time in fp32, 0.96 in bf16) without such a mask. Relative position biases always
    use SDPA or the reference.
    """
    cpu = q.device.type == "cpu"
    long = any(keys >= TILED_LENGTHS.stop and queries > 1 for queries, keys in lengths)
    intervals = cpu and long and scores.causal and visible.pairs is None
    if scores.relative is not None or (sdpa_supports(scores, sinks) and not intervals):
        return "torch"
    if cpu:
        return "split_kv"
    from megalith.kernels.attention import flex

    return "flex" if flex.can_use(q, v, scores) else "split_kv"


def visible_key_lengths(lengths: Lengths, scores: Scores) -> Lengths:
    """Return (queries, keys) of each document without the cached keys that lie before every query's
    window or chunk."""
    if scores.window is None:
        return lengths
    return (
        _chunked_lengths(lengths, scores.window)
        if scores.chunked
        else _window_lengths(lengths, scores.window)
    )


def _remaining_key_indices(lengths: Lengths, kept: Lengths, device: torch.device) -> Tensor:
    """Return the indices of the remaining keys among all keys, int64 [t_kv], if each document keeps
    its last keys."""
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
    pair_mask: PairMask | None = None,
    max_scores: MaxScores | None = None,
) -> Tensor:
    spans = plan_length_spans(lengths, scores.window, causal=scores.causal, right=scores.right)
    return span_attention(
        q, k, v, spans, scores, sinks, dropped, pair_mask=pair_mask, max_scores=max_scores
    )


ATTENTION_BACKENDS: Mapping[BackendName, AttentionBackend] = {
    "torch": "torch",
    "sdpa": "torch",
    "cpu_tiled": "cpu_tiled",
    "split_kv": "split_kv",
    "varlen": "varlen",
    "flex": "flex",
}
"""Attention backend of each backend name that a user can set."""


def check_explicit_backend(
    kernel: BackendName,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_params: PackedSeqParams,
    scores: Scores,
    sinks: Tensor | None,
) -> None:
    """Reject an explicitly requested backend that does not support the inputs.

    Raises:
        ConfigError: the backend does not support them; the message names one that does.
    """
    plain = sdpa_supports(scores, sinks)
    if scores.relative is not None:
        is_supported = kernel == "sdpa" and sdpa_supports(
            replace(scores, window=None, relative=None), sinks
        )
    elif seq_params.visible is not None and kernel in ("sdpa", "cpu_tiled", "varlen"):
        is_supported = kernel == "sdpa" and sdpa_supports(replace(scores, window=None), sinks)
    elif kernel in ("sdpa", "cpu_tiled"):
        has_all_queries = all(queries == keys for queries, keys in seq_params.lengths)
        is_supported = plain and (kernel == "sdpa" or (has_all_queries and q.device.type == "cpu"))
    elif kernel in ("split_kv", "paged", "triton"):
        is_supported = kernel == "split_kv"  # the others: attention/paged.py
    else:
        from megalith.kernels.attention import flex, sdpa

        varlen_supported = sdpa.can_use(q, v, scores, sinks)
        is_supported = varlen_supported if kernel == "varlen" else flex.can_use(q, v, scores)
    if not is_supported:
        raise_unsupported("attention", kernel, q)


def select_attention_backend(
    q: Tensor, v: Tensor, lengths: Lengths, scores: Scores, sinks: Tensor | None
) -> AttentionBackend:
    """Return the fastest backend that supports `scores`; a window that spans whole documents counts
    as none.

    - split_kv: windows, soft caps, sinks and attention dropout; SDPA supports windows only with a
      mask over all pairs, and none of the others. On CPUs also long documents whose values and keys
      have different widths, since PyTorch has no fused kernel for them and materializes all scores.
    - cpu_tiled: on CPUs, documents without cached keys that are neither very short nor very long.
    - varlen: on GPUs, documents of several lengths, and windows, in 16 bits.
    - flex: on GPUs, soft caps and sinks, and windows that varlen does not support.
    - torch: everything else.

    On GPUs the choice is heuristic, not measured.
    """
    if q.device.type != "cpu":
        return _select_gpu_backend(q, v, lengths, scores, sinks)
    if not sdpa_supports(scores, sinks):
        return "split_kv"
    if torch.compiler.is_compiling():
        return "torch"
    whole = all(queries == keys for queries, keys in lengths)
    if whole and _cpu_tiled_is_faster(q.dtype, distinct_row_lengths(lengths)):
        return "cpu_tiled"
    unfused = v.shape[2] != q.shape[2] and any(
        keys >= TILED_LENGTHS.stop and queries > 1 for queries, keys in lengths
    )
    return "split_kv" if unfused else "torch"


def _select_gpu_backend(
    q: Tensor, v: Tensor, lengths: Lengths, scores: Scores, sinks: Tensor | None
) -> AttentionBackend:
    from megalith.kernels.attention import flex, sdpa

    sdpa_supported, equal_lengths = sdpa_supports(scores, sinks), len(set(lengths)) == 1
    if not (sdpa_supported and equal_lengths) and sdpa.can_use(q, v, scores, sinks):
        return "varlen"
    if not sdpa_supported:
        return "flex" if flex.can_use(q, v, scores) else "split_kv"
    return "torch"


def _on_gpu(
    backend: AttentionBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    scores: Scores,
    sinks: Tensor | None,
    max_scores: MaxScores | None,
) -> Tensor:
    from megalith.kernels.attention.flex import flexible_attention
    from megalith.kernels.attention.sdpa import varlen_attention

    if backend == "varlen":
        _measure_max_scores(max_scores, q, k, lengths, scores)
        return varlen_attention(q, k, v, lengths, scores)
    return flexible_attention(q, k, v, lengths, scores, sinks, max_scores=max_scores)


def sdpa_supports(scores: Scores, sinks: Tensor | None) -> bool:
    """Return whether SDPA computes these scores without a mask over all pairs."""
    has_unsupported = (
        scores.off_by_one
        or scores.dropout is not None
        or scores.relative is not None
        or sinks is not None
    )
    return scores.window is None and scores.softcap is None and not has_unsupported


def _cpu_tiled_is_faster(dtype: torch.dtype, lengths: tuple[int, ...]) -> bool:
    """Return whether cpu_tiled is faster than SDPA: for documents of moderate length."""
    typical = sum(lengths) // max(1, sum(length > 0 for length in lengths))
    # Short documents: torch's bf16 backward is 4 to 9 times slower, and one tile holds several
    # packed documents, one call only one.
    shortest = 16 if dtype == torch.bfloat16 or len(lengths) > 1 else TILED_LENGTHS.start
    return shortest <= typical and max(lengths) < TILED_LENGTHS.stop


def distinct_row_lengths(lengths: Lengths) -> tuple[int, ...]:
    """Return the lengths of the documents of one row: one length if all are equal, else all."""
    return tuple(keys for _, keys in (lengths[:1] if len(set(lengths)) == 1 else lengths))


def drop_keys_before_window(
    k: Tensor, v: Tensor, lengths: Lengths, window: int
) -> tuple[Tensor, Tensor, Lengths]:
    """Drop the cached keys that lie before every query's window: return k, v and the remaining
    lengths.

    A token decoded with a KV cache then costs no more than its window. The cache may have dropped
    those keys already.
    """
    kept = _window_lengths(lengths, window)
    return *_keep_last_keys(k, v, lengths, kept), kept


def _window_lengths(lengths: Lengths, window: int) -> Lengths:
    return tuple(
        (queries, min(keys, queries + window - 1) if queries else 0) for queries, keys in lengths
    )


def split_into_chunks(
    k: Tensor, v: Tensor, lengths: Lengths, size: int
) -> tuple[Tensor, Tensor, Lengths]:
    """Split documents into chunks of `size` tokens, each a document: return k and v without chunks
    that have no query, and the lengths.

    Any backend then computes chunked attention, at the cost of the chunks alone. The KV cache may
    have dropped whole chunks already.
    """
    kept = _chunked_lengths(lengths, size)
    return *_keep_last_keys(k, v, lengths, kept), split_lengths_into_chunks(kept, size)


def _chunked_lengths(lengths: Lengths, size: int) -> Lengths:
    return tuple(
        (queries, queries + (keys - queries) % size if queries else 0) for queries, keys in lengths
    )


def split_lengths_into_chunks(lengths: Lengths, size: int) -> Lengths:
    """Return (queries, keys) of each chunk of `size` tokens; a document's queries start in its
    first chunk.

    >>> split_lengths_into_chunks(((3, 4), (5, 5)), 2)
    ((1, 2), (2, 2), (2, 2), (2, 2), (1, 1))
    """
    chunk_lengths: list[tuple[int, int]] = []
    for queries, keys in lengths:
        chunk_keys = [min(size, keys - start) for start in range(0, keys, size)] or [0]
        chunk_lengths += zip(
            [chunk_keys[0] - (keys - queries), *chunk_keys[1:]], chunk_keys, strict=True
        )
    return tuple(chunk_lengths)


def _keep_last_keys(k: Tensor, v: Tensor, lengths: Lengths, kept: Lengths) -> tuple[Tensor, Tensor]:
    """Return the last keys and values of each document, as many as `kept` says; k and v themselves
    if nothing is dropped."""
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


def _contiguous_if_view(v: Tensor, *others: Tensor) -> Tensor:
    """Return v, copied if it is a view of a larger tensor that backward would keep alive.

    Values are a view of the QKV projection, while rotated queries and keys are new tensors. In a
    layer of Llama-3 8B the copy saves 10 KiB of the 146 KiB per token that are saved for backward
    in bf16.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and v.requires_grad):
        return v
    storage = v.untyped_storage()
    shared = any(storage._cdata == other.untyped_storage()._cdata for other in others)
    return v if shared or storage.nbytes() == v.numel() * v.element_size() else v.contiguous()
