"""Reference optimizer updates by torch.optim, from the recorded float64 gradients of one process.

This uses no code of `megalith.optim`, and so detects faults in its bias correction, weight decay
groups, momentum or gradient clipping that are the same in every layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.config.train import EMAConfig, TrainRun
from megalith.optim.optimizers import Optimizer
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.plan.param_groups import parameter_rates

STATE_NAMES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer"}
"""Role of an optimizer state in a checkpoint -> its name in torch.optim."""


@dataclass(frozen=True, slots=True)
class TorchUpdate:
    """One optimizer step as computed by torch."""

    grad_norm: float
    """Gradient norm before clipping."""

    weights: dict[str, Tensor]
    """Weights after the step by parameter name."""

    states: dict[str, Tensor]
    """Moments, and moving averages of the weights, after the step by checkpoint key."""


class RecordingOptimizer:
    """Optimizer wrapper that records the gradients before they are clipped."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.slots = optimizer.slots
        self.updates = optimizer.updates
        self.gradients: list[Tensor] = []

    def step(
        self,
        gradients: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float,
        scale: Tensor | None = None,
        groups: Mapping[str, GroupRates] = NO_GROUPS,
    ) -> None:
        """Record the gradients and update the weights."""
        self.gradients = [gradient.clone() for gradient in gradients]
        self.optimizer.step(gradients, lr=lr, weight_decay=weight_decay, scale=scale, groups=groups)
        self.updates = self.optimizer.updates

    def set_updates(self, updates: int) -> None:
        """Set the number of completed updates."""
        self.optimizer.set_updates(updates)
        self.updates = self.optimizer.updates


def torch_updates(
    run: TrainRun,
    weights: Mapping[str, Tensor],
    gradients: Sequence[Mapping[str, Tensor]],
    *,
    lr: float,
    weight_decay: float,
    groups: Mapping[str, GroupRates],
) -> list[TorchUpdate]:
    """Return torch's updates from initial weights and the unclipped gradients of each step, by
    parameter name."""
    parameters = {name: torch.nn.Parameter(weights[name].clone()) for name in gradients[0]}
    optimizer = _build_optimizer(run, parameters, lr, weight_decay, groups)
    averages: dict[str, Tensor] = {}
    updates = []
    for number, step_gradients in enumerate(gradients, start=1):
        for name, parameter in parameters.items():
            parameter.grad = step_gradients[name].clone()
        clip_grad = run.optim.clip_grad or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), clip_grad))
        optimizer.step()
        copies = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        averages = _average_weights(run.train.ema, averages, copies, number)
        states = _states(optimizer, parameters) | averages
        updates.append(TorchUpdate(norm, copies, states))
    return updates


def _average_weights(
    ema: EMAConfig | None, averages: Mapping[str, Tensor], weights: Mapping[str, Tensor], step: int
) -> dict[str, Tensor]:
    """Return the moving averages after a step by checkpoint key."""
    if ema is None:
        return {}
    if step <= ema.start_step:
        return {f"optimizer.ema.{name}": weight for name, weight in weights.items()}
    if step % ema.every:
        return dict(averages)
    return {
        f"optimizer.ema.{name}": ema.decay * averages[f"optimizer.ema.{name}"]
        + (1 - ema.decay) * weight
        for name, weight in weights.items()
    }


def _build_optimizer(
    run: TrainRun,
    parameters: Mapping[str, torch.nn.Parameter],
    lr: float,
    weight_decay: float,
    groups: Mapping[str, GroupRates],
) -> torch.optim.Optimizer:
    """Build torch's optimizer with one parameter group per parameter."""
    options = []
    for name, parameter in parameters.items():
        rates = parameter_rates(run.model, run.optim, name, int(is_matrix(name, parameter)))
        group_lr = groups[rates.lr_of].lr if rates.lr_of else lr
        decay = groups[rates.decay_of].weight_decay if rates.decay_of else weight_decay
        decays = is_matrix(name, parameter) or rates.vector_decays
        option = {
            "params": [parameter],
            "lr": group_lr * rates.lr,
            "weight_decay": decay * rates.decay * decays,
        }
        options.append(
            option | ({"eps": run.optim.eps * rates.eps} if run.optim.kind == "adamw" else {})
        )
    c = run.optim
    if c.kind == "sgd":
        return torch.optim.SGD(options, momentum=c.momentum, nesterov=c.nesterov, foreach=False)
    adam = torch.optim.AdamW if c.decoupled_weight_decay else torch.optim.Adam
    return adam(options, betas=(c.beta1, c.beta2), foreach=False)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter decays by default: norms, biases and attention sinks are vectors,
    which do not.

    Stacked vectors of several experts, heads or projections are still vectors.
    """
    return parameter.ndim > 1 and not name.endswith(("bias", "norm.weight"))


def _states(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, Tensor]:
    """Return the moments by checkpoint key."""
    return {
        f"optimizer.{role}.{name}": optimizer.state[parameter][state].clone()
        for name, parameter in parameters.items()
        for role, state in STATE_NAMES.items()
        if optimizer.state[parameter].get(state) is not None
    }
