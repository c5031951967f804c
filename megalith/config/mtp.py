"""Multi-token prediction: layers beyond the last that learn to predict further tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig:
    """Heads that predict the tokens after the next one.

    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2.
    """

    num_layers: int = 0
    """How many tokens further than the next are predicted, by one more layer each; 0: none."""

    loss_weight: float = 0.1
    """The mean of their losses is added to the loss with this weight."""
