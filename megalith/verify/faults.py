"""Faults that can be planted in the running process, one at a time, to ask which proof refuses it.

A proof that nothing can fail proves nothing. Each fault is a mistake that people make, and changes
the behavior of existing classes until its context ends; nothing here is ever reached without
`planted`.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.config.suggest import did_you_mean
from megalith.data import loader
from megalith.errors import ConfigError
from megalith.kernels import cross_entropy, tokens
from megalith.kernels.dropout import DroppedWeights
from megalith.kernels.embedding import embedding
from megalith.kernels.linear import linear
from megalith.kernels.rebuilt import LayerInput, output_tensor
from megalith.kernels.scores import Scores
from megalith.kernels.tokens import Join, PackedSeqParams, tokens_of_slices
from megalith.models.decoder import Decoder, declared_parameters
from megalith.nn import lora, qk_norm
from megalith.nn.cross_attention import CrossLayerAttention
from megalith.nn.embedding import LearnedPositions
from megalith.nn.mla import LatentAttention
from megalith.nn.moe import balance
from megalith.nn.moe.balance import Balance
from megalith.nn.moe.experts import Experts
from megalith.nn.moe.router import Router, RouterGate
from megalith.nn.norm import RMSNorm
from megalith.optim import adamw, clip
from megalith.parallel import context, data, engine, expert, publish, recompute, tensor
from megalith.parallel.autograd import AsyncAllToAll, mark_partial
from megalith.parallel.group import Group, alone, start_all_reduce_
from megalith.parallel.link import StageLink
from megalith.parallel.mesh import Mesh
from megalith.parallel.offload import Away
from megalith.parallel.pipeline import Pipeline
from megalith.parallel.postpone import WeightGradStore
from megalith.parallel.rings import Started
from megalith.parallel.slices import SliceSum, Works
from megalith.parallel.tensor import (
    ColumnLinear,
    RowLinear,
    SequenceParallelComm,
    TensorParallelComm,
    TPComm,
    VocabEmbedding,
    VocabHead,
)
from megalith.plan.context import KeySpans, Numbers, Slices
from megalith.plan.shards import Shard
from megalith.testing.inject import replaced
from megalith.train import build, experts, loss, step
from megalith.train.loss import normalize_losses_by_labels
from megalith.verify import (
    attention_faults,
    choice_faults,
    expert_faults,
    loss_faults,
    optimizer_faults,
    pipeline_faults,
)

Change = Callable[[Decoder, Mesh], None]
"""What a faulty model does to itself after it was built."""
Proof = Literal["types", "shapes", "numbers"]
Need = Literal[
    "tp",
    "sp",
    "whole tokens",
    "dp",
    "cp",
    "shared heads",
    "bias",
    "uneven masks",
    "pp",
    "tied",
    "chunks",
    "mtp",
    "split backward",
    "zero",
    "replicas",
    "fsdp",
    "recompute",
    "offload",
    "dropout",
    "gather",
    "a2a",
    "documents",
    "rings",
    "zero 2",
    "whole norms",
    "sinks",
    "window",
    "learned positions",
    "latent",
    "adapters",
    "places",
    "experts",
    "biases by distance",
    "ep",
    "etp",
    "capacity",
    "balancing bias",
    "balancing offset",
    "dropped weights",
    "memory",
    "chunks of documents",
    "off by one",
    "z loss",
    "balance over ranks",
    "masks",
    "frozen",
    "groups",
    "own stage",
    "sgd",
]


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake."""

    name: str
    what: str
    """The mistake in one sentence."""

    found_by: Proof
    """`types` and `shapes` are refused by the type check, `numbers` by running ranks in float64."""

    needs: tuple[Need, ...]
    """What a run has to have for it to matter: more than one rank on an axis, tokens split over
    tp or not (`whole tokens`), more tp ranks than key/value heads (`shared heads`), a bias after
    the attention or the MLP, a table that two stages share (`tied`), three chunks per rank, a
    schedule with a W (`split backward`), layers that backward runs again (`recompute`), whose
    activations wait in host memory (`offload`), or are dropped (`dropout`, of attention's
    weights `dropped weights`), or a MTP layer (`further`), two on a
    stage of their own (`own stage`); a kind of exchange over cp other than the ring, packed
    documents, matmuls in rings, gradients that are divided, too (`zero 2`), queries and keys
    that are normed over all heads (`whole norms`), and what else attention and embeddings can
    have; experts, which may be divided (`ep`), have parts (`etp`), or refuse (`capacity`),
    balancing biases or offsets, or a loss of balance over the global batch (`balance over
    ranks`); SGD instead of AdamW (`sgd`)."""

    context: Callable[[], AbstractContextManager[None]]
    """In which it is in place."""

    everywhere: bool = False
    """Whether the one process that ranks are compared with makes the mistake, too."""


