"""What becomes of the embeddings before the first layer: a learned vector for every place, a scale,
dropout."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.errors import DataError
from megalith.kernels.embedding import embedding
from megalith.kernels.tokens import PackedSeqParams
from megalith.nn.dropout import Step, dropping
from megalith.nn.norm import stream_dtype
from megalith.parallel.tensor import Init, ParameterSpec, TPComm, register_param
from megalith.plan.shards import Shard


class LearnedPositions(nn.Module):
    """Adds to each token the vector of its place in its document: x [t, h] -> [t, h], as the region
    has tokens.

    The table [max_seq_len, h] is whole on every rank. With `ahead`, what is read are embeddings of
    tokens so much further on, whose places they get; where a document has none, and the table no
    such place, nothing is added. Source: Radford et al. 2018; Gehring et al. 2017,
    arXiv:1705.03122.
    """

    weight: nn.Parameter

    def __init__(
        self,
        config: ModelConfig,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        ahead: int = 0,
        shared: nn.Parameter | None = None,
    ) -> None:
        """`shared`: the table, where this rank has it already."""
        super().__init__()
        self.tp_comm, self.ahead = tp_comm, ahead
        shard = Shard.full(
            "positions.weight",
            (config.max_seq_len, config.hidden_size),
            invariant=tp_comm.invariant,
        )
        if shared is None:
            register_param(self, "weight", ParameterSpec(shard, Init(config.init_std)), dtype=dtype)
        else:
            self.register_parameter("weight", shared)

    def forward(self, x: Tensor, tokens: PackedSeqParams) -> Tensor:
        """x [t, h] -> [t, h].

        Raises:
            DataError: a document has more places than the table.
        """
        # Rows that ranks share may end with filler beyond the table, which is given zeros.
        if tokens.context is None and tokens.max_seqlen_kv > len(self.weight):
            raise DataError(
                f"a document of {tokens.max_seqlen_kv} tokens with model.positions=learned, which "
                "knows "
                f"{len(self.weight)} "
                f"places. Use documents of at most {len(self.weight)} tokens, or set "
                "model.max_seq_len to as many."
            )
        places = tokens.position_ids + self.ahead if self.ahead else tokens.position_ids
        return x + embedding(self.tp_comm.mine(places), self.weight)


class InputEmbedding(nn.Module):
    """From embeddings to the residual stream: x [t, h] -> [t, h], in the layout of `tp_comm`."""

    positions: LearnedPositions
    """Only with learned positions."""

    def __init__(
        self,
        config: ModelConfig,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        number: int = 0,
        places: nn.Parameter | None = None,
    ) -> None:
        """`number`: how far ahead the tokens are whose embeddings it gets, and what dropout
        knows it by, where a model has several; `places`: the table of learned positions, where
        this rank has it already."""
        super().__init__()
        steps: list[Step] = []
        if config.positions == "learned":
            self.positions = LearnedPositions(
                config, tp_comm, dtype=dtype, ahead=number, shared=places
            )
            steps.append(self.positions)
        if config.embedding_scale != 1.0:
            steps.append(Scale(config.embedding_scale, dtype))
        if config.fp32_residual:
            steps.append(Widened(stream_dtype(config, dtype)))
        self.steps = (*steps, *dropping("embedding", number, config.dropout.embedding, tp_comm))

    def places(self) -> nn.Parameter | None:
        """The table of learned positions, if there is one."""
        return self.positions.weight if hasattr(self, "positions") else None

    def forward(self, x: Tensor, tokens: PackedSeqParams) -> Tensor:
        """x [t, h] -> [t, h]."""
        for step in self.steps:
            x = step(x, tokens)
        return x


@dataclass(frozen=True, slots=True)
class Widened:
    """Makes the residual stream as wide as it stays."""

    dtype: torch.dtype

    def __call__(self, x: Tensor, tokens: PackedSeqParams) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x.to(self.dtype)


class Scale:
    """Multiplies by a number, rounded to the dtype of activations first, as published weights
    expect."""

    def __init__(self, factor: float, dtype: torch.dtype) -> None:
        self.factor = torch.tensor(factor, dtype=dtype).item()

    def __call__(self, x: Tensor, tokens: PackedSeqParams) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x * self.factor
