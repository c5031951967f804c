"""muP: how weights and rates change with a model's width, so that what a narrow one was tuned to
fits a wide one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MuPConfig:
    """Maximal update parametrization. With m = hidden_size / base_hidden_size: matrices of layers
    start 1 / sqrt(m) as wide, scores of the vocabulary are divided by m, and Adam's rate and eps of
    those matrices too; under SGD the rate of all others is multiplied by m. Tables, vectors and the
    head start as they do at the base.

    Source: Yang et al. 2022, arXiv:2203.03466, table 8; Lingle 2024, arXiv:2404.05728.
    """

    base_hidden_size: int
    """Hidden size of the model that init_std and learning rate were tuned on."""

    base_head_dim: int | None = None
    """Its features per head, at which scores of attention are as without muP; unset: they are
    divided by head_dim ** attention_scale_power alone."""

    attention_scale_power: float = 1.0
    """Scores of attention are multiplied by sqrt(base_head_dim) / head_dim **
    attention_scale_power."""
