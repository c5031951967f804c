"""`RuleOptimizer`, the optimizer of a run with one update rule per slot, and the table of
rules."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from megalith.config.fields import range_problems
from megalith.config.kernels import BackendName
from megalith.config.optim import OptimConfig, OptimizerStatesConfig
from megalith.config.plugins import load_plugin
from megalith.config.tree import build_section
from megalith.errors import ConfigError, raise_all
from megalith.optim.adafactor import Adafactor
from megalith.optim.adamw import AdamW
from megalith.optim.lion import Lion
from megalith.optim.muon import Muon
from megalith.optim.rules import (
    ElementwiseRule,
    MatrixRule,
    RoundingRule,
    SummedRule,
    UpdateRule,
    UpdateScalars,
)
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.optim.sgd import SGD
from megalith.optim.slots import (
    FP32_STATES,
    MASTER,
    OptimizerSlot,
    RatesOf,
    build_slot,
    equal_rates,
    group_by_rates,
    round_master_weights,
)
from megalith.optim.soap import Soap
from megalith.plan.keys import key as build_key
from megalith.plan.shards import Shard
from megalith.plan.state_encodings import FIRST_MOMENTS, SECOND_MOMENTS
from megalith.plan.update_rules import (
    PLUGIN_RULE,
    list_per_matrix_rules,
    list_slice_roles,
    rule_of,
)

BuildRule = Callable[[OptimConfig], UpdateRule]
"""Builds a rule from the settings of the optimizer."""

RULES: Mapping[str, BuildRule] = {
    "adamw": AdamW,
    "sgd": SGD,
    "lion": Lion,
    "muon": Muon,
    "soap": Soap,
    "adafactor": Adafactor,
}
"""Built-in update rules by the name in `optim.kind`."""


def build_rule(name: str, config: OptimConfig, backend: BackendName = "torch") -> UpdateRule:
    """Build the update rule of this name, or that of optim.plugin.

    `backend`: that of AdamW, `kernels.optimizer`.

    Raises:
        ConfigError: the class of the plug-in is not an update rule.
    """
    if name == PLUGIN_RULE:
        return _build_plugin_rule(config)
    build = RULES[name]
    return AdamW(config, backend) if build is AdamW else build(config)


def _build_plugin_rule(config: OptimConfig) -> UpdateRule:
    assert config.plugin is not None, "the name of the rule comes from optim.plugin"
    rule_class = load_plugin("optimizer", config.plugin)
    options = getattr(rule_class, "Config", None)
    problems: list[str] = []
    arguments: tuple[object, ...] = (config,)
    if options is None:
        problems += [
            f"optim.plugin_options.{name}={value}: {config.plugin} has no settings. Remove it."
            for name, value in config.plugin_options.items()
        ]
    else:
        section = build_section(options, config.plugin_options, "optim.plugin_options", problems)
        problems += [] if section is None else range_problems(section, "optim.plugin_options")
        arguments = (config, section)
    raise_all(problems)
    try:
        rule = rule_class(*arguments)
    except TypeError:
        rule = None  # it has another constructor, such as that of a whole optimizer
    if isinstance(rule, ElementwiseRule):
        return rule
    if not isinstance(rule, MatrixRule | SummedRule):
        raise ConfigError(
            f"optim.plugin={config.plugin} is not an update rule. Its class needs `roles` and "
            "`update`, or the methods of megalith.optim.rules.MatrixRule or SummedRule, and is "
            "built as Class(optim), or as Class(optim, options) if it has a dataclass Config."
        )
    if config.scalar_optimizer is None:
        raise ConfigError(
            f"optim.plugin={config.plugin} is a rule for whole matrices. Set "
            "optim.scalar_optimizer=adamw for embedding tables, heads, routers and vectors."
        )
    return rule


class RuleSlots(NamedTuple):
    """Slots of one rule with equal scalars, and their gradients."""

    slots: list[OptimizerSlot]
    gradients: list[Tensor]
    scalars: UpdateScalars


class MatrixUpdater(Protocol):
    """Runs a per-matrix rule on the matrices of which this rank holds slices."""

    def update(self, parts: Sequence[RuleSlots], updates: int) -> None:
        """Update all slots of the rule; `updates`: number of this update.

        Collective over the ranks that hold slices of the rule's matrices: every rank makes this
        call once per step, also without slots.
        """

    def list_states(self) -> list[tuple[Shard, str, Tensor]]:
        """Return the states of whole matrices that this rank stores: shard, role and tensor."""


BuildMatrixUpdater = Callable[
    [str, MatrixRule | SummedRule, Sequence[OptimizerSlot]], MatrixUpdater
]
"""Builds the updater of a per-matrix rule from its name, the rule and this rank's slots of it."""


