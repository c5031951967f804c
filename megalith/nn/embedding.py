"""Input embedding after the table lookup: learned position embedding, scale and dropout; the table
of relative position biases."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.errors import DataError
from megalith.kernels.embedding import embedding
from megalith.kernels.layer_inputs import InsertedEmbeddings, LayerInputs
from megalith.nn.build import BuildContext
from megalith.nn.dropout import Step, build_dropout
from megalith.nn.norm import stream_dtype
from megalith.parallel.collectives import copy_to_tp
from megalith.parallel.tensor import Init, TPComm
from megalith.plan.shards import Shard, split_heads


class LearnedPositions(nn.Module):
    """Learned position embedding, added to each token: x [t, h] -> [t, h], in the layout of
    `tp_comm`.

    The table [max_seq_len, h] is replicated. With `position_offset` (MTP), x are embeddings of
    tokens that many positions later; beyond the document and the table nothing is added. Source:
    Radford et al. 2018; Gehring et al. 2017, arXiv:1705.03122.
    """

    weight: nn.Parameter

    def __init__(
        self,
        config: ModelConfig,
        context: BuildContext,
        *,
        position_offset: int = 0,
        shared: nn.Parameter | None = None,
    ) -> None:
        """`shared`: the table, if this rank has it already."""
        super().__init__()
        self.tp_comm, self.position_offset = context.tp_comm, position_offset
        shard = Shard.full(
            "positions.weight",
            (config.max_seq_len, config.hidden_size),
            invariant=self.tp_comm.invariant,
        )
        if shared is None:
            context.register_param(self, "weight", shard, Init(config.init_std))
        else:
            self.register_parameter("weight", shared)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h].

        Raises:
            DataError: a document is longer than the table.
        """
        # Context-parallel rows may end with padding beyond the table, which gets zeros.
        seq_params = inputs.seq_params
        if seq_params.context is None and seq_params.max_seqlen_kv > len(self.weight):
            raise DataError(
                f"a document has {seq_params.max_seqlen_kv} tokens, but model.positions=learned "
                f"has only {len(self.weight)} positions. Use documents of at most "
                f"{len(self.weight)} tokens, or set model.max_seq_len={seq_params.max_seqlen_kv}."
            )
        places = seq_params.position_ids
        if self.position_offset:
            places = places + self.position_offset
        return x + embedding(self.tp_comm.select_local(places), self.weight)


class InputEmbedding(nn.Module):
    """Input of the first layer from token embeddings: x [t, h] -> [t, h], in the layout of
    `tp_comm`."""

    positions: LearnedPositions
    """Only with model.positions=learned."""

    def __init__(
        self,
        config: ModelConfig,
        context: BuildContext,
        *,
        number: int = 0,
        places: nn.Parameter | None = None,
        requires_grad: bool = False,
    ) -> None:
        """`number`: offset of the embedded tokens (MTP depth), which also identifies the dropout
        masks; `places`: the table of learned positions, if this rank has it already;
        `requires_grad`: the output requires a gradient although the tables are frozen, because
        activation checkpointing has no backward otherwise."""
        super().__init__()
        self.requires_grad = requires_grad
        steps: list[Step] = []
        if config.positions == "learned":
            self.positions = LearnedPositions(
                config, context, position_offset=number, shared=places
            )
            steps.append(self.positions)
        if config.embedding_scale != 1.0:
            steps.append(Scale(config.embedding_scale, context.dtype))
        if config.fp32_residual:
            steps.append(CastToStream(stream_dtype(config, context.dtype)))
        self.steps = (
            *steps,
            *build_dropout("embedding", number, config.dropout.embedding, context),
        )

    def position_table(self) -> nn.Parameter | None:
        """Return the table of learned positions, or None."""
        return self.positions.weight if hasattr(self, "positions") else None

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        for step in self.steps:
            x = step(x, inputs)
        return x.requires_grad_() if self.requires_grad and torch.is_grad_enabled() else x


@dataclass(frozen=True, slots=True)
class CastToStream:
    """Converts x to the residual stream's dtype."""

    dtype: torch.dtype

    def __call__(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x.to(self.dtype)


class Scale:
    """Multiplies by a constant that is rounded to the activations' dtype first, as published
    weights expect."""

    def __init__(self, factor: float, dtype: torch.dtype) -> None:
        self.factor = torch.tensor(factor, dtype=dtype).item()

    def __call__(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x * self.factor


def insert_embeddings(
    x: Tensor, inserted: InsertedEmbeddings, num_tokens: int, tp_comm: TPComm
) -> Tensor:
    """Replace rows of the token embeddings x [t, h], in the layout of `tp_comm`, by `inserted`,
    before position embedding, scale and dropout.

    The gradient of the embeddings is complete on every tensor-parallel rank.
    """
    row_of_token = inserted.positions.new_full((num_tokens,), -1)
    numbers = torch.arange(len(inserted.positions), device=row_of_token.device)
    rows = tp_comm.select_local(row_of_token.index_copy(0, inserted.positions, numbers))
    # Under sequence parallelism a rank reads the rows of its own tokens only.
    has_all_tokens = bool(tp_comm.invariant)
    embeddings = inserted.embeddings
    embeddings = embeddings if has_all_tokens else copy_to_tp(embeddings, tp_comm.group)
    selected = embeddings[rows.clamp(min=0)].to(x.dtype)
    return torch.where((rows >= 0).unsqueeze(1), selected, x)


# --- relative position bias of a model: one table of biases by distance that all layers share


class RelativeBias(nn.Module):
    """Adds the table of relative position biases [buckets, n] to the layers' inputs.

    A rank has the columns of its heads. Pipeline stages hold a copy each, whose gradients are
    summed; chunks of a rank share one. Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """

    weight: nn.Parameter

    def __init__(
        self, config: ModelConfig, context: BuildContext, *, shared: nn.Parameter | None = None
    ) -> None:
        """`shared`: the table, if another chunk of this rank has it already."""
        super().__init__()
        n, tp = config.num_heads, context.mesh.tp
        heads = split_heads(n, config.num_kv_heads, tp.size).queries
        shard = Shard.full("relative.weight", (config.relative.buckets, n))
        shard = shard.split_dim(1, heads, tp.rank, tp.axes)
        if shared is None:
            context.register_param(self, "weight", shard, Init(config.init_std))
        else:
            self.register_parameter("weight", shared)

    def add_to(self, inputs: LayerInputs) -> LayerInputs:
        """Return the inputs with the local heads' biases: the parameter itself, so that recomputed
        layers read it again."""
        return replace(inputs, attention_bias=self.weight)


class NoBias(nn.Module):
    """Placeholder for models without relative position bias."""

    def add_to(self, inputs: LayerInputs) -> LayerInputs:
        """Return the inputs unchanged."""
        return inputs
