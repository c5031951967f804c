"""Planted faults in layers, loss, tensor and context parallelism, and recomputation."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megalith.config.lora import LoraConfig
from megalith.data import loader
from megalith.data.loader import Batch
from megalith.kernels import packed
from megalith.kernels.attention.scores import PairMask, Scores
from megalith.kernels.attention.split_kv import PartialAttention, attend, init_attention_result
from megalith.kernels.dropout import DropoutKey, DroppedWeights
from megalith.kernels.embedding import embedding
from megalith.kernels.layer_inputs import LayerCache, LayerInputs
from megalith.kernels.linear import WeightMatmul, linear
from megalith.kernels.packed import ContextShard, PackedSeqParams, TokenPermutation
from megalith.models.decoder import Decoder, iter_parameter_specs
from megalith.nn import lora, norm
from megalith.nn.attention import CrossLayerAttention
from megalith.nn.embedding import LearnedPositions
from megalith.nn.mla import LatentAttention
from megalith.nn.norm import RMSNorm
from megalith.parallel import context, cross_entropy, grad_sync, recompute, tensor
from megalith.parallel.collectives import mark_partial, reduce_from_tp, reduce_scatter
from megalith.parallel.cross_entropy import HeadShard, Softmax
from megalith.parallel.group import Group, single_rank_group
from megalith.parallel.mesh import Mesh
from megalith.parallel.recompute import OffloadedStorage
from megalith.parallel.tensor import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    SequenceParallelComm,
    TPComm,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from megalith.parallel.tensor_overlap import PendingCollective
from megalith.plan.context import KeySpans, Numbers, Slices, plan_spans
from megalith.plan.shards import Shard
from megalith.testing.inject import patched
from megalith.train import objective
from megalith.train.objective import MAIN_LOSS, LMObjective, LossNormalizer, ModelOutputs
from megalith.verify.faults.plant import Original, changes_model, plants, replaces

# --- communication of tensor-parallel layers


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


def _patch_tp_comm(
    layers: nn.Module,
    kind: type[nn.Module],
    *,
    prepare: Callable[[Tensor], Tensor] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Replace the tensor-parallel communication of all layers of one class."""
    for layer in layers.modules():
        if isinstance(layer, kind):
            old: TPComm = layer.tp_comm  # type: ignore[assignment]  # every kind passed here has one
            new = PatchedTPComm(
                prepare or old.prepare_input,
                reduce or _reduction(old, old.group),
                old.group,
                old.invariant,
            )
            layer.tp_comm = new  # type: ignore[assignment]  # it is a plain attribute, where mypy expects a module


def _reduction(tp_comm: TPComm, group: Group) -> Callable[[Tensor], Tensor]:
    """Return the collective of `reduce_output`, over `group`."""
    sp = isinstance(tp_comm, SequenceParallelComm)
    return functools.partial(reduce_scatter if sp else reduce_from_tp, group=group)


def _identity(x: Tensor) -> Tensor:
    return x


def _declare_invariant(model: Decoder, mesh: Mesh, kind: type[nn.Module]) -> None:
    for declared, module, name in list(iter_parameter_specs(model)):
        if isinstance(module, kind):
            shard = replace(declared.shard, invariant=frozenset(mesh.tp.axes))
            module.__dict__["param_specs"][name] = replace(declared, shard=shard)


@changes_model("tp, whole tokens")
def column_enter_removed(model: Decoder, mesh: Mesh) -> None:
    """Backward of a column-parallel layer does not all-reduce the gradient of its input."""
    _patch_tp_comm(model, ColumnParallelLinear, prepare=_identity)


@changes_model("tp")
def row_sum_removed(model: Decoder, mesh: Mesh) -> None:
    """A row-parallel layer returns its partial output instead of the sum over tp."""
    _patch_tp_comm(model, RowParallelLinear, reduce=_identity)


@changes_model("tp, dp")
def row_sum_over_dp(model: Decoder, mesh: Mesh) -> None:
    """A row-parallel layer sums over dp instead of tp."""
    _patch_tp_comm(model, RowParallelLinear, reduce=_reduction(model.tp_comm, mesh.dp))


@changes_model("tp")
def embedding_not_summed(model: Decoder, mesh: Mesh) -> None:
    """The vocabulary-parallel embedding returns its partial output instead of the sum."""
    _patch_tp_comm(model, VocabParallelEmbedding, reduce=_identity)


