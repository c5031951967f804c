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
    LogitTransform,
    linear_cross_entropy,
    recomputed_cross_entropy,
    recomputed_measures,
    token_losses,
)
from megalith.kernels.embedding import embedding
from megalith.kernels.experts import Matrix
from megalith.kernels.grouped_linear import GroupedGradAccumulator
from megalith.kernels.linear import linear
from megalith.kernels.rebuilt import LayerInput, as_recomputed, output_tensor
from megalith.kernels.watched_loss import LossWithLogitStats
from megalith.parallel.autograd import (
    all_gather,
    copy_to_tp,
    mark_partial,
    reduce_from_tp,
    reduce_scatter,
    regather,
)
from megalith.parallel.group import Group
from megalith.parallel.overlap import OverlappedTPComm, all_gather_linear, linear_reduce_scatter
from megalith.parallel.rings import (
    RING_EXCHANGE,
    CollectiveMatmul,
    Product,
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
class ParameterSpec:
    """What a layer says of one parameter: its slice and its first value."""

    shard: Shard
    init: Init


class TPComm(Protocol):
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

    def prepare_input(self, x: LayerInput) -> LayerInput:
        """My tokens -> all tokens [t, h], for work that each rank does differently (R)."""

    def reduce_output(self, x: Tensor) -> Tensor:
        """MarkPartial sums [t, h] (P) -> the sum, for my tokens."""

    @property
    def overlapped(self) -> OverlappedTPComm | None:
        """The same with communication behind matmuls; None: one after the other."""

    @property
    def tp_comm_overlap(self) -> bool:
        """Whether the way out goes on behind a matmul, too."""


@dataclass(frozen=True, slots=True)
class TensorParallelComm:
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

    def prepare_input(self, x: LayerInput) -> LayerInput:
        """Nothing forward; backward sums."""
        entered = copy_to_tp(output_tensor(x), self.group)
        return entered if isinstance(x, Tensor) else replace(x, value=entered)

    def reduce_output(self, x: Tensor) -> Tensor:
        """Sum forward; nothing backward."""
        return reduce_from_tp(x, self.group)

    @property
    def overlapped(self) -> OverlappedTPComm | None:
        """Itself, where there is something to hide."""
        return self if self.overlap and self.group.size > 1 else None

    @property
    def tp_comm_overlap(self) -> bool:
        """Whole sums go round no ring."""
        return False

    def all_gather_matmul(self, x: Tensor, w: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """Every rank has all tokens."""
        return x, product(x, w)

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor, product: Product) -> Started:
        """A sum that is waited for later."""
        return start_sum(product(x, w), self.group)

    def start_regather(self, x: Tensor) -> Started:
        """They are here."""
        return Started(x)


@dataclass(frozen=True, slots=True)
class SequenceParallelComm:
    """Sequence parallel: outside divided work each rank has its own part of the tokens (V), t / tp
    of them.

    Only a rank's own part is kept for backward, which gathers the tokens again: one all-gather for
    t·h values less. Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """

    group: Group
    overlap: bool = True
    """Communicate in backward behind the matmuls for dx and for the weights."""

    tp_comm_overlap: bool = False
    """Communicate step by step around a ring, in forward, too, each step behind a part of a
    matmul."""

    products: CollectiveMatmul = RING_EXCHANGE
    """How a ring's steps and matmuls are computed."""

    @property
    def invariant(self) -> frozenset[str]:
        """Ranks see different tokens, so their gradients are parts of a sum."""
        return frozenset()

    def mine(self, values: Tensor) -> Tensor:
        """My part, one of equal parts in the order of ranks."""
        count = values.shape[0] // self.group.size
        return values.narrow(0, self.group.rank * count, count)

    def prepare_input(self, x: LayerInput) -> LayerInput:
        """All-gather forward; reduce-scatter backward."""
        whole = all_gather(output_tensor(x), self.group)
        return as_recomputed(x).then(whole, with_arguments(regather, group=self.group))

    def reduce_output(self, x: Tensor) -> Tensor:
        """Reduce-scatter forward; all-gather backward."""
        return reduce_scatter(x, self.group)

    @property
    def overlapped(self) -> OverlappedTPComm | None:
        """Itself, where there is something to hide."""
        return self if self.overlap and self.group.size > 1 else None

    def all_gather_matmul(self, x: Tensor, w: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """All tokens, gathered at once or part by part, and their product."""
        if self.tp_comm_overlap:
            return self.products.gathered(x, w, self.group, product)
        whole = start_gather(x, self.group).wait()
        return whole, product(whole, w)

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor, product: Product) -> Started:
        """Its sum for my tokens, taken at once or part by part."""
        if self.tp_comm_overlap:
            return Started(self.products.scattered(x, w, self.group, product))
        return start_scatter(product(x, w), self.group)

    def start_regather(self, x: Tensor) -> Started:
        """All-gather once more."""
        return start_gather(x, self.group)


def register_param(
    module: nn.Module, name: str, declared: ParameterSpec, *, dtype: torch.dtype
) -> None:
    """Give `module` the parameter `name`, without memory yet, and note its slice in
    `module.declared`."""
    notes: dict[str, ParameterSpec] = module.__dict__.setdefault("declared", {})
    notes[name] = declared
    module.register_parameter(
        name, nn.Parameter(torch.empty(declared.shard.matrix_shape, dtype=dtype, device="meta"))
    )


class ColumnLinear(nn.Module):
    """`y = x @ W.T` with the output features of `W` split over the tensor-parallel group; W may be
    several matrices.

    x [t, i], in the layout of `tp_comm` -> y [t, f_tp], my slice of every matrix's features, one
    matrix after the other. Backward sums dx over the group, because every rank used the same x.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    def __init__(
        self,
        weights: Sequence[ParameterSpec],
        biases: Sequence[ParameterSpec],
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.tp_comm = tp_comm
        self.grad_accumulator: GroupedGradAccumulator | None = None
        self.weight_names = [_attribute(weight) for weight in weights]
        self.bias_names = [_attribute(bias) for bias in biases]
        for declared in (*weights, *biases):
            register_param(self, _attribute(declared), declared, dtype=dtype)

    def forward(self, x: LayerInput) -> Tensor:
        """x [t, i] -> [t, f_tp]."""
        overlapped = self.tp_comm.overlapped
        if overlapped is None:
            y = linear(
                self.tp_comm.prepare_input(x),
                self.accumulated_parameters(),
                grad_accumulator=self.grad_accumulator,
            )
        else:
            y = all_gather_linear(
                x, self.accumulated_parameters(), overlapped, grad_accumulator=self.grad_accumulator
            )
        if self.bias_names:
            y = y + torch.cat([getattr(self, name) for name in self.bias_names])
        return y

    def accumulated_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradient goes to `grad_accumulator`, as the rows of one matrix."""
        return [getattr(self, name) for name in self.weight_names]


class RowLinear(nn.Module):
    """`y = x @ W.T + b` with the input features of `W` split over the tensor-parallel group.

    x [t, i_tp], my slice of the features -> y [t, o] in the layout of `tp_comm`; the bias is added
    once, after the sum.
    """

    def __init__(
        self,
        weight: ParameterSpec,
        bias: ParameterSpec | None,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.tp_comm = tp_comm
        self.grad_accumulator: GroupedGradAccumulator | None = None
        self.weight_name, self.bias_name = (
            _attribute(weight),
            None if bias is None else _attribute(bias),
        )
        for declared in (weight, bias):
            if declared is not None:
                register_param(self, _attribute(declared), declared, dtype=dtype)

    def forward(self, x: LayerInput) -> Tensor:
        """x [t, i_tp] -> [t, o]."""
        overlapped = self.tp_comm.overlapped
        if overlapped is None or not self.tp_comm.tp_comm_overlap:
            y = self.tp_comm.reduce_output(
                mark_partial(
                    linear(
                        x, self.accumulated_parameters(), grad_accumulator=self.grad_accumulator
                    ),
                    self.tp_comm.group,
                )
            )
        else:
            y = linear_reduce_scatter(
                x, self.accumulated_parameters(), overlapped, grad_accumulator=self.grad_accumulator
            )
        return y if self.bias_name is None else y + getattr(self, self.bias_name)

    def accumulated_parameters(self) -> list[nn.Parameter]:
        """The parameter whose gradient goes to `grad_accumulator`."""
        return [getattr(self, self.weight_name)]


class WholeLinear(nn.Module):
    """`y = x @ W.T` with all of `W` on every rank: x [t, i] in the layout of `tp_comm` -> y [t, o],
    of the same tokens.

    Ranks that have all tokens repeat each other's work, and the gradient is whole on each; those
    that have parts of the tokens sum it.
    """

    def __init__(self, weight: ParameterSpec, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.grad_accumulator: GroupedGradAccumulator | None = None
        self.weight_name = _attribute(weight)
        register_param(self, self.weight_name, weight, dtype=dtype)

    def forward(self, x: LayerInput) -> Tensor:
        """x [t, i] -> [t, o]."""
        return linear(x, self.accumulated_parameters(), grad_accumulator=self.grad_accumulator)

    def accumulated_parameters(self) -> list[nn.Parameter]:
        """The parameter whose gradient goes to `grad_accumulator`."""
        return [getattr(self, self.weight_name)]


class VocabEmbedding(nn.Module):
    """Token numbers to vectors, with the table's rows split over the tensor-parallel group.

    ids [t], the same on every rank of the group -> [t, h] in the layout of `tp_comm`.
    """

    weight: nn.Parameter

    def __init__(
        self,
        weight: ParameterSpec,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        tied: nn.Parameter | None = None,
    ) -> None:
        """`tied`: the parameter, where another layer has it already."""
        super().__init__()
        self.tp_comm = tp_comm
        self.grad_accumulator: GroupedGradAccumulator | None = None
        self.first_row = weight.shard.box[0][0]
        if tied is None:
            register_param(self, "weight", weight, dtype=dtype)
        else:
            self.register_parameter("weight", tied)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [t] -> [t, h]."""
        rows = embedding(
            ids, self.weight, first_row=self.first_row, grad_accumulator=self.grad_accumulator
        )
        return self.tp_comm.reduce_output(mark_partial(rows, self.tp_comm.group))

    def accumulated_parameters(self) -> list[nn.Parameter]:
        """The parameter whose gradient goes to `grad_accumulator`."""
        return [self.weight]


class VocabHead(nn.Module):
    """Scores of every token of the vocabulary, with the vocabulary split over the tensor-parallel
    group; ends in the loss.

    Full logits are never gathered in training. A tied head is given the embedding's parameter.
    """

    weight: nn.Parameter

    def __init__(
        self,
        weight: ParameterSpec,
        tp_comm: TPComm,
        *,
        vocab_size: int,
        tied: nn.Parameter | None,
        dtype: torch.dtype,
        logit_transform: LogitTransform = AS_THEY_ARE,
    ) -> None:
        """`logit_transform`: what becomes of the products of hidden states and vocabulary before
        they are scores."""
        super().__init__()
        self.tp_comm, self.logit_transform, self.table = tp_comm, logit_transform, weight
        self.summed_loss: Callable[..., Tensor] = linear_cross_entropy
        """What is minimized."""
        self.eval_loss: Callable[..., Tensor] = linear_cross_entropy
        """-log p(label), whatever is minimized."""
        self.single_losses = token_losses
        self.grad_accumulator: GroupedGradAccumulator | None = None
        self.vocab_size = vocab_size
        self.first_row = weight.shard.box[0][0]
        self.row_sizes = split_evenly(weight.shard.shape[0], tp_comm.group.size)
        if tied is None:
            register_param(self, "weight", weight, dtype=dtype)
        else:
            self.register_parameter("weight", tied)

    @property
    def reads_table_again(self) -> bool:
        """Whether the backward of `loss` reads the table: that of its plain definition does, and
        one that computes logits again."""
        held: Callable[..., object] = self.summed_loss
        words: dict[str, object] = {}
        while isinstance(held, LossWithLogitStats | with_arguments):
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
            self.tp_comm,
            vocab_size=self.vocab_size,
            tied=self.weight,
            dtype=self.weight.dtype,
            logit_transform=self.logit_transform,
        )

    def loss(self, x: Tensor, labels: Tensor, *, evaluating: bool = False) -> Tensor:
        """Sum of -log p(label) over labels that are not negative: x [t, h] in the layout of
        `tp_comm`, labels [t] -> scalar.

        The same on every rank of the group (I). Unless `evaluating`, with what else is minimized:
        see `choose_losses`.
        """
        return (self.eval_loss if evaluating else self.summed_loss)(
            output_tensor(self.tp_comm.prepare_input(x)),
            self.weight,
            labels,
            vocab=self.tp_comm.group,
            first_row=self.first_row,
            vocab_size=self.vocab_size,
            logit_transform=self.logit_transform,
            grad_accumulator=self.grad_accumulator,
        )

    def token_losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """-log p(label) of each token, 0 where the label is negative: -> [t] (I). Recomputes logits
        in backward."""
        return self.single_losses(
            output_tensor(self.tp_comm.prepare_input(x)),
            self.weight,
            labels,
            vocab=self.tp_comm.group,
            first_row=self.first_row,
            vocab_size=self.vocab_size,
            logit_transform=self.logit_transform,
            grad_accumulator=self.grad_accumulator,
        )

    def best(self, x: Tensor) -> Tensor:
        """The token that scores highest after each: x [t, h] in the layout of `tp_comm` -> int64
        [t] (I), no gradient."""
        return best_tokens(
            output_tensor(self.tp_comm.prepare_input(x)),
            self.weight,
            vocab=self.tp_comm.group,
            first_row=self.first_row,
            vocab_size=self.vocab_size,
        )

    def logits(self, x: Tensor) -> Tensor:
        """x [t, h] on every rank -> [t, vocab_size] on every rank; for sampling, without
        gradient."""
        part = self.logit_transform.scores(linear(x, self.accumulated_parameters())).T.contiguous()
        return all_gather(part, self.tp_comm.group, sizes=self.row_sizes).T[:, : self.vocab_size]

    def accumulated_parameters(self) -> list[nn.Parameter]:
        """The parameter whose gradient goes to `grad_accumulator`."""
        return [self.weight]


def heads_of(models: Iterable[nn.Module]) -> Iterator[VocabHead]:
    """Every head: the model's, and one for each MTP depths."""
    return (
        module for model in models for module in model.modules() if isinstance(module, VocabHead)
    )


def choose_losses(models: Iterable[nn.Module], choose: Callable[[], Callable[..., Tensor]]) -> None:
    """Let every head minimize what `choose` makes for it."""
    for head in heads_of(models):
        head.summed_loss = choose()


class ExpertMatrix(nn.Module):
    """A matrix of every expert of this rank, [e o, i], and a bias of each, [e o];
    kernels/experts.py multiplies them.

    What ranks divide, experts or the features of each, is for the shards to say and for others to
    exchange.
    """

    def __init__(
        self, weight: ParameterSpec, bias: ParameterSpec | None, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.grad_accumulator: GroupedGradAccumulator | None = None
        self.weight_name, self.bias_name = (
            _attribute(weight),
            None if bias is None else _attribute(bias),
        )
        for declared in (weight, bias):
            if declared is not None:
                register_param(self, _attribute(declared), declared, dtype=dtype)

    def forward(self) -> Matrix:
        """Weight, bias and where the weight's gradient goes."""
        bias = None if self.bias_name is None else getattr(self, self.bias_name)
        return Matrix(getattr(self, self.weight_name), bias, self.grad_accumulator)

    def accumulated_parameters(self) -> list[nn.Parameter]:
        """The parameter whose gradient goes to `grad_accumulator`."""
        return [getattr(self, self.weight_name)]


TensorParallel = ColumnLinear | RowLinear | WholeLinear | ExpertMatrix | VocabEmbedding | VocabHead


def _attribute(declared: ParameterSpec) -> str:
    return declared.shard.name.rsplit(".", 1)[1]
