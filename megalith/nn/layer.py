"""Transformer layers: attention and an MLP with norms and residual connections; a single linear
layer in place of either (DeciLM)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.parallel import DispatcherName, RecomputeConfig
from megalith.kernels.attention.dispatch import attention
from megalith.kernels.attention.scores import PLAIN, Scores
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import PackedSeqParams
from megalith.kernels.recomputed import (
    RegisterRecompute,
    register_checked_recompute,
    register_recompute,
)
from megalith.nn.attention import Attention
from megalith.nn.cross_attention import CrossLayerAttention
from megalith.nn.dropout import Step, add_attention_dropout, build_dropout
from megalith.nn.mla import HeadsFn, LatentAttention, no_recompute
from megalith.nn.mlp import MLP, GatedMLP, build_mlp
from megalith.nn.moe import MoE, no_wrapper
from megalith.nn.norm import Norm, build_norm
from megalith.parallel import recompute as recomputation
from megalith.parallel.context import Attend
from megalith.parallel.mesh import Mesh
from megalith.parallel.recompute import Recomputed, RecomputedInChunks
from megalith.parallel.tensor import (
    ZEROS,
    Init,
    ParameterSpec,
    ReplicatedLinear,
    TPComm,
    register_param,
)
from megalith.plan.recompute import recomputed_modules
from megalith.plan.shards import Shard

# A single linear layer in place of attention or an MLP (Puzzle, DeciLM).


class LinearReplacement(nn.Module):
    """Linear layer in place of attention or an MLP: `y = x @ W.T`, or with a bias `y = x @ W.T +
    b`: x [t, h] -> [t, h], in the layout of `tp_comm`.

    W [h, h] is replicated: it is small, and tokens need no communication. Source: Bercovich et al.
    2024, arXiv:2411.19146, section 3.1.
    """

    def __init__(
        self, name: str, config: ModelConfig, tp_comm: TPComm, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        h, start = config.hidden_size, Init(config.init_std / math.sqrt(2 * config.num_layers))
        weight = Shard.full(f"{name}.linear", (h, h), invariant=tp_comm.invariant)
        self.linear = ReplicatedLinear(ParameterSpec(weight, start), dtype=dtype)
        self.shift = (
            AddBias(f"{name}.linear_bias", h, tp_comm, dtype=dtype) if bias else nn.Identity()
        )

    def forward(self, x: Tensor, inputs: LayerInputs | None = None) -> Tensor:
        """x [t, h] -> [t, h]; `inputs` are ignored."""
        y: Tensor = self.shift(self.linear(x))
        return y


class AddBias(nn.Module):
    """Adds a learned bias [h]: x [t, h] -> [t, h]."""

    weight: nn.Parameter

    def __init__(self, name: str, size: int, tp_comm: TPComm, *, dtype: torch.dtype) -> None:
        super().__init__()
        shard = Shard.full(name, (size,), invariant=tp_comm.invariant, inputs=0)
        register_param(self, "weight", ParameterSpec(shard, ZEROS), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x + self.weight


KEEP_ALL = RecomputeConfig()


class Layer(nn.Module):
    """Base of all kinds of layers: builds the modules; subclasses define `forward`."""

    attentions = 1
    """Number of attention modules with a KV cache."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        mesh: Mesh,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        index: int = 0,
        number: int | None = None,
        core: Attend = attention,
        recompute: RecomputeConfig = KEEP_ALL,
        dispatcher: DispatcherName = "alltoall",
    ) -> None:
        """`index`: the layer's index over all stages, which determines its kind; `number`:
        identifies its dropout masks, default `index`; `core`: computes softmax attention;
        `recompute`: modules that are recomputed in backward; `dispatcher`: token dispatcher of
        experts."""
        super().__init__()
        config, number = config.at(index), index if number is None else number
        again, check = recomputed_modules(recompute), recompute.check
        register: RegisterRecompute = register_checked_recompute if check else register_recompute
        act = register if "mlp_act" in again else None

        def attend(place: str, *, inside: bool = False) -> Attend:
            dropped = add_attention_dropout(core, config, number, mesh, place=place)
            return (
                RecomputedCore(dropped, check)
                if "core_attention" in again and not inside
                else dropped
            )

        def norm(
            word: str,
            *,
            again: RegisterRecompute | None = register if "norm" in again else None,
        ) -> Norm:
            size, invariant = config.hidden_size, tp_comm.invariant
            return build_norm(
                f"{name}.{word}", size, config, invariant=invariant, dtype=dtype, again=again
            )

        def branch(word: str) -> ResidualBranch:
            own = norm(f"{word}_post_norm", again=None) if after else None
            return ResidualBranch(
                own,
                config.residual_scale,
                build_dropout(word, number, config.dropout.residual, tp_comm),
            )

        before, after = config.norm_placement != "after", config.norm_placement != "before"
        if config.attention_part(index) != "none":
            self.attention_norm = norm("attention_norm") if before else IdentityNorm(dtype)
            up = "mla_up_proj" in again
            self.attention = _attention(
                f"{name}.attention",
                config,
                mesh,
                tp_comm,
                dtype=dtype,
                index=index,
                core=attend("weights", inside=up),
                around=partial(Recomputed, check=check, saves_rope_tables=True)
                if up
                else no_recompute,
            )
            self.attention_out = branch("attention")
        if config.uses_cross_layer_source(index):
            self.cross_norm = norm("cross_norm") if before else IdentityNorm(dtype)
            self.cross = CrossLayerAttention(
                f"{name}.cross",
                config,
                mesh,
                tp_comm,
                dtype=dtype,
                causal=config.attention.causal,
                core=attend("cross weights"),
            )
            self.cross_out = branch("cross")
        if config.mlp_part(index) != "none":
            own = before and config.block != "parallel_one_norm"
            self.mlp_norm = norm("mlp_norm") if own else IdentityNorm(dtype)
            mlp: nn.Module
            if config.moe is not None and config.has_experts(index):
                mlp = MoE(
                    f"{name}.moe",
                    config,
                    config.moe,
                    mesh,
                    tp_comm,
                    dtype=dtype,
                    act_again=act,
                    dispatcher=dispatcher,
                    number=number,
                    around_shared=partial(Recomputed, check=check)
                    if "shared_experts" in again
                    else no_wrapper,
                )
            else:
                mlp = _mlp(
                    f"{name}.mlp", config, mesh, tp_comm, dtype=dtype, index=index, act_again=act
                )
            self.mlp = _again(mlp, recompute) if "mlp" in again else mlp
            self.mlp_out = branch("mlp")


