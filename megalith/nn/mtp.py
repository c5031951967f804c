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

from collections.abc import Iterator, Sequence

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
    VocabParallelHead,
)
from megalith.plan.shards import Shard

MTPInputs = Sequence[tuple[Tensor, Tensor]]
"""(ids, labels), each [t], of every depth; empty if only the next token is predicted."""


class MTPLayer(nn.Module):
    """One MTP depth: hidden states x [t, h] and the ids [t] of the tokens `depth + 1` positions
    later -> hidden states that predict the token after these.

    x and the normalized result [t, h] are in the layout of `tp_comm`; ids are those of all tokens.
    """

    head: VocabParallelHead
    """Only on the stage with the loss."""

    def __init__(
        self,
        depth: int,
        config: ModelConfig,
        context: BuildContext,
        *,
        table: ParameterSpec,
        shared: nn.Parameter | None,
        head: VocabParallelHead | None,
        places: nn.Parameter | None = None,
    ) -> None:
        """`depth`: from 0; `table`: spec of the embedding table; `shared`: its parameter, if this
        rank has it already, and `places` that of learned positions; `head`: the model's output
        head, unless it is on another stage."""
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
        if head is not None:
            self.head = head.share_weight()

    def forward(self, x: Tensor, ids: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h], ids [t] -> [t, h]."""
        embedded = self.input_embedding(self.embed(ids), inputs)
        both = torch.cat([self.embed_norm(embedded), self.hidden_norm(x)], dim=-1)
        x, _ = self.run_layers([self.layer], self.project(both).to(self.stream), inputs)
        return self.norm(x)


class MTPBlock(nn.Module):
    """All MTP depths in sequence; empty without MTP. Losses are computed here only if the stage has
    the output head.

    A separate module instead of a list in the model, so that FSDP and activation checkpointing
    treat it as one unit.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: BuildContext,
        *,
        table: ParameterSpec,
        shared: nn.Parameter | None,
        head: VocabParallelHead | None,
        places: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for depth in range(config.mtp.num_layers):
            made = MTPLayer(
                depth,
                config,
                context,
                table=table,
                shared=shared,
                head=head,
                places=places,
            )
            self.layers.append(made)
            shared, places = made.embed.weight, made.input_embedding.position_table()

    def states(self, x: Tensor, mtp_inputs: MTPInputs, inputs: LayerInputs) -> tuple[Tensor, ...]:
        """Return the hidden states of every depth, each [t, h]; x: those of the model."""
        hidden_states = []
        for prediction, (ids, _) in self._each(mtp_inputs):
            x = prediction(x, ids, inputs)
            hidden_states.append(x)
        return tuple(hidden_states)

    def losses(
        self, hidden: Sequence[Tensor], mtp_inputs: MTPInputs, inputs: LayerInputs
    ) -> Iterator[Tensor]:
        """Yield the summed loss of every depth; hidden: only the model's hidden states."""
        (x,) = hidden
        for prediction, (ids, labels) in self._each(mtp_inputs):
            x = prediction(x, ids, inputs)
            yield prediction.head.loss(x, labels)

    def evaluate(
        self, hidden: Sequence[Tensor], mtp_inputs: MTPInputs, inputs: LayerInputs
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the summed loss of every depth, and where its most likely token is the label: bool
        [t]."""
        (x,), losses, right = hidden, [], []
        for prediction, (ids, labels) in self._each(mtp_inputs):
            x = prediction(x, ids, inputs)
            losses.append(prediction.head.loss(x, labels, evaluating=True))
            # a missing label is negative, so it never matches
            right.append(prediction.head.best(x) == labels)
        return losses, right

    def _each(self, mtp_inputs: MTPInputs) -> Iterator[tuple[MTPLayer, tuple[Tensor, Tensor]]]:
        for prediction, pair in zip(self.layers if mtp_inputs else (), mtp_inputs, strict=True):
            assert isinstance(prediction, MTPLayer)
            yield prediction, pair


class MTPLoss(nn.Module):
    """Losses of MTP depths whose hidden states are computed on another stage; counterpart of
    `MTPBlock.losses`.

    Has the shared output head for each depth, and no other parameters.
    """

    def __init__(self, depths: int, head: VocabParallelHead) -> None:
        super().__init__()
        self.heads = nn.ModuleList(head.share_weight() for _ in range(depths))

    def losses(
        self, hidden: Sequence[Tensor], mtp_inputs: MTPInputs, inputs: LayerInputs
    ) -> Iterator[Tensor]:
        """Yield the summed loss of every depth; hidden: the hidden states of the model and of every
        depth."""
        for head, x, labels in self._each(hidden, mtp_inputs):
            yield head.loss(x, labels)

    def evaluate(
        self, hidden: Sequence[Tensor], mtp_inputs: MTPInputs, inputs: LayerInputs
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Evaluate as `MTPBlock.evaluate`."""
        each = list(self._each(hidden, mtp_inputs))
        losses = [head.loss(x, labels, evaluating=True) for head, x, labels in each]
        return losses, [head.best(x) == labels for head, x, labels in each]

    def _each(
        self, hidden: Sequence[Tensor], mtp_inputs: MTPInputs
    ) -> Iterator[tuple[VocabParallelHead, Tensor, Tensor]]:
        for head, x, (_, labels) in zip(
            self.heads if mtp_inputs else (), hidden[1:], mtp_inputs, strict=True
        ):
            assert isinstance(head, VocabParallelHead)
            yield head, x, labels


def mtp_acceptance_rate(right: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
    """Return how many MTP predictions are accepted: float64 [depths + 1].

    right: bool [t] of each depth; labels: [t] of each. The number of correct tokens of each depth,
    and the number of accepted tokens (correct at all depths up to theirs), summed over the
    `complete` tokens. Source: Leviathan et al. 2023, arXiv:2211.17192, section 3.
    """
    num_accepted = torch.stack(list(right)).long().cumprod(0).sum(0)
    return torch.stack(
        [*(correct.sum() for correct in right), num_accepted[complete(labels)].sum()]
    ).double()


def complete(labels: Sequence[Tensor]) -> Tensor:
    """Return which tokens have a label at every depth: bool [t]."""
    return torch.stack([one >= 0 for one in labels]).all(0)
