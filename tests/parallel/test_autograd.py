"""Every differentiable collective equals dense algebra on one process, forward and backward, for
any sizes and dims."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.errors import RankError
from megalith.parallel import collectives
from megalith.parallel.collectives import (
    AsyncAllToAll,
    all_gather,
    all_gather_invariant,
    all_reduce,
    all_to_all,
    copy_to_tp,
    mark_partial,
    reduce_from_tp,
    reduce_scatter,
    scatter_to_sp,
    start_all_to_all,
    wait_all_to_all,
)
from megalith.parallel.group import Group, single_rank_group
from megalith.testing.inject import slow_link
from megalith.testing.ranks import run_ranks, world_group
from megalith.testing.tolerance import EXACT, FP64, assert_close, assert_equals


@dataclass(frozen=True)
class Variant:
    """Sizes and memory layout of one test of a collective."""

    dim: int = 0
    uneven: bool = False
    empty: bool = False
    """One rank's part has no elements."""
    transposed: bool = False
    """The input is not contiguous."""

    def sizes(self, world: int) -> list[int]:
        """Each rank's length along `dim`."""
        if self.empty:
            return [0, 3, 2, 1][:world]
        return [3, 1, 4, 2][:world] if self.uneven else [2] * world

    def part(self, length: int, seed: int) -> Tensor:
        """A leaf tensor of odd sizes, `length` long along `dim`."""
        shape = [3, 5, 2]
        shape[self.dim] = length
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        if self.transposed:
            x = x.transpose(0, 2).contiguous().transpose(0, 2)
        return x.requires_grad_()


VARIANTS = (
    Variant(),
    Variant(dim=1),
    Variant(dim=-1, transposed=True),
    Variant(uneven=True),
    Variant(dim=1, uneven=True, transposed=True),
    Variant(empty=True),
    Variant(dim=-1, empty=True),
)

Parallel = Callable[[Tensor, Group, int, list[int]], Tensor]
Dense = Callable[[Sequence[Tensor], int, int, list[int]], Tensor]


@dataclass(frozen=True)
class Case:
    """A collective, its types, and what rank r's output is in terms of all ranks' inputs."""

    before: str
    after: str
    parallel: Parallel
    dense: Dense


def _total(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(xs)).sum(0)


NAMES = {"tp": "TP", "sp": "SP"}
"""Abbreviations in names of classes."""

CASES = {
    "copy_to_tp": Case("I", "R", lambda x, g, d, s: copy_to_tp(x, g), lambda xs, r, d, s: xs[0]),
    "reduce_from_tp": Case(
        "P", "I", lambda x, g, d, s: reduce_from_tp(x, g), lambda xs, r, d, s: _total(xs)
    ),
    "all_reduce": Case(
        "P", "R", lambda x, g, d, s: all_reduce(x, g), lambda xs, r, d, s: _total(xs)
    ),
    "all_gather": Case(
        "V",
        "R",
        lambda x, g, d, s: all_gather(x, g, dim=d, sizes=s),
        lambda xs, r, d, s: torch.cat(list(xs), d),
    ),
    "all_gather_invariant": Case(
        "V",
        "I",
        lambda x, g, d, s: all_gather_invariant(x, g, dim=d, sizes=s),
        lambda xs, r, d, s: torch.cat(list(xs), d),
    ),
    "reduce_scatter": Case(
        "P",
        "V",
        lambda x, g, d, s: reduce_scatter(x, g, dim=d, sizes=s),
        lambda xs, r, d, s: _total(xs).split(s, d)[r],
    ),
    "scatter_to_sp": Case(
        "I",
        "V",
        lambda x, g, d, s: scatter_to_sp(x, g, dim=d, sizes=s),
        lambda xs, r, d, s: xs[0].split(s, d)[r],
    ),
}


