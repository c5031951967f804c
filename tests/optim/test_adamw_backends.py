"""Backends of AdamW's update: the compiled loop against torch's fused kernel, the reference, and
bf16 states with remainders."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.kernels import BackendName
from megalith.config.optim import OptimConfig, OptimizerStatesConfig
from megalith.errors import ConfigError
from megalith.kernels import cpu_threads
from megalith.kernels.adamw import (
    BLOCK_NUMEL,
    AdamWScalars,
    AdamWTensors,
    RemainderTensors,
    supports_adamw,
    update_adamw,
    update_remainder_adamw,
)
from megalith.observe.machine import FORMATS
from megalith.optim import adamw
from megalith.optim.optimizer import RuleOptimizer
from megalith.plan.shards import Shard
from megalith.testing.tolerance import FP32, assert_equals

pytestmark = pytest.mark.skipif(cpu_threads.openmp() is None, reason="torch has no GOMP interface")

NUMELS = [1, 7, 16, 513, BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, 40 * BLOCK_NUMEL + 33]
"""Elements of the slots: one, odd lengths, edges of blocks, and several blocks per thread."""

TAIL = 16
"""torch computes fewer elements than this at the end of its slices in another way."""

SCALARS = AdamWScalars(
    lr=1e-3,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    weight_decay=0.1,
    updates=3,
    gradient_divisor=1.3,
)


def draw_slots(numels: list[int], seed: int = 0) -> list[AdamWTensors]:
    """Return slots with fp32 states and bf16 weights."""
    generator = torch.Generator().manual_seed(seed)

    def draw(numel: int, scale: float) -> Tensor:
        return torch.randn(numel, generator=generator) * scale

    return [
        AdamWTensors(
            draw(n, 1e-3),
            draw(n, 0.02),
            draw(n, 1e-3),
            draw(n, 1e-3).square(),
            torch.zeros(n, dtype=torch.bfloat16),
        )
        for n in numels
    ]


def clone(slots: list[AdamWTensors]) -> list[AdamWTensors]:
    return [AdamWTensors(*(tensor.clone() for tensor in slot)) for slot in slots]


def update_with_torch(slots: list[AdamWTensors], scalars: AdamWScalars) -> None:
    """Update with torch's fused kernel, then round."""
    fused = torch._fused_adamw_ if scalars.decoupled else torch._fused_adam_
    fused(
        [slot.master for slot in slots],
        [slot.gradient for slot in slots],
        [slot.mean for slot in slots],
        [slot.square for slot in slots],
        [],
        [torch.tensor(float(scalars.updates))] * len(slots),
        lr=scalars.lr,
        beta1=scalars.beta1,
        beta2=scalars.beta2,
        weight_decay=scalars.weight_decay,
        eps=scalars.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=torch.tensor(scalars.gradient_divisor),
    )
    torch._foreach_copy_([slot.weight for slot in slots], [slot.master for slot in slots])


def find_ulps(ours: Tensor, theirs: Tensor) -> int:
    """Return the largest distance in units in the last place."""
    a, b = ours.view(torch.int32).long(), theirs.view(torch.int32).long()
    return int((a - b).abs().max()) if a.numel() else 0


HAS_VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.mark.parametrize("beta1", [0.9, 0.3])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.skipif(not HAS_VECTORS, reason="torch's fused kernel has other roundings without FMA")
def test_compiled_update_equals_fused_kernel_bitwise(
    beta1: float, decoupled: bool, weight_decay: float
) -> None:
    scalars = SCALARS._replace(beta1=beta1, decoupled=decoupled, weight_decay=weight_decay)
    ours = draw_slots(NUMELS)
    theirs = clone(ours)
    update_adamw(ours, scalars)
    update_with_torch(theirs, scalars)
    for slot, other in zip(ours, theirs, strict=True):
        whole = slot.master.numel() // TAIL * TAIL
        for name in ("master", "mean", "square"):
            a, b = getattr(slot, name), getattr(other, name)
            assert torch.equal(a[:whole], b[:whole]), (name, len(a))
            # 1 ulp of a product, which may be several of a sum near zero
            assert_equals(name, a[whole:], b[whole:], FP32)
        assert find_ulps(slot.square, other.square) <= 1
        assert torch.equal(slot.weight, slot.master.bfloat16())


@pytest.mark.parametrize("with_remainders", [False, True])
def test_compiled_update_does_not_depend_on_threads_or_slices(with_remainders: bool) -> None:
    def update(slots: list[Any], threads: int) -> None:  # Any: tensors of either form
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            (update_remainder_adamw if with_remainders else update_adamw)(slots, SCALARS)
        finally:
            torch.set_num_threads(before)

    def prepare() -> list[Any]:  # Any: tensors of either form
        slots = draw_slots(NUMELS)
        return [encode(slot) for slot in slots] if with_remainders else slots

    one, two, split = prepare(), prepare(), prepare()
    update(one, 1)
    update(two, 2)
    parts = [
        type(slot)(*(tensor[start : start + 700] for tensor in slot))
        for slot in split
        for start in range(0, slot.gradient.numel(), 700)
    ]
    update(parts, 2)
    for first, *others in zip(one, two, split, strict=True):
        for other in others:
            for name, expected, tensor in zip(first._fields, first, other, strict=True):
                assert torch.equal(expected, tensor), (name, len(tensor))


