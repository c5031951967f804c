"""Encodings of optimizer states are exact where they must be, and give the same codes for every
slice of a parameter."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.config.optim import MomentDtype, OptimConfig, OptimizerStatesConfig
from megalith.errors import ConfigError
from megalith.optim.encodings import (
    BlockTensor,
    EncodedTensor,
    RemainderTensor,
    build_code_values,
    encode_moment,
    join_remainders,
    list_global_elements,
    list_nbytes,
    round_stochastically,
    split_remainders,
)
from megalith.optim.optimizer import PIECE_NUMEL, RuleOptimizer
from megalith.optim.qk_clip import scale_slot
from megalith.optim.slots import MASTER, build_slot
from megalith.plan.keys import key as build_key
from megalith.plan.qk_clip import split_factors
from megalith.plan.shards import Shard
from megalith.plan.state_encodings import moment_nbytes

ENCODED: tuple[MomentDtype, ...] = ("bf16", "fp16", "fp8", "int8")
BLOCKS: tuple[MomentDtype, ...] = ("fp16", "fp8", "int8")


def draw_moments(numel: int, seed: int, *, is_unsigned: bool) -> Tensor:
    """Return values of many magnitudes, with zeros, a block of zeros and tiny blocks."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values *= 10.0 ** torch.randint(-12, 3, (numel,), generator=generator)
    values[::17] = 0.0
    values[256:512] = 0.0
    values[512:768] *= 1e-28
    values[768:1024] *= 1e-38
    values[1024:1280] = -(2.0 ** torch.arange(-128, 128)) if numel > 1280 else 0.0
    return values.abs() if is_unsigned else values


def decode(encoded: EncodedTensor) -> Tensor:
    return encoded.decode(0, encoded.numel)


# --- remainders


def test_remainders_of_known_values() -> None:
    values = torch.tensor([0.1, 1 / 3, 1.00390625, -2.7182818])
    high, low = split_remainders(values)
    assert high.view(torch.bfloat16).tolist() == [0.10009765625, 0.333984375, 1.0078125, -2.71875]
    assert low.tolist() == [-13107, -21845, -32768, -1964]
    assert torch.equal(join_remainders(high, low), values)


SplitRemainders = Callable[[Tensor], tuple[Tensor, Tensor]]


def check_remainders(bits: Tensor, split: SplitRemainders = split_remainders) -> None:
    values = bits.view(torch.float32)
    high, low = split(values)
    joined = join_remainders(high, low)
    is_nan = values.isnan()
    assert torch.equal(joined.view(torch.int32)[~is_nan], bits[~is_nan])
    assert joined[is_nan].isnan().all()
    assert high.view(torch.bfloat16)[is_nan].isnan().all()


def sample_bits() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    sampled = torch.randint(-(2**31), 2**31, (2**16,), generator=generator, dtype=torch.int64)
    halves = torch.tensor([-0x8001, -0x8000, -0x7FFF, -1, 0, 1, 0x7FFF, 0x8000, 0x8001])
    upper = torch.randint(-(2**15), 2**15, (4096, 1), generator=generator, dtype=torch.int64) << 16
    near = (upper + halves).flatten()
    edges = torch.tensor([0x7F800000, 0x7F7FFFFF, 0x7FFFFFFF, 0x7F800001, -(2**31), -1, 0x7F7F8000])
    return torch.cat([sampled, near.clamp(-(2**31), 2**31 - 1), edges]).to(torch.int32)


def test_remainders_are_exact_for_sampled_bit_patterns() -> None:
    check_remainders(sample_bits())