def _inputs(case: Case, variant: Variant, world: int) -> list[Tensor]:
    """Every rank's input: one and the same for I, each its own for V and P; whole along dim unless
    it is V."""
    sizes = variant.sizes(world)
    if case.before == "I":
        return [variant.part(sum(sizes), seed=0)] * world
    return [
        variant.part(sizes[r] if case.before == "V" else sum(sizes), seed=r) for r in range(world)
    ]


def _cotangent(case: Case, y: Tensor, rank: int) -> Tensor:
    """dL/dy on one rank: of its own for V and R, which ranks use differently; the same everywhere
    for I."""
    seed = 100 if case.after == "I" else 100 + rank
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient_of(x: Tensor) -> Tensor:
    """Its gradient, which must exist."""
    assert x.grad is not None
    return x.grad


def _dense_gradients(case: Case, variant: Variant, world: int) -> list[Tensor]:
    """dL/dx of every rank's input, by plain autograd on one process; an I output counts once."""
    xs, sizes = _inputs(case, variant, world), variant.sizes(world)
    counted = [0] if case.after == "I" else range(world)
    ys = {r: case.dense(xs, r, variant.dim, sizes) for r in counted}
    loss = torch.stack([(y * _cotangent(case, y.detach(), r)).sum() for r, y in ys.items()]).sum()
    loss.backward()
    return [gradient_of(x) for x in xs]


def _equals_dense_algebra(rank: int, world: int, name: str, parallel_name: str) -> None:
    case, group = CASES[name], world_group(rank, world, "tp")
    for variant in VARIANTS:
        x, sizes = _inputs(case, variant, world)[rank], variant.sizes(world)
        before = x.detach().clone()
        y = CASES[parallel_name].parallel(x, group, variant.dim, sizes)
        expected = case.dense(_inputs(case, variant, world), rank, variant.dim, sizes).detach()
        if expected.numel():
            assert_equals(f"{name} {variant}", y, expected, FP64)
        assert y.shape == expected.shape
        dy = _cotangent(case, y.detach(), rank)
        kept = dy.clone()
        y.backward(dy)
        gradient = _dense_gradients(case, variant, world)[rank]
        assert gradient_of(x).shape == gradient.shape
        if gradient.numel():
            assert_equals(f"gradient of {name} {variant}", gradient_of(x), gradient, FP64)
        assert_equals("the input", x, before, EXACT)
        assert_equals("the gradient handed in", dy, kept, EXACT)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", list(CASES))
def test_collectives_equal_dense_algebra_forward_and_backward(name: str, world: int) -> None:
    run_ranks(_equals_dense_algebra, world, name, name)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("all_reduce", "reduce_from_tp"),
        ("reduce_from_tp", "all_reduce"),
        ("all_gather", "all_gather_invariant"),
        ("all_gather_invariant", "all_gather"),
    ],
)
def test_comparison_detects_a_wrong_backward(name: str, other: str) -> None:
    with pytest.raises(RankError, match=rf"AssertionError: gradient of {name} Variant"):
        run_ranks(_equals_dense_algebra, 2, name, other)


TRAFFIC = (
    [[1, 2, 0, 3], [0, 0, 1, 1], [0, 4, 2, 0], [1, 1, 1, 0]],
    [[0, 0, 0, 0]] * 4,
    [[2, 2, 2, 2]] * 4,
)
"""Rows that each rank (outer) sends to each rank (inner)."""


def _exchange(x: Tensor, group: Group, send: list[int], receive: list[int], in_two: bool) -> Tensor:
    if not in_two:
        return all_to_all(x, group, send=send, receive=receive)
    async_all_to_all = AsyncAllToAll(group, send, receive)
    departed = start_all_to_all(x, async_all_to_all)
    assert departed.shape == x.shape
    return wait_all_to_all(departed, async_all_to_all)


