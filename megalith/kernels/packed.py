"""`PackedSeqParams`: documents, position ids and masks of packed tokens (as in Megatron Core)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.errors import DataError
from megalith.kernels.attention.scores import NO_MASK, AttentionMask
from megalith.plan.context import KeySpans, Numbers, Slices, Slicing, plan_spans


@dataclass(frozen=True, slots=True)
class PackedSeqParams:
    """Metadata of activations [t, h]: t packed tokens, row after row, divided into documents.

    Attention stays inside a document. The Python values are known on the host, so that no device
    synchronization is needed.
    """

    cu_seqlens_q: Tensor
    """int32 [documents + 1]: start of each document's queries; from 0 to t."""

    cu_seqlens_kv: Tensor
    """int32 [documents + 1]: start of each document's keys, of which there are more than queries if
    a KV cache holds earlier ones."""

    max_seqlen_q: int
    """Longest document, in queries."""

    max_seqlen_kv: int
    """Longest document, in keys."""

    uniform: int | None
    """Length of every document if all are equal and queries and keys are the same tokens; else
    None."""

    position_ids: Tensor
    """int64 [t]: position ids, the place of each token in its document; or [3, t]: its time, height
    and width for multimodal RoPE (see `with_multimodal_positions`)."""

    document_ids: Tensor
    """int32 [t]: document of each token."""

    valid: Tensor
    """bool [t]: False for padding."""

    lengths: tuple[tuple[int, int], ...]
    """(queries, keys) of each document, on the host."""

    reach: tuple[int, ...] | None = None
    """Full length of each document, on the host, as far as known when it is processed in parts;
    None: the number of its keys."""

    visible: AttentionMask | None = None
    """Attention mask and padding mask, see `kernels/attention/scores.py`; None: no mask besides
    those of the layers. Under context parallelism only `whole` has it."""

    context: "ContextShard | None" = None
    """The local tokens of the microbatch under context parallelism. `cu_seqlens_q` and `lengths`
    then count local queries, and the keys of all ranks."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens t."""
        return int(self.position_ids.shape[-1])

    @property
    def whole(self) -> "PackedSeqParams":
        """All tokens of the microbatch under context parallelism; else self."""
        return self if self.context is None else self.context.whole


@dataclass(frozen=True, slots=True)
class TokenPermutation:
    """Permutation between the natural order of tokens and the concatenated parts of several
    ranks."""

    order: Tensor
    """int64 [n]: place in the concatenated parts of each token in natural order."""

    back: Tensor
    """int64 [n]: place in natural order of each token of the concatenated parts (the inverse)."""


