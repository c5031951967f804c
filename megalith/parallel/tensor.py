"""Tensor parallel and sequence parallel layers, and their communication (`TPComm`)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial as with_arguments
from typing import Protocol

import torch
from torch import Tensor, nn

from megalith.kernels.backend import AUTO, Backends
from megalith.kernels.embedding import embedding
from megalith.kernels.grouped_linear import GroupedGradAccumulator, GroupedMatmulOps, Matrix
from megalith.kernels.linear import (
    PLAIN,
    MatmulOps,
    WeightMatmul,
    derive_recompute,
    linear,
    pass_recompute,
)
from megalith.observe.machine import FORMATS
from megalith.parallel.collectives import (
    PROCESS_GROUP,
    Collectives,
    all_gather_no_grad,
    copy_to_tp,
    mark_partial,
)
from megalith.parallel.cross_entropy import (
    LossWithLogitStats,
    VocabShard,
    greedy_tokens,
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
    token_losses,
)
from megalith.parallel.group import Group
from megalith.parallel.tensor_overlap import (
    CollectiveMatmul,
    PendingCollective,
    Product,
    all_gather_linear,
    linear_reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
    start_token_gather,
)
from megalith.plan.shards import Shard, split_evenly


@dataclass(frozen=True, slots=True)
class Init:
    """Initial distribution of a parameter: normal or uniform with standard deviation `std`, plus
    `offset`; rows from number `rows` on are zero."""

    std: float
    offset: float = 0.0
    rows: int | None = None
    uniform: bool = False


ZEROS, ONES = Init(std=0.0), Init(std=0.0, offset=1.0)


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Shard and initial distribution of one parameter of a layer."""

    shard: Shard
    init: Init
    trained: bool = True
    """Whether it gets a gradient; False: frozen."""


class TPComm(Protocol):
    """Communication before and after tensor-parallel work, alone or together with the first or last
    matmul of that work, with which it may be overlapped."""

    @property
    def group(self) -> Group:
        """The tensor-parallel ranks."""

    @property
    def invariant(self) -> frozenset[str]:
        """Axes over which parameters used outside tensor-parallel work have the complete gradient
        on every rank."""

    @property
    def collectives(self) -> Collectives:
        """Those of forward without overlap."""

    def select_local(self, values: Tensor) -> Tensor:
        """Select this rank's tokens outside tensor-parallel work from values [t, ...] of all
        tokens."""

    def prepare_input(self, x: Tensor, matmul: WeightMatmul | None = None) -> Tensor:
        """Tokens of this rank -> all tokens [t, h], for work that differs between ranks (R); with
        `matmul`, its result for all tokens."""

    def reduce_output(self, x: Tensor, matmul: WeightMatmul | None = None) -> Tensor:
        """Partial sums [t, h] of all tokens, or their `matmul`, whose results are partial sums ->
        their sum, for the tokens of this rank."""


@dataclass(frozen=True, slots=True)
class TensorParallelComm:
    """Tensor parallel without sequence parallel: outside tensor-parallel work every rank has all
    tokens and computes the same (I)."""

    group: Group
    overlap: bool = True
    """All-reduce dx while the weight gradients are computed."""

    collectives: Collectives = PROCESS_GROUP
    """Those of forward without overlap."""

    @property
    def invariant(self) -> frozenset[str]:
        """All ranks compute the same, so gradients are complete on each."""
        return frozenset(self.group.axes)

    def select_local(self, values: Tensor) -> Tensor:
        """Return all values."""
        return values

    def prepare_input(self, x: Tensor, matmul: WeightMatmul | None = None) -> Tensor:
        """Identity forward; all-reduce backward, during the matmul for the weight gradients."""
        if matmul is not None and self.overlap and self.group.size > 1:
            return all_gather_linear(x, matmul, self)
        x = pass_recompute(x, copy_to_tp(x, self.group))
        return x if matmul is None else matmul(x)

    def reduce_output(self, x: Tensor, matmul: WeightMatmul | None = None) -> Tensor:
        """All-reduce forward; identity backward."""
        partial_sum = mark_partial(x if matmul is None else matmul(x), self.group)
        return self.collectives.all_reduce(partial_sum, self.group)

    def all_gather_matmul(self, x: Tensor, w: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """Compute the matmul; every rank has all tokens."""
        return x, product(x, w)

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor, product: Product) -> PendingCollective:
        """Compute the matmul and start the all-reduce of its result."""
        return start_all_reduce(product(x, w), self.group)

    def start_regather(self, x: Tensor) -> PendingCollective:
        """Return x: every rank has all tokens."""
        return PendingCollective(x)


