"""Faults that can be planted into the running process one at a time, to test that verification
detects them.

Each fault is a realistic mistake, which patches existing classes until its context ends. Code
outside of `planted` never reaches it.
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

from megalith.data import loader
from megalith.errors import ConfigError, did_you_mean
from megalith.kernels import packed
from megalith.kernels.attention.scores import Scores
from megalith.kernels.dropout import DropoutKey, DroppedWeights
from megalith.kernels.embedding import embedding
from megalith.kernels.linear import WeightMatmul, linear
from megalith.kernels.packed import (
    ContextShard,
    PackedSeqParams,
    TokenPermutation,
    tokens_of_slices,
)
from megalith.models.decoder import Decoder, iter_parameter_specs
from megalith.nn import lora, norm, router
from megalith.nn.build import BuildContext
from megalith.nn.cross_attention import CrossLayerAttention
from megalith.nn.embedding import LearnedPositions
from megalith.nn.mla import LatentAttention
from megalith.nn.moe import Experts
from megalith.nn.norm import RMSNorm
from megalith.nn.router import LoadBalancing, Router, RouterGate
from megalith.optim import adamw, gradients
from megalith.parallel import (
    bucket_comm,
    context,
    cross_entropy,
    data,
    expert,
    grad_sync,
    recompute,
    tensor,
)
from megalith.parallel.bucket_comm import PendingMessages, PendingReduceScatter
from megalith.parallel.collectives import (
    AsyncAllToAll,
    mark_partial,
    reduce_from_tp,
    reduce_scatter,
)
from megalith.parallel.group import Group, single_rank_group, start_all_reduce_
from megalith.parallel.mesh import Mesh
from megalith.parallel.offload import OffloadedStorage
from megalith.parallel.p2p import StageLink
from megalith.parallel.pipeline import Pipeline
from megalith.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceParallelComm,
    TPComm,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from megalith.parallel.tensor_overlap import PendingCollective
from megalith.parallel.weight_grad_store import WeightGradStore
from megalith.plan.context import KeySpans, Numbers, Slices
from megalith.plan.shards import Shard
from megalith.testing.inject import patched
from megalith.train import forward_backward, moe, step, trainer
from megalith.train.forward_backward import normalize_losses_by_labels
from megalith.verify.faults import model as model_faults
from megalith.verify.faults import moe as moe_faults
from megalith.verify.faults import optimizer as optimizer_faults
from megalith.verify.faults import pipeline as pipeline_faults

Change = Callable[[Decoder, Mesh], None]
"""Modifies a model after it was built."""
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
    """One planted mistake."""

    name: str
    what: str
    """Describes the mistake in one sentence."""

    found_by: Proof
    """`types` and `shapes` are rejected by the type check, `numbers` by the float64 run."""

    needs: tuple[Need, ...]
    """What a run must have to be affected: more than one rank on an axis, tokens sharded over tp or
    not (`whole tokens`), more tp ranks than KV heads (`shared heads`), a bias after attention or
    MLP, tied embeddings on two stages (`tied`), three model chunks per rank, a schedule with W
    (`split backward`), activation checkpointing (`recompute`), activation offload (`offload`),
    dropout (`dropout`, of attention weights `dropped weights`), MTP layers (`mtp`), two of them on
    a separate stage (`own stage`); context parallelism other than the ring, packed documents,
    collective matmul (`rings`), sharded gradients (`zero 2`), QK norms over all heads (`whole
    norms`), and other variants of attention and embeddings; experts with ep, etp, capacity, expert
    bias or offsets (`balancing bias`, `balancing offset`), or an aux loss over the global batch
    (`balance over ranks`); SGD instead of AdamW (`sgd`)."""

    context: Callable[[], AbstractContextManager[None]]
    """Context manager in which the fault is active."""

    everywhere: bool = False
    """Whether the one process that ranks are compared with makes the mistake, too."""


def find_fault(name: str) -> Fault:
    """Return the fault of that name.

    Raises:
        ConfigError: there is none.
    """
    by_name = {fault.name: fault for fault in FAULTS}
    if name not in by_name:
        advice = did_you_mean(name, list(by_name)) or ""
        raise ConfigError(f"fault={name}: unknown fault.{advice} Use one of {', '.join(by_name)}.")
    return by_name[name]


def plant_fault(name: str | None) -> AbstractContextManager[None]:
    """Return a context in which the named fault is active; None: no fault.

    Raises:
        ConfigError: there is no such fault.
    """
    return nullcontext() if name is None else find_fault(name).context()


@dataclass(frozen=True, slots=True)
class PatchedTPComm:
    """TPComm without overlap whose collectives are replaced."""

    prepare: Callable[[Tensor], Tensor]
    """Collective before the work."""

    reduce: Callable[[Tensor], Tensor]
    """Collective after the work, on partial sums."""

    group: Group
    invariant: frozenset[str]

    def prepare_input(self, x: Tensor, matmul: WeightMatmul | None = None) -> Tensor:
        """Apply `prepare` and the matmul."""
        x = self.prepare(x)
        return x if matmul is None else matmul(x)

    def reduce_output(self, x: Tensor, matmul: WeightMatmul | None = None) -> Tensor:
        """Apply the matmul and `reduce`."""
        return self.reduce(mark_partial(x if matmul is None else matmul(x), self.group))


# --- faults in the model, applied right after it was built


def changed_model(change: Change) -> AbstractContextManager[None]:
    """Apply `change` to every `Decoder` that is built in this context."""
    trainer = Decoder.__init__

    def build_and_change(self: Decoder, context: BuildContext, **others: Any) -> None:
        trainer(self, context, **others)
        change(self, context.mesh)

    return patched(Decoder, "__init__", build_and_change)


def _patch_tp_comm(
    layers: nn.Module,
    kind: type[nn.Module],
    *,
    prepare: Callable[[Tensor], Tensor] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    group: Group | None = None,
) -> None:
    """Replace the tensor-parallel communication of all layers of one class."""
    for layer in layers.modules():
        if isinstance(layer, kind):
            old: TPComm = layer.tp_comm  # type: ignore[assignment]  # every kind passed here has one
            patched = PatchedTPComm(
                prepare or old.prepare_input,
                reduce or _reduction(old, old.group),
                group or old.group,
                old.invariant,
            )
            layer.tp_comm = patched  # type: ignore[assignment]  # it is a plain attribute, where mypy expects a module


def _reduction(tp_comm: TPComm, group: Group) -> Callable[[Tensor], Tensor]:
    """Return the collective of `reduce_output`, over `group`."""
    sp = isinstance(tp_comm, SequenceParallelComm)
    return functools.partial(reduce_scatter if sp else reduce_from_tp, group=group)


def _identity(x: Tensor) -> Tensor:
    return x


def _skip_prepare_input(model: Decoder, mesh: Mesh) -> None:
    _patch_tp_comm(model, ColumnParallelLinear, prepare=_identity)


def _skip_prepare_latent_key(model: Decoder, mesh: Mesh) -> None:
    _patch_tp_comm(model, LatentAttention, prepare=_identity)


def _skip_reduce_output(model: Decoder, mesh: Mesh) -> None:
    _patch_tp_comm(model, RowParallelLinear, reduce=_identity)


def _skip_recomputed_reduce(model: Decoder, mesh: Mesh) -> None:
    _patch_tp_comm(
        model,
        RowParallelLinear,
        reduce=functools.partial(_reduce_in_forward, _reduction(model.tp_comm, mesh.tp)),
    )


def _reduce_in_forward(reduce: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    in_backward = torch._C._current_graph_task_id() != -1
    return x if in_backward else reduce(x)


def _zero_storage(self: OffloadedStorage) -> torch.UntypedStorage:
    return torch.zeros_like(self.host).to(self.device).untyped_storage()


def _embedding_not_summed(model: Decoder, mesh: Mesh) -> None:
    _patch_tp_comm(model, VocabParallelEmbedding, reduce=_identity)


def _sum_over_dp(model: Decoder, mesh: Mesh) -> None:
    _patch_tp_comm(model, RowParallelLinear, reduce=_reduction(model.tp_comm, mesh.dp))


def _local_vocabulary(model: Decoder, mesh: Mesh) -> None:
    _patch_tp_comm(model, VocabParallelHead, group=single_rank_group(*mesh.tp.axes))


def _declare_invariant(model: Decoder, mesh: Mesh, kind: type[nn.Module]) -> None:
    for declared, module, name in list(iter_parameter_specs(model)):
        if isinstance(module, kind):
            shard = replace(declared.shard, invariant=frozenset(mesh.tp.axes))
            module.__dict__["param_specs"][name] = replace(declared, shard=shard)


def _bias_before_sum(self: RowParallelLinear, x: Tensor) -> Tensor:
    y = linear(x, self.accumulated_parameters(), grad_accumulator=self.grad_accumulator)
    y = mark_partial(y, self.tp_comm.group)
    if self.bias_name is not None:
        y = y + getattr(self, self.bias_name)
    return _reduction(self.tp_comm, self.tp_comm.group)(y)


def _local_mean(
    self: Decoder, ids: Tensor, labels: Tensor, packed: Any, **received: Any
) -> tuple[Tensor, ...]:
    """Divide the loss by the rank's own number of labels."""
    own, *mtp_inputs = ORIGINAL_LOSSES(self, ids, labels, packed, **received)
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
    """Divide MTP losses by the rank's part of the labels instead of the global count."""
    counts = [num_labels[0], *(count // mesh.dp_cp.size for count in num_labels[1:])]
    return normalize_losses_by_labels(
        losses, num_labels=counts, weight=weight, mesh=mesh, scale=scale
    )


ORIGINAL_LOSSES = Decoder.losses


# --- faults in gradient reduction


def _without_sum(left_out: Callable[[Shard], bool]) -> AbstractContextManager[None]:
    """Gradients of some shards are not summed over tensor-parallel ranks."""
    right = grad_sync.tp_reduce_axes

    def wrong(shard: Shard) -> tuple[str, ...]:
        return () if left_out(shard) else right(shard)

    return patched(grad_sync, "tp_reduce_axes", wrong)


def _averaged() -> AbstractContextManager[None]:
    finish = data.BucketedDataParallel.finish

    def wrong(self: data.BucketedDataParallel) -> Sequence[grad_sync.ShardedParam]:
        local_params = finish(self)
        for param in local_params:
            param.gradient.div_(self.mesh.dp.size)
        return local_params

    return patched(data.BucketedDataParallel, "finish", wrong)


# --- faults in the distributed optimizer


def _slice_shifted() -> AbstractContextManager[None]:
    right = PendingReduceScatter.wait

    def wrong(self: PendingReduceScatter) -> Tensor:
        part = right(self)
        return part.copy_(part.roll(1))

    return patched(PendingReduceScatter, "wait", wrong)


def _without_replicas() -> AbstractContextManager[None]:
    def wrong(x: Tensor, group: Group) -> dist.Work | None:
        return None if group.axes == ("dp_replica",) else start_all_reduce_(x, group)

    return patched(data, "start_all_reduce_", wrong)


def _over_dp_alone(zero: int, mesh: Mesh, grid: str) -> data.ShardGroups:
    return data.ShardGroups(single_rank_group(*grad_sync.SHARD_AXES), mesh.dp)


def _last_microbatch_alone(self: data.BucketedDataParallel, most: int) -> None:
    """Discard the accumulated gradient of a slice when the sum of the next microbatch is
    complete."""
    while len(self._sums) > most:
        index = self._sums[0][0] % len(self.plan.buckets)
        first, _ = self._slice(index)
        bucket = self.plan.buckets[index]
        slices = self.divisions["dense"].slices.size
        self.gradients[first : first + (bucket.stop - bucket.start) // slices].zero_()
        ORIGINAL_COMPLETE(self, len(self._sums) - 1)


ORIGINAL_COMPLETE = data.BucketedDataParallel._complete


def _fsdp_takes_means() -> AbstractContextManager[None]:
    from megalith.parallel import fsdp  # torch's FSDP takes 0.5 s to import

    return patched(fsdp, "DIVIDE_BY", 2.0)


# --- faults in context parallelism


def _own_keys_for_all(x: Tensor, group: Group) -> PendingCollective:
    return PendingCollective(x.clone())


def _gradients_stay(
    sums: Tensor, pending: PendingCollective | None, group: Group
) -> PendingCollective:
    return PendingCollective(sums if pending is None else sums + pending.x, None)


def _positions_of_slices(*arguments: Any, **others: Any) -> PackedSeqParams:
    packed = ORIGINAL_SLICES(*arguments, **others)
    return replace(
        packed, position_ids=torch.arange(packed.num_tokens, device=packed.position_ids.device)
    )


def _places_of_the_first_slice(packed: PackedSeqParams, places: Numbers) -> PackedSeqParams:
    return replace(packed, position_ids=torch.from_numpy(places[:, : packed.num_tokens]))


def _late_chunk_first(self: Slices, rank: int) -> Numbers:
    read = ORIGINAL_AS_READ(self, rank)
    return np.concatenate([np.roll(row, len(row) // 2) for row in np.split(read, self.repeats)])


def _heads_of_the_next_rank(out: Tensor, group: Group, join: TokenPermutation) -> Tensor:
    y = ORIGINAL_TOKENS_FOR_HEADS(out, group, join)
    return y.roll(out.shape[1], dims=1)


def _no_window(
    self: packed.ContextShard, near: int, *, causal: bool = True, **windows: Any
) -> tuple[KeySpans, ...]:
    return ORIGINAL_SPANS_OF_GROUPS(self, near, causal=causal)


def _numbers_of_each_rank_alone(self: packed.ContextShard, near: int) -> tuple[Tensor, ...]:
    return tuple(
        torch.arange(len(part), device=part.device)
        for part in ORIGINAL_NUMBERS_OF_GROUPS(self, near)
    )


ORIGINAL_NUMBERS_OF_GROUPS = packed.ContextShard.numbers_of_groups
ORIGINAL_TOKENS_FOR_HEADS = context.exchange_heads_for_tokens
ORIGINAL_SPANS_OF_GROUPS = packed.ContextShard.spans_of_groups


ORIGINAL_SLICES, ORIGINAL_AS_READ = tokens_of_slices, Slices.as_read


def _rows_from_zero(batch: loader.Batch, rows: Sequence[int], *, seed: int) -> loader.Batch:
    return ORIGINAL_WITH_DROPOUT(batch, range(len(rows)), seed=seed)


ORIGINAL_WITH_DROPOUT = loader.with_dropout


def _numbers_of_queries(
    shard: ContextShard, dropout_key: DropoutKey | None, scores: Scores, near: int
) -> list[DroppedWeights] | None:
    dropped = ORIGINAL_DROPPED(shard, dropout_key, scores, near)
    return dropped and [replace(one, keys=one.queries) for one in dropped]


ORIGINAL_DROPPED = context.dropped_of_groups


# --- faults in collective matmul, activation checkpointing and other layers


def _parts_of_the_next_rank(
    self: SequenceParallelComm, x: Tensor, w: Tensor, product: Any
) -> tuple[Tensor, Tensor]:
    whole, y = ORIGINAL_ENTERED(self, x, w, product)
    return whole.roll(len(x), dims=0), y.roll(len(x), dims=0)


def _sums_for_the_next_rank(
    self: SequenceParallelComm, x: Tensor, w: Tensor, product: Any
) -> PendingCollective:
    return ORIGINAL_LEFT(self, x.roll(len(x) // self.group.size, dims=0), w, product)


ORIGINAL_ENTERED, ORIGINAL_LEFT = (
    SequenceParallelComm.all_gather_matmul,
    SequenceParallelComm.matmul_reduce_scatter,
)


class _StaleRecompute:
    """Recomputation whose second pass reads the input of an earlier call."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def recompute(
        self, function: Callable[..., Tensor], x: Tensor, *others: Tensor, check: bool = False
    ) -> Tensor:
        before = x if self.last is None or self.last.shape != x.shape else self.last
        self.last = x.detach().requires_grad_(x.requires_grad)
        return ORIGINAL_RECOMPUTE(_StaleInSecondPass(function, before), x, *others, check=check)


class _StaleInSecondPass:
    def __init__(self, function: Callable[..., Tensor], before: Tensor) -> None:
        self.function, self.before, self.first = function, before, True

    def __call__(self, x: Tensor, *others: Tensor) -> Tensor:
        first, self.first = self.first, False
        return self.function(x if first else self.before, *others)


ORIGINAL_RECOMPUTE = recompute.recompute


def _positions_of_the_first_rank(
    self: LearnedPositions, x: Tensor, packed: PackedSeqParams
) -> Tensor:
    return x + embedding(packed.position_ids[: len(x)], self.weight)


def _is_norm(shard: Shard) -> bool:
    return shard.name.endswith("norm.weight")


def _is_shared_head(shard: Shard) -> bool:
    return "tp_kv" in shard.cut and "tp_copy" not in shard.cut


FAULTS: tuple[Fault, ...] = (
    Fault(
        "column_enter_removed",
        "Backward of a column-parallel layer does not all-reduce the gradient of its input.",
        "types",
        ("tp", "whole tokens"),
        lambda: changed_model(_skip_prepare_input),
    ),
    Fault(
        "row_sum_removed",
        "A row-parallel layer returns its partial output instead of the sum over tp.",
        "types",
        ("tp",),
        lambda: changed_model(_skip_reduce_output),
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
        "The vocabulary-parallel embedding returns its partial output instead of the sum.",
        "types",
        ("tp",),
        lambda: changed_model(_embedding_not_summed),
    ),
    Fault(
        "bias_before_sum",
        "Every rank adds the bias of a row-parallel layer, before the sum over tp.",
        "types",
        ("tp", "bias"),
        lambda: patched(RowParallelLinear, "forward", _bias_before_sum),
    ),
    Fault(
        "overlapped_sum_removed",
        "The input gradient of a column-parallel layer is used before its all-reduce.",
        "numbers",
        ("tp", "whole tokens"),
        lambda: patched(tensor, "start_all_reduce", lambda x, group: PendingCollective(x)),
    ),
    Fault(
        "sp_gather_removed",
        "A column-parallel layer does not all-gather the tokens under sequence parallelism.",
        "shapes",
        ("tp", "sp"),
        lambda: changed_model(_skip_prepare_input),
    ),
    Fault(
        "sp_norm_invariant",
        "Norm weights are declared invariant, although under sp each rank has a partial gradient.",
        "types",
        ("tp", "sp"),
        lambda: changed_model(functools.partial(_declare_invariant, kind=RMSNorm)),
    ),
    Fault(
        "sp_norm_not_summed",
        "Norm gradients under sp are not summed over tp.",
        "numbers",
        ("tp", "sp"),
        lambda: _without_sum(_is_norm),
    ),
    Fault(
        "kv_copies_not_summed",
        "Gradients of KV heads that several ranks replicate are not summed over these ranks.",
        "numbers",
        ("tp", "shared heads"),
        lambda: _without_sum(_is_shared_head),
    ),
    Fault(
        "vocab_loss_local",
        "The softmax of the loss covers only the rank's vocabulary shard.",
        "types",
        ("tp",),
        lambda: changed_model(_local_vocabulary),
    ),
    Fault(
        "z_loss_of_own_rows",
        "The z-loss is computed from the rank's vocabulary shard only.",
        "numbers",
        ("tp", "z loss"),
        lambda: patched(cross_entropy, "softmax_over_ranks", model_faults.logsumexp_of_own_rows),
    ),
    Fault(
        "loss_not_partial",
        "The loss of one rank is used as the loss of all ranks.",
        "types",
        ("dp",),
        lambda: patched(forward_backward, "mark_partial", lambda x, group: x),
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
        lambda: patched(Decoder, "losses", _local_mean),
    ),
    Fault(
        "mtp_loss_scaled_per_rank",
        "MTP losses are divided by a rank's part of the labels.",
        "numbers",
        ("dp", "mtp"),
        lambda: patched(step, "normalize_losses_by_labels", _depths_over_own_labels),
    ),
    Fault(
        "mtp_table_not_summed",
        "The gradient of the last stage's copy of the embedding, which MTP layers use, is not "
        "summed.",
        "numbers",
        ("pp", "mtp"),
        lambda: patched(grad_sync, "_stages", lambda shard: (0,)),
    ),
    Fault(
        "ring_never_turned",
        "Ring attention never exchanges keys and values.",
        "numbers",
        ("cp",),
        lambda: patched(context, "start_ring_exchange", _own_keys_for_all),
    ),
    Fault(
        "ring_gradients_kept",
        "Gradients of keys and values are not sent back to the rank that owns them.",
        "numbers",
        ("cp",),
        lambda: patched(context, "_send_home", _gradients_stay),
    ),
    Fault(
        "cp_positions_local",
        "Position ids count tokens of the context-parallel slice, not of the document.",
        "numbers",
        ("cp",),
        lambda: patched(loader, "tokens_of_slices", _positions_of_slices),
    ),
    Fault(
        "cp_places_of_the_first_slice",
        "Every context-parallel rank uses the multimodal position ids of the first slice.",
        "numbers",
        ("cp", "places"),
        lambda: patched(loader, "with_multimodal_positions", _places_of_the_first_slice),
    ),
    Fault(
        "cp_chunks_swapped",
        "A context-parallel rank swaps its two zig-zag chunks.",
        "numbers",
        ("cp",),
        lambda: patched(Slices, "as_read", _late_chunk_first),
    ),
    Fault(
        "cp_weights_dropped_by_own_numbers",
        "Ring attention uses the rank's own token numbers for the attention dropout of all keys.",
        "numbers",
        ("cp", "dropped weights"),
        lambda: patched(context, "dropped_of_groups", _numbers_of_queries),
    ),
    Fault(
        "dropout_per_rank",
        "Every rank numbers its rows from zero, so that all use the same dropout masks.",
        "numbers",
        ("dp", "dropout"),
        lambda: patched(loader, "with_dropout", _rows_from_zero),
    ),
    Fault(
        "tied_sum_left_out",
        "Gradients of tied embeddings are not summed over the two stages.",
        "numbers",
        ("pp", "tied"),
        lambda: patched(grad_sync, "_stages", lambda shard: (0,)),
    ),
    Fault(
        "microbatches_swapped",
        "A stage receives the hidden states of another microbatch.",
        "numbers",
        ("pp",),
        lambda: patched(StageLink, "send", pipeline_faults.other_microbatch),
    ),
    Fault(
        "memory_gradient_kept",
        "The gradient of cross-layer source states is not sent to the previous stage.",
        "numbers",
        ("pp", "memory"),
        lambda: patched(StageLink, "send", pipeline_faults.gradient_of_memory_stays),
    ),
    Fault(
        "memory_of_another_microbatch",
        "A stage uses the cross-layer source states of the previous microbatch.",
        "numbers",
        ("pp", "memory"),
        lambda: patched(StageLink, "send", pipeline_faults.stale_memory()),
    ),
    Fault(
        "memory_of_later_tokens",
        "Cross-layer attention is not causal, so tokens attend to later ones.",
        "numbers",
        ("cp", "memory"),
        lambda: patched(CrossLayerAttention, "attend", pipeline_faults.memory_of_later_tokens),
    ),
    Fault(
        "chunks_swapped",
        "A rank runs its model chunks in the wrong order.",
        "numbers",
        ("pp", "chunks"),
        lambda: patched(Pipeline, "run", pipeline_faults.other_chunk),
    ),
    Fault(
        "weights_part_left_out",
        "Deferred weight gradients are never accumulated.",
        "numbers",
        ("pp", "split backward"),
        lambda: patched(WeightGradStore, "run_deferred", pipeline_faults.never_added),
    ),
    Fault(
        "stale_weights",
        "The all-gather of parameters is skipped, so ranks compute with stale weights.",
        "numbers",
        ("dp", "zero"),
        lambda: patched(
            bucket_comm, "start_bucket_all_gather", lambda *_, **__: PendingMessages([])
        ),
    ),
    Fault(
        "slice_off_by_one",
        "The gradient slice of a rank is offset by one element from its weight slice.",
        "numbers",
        ("dp", "zero"),
        _slice_shifted,
    ),
    Fault(
        "replicas_not_summed",
        "Gradient slices are not summed over dp replicas.",
        "numbers",
        ("dp", "zero", "replicas"),
        _without_replicas,
    ),
    Fault(
        "slices_not_summed_over_tp",
        "Norm gradient slices under sp are not summed over tp.",
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
        moe_faults.without_replicas_of_rows,
    ),
    Fault(
        "microbatch_overwritten",
        "The gradients of a microbatch overwrite the accumulated ones in a slice.",
        "numbers",
        ("dp", "zero", "zero 2"),
        lambda: patched(data.BucketedDataParallel, "_complete", _last_microbatch_alone),
    ),
    Fault(
        "cp_left_out_of_sum",
        "Gradients are summed over dp, but not over cp.",
        "numbers",
        ("cp",),
        lambda: patched(data, "shard_groups", _over_dp_alone),
    ),
    Fault(
        "cp_gather_unsorted",
        "All-gathered keys and values are not reordered from zig-zag chunks.",
        "numbers",
        ("cp", "gather"),
        lambda: patched(context, "reorder", lambda x, join: x),
    ),
    Fault(
        "a2a_heads_swapped",
        "The all-to-all returns heads at the positions of another rank's heads.",
        "numbers",
        ("cp", "a2a"),
        lambda: patched(context, "exchange_heads_for_tokens", _heads_of_the_next_rank),
    ),
    Fault(
        "chunks_of_rows",
        "Attention chunks are counted from the first token of all documents.",
        "numbers",
        ("cp", "documents", "window", "chunks of documents"),
        lambda: patched(packed, "plan_spans", model_faults.chunks_of_rows),
    ),
    Fault(
        "documents_joined_across_ranks",
        "Document boundaries are ignored where the keys belong to another rank.",
        "numbers",
        ("cp", "documents"),
        lambda: patched(packed, "plan_spans", model_faults.one_document_across_ranks),
    ),
    Fault(
        "ring_gather_owner",
        "The collective matmul's all-gather assigns tokens to the wrong rank.",
        "numbers",
        ("tp", "sp", "rings"),
        lambda: patched(SequenceParallelComm, "all_gather_matmul", _parts_of_the_next_rank),
    ),
    Fault(
        "ring_scatter_owner",
        "The collective matmul's reduce-scatter returns the sums to the wrong rank.",
        "numbers",
        ("tp", "sp", "rings"),
        lambda: patched(SequenceParallelComm, "matmul_reduce_scatter", _sums_for_the_next_rank),
    ),
    Fault(
        "window_lost_in_ring",
        "Ring attention ignores the sliding window.",
        "numbers",
        ("cp", "window"),
        lambda: patched(packed.ContextShard, "spans_of_groups", _no_window),
    ),
    Fault(
        "sinks_in_every_step",
        "Attention sinks are added to the softmax in each step of the ring.",
        "numbers",
        ("cp", "sinks"),
        model_faults.sinks_in_every_step,
    ),
    Fault(
        "distances_within_a_rank",
        "Relative position biases use distances on the rank, not in the document.",
        "numbers",
        ("cp", "biases by distance"),
        lambda: patched(packed.ContextShard, "numbers_of_groups", _numbers_of_each_rank_alone),
    ),
    Fault(
        "biases_not_summed_over_stages",
        "Gradients of the relative-bias table are not summed over stages.",
        "numbers",
        ("pp", "biases by distance"),
        lambda: patched(grad_sync, "_stages", lambda shard: (0,)),
    ),
    Fault(
        "biases_of_other_heads",
        "After the all-to-all over heads, every rank uses the biases of the first rank's heads.",
        "numbers",
        ("cp", "a2a", "biases by distance"),
        lambda: patched(context, "select_local_heads", model_faults.heads_of_the_first_rank),
    ),
    Fault(
        "extra_score_left_out",
        "Ring attention omits the additional score of off-by-one softmax.",
        "numbers",
        ("cp", "off by one"),
        lambda: patched(
            context, "init_attention_result", model_faults.nothing_found_without_the_extra_score
        ),
    ),
    Fault(
        "whole_norm_local",
        "QK norms over all heads are computed over the rank's own heads.",
        "types",
        ("tp", "whole norms"),
        lambda: patched(norm, "all_reduce", lambda x, group: x),
    ),
    Fault(
        "masks_of_another_rank",
        "Every rank uses the attention-mask rows of the first rank's tokens.",
        "numbers",
        ("cp", "masks"),
        lambda: patched(context, "seen_of_groups", model_faults.rows_of_the_first_rank),
    ),
    Fault(
        "masks_forgotten",
        "Attention masks are applied on the first rank only.",
        "numbers",
        ("cp", "masks"),
        lambda: patched(context, "seen_of_groups", model_faults.known_to_the_first),
    ),
    Fault(
        "latent_key_not_entered",
        "Backward of the shared latent-attention key does not sum its gradient over tp.",
        "types",
        ("tp", "whole tokens", "latent"),
        lambda: changed_model(_skip_prepare_latent_key),
    ),
    Fault(
        "positions_of_first_rank",
        "Under sp, each rank adds the learned positions of the first slice.",
        "numbers",
        ("tp", "sp", "learned positions"),
        lambda: patched(LearnedPositions, "forward", _positions_of_the_first_rank),
    ),
    Fault(
        "adapter_invariant",
        "The replicated half of an adapter is declared invariant under sp.",
        "types",
        ("tp", "sp", "adapters"),
        lambda: patched(lora, "column_adapter", model_faults.whole_gradient),
    ),
    Fault(
        "adapter_mask_of_first_slice",
        "Every rank uses the first rank's dropout mask for the input of an adapter.",
        "numbers",
        ("tp", "adapters", "dropout"),
        lambda: patched(lora, "first_input_feature", lambda weight: 0),
    ),
    Fault(
        "stale_input_recomputed",
        "Recomputation in backward reads the input of an earlier microbatch.",
        "numbers",
        ("dp", "recompute"),
        lambda: patched(recompute, "recompute", _StaleRecompute().recompute),
    ),
    Fault(
        "second_sum_removed",
        "Recomputation in backward omits the sum over tp.",
        "types",
        ("tp", "whole tokens", "recompute"),
        lambda: changed_model(_skip_recomputed_reduce),
    ),
    Fault(
        "host_copy_lost",
        "Offloaded activations are restored as zeros.",
        "numbers",
        ("dp", "offload"),
        lambda: patched(OffloadedStorage, "storage", _zero_storage),
    ),
    Fault(
        "experts_summed_over_dp",
        "Expert gradients are summed over the data-parallel ranks of dense weights.",
        "numbers",
        ("dp", "ep"),
        lambda: patched(data, "shard_groups", moe_faults.division_of_dense),
    ),
    Fault(
        "whole_experts_overwritten",
        "The gradient of unsharded experts is overwritten by each microbatch.",
        "numbers",
        ("dp", "zero", "fsdp", "ep"),
        moe_faults.whole_experts_overwritten,
    ),
    Fault(
        "etp_alone_on_dense_grid",
        "Without ep, experts use the dense grid, although etp differs from tp.",
        "numbers",
        ("dp", "etp"),
        lambda: patched(data, "shard_groups", moe_faults.division_by_ep_alone),
    ),
    Fault(
        "experts_drawn_by_place",
        "The initial weights of an expert depend on the number of local experts.",
        "numbers",
        ("dp", "ep"),
        lambda: patched(trainer, "init_param_", moe_faults.init_as_if_first_experts),
    ),
    Fault(
        "router_invariant",
        "Router weights are declared invariant, although under sp each rank has a partial "
        "gradient.",
        "types",
        ("tp", "sp", "experts"),
        lambda: changed_model(functools.partial(_declare_invariant, kind=RouterGate)),
    ),
    Fault(
        "etp_sum_removed",
        "Expert outputs are not summed over etp.",
        "types",
        ("dp", "etp"),
        lambda: patched(expert, "reduce_scatter", moe_faults.parts_of_own_rank),
    ),
    Fault(
        "etp_part_not_declared",
        "Partial expert outputs over etp are not declared partial, but summed.",
        "types",
        ("dp", "etp"),
        lambda: patched(expert, "mark_partial", lambda x, group: x),
    ),
    Fault(
        "answers_in_wrong_order",
        "Expert outputs are combined in the order in which they were computed.",
        "numbers",
        ("dp", "ep"),
        lambda: patched(expert, "invert_chunk_order", moe_faults.never_undone),
    ),
    Fault(
        "rows_read_early",
        "Experts read dispatched tokens before the all-to-all is complete.",
        "numbers",
        ("dp", "ep"),
        lambda: patched(AsyncAllToAll, "wait", moe_faults.read_early),
    ),
    Fault(
        "experts_weighted_twice",
        "Expert outputs are multiplied by router weights twice.",
        "numbers",
        ("dp", "experts"),
        lambda: patched(Experts, "forward", moe_faults.weighted_twice),
    ),
    Fault(
        "refused_by_each_rank",
        "Expert capacity is applied per rank instead of over the ranks that share tokens.",
        "numbers",
        ("cp", "capacity"),
        lambda: patched(Router, "within_capacity", moe_faults.refused_by_each_rank),
    ),
    Fault(
        "counted_before_refusal",
        "Dropped tokens are included in the expert load.",
        "numbers",
        ("dp", "capacity"),
        lambda: patched(LoadBalancing, "__call__", moe_faults.counted_before_refusal),
    ),
    Fault(
        "balance_of_own_tokens",
        "Aux losses use only a rank's own tokens.",
        "numbers",
        ("cp", "experts"),
        lambda: patched(router, "all_reduce_", moe_faults.own_counts_alone),
    ),
    Fault(
        "balance_scaled_with_cp",
        "Aux losses are scaled by the number of cp ranks.",
        "numbers",
        ("cp", "experts"),
        lambda: patched(LoadBalancing, "losses", moe_faults.scaled_by_sharing_ranks),
    ),
    Fault(
        "step_of_own_tokens",
        "The aux loss over the global batch covers only the rank's own microbatches.",
        "numbers",
        ("dp", "balance over ranks"),
        lambda: patched(LoadBalancing, "global_loss", moe_faults.step_of_own_tokens),
    ),
    Fault(
        "bias_moved_by_own_tokens",
        "Expert biases are updated with the load of a rank's own tokens.",
        "numbers",
        ("dp", "balancing bias"),
        lambda: patched(moe, "all_reduce_", moe_faults.own_counts_alone),
    ),
    Fault(
        "offset_of_own_tokens",
        "Expert offsets balance only a rank's own tokens.",
        "numbers",
        ("cp", "balancing offset"),
        lambda: patched(Router, "note_offsets", moe_faults.offsets_of_own),
    ),
    Fault(
        "second_pass_counted",
        "Recomputation counts the expert load of tokens again.",
        "numbers",
        ("dp", "recompute", "experts"),
        lambda: patched(LoadBalancing, "__call__", moe_faults.counted_again),
    ),
    Fault(
        "frozen_weights_decay",
        "Weights that are not trained decay in every step.",
        "numbers",
        ("dp", "frozen"),
        lambda: patched(data.BucketedDataParallel, "finish", model_faults.decaying_frozen),
    ),
    Fault(
        "rates_of_the_neighbor",
        "The rates of a parameter group are applied to the next slot.",
        "numbers",
        ("dp", "zero", "groups"),
        lambda: patched(adamw, "group_by_rates", model_faults.rates_of_slot_before),
    ),
    Fault(
        "norm_counts_copies",
        "The gradient norm counts replicated parameters several times.",
        "numbers",
        ("dp",),
        lambda: patched(gradients, "is_first_replica", lambda shard, coordinates: True),
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
