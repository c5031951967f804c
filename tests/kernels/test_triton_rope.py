"""Triton RoPE matches its reference, including gradients."""

import pytest
import torch
from torch import Tensor

from megalith.kernels.rope import apply_rope, reference_rope
from megalith.kernels.triton import launch
from megalith.testing.tiny import triton_device

DEVICE = triton_device()
if DEVICE is None:
    pytest.skip(
        "needs an NVIDIA GPU; tests/kernels/test_gpu.py interprets these", allow_module_level=True
    )
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the programs would not be asked."""
    monkeypatch.setattr(launch, "can_use", lambda *tensors: True)
    monkeypatch.setattr("megalith.kernels.cpu_threads.should_use", lambda *tensors: False)


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("heads", "size", "pairs"), [(3, 6, 3), (5, 10, 2), (1, 80, 40), (90, 64, 20)]
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_matches_the_reference(
    interleaved: bool, heads: int, size: int, pairs: int, dtype: torch.dtype, tolerance: float
) -> None:
    whole = seeded(7, heads + 2, size, dtype=dtype).requires_grad_()
    angles, dy = seeded(7, pairs, seed=1), seeded(7, heads, size, seed=2, dtype=dtype)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    x = whole[:, 1:-1]
    actual, reference = (
        apply_rope(x, cos, sin, interleaved=interleaved),
        reference_rope(x, cos, sin, interleaved),
    )
    assert (actual - reference).abs().max() <= tolerance * reference.abs().max()
    assert torch.equal(actual[..., 2 * pairs :], x[..., 2 * pairs :]), "the rest does not turn"
    (a,), (b,) = torch.autograd.grad(actual, whole, dy), torch.autograd.grad(reference, whole, dy)
    assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_strided_features_match_contiguous_ones() -> None:
    x = seeded(7, 6, 3).transpose(1, 2)
    cos, sin = seeded(7, 3, seed=1).cos(), seeded(7, 3, seed=1).sin()
    torch.testing.assert_close(apply_rope(x, cos, sin), reference_rope(x, cos, sin))
