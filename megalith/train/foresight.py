"""How far the next layer's router, given what a layer's router reads, foretells what tokens choose
there.

That is what lets experts be fetched before they are needed. Source: Eliseev and Mazur 2023,
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
    Chosen,
    Place,
    common,
    neighbors,
    pairs_in_order,
    steps_of_trace,
)

Headers = dict[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class Applied:
    """A layer's router on what that of a layer read, which may be the same."""

    layer: str
    """Whose hidden states."""

    router: str
    """Whose router, and choices."""

    tokens: int
    hits: float
    """Which part of tokens' k choices it finds."""

    load: float
    """Cosine of how busy it says experts are, and how busy they were: 1 where these are the same up
    to a factor."""


def apply_routers(folder: Path, moe: MoEConfig) -> list[Applied]:
    """Each layer's router on its own hidden states, and on those of the layer before; nothing
    without such sidecars.

    On its own it finds all, but for what bf16, noise and a plan of sinkhorn change.

    Raises:
        DataError, CheckpointError: the trace or a file beside it is damaged or missing.
    """
    found: dict[tuple[str, str], list[np.ndarray[tuple[int], np.dtype[np.float64]]]] = {}
    for _, layers in steps_of_trace(folder):
        headers = {path: read_header(path) for path in _capture_files(layers)}
        routers = {layer: _router(layer, headers.values()) for layer in layers}
        pairs = [
            (layer, layer, row, row) for layer, rows in layers.items() for row in rows.values()
        ]
        for here, there, before, after in (*pairs, *neighbors(layers)):
            hidden, router = _hidden(before, headers), routers[there]
            if hidden is None or not router:
                continue
            chosen = choices_of(hidden, router, moe).numpy()
            row = [common(chosen, after.experts), after.experts.size]
            counts = [
                np.bincount(one.ravel(), minlength=moe.num_experts)
                for one in (chosen, after.experts)
            ]
            found.setdefault((here, there), []).append(
                np.concatenate([row, *counts]).astype(np.float64)
            )
    return [_applied(names, np.sum(found[names], axis=0), moe) for names in pairs_in_order(found)]


def choices_of(hidden: Tensor, router: Mapping[str, Tensor], moe: MoEConfig) -> Tensor:
    """What a router's own (`weight`, biases, offsets) choose after hidden states [t, h]: int64 [t,
    k]."""
    weight = router["weight"].to(torch.promote_types(router["weight"].dtype, torch.float32))
    logits = hidden.to(weight.dtype) @ weight.t()
    if "router_bias" in router:
        logits = logits + router["router_bias"].to(logits.dtype)
    bias, offsets = router.get("balancing_bias"), router.get("balancing_offset")
    return choose_experts(logits, moe.router, moe.top_k, bias, offsets=offsets).experts


def _capture_files(layers: Mapping[str, dict[Place, Chosen]]) -> set[Path]:
    return {
        row.capture_file
        for rows in layers.values()
        for row in rows.values()
        if row.capture_file is not None
    }


def _router(layer: str, headers: Iterable[Headers]) -> dict[str, Tensor]:
    """A layer's own, from whichever rank wrote it."""
    start = f"{layer}/router/"
    return {
        name.removeprefix(start): read_box(name, info, (slice(None),) * len(info.shape))
        for header in headers
        for name, info in header.items()
        if name.startswith(start)
    }


def _hidden(row: Chosen, headers: Mapping[Path, Headers]) -> Tensor | None:
    if row.capture_file is None:
        return None
    name = f"{row.layer}/{row.place[3]}/hidden"
    info = headers[row.capture_file].get(name)
    return None if info is None else read_box(name, info, (slice(None), slice(None)))


def _applied(
    names: tuple[str, str], row: np.ndarray[tuple[int], np.dtype[np.float64]], moe: MoEConfig
) -> Applied:
    foretold, actual = row[2 : 2 + moe.num_experts], row[2 + moe.num_experts :]
    both = float(np.linalg.norm(foretold) * np.linalg.norm(actual))
    return Applied(
        *names,
        tokens=int(row[1]) // moe.top_k,
        hits=float(row[0] / max(row[1], 1)),
        load=float(foretold @ actual) / both if both else 1.0,
    )
