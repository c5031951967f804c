"""Reference optimizer updates by torch.optim, and of Lion, from the recorded float64 gradients of
one process.

This uses no code of `megalith.optim`, and so detects faults in its bias correction, weight decay
groups, momentum or gradient clipping that are the same in every layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.config.train import EMAConfig, TrainRun
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.optim.slots import Optimizer
from megalith.plan.param_groups import parameter_rates
from megalith.plan.shards import Shard
from megalith.plan.update_rules import rule_of
from megalith.verify.muon import ReferenceMuon, has_muon_reference

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

    others: frozenset[str] = frozenset()
    """Parameters whose update rule has no reference in torch.optim; the other fields lack them."""


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
        unclipped_scale: Tensor | None = None,
    ) -> None:
        """Record the gradients and update the weights."""
        self.gradients = [gradient.clone() for gradient in gradients]
        self.optimizer.step(
            gradients,
            lr=lr,
            weight_decay=weight_decay,
            scale=scale,
            groups=groups,
            unclipped_scale=unclipped_scale,
        )
        self.updates = self.optimizer.updates

    def set_updates(self, updates: int) -> None:
        """Set the number of completed updates."""
        self.optimizer.set_updates(updates)
        self.updates = self.optimizer.updates

    def list_matrix_states(self) -> list[tuple[Shard, str, Tensor]]:
        """Return the states of whole matrices on this rank: shard, role and tensor."""
        return self.optimizer.list_matrix_states()


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

    def is_muon(name: str) -> bool:
        inputs = int(is_matrix(name, weights[name]))
        return rule_of(name, inputs, run.optim) == "muon"

    parameters = {name: torch.nn.Parameter(weights[name].clone()) for name in gradients[0]}
    optimizers = _build_optimizers(run, parameters, lr, weight_decay, groups)
    updated = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    others = frozenset(name for name, each in parameters.items() if id(each) not in updated)
    clipped = [p for name, p in parameters.items() if run.optim.muon.clip_grad or not is_muon(name)]
    averages: dict[str, Tensor] = {}
    updates = []
    for number, step_gradients in enumerate(gradients, start=1):
        for name, parameter in parameters.items():
            parameter.grad = step_gradients[name].clone()
        clip_grad = run.optim.clip_grad or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(clipped, clip_grad))
        for optimizer in optimizers:
            optimizer.step()
        copies = {
            name: parameter.detach().clone()
            for name, parameter in parameters.items()
            if name not in others
        }
        averages = _average_weights(run.train.ema, averages, copies, number)
        states = averages.copy()
        for optimizer in optimizers:
            states |= _states(optimizer, parameters)
        updates.append(TorchUpdate(norm, copies, states, others))
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


class _Lion(torch.optim.Optimizer):
    """Lion in its definition; torch has none."""

    def __init__(self, options: list[dict[str, Any]], beta1: float, beta2: float) -> None:
        super().__init__(options, {"lr": 0.0, "weight_decay": 0.0})
        self.beta1, self.beta2 = beta1, beta2

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # without a closure
        """Update the parameters once."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
                sign = (self.beta1 * mean + (1 - self.beta1) * parameter.grad).sign()
                step = sign + group["weight_decay"] * parameter
                parameter.sub_(group["lr"] * step)
                state["exp_avg"] = self.beta2 * mean + (1 - self.beta2) * parameter.grad


def _build_optimizers(
    run: TrainRun,
    parameters: Mapping[str, torch.nn.Parameter],
    lr: float,
    weight_decay: float,
    groups: Mapping[str, GroupRates],
) -> list[torch.optim.Optimizer]:
    """Build torch's optimizer of each update rule, with one parameter group per parameter."""
    options: dict[str, list[dict[str, Any]]] = {}  # Any: options of torch.optim
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
        option |= {"eps": run.optim.eps * rates.eps} if rates.rule == "adamw" else {}
        options.setdefault(rates.rule, []).append(option)
    c = run.optim
    optimizers: list[torch.optim.Optimizer] = []
    if own := options.get("sgd"):
        sgd = torch.optim.SGD(own, momentum=c.momentum, nesterov=c.nesterov, foreach=False)
        optimizers.append(sgd)
    if own := options.get("lion"):
        optimizers.append(_Lion(own, c.lion.beta1, c.lion.beta2))
    if own := options.get("adamw"):
        adam = torch.optim.AdamW if c.decoupled_weight_decay else torch.optim.Adam
        optimizers.append(adam(own, betas=(c.beta1, c.beta2), foreach=False))
    if (own := options.get("muon")) and has_muon_reference(c.muon):
        names = {id(parameter): name for name, parameter in parameters.items()}
        nope_dim = None if run.model.mla is None else run.model.mla.nope_dim
        optimizers.append(ReferenceMuon(own, names, c.muon, nope_dim))
    return optimizers


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
        if optimizer.state.get(parameter, {}).get(state) is not None
    }
