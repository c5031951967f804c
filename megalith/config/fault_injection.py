"""Settings of fault injection, with which users test how their cluster and their run recover."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from megalith.config.fields import Ge, Le

FaultKind = Literal[
    "exception",
    "kill",
    "stop",
    "hang",
    "hang_with_gil",
    "segfault",
    "slow",
    "nan",
    "bit_flip",
    "full_disk",
    "lost_link",
]

FaultTarget = Literal["gradient", "activation", "weight", "moment", "file"]

FaultSection = Literal["step", "backward", "evaluate", "save"]

NUMERIC_KINDS = "nan", "bit_flip"
"""Kinds that change values, of `fault_injector.target`."""

STEP_KINDS = (*NUMERIC_KINDS, "slow", "full_disk")
"""Kinds that last for a step, so they begin with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjectorConfig:
    """Fault injection: a fault that is injected into one rank of the run, for tests of fault
    tolerance."""

    kind: FaultKind
    """exception: an internal error; kill: SIGKILL; stop: SIGSTOP; hang: a thread that waits
    forever; hang_with_gil: the same with the GIL held, so that no other thread of the process
    runs; segfault: an invalid memory access; slow: forward and backward take `factor` times as
    long; nan, bit_flip: a wrong value in `target`; full_disk: writes to files fail during the step,
    also those of writer processes; lost_link: all TCP connections of the process are shut down."""

    confirm: bool = False
    """Must be true, so that no fault is injected by mistake."""

    rank: Annotated[int, Ge(0)] = 0
    """Rank that has the fault."""

    step: Annotated[int | None, Ge(1)] = None
    """First step with the fault. Unset: `seconds`."""

    seconds: Annotated[float | None, Ge(0), Le(1e9)] = None
    """Time after the start of training at which the fault occurs. Unset: `step`."""

    section: FaultSection = "step"
    """Part of the run in which the fault of `step` occurs. step: before forward; backward: after
    the backward pass of the first microbatch; evaluate, save: in the first evaluation or save after
    that step has begun."""

    times: Annotated[int, Ge(0)] = 1
    """Number of times that the fault occurs in the run: in later steps, reruns of a step, and after
    restarts (the run folder counts them). 1: a transient fault; 0: no limit, a persistent one."""

    target: FaultTarget = "gradient"
    """What nan and bit_flip change on this rank. gradient: the gradient of the output of its
    layers, before gradients are summed over ranks; activation: that output; weight: a weight that
    it updates; moment: optimizer state; file: a file of the next checkpoint (bit_flip)."""

    bit: Annotated[int | None, Ge(0), Le(63)] = None
    """Number of the bit that bit_flip changes, 0 for the lowest. Unset: chosen by `seed`."""

    factor: Annotated[float, Ge(1), Le(1e6)] = 2.0
    """How many times as long forward and backward take (slow)."""

    seed: Annotated[int, Ge(0)] = 0
    """Random seed of the choice of parameter, element and bit."""


def fault_injector_problems(
    config: FaultInjectorConfig | None, *, steps: int, world: int, saves: Mapping[str, bool]
) -> list[str]:
    """Return the messages of a fault that a run of `steps` steps on `world` ranks cannot have.

    `saves`: whether the run ever saves (`save`) and evaluates (`evaluate`).
    """
    if config is None:
        return []
    at, problems = "fault_injector", []
    if not config.confirm:
        problems.append(
            f"{at}.kind={config.kind} injects a fault into the run. Set {at}.confirm=true if that "
            f"is intended, or {at}=none."
        )
    if config.rank >= world:
        problems.append(
            f"{at}.rank={config.rank}: the run has {world} ranks. Use a rank from 0 to {world - 1}."
        )
    if config.step is None and config.seconds is None:
        problems.append(
            f"{at}.kind={config.kind} has no time. Set {at}.step to a step from 1 to {steps}."
        )
    if config.step is not None and config.seconds is not None:
        problems.append(
            f"{at}.step={config.step} and {at}.seconds={config.seconds:g} are two times. Set one "
            "of them to none."
        )
    if config.step is not None and config.step > steps:
        problems.append(
            f"{at}.step={config.step}: the run ends at train.steps={steps}. Use a step from 1 to "
            f"{steps}."
        )
    if config.section != "step" and (config.kind in STEP_KINDS or config.step is None):
        reason = "lasts for a step" if config.kind in STEP_KINDS else "occurs at any time"
        problems.append(
            f"{at}.section={config.section}: the fault {at}.kind={config.kind} {reason}. Set "
            f"{at}.section=step."
        )
    if config.section in saves and not saves[config.section]:
        setting = "checkpoint.every" if config.section == "save" else "train.eval_every"
        problems.append(
            f"{at}.section={config.section}: the run does not {config.section} before its last "
            f"step. Set {setting} to at least 1, or {at}.section=step."
        )
    if config.kind == "nan" and config.target == "file":
        problems.append(f"{at}.target=file: {at}.kind=nan changes tensors. Set {at}.kind=bit_flip.")
    return problems
