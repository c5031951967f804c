"""Grouped matmuls of experts with uneven rows, and their gradient accumulators."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megalith.kernels.grouped_linear import (
    BATCHED,
    FUSED,
    HAS_GROUPED_MM,
    LOOP,
    MIN_ONEDNN_COPY_MULTIPLICATIONS,
    GroupedMatmulOps,
    Groups,
    LoopMatmulOps,
    accumulate_grouped_product_,
    build_groups,
    equal_groups,
    grouped_linear,
    reference_grouped_linear,
    select_grouped_matmul_ops,
    zero_experts_without_rows_,
)
from megalith.kernels.linear import MatmulOps, bf16_matmul, register_recompute
from megalith.testing.inject import patched
from megalith.testing.tolerance import FP32, assert_equals

UNEVEN = [3, 0, 5, 1, 0]
E, R, O, I = 5, 9, 8, 16  # noqa: E741  # experts, rows, outputs, inputs


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def wants(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return seeded(*shape, seed=seed, dtype=dtype).requires_grad_()


class Recorder:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.matmul_ops: list[tuple[Tensor, Tensor, Groups]] = []

    def grouped_product(
        self, x: Tensor, dy: Tensor, groups: Groups, matmul_ops: GroupedMatmulOps | None
    ) -> None:
        self.matmul_ops.append((x, dy, groups))

    def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
        raise AssertionError("experts hand over grouped products")

    def gradient(self, dw: Tensor) -> None:
        raise AssertionError("experts hand over grouped products")

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        raise AssertionError("experts hand over grouped products")


def test_experts_without_rows_get_zeros_with_counts_on_host_or_device() -> None:
    ends = build_groups(torch.tensor(UNEVEN)).on_device(torch.device("cpu"))
    for groups in (Groups(tuple(UNEVEN)), Groups(None, ends)):
        dw = seeded(E, O, I)
        result = zero_experts_without_rows_(dw.clone(), groups, ends)
        for expert, count in enumerate(UNEVEN):
            assert torch.equal(
                result[expert], dw[expert] if count else torch.zeros(O, I, dtype=dw.dtype)
            )


def each_way(
    x: Tensor, w: Tensor, dy: Tensor, groups: Groups, matmul_ops: GroupedMatmulOps
) -> Sequence[Tensor]:
    """y, dx and dw."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = grouped_linear(x, w, groups, matmul_ops=matmul_ops)
    return y.detach(), *torch.autograd.grad(y, (x, w), dy)


@pytest.mark.parametrize("counts", [UNEVEN, [0, 0, 9, 0, 0], [9, 0, 0, 0, 0], [0] * 5], ids=str)
def test_gradients_match_finite_differences(counts: list[int]) -> None:
    x, w = wants(sum(counts), 3), wants(E * 2, 3, seed=1)
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, build_groups(counts)), (x, w))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [UNEVEN, [0, 0, 9, 0, 0], [1] * 9], ids=str)
def test_result_and_gradients_equal_the_reference(dtype: torch.dtype, counts: list[int]) -> None:
    x, w, dy = (
        wants(R, I, dtype=dtype),
        wants(len(counts) * O, I, seed=1, dtype=dtype),
        seeded(R, O, seed=2, dtype=dtype),
    )
    y, expected = (
        grouped_linear(x, w, build_groups(counts)),
        reference_grouped_linear(x, w, build_groups(counts)),
    )
    torch.testing.assert_close(y, expected)
    for actual, reference in zip(
        torch.autograd.grad(y, (x, w), dy), torch.autograd.grad(expected, (x, w), dy)
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, reference)