def _again(mlp: nn.Module, recompute: RecomputeConfig) -> nn.Module:
    """Wrap the MLP of a layer for recomputation in backward, in chunks if set; MoE layers are not
    chunked."""
    if recompute.mlp_chunks > 1 and isinstance(mlp, GatedMLP | MLP):
        return RecomputedInChunks(mlp, recompute.mlp_chunks, check=recompute.check)
    return Recomputed(mlp, check=recompute.check)


def _attention(
    name: str,
    config: ModelConfig,
    mesh: Mesh,
    tp_comm: TPComm,
    *,
    dtype: torch.dtype,
    index: int,
    core: Attend,
    around: Callable[[HeadsFn], HeadsFn],
) -> Attention | LatentAttention | LinearReplacement:
    """Build a layer's attention or its linear replacement."""
    if config.attention_part(index) == "linear":
        return LinearReplacement(name, config, tp_comm, bias=config.output_bias, dtype=dtype)
    if config.mla is None:
        return Attention(name, config, mesh, tp_comm, dtype=dtype, index=index, core=core)
    return LatentAttention(
        name, config, mesh, tp_comm, dtype=dtype, index=index, core=core, around=around
    )


def _mlp(
    name: str,
    config: ModelConfig,
    mesh: Mesh,
    tp_comm: TPComm,
    *,
    dtype: torch.dtype,
    index: int,
    act_again: RegisterRecompute | None,
) -> GatedMLP | MLP | LinearReplacement:
    """Build a layer's dense MLP or its linear replacement."""
    if config.mlp_part(index) == "linear":
        return LinearReplacement(name, config, tp_comm, bias=config.mlp_bias, dtype=dtype)
    return build_mlp(name, config, mesh, tp_comm, dtype=dtype, act_again=act_again)


class SequentialBlock(Layer):
    """Layer with attention and then an MLP, each added to the residual stream: x [t, h] -> x [t,
    h]."""

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        attended = self.attention_out(self.attention(self.attention_norm(x), inputs), inputs)
        x, normed = self.mlp_norm.add_and_normalize(attended, x)
        return x + self.mlp_out(self.mlp(normed, inputs), inputs)


