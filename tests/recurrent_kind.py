"""The planning module of a toy recurrent mixer, as another package would write it; no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megalith.plan.layers.base import (
    DocumentCounts,
    HeldParameter,
    LayerBranch,
    LayerKind,
    LayerRank,
    LayerRecompute,
    LayerSetting,
    Message,
    Passes,
    SavedActivation,
    TPMessages,
)
from megalith.plan.shards import split_evenly

WIDTH, STATE = 12, 5
"""Channels of the mixer, and elements of each channel's state."""


def channels(rank: LayerRank) -> int:
    """Return the channels of this rank."""
    return split_evenly(WIDTH, rank.tp)[rank.rank]


def parameters(branch: LayerBranch, rank: LayerRank) -> Iterator[HeldParameter]:
    h, own = branch.model.hidden_size, channels(rank)
    yield HeldParameter("attention.inward", own, h, cut=True)
    yield HeldParameter("attention.decay", own * STATE, cut=True)
    yield HeldParameter("attention.outward", h, own, cut=True)


def saved_tensors(
    branch: LayerBranch, setting: LayerSetting, recomputed: Sequence[str], saves_input: bool
) -> list[SavedActivation]:
    numel = channels(setting.rank) * setting.tokens
    states = SavedActivation("attention", "states", STATE * numel, STATE * numel * setting.wide)
    return [*([setting.hidden("attention")] if saves_input else []), states]


def core_flops(branch: LayerBranch, counts: DocumentCounts) -> int:
    return 6 * counts.tokens * WIDTH * STATE


def backward_numel(branch: LayerBranch, setting: LayerSetting) -> int:
    return 1000 * channels(setting.rank) * setting.tokens


def tp_messages(branch: LayerBranch, recomputed: Sequence[str]) -> TPMessages:
    x = (branch.model.hidden_size,)
    return TPMessages(inputs=x, weight_inputs=x, sums=1)


@dataclass(frozen=True)
class GatheredInputs:
    """All-gather of the mixer's inputs over cp, and the reduce-scatter of their gradients."""

    cp: int
    nbytes: int

    def repeats(self, recompute: LayerRecompute) -> tuple[bool, bool]:
        return recompute.whole, False

    def messages(self, passes: Passes) -> Iterator[Message]:
        for kind, calls in ("all_gather", passes.forwards), ("reduce_scatter", passes.forward):
            yield Message("cp", f"mixer: {kind}", kind, self.cp, calls, calls * self.nbytes)


def exchange(branch: LayerBranch, setting: LayerSetting) -> GatheredInputs:
    numel = setting.cp * setting.tokens * channels(setting.rank)
    return GatheredInputs(setting.cp, numel * setting.element)


RECURRENT = LayerKind(
    parameters=parameters,
    saved_tensors=saved_tensors,
    core_flops=core_flops,
    backward_numel=backward_numel,
    tp_messages=tp_messages,
    exchange=exchange,
    position=lambda name: {"inward": 1, "decay": 2, "outward": 4}[name],
)