class RuleOptimizer:
    """Optimizer over all slots of a rank, each with one update rule.

    All rules share the number of updates. Slots with the same rule, learning rate and weight decay
    are updated together; vectors (norms, biases) have no weight decay by default.
    """

    def __init__(
        self,
        weights: Sequence[tuple[Shard, Tensor]],
        config: OptimConfig,
        rates: RatesOf = equal_rates,
        build_matrix_updater: BuildMatrixUpdater | None = None,
        *,
        states: OptimizerStatesConfig = FP32_STATES,
        seed: int = 0,
        backend: BackendName = "torch",
    ) -> None:
        """`rates`: rule and factors of each parameter. `build_matrix_updater` is needed for
        per-matrix rules, and is called for each of them on every rank. `states`: formats of master
        weights and moments; per-matrix rules have fp32 only. `seed`: of stochastic rounding.
        `backend`: that of AdamW, `kernels.optimizer`.

        Raises:
            ConfigError: the rule of optim.plugin has no states that `states` applies to.
        """
        self.config = config
        self._backend: BackendName = backend
        self.updates = 0
        self._seed = seed
        self.rules: dict[str, UpdateRule] = {}
        self.slots: list[OptimizerSlot] = []
        for shard, weight in weights:
            parameter = rates(shard)
            if not parameter.rule:
                parameter = parameter._replace(rule=rule_of(shard.name, shard.inputs, config))
            rule = self._find_rule(parameter.rule)
            if parameter.rule == PLUGIN_RULE:
                _check_plugin_states(rule, config, states)
            slot_states = states if isinstance(rule, ElementwiseRule) else FP32_STATES
            self.slots.append(
                build_slot(
                    shard, weight, rule.roles, parameter, slot_states, self._build_rounding_key
                )
            )
        self._updaters: dict[str, MatrixUpdater] = {}
        for name in list_per_matrix_rules(config):
            rule = self._find_rule(name)
            if not isinstance(rule, ElementwiseRule):
                assert build_matrix_updater is not None, f"{name} needs whole matrices"
                slots = [slot for slot in self.slots if slot.rates.rule == name]
                self._updaters[name] = build_matrix_updater(name, rule, slots)

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
        """Update every weight once.

        `scale` multiplies the gradients first (gradient clipping, loss scale); None leaves them.
        `unclipped_scale`: the same for slots whose gradients are not clipped. `groups`: rates of
        parameter groups, which replace `lr` and `weight_decay`.
        """
        self.updates += 1
        parts: dict[str, list[RuleSlots]] = {name: [] for name in self.rules}
        for part in group_by_rates(
            self.slots, gradients, lr=lr, weight_decay=weight_decay, groups=groups
        ):
            rates = part.slots[0].rates
            scalars = UpdateScalars(
                part.lr,
                part.weight_decay,
                self.updates,
                scale if is_clipped(part.slots[0], self.config) else unclipped_scale,
                rates.eps,
            )
            parts[rates.rule].append(RuleSlots(part.slots, part.gradients, scalars))
        for name, rule in self.rules.items():
            if isinstance(rule, ElementwiseRule):
                for rule_slots in parts[name]:
                    _update_slots(rule, rule_slots)
        # collective, so in the same order on every rank; that of `rules` depends on its slots
        for name, updater in self._updaters.items():
            updater.update(parts[name], self.updates)
        round_master_weights(
            [slot for slot in self.slots if not _rounds_weights(self.rules[slot.rates.rule])]
        )

    def set_updates(self, updates: int) -> None:
        """Set the number of updates after loading a checkpoint; tensors are loaded separately."""
        self.updates = updates

    def list_matrix_states(self) -> list[tuple[Shard, str, Tensor]]:
        """Return the states of whole matrices on this rank: shard, role and tensor."""
        return [state for updater in self._updaters.values() for state in updater.list_states()]

    def _build_rounding_key(self, name: str, purpose: str) -> int:
        """Return the key of a stochastic rounding of a parameter in the current update."""
        return build_key(self._seed, purpose, name, self.updates)

    def _find_rule(self, name: str) -> UpdateRule:
        if name not in self.rules:
            self.rules[name] = build_rule(name, self.config, self._backend)
        return self.rules[name]