def fault_named(name: str) -> Fault:
    """The fault of that name.

    Raises:
        ConfigError: there is none.
    """
    by_name = {fault.name: fault for fault in FAULTS}
    if name not in by_name:
        advice = did_you_mean(name, list(by_name)) or ""
        raise ConfigError(
            f"fault={name}: there is no such fault to plant.{advice} Use one of "
            f"{', '.join(by_name)}."
        )
    return by_name[name]


def planted(name: str | None) -> AbstractContextManager[None]:
    """A context in which the named fault is in place; None: nothing changes.

    Raises:
        ConfigError: there is no such fault.
    """
    return nullcontext() if name is None else fault_named(name).context()


@dataclass(frozen=True, slots=True)
class Detour:
    """A region with its ways replaced."""

    prepare_input: Callable[[LayerInput], LayerInput]
    reduce_output: Callable[[Tensor], Tensor]
    group: Group
    invariant: frozenset[str]
    overlapped: None = None
    tp_comm_overlap: bool = False


# --- faults in the model: they change it right after it was built


def changed_model(change: Change) -> AbstractContextManager[None]:
    """Every `Decoder` built inside is changed by `change`."""
    build = Decoder.__init__

    def build_and_change(self: Decoder, config: Any, mesh: Mesh, **others: Any) -> None:
        build(self, config, mesh, **others)
        change(self, mesh)

    return replaced(Decoder, "__init__", build_and_change)


def _detour(
    layers: nn.Module,
    kind: type[nn.Module],
    *,
    prepare_input: Callable[[LayerInput], LayerInput] | None = None,
    reduce_output: Callable[[Tensor], Tensor] | None = None,
    group: Group | None = None,
) -> None:
    """Send all layers of one kind another way into or out of divided work."""
    for layer in layers.modules():
        if isinstance(layer, kind):
            old: TPComm = layer.tp_comm  # type: ignore[assignment]  # every kind passed here has one
            detour = Detour(
                prepare_input or old.prepare_input,
                reduce_output or old.reduce_output,
                group or old.group,
                old.invariant,
            )
            layer.tp_comm = detour  # type: ignore[assignment]  # it is a plain attribute, where mypy expects a module


def _as_it_is(
    x: Any,
) -> Any:  # Any: it stands for ways in, which take inputs, and for ways out, which take tensors
    return x


def _no_enter(model: Decoder, mesh: Mesh) -> None:
    _detour(model, ColumnLinear, prepare_input=_as_it_is)


def _shared_key_not_entered(model: Decoder, mesh: Mesh) -> None:
    _detour(model, LatentAttention, prepare_input=_as_it_is)


def _no_sum(model: Decoder, mesh: Mesh) -> None:
    _detour(model, RowLinear, reduce_output=_as_it_is)


def _no_second_sum(model: Decoder, mesh: Mesh) -> None:
    _detour(
        model,
        RowLinear,
        reduce_output=functools.partial(_leave_in_forward, model.tp_comm.reduce_output),
    )


