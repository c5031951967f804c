"""`PackedSeqParams`: which document each token belongs to and where; the only thing that knows
about documents."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.kernels.replay import Decided, Route
from megalith.kernels.visible import Visible
from megalith.plan.context import KeySpans, Numbers, Slices, Slicing, plan_spans


@dataclass(frozen=True, slots=True)
class PackedSeqParams:
    """What travels beside activations [t, h]: t tokens, row after row, cut into documents.

    Attention stays inside a document. The Python values are known on the host, so that nothing
    waits for a device.
    """

    cu_seqlens_q: Tensor
    """int32 [documents + 1]: where each document's queries start; begins with 0, ends with t."""

    cu_seqlens_kv: Tensor
    """int32 [documents + 1]: the same for keys, which are more than the queries when a cache holds
    earlier ones."""

    max_seqlen_q: int
    """Longest document, in queries."""

    max_seqlen_kv: int
    """Longest document, in keys."""

    uniform: int | None
    """Length of every document when all have the same and queries and keys are the same tokens;
    else None."""

    position_ids: Tensor
    """int64 [t]: place of each token within its document; or [3, t]: its places in time, height
    and width, as tokens of pictures have them (see `with_places`)."""

    document_ids: Tensor
    """int32 [t]: number of the document a token belongs to."""

    valid: Tensor
    """bool [t]: False for padding."""

    lengths: tuple[tuple[int, int], ...]
    """(queries, keys) of each document, on the host."""

    reach: tuple[int, ...] | None = None
    """How long each document is known to be, on the host, where it is read in parts; None: as long
    as its keys."""

    rotary: tuple[Tensor, ...] = ()
    """Cosine and sine [t, pairs] of each token's rotation, filled in once per forward by the
    model; a second pair where some layers turn by other angles."""

    biases: Tensor | None = None
    """[buckets, n]: what scores gain by the bucket of a distance, for each head that is here; a
    parameter of the model, filled in once per forward, where it has relative positions."""

    memory: Tensor | None = None
    """Hidden states [t, h] of these tokens after an earlier layer, in the layout of `tp_comm`,
    normed: for layers that look at them, filled in by the model where it takes them."""

    dropout: "DropoutKey | None" = None
    """What dropout's masks are made from; None where nothing is dropped, as in evaluation."""

    balance: "BalanceShare | None" = None
    """What losses that keep experts busy count; None where nothing is trained."""

    decided: Decided | None = None
    """What routers decided when these tokens came here first; filled in where a part of the model
    runs twice."""

    route: Route | None = None
    """What routers write down of this microbatch, or follow; None: neither."""

    visible: Visible | None = None
    """What of its document each query may see at most, as `kernels/masks.py` gives it; None: no
    more is hidden than layers hide. Where ranks share tokens, `whole` alone has it."""

    context: "Context | None" = None
    """Which tokens of the microbatch these are, when ranks share it. `cu_seqlens_q` and
    `lengths` then count queries that are here, and keys wherever they are."""

    @property
    def num_tokens(self) -> int:
        """t."""
        return int(self.position_ids.shape[-1])

    @property
    def whole(self) -> "PackedSeqParams":
        """All tokens of the microbatch, when ranks share it; else these."""
        return self if self.context is None else self.context.whole


class BalanceShare(NamedTuple):
    """Which microbatch of a step this is, and its part in the step's loss."""

    microbatch: int
    """Its number on this rank."""

    microbatches: int
    """How many this rank has in the step."""

    weight: float
    """What a mean over the microbatch counts: `part` / (microbatches of all ranks), times the loss
    scale of fp16."""

    part: float = 1.0
    """How many of the step's tokens it has, as a multiple of an even part."""


class DropoutKey(NamedTuple):
    """What tells the masks of two tokens apart, and those of two runs."""

    seed: int
    """The run's."""

    numbers: Tensor
    """int64 [t]: which token of the whole run each is: (row, counted from the run's first) *
    seq_len + place in it; -1 for padding. A number comes once in a run, so that it stands for
    the step, too."""

    keys: Tensor | None = None
    """The same of the keys, where those are other tokens than the queries."""

    @property
    def numbers_of_keys(self) -> Tensor:
        """int64 [t_kv]."""
        return self.numbers if self.keys is None else self.keys


@dataclass(frozen=True, slots=True)
class Join:
    """The order of the tokens that some ranks put together."""

    order: Tensor
    """int64 [n]: where each token, in natural order, lies among the ranks' parts one after the
    other."""

    back: Tensor
    """int64 [n]: the way back: which token, in natural order, each of the parts' is."""


