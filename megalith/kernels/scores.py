"""How the scores of queries and keys become weights: scale, cap, biases, sinks, and which keys are
seen at all."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class WeightDropout(NamedTuple):
    """Which of attention's weights are zero, while training: see kernels/dropout.py."""

    p: float
    key: int
    """63 bits for this place and layer."""

    first_head: int
    """Of all query heads of the model, the first that is here."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of q · k until it weighs values. Every field unset: scaled by 1 / sqrt(d), all
    earlier keys seen."""

    scale: float | None = None
    """Scores are multiplied by this; None: 1 / sqrt(d)."""

    window: int | None = None
    """A token sees itself and the window - 1 tokens before it; None: all before it. The same after
    it, if not causal.
    """

    chunked: bool = False
    """It sees those of its own run of `window` tokens instead, counted from the first of its
    document."""

    softcap: float | None = None
    """Then scores s become softcap · tanh(s / softcap); None: they stay."""

    causal: bool = True
    """A token sees none that comes after it."""

    right: int | None = None
    """With a window, and not causal: it sees so many tokens after it; None: as many as before
    it."""

    off_by_one: bool = False
    """A score of 0 takes part in softmax and stands for no key: weights are exp(s) / (1 + sum of
    exp(s)). Source: Miller 2023, "Attention is off by one"."""

    relative: int | None = None
    """Scores gain a bias by the distance of query and key, from the table that comes with the
    tokens; distances of this many tokens and more are alike. None: none."""

    dropout: WeightDropout | None = None
    """Weights dropped after softmax; None: none."""

    @property
    def after(self) -> int | None:
        """How many of the tokens after it a token sees; None: all of its document."""
        if self.causal:
            return 0
        if self.window is None:
            return None
        return self.window - 1 if self.right is None else self.right

    def hides(self, longest: int) -> bool:
        """Whether the window hides any token of documents of at most so many."""
        if self.window is None:
            return False
        return self.window < longest or (not self.causal and (self.after or 0) < longest - 1)

    def factor(self, head_dim: int) -> float:
        """What q · k of so many features is multiplied by."""
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale


PLAIN = Scores()


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """The definition of attention, in plain operations: q [q, n, d], k [kv, g, d], v [kv, g, d_v]
    -> [q, n, d_v].

    `visible`, bool [q, kv], says which keys a query sees, None that it sees all; window, causality
    and dropout of `scores` are not looked at. `sinks` [n] are scores that take part in softmax and
    stand for no key (Xiao et al. 2023, arXiv:2309.17453, of which those of OpenAI 2025,
    arXiv:2508.10925, are learned). Scores and softmax are fp32 or float64. A query that sees no key
    gives 0. `bias` [n, q, kv]: added to the scores; `factors` [n, q, kv]: what weights are
    multiplied by after softmax.
    """
    shared, dtype = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    s = torch.einsum("qnd,knd->nqk", q.to(dtype), k.to(dtype)) * scores.factor(q.shape[2])
    if scores.softcap is not None:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    s = s if bias is None else s + bias.to(dtype)
    weights = _softmax(s, visible, _sinks(s, scores, sinks))
    weights = (weights if factors is None else weights * factors).to(q.dtype)
    return torch.einsum("nqk,knd->qnd", weights, v)


def _sinks(s: Tensor, scores: Scores, sinks: Tensor | None) -> Tensor | None:
    """Scores that stand for no key, beside s [n, q, kv]: [n, q, 1]."""
    if scores.off_by_one:
        return torch.zeros_like(s[..., :1])
    return None if sinks is None else sinks.to(s.dtype)[:, None, None].expand(-1, s.shape[1], 1)


def _softmax(s: Tensor, visible: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Weights [n, q, kv] of the keys seen; 0 for all others. Those of a query add up to less than 1
    with sinks."""
    keys = s.shape[-1]
    if visible is not None:
        s = s.masked_fill(~visible, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks], dim=-1)
    if visible is None:
        return s.softmax(-1)[..., :keys]
    blind = ~visible.any(
        -1, keepdim=True
    )  # softmax of nothing but -inf is NaN, and so are its gradients
    return s.masked_fill(blind, 0).softmax(-1)[..., :keys].masked_fill(blind, 0)


def keys_seen(queries: int, keys: int, scores: Scores, *, device: torch.device) -> Tensor | None:
    """bool [queries, keys]: which keys each query sees, query i being token keys - queries + i;
    None: all."""
    if scores.chunked and scores.window is not None:
        runs = torch.arange(keys, device=device) // scores.window
        alike = runs[keys - queries :, None] == runs
        return alike & causal_mask(queries, keys, device=device) if scores.causal else alike
    if scores.causal:
        return causal_mask(queries, keys, window=scores.window, device=device)
    if scores.window is None or not scores.hides(keys):
        return None
    everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return everything.triu(keys - queries - scores.window + 1).tril(
        keys - queries + (scores.after or 0)
    )


def causal_mask(
    queries: int, keys: int, *, window: int | None = None, device: torch.device
) -> Tensor:
    """bool [queries, keys]: query i, which is token keys - queries + i, sees itself and what came
    before.

    With a `window` it sees itself and the window - 1 tokens before it.
    """
    before = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return before if window is None else before.triu(keys - queries - window + 1)