@dataclass(frozen=True, slots=True)
class SequenceParallelComm:
    """Sequence parallel: outside tensor-parallel work each rank has its own t / tp tokens (V).

    Only the rank's own tokens are saved for backward, which gathers them again: one more all-gather
    saves t·h values. Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """

    group: Group
    overlap: bool = True
    """Overlap communication in backward with the matmuls for dx and dw."""

    collective_matmul: CollectiveMatmul | None = None
    """Decompose communication, in forward too, each step overlapped with a part of a matmul; None:
    communicate all tokens at once."""

    collectives: Collectives = PROCESS_GROUP
    """Those of forward without overlap."""

    @property
    def invariant(self) -> frozenset[str]:
        """None: ranks have different tokens, so their gradients are partial sums."""
        return frozenset()

    def select_local(self, values: Tensor) -> Tensor:
        """Return this rank's part, one of equal parts in the order of ranks."""
        count = values.shape[0] // self.group.size
        return values.narrow(0, self.group.rank * count, count)

    def prepare_input(self, x: Tensor, matmul: WeightMatmul | None = None) -> Tensor:
        """All-gather forward; reduce-scatter backward."""
        if matmul is not None and self.overlap and self.group.size > 1:
            return all_gather_linear(x, matmul, self)
        gathered = self.collectives.all_gather(x, self.group)
        x = derive_recompute(x, gathered, with_arguments(all_gather_no_grad, group=self.group))
        return x if matmul is None else matmul(x)

    def reduce_output(self, x: Tensor, matmul: WeightMatmul | None = None) -> Tensor:
        """Reduce-scatter forward; all-gather backward."""
        if matmul is not None and self.collective_matmul is not None and self.group.size > 1:
            return linear_reduce_scatter(x, matmul, self)
        partial_sum = mark_partial(x if matmul is None else matmul(x), self.group)
        return self.collectives.reduce_scatter(partial_sum, self.group)

    def all_gather_matmul(self, x: Tensor, w: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """Return all tokens, gathered at once or part by part, and their matmul."""
        if self.collective_matmul is not None:
            return self.collective_matmul.all_gather_matmul(x, w, self.group, product)
        gathered_x = start_token_gather(x, self.group).wait()
        return gathered_x, product(gathered_x, w)

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor, product: Product) -> PendingCollective:
        """Return the reduce-scatter of the matmul, computed at once or part by part."""
        if self.collective_matmul is not None:
            y = self.collective_matmul.matmul_reduce_scatter(x, w, self.group, product)
            return PendingCollective(y)
        return start_reduce_scatter(product(x, w), self.group)

    def start_regather(self, x: Tensor) -> PendingCollective:
        """Start the all-gather of forward once more."""
        return start_token_gather(x, self.group)


def register_param(
    module: nn.Module, name: str, spec: ParameterSpec, *, dtype: torch.dtype
) -> None:
    """Register the parameter `name` of `module` on the meta device, and record its spec, with its
    dtype, in `module.param_specs`."""
    spec = replace(spec, shard=replace(spec.shard, dtype=FORMATS[dtype]))
    specs: dict[str, ParameterSpec] = module.__dict__.setdefault("param_specs", {})
    specs[name] = spec
    empty = torch.empty(spec.shard.matrix_shape, dtype=dtype, device="meta")
    module.register_parameter(name, nn.Parameter(empty, requires_grad=spec.trained))