@pytest.mark.skipif(not HAS_GROUPED_MM, reason="this torch has no grouped_mm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [UNEVEN, [0, 0, 9, 0, 0], [0] * 5], ids=str)
def test_torch_grouped_matmul_matches_the_loop(dtype: torch.dtype, counts: list[int]) -> None:
    r = sum(counts)
    x, w, dy = (
        seeded(r, I, dtype=dtype),
        seeded(E * O, I, seed=1, dtype=dtype),
        seeded(r, O, seed=2, dtype=dtype),
    )
    on_device = Groups(ends=torch.tensor(counts).cumsum(0, dtype=torch.int32))
    for actual, reference in zip(
        each_way(x, w, dy, on_device, FUSED), each_way(x, w, dy, build_groups(counts), LOOP)
    ):
        torch.testing.assert_close(actual, reference)
    dw = each_way(x, w, dy, on_device, FUSED)[2].view(E, O, I)
    assert (dw[[1, 4]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4096])
def test_grouped_matmul_selection(dtype: torch.dtype, rows: int) -> None:
    x, w = torch.empty(2 * rows, 64, dtype=dtype), torch.empty(2 * 128, 64, dtype=dtype)
    small = dtype != torch.float64 and (dtype == torch.bfloat16 or rows < 1024)
    with bf16_matmul("torch"):
        assert select_grouped_matmul_ops(x, w, build_groups([0, 2 * rows])) is (
            FUSED if small and HAS_GROUPED_MM else LOOP
        )
    with bf16_matmul("upcast"):  # the loop upcasts the matrices of busy experts alone
        expected = FUSED if small and HAS_GROUPED_MM and dtype != torch.bfloat16 else LOOP
        assert select_grouped_matmul_ops(x, w, build_groups([0, 2 * rows])) is expected
    assert select_grouped_matmul_ops(x[:, :63], w[:, :63], build_groups([0, 2 * rows])) is LOOP
    assert select_grouped_matmul_ops(x, w, equal_groups(2, rows)) is BATCHED


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_equal_groups_are_one_batched_matmul(dtype: torch.dtype, rows: int) -> None:
    groups = equal_groups(E, rows)
    x, w, dy = (seeded(E * n, f, seed=n, dtype=dtype) for n, f in ((rows, I), (O, I), (rows, O)))
    assert select_grouped_matmul_ops(x, w, groups) is BATCHED
    for actual, reference in zip(
        each_way(x, w, dy, groups, BATCHED), each_way(x, w, dy, build_groups([rows] * E), LOOP)
    ):
        torch.testing.assert_close(actual, reference)
    torch.testing.assert_close(
        reference_grouped_linear(x, w, groups), each_way(x, w, dy, groups, BATCHED)[0]
    )


def test_onednn_matmuls_match_mkl() -> None:
    counts, outputs, inputs = [130, 10, 0], 400, 330
    x, w, dy = (
        seeded(*shape, dtype=torch.float32)
        for shape in [(140, inputs), (3 * outputs, inputs), (140, outputs)]
    )
    assert 10 * outputs * inputs < MIN_ONEDNN_COPY_MULTIPLICATIONS < 130 * outputs * inputs
    plain = each_way(x.double(), w.double(), dy.double(), build_groups(counts), LOOP)
    for actual, reference in zip(each_way(x, w, dy, build_groups(counts), LOOP), plain):
        assert_equals("product", actual, reference.float(), FP32)


def test_gradient_accumulator_is_called_once_and_autograd_gets_none() -> None:
    x, w, dy, grad_accumulator = (
        wants(R, I),
        wants(E * O, I, seed=1),
        seeded(R, O, seed=2),
        Recorder(),
    )
    grouped_linear(x, w, build_groups(UNEVEN), grad_accumulator=grad_accumulator).backward(dy)
    assert w.grad is None
    assert x.grad is not None
    [(kept_x, kept_dy, groups)] = grad_accumulator.matmul_ops
    assert torch.equal(kept_x, x)
    assert torch.equal(kept_dy, dy)
    assert groups.on_host() == tuple(UNEVEN)


def test_rank_without_rows_calls_its_gradient_accumulator() -> None:
    x, w, grad_accumulator = wants(0, I), wants(E * O, I, seed=1), Recorder()
    grouped_linear(x, w, build_groups([0] * E), grad_accumulator=grad_accumulator).sum().backward()
    [(kept_x, kept_dy, groups)] = grad_accumulator.matmul_ops
    with torch.no_grad():
        total = accumulate_grouped_product_(
            torch.ones(E * O, I), kept_x.float(), kept_dy.float(), groups, fresh=True
        )
    assert (total == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("matmul_ops", [LOOP, BATCHED, FUSED], ids=["loop", "batched", "fused"])
def test_grouped_product_is_written_or_added(
    dtype: torch.dtype, total_dtype: torch.dtype, fresh: bool, matmul_ops: GroupedMatmulOps
) -> None:
    counts = [2, 2, 2] if matmul_ops is BATCHED else [4, 0, 2]
    groups = equal_groups(3, 2) if matmul_ops is BATCHED else build_groups(counts)
    x, dy, total = (
        seeded(6, I, dtype=dtype),
        seeded(6, O, seed=1, dtype=dtype),
        seeded(3 * O, I, dtype=total_dtype),
    )
    expected = torch.cat(
        [b.t() @ a for a, b in zip(x.double().split(counts), dy.double().split(counts))]
    )
    expected = expected if fresh else expected + total.double()
    assert (
        accumulate_grouped_product_(total, x, dy, groups, fresh=fresh, matmul_ops=matmul_ops)
        is total
    )
    exact = dtype == total_dtype == torch.float32
    torch.testing.assert_close(
        total.double(), expected, rtol=1e-5 if exact else 2e-2, atol=1e-5 if exact else 5e-2
    )


def test_frozen_weights_do_not_save_the_input() -> None:
    kept: list[Tensor] = []
    x, w = wants(R, I), seeded(E * O, I, seed=1)

    def note(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        y = grouped_linear(x, w, build_groups(UNEVEN), grad_accumulator=Recorder())
    assert [saved.data_ptr() for saved in kept] == [w.data_ptr()]
    y.sum().backward()
    assert x.grad is not None


def test_recomputed_input_is_not_saved() -> None:
    kept: list[Tensor] = []
    source, w, dy = wants(R, I), wants(E * O, I, seed=1), seeded(R, O, seed=2)

    def note(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    doubled = 2 * source
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        y = grouped_linear(
            register_recompute(doubled, lambda s: 2 * s, (source,)), w, build_groups(UNEVEN)
        )
    assert {saved.data_ptr() for saved in kept} == {w.data_ptr(), source.data_ptr()}
    expected = reference_grouped_linear(2 * source, w, build_groups(UNEVEN))
    for actual, reference in zip(
        torch.autograd.grad(y, (source, w), dy), torch.autograd.grad(expected, (source, w), dy)
    ):
        torch.testing.assert_close(actual, reference)


def test_matmul_ops_can_be_replaced() -> None:
    class Tripled(LoopMatmulOps):
        def weight_grad(self, dy: Tensor, x: Tensor, groups: Groups) -> Tensor:
            return 3 * super().weight_grad(dy, x, groups)

    x, w, dy = wants(R, I), wants(E * O, I, seed=1), seeded(R, O, seed=2)
    (actual,) = torch.autograd.grad(
        grouped_linear(x, w, build_groups(UNEVEN), matmul_ops=Tripled()), w, dy
    )
    (reference,) = torch.autograd.grad(grouped_linear(x, w, build_groups(UNEVEN)), w, dy)
    torch.testing.assert_close(actual, 3 * reference)


@pytest.mark.parametrize("counts", [UNEVEN, [2], [0, 0]], ids=str)
def test_counts_on_host_and_ends_on_device_agree(counts: list[int]) -> None:
    host, device = (
        build_groups(counts),
        Groups(ends=build_groups(counts).on_device(torch.device("cpu"))),
    )
    assert host.experts == device.experts == len(counts)
    assert (
        device.on_host()
        == host.on_host()
        == build_groups(torch.tensor(counts)).on_host()
        == tuple(counts)
    )
    assert torch.equal(host.on_device(torch.device("cpu")), device.on_device(torch.device("cpu")))
    both = host.known_on(torch.device("cpu"))
    assert both.counts == tuple(counts) and both.on_device(torch.device("cpu")) is both.ends, (
        "copied once"
    )


def test_rows_outside_the_groups_raise_an_error() -> None:
    with pytest.raises(AssertionError, match="counts=\\(3, 0, 5, 1, 0\\)"):
        grouped_linear(seeded(10, I), seeded(E * O, I), build_groups(UNEVEN))


def test_expanded_scalar_gradient_is_supported() -> None:
    for groups in (build_groups([2, 2]), equal_groups(2, 2)):
        x, w = wants(4, 3), wants(4, 3, seed=1)
        dx, dw = torch.autograd.grad(grouped_linear(x, w, groups).sum(), (x, w))
        torch.testing.assert_close(dx, w.detach().view(2, 2, 3).sum(1).repeat_interleave(2, 0))
        torch.testing.assert_close(dw, x.detach().view(2, 2, 3).sum(1).repeat_interleave(2, 0))


def test_meta_device_allocates_no_memory() -> None:
    for groups in (build_groups([1, 3]), equal_groups(2, 2)):
        x = torch.empty(4, 3, device="meta", requires_grad=True)
        w = torch.empty(10, 3, device="meta", requires_grad=True)
        y = grouped_linear(x, w, groups)
        assert y.shape == (4, 5)
        y.sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        assert w.grad.shape == (10, 3)


def test_loop_over_experts_synchronizes_once() -> None:
    """In forward and backward together, where only the device knows."""
    requested: list[Groups] = []

    def on_host(self: Groups) -> tuple[int, ...]:
        if self.counts is None:
            requested.append(self)
        return right(self)

    right = Groups.on_host
    x, w = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 3), (4, 3))
    )
    with patched(Groups, "on_host", on_host):
        grouped_linear(
            x, w, Groups(ends=torch.tensor([2, 6], dtype=torch.int32)), matmul_ops=LOOP
        ).sum().backward()
    assert len(requested) == 1 and w.grad is not None