def _exchanges(rank: int, world: int, in_two: bool) -> None:
    group = world_group(rank, world, "ep")
    for full in TRAFFIC:
        rows = [line[:world] for line in full[:world]]
        xs = [Variant().part(sum(line), seed=r) for r, line in enumerate(rows)]
        receive = [rows[r][rank] for r in range(world)]
        y = _exchange(xs[rank], group, rows[rank], receive, in_two)
        expected = torch.cat([xs[r].split(rows[r])[rank] for r in range(world)]).detach()
        assert torch.equal(y, expected)
        dys = [
            Variant().part(sum(rows[r][s] for r in range(world)), seed=50 + s).detach()
            for s in range(world)
        ]
        y.backward(dys[rank])
        back = [dys[s].split([rows[r][s] for r in range(world)])[rank] for s in range(world)]
        assert_equals("the gradient sent back", gradient_of(xs[rank]), torch.cat(back), EXACT)


@pytest.mark.parametrize("in_two", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_to_all_backward_is_the_inverse_exchange(world: int, in_two: bool) -> None:
    run_ranks(_exchanges, world, in_two)


def _works_between(rank: int, world: int) -> list[tuple[str, bool]]:
    """What happened while a message was on its way, in order: (what, whether one was)."""
    group, log, w = (
        world_group(rank, world, "ep"),
        list[tuple[str, bool]](),
        torch.ones(3, 3, requires_grad=True),
    )
    x = torch.ones(2 * world, 3, requires_grad=True)

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            log.append(("forward", link.select("all_to_all")[-1].waits == 0))
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            log.append(("backward", link.select("all_to_all")[-1].waits == 0))
            return dy * 2

    with slow_link(latency_seconds=0.2, poison=True) as link:
        async_all_to_all = AsyncAllToAll(
            group, [2] * world, [2] * world, lambda: log.append(("meanwhile", True))
        )
        departed = start_all_to_all(x, async_all_to_all)
        beside: Tensor = Work.apply(x)
        rows = wait_all_to_all(departed, async_all_to_all) @ w
        (rows.sum() + beside.sum()).backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 5.0))
    assert torch.equal(gradient_of(w), torch.full_like(w, 2.0 * world))
    return log


def test_work_between_start_and_wait_overlaps_with_the_all_to_all_in_both_directions() -> None:
    for log in run_ranks(_works_between, 2):
        assert log == [
            ("forward", True),
            ("meanwhile", True),
            ("backward", True),
            ("meanwhile", True),
        ]


def _defaults_without_sizes(rank: int, world: int) -> None:
    group = world_group(rank, world, "tp")
    whole = torch.arange(7.0)
    assert scatter_to_sp(whole, group).tolist() == whole.split([3, 2, 2])[rank].tolist()
    assert reduce_scatter(whole, group).tolist() == (3 * whole).split([3, 2, 2])[rank].tolist()
    assert all_gather(torch.full((2,), rank), group).tolist() == [0, 0, 1, 1, 2, 2]
    assert all_gather_invariant(torch.full((1, 2), rank), group, dim=1).tolist() == [
        [0, 0, 1, 1, 2, 2]
    ]


def test_default_sizes_are_even_and_integer_tensors_are_supported() -> None:
    run_ranks(_defaults_without_sizes, 3)


def _bfloat16(rank: int, world: int) -> None:
    group = world_group(rank, world, "tp")
    x = torch.full((4, 3), 1.0 + rank, dtype=torch.bfloat16).requires_grad_()
    y = all_gather(
        reduce_from_tp(x, group)
        + reduce_scatter(all_reduce(copy_to_tp(x, group), group), group).sum(),
        group,
    )
    y.sum().backward()
    assert y.dtype == x.dtype == torch.bfloat16
    assert gradient_of(x).dtype == torch.bfloat16


def test_bfloat16_stays_bfloat16() -> None:
    run_ranks(_bfloat16, 2)