class ColumnParallelLinear(nn.Module):
    """Linear layer `y = x @ W.T` whose output features are sharded over the tensor-parallel group;
    W may be several matrices.

    x [t, i], in the layout of `tp_comm` -> y [t, f_tp], this rank's slice of each matrix's
    features, one matrix after the other. Backward sums dx over the group, because all ranks used
    the same x. Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    def __init__(
        self,
        weights: Sequence[ParameterSpec],
        biases: Sequence[ParameterSpec],
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        matmul_ops: MatmulOps = PLAIN,
    ) -> None:
        super().__init__()
        self.tp_comm, self.matmul_ops = tp_comm, matmul_ops
        self.grad_accumulator: GroupedGradAccumulator | None = None
        self.weight_names = [_attribute(weight) for weight in weights]
        self.bias_names = [_attribute(bias) for bias in biases]
        for spec in (*weights, *biases):
            register_param(self, _attribute(spec), spec, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, i] -> [t, f_tp]."""
        return self._add_biases(self.tp_comm.prepare_input(x, self._matmul()))

    def project_all_tokens(self, x: Tensor) -> Tensor:
        """x [t, i] of all tokens, such as those of a KV cache, whatever the layout of `tp_comm` ->
        [t, f_tp]. Backward does not sum dx."""
        return self._add_biases(self._matmul()(x))

    def _matmul(self) -> WeightMatmul:
        weights = self.accumulated_parameters()
        return WeightMatmul(weights, self.grad_accumulator, self.matmul_ops)

    def _add_biases(self, y: Tensor) -> Tensor:
        if self.bias_names:
            y = y + torch.cat([getattr(self, name) for name in self.bias_names])
        return y

    def accumulated_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient goes to `grad_accumulator`, as the rows of one
        matrix."""
        return [getattr(self, name) for name in self.weight_names]


class RowParallelLinear(nn.Module):
    """Linear layer `y = x @ W.T + b` whose input features are sharded over the tensor-parallel
    group.

    x [t, i_tp], this rank's slice of the features -> y [t, o] in the layout of `tp_comm`; the bias
    is added once, after the sum.
    """

    def __init__(
        self,
        weight: ParameterSpec,
        bias: ParameterSpec | None,
        tp_comm: TPComm,
        *,
        dtype: torch.dtype,
        matmul_ops: MatmulOps = PLAIN,
    ) -> None:
        super().__init__()
        self.tp_comm, self.matmul_ops = tp_comm, matmul_ops
        self.grad_accumulator: GroupedGradAccumulator | None = None
        self.weight_name, self.bias_name = (
            _attribute(weight),
            None if bias is None else _attribute(bias),
        )
        for spec in (weight, bias):
            if spec is not None:
                register_param(self, _attribute(spec), spec, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, i_tp] -> [t, o]."""
        weights = self.accumulated_parameters()
        matmul = WeightMatmul(weights, self.grad_accumulator, self.matmul_ops)
        y = self.tp_comm.reduce_output(x, matmul)
        return y if self.bias_name is None else y + getattr(self, self.bias_name)

    def accumulated_parameters(self) -> list[nn.Parameter]:
        """Return the parameter whose gradient goes to `grad_accumulator`."""
        return [getattr(self, self.weight_name)]


