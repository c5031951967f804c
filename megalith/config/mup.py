"""Maximal update parametrization (muP): initialization and learning rates that transfer from a
narrow to a wide model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MuPConfig:
    """Maximal update parametrization (muP). With m = hidden_size / base_hidden_size, weight
    matrices of layers are initialized with std / sqrt(m), logits are divided by m, and so are
    Adam's learning rate and eps of these matrices; with SGD the learning rate of all other
    parameters is multiplied by m. Embeddings, vectors and the output head are initialized as in
    the base model.

    Source: Yang et al. 2022, arXiv:2203.03466, table 8; Lingle 2024, arXiv:2404.05728.
    """

    base_hidden_size: int
    """Hidden size of the base model, on which init_std and the learning rate were tuned."""

    base_head_dim: int | None = None
    """Head size of the base model, at which attention scores are scaled as without muP. Unset:
    scores are divided by head_dim ** attention_scale_power."""

    attention_scale_power: float = 1.0
    """Exponent p of the attention scale sqrt(base_head_dim) / head_dim ** p."""