def test_a_group_of_one_returns_its_input_itself() -> None:
    x, group = torch.randn(3, 2), single_rank_group("tp")
    results = [
        copy_to_tp(x, group),
        reduce_from_tp(x, group),
        all_reduce(x, group),
        all_gather(x, group),
        all_gather_invariant(x, group, dim=1),
    ]
    results += [
        reduce_scatter(x, group),
        scatter_to_sp(x, group, dim=1),
        all_to_all(x, group, send=[3], receive=[3]),
    ]
    assert all(result is x for result in [*results, mark_partial(x, group)])


def _partial_is_free(rank: int, world: int) -> None:
    x = torch.randn(3)
    assert mark_partial(x, world_group(rank, world, "tp")) is x


def test_mark_partial_is_free_on_real_tensors() -> None:
    run_ranks(_partial_is_free, 2)


def _paper(size: int) -> Group:
    return Group(axes=("tp",), ranks=tuple(range(size)), rank=1, name="paper-tp")


@pytest.mark.parametrize("name", list(CASES))
def test_meta_tensors_have_the_right_shapes_without_a_process_group(name: str) -> None:
    case, world = CASES[name], 3
    for variant in (Variant(), Variant(dim=1), Variant(uneven=True)):
        sizes = variant.sizes(world)
        xs = _inputs(case, variant, world)
        x = xs[1].detach().to("meta").requires_grad_()
        y = case.parallel(x, _paper(world), variant.dim, sizes)
        assert y.is_meta
        assert y.shape == case.dense(xs, 1, variant.dim, sizes).shape
        y.backward(torch.empty_like(y))
        assert gradient_of(x).shape == x.shape


def test_mark_partial_is_recorded_on_meta_tensors() -> None:
    x = torch.empty(2, device="meta", requires_grad=True)
    y = mark_partial(x, _paper(4))
    assert y is not x
    assert type(y.grad_fn).__name__ == "MarkPartialBackward"


def test_every_autograd_function_declares_its_types() -> None:
    stated = {
        value.__name__: getattr(value, "moves", None)
        for value in vars(collectives).values()
        if isinstance(value, type) and issubclass(value, torch.autograd.Function)
    }
    table = {
        "".join(NAMES.get(word, word.title()) for word in name.split("_")): (
            case.before,
            case.after,
        )
        for name, case in CASES.items()
    }
    assert stated == {
        **table,
        "AllToAll": ("V", "V"),
        "StartAllToAll": ("V", "V"),
        "WaitAllToAll": ("V", "V"),
        "MarkPartial": ("V", "P"),
    }


def _step(x: Tensor, w: Tensor, group: Group, rows: list[list[int]]) -> Tensor:
    """Every collective once, in an order whose types fit."""
    sizes = [sum(line) for line in rows]
    whole = all_gather(x, group, sizes=sizes)
    y = reduce_scatter(whole @ w, group, sizes=sizes) + all_reduce(whole * 2, group).sum()
    same = all_gather_invariant(y, group, sizes=sizes) + reduce_from_tp(y.sum(), group)
    y = scatter_to_sp(same, group, sizes=sizes) * copy_to_tp(same.sum(), group)
    return all_to_all(y, group, send=rows[group.rank], receive=[line[group.rank] for line in rows])


def _compiles(rank: int, world: int, rows: list[list[int]]) -> None:
    group, result = world_group(rank, world, "tp"), []
    for function in (_step, torch.compile(_step, fullgraph=True, backend="aot_eager")):
        x = torch.randn(
            sum(rows[rank]), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
        )
        w = torch.eye(5, dtype=torch.float64).requires_grad_()
        y = function(x.requires_grad_(), w, group, rows)
        y.square().sum().backward()
        result.append({"y": y, "dx": gradient_of(x), "dw": gradient_of(w)})
    assert_close(result[1], result[0], EXACT)


@pytest.mark.parametrize("rows", [[[1, 1], [1, 1]], [[0, 1], [2, 1]]], ids=["even", "uneven"])
def test_compiled_collectives_equal_eager_ones(rows: list[list[int]]) -> None:
    run_ranks(_compiles, 2, rows, timeout=240)
