"""Greedy decoding over a sharded vocabulary matches the argmax of full logits."""

import pytest
import torch
from torch import Tensor

from megalith.parallel import cross_entropy
from megalith.parallel.cross_entropy import VocabShard, greedy_tokens
from megalith.parallel.group import Group, single_rank_group
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.plan.shards import split_evenly
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run

VOCAB, PADDED = 37, 40


def inputs() -> tuple[Tensor, Tensor]:
    """x [23, 6] and a table whose padding would win, if it took part; two rows of it are equal."""
    generator = torch.Generator().manual_seed(0)
    x, table = torch.randn(23, 6, generator=generator), torch.randn(PADDED, 6, generator=generator)
    table[VOCAB:] = 100.0 * x.sign()[0]
    table[30] = table[3]
    return x, table


def best_of_rank(rank: int, world: int) -> list[int]:
    x, table = inputs()
    run = tiny_run({"parallel.tp": str(world)})
    group: Group = build_mesh(model_grid(run.parallel, run.model, world), rank=rank).tp
    sizes = split_evenly(PADDED, world)
    first = sum(sizes[:rank])
    local = table[first : first + sizes[rank]]
    return greedy_tokens(x, local, vocab=VocabShard(group, first, VOCAB)).tolist()


def expected() -> list[int]:
    x, table = inputs()
    return (x @ table[:VOCAB].T).argmax(-1).tolist()


@pytest.mark.parametrize("chunk", [4, 100])
def test_best_token_has_the_largest_logit(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "loss_chunk", lambda vocab_size, ranks: chunk)
    x, table = inputs()
    assert (
        greedy_tokens(x, table, vocab=VocabShard(single_rank_group("tp"), 0, VOCAB)).tolist()
        == expected()
    )
    assert 3 in expected() and 30 not in expected()  # of equals the first


def test_vocabulary_parallel_ranks_return_the_same_token() -> None:
    assert run_ranks(best_of_rank, 2) == [expected()] * 2


def test_rank_with_only_padding_rows_is_ignored() -> None:
    x, table = inputs()
    only = greedy_tokens(
        x[:2], table[VOCAB:], vocab=VocabShard(single_rank_group("tp"), VOCAB, VOCAB)
    )
    # nobody's token, which another rank's largest takes the place of
    assert only.tolist() == [
        VOCAB,
        VOCAB,
    ]