def round_to_even(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return bf16 weights rounded to nearest even with the low halves: a fault."""
    low = values.view(torch.int32).to(torch.int16)
    return values.bfloat16().view(torch.int16), low


def test_planted_fault_remainder_rounded_to_even_is_rejected() -> None:
    bits = sample_bits()
    bits = bits[bits.view(torch.float32).isfinite()]
    check_remainders(bits)
    with pytest.raises(AssertionError):
        check_remainders(bits, round_to_even)
    with pytest.raises(AssertionError):  # already for a single tie
        check_remainders(torch.tensor([1.00390625]).view(torch.int32), round_to_even)


@pytest.mark.slow
def test_remainders_are_exact_for_all_bit_patterns() -> None:
    offsets = torch.arange(2**22, dtype=torch.int32)  # a part of the cache at a time
    for start in range(-(2**31), 2**31, 2**22):
        check_remainders(offsets + start)


def test_remainder_tensor_writes_the_weights_of_the_model() -> None:
    weight = torch.zeros(600, dtype=torch.bfloat16)
    master = RemainderTensor(weight)
    values = torch.randn(600, generator=torch.Generator().manual_seed(1))
    master.encode(values[256:512], 256)
    expected = torch.zeros(600)
    expected[256:512] = values[256:512]
    assert torch.equal(decode(master), expected)
    assert torch.equal(weight, expected.bfloat16())  # no ties among these values
    assert list_nbytes(master) == 2 * 600


# --- moments


@pytest.mark.parametrize("is_unsigned", [False, True])
@pytest.mark.parametrize("dtype", ENCODED)
def test_decoding_is_idempotent(dtype: MomentDtype, is_unsigned: bool) -> None:
    for seed in range(4):
        values = draw_moments(20_001, seed, is_unsigned=is_unsigned)
        first = decode(encode_moment(values, dtype, is_unsigned=is_unsigned))
        second = decode(encode_moment(first, dtype, is_unsigned=is_unsigned))
        assert torch.equal(first.view(torch.int32), second.view(torch.int32)), seed


@pytest.mark.parametrize("is_unsigned", [False, True])
@pytest.mark.parametrize(
    ("dtype", "relative", "of_largest"),
    [("bf16", 2**-8, 0.0), ("fp16", 2**-11, 2**-38), ("fp8", 2**-4, 2**-17), ("int8", 0.47, 7e-7)],
)
def test_rounding_error_is_within_half_a_unit(
    dtype: MomentDtype, relative: float, of_largest: float, is_unsigned: bool
) -> None:
    values = draw_moments(20_001, 5, is_unsigned=is_unsigned)[1280:]
    decoded = decode(encode_moment(values, dtype, is_unsigned=is_unsigned))
    padded = torch.nn.functional.pad(values.abs(), (0, -len(values) % 256)).view(-1, 256)
    largest = padded.amax(1).repeat_interleave(256)[: len(values)]
    # positive second moments round up to the smallest code, a whole unit
    bound = relative * values.abs() + of_largest * largest * (8 if is_unsigned else 2)
    assert ((decoded - values).abs() <= bound.clamp(min=2.0**-149)).all()


@pytest.mark.parametrize("dtype", BLOCKS)
def test_positive_second_moments_are_not_rounded_to_zero(dtype: MomentDtype) -> None:
    values = torch.full((256,), 1e-12)
    values[0], values[1] = 1.0, 0.0
    decoded = decode(encode_moment(values, dtype, is_unsigned=True))
    assert decoded[0] == 1.0 and decoded[1] == 0.0
    assert (decoded[2:] > 0).all()
    signed = decode(encode_moment(values, dtype, is_unsigned=False))
    assert not signed[2:].any() or dtype == "fp16"


def test_second_moments_below_the_smallest_scale_stay_positive() -> None:
    values = torch.tensor([1e-33, 3e-34, 1e-44, 0.0])
    for dtype in BLOCKS:
        encoded = encode_moment(values, dtype, is_unsigned=True)
        decoded = decode(encoded)
        assert (decoded[:3] > 0).all() and decoded[3] == 0, dtype
        assert decoded[0] >= decoded[1] >= decoded[2], dtype
        encoded.encode(decoded, 0)
        assert torch.equal(decode(encoded), decoded), dtype


def test_int8_keeps_the_largest_value_of_a_block_with_its_sign() -> None:
    values = torch.linspace(-0.7, 0.69, 256)
    encoded = BlockTensor(values, "int8", is_unsigned=False)
    decoded = decode(encoded)
    assert decoded[0] == values[0]
    assert encoded.tensors["scales"].tolist() == values[:1].tolist()


def test_scale_of_a_block_of_zeros_is_one() -> None:
    for dtype in BLOCKS:
        encoded = encode_moment(torch.zeros(300), dtype, is_unsigned=False)
        assert encoded.tensors["scales"].tolist() == [1.0, 1.0]
        assert not decode(encoded).any()


def test_scales_are_powers_of_two_rounded_up() -> None:
    values = torch.zeros(4, 256)
    values[:, 3] = torch.tensor([448.0, 448.0001, 0.875, 1e-40])
    encoded = BlockTensor(values.flatten(), "fp8", is_unsigned=False)
    assert encoded.tensors["scales"].tolist() == [1.0, 2.0, 2.0**-9, 2.0**-100]
    halves = BlockTensor(torch.tensor([32752.0]), "fp16", is_unsigned=True)
    assert halves.tensors["scales"].tolist() == [1.0]


def test_code_values_of_int8() -> None:
    signed, unsigned = (build_code_values(is_unsigned=flag) for flag in (False, True))
    for values in (signed, unsigned):
        assert len(values) == 256 and (values.diff() > 0).all() and values[-1] == 1.0
    assert unsigned[0] == 0.0 and unsigned[1].item() == pytest.approx(3.25e-7)
    assert (signed < 0).sum() == 127 and signed[127] == 0.0
    assert signed[0].item() == pytest.approx(-(0.1 + 0.9 * 63.5 / 64))
    assert unsigned[-2].item() == pytest.approx(0.1 + 0.9 * 127.5 / 128)


def test_int8_codes_of_known_values() -> None:
    values = torch.tensor([2.0, 1.0, 0.5, 0.02, 2e-6, 0.0])
    second = BlockTensor(values, "int8", is_unsigned=True)
    assert second.tensors["codes"].tolist() == [255, 183, 148, 62, 2, 0]
    first = BlockTensor(values * -1, "int8", is_unsigned=False)
    assert first.tensors["codes"].tolist() == [255, 219, 201, 158, 128, 127]
    assert first.tensors["scales"].tolist() == [-2.0]


@pytest.mark.parametrize("is_unsigned", [False, True])
def test_int8_code_values_equal_torchao(is_unsigned: bool) -> None:
    utils = pytest.importorskip("torchao.optim.quant_utils")
    table = sorted(utils.create_dynamic_map(not is_unsigned, 7, 8))
    torch.testing.assert_close(
        build_code_values(is_unsigned=is_unsigned), torch.tensor(table), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", ENCODED)
def test_bytes_of_stored_tensors(dtype: MomentDtype, numel: int) -> None:
    encoded = encode_moment(torch.ones(numel), dtype, is_unsigned=False)
    assert list_nbytes(encoded) == moment_nbytes(numel, dtype)


@pytest.mark.parametrize("dtype", ENCODED)
def test_part_of_the_blocks_is_decoded_and_encoded(dtype: MomentDtype) -> None:
    values = draw_moments(2000, 3, is_unsigned=False)
    whole = encode_moment(values, dtype, is_unsigned=False)
    parts = encode_moment(torch.zeros(2000), dtype, is_unsigned=False)
    for start, stop in ((0, 512), (512, 768), (768, 2000)):
        parts.encode(values[start:stop], start)
        assert torch.equal(parts.decode(start, stop), whole.decode(start, stop))
    assert torch.equal(decode(parts), decode(whole))


# --- stochastic rounding


def test_stochastic_rounding_is_unbiased() -> None:
    numel = 100_000
    for value in (1.001, -0.3337, 3.1e-5):
        values = torch.full((numel,), value)
        rounded = round_stochastically(values, torch.arange(numel), build_key(0, "a", "w")).double()
        steps = rounded.unique()
        assert len(steps) == 2
        step = float(steps[1] - steps[0])
        share = (torch.tensor(value).double().item() - float(steps[0])) / step
        four_sigma = 4 * step * math.sqrt(share * (1 - share) / numel)
        assert abs(rounded.mean().item() - torch.tensor(value).double().item()) < four_sigma


def test_stochastic_rounding_keeps_bf16_values_and_nonfinite_ones() -> None:
    values = torch.tensor([1.5, -0.0, math.inf, -math.inf, math.nan, 2.0**-130])
    for key in range(20):
        rounded = round_stochastically(values, torch.arange(6), key).float()
        torch.testing.assert_close(rounded, values, rtol=0, atol=0, equal_nan=True)


def test_stochastic_rounding_depends_on_key_and_element() -> None:
    values = torch.full((4096,), 1.001)
    elements = torch.arange(4096)
    first = round_stochastically(values, elements, 1)
    assert torch.equal(first, round_stochastically(values, elements, 1))
    assert torch.equal(first[1000:], round_stochastically(values[1000:], elements[1000:], 1))
    assert not torch.equal(first, round_stochastically(values, elements, 2))
    assert not torch.equal(first, round_stochastically(values, elements + 1, 1))


def test_roundings_of_one_update_have_separate_bits() -> None:
    """A weight that the update rounds up is not rounded up by QK-clip for the same reason."""
    numel = 2**14
    shard = Shard.full("layers.0.attention.q", (1, 128, 128), dtype="bf16")
    states = OptimizerStatesConfig(master_weights="none")
    weights = [(shard, torch.ones(128, 128, dtype=torch.bfloat16))]
    optimizer = RuleOptimizer(weights, OptimConfig(kind="sgd", momentum=0.0), states=states)
    half = 2.0**-8  # of the distance of bf16 values above 1
    optimizer.step([torch.full((128, 128), -half)], lr=1.0, weight_decay=0.0)
    (slot,) = optimizer.slots
    assert abs(slot.weight.double().mean() - (1 + half)) < 4 * half / math.sqrt(numel)
    scale_slot(slot, split_factors(shard, np.full((1, 1, 1), 0.75)))
    # errors of both roundings: of 2 values at distance 2 half, times 0.75, and at distance half
    sigma = math.hypot(0.75 * half, 0.5 * half)
    error = abs(slot.weight.double().mean() - 0.75 * (1 + half))
    assert error < 4 * sigma / math.sqrt(numel)


def test_elements_of_slices_are_numbered_in_the_whole_parameter() -> None:
    numbers = torch.arange(6 * 8 * 5).view(6, 8, 5)
    box = ((1, 5), (2, 8), (0, 5))
    shard = replace(Shard.full("w", (6, 8, 5)), box=box, flat=(7, 100))
    expected = numbers[1:5, 2:8].reshape(-1)[7:100]
    assert torch.equal(list_global_elements(shard, 0, 93, torch.device("cpu")), expected)
    assert torch.equal(list_global_elements(shard, 5, 9, torch.device("cpu")), expected[5:9])


# --- slots and updates

PARAMETERS = [
    Shard.full("layers.0.mlp.down", (96, 64), dtype="bf16"),
    Shard.full("layers.0.attention.q", (4, 16, 64), dtype="bf16"),
    Shard.full("norm.weight", (128,), inputs=0, dtype="bf16"),
]
STATES = [
    OptimizerStatesConfig(master_weights="remainder", first_moment="bf16", second_moment="bf16"),
    OptimizerStatesConfig(master_weights="remainder", first_moment="fp16", second_moment="fp8"),
    OptimizerStatesConfig(master_weights="none", first_moment="int8", second_moment="int8"),
    OptimizerStatesConfig(master_weights="fp32", first_moment="fp8", second_moment="int8"),
    OptimizerStatesConfig(master_weights="none"),
]


def draw_tensors(seed: int, scale: float, shards: list[Shard]) -> list[Tensor]:
    """Return one tensor per shard, the slice of the whole parameter's."""
    tensors = []
    for number, shard in enumerate(shards):
        generator = torch.Generator().manual_seed(seed * 100 + number)
        whole = torch.randn(shard.shape, generator=generator) * scale
        part = whole[tuple(slice(start, stop) for start, stop in shard.box)].reshape(-1)
        tensors.append(part[slice(*(shard.flat or (0, shard.numel)))].clone())
    return tensors


def train(
    shards: list[Shard], states: OptimizerStatesConfig, optim: OptimConfig, steps: int = 3
) -> RuleOptimizer:
    weights = [(s, w.bfloat16()) for s, w in zip(shards, draw_tensors(0, 1.0, shards), strict=True)]
    optimizer = RuleOptimizer(weights, optim, states=states, seed=7)
    for step in range(1, steps + 1):
        gradients = draw_tensors(step, 0.1, shards)
        optimizer.step(gradients, lr=1e-2, weight_decay=0.1, scale=torch.tensor(0.5))
    return optimizer


def slice_shards(rank: int, ranks: int) -> list[Shard]:
    """Return slices of whole blocks, as ZeRO's, and of rows, as those of tensor parallelism."""
    sliced = []
    for shard in PARAMETERS:
        if shard.inputs == 0:
            half = shard.numel // 2
            sliced.append(replace(shard, flat=(half * rank, half * (rank + 1))))
        elif len(shard.shape) == 3:
            sliced.append(shard.split_dim(0, [1, 3], rank, ("tp",)))
        else:
            bound = 256 * 7
            flat = (0, bound) if rank == 0 else (bound, shard.numel)
            sliced.append(replace(shard, flat=flat))
    return sliced


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("states", STATES, ids=str)
def test_codes_do_not_depend_on_the_slices(states: OptimizerStatesConfig, kind: str) -> None:
    optim = OptimConfig(kind=kind)  # type: ignore[arg-type]  # a parameter of the test
    whole = train(PARAMETERS, states, optim)
    halves = [train(slice_shards(rank, 2), states, optim) for rank in range(2)]
    for number, slot in enumerate(whole.slots):
        parts = [half.slots[number] for half in halves]
        joined = torch.cat([part.weight for part in parts])
        assert torch.equal(joined, slot.weight.view(-1)), slot.shard.name
        stored = slot.list_stored_tensors()
        assert stored.keys() == parts[0].list_stored_tensors().keys()
        for name, tensor in stored.items():
            pieces = [part.list_stored_tensors()[name].view(-1) for part in parts]
            assert torch.equal(torch.cat(pieces), tensor.view(-1)), (slot.shard.name, name)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("states", STATES, ids=str)
def test_update_equals_the_rule_on_decoded_values(states: OptimizerStatesConfig, kind: str) -> None:
    """An update of encoded slots is that of fp32 slots, whose states are then encoded."""
    optim = OptimConfig(kind=kind)  # type: ignore[arg-type]  # a parameter of the test
    encoded, plain = (
        train(PARAMETERS, states, optim, 2),
        train(PARAMETERS, OptimizerStatesConfig(), optim, 2),
    )
    for slot, wide in zip(encoded.slots, plain.slots, strict=True):
        wide.master.copy_(slot.read_master().view(wide.master.shape))
        for role in slot.state:
            wide.state[role].copy_(slot.read_state(role).view(wide.master.shape))
    for optimizer in (encoded, plain):
        optimizer.step(draw_tensors(9, 0.1, PARAMETERS), lr=1e-2, weight_decay=0.1)
    for slot, wide in zip(encoded.slots, plain.slots, strict=True):
        for role, tensor in wide.state.items():
            expected = tensor
            if role in slot.encoded:
                dtype = states.second_moment if role == "exp_avg_sq" else states.first_moment
                is_unsigned = role == "exp_avg_sq"
                expected = decode(encode_moment(tensor, dtype, is_unsigned=is_unsigned))
            torch.testing.assert_close(
                slot.read_state(role).view(-1), expected.view(-1), rtol=1e-6, atol=1e-9
            )
        step = 2.0**-7 if states.master_weights == "none" else 2.0**-22
        torch.testing.assert_close(slot.read_master(), wide.master, rtol=step, atol=1e-8)


def test_large_and_empty_slices_are_updated_in_pieces() -> None:
    states = OptimizerStatesConfig(
        master_weights="remainder", first_moment="int8", second_moment="int8"
    )
    shard = Shard.full("w", (PIECE_NUMEL // 128 + 3, 256), dtype="bf16")
    empty = replace(Shard.full("v", (4, 64), dtype="bf16"), flat=(0, 0))
    optimizer = train([shard, empty], states, OptimConfig(), 1)
    plain = train([shard, empty], OptimizerStatesConfig(), OptimConfig(), 1)
    torch.testing.assert_close(optimizer.slots[0].read_master(), plain.slots[0].master)


def test_second_moments_have_the_unsigned_map() -> None:
    states = OptimizerStatesConfig(first_moment="int8", second_moment="int8")
    slot = build_slot(
        Shard.full("w", (16, 16)), torch.ones(16, 16), ("exp_avg", "exp_avg_sq"), states=states
    )
    assert slot.encoded["exp_avg_sq"].tensors["codes"].unique().tolist() == [0]
    assert slot.encoded["exp_avg"].tensors["codes"].unique().tolist() == [127]


def test_planted_fault_signed_map_of_second_moments_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megalith.optim.slots.SECOND_MOMENTS", ())
    with pytest.raises(AssertionError):
        test_second_moments_have_the_unsigned_map()


def test_bytes_per_parameter() -> None:
    """bf16 weights, remainders, int8 moments and fp32 gradients are 10 bytes per parameter."""
    shard = Shard.full("w", (1024, 256), dtype="bf16")
    states = OptimizerStatesConfig(
        master_weights="remainder", first_moment="int8", second_moment="int8"
    )
    optimizer = train([shard], states, OptimConfig(), 1)
    (slot,) = optimizer.slots
    stored = sum(tensor.nbytes for tensor in slot.list_stored_tensors().values())
    assert stored / shard.numel == 4 + 2 * 4 / 256
    assert (slot.weight.nbytes + stored + 4 * shard.numel) / shard.numel == pytest.approx(
        10, rel=0.005
    )


def test_slices_that_split_blocks_are_rejected() -> None:
    shard = replace(Shard.full("layers.0.mlp.down", (96, 64)), flat=(0, 2000))
    states = OptimizerStatesConfig(first_moment="int8")
    with pytest.raises(ConfigError, match="holds elements 0 to 2000 of 6144 of layers.0.mlp.down"):
        build_slot(shard, torch.ones(2000), ("exp_avg",), states=states)
    build_slot(replace(shard, flat=(5888, 6144)), torch.ones(256), ("exp_avg",), states=states)


def test_states_are_reset_and_master_weights_written() -> None:
    for states in STATES:
        optimizer = train(PARAMETERS, states, OptimConfig())
        for slot in optimizer.slots:
            slot.reset_states()
            assert all(not slot.read_state(role).any() for role in slot.state)
            slot.write_master(torch.ones(slot.weight.shape), purpose="test")
            assert torch.equal(slot.read_master().float(), torch.ones(slot.weight.shape))
            assert (MASTER in slot.encoded) == (states.master_weights != "fp32")


@pytest.mark.parametrize("states", STATES, ids=str)
def test_qk_clip_scales_encoded_master_weights(states: OptimizerStatesConfig) -> None:
    slot = train(PARAMETERS, states, OptimConfig()).slots[1]
    before = slot.read_master().float().clone()
    weights = slot.weight.clone()
    factors = np.array([1.0, 0.5, 1.0, 0.7]).reshape(4, 1, 1)
    scale_slot(slot, split_factors(slot.shard, factors))
    expected = before.view(4, -1) * torch.tensor([1.0, 0.5, 1.0, 0.7]).view(4, 1)
    rounding = 2**-7 if states.master_weights == "none" else 1e-6
    torch.testing.assert_close(
        slot.read_master().float().view(4, -1), expected, rtol=rounding, atol=0
    )
    kept = slot.weight.view(4, -1)[[0, 2]], weights.view(4, -1)[[0, 2]]
    assert torch.equal(*kept)


assert {*ENCODED, "fp32"} == {*get_args(MomentDtype)}
