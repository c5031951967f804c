"""Tensor and sequence parallelism: the layers that cut their weights over a group, and the ways in
and out of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial as with_arguments
from typing import Protocol

import torch
from torch import Tensor, nn

from megalith.kernels.best_token import best_tokens
from megalith.kernels.cross_entropy import (
    AS_THEY_ARE,
    Readout,
    linear_cross_entropy,
    recomputed_cross_entropy,
    recomputed_measures,
    token_losses,
)
from megalith.kernels.embedding import embedding
from megalith.kernels.experts import Matrix
from megalith.kernels.grouped_linear import GroupedSink
from megalith.kernels.linear import linear
from megalith.kernels.rebuilt import Input, rebuilt, value_of
from megalith.kernels.watched_loss import WatchedLoss
from megalith.parallel.autograd import enter, gather, gathered_again, leave, partial, reduce_scatter
from megalith.parallel.group import Group
from megalith.parallel.overlap import Border, entered_linear, left_linear
from megalith.parallel.rings import (
    MESSAGES,
    Product,
    RingProducts,
    Started,
    start_gather,
    start_scatter,
    start_sum,
)
from megalith.plan.shards import Shard, split_evenly


@dataclass(frozen=True, slots=True)
class Init:
    """How a parameter starts: normal or uniform with standard deviation `std`, plus `offset`;
    rows beyond `rows` are zero."""

    std: float
    offset: float = 0.0
    rows: int | None = None
    uniform: bool = False


ZEROS, ONES = Init(std=0.0), Init(std=0.0, offset=1.0)


@dataclass(frozen=True, slots=True)
class Declared:
    """What a layer says of one parameter: its slice and its first value."""

    shard: Shard
    init: Init


class Region(Protocol):
    """How tokens come into work that tensor parallelism divides, and leave it."""

    @property
    def group(self) -> Group:
        """The ranks that divide the work."""

    @property
    def invariant(self) -> frozenset[str]:
        """Axes over which parameters used outside the divided work get the whole gradient on every
        rank."""

    def mine(self, values: Tensor) -> Tensor:
        """What is known of all tokens [t, ...] -> of my tokens, outside the divided work."""

    def enter(self, x: Input) -> Input:
        """My tokens -> all tokens [t, h], for work that each rank does differently (R)."""

    def leave(self, x: Tensor) -> Tensor:
        """Partial sums [t, h] (P) -> the sum, for my tokens."""

    @property
    def border(self) -> Border | None:
        """The same with communication behind matmuls; None: one after the other."""

    @property
    def rings(self) -> bool:
        """Whether the way out goes on behind a matmul, too."""


@dataclass(frozen=True, slots=True)
class WholeTokens:
    """Outside divided work every rank has all tokens, and does the same with them (I)."""

    group: Group
    overlap: bool = True
    """Sum dx over ranks while the weights' gradients are computed."""

    @property
    def invariant(self) -> frozenset[str]:
        """Every rank repeats the same work, so gradients there are whole already."""
        return frozenset(self.group.axes)

    def mine(self, values: Tensor) -> Tensor:
        """Everything."""
        return values

    def enter(self, x: Input) -> Input:
        """Nothing forward; backward sums."""
        entered = enter(value_of(x), self.group)
        return entered if isinstance(x, Tensor) else replace(x, value=entered)

    def leave(self, x: Tensor) -> Tensor:
        """Sum forward; nothing backward."""
        return leave(x, self.group)

    @property
    def border(self) -> Border | None:
        """Itself, where there is something to hide."""
        return self if self.overlap and self.group.size > 1 else None

    @property
    def rings(self) -> bool:
        """Whole sums go round no ring."""
        return False

    def entered_product(self, x: Tensor, w: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """Every rank has all tokens."""
        return x, product(x, w)

    def left_product(self, x: Tensor, w: Tensor, product: Product) -> Started:
        """A sum that is waited for later."""
        return start_sum(product(x, w), self.group)

    def start_again(self, x: Tensor) -> Started:
        """They are here."""
        return Started(x)


@dataclass(frozen=True, slots=True)
class SplitTokens:
    """Sequence parallel: outside divided work each rank has its own part of the tokens (V), t / tp
    of them.

    Only a rank's own part is kept for backward, which gathers the tokens again: one all-gather for
    t·h values less. Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """

    group: Group
    overlap: bool = True
    """Communicate in backward behind the matmuls for dx and for the weights."""

    rings: bool = False
    """Communicate step by step around a ring, in forward, too, each step behind a part of a
    matmul."""

    products: RingProducts = MESSAGES
    """How a ring's steps and matmuls are computed."""

    @property
    def invariant(self) -> frozenset[str]:
        """Ranks see different tokens, so their gradients are parts of a sum."""
        return frozenset()

    def mine(self, values: Tensor) -> Tensor:
        """My part, one of equal parts in the order of ranks."""
        count = values.shape[0] // self.group.size
        return values.narrow(0, self.group.rank * count, count)

    def enter(self, x: Input) -> Input:
        """All-gather forward; reduce-scatter backward."""
        whole = gather(value_of(x), self.group)
        return rebuilt(x).then(whole, with_arguments(gathered_again, group=self.group))

    def leave(self, x: Tensor) -> Tensor:
        """Reduce-scatter forward; all-gather backward."""
        return reduce_scatter(x, self.group)

    @property
    def border(self) -> Border | None:
        """Itself, where there is something to hide."""
        return self if self.overlap and self.group.size > 1 else None

    def entered_product(self, x: Tensor, w: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """All tokens, gathered at once or part by part, and their product."""
        if self.rings:
            return self.products.gathered(x, w, self.group, product)
        whole = start_gather(x, self.group).wait()
        return whole, product(whole, w)

    def left_product(self, x: Tensor, w: Tensor, product: Product) -> Started:
        """Its sum for my tokens, taken at once or part by part."""
        if self.rings:
            return Started(self.products.scattered(x, w, self.group, product))
        return start_scatter(product(x, w), self.group)

    def start_again(self, x: Tensor) -> Started:
        """All-gather once more."""
        return start_gather(x, self.group)


def declare(module: nn.Module, name: str, declared: Declared, *, dtype: torch.dtype) -> None:
    """Give `module` the parameter `name`, without memory yet, and note its slice in
    `module.declared`."""
    notes: dict[str, Declared] = module.__dict__.setdefault("declared", {})
    notes[name] = declared
    module.register_parameter(
        name, nn.Parameter(torch.empty(declared.shard.matrix_shape, dtype=dtype, device="meta"))
    )


class ColumnLinear(nn.Module):
    """`y = x @ W.T` with the output features of `W` split over the region's group; W may be several
    matrices.

    x [t, i], as the region has it -> y [t, f_tp], my slice of every matrix's features, one matrix
    after the other. Backward sums dx over the group, because every rank used the same x. Source:
    Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    def __init__(
        self,
        weights: Sequence[Declared],
        biases: Sequence[Declared],
        region: Region,
        *,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.region = region
        self.sink: GroupedSink | None = None
        self.weight_names = [_attribute(weight) for weight in weights]
        self.bias_names = [_attribute(bias) for bias in biases]
        for declared in (*weights, *biases):
            declare(self, _attribute(declared), declared, dtype=dtype)

    def forward(self, x: Input) -> Tensor:
        """x [t, i] -> [t, f_tp]."""
        border = self.region.border
        if border is None:
            y = linear(self.region.enter(x), self.sunk(), sink=self.sink)
        else:
            y = entered_linear(x, self.sunk(), border, sink=self.sink)
        if self.bias_names:
            y = y + torch.cat([getattr(self, name) for name in self.bias_names])
        return y

    def sunk(self) -> list[nn.Parameter]:
        """The parameters whose gradient goes to `sink`, as the rows of one matrix."""
        return [getattr(self, name) for name in self.weight_names]


class RowLinear(nn.Module):
    """`y = x @ W.T + b` with the input features of `W` split over the region's group.

    x [t, i_tp], my slice of the features -> y [t, o] as the region has tokens; the bias is added
    once, after the sum.
    """

    def __init__(
        self, weight: Declared, bias: Declared | None, region: Region, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.region = region
        self.sink: GroupedSink | None = None
        self.weight_name, self.bias_name = (
            _attribute(weight),
            None if bias is None else _attribute(bias),
        )
        for declared in (weight, bias):
            if declared is not None:
                declare(self, _attribute(declared), declared, dtype=dtype)

    def forward(self, x: Input) -> Tensor:
        """x [t, i_tp] -> [t, o]."""
        border = self.region.border
        if border is None or not self.region.rings:
            y = self.region.leave(
                partial(linear(x, self.sunk(), sink=self.sink), self.region.group)
            )
        else:
            y = left_linear(x, self.sunk(), border, sink=self.sink)
        return y if self.bias_name is None else y + getattr(self, self.bias_name)

    def sunk(self) -> list[nn.Parameter]:
        """The parameter whose gradient goes to `sink`."""
        return [getattr(self, self.weight_name)]


class WholeLinear(nn.Module):
    """`y = x @ W.T` with all of `W` on every rank: x [t, i] as the region has it -> y [t, o], of
    the same tokens.

    Ranks that have all tokens repeat each other's work, and the gradient is whole on each; those
    that have parts of the tokens sum it.
    """

    def __init__(self, weight: Declared, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.sink: GroupedSink | None = None
        self.weight_name = _attribute(weight)
        declare(self, self.weight_name, weight, dtype=dtype)

    def forward(self, x: Input) -> Tensor:
        """x [t, i] -> [t, o]."""
        return linear(x, self.sunk(), sink=self.sink)

    def sunk(self) -> list[nn.Parameter]:
        """The parameter whose gradient goes to `sink`."""
        return [getattr(self, self.weight_name)]


class VocabEmbedding(nn.Module):
    """Token numbers to vectors, with the table's rows split over the region's group.

    ids [t], the same on every rank of the group -> [t, h] as the region has tokens.
    """

    weight: nn.Parameter

    def __init__(
        self,
        weight: Declared,
        region: Region,
        *,
        dtype: torch.dtype,
        tied: nn.Parameter | None = None,
    ) -> None:
        """`tied`: the parameter, where another layer has it already."""
        super().__init__()
        self.region = region
        self.sink: GroupedSink | None = None
        self.first_row = weight.shard.box[0][0]
        if tied is None:
            declare(self, "weight", weight, dtype=dtype)
        else:
            self.register_parameter("weight", tied)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [t] -> [t, h]."""
        rows = embedding(ids, self.weight, first_row=self.first_row, sink=self.sink)
        return self.region.leave(partial(rows, self.region.group))

    def sunk(self) -> list[nn.Parameter]:
        """The parameter whose gradient goes to `sink`."""
        return [self.weight]


class VocabHead(nn.Module):
    """Scores of every token of the vocabulary, with the vocabulary split over the region's group;
    ends in the loss.

    Full logits are never gathered in training. A tied head is given the embedding's parameter.
    """

    weight: nn.Parameter

    def __init__(
        self,
        weight: Declared,
        region: Region,
        *,
        vocab_size: int,
        tied: nn.Parameter | None,
        dtype: torch.dtype,
        readout: Readout = AS_THEY_ARE,
    ) -> None:
        """`readout`: what becomes of the products of hidden states and vocabulary before they are
        scores."""
        super().__init__()
        self.region, self.readout, self.table = region, readout, weight
        self.summed_loss: Callable[..., Tensor] = linear_cross_entropy
        """What is minimised."""
        self.judged_loss: Callable[..., Tensor] = linear_cross_entropy
        """-log p(label), whatever is minimised."""
        self.single_losses = token_losses
        self.sink: GroupedSink | None = None
        self.vocab_size = vocab_size
        self.first_row = weight.shard.box[0][0]
        self.row_sizes = split_evenly(weight.shard.shape[0], region.group.size)
        if tied is None:
            declare(self, "weight", weight, dtype=dtype)
        else:
            self.register_parameter("weight", tied)

    @property
    def reads_table_again(self) -> bool:
        """Whether the backward of `loss` reads the table: that of its plain definition does, and
        one that computes logits again."""
        held: Callable[..., object] = self.summed_loss
        words: dict[str, object] = {}
        while isinstance(held, WatchedLoss | with_arguments):
            words |= held.keywords if isinstance(held, with_arguments) else {}
            held = held.func if isinstance(held, with_arguments) else held.compute
        return (
            held in (recomputed_cross_entropy, recomputed_measures)
            or words.get("kernel") == "reference"
        )

    def again(self) -> "VocabHead":
        """The same head for one more use in a forward; engines count the gradients of each use."""
        return VocabHead(
            self.table,
            self.region,
            vocab_size=self.vocab_size,
            tied=self.weight,
            dtype=self.weight.dtype,
            readout=self.readout,
        )

    def loss(self, x: Tensor, labels: Tensor, *, judged: bool = False) -> Tensor:
        """Sum of -log p(label) over labels that are not negative: x [t, h] as the region has it,
        labels [t] -> scalar.

        The same on every rank of the group (I). Unless `judged`, with what else is minimised: see
        `choose_losses`.
        """
        return (self.judged_loss if judged else self.summed_loss)(
            value_of(self.region.enter(x)),
            self.weight,
            labels,
            vocab=self.region.group,
            first_row=self.first_row,
            vocab_size=self.vocab_size,
            readout=self.readout,
            sink=self.sink,
        )

    def token_losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """-log p(label) of each token, 0 where the label is negative: -> [t] (I). Recomputes logits
        in backward."""
        return self.single_losses(
            value_of(self.region.enter(x)),
            self.weight,
            labels,
            vocab=self.region.group,
            first_row=self.first_row,
            vocab_size=self.vocab_size,
            readout=self.readout,
            sink=self.sink,
        )

    def best(self, x: Tensor) -> Tensor:
        """The token that scores highest after each: x [t, h] as the region has it -> int64 [t] (I),
        no gradient."""
        return best_tokens(
            value_of(self.region.enter(x)),
            self.weight,
            vocab=self.region.group,
            first_row=self.first_row,
            vocab_size=self.vocab_size,
        )

    def logits(self, x: Tensor) -> Tensor:
        """x [t, h] on every rank -> [t, vocab_size] on every rank; for sampling, without
        gradient."""
        part = self.readout.scores(linear(x, self.sunk())).T.contiguous()
        return gather(part, self.region.group, sizes=self.row_sizes).T[:, : self.vocab_size]

    def sunk(self) -> list[nn.Parameter]:
        """The parameter whose gradient goes to `sink`."""
        return [self.weight]


def heads_of(models: Iterable[nn.Module]) -> Iterator[VocabHead]:
    """Every head: the model's, and one for each depth that predicts further ahead."""
    return (
        module for model in models for module in model.modules() if isinstance(module, VocabHead)
    )


def choose_losses(models: Iterable[nn.Module], choose: Callable[[], Callable[..., Tensor]]) -> None:
    """Let every head minimise what `choose` makes for it."""
    for head in heads_of(models):
        head.summed_loss = choose()


class ExpertMatrix(nn.Module):
    """A matrix of every expert of this rank, [e o, i], and a bias of each, [e o];
    kernels/experts.py multiplies them.

    What ranks divide, experts or the features of each, is for the shards to say and for others to
    exchange.
    """

    def __init__(self, weight: Declared, bias: Declared | None, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.sink: GroupedSink | None = None
        self.weight_name, self.bias_name = (
            _attribute(weight),
            None if bias is None else _attribute(bias),
        )
        for declared in (weight, bias):
            if declared is not None:
                declare(self, _attribute(declared), declared, dtype=dtype)

    def forward(self) -> Matrix:
        """Weight, bias and where the weight's gradient goes."""
        bias = None if self.bias_name is None else getattr(self, self.bias_name)
        return Matrix(getattr(self, self.weight_name), bias, self.sink)

    def sunk(self) -> list[nn.Parameter]:
        """The parameter whose gradient goes to `sink`."""
        return [getattr(self, self.weight_name)]


TensorParallel = ColumnLinear | RowLinear | WholeLinear | ExpertMatrix | VocabEmbedding | VocabHead


def _attribute(declared: Declared) -> str:
    return declared.shard.name.rsplit(".", 1)[1]
