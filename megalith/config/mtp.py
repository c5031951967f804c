"""Multi-token prediction (MTP) settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig:
    """Multi-token prediction: additional layers that predict the tokens after the next one.

    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2.
    """

    num_layers: int = 0
    """Number of MTP layers, each of which predicts one more token after the next; 0: none."""

    loss_weight: float = 0.1
    """Weight of the mean MTP loss in the total loss."""
