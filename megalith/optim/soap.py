"""SOAP: Adam in the eigenbases of Shampoo's factors, for each matrix."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalith.config.optim import OptimConfig, SoapConfig
from megalith.optim.rules import UpdateScalars
from megalith.optim.slots import OptimizerSlot

LEFT, RIGHT = "left", "right"
"""Sides of a matrix G: its factor is the average of G G^T (rows) or of G^T G (columns)."""


class Soap:
    """SOAP update rule: gradients are rotated by the eigenbases of the averages of G G^T and
    G^T G, where Adam's second moment is kept.

    The first update sets the bases and changes no weight. A side longer than max_precondition_dim
    has the identity as its basis, and no factor. All states are those of whole matrices. The first
    moment is stored unrotated, so that it does not change with the bases. Source: Vyas et al. 2024,
    arXiv:2409.11321, algorithm 3.
    """

    roles: tuple[str, ...] = ()

    def __init__(self, config: OptimConfig) -> None:
        self.config: SoapConfig = config.soap

    def prepare(
        self, slots: Sequence[OptimizerSlot], gradients: Sequence[Tensor], scalars: UpdateScalars
    ) -> list[Tensor]:
        """Return the gradients, multiplied by the scale."""
        slices = list(gradients)
        if slices and scalars.scale is not None:
            torch._foreach_mul_(slices, scalars.scale.to(slices[0].dtype))
        return slices

    def message_dtype(self, params: torch.dtype) -> torch.dtype:
        """Return the dtype of the master weights: eigenbases need fp32."""
        return torch.float64 if params == torch.float64 else torch.float32

    def matrix_state_shapes(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of both moments, and of factor and basis of each rotated side."""
        shapes: dict[str, tuple[int, ...]] = {
            "exp_avg": (rows, columns),
            "exp_avg_sq": (rows, columns),
        }
        for side, size in ((LEFT, rows), (RIGHT, columns)):
            if size <= self.config.max_precondition_dim:
                shapes |= {f"factor_{side}": (size, size), f"basis_{side}": (size, size)}
        return shapes

    def compute_direction(
        self, matrices: Tensor, states: Mapping[str, Tensor], updates: int
    ) -> Tensor:
        """Return the directions of gradients [b, rows, columns]; zero in the first update."""
        if updates == 1:
            self._update_factors(matrices, states, has_bases=False)
            for side in _rotated_sides(states):
                states[f"basis_{side}"].copy_(_compute_eigenbasis(states[f"factor_{side}"]))
            return torch.zeros_like(matrices)
        _initialize_missing_bases(states)
        directions = self._compute_adam(matrices, states, updates - 1)
        self._update_factors(matrices, states, has_bases=True)
        if (updates - 1) % self.config.precondition_frequency == 0:
            _refresh_bases(states)
        return directions

    def apply(
        self,
        master_weights: Sequence[Tensor],
        directions: Sequence[Tensor],
        shape: tuple[int, int],
        scalars: UpdateScalars,
    ) -> None:
        """Apply step and weight decay, except in the first update."""
        if not master_weights or scalars.updates == 1:
            return
        weights = list(master_weights)
        torch._foreach_add_(weights, list(directions), alpha=-scalars.lr)
        if scalars.weight_decay:
            torch._foreach_mul_(weights, 1 - scalars.lr * scalars.weight_decay)

    def _compute_adam(self, gradients: Tensor, states: Mapping[str, Tensor], steps: int) -> Tensor:
        """Return Adam's direction in the eigenbases, rotated back, and update its moments."""
        c = self.config
        exp_avg, exp_avg_sq = states["exp_avg"], states["exp_avg_sq"]
        exp_avg.lerp_(gradients, 1 - c.beta1)
        exp_avg_sq.lerp_(rotate(gradients, states).square_(), 1 - c.beta2)
        directions = rotate(exp_avg, states) / exp_avg_sq.sqrt().add_(c.eps)
        correction = math.sqrt(1 - c.beta2**steps) / (1 - c.beta1**steps)
        return rotate_back(directions, states).mul_(correction)

    def _update_factors(
        self, gradients: Tensor, states: Mapping[str, Tensor], *, has_bases: bool
    ) -> None:
        """Update the averages of G G^T and G^T G, or of G R^-1 G^T / columns and
        G^T L^-1 G / rows (KL form), where L and R are the factors before this update."""
        weighted = self.config.kl and has_bases
        products = {}
        for side, other in ((LEFT, RIGHT), (RIGHT, LEFT)):
            if f"factor_{side}" not in states:
                continue
            x = gradients if side == LEFT else gradients.mT
            if weighted and f"factor_{other}" in states:
                x = x @ states[f"basis_{other}"]
                scales = _estimate_eigenvalues(states, other) * x.shape[-1]
                # a factor of zero, of gradients that were all zero, weights nothing
                scales.masked_fill_(scales == 0, 1.0)
                products[side] = (x / scales.unsqueeze(-2)) @ x.mT
            else:
                products[side] = x @ x.mT
        for side, product in products.items():
            states[f"factor_{side}"].lerp_(product, 1 - self.config.shampoo_beta)


