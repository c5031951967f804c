"""RoPE: known frequencies, scores that depend on distances only, and the backward rotation."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.kernels import Kernel
from megalith.config.model import RopeConfig
from megalith.kernels.rope import (
    apply_rope,
    attention_factor,
    reference_rope,
    rope_frequencies,
    rope_tables,
    yarn_range,
)

LLAMA31 = RopeConfig(theta=500_000.0, scaling="llama3", factor=8.0)


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def tables(
    positions: Tensor, d: int, *, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    return rope_tables(positions, rope_frequencies(RopeConfig(), d, dtype=torch.float64), dtype)


def test_frequencies_fall_from_one_by_powers_of_theta() -> None:
    assert rope_frequencies(RopeConfig(theta=100.0), 4).tolist() == pytest.approx([1.0, 0.1])


def test_llama31_frequencies_match_the_release() -> None:
    plain = rope_frequencies(RopeConfig(theta=500_000.0), 128)
    scaled = rope_frequencies(LLAMA31, 128)
    assert torch.equal(scaled[:29], plain[:29])
    assert torch.allclose(scaled[35:], plain[35:] / 8, rtol=1e-6)
    assert bool(((scaled[29:35] < plain[29:35]) & (scaled[29:35] > plain[29:35] / 8)).all())
    known = {28: 3.211446e-3, 29: 2.166571e-3, 34: 1.785078e-4, 35: 9.556212e-5, 63: 3.068926e-7}
    for index, value in known.items():
        assert scaled[index].item() == pytest.approx(value, rel=1e-5)


def test_llama3_bands_of_zero_width_do_not_interpolate() -> None:
    none = RopeConfig(
        theta=30.0, scaling="llama3", factor=4.0, high_freq_factor=1.0, original_max_position=16
    )
    plain, scaled = rope_frequencies(RopeConfig(theta=30.0), 16), rope_frequencies(none, 16)
    kept = plain * 16 / (2 * math.pi) >= 1.0
    assert kept.any() and not kept.all()
    torch.testing.assert_close(scaled, torch.where(kept, plain, plain / 4), rtol=1e-6, atol=0)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_match_transformers(factor: float) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="compares with transformers, which is not installed"
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=parameters
    )
    reference, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    ours = rope_frequencies(RopeConfig(theta=500_000.0, scaling="llama3", factor=factor), 64)
    torch.testing.assert_close(ours, reference, rtol=1e-6, atol=0)


@pytest.mark.parametrize("length", [16, 17])
@pytest.mark.parametrize("attention", [{}, {"attention_factor": 1.3}, {"factor": 32.0}])
def test_longrope_factors_match_transformers(length: int, attention: dict[str, Any]) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="compares with transformers, which is not installed"
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    short, long = (1.0, 1.1, 1.25, 2.0), (1.5, 3.0, 9.0, 30.5)
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": list(short),
        "long_factor": list(long),
        "original_max_position_embeddings": 16,
        **attention,
    }
    theirs_config = transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters=parameters,
    )
    reference, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs_config, "cpu", seq_len=length)
    ours = RopeConfig(
        theta=500.0,
        scaling="longrope",
        short_factors=short,
        long_factors=long,
        original_max_position=16,
        **({"factor": 4.0} | attention),
    )
    torch.testing.assert_close(
        rope_frequencies(ours, 8, length=length), reference, rtol=1e-6, atol=0
    )
    assert attention_factor(ours) == pytest.approx(factor, rel=1e-12)
    assert attention_factor(replace(ours, factor=1.0, attention_factor=None)) == 1.0


@pytest.mark.parametrize(
    "yarn_parameters",
    [
        {},
        {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
        {"factor": 1.0},
        {"beta_fast": 1.0, "beta_slow": 1.0},
        {"truncate": False, "beta_fast": 1.0, "beta_slow": 1.0},
    ],
)
def test_yarn_frequencies_and_attention_factor_match_transformers(
    yarn_parameters: dict[str, Any],
) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="compares with transformers, which is not installed"
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        **yarn_parameters,
    }
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters=parameters,
    )
    reference, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    ours = RopeConfig(
        theta=500.0,
        scaling="yarn",
        original_max_position=32,
        factor=parameters["factor"],
        whole_pairs=yarn_parameters.get("truncate", True),
        beta_fast=yarn_parameters.get("beta_fast", 32.0),
        beta_slow=yarn_parameters.get("beta_slow", 1.0),
    )
    torch.testing.assert_close(rope_frequencies(ours, 16), reference, rtol=1e-6, atol=0)
    assert attention_factor(ours) == pytest.approx(factor, rel=1e-12)
    assert (attention_factor(ours) > 1.1) == (ours.factor > 1)
    assert attention_factor(replace(ours, attention_factor=1.3)) == 1.3


DEEPSEEK_YARN = RopeConfig(scaling="yarn", factor=40.0, original_max_position=4096)
GPT_OSS_YARN = RopeConfig(
    theta=150_000.0, scaling="yarn", factor=32.0, original_max_position=4096, whole_pairs=False
)


def test_yarn_range_matches_published_models() -> None:
    exact = yarn_range(replace(DEEPSEEK_YARN, whole_pairs=False), 64)
    assert exact == pytest.approx((10.4722, 22.5134), abs=5e-5)
    assert yarn_range(DEEPSEEK_YARN, 64) == (10, 23)
    assert yarn_range(GPT_OSS_YARN, 64) == pytest.approx((8.0928, 17.3980), abs=5e-5)
    plain, scaled = (rope_frequencies(one, 64) for one in (RopeConfig(), DEEPSEEK_YARN))
    assert torch.equal(scaled[:11], plain[:11]) and bool((scaled[11:] < plain[11:]).all())
    torch.testing.assert_close(scaled[23:], plain[23:] / 40, rtol=1e-6, atol=0)


def test_yarn_attention_factor_matches_published_models() -> None:
    assert attention_factor(GPT_OSS_YARN) == pytest.approx(1.3465736, abs=5e-8)
    assert attention_factor(DEEPSEEK_YARN) == pytest.approx(1.368888, abs=5e-7)
    assert attention_factor(DEEPSEEK_YARN) ** 2 == pytest.approx(1.873854, abs=5e-7)


def test_rotation_matches_transformers() -> None:
    pytest.importorskip("transformers", reason="compares with transformers, which is not installed")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, (cos, sin) = seeded(6, 3, 8), tables(torch.arange(6), 8)
    both = [torch.cat([table, table], dim=-1).unsqueeze(0) for table in (cos, sin)]
    reference, _ = apply_rotary_pos_emb(
        x.transpose(0, 1).unsqueeze(0), x.transpose(0, 1).unsqueeze(0), *both
    )
    torch.testing.assert_close(apply_rope(x, cos, sin), reference.squeeze(0).transpose(0, 1))


def test_gradients_match_finite_differences() -> None:
    cos, sin = tables(torch.tensor([0, 3, 1]), 6)
    assert torch.autograd.gradcheck(
        lambda x: apply_rope(x, cos, sin), (seeded(3, 2, 6).requires_grad_(),)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_result_and_gradient_equal_the_reference(dtype: torch.dtype) -> None:
    x = seeded(7, 3, 10, dtype=dtype).requires_grad_()
    cos, sin = tables(torch.arange(7), 10, dtype=dtype)
    dy = seeded(7, 3, 10, seed=1, dtype=dtype)
    y, expected = apply_rope(x, cos, sin), reference_rope(x, cos, sin)
    tolerance = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    (actual,), (reference,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy)
    torch.testing.assert_close(actual, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("d", [10, 32])
def test_all_backends_match_the_reference(
    dtype: torch.dtype, tolerance: float, kernel: Kernel, d: int
) -> None:
    wide = seeded(301, 7, d, dtype=dtype).requires_grad_()
    x, (cos, sin), dy = (
        wide[:, 1:6],
        tables(torch.arange(301), d, dtype=dtype),
        seeded(301, 5, d, seed=1, dtype=dtype),
    )
    y, expected = (
        apply_rope(x, cos, sin, kernel=kernel),
        apply_rope(x, cos, sin, kernel="reference"),
    )
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    (actual,), (reference,) = (
        torch.autograd.grad(y, wide, dy),
        torch.autograd.grad(expected, wide, dy),
    )
    torch.testing.assert_close(actual, reference, rtol=tolerance, atol=tolerance)


def test_scores_depend_only_on_the_distance() -> None:
    q, k, positions = seeded(5, 2, 16), seeded(5, 2, 16, seed=1), torch.tensor([0, 4, 5, 9, 30])
    here, there = tables(positions, 16), tables(positions + 7, 16)
    scores = [
        torch.einsum("qnd,knd->nqk", apply_rope(q, *t), apply_rope(k, *t)) for t in (here, there)
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-12, atol=1e-12)


def test_rotation_keeps_position_zero_and_vector_norms() -> None:
    x, (cos, sin) = seeded(4, 3, 8), tables(torch.arange(4), 8)
    y = apply_rope(x, cos, sin)
    assert torch.equal(y[0], x[0])
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


def test_strided_heads_are_read_without_copy_and_not_modified() -> None:
    wide = seeded(5, 6, 8)
    before, (cos, sin) = wide.clone(), tables(torch.arange(5), 8)
    torch.testing.assert_close(
        apply_rope(wide[:, 1:4], cos, sin), reference_rope(wide[:, 1:4], cos, sin)
    )
    assert torch.equal(wide, before)


def test_angles_of_far_positions_are_computed_in_fp32() -> None:
    frequencies = rope_frequencies(RopeConfig(), 8)
    cos, sin = rope_tables(torch.tensor([100_003]), frequencies, torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.bfloat16
    exact = (100_003 * frequencies.double()).cos()
    assert (cos.double() - exact).abs().max() < 2**-7


def test_shapes_on_meta_device() -> None:
    x = torch.empty(5, 2, 8, device="meta", requires_grad=True)
    cos, sin = rope_tables(
        torch.arange(5, device="meta"), rope_frequencies(RopeConfig(), 8).to("meta"), torch.float32
    )
    y = apply_rope(x, cos, sin)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [5, 16])
def test_partial_and_interleaved_rope_match_under_every_backend(
    dtype: torch.dtype, tolerance: float, kernel: Kernel, interleaved: bool, pairs: int
) -> None:
    whole, dy = (
        seeded(131, 5, 32, dtype=dtype).requires_grad_(),
        seeded(131, 3, 32, seed=1, dtype=dtype),
    )
    x, angles = whole[:, 1:-1], seeded(131, pairs, seed=2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    actual, reference = (
        apply_rope(x, cos, sin, interleaved=interleaved, kernel=k) for k in (kernel, "reference")
    )
    assert (actual - reference).abs().max() <= tolerance * reference.abs().max()
    assert torch.equal(actual[..., 2 * pairs :], x[..., 2 * pairs :])
    (a,), (b,) = torch.autograd.grad(actual, whole, dy), torch.autograd.grad(reference, whole, dy)
    assert (a - b).abs().max() <= tolerance * b.abs().max()