class ReplicatedLinear(nn.Module):
    """Linear layer `y = x @ W.T` with a replicated weight: x [t, i] in the layout of `tp_comm` -> y
    [t, o], of the same tokens.

    Ranks that have all tokens compute the same, and the gradient is complete on each; under
    sequence parallel the gradient is summed over ranks.
    """

    def __init__(
        self, weight: ParameterSpec, *, dtype: torch.dtype, matmul_ops: MatmulOps = PLAIN
    ) -> None:
        super().__init__()
        self.matmul_ops = matmul_ops
        self.grad_accumulator: GroupedGradAccumulator | None = None
        self.weight_name = _attribute(weight)
        register_param(self, self.weight_name, weight, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, i] -> [t, o]."""
        weights = self.accumulated_parameters()
        return WeightMatmul(weights, self.grad_accumulator, self.matmul_ops)(x)

    def accumulated_parameters(self) -> list[nn.Parameter]:
        """Return the parameter whose gradient goes to `grad_accumulator`."""
        return [getattr(self, self.weight_name)]


class VocabParallelEmbedding(nn.Module):
    """Token embedding whose table rows are sharded over the tensor-parallel group.

    ids [t], equal on all ranks of the group -> [t, h] in the layout of `tp_comm`.
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
        """`tied`: the parameter, if another layer has registered it."""
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
        return self.tp_comm.reduce_output(rows)

    def accumulated_parameters(self) -> list[nn.Parameter]:
        """Return the parameter whose gradient goes to `grad_accumulator`."""
        return [self.weight]


def default_loss(backends: Backends) -> Callable[..., Tensor]:
    """Return the loss of an output head: cross-entropy without options."""
    return backends.bind("cross_entropy", linear_cross_entropy)


class VocabParallelHead(nn.Module):
    """Output layer whose vocabulary is sharded over the tensor-parallel group; computes logits and
    the cross-entropy loss.

    Full logits are never gathered in training. A tied head uses the embedding's parameter.
    """

    weight: nn.Parameter

    def __init__(
        self,
        weight: ParameterSpec,
        tp_comm: TPComm,
        vocab: VocabShard,
        *,
        tied: nn.Parameter | None,
        dtype: torch.dtype,
        build_loss: Callable[[Backends], Callable[..., Tensor]] = default_loss,
        backends: Backends = AUTO,
    ) -> None:
        """`vocab`: the rows of `weight`, without a gradient accumulator; `build_loss`: builds the
        training loss of this head."""
        super().__init__()
        self.tp_comm, self.vocab, self.table = tp_comm, vocab, weight
        self.build_loss, self.backends = build_loss, backends
        self.summed_loss = build_loss(backends)
        """Training loss, summed over tokens."""
        self.eval_loss = default_loss(backends)
        """Evaluation loss, -log p(label), whatever the training loss is."""
        self.single_losses = backends.bind("cross_entropy", token_losses)
        self.grad_accumulator: GroupedGradAccumulator | None = None
        self.max_rows = max(split_evenly(weight.shard.shape[0], tp_comm.group.size))
        """Largest number of rows of a rank."""
        if tied is None:
            register_param(self, "weight", weight, dtype=dtype)
        else:
            self.register_parameter("weight", tied)

    @property
    def vocab_shard(self) -> VocabShard:
        """The local rows of the vocabulary, and how logits are computed from them."""
        return replace(self.vocab, grad_accumulator=self.grad_accumulator)

    @property
    def reads_table_again(self) -> bool:
        """Whether the backward of `loss` reads the table: true for the reference loss, for losses
        that recompute logits and for those of plug-ins."""
        loss_fn: Callable[..., object] = self.summed_loss
        keywords: dict[str, object] = {}
        while isinstance(loss_fn, LossWithLogitStats | with_arguments):
            keywords |= loss_fn.keywords if isinstance(loss_fn, with_arguments) else {}
            loss_fn = loss_fn.func if isinstance(loss_fn, with_arguments) else loss_fn.compute
        saves_gradients = loss_fn in (linear_cross_entropy, linear_cross_entropy_with_stats)
        return not saves_gradients or keywords.get("kernel") == "reference"

    def share_weight(self) -> "VocabParallelHead":
        """Return a head with the same parameter for one more use in a forward pass; data
        parallelism counts the gradients of each use."""
        return VocabParallelHead(
            self.table,
            self.tp_comm,
            self.vocab,
            tied=self.weight,
            dtype=self.weight.dtype,
            build_loss=self.build_loss,
            backends=self.backends,
        )

    def loss(self, x: Tensor, labels: Tensor, *, evaluating: bool = False) -> Tensor:
        """Sum of -log p(label) over labels that are not negative: x [t, h] in the layout of
        `tp_comm`, labels [t] -> scalar.

        Equal on all ranks of the group (I). Unless `evaluating`, includes everything that is
        minimized.
        """
        loss_fn = self.eval_loss if evaluating else self.summed_loss
        return loss_fn(self.tp_comm.prepare_input(x), self.weight, labels, self.vocab_shard)

    def token_losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """-log p(label) of each token, 0 where the label is negative: -> [t] (I). Backward
        recomputes the logits."""
        return self.single_losses(
            self.tp_comm.prepare_input(x), self.weight, labels, self.vocab_shard
        )

    def best(self, x: Tensor) -> Tensor:
        """Return the token with the largest logit after each position: x [t, h] in the layout of
        `tp_comm` -> int64 [t] (I), no gradient."""
        return greedy_tokens(self.tp_comm.prepare_input(x), self.weight, self.vocab_shard)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the local rows of the vocabulary, without padding: x [t, h] on every
        rank -> [t, v_local]; for sampling, without gradient."""
        products = linear(x, self.accumulated_parameters(), matmul_ops=self.vocab.matmul_ops)
        logits = self.vocab.logit_transform.scores(products)
        return logits[:, : max(0, self.vocab.vocab_size - self.vocab.first_row)]

    def accumulated_parameters(self) -> list[nn.Parameter]:
        """Return the parameter whose gradient goes to `grad_accumulator`."""
        return [self.weight]


def iter_vocab_heads(models: Iterable[nn.Module]) -> Iterator[VocabParallelHead]:
    """Return every head: the model's, and one for each MTP depth."""
    return (
        module
        for model in models
        for module in model.modules()
        if isinstance(module, VocabParallelHead)
    )


