"""One optimizer has the slots of several update rules; a plug-in provides a rule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from megalith.config.fields import Ge, Lt
from megalith.config.optim import (
    GroupConfig,
    MuonConfig,
    OptimConfig,
    OptimizerStatesConfig,
)
from megalith.errors import ConfigError
from megalith.optim.optimizer import RULES, RuleOptimizer, build_rule, is_clipped
from megalith.optim.rules import ElementwiseRule, UpdateRule, UpdateScalars
from megalith.optim.slots import OptimizerSlot, build_slot, zero_states
from megalith.plan.parameters import ParameterRates
from megalith.plan.shards import Shard

NAMES = ("layers.0.mlp.down", "layers.1.mlp.down", "embed.weight")
SHARDS = [*(Shard.full(name, (4, 3)) for name in NAMES), Shard.full("norm.weight", (3,), inputs=0)]


def draw(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shard.shape, generator=generator) for shard in SHARDS]


class SignSGD:
    """Update rule of another package: the sign of a decayed sum of gradients."""

    roles = ("sign_sum",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of the rule."""

        decay: Annotated[float, Ge(0), Lt(1)] = 0.9
        """Decay rate of the sum."""

    def __init__(self, optim: OptimConfig, options: Config) -> None:
        self.decay = options.decay

    def update(
        self, slots: Sequence[OptimizerSlot], gradients: Sequence[Tensor], scalars: UpdateScalars
    ) -> None:
        """Update the master weights."""
        for slot, gradient in zip(slots, gradients, strict=True):
            g = gradient if scalars.scale is None else gradient * scalars.scale
            slot.state["sign_sum"].mul_(self.decay).add_(g)
            slot.master.mul_(1 - scalars.lr * scalars.weight_decay)
            slot.master.sub_(scalars.lr * slot.state["sign_sum"].sign())


class WholeOptimizer:
    """Not a rule: a whole optimizer."""

    def __init__(self, weights: object, optim: object, rates: object) -> None: ...