def encode(slot: AdamWTensors) -> RemainderTensors:
    """Split master weights into bf16 weights, rounded half up, and remainders."""
    bits = slot.master.view(torch.int32)
    weight = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return RemainderTensors(
        slot.gradient, weight, slot.mean.bfloat16(), slot.square.bfloat16(), bits.to(torch.int16)
    )


def decode(slot: RemainderTensors) -> AdamWTensors:
    low = slot.remainder.int()
    upper = slot.weight.view(torch.int16).int() - (low < 0).int()
    master = ((upper << 16) | (low & 0xFFFF)).view(torch.float32)
    return AdamWTensors(
        slot.gradient, master, slot.mean.float(), slot.square.float(), slot.weight.clone()
    )


@pytest.mark.parametrize("decoupled", [True, False])
def test_remainder_update_equals_update_of_decoded_states(decoupled: bool) -> None:
    scalars = SCALARS._replace(decoupled=decoupled)
    ours = [encode(slot) for slot in draw_slots(NUMELS)]
    for updates in range(1, 4):
        scalars = scalars._replace(updates=updates)
        decoded = [decode(slot) for slot in ours]
        update_adamw(decoded, scalars)
        update_remainder_adamw(ours, scalars)
        for slot, expected in zip(ours, decoded, strict=True):
            for name, tensor, value in zip(slot._fields, slot, encode(expected), strict=True):
                assert torch.equal(tensor, value), (updates, name, len(tensor))


def test_remainder_update_keeps_vectors_of_the_format_and_nan() -> None:
    values = torch.tensor([0.1, 1 / 3, 1.00390625, -2.7182818, float("nan")])
    slot = encode(
        AdamWTensors(torch.zeros(5), values, torch.zeros(5), torch.zeros(5), torch.zeros(5))
    )
    update_remainder_adamw([slot], SCALARS._replace(lr=0.0))
    assert slot.remainder.tolist()[:4] == [-13107, -21845, -32768, -1964]
    assert slot.weight.tolist()[:4] == [0.10009765625, 0.333984375, 1.0078125, -2.71875]
    assert bool(slot.weight[4].isnan()) and int(slot.remainder[4]) == 0


def test_slots_without_elements_and_other_tensors_are_handled() -> None:
    update_adamw(draw_slots([0, 3, 0]), SCALARS)
    update_adamw([], SCALARS)
    (slot,) = draw_slots([8])
    assert supports_adamw([slot]) and supports_adamw([slot._replace(weight=slot.master)])
    assert not supports_adamw([slot._replace(gradient=slot.gradient.double())])
    assert not supports_adamw([slot._replace(mean=torch.zeros(16)[::2])])
    assert not supports_adamw([slot._replace(weight=slot.master.half())])


# --- the rule

SHARDS = [Shard.full("w", (70, 50)), Shard.full("b", (50,), inputs=0)]


def build(backend: BackendName, dtype: torch.dtype = torch.bfloat16) -> RuleOptimizer:
    generator = torch.Generator().manual_seed(3)
    weights = []
    for shard in SHARDS:
        weight = torch.randn(shard.box_shape, generator=generator).to(dtype)
        weights.append((replace(shard, dtype=FORMATS[dtype]), weight))
    return RuleOptimizer(weights, OptimConfig(), backend=backend)


