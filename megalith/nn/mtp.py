"""Multi-token prediction (MTP): additional layers after the last that predict tokens beyond the
next one.

Depth 1 takes the hidden states from which the next token is predicted and the embedding of that
token, and predicts the token after it; each later depth takes the output of the previous one and
the embedding one token later. Embedding table and output head are shared with the model. RoPE and
relative biases use the position of the predicting token, a learned position embedding that of the
embedded token. Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2; the projection's input has
the embedding first, as in the published weights, while equation 21 of the paper has it last.

Under pipeline parallelism all depths are on one stage, which has a copy of the embedding table.
Their losses are computed on the stage of the model's output head; if that is another stage, it
receives the hidden states of every depth.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.parallel import OffloadConfig
from megalith.kernels.layer_inputs import LayerInputs
from megalith.nn.build import BuildContext
from megalith.nn.embedding import InputEmbedding
from megalith.nn.layer import select_block_class
from megalith.nn.norm import build_norm, stream_dtype
from megalith.parallel.recompute import LayerRunner
from megalith.parallel.tensor import (
    Init,
    ParameterSpec,
    VocabParallelEmbedding,
)
from megalith.plan.shards import Shard

MTPInputs = Sequence[tuple[Tensor, Tensor]]
"""(ids, labels), each [t], of every depth; empty if only the next token is predicted."""


class MTPLayer(nn.Module):
    """One MTP depth: hidden states x [t, h] and the ids [t] of the tokens `depth + 1` positions
    later -> hidden states that predict the token after these.

    x and the normalized result [t, h] are in the layout of `tp_comm`; ids are those of all tokens.
    """

    def __init__(
        self,
        depth: int,
        config: ModelConfig,
        context: BuildContext,
        *,
        table: ParameterSpec,
        shared: nn.Parameter | None,
        places: nn.Parameter | None = None,
    ) -> None:
        """`depth`: from 0; `table`: spec of the embedding table; `shared`: its parameter, if this
        rank has it already, and `places` that of learned positions."""
        super().__init__()
        name, h, last = f"mtp.{depth}", config.hidden_size, config.num_layers - 1
        self.embed = VocabParallelEmbedding(
            table, context.tp_comm, dtype=context.dtype, tied=shared
        )
        self.input_embedding = InputEmbedding(config, context, number=depth + 1, places=places)
        self.embed_norm, self.hidden_norm, self.norm = (
            build_norm(f"{name}.{word}", h, config, context)
            for word in ("embed_norm", "hidden_norm", "norm")
        )
        project = Shard.full(f"{name}.project", (h, 2 * h), invariant=context.tp_comm.invariant)
        self.project = context.replicated_linear(project, Init(config.init_std))
        self.layer = select_block_class(config, last)(
            f"{name}.layer", config, context.at_layer(last, config.num_layers + depth)
        )
        self.run_layers = LayerRunner(context.recompute, OffloadConfig(), context.mesh.tp)
        self.stream = stream_dtype(config, context.dtype)

    def forward(self, x: Tensor, ids: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h], ids [t] -> [t, h]."""
        embedded = self.input_embedding(self.embed(ids), inputs)
        both = torch.cat([self.embed_norm(embedded), self.hidden_norm(x)], dim=-1)
        x, _ = self.run_layers([self.layer], self.project(both).to(self.stream), inputs)
        return self.norm(x)


class MTPBlock(nn.Module):
    """All MTP depths in sequence; empty on other stages.

    A separate module instead of a list in the model, so that FSDP and activation checkpointing
    treat it as one unit.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: BuildContext,
        *,
        depths: int,
        table: ParameterSpec,
        shared: nn.Parameter | None,
        places: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for depth in range(depths):
            layer = MTPLayer(depth, config, context, table=table, shared=shared, places=places)
            self.layers.append(layer)
            shared, places = layer.embed.weight, layer.input_embedding.position_table()

    def forward(self, x: Tensor, mtp_inputs: MTPInputs, inputs: LayerInputs) -> tuple[Tensor, ...]:
        """Return the hidden states of every depth, each [t, h]; x: those of the model."""
        hidden_states = []
        for layer, (ids, _) in zip(self.layers if mtp_inputs else (), mtp_inputs, strict=True):
            x = layer(x, ids, inputs)
            hidden_states.append(x)
        return tuple(hidden_states)
