"""Fused products are those of rings and of plain work; they are chosen by all ranks of a group
alike, or excinfo."""

import os
from dataclasses import replace
from importlib import import_module
from itertools import product as combinations

import pytest
import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.kernels.linear import PLAIN
from megalith.observe.flight import FlightRecorder
from megalith.observe.machine import has_symmetric_memory
from megalith.parallel import tensor_overlap
from megalith.parallel.group import Group, single_rank_group
from megalith.parallel.tensor_overlap import (
    FUSED,
    RING_EXCHANGE,
    RankDevice,
    choose_collective_matmul,
    find_fusion_obstacle,
    local_rank_device,
    ring_all_gather_matmul,
    ring_matmul_reduce_scatter,
    symm_mem_all_gather_matmul,
    symm_mem_matmul_reduce_scatter,
)
from megalith.testing.inject import fused_on_cpus
from megalith.testing.ranks import run_ranks, world_group
from megalith.testing.tolerance import BF16, FP32_DEEP, FP64, Tolerance, assert_equals

TOKENS, INPUTS, OUTPUTS = 12, 5, 7
CPU = torch.device("cpu")


def seeded(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare_with_plain_work(
    group: Group, device: torch.device, dtype: torch.dtype, tolerance: Tolerance
) -> None:
    """Both products of both matmuls, of parts of other matrices too, against sums on one rank in
    float64."""
    for matmul, inputs in ((PLAIN.forward, INPUTS), (PLAIN.input_grad, OUTPUTS)):
        # strides as in a part of a wider matrix
        x = seeded(TOKENS, 2 * inputs, seed=0).to(dtype)[:, :inputs]
        weights = [seeded(OUTPUTS, INPUTS, seed=1 + r).to(dtype) for r in range(group.size)]
        mine = weights[group.rank].to(device)
        whole, y = symm_mem_all_gather_matmul(
            x.chunk(group.size)[group.rank].to(device), mine, group, matmul
        )
        assert torch.equal(whole.cpu(), x)
        assert_equals(
            "gathered",
            y.cpu().double(),
            matmul(x.double(), weights[group.rank].double()),
            tolerance,
        )
        xs = [seeded(TOKENS, inputs, seed=9 + r).to(dtype) for r in range(group.size)]
        summed = symm_mem_matmul_reduce_scatter(xs[group.rank].to(device), mine, group, matmul)
        total = torch.stack(
            [matmul(x.double(), w.double()) for x, w in zip(xs, weights, strict=True)]
        ).sum(0)
        assert_equals(
            "scattered", summed.cpu().double(), total.chunk(group.size)[group.rank], tolerance
        )
        assert whole.dtype == y.dtype == summed.dtype == dtype


def on_cpus(rank: int, world: int) -> None:
    group = world_group(rank, world, "tp_kv", "tp_copy")
    with fused_on_cpus():
        compare_with_plain_work(group, CPU, torch.float64, FP64)
        x, w, dy = (
            seeded(4, INPUTS, seed=rank),
            seeded(OUTPUTS, INPUTS, seed=rank),
            seeded(TOKENS, OUTPUTS, seed=rank),
        )
        for mine, ring in zip(
            symm_mem_all_gather_matmul(x, w, group, PLAIN.forward),
            ring_all_gather_matmul(x, w, group, PLAIN.forward),
            strict=True,
        ):
            assert_equals("as a ring gathers", mine, ring, FP64)
        mine, ring = (
            scatter(dy, w, group, PLAIN.input_grad)
            for scatter in (symm_mem_matmul_reduce_scatter, ring_matmul_reduce_scatter)
        )
        assert_equals("as a ring scatters", mine, ring, FP64)


@pytest.mark.parametrize("tp", [2, 3])
def test_fused_matmuls_match_plain_and_ring_ones(tp: int) -> None:
    run_ranks(on_cpus, tp)


def with_a_mean(rank: int, world: int) -> str:
    operators = tensor_overlap._operators()
    scatter = operators.fused_matmul_reduce_scatter
    with fused_on_cpus(), pytest.MonkeyPatch.context() as patch:
        wrong = lambda x, w, op, dim, name: scatter(x, w, "avg", dim, name)  # noqa: E731  # one fault, in place
        patch.setattr(operators, "fused_matmul_reduce_scatter", wrong)
        try:
            on_cpus(rank, world)
        except AssertionError as error:
            return str(error)
    return ""


def test_comparison_detects_a_mean_instead_of_a_sum() -> None:
    """A planted fault that changes no shape."""
    assert all("scattered" in text for text in run_ranks(with_a_mean, 2))


def noted(rank: int, world: int) -> list[tuple[str, bool]]:
    flight = FlightRecorder()
    group = replace(world_group(rank, world, "tp_kv", "tp_copy"), flight=flight)
    with fused_on_cpus():
        symm_mem_matmul_reduce_scatter(
            seeded(4, 3, seed=0), seeded(3, 2, seed=1), group, PLAIN.input_grad
        )
        symm_mem_all_gather_matmul(seeded(4, 2, seed=0), seeded(3, 2, seed=1), group, PLAIN.forward)
    return [(entry.op, entry.finished) for entry in flight.entries]


def test_fused_matmuls_are_recorded() -> None:
    expected = [("fused_matmul_reduce_scatter", True), ("fused_all_gather_matmul", True)]
    assert run_ranks(noted, 2) == [expected] * 2


def test_other_matmuls_use_the_ring_exchange() -> None:
    x, w = seeded(4, 2, seed=0), seeded(3, 2, seed=1)
    _, y = symm_mem_all_gather_matmul(x, w, single_rank_group("tp"), lambda x, w: 2 * (x @ w.t()))
    assert_equals("doubled", y, 2 * (x @ w.t()), FP64)


# --- whether they can serve


def place(rank: int, **others: object) -> RankDevice:
    gpu = rank % 4
    reads = tuple(other for other in range(4) if other != gpu)
    return replace(RankDevice(rank, "cuda", host="a", gpu=gpu, reads=reads), **others)  # type: ignore[arg-type]  # by name


FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "cpu": ({"device": "cpu"}, "rank 2 computes on cpu, and fused matmuls need NVIDIA GPUs"),
    "torch": (
        {"has_operators": False},
        f"the torch {torch.__version__} of rank 2 has no symmetric memory for GPUs",
    ),
    "host": (
        {"host": "b"},
        "rank 0 is on a and rank 2 on b, and a GPU reads the memory of its own machine only",
    ),
    "gpu": ({"gpu": 1, "reads": (0, 2, 3)}, "ranks 1 and 2 both compute on GPU 1"),
    "reads": ({"reads": (0, 1)}, "GPU 2 of a cannot read the memory of GPU 3"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_rank_without_support_is_named(name: str) -> None:
    change, reason = FAULTS[name]
    places = [place(rank) for rank in range(4)]
    assert find_fusion_obstacle(places) is None
    places[2] = replace(places[2], **change)  # type: ignore[arg-type]  # by name
    assert find_fusion_obstacle(places) == reason


def test_each_missing_requirement_is_a_reason() -> None:
    for wrong in combinations((False, True), repeat=len(FAULTS)):
        places = [place(rank) for rank in range(4)]
        for (change, _), is_wrong in zip(FAULTS.values(), wrong, strict=True):
            if is_wrong:
                places[2] = replace(places[2], **change)  # type: ignore[arg-type]  # by name
        assert (find_fusion_obstacle(places) is None) == (not any(wrong)), wrong


def choices(rank: int, world: int, disagree: bool) -> tuple[str, str]:
    """What auto and fused come to where all ranks say they can, or all but the last."""
    group = world_group(rank, world, "tp_kv", "tp_copy")
    with pytest.MonkeyPatch.context() as patch:
        reads = () if disagree and rank == world - 1 else tuple(range(world))
        patch.setattr(
            tensor_overlap,
            "local_rank_device",
            lambda rank, device: RankDevice(rank, "cuda", "a", rank, reads),
        )
        chosen = choose_collective_matmul("auto", group, torch.device("cuda"))
        assert (
            choose_collective_matmul("ring_exchange", group, torch.device("cuda")) is RING_EXCHANGE
        )
        try:
            second = choose_collective_matmul("fused", group, torch.device("cuda"))
        except ConfigError as error:
            return "fused" if chosen is FUSED else "ring_exchange", str(error)
        assert second is FUSED
    return "fused" if chosen is FUSED else "ring_exchange", ""


def test_ranks_choose_the_same_collective_matmul() -> None:
    assert run_ranks(choices, 3, False) == [("fused", "")] * 3
    text = (
        "parallel.collective_matmul=fused is not available to ranks [0, 1, 2]: GPU 2 of a cannot "
        "read the memory of GPU 0. "
        "Set parallel.collective_matmul to auto or ring_exchange."
    )
    assert run_ranks(choices, 3, True) == [("ring_exchange", text)] * 3


def on_a_cpu(rank: int, world: int) -> str:
    group = world_group(rank, world, "tp_kv", "tp_copy")
    assert choose_collective_matmul("auto", group, CPU) is RING_EXCHANGE
    with pytest.raises(ConfigError) as excinfo:
        choose_collective_matmul("fused", group, CPU)
    return str(excinfo.value)


def test_on_cpus_auto_is_ring_exchange_and_fused_is_rejected() -> None:
    (text,) = set(run_ranks(on_a_cpu, 2))
    assert text.startswith(
        "parallel.collective_matmul=fused is not available to ranks [0, 1]: rank 0 computes on cpu"
    )
    assert choose_collective_matmul("fused", single_rank_group("tp"), CPU) is RING_EXCHANGE, (
        "one rank has no ring"
    )


def test_gpu_device_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda mine, other: (mine, other) == (1, 2)
    )
    found = local_rank_device(5, torch.device("cuda:1"))
    assert (found.rank, found.device, found.gpu, found.reads) == (5, "cuda", 1, (2,))
    assert found.host and found.has_operators == has_symmetric_memory()


def test_symmetric_memory_is_enabled_for_groups_where_torch_requires_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enabled_groups: list[str] = []
    module = import_module("torch.distributed._symmetric_memory")
    group = replace(single_rank_group("tp"), name="seven")
    tensor_overlap._enable_symmetric_memory(group)
    assert not module.is_symm_mem_enabled_for_group("seven"), (
        "the one installed finds out by itself"
    )
    monkeypatch.setattr(module, "enable_symm_mem_for_group", enabled_groups.append)
    tensor_overlap._enable_symmetric_memory(group)
    assert enabled_groups == ["seven"]


# --- the real operators


def on_gpus(rank: int, world: int, dtype: torch.dtype) -> None:
    gpus = torch.cuda.device_count()
    if gpus < world:  # two ranks on one GPU: torch allows it if told so before the first use
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device(f"cuda:{rank % gpus}")
    torch.cuda.set_device(device)
    tolerance = {torch.float32: FP32_DEEP, torch.bfloat16: BF16}[dtype]
    assert has_symmetric_memory()
    compare_with_plain_work(world_group(rank, world, "tp_kv", "tp_copy"), device, dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, better two")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_kernels_match_plain_matmuls(dtype: torch.dtype) -> None:
    run_ranks(on_gpus, 2, dtype, timeout=120.0)