@replaces(RowParallelLinear, "forward", "tp, bias", found_by="types")
def bias_before_sum(original: Original, self: RowParallelLinear, x: Tensor) -> Tensor:
    """Every rank adds the bias of a row-parallel layer, before the sum over tp."""
    weight, accumulator = self.accumulated_parameters(), self.grad_accumulator
    y = mark_partial(linear(x, weight, grad_accumulator=accumulator), self.tp_comm.group)
    y = y if self.bias_name is None else y + getattr(self, self.bias_name)
    return _reduction(self.tp_comm, self.tp_comm.group)(y)


@replaces(tensor, "start_all_reduce", "tp, whole tokens")
def overlapped_sum_removed(original: Original, x: Tensor, group: Group) -> PendingCollective:
    """The input gradient of a column-parallel layer is used before its all-reduce."""
    return PendingCollective(x)


@changes_model("tp, sp", found_by="shapes")
def sp_gather_removed(model: Decoder, mesh: Mesh) -> None:
    """A column-parallel layer does not all-gather the tokens under sequence parallelism."""
    _patch_tp_comm(model, ColumnParallelLinear, prepare=_identity)


@changes_model("tp, sp")
def sp_norm_invariant(model: Decoder, mesh: Mesh) -> None:
    """Norm weights are declared invariant, although under sp each rank has a partial gradient."""
    _declare_invariant(model, mesh, RMSNorm)


@changes_model("tp, sp, experts")
def router_invariant(model: Decoder, mesh: Mesh) -> None:
    """Router weights are declared invariant, although under sp each rank has a partial gradient."""
    _declare_invariant(model, mesh, ReplicatedLinear)


@replaces(grad_sync, "tp_reduce_axes", "tp, sp")
def sp_norm_not_summed(original: Original, shard: Shard) -> tuple[str, ...]:
    """Norm gradients under sp are not summed over tp."""
    return () if shard.name.endswith("norm.weight") else original(shard)


@replaces(grad_sync, "tp_reduce_axes", "tp, shared heads")
def kv_copies_not_summed(original: Original, shard: Shard) -> tuple[str, ...]:
    """Gradients of KV heads that several ranks replicate are not summed over these ranks."""
    return () if "tp_kv" in shard.cut and "tp_copy" not in shard.cut else original(shard)


@replaces(SequenceParallelComm, "all_gather_matmul", "tp, sp, rings")
def ring_gather_owner(
    original: Original, self: SequenceParallelComm, x: Tensor, w: Tensor, product: object
) -> tuple[Tensor, Tensor]:
    """The collective matmul's all-gather assigns tokens to the wrong rank."""
    whole, y = original(self, x, w, product)
    return whole.roll(len(x), dims=0), y.roll(len(x), dims=0)