PIECE_NUMEL = 2**17
"""Elements of encoded slots that are decoded at a time (heuristic: master weights, gradient and
moments are 2 MiB, part of a processor's cache)."""


def _update_slots(rule: ElementwiseRule, part: RuleSlots) -> None:
    """Update plain slots together, and encoded slots in pieces that are decoded, updated and
    encoded, unless the rule updates them without."""
    if isinstance(rule, AdamW):
        others = rule.update_encoded(part.slots, part.gradients, part.scalars)
        part = RuleSlots(
            [part.slots[number] for number in others],
            [part.gradients[number] for number in others],
            part.scalars,
        )
    plain, gradients = [], []
    pieces: list[_DecodedPiece] = []
    numel = 0
    for slot, gradient in zip(part.slots, part.gradients, strict=True):
        if not slot.encoded:
            plain.append(slot)
            gradients.append(gradient)
            continue
        for start in range(0, slot.weight.numel(), PIECE_NUMEL):
            stop = min(start + PIECE_NUMEL, slot.weight.numel())
            if numel + stop - start > PIECE_NUMEL:
                _update_pieces(rule, pieces, part.scalars)
                pieces, numel = [], 0
            pieces.append(_DecodedPiece(slot, gradient.reshape(-1)[start:stop], start, stop))
            numel += stop - start
    _update_pieces(rule, pieces, part.scalars)
    if plain:
        rule.update(plain, gradients, part.scalars)


class _DecodedPiece(NamedTuple):
    """Elements [start, stop) of an encoded slot and their gradient."""

    slot: OptimizerSlot
    gradient: Tensor
    start: int
    stop: int

    def decode(self) -> OptimizerSlot:
        """Return a slot with decoded values, and views of what is not encoded."""
        slot, start, stop = self.slot, self.start, self.stop

        def read(role: str, plain: Tensor) -> Tensor:
            if role in slot.encoded:
                return slot.encoded[role].decode(start, stop)
            return plain.view(-1)[start:stop]

        return OptimizerSlot(
            slot.shard,
            slot.weight.view(-1)[start:stop],
            read(MASTER, slot.master),
            {role: read(role, tensor) for role, tensor in slot.state.items()},
            slot.rates,
        )

    def encode(self, decoded: OptimizerSlot) -> None:
        """Store the values of `decode` after an update."""
        for role, encoded in self.slot.encoded.items():
            values = decoded.master if role == MASTER else decoded.state[role]
            encoded.encode(values, self.start)


def _update_pieces(
    rule: ElementwiseRule, pieces: Sequence[_DecodedPiece], scalars: UpdateScalars
) -> None:
    if not pieces:
        return
    decoded = [piece.decode() for piece in pieces]
    rule.update(decoded, [piece.gradient for piece in pieces], scalars)
    for piece, slot in zip(pieces, decoded, strict=True):
        piece.encode(slot)


def _check_plugin_states(
    rule: UpdateRule, config: OptimConfig, states: OptimizerStatesConfig
) -> None:
    """Check that a plug-in's rule has the states whose formats are set.

    Raises:
        ConfigError: it is a rule for whole matrices, or has no such moment.
    """
    section = "precision.optimizer_states"
    if not isinstance(rule, ElementwiseRule):
        if states != FP32_STATES:
            raise ConfigError(
                f"{section} with optim.plugin={config.plugin}: states of rules for whole matrices "
                f"are fp32. Remove {section}, or set optim.kind=adamw and remove optim.plugin."
            )
        return
    others = [name for name in ("adamw", "sgd", "lion") if config.uses(name)]
    known = {role for name in others for role in list_slice_roles(config, name)} | {*rule.roles}
    for name, roles in (("first_moment", FIRST_MOMENTS), ("second_moment", SECOND_MOMENTS)):
        dtype = getattr(states, name)
        if dtype != "fp32" and not known & {*roles}:
            raise ConfigError(
                f"{section}.{name}={dtype}: the states of optim.plugin={config.plugin} are "
                f"{', '.join(sorted(known)) or 'none'}, and this format applies to "
                f"{' and '.join(roles)}. Remove {section}.{name}."
            )


def _rounds_weights(rule: UpdateRule) -> bool:
    return isinstance(rule, RoundingRule) and rule.rounds_weights


def is_clipped(slot: OptimizerSlot, config: OptimConfig) -> bool:
    """Return whether the gradient of a slot counts in the global norm and is clipped."""
    return config.muon.clip_grad or slot.rates.rule != "muon"