class ExpertMatrix(nn.Module):
    """A weight matrix of every expert of this rank, [e o, i], with a bias of each, [e o];
    kernels/grouped_linear.py multiplies them.

    The shards determine whether ranks split the experts or the features of each.
    """

    def __init__(
        self,
        weight: ParameterSpec,
        bias: ParameterSpec | None,
        *,
        dtype: torch.dtype,
        matmul_ops: GroupedMatmulOps | None = None,
    ) -> None:
        """`matmul_ops`: unset: the fastest for the rows."""
        super().__init__()
        self.matmul_ops = matmul_ops
        self.grad_accumulator: GroupedGradAccumulator | None = None
        self.weight_name, self.bias_name = (
            _attribute(weight),
            None if bias is None else _attribute(bias),
        )
        for spec in (weight, bias):
            if spec is not None:
                register_param(self, _attribute(spec), spec, dtype=dtype)

    def forward(self) -> Matrix:
        """Return weight, bias, gradient accumulator and matmuls."""
        bias = None if self.bias_name is None else getattr(self, self.bias_name)
        weight = getattr(self, self.weight_name)
        return Matrix(weight, bias, self.grad_accumulator, self.matmul_ops)

    def accumulated_parameters(self) -> list[nn.Parameter]:
        """Return the parameter whose gradient goes to `grad_accumulator`."""
        return [getattr(self, self.weight_name)]


TensorParallel = (
    ColumnParallelLinear
    | RowParallelLinear
    | ReplicatedLinear
    | ExpertMatrix
    | VocabParallelEmbedding
    | VocabParallelHead
)


def _attribute(spec: ParameterSpec) -> str:
    return spec.shard.name.rsplit(".", 1)[1]