@replaces(SequenceParallelComm, "matmul_reduce_scatter", "tp, sp, rings")
def ring_scatter_owner(
    original: Original, self: SequenceParallelComm, x: Tensor, w: Tensor, product: object
) -> PendingCollective:
    """The collective matmul's reduce-scatter returns the sums to the wrong rank."""
    result: PendingCollective = original(
        self, x.roll(len(x) // self.group.size, dims=0), w, product
    )
    return result


@replaces(SequenceParallelComm, "start_regather", "tp, sp")
def regather_owner(original: Original, self: SequenceParallelComm, x: Tensor) -> PendingCollective:
    """The all-gather in backward, for the weight gradients, assigns tokens to the wrong rank."""
    pending: PendingCollective = original(self, x)
    return PendingCollective(pending.wait().roll(len(x), dims=0))


# --- loss


@changes_model("tp")
def vocab_loss_local(model: Decoder, mesh: Mesh) -> None:
    """The softmax of the loss covers only the rank's vocabulary shard."""
    for layer in model.modules():
        if isinstance(layer, VocabParallelHead):
            layer.vocab = replace(layer.vocab, group=single_rank_group(*mesh.tp.axes))


class LocalLogsumexp(Softmax):
    """Softmax over the whole vocabulary with a logsumexp over the rank's shard."""

    own: Tensor

    def logsumexp(self) -> Tensor:
        """Return the local logsumexp [c]."""
        return self.own.clone()


@replaces(cross_entropy, "softmax_over_ranks", "tp, z loss")
def z_loss_of_own_rows(
    original: Original, logits: Tensor, labels: Tensor, head: HeadShard
) -> Softmax:
    """The z-loss is computed from the rank's vocabulary shard only."""
    softmax = LocalLogsumexp(*original(logits, labels, head))
    softmax.own = torch.logsumexp(logits.to(softmax.total.dtype), -1)
    return softmax


@replaces(objective, "mark_partial", "dp", found_by="types")
def loss_not_partial(original: Original, x: Tensor, group: Group) -> Tensor:
    """The loss of one rank is used as the loss of all ranks."""
    return x


@replaces(LMObjective, "__call__", "dp, uneven masks")
def loss_scaled_per_rank(
    original: Original, self: LMObjective, outputs: ModelOutputs, batch: Batch
) -> dict[str, Tensor]:
    """Every rank divides its loss by its own number of labels."""
    losses: dict[str, Tensor] = original(self, outputs, batch)
    num_labels = max(1, int((batch.labels >= 0).sum()))
    losses[MAIN_LOSS] = losses[MAIN_LOSS] * batch.labels.numel() / num_labels
    return losses


@replaces(LossNormalizer, "scale_loss", "dp, mtp")
def mtp_loss_scaled_per_rank(
    original: Original, self: LossNormalizer, losses: Mapping[str, Tensor]
) -> Tensor:
    """MTP losses are divided by a rank's part of the labels."""
    scaled = {
        name: loss if name == MAIN_LOSS else loss * self.mesh.dp_cp.size
        for name, loss in losses.items()
    }
    loss: Tensor = original(self, scaled)
    return loss


# --- context parallelism


@replaces(context, "start_ring_exchange", "cp")
def ring_never_turned(original: Original, x: Tensor, group: Group) -> PendingCollective:
    """Ring attention never exchanges keys and values."""
    return PendingCollective(x.clone())


@replaces(context, "_return_gradients", "cp")
def ring_gradients_kept(
    original: Original, sums: Tensor, pending: PendingCollective | None, group: Group
) -> PendingCollective:
    """Gradients of keys and values are not sent back to the rank that owns them."""
    return PendingCollective(sums if pending is None else sums + pending.x, None)


@replaces(loader, "seq_params_from_slices", "cp")
def cp_positions_local(original: Original, *arguments: Any, **others: Any) -> PackedSeqParams:
    """Position ids count tokens of the context-parallel slice, not of the document."""
    tokens: PackedSeqParams = original(*arguments, **others)
    return replace(
        tokens, position_ids=torch.arange(tokens.num_tokens, device=tokens.position_ids.device)
    )


@replaces(loader, "with_multimodal_positions", "cp, places")
def cp_places_of_the_first_slice(
    original: Original, tokens: PackedSeqParams, places: Numbers
) -> PackedSeqParams:
    """Every context-parallel rank uses the multimodal position ids of the first slice."""
    return replace(tokens, position_ids=torch.from_numpy(places[:, : tokens.num_tokens]))


@replaces(Slices, "as_read", "cp")
def cp_chunks_swapped(original: Original, self: Slices, rank: int) -> Numbers:
    """A context-parallel rank swaps its two zig-zag chunks."""
    rows = np.split(original(self, rank), self.repeats)
    return np.concatenate([np.roll(row, len(row) // 2) for row in rows])


@replaces(context, "dropped_weights_by_group", "cp, dropped weights")
def cp_weights_dropped_by_own_numbers(
    original: Original,
    shard: ContextShard,
    dropout_key: DropoutKey | None,
    scores: Scores,
    near: int,
) -> list[DroppedWeights] | None:
    """Ring attention uses the rank's own token numbers for the attention dropout of all keys."""
    dropped = original(shard, dropout_key, scores, near)
    return dropped and [replace(one, keys=one.queries) for one in dropped]


@replaces(loader, "with_dropout", "dp, dropout")
def dropout_per_rank(original: Original, batch: Batch, rows: Sequence[int], *, seed: int) -> Batch:
    """Every rank numbers its rows from zero, so that all use the same dropout masks."""
    numbered: Batch = original(batch, range(len(rows)), seed=seed)
    return numbered


@replaces(context, "reorder", "cp, gather")
def cp_gather_unsorted(original: Original, x: Tensor, join: TokenPermutation) -> Tensor:
    """All-gathered keys and values are not reordered from zig-zag chunks."""
    return x


@replaces(context, "exchange_heads_for_tokens", "cp, a2a")
def a2a_heads_swapped(
    original: Original, out: Tensor, group: Group, join: TokenPermutation
) -> Tensor:
    """The all-to-all returns heads at the positions of another rank's heads."""
    y: Tensor = original(out, group, join)
    return y.roll(out.shape[1], dims=1)


@replaces(packed, "plan_spans", "cp, documents, window, chunks of documents")
def chunks_of_rows(
    original: Original, queries: Numbers, keys: Numbers, starts: Numbers, **others: Any
) -> KeySpans:
    """Attention chunks are counted from the first token of all documents."""
    size = others["window"]
    if not size:
        return plan_spans(queries, keys, starts, **others)
    return plan_spans(queries, keys, np.maximum(starts, np.arange(len(starts)) // size * size))


@replaces(packed, "plan_spans", "cp, documents")
def documents_joined_across_ranks(
    original: Original, queries: Numbers, keys: Numbers, starts: Numbers, **others: Any
) -> KeySpans:
    """Document boundaries are ignored where the keys belong to another rank."""
    own = np.array_equal(queries, keys)
    return plan_spans(queries, keys, starts if own else np.zeros_like(starts), **others)


@replaces(ContextShard, "key_spans_by_group", "cp, window")
def window_lost_in_ring(
    original: Original, self: ContextShard, near: int, *, causal: bool = True, **windows: Any
) -> tuple[KeySpans, ...]:
    """Ring attention ignores the sliding window."""
    spans: tuple[KeySpans, ...] = original(self, near, causal=causal)
    return spans


class SinksInEveryStep:
    """Ring attention in which every step adds the attention sinks to the softmax again."""

    def __init__(self) -> None:
        self.first = True
        self.sinks = torch.empty(0)

    def init_attention_result(self, *arguments: Any, **others: Any) -> PartialAttention:
        """Return the result before the first step of the ring."""
        result = init_attention_result(*arguments, **others)
        self.first, self.sinks = True, result.lse.clone()
        return result

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, spans: KeySpans, result: PartialAttention, *more: Any
    ) -> None:
        """Add one step of the ring to the result, and the sinks again."""
        attend(q, k, v, spans, result, *more)
        if not self.first:
            lse = torch.logaddexp(result.lse, self.sinks)
            result.out.mul_((result.lse - lse).exp_().unsqueeze(-1))
            result.lse.copy_(lse)
        self.first = False


@plants("cp, sinks")
@contextmanager
def sinks_in_every_step() -> Iterator[None]:
    """Attention sinks are added to the softmax in each step of the ring."""
    steps = SinksInEveryStep()
    with patched(context, "init_attention_result", steps.init_attention_result):
        with patched(context, "attend", steps.attend):
            yield


@replaces(ContextShard, "token_numbers_by_group", "cp, biases by distance")
def distances_within_a_rank(
    original: Original, self: ContextShard, near: int
) -> tuple[Tensor, ...]:
    """Relative position biases use distances on the rank, not in the document."""
    return tuple(torch.arange(len(part), device=part.device) for part in original(self, near))


@replaces(context, "select_local_heads", "cp, a2a, biases by distance")
def biases_of_other_heads(original: Original, weight: Tensor | None, group: Group) -> Tensor | None:
    """After the all-to-all over heads, every rank uses the biases of the first rank's heads."""
    return None if weight is None else weight.unflatten(-1, (group.size, -1))[..., 0, :]


@replaces(context, "init_attention_result", "cp, off by one")
def extra_score_left_out(
    original: Original,
    q: Tensor,
    width: int,
    sinks: Tensor | None = None,
    *,
    off_by_one: bool = False,
) -> PartialAttention:
    """Ring attention omits the additional score of off-by-one softmax."""
    result: PartialAttention = original(q, width, sinks)
    return result


@replaces(context, "pair_masks_by_group", "cp, masks")
def masks_of_another_rank(
    original: Original, shard: ContextShard, near: int
) -> list[PairMask] | None:
    """Every rank uses the attention-mask rows of the first rank's tokens."""
    visible = original(shard, near)
    first = shard.token_numbers_by_group(near)[0]
    return visible and [PairMask(pairs.visible, first, pairs.keys) for pairs in visible]


@replaces(context, "pair_masks_by_group", "cp, masks")
def masks_forgotten(original: Original, shard: ContextShard, near: int) -> list[PairMask] | None:
    """Attention masks are applied on the first rank only."""
    visible: list[PairMask] | None = original(shard, near)
    return visible if shard.rank == 0 else None


@replaces(CrossLayerAttention, "attend", "cp, memory")
def memory_of_later_tokens(
    original: Original,
    self: CrossLayerAttention,
    x: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: LayerInputs,
    cache: LayerCache | None,
) -> Tensor:
    """Cross-layer attention is not causal, so tokens attend to later ones."""
    self.scores = replace(self.scores, causal=False)
    y: Tensor = original(self, x, k, v, inputs, cache)
    return y


# --- norms, embeddings, latent attention and adapters


@replaces(norm, "all_reduce", "tp, whole norms", found_by="types")
def whole_norm_local(original: Original, x: Tensor, group: Group) -> Tensor:
    """QK norms over all heads are computed over the rank's own heads."""
    return x


@changes_model("tp, whole tokens, latent")
def latent_key_not_entered(model: Decoder, mesh: Mesh) -> None:
    """Backward of the shared latent-attention key does not sum its gradient over tp."""
    _patch_tp_comm(model, LatentAttention, prepare=_identity)


@replaces(LearnedPositions, "forward", "tp, sp, learned positions")
def positions_of_first_rank(
    original: Original, self: LearnedPositions, x: Tensor, inputs: LayerInputs
) -> Tensor:
    """Under sp, each rank adds the learned positions of the first slice."""
    return x + embedding(inputs.seq_params.position_ids[: len(x)], self.weight)


@replaces(lora, "column_adapter", "tp, sp, adapters", found_by="types")
def adapter_invariant(
    original: Original, weight: Shard, adapters: LoraConfig, tp_comm: TPComm
) -> tuple[Shard, Shard]:
    """The replicated half of an adapter is declared invariant under sp."""
    a, b = original(weight, adapters, tp_comm)
    return replace(a, invariant=frozenset(tp_comm.group.axes)), b


@replaces(lora, "first_input_feature", "tp, adapters, dropout")
def adapter_mask_of_first_slice(original: Original, weight: Shard) -> int:
    """Every rank uses the first rank's dropout mask for the input of an adapter."""
    return 0


# --- activation checkpointing and offload


class StaleRecompute:
    """Recomputation whose second pass reads the input of an earlier call."""

    def __init__(self) -> None:
        self.recompute = recompute.recompute
        self.last: Tensor | None = None

    def __call__(
        self, function: Callable[..., Tensor], x: Tensor, *others: Tensor, check: bool = False
    ) -> Tensor:
        before = x if self.last is None or self.last.shape != x.shape else self.last
        self.last = x.detach().requires_grad_(x.requires_grad)
        return self.recompute(StaleSecondPass(function, before), x, *others, check=check)


class StaleSecondPass:
    """Function whose second call reads another input."""

    def __init__(self, function: Callable[..., Tensor], before: Tensor) -> None:
        self.function, self.before, self.first = function, before, True

    def __call__(self, x: Tensor, *others: Tensor) -> Tensor:
        first, self.first = self.first, False
        return self.function(x if first else self.before, *others)


@plants("dp, recompute")
def stale_input_recomputed() -> AbstractContextManager[None]:
    """Recomputation in backward reads the input of an earlier microbatch."""
    return patched(recompute, "recompute", StaleRecompute())


@changes_model("tp, whole tokens, recompute")
def second_sum_removed(model: Decoder, mesh: Mesh) -> None:
    """Recomputation in backward omits the sum over tp."""
    right = _reduction(model.tp_comm, mesh.tp)

    def reduce_in_forward(x: Tensor) -> Tensor:
        in_backward = torch._C._current_graph_task_id() != -1
        return x if in_backward else right(x)

    _patch_tp_comm(model, RowParallelLinear, reduce=reduce_in_forward)


@replaces(OffloadedStorage, "storage", "dp, offload")
def host_copy_lost(original: Original, self: OffloadedStorage) -> torch.UntypedStorage:
    """Offloaded activations are restored as zeros."""
    return torch.zeros_like(self.host).to(self.device).untyped_storage()