def _leave_in_forward(reduce_output: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    in_backward = torch._C._current_graph_task_id() != -1
    return x if in_backward else reduce_output(x)


def _blank(self: Away) -> torch.UntypedStorage:
    return torch.zeros_like(self.host).to(self.device).untyped_storage()


def _embedding_not_summed(model: Decoder, mesh: Mesh) -> None:
    _detour(model, VocabEmbedding, reduce_output=_as_it_is)


def _sum_over_dp(model: Decoder, mesh: Mesh) -> None:
    wrong = (
        SequenceParallelComm(mesh.dp)
        if isinstance(model.tp_comm, SequenceParallelComm)
        else TensorParallelComm(mesh.dp)
    )
    _detour(model, RowLinear, reduce_output=wrong.reduce_output)


def _local_vocabulary(model: Decoder, mesh: Mesh) -> None:
    _detour(model, VocabHead, group=alone(*mesh.tp.axes))


def _call_invariant(model: Decoder, mesh: Mesh, kind: type[nn.Module]) -> None:
    for declared, module, name in list(declared_parameters(model)):
        if isinstance(module, kind):
            shard = replace(declared.shard, invariant=frozenset(mesh.tp.axes))
            module.__dict__["declared"][name] = replace(declared, shard=shard)


def _bias_before_sum(self: RowLinear, x: Tensor) -> Tensor:
    y = mark_partial(
        linear(x, self.accumulated_parameters(), grad_accumulator=self.grad_accumulator),
        self.tp_comm.group,
    )
    return self.tp_comm.reduce_output(
        y if self.bias_name is None else y + getattr(self, self.bias_name)
    )


def _local_mean(
    self: Decoder, ids: Tensor, labels: Tensor, tokens: Any, **received: Any
) -> tuple[Tensor, ...]:
    """Each rank divides by its own number of labels, as if all had as many."""
    own, *mtp_inputs = ORIGINAL_LOSSES(self, ids, labels, tokens, **received)
    return own if labels.is_meta else own * labels.numel() / max(
        1, int((labels >= 0).sum())
    ), *mtp_inputs


def _depths_over_own_labels(
    losses: Sequence[Tensor],
    *,
    num_labels: Sequence[int],
    weight: float,
    mesh: Mesh,
    scale: float = 1.0,
) -> Tensor:
    """Further losses are divided by a rank's part of the labels instead of by the count of all."""
    counts = [num_labels[0], *(count // mesh.dp_cp.size for count in num_labels[1:])]
    return normalize_losses_by_labels(
        losses, num_labels=counts, weight=weight, mesh=mesh, scale=scale
    )


ORIGINAL_LOSSES = Decoder.losses


# --- faults in the sums of gradients


def _without_sum(left_out: Callable[[Shard], bool]) -> AbstractContextManager[None]:
    """Gradients of some shards are not summed over tensor-parallel ranks."""
    right = engine.tensor_axes

    def wrong(shard: Shard) -> tuple[str, ...]:
        return () if left_out(shard) else right(shard)

    return replaced(engine, "tensor_axes", wrong)


def _averaged() -> AbstractContextManager[None]:
    finish = data.BucketedDataParallel.finish

    def wrong(self: data.BucketedDataParallel) -> Sequence[engine.ShardedParam]:
        local_params = finish(self)
        for one in local_params:
            one.gradient.div_(self.mesh.dp.size)
        return local_params

    return replaced(data.BucketedDataParallel, "finish", wrong)


# --- faults in dividing optimizer state and gradients


def _slice_shifted() -> AbstractContextManager[None]:
    right = SliceSum.wait

    def wrong(self: SliceSum) -> Tensor:
        part = right(self)
        return part.copy_(part.roll(1))

    return replaced(SliceSum, "wait", wrong)


def _without_replicas() -> AbstractContextManager[None]:
    def wrong(x: Tensor, group: Group) -> dist.Work | None:
        return None if group.axes == ("dp_replica",) else start_all_reduce_(x, group)

    return replaced(data, "start_all_reduce_", wrong)


def _over_dp_alone(zero: int, mesh: Mesh, grid: str) -> data.Division:
    return data.Division(alone(*engine.SHARD_AXES), mesh.dp)


def _last_microbatch_alone(self: data.BucketedDataParallel, most: int) -> None:
    """What earlier microbatches have added to a slice is gone when the next one's sum arrives."""
    while len(self._sums) > most:
        index = self._sums[0][0] % len(self.plan.buckets)
        first, _ = self._slice(index)
        bucket = self.plan.buckets[index]
        slices = self.divisions["dense"].slices.size
        self.gradients[first : first + (bucket.stop - bucket.start) // slices].zero_()
        ORIGINAL_COMPLETE(self, len(self._sums) - 1)


ORIGINAL_COMPLETE = data.BucketedDataParallel._complete


def _fsdp_takes_means() -> AbstractContextManager[None]:
    from megalith.parallel import (
        fsdp,
    )  # here, because torch's part of it takes half a second to load

    return replaced(fsdp, "DIVIDE_BY", 2.0)


# --- faults in sharing tokens over context-parallel ranks


def _own_keys_for_all(x: Tensor, group: Group) -> Started:
    return Started(x.clone())


def _gradients_stay(sums: Tensor, travelling: Started | None, group: Group) -> Started:
    return Started(sums if travelling is None else sums + travelling.x, None)


def _positions_of_slices(*arguments: Any, **others: Any) -> PackedSeqParams:
    tokens = ORIGINAL_SLICES(*arguments, **others)
    return replace(
        tokens, position_ids=torch.arange(tokens.num_tokens, device=tokens.position_ids.device)
    )


def _places_of_the_first_slice(tokens: PackedSeqParams, places: Numbers) -> PackedSeqParams:
    return replace(tokens, position_ids=torch.from_numpy(places[:, : tokens.num_tokens]))


def _late_chunk_first(self: Slices, rank: int) -> Numbers:
    read = ORIGINAL_AS_READ(self, rank)
    return np.concatenate([np.roll(row, len(row) // 2) for row in np.split(read, self.repeats)])


def _heads_of_the_next_rank(out: Tensor, group: Group, join: Join) -> Tensor:
    y = ORIGINAL_TOKENS_FOR_HEADS(out, group, join)
    return y.roll(out.shape[1], dims=1)


def _no_window(
    self: tokens.Context, near: int, *, causal: bool = True, **windows: Any
) -> tuple[KeySpans, ...]:
    return ORIGINAL_SPANS_OF_GROUPS(self, near, causal=causal)


def _numbers_of_each_rank_alone(self: tokens.Context, near: int) -> tuple[Tensor, ...]:
    return tuple(
        torch.arange(len(part), device=part.device)
        for part in ORIGINAL_NUMBERS_OF_GROUPS(self, near)
    )


ORIGINAL_NUMBERS_OF_GROUPS = tokens.Context.numbers_of_groups
ORIGINAL_TOKENS_FOR_HEADS = context.tokens_for_heads
ORIGINAL_SPANS_OF_GROUPS = tokens.Context.spans_of_groups


ORIGINAL_SLICES, ORIGINAL_AS_READ = tokens_of_slices, Slices.as_read


def _rows_from_zero(batch: loader.Batch, rows: Sequence[int], *, seed: int) -> loader.Batch:
    return ORIGINAL_WITH_DROPOUT(batch, range(len(rows)), seed=seed)


ORIGINAL_WITH_DROPOUT = loader.with_dropout


def _numbers_of_queries(
    tokens: PackedSeqParams, scores: Scores, near: int
) -> list[DroppedWeights] | None:
    found = ORIGINAL_DROPPED(tokens, scores, near)
    return found and [replace(one, keys=one.queries) for one in found]


ORIGINAL_DROPPED = context.dropped_of_groups


# --- faults in rings, in what is computed again, and in layers of other kinds


def _parts_of_the_next_rank(
    self: SequenceParallelComm, x: Tensor, w: Tensor, product: Any
) -> tuple[Tensor, Tensor]:
    whole, y = ORIGINAL_ENTERED(self, x, w, product)
    return whole.roll(len(x), dims=0), y.roll(len(x), dims=0)


def _sums_for_the_next_rank(
    self: SequenceParallelComm, x: Tensor, w: Tensor, product: Any
) -> Started:
    return ORIGINAL_LEFT(self, x.roll(len(x) // self.group.size, dims=0), w, product)


ORIGINAL_ENTERED, ORIGINAL_LEFT = (
    SequenceParallelComm.all_gather_matmul,
    SequenceParallelComm.matmul_reduce_scatter,
)


class _Stale:
    """Regions whose second pass reads what was put into the region before."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def recompute(
        self, function: Callable[..., Tensor], x: LayerInput, *others: Tensor, check: bool = False
    ) -> Tensor:
        now = output_tensor(x)
        before = now if self.last is None or self.last.shape != now.shape else self.last
        self.last = now.detach().requires_grad_(now.requires_grad)
        return ORIGINAL_RECOMPUTE(_ThenStale(function, before), x, *others, check=check)


class _ThenStale:
    def __init__(self, function: Callable[..., Tensor], before: Tensor) -> None:
        self.function, self.before, self.first = function, before, True

    def __call__(self, x: Tensor, *others: Tensor) -> Tensor:
        first, self.first = self.first, False
        return self.function(x if first else self.before, *others)


ORIGINAL_RECOMPUTE = recompute.recompute


def _positions_of_the_first_rank(
    self: LearnedPositions, x: Tensor, tokens: PackedSeqParams
) -> Tensor:
    return x + embedding(tokens.position_ids[: len(x)], self.weight)


def _is_norm(shard: Shard) -> bool:
    return shard.name.endswith("norm.weight")


def _is_shared_head(shard: Shard) -> bool:
    return "tp_kv" in shard.cut and "tp_copy" not in shard.cut


FAULTS: tuple[Fault, ...] = (
    Fault(
        "column_enter_removed",
        "A column-parallel layer's backward does not sum the gradient of its input.",
        "types",
        ("tp", "whole tokens"),
        lambda: changed_model(_no_enter),
    ),
    Fault(
        "row_sum_removed",
        "A row-parallel layer hands on its own part instead of the sum.",
        "types",
        ("tp",),
        lambda: changed_model(_no_sum),
    ),
    Fault(
        "row_sum_over_dp",
        "A row-parallel layer sums over dp instead of tp.",
        "types",
        ("tp", "dp"),
        lambda: changed_model(_sum_over_dp),
    ),
    Fault(
        "embedding_not_summed",
        "The embedding hands on its own rows' part instead of the sum.",
        "types",
        ("tp",),
        lambda: changed_model(_embedding_not_summed),
    ),
    Fault(
        "bias_before_sum",
        "A row-parallel layer's bias is added by every rank, before the sum.",
        "types",
        ("tp", "bias"),
        lambda: replaced(RowLinear, "forward", _bias_before_sum),
    ),
    Fault(
        "overlapped_sum_removed",
        "The gradient of a column-parallel layer's input is handed on before it is summed.",
        "numbers",
        ("tp", "whole tokens"),
        lambda: replaced(tensor, "start_sum", lambda x, group: Started(x)),
    ),
    Fault(
        "sp_gather_removed",
        "A column-parallel layer works on its own tokens only.",
        "shapes",
        ("tp", "sp"),
        lambda: changed_model(_no_enter),
    ),
    Fault(
        "sp_norm_invariant",
        "Norms say that every rank has their whole gradient, which under sp it has not.",
        "types",
        ("tp", "sp"),
        lambda: changed_model(functools.partial(_call_invariant, kind=RMSNorm)),
    ),
    Fault(
        "sp_norm_not_summed",
        "The gradients of norms under sp are left out of the sum over tp.",
        "numbers",
        ("tp", "sp"),
        lambda: _without_sum(_is_norm),
    ),
    Fault(
        "kv_copies_not_summed",
        "Gradients of key/value heads that ranks share are left out of the sum over them.",
        "numbers",
        ("tp", "shared heads"),
        lambda: _without_sum(_is_shared_head),
    ),
    Fault(
        "vocab_loss_local",
        "The loss normalizes over the rank's own part of the vocabulary.",
        "types",
        ("tp",),
        lambda: changed_model(_local_vocabulary),
    ),
    Fault(
        "z_loss_of_own_rows",
        "What the size of scores costs is found from the rank's own part of the vocabulary.",
        "numbers",
        ("tp", "z loss"),
        lambda: replaced(cross_entropy, "softmax_over_ranks", loss_faults.logsumexp_of_own_rows),
    ),
    Fault(
        "loss_not_partial",
        "The loss of one rank is taken for the loss of all.",
        "types",
        ("dp",),
        lambda: replaced(loss, "partial", lambda x, group: x),
    ),
    Fault(
        "dp_sum_averaged",
        "Gradients are averaged over dp after the loss was divided by the global count.",
        "numbers",
        ("dp",),
        _averaged,
    ),
    Fault(
        "loss_scaled_per_rank",
        "Every rank divides its loss by its own number of labels.",
        "numbers",
        ("dp", "uneven masks"),
        lambda: replaced(Decoder, "losses", _local_mean),
    ),
    Fault(
        "mtp_loss_scaled_per_rank",
        "Losses of tokens further ahead are divided by a rank's part of their labels.",
        "numbers",
        ("dp", "mtp"),
        lambda: replaced(step, "normalize_losses_by_labels", _depths_over_own_labels),
    ),
    Fault(
        "mtp_table_not_summed",
        "The last stage's copy of the table that multi-token predictions read is not summed.",
        "numbers",
        ("pp", "mtp"),
        lambda: replaced(engine, "_stages", lambda shard: (0,)),
    ),
    Fault(
        "ring_never_turned",
        "Context-parallel ranks never exchange keys and values, and use their own for all.",
        "numbers",
        ("cp",),
        lambda: replaced(context, "start_passing", _own_keys_for_all),
    ),
    Fault(
        "ring_gradients_kept",
        "Gradients of keys and values stay with the rank that computed them.",
        "numbers",
        ("cp",),
        lambda: replaced(context, "_send_home", _gradients_stay),
    ),
    Fault(
        "cp_positions_local",
        "Positions count the tokens of a context-parallel rank's slice, not of the document.",
        "numbers",
        ("cp",),
        lambda: replaced(loader, "tokens_of_slices", _positions_of_slices),
    ),
    Fault(
        "cp_places_of_the_first_slice",
        "Every context-parallel rank takes the first tokens' places in a picture.",
        "numbers",
        ("cp", "places"),
        lambda: replaced(loader, "with_places", _places_of_the_first_slice),
    ),
    Fault(
        "cp_chunks_swapped",
        "A context-parallel rank reads its late chunk of each row first.",
        "numbers",
        ("cp",),
        lambda: replaced(Slices, "as_read", _late_chunk_first),
    ),
    Fault(
        "cp_weights_dropped_by_own_numbers",
        "A ring drops weights as if every rank's keys were the rank's own tokens.",
        "numbers",
        ("cp", "dropped weights"),
        lambda: replaced(context, "dropped_of_groups", _numbers_of_queries),
    ),
    Fault(
        "dropout_per_rank",
        "Every rank numbers its rows from zero, so that all drop the same of different tokens.",
        "numbers",
        ("dp", "dropout"),
        lambda: replaced(loader, "with_dropout", _rows_from_zero),
    ),
    Fault(
        "tied_sum_left_out",
        "The two stages that share the vocabulary table do not add up its gradients.",
        "numbers",
        ("pp", "tied"),
        lambda: replaced(engine, "_stages", lambda shard: (0,)),
    ),
    Fault(
        "microbatches_swapped",
        "A stage receives the hidden states of another microbatch.",
        "numbers",
        ("pp",),
        lambda: replaced(StageLink, "send", pipeline_faults.other_microbatch),
    ),
    Fault(
        "memory_gradient_kept",
        "What a memory gets as gradient does not go back over the border of stages.",
        "numbers",
        ("pp", "memory"),
        lambda: replaced(StageLink, "send", pipeline_faults.gradient_of_memory_stays),
    ),
    Fault(
        "memory_of_another_microbatch",
        "A stage looks at the memory of the microbatch before.",
        "numbers",
        ("pp", "memory"),
        lambda: replaced(StageLink, "send", pipeline_faults.stale_memory()),
    ),
    Fault(
        "memory_of_later_tokens",
        "PackedSeqParams look at the memory of those after them, whose labels it has seen.",
        "numbers",
        ("cp", "memory"),
        lambda: replaced(CrossLayerAttention, "attend", pipeline_faults.memory_of_later_tokens),
    ),
    Fault(
        "chunks_swapped",
        "A rank runs one of its chunks where another is due.",
        "numbers",
        ("pp", "chunks"),
        lambda: replaced(Pipeline, "run", pipeline_faults.other_chunk),
    ),
    Fault(
        "weights_part_left_out",
        "Weight gradients that were put aside are never added.",
        "numbers",
        ("pp", "split backward"),
        lambda: replaced(WeightGradStore, "add_up", pipeline_faults.never_added),
    ),
    Fault(
        "stale_weights",
        "Ranks compute with weights that the ranks that own them have updated, and do not "
        "get them.",
        "numbers",
        ("dp", "zero"),
        lambda: replaced(publish, "start_gather", lambda *_, **__: Works([])),
    ),
    Fault(
        "slice_off_by_one",
        "A rank's slice of the gradient lies one element further than its slice of the weights.",
        "numbers",
        ("dp", "zero"),
        _slice_shifted,
    ),
    Fault(
        "replicas_not_summed",
        "Slices are summed over the ranks that divide them, and not over the replicas.",
        "numbers",
        ("dp", "zero", "replicas"),
        _without_replicas,
    ),
    Fault(
        "slices_not_summed_over_tp",
        "Slices of norms under sp are left out of the sum over tp.",
        "numbers",
        ("tp", "sp", "dp", "zero"),
        lambda: _without_sum(_is_norm),
    ),
    Fault(
        "fsdp_takes_means",
        "Fully sharded gradients are averaged after the loss was divided by the global count.",
        "numbers",
        ("dp", "zero", "fsdp"),
        _fsdp_takes_means,
    ),
    Fault(
        "fsdp_replicas_not_summed",
        "Rows of fully sharded gradients are not summed over the replicas.",
        "numbers",
        ("dp", "zero", "fsdp", "replicas"),
        expert_faults.without_replicas_of_rows,
    ),
    Fault(
        "microbatch_overwritten",
        "A microbatch's gradients take the place of the earlier ones' in a slice.",
        "numbers",
        ("dp", "zero", "zero 2"),
        lambda: replaced(data.BucketedDataParallel, "_complete", _last_microbatch_alone),
    ),
    Fault(
        "cp_left_out_of_sum",
        "Gradients are summed over dp, and not over the ranks that share rows.",
        "numbers",
        ("cp",),
        lambda: replaced(data, "division_of", _over_dp_alone),
    ),
    Fault(
        "cp_gather_unsorted",
        "Gathered keys and values stay in the order of ranks, each an early and a late chunk.",
        "numbers",
        ("cp", "gather"),
        lambda: replaced(context, "reorder", lambda x, join: x),
    ),
    Fault(
        "a2a_heads_swapped",
        "Heads come back from the exchange in the places of another rank's.",
        "numbers",
        ("cp", "a2a"),
        lambda: replaced(context, "tokens_for_heads", _heads_of_the_next_rank),
    ),
    Fault(
        "chunks_of_rows",
        "Chunks that attention stays inside are counted from the first token of all documents.",
        "numbers",
        ("cp", "documents", "window", "chunks of documents"),
        lambda: replaced(tokens, "plan_spans", attention_faults.chunks_of_rows),
    ),
    Fault(
        "documents_joined_across_ranks",
        "PackedSeqParams see other documents, where the keys are those of another rank.",
        "numbers",
        ("cp", "documents"),
        lambda: replaced(tokens, "plan_spans", attention_faults.one_document_across_ranks),
    ),
    Fault(
        "ring_gather_owner",
        "PackedSeqParams that came round a ring are taken for those of the rank before "
        "their owner.",
        "numbers",
        ("tp", "sp", "rings"),
        lambda: replaced(SequenceParallelComm, "all_gather_matmul", _parts_of_the_next_rank),
    ),
    Fault(
        "ring_scatter_owner",
        "Sums that go round a ring end at the rank before the one whose tokens they are for.",
        "numbers",
        ("tp", "sp", "rings"),
        lambda: replaced(SequenceParallelComm, "matmul_reduce_scatter", _sums_for_the_next_rank),
    ),
    Fault(
        "window_lost_in_ring",
        "A layer with a window sees everything that goes round.",
        "numbers",
        ("cp", "window"),
        lambda: replaced(tokens.Context, "spans_of_groups", _no_window),
    ),
    Fault(
        "sinks_in_every_step",
        "Sinks take part in softmax once for each step of the ring.",
        "numbers",
        ("cp", "sinks"),
        attention_faults.sinks_in_every_step,
    ),
    Fault(
        "distances_within_a_rank",
        "Biases by distance count how far apart tokens lie on their ranks, not in the text.",
        "numbers",
        ("cp", "biases by distance"),
        lambda: replaced(tokens.Context, "numbers_of_groups", _numbers_of_each_rank_alone),
    ),
    Fault(
        "biases_not_summed_over_stages",
        "Stages that hold the table of biases do not add up its gradients.",
        "numbers",
        ("pp", "biases by distance"),
        lambda: replaced(engine, "_stages", lambda shard: (0,)),
    ),
    Fault(
        "biases_of_other_heads",
        "After an exchange of heads every rank reads the biases of the first rank's heads.",
        "numbers",
        ("cp", "a2a", "biases by distance"),
        lambda: replaced(context, "of_my_heads", attention_faults.heads_of_the_first_rank),
    ),
    Fault(
        "extra_score_left_out",
        "The score of softmax off by one takes no part in the ring.",
        "numbers",
        ("cp", "off by one"),
        lambda: replaced(
            context, "nothing_found", attention_faults.nothing_found_without_the_extra_score
        ),
    ),
    Fault(
        "whole_norm_local",
        "Queries and keys are normed over the rank's own heads.",
        "types",
        ("tp", "whole norms"),
        lambda: replaced(qk_norm, "all_reduce", lambda x, group: x),
    ),
    Fault(
        "masks_of_another_rank",
        "Every rank looks at the rows of masks that are of the first rank's tokens.",
        "numbers",
        ("cp", "masks"),
        lambda: replaced(context, "seen_of_groups", attention_faults.rows_of_the_first_rank),
    ),
    Fault(
        "masks_forgotten",
        "All ranks but the first forget that tokens have masks.",
        "numbers",
        ("cp", "masks"),
        lambda: replaced(context, "seen_of_groups", attention_faults.known_to_the_first),
    ),
    Fault(
        "latent_key_not_entered",
        "The key that all heads of latent attention share does not enter divided work.",
        "types",
        ("tp", "whole tokens", "latent"),
        lambda: changed_model(_shared_key_not_entered),
    ),
    Fault(
        "positions_of_first_rank",
        "Each rank's part of the tokens gets the learned positions of the first part.",
        "numbers",
        ("tp", "sp", "learned positions"),
        lambda: replaced(LearnedPositions, "forward", _positions_of_the_first_rank),
    ),
    Fault(
        "adapter_invariant",
        "The whole half of an adapter says under sp that its gradient is whole, too.",
        "types",
        ("tp", "sp", "adapters"),
        lambda: replaced(lora, "column_adapter", choice_faults.whole_gradient),
    ),
    Fault(
        "adapter_mask_of_first_slice",
        "Every rank drops those of an adapter's features that the first rank does.",
        "numbers",
        ("tp", "adapters", "dropout"),
        lambda: replaced(lora, "first_input", lambda weight: 0),
    ),
    Fault(
        "stale_input_recomputed",
        "What backward computes again reads an earlier microbatch.",
        "numbers",
        ("dp", "recompute"),
        lambda: replaced(recompute, "recompute", _Stale().recompute),
    ),
    Fault(
        "second_sum_removed",
        "What backward computes again leaves out the sum over tp.",
        "types",
        ("tp", "whole tokens", "recompute"),
        lambda: changed_model(_no_second_sum),
    ),
    Fault(
        "host_copy_lost",
        "What waited in host memory comes back as zeros.",
        "numbers",
        ("dp", "offload"),
        lambda: replaced(Away, "storage", _blank),
    ),
    Fault(
        "experts_summed_over_dp",
        "Experts' gradients are summed over ranks with the same dense weights.",
        "numbers",
        ("dp", "ep"),
        lambda: replaced(data, "division_of", expert_faults.division_of_dense),
    ),
    Fault(
        "whole_experts_overwritten",
        "A microbatch's gradient of experts that are not divided replaces earlier ones'.",
        "numbers",
        ("dp", "zero", "fsdp", "ep"),
        expert_faults.whole_experts_overwritten,
    ),
    Fault(
        "etp_alone_on_dense_grid",
        "Without ep experts are taken for dense weights, though etp is not tp.",
        "numbers",
        ("dp", "etp"),
        lambda: replaced(data, "division_of", expert_faults.division_by_ep_alone),
    ),
    Fault(
        "experts_drawn_by_place",
        "The first weights of an expert depend on how many experts a rank has.",
        "numbers",
        ("dp", "ep"),
        lambda: replaced(build, "fill", expert_faults.fill_as_if_mine_were_all),
    ),
    Fault(
        "router_invariant",
        "Routers say that every rank has their whole gradient, which under sp it has not.",
        "types",
        ("tp", "sp", "experts"),
        lambda: changed_model(functools.partial(_call_invariant, kind=RouterGate)),
    ),
    Fault(
        "etp_sum_removed",
        "An expert's answer is the part of it that one rank along etp has.",
        "types",
        ("dp", "etp"),
        lambda: replaced(expert, "reduce_scatter", expert_faults.parts_of_own_rank),
    ),
    Fault(
        "etp_part_not_declared",
        "What one rank along etp has of an answer is taken for all of it, and still summed.",
        "types",
        ("dp", "etp"),
        lambda: replaced(expert, "partial", lambda x, group: x),
    ),
    Fault(
        "answers_in_wrong_order",
        "Answers go back to ranks in the order in which experts gave them.",
        "numbers",
        ("dp", "ep"),
        lambda: replaced(expert, "undone", expert_faults.never_undone),
    ),
    Fault(
        "rows_read_early",
        "Experts work on what was there before rows arrived.",
        "numbers",
        ("dp", "ep"),
        lambda: replaced(AsyncAllToAll, "wait", expert_faults.read_early),
    ),
    Fault(
        "experts_weighted_twice",
        "A choice's weight multiplies its expert's answer a second time.",
        "numbers",
        ("dp", "experts"),
        lambda: replaced(Experts, "forward", expert_faults.weighted_twice),
    ),
    Fault(
        "refused_by_each_rank",
        "Ranks that share tokens each fill their own part of an expert's seats.",
        "numbers",
        ("cp", "capacity"),
        lambda: replaced(Router, "within_capacity", expert_faults.refused_by_each_rank),
    ),
    Fault(
        "counted_before_refusal",
        "Choices that experts refuse count as their tokens.",
        "numbers",
        ("dp", "capacity"),
        lambda: replaced(Balance, "__call__", expert_faults.counted_before_refusal),
    ),
    Fault(
        "balance_of_own_tokens",
        "Losses of balance take a rank's own tokens for all that ranks share.",
        "numbers",
        ("cp", "experts"),
        lambda: replaced(balance, "all_reduce_", expert_faults.own_counts_alone),
    ),
    Fault(
        "balance_scaled_with_cp",
        "Every rank that shares tokens takes its part of a balance loss for the whole.",
        "numbers",
        ("cp", "experts"),
        lambda: replaced(Balance, "losses", expert_faults.scaled_by_sharing_ranks),
    ),
    Fault(
        "step_of_own_tokens",
        "The loss of balance over the global batch knows of a rank's own microbatches alone.",
        "numbers",
        ("dp", "balance over ranks"),
        lambda: replaced(Balance, "global_loss", expert_faults.step_of_own_tokens),
    ),
    Fault(
        "bias_moved_by_own_tokens",
        "Balancing biases move by what a rank's own tokens chose.",
        "numbers",
        ("dp", "balancing bias"),
        lambda: replaced(experts, "all_reduce_", expert_faults.own_counts_alone),
    ),
    Fault(
        "offset_of_own_tokens",
        "Offsets of experts are what would make them equally busy with a rank's own tokens.",
        "numbers",
        ("cp", "balancing offset"),
        lambda: replaced(Router, "note_offsets", expert_faults.offsets_of_own),
    ),
    Fault(
        "second_pass_counted",
        "PackedSeqParams count once more when backward computes their layer again.",
        "numbers",
        ("dp", "recompute", "experts"),
        lambda: replaced(Balance, "__call__", expert_faults.counted_again),
    ),
    Fault(
        "frozen_weights_decay",
        "Weights that are not trained decay in every step.",
        "numbers",
        ("dp", "frozen"),
        lambda: replaced(data.BucketedDataParallel, "finish", choice_faults.decaying_frozen),
    ),
    Fault(
        "rates_of_the_neighbor",
        "A group's rates go to the slot behind the one that they are for.",
        "numbers",
        ("dp", "zero", "groups"),
        lambda: replaced(adamw, "by_rates", choice_faults.rates_of_slot_before),
    ),
    Fault(
        "norm_counts_copies",
        "The gradient norm counts what several ranks hold several times, and clips too much.",
        "numbers",
        ("dp",),
        lambda: replaced(clip, "is_first_replica", lambda shard, here: True),
    ),
    *(
        Fault(name, what, "numbers", ("pp", "tied", "own stage"), how)
        for name, what, how in pipeline_faults.OWN_STAGE
    ),
    *(
        Fault(name, what, "numbers", ("dp", "sgd") if is_sgd else ("dp",), how, everywhere=True)
        for name, what, is_sgd, how in optimizer_faults.EVERYWHERE
    ),
)
"""Every fault that can be planted."""
