"""Expert load of a step: updates of the expert bias, routing replay and expert load metrics."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalith.data.loader import Batch
from megalith.kernels.replay import MicrobatchRouting, RoutingRecord
from megalith.nn.moe.balance import LOSSES, RoutingStats
from megalith.nn.moe.router import Router
from megalith.observe.metrics import Value
from megalith.parallel.group import all_reduce_, gather_objects
from megalith.parallel.mesh import Mesh


def iter_routers(model: nn.Module) -> Iterator[Router]:
    """Yield every router in the order of the layers."""
    return (module for module in model.modules() if isinstance(module, Router))


def learning(model: nn.Module) -> Iterator[tuple[Router, RoutingStats]]:
    """Yield the trained routers that have recorded routing statistics, with their records."""
    for router in iter_routers(model):
        record = router.balance.record
        if record is not None and any(
            weight.requires_grad for weight in router.gate.accumulated_parameters()
        ):
            yield router, record


def update_expert_biases(model: nn.Module, mesh: Mesh) -> None:
    """Update the expert bias after a step: raise it for underused experts, lower it for overused
    ones.

    Routers that are not trained keep their biases. One all-reduce over the ranks with the same
    layers. Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1.
    """
    counted = [
        (router, bias, record)
        for router, record in learning(model)
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
        for router, record in learning(model)
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
        replace(batch, tokens=replace(batch.tokens, route=MicrobatchRouting(routing, number)))
        for number, batch in enumerate(batches)
    ]


class LayerExpertLoad(NamedTuple):
    """Expert load of one layer in a step."""

    layer: str
    """Name of the layer, as in its parameters: `layers.3`."""

    counts: tuple[float, ...]
    """Number of tokens of each expert."""

    refused: float
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
            record.refused.sum(0, keepdim=True),
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
    chosen = sum(sum(use.counts) + use.refused for use in uses)
    return round(sum(use.refused for use in uses) / max(chosen, 1.0), 6)
