"""Multi-token prediction: layers after the last that learn to predict tokens further ahead than the
next.

Depth 1 reads the hidden states that the next token is predicted from and the embedding of that
token, and predicts the token after it; each further depth reads what the one before it gives, and
the token one further on. Tables and head are the model's own, and so are positions: layers turn, or
are biased, by the place of the token that predicts, while a learnt place is that of the token whose
embedding it is added to. Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2; the embedding
comes first in what is projected, as in the published weights, where the paper's equation 21 has it
last.

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
from megalith.kernels.rebuilt import value_of
from megalith.kernels.tokens import Tokens
from megalith.nn.block import block_of_layer
from megalith.nn.embedding import Entrance
from megalith.nn.norm import build_norm, stream_dtype
from megalith.parallel.context import Attend
from megalith.parallel.mesh import Mesh
from megalith.parallel.recompute import LayerRunner
from megalith.parallel.tensor import Declared, Init, Region, VocabEmbedding, VocabHead, WholeLinear
from megalith.plan.shards import whole

KEEP_ALL = RecomputeConfig()

Further = Sequence[tuple[Tensor, Tensor]]
"""(ids, labels), each [t], of every depth; of none, where only the next token is of interest."""


class FurtherPrediction(nn.Module):
    """Hidden states x [t, h] and the token k further on than each, ids [t] -> hidden states for the
    token after that.

    x as the region has tokens, ids of all of them -> [t, h] as the region has tokens, normed.
    """

    head: VocabHead
    """Only where the stage has the loss."""

    def __init__(
        self,
        depth: int,
        config: ModelConfig,
        mesh: Mesh,
        region: Region,
        *,
        dtype: torch.dtype,
        table: Declared,
        shared: nn.Parameter | None,
        head: VocabHead | None,
        core: Attend = attention,
        recompute: RecomputeConfig = KEEP_ALL,
        dispatcher: DispatcherName = "exchange",
        places: nn.Parameter | None = None,
    ) -> None:
        """`depth`: its number; `table`: the embedding's; `shared`: its parameter, where this
        rank has it already, and `places` that of learnt positions; `head`: the model's, unless
        another stage has it."""
        super().__init__()
        name, h = f"mtp.{depth}", config.hidden_size
        self.embed = VocabEmbedding(table, region, dtype=dtype, tied=shared)
        self.entrance = Entrance(config, region, dtype=dtype, number=depth + 1, places=places)
        self.embed_norm, self.hidden_norm, self.norm = (
            build_norm(f"{name}.{word}", h, config, invariant=region.invariant, dtype=dtype)
            for word in ("embed_norm", "hidden_norm", "norm")
        )
        project = whole(f"{name}.project", (h, 2 * h), invariant=region.invariant)
        self.project = WholeLinear(Declared(project, Init(config.init_std)), dtype=dtype)
        last = config.num_layers - 1
        self.layer = block_of_layer(config, last)(
            f"{name}.layer",
            config,
            mesh,
            region,
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

    def forward(self, x: Tensor, ids: Tensor, tokens: Tokens) -> Tensor:
        """x [t, h], ids [t] -> [t, h]."""
        embedded = self.entrance(self.embed(ids), tokens)
        both = torch.cat(
            [value_of(self.embed_norm(embedded)), value_of(self.hidden_norm(x))], dim=-1
        )
        x, _ = self.run_layers([self.layer], self.project(both).to(self.stream), tokens)
        return value_of(self.norm(x))


class FurtherPredictions(nn.Module):
    """All depths, one after the other; none where the model predicts the next token only. Losses
    are computed here only if the stage has the head.

    A module of its own, and no list in the model, so that engines which look for layers take it for
    one part.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        region: Region,
        *,
        dtype: torch.dtype,
        table: Declared,
        shared: nn.Parameter | None,
        head: VocabHead | None,
        core: Attend = attention,
        recompute: RecomputeConfig = KEEP_ALL,
        dispatcher: DispatcherName = "exchange",
        places: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.depths = nn.ModuleList()
        for depth in range(config.mtp.depths):
            made = FurtherPrediction(
                depth,
                config,
                mesh,
                region,
                dtype=dtype,
                table=table,
                shared=shared,
                head=head,
                core=core,
                recompute=recompute,
                dispatcher=dispatcher,
                places=places,
            )
            self.depths.append(made)
            shared, places = made.embed.weight, made.entrance.places()

    def states(self, x: Tensor, further: Further, tokens: Tokens) -> tuple[Tensor, ...]:
        """Hidden states of every depth, each [t, h] as x: those of the model."""
        found = []
        for prediction, (ids, _) in self._each(further):
            x = prediction(x, ids, tokens)
            found.append(x)
        return tuple(found)

    def losses(
        self, hidden: Sequence[Tensor], further: Further, tokens: Tokens
    ) -> Iterator[Tensor]:
        """The summed loss of every depth; hidden: the model's hidden states alone."""
        (x,) = hidden
        for prediction, (ids, labels) in self._each(further):
            x = prediction(x, ids, tokens)
            yield prediction.head.loss(x, labels)

    def judged(
        self, hidden: Sequence[Tensor], further: Further, tokens: Tokens
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Of every depth the summed loss, as `losses`, and where its best token is the label: bool
        [t]."""
        (x,), losses, right = hidden, [], []
        for prediction, (ids, labels) in self._each(further):
            x = prediction(x, ids, tokens)
            losses.append(prediction.head.loss(x, labels, judged=True))
            right.append(
                prediction.head.best(x) == labels
            )  # no token is negative, as a missing label is
        return losses, right

    def _each(self, further: Further) -> Iterator[tuple[FurtherPrediction, tuple[Tensor, Tensor]]]:
        for prediction, pair in zip(self.depths if further else (), further, strict=True):
            assert isinstance(prediction, FurtherPrediction)
            yield prediction, pair


class FurtherLosses(nn.Module):
    """The losses of depths whose hidden states another stage computes: what `FurtherPredictions`
    has where both are.

    The head once more for each depth, and no other parameters.
    """

    def __init__(self, depths: int, head: VocabHead) -> None:
        super().__init__()
        self.heads = nn.ModuleList(head.again() for _ in range(depths))

    def losses(
        self, hidden: Sequence[Tensor], further: Further, tokens: Tokens
    ) -> Iterator[Tensor]:
        """The summed loss of every depth; hidden: the model's hidden states, and those of every
        depth."""
        for head, x, labels in self._each(hidden, further):
            yield head.loss(x, labels)

    def judged(
        self, hidden: Sequence[Tensor], further: Further, tokens: Tokens
    ) -> tuple[list[Tensor], list[Tensor]]:
        """As `FurtherPredictions.judged`."""
        each = list(self._each(hidden, further))
        losses = [head.loss(x, labels, judged=True) for head, x, labels in each]
        return losses, [head.best(x) == labels for head, x, labels in each]

    def _each(
        self, hidden: Sequence[Tensor], further: Further
    ) -> Iterator[tuple[VocabHead, Tensor, Tensor]]:
        for head, x, (_, labels) in zip(
            self.heads if further else (), hidden[1:], further, strict=True
        ):
            assert isinstance(head, VocabHead)
            yield head, x, labels


def accepted(right: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
    """What of the depths' guesses a reader who knows the text would accept: float64 [depths + 1].

    right: bool [t] of each depth; labels: [t] of each. How often each depth is right; and how many
    depths are so from the first on without a gap, summed over the `complete` tokens. Source:
    Leviathan et al. 2023, arXiv:2211.17192, section 3: a guess counts when all before it were
    right.
    """
    run = torch.stack(list(right)).long().cumprod(0).sum(0)
    return torch.stack([*(one.sum() for one in right), run[complete(labels)].sum()]).double()


def complete(labels: Sequence[Tensor]) -> Tensor:
    """Tokens that have a label at every depth: bool [t]."""
    return torch.stack([one >= 0 for one in labels]).all(0)
