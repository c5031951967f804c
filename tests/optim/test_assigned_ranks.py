"""Tests of megalith/optim/assigned_ranks.py: directions are bitwise equal with and without overlap
and on any number of ranks, states of matrices are resharded, and every rank takes part.

The rows of the layout matrix with Muon, SOAP and Adafactor compare whole runs with one process.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalith.config.optim import MuonConfig, OptimConfig
from megalith.config.parallel import ParallelConfig
from megalith.optim import newton_schulz
from megalith.optim.assigned_ranks import AssignedMatrices, flat_offset, iter_rectangles
from megalith.optim.muon import Muon
from megalith.optim.optimizer import RuleSlots
from megalith.optim.rules import UpdateScalars
from megalith.optim.slots import OptimizerSlot, build_slot
from megalith.parallel.matrix_exchange import start_uneven_all_to_all
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.plan.shards import Box, Shard
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks, world_group
from megalith.verify.matrix import parse_row, tiny
from megalith.verify.ranks import compare_with_one_process, resharded_run

CPU = torch.device("cpu")
STEPS = 3

# --- exchange


def _exchange(rank: int, world: int) -> Tensor:
    group = world_group(rank, world, "dp")
    send = [(rank + 1) * to if to != rank else 0 for to in range(world)]
    receive = [(source + 1) * rank if source != rank else 0 for source in range(world)]
    sent = torch.cat([torch.full((count,), 10.0 * rank + to) for to, count in enumerate(send)])
    return start_uneven_all_to_all(sent, send, receive, group, number=0).wait()


def test_uneven_all_to_all_delivers_each_message_in_rank_order() -> None:
    """Rank 0 receives nothing, and no rank sends to itself."""
    received = run_ranks(_exchange, 3)
    assert received[0].tolist() == []
    assert received[1].tolist() == [1.0, *[21.0] * 3]
    assert received[2].tolist() == [2.0] * 2 + [12.0] * 4


# --- one rule on slices of the same parameters

SHAPES: Mapping[str, tuple[tuple[int, ...], int]] = {
    "layers.0.attention.q": ((6, 4, 24), 1),
    "layers.0.attention.kv": ((2, 6, 4, 24), 1),
    "layers.0.attention.o": ((24, 6, 4), 2),
    "layers.0.mlp.gate_up": ((2, 20, 24), 1),
    "layers.0.mlp.down": ((24, 20), 1),
    "layers.1.mlp.down": ((24, 20), 1),
}
SCALARS = UpdateScalars(lr=0.1, weight_decay=0.2, updates=1)


def draw(name: str, step: int) -> Tensor:
    """Return values of a whole parameter: the weights are those of step 0."""
    shape, _ = SHAPES[name]
    generator = torch.Generator().manual_seed(100 * list(SHAPES).index(name) + step)
    return torch.randn(shape, generator=generator)


def build_slots(mesh: Mesh, names: tuple[str, ...], *, zero: bool) -> list[OptimizerSlot]:
    """Return slots of parameters that dp ranks hold in uneven slices, or with `zero` off as
    copies."""
    dp = mesh.dp
    slots: list[OptimizerSlot] = []
    for name in names:
        shape, inputs = SHAPES[name]
        shard = Shard.full(name, shape, inputs=inputs)
        weight = draw(name, 0).flatten()
        if zero and dp.size > 1:
            cuts = [0, 7 * weight.numel() // 10, weight.numel()]
            flat = (cuts[dp.rank], cuts[dp.rank + 1])
            shard = replace(shard, flat=flat, cut=("dp_shard",))
            weight = weight[slice(*flat)].clone()
        slots.append(build_slot(shard, weight, Muon.roles))
    return slots


def _update(
    rank: int,
    world: int,
    muon: MuonConfig,
    overlap: bool,
    zero: bool,
    names: tuple[tuple[str, ...], ...] = (tuple(SHAPES),) * 2,
) -> dict[str, tuple[Shard, Tensor]]:
    """Update weights several times from equal gradients; return this rank's slices of them and of
    the states of its matrices."""
    parallel = ParallelConfig(dp=world)
    mesh = (
        build_mesh(model_grid(parallel, tiny(), world), rank=rank)
        if world > 1
        else build_single_rank_mesh()
    )
    rule = Muon(OptimConfig(kind="muon", muon=muon))
    slots = build_slots(mesh, names[rank], zero=zero)
    updater = AssignedMatrices(
        rule, slots, mesh, split=muon.split, nope_dim=None, overlap=overlap, device=CPU
    )
    for step in range(1, STEPS + 1):
        gradients = [
            draw(slot.shard.name, step).flatten()[slice(*(slot.shard.flat or (0, None)))].clone()
            for slot in slots
        ]
        # as large matrices on CPUs: the rounding of batched matmuls depends on the batch
        with patched(newton_schulz, "MIN_ROWS_ONE_BY_ONE", 1):
            updater.update([RuleSlots(slots, gradients, SCALARS._replace(updates=step))], step)
    results = {slot.shard.name: (slot.shard, slot.master) for slot in slots}
    for shard, role, tensor in updater.list_states():
        results[f"{role}.{shard.name}.{shard.box[0][0]}"] = (shard, tensor)
    return results


def join(results: list[dict[str, tuple[Shard, Tensor]]]) -> dict[str, Tensor]:
    """Return whole parameters from the slices of all ranks, which are in order; of copies the
    first."""
    whole: dict[str, Tensor] = {}
    for result in results:
        for name, (shard, values) in result.items():
            if shard.flat is not None and name in whole:
                values = torch.cat([whole[name], values])
            elif name in whole:
                assert torch.equal(whole[name], values), f"copies of {name} differ"
            whole[name] = values
    return whole


@pytest.mark.parametrize("zero", [True, False])
def test_slices_on_two_ranks_get_bitwise_the_update_of_one_rank(zero: bool) -> None:
    """Momentum, direction and second moments, for slices and for copies."""
    muon = MuonConfig(second_moment="normuon")
    expected = join([_update(0, 1, muon, True, False)])
    assert len(expected) > len(SHAPES)
    actual = join(run_ranks(_update, 2, muon, True, zero))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_waves_without_overlap_change_no_bit() -> None:
    muon = MuonConfig(dtype="bf16")
    results = [join(run_ranks(_update, 2, muon, overlap, True)) for overlap in (True, False)]
    assert all(torch.equal(results[0][name], results[1][name]) for name in SHAPES)


def test_rank_without_matrices_takes_part() -> None:
    """It has no slots; the other rank computes everything."""
    muon = MuonConfig()
    held = run_ranks(_update, 2, muon, True, False, (tuple(SHAPES), ()))
    expected = _update(0, 1, muon, True, False)
    assert held[1] == {}
    assert all(torch.equal(held[0][name][1], expected[name][1]) for name in SHAPES)


# --- rectangles of a piece


def test_rectangles_of_a_piece_are_views_of_its_matrix() -> None:
    """Of the value part of two heads, whose rows are not contiguous in the slice."""
    parameter = torch.arange(3 * 5 * 4).view(3, 5, 4)
    view, shape = parameter[1:3, 2:5], (3, 3, 4)
    matrix = parameter[:, 2:5].reshape(9, 4)
    box: Box = ((1, 3), (0, 3), (0, 4))
    parts = list(iter_rectangles(box, shape, view.stride(), 1))
    assert len(parts) == 2
    for part in parts:
        row = flat_offset(part[:2], shape[:2])
        values = parameter[part[0][0], 2:5]
        assert torch.equal(matrix[row : row + 3], values)


# --- whole runs


SLOW_RUNS = (
    "tiny dp2 zero1 normuon by-heads",
    "experts dp4 ep2 zero1 adafactor",
    "latent tp2 dp2 zero3 adafactor",
    "tiny tp2 dp2 zero1 soap",
    "narrow tp2 sp dp2 ep2 etp2 zero1 rows=1 normuon",
    "tiny dp3 zero1 muon trained=[layers.0.mlp.down,norm.*]",
    "tiny num_heads=7 num_kv_heads=7 tp3 sp muon by-heads",
    "shared tp4 dp2 zero1 muon",
    "latent tp3 dp2 zero1 muon",
    "four tied tp2 pp2 muon optim.muon.clip_grad=false",
    "uneven tp4 muon optim.muon.scale=unit_rms",
    "tiny dp4 zero3 replicate=2 muon fused-matrices",
    "experts dp4 ep2 zero1 muon parallel.bucket_alignment=matrices",
    "latent tp2 dp2 zero1 adamuon parallel.bucket_alignment=matrices",
)
"""Model and layout of runs, as in the rows of the layout matrix."""


@pytest.mark.parametrize(
    "words",
    [
        "tiny num_layers=1 tp2 adamuon",
        *(pytest.param(row, marks=pytest.mark.slow) for row in SLOW_RUNS),
    ],
)
def test_run_equals_one_process_and_loads_under_another_layout(words: str) -> None:
    case = parse_row("assigned ranks", words, words).case()
    case = replace(case, resharded=resharded_run(case.run, case.world))
    assert case.resharded is not None
    differences = compare_with_one_process(case)
    assert "checkpoint under another layout" in {result.what for result in differences}
    assert [result for result in differences if not result.holds] == []