@dataclass(frozen=True, slots=True)
class ContextShard:
    """The tokens of a microbatch that one context-parallel rank holds, and the keys they see on all
    ranks."""

    slices: Slices
    rank: int

    whole: PackedSeqParams
    """All tokens, including padding."""

    all_ranks: TokenPermutation
    """The order of the tokens of all ranks."""

    neighbors: TokenPermutation
    """The order of the tokens of the ranks that exchange heads (Ulysses) inside a ring of such
    groups; of this rank only, without such groups."""

    _key_spans: dict[tuple[int, int | None, int | None, bool, bool], tuple[KeySpans, ...]] = field(
        default_factory=dict, repr=False
    )
    """Cache of planned spans, which all layers share."""

    _token_numbers: dict[int, tuple[Tensor, ...]] = field(default_factory=dict, repr=False)
    """Cache of `token_numbers_by_group`."""

    def token_numbers_by_group(self, near: int) -> tuple[Tensor, ...]:
        """Return the tokens, by natural order, of each group of `near` neighbors: int64 [near *
        t]."""
        if near not in self._token_numbers:
            parts, device = self.slices.joined(near), self.all_ranks.order.device
            on_host = tuple(torch.from_numpy(part) for part in parts)
            # Relative biases on meta tensors look nothing up, and the type check must not see these
            # tensors change devices.
            self._token_numbers[near] = (
                on_host if device.type == "meta" else tuple(part.to(device) for part in on_host)
            )
        return self._token_numbers[near]

    def key_spans_by_group(
        self,
        near: int,
        *,
        window: int | None = None,
        right: int | None = None,
        causal: bool = True,
        chunked: bool = False,
    ) -> tuple[KeySpans, ...]:
        """Return the keys of each group of `near` neighbors that the tokens of the local group
        see."""
        cache_key = near, window, right, causal, chunked
        if cache_key not in self._key_spans:
            parts = self.slices.joined(near)
            local_tokens = parts[self.rank // near]
            self._key_spans[cache_key] = tuple(
                self._spans(local_tokens, keys, window, right, causal, chunked) for keys in parts
            )
        return self._key_spans[cache_key]

    def key_spans_to_all(
        self,
        *,
        window: int | None = None,
        right: int | None = None,
        causal: bool = True,
        chunked: bool = False,
    ) -> KeySpans:
        """Return the keys, among all tokens in natural order, that the local tokens see."""
        cache_key = 0, window, right, causal, chunked
        if cache_key not in self._key_spans:
            all_tokens = np.arange(self.slices.num_tokens, dtype=np.int64)
            local_tokens = self.slices.numbers[self.rank]
            self._key_spans[cache_key] = (
                self._spans(local_tokens, all_tokens, window, right, causal, chunked),
            )
        return self._key_spans[cache_key][0]

    def key_spans_among_all(
        self,
        *,
        window: int | None = None,
        right: int | None = None,
        causal: bool = True,
        chunked: bool = False,
    ) -> KeySpans:
        """Return the keys that all tokens see, in natural order; unlike `whole`, without trailing
        padding."""
        cache_key = -1, window, right, causal, chunked
        if cache_key not in self._key_spans:
            all_tokens = np.arange(self.slices.num_tokens, dtype=np.int64)
            self._key_spans[cache_key] = (
                self._spans(all_tokens, all_tokens, window, right, causal, chunked),
            )
        return self._key_spans[cache_key][0]

    def _spans(
        self,
        queries: Numbers,
        keys: Numbers,
        window: int | None,
        right: int | None,
        causal: bool,
        chunked: bool,
    ) -> KeySpans:
        slices, starts = self.slices, self.slices.starts()
        ends, repeats = None if causal else slices.ends(), slices.repeats
        if ends is not None and len(set((ends - starts).tolist())) > 1:
            repeats = 1  # documents have equal lengths only with their padding
        return plan_spans(
            queries,
            keys,
            starts,
            ends=ends,
            repeats=repeats,
            window=window,
            right=right,
            chunked=chunked,
        )


def seq_params_from_rows(
    rows: int, length: int, *, device: torch.device | str = "cpu"
) -> PackedSeqParams:
    """Return `rows` rows of `length` tokens, each row one document."""
    return seq_params_from_lengths([length] * rows, device=device)


def seq_params_from_lengths(
    lengths: list[int], *, device: torch.device | str = "cpu"
) -> PackedSeqParams:
    """Return documents of these lengths, one after the other, each from its first token."""
    return seq_params_from_queries([(length, length) for length in lengths], device=device)


def seq_params_from_queries(
    lengths: list[tuple[int, int]],
    *,
    reach: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> PackedSeqParams:
    """Return documents of which only the last `queries` of `keys` tokens are processed: (queries,
    keys) for each; `reach`: the full length of each."""
    queries = np.array([q for q, _ in lengths], dtype=np.int32)
    keys = np.array([k for _, k in lengths], dtype=np.int32)
    cu_seqlens_q = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    cu_seqlens_kv = np.concatenate([[0], np.cumsum(keys)]).astype(np.int32)
    document = np.repeat(np.arange(len(lengths), dtype=np.int32), queries)
    first = (keys - queries)[document]
    positions = np.arange(int(cu_seqlens_q[-1]), dtype=np.int64) - cu_seqlens_q[document] + first
    same = len(set(lengths)) == 1 and lengths[0][0] == lengths[0][1]
    return PackedSeqParams(
        cu_seqlens_q=torch.from_numpy(cu_seqlens_q).to(device),
        cu_seqlens_kv=torch.from_numpy(cu_seqlens_kv).to(device),
        max_seqlen_q=int(queries.max()),
        max_seqlen_kv=int(keys.max()),
        uniform=lengths[0][0] if same else None,
        position_ids=torch.from_numpy(positions).to(device),
        document_ids=torch.from_numpy(document).to(device),
        valid=torch.ones(len(document), dtype=torch.bool, device=device),
        lengths=tuple(lengths),
        reach=None if reach is None else tuple(reach),
    )


def seq_params_from_slices(
    slices: Slices, slicing: Slicing, *, device: torch.device | str = "cpu"
) -> PackedSeqParams:
    """Return one context-parallel rank's tokens of documents; document ids and position ids count
    over all ranks."""
    local_tokens, document, starts = (
        slices.numbers[slicing.rank],
        slices.document(),
        slices.starts(),
    )
    lengths = [int(length) for length in slices.lengths]
    queries = np.bincount(document[local_tokens], minlength=len(lengths))
    cu_seqlens_q = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    whole = seq_params_from_lengths(lengths, device=device)
    first = slicing.rank // slicing.near * slicing.near
    context = ContextShard(
        slices,
        slicing.rank,
        whole,
        _join(slices.numbers, device),
        _join(slices.numbers[first : first + slicing.near], device),
    )
    return PackedSeqParams(
        cu_seqlens_q=torch.from_numpy(cu_seqlens_q).to(device),
        cu_seqlens_kv=whole.cu_seqlens_kv,
        max_seqlen_q=int(queries.max()),
        max_seqlen_kv=whole.max_seqlen_kv,
        uniform=None,
        position_ids=torch.from_numpy(local_tokens - starts[local_tokens]).to(device),
        document_ids=torch.from_numpy(document[local_tokens]).to(device),
        valid=torch.from_numpy(slices.as_read(slicing.rank) >= 0).to(device),
        lengths=tuple(zip(queries.tolist(), lengths)),
        context=context,
    )


def with_multimodal_positions(
    tokens: PackedSeqParams, places: NDArray[np.int64]
) -> PackedSeqParams:
    """Return the tokens with position ids `places` [3, t] in time, height and width, given for all
    tokens that were read; padding gets 0.

    Source: Wang et al. 2024, arXiv:2409.12191, section 2.1.
    """
    context, device = tokens.context, tokens.position_ids.device
    if context is None:
        return replace(tokens, position_ids=torch.from_numpy(places).to(device))
    slices = context.slices
    local_sources, all_sources = slices.as_read(context.rank), slices.source
    local_places = np.where(local_sources >= 0, places[:, local_sources], 0)
    all_places = (
        places if all_sources is None else np.where(all_sources >= 0, places[:, all_sources], 0)
    )
    whole = replace(context.whole, position_ids=torch.from_numpy(all_places).to(device))
    return replace(
        tokens,
        position_ids=torch.from_numpy(local_places).to(device),
        context=replace(context, whole=whole),
    )


def _join(parts: Numbers, device: torch.device | str) -> TokenPermutation:
    order = np.argsort(parts.reshape(-1))
    return TokenPermutation(
        torch.from_numpy(order).to(device), torch.from_numpy(np.argsort(order)).to(device)
    )


# --- attention masks that a user passes with the tokens: per-document masks and padding

Lengths = Sequence[tuple[int, int]]
"""(queries, keys) of each document."""


def with_masks(
    tokens: PackedSeqParams, masks: Sequence[Tensor | None], *, alone: bool = False
) -> PackedSeqParams:
    """Return the tokens with an attention mask for each document: bool [queries, keys], True where
    a query may see a key; None: all.

    The masks apply in addition to causality and windows. With `alone` they replace causality (not
    windows), so that a causal layer sees later tokens where the mask allows it; then each document
    needs a mask. A query that may see nothing gives 0. Masks refer to documents as they were read
    and are the same on every rank: under context parallelism each rank uses its own part.

    Raises:
        DataError: the masks do not match the documents in number, shape, dtype or device.
    """
    document_lengths, device = _as_read(tokens), tokens.position_ids.device
    if len(masks) != len(document_lengths):
        raise DataError(
            f"masks: got {len(masks)} masks for {len(document_lengths)} documents. Pass one mask "
            "for each document, or None for a document without a mask."
        )
    for number, mask in enumerate(masks):
        if mask is not None:
            _check(mask, f"masks[{number}]", document_lengths[number], f"document {number}", device)
        elif alone:
            queries, keys = document_lengths[number]
            raise DataError(
                f"masks[{number}]=None with alone=True: the masks replace causality, so each "
                f"document needs one. For a causal mask pass torch.ones({queries}, {keys}, "
                f"dtype=torch.bool).tril({keys - queries})."
            )
    lengths = tokens.whole.lengths
    masks = [
        None if mask is None else _extended(mask, *whole)
        for mask, whole in zip(masks, lengths, strict=True)
    ]
    flat_masks = [mask.reshape(-1) for mask in masks if mask is not None]
    # the cache belongs to the old masks
    existing = replace(tokens.whole.visible or AttentionMask(), torch_masks={})
    if sum(map(len, flat_masks)) == 0:
        return _given(tokens, replace(existing, pairs=None, rows=None, starts=(), alone=False))
    starts, end = list[int | None](), 0
    for mask in masks:
        starts.append(None if mask is None else end)
        end += 0 if mask is None else mask.numel()
    rows = torch.from_numpy(mask_row_starts(lengths, starts)).to(device)
    return _given(
        tokens,
        replace(
            existing, pairs=torch.cat(flat_masks), rows=rows, starts=tuple(starts), alone=alone
        ),
    )


def with_padding(tokens: PackedSeqParams, text: Tensor) -> PackedSeqParams:
    """Return the tokens with a padding mask: `text`, bool [t_kv], is False for padding, which no
    query sees.

    For documents without cached keys, padding is also not `valid`: it does not count for expert
    load balancing, and experts over capacity drop it first. `text` covers all keys as they were
    read, document after document, on every rank.

    Raises:
        DataError: `text` does not match the keys in length, dtype or device.
    """
    document_lengths, device = _as_read(tokens), tokens.position_ids.device
    _check(
        text,
        "text",
        (sum(keys for _, keys in document_lengths),),
        f"padding of {len(document_lengths)} documents",
        device,
    )
    whole, context = tokens.whole, tokens.context
    if context is not None and context.slices.source is not None:
        source = torch.from_numpy(context.slices.source).to(device)
        text = (source >= 0) & text[source.clamp(min=0)]
    existing = replace(whole.visible or AttentionMask(), torch_masks={})
    tokens = _given(
        tokens, replace(existing, keys=text if existing.keys is None else existing.keys & text)
    )
    if any(queries != keys for queries, keys in whole.lengths):
        return tokens
    local_text = text
    if context is not None:
        local_text = text[torch.from_numpy(context.slices.numbers[context.rank]).to(device)]
    return replace(tokens, valid=tokens.valid & local_text)


def for_one_pass(tokens: PackedSeqParams) -> PackedSeqParams:
    """Return the same tokens with an empty mask cache, so that masks over all pairs that are built
    in one forward and backward pass are freed after it; microbatches live for the whole step."""
    visible = tokens.whole.visible
    return tokens if visible is None else _given(tokens, replace(visible, torch_masks={}))


def mask_row_starts(lengths: Lengths, starts: Sequence[int | None]) -> NDArray[np.int64]:
    """Return where each query's mask row would begin if it covered all keys, [t]; masks begin at
    `starts`.

    >>> mask_row_starts([(2, 2), (1, 3), (1, 4)], [0, None, 4])[[0, 1, 3]].tolist()
    [0, 2, -1]
    """
    queries, keys = np.array(lengths, dtype=np.int64).reshape(-1, 2).T
    document = np.repeat(np.arange(len(queries)), queries)
    place = np.arange(len(document)) - (np.cumsum(queries) - queries)[document]
    first = (np.cumsum(keys) - keys)[document]
    start = np.array([NO_MASK if start is None else start for start in starts], dtype=np.int64)[
        document
    ]
    return np.where(start == NO_MASK, NO_MASK, start + place * keys[document] - first)


def _as_read(tokens: PackedSeqParams) -> Lengths:
    """Return (queries, keys) of the microbatch's documents over all ranks, without context-parallel
    padding."""
    context = tokens.context
    if context is None or context.slices.source is None:
        return tokens.whole.lengths
    document = context.slices.document()[context.slices.source >= 0]
    counts = np.bincount(document, minlength=len(context.slices.lengths)).tolist()
    return [(count, count) for count in counts]


def _check(given: Tensor, name: str, shape: tuple[int, ...], of: str, device: torch.device) -> None:
    """Raise DataError unless the tensor is bool, of that shape and on that device."""
    if given.dtype != torch.bool:
        raise DataError(
            f"{name} is {given.dtype}: expected torch.bool, True where a query may see a key. Pass "
            f"{name}.bool(), or {name} == 0 if it is an additive mask."
        )
    if tuple(given.shape) != shape:
        what = f" ({shape[0]} queries, {shape[1]} keys)" if len(shape) == 2 else ""
        raise DataError(
            f"{name} has the shape {list(given.shape)}: {of} requires {list(shape)}{what}. Pass a "
            "tensor of that shape."
        )
    if given.device != device:
        raise DataError(
            f"{name} is on {given.device}, but the tokens are on {device}. Pass "
            f"{name}.to('{device}')."
        )


def _extended(mask: Tensor, queries: int, keys: int) -> Tensor:
    """Return a document's mask extended by padding, which sees nothing and is seen by no query."""
    if mask.shape == (queries, keys):
        return mask
    whole = mask.new_zeros(queries, keys)
    whole[: mask.shape[0], : mask.shape[1]] = mask
    return whole


def _given(tokens: PackedSeqParams, visible: AttentionMask) -> PackedSeqParams:
    """Return the tokens with these masks, or without any if they are empty; under context
    parallelism the masks are stored with all tokens."""
    masks = None if visible.pairs is None and visible.keys is None else visible
    if tokens.context is None:
        return replace(tokens, visible=masks)
    whole = replace(tokens.context.whole, visible=masks)
    return replace(tokens, context=replace(tokens.context, whole=whole))