class CrossBlock(Layer):
    """Layer with cross-layer attention between attention and MLP: x [t, h] -> x [t, h].

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1 (with post-norm).
    """

    attentions = 2

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]; `inputs.encoder_hidden`: the cross-layer source."""
        attended = self.attention_out(self.attention(self.attention_norm(x), inputs), inputs)
        x, normed = self.cross_norm.add_and_normalize(attended, x)
        cross_attended = self.cross_out(self.cross(normed, inputs), inputs)
        x, normed = self.mlp_norm.add_and_normalize(cross_attended, x)
        return x + self.mlp_out(self.mlp(normed, inputs), inputs)


class ParallelBlock(Layer):
    """Layer whose attention and MLP read the same x and are both added to it: x [t, h] -> x [t, h].

    Source: Chowdhery et al. 2022, arXiv:2204.02311, section 2; Black et al. 2022, arXiv:2204.06745,
    section 2.
    """

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        attended = self.attention_out(self.attention(self.attention_norm(x), inputs), inputs)
        return x + attended + self.mlp_out(self.mlp(self.mlp_norm(x), inputs), inputs)


class OneNormBlock(Layer):
    """Parallel layer with one norm for attention and MLP: x [t, h] -> x [t, h]."""

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        normed = self.attention_norm(x)
        attended = self.attention_out(self.attention(normed, inputs), inputs)
        return x + attended + self.mlp_out(self.mlp(normed, inputs), inputs)


class AttentionBlock(Layer):
    """A layer without an MLP: x [t, h] -> x [t, h]."""

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x + self.attention_out(self.attention(self.attention_norm(x), inputs), inputs)


class MLPBlock(Layer):
    """A layer without attention: x [t, h] -> x [t, h]."""

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x + self.mlp_out(self.mlp(self.mlp_norm(x), inputs), inputs)


BLOCKS: dict[str, type[Layer]] = {
    "sequential": SequentialBlock,
    "parallel": ParallelBlock,
    "parallel_one_norm": OneNormBlock,
}
"""Layer class by model.block, for layers with attention and MLP."""


def block_of_layer(config: ModelConfig, layer: int) -> type[Layer]:
    """Return the class of a layer, numbered over all stages; every layer has attention or an
    MLP."""
    if config.attention_part(layer) == "none":
        return MLPBlock
    if config.mlp_part(layer) == "none":
        return AttentionBlock
    return CrossBlock if config.uses_cross_layer_source(layer) else BLOCKS[config.block]


class IdentityNorm(nn.Module):
    """Placeholder of an absent norm: returns x in the dtype of the layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x.to(self.dtype)

    def add_and_normalize(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual sum in the stream's dtype and in the layer's dtype."""
        total = residual + x
        return total, total.to(self.dtype)


class ResidualBranch(nn.Module):
    """Output of attention or MLP before the residual addition: optional post-norm, scale and
    dropout."""

    def __init__(self, norm: Norm | None, scale: float, dropped: Sequence[Step]) -> None:
        super().__init__()
        self.norm = norm or nn.Identity()
        self.scale = (ScaleBy(scale),) if scale != 1.0 else ()
        self.dropped = tuple(dropped)

    def forward(self, y: Tensor, inputs: LayerInputs) -> Tensor:
        """y [t, h] -> [t, h]."""
        y = self.norm(y)
        for step in (*self.scale, *self.dropped):
            y = step(y, inputs)
        return y


@dataclass(frozen=True, slots=True)
class ScaleBy:
    """Multiplies by a constant."""

    factor: float

    def __call__(self, y: Tensor, inputs: LayerInputs) -> Tensor:
        """y [t, h] -> [t, h]."""
        return y * self.factor


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
        *,
        scores: Scores = PLAIN,
        sinks: Tensor | None = None,
        attention_bias: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Tensor:
        """Save q, k, v, made contiguous, because values are a view of a larger tensor that would be
        kept alive."""
        tensors = [x.contiguous() for x in (k, v, sinks) if x is not None]
        arguments = {
            "scores": scores,
            "attention_bias": attention_bias,
            "dropout_key": dropout_key,
        }
        return recomputation.recompute(
            partial(self._attend, seq_params, arguments), q, *tensors, check=self.check
        )

    def _attend(
        self,
        seq_params: PackedSeqParams,
        arguments: dict[str, Any],  # keyword arguments of `Attend`
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *sinks: Tensor,
    ) -> Tensor:
        return self.core(q, k, v, seq_params, sinks=sinks[0] if sinks else None, **arguments)