def rotate(matrices: Tensor, states: Mapping[str, Tensor]) -> Tensor:
    """Return Q_L^T G Q_R, without the rotation of a side that has no basis; always a new tensor."""
    rotated = matrices
    if "basis_left" in states:
        rotated = states["basis_left"].mT @ rotated
    if "basis_right" in states:
        rotated = rotated @ states["basis_right"]
    return matrices.clone() if rotated is matrices else rotated


def rotate_back(matrices: Tensor, states: Mapping[str, Tensor]) -> Tensor:
    """Return Q_L D Q_R^T, the inverse of `rotate`."""
    if "basis_left" in states:
        matrices = states["basis_left"] @ matrices
    if "basis_right" in states:
        matrices = matrices @ states["basis_right"].mT
    return matrices


def _rotated_sides(states: Mapping[str, Tensor]) -> list[str]:
    return [side for side in (LEFT, RIGHT) if f"basis_{side}" in states]


def _initialize_missing_bases(states: Mapping[str, Tensor]) -> None:
    """Set bases of zero to the identity, which a refresh replaces: matrices whose states were
    missing in the checkpoint of a later update have no first update."""
    for side in _rotated_sides(states):
        basis = states[f"basis_{side}"]
        is_missing = basis[..., 0].abs().sum(-1, keepdim=True) == 0
        basis.diagonal(dim1=-2, dim2=-1).add_(is_missing)


def _compute_eigenbasis(factors: Tensor) -> Tensor:
    """Return the eigenvectors [b, n, n] of symmetric matrices, largest eigenvalue first."""
    eigenvectors: Tensor = torch.linalg.eigh(factors).eigenvectors
    return eigenvectors.flip(-1)


def _estimate_eigenvalues(states: Mapping[str, Tensor], side: str) -> Tensor:
    """Return the diagonal [b, n] of Q^T F Q, at least the largest entry times the resolution of
    the dtype: averages of few gradients have no full rank. Zero if F is zero."""
    factor, basis = states[f"factor_{side}"], states[f"basis_{side}"]
    eigenvalues = (basis * (factor @ basis)).sum(-2)
    smallest = eigenvalues.amax(-1, keepdim=True) * torch.finfo(eigenvalues.dtype).eps
    return torch.maximum(eigenvalues, smallest)


def _refresh_bases(states: Mapping[str, Tensor]) -> None:
    """Replace each basis by one power iteration and a QR decomposition, in the order of the
    estimated eigenvalues, in which the second moment is permuted too."""
    exp_avg_sq = states["exp_avg_sq"]
    for side, dim in ((LEFT, -2), (RIGHT, -1)):
        if f"basis_{side}" not in states:
            continue
        basis = states[f"basis_{side}"]
        product = states[f"factor_{side}"] @ basis
        order = (basis * product).sum(-2).argsort(-1, descending=True)
        columns = order.unsqueeze(-2).expand_as(product)
        basis.copy_(torch.linalg.qr(product.gather(-1, columns)).Q)
        index = order.unsqueeze(-1 if dim == -2 else -2).expand_as(exp_avg_sq)
        exp_avg_sq.copy_(exp_avg_sq.gather(dim, index))
