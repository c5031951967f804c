"""Numba loops run on torch's threads, and only on supported tensors."""

import struct
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megalith.kernels import cpu_threads
from megalith.kernels.activation import swiglu
from megalith.kernels.attention.dispatch import attention
from megalith.kernels.embedding import embedding
from megalith.kernels.linear import linear
from megalith.kernels.norm import add_rms_norm, rms_norm
from megalith.kernels.packed import seq_params_from_rows
from megalith.kernels.rope import apply_rope
from megalith.parallel.cross_entropy import VocabShard, linear_cross_entropy
from megalith.parallel.group import single_rank_group

ROWS = seq_params_from_rows(2, 64)
linux = pytest.mark.skipif(
    sys.platform != "linux", reason="finds torch's OpenMP library in /proc, which only Linux has"
)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@linux
def test_openmp_library_is_torchs_own() -> None:
    assert cpu_threads.openmp() is not None
    assert "/torch" in cpu_threads._loaded_libraries()[0]


@linux
def test_loops_support_large_fp32_or_bf16_cpu_tensors() -> None:
    large, weight = torch.zeros(128, 64), torch.zeros(64)
    assert cpu_threads.should_use(large, weight)
    assert cpu_threads.should_use(large.bfloat16(), weight.bfloat16())
    assert not cpu_threads.should_use(large[:2], weight)
    assert not cpu_threads.should_use(large.double(), weight.double())
    assert not cpu_threads.should_use(large.bfloat16(), weight)
    assert not cpu_threads.should_use(large.half(), weight.half())
    assert not cpu_threads.should_use(large.to("meta"), weight.to("meta"))


def test_torch_backend_is_used_without_openmp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate_up = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(cpu_threads, "openmp", lambda: None)
    assert not cpu_threads.should_use(gate_up)
    torch.testing.assert_close(swiglu(gate_up), swiglu(gate_up, kernel="reference"))


def test_arguments_become_eight_bytes_each() -> None:
    x = torch.zeros(3)
    assert cpu_threads._bits(x) == x.data_ptr()
    assert cpu_threads._bits(-7) == -7
    assert cpu_threads._bits(True) == 1
    assert struct.unpack("d", struct.pack("q", cpu_threads._bits(1e-5))) == (1e-5,)


def test_small_work_uses_one_thread(two_threads: None) -> None:
    assert cpu_threads.num_threads(cpu_threads.MIN_THREADED_ELEMENTS - 1) == 1
    assert cpu_threads.num_threads(cpu_threads.MIN_THREADED_ELEMENTS) == 2


@linux
@pytest.mark.parametrize("rows", [1, 2, 3, 101])
def test_two_threads_partition_any_number_of_rows(rows: int, two_threads: None) -> None:
    h = cpu_threads.MIN_THREADED_ELEMENTS
    x = torch.randn(rows, h, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.ones(h, requires_grad=True)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        y = rms_norm(x, weight, 1e-5)
        results.append((y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))))
    (y1, dx1, dw1), (y2, dx2, dw2) = results
    assert torch.equal(y1, y2)
    assert torch.equal(dx1, dx2)
    torch.testing.assert_close(dw1, dw2)


@linux
def test_results_are_deterministic_for_equal_thread_counts(two_threads: None) -> None:
    x = torch.randn(512, 96, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.ones(96, requires_grad=True)

    def dweight() -> Tensor:
        return torch.autograd.grad(rms_norm(x, weight, 1e-5).square().sum(), weight)[0]

    first = dweight()
    assert all(torch.equal(first, dweight()) for _ in range(5))


VOCAB = VocabShard(single_rank_group("tp"), 0, 190)


def everything(x: Tensor, weight: Tensor) -> Tensor:
    """Every kernel once: x [128, 96], weight [192, 96]."""
    ids = torch.arange(128) % 192
    cos, sin = torch.ones(128, 8), torch.zeros(128, 8)
    x, normed = add_rms_norm(x, embedding(ids, weight), weight[0], 1e-5)
    x = linear(rms_norm(x, weight[1], 1e-5), [weight[:96], weight[96:]])
    q, k, v = (apply_rope(part.unflatten(1, (4, 16)), cos, sin) for part in x.split(64, dim=1))
    x = swiglu(attention(q, k, v, ROWS).flatten(1)) @ normed[:32]
    return linear_cross_entropy(x, weight, ids, vocab=VOCAB)


def test_torch_compile_captures_every_kernel_in_one_graph() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(n, 96, generator=generator).mul(0.1).requires_grad_() for n in (128, 192)
    )
    graph: Callable[[Tensor, Tensor], Tensor] = torch.compile(
        everything, backend="aot_eager", fullgraph=True
    )
    actual, reference = (
        torch.autograd.grad(f(x, weight), (x, weight)) for f in (graph, everything)
    )
    torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-4)
