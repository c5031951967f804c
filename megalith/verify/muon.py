"""Reference of Muon for float64 verification, on whole parameters.

It uses no code of `megalith.optim` and `megalith.plan.matrices`: the Newton-Schulz steps are
applied to singular values, and matrices are selected by indexing the global parameter.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.config.optim import MuonConfig

QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of `optim.muon.coefficients=quintic`."""


def has_muon_reference(config: MuonConfig) -> bool:
    """Return whether `ReferenceMuon` has the coefficients and second moments of these settings."""
    return config.coefficients == "quintic" and config.second_moment is None


class ReferenceMuon(torch.optim.Optimizer):
    """Muon with the singular value decomposition of each matrix.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],  # Any: options of torch.optim
        names: Mapping[int, str],
        config: MuonConfig,
        nope_dim: int | None,
    ) -> None:
        """`names`: of the parameters, by id."""
        super().__init__(groups, {})
        self.names, self.config, self.nope_dim = names, config, nope_dim

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # without a closure
        """Update the parameters once."""
        c = self.config
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                momentum.copy_(c.momentum * momentum + (1 - c.momentum) * gradient)
                u = momentum
                if c.nesterov:
                    u = c.momentum * momentum + (1 - c.momentum) * gradient
                update = torch.zeros_like(parameter)
                name = self.names[id(parameter)]
                for source, target in zip(
                    self._select(name, u), self._select(name, update), strict=True
                ):
                    matrix = source.reshape(self._rows(name, source), -1)
                    scaled = self._scale(*matrix.shape) * self._orthogonalize(matrix)
                    target.copy_(scaled.view(source.shape))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * update)

    def _orthogonalize(self, matrix: Tensor) -> Tensor:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        values = values / values.norm().clamp(min=1e-7)  # as in torch.optim.Muon
        for number in range(self.config.ns_steps):
            a, b, c = QUINTIC[number % len(QUINTIC)]
            values = a * values + b * values**3 + c * values**5
        orthogonal: Tensor = left * values @ right
        return orthogonal

    def _scale(self, rows: int, columns: int) -> float:
        scales: dict[str, float] = {
            "spectral": math.sqrt(max(rows, columns)),
            "unit_rms": math.sqrt(rows / columns),
            "shape": math.sqrt(max(1.0, rows / columns)),
        }
        return self.config.factor * scales[self.config.scale]

    def _rows(self, name: str, matrix: Tensor) -> int:
        """Return the outputs of a matrix: the inputs of `o` are heads and their features."""
        if name.endswith(".o") and matrix.dim() == 3:
            return matrix.shape[0]
        return matrix.numel() // matrix.shape[-1]

    def _select(self, name: str, parameter: Tensor) -> Iterator[Tensor]:
        """Yield the matrices of a parameter as views of it."""
        split, word = self.config.split, name.rsplit(".", 1)[-1]
        parts = [parameter]
        if ".experts." in name:
            parts = list(parameter)
        if word in ("kv", "gate_up") and split != "fused":
            parts = [half for part in parts for half in part]
        elif word == "kv_up" and self.nope_dim is not None and split != "fused":
            parts = [parameter[:, : self.nope_dim], parameter[:, self.nope_dim :]]
        if split == "heads" and word in ("q", "kv", "gate", "q_up", "kv_up") and parts[0].dim() > 2:
            parts = [head for part in parts for head in part]
        elif split == "heads" and word == "o":
            parts = [parameter[:, head] for head in range(parameter.shape[1])]
        yield from parts
