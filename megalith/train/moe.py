"""Expert load of a step: updates of the expert bias, expert load metrics, and routing replay
across layouts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megalith.data.loader import Batch
from megalith.errors import DataError
from megalith.kernels.layer_inputs import MicrobatchRouting, RoutingRecord
from megalith.kernels.packed import PackedSeqParams
from megalith.nn.moe import LOSSES, Router, RoutingStats
from megalith.observe.metrics import Value
from megalith.parallel.group import all_reduce_, gather_objects
from megalith.parallel.mesh import Mesh


def iter_routers(model: nn.Module) -> Iterator[Router]:
    """Yield every router in the order of the layers."""
    return (module for module in model.modules() if isinstance(module, Router))


def iter_trained_routers(model: nn.Module) -> Iterator[tuple[Router, RoutingStats]]:
    """Yield the trained routers that have recorded routing statistics, with their records."""
    for router in iter_routers(model):
        record = router.balance.record
        if record is not None and any(
            weight.requires_grad for weight in router.gate.accumulated_parameters()
        ):
            yield router, record


def list_routing_sums(model: nn.Module, device: torch.device) -> list[Tensor]:
    """Return the statistics of the last step on this rank: per router token counts, dropped choices
    and quantile offsets, summed over its microbatches, and the means of the aux losses. In place of
    records that do not exist yet: zeros.

    They become the record of one microbatch, so that what replica groups add to them counts as part
    of the step.
    """
    sums = []
    for router in iter_routers(model):
        record = router.balance.record or router.balance.reset_record(1, device)
        router.balance.record = merged = RoutingStats(
            record.counts.sum(0, keepdim=True),
            record.chosen.sum(0, keepdim=True),
            record.num_dropped.sum(0, keepdim=True),
            record.losses.mean(0, keepdim=True),
            record.offsets.sum(0, keepdim=True),
        )
        sums += [merged.counts, merged.num_dropped, merged.losses, merged.offsets]
    return sums


def update_expert_biases(model: nn.Module, mesh: Mesh) -> None:
    """Update the expert bias after a step: raise it for underused experts, lower it for overused
    ones.

    Routers that are not trained keep their biases. One all-reduce over the ranks with the same
    layers. Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1.
    """
    counted = [
        (router, bias, record)
        for router, record in iter_trained_routers(model)
        if (bias := router.expert_bias) is not None
    ]
    if not counted:
        return
    counts = all_reduce_(
        torch.stack([record.counts.sum(0) for _, _, record in counted]), mesh.over("dp", "cp", "tp")
    )
    for (router, bias, _), count in zip(counted, counts, strict=True):
        rate = router.moe.router.expert_bias_update_rate
        bias.data.add_((count.mean() - count).sign().to(bias.dtype), alpha=rate)


def update_quantile_offsets(model: nn.Module, mesh: Mesh) -> None:
    """Update the quantile offsets of the router logits after a step, so that experts are equally
    loaded.

    The offsets are averaged over the microbatches with tokens, smoothed by `quantile_ema`, and
    centered to a mean of 0 over the experts, which changes no choice. One all-reduce over the ranks
    with the same layers.
    """
    counted = [
        (router, offset, record)
        for router, record in iter_trained_routers(model)
        if (offset := router.offset) is not None
    ]
    if not counted:
        return
    sums = all_reduce_(
        torch.stack([record.offsets.sum(0) for _, _, record in counted]),
        mesh.over("dp", "cp", "tp"),
    )
    for (router, offset, _), row in zip(counted, sums, strict=True):
        ema = router.moe.aux_loss.quantile_ema
        updated = ema * offset.data.double() + (1 - ema) * row[:-1] / row[-1].clamp(min=1)
        offset.data.copy_(updated - updated.mean())


def attach_routing(batches: Sequence[Batch], routing: RoutingRecord) -> list[Batch]:
    """Return microbatches whose expert choices are recorded in `routing`, or replayed from it.

    The choices are of this rank's own tokens and layers: they must be replayed under the same
    layout.
    """
    return [
        replace(batch, routing=MicrobatchRouting(routing, number))
        for number, batch in enumerate(batches)
    ]


class LayerExpertLoad(NamedTuple):
    """Expert load of one layer in a step."""

    layer: str
    """Name of the layer, as in its parameters: `layers.3`."""

    counts: tuple[float, ...]
    """Number of tokens of each expert."""

    num_dropped: float
    """Number of dropped choices, beyond the expert capacity."""

    losses: tuple[float, ...]
    """Aux losses, in the order of `LOSSES`, without their coefficients: means over the
    microbatches."""

    bias_range: float
    """Largest minus smallest expert bias; 0 without an expert bias."""


def collect_expert_load(model: nn.Module, mesh: Mesh) -> list[LayerExpertLoad]:
    """Return the expert load of all layers in the last step, in their order. Collective; two
    messages.

    The result is the same on every rank. Pipeline stages without experts take part. Empty before
    the first step.
    """
    routers = [router for router in iter_routers(model) if router.balance.record is not None]
    local_rows = [_local_row(router) for router in routers]
    if local_rows:
        sums = all_reduce_(torch.stack(local_rows), mesh.over("dp", "cp", "tp")).tolist()
        loads = [
            _build_layer_load(router, row, mesh) for router, row in zip(routers, sums, strict=True)
        ]
    else:
        loads = []
    gathered = gather_objects(loads, mesh.pp)
    all_loads = [load for part in gathered if isinstance(part, list) for load in part]
    return sorted(all_loads, key=lambda load: layer_sort_key(load.layer))


def _local_row(router: Router) -> Tensor:
    """Return token counts, dropped choices and aux losses of a step on this rank: [E + 1 +
    losses]."""
    record = router.balance.record
    assert record is not None
    microbatches = len(record.counts)
    return torch.cat(
        [
            record.counts.sum(0),
            record.num_dropped.sum(0, keepdim=True),
            record.losses.sum(0) / microbatches,
        ]
    )


def _build_layer_load(router: Router, row: Sequence[float], mesh: Mesh) -> LayerExpertLoad:
    experts = router.moe.num_experts
    bias = router.expert_bias
    spread = 0.0 if bias is None else float(bias.max() - bias.min())
    losses = tuple(value / mesh.dp.size for value in row[experts + 1 :])
    return LayerExpertLoad(router.layer, tuple(row[:experts]), row[experts], losses, spread)


def layer_sort_key(layer: str) -> tuple[bool, int]:
    """Return the sort key of a layer name: layers by number, then MTP layers."""
    kind, number = layer.split(".")[:2]
    return kind != "layers", int(number)


def _entropy(counts: Sequence[float]) -> float:
    """Return the entropy of the expert shares, relative to equal shares; 1 without choices."""
    total = sum(counts)
    shares = [count / total for count in counts if count > 0]
    return (
        -sum(share * math.log(share) for share in shares) / math.log(len(counts))
        if shares and counts[1:]
        else 1.0
    )


def expert_load_metrics(
    uses: Sequence[LayerExpertLoad], weights: Sequence[float], *, per_layer: bool = False
) -> dict[str, Value]:
    """Return the expert load metrics for metrics.jsonl; aux losses with coefficient 0 are left out.

    `weights`: coefficients of the aux losses. The load is the token count of the busiest expert
    divided by the mean over experts. The entropy is 1 if all experts are equally loaded; the
    minimum over layers is reported. `per_layer`: also report each layer's own metrics.
    """
    if not uses:
        return {}
    loads = {
        use.layer: max(use.counts) * len(use.counts) / max(sum(use.counts), 1.0) for use in uses
    }
    means = [sum(use.losses[kind] for use in uses) / len(uses) for kind in range(len(LOSSES))]
    row = _named_losses(means, weights)
    row["moe_max_load"] = round(max(loads.values()), 4)
    row["moe_entropy"] = round(min(_entropy(use.counts) for use in uses), 4)
    row["moe_idle_experts"] = sum(count == 0 for use in uses for count in use.counts)
    row["moe_dropped_share"] = _dropped_share(uses)
    if (spread := max(use.bias_range for use in uses)) > 0:
        row["moe_bias_range"] = round(spread, 6)
    row |= {f"moe_{layer.replace('.', '_')}_load": round(load, 4) for layer, load in loads.items()}
    for use in uses if per_layer else ():
        row |= _layer_metrics(use, weights)
    return row


def _layer_metrics(use: LayerExpertLoad, weights: Sequence[float]) -> dict[str, Value]:
    """Return the metrics of one layer, with its name in the keys, and the tokens of each expert."""
    row = expert_load_metrics([use], weights)
    own = {name: value for name, value in row.items() if not name.endswith("_load")}
    own["moe_tokens"] = [int(count) for count in use.counts]
    return {
        f"moe_{use.layer.replace('.', '_')}_{name.removeprefix('moe_')}": value
        for name, value in own.items()
    }


def _named_losses(values: Sequence[float], weights: Sequence[float]) -> dict[str, Value]:
    """Return the aux losses that have a coefficient."""
    named = zip(LOSSES, values, weights, strict=True)
    return {f"moe_{name}_loss": round(value, 6) for name, value, weight in named if weight > 0}


def _dropped_share(uses: Sequence[LayerExpertLoad]) -> float:
    """Return the share of dropped choices among all choices of the given layers."""
    chosen = sum(sum(use.counts) + use.num_dropped for use in uses)
    return round(sum(use.num_dropped for use in uses) / max(chosen, 1.0), 6)


# Routing replay across layouts: gathers the expert choices of a step, and shards them for another
# layout.
#
# Routers record the choices of one rank's own tokens and layers. In the order in which tokens were
# read, the choices are the same under every layout of the same global batch, so they can also come
# from rollouts or from runs with other layouts.

Numbers = NDArray[np.int64]


class RoutingPart(NamedTuple):
    """Expert choices of one rank in one layer and microbatch."""

    layer: str
    microbatch: int
    numbers: Numbers
    """[n]: indices of the tokens in the step, in reading order."""

    experts: NDArray[np.int32]
    """[n, k]."""


def gather_routing(
    routing: RoutingRecord, batches: Sequence[Batch], mesh: Mesh
) -> dict[str, Tensor]:
    """Return the expert choices of a step by layer: int64 [tokens of the global batch, k], in
    reading order.

    The result is the same on every rank. Collective over the mesh, through host memory: for tests,
    debugging and short rollouts.

    Raises:
        DataError: a microbatch of the step was not recorded, or microbatches have different sizes.
    """
    local_sizes = {_tokens_read(batch.seq_params) for batch in batches}
    local_routing = local_sizes, list(iter_routing_parts(routing, batches, mesh))
    gathered = [
        rank_routing
        for rank_routing in gather_objects(local_routing, mesh.world)
        if isinstance(rank_routing, tuple)
    ]
    tokens = _common_size({size for sizes, _ in gathered for size in sizes})
    size = len(batches) * mesh.dp.size * tokens
    all_parts = [part for _, rank_parts in gathered for part in rank_parts]
    step_choices: dict[str, NDArray[np.int64]] = {}
    for layer, _, numbers, experts in all_parts:
        step_choices.setdefault(layer, np.full((size, experts.shape[1]), -1))[numbers] = experts
    for layer, choices in step_choices.items():
        missing = int((choices[:, 0] < 0).sum())
        if missing:
            raise DataError(
                f"{layer}: expert choices of {missing} of the step's {size} tokens were not "
                "recorded. Record every microbatch of the step on all ranks, and pass the same "
                "microbatches to gather_routing."
            )
    return {layer: torch.from_numpy(step_choices[layer]) for layer in sorted(step_choices)}


def shard_routing(
    whole: Mapping[str, Tensor], batches: Sequence[Batch], model: nn.Module, mesh: Mesh, *, sp: bool
) -> RoutingRecord:
    """Return this rank's part of the expert choices of a step, to be replayed, by layer and
    microbatch.

    whole: by layer, [tokens of the global batch, k], as returned by `gather_routing`. Padding
    tokens choose the first experts.

    Raises:
        DataError: a layer is missing, or the number of tokens differs.
    """
    choices = {}
    for layer in (router.layer for router in iter_routers(model)):
        num_tokens = _common_size({_tokens_read(batch.seq_params) for batch in batches})
        experts = _checked_choices(whole, layer, len(batches) * mesh.dp.size * num_tokens)
        for number, batch in enumerate(batches):
            count = batch.seq_params.num_tokens // (mesh.tp.size if sp else 1)
            numbers = torch.from_numpy(token_numbers(number, batch.seq_params, count, mesh)).to(
                experts.device
            )
            padding = torch.arange(experts.shape[1], device=experts.device)
            choices[layer, number] = experts[numbers].where((numbers >= 0).unsqueeze(1), padding)
    return RoutingRecord(choices, followed=True)


def iter_routing_parts(
    routing: RoutingRecord, batches: Sequence[Batch], mesh: Mesh, *, filler: bool = True
) -> Iterator[RoutingPart]:
    """Yield the choices that this rank recorded, by layer and microbatch, without padding.

    With `filler=False`, filler tokens of packed batches are left out too.
    """
    for (layer, number), experts in routing.choices.items():
        seq_params, count = batches[number].seq_params, len(experts)
        numbers = token_numbers(number, seq_params, count, mesh)
        selected = numbers >= 0 if filler else text_token_mask(seq_params, count, mesh)
        yield RoutingPart(
            layer, number, numbers[selected], experts.cpu().numpy().astype(np.int32)[selected]
        )


def text_token_mask(seq_params: PackedSeqParams, count: int, mesh: Mesh) -> NDArray[np.bool_]:
    """Return which of this rank's `count` tokens of a microbatch are text, not padding or filler:
    [count]."""
    valid: NDArray[np.bool_] = seq_params.valid.cpu().numpy()
    first = 0 if count == len(valid) else mesh.tp.rank * count
    return valid[first : first + count]


def token_numbers(number: int, seq_params: PackedSeqParams, count: int, mesh: Mesh) -> Numbers:
    """Return the indices in the step of this rank's `count` tokens of a microbatch; -1 for padding.

    A step reads one microbatch of every data-parallel rank after the other.
    """
    context = seq_params.context
    read = (
        np.arange(seq_params.num_tokens)
        if context is None
        else context.slices.as_read(context.rank)
    )
    first = 0 if count == len(read) else mesh.tp.rank * count
    local_indices = read[first : first + count]
    start = (number * mesh.dp.size + mesh.dp.rank) * _tokens_read(seq_params)
    numbers: Numbers = np.where(local_indices >= 0, start + local_indices, -1)
    return numbers


def _tokens_read(seq_params: PackedSeqParams) -> int:
    """Return the tokens of a microbatch over the ranks that share it, without padding of the
    layout."""
    source = None if seq_params.context is None else seq_params.context.slices.source
    return seq_params.whole.num_tokens if source is None else int(np.count_nonzero(source >= 0))


def _common_size(sizes: set[int]) -> int:
    """Return the number of tokens that every microbatch of a step reads."""
    if len(sizes) > 1:
        raise DataError(
            f"microbatches of {sorted(sizes)} tokens: routing replay needs microbatches of one "
            "size. Use train.seq_len without train.tokens_per_microbatch, or "
            "parallel.context.slicing=row."
        )
    return next(iter(sizes))


def _checked_choices(whole: Mapping[str, Tensor], layer: str, tokens: int) -> Tensor:
    if layer not in whole:
        raise DataError(
            f"{layer}: no expert choices to replay (layers with choices: "
            f"{', '.join(whole) or 'none'}). Pass those of a model with experts in the same layers."
        )
    if len(whole[layer]) != tokens:
        raise DataError(
            f"{layer}: expert choices of {len(whole[layer])} tokens for a step that reads "
            f"{tokens}. Use choices of the same train.global_batch_size and train.seq_len."
        )
    return whole[layer]