@dataclass(frozen=True, slots=True)
class Context:
    """Which tokens of a microbatch one of several ranks has, and what they see of those of the
    others."""

    slices: Slices
    rank: int

    whole: PackedSeqParams
    """All of them, padding included."""

    everyone: Join
    """Of all ranks."""

    neighbors: Join
    """Of those that exchange heads before a ring goes across them; of me alone where there are
    none."""

    seen: dict[tuple[int, int | None, int | None, bool, bool], tuple[KeySpans, ...]] = field(
        default_factory=dict, repr=False
    )
    """What has been planned so far, since all layers ask the same."""

    numbered: dict[int, tuple[Tensor, ...]] = field(default_factory=dict, repr=False)
    """The same of `numbers_of_groups`."""

    def numbers_of_groups(self, near: int) -> tuple[Tensor, ...]:
        """Which tokens, in natural order, each group of `near` neighbors has: int64 [near * t]."""
        if near not in self.numbered:
            parts, device = self.slices.joined(near), self.everyone.order.device
            on_host = tuple(torch.from_numpy(part) for part in parts)
            # Biases without numbers look none up, and what is checked there should not see them
            # move.
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
        """What the tokens of my group of `near` neighbors see of those of every such group."""
        asked = near, window, right, causal, chunked
        if asked not in self.seen:
            parts = self.slices.joined(near)
            mine = parts[self.rank // near]
            self.seen[asked] = tuple(
                self._spans(mine, keys, window, right, causal, chunked) for keys in parts
            )
        return self.seen[asked]

    def spans_of_all(
        self,
        *,
        window: int | None = None,
        right: int | None = None,
        causal: bool = True,
        chunked: bool = False,
    ) -> KeySpans:
        """What my tokens see of all tokens in natural order."""
        asked = 0, window, right, causal, chunked
        if asked not in self.seen:
            everything = np.arange(self.slices.num_tokens, dtype=np.int64)
            mine = self.slices.numbers[self.rank]
            self.seen[asked] = (self._spans(mine, everything, window, right, causal, chunked),)
        return self.seen[asked][0]

    def spans_of_whole(
        self,
        *,
        window: int | None = None,
        right: int | None = None,
        causal: bool = True,
        chunked: bool = False,
    ) -> KeySpans:
        """What all tokens, in natural order, see of one another; unlike `whole`, without the
        padding that follows."""
        asked = -1, window, right, causal, chunked
        if asked not in self.seen:
            everything = np.arange(self.slices.num_tokens, dtype=np.int64)
            self.seen[asked] = (
                self._spans(everything, everything, window, right, causal, chunked),
            )
        return self.seen[asked][0]

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
            repeats = (
                1  # documents that are as long as one another with their padding, but not without
            )
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
    """`rows` rows of `length` tokens, each row one document."""
    return tokens_of_lengths([length] * rows, device=device)


def tokens_of_lengths(lengths: list[int], *, device: torch.device | str = "cpu") -> PackedSeqParams:
    """Documents of the given lengths, one after the other, each read from its first token."""
    return tokens_of_queries([(length, length) for length in lengths], device=device)


def tokens_of_queries(
    lengths: list[tuple[int, int]],
    *,
    reach: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> PackedSeqParams:
    """Documents of which only the last `queries` of `keys` tokens are read now: (queries, keys)
    for each; `reach`: what each will have when all of it is read."""
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
    """One rank's tokens of documents that several ranks share; documents and positions count over
    all of them."""
    mine, document, starts = slices.numbers[slicing.rank], slices.document(), slices.starts()
    lengths = [int(length) for length in slices.lengths]
    queries = np.bincount(document[mine], minlength=len(lengths))
    cu_seqlens_q = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    whole = tokens_of_lengths(lengths, device=device)
    first = slicing.rank // slicing.near * slicing.near
    context = Context(
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
        position_ids=torch.from_numpy(mine - starts[mine]).to(device),
        document_ids=torch.from_numpy(document[mine]).to(device),
        valid=torch.from_numpy(slices.as_read(slicing.rank) >= 0).to(device),
        lengths=tuple(zip(queries.tolist(), lengths)),
        context=context,
    )


def with_places(tokens: PackedSeqParams, places: NDArray[np.int64]) -> PackedSeqParams:
    """The tokens with `places` [3, t] in time, height and width, given for all that were read;
    filler is at 0.

    Source: Wang et al. 2024, arXiv:2409.12191, section 2.1.
    """
    context, device = tokens.context, tokens.position_ids.device
    if context is None:
        return replace(tokens, position_ids=torch.from_numpy(places).to(device))
    slices = context.slices
    mine, everyone = slices.as_read(context.rank), slices.source
    mine = np.where(mine >= 0, places[:, mine], 0)
    every = places if everyone is None else np.where(everyone >= 0, places[:, everyone], 0)
    whole = replace(context.whole, position_ids=torch.from_numpy(every).to(device))
    return replace(
        tokens,
        position_ids=torch.from_numpy(mine).to(device),
        context=replace(context, whole=whole),
    )


def _join(parts: Numbers, device: torch.device | str) -> Join:
    order = np.argsort(parts.reshape(-1))
    return Join(torch.from_numpy(order).to(device), torch.from_numpy(np.argsort(order)).to(device))
