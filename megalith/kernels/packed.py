"""`PackedSeqParams`: documents, position ids and masks of packed tokens (as in Megatron Core)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.kernels.attention.mask import AttentionMask
from megalith.kernels.replay import MicrobatchRouting, RoutingDecisions
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

    rotary: tuple[Tensor, ...] = ()
    """Cosine and sine [t, pairs] of RoPE, set once per forward by the model; a second pair if some
    layers have other angles."""

    biases: Tensor | None = None
    """[buckets, n]: relative position bias of the local heads by bucket of distance, a parameter of
    the model that is set once per forward; None: no relative positions."""

    memory: Tensor | None = None
    """Normalized hidden states [t, h] of these tokens after an earlier layer, in the layout of
    `tp_comm`, set by the model for layers with cross-layer attention."""

    dropout: "DropoutKey | None" = None
    """Key of the dropout masks; None: no dropout, as in evaluation."""

    balance: "AuxLossScale | None" = None
    """Scale of the aux losses of this microbatch; None outside training."""

    decided: RoutingDecisions | None = None
    """Routing decisions of the first pass, set where a part of the model is recomputed."""

    route: MicrobatchRouting | None = None
    """Routing record or replay of this microbatch; None: neither."""

    visible: AttentionMask | None = None
    """Attention mask and padding mask, see `kernels/attention/mask.py`; None: no mask besides those
    of the
    layers. Under context parallelism only `whole` has it."""

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


class AuxLossScale(NamedTuple):
    """Index of a microbatch in its step, and its weight in the step's loss."""

    microbatch: int
    """Index of the microbatch on this rank."""

    microbatches: int
    """Number of microbatches of this rank in the step."""

    weight: float
    """Weight of a mean over the microbatch: `part` / (microbatches of all ranks), times the fp16
    loss scale."""

    part: float = 1.0
    """The microbatch's share of the step's tokens, relative to an even share."""


class DropoutKey(NamedTuple):
    """Key of dropout masks: the run's seed and the number of each token."""

    seed: int
    """Seed of the run."""

    numbers: Tensor
    """int64 [t]: number of each token in the run: (row, counted from the run's first) * seq_len +
    position in the row; -1 for padding. A number occurs once in a run, so it also identifies the
    step."""

    keys: Tensor | None = None
    """The numbers of the keys, if these are other tokens than the queries."""

    @property
    def numbers_of_keys(self) -> Tensor:
        """Numbers of the keys: int64 [t_kv]."""
        return self.numbers if self.keys is None else self.keys


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

    everyone: TokenPermutation
    """The order of the tokens of all ranks."""

    neighbors: TokenPermutation
    """The order of the tokens of the ranks that exchange heads (Ulysses) inside a ring of such
    groups; of this rank only, without such groups."""

    seen: dict[tuple[int, int | None, int | None, bool, bool], tuple[KeySpans, ...]] = field(
        default_factory=dict, repr=False
    )
    """Cache of planned spans, which all layers share."""

    numbered: dict[int, tuple[Tensor, ...]] = field(default_factory=dict, repr=False)
    """Cache of `numbers_of_groups`."""

    def numbers_of_groups(self, near: int) -> tuple[Tensor, ...]:
        """Return the tokens, by natural order, of each group of `near` neighbors: int64 [near *
        t]."""
        if near not in self.numbered:
            parts, device = self.slices.joined(near), self.everyone.order.device
            on_host = tuple(torch.from_numpy(part) for part in parts)
            # Relative biases on meta tensors look nothing up, and the type check must not see these
            # tensors change devices.
            self.numbered[near] = (
                on_host if device.type == "meta" else tuple(part.to(device) for part in on_host)
            )
        return self.numbered[near]

    def spans_of_groups(
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
        if cache_key not in self.seen:
            parts = self.slices.joined(near)
            local_tokens = parts[self.rank // near]
            self.seen[cache_key] = tuple(
                self._spans(local_tokens, keys, window, right, causal, chunked) for keys in parts
            )
        return self.seen[cache_key]

    def spans_of_all(
        self,
        *,
        window: int | None = None,
        right: int | None = None,
        causal: bool = True,
        chunked: bool = False,
    ) -> KeySpans:
        """Return the keys, among all tokens in natural order, that the local tokens see."""
        cache_key = 0, window, right, causal, chunked
        if cache_key not in self.seen:
            all_tokens = np.arange(self.slices.num_tokens, dtype=np.int64)
            local_tokens = self.slices.numbers[self.rank]
            self.seen[cache_key] = (
                self._spans(local_tokens, all_tokens, window, right, causal, chunked),
            )
        return self.seen[cache_key][0]

    def spans_of_whole(
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
        if cache_key not in self.seen:
            all_tokens = np.arange(self.slices.num_tokens, dtype=np.int64)
            self.seen[cache_key] = (
                self._spans(all_tokens, all_tokens, window, right, causal, chunked),
            )
        return self.seen[cache_key][0]

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


def tokens_of_rows(
    rows: int, length: int, *, device: torch.device | str = "cpu"
) -> PackedSeqParams:
    """Return `rows` rows of `length` tokens, each row one document."""
    return tokens_of_lengths([length] * rows, device=device)


def tokens_of_lengths(lengths: list[int], *, device: torch.device | str = "cpu") -> PackedSeqParams:
    """Return documents of these lengths, one after the other, each from its first token."""
    return tokens_of_queries([(length, length) for length in lengths], device=device)


def tokens_of_queries(
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


def tokens_of_slices(
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
    whole = tokens_of_lengths(lengths, device=device)
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
