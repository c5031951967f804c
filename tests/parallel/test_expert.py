"""LayerInputs reach their experts and come back, however these lie on the ranks."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import DispatcherName, ParallelConfig
from megalith.kernels.routing import DROPPED_CHOICE, Choice
from megalith.parallel.expert import ExpertCapacity, all_gather_counts, build_dispatcher
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks

MODEL = ModelConfig(
    vocab_size=8,
    hidden_size=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    ffn_hidden_size=8,
    moe=MoEConfig(num_experts=4, ffn_hidden_size=4),
)
T, K, H = 5, 2, 3


def made(rank: int, kind: str) -> tuple[Tensor, Choice]:
    """A rank's tokens and what they choose: at random, all one expert, or nothing at all on the
    first rank."""
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(T, H, dtype=torch.float64, generator=draw)
    experts = torch.stack([torch.randperm(4, generator=draw)[:K] for _ in range(T)])
    if kind == "one expert":
        experts = torch.tensor([[3, DROPPED_CHOICE]] * T)
    if kind == "nothing from the first" and rank == 0:
        experts = torch.full((T, K), DROPPED_CHOICE)
    weights = torch.rand(T, K, dtype=torch.float64, generator=draw) * (experts >= 0)
    return x, Choice(experts, weights)


def answer(rows: Tensor, weights: Tensor, expert: Tensor, part: float) -> Tensor:
    """What expert number e makes of a row: (e + 1) times it, weighted; here, one rank's part of
    that."""
    return rows * ((expert + 1) * weights * part).unsqueeze(1)


def there_and_back(
    rank: int,
    world: int,
    ep: int,
    etp: int,
    name: DispatcherName,
    kind: str,
    room: ExpertCapacity | None = None,
) -> tuple[Tensor, Tensor, Tensor, int]:
    parallel = ParallelConfig(dp=world, ep=ep, etp=etp)
    mesh = build_mesh(model_grid(parallel, MODEL, world), rank=rank)
    x, choice = made(rank, kind)
    x.requires_grad_()
    choice = Choice(choice.experts, choice.weights.requires_grad_())
    sent, way = build_dispatcher(name, mesh, 4, drops_tokens=True, room=room)(x, choice).wait()
    local = mesh.over("ep").rank * (4 // ep) + torch.arange(4 // ep)
    expert = local.repeat_interleave(torch.tensor(sent.groups.on_host()))
    y = way.combine(answer(sent.rows, sent.weights, expert, 1 / etp))
    y.sum().backward()
    assert x.grad is not None and choice.weights.grad is not None
    return y.detach(), x.grad, choice.weights.grad, len(sent.rows)


@pytest.mark.parametrize("kind", ["anything", "one expert", "nothing from the first"])
@pytest.mark.parametrize(
    ("ep", "etp", "name"),
    [
        (2, 1, "alltoall"),
        (1, 2, "alltoall"),
        (2, 1, "allgather"),
        (1, 2, "allgather"),
        (2, 2, "alltoall"),
        (2, 2, "allgather"),
        (4, 1, "alltoall"),
    ],
)
def test_tokens_get_the_sum_of_their_experts_outputs(
    ep: int, etp: int, name: DispatcherName, kind: str
) -> None:
    world = ep * etp
    results = run_ranks(there_and_back, world, ep, etp, name, kind)
    for rank, (y, dx, dw, _) in enumerate(results):
        x, choice = made(rank, kind)
        factors = (choice.experts + 1) * choice.weights
        assert torch.allclose(y, x * factors.sum(1, keepdim=True), rtol=1e-14)
        assert torch.allclose(dx, factors.sum(1, keepdim=True).expand_as(x), rtol=1e-14)
        expected = (choice.experts + 1) * x.sum(1, keepdim=True)
        assert torch.allclose(dw, expected * (choice.experts >= 0), rtol=1e-13)
    chosen = sum(int((made(rank, kind)[1].experts >= 0).sum()) for rank in range(world))
    assert sum(rows for *_, rows in results) == chosen * etp, (
        "every rank along etp has every row of its experts"
    )


def with_few_tokens(
    rank: int, world: int, ep: int, etp: int, counts: list[int]
) -> tuple[Tensor, Tensor]:
    """As where text is written: each rank has tokens of its own, some of them none."""
    mesh = build_mesh(model_grid(ParallelConfig(dp=world, ep=ep, etp=etp), MODEL, world), rank=rank)
    x, choice = (
        part[: counts[rank]]
        for part in (made(rank, "anything")[0], made(rank, "anything")[1].experts)
    )
    weights = made(rank, "anything")[1].weights[: counts[rank]].requires_grad_()
    sent, way = build_dispatcher("alltoall", mesh, 4)(x, Choice(choice, weights)).wait()
    local = mesh.over("ep").rank * (4 // ep) + torch.arange(4 // ep)
    expert = local.repeat_interleave(torch.tensor(sent.groups.on_host()))
    y = way.combine(answer(sent.rows, sent.weights, expert, 1 / etp))
    y.sum().backward()
    assert weights.grad is not None and weights.grad.shape == (counts[rank], K)
    factors = (choice + 1) * weights.detach()
    return y.detach(), x * factors.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("ep", "etp", "counts"), [(2, 1, [0, 3]), (2, 1, [0, 0]), (2, 2, [2, 0, 5, 0])]
)
def test_ranks_with_few_or_no_tokens_enter_every_all_to_all(
    ep: int, etp: int, counts: list[int]
) -> None:
    for rank, (y, expected) in enumerate(run_ranks(with_few_tokens, ep * etp, ep, etp, counts)):
        assert y.shape == (counts[rank], H) and torch.allclose(y, expected, rtol=1e-14)


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (2, 2)])
def test_padding_to_capacity_needs_no_counts_and_contributes_zero(ep: int, etp: int) -> None:
    room = ExpertCapacity(factor=3.1, top_k=K, experts=4, sharing=1)
    assert room.row_limit(T) == T and replace(room, factor=0.8).row_limit(T) == 2
    for rank, (y, dx, dw, rows) in enumerate(
        run_ranks(there_and_back, ep * etp, ep, etp, "alltoall", "nothing from the first", room)
    ):
        x, choice = made(rank, "nothing from the first")
        factors = (choice.experts + 1) * choice.weights
        assert torch.allclose(y, x * factors.sum(1, keepdim=True), rtol=1e-14)
        assert torch.allclose(dx, factors.sum(1, keepdim=True).expand_as(x), rtol=1e-14)
        expected = (choice.experts + 1) * x.sum(1, keepdim=True)
        assert torch.allclose(dw, expected * (choice.experts >= 0), rtol=1e-13)
        assert rows == 4 // ep * T * ep * etp


def test_local_dispatcher_sends_no_message() -> None:
    x, choice = made(0, "anything")
    sent, way = build_dispatcher("alltoall", build_single_rank_mesh(), 4)(x, choice).wait()
    assert torch.allclose(
        way.combine(sent.rows * sent.weights.unsqueeze(1)),
        x * choice.weights.sum(1, keepdim=True),
    )


def test_counts_are_sorted_by_both_axes_whichever_is_inner() -> None:
    def group(name: str, ranks: tuple[int, ...]):  # a Group
        return replace(single_rank_group(name), ranks=ranks)

    meta = torch.empty(4, dtype=torch.int64, device="meta")
    table = all_gather_counts(
        meta, 10, group("ep", (0, 2)), group("etp", (0, 1)), group("ep", (0, 1, 2, 3))
    )
    assert table == [[[3, 3, 2, 2]] * 2] * 2


def gather_counts(rank: int, world: int, order: str) -> object:
    mesh = build_mesh(
        model_grid(ParallelConfig(dp=4, ep=2, etp=2, order=order), MODEL, world), rank=rank
    )
    counts = torch.full((4,), rank)
    table = all_gather_counts(counts, 0, mesh.over("ep"), mesh.over("etp"), mesh.over("ep", "etp"))
    return mesh.over("etp").rank, mesh.over("ep").rank, [[row[0] for row in rows] for rows in table]


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "ep-tp-cp-dp-pp"])
def test_gathered_counts_are_indexed_by_etp_and_ep_rank(order: str) -> None:
    for rank, (etp, ep, table) in enumerate(run_ranks(gather_counts, 4, order)):  # type: ignore[misc]
        assert table[etp][ep] == rank


def waits(rank: int, world: int, drops_tokens: bool) -> tuple[list[str], int]:
    """What a host would have to wait for, had it a GPU, until its experts may begin."""
    mesh = build_mesh(model_grid(ParallelConfig(dp=world, ep=world), MODEL, world), rank=rank)
    dispatch = build_dispatcher("alltoall", mesh, 4, drops_tokens=drops_tokens)
    x, choice = made(rank, "one expert" if drops_tokens else "anything")
    requested: list[str] = []
    with ExitStack() as stack:
        for name in ("tolist", "__int__", "__bool__", "item"):
            stack.enter_context(
                patched(Tensor, name, noted(name, getattr(Tensor, name), requested))
            )
        sent, _ = dispatch(x, choice).wait()
    return requested, len(sent.rows)


def noted(name: str, method: Callable[..., object], asked: list[str]) -> Callable[..., object]:
    def recorded(self: Tensor, *others: object) -> object:
        asked.append(name)
        return method(self, *others)

    return recorded


@pytest.mark.parametrize("drops_tokens", [False, True])
def test_dispatch_has_one_device_sync_with_or_without_token_dropping(
    drops_tokens: bool,
) -> None:
    for requested, rows in run_ranks(waits, 2, drops_tokens):
        assert requested == ["tolist"] and (rows in (0, 2 * T) if drops_tokens else rows > 0)