def run_steps(optimizer: RuleOptimizer, dtype: torch.dtype = torch.float32) -> None:
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(s.box_shape, generator=generator).to(dtype) for s in SHARDS]
        scale = torch.tensor(0.5)
        optimizer.step(gradients, lr=1e-2, weight_decay=0.1, scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backends_agree(dtype: torch.dtype) -> None:
    optimizers = {name: build(name, dtype) for name in ("numba", "torch", "reference")}
    for optimizer in optimizers.values():
        run_steps(optimizer)
    for name, optimizer in optimizers.items():
        for slot, expected in zip(optimizer.slots, optimizers["reference"].slots, strict=True):
            assert_equals(f"{name} {slot.shard.name}", slot.master, expected.master, FP32)
            assert torch.equal(slot.weight, slot.master.to(dtype))


def test_automatic_backend_is_compiled_where_it_is_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def record(slots: list[AdamWTensors], scalars: AdamWScalars) -> None:
        calls.append(len(slots))
        update_adamw(slots, scalars)

    monkeypatch.setattr(adamw, "update_adamw", record)
    run_steps(build("torch"))
    run_steps(build("auto", torch.float64), torch.float64)
    run_steps(build("auto", torch.float16))
    assert calls == []
    run_steps(build("auto"))
    assert calls == [1, 1] * 3  # the matrix, and the vector, which has no weight decay


def run_encoded(backend: BackendName, states: OptimizerStatesConfig) -> RuleOptimizer:
    generator = torch.Generator().manual_seed(3)
    weights = [
        (replace(shard, dtype="bf16"), torch.randn(shard.box_shape, generator=generator).bfloat16())
        for shard in SHARDS
    ]
    optimizer = RuleOptimizer(weights, OptimConfig(), states=states, backend=backend)
    run_steps(optimizer)
    return optimizer


def test_states_with_remainders_are_updated_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of an update of decoded values by the other loop, which are then encoded."""
    states = OptimizerStatesConfig(
        master_weights="remainder", first_moment="bf16", second_moment="bf16"
    )
    calls = []

    def record(slots: list[RemainderTensors], scalars: AdamWScalars) -> None:
        calls.append(len(slots))
        update_remainder_adamw(slots, scalars)

    monkeypatch.setattr(adamw, "update_remainder_adamw", record)
    once = run_encoded("auto", states)
    assert calls == [1, 1] * 3  # the matrix, and the vector, which has no weight decay
    run_encoded("torch", states)
    run_encoded("auto", replace(states, second_moment="fp16"))
    run_encoded("auto", replace(states, master_weights="fp32"))
    assert len(calls) == 6
    monkeypatch.setattr(adamw, "supports_remainder_adamw", lambda slot: False)
    decoded = run_encoded("auto", states)
    assert len(calls) == 6
    for slot, expected in zip(once.slots, decoded.slots, strict=True):
        assert torch.equal(slot.weight, expected.weight)
        for role, tensor in slot.list_stored_tensors().items():
            assert torch.equal(tensor, expected.list_stored_tensors()[role]), role


MIXED = [Shard.full(name, (40, 50)) for name in "abc"]


def run_mixed(backend: BackendName, dtypes: dict[str, torch.dtype]) -> RuleOptimizer:
    """Update matrices of several dtypes, which have equal scalars, in one call."""
    weights = []
    for number, shard in enumerate(MIXED):
        weight = torch.randn(40, 50, generator=torch.Generator().manual_seed(number))
        if shard.name in dtypes:
            dtype = dtypes[shard.name]
            weights.append((replace(shard, dtype=FORMATS[dtype]), weight.to(dtype)))
    optimizer = RuleOptimizer(weights, OptimConfig(), backend=backend)
    for step in range(3):
        gradients = [
            torch.randn(40, 50, generator=torch.Generator().manual_seed(10 * step + ord(s.name)))
            for s, _ in weights
        ]
        optimizer.step(gradients, lr=1e-2, weight_decay=0.1, scale=torch.tensor(0.5))
    return optimizer


def test_weights_of_several_dtypes_are_updated_in_one_call() -> None:
    dtypes = {"a": torch.bfloat16, "b": torch.float32, "c": torch.bfloat16}
    compiled, reference = run_mixed("numba", dtypes), run_mixed("reference", dtypes)
    for slot, expected in zip(compiled.slots, reference.slots, strict=True):
        assert_equals(slot.shard.name, slot.master, expected.master, FP32)
        assert torch.equal(slot.weight, slot.master.to(slot.weight.dtype))


def test_backend_of_a_slot_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may hold a replica beside other parameters than another rank."""
    bf16, fp16 = {"a": torch.bfloat16}, {"c": torch.float16}
    calls = []

    def record(slots: list[AdamWTensors], scalars: AdamWScalars) -> None:
        calls.append([slot.weight.dtype for slot in slots])
        update_adamw(slots, scalars)

    monkeypatch.setattr(adamw, "update_adamw", record)
    mixed = run_mixed("auto", bf16 | fp16)
    assert calls == [[torch.bfloat16]] * 3
    for slot, alone in zip(
        mixed.slots, (run_mixed("numba", bf16), run_mixed("torch", fp16)), strict=True
    ):
        for role, tensor in slot.list_stored_tensors().items():
            assert torch.equal(tensor, alone.slots[0].list_stored_tensors()[role]), role
        assert torch.equal(slot.weight, alone.slots[0].weight)


def test_compiled_backend_of_float64_is_rejected_with_the_reason() -> None:
    with pytest.raises(ConfigError) as error:
        run_steps(build("numba", torch.float64), torch.float64)
    assert str(error.value) == (
        "kernels.optimizer=numba: supported inputs: fp32, bf16 on CPUs; AdamW; automatic for "
        "models of 2^20 parameters or more; this input: float64 [70, 50] on cpu. Set "
        "kernels.optimizer to torch, which supports this input, or to auto."
    )
