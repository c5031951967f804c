"""What becomes of the embeddings before the first layer: a scale, a learnt vector for every place, dropout."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.errors import DataError
from megalith.kernels.embedding import embedding
from megalith.kernels.tokens import Tokens
from megalith.nn.dropout import Step, dropping
from megalith.nn.norm import stream_dtype
from megalith.parallel.tensor import Declared, Init, Region, declare
from megalith.plan.shards import whole


class LearnedPositions(nn.Module):
    """Adds to each token the vector of its place in its document: x [t, h] -> [t, h], as the region has tokens.

    The table [max_seq_len, h] is whole on every rank. Source: Radford et al. 2018; Gehring et al. 2017,
    arXiv:1705.03122.
    """

    weight: nn.Parameter

    def __init__(self, config: ModelConfig, region: Region, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.region = region
        shard = whole("positions.weight", (config.max_seq_len, config.hidden_size), invariant=region.invariant)
        declare(self, "weight", Declared(shard, Init(config.init_std)), dtype=dtype)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [t, h] -> [t, h].

        Raises:
            DataError: a document has more places than the table.
        """
        # Rows that ranks share may end with filler beyond the table, which is given zeros.
        if tokens.context is None and tokens.max_kv > len(self.weight):
            raise DataError(
                f"a document of {tokens.max_kv} tokens with model.positions=learned, which knows {len(self.weight)} "
                f"places. Use documents of at most {len(self.weight)} tokens, or set model.max_seq_len to as many."
            )
        return x + embedding(self.region.mine(tokens.positions), self.weight)


class Entrance(nn.Module):
    """From embeddings to the residual stream: x [t, h] -> [t, h], as the region has tokens."""

    def __init__(self, config: ModelConfig, region: Region, *, dtype: torch.dtype, number: int = 0) -> None:
        """`number`: what dropout knows it by, where a model has several."""
        super().__init__()
        steps: list[Step] = []
        if config.embedding_scale != 1.0:
            steps.append(Scale(config.embedding_scale, dtype))
        if config.positions == "learned":
            self.positions = LearnedPositions(config, region, dtype=dtype)
            steps.append(self.positions)
        if config.fp32_residual:
            steps.append(Widened(stream_dtype(config, dtype)))
        self.steps = (*steps, *dropping("embedding", number, config.dropout.embedding, region))

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [t, h] -> [t, h]."""
        for step in self.steps:
            x = step(x, tokens)
        return x


@dataclass(frozen=True, slots=True)
class Widened:
    """Makes the residual stream as wide as it stays."""

    dtype: torch.dtype

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x.to(self.dtype)


class Scale:
    """Multiplies by a number, rounded to the dtype of activations first, as published weights expect."""

    def __init__(self, factor: float, dtype: torch.dtype) -> None:
        self.factor = torch.tensor(factor, dtype=dtype).item()

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [t, h] -> [t, h]."""
        return x * self.factor
