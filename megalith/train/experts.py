"""Experts over a step: the biases that even out their use, and what a run tells of it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalith.data.loader import Batch
from megalith.kernels.replay import Route, Routing
from megalith.nn.moe.balance import LOSSES, Record
from megalith.nn.moe.router import Router
from megalith.observe.metrics import Value
from megalith.parallel.group import all_reduce_, gather_objects
from megalith.parallel.mesh import Mesh


def routers_of(model: nn.Module) -> Iterator[Router]:
    """Every router, in the order of the layers."""
    return (module for module in model.modules() if isinstance(module, Router))


def learning(model: nn.Module) -> Iterator[tuple[Router, Record]]:
    """Routers that are trained and have counted something, and what."""
    for router in routers_of(model):
        record = router.balance.record
        if record is not None and any(
            weight.requires_grad for weight in router.gate.accumulated_parameters()
        ):
            yield router, record


def move_balancing_biases(model: nn.Module, mesh: Mesh) -> None:
    """After a step, make experts that were chosen too seldom more likely to be chosen, and those
    too often less.

    Routers that are not trained keep their biases. Collective over the ranks with the same layers;
    one message. Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1.
    """
    counted = [
        (router, bias, record)
        for router, record in learning(model)
        if (bias := router.moved) is not None
    ]
    if not counted:
        return
    counts = all_reduce_(
        torch.stack([record.counts.sum(0) for _, _, record in counted]), mesh.over("dp", "cp", "tp")
    )
    for (router, bias, _), count in zip(counted, counts, strict=True):
        rate = router.moe.router.expert_bias_update_rate
        bias.data.add_((count.mean() - count).sign().to(bias.dtype), alpha=rate)


def move_balancing_offsets(model: nn.Module, mesh: Mesh) -> None:
    """After a step, take from the logits of experts what would have made them equally busy in it,
    on average.

    Offsets are those of the microbatches that had tokens; of these before the step `quantile_ema`
    remains. Their mean over the experts, which changes no choice, is 0. Collective over the ranks
    with the same layers; one message.
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
        kept = router.moe.aux_loss.quantile_ema
        fresh = kept * offset.data.double() + (1 - kept) * row[:-1] / row[-1].clamp(min=1)
        offset.data.copy_(fresh - fresh.mean())


def with_routing(batches: Sequence[Batch], routing: Routing) -> list[Batch]:
    """Microbatches whose choices of experts are written into `routing`, or follow it
    (`routing.again()`).

    Choices are of a rank's own tokens and layers: they are replayed under the layout that they were
    recorded under.
    """
    return [
        replace(batch, tokens=replace(batch.tokens, route=Route(routing, number)))
        for number, batch in enumerate(batches)
    ]


class LayerExpertLoad(NamedTuple):
    """What the experts of one layer did in a step."""

    layer: str
    """As its parameters are named: `layers.3`."""

    counts: tuple[float, ...]
    """PackedSeqParams that went to each expert."""

    refused: float
    """Choices that were refused."""

    losses: tuple[float, ...]
    """Of balance, as in `LOSSES`, each without its weight: means over the microbatches."""

    bias_range: float
    """Largest balancing bias less the smallest; 0 without."""


def collect_expert_load(model: nn.Module, mesh: Mesh) -> list[LayerExpertLoad]:
    """What all layers did in the last step, in their order, the same on every rank. Collective; two
    messages.

    A stage without experts takes part. Nothing was recorded before the first step: then it is
    empty.
    """
    routers = [router for router in routers_of(model) if router.balance.record is not None]
    found = [_rows_of(router) for router in routers]
    if found:
        sums = all_reduce_(torch.stack(found), mesh.over("dp", "cp", "tp")).tolist()
        uses = [_use_of(router, row, mesh) for router, row in zip(routers, sums, strict=True)]
    else:
        uses = []
    every = gather_objects(uses, mesh.pp)
    joined = [use for part in every if isinstance(part, list) for use in part]
    return sorted(joined, key=lambda use: in_order(use.layer))


def _rows_of(router: Router) -> Tensor:
    """Counts, refused choices and losses of a step on this rank: [E + 1 + losses]."""
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


def _use_of(router: Router, row: Sequence[float], mesh: Mesh) -> LayerExpertLoad:
    experts = router.moe.num_experts
    bias = router.moved
    spread = 0.0 if bias is None else float(bias.max() - bias.min())
    losses = tuple(value / mesh.dp.size for value in row[experts + 1 :])
    return LayerExpertLoad(router.layer, tuple(row[:experts]), row[experts], losses, spread)


def in_order(layer: str) -> tuple[bool, int]:
    """Layers by number, and after them MTP layers."""
    kind, number = layer.split(".")[:2]
    return kind != "layers", int(number)


def _entropy(counts: Sequence[float]) -> float:
    """Of shares of the choices, where 1 is that of equal shares; 1 without any."""
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
    """What metrics.jsonl tells of it; `weights`: of the losses in the config, of which the others
    are left out.

    A load is how many tokens the busiest expert had, where 1 is the mean over experts; the entropy
    of who was chosen is 1 when all are equally busy, and that of the layer where it is least.
    `per_layer`: and what each layer did alone.
    """
    if not uses:
        return {}
    loads = {
        use.layer: max(use.counts) * len(use.counts) / max(sum(use.counts), 1.0) for use in uses
    }
    means = [sum(use.losses[kind] for use in uses) / len(uses) for kind in range(len(LOSSES))]
    row = _losses(means, weights)
    row["moe_max_load"] = round(max(loads.values()), 4)
    row["moe_entropy"] = round(min(_entropy(use.counts) for use in uses), 4)
    row["moe_idle_experts"] = sum(count == 0 for use in uses for count in use.counts)
    row["moe_dropped_share"] = _share_refused(uses)
    if (spread := max(use.bias_range for use in uses)) > 0:
        row["moe_bias_range"] = round(spread, 6)
    row |= {f"moe_{layer.replace('.', '_')}_load": round(load, 4) for layer, load in loads.items()}
    for use in uses if per_layer else ():
        row |= _layer_metrics(use, weights)
    return row


def _layer_metrics(use: LayerExpertLoad, weights: Sequence[float]) -> dict[str, Value]:
    """The same of one layer, named after it, and the tokens of each expert."""
    row = expert_load_metrics([use], weights)
    own = {name: value for name, value in row.items() if not name.endswith("_load")}
    own["moe_tokens"] = [int(count) for count in use.counts]
    return {
        f"moe_{use.layer.replace('.', '_')}_{name.removeprefix('moe_')}": value
        for name, value in own.items()
    }


def _losses(values: Sequence[float], weights: Sequence[float]) -> dict[str, Value]:
    """Those that have a weight."""
    named = zip(LOSSES, values, weights, strict=True)
    return {f"moe_{name}_loss": round(value, 6) for name, value, weight in named if weight > 0}


def _share_refused(uses: Sequence[LayerExpertLoad]) -> float:
    """Of all choices of some layers."""
    chosen = sum(sum(use.counts) + use.refused for use in uses)
    return round(sum(use.refused for use in uses) / max(chosen, 1.0), 6)