class MatrixPlugin:
    """Update rule for matrices."""

    roles = ()

    def __init__(self, optim: OptimConfig) -> None: ...

    def matrix_state_shapes(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """No state."""
        return {}

    def update_pieces(self, *arguments: Any) -> None:
        """No update."""


def name_of(plugin: type) -> str:
    return f"{plugin.__module__}:{plugin.__name__}"


PLUGIN = OptimConfig(plugin=name_of(SignSGD), plugin_options={"decay": 0.5})


def test_each_slot_is_updated_by_its_rule_alone() -> None:
    groups = (GroupConfig(name="one", match=("layers.1.*",), kind="sgd"),)
    config = OptimConfig(scalar_optimizer="lion", groups=groups)
    mixed = RuleOptimizer(list(zip(SHARDS, draw(0), strict=True)), config)
    assert [slot.rates.rule for slot in mixed.slots] == ["adamw", "sgd", "lion", "lion"]
    alone = {
        kind: RuleOptimizer(list(zip(SHARDS, draw(0), strict=True)), OptimConfig(kind=kind))
        for kind in ("adamw", "sgd", "lion")
    }
    for step in range(1, 4):
        for optimizer in (mixed, *alone.values()):
            optimizer.step(draw(step), lr=0.1, weight_decay=0.1, scale=torch.tensor(0.5))
    for number, slot in enumerate(mixed.slots):
        same = alone[slot.rates.rule].slots[number]
        assert torch.equal(slot.weight, same.weight) and slot.state.keys() == same.state.keys()
    assert mixed.updates == 3 and mixed.list_matrix_states() == []


def test_plugin_rule_updates_all_parameters_or_matrices_only() -> None:
    optimizer = RuleOptimizer(list(zip(SHARDS, draw(0), strict=True)), PLUGIN)
    assert {slot.rates.rule for slot in optimizer.slots} == {"plugin"}
    optimizer.step(draw(1), lr=0.25, weight_decay=0.0)
    for slot, before, gradient in zip(optimizer.slots, draw(0), draw(1), strict=True):
        assert torch.equal(slot.weight, before - 0.25 * gradient.sign())
    config = replace(PLUGIN, scalar_optimizer="adamw")
    both = RuleOptimizer(list(zip(SHARDS, draw(0), strict=True)), config)
    assert [list(slot.state) for slot in both.slots][1:3] == [
        ["sign_sum"],
        ["exp_avg", "exp_avg_sq"],
    ]
    assert isinstance(build_rule("plugin", PLUGIN), ElementwiseRule)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            OptimConfig(plugin=name_of(WholeOptimizer)),
            r"is not an update rule. Its class needs `roles` and `update`",
        ),
        (OptimConfig(plugin=name_of(MatrixPlugin)), "Set optim.scalar_optimizer=adamw"),
        (replace(PLUGIN, plugin_options={"decai": 0.5}), "optim.plugin_options.decai"),
        (
            replace(PLUGIN, plugin_options={"decay": 1.5}),
            "optim.plugin_options.decay=1.5 must be below 1",
        ),
        (
            OptimConfig(
                plugin=name_of(MatrixPlugin), scalar_optimizer="adamw", plugin_options={"a": 1}
            ),
            r"optim.plugin_options.a=1: .*MatrixPlugin has no settings. Remove it.",
        ),
    ],
)
def test_plugin_that_is_no_rule_or_has_wrong_settings_is_rejected(
    config: OptimConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_rule("plugin", config)


def test_formats_of_states_that_a_plugin_does_not_have_are_rejected() -> None:
    int8 = OptimizerStatesConfig(first_moment="int8")
    weights = list(zip(SHARDS, draw(0), strict=True))
    with pytest.raises(ConfigError) as error:
        RuleOptimizer(weights, PLUGIN, states=int8)
    assert str(error.value) == (
        f"precision.optimizer_states.first_moment=int8: the states of optim.plugin={PLUGIN.plugin} "
        "are sign_sum, and this format applies to exp_avg and momentum. Remove "
        "precision.optimizer_states.first_moment."
    )
    RuleOptimizer(weights, replace(PLUGIN, scalar_optimizer="adamw"), states=int8)
    matrices = OptimConfig(plugin=name_of(MatrixPlugin), scalar_optimizer="adamw")
    with pytest.raises(ConfigError, match="states of rules for whole matrices are fp32. Remove"):
        RuleOptimizer(weights, matrices, states=int8)


def test_only_muon_may_be_left_out_of_clipping() -> None:
    config = OptimConfig(kind="muon", muon=MuonConfig(clip_grad=False))
    slots = [
        build_slot(SHARDS[0], draw(0)[0], (), ParameterRates(rule=rule))
        for rule in ("muon", "adamw")
    ]
    assert [is_clipped(slot, config) for slot in slots] == [False, True]
    assert all(is_clipped(slot, OptimConfig(kind="muon")) for slot in slots)


def test_gradients_that_are_not_clipped_have_their_own_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scales: dict[str, Tensor | None] = {}

    class Recorder:
        roles: tuple[str, ...] = ()

        def __init__(self, config: OptimConfig) -> None: ...

        def update(
            self,
            slots: Sequence[OptimizerSlot],
            gradients: Sequence[Tensor],
            scalars: UpdateScalars,
        ) -> None:
            scales[slots[0].rates.rule] = scalars.scale

    rules: dict[str, Any] = {"muon": Recorder, "adamw": Recorder}
    monkeypatch.setattr("megalith.optim.optimizer.RULES", rules)
    config = OptimConfig(kind="muon", muon=MuonConfig(clip_grad=False))
    optimizer = RuleOptimizer(list(zip(SHARDS, draw(0), strict=True)), config)
    clipped, unclipped = torch.tensor(0.1), torch.tensor(0.5)
    optimizer.step(draw(1), lr=0.1, weight_decay=0.0, scale=clipped, unclipped_scale=unclipped)
    assert scales["muon"] is unclipped and scales["adamw"] is clipped


def test_rules_have_the_interface_of_elementwise_rules() -> None:
    for kind in ("adamw", "sgd", "lion"):
        rule: UpdateRule = build_rule(kind, OptimConfig())
        assert isinstance(rule, ElementwiseRule)


class RecordingUpdater:
    """Updater of a per-matrix rule that records its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls
        self.state = torch.ones(2)

    def update(self, parts: object, updates: int) -> None:
        """Record the call."""
        self.calls.append(self.name)

    def list_states(self) -> list[tuple[Shard, str, Tensor]]:
        """One state."""
        return [(Shard.full(self.name, (2,), inputs=0), "factor", self.state)]


def build_recorded(names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> RuleOptimizer:
    """Build an optimizer with two per-matrix rules over slots in this order."""
    rules = {**RULES, "muon": MatrixPlugin, "adafactor": MatrixPlugin}
    monkeypatch.setattr("megalith.optim.optimizer.RULES", rules)
    groups = (GroupConfig(name="one", match=("layers.1.*",), kind="adafactor"),)
    weights = [(Shard.full(name, (4, 3)), torch.zeros(4, 3)) for name in names]
    calls: list[str] = []
    optimizer = RuleOptimizer(
        weights,
        OptimConfig(kind="muon", groups=groups),
        build_matrix_updater=lambda name, rule, slots: RecordingUpdater(name, calls),
    )
    optimizer.step([torch.zeros(4, 3) for _ in names], lr=0.1, weight_decay=0.0)
    assert calls == ["muon", "adafactor"]
    return optimizer


def test_per_matrix_rules_run_in_the_same_order_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # their updates are collective, and ranks differ in the rule of their first slot
    for names in (NAMES[:2], NAMES[1::-1], NAMES[1:2], ()):
        build_recorded(names, monkeypatch)


def test_states_of_whole_matrices_are_set_to_zero_too(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = build_recorded(NAMES[:2], monkeypatch)
    zero_states(optimizer)
    states = [tensor for _, _, tensor in optimizer.list_matrix_states()]
    assert len(states) == 2 and not any(state.any() for state in states)
    adam = RuleOptimizer(list(zip(SHARDS, draw(0), strict=True)), OptimConfig())
    adam.step(draw(1), lr=0.1, weight_decay=0.0)
    zero_states(adam)
    assert not any(tensor.any() for slot in adam.slots for tensor in slot.state.values())
