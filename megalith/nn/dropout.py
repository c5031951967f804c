"""Dropout of activations and of attention weights, equal under every parallel layout."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.attention.scores import PLAIN, Scores, WeightDropout
from megalith.kernels.dropout import DropoutKey, dropout
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import PackedSeqParams
from megalith.parallel.context import Attend
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import TPComm
from megalith.plan.keys import key
from megalith.plan.shards import split_evenly, split_heads

Step = Callable[[Tensor, LayerInputs], Tensor]
"""x [t, h], in the layout of `tp_comm` -> [t, h]."""

key_of = torch.compiler.assume_constant_result(key)
"""`key` as a constant for torch.compile."""


class Dropout(nn.Module):
    """Dropout in training, by hashed masks: x [t, h] -> [t, h]; the other features are divided by 1
    - p.

    Masks are equal under every layout and in recomputation. Source: Srivastava et al. 2014, JMLR
    15(56).
    """

    def __init__(self, place: str, layer: int, p: float, tp_comm: TPComm) -> None:
        """`place` and `layer` (numbered over all stages) give each dropout its own masks."""
        super().__init__()
        self.place, self.layer, self.p, self.tp_comm, self.drop = place, layer, p, tp_comm, dropout

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] of the local tokens, in the layout of `tp_comm` -> [t, h]; x itself outside
        training."""
        if inputs.dropout_key is None:
            return x
        seed, numbers = inputs.dropout_key.seed, inputs.dropout_key.numbers
        return self.drop(
            x,
            self.p,
            key_of(seed, "dropout", self.place, self.layer),
            self.tp_comm.select_local(numbers),
        )


@dataclass(frozen=True, slots=True)
class AttentionWithDropout:
    """Softmax attention with dropout of its weights in training: see `Attend`."""

    core: Attend
    """Computes softmax attention."""

    layer: int
    p: float

    first_head: int
    """Index of the first local head among all query heads."""

    place: str = "weights"
    """Distinguishes the masks of several attention modules in a layer."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_params: PackedSeqParams,
        *,
        scores: Scores = PLAIN,
        sinks: Tensor | None = None,
        attention_bias: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Tensor:
        """Call `core` with the dropout settings in `scores`."""
        if dropout_key is not None:
            place = key_of(dropout_key.seed, "dropout", self.place, self.layer)
            scores = replace(scores, dropout=WeightDropout(self.p, place, self.first_head))
        return self.core(
            q,
            k,
            v,
            seq_params,
            scores=scores,
            sinks=sinks,
            attention_bias=attention_bias,
            dropout_key=dropout_key,
        )


def add_attention_dropout(
    core: Attend, config: ModelConfig, layer: int, mesh: Mesh, *, place: str = "weights"
) -> Attend:
    """Return `core` with the attention dropout of a layer, numbered over all stages; `core` itself
    without dropout."""
    p = config.dropout.attention
    if p == 0.0:
        return core
    n, tp = config.num_heads, mesh.tp.size
    heads = (
        split_heads(n, config.num_kv_heads, tp).queries
        if config.mla is None
        else split_evenly(n, tp)
    )
    return AttentionWithDropout(core, layer, p, sum(heads[: mesh.tp.rank]), place)


def build_dropout(place: str, layer: int, p: float, tp_comm: TPComm) -> list[Step]:
    """Return a list with one `Dropout`, or an empty list if p is 0."""
    return [Dropout(place, layer, p, tp_comm)] if p else []
