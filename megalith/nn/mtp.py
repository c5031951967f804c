"""Multi-token prediction: layers after the last that learn to predict further tokens than the
next.

Depth 1 reads the hidden states that the next token is predicted from and the embedding of that
token, and predicts the token after it; each further depth reads what the one before it gives, and
the token one further on. Tables and head are the model's own, and so are positions: layers turn, or
are biased, by the place of the token that predicts, while a learned place is that of the token
whose embedding it is added to. Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2; the
embedding comes first in what is projected, as in the published weights, where the paper's equation
21 has it last.

In a pipeline all depths are on one stage, which has a copy of the embedding's table. Their losses
are computed where the model's own is, by the same head: where that is another stage, it is handed
the hidden states of every depth.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.parallel import DispatcherName
from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.kernels.attention import attention
from megalith.kernels.rebuilt import output_tensor
from megalith.kernels.tokens import PackedSeqParams
from megalith.nn.block import block_of_layer
from megalith.nn.embedding import InputEmbedding
from megalith.nn.norm import build_norm, stream_dtype
from megalith.parallel.context import Attend
from megalith.parallel.mesh import Mesh
from megalith.parallel.recompute import LayerRunner
from megalith.parallel.tensor import (
    Init,
    ParameterSpec,
    TPComm,
    VocabEmbedding,
    VocabHead,
    WholeLinear,
)
from megalith.plan.shards import Shard

KEEP_ALL = RecomputeConfig()

MTPInputs = Sequence[tuple[Tensor, Tensor]]
"""(ids, labels), each [t], of every depth; of none, where only the next token is of interest."""


class MTPLayer(nn.Module):
    """Hidden states x [t, h] and the token k further on than each, ids [t] -> hidden states for the
    token after that.

    x in the layout of `tp_comm`, ids of all of them -> [t, h] in the layout of `tp_comm`, normed.
    """

    head: VocabHead
    """Only where the stage has the loss."""

    def __init__(
        self,
        depth: int,
        config: ModelConfig,
        mesh: Mesh,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        table: ParameterSpec,
        shared: nn.Parameter | None,
        head: VocabHead | None,
        core: Attend = attention,
        recompute: RecomputeConfig = KEEP_ALL,
        dispatcher: DispatcherName = "alltoall",
        places: nn.Parameter | None = None,
    ) -> None:
        """`depth`: its number; `table`: the embedding's; `shared`: its parameter, where this
        rank has it already, and `places` that of learned positions; `head`: the model's, unless
        another stage has it."""
        super().__init__()
        name, h = f"mtp.{depth}", config.hidden_size
        self.embed = VocabEmbedding(table, tp_comm, dtype=dtype, tied=shared)
        self.input_embedding = InputEmbedding(
            config, tp_comm, dtype=dtype, number=depth + 1, places=places
        )
        self.embed_norm, self.hidden_norm, self.norm = (
            build_norm(f"{name}.{word}", h, config, invariant=tp_comm.invariant, dtype=dtype)
            for word in ("embed_norm", "hidden_norm", "norm")
        )
        project = Shard.full(f"{name}.project", (h, 2 * h), invariant=tp_comm.invariant)
        self.project = WholeLinear(ParameterSpec(project, Init(config.init_std)), dtype=dtype)
        last = config.num_layers - 1
        self.layer = block_of_layer(config, last)(
            f"{name}.layer",
            config,
            mesh,
            tp_comm,
            dtype=dtype,
            index=last,
            number=config.num_layers + depth,
            core=core,
            recompute=recompute,
            dispatcher=dispatcher,
        )
        self.run_layers, self.stream = (
            LayerRunner(recompute, OffloadConfig(), mesh.tp),
            stream_dtype(config, dtype),
        )
        if head is not None:
            self.head = head.again()

    def forward(self, x: Tensor, ids: Tensor, tokens: PackedSeqParams) -> Tensor:
        """x [t, h], ids [t] -> [t, h]."""
        embedded = self.input_embedding(self.embed(ids), tokens)
        both = torch.cat(
            [output_tensor(self.embed_norm(embedded)), output_tensor(self.hidden_norm(x))], dim=-1
        )
        x, _ = self.run_layers([self.layer], self.project(both).to(self.stream), tokens)
        return output_tensor(self.norm(x))


class MTPBlock(nn.Module):
    """All depths, one after the other; none where the model predicts the next token only. Losses
    are computed here only if the stage has the head.

    A module of its own, and no list in the model, so that engines which look for layers take it for
    one part.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        table: ParameterSpec,
        shared: nn.Parameter | None,
        head: VocabHead | None,
        core: Attend = attention,
        recompute: RecomputeConfig = KEEP_ALL,
        dispatcher: DispatcherName = "alltoall",
        places: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for depth in range(config.mtp.num_layers):
            made = MTPLayer(
                depth,
                config,
                mesh,
                tp_comm,
                dtype=dtype,
                table=table,
                shared=shared,
                head=head,
                core=core,
                recompute=recompute,
                dispatcher=dispatcher,
                places=places,
            )
            self.layers.append(made)
            shared, places = made.embed.weight, made.input_embedding.places()

    def states(
        self, x: Tensor, mtp_inputs: MTPInputs, tokens: PackedSeqParams
    ) -> tuple[Tensor, ...]:
        """Hidden states of every depth, each [t, h] as x: those of the model."""
        found = []
        for prediction, (ids, _) in self._each(mtp_inputs):
            x = prediction(x, ids, tokens)
            found.append(x)
        return tuple(found)

    def losses(
        self, hidden: Sequence[Tensor], mtp_inputs: MTPInputs, tokens: PackedSeqParams
    ) -> Iterator[Tensor]:
        """The summed loss of every depth; hidden: the model's hidden states alone."""
        (x,) = hidden
        for prediction, (ids, labels) in self._each(mtp_inputs):
            x = prediction(x, ids, tokens)
            yield prediction.head.loss(x, labels)

    def evaluate(
        self, hidden: Sequence[Tensor], mtp_inputs: MTPInputs, tokens: PackedSeqParams
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Of every depth the summed loss, as `losses`, and where its best token is the label: bool
        [t]."""
        (x,), losses, right = hidden, [], []
        for prediction, (ids, labels) in self._each(mtp_inputs):
            x = prediction(x, ids, tokens)
            losses.append(prediction.head.loss(x, labels, evaluating=True))
            right.append(
                prediction.head.best(x) == labels
            )  # no token is negative, as a missing label is
        return losses, right

    def _each(self, mtp_inputs: MTPInputs) -> Iterator[tuple[MTPLayer, tuple[Tensor, Tensor]]]:
        for prediction, pair in zip(self.layers if mtp_inputs else (), mtp_inputs, strict=True):
            assert isinstance(prediction, MTPLayer)
            yield prediction, pair


class MTPLoss(nn.Module):
    """The losses of depths whose hidden states another stage computes: what `MTPBlock`
    has where both are.

    The head once more for each depth, and no other parameters.
    """

    def __init__(self, depths: int, head: VocabHead) -> None:
        super().__init__()
        self.heads = nn.ModuleList(head.again() for _ in range(depths))

    def losses(
        self, hidden: Sequence[Tensor], mtp_inputs: MTPInputs, tokens: PackedSeqParams
    ) -> Iterator[Tensor]:
        """The summed loss of every depth; hidden: the model's hidden states, and those of every
        depth."""
        for head, x, labels in self._each(hidden, mtp_inputs):
            yield head.loss(x, labels)

    def evaluate(
        self, hidden: Sequence[Tensor], mtp_inputs: MTPInputs, tokens: PackedSeqParams
    ) -> tuple[list[Tensor], list[Tensor]]:
        """As `MTPBlock.evaluate`."""
        each = list(self._each(hidden, mtp_inputs))
        losses = [head.loss(x, labels, evaluating=True) for head, x, labels in each]
        return losses, [head.best(x) == labels for head, x, labels in each]

    def _each(
        self, hidden: Sequence[Tensor], mtp_inputs: MTPInputs
    ) -> Iterator[tuple[VocabHead, Tensor, Tensor]]:
        for head, x, (_, labels) in zip(
            self.heads if mtp_inputs else (), hidden[1:], mtp_inputs, strict=True
        ):
            assert isinstance(head, VocabHead)
            yield head, x, labels


def mtp_acceptance_rate(right: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
    """What of the depths' guesses a reader who knows the text would accept: float64 [depths + 1].

    right: bool [t] of each depth; labels: [t] of each. How often each depth is right; and how many
    depths are so from the first on without a gap, summed over the `complete` tokens. Source:
    Leviathan et al. 2023, arXiv:2211.17192, section 3: a guess counts when all before it were
    right.
    """
    run = torch.stack(list(right)).long().cumprod(0).sum(0)
    return torch.stack([*(one.sum() for one in right), run[complete(labels)].sum()]).double()


def complete(labels: Sequence[Tensor]) -> Tensor:
    """PackedSeqParams that have a label at every depth: bool [t]."""
    return torch.stack([one >= 0 for one in labels]).all(0)
