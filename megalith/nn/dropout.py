"""Dropout of activations and of attention weights, equal under every parallel layout."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.attention.scores import PLAIN, MaxScores, WeightDropout
from megalith.kernels.dropout import dropout, key_of
from megalith.kernels.layer_inputs import Attend, AttendOptions, LayerInputs
from megalith.kernels.packed import PackedSeqParams
from megalith.nn.build import BuildContext
from megalith.parallel import recompute as recomputation
from megalith.parallel.context import build_attend
from megalith.plan.recompute import recomputed_modules
from megalith.plan.shards import split_evenly, split_heads

Step = Callable[[Tensor, LayerInputs], Tensor]
"""x [t, h], in the layout of `tp_comm` -> [t, h]."""


class Dropout(nn.Module):
    """Dropout in training, by hashed masks: x [t, h] -> [t, h]; the other features are divided by 1
    - p.

    Masks are equal under every layout and in recomputation. Source: Srivastava et al. 2014, JMLR
    15(56).
    """

    def __init__(self, place: str, layer: int, p: float, context: BuildContext) -> None:
        """`place` and `layer` (numbered over all stages) give each dropout its own masks."""
        super().__init__()
        self.place, self.layer, self.p, self.tp_comm = place, layer, p, context.tp_comm
        self.drop = context.backends.bind("dropout", dropout)

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
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """Call `core` with the dropout settings in `scores`."""
        dropout_key = options.get("dropout_key")
        if dropout_key is not None:
            place = key_of(dropout_key.seed, "dropout", self.place, self.layer)
            weight_dropout = WeightDropout(self.p, place, self.first_head)
            options["scores"] = replace(options.get("scores", PLAIN), dropout=weight_dropout)
        return self.core(q, k, v, seq_params, **options)


def build_core_attention(
    config: ModelConfig, context: BuildContext, *, place: str = "weights", recomputed: bool = True
) -> Attend:
    """Build the softmax attention of a layer: context parallel, with dropout of its weights, and
    recomputed in backward if the run asks for it and `recomputed`.

    `place` distinguishes the dropout masks of several attention modules in a layer.
    """
    core = _add_attention_dropout(
        build_attend(
            context.parallel.context,
            context.layer,
            context.mesh,
            overlap=context.parallel.overlap,
            backends=context.backends,
        ),
        config,
        context,
        place,
    )
    recompute = context.recompute
    if recomputed and "core_attention" in recomputed_modules(recompute):
        return RecomputedCore(core, recompute.check)
    return core


def _add_attention_dropout(
    core: Attend, config: ModelConfig, context: BuildContext, place: str
) -> Attend:
    """Return `core` with the attention dropout of a layer; `core` itself without dropout."""
    p = config.dropout.attention
    if p == 0.0:
        return core
    n, tp = config.num_heads, context.mesh.tp
    heads = (
        split_heads(n, config.num_kv_heads, tp.size).queries
        if config.mla is None
        else split_evenly(n, tp.size)
    )
    return AttentionWithDropout(core, context.dropout_layer, p, sum(heads[: tp.rank]), place)


def build_dropout(place: str, layer: int, p: float, context: BuildContext) -> list[Step]:
    """Return a list with one `Dropout`, or an empty list if p is 0."""
    return [Dropout(place, layer, p, context)] if p else []


@dataclass(frozen=True, slots=True)
class RecomputedCore:
    """Softmax attention that is recomputed in backward: see `Attend`."""

    core: Attend
    check: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_params: PackedSeqParams,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """Save q, k, v, made contiguous, because values are a view of a larger tensor that would be
        kept alive."""
        tensors = [x.contiguous() for x in (k, v, options.get("sinks")) if x is not None]
        max_scores = options.pop("max_scores", None)
        records = [] if max_scores is None else [max_scores]
        run = partial(self._attend, seq_params, options, records)
        return recomputation.recompute(run, q, *tensors, check=self.check)

    def _attend(
        self,
        seq_params: PackedSeqParams,
        options: AttendOptions,
        records: list[MaxScores],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *sinks: Tensor,
    ) -> Tensor:
        if records:  # only of the first pass
            options = {**options, "max_scores": records.pop()}
        if sinks:
            options = {**options, "sinks": sinks[0]}
        return self.core(q, k, v, seq_params, **options)
