"""Cross-layer routing predictability: the next layer's router, applied to a layer's router input.

If it chooses the same experts, their weights can be prefetched. Source: Eliseev and Mazur 2023,
arXiv:2312.17238, section 3.2.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megalith.checkpoint.safetensors import TensorInfo, read_box, read_header
from megalith.config.moe import MoEConfig
from megalith.kernels.routing import choose_experts
from megalith.observe.routing import (
    Place,
    TraceRow,
    count_common_experts,
    iter_adjacent_layers,
    pairs_in_order,
    read_trace_steps,
)

Headers = dict[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class RouterPrediction:
    """A layer's router applied to the hidden states of the same or the previous layer."""

    layer: str
    """Layer that the hidden states are the router input of."""

    router: str
    """Layer whose router is applied and whose choices are predicted."""

    tokens: int
    hits: float
    """Share of the tokens' k experts that the router predicts."""

    load: float
    """Cosine similarity of the predicted and the actual expert load."""


def apply_routers(folder: Path, moe: MoEConfig) -> list[RouterPrediction]:
    """Apply each layer's router to its own hidden states and to those of the previous layer.

    Returns an empty list if the trace has no captures of hidden states and routers. On its own
    hidden states a router predicts all choices, except for bf16 rounding, router noise and
    sinkhorn.

    Raises:
        DataError, CheckpointError: the trace or a captures file is damaged or missing.
    """
    counts_by_pair: dict[tuple[str, str], list[np.ndarray[tuple[int], np.dtype[np.float64]]]] = {}
    for _, layers in read_trace_steps(folder):
        headers = {path: read_header(path) for path in _capture_files(layers)}
        routers = {layer: _router(layer, headers.values()) for layer in layers}
        pairs = [
            (layer, layer, row, row) for layer, rows in layers.items() for row in rows.values()
        ]
        for layer, next_layer, before, after in (*pairs, *iter_adjacent_layers(layers)):
            hidden, router = _hidden(before, headers), routers[next_layer]
            if hidden is None or not router:
                continue
            chosen = predict_experts(hidden, router, moe).numpy()
            row = [count_common_experts(chosen, after.experts), after.experts.size]
            counts = [
                np.bincount(one.ravel(), minlength=moe.num_experts)
                for one in (chosen, after.experts)
            ]
            counts_by_pair.setdefault((layer, next_layer), []).append(
                np.concatenate([row, *counts]).astype(np.float64)
            )
    return [
        _applied(names, np.sum(counts_by_pair[names], axis=0), moe)
        for names in pairs_in_order(counts_by_pair)
    ]


def predict_experts(hidden: Tensor, router: Mapping[str, Tensor], moe: MoEConfig) -> Tensor:
    """Return the experts that a router (`weight`, biases, offsets) chooses for hidden states [t,
    h]: int64 [t, k]."""
    weight = router["weight"].to(torch.promote_types(router["weight"].dtype, torch.float32))
    logits = hidden.to(weight.dtype) @ weight.t()
    if "router_bias" in router:
        logits = logits + router["router_bias"].to(logits.dtype)
    bias, offsets = router.get("balancing_bias"), router.get("balancing_offset")
    return choose_experts(logits, moe.router, moe.top_k, bias, offsets=offsets).experts


def _capture_files(layers: Mapping[str, dict[Place, TraceRow]]) -> set[Path]:
    return {
        row.capture_file
        for rows in layers.values()
        for row in rows.values()
        if row.capture_file is not None
    }


def _router(layer: str, headers: Iterable[Headers]) -> dict[str, Tensor]:
    """Return the tensors of a layer's router, from the rank that captured them."""
    start = f"{layer}/router/"
    return {
        name.removeprefix(start): read_box(name, info, (slice(None),) * len(info.shape))
        for header in headers
        for name, info in header.items()
        if name.startswith(start)
    }


def _hidden(row: TraceRow, headers: Mapping[Path, Headers]) -> Tensor | None:
    if row.capture_file is None:
        return None
    name = f"{row.layer}/{row.place[3]}/hidden"
    info = headers[row.capture_file].get(name)
    return None if info is None else read_box(name, info, (slice(None), slice(None)))


def _applied(
    names: tuple[str, str], row: np.ndarray[tuple[int], np.dtype[np.float64]], moe: MoEConfig
) -> RouterPrediction:
    predicted, actual = row[2 : 2 + moe.num_experts], row[2 + moe.num_experts :]
    norms = float(np.linalg.norm(predicted) * np.linalg.norm(actual))
    return RouterPrediction(
        *names,
        tokens=int(row[1]) // moe.top_k,
        hits=float(row[0] / max(row[1], 1)),
        load=float(predicted @ actual) / norms if norms else 1.0,
    )
