"""Matmuls of bf16 on CPUs: torch's kernels and upcast operands match within the rounding of
bf16."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.config.kernels import KernelsConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels import linear
from megalith.kernels.attention.dispatch import attention
from megalith.kernels.attention.scores import Scores
from megalith.kernels.backend import select_backends
from megalith.kernels.grouped_linear import (
    BATCHED,
    FUSED,
    HAS_GROUPED_MM,
    LOOP,
    GroupedMatmulOps,
    equal_groups,
    grouped_linear,
)
from megalith.kernels.linear import (
    add_product_,
    bf16_matmul,
    bmm,
    einsum,
    forward,
    input_grad,
    is_upcast,
    mm,
    weight_grad,
)
from megalith.kernels.packed import seq_params_from_rows
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.tolerance import BF16, assert_equals, matmul_bound
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer
from megalith.verify.matrix import PLAIN, VARIANTS
from megalith.verify.ranks import _loader as loader_of
from megalith.verify.ranks import layout_case

BackendName = Literal["torch", "upcast"]
FORMS: tuple[BackendName, ...] = "torch", "upcast"


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


A, B = seeded(37, 130), seeded(130, 45, seed=1)
BATCHED_A, BATCHED_B = seeded(3, 20, 70, seed=2), seeded(3, 70, 11, seed=3)
MATMULS: dict[str, tuple[Callable[[], Tensor], Tensor, Tensor]] = {
    "mm": (lambda: mm(A, B), A, B),
    "mm of transposed operands": (lambda: mm(B.t(), A.t()), B.t(), A.t()),
    "mm into a result": (lambda: mm(A, B, out=A.new_empty(37, 45)), A, B),
    "bmm": (lambda: bmm(BATCHED_A, BATCHED_B), BATCHED_A, BATCHED_B),
    "einsum": (lambda: einsum("btk,bkm->btm", BATCHED_A, BATCHED_B), BATCHED_A, BATCHED_B),
    "forward": (lambda: forward(A, B.t().contiguous()), A, B),
    "forward of one row": (lambda: forward(A[:1], B.t().contiguous()), A[:1], B),
    "input gradient": (lambda: input_grad(A, B), A, B),
    "weight gradient": (lambda: weight_grad(A.t().contiguous(), B), A, B),
    "weight gradient added": (
        lambda: add_product_(A.new_zeros(37, 45), B, A.t().contiguous()),
        A,
        B,
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MATMULS)
def test_bf16_matmuls_are_rounded_once(name: str, form: BackendName) -> None:
    compute, a, b = MATMULS[name]
    with bf16_matmul(form):
        result = compute()
    assert result.dtype == torch.bfloat16
    error = (result.double() - a.double() @ b.double()).abs()
    assert bool((error <= matmul_bound(a, b)).all()), (
        f"{float((error / matmul_bound(a, b)).max())} of the bound"
    )


def test_a_product_is_added_to_a_bf16_gradient_before_it_is_rounded() -> None:
    total, x, dy = seeded(37, 45, seed=4), B, A.t().contiguous()
    with bf16_matmul("upcast"):
        result = add_product_(total.clone(), x, dy)
    identity = torch.eye(45, dtype=torch.bfloat16)
    a, b = torch.cat([A, total], dim=1), torch.cat([B, identity])
    assert bool(((result.double() - a.double() @ b.double()).abs() <= matmul_bound(a, b)).all())


@pytest.mark.parametrize("matmul_ops", [LOOP, BATCHED, *([FUSED] if HAS_GROUPED_MM else [])])
def test_grouped_matmuls_match(matmul_ops: GroupedMatmulOps) -> None:
    groups = equal_groups(3, 20)
    x, w, dy = seeded(60, 64), seeded(3 * 48, 64, seed=1), seeded(60, 48, seed=2)

    def results(form: BackendName) -> list[Tensor]:
        inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
        with bf16_matmul(form):
            y = grouped_linear(*inputs, groups, matmul_ops=matmul_ops)
            return [y.detach(), *torch.autograd.grad(y, inputs, dy)]

    for name, actual, reference in zip(
        ("y", "dx", "dw"), results("upcast"), results("torch"), strict=True
    ):
        assert actual.dtype == reference.dtype == torch.bfloat16
        assert_equals(name, actual, reference, BF16)


@pytest.mark.parametrize("length", [8, 70])
@pytest.mark.parametrize("scores", [Scores(), Scores(window=5)], ids=["plain", "window"])
@pytest.mark.parametrize("kernel", ["auto", "sdpa"])
def test_attention_matches(length: int, scores: Scores, kernel: Literal["auto", "sdpa"]) -> None:
    if kernel == "sdpa" and scores.window is not None:
        return  # torch's kernel has no windows
    tokens = seq_params_from_rows(2, length)
    shapes = [(2 * length, heads, 16) for heads in (4, 2, 2)]
    values = [seeded(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    dy = seeded(*shapes[0], seed=3)

    def results(form: BackendName) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in values]
        with bf16_matmul(form):
            y = attention(*inputs, tokens, scores, kernel=kernel)
            return [y.detach(), *torch.autograd.grad(y, inputs, dy)]

    for name, actual, reference in zip(
        ("y", "dq", "dk", "dv"), results("upcast"), results("torch"), strict=True
    ):
        assert actual.dtype == reference.dtype == torch.bfloat16
        assert_equals(name, actual, reference, BF16)


class Bf16Matmuls(TorchDispatchMode):
    """Records every matmul that is computed on bf16 operands, but for one row, which torch
    multiplies fast anyway."""

    NAMES = "mm", "bmm", "addmm", "addmm_", "baddbmm", "_linear_pointwise", "_grouped_mm"

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's protocol
        name = func.overloadpacket.__name__
        narrow = any(
            isinstance(one, Tensor) and one.dtype == torch.bfloat16 and len(one) > 1
            for one in args[:1]
        )
        if narrow and (name in self.NAMES or name.startswith("_scaled_dot_product")):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


EXPERTS = replace(PLAIN, moe=MoEConfig(num_experts=5, top_k=2, ffn_hidden_size=8))
MODELS = {
    "plain": PLAIN,
    "experts": EXPERTS,
    **{kind: VARIANTS[kind] for kind in ("latent", "sinks", "relative")},
}


@pytest.mark.parametrize("kind", MODELS)
def test_all_matmuls_of_a_training_step_are_upcast(
    kind: str,
) -> None:
    # long enough for attention in tiles
    run = layout_case(MODELS[kind], ParallelConfig(), 1, seq_len=24).run
    run = replace(run, precision=replace(run.precision, params="bf16"))

    def step(form: BackendName) -> tuple[set[str], float]:
        with bf16_matmul("auto"):  # restores what was selected before
            trainer = build_trainer(
                replace(run, kernels=KernelsConfig(matmul=form)),
                build_single_rank_mesh(),
                torch.device("cpu"),
            )
            batch = loader_of(run, trainer.mesh, consumed=0, steps=1).next()
            with Bf16Matmuls() as seen:
                loss = train_step(trainer, batch, lr=1e-2, weight_decay=0.1).loss
        return seen.names, loss

    (names, loss), (upcast_names, upcast_loss) = step("torch"), step("upcast")
    assert "mm" in names and upcast_names == set()
    assert upcast_loss == pytest.approx(loss, rel=BF16.relative)


def test_operands_are_upcast_where_the_cpu_has_no_bf16_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for has_kernels in (True, False):
        monkeypatch.setattr(linear, "HAS_BF16_KERNELS", has_kernels)
        with bf16_matmul("auto"):
            assert is_upcast(A) is not has_kernels
            assert not is_upcast(A.float()) and not is_upcast(A.to("meta"))


def test_setting_selects_either_matmul() -> None:
    with bf16_matmul("auto"):
        select_backends(KernelsConfig(matmul="upcast"))
        assert is_upcast(A)
        select_backends(KernelsConfig(matmul="torch"))
        assert not is_upcast(A)
        assert torch.equal(mm(A, B), torch.mm(A, B))
        select_backends("auto")
        assert is_upcast(A) is not linear.HAS_BF16_KERNELS
