from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalith.kernels.dropout import dropout
from megalith.kernels.tokens import DropoutKey, Tokens, tokens_of_rows
from megalith.nn.dropout import Dropout
from megalith.parallel.group import Group, alone
from megalith.parallel.tensor import Region, SplitTokens, WholeTokens
from megalith.plan.keys import key
from megalith.testing.ranks import everyone, run_ranks

NUMBERS = torch.arange(700, 712)
X = torch.rand(12, 16, generator=torch.Generator().manual_seed(0)) + 1


def tokens(*, seed: int | None = 5) -> Tokens:
    found = tokens_of_rows(2, 6)
    return found if seed is None else replace(found, dropout=DropoutKey(seed, NUMBERS))


def made(p: float = 0.5, *, place: str = "attention", layer: int = 2, region: Region | None = None) -> Dropout:
    return Dropout(place, layer, p, region or WholeTokens(alone("tp")))


def test_it_drops_by_seed_place_layer_and_the_tokens_numbers() -> None:
    expected = dropout(X, 0.5, key(5, "dropout", "attention", 2), NUMBERS)
    assert torch.equal(made()(X, tokens()), expected)
    others = [made(place="mlp")(X, tokens()), made(layer=3)(X, tokens()), made()(X, tokens(seed=6))]
    assert all(not torch.equal(other, expected) for other in others)


def test_where_nothing_is_trained_or_dropped_x_comes_back() -> None:
    assert made()(X, tokens(seed=None)) is X
    assert made(0.0)(X, tokens()) is X


def _on_a_rank(rank: int, world: int, sp: bool) -> Tensor:
    group: Group = everyone(rank, world, "tp")
    region = SplitTokens(group) if sp else WholeTokens(group)
    mine: Tensor = made(region=region)(region.mine(X), tokens())
    return mine


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("sp", [False, True])
def test_tensor_parallel_ranks_drop_what_one_rank_drops(tp: int, sp: bool) -> None:
    found, expected = run_ranks(_on_a_rank, tp, sp), made()(X, tokens())
    if sp:
        assert torch.equal(torch.cat(found), expected)
    else:
        assert all(torch.equal(each, expected) for each in found)
