"""Dropout of activations outside divided work, and of attention's weights, the same under every
layout."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.dropout import dropout
from megalith.kernels.scores import PLAIN, Scores, WeightDropout
from megalith.kernels.tokens import PackedSeqParams
from megalith.parallel.context import Attend
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import TPComm
from megalith.plan.keys import key
from megalith.plan.shards import split_evenly, split_heads

Step = Callable[[Tensor, PackedSeqParams], Tensor]
"""x [t, h], in the layout of `tp_comm` -> [t, h]."""

key_of = torch.compiler.assume_constant_result(key)
"""`key`, which a compiler takes for the number that it is."""


class Dropout(nn.Module):
    """While training, set each feature of each token to zero with probability p: x [t, h] -> [t,
    h].

    The same features whatever the layout, also when backward computes a layer again; the others are
    divided by 1 - p. Source: Srivastava et al. 2014, JMLR 15(56).
    """

    def __init__(self, place: str, layer: int, p: float, tp_comm: TPComm) -> None:
        """`place` and `layer`, numbered over all stages, keep apart the masks of one token."""
        super().__init__()
        self.place, self.layer, self.p, self.tp_comm, self.drop = place, layer, p, tp_comm, dropout

    def forward(self, x: Tensor, tokens: PackedSeqParams) -> Tensor:
        """x [t, h], of the tokens that I have outside divided work -> [t, h]; x itself where
        nothing is trained."""
        if tokens.dropout is None:
            return x
        seed, numbers = tokens.dropout.seed, tokens.dropout.numbers
        return self.drop(
            x, self.p, key_of(seed, "dropout", self.place, self.layer), self.tp_comm.mine(numbers)
        )


@dataclass(frozen=True, slots=True)
class DroppingAttention:
    """While training, set each of attention's weights to zero with probability p: see `Attend`."""

    core: Attend
    """How tokens are seen."""

    layer: int
    p: float

    first_head: int
    """Of all query heads, the first that I have."""

    place: str = "weights"
    """Keeps apart the masks of several attentions in one layer."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: PackedSeqParams,
        *,
        scores: Scores = PLAIN,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """What `core` does, with the weights to be dropped among the scores' settings."""
        if tokens.dropout is None:
            return self.core(q, k, v, tokens, scores=scores, sinks=sinks)
        place = key_of(tokens.dropout.seed, "dropout", self.place, self.layer)
        dropping = replace(scores, dropout=WeightDropout(self.p, place, self.first_head))
        return self.core(q, k, v, tokens, scores=dropping, sinks=sinks)


def with_dropped_weights(
    core: Attend, config: ModelConfig, layer: int, mesh: Mesh, *, place: str = "weights"
) -> Attend:
    """`core` for a layer of the model, numbered over all stages; `core` itself where no weights are
    dropped."""
    p = config.dropout.attention
    if p == 0.0:
        return core
    n, tp = config.num_heads, mesh.tp.size
    heads = (
        split_heads(n, config.num_kv_heads, tp).queries
        if config.mla is None
        else split_evenly(n, tp)
    )
    return DroppingAttention(core, layer, p, sum(heads[: mesh.tp.rank]), place)


def dropping(place: str, layer: int, p: float, tp_comm: TPComm) -> list[Step]:
    """`Dropout` as the one step it is, and no step where p is 0."""
    return [Dropout(place, layer, p, tp_comm)] if p else []
