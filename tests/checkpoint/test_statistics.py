"""Tests of megalith/checkpoint/inspect.py."""

import math
from pathlib import Path

import pytest
import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.inspect import (
    compute_statistics,
    list_nonfinite_tensors,
    match_tensor_names,
)
from megalith.checkpoint.load import Checkpoint, open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.errors import CheckpointError
from megalith.parallel.group import single_rank_group
from megalith.plan.shards import Shard


def saved(path: Path, values: torch.Tensor, *, rows: list[int]) -> Checkpoint:
    """A checkpoint of one tensor in boxes of so many rows each."""
    shard = Shard.full("a.weight", tuple(values.shape))
    parts = values.split(rows)
    entries = [
        CheckpointEntry(shard.split_dim(0, rows, n, ("tp",)), "param", part, True)
        for n, part in enumerate(parts)
    ]
    save_checkpoint(
        path, 1, entries, {"train": {}}, single_rank_group("world"), config_text="name: x\n"
    )
    return open_checkpoint(path / "step_0000001")


@pytest.mark.parametrize("rows", [[7], [2, 1, 4]])
def test_statistics_do_not_depend_on_the_sharding(rows: list[int], tmp_path: Path) -> None:
    values = torch.randn((7, 5), generator=torch.Generator().manual_seed(3)) + 1000
    statistics = compute_statistics(saved(tmp_path, values, rows=rows), "model.a.weight")
    exact = values.double()
    assert statistics.mean == pytest.approx(exact.mean().item(), rel=1e-14)
    assert statistics.std == pytest.approx(exact.std(correction=0).item(), rel=1e-9)
    assert (statistics.least, statistics.largest, statistics.not_finite) == (
        exact.min().item(),
        exact.max().item(),
        0,
    )


def test_nonfinite_elements_are_counted_and_excluded(tmp_path: Path) -> None:
    values = torch.tensor([[math.nan, math.inf], [3.0, -1.0], [math.nan, -math.inf]])
    opened = saved(tmp_path / "some", values, rows=[1, 1, 1])
    statistics = compute_statistics(opened, "model.a.weight")
    assert (
        statistics.mean,
        statistics.std,
        statistics.least,
        statistics.largest,
        statistics.not_finite,
    ) == (
        1.0,
        2.0,
        -1.0,
        3.0,
        4,
    )
    assert list_nonfinite_tensors(opened) == ["model.a.weight: 4 of 6 elements are nan or infinite"]
    nothing = compute_statistics(saved(tmp_path / "none", values[:1], rows=[1]), "model.a.weight")
    assert math.isnan(nothing.mean) and math.isnan(nothing.least) and nothing.not_finite == 2


def test_finite_tensors_are_not_reported(tmp_path: Path) -> None:
    assert list_nonfinite_tensors(saved(tmp_path, torch.ones(3, 2), rows=[3])) == []


def test_names_are_chosen_by_a_pattern(tmp_path: Path) -> None:
    opened = saved(tmp_path, torch.ones(3, 2), rows=[1, 2])
    assert match_tensor_names(opened, "*.weight") == ["model.a.weight"]
    with pytest.raises(
        CheckpointError, match=r"--only=b\.\* matches none of .*Use a pattern such as model\.\*"
    ):
        match_tensor_names(opened, "b.*")
