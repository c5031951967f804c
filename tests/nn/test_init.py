import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalith.nn import build
from megalith.nn.build import TILE, init_param_
from megalith.parallel.tensor import ONES, ZEROS, Init
from megalith.plan.shards import Shard, split_evenly

SHAPES = {
    "vector": (700,),
    "matrix": (300, 1100),
    "heads": (5, 30, 600),
    "key and value": (2, 3, 50, 520),
    "scalar": (),
}


def filled(
    shard: Shard, start: Init, *, seed: int = 3, dtype: torch.dtype = torch.float32
) -> Tensor:
    """First values of a shard, in the shape of its box."""
    parameter = torch.full(shard.matrix_shape if shard.shape else (), float("nan"), dtype=dtype)
    init_param_(parameter, shard, start, seed=seed)
    return parameter.view(shard.box_shape)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_any_sharding_gives_the_same_bits(shape: tuple[int, ...], parts: int) -> None:
    full = Shard.full("a.b", shape, inputs=min(1, len(shape)))
    expected = filled(full, Init(0.5))
    for dim in range(len(shape)):
        sizes = split_evenly(shape[dim], parts)
        pieces = [
            filled(full.split_dim(dim, sizes, rank, ("tp",)), Init(0.5))
            for rank in range(parts)
            if sizes[rank]
        ]
        assert torch.equal(torch.cat(pieces, dim), expected)


def test_box_sharded_along_every_dim_gives_the_same_bits() -> None:
    full = Shard.full("a.b", (7, 260, 1030))
    expected = filled(full, Init(1.0))
    for box in itertools.product(
        [(0, 3), (3, 7)], [(0, 100), (100, 257), (257, 260)], [(1, 2), (511, 1030)]
    ):
        part = filled(replace(full, box=box), Init(1.0))
        assert torch.equal(part, expected[tuple(slice(a, b) for a, b in box)])


@pytest.mark.parametrize("cuts", [(0, 1, 7), (0, 300, 300, 61_000), (0, 77, 14_000)])
def test_flat_ranges_of_a_box_give_the_same_bits(cuts: tuple[int, ...]) -> None:
    full = Init(0.5, rows=90)
    for shape in ((100, 620), (2, 50, 620)):
        shard = replace(Shard.full("a.b", shape), box=(*((1, n) for n in shape[:-1]), (3, 600)))
        expected = filled(shard, full).flatten()
        for start, stop in itertools.pairwise(
            (*(cut for cut in cuts if cut < shard.numel), shard.numel)
        ):
            part = torch.full((stop - start,), float("nan"))
            init_param_(part, replace(shard, flat=(start, stop)), full, seed=3)
            assert torch.equal(part, expected[start:stop])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_are_drawn_in_fp32_and_then_cast(dtype: torch.dtype) -> None:
    shard = Shard.full("a.b", (200, 40))
    assert torch.equal(filled(shard, Init(0.02), dtype=dtype), filled(shard, Init(0.02)).to(dtype))


def test_values_follow_the_seed_the_name_and_nothing_else() -> None:
    shard = Shard.full("a.b", (40, 30))
    torch.manual_seed(1)
    first = filled(shard, Init(0.02))
    torch.manual_seed(2)
    assert torch.equal(filled(shard, Init(0.02)), first)
    assert not torch.equal(filled(shard, Init(0.02), seed=4), first)
    assert not torch.equal(filled(replace(shard, name="a.c"), Init(0.02)), first)


def test_values_are_normal_with_the_given_mean_and_std() -> None:
    values = filled(Shard.full("a.b", (600, 1200)), Init(0.02, offset=0.5)).double()
    assert abs(values.mean().item() - 0.5) < 1e-4 and abs(values.std().item() / 0.02 - 1) < 0.01
    beyond = ((values - 0.5).abs() > 0.04).double().mean().item()
    assert abs(beyond - 0.0455) < 0.002, "two deviations leave out 4.55 % of a normal distribution"
    rows = values - values.mean()
    assert abs((rows[:128] * rows[128:256]).mean().item()) < 1e-5, "tiles differ from one another"


def test_constants_need_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(build, "_draw")
    assert not filled(Shard.full("a.b", (9, 4)), ZEROS).any()
    assert (filled(Shard.full("a.b", (9, 4)), ONES) == 1).all()


@pytest.mark.parametrize("rows", [0, 1, 37, 40])
def test_padding_rows_are_zero_in_every_shard(rows: int) -> None:
    full = Shard.full("embed.weight", (40, 6))
    for rank in range(3):
        part = full.split_dim(0, split_evenly(40, 3), rank, ("tp",))
        values = filled(part, Init(0.02, rows=rows))
        real = max(0, min(part.box[0][1], rows) - part.box[0][0])
        assert values[:real].all() and not values[real:].any()


def test_only_tiles_that_intersect_the_box_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[int] = []
    original = torch.randn

    def counted(*args: object, **options: object) -> Tensor:
        values: Tensor = original(*args, **options)  # type: ignore[call-overload]
        drawn.append(values.numel())
        return values

    monkeypatch.setattr(torch, "randn", counted)
    huge = Shard.full("a.b", (128_256, 8192))
    filled(replace(huge, box=((1000, 1100), (600, 700))), Init(0.02))
    assert max(drawn) <= TILE[0] * TILE[1] and sum(drawn) <= 2 * TILE[0] * TILE[1]


def test_initial_values_are_stable_across_releases() -> None:
    """First weights are keyed by names and tiles, so a rename would change them. Drawn on
    2026-11-21 (torch 2.13.0)."""
    result = filled(Shard.full("embed.weight", (4, 3)), Init(1.0), seed=1234).flatten().tolist()
    assert [round(value, 4) for value in result[:4]] == [-0.6128, -0.0955, 1.9148, 0.3456]


def test_uniform_values_have_the_same_std_and_are_bounded() -> None:
    values = filled(Shard.full("a.b", (300, 1100)), Init(0.5, uniform=True))
    assert values.std().item() == pytest.approx(0.5, rel=0.01) and values.mean().abs().item() < 0.01
    assert 0.99 * 0.5 * 3**0.5 < values.abs().max().item() <= 0.5 * 3**0.5 + 1e-6
